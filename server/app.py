"""The routes: OpenAI's /v1, /health, /metrics, and the schedule page with its records.

Read first: protocol.py, engine_thread.py, pretrained/tokenizers.py. Read next: connections.py."""

import asyncio
import json
import re
import time
import uuid
from collections.abc import AsyncIterator, Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Literal

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

from errors import QueueFull, one_line, refusing, shorten
from page.html import page
from pretrained.chat import Chat
from pretrained.tokenizers import TextStream, Tokenizer, Writer
from request import Event
from sampling import SamplingParams
from scheduler import Request
from server.checks import check_host, check_key, read_body
from server.engine_thread import EngineThread, EventQueue
from server.metrics import Metrics
from server.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    Piece,
    Place,
    RequestBody,
    WrittenToken,
)

MAX_DIGITS = 100  # of the number of a record
SLO_DECODES = 5  # decode iterations that a gap between tokens may take, if none is given
SERVER_ENDS = "the server ends"
TOO_LONG = "context_length_exceeded"
OPENAI_SAMPLING = SamplingParams(temperature=1.0)
Progress = Literal["waiting", "begun", "complete"]  # of a response: "begun" sent its status


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
        self.progress: Progress = "waiting"
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
            if "body" not in message:
                return
            self.progress = "begun" if message["more_body"] else "complete"
            while held:
                await send(held.pop(0))

        try:
            await super().__call__(scope, receive, send_with_body)
        except asyncio.CancelledError:  # the server ends before the response does
            await self.cut_off(scope, receive, send)
        finally:
            self.api.thread.executor.submit(self.api.thread.end, self.request.id)

    async def cut_off(self, scope: Scope, receive: Receive, send: Send) -> None:
        """End the response with an error: its status, or an event if a stream has begun."""
        error = ApiError(503, SERVER_ENDS)
        if self.progress == "waiting":
            await JSONResponse(error.detail, error.status_code)(scope, receive, send)
        elif self.progress == "begun":
            event = f"data: {json.dumps(error.detail)}\n\n" if self.request_body.stream else ""
            await send({"type": "http.response.body", "body": event.encode(), "more_body": False})

    async def pieces(self) -> AsyncIterator[Piece]:
        """The answer, token by token. Raises ApiError if the engine or the tokenizer fails."""
        writer: Writer | None = None
        finish_reason = None
        while not finish_reason:
            event = await self.events.get()
            if event is None:
                raise ApiError(500, "the engine failed, see its log")
            self.output_tokens += 1
            try:
                with refusing("the tokenizer failed"):
                    if writer is None:
                        stream = TextStream(self.api.tokenizer, self.prompt)
                        writer = Writer(stream, self.request_body.stops)
                    piece = write_piece(writer, event)
            except ValueError as error:
                raise ApiError(500, str(error)) from error
            finish_reason = piece.finish_reason
            yield piece

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


def write_piece(writer: Writer, event: Event) -> Piece:
    """The part of an answer that is certain with the token of an event."""
    offset = writer.length
    text, finish_reason = writer.push(event)
    tokens = []
    if event.finish_reason != "stop":  # a stop token is no part of the answer
        tokens = [WrittenToken(writer.stream.token, offset, event.logprob)]
    return Piece(text, tokens, finish_reason)


