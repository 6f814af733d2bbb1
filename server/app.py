"""The routes: OpenAI's /v1, /health, /metrics, and the schedule page with its records.

Read first: protocol.py, engine_thread.py, responses.py. Read next: connections.py."""

import asyncio
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from page.html import page
from pretrained.tokenizers import Tokenizer
from sampling import SamplingParams
from server.checks import Gate, read_body
from server.engine_thread import Choice, EngineThread
from server.protocol import ApiError, ChatRequest, CompletionRequest, RequestBody
from server.responses import SERVER_ENDS, CompletionResponse

MAX_DIGITS = 100  # of the number of a record
SLO_DECODES = 5  # decode iterations that a gap between tokens may take, if none is given
TOO_LONG = "context_length_exceeded"
OPENAI_SAMPLING = SamplingParams(temperature=1.0)


async def error_response(request: HttpRequest, error: Exception) -> Response:
    """The response to an ApiError, to the router's 404 and 405, or to an error of ours."""
    ours = ApiError(500, "internal")
    if isinstance(error, ApiError):
        ours = error
    elif isinstance(error, HTTPException):
        ours = ApiError(error.status_code, error.detail, headers=error.headers)
    return JSONResponse(ours.detail, ours.status_code, ours.headers)


@dataclass(eq=False)
class Api:
    """The HTTP interface to an EngineThread, whose engine has no tokenizer of its own.

    Clients must send `key`, if there is one, see checks.Gate. A body has at most `max_body` bytes.
    `hosts` are names that clients may call this server by, see checks.check_host. `sampling` has
    the defaults of temperature, top_p and top_k. Web pages from `cors`, their origins, may call
    it."""

    thread: EngineThread
    tokenizer: Tokenizer
    name: str
    key: str | None = None
    max_body: int = 2**20
    hosts: Collection[str] = ()
    sampling: SamplingParams = OPENAI_SAMPLING
    cors: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.engine = self.thread.engine
        self.max_len = self.engine.scheduler.max_len
        self.hosts = {"localhost", *(host.lower() for host in self.hosts)}
        self.slo_s: float | None = self.engine.config.policy_options.get("tbt_slo")
        self.slo_source = "the option --tbt-slo"
        if self.slo_s is None and self.thread.idle_decode_s is not None:
            self.slo_s = SLO_DECODES * self.thread.idle_decode_s
            self.slo_source = f"{SLO_DECODES} times the median decode iteration of an idle engine"

    def app(self) -> Starlette:
        """The ASGI application."""
        cors = Middleware(
            CORSMiddleware, allow_origins=self.cors, allow_methods=["*"], allow_headers=["*"]
        )
        gate = Middleware(Gate, key=self.key, hosts=self.hosts)
        post = ["POST"]
        return Starlette(
            routes=[
                Route("/v1/completions", partial(self.create, CompletionRequest), methods=post),
                Route("/v1/chat/completions", partial(self.create, ChatRequest), methods=post),
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.model),
                Route("/health", self.health),
                Route("/metrics", self.metrics_text),
                Route("/records/{place}", self.records),
                Route("/", self.page),
            ],
            middleware=[cors, gate] if self.cors else [gate],
            exception_handlers=dict.fromkeys(
                (HTTPException, ClientDisconnect, Exception), error_response
            ),
        )

    async def page(self, request: HttpRequest) -> Response:
        """GET /: the live schedule page, without records. A gap is red above `slo_s`."""
        config = self.engine.config
        sizes = f"{config.max_batch} requests of {config.max_len} tokens"
        description = f"{config.policy}, chunk {config.chunk}, {sizes}"
        text = page(
            self.name, description, live="/records", slo_s=self.slo_s, slo_source=self.slo_source
        )
        return HTMLResponse(text)

    async def records(self, request: HttpRequest) -> Response:
        """GET /records/N: the records from number N on, and the ends of the last texts, as JSON."""
        digits: str = request.path_params["place"]
        if not re.fullmatch(f"[0-9]{{1,{MAX_DIGITS}}}", digits):
            raise ApiError(404, f"/records/N: N must have 1 to {MAX_DIGITS} digits")
        records, place, outputs = await self.thread.call(self.thread.records_since, int(digits))
        texts: dict[int, str] = {}
        for request_id, tokens in outputs.items():
            with suppress(Exception):  # of a tokenizer: the client is told
                texts[request_id] = self.tokenizer.decode(tokens)
        return JSONResponse({"records": records, "place": place, "texts": texts})

    async def health(self, request: HttpRequest) -> Response:
        """GET /health."""
        return PlainTextResponse("ok")

    async def metrics_text(self, request: HttpRequest) -> Response:
        """GET /metrics."""
        return PlainTextResponse(self.thread.metrics.text())

    async def models(self, request: HttpRequest) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self.model_object()]})

    async def model(self, request: HttpRequest) -> Response:
        """GET /v1/models/NAME."""
        self.check_name(request.path_params["name"])
        return JSONResponse(self.model_object())

    def model_object(self) -> dict[str, object]:
        """The model as OpenAI describes one."""
        return {"id": self.name, "object": "model", "created": 0, "owned_by": "nanosarathi"}

    def check_name(self, name: str) -> None:
        """Raise ApiError if this is no name of the model."""
        if name != self.name:
            message = f"model: there is only {self.name}"
            raise ApiError(404, message, "model", "model_not_found")

    async def create(self, kind: type[RequestBody], request: HttpRequest) -> Response:
        """POST /v1/completions or /v1/chat/completions: queue a request. Raises ApiError."""
        try:
            return await self._create(kind, request)
        except asyncio.CancelledError as error:  # the server ends first
            raise ApiError(503, SERVER_ENDS) from error

    async def _create(self, kind: type[RequestBody], request: HttpRequest) -> Response:
        arrival = self.engine.clock()
        body = kind.read(await read_body(request, self.max_body))
        if body.model is not None:
            self.check_name(body.model)
        # in another thread, because it may take long
        prompts = await asyncio.to_thread(encode_prompts, body, self.tokenizer)
        try:
            requests, events = await self.thread.call(
                self.thread.add,
                self.choices(body, prompts),
                arrival,
                **body.model_dump(include={"priority", "ttft_slo", "tbt_slo", "user"}),
            )
        except ValueError as error:
            raise body.refusal(error) from error
        return CompletionResponse(self.thread, self.tokenizer, self.name, body, requests, events)

    def choices(self, body: RequestBody, prompts: Sequence[list[int]]) -> list[Choice]:
        """The prompt and the sampling of each choice: answer i to a prompt has the seed + i.

        Raises ApiError, and ValueError as SamplingParams."""
        params = replace(
            self.sampling,
            stop_token_ids=self.stop_token_ids(body),
            logprobs=body.wants_logprobs,
            **body.model_dump(include={"temperature", "top_p", "top_k"}, exclude_none=True),
        )
        choices: list[Choice] = []
        for prompt in prompts:
            max_new_tokens = body.limit or max(1, self.max_len - len(prompt))
            for i in range(body.n):
                seed = body.seed + i
                choices.append((prompt, replace(params, max_new_tokens=max_new_tokens, seed=seed)))
            self.check_length(body, len(prompt), max_new_tokens)
        return choices

    def stop_token_ids(self, body: RequestBody) -> tuple[int, ...]:
        """The tokens that end the text: the tokenizer's, and stop strings that are special tokens.

        Raises ApiError for a special token within a stop string: it is no part of any text."""
        special_tokens = self.tokenizer.special_tokens
        token_ids = set() if body.ignore_eos else set(self.tokenizer.stop_token_ids)
        for stop in body.stops:
            if stop in special_tokens:
                token_ids.add(special_tokens[stop])
                continue
            for token in special_tokens:
                if token and token in stop:
                    inside = f"{token} is a special token, and never in a text"
                    message = f"stop={stop!r}: {inside}: stop at it alone"
                    raise ApiError(400, message, "stop")
        return tuple(token_ids)

    def check_length(self, body: RequestBody, prompt_len: int, max_new_tokens: int) -> None:
        """Raise ApiError if prompt and output do not fit."""
        if prompt_len + max_new_tokens <= self.max_len:
            return
        limit_is_wrong = body.limit_name in body.model_fields_set and prompt_len < self.max_len
        total = f"{body.prompt_name} of {prompt_len} tokens + {body.limit_name}={max_new_tokens}"
        message = f"{total}: must not exceed {self.max_len}"
        param = body.limit_name if limit_is_wrong else body.prompt_name
        raise ApiError(400, message, param, TOO_LONG)


def encode_prompts(body: RequestBody, tokenizer: Tokenizer) -> list[list[int]]:
    """The tokens of a request's prompts, or of its messages. Raises ApiError."""
    try:
        if isinstance(body, ChatRequest):
            return [tokenizer.encode_chat([plain_message(message) for message in body.messages])]
        return [
            tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            for prompt in body.prompts
        ]
    except Exception as error:  # whatever a template or tokenizer raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        message = f"{body.prompt_name}: cannot be encoded: {reason}"
        raise ApiError(400, message, body.prompt_name) from error


def plain_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message as a template reads it: without nulls, its content a text. Raises ValueError."""
    content = message.get("content")
    if content is None:
        content = ""
        if "tool_calls" not in message:
            raise ValueError("content=None: must be a text")
    if isinstance(content, list):
        if any(part.get("type") != "text" for part in content):
            raise ValueError("content: must be a text, or a list of parts of type text")
        content = "".join(part["text"] for part in content)
    fields = {name: value for name, value in message.items() if value is not None}
    return {**fields, "role": message["role"], "content": content}
