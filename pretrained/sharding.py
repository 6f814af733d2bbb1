"""Which slices of a model's weights one of several ranks has: Megatron-LM's (Shoeybi et al. 2019).

Tensor parallelism divides each layer among `tp` ranks: the columns of preproj and ffn_ln1, the rows
of postproj and ffn_ln2, the vocabulary of embedding and head. Pipeline parallelism divides the
layers among `pp` stages. Rank r is part r % tp of stage r // tp.

Read next: checkpoints.py, which loads these slices, and parallel/shard.py, which computes with
them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from config import GPTConfig

if TYPE_CHECKING:  # a simulation divides geometries alone
    from torch import Tensor


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


def name_in_whole_model(config: GPTConfig, name: str, pp: int, stage: int) -> str:
    """The name in a whole model of this geometry of a parameter that one of `pp` stages has.

    Tied embeddings are one parameter there, although a first and a last stage each have one."""
    if config.tie_embeddings and name == "head.weight":
        return "token_embedding.weight"
    parts = name.split(".")
    if parts[0] == "blocks":
        first_layer = stage * (config.n_layer // pp)
        parts[1] = str(first_layer + int(parts[1]))
    return ".".join(parts)


def slices_of(config: GPTConfig, name: str, weight: Tensor, tp: int, part: int) -> list[Tensor]:
    """The rows of a whole model's parameter that part `part` of `tp` has, in their order. If its
    own parameter has more rows, zeros follow.

        parameter                   a part has
        preproj                     its heads' queries, then their keys, then their values
        ffn_ln1                     its share of gate, then of up; of GPT-2 there is only one
        postproj, ffn_ln2 (weight)  the columns for what its preproj or ffn_ln1 makes
        postproj, ffn_ln2 (bias)    all of it in part 0, nothing elsewhere: parts are added up
        token_embedding, head       its share of the vocabulary; the last may have fewer
        all others                  all of it
    """
    module, kind = name.split(".")[-2:]
    if module == "preproj":
        kv_rows = config.n_kv_head * config.head_dim
        queries, keys, values = weight.split([len(weight) - 2 * kv_rows, kv_rows, kv_rows])
        kv_parts = min(tp, config.n_kv_head)  # if these are fewer, several ranks have the same
        kv_part = part * kv_parts // tp
        return [
            queries.chunk(tp)[part],
            keys.chunk(kv_parts)[kv_part],
            values.chunk(kv_parts)[kv_part],
        ]
    if module == "ffn_ln1":
        return [matrix.chunk(tp)[part] for matrix in weight.split(config.n_inner)]
    if module in ("postproj", "ffn_ln2"):
        if kind == "weight":
            return [weight.chunk(tp, dim=1)[part]]
        return [weight if part == 0 else weight[:0]]
    if module in ("token_embedding", "head"):
        rows = -(-config.vocab_size // tp)
        return [weight[rows * part : rows * (part + 1)]]
    return [weight]