class Api:
    """The HTTP interface to an EngineThread, whose engine has no tokenizer of its own.

    `chat` makes a prompt of messages, see load_chat. Clients of /v1 must send `key`, if there is
    one. A body has at most `max_body` bytes. `hosts` are names that clients may call this server
    by, see checks.check_host. `sampling` has the defaults of temperature, top_p and top_k."""

    def __init__(
        self,
        thread: EngineThread,
        tokenizer: Tokenizer,
        name: str,
        chat: Chat,
        key: str | None = None,
        max_body: int = 2**20,
        hosts: Collection[str] = (),
        sampling: SamplingParams = OPENAI_SAMPLING,
    ) -> None:
        self.thread = thread
        self.engine = thread.engine
        self.tokenizer = tokenizer
        self.name = name
        self.chat = chat
        self.sampling = sampling
        self.key = key
        self.max_body = max_body
        self.max_len = thread.engine.scheduler.max_len
        self.hosts = {"localhost", *(host.lower() for host in hosts)}
        self.metrics = Metrics(thread.engine.schedulers)
        thread.on_completion = self.metrics.observe
        self.slo_s: float | None = self.engine.config.policy_options.get("tbt_slo")
        self.slo_source = "the option --tbt-slo"
        if self.slo_s is None and thread.idle_decode_s is not None:
            self.slo_s = SLO_DECODES * thread.idle_decode_s
            self.slo_source = f"{SLO_DECODES} times the median decode iteration of an idle engine"

    def app(self) -> Starlette:
        """The ASGI application."""
        complete = partial(self.create, CompletionRequest)
        chat = partial(self.create, ChatRequest)
        return Starlette(
            routes=[
                Route("/v1/completions", complete, methods=["POST"]),
                Route("/v1/chat/completions", chat, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.model),
                Route("/health", self.health),
                Route("/metrics", self.metrics_text),
                Route("/records/{place}", self.records),
                Route("/", self.page),
            ],
            exception_handlers={
                HTTPException: error_response,
                ClientDisconnect: error_response,
                Exception: error_response,
            },
        )

    async def page(self, request: HttpRequest) -> Response:
        """GET /: the live schedule page. A gap is red above `slo_s`."""
        self.reject_other_names(request)
        config = self.engine.config
        sizes = f"{config.max_batch} requests of {config.max_len} tokens"
        description = f"{config.policy}, chunk {config.chunk}, {sizes}"
        text = page(
            self.name, description, live="/records", slo_s=self.slo_s, slo_source=self.slo_source
        )
        return HTMLResponse(text)

    async def records(self, request: HttpRequest) -> Response:
        """GET /records/N: the records from number N on, and the ends of the last texts, as JSON."""
        self.reject_other_names(request)
        digits: str = request.path_params["place"]
        if not re.fullmatch(f"[0-9]{{1,{MAX_DIGITS}}}", digits):
            raise ApiError(404, f"/records/N: N must have 1 to {MAX_DIGITS} digits")
        reply = await self.thread.call(self.thread.records_since, int(digits))
        texts: dict[int, str] = {}
        for request_id, tokens in reply["outputs"].items():
            with suppress(Exception):  # of a tokenizer: the client is told
                texts[request_id] = self.tokenizer.decode(tokens)
        return JSONResponse({"records": reply["records"], "place": reply["place"], "texts": texts})

    async def health(self, request: HttpRequest) -> Response:
        """GET /health."""
        return PlainTextResponse("ok")

    async def metrics_text(self, request: HttpRequest) -> Response:
        """GET /metrics."""
        return PlainTextResponse(self.metrics.text())

    async def models(self, request: HttpRequest) -> Response:
        """GET /v1/models."""
        self.check_client(request)
        return JSONResponse({"object": "list", "data": [self.model_object()]})

    async def model(self, request: HttpRequest) -> Response:
        """GET /v1/models/NAME."""
        self.check_client(request)
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
        self.check_client(request)
        body = kind.read(await read_body(request, self.max_body))
        if body.model is not None:
            self.check_name(body.model)
        # in another thread, because it may take long
        prompt = await asyncio.to_thread(
            encode_prompt, body, self.tokenizer, self.chat, self.max_len
        )
        max_new_tokens = body.limit or max(1, self.max_len - len(prompt))
        stop_token_ids = self.stop_token_ids(body)
        given = body.model_dump(include={"temperature", "top_p", "top_k"}, exclude_none=True)
        try:
            params = replace(
                self.sampling,
                max_new_tokens=max_new_tokens,
                seed=body.seed,
                stop_token_ids=stop_token_ids,
                logprobs=body.wants_logprobs,
                **given,
            )
            self.check_length(body, len(prompt), max_new_tokens)
            submitted = await self.thread.call(
                self.thread.add,
                prompt,
                params,
                arrival,
                priority=body.priority,
                ttft_slo=body.ttft_slo,
                tbt_slo=body.tbt_slo,
                user=body.user,
            )
        except QueueFull as error:
            raise ApiError(429, str(error), None, "queue_full", {"Retry-After": "1"}) from error
        except ValueError as error:
            raise body.refusal(error) from error
        return CompletionResponse(self, body, prompt, submitted.request, submitted.events)

    def stop_token_ids(self, body: RequestBody) -> tuple[int, ...]:
        """The tokens that end the text: the tokenizer's, and stop strings that are special tokens.

        Raises ApiError for a special token within a stop string: it is no part of any text."""
        special_tokens = self.tokenizer.special_tokens
        token_ids = set() if body.ignore_eos else set(self.tokenizer.stop_token_ids)
        for stop in body.stops:
            if stop in special_tokens:
                token_ids.add(special_tokens[stop])
                continue
            inside = [token for token in special_tokens if token and token in stop]
            if inside:
                message = (
                    f"stop={shorten(stop)}: {inside[0]} is a special token, and never in a text"
                )
                raise ApiError(400, f"{message}: stop at it alone", "stop")
        return tuple(token_ids)

    def check_client(self, request: HttpRequest) -> None:
        """Raise ApiError unless the request sends the key, or there is none."""
        if self.key:
            check_key(request, self.key)
        else:
            self.reject_other_names(request)

    def reject_other_names(self, request: HttpRequest) -> None:
        """Raise ApiError if there is no key, and the request calls this server by a wrong name."""
        if not self.key:
            check_host(request, self.hosts)

    def check_length(self, body: RequestBody, prompt_len: int, max_new_tokens: int) -> None:
        """Raise ApiError if prompt and output do not fit."""
        if prompt_len + max_new_tokens <= self.max_len:
            return
        limit_is_wrong = body.limit_name in body.model_fields_set and prompt_len < self.max_len
        total = f"{body.prompt_name} of {prompt_len} tokens + {body.limit_name}={max_new_tokens}"
        message = f"{total}: must not exceed {self.max_len}"
        param = body.limit_name if limit_is_wrong else body.prompt_name
        raise ApiError(400, message, param, TOO_LONG)


