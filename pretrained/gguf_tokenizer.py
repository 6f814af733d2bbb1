"""The tokenizer of a GGUF file, made of its metadata as llama.cpp reads it.

`tokenizer.ggml.pre` names how a text is cut into words before bytes are merged. Of llama.cpp's
names those are here whose rules are regular expressions of a few lines (llama-vocab.cpp). Another
name is an error, not a guess. Read first: gguf_files.py. Read next: tokenizers.py."""

from dataclasses import dataclass
from typing import Literal

from pydantic import Field, NonNegativeInt
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
)

from pretrained.checks import refusing
from pretrained.gguf_files import GGUFFile
from pretrained.schema import Schema

PREFIX = "tokenizer.ggml."
CONTROL = 3  # types of tokens: this one has no text
USER_DEFINED = 4  # is never cut, and has its text


@dataclass(frozen=True)
class Words:
    """How a text is cut before bytes are merged: by each pattern in turn."""

    patterns: tuple[str, ...]
    add_bos: bool = False  # unless the metadata says so
    ignore_merges: bool = False  # a word that is a token is that token


GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
MODERN_WORDS = (  # %s has the digits
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_WORDS = Words((MODERN_WORDS % r"\p{N}{1,3}",), add_bos=True, ignore_merges=True)
QWEN2_WORDS = Words((MODERN_WORDS % r"\p{N}",))
DIGITS_ALONE = Words((r"\p{N}", GPT2_WORDS))
PRE_TOKENIZERS = {
    "gpt-2": Words((GPT2_WORDS,)),
    "smollm": DIGITS_ALONE,
    "starcoder": DIGITS_ALONE,
    "llama-bpe": LLAMA3_WORDS,
    "llama3": LLAMA3_WORDS,
    "llama-v3": LLAMA3_WORDS,
    "qwen2": QWEN2_WORDS,
}
MODELS = {"gpt2": "byte-level BPE"}  # tokenizer.ggml.model


class TokenizerKeys(Schema):
    """The metadata that begins with "tokenizer.ggml."."""

    tokens: list[str] = Field(min_length=1)
    merges: list[str]
    token_type: list[int] = []
    bos_token_id: NonNegativeInt | None = None
    eos_token_id: NonNegativeInt | None = None
    eot_token_id: NonNegativeInt | None = None
    add_bos_token: bool | None = None
    add_eos_token: Literal[False] | None = None
    add_space_prefix: Literal[False] | None = None


@dataclass(frozen=True)
class GGUFText:
    """What a GGUF file says about text."""

    tokenizer: Tokenizer
    stop_token_ids: list[int]
    special_tokens: dict[str, str]  # as a chat template calls them
    chat_template: str | None


def read_text(file: GGUFFile) -> GGUFText:
    """The tokenizer and chat template of a file. Raises ValueError, naming the key, for metadata
    that is missing, wrong or unknown."""
    file.text(f"{PREFIX}model", MODELS)
    rules = PRE_TOKENIZERS[file.text(f"{PREFIX}pre", PRE_TOKENIZERS)]
    keys = TokenizerKeys.of(file.path, PREFIX, file.metadata)
    _check(f"{file.path}: {PREFIX}", keys)
    template = file.metadata.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise ValueError(f"{file.path}: tokenizer.chat_template: must be a text")
    with refusing(f"{file.path}: no tokenizer can be made of it"):
        tokenizer = _make(keys, rules)
    ids = {"bos_token": keys.bos_token_id, "eos_token": keys.eos_token_id}
    stops = [keys.eos_token_id, keys.eot_token_id]
    return GGUFText(
        tokenizer=tokenizer,
        stop_token_ids=[token_id for token_id in stops if token_id is not None],
        special_tokens={name: keys.tokens[i] for name, i in ids.items() if i is not None},
        chat_template=template,
    )


def _check(place: str, keys: TokenizerKeys) -> None:
    """Raise ValueError for numbers that do not fit the vocabulary."""
    size = len(keys.tokens)
    if len(set(keys.tokens)) < size:
        raise ValueError(f"{place}tokens: must not hold a token twice")
    if keys.token_type and len(keys.token_type) != size:
        count = len(keys.token_type)
        raise ValueError(f"{place}token_type: has {count:,} items, must have {size:,}")
    for name in ("bos_token_id", "eos_token_id", "eot_token_id"):
        token_id = getattr(keys, name)
        if token_id is not None and token_id >= size:
            raise ValueError(f"{place}{name}={token_id}: must be below {size:,}")
    if keys.add_bos_token and keys.bos_token_id is None:
        raise ValueError(f"{place}add_bos_token=True: needs a bos_token_id")
    for merge in keys.merges:
        if merge.count(" ") != 1:
            raise ValueError(f"{place}merges: {merge[:60]!r} must be two tokens and a space")


def _make(keys: TokenizerKeys, rules: Words) -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate(keys.tokens)}
    merges = [(left, right) for left, right in (merge.split(" ") for merge in keys.merges)]
    bpe = models.BPE(vocabulary, merges, ignore_merges=rules.ignore_merges)
    tokenizer = Tokenizer(bpe)
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rules.patterns]
    bytes_step = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, bytes_step])
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(keys.tokens, keys.token_type, strict=False):  # none: all are normal
        if kind in (CONTROL, USER_DEFINED):
            added = AddedToken(token, normalized=False, special=kind == CONTROL)
            tokenizer.add_tokens([added])
    add_bos = rules.add_bos if keys.add_bos_token is None else keys.add_bos_token
    if add_bos and keys.bos_token_id is not None:
        bos = keys.tokens[keys.bos_token_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, keys.bos_token_id)]
        )
    return tokenizer
