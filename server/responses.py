"""The response to a completion or a chat: whole, streamed, cut off.

Read first: protocol.py, engine_thread.py, pretrained/streams.py. Read next: app.py."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Literal

from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from pretrained.streams import TextStream, Writer
from pretrained.tokenizers import Tokenizer
from request import Event
from scheduler import Request
from server.engine_thread import EngineThread, EventQueue
from server.protocol import ApiError, Piece, RequestBody, WrittenToken

SERVER_ENDS = "the server ends"
Progress = Literal["waiting", "begun", "complete"]  # of a response: "begun" sent its status


class CompletionResponse(StreamingResponse):
    """The response to a completion or a chat, whole or as a stream of server-sent events.

    Choice i is the answer to `requests[i]`; their `events` are in one queue, see EngineThread.add.
    However the response ends, also if the client goes away, the requests end with it."""

    def __init__(
        self,
        thread: EngineThread,
        tokenizer: Tokenizer,
        name: str,
        body: RequestBody,
        requests: Sequence[Request],
        events: EventQueue,
    ) -> None:
        """`name` is that of the model."""
        self.thread = thread
        self.tokenizer = tokenizer
        self.request_body = body
        self.requests = requests
        self.events = events
        self.output_tokens = 0  # so far
        self.progress: Progress = "waiting"
        self.head: dict[str, object] = {
            "id": f"{body.id_prefix}-{uuid.uuid4().hex}",
            "object": body.chunk_object_name if body.stream else body.object_name,
            "created": int(time.time()),
            "model": name,
        }
        super().__init__(
            self.stream() if body.stream else self.whole(),
            headers={"cache-control": "no-cache"},
            media_type="text/event-stream" if body.stream else "application/json",
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
            for request in self.requests:
                self.end(request)

    def end(self, request: Request) -> None:
        """Let the engine's thread end a request, if it has not ended."""
        self.thread.executor.submit(self.thread.end, request.id)

    async def cut_off(self, scope: Scope, receive: Receive, send: Send) -> None:
        """End the response with an error: its status, or an event if a stream has begun."""
        error = ApiError(503, SERVER_ENDS)
        if self.progress == "waiting":
            await JSONResponse(error.detail, error.status_code)(scope, receive, send)
        elif self.progress == "begun":
            event = f"data: {json.dumps(error.detail)}\n\n" if self.request_body.stream else ""
            await send({"type": "http.response.body", "body": event.encode(), "more_body": False})

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """(number of a choice, the next part of it), token by token. Raises ApiError if the engine
        or the tokenizer fails."""
        writers: dict[int, Writer] = {}
        running = {request.id: i for i, request in enumerate(self.requests)}
        while running:
            event = await self.events.get()
            if event is None:
                raise ApiError(500, "the engine failed, see its log")
            index = running.get(event.request.id)
            if index is None:
                continue  # a token after a stop string
            request = self.requests[index]
            self.output_tokens += 1
            try:
                if index not in writers:
                    prompt = request.tokens[: request.prompt_len]
                    stream = TextStream(self.tokenizer, prompt)
                    writers[index] = Writer(stream, self.request_body.stops)
                piece = write_piece(writers[index], event)
            except Exception as error:
                raise ApiError(
                    500, f"the tokenizer failed: {type(error).__name__}: {error}"
                ) from error
            if piece.finish_reason:
                del running[request.id]
                if not event.finish_reason:  # a stop string, of which the engine does not know
                    self.end(request)
            yield index, piece

    async def whole(self) -> AsyncIterator[str]:
        """The body of a response at once."""
        pieces: list[list[Piece]] = [[] for _ in self.requests]
        async for index, piece in self.pieces():
            pieces[index].append(piece)
        choices = [
            self.request_body.choice(index, Piece.joined(parts), "whole")
            for index, parts in enumerate(pieces)
        ]
        yield json.dumps({**self.head, "choices": choices, "usage": self.usage()})

    async def stream(self) -> AsyncIterator[str]:
        """A server-sent event for each token, also if no text is certain with it."""
        with_usage = self.request_body.stream_options.get("include_usage")
        head = {**self.head, "usage": None} if with_usage else self.head
        started: set[int] = set()
        last = "[DONE]"
        try:
            async for index, piece in self.pieces():
                place = "next" if index in started else "first"
                choice = self.request_body.choice(index, piece, place)
                yield f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"
                started.add(index)
            if with_usage:
                yield f"data: {json.dumps({**head, 'choices': [], 'usage': self.usage()})}\n\n"
        except ApiError as error:
            if not started:
                raise
            last = json.dumps(error.detail)
        yield f"data: {last}\n\n"

    def usage(self) -> dict[str, object]:
        """The number of tokens, and how many of the prompts were found in the cache.

        A prompt of several choices counts once. A request that was preempted may have found its own
        pages again: it counts as 0."""
        first_of_each = self.requests[:: self.request_body.n]
        prompt_tokens = sum(request.prompt_len for request in first_of_each)
        cached = [request.cached_tokens for request in first_of_each if not request.preemptions]
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.output_tokens,
            "total_tokens": prompt_tokens + self.output_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(cached)},
        }


def write_piece(writer: Writer, event: Event) -> Piece:
    """The part of an answer that is certain with the token of an event."""
    offset = writer.length
    text, finish_reason = writer.push(event)
    tokens = []
    if event.finish_reason != "stop":  # a stop token is no part of the answer
        tokens = [WrittenToken(writer.stream.text.encode(), offset, event.logprob)]
    return Piece(text, tokens, finish_reason)
