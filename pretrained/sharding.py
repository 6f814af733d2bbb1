"""Which slices of a model's weights one of several ranks has: Megatron-LM's (Shoeybi et al. 2019).

Tensor parallelism divides each layer among `tp` ranks: the columns of preproj and ffn_ln1, the rows
of postproj and ffn_ln2, the vocabulary of embedding and head. Pipeline parallelism divides the
layers among `pp` stages. Rank r is part r % tp of stage r // tp.

Read next: checkpoints.py, which loads these slices, and parallel/shard.py, which computes with
them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from config import GPTConfig

if TYPE_CHECKING:  # a simulation divides geometries alone
    from torch import Tensor

Range = tuple[int, int]  # from a start to an end, which is not in it


class Slices(NamedTuple):
    """The part of a whole model's parameter that a rank's parameter holds."""

    source: str  # the name of the parameter in the whole model
    dim: int  # the dimension that is divided
    ranges: list[Range]  # in that dimension of the whole one; in the rank's they follow each other


def local_config(config: GPTConfig, tp: int, pp: int = 1) -> GPTConfig:
    """The geometry of one rank's part. Where KV heads are fewer than ranks, they are repeated.
    Raises ValueError, naming what does not divide."""
    for name, size, field in (("tp", tp, "n_head"), ("tp", tp, "n_inner"), ("pp", pp, "n_layer")):
        count = getattr(config, field)
        if size < 1 or count % size:
            raise ValueError(f"{name}={size}: must divide {field}={count}")
    n_kv_head = config.n_kv_head
    if n_kv_head % tp and tp % n_kv_head:
        raise ValueError(f"tp={tp}: must divide n_kv_head={n_kv_head}, or be a multiple of it")
    return replace(
        config,
        n_layer=config.n_layer // pp,
        n_head=config.n_head // tp,
        n_kv_head=max(1, n_kv_head // tp),
        n_inner=config.n_inner // tp,
    )


def slices_of(
    config: GPTConfig, tp: int, pp: int, rank: int, name: str, shape: Sequence[int]
) -> Slices:
    """The slices of a whole model of this geometry that a rank's parameter holds.

    `name` and `shape` are those of the parameter on the rank. If it is larger than its slices,
    zeros follow.

        parameter                   dim   a rank has
        preproj                      0    its heads' queries, then their keys, then their values
        ffn_ln1                      0    its share of gate, then of up; of GPT-2 there is only one
        postproj, ffn_ln2 (weight)   1    the inputs that its preproj or ffn_ln1 makes
        postproj, ffn_ln2 (bias)     0    all of it in part 0, nothing elsewhere: parts are added up
        token_embedding, head        0    its share of the vocabulary; the last may have fewer
        all others                   0    all of it
    """
    stage, part = divmod(rank, tp)
    source = _name_in_whole_model(config, name, first_layer=stage * (config.n_layer // pp))
    module, kind = name.split(".")[-2:]
    if module == "preproj":
        return Slices(source, 0, _qkv_ranges(config, tp, part))
    if module == "ffn_ln1":
        return Slices(source, 0, _gate_up_ranges(config.n_inner, shape[0] * tp, tp, part))
    if module in ("postproj", "ffn_ln2") and kind == "weight":
        return Slices(source, 1, [_share(shape[1] * tp, tp, part)])
    if module in ("postproj", "ffn_ln2"):
        return Slices(source, 0, [(0, shape[0])] if part == 0 else [])
    if module in ("token_embedding", "head"):
        return Slices(source, 0, [_vocabulary_range(config.vocab_size, shape[0], part)])
    return Slices(source, 0, [(0, shape[0])])


def _name_in_whole_model(config: GPTConfig, name: str, first_layer: int) -> str:
    """The name of a rank's parameter in the whole model, where its stage begins at `first_layer`.
    Tied embeddings are one parameter there."""

    def layer_in_whole_model(match: re.Match[str]) -> str:
        return str(first_layer + int(match[0]))

    if config.tie_embeddings and name == "head.weight":
        return "token_embedding.weight"
    return re.sub(r"(?<=blocks\.)\d+", layer_in_whole_model, name)


def _share(size: int, tp: int, part: int, start: int = 0) -> Range:
    """Part `part` of `tp` equal parts of the range that has this size and start."""
    return start + size * part // tp, start + size * (part + 1) // tp


def _qkv_ranges(config: GPTConfig, tp: int, part: int) -> list[Range]:
    """The rows of queries, keys and values. KV heads are repeated if they are fewer than ranks."""
    q_rows = config.n_head * config.head_dim
    kv_rows = config.n_kv_head * config.head_dim
    local_kv_rows = max(1, config.n_kv_head // tp) * config.head_dim
    first_kv_head = config.n_kv_head * part // tp
    key_start = q_rows + first_kv_head * config.head_dim
    value_start = key_start + kv_rows
    return [
        _share(q_rows, tp, part),
        (key_start, key_start + local_kv_rows),
        (value_start, value_start + local_kv_rows),
    ]


def _gate_up_ranges(n_inner: int, rows: int, tp: int, part: int) -> list[Range]:
    """The share of each matrix of n_inner rows among all `rows`: gate and up, or the only one."""
    return [_share(n_inner, tp, part, start) for start in range(0, rows, n_inner)]


def _vocabulary_range(vocab_size: int, rows: int, part: int) -> Range:
    """The tokens of a part that has room for `rows` of them."""
    return min(vocab_size, rows * part), min(vocab_size, rows * (part + 1))


def views(parameter: Tensor, slices: Slices) -> list[Tensor]:
    """A view of a rank's parameter for each of its ranges. What is behind them becomes 0."""
    sizes = [end - start for start, end in slices.ranges]
    padding = parameter.shape[slices.dim] - sum(sizes)
    *parts, zeros = parameter.split([*sizes, padding], slices.dim)
    zeros.zero_()
    return parts
