"""GGUF files, as llama.cpp has them: metadata and quantised tensors in one file.

The header is read here and not by the package gguf: its reader takes seconds for a vocabulary and
believes every size. The package knows the quantisations. Their blocks become float32 as rows are
read. Read next: checkpoints.py, which fills a model from them; gguf_tokenizer.py."""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor

from config import GPTConfig
from pretrained.checks import one_line, shorten
from pretrained.presets import ARCHITECTURES
from pretrained.schema import Schema, naming

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEYS = 2**16  # and tensors
MAX_ITEMS = 2**22  # of an array: tokens, merges
MAX_TEXT = 2**24  # bytes of a text
MAX_DIMENSIONS = 4
ALIGNMENT = 32  # of tensors, where general.alignment says nothing
SCALARS = {  # number of a type in the file -> its letter in struct
    **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f"},
    **{7: "?", 10: "Q", 11: "q", 12: "d"},
}
TEXT = 8
ARRAY = 9

QUANTISATIONS = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
)
OUTPUT = "output.weight"  # not there if the embeddings are tied
PERMUTED = r"blk\.\d+\.attn_(q|k)\.weight"  # by llama.cpp, of the architecture llama
OF_LLAMA_CPP = ("llama", "qwen2", "qwen3")  # of ARCHITECTURES


class GeometryKeys(Schema):
    """The metadata that begins with the name of the architecture, as "llama.block_count"."""

    n_layer: PositiveInt = Field(alias="block_count")
    n_head: PositiveInt = Field(alias="attention.head_count")
    n_kv_head: PositiveInt | None = Field(None, alias="attention.head_count_kv")
    head_dim: PositiveInt | None = Field(None, alias="attention.key_length")
    n_embd: PositiveInt = Field(alias="embedding_length")
    n_inner: PositiveInt = Field(alias="feed_forward_length")
    max_positions: PositiveInt = Field(alias="context_length")
    norm_eps: PositiveFloat = Field(alias="attention.layer_norm_rms_epsilon")
    rope_theta: PositiveFloat = Field(10000.0, alias="rope.freq_base")


