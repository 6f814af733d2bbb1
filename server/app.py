"""The routes: OpenAI's /v1, /health, /metrics, and the schedule page with its records.

Read first: protocol.py, engine_thread.py, responses.py. Read next: __main__.py."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, PlainTextResponse
from prometheus_client import make_asgi_app
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from config import QueueFull, TooLong
from page.html import page
from pretrained.tokenizers import Tokenizer
from sampling import SamplingParams
from server.checks import Gate
from server.engine_thread import Choice, EngineThread
from server.protocol import ApiError, Body, ChatBody, CompletionBody, error_response
from server.responses import Answer

LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
SLO_DECODES = 5  # decode iterations that a gap between tokens may take, if none is given
OPENAI_SAMPLING = SamplingParams(temperature=1.0)


@dataclass(eq=False)
class Api:
    """The answers to requests, by an EngineThread whose engine has no tokenizer of its own.

    `sampling` has the defaults of temperature, top_p and top_k."""

    thread: EngineThread
    tokenizer: Tokenizer
    name: str  # of the model
    sampling: SamplingParams = OPENAI_SAMPLING

    async def page(self) -> HTMLResponse:
        """GET /: the live schedule page, without records."""
        config = self.thread.engine.config
        sizes = f"{config.max_batch} requests of {config.max_len} tokens"
        description = f"{config.policy}, chunk {config.chunk}, {sizes}"
        slo_s = config.policy_options.get("tbt_slo")
        slo_source = "the option --tbt-slo"
        if slo_s is None and self.thread.idle_decode_s is not None:
            slo_s = SLO_DECODES * self.thread.idle_decode_s
            slo_source = f"{SLO_DECODES} times the median decode iteration of an idle engine"
        text = page(self.name, description, live="/records", slo_s=slo_s, slo_source=slo_source)
        return HTMLResponse(text)

    async def records(self, place: int) -> dict[str, object]:
        """GET /records/N: the records from number N on, and the ends of the last texts."""
        records, end, outputs = await self.thread.call(self.thread.records_since, place)
        texts = {request_id: self.tokenizer.decode(ids) for request_id, ids in outputs.items()}
        return {"records": records, "place": end, "texts": texts}

    async def health(self) -> PlainTextResponse:
        """GET /health."""
        return PlainTextResponse("ok")

    async def models(self) -> dict[str, object]:
        """GET /v1/models."""
        return {"object": "list", "data": [await self.model(self.name)]}

    async def model(self, name: str) -> dict[str, object]:
        """GET /v1/models/NAME. Raises ApiError if the model has another name."""
        if name != self.name:
            raise ApiError(404, f"model: there is only {self.name}", "model", "model_not_found")
        return {"id": name, "object": "model", "created": 0, "owned_by": "nanosarathi"}

    async def completions(self, body: CompletionBody) -> Answer:
        """POST /v1/completions."""
        return await self.create(body)

    async def chat_completions(self, body: ChatBody) -> Answer:
        """POST /v1/chat/completions."""
        return await self.create(body)

    async def create(self, body: Body) -> Answer:
        """Queue the requests of a body. Raises ApiError."""
        arrival = self.thread.engine.clock()
        await self.model(body.model or self.name)
        service = body.model_dump(include={"priority", "ttft_slo", "tbt_slo", "user"})
        try:
            prompts = await run_in_threadpool(self.encode, body)
            choices = self.choices(body, prompts)
            requests, events = await self.thread.call(self.thread.add, choices, arrival, **service)
        except QueueFull as error:
            raise ApiError(429, str(error), None, "queue_full", {"Retry-After": "1"}) from error
        except ValueError as error:
            code = "context_length_exceeded" if isinstance(error, TooLong) else None
            raise ApiError(400, str(error), code=code) from error
        return Answer(self.thread, self.tokenizer, self.name, body, requests, events)

    def encode(self, body: Body) -> list[list[int]]:
        """The tokens of the prompts, or of the messages. Raises ValueError."""
        if isinstance(body, CompletionBody):
            encode = self.tokenizer.encode
            return [encode(each) if isinstance(each, str) else each for each in body.prompt]
        assert isinstance(body, ChatBody)
        try:  # a template is a program, and may raise anything
            messages = [message.for_template() for message in body.messages]
            return [self.tokenizer.encode_chat(messages)]
        except Exception as error:
            raise ValueError(f"messages: {error}") from error

    def choices(self, body: Body, prompts: Sequence[list[int]]) -> list[Choice]:
        """The prompt and the sampling of each choice: answer i to a prompt has the seed + i.

        Raises ApiError if they are more than ever may wait, and ValueError as SamplingParams."""
        config = self.thread.engine.config
        count = len(prompts) * body.n
        if config.max_waiting and count > config.max_waiting:
            message = f"n: {count} answers, at most {config.max_waiting} requests may wait"
            raise ApiError(400, message, "n")
        token_ids = set() if body.ignore_eos else set(self.tokenizer.stop_token_ids)
        special_tokens = self.tokenizer.special_tokens
        token_ids.update(special_tokens[stop] for stop in body.stop if stop in special_tokens)
        fields = body.model_dump(include={"temperature", "top_p", "top_k"}, exclude_none=True)
        params = replace(
            self.sampling,
            stop_token_ids=tuple(token_ids),
            logprobs=body.wants_logprobs,
            **fields,
        )
        choices: list[Choice] = []
        for prompt in prompts:
            limit = body.limit or max(1, self.thread.engine.scheduler.max_len - len(prompt))
            for i in range(body.n):
                choices.append((prompt, replace(params, max_new_tokens=limit, seed=body.seed + i)))
        return choices


def app_of(
    api: Api, key: str | None = None, hosts: Sequence[str] = (), cors: Sequence[str] = ()
) -> FastAPI:
    """The ASGI application.

    Clients must send `key`. If there is none, they must call this server by one of `hosts`, or
    locally: any web page can make its own name an address of this machine (DNS rebinding), but a
    browser still sends that name. Web pages of the origins `cors` may call it."""
    app = FastAPI(title="nanosarathi")
    app.post("/v1/completions")(api.completions)
    app.post("/v1/chat/completions")(api.chat_completions)
    app.get("/v1/models")(api.models)
    app.get("/v1/models/{name:path}")(api.model)
    app.get("/health")(api.health)
    app.get("/records/{place}")(api.records)
    app.get("/")(api.page)
    app.mount("/metrics", make_asgi_app(api.thread.metrics.registry))
    app.exception_handler(RequestValidationError)(_reject)
    app.exception_handler(HTTPException)(_explain)
    if key:
        app.add_middleware(Gate, key=key)
    else:
        allowed_hosts = [*LOCAL_HOSTS, *hosts]
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=allowed_hosts, www_redirect=False)
    if cors:
        app.add_middleware(
            CORSMiddleware, allow_origins=cors, allow_methods=["*"], allow_headers=["*"]
        )
    return app


async def _reject(request: HttpRequest, error: RequestValidationError) -> Response:
    """The response to a body with a wrong field: pydantic's first message, and its place."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return error_response(ApiError(400, f"the body is no JSON: {first['ctx']['error']}"))
    if isinstance(first["input"], bytes):
        return error_response(ApiError(400, "Content-Type: must be application/json"))
    place = [str(part) for part in first["loc"][1:]]
    message = ": ".join([".".join(place), first["msg"]]) if place else first["msg"]
    return error_response(ApiError(400, message, place[0] if place else None))


async def _explain(request: HttpRequest, error: HTTPException) -> Response:
    """The response to an ApiError, or to the router's 404 and 405."""
    return error_response(error)
