"""GGUF files, as llama.cpp has them: metadata and quantised tensors in one file.

The package gguf reads a file and knows the quantisations. It takes seconds for a vocabulary, so a
file is read once for geometry, weights and tokenizer. Read next: checkpoints.py, which fills a
model; gguf_tokenizer.py."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from config import GPTConfig
from pretrained.presets import ARCHITECTURES

OF_LLAMA_CPP = ("llama", "qwen2", "qwen3")  # of ARCHITECTURES
GGUF_NAMES = {  # llama.cpp's names of our modules, see LLAMA_NAMES in checkpoints.py
    "blocks": "blk",
    "token_embedding": "token_embd",
    "attn_norm": "attn_norm",
    "preproj": "attn_q attn_k attn_v",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "postproj": "attn_output",
    "ffn_norm": "ffn_norm",
    "ffn_ln1": "ffn_gate ffn_up",
    "ffn_ln2": "ffn_down",
    "final_norm": "output_norm",
    "head": "output",
}


@dataclass(frozen=True)
class GGUFFile:
    """What is in a GGUF file."""

    path: str
    metadata: dict[str, Any]
    tensors: list[Any]  # gguf.ReaderTensor, mapped

    def keys(self, prefix: str) -> dict[str, Any]:
        """The metadata whose keys begin with a prefix, without that."""
        keys = [key for key in self.metadata if key.startswith(prefix)]
        return {key.removeprefix(prefix): self.metadata[key] for key in keys}


def check_supported(path: str, option: str, value: Any, supported: Collection[Any]) -> None:
    """Raise ValueError if the value of an option is not one of those that are supported here."""
    if value not in supported:
        names = ", ".join(map(str, supported))
        raise ValueError(f"{path}: {option}={value}: must be one of {names}")


def is_gguf(path: str | Path) -> bool:
    """Whether this is the name of a GGUF file."""
    return str(path).endswith(".gguf")


@lru_cache(maxsize=1)
def read_gguf(path: str) -> GGUFFile:
    """The metadata and tensors of a file. Raises as `gguf.GGUFReader`."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    return GGUFFile(path, metadata, reader.tensors)


def gguf_config(file: GGUFFile) -> GPTConfig:
    """The geometry. Raises ValueError, naming what is not computed here."""
    architecture = file.metadata["general.architecture"]
    check_supported(file.path, "general.architecture", architecture, OF_LLAMA_CPP)
    keys = file.keys(f"{architecture}.")
    positions = keys["context_length"]
    fields = {
        "vocab_size": len(file.metadata["tokenizer.ggml.tokens"]),
        "n_layer": keys["block_count"],
        "n_head": keys["attention.head_count"],
        "n_kv_head": keys.get("attention.head_count_kv"),
        "head_dim": keys.get("attention.key_length"),
        "n_embd": keys["embedding_length"],
        "n_inner": keys["feed_forward_length"],
        "max_positions": min(positions, keys.get("attention.sliding_window") or positions),
        "norm_eps": keys["attention.layer_norm_rms_epsilon"],
        "rope_theta": keys.get("rope.freq_base", 10000.0),
        "tie_embeddings": "output.weight" not in [tensor.name for tensor in file.tensors],
    }
    config = GPTConfig(**ARCHITECTURES[architecture] | fields)
    computed = {
        "rope.scaling.type": "none",
        "rope.dimension_count": config.head_dim,
        "attention.value_length": config.head_dim,
    }
    for key, value in computed.items():
        check_supported(file.path, key, keys.get(key, value), [value])
    return config


def gguf_weights(file: GGUFFile, config: GPTConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors by their names in the file."""
    from gguf import dequantize

    heads = {}
    if file.metadata["general.architecture"] == "llama":
        heads = {"attn_q": config.n_head, "attn_k": config.n_kv_head}
    weights: dict[str, Tensor] = {}
    for tensor in file.tensors:
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type), dtype=dtype)
        module = tensor.name.split(".")[-2]
        if module in heads:
            weight = in_own_order(weight, heads[module])
        weights[tensor.name] = weight
    return weights


def in_own_order(weight: Tensor, n_head: int) -> Tensor:
    """The rows of queries or keys as rotate_ needs them. llama.cpp's converter permutes them for
    its own rotation: row `half * d + i` of a head of 2 * d rows is stored at `2 * i + half`."""
    rows = weight.unflatten(0, (n_head, -1, 2))  # (n_head, d, 2, n_embd)
    return rows.transpose(1, 2).reshape(weight.shape)
