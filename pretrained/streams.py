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
        self.text = ""  # of the token that was pushed last
        self._tokenizer = tokenizer
        self._context = list(prompt[-CONTEXT:])  # the last tokens that were shown
        self._held: list[int] = []  # tokens that are no whole character yet

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; "" if it completes none."""
        self._held.append(token_id)
        self.text = decode_after(self._tokenizer, self._context, self._held)
        if self.text.endswith(HALF_A_CHARACTER):
            self.text = ""
        if self.text:
            self._context = self._held
            self._held = []
        return self.text

    def flush(self) -> str:
        """The text that is left after the last token: that of a character without its end."""
        return decode_after(self._tokenizer, self._context, self._held)


class Writer:
    """Writes the text of a request, up to the first of the strings `stops`.

    Text that may be the beginning of a stop string is held back until that is certain."""

    def __init__(self, stream: TextStream, stops: Sequence[str]) -> None:
        self.stream = stream
        self.stops = stops
        self.held = ""  # text that is not certain
        self.length = 0  # in characters, with `held`

    def push(self, event: Event) -> tuple[str, str | None]:
        """(text, finish_reason) of an event: the text that is certain with it, and "stop" for a
        stop string, too. A stop token is no part of the text."""
        reason = event.finish_reason
        is_stop_token = reason == "stop" and event.token in event.request.stop
        text = "" if is_stop_token else self.stream.push(event.token)
        if reason:
            text += self.stream.flush()
        self.held += text
        self.length += len(text)
        stop_at = [self.held.find(stop) for stop in self.stops if stop in self.held]
        if stop_at:
            return self.held[: min(stop_at)], "stop"
        certain = len(self.held) if reason else self._certain_length()
        text = self.held[:certain]
        self.held = self.held[certain:]
        return text, reason

    def _certain_length(self) -> int:
        """How many characters of `held` come before what may be the beginning of a stop string."""
        for i in range(len(self.held)):
            if any(stop.startswith(self.held[i:]) for stop in self.stops):
                return i
        return len(self.held)
