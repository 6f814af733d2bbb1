"""Tokens as text while they come: streams of characters, up to a stop string.

A single token may have no text: an emoji may take three, and some tokenizers drop the space before
the first word. So a token is decoded behind those before it, and its text is what is new. This is
the rule of `tokenizers.decoders.DecodeStream`, for whatever decodes. Read first: tokenizers.py.
Read next: text.py."""

from collections.abc import Sequence

from pretrained.tokenizers import Tokenizer
from request import Event

CONTEXT = 8  # tokens, of which one has text, so that the next keeps its space
HALF_A_CHARACTER = "\ufffd"  # how bytes that are no text yet are decoded


def decode_after(tokenizer: Tokenizer, context: Sequence[int], tokens: Sequence[int]) -> str:
    """The text of `tokens` as it reads behind `context`.

    If the context ends within a character, the text reads as at the beginning."""
    before = tokenizer.decode(context)
    if before.endswith(HALF_A_CHARACTER):
        return tokenizer.decode(tokens)
    return tokenizer.decode([*context, *tokens])[len(before) :]


class TextStream:
    """Decodes the tokens that follow a prompt, one at a time."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._context = list(prompt[-CONTEXT:])  # the last tokens that were shown
        self._held: list[int] = []  # tokens that are no whole character yet

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; "" if it completes none."""
        self._held.append(token_id)
        text = self.flush()
        if not text or text.endswith(HALF_A_CHARACTER):
            return ""
        self._context = self._held
        self._held = []
        return text

    def flush(self) -> str:
        """The text that is left after the last token: that of a character without its end."""
        return decode_after(self._tokenizer, self._context, self._held)


def cut(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """(the text up to the first of the strings `stops`, whether there is one)."""
    ends = [text.find(stop) for stop in stops if stop in text]
    return text[: min(ends, default=None)], bool(ends)


class Writer:
    """Writes the text of a request, up to the first of the strings `stops`.

    Text that may be the beginning of a stop string is held back until that is certain."""

    def __init__(self, stream: TextStream, stops: Sequence[str]) -> None:
        self.stream = stream
        self.stops = stops
        self.held = ""  # text that is not certain

    def push(self, event: Event) -> tuple[str, str | None]:
        """(text, finish_reason) of an event: the text that is certain with it, and "stop" for a
        stop string, too. A stop token is no part of the text."""
        reason = event.finish_reason
        if reason != "stop" or event.token not in event.request.stop:
            self.held += self.stream.push(event.token)
        if reason:
            self.held += self.stream.flush()
        text, is_stopped = cut(self.held, self.stops)
        if is_stopped:
            return text, "stop"
        if not reason:
            text = text[: len(text) - self._uncertain_length()]
        self.held = self.held[len(text) :]
        return text, reason

    def _uncertain_length(self) -> int:
        """How many characters at the end of `held` may be the beginning of a stop string."""
        beginnings = [stop[:length] for stop in self.stops for length in range(len(stop))]
        return max((len(text) for text in beginnings if self.held.endswith(text)), default=0)
