"""What an engine does with text: prompts in, output and stop strings out.

Without a tokenizer there is no text, and all of this does nothing. Read first: streams.py."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from errors import ArgumentError, check_list, check_type, check_whole_list, refusing, shorten
from pretrained.streams import TextStream, Writer, has_stop, write_text
from pretrained.tokenizers import Tokenizer
from request import Completion, Event, Request
from sampling import SamplingParams

Prompt = str | Sequence[int]  # text, if there is a tokenizer, or token ids


def params_of_each(prompts: Any, params: Any) -> list[tuple[Any, SamplingParams]]:
    """Each prompt with its params: one SamplingParams for all, or a list. Raises ValueError."""
    prompts = check_list("prompts", prompts, "a list of prompts")
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * len(prompts)
    params = check_list("params", params, "SamplingParams, or a list of them")
    if len(params) != len(prompts):
        raise ValueError(f"params: {len(params)} given for {len(prompts)} prompts")
    return list(zip(prompts, params, strict=True))


class Text:
    """The text of an engine's requests. Raises ValueError for what is no tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        check_type("tokenizer", tokenizer, Tokenizer | None, "a Tokenizer, as of load_tokenizer")
        if tokenizer is not None:
            tokenizer.check()
        self.tokenizer = tokenizer
        self.stop_token_ids = tokenizer.stop_token_ids if tokenizer else frozenset[int]()

    def encode(self, prompt: Prompt, stops: Sequence[str], vocab_size: int) -> list[int]:
        """A prompt as token ids. Raises ValueError if there are none, or one is out of range, and
        for text or stop strings without tokenizer."""
        if self.tokenizer is None and (stops or isinstance(prompt, str)):
            text = f"stop={stops}" if stops else f"prompt={shorten(prompt)}"
            raise ValueError(f"{text}: no tokenizer here, give token ids")
        if self.tokenizer is not None and isinstance(prompt, str):
            prompt = self.tokenizer.encode(prompt)
        tokens = check_whole_list("prompt", prompt, "text or a list of token ids")
        if not tokens:
            raise ArgumentError("prompt: must hold at least 1 token", "prompt")
        for token in tokens:
            if not 0 <= token < vocab_size:
                limit = f"the vocabulary is 0 … {vocab_size - 1}"
                message = f"prompt: token {shorten(token)} is out of range, {limit}"
                raise ArgumentError(message, "prompt")
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
        with refusing("the tokenizer failed"):
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
                with refusing("the tokenizer failed"):
                    text, _ = writers[event.request_id].push(event)
            else:
                text = (event.completion.text or "")[lengths[event.request_id] :]
            lengths[event.request_id] += len(text)
            yield event._replace(text=text)
