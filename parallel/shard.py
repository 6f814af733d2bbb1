"""The part of a model.GPT that one rank has: some of its layers, some heads and columns of each.

A rank multiplies with its columns of preproj and its rows of postproj, or of ffn_ln1 and ffn_ln2;
then all ranks of a stage add up their products (Shoeybi et al. 2019, §3). The first stage has the
embeddings, the last the head. Read first: model.py, pretrained/sharding.py. Read next:
stages.py."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from config import GPTConfig
from model import GPT, FlatBatch
from parallel.ranks import Ranks
from pretrained.checkpoints import read_weights
from pretrained.random_weights import init_weight
from pretrained.sharding import local_config, name_in_whole_model, slices_of


class Shard(GPT):
    """The part of a GPT of the geometry `whole_config` that one of several ranks has.

    Its random weights are those of the whole GPT of this seed. `config` is the local geometry, with
    the whole vocabulary. Raises ValueError as local_config."""

    def __init__(
        self,
        whole_config: GPTConfig,
        ranks: Ranks,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int | None = 0,
    ) -> None:
        local = local_config(whole_config, ranks.tp, ranks.pp)
        # embedding and head of a pipeline are on different ranks
        local = replace(local, tie_embeddings=whole_config.tie_embeddings and ranks.pp == 1)
        # the rows of the vocabulary that a rank has; the last may have fewer
        self.rows = -(-whole_config.vocab_size // ranks.tp)
        super().__init__(replace(local, vocab_size=self.rows), "meta", dtype, seed=None)
        self.config = local
        self.whole_config = whole_config
        self.ranks = ranks
        if ranks.stage > 0:
            self.token_embedding = self.position_embedding = None
        if ranks.stage < ranks.pp - 1:
            self.head = None
        for block in self.blocks:
            block.postproj.register_forward_hook(self._sum_up_output)
            block.ffn_ln2.register_forward_hook(self._sum_up_output)
        self.allocate(device)
        if seed is not None:
            self.init_weights(torch.Generator(device).manual_seed(seed))

    def init_weights(self, generator: torch.Generator) -> None:
        """Fill the parameters with what a whole GPT would have there: all of its weights are
        made."""
        for source, empty in self.whole_model().named_parameters():
            weights = torch.empty(empty.shape, dtype=self.dtype, device=self.device)
            init_weight(source, weights, self.whole_config.n_layer, generator)
            self.fill(source, weights)

    def load(self, name: str, device: torch.device | str) -> None:
        """Take memory, and fill it from a checkpoint. Raises as read_weights."""
        self.allocate(device)
        for source, weights in read_weights(self.whole_model(), name):
            self.fill(source, weights)

    def fill(self, source: str, weights: Tensor) -> None:
        """Keep this rank's slices of a whole GPT's parameter, if it has any."""
        ranks = self.ranks
        for name, parameter in self.named_parameters():
            if name_in_whole_model(self.whole_config, name, ranks.pp, ranks.stage) != source:
                continue
            slices = slices_of(self.whole_config, source, weights, ranks.tp, ranks.part)
            rows = torch.cat(slices)
            parameter[: len(rows)] = rows
            parameter[len(rows) :] = 0

    def whole_model(self) -> GPT:
        """A GPT of the whole geometry, without memory."""
        return GPT(self.whole_config, "meta", self.dtype, seed=None)

    def sum_up(self, x: Tensor) -> Tensor:
        """The sum over all ranks of this stage, in place."""
        if self.ranks.tp > 1:
            dist.all_reduce(x, group=self.ranks.tp_group)
        return x

    def _sum_up_output(self, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return self.sum_up(output)

    def embed(self, batch: FlatBatch) -> Tensor:
        """As GPT.embed: each row comes from the rank that has the token."""
        row = batch.tokens - self.rows * self.ranks.part  # of this rank's part of the embedding
        is_here = (row >= 0) & (row < self.rows)
        x = super().embed(batch._replace(tokens=row.where(is_here, 0)))
        return self.sum_up(x * is_here[:, None])

    def logits(self, x: Tensor, batch: FlatBatch) -> Tensor:
        """As GPT.logits, on all ranks of the last stage."""
        y = super().logits(x, batch)
        if len(y) == 0 or self.ranks.tp == 1:
            return y
        parts = [torch.empty_like(y) for _ in range(self.ranks.tp)]
        dist.all_gather(parts, y, group=self.ranks.tp_group)
        return torch.cat(parts, dim=1)[:, : self.whole_config.vocab_size]


def stages_of(model: GPT) -> int:
    """How many times the layers that a model has here make up the whole model."""
    return model.ranks.pp if isinstance(model, Shard) else 1
