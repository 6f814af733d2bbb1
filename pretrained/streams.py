"""Tokens as text while they come: streams of characters, up to a stop string.

A single token may have no text: an emoji may take three, and some tokenizers drop the space before
the first word. So text is streamed as the bytes of tokens, each decoded after the one before. Read
first: tokenizers.py. Read next: text.py."""

import codecs
from collections.abc import Sequence
from itertools import islice

from pretrained.tokenizers import Tokenizer
from request import Event, Request

LONGEST_CHARACTER = 4  # in bytes, and so in tokens
HALF_A_CHARACTER = "\ufffd"  # how bytes that are no text yet are decoded
utf8_decoder = codecs.getincrementaldecoder("utf-8")


def decode_output(tokenizer: Tokenizer, tokens: Sequence[int], prompt_len: int) -> str:
    """The text of tokens[prompt_len:], as a TextStream writes it."""
    stream = TextStream(tokenizer, tokens[:prompt_len])
    return "".join([stream.push(token) for token in tokens[prompt_len:]]) + stream.flush()


def write_text(request: Request, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
    """Set the text of a request that has ended: its output, without a stop token, up to the first
    stop string."""
    tokens = request.tokens
    if request.finish_reason == "stop" and tokens[-1] in request.stop:
        tokens = tokens[:-1]
    text = decode_output(tokenizer, tokens, request.prompt_len)
    request.text = text[: min([text.find(stop) for stop in stops if stop in text], default=None)]


def has_stop(
    tokenizer: Tokenizer, tokens: Sequence[int], prompt_len: int, stops: Sequence[str]
) -> bool:
    """Whether a stop string is in the text of the last tokens, as many as may hold one."""
    longest = LONGEST_CHARACTER * max(len(stop) for stop in stops)  # in tokens
    first = len(tokens)
    text = ""
    while first > prompt_len and len(text) <= longest:
        first = max(prompt_len, first - longest - 1)  # some tokens may have no text
        stream = TextStream(tokenizer, tokens[:first])
        text = "".join([stream.push(token) for token in tokens[first:]])
    return any(stop in text for stop in stops)


class TextStream:
    """Decodes the tokens that follow a prompt, one at a time.

    Its texts, joined, are `decode` of all tokens, but for two cases. Bytes that are no text are one
    replacement character for each that cannot go on, also with a tokenizer that writes one for each
    byte. And a character that the prompt begins is in the text if the output goes on with it."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self.token = b""  # the bytes of the token that was pushed last
        self._tokenizer = tokenizer
        self._utf8 = utf8_decoder("replace")
        self._context: list[int] = []  # the last whole token decides on the next one's space
        self._begun = b""  # of a character that the prompt ends within
        with_text = (token for token in reversed(prompt) if not tokenizer.is_silent(token))
        for token in reversed(list(islice(with_text, LONGEST_CHARACTER))):
            self.push(token)
        if not self._context:  # the prompt ends with characters of several tokens each
            whole_tokens = (
                token for token in with_text if HALF_A_CHARACTER not in tokenizer.decode([token])
            )
            self._context = list(islice(whole_tokens, 1))
        self._begun, _ = self._utf8.getstate()

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; "" if it completes none."""
        self.token = self._bytes(token_id)
        if self._begun and self.token:
            if not _goes_on(self._begun, self.token[:1]):
                self._utf8.reset()
            self._begun = b""
        return self._utf8.decode(self.token)

    def flush(self) -> str:
        """The text that is left after the last token: that of a character without its end."""
        return "" if self._begun else self._utf8.decode(b"", final=True)

    def _bytes(self, token_id: int) -> bytes:
        """The bytes of a token in its place."""
        decode = self._tokenizer.decode
        before = decode(self._context)
        text = decode([*self._context, token_id])[len(before) :]
        if not text and self._tokenizer.is_silent(token_id):
            return b""
        if HALF_A_CHARACTER in text:
            spelled = self._tokenizer.token_bytes(token_id)
            if spelled is not None:
                return spelled
        self._context = [token_id]
        return text.encode()


def _goes_on(beginning: bytes, byte: bytes) -> bool:
    """Whether a character that begins with these bytes may go on with another one."""
    try:
        utf8_decoder("strict").decode(beginning + byte)
    except UnicodeDecodeError:
        return False
    return True


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
        text = "" if reason == "stop" else self.stream.push(event.token)
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
