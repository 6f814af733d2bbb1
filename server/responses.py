"""The answer to a completion or a chat, at once or as a stream of server-sent events.

Read first: protocol.py, engine_thread.py, pretrained/streams.py. Read next: app.py."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from anyio import from_thread
from fastapi import HTTPException
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from config import QueueFull, TooLong
from pretrained.streams import TextStream, Writer
from request import Event, Request
from server.engine_thread import Choice, EngineThread, JsonObject
from server.protocol import Body, ChatBody, api_error, error_json


class Piece(NamedTuple):
    """The text of a choice that is certain with one more token."""

    text: str
    event: Event
    finish_reason: str | None


class Answer(StreamingResponse):
    """The response to a body. Its requests begin with it, and end with it however it ends, also if
    the client goes away. Choice i is the answer to `requests[i]`."""

    def __init__(self, thread: EngineThread, asked: Body, prompts: Sequence[Sequence[int]]) -> None:
        """Queue the requests. For a worker thread of FastAPI. Raises HTTPException."""
        if asked.model not in (None, thread.name):
            message = f"model: there is only {thread.name}"
            raise api_error(404, message, "model", "model_not_found")
        self.thread = thread
        self.asked = asked
        self.events: asyncio.Queue[Event | None] = asyncio.Queue()  # None: the engine failed
        self.requests = self.add_requests(prompts)
        self.output_tokens = 0  # so far
        self.is_chat = isinstance(asked, ChatBody)
        kind = "chat.completion" if self.is_chat else "text_completion"
        self.head: JsonObject = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": f"{kind}.chunk" if self.is_chat and asked.stream else kind,
            "created": int(time.time()),
            "model": thread.name,
        }
        if asked.stream:
            super().__init__(self.stream(), media_type="text/event-stream")
        else:
            super().__init__(self.whole(), media_type="application/json")

    def add_requests(self, prompts: Sequence[Sequence[int]]) -> Sequence[Request]:
        """Have requests with these prompts queued."""
        thread = self.thread
        count = len(prompts) * self.asked.n
        most = thread.engine.config.max_waiting or count
        if count > most:
            raise api_error(400, f"n: {count} answers, at most {most} may wait", "n")
        loop = from_thread.run_sync(asyncio.get_running_loop)
        deliver = partial(loop.call_soon_threadsafe, self.events.put_nowait)
        service = self.asked.model_dump(include={"priority", "ttft_slo", "tbt_slo", "user"})
        try:
            choices = self.choices(prompts)
            return thread.call(thread.add, choices, thread.engine.clock(), deliver, **service)
        except QueueFull as error:
            raise api_error(429, str(error), code="queue_full") from error
        except ValueError as error:
            code = "context_length_exceeded" if isinstance(error, TooLong) else None
            raise api_error(400, str(error), code=code) from error

    def choices(self, prompts: Sequence[Sequence[int]]) -> Iterator[Choice]:
        """The prompt and the sampling of each choice: answer i to a prompt has the seed + i.

        Raises ValueError as SamplingParams."""
        asked = self.asked
        special_tokens = self.thread.tokenizer.special_tokens
        token_ids = {special_tokens[stop] for stop in asked.stop if stop in special_tokens}
        if not asked.ignore_eos:
            token_ids.update(self.thread.tokenizer.stop_token_ids)
        params = replace(
            self.thread.sampling,
            stop_token_ids=tuple(token_ids),
            logprobs=asked.wants_logprobs,
            **asked.model_dump(include={"temperature", "top_p", "top_k"}, exclude_none=True),
        )
        limit = asked.max_completion_tokens or asked.max_tokens
        for prompt in prompts:
            room = max(1, self.thread.engine.scheduler.max_len - len(prompt))
            for i in range(asked.n):
                yield prompt, replace(params, max_new_tokens=limit or room, seed=asked.seed + i)

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
        self.body_iterator = self.resume(await anext(parts), parts)
        await super().stream_response(send)

    async def resume(self, first: Any, parts: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """The first part and those that follow. An error is the last one."""
        yield first
        try:
            async for part in parts:
                yield part
        except HTTPException as error:
            yield f"data: {error_json(error)}\n\n"

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """(number of a choice, the next piece of it), token by token. Raises HTTPException."""
        indices: dict[int, int] = {}  # by request id: the choices that have not ended
        writers: list[Writer] = []
        for index, request in enumerate(self.requests):
            indices[request.id] = index
            stream = TextStream(self.thread.tokenizer, request.prompt)
            writers.append(Writer(stream, self.asked.stop))
        while indices:
            event = await self.events.get()
            if event is None:
                raise api_error(500, "the engine failed, see its log")
            request_id = event.request.id
            if request_id not in indices:
                continue  # a token after a stop string
            index = indices[request_id]
            self.output_tokens += 1
            text, finish_reason = writers[index].push(event)
            if finish_reason:
                del indices[request_id]
                self.thread.end(request_id)  # the engine knows of no stop string
            yield index, Piece(text, event, finish_reason)

    async def whole(self) -> AsyncIterator[str]:
        """The answer at once."""
        pieces: list[list[Piece]] = [[] for _ in self.requests]
        async for index, piece in self.pieces():
            pieces[index].append(piece)
        choices = [self.choice(index, each) for index, each in enumerate(pieces)]
        yield self.json(choices, self.usage())

    async def stream(self) -> AsyncIterator[str]:
        """An event for each token, also if no text is certain with it."""
        options = self.asked.stream_options
        async for index, piece in self.pieces():
            usage = self.usage() if options.continuous_usage_stats else None
            yield f"data: {self.json([self.choice(index, [piece])], usage)}\n\n"
        if options.include_usage:
            yield f"data: {self.json([], self.usage())}\n\n"
        yield "data: [DONE]\n\n"

    def json(self, choices: Sequence[JsonObject], usage: JsonObject | None) -> str:
        """The answer, or an event of it."""
        return json.dumps({**self.head, "choices": choices, "usage": usage})

    def choice(self, index: int, pieces: Sequence[Piece]) -> JsonObject:
        """Pieces of a choice in OpenAI's shape."""
        text = "".join(piece.text for piece in pieces)
        choice: JsonObject = {"index": index, "finish_reason": pieces[-1].finish_reason}
        if self.is_chat:
            key = "delta" if self.asked.stream else "message"
            choice[key] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        choice["logprobs"] = self.logprobs(pieces) if self.asked.wants_logprobs else None
        return choice

    def logprobs(self, pieces: Sequence[Piece]) -> JsonObject:
        """The log-probabilities of tokens in OpenAI's shape. A stop token has none."""
        content: list[JsonObject] = []
        for _, event, _ in pieces:
            if event.finish_reason != "stop":
                token = self.thread.tokenizer.decode([event.token])
                names = {"token": token, "bytes": list(token.encode()), "top_logprobs": []}
                content.append({**names, "logprob": event.logprob})
        if self.is_chat:
            return {"content": content}
        return {
            "tokens": [each["token"] for each in content],
            "token_logprobs": [each["logprob"] for each in content],
            "top_logprobs": None,
        }

    def usage(self) -> JsonObject:
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
