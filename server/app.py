"""The routes: OpenAI's /v1, /health, /metrics, and the schedule page with its records.

Read first: protocol.py, engine_thread.py, pretrained/tokenizers.py."""

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from engine import QueueFull
from outputs import Completion
from pretrained.tokenizers import TextStream, Tokenizer, Writer
from sampling import SamplingParams
from scheduler import Request, Scheduler
from server.engine_thread import EngineThread, EventQueue
from server.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    Piece,
    Place,
    RequestBody,
    WrittenToken,
)
from views.page import page

BUCKETS_S = [0.005 * 2**n for n in range(15)]  # upper ends of the histograms' buckets, to 82 s
Chat = Callable[[list[dict]], str]  # messages -> the prompt


async def error_response(request: HttpRequest, error: Exception) -> Response:
    """The response to an ApiError, to the router's 404 and 405, or to an error of ours."""
    if isinstance(error, ApiError):
        return JSONResponse(error.detail, error.status_code, error.headers)
    if isinstance(error, HTTPException):
        ours = ApiError(error.status_code, error.detail)
        return JSONResponse(ours.detail, ours.status_code, error.headers)
    ours = ApiError(500, "internal")
    return JSONResponse(ours.detail, ours.status_code)


class CompletionResponse(StreamingResponse):
    """The response to a completion or a chat, whole or as a stream of server-sent events.

    `request` and `events` are what EngineThread.add returned. However the response ends, also if
    the client goes away, the request ends with it."""

    def __init__(
        self,
        api: "Api",
        request_body: RequestBody,
        prompt: list[int],
        request: Request,
        events: EventQueue,
    ) -> None:
        self.api = api
        self.request_body = request_body
        self.prompt = prompt
        self.request = request
        self.events = events
        self.output_tokens = 0  # so far
        stream = request_body.stream
        self.head: dict[str, object] = {
            "id": f"{request_body.id_prefix}-{uuid.uuid4().hex}",
            "object": request_body.chunk_object_name if stream else request_body.object_name,
            "created": int(time.time()),
            "model": api.name,
        }
        super().__init__(
            self.stream() if stream else self.whole(),
            headers={"cache-control": "no-cache"},
            media_type="text/event-stream" if stream else "application/json",
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response.

        The first message holds the status, 200. It waits until the first part of the body is
        there: if the engine fails before that, an error with status 500 can be sent instead."""
        held: list[Message] = []

        async def send_with_body(message: Message) -> None:
            held.append(message)
            while held and "body" in message:
                await send(held.pop(0))

        with suppress(asyncio.CancelledError):  # the server ends before the response does
            try:
                await super().__call__(scope, receive, send_with_body)
            finally:
                await self.api.thread.call(self.api.thread.end, self.request.id)

    async def pieces(self) -> AsyncIterator[Piece]:
        """The answer, token by token. Raises ApiError if the engine fails."""
        tokenizer = self.api.tokenizer
        writer = Writer(TextStream(tokenizer, self.prompt), self.request_body.stops)
        finish_reason = None
        while not finish_reason:
            event = await self.events.get()
            if event is None:
                raise ApiError(500, "the engine failed, see its log")
            self.output_tokens += 1
            offset = writer.length
            text, finish_reason = writer.push(event)
            tokens = []
            if event.finish_reason != "stop":  # a stop token is no part of the answer
                token_text = tokenizer.decode([event.token])
                tokens = [WrittenToken(token_text, offset, event.logprob)]
            yield Piece(text, tokens, finish_reason)

    async def whole(self) -> AsyncIterator[str]:
        """The body of a response at once."""
        pieces = [piece async for piece in self.pieces()]
        answer = Piece(
            text="".join(piece.text for piece in pieces),
            tokens=[token for piece in pieces for token in piece.tokens],
            finish_reason=pieces[-1].finish_reason,
        )
        choice = self.request_body.choice(answer, "whole")
        yield json.dumps({**self.head, "choices": [choice], "usage": self.usage()})

    async def stream(self) -> AsyncIterator[str]:
        """A server-sent event for each token, also if no text is certain with it."""
        with_usage = self.request_body.stream_options.get("include_usage")
        head = {**self.head, "usage": None} if with_usage else self.head
        place: Place = "first"
        last = "[DONE]"
        try:
            async for piece in self.pieces():
                choice = self.request_body.choice(piece, place)
                yield f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"
                place = "next"
            if with_usage:
                yield f"data: {json.dumps({**head, 'choices': [], 'usage': self.usage()})}\n\n"
        except ApiError as error:
            if place == "first":
                raise
            last = json.dumps(error.detail)
        yield f"data: {last}\n\n"

    def usage(self) -> dict[str, object]:
        """The number of tokens, and how many of the prompt were found in the cache.

        A request that was preempted may have found its own pages again: it counts as 0."""
        cached_tokens = 0 if self.request.preemptions else self.request.cached_tokens
        return {
            "prompt_tokens": len(self.prompt),
            "completion_tokens": self.output_tokens,
            "total_tokens": len(self.prompt) + self.output_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }


class Metrics:
    """The numbers for Prometheus: of requests that have ended, and of the present."""

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        self.schedulers = schedulers
        self.registry = CollectorRegistry()
        self.ttft = self._histogram("ttft_seconds", "arrival to first token")
        self.tbt = self._histogram("tbt_seconds", "between two tokens")
        self.prompt_tokens = self._counter("prompt_tokens")
        self.output_tokens = self._counter("output_tokens")
        self.preemptions = self._counter("preemptions")
        self.cached_tokens = self._counter("cached_tokens")
        self._gauge("waiting_requests", self._waiting_requests)
        self._gauge("running_requests", self._running_requests)
        self._gauge("free_pages", self._free_pages)

    def _histogram(self, name: str, description: str) -> Histogram:
        return Histogram(
            name, description, namespace="nanosarathi", registry=self.registry, buckets=BUCKETS_S
        )

    def _counter(self, name: str) -> Counter:
        description = "of requests that have ended"
        return Counter(name, description, namespace="nanosarathi", registry=self.registry)

    def _gauge(self, name: str, value: Callable[[], float]) -> None:
        gauge = Gauge(name, "at this moment", namespace="nanosarathi", registry=self.registry)
        gauge.set_function(value)

    def _waiting_requests(self) -> int:
        return len(self.schedulers[0].waiting)  # all schedulers share one queue

    def _running_requests(self) -> int:
        return sum(len(scheduler.running) for scheduler in self.schedulers)

    def _free_pages(self) -> int:
        return sum(scheduler.pages.num_free for scheduler in self.schedulers)

    def observe(self, completion: Completion) -> None:
        """Count a request that has ended."""
        self.prompt_tokens.inc(len(completion.prompt))
        self.output_tokens.inc(len(completion.tokens))
        self.preemptions.inc(completion.preemptions)
        self.cached_tokens.inc(completion.cached_tokens)
        if completion.ttft is not None:
            self.ttft.observe(completion.ttft)
        for seconds in completion.tbt:
            self.tbt.observe(seconds)

    def text(self) -> bytes:
        """All numbers, in Prometheus' format."""
        return generate_latest(self.registry)


class Api:
    """The HTTP interface to an EngineThread, whose engine has no tokenizer of its own.

    `chat` makes a prompt of messages, see load_chat. Clients of /v1 must send `key`, if there is
    one. A body has at most `max_body` bytes."""

    def __init__(
        self,
        thread: EngineThread,
        tokenizer: Tokenizer,
        name: str,
        chat: Chat,
        key: str | None = None,
        max_body: int = 2**20,
    ) -> None:
        self.thread = thread
        self.engine = thread.engine
        self.tokenizer = tokenizer
        self.name = name
        self.chat = chat
        self.key = key
        self.max_body = max_body
        self.metrics = Metrics(thread.engine.schedulers)
        thread.on_completion = self.metrics.observe
        self.slo_s: float | None = self.engine.config.policy_options.get("tbt_slo")
        last = self.engine.last_iteration
        if not self.slo_s and last:  # that of the warm-up: a decode iteration
            self.slo_s = 10 * (last.end - last.start)

    def app(self) -> Starlette:
        """The ASGI application."""
        complete = partial(self.create, CompletionRequest)
        chat = partial(self.create, ChatRequest)
        return Starlette(
            routes=[
                Route("/v1/completions", complete, methods=["POST"]),
                Route("/v1/chat/completions", chat, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/health", self.health),
                Route("/metrics", self.metrics_text),
                Route("/records/{place:int}", self.records),
                Route("/", self.page),
            ],
            exception_handlers={
                HTTPException: error_response,
                ClientDisconnect: error_response,
                Exception: error_response,
            },
        )

    async def page(self, request: HttpRequest) -> Response:
        """GET /: the live schedule page. A gap is red above --tbt-slo, or ten decode iterations."""
        config = self.engine.config
        sizes = f"{config.max_batch} requests of {config.max_len} tokens"
        description = f"{config.policy}, chunk {config.chunk}, {sizes}"
        return HTMLResponse(page(self.name, description, live="/records", slo_s=self.slo_s))

    async def records(self, request: HttpRequest) -> Response:
        """GET /records/N: the records from number N on, as JSON."""
        place: int = request.path_params["place"]
        return JSONResponse(await self.thread.call(self.thread.records_since, place))

    async def health(self, request: HttpRequest) -> Response:
        """GET /health."""
        return PlainTextResponse("ok")

    async def metrics_text(self, request: HttpRequest) -> Response:
        """GET /metrics."""
        return PlainTextResponse(self.metrics.text())

    async def models(self, request: HttpRequest) -> Response:
        """GET /v1/models."""
        self.check_key(request)
        model = {"id": self.name, "object": "model", "created": 0, "owned_by": "nanosarathi"}
        return JSONResponse({"object": "list", "data": [model]})

    async def create(self, kind: type[RequestBody], request: HttpRequest) -> Response:
        """POST /v1/completions or /v1/chat/completions: queue a request. Raises ApiError."""
        arrival = self.engine.clock()
        self.check_key(request)
        self.check_headers(request)
        body = kind.read(await request.body())
        if body.model != self.name:
            message = f"model: there is only {self.name}"
            raise ApiError(404, message, "model", "model_not_found")
        prompt = await asyncio.to_thread(self.encode, body)
        max_len = self.engine.scheduler.max_len
        max_new_tokens = body.max_tokens or max(1, max_len - len(prompt))
        try:
            params = SamplingParams(
                max_new_tokens=max_new_tokens,
                temperature=body.temperature,
                top_k=body.top_k,
                top_p=body.top_p,
                seed=body.seed,
                stop_token_ids=() if body.ignore_eos else tuple(self.tokenizer.stop_token_ids),
                logprobs=body.wants_logprobs,
            )
            submitted = await self.thread.call(
                self.thread.add,
                prompt,
                params,
                arrival,
                priority=body.priority,
                ttft_slo=body.ttft_slo,
                tbt_slo=body.tbt_slo,
            )
        except QueueFull as error:
            raise ApiError(429, str(error), None, "queue_full", {"Retry-After": "1"}) from error
        except ValueError as error:
            too_long = len(prompt) + max_new_tokens > max_len
            code = "context_length_exceeded" if too_long else None
            raise ApiError(400, str(error), None, code) from error
        return CompletionResponse(self, body, prompt, submitted.request, submitted.events)

    def check_key(self, request: HttpRequest) -> None:
        """Raise ApiError if the request does not send the key."""
        if not self.key:
            return
        sent = request.headers.get("authorization", "").encode("latin-1")
        if not hmac.compare_digest(sent, f"Bearer {self.key}".encode()):
            message = "Authorization: must be Bearer and the key"
            raise ApiError(401, message, None, "invalid_api_key")

    def check_headers(self, request: HttpRequest) -> None:
        """Raise ApiError unless the body is JSON with a length of at most max_body bytes."""
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise ApiError(415, "Content-Type: must be application/json")
        length = request.headers.get("content-length")
        limit = f"Content-Length: must be there, and at most {self.max_body:,}"
        if not length:
            raise ApiError(411, limit)
        if int(length) > self.max_body:
            raise ApiError(413, limit)

    def encode(self, body: RequestBody) -> list[int]:
        """The tokens of a request's prompt, or of its messages. Raises ApiError."""
        encode = self.tokenizer.encode
        if isinstance(body, CompletionRequest):
            return encode(body.prompt) if isinstance(body.prompt, str) else body.prompt
        assert isinstance(body, ChatRequest)
        try:
            text = self.chat(body.messages)
        except Exception as error:  # a template may raise anything
            raise ApiError(400, f"messages: no chat: {error!r}", "messages") from error
        added = len(encode(""))  # tokens that encode() begins with, as BOS: the template has them
        return encode(text)[added:]
