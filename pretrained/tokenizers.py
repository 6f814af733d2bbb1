"""Text <-> token ids: a checkpoint's own tokenizer, or bytes for a model with random weights.

A token is a piece of text only in company: an emoji may take three, and some tokenizers drop the
space before the first word. So text is streamed by decoding a few tokens together, never one alone,
up to a stop string. And chat templates. Read next: sample.py, which prints what is streamed."""

import base64
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

import tiktoken
import tokenizers
from pydantic import NonNegativeInt

from pretrained.checkpoints import FILES, FORMAT, Schema

CONTEXT = 32  # tokens, of which many are a word
BYTES = {bytes([i]) for i in range(256)}


class Tokenizer(NamedTuple):
    """Text to token ids and back."""

    encode: Callable  # text -> a list of ids, BOS first if there is one; it may spell special ones
    decode: Callable  # ids -> text; special tokens have none
    stop_token_ids: frozenset = frozenset()  # these end a text


class TextStream:
    """Decodes what comes after a prompt, one token at a time. What it returns, joined, is `decode`
    of all tokens (not quite where rare characters are spelt in bytes, and bytes are no text)."""

    def __init__(self, tokenizer, prompt=()):
        self._decode = tokenizer.decode
        self._context = []  # the tokens of the last text: they decide on the next one's space
        self._pending = []  # tokens whose text is not out yet
        for token in prompt[-CONTEXT:]:
            self.push(token)

    def push(self, token_id):
        """The text that `token_id` completes; "" if it completes none."""
        self._pending.append(token_id)
        return self.flush(whole=True)

    def flush(self, whole=False):
        """The text that is left after the last token; `whole`: unless it ends in a character."""
        before = self._decode(self._context)
        text = self._decode(self._context + self._pending)[len(before) :]
        if not text or whole and text.endswith("\ufffd"):  # the next token may complete it
            return ""
        self._context, self._pending = self._pending, []
        return text


class Writer:
    """Writes what a TextStream says of a request, up to the first of the strings `stops`: nothing
    that may be the beginning of one is out before it is certain."""

    def __init__(self, stream, stops):
        self.stream, self.stops = stream, stops
        self.held, self.length = "", 0  # text that is not certain; characters, with that

    def push(self, event):
        """(text, finish_reason) of an engine.Event: what is certain with it, and "stop" also for a
        stop string. A stop token is no part of the text."""
        reason = event.finish_reason
        text = "" if reason == "stop" else self.stream.push(event.token)
        text += self.stream.flush() if reason else ""
        self.held, self.length = self.held + text, self.length + len(text)
        if found := [i for stop in self.stops if (i := self.held.find(stop)) >= 0]:
            return self.held[: min(found)], "stop"
        certain = len(self.held)
        if not reason:  # what may be the beginning of a stop string waits
            begins = lambda i: any(stop.startswith(self.held[i:]) for stop in self.stops)
            certain = next(filter(begins, range(certain)), certain)
        text, self.held = self.held[:certain], self.held[certain:]
        return text, reason


def byte_tokenizer():
    """One token per byte, its id the byte's value: for models with random weights. A larger id,
    of which such a model yields many, is shown as a box."""
    encode = lambda text: list(text.encode(errors="replace"))
    spell = lambda i: bytes([i]) if i < 256 else "□".encode()
    decode = lambda ids: b"".join(map(spell, ids)).decode(errors="replace")
    return Tokenizer(encode, decode)


class TextFile(Schema):
    """What config.json and generation_config.json say about text."""

    eos_token_id: NonNegativeInt | list[NonNegativeInt] | None = None


def load_tokenizer(directory):
    """The tokenizer of a checkpoint. Raises FileNotFoundError, or ValueError for a broken file."""
    there = lambda kind: [p for name in FILES[kind] if (p := Path(directory, name)).is_file()]
    stop = []
    for path in there("texts"):  # of both, the second
        ids = TextFile.read(path).eos_token_id
        stop = stop if ids is None else [ids] if isinstance(ids, int) else ids
    if not (paths := there("tokenizers")):
        raise FileNotFoundError(f"{directory}: has no tokenizer.json. Put the checkpoint's there")
    if (path := paths[0]).suffix == ".model":
        return _llama3(path, stop)
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
        inner.encode("")  # some of what is broken only shows here
    except BaseException as error:  # Exception, and what a panic in Rust becomes
        if isinstance(error, KeyboardInterrupt):
            raise
        raise ValueError(f"{path}: not a tokenizer: {str(error)!r}") from error
    inner.no_truncation()  # a prompt is never cut or filled up without being told
    inner.no_padding()
    return Tokenizer(lambda text: inner.encode(text).ids, inner.decode, frozenset(stop))


def load_chat(directory):
    """A function from messages, [{"role", "content", ...}], to the prompt that a checkpoint's chat
    template makes of them; it raises what the template raises. Of None: a line for each."""
    if directory is None:
        line = "{role}: {content}\n".format_map
        return lambda messages: "".join(map(line, messages)) + "assistant:"
    from transformers import PreTrainedTokenizerFast

    inner = PreTrainedTokenizerFast.from_pretrained(directory)
    return partial(inner.apply_chat_template, tokenize=False, add_generation_prompt=True)


def _llama3(path, stop):
    """LLaMA 3's own tokenizer, from its file of byte-pair ranks: a line has base64 and a rank."""
    try:
        lines = [line.split() for line in path.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
        if sorted(ranks.values()) != list(range(len(lines))) or not BYTES <= ranks.keys():
            raise ValueError("ranks must go from 0 by one, and every byte have its own")
    except ValueError as error:
        wants = "put the checkpoint's tokenizer.json next to its config.json"
        raise ValueError(f"{path}: not a list of byte-pair ranks as of LLaMA 3: {wants}") from error
    its, reserved = FORMAT["llama3"], map("reserved_special_token_{}".format, count())
    names = [its["specials"].get(str(i)) or next(reserved) for i in range(256)]
    specials = {f"<|{name}|>": i for i, name in enumerate(names, len(ranks))}
    rules = dict(pat_str=its["words"], mergeable_ranks=ranks, special_tokens=specials)
    inner, bos = tiktoken.Encoding("llama3", **rules), specials["<|begin_of_text|>"]
    encode = lambda text: [bos, *inner.encode(text, allowed_special="all")]
    decode = lambda ids: inner.decode([i for i in ids if i < len(ranks)])
    stop = stop or [specials["<|end_of_text|>"], specials["<|eot_id|>"]]
    return Tokenizer(encode, decode, frozenset(stop))