class OtherKeys(Schema):
    """Metadata of which one value only is computed here, and sizes that are there twice."""

    vocab_size: PositiveInt | None = None
    value_length: PositiveInt | None = Field(None, alias="attention.value_length")
    rotated: PositiveInt | None = Field(None, alias="rope.dimension_count")
    sliding_window: PositiveInt | None = Field(None, alias="attention.sliding_window")
    scaling: Literal["none"] | None = Field(None, alias="rope.scaling.type")
    old_scaling: Literal[1] | None = Field(None, alias="rope.scale_linear")
    experts: Literal[0] | None = Field(None, alias="expert_count")


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor in a GGUF file. Indexing it reads those rows, in float32."""

    stored: np.ndarray  # (rows, bytes of a row), or (bytes,) of a vector
    shape: list[int]
    quantisation: GGMLQuantizationType
    row_order: np.ndarray | None = None  # where each row is, if they are permuted

    def get_shape(self) -> list[int]:
        """Its shape, (out, in) of a matrix."""
        return self.shape

    def get_dtype(self) -> str:
        """The dtype that it is read in."""
        return "F32"

    def __getitem__(self, slices: Any) -> Tensor:
        from gguf import quants

        rows, *columns = slices if isinstance(slices, tuple) else (slices,)
        blocks = self.stored
        if len(self.shape) == 1:
            columns = [rows]
        else:
            blocks = blocks[rows if self.row_order is None else self.row_order[rows]]
            columns = [slice(None), *columns]
        numbers = quants.dequantize(blocks, self.quantisation)
        return torch.from_numpy(np.require(numbers, requirements="W"))[tuple(columns)]


@dataclass(frozen=True)
class GGUFFile:
    """What is in a GGUF file. `tensors` have the names that llama.cpp gives them."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    def config(self) -> GPTConfig:
        """The geometry. Raises ValueError for what is missing, and what is not computed here."""
        architecture = self.text("general.architecture", OF_LLAMA_CPP)
        prefix = f"{architecture}."
        geometry = GeometryKeys.of(self.path, prefix, self.metadata)
        other = OtherKeys.of(self.path, prefix, self.metadata)
        fields = ARCHITECTURES[architecture] | geometry.model_dump(exclude_none=True)
        tokens = self.metadata.get("tokenizer.ggml.tokens", ())
        fields["vocab_size"] = other.vocab_size or len(tokens)
        fields["tie_embeddings"] = OUTPUT not in self.tensors
        if other.sliding_window:  # it changes nothing up to its length
            fields["max_positions"] = min(geometry.max_positions, other.sliding_window)
        with naming(self.path):
            config = GPTConfig(**fields)
            for key in ("attention.value_length", "rope.dimension_count"):
                size = self.metadata.get(prefix + key, config.head_dim)
                if size != config.head_dim:
                    allowed = f"must be that of keys, {config.head_dim}"
                    raise ValueError(f"{prefix}{key}={size}: {allowed}")
        return config

    def text(self, key: str, allowed: Collection[str]) -> str:
        """The text of this key. Raises ValueError unless it is one of `allowed`."""
        value = self.metadata.get(key)
        if not isinstance(value, str) or value not in allowed:
            names = ", ".join(allowed)
            raise ValueError(f"{self.path}: {key}={shorten(value)}: must be one of {names}")
        return value

    def weights(self) -> dict[str, GGUFTensor]:
        """The tensors. Rows that llama.cpp permuted for its rotation are read in their own order.

        The permutation puts row `half * d + i` of a head of 2 * d rows at `2 * i + half`."""
        weights = dict(self.tensors)
        if self.metadata.get("general.architecture") != "llama":
            return weights
        config = self.config()
        heads_of = {"q": config.n_head, "k": config.n_kv_head}
        for name, tensor in self.tensors.items():
            match = re.fullmatch(PERMUTED, name)
            n_rows = tensor.shape[0]
            if match and n_rows % (2 * heads_of[match[1]]) == 0:  # else it fits no parameter
                places = np.arange(n_rows).reshape(heads_of[match[1]], -1, 2)
                weights[name] = replace(tensor, row_order=places.swapaxes(1, 2).reshape(-1))
        return weights


class Cursor:
    """Reads a file's header from its beginning on. Raises ValueError where the file ends first."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.place = 0

    def take(self, size: int) -> bytes:
        """The next bytes."""
        end = self.place + size
        if end > len(self.data):
            raise ValueError(f"has {len(self.data):,} bytes, its header says at least {end:,}")
        taken = self.data[self.place : end]
        self.place = end
        return taken

    def numbers(self, letter: str, count: int) -> list[Any]:
        """So many numbers of a type of struct."""
        _check_count("numbers in an array", count, MAX_ITEMS)
        return list(struct.unpack(f"<{count}{letter}", self.take(count * struct.calcsize(letter))))

    def number(self, letter: str) -> int:
        """One number."""
        return self.numbers(letter, 1)[0]

    def text(self) -> str:
        """A text, after its length."""
        length = self.number("Q")
        _check_count("bytes in a text", length, MAX_TEXT)
        return self.take(length).decode()

    def value(self, kind: int) -> Any:
        """The value of a key. Arrays of arrays are no metadata of models that are known here."""
        if kind == TEXT:
            return self.text()
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind != ARRAY:
            raise ValueError(f"a value of type {kind}, must be one of 0 … 12")
        item_kind = self.number("I")
        count = self.number("Q")
        if item_kind in SCALARS:
            return self.numbers(SCALARS[item_kind], count)
        if item_kind != TEXT:
            raise ValueError(f"an array of type {item_kind}, must be of numbers or texts")
        _check_count("texts in an array", count, MAX_ITEMS)
        return [self.text() for _ in range(count)]


def _check_count(things: str, count: int, limit: int) -> None:
    if count > limit:
        raise ValueError(f"its header says {count:,} {things}, must be at most {limit:,}")


def is_gguf(path: str | Path) -> bool:
    """Whether this is the name of a GGUF file."""
    return str(path).endswith(SUFFIX)


def read_gguf(path: str | Path) -> GGUFFile:
    """The metadata and tensors of a file. The tensors are mapped, not read. Raises
    FileNotFoundError, or ValueError of one line for a file that is no whole GGUF file."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    state = path.stat()
    return _read(path, state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=1)
