"""Text <-> token ids: a checkpoint's own tokenizer, or bytes for a model with random weights.

A single token may have no text: an emoji may take three, and some tokenizers drop the space before
the first word. So text is streamed as the bytes of tokens, each decoded after the one before, up to
a stop string. Read first: chat.py. Read next: sample.py, which prints the stream."""

from __future__ import annotations

import base64
import codecs
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, Protocol

import tiktoken
import tokenizers
from pydantic import Field, NonNegativeFloat, NonNegativeInt
from tokenizers import models, pre_tokenizers

from errors import (
    check_token_ids,
    check_type,
    check_whole,
    one_line,
    refusing,
    shorten,
)
from pretrained.chat import Chat, ChatTemplate, Message, check_messages, lines_of_chat
from pretrained.checkpoints import (
    ADDED_FILES,
    GENERATION_FILE,
    TEXT_FILES,
    TOKENIZER_FILES,
)
from pretrained.gguf_files import is_gguf, read_gguf
from pretrained.gguf_tokenizer import read_text
from pretrained.schema import Schema
from request import Completion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast  # a model with random weights needs none

LONGEST_CHARACTER = 4  # in bytes, and so in tokens
BYTES = {bytes([i]) for i in range(256)}
KEEPING_STEPS = {"ByteLevel", "Digits", "Split"}  # cut a text and drop nothing
HALF_A_CHARACTER = "\ufffd"  # how bytes that are no text yet are decoded
BYTE_TOKEN = r"<0x([0-9A-F]{2})>"  # of a rare character, in sentencepiece's vocabularies
SOME_TEXT = "Tell me 1 story, né?\n"
MAX_NORMALIZED = 10_000  # characters that a normalizer may make of it
utf8_decoder = codecs.getincrementaldecoder("utf-8")

# The letters by which byte-level BPE names bytes (GPT-2's encoder.py, bytes_to_unicode).
UNPRINTABLE = [byte for byte in range(256) if not chr(byte).isprintable() or byte == ord(" ")]
BYTE_OF_LETTER = {chr(byte): byte for byte in range(256) if byte not in UNPRINTABLE}
BYTE_OF_LETTER.update((chr(256 + i), byte) for i, byte in enumerate(UNPRINTABLE))

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


def _no_bytes(token_id: int) -> None:
    """The `token_bytes` of a tokenizer whose tokens are whole characters."""


