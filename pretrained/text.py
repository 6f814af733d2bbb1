"""What an engine does with text: prompts in, output and stop strings out.

Without a tokenizer there is no text, and all of this does nothing. Read first: streams.py."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pretrained.streams import CONTEXT, TextStream, Writer, cut, decode_after
from pretrained.tokenizers import Tokenizer
from request import Event, Request

Prompt = str | Sequence[int]  # text, if there is a tokenizer, or token ids
LONGEST_CHARACTER = 4  # in bytes, and so in tokens


class Text:
    """The text of an engine's requests."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.stop_token_ids = tokenizer.stop_token_ids if tokenizer else frozenset[int]()

    def encode(self, prompt: Prompt, stops: Sequence[str], vocab_size: int) -> list[int]:
        """A prompt as token ids. Raises ValueError if there are none, or one is out of range, and
        for text or stop strings without tokenizer."""
        if self.tokenizer is None and (stops or isinstance(prompt, str)):
            raise ValueError("prompt, stop: no tokenizer here, give token ids")
        if self.tokenizer is not None and isinstance(prompt, str):
            prompt = self.tokenizer.encode(prompt)
        tokens: list[Any] = list(prompt)
        if not tokens or min(tokens) < 0 or max(tokens) >= vocab_size:
            raise ValueError(f"prompt: must be token ids from 0 to {vocab_size - 1}, at least one")
        return tokens

    def decode(self, request: Request, start: int) -> tuple[str, bool]:
        """(the text of a request's tokens from `start` on, without a stop token, up to the first
        stop string; whether there is one)."""
        assert self.tokenizer is not None
        tokens = request.tokens
        if request.finish_reason == "stop" and tokens[-1] in request.stop:
            tokens = tokens[:-1]
        context = tokens[max(0, start - CONTEXT) : start]
        return cut(decode_after(self.tokenizer, context, tokens[start:]), request.params.stop)

    def has_stop(self, request: Request) -> bool:
        """Whether one of its stop strings is in the text of a request's last tokens, as many as it
        may take."""
        stops = request.params.stop
        if not stops:
            return False
        last_tokens = 1 + LONGEST_CHARACTER * max(map(len, stops))
        start = max(request.prompt_len, len(request.tokens) - last_tokens)
        _, is_stopped = self.decode(request, start)
        return is_stopped

    def write(self, request: Request) -> None:
        """Set the text of a request that has ended."""
        if self.tokenizer is not None:
            request.text, _ = self.decode(request, request.prompt_len)

    def add_to(self, events: Iterable[Event]) -> Iterator[Event]:
        """The events, each with its text."""
        if self.tokenizer is None:
            yield from events
            return
        writers: dict[int, Writer] = {}  # by request id
        for event in events:
            request = event.request
            if request.id not in writers:  # its first token
                stream = TextStream(self.tokenizer, request.prompt)
                writers[request.id] = Writer(stream, request.params.stop)
            text, _ = writers[request.id].push(event)
            yield event._replace(text=text)
