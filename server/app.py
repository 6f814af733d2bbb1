"""The routes: OpenAI's /v1, /health, /metrics, and the schedule page with its records.

Read first: protocol.py, engine_thread.py, responses.py. Read next: __main__.py."""

from collections.abc import Awaitable, Callable, Sequence
from hmac import compare_digest
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, PlainTextResponse, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import make_asgi_app
from starlette.exceptions import HTTPException as StarletteError
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from page.html import page
from server.engine_thread import EngineThread, JsonObject
from server.protocol import ChatBody, CompletionBody, api_error, error_json
from server.responses import Answer

LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
SLO_DECODES = 5  # decode iterations that a gap between tokens may take, if none is given


def make_app(
    thread: EngineThread,
    key: str | None = None,
    hosts: Sequence[str] = (),
    cors: Sequence[str] = (),
) -> FastAPI:
    """The ASGI application.

    Clients must send `key`. If there is none, they must call this server by one of `hosts`, or
    locally: any web page can make its own name an address of this machine (DNS rebinding), but a
    browser still sends that name. Web pages of the origins `cors` may call it."""
    model: JsonObject = {
        "id": thread.name,
        "object": "model",
        "created": 0,
        "owned_by": "nanosarathi",
    }
    app = FastAPI(title="nanosarathi")
    guarded = APIRouter(dependencies=[Depends(_check(key))] if key else [])

    @app.get("/health", response_class=PlainTextResponse)
    async def health() -> str:
        return "ok"

    @app.get("/", response_class=HTMLResponse)
    async def schedule_page() -> str:
        config = thread.engine.config
        sizes = f"{config.max_batch} requests of {config.max_len} tokens"
        idle_slo = SLO_DECODES * thread.idle_decode_s
        return page(
            thread.name,
            f"{config.policy}, chunk {config.chunk}, {sizes}",
            live="/records",
            slo_s=config.policy_options.get("tbt_slo", idle_slo),
            slo_source=f"--tbt-slo, or {SLO_DECODES} decode iterations of an idle engine",
        )

    @guarded.get("/records/{place}")
    def records(place: int) -> JsonObject:
        """The records from number `place` on, and the ends of the last texts."""
        return thread.call(thread.records_since, place)

    @guarded.get("/v1/models")
    async def models() -> JsonObject:
        return {"object": "list", "data": [model]}

    @guarded.get(f"/v1/models/{thread.name}")
    async def only_model() -> JsonObject:
        return model

    # FastAPI runs these in worker threads: a long prompt takes a moment, as a step of the engine

    @guarded.post("/v1/completions")
    def completions(body: CompletionBody) -> Response:
        encode = thread.tokenizer.encode
        prompts = [encode(each) if isinstance(each, str) else each for each in body.prompt]
        return Answer(thread, body, prompts)

    @guarded.post("/v1/chat/completions")
    def chat_completions(body: ChatBody) -> Response:
        messages = [message.model_dump(exclude_none=True) for message in body.messages]
        try:  # a template is a program, and may raise anything
            prompt = thread.tokenizer.encode_chat(messages)
        except Exception as error:
            raise api_error(400, f"messages: {error}", "messages") from error
        return Answer(thread, body, [prompt])

    app.include_router(guarded)
    app.mount("/metrics", make_asgi_app(thread.metrics.registry))
    app.exception_handler(RequestValidationError)(_reject)
    app.exception_handler(StarletteError)(_explain)
    if not key:
        allowed_hosts = [*LOCAL_HOSTS, *hosts]
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=allowed_hosts, www_redirect=False)
    if cors:
        app.add_middleware(
            CORSMiddleware, allow_origins=cors, allow_methods=["*"], allow_headers=["*"]
        )
    return app


def _check(key: str) -> Callable[..., Awaitable[None]]:
    """The dependency of routes that need `Authorization: Bearer KEY`."""

    async def check(
        sent: Annotated[HTTPAuthorizationCredentials, Depends(HTTPBearer())],
    ) -> None:
        if not compare_digest(sent.credentials.encode("latin-1"), key.encode()):
            raise api_error(401, "Authorization: wrong key", code="invalid_api_key")

    return check


async def _reject(request: Request, error: RequestValidationError) -> Response:
    """The response to a body with a wrong field: pydantic's first message, and its place."""
    first = error.errors()[0]
    names = [part for part in first["loc"][1:] if isinstance(part, str)]
    place = ".".join(map(str, first["loc"]))
    param = names[0] if names else None
    return await _explain(request, api_error(400, f"{place}: {first['msg']}", param))


async def _explain(request: Request, error: HTTPException) -> Response:
    """The response to an api_error, or to a library's error, whose detail is a text."""
    if isinstance(error.detail, str):
        error.detail = api_error(error.status_code, error.detail).detail
    return Response(error_json(error), error.status_code, error.headers, "application/json")
