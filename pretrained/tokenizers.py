"""Text <-> token ids: a checkpoint's own tokenizer, or bytes for a model with random weights.

A single token may have no text: an emoji may take three, and some tokenizers drop the space before
the first word. So text is streamed by decoding a few tokens together, up to a stop string. Chat
templates are here, too. Read next: sample.py, which prints the stream."""

import base64
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import tiktoken
import tokenizers
from pydantic import NonNegativeInt
from tokenizers import models, pre_tokenizers

from errors import (
    check_function,
    check_token_ids,
    check_type,
    check_whole,
    one_line,
    refusing,
    shorten,
)
from pretrained.checkpoints import (
    CHAT_FILES,
    TEXT_FILES,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILES,
    Schema,
)

CONTEXT = 32  # tokens, of which many are a word
BYTES = {bytes([i]) for i in range(256)}
KEEPING_STEPS = {"ByteLevel", "Digits", "Split"}  # cut a text and drop nothing
HALF_A_CHARACTER = "\ufffd"  # how bytes that are no text yet are decoded
SOME_TEXT = "Tell me 1 story, né?\n"
Message = dict[str, str]  # {"role": ..., "content": ...}

# How LLaMA 3 cuts text into words before merging bytes, as published.
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPECIALS = {  # of its 256 special tokens; the others are <|reserved_special_token_0|>, ...
    0: "begin_of_text",
    1: "end_of_text",
    6: "start_header_id",
    7: "end_header_id",
    9: "eot_id",
}


class Tokenizer(NamedTuple):
    """Text to token ids and back.

    `encode` raises ValueError for a text that it cannot encode. While a checkpoint's tokenizer
    encodes, other threads run."""

    encode: Callable[[str], list[int]]  # BOS comes first, if there is one
    decode: Callable[[Sequence[int]], str]  # special tokens have no text
    stop_token_ids: frozenset[int] = frozenset()  # these end a text
    longest_token: int | None = None  # in characters; None if a token may stand for any number

    def check(self) -> None:
        """Raise ValueError for a field of another type."""
        check_function("tokenizer: encode", self.encode, "a function")
        check_function("tokenizer: decode", self.decode, "a function")
        check_token_ids("tokenizer: stop_token_ids", self.stop_token_ids)
        if self.longest_token is not None:
            check_whole("tokenizer: longest_token", self.longest_token, minimum=1)

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that the text has at least. It is found without encoding the text."""
        if self.longest_token is None:
            return 0
        return -(-len(text) // self.longest_token)


def decode_output(tokenizer: Tokenizer, tokens: Sequence[int], prompt_len: int) -> str:
    """The text of tokens[prompt_len:].

    It is decoded after the prompt: in some tokenizers that decides on the first word's space. A
    prompt may end within a character that the output completes."""
    prompt = tokenizer.decode(tokens[:prompt_len]).rstrip(HALF_A_CHARACTER)
    return tokenizer.decode(tokens)[len(prompt) :]


class TextStream:
    """Decodes the tokens that follow a prompt, one at a time.

    Its texts, joined, are `decode` of all tokens. (Not quite, where rare characters are spelt in
    bytes and the bytes are no text.)"""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._decode = tokenizer.decode
        self._context: list[int] = []  # of the last text: they decide on the next one's space
        self._pending: list[int] = []  # tokens whose text is not out yet
        for token in prompt[-CONTEXT:]:
            self.push(token)

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; "" if it completes none."""
        self._pending.append(token_id)
        return self.flush(whole_characters=True)

    def flush(self, whole_characters: bool = False) -> str:
        """The text that is left after the last token. With `whole_characters` it is "" if that ends
        within a character: the next token may complete it."""
        before = self._decode(self._context)
        text = self._decode(self._context + self._pending)[len(before) :]
        if not text or whole_characters and text.endswith(HALF_A_CHARACTER):
            return ""
        self._context = self._pending
        self._pending = []
        return text


