"""What an engine does with text: prompts in, output and stop strings out.

Without a tokenizer there is no text, and all of this does nothing. Read first: streams.py."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pretrained.streams import TextStream, Writer, has_stop, write_text
from pretrained.tokenizers import Tokenizer
from request import Completion, Event, Request
from sampling import SamplingParams

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

    def complete(self, request: Request) -> Completion:
        """The request's Completion, with the output as text, too.

        If the tokenizer fails, it ends the request with an error, and no others."""
        completion = Completion.of(request)
        if self.tokenizer is not None:
            write_text(completion, self.tokenizer, request.stop, request.params.stop)
        return completion

    def add_to(
        self, events: Iterable[Event], requests: Mapping[int, tuple[list[int], SamplingParams]]
    ) -> Iterator[Event]:
        """The events, each with its text. `requests` has prompt and params by request id."""
        if self.tokenizer is None:
            yield from events
            return
        writers = {
            request_id: Writer(TextStream(self.tokenizer, prompt), params.stop)
            for request_id, (prompt, params) in requests.items()
        }
        lengths = dict.fromkeys(requests, 0)  # of the texts so far
        for event in events:
            if event.request_id not in writers:  # added by somebody else since then
                yield event
                continue
            if event.completion is None:
                text, _ = writers[event.request_id].push(event)
            else:
                text = (event.completion.text or "")[lengths[event.request_id] :]
            lengths[event.request_id] += len(text)
            yield event._replace(text=text)
