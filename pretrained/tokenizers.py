"""Text <-> token ids: a checkpoint's own tokenizer, or bytes for a model with random weights.

A token is a piece of text only in company: an emoji may take three, and some tokenizers drop the
space before the first word. So text is streamed by decoding a few tokens together, never one alone.
Read next: sample.py, which prints what is streamed here.
"""

import base64
from itertools import groupby
from pathlib import Path

import tiktoken
import tokenizers

from pretrained.checkpoints import Schema, TokenId

# How LLaMA 3 cuts text into words before merging bytes, and its 256 special tokens, as published.
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_RESERVED = [f"<|reserved_special_token_{i}|>" for i in range(251)]
LLAMA3_SPECIALS = ["<|begin_of_text|>", "<|end_of_text|>", *_RESERVED[:4], "<|start_header_id|>"]
LLAMA3_SPECIALS += ["<|end_header_id|>", _RESERVED[4], "<|eot_id|>", *_RESERVED[5:]]
BYTES = {bytes([i]): i for i in range(256)}


class Tokenizer:
    """Text to token ids and back. `encode(text)` returns the list of its ids, BOS first if there is
    one; the text may spell special tokens. `stop_token_ids` (a frozenset) end a text."""

    def __init__(self, encode, decode, known, stop_token_ids=()):
        """`encode`: str -> ids; `decode`: ids -> str, called only with ids in `known`."""
        self.encode, self._decode, self.known = encode, decode, known
        self.stop_token_ids = frozenset(stop_token_ids)

    def decode(self, ids):
        """The text of ids; special tokens have none, an unknown id becomes "\\ufffd"."""
        runs = ((known, list(run)) for known, run in groupby(ids, self.known.__contains__))
        return "".join(self._decode(run) if known else "\ufffd" * len(run) for known, run in runs)

    def stream(self):
        """A new TextStream."""
        return TextStream(self)


class TextStream:
    """Decodes one token at a time. What it returns, joined, is `decode` of all tokens (not quite
    for tokenizers that spell rare characters in bytes, and bytes that are no text)."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self._context = []  # the tokens of the last text: they decide on the next one's space
        self._pending = []  # tokens whose text is not out yet

    def push(self, token_id):
        """The text that `token_id` completes; "" if it completes none."""
        self._pending.append(token_id)
        half_a_character = self._text().endswith("\ufffd")  # so far; the next may complete it
        return "" if half_a_character and token_id in self._tokenizer.known else self.flush()

    def flush(self):
        """The text that is left, complete or not. Call it after the last token."""
        text = self._text()
        if text:
            self._context, self._pending = self._pending, []
        return text

    def _text(self):
        decode = self._tokenizer.decode
        return decode(self._context + self._pending)[len(decode(self._context)) :]


def byte_tokenizer():
    """One token per byte, its id the byte's value: for models with random weights."""
    rules = dict(pat_str=r"[\s\S]", mergeable_ranks=BYTES, special_tokens={})
    inner = tiktoken.Encoding("bytes", **rules)
    return Tokenizer(inner.encode, inner.decode, range(256))


class TextFile(Schema):
    """What config.json and generation_config.json say about text."""

    eos_token_id: TokenId | list[TokenId] | None = None


def load_tokenizer(directory):
    """The tokenizer of a checkpoint, from tokenizer.json or LLaMA 3's own tokenizer.model. Raises
    FileNotFoundError, which says which file to put where, and ValueError for a broken file."""
    directory, stop = Path(directory), []
    for name in ("config.json", "generation_config.json"):  # of both, the second
        if (directory / name).is_file():
            ids = TextFile.read(directory / name).eos_token_id
            stop = stop if ids is None else [ids] if isinstance(ids, int) else ids
    for name in ("tokenizer.json", "tokenizer.model", "original/tokenizer.model"):
        if (directory / name).is_file():
            load = _tokenizers if name == "tokenizer.json" else _llama3
            return load(directory / name, stop)
    raise FileNotFoundError(f"{directory}: no tokenizer. Put the checkpoint's tokenizer.json there")


def _tokenizers(path, stop):
    """A Tokenizer around the tokenizers.Tokenizer of a tokenizer.json."""
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
        inner.encode("")  # some of what is broken only shows here
    except BaseException as error:  # Exception, and what a panic in Rust becomes
        if isinstance(error, KeyboardInterrupt):
            raise
        raise ValueError(f"{path}: not a tokenizer: {str(error)!r}") from error
    inner.no_truncation()  # a prompt is never cut or filled up without being told
    inner.no_padding()
    known = set(inner.get_vocab(with_added_tokens=True).values())
    return Tokenizer(lambda text: inner.encode(text).ids, inner.decode, known, stop)


def _llama3(path, stop):
    """LLaMA 3's tokenizer from its file of byte-pair ranks, one "base64 rank" per line."""
    try:
        lines = [line.split() for line in path.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
        if sorted(ranks.values()) != list(range(len(lines))) or BYTES.keys() - ranks:
            raise ValueError("ranks must go from 0 by one, and every byte have its own")
    except ValueError as error:
        raise ValueError(
            f"{path}: not a list of byte-pair ranks as LLaMA 3 has it (a sentencepiece model?). "
            "Put the checkpoint's tokenizer.json next to its config.json"
        ) from error
    specials = {token: len(ranks) + i for i, token in enumerate(LLAMA3_SPECIALS)}
    rules = dict(pat_str=LLAMA3_WORDS, mergeable_ranks=ranks, special_tokens=specials)
    inner, bos = tiktoken.Encoding("llama3", **rules), specials["<|begin_of_text|>"]
    encode = lambda text: [bos, *inner.encode(text, allowed_special="all")]
    decode = lambda ids: inner.decode([i for i in ids if i < len(ranks)])
    stop = stop or [specials["<|end_of_text|>"], specials["<|eot_id|>"]]
    return Tokenizer(encode, decode, range(inner.n_vocab), stop)