def _read(path: Path, size: int, changed_ns: int) -> GGUFFile:
    """read_gguf. Config, tokenizer, chat template and weights come from one reading."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ValueError(f"{path}: not a GGUF file: it does not begin with GGUF")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return _read_header(path, data)
    except (ValueError, OverflowError, struct.error) as error:
        raise ValueError(f"{path}: not a whole GGUF file: {one_line(str(error))[:200]}") from error


def _read_header(path: Path, data: mmap.mmap) -> GGUFFile:
    cursor = Cursor(data)
    cursor.take(len(MAGIC))
    version = cursor.number("I")
    if version not in VERSIONS:
        raise ValueError(f"version {version}, must be one of {VERSIONS}")
    n_tensors = cursor.number("Q")
    n_keys = cursor.number("Q")
    _check_count("tensors", n_tensors, MAX_KEYS)
    _check_count("keys", n_keys, MAX_KEYS)
    metadata: dict[str, Any] = {}
    for _ in range(n_keys):
        key = cursor.text()
        if key in metadata:
            raise ValueError(f"{one_line(key)[:100]} is there twice")
        metadata[key] = cursor.value(cursor.number("I"))
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment={shorten(alignment)}: must be a positive number")
    entries = [Entry.read(cursor) for _ in range(n_tensors)]
    first = -(-cursor.place // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for entry in entries:
        if entry.name in tensors:
            raise ValueError(f"{one_line(entry.name)[:100]} is there twice")
        tensors[entry.name] = map_tensor(data, entry, first)
    return GGUFFile(path, metadata, tensors)


class Entry(NamedTuple):
    """What the header says of a tensor."""

    name: str
    shape: list[int]  # (out, in) of a matrix
    kind: int  # the number of its quantisation
    offset: int  # from the first tensor

    @classmethod
    def read(cls, cursor: Cursor) -> Entry:
        """The next entry."""
        name = cursor.text()
        n_dimensions = cursor.number("I")
        _check_count("dimensions of a tensor", n_dimensions, MAX_DIMENSIONS)
        shape = cursor.numbers("Q", n_dimensions)
        return cls(name, shape[::-1], kind=cursor.number("I"), offset=cursor.number("Q"))


def map_tensor(data: mmap.mmap, entry: Entry, first: int) -> GGUFTensor:
    """The tensor of an entry. Raises ValueError if it cannot be read, or is not in the file."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    name = one_line(entry.name)[:100]
    names = {kind.value: kind.name for kind in GGMLQuantizationType}
    kind_name = names.get(entry.kind, entry.kind)
    if kind_name not in QUANTISATIONS:
        allowed = ", ".join(QUANTISATIONS)
        raise ValueError(f"{name} is of type {kind_name}, must be one of {allowed}")
    quantisation = GGMLQuantizationType(entry.kind)
    block_size, block_bytes = GGML_QUANT_SIZES[quantisation]
    if not entry.shape or entry.shape[-1] % block_size:
        raise ValueError(f"{name} {entry.shape}: rows must be whole blocks of {block_size}")
    row_bytes = entry.shape[-1] // block_size * block_bytes
    size = prod(entry.shape[:-1]) * row_bytes
    start = first + entry.offset
    if start + size > len(data):
        raise ValueError(f"has {len(data):,} bytes, with {name} at least {start + size:,}")
    stored = np.frombuffer(data, np.uint8, size, start).reshape([*entry.shape[:-1], row_bytes])
    return GGUFTensor(stored, entry.shape, quantisation)