class Tokenizer(NamedTuple):
    """Text to token ids and back.

    `encode` raises ValueError for a text that it cannot encode. While a checkpoint's tokenizer
    encodes, other threads run."""

    encode: Callable[[str], list[int]]  # BOS comes first, if there is one
    decode: Callable[[Sequence[int]], str]  # special tokens have no text
    stop_token_ids: frozenset[int] = frozenset()  # these end a text
    longest_token: int | None = None  # in characters; None if a token may stand for any number
    encode_chat: Callable[[str], list[int]] | None = None  # adds no BOS; None: as `encode`
    token_bytes: Callable[[int], bytes | None] = _no_bytes  # of one that may end in a character
    special_tokens: Mapping[str, int] = {}  # how they are written in a prompt

    def check(self) -> None:
        """Raise ValueError for a field of another type."""
        check_type("tokenizer: encode", self.encode, Callable, "a function")
        check_type("tokenizer: decode", self.decode, Callable, "a function")
        check_token_ids("tokenizer: stop_token_ids", self.stop_token_ids)
        if self.longest_token is not None:
            check_whole("tokenizer: longest_token", self.longest_token, minimum=1)

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that the text has at least. It is found without encoding the text."""
        if self.longest_token is None:
            return 0
        return -(-len(text) // self.longest_token)

    def is_silent(self, token_id: int) -> bool:
        """Whether a token, special or unknown, has no text. (A space has none at the beginning.)"""
        return self.decode([token_id, token_id]) == ""


def decode_output(tokenizer: Tokenizer, tokens: Sequence[int], prompt_len: int) -> str:
    """The text of tokens[prompt_len:], as a TextStream writes it."""
    stream = TextStream(tokenizer, tokens[:prompt_len])
    return "".join([stream.push(token) for token in tokens[prompt_len:]]) + stream.flush()


def write_text(
    completion: Completion,
    tokenizer: Tokenizer,
    stop_token_ids: Collection[int],
    stops: Sequence[str],
) -> None:
    """Set the text of a completion: its output, without a stop token, up to the first stop string.

    If the tokenizer fails, it ends this completion with an error, and no others."""
    output = completion.tokens
    if completion.finish_reason == "stop" and output[-1] in stop_token_ids:
        output = output[:-1]
    prompt = list(completion.prompt)
    try:
        with refusing("the tokenizer failed"):
            text = decode_output(tokenizer, [*prompt, *output], len(prompt))
    except ValueError as error:
        completion.finish_reason = "error"
        completion.error = str(error)
        return
    completion.text = text[: min([text.find(stop) for stop in stops if stop in text], default=None)]


def has_stop(tokenizer: Tokenizer, output: Sequence[int], stops: Sequence[str]) -> bool:
    """Whether a stop string is in the text of the last tokens, as many as may hold one.

    True if the tokenizer fails: then `write_text` says why."""
    longest = max(len(stop) for stop in stops)
    first = len(output)
    text = ""
    try:
        with refusing("the tokenizer failed"):
            while first > 0 and len(text) <= longest:
                first = max(0, first - longest - 1)  # some tokens may have no text
                text = tokenizer.decode(output[first:])
    except ValueError:
        return True
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
        known = self._tokenizer.token_bytes(token_id) if HALF_A_CHARACTER in text else None
        if known is not None:
            return known
        self._context = [token_id]
        return text.encode()


def _goes_on(beginning: bytes, byte: bytes) -> bool:
    """Whether a character that begins with these bytes may go on with another one."""
    try:
        utf8_decoder("strict").decode(beginning + byte)
    except UnicodeDecodeError:
        return False
    return True


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

    def token_bytes(token_id: int) -> bytes | None:
        return bytes([token_id]) if token_id < 256 else None

    return Tokenizer(encode, decode, longest_token=1, token_bytes=token_bytes)


class TextFile(Schema):
    """The part of config.json and generation_config.json that is about text."""

    eos_token_id: NonNegativeInt | list[NonNegativeInt] | None = None


class SamplingFile(Schema):
    """The part of generation_config.json that is about sampling, None where it says nothing."""

    temperature: NonNegativeFloat | None = None
    top_k: NonNegativeInt | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    repetition_penalty: float | None = None  # which is not computed here


def read_sampling(directory: str | Path | None) -> SamplingFile:
    """What a checkpoint's publisher recommends. Raises ValueError for a broken file."""
    path = Path(directory or "", GENERATION_FILE)
    return SamplingFile.read(path) if directory and path.is_file() else SamplingFile()


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint. Raises FileNotFoundError, or ValueError for a broken file."""
    check_type("directory", directory, str | Path, "that of a checkpoint")
    if is_gguf(directory):
        text = read_text(read_gguf(directory))
        return _tokenizer_of(text.tokenizer, text.stop_token_ids, Path(directory))
    stop_token_ids = _read_stop_tokens(Path(directory))
    paths = [Path(directory, name) for name in TOKENIZER_FILES]
    paths = [path for path in paths if path.is_file()]
    if not paths:
        name = one_line(str(directory))
        raise FileNotFoundError(f"{name}: has no tokenizer.json. Put the checkpoint's there")
    path = paths[0]
    if path.suffix == ".model":
        return _load_llama3(path, stop_token_ids)
    fast = _load_fast(path)
    end_of_text = fast.eos_token_id
    if not stop_token_ids and isinstance(end_of_text, int):
        stop_token_ids = [end_of_text]
    return _tokenizer_of(fast.backend_tokenizer, stop_token_ids, path)


def _tokenizer_of(
    inner: tokenizers.Tokenizer, stop_token_ids: Sequence[int], path: Path
) -> Tokenizer:
    """The Tokenizer of what the library has read. Raises ValueError if it does not work."""
    inner.no_truncation()  # a prompt is never cut or filled up silently
    inner.no_padding()
    with refusing(f"{path}: not a tokenizer"):
        normalizer = inner.normalizer
        if normalizer and len(normalizer.normalize_str(SOME_TEXT)) > MAX_NORMALIZED:
            raise ValueError(f"it makes over {MAX_NORMALIZED:,} characters of a short text")
        for text in ("", SOME_TEXT):  # some broken files only show here
            inner.decode(inner.encode(text).ids)

    def encode(text: str, add_special_tokens: bool = True) -> list[int]:
        with refusing(f"text={shorten(text)}: this tokenizer cannot encode it"):
            # unlike inner.encode() this lets other threads run meanwhile
            return inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def token_bytes(token_id: int) -> bytes | None:
        return _spelled_bytes(inner.id_to_token(token_id) or "")

    added_tokens = inner.get_added_tokens_decoder().items()
    return Tokenizer(
        encode=encode,
        decode=inner.decode,
        stop_token_ids=frozenset(stop_token_ids),
        longest_token=_longest_token(inner),
        encode_chat=partial(encode, add_special_tokens=False),
        token_bytes=token_bytes,
        special_tokens={token.content: i for i, token in added_tokens if token.special},
    )


def _spelled_bytes(token: str) -> bytes | None:
    """The bytes that a token of a vocabulary spells, if it is no text."""
    match = re.fullmatch(BYTE_TOKEN, token)
    if match:
        return bytes.fromhex(match[1])
    spelled = [BYTE_OF_LETTER[letter] for letter in token if letter in BYTE_OF_LETTER]
    return bytes(spelled) if len(spelled) == len(token) else None


def _load_fast(path: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of tokenizer.json, with the tokens that the files beside it add.

    Raises ValueError for a broken file."""
    from transformers import PreTrainedTokenizerFast

    files = [file for file in map(path.with_name, ADDED_FILES) if file.is_file()]
    for file in files:
        Schema.read(file)  # it is a JSON object
    with refusing(f"{path}: no tokenizer can be made of it, with {', '.join(ADDED_FILES)}"):
        return PreTrainedTokenizerFast.from_pretrained(path.parent)


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


