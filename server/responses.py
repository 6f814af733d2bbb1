"""The answer to a completion or a chat, at once or as a stream of server-sent events.

Read first: protocol.py, engine_thread.py, pretrained/streams.py. Read next: app.py."""

import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from pretrained.streams import TextStream, Writer
from pretrained.tokenizers import Tokenizer
from request import Event, Request
from server.engine_thread import EngineThread, EventQueue
from server.protocol import ApiError, Body, ChatBody, error_json


@dataclass
class Piece:
    """The part of a choice that is certain with one more token, or the whole of it."""

    text: str
    tokens: list[tuple[str, float | None]]  # the text and the log-probability of each
    finish_reason: str | None


class Answer(StreamingResponse):
    """The response to a body. Choice i is the answer to `requests[i]`.

    However it ends, also if the client goes away, the requests end with it."""

    def __init__(
        self,
        thread: EngineThread,
        tokenizer: Tokenizer,
        name: str,
        asked: Body,
        requests: Sequence[Request],
        events: EventQueue,
    ) -> None:
        """`events` are those of all requests, `name` is that of the model."""
        self.thread = thread
        self.tokenizer = tokenizer
        self.asked = asked
        self.requests = requests
        self.events = events
        self.output_tokens = 0  # so far
        kind = "text_completion"
        if isinstance(asked, ChatBody):
            kind = "chat.completion.chunk" if asked.stream else "chat.completion"
        self.head: dict[str, object] = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": name,
        }
        if asked.stream:
            super().__init__(self.stream(), media_type="text/event-stream")
        else:
            super().__init__(self.whole(), media_type="application/json")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, as long as the client is there."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            for request in self.requests:
                self.thread.end(request.id)

    async def stream_response(self, send: Send) -> None:
        """Send the status, which waits for the first part: an error before it has its own."""
        parts = aiter(self.body_iterator)
        first = await anext(parts)

        async def all_parts() -> AsyncIterator[Any]:
            yield first
            async for part in parts:
                yield part

        self.body_iterator = all_parts()
        await super().stream_response(send)

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """(number of a choice, the next part of it), token by token.

        Raises ApiError if the engine fails."""
        writers: dict[int, Writer] = {}
        running = {request.id: index for index, request in enumerate(self.requests)}
        for request in self.requests:
            stream = TextStream(self.tokenizer, request.prompt)
            writers[request.id] = Writer(stream, self.asked.stop)
        while running:
            event = await self.events.get()
            if event is None:
                raise ApiError(500, "the engine failed, see its log")
            request_id = event.request.id
            if request_id not in running:
                continue  # a token after a stop string
            index = running[request_id]
            self.output_tokens += 1
            text, finish_reason = writers[request_id].push(event)
            if finish_reason:
                del running[request_id]
                self.thread.end(request_id)  # the engine knows of no stop string
            yield index, Piece(text, self.written(event), finish_reason)

    def written(self, event: Event) -> list[tuple[str, float | None]]:
        """The token of an event; a stop token is no part of an answer."""
        if event.finish_reason == "stop":
            return []
        return [(self.tokenizer.decode([event.token]), event.logprob)]

    async def whole(self) -> AsyncIterator[str]:
        """The answer at once."""
        choices = [Piece("", [], None) for _ in self.requests]
        async for index, piece in self.pieces():
            choice = choices[index]
            choice.text += piece.text
            choice.tokens += piece.tokens
            choice.finish_reason = piece.finish_reason
        shapes = [self.choice(index, choice, "message") for index, choice in enumerate(choices)]
        yield json.dumps({**self.head, "choices": shapes, "usage": self.usage()})

    async def stream(self) -> AsyncIterator[str]:
        """An event for each token, also if no text is certain with it. An error is the last one."""
        options = self.asked.stream_options
        begun = False
        try:
            async for index, piece in self.pieces():
                event = {**self.head, "choices": [self.choice(index, piece, "delta")]}
                if options.include_usage:
                    event["usage"] = self.usage() if options.continuous_usage_stats else None
                yield f"data: {json.dumps(event)}\n\n"
                begun = True
        except ApiError as error:
            if not begun:
                raise
            yield f"data: {error_json(error)}\n\n"
            return
        if options.include_usage:
            yield f"data: {json.dumps({**self.head, 'choices': [], 'usage': self.usage()})}\n\n"
        yield "data: [DONE]\n\n"

    def choice(self, index: int, piece: Piece, message_key: str) -> dict[str, object]:
        """A piece of a choice in OpenAI's shape. `message_key` is "message" or "delta"."""
        choice: dict[str, object] = {"index": index, "finish_reason": piece.finish_reason}
        if isinstance(self.asked, ChatBody):
            choice[message_key] = {"role": "assistant", "content": piece.text}
        else:
            choice["text"] = piece.text
        choice["logprobs"] = self.logprobs(piece) if self.asked.wants_logprobs else None
        return choice

    def logprobs(self, piece: Piece) -> dict[str, object]:
        """The log-probabilities of a piece's tokens in OpenAI's shape."""
        if not isinstance(self.asked, ChatBody):
            return {
                "tokens": [text for text, _ in piece.tokens],
                "token_logprobs": [logprob for _, logprob in piece.tokens],
                "top_logprobs": None,
            }
        content = [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in piece.tokens
        ]
        return {"content": content}

    def usage(self) -> dict[str, object]:
        """The number of tokens, and how many of the prompts were found in the cache.

        A prompt of several choices counts once. A request that was preempted may have found its own
        pages again: it counts as 0."""
        first_of_each = self.requests[:: self.asked.n]
        prompt_tokens = sum(request.prompt_len for request in first_of_each)
        cached = [request.cached_tokens for request in first_of_each if not request.preemptions]
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.output_tokens,
            "total_tokens": prompt_tokens + self.output_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(cached)},
        }