class TokenEvent(Protocol):
    """The part of an engine.Event that a Writer reads."""

    @property
    def token(self) -> int: ...
    @property
    def finish_reason(self) -> str | None: ...


class Writer:
    """Writes the text of a request, up to the first of the strings `stops`.

    Text that may be the beginning of a stop string is held back until that is certain."""

    def __init__(self, stream: TextStream, stops: Sequence[str]) -> None:
        self.stream = stream
        self.stops = stops
        self.held = ""  # text that is not certain
        self.length = 0  # in characters, with `held`

    def push(self, event: TokenEvent) -> tuple[str, str | None]:
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


def byte_tokenizer() -> Tokenizer:
    """One token per byte, its id the byte's value: for models with random weights.

    Such a model also yields larger ids, which are shown as boxes."""
    box = "□".encode()

    def encode(text: str) -> list[int]:
        return list(text.encode(errors="replace"))

    def decode(ids: Sequence[int]) -> str:
        spelled = b"".join(bytes([i]) if i < 256 else box for i in ids)
        return spelled.decode(errors="replace")

    return Tokenizer(encode, decode, longest_token=1)


class TextFile(Schema):
    """The part of config.json and generation_config.json that is about text."""

    eos_token_id: NonNegativeInt | list[NonNegativeInt] | None = None


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint. Raises FileNotFoundError, or ValueError for a broken file."""
    check_type("directory", directory, str | Path, "that of a checkpoint")
    stop_token_ids = _read_stop_tokens(Path(directory))
    paths = [Path(directory, name) for name in TOKENIZER_FILES]
    paths = [path for path in paths if path.is_file()]
    if not paths:
        name = one_line(str(directory))
        raise FileNotFoundError(f"{name}: has no tokenizer.json. Put the checkpoint's there")
    path = paths[0]
    if path.suffix == ".model":
        return _load_llama3(path, stop_token_ids)
    with refusing(f"{path}: not a tokenizer"):
        inner = tokenizers.Tokenizer.from_file(str(path))
        for text in ("", SOME_TEXT):  # some broken files only show here
            inner.decode(inner.encode(text).ids)
    inner.no_truncation()  # a prompt is never cut or filled up silently
    inner.no_padding()

    def encode(text: str) -> list[int]:
        with refusing(f"text={shorten(text)}: this tokenizer cannot encode it"):
            # unlike inner.encode() this lets other threads run meanwhile
            return inner.encode_batch_fast([text])[0].ids

    return Tokenizer(encode, inner.decode, frozenset(stop_token_ids), _longest_token(inner))


def _longest_token(inner: tokenizers.Tokenizer) -> int | None:
    """The most characters of a text that one token stands for, or None if that is not certain.

    It is certain for byte-level BPE as of GPT-2 and LLaMA 3, which names a token by one letter for
    each of its bytes. A normalizer may shorten a text, a special token may swallow the spaces
    beside it, and other models may write many characters as one unknown token."""
    if inner.normalizer is not None or not isinstance(inner.model, models.BPE):
        return None
    rules = json.loads(inner.pre_tokenizer.__getstate__()) if inner.pre_tokenizer else {}
    steps = rules.get("pretokenizers", [rules])
    keeps_all = all(step.get("behavior") != "Removed" for step in steps)
    names = [step.get("type") for step in steps]
    if not keeps_all or names[-1] != "ByteLevel" or not KEEPING_STEPS.issuperset(names):
        return None
    if inner.model.continuing_subword_prefix or inner.model.end_of_word_suffix:
        return None
    added_tokens = inner.get_added_tokens_decoder().values()
    vocabulary = inner.get_vocab()
    if any(token.lstrip or token.rstrip for token in added_tokens):
        return None
    if not vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet()):
        return None
    return max(map(len, vocabulary))


def _read_stop_tokens(directory: Path) -> list[int]:
    """The ids that end a text. generation_config.json goes before config.json."""
    stop_token_ids: list[int] = []
    for name in TEXT_FILES:
        path = directory / name
        if not path.is_file():
            continue
        ids = TextFile.read(path).eos_token_id
        if isinstance(ids, int):
            stop_token_ids = [ids]
        elif ids is not None:
            stop_token_ids = ids
    return stop_token_ids


def load_chat(directory: str | Path | None) -> Callable[[list[Message]], str]:
    """A function from messages to the prompt that a checkpoint's chat template makes of them.

    Without a checkpoint each message is a line. Raises ValueError for broken files. The function
    raises ValueError if there is no template, and where the template raises anything."""
    if directory is None:
        return _lines_of_chat
    from jinja2 import TemplateSyntaxError
    from transformers import PreTrainedTokenizerFast

    path = Path(directory, TOKENIZER_CONFIG_FILE)
    if path.is_file():
        Schema.read(path)  # it is a JSON object
    with refusing(f"{directory}: no tokenizer can be made of {' and '.join(CHAT_FILES)}"):
        inner = PreTrainedTokenizerFast.from_pretrained(directory)
    template = inner.chat_template
    if template is not None:
        check_type(f"{path}: chat_template", template, str | dict, "text")

    def apply_template(messages: list[Message]) -> str:
        with refusing(f"{directory}: chat template"):
            prompt: Any = inner.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        return prompt

    try:
        apply_template([{"role": "user", "content": SOME_TEXT}])
    except ValueError as error:
        if isinstance(error.__cause__, TemplateSyntaxError | RecursionError):
            raise  # any other error may be about these messages
    return apply_template


def _lines_of_chat(messages: list[Message]) -> str:
    lines = [f"{message['role']}: {message['content']}\n" for message in messages]
    return "".join(lines) + "assistant:"


def _load_llama3(path: Path, stop_token_ids: list[int]) -> Tokenizer:
    """LLaMA 3's own tokenizer. Raises ValueError for a file of another kind."""
    try:
        ranks = _read_ranks(path)
    except ValueError as error:
        advice = "put the checkpoint's tokenizer.json next to its config.json"
        raise ValueError(
            f"{path}: not a list of byte-pair ranks as of LLaMA 3: {advice}"
        ) from error
    specials = _llama3_specials(first_id=len(ranks))
    begin_of_text = specials["<|begin_of_text|>"]
    longest_token = max(map(len, [*ranks, *specials]))
    inner = tiktoken.Encoding(
        "llama3", pat_str=LLAMA3_WORDS, mergeable_ranks=ranks, special_tokens=specials
    )

    def encode(text: str) -> list[int]:
        return [begin_of_text, *inner.encode(text, allowed_special="all")]

    def decode(ids: Sequence[int]) -> str:
        return inner.decode([i for i in ids if i < len(ranks)])

    if not stop_token_ids:
        stop_token_ids = [specials["<|end_of_text|>"], specials["<|eot_id|>"]]
    return Tokenizer(encode, decode, frozenset(stop_token_ids), longest_token)


def _read_ranks(path: Path) -> dict[bytes, int]:
    """The rank of each byte pair, from a file whose lines have base64 and a rank."""
    lines = [line.split() for line in path.read_bytes().splitlines() if line]
    ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    if sorted(ranks.values()) != list(range(len(lines))) or not ranks.keys() >= BYTES:
        raise ValueError("ranks must go from 0 by one, and every byte must have one")
    return ranks


def _llama3_specials(first_id: int) -> dict[str, int]:
    """The ids of LLaMA 3's 256 special tokens, of which the first is `first_id`."""
    specials: dict[str, int] = {}
    reserved = 0
    for i in range(256):
        name = LLAMA3_SPECIALS.get(i)
        if name is None:
            name = f"reserved_special_token_{reserved}"
            reserved += 1
        specials[f"<|{name}|>"] = first_id + i
    return specials