def load_chat(directory: str | Path | None) -> Chat:
    """A function from messages to the prompt that a checkpoint's chat template makes of them.

    Without a checkpoint each message is a line. Raises ValueError for broken files. The function
    raises ValueError for messages that make no sense, if there is no template, and where the
    template raises anything."""
    if directory is None:
        return lines_of_chat
    problem = f"{directory}: chat template"
    template: ChatTemplate | None = None
    if is_gguf(directory):
        text = read_text(read_gguf(directory))
        if text.chat_template is not None:
            with refusing(problem):
                template = ChatTemplate(text.chat_template, text.special_tokens)
    else:
        fast = _load_fast(Path(directory, TOKENIZER_FILES[0]))
        if fast.chat_template is not None:
            check_type(f"{directory}: chat_template", fast.chat_template, str | dict, "text")
            with refusing(problem):
                template = ChatTemplate(fast.get_chat_template(), fast.special_tokens_map)

    def apply_template(messages: list[Message]) -> str:
        messages = check_messages(messages, template.source if template else "")
        with refusing(problem):
            if template is None:
                raise LookupError("chat_template is not set")
            return template.render(messages)

    try:
        apply_template([{"role": "user", "content": SOME_TEXT}])
    except ValueError as error:
        if isinstance(error.__cause__, OverflowError | TimeoutError | RecursionError):
            raise  # any other error may be about these messages
    return apply_template


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
        return [begin_of_text, *encode_chat(text)]

    def encode_chat(text: str) -> list[int]:
        return inner.encode(text, allowed_special="all")

    def decode(ids: Sequence[int]) -> str:
        return inner.decode([i for i in ids if i < len(ranks)])

    if not stop_token_ids:
        stop_token_ids = [specials["<|end_of_text|>"], specials["<|eot_id|>"]]
    return Tokenizer(
        encode=encode,
        decode=decode,
        stop_token_ids=frozenset(stop_token_ids),
        longest_token=longest_token,
        encode_chat=encode_chat,
        token_bytes=inner.decode_single_token_bytes,
        special_tokens=specials,
    )


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
