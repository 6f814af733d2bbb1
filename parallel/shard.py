"""The part of a model.GPT that one rank has: some of its layers, some heads and columns of each.

A rank multiplies with its columns of preproj and its rows of postproj, or of ffn_ln1 and ffn_ln2;
then all ranks of a stage add up what they have (Shoeybi et al. 2019, §3). The first stage has the
embeddings, the last the head. Read first: model.py, pretrained/sharding.py. Next: engine.py."""

import time
from dataclasses import replace

import torch
import torch.distributed as dist

from model import GPT, init_weight
from pretrained.sharding import Slices, local_config, slices_of, views


class Shard(GPT):
    """What one of Ranks has of a GPT of the geometry `whole`, with the weights that one has.
    `config` is the local geometry, with the whole vocabulary. Raises ValueError as local_config."""

    def __init__(self, whole, ranks, device="cpu", dtype=torch.float32, seed=0):
        self.rows = -(-whole.vocab_size // ranks.tp)  # of the vocabulary; the last may have fewer
        tied = whole.tie_embeddings and ranks.pp == 1
        own = replace(local_config(whole, ranks.tp, ranks.pp), tie_embeddings=tied)
        super().__init__(replace(own, vocab_size=self.rows), "meta", dtype, seed=None)
        self.config, self.whole, self.ranks = own, whole, ranks
        self.stages, self.summing_s = ranks.pp, 0.0  # seconds, in sums so far
        if ranks.stage > 0:
            self.token_embedding = self.position_embedding = None
        if ranks.stage < ranks.pp - 1:
            self.head = None
        for block in self.blocks:
            block.sum_up = self.sum_up
        self.to_empty(device=device)
        if seed is not None:
            self.init_weights(torch.Generator(device).manual_seed(seed))

    def init_weights(self, generator: torch.Generator) -> None:
        """Fill the parameters with what a whole GPT would have there: all of its weights are made,
        one by one, and each rank keeps its slices."""
        local = {}
        for name, parameter in self.named_parameters():
            slices = self.slices_of(name)
            local[slices.source] = parameter, slices
        for name, empty in self.whole_model().named_parameters():
            weights = torch.empty(empty.shape, dtype=self.dtype, device=self.device)
            init_weight(name, weights, self.whole.n_layer, generator)
            if name not in local:
                continue
            parameter, slices = local[name]
            for view, (start, end) in zip(views(parameter, slices), slices.ranges, strict=True):
                view.copy_(weights.narrow(slices.dim, start, end - start))

    def whole_model(self) -> GPT:
        """A GPT of the whole geometry, without memory."""
        return GPT(self.whole, "meta", self.dtype, seed=None)

    def slices_of(self, name: str) -> Slices:
        """The slices of the whole model that the parameter `name` holds."""
        ranks = self.ranks
        shape = self.get_parameter(name).shape
        return slices_of(self.whole, ranks.tp, ranks.pp, ranks.rank, name, shape)

    def sum_up(self, x):
        """The sum over all ranks of this stage, in place."""
        if self.ranks.tp > 1:
            began = time.perf_counter()
            dist.all_reduce(x, group=self.ranks.tp_group)
            self.summing_s += time.perf_counter() - began
        return x

    def embed(self, batch):
        """As GPT.embed: each row comes from the rank that has the token."""
        own = batch.tokens - self.rows * self.ranks.part
        here = (own >= 0) & (own < self.rows)
        return self.sum_up(super().embed(batch._replace(tokens=own.where(here, 0))) * here[:, None])

    def logits(self, x, batch):
        """As GPT.logits, on all ranks of the last stage."""
        y = super().logits(x, batch)
        if len(y) and self.ranks.tp > 1:
            parts = [torch.empty_like(y) for _ in range(self.ranks.tp)]
            dist.all_gather(parts, y, group=self.ranks.tp_group)
            y = torch.cat(parts, dim=1)[:, : self.whole.vocab_size]
        return y
