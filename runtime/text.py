"""What an engine does with text: prompts in, output and stop strings out.

Without a tokenizer there is no text, and all of this does nothing. Read first: streams.py."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pretrained.streams import TextStream, Writer, has_stop, write_text
from pretrained.tokenizers import Tokenizer
from request import Event, Request

Prompt = str | Sequence[int]  # text, if there is a tokenizer, or token ids


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
        if not tokens:
            raise ValueError("prompt: must hold at least 1 token")
        if min(tokens) < 0 or max(tokens) >= vocab_size:
            raise ValueError(f"prompt: token ids must be in 0 … {vocab_size - 1}")
        return tokens

    def has_stop(self, request: Request) -> bool:
        """Whether one of its stop strings is in the text of a request's last tokens."""
        stops = request.params.stop
        if self.tokenizer is None or not stops:
            return False
        return has_stop(self.tokenizer, request.tokens, request.prompt_len, stops)

    def write(self, request: Request) -> None:
        """Set the text of a request that has ended."""
        if self.tokenizer is not None:
            write_text(request, self.tokenizer, request.params.stop)

    def add_to(self, events: Iterable[Event]) -> Iterator[Event]:
        """The events, each with its text."""
        if self.tokenizer is None:
            yield from events
            return
        writers: dict[int, Writer] = {}  # by request id
        lengths: Counter[int] = Counter()  # of the texts so far
        for event in events:
            request = event.request
            if request.id not in writers:  # its first token
                stream = TextStream(self.tokenizer, request.prompt)
                writers[request.id] = Writer(stream, request.params.stop)
            if event.finish_reason is None:
                text, _ = writers[request.id].push(event)
            else:
                text = (request.text or "")[lengths[request.id] :]
            lengths[request.id] += len(text)
            yield event._replace(text=text)
