"""Text <-> token ids: a checkpoint's own tokenizer, or bytes for a model with random weights.

Read first: chat.py. Read next: streams.py."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import tiktoken
import tokenizers
from pydantic import Field, NonNegativeFloat, NonNegativeInt
from tokenizers import models, pre_tokenizers

from pretrained.chat import Chat, ChatTemplate, Message, check_messages, lines_of_chat
from pretrained.checkpoints import (
    ADDED_FILES,
    GENERATION_FILE,
    TEMPLATE_FILE,
    TEXT_FILES,
    TOKENIZER_FILES,
)
from pretrained.checks import (
    check_type,
    one_line,
    refusing,
    shorten,
)
from pretrained.gguf_files import is_gguf, read_gguf
from pretrained.gguf_tokenizer import LLAMA3_WORDS, read_text
from pretrained.schema import Schema

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast  # a model with random weights needs none

BYTES = {bytes([i]) for i in range(256)}
KEEPING_STEPS = {"ByteLevel", "Digits", "Split"}  # cut a text and drop nothing
BYTE_TOKEN = r"<0x([0-9A-F]{2})>"  # of a rare character, in sentencepiece's vocabularies
SOME_TEXT = "Tell me 1 story, né?\n"
MAX_NORMALIZED = 10_000  # characters that a normalizer may make of it

# The letters by which byte-level BPE names bytes (GPT-2's encoder.py, bytes_to_unicode).
UNPRINTABLE = [byte for byte in range(256) if not chr(byte).isprintable() or byte == ord(" ")]
BYTE_OF_LETTER = {chr(byte): byte for byte in range(256) if byte not in UNPRINTABLE}
BYTE_OF_LETTER.update((chr(256 + i), byte) for i, byte in enumerate(UNPRINTABLE))

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

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that the text has at least. It is found without encoding the text."""
        if self.longest_token is None:
            return 0
        return -(-len(text) // self.longest_token)

    def is_silent(self, token_id: int) -> bool:
        """Whether a token, special or unknown, has no text. (A space has none at the beginning.)"""
        return self.decode([token_id, token_id]) == ""


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
    ids: int | list[int] = []
    for path in (directory / name for name in TEXT_FILES):
        if path.is_file():
            end = TextFile.read(path).eos_token_id
            ids = ids if end is None else end
    return [ids] if isinstance(ids, int) else ids


class TemplateFile(Schema):
    """chat_template.json, where processors of old have their template."""

    chat_template: str


def _read_template(directory: str | Path) -> tuple[str | None, Mapping[str, str]]:
    """(chat template of a checkpoint, the special tokens that it may write), None without one."""
    if is_gguf(directory):
        text = read_text(read_gguf(directory))
        return text.chat_template, text.special_tokens
    fast = _load_fast(Path(directory, TOKENIZER_FILES[0]))
    template = fast.chat_template
    file = Path(directory, TEMPLATE_FILE)
    if template is not None:
        check_type(f"{directory}: chat_template", template, str | dict, "text")
        with refusing(f"{directory}: chat template"):
            template = fast.get_chat_template()  # of several, the default
    elif file.is_file():
        template = TemplateFile.read(file).chat_template
    return template, fast.special_tokens_map


def load_chat(directory: str | Path | None) -> Chat:
    """A function from messages to the prompt that a checkpoint's chat template makes of them.

    Without a checkpoint each message is a line. Raises ValueError for broken files. The function
    raises ValueError for messages that make no sense, if there is no template, and where the
    template raises anything."""
    if directory is None:
        return lines_of_chat
    problem = f"{directory}: chat template"
    source, special_tokens = _read_template(directory)
    template: ChatTemplate | None = None
    if source is not None:
        with refusing(problem):
            template = ChatTemplate(source, special_tokens)

    def apply_template(messages: list[Message]) -> str:
        messages = check_messages(messages, source or "")
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
        "llama3", pat_str=LLAMA3_WORDS.patterns[0], mergeable_ranks=ranks, special_tokens=specials
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
    reserved = count()
    names = (
        LLAMA3_SPECIALS.get(i) or f"reserved_special_token_{next(reserved)}" for i in range(256)
    )
    return {f"<|{name}|>": first_id + i for i, name in enumerate(names)}