def encode_prompt(body: RequestBody, tokenizer: Tokenizer, chat: Chat, max_len: int) -> list[int]:
    """The tokens of a request's prompt, or of its messages. Raises ApiError.

    A text that certainly has `max_len` tokens or more is refused before it is encoded."""
    text = ""
    encode = tokenizer.encode
    if isinstance(body, CompletionRequest):
        if not isinstance(body.prompt, str):
            return body.prompt
        text = body.prompt
    elif isinstance(body, ChatRequest):
        try:
            text = chat(body.messages)
        except ValueError as error:
            message = str(error)  # names a field
            if error.__cause__ is not None:  # the template raised it: the file is nobody's business
                cause = error.__cause__
                message = f"messages: no chat: {one_line(f'{type(cause).__name__}: {cause}')}"
            raise ApiError(400, message, "messages") from error
        encode = tokenizer.encode_chat or encode  # a template writes BOS itself
    fewest_tokens = tokenizer.fewest_tokens(text)
    if fewest_tokens >= max_len:
        message = f"{body.prompt_name} of at least {fewest_tokens} tokens: must be below {max_len}"
        raise ApiError(400, message, body.prompt_name, TOO_LONG)
    try:
        return encode(text)
    except ValueError as error:
        message = f"{body.prompt_name}: cannot be encoded: {error}"
        raise ApiError(400, message, body.prompt_name) from error
