"""Attention by torch's own kernel, one call for each chunk: the plain backend, for any device.

Read first: plan.py. Read next: model.py."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attention.plan import AttentionPlan, staircase, to_device
from config import GPTConfig
from kv_cache import KVCache
from request import Chunk


class Call(NamedTuple):
    """One call of the kernel: some rows of q, and the keys that they see."""

    rows: slice  # of q
    slots: slice | Tensor  # of the cache, where these keys are
    mask: Tensor | None  # (rows * group, keys); None: all are seen


class SDPA:
    """One `scaled_dot_product_attention` call for each chunk, over its past and itself.

    The query heads that share a KV head are folded into the query length, (n, n_kv_head, group,
    head_dim) -> (n_kv_head, n * group, head_dim): keys are read once per group."""

    def __init__(self, config: GPTConfig, cache: KVCache) -> None:
        self.page_size = cache.page_size
        self.device = cache.data.device
        self.dtype = cache.data.dtype
        self.group = config.n_head // config.n_kv_head

    def plan(self, chunks: Sequence[Chunk]) -> AttentionPlan:
        """The plan of a batch, see plan.AttentionBackend."""
        calls = []
        first_row = 0
        for chunk in chunks:
            rows = slice(first_row, first_row + chunk.length)
            first_row = rows.stop
            slots = self.slots(chunk, chunk.end)
            mask = None
            if chunk.length > 1:
                mask = staircase(chunk.length, chunk.start, self.group, self.dtype, self.device)
            calls.append(Call(rows, slots, mask))
        return partial(self.attend, calls)

    def slots(self, chunk: Chunk, keys: int) -> slice | Tensor:
        """Where the first `keys` keys of a chunk's request are. A slice, if they lie in a row."""
        pages = chunk.pages[: -(-keys // self.page_size)]
        first = pages[0]
        if pages == list(range(first, first + len(pages))):
            return slice(first * self.page_size, first * self.page_size + keys)
        first_slots = to_device(pages, self.device)[:, None] * self.page_size
        slots = first_slots + torch.arange(self.page_size, device=self.device)
        return slots.flatten()[:keys]

    def attend(self, calls: Sequence[Call], q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """The attention of these calls; shapes as in AttentionPlan."""
        q = q.unflatten(1, (-1, self.group))  # (num_tokens, n_kv_head, group, head_dim)
        out = q.new_empty(q.shape)
        for rows, slots, mask in calls:
            folded = q[rows].transpose(0, 1).flatten(1, 2)  # (n_kv_head, n * group, head_dim)
            k = read(keys, slots)
            v = read(values, slots)
            y = F.scaled_dot_product_attention(folded[None], k[None], v[None], attn_mask=mask)[0]
            out[rows] = y.unflatten(1, (-1, self.group)).transpose(0, 1)
        return out.flatten(1, 2)


def read(x: Tensor, slots: slice | Tensor) -> Tensor:
    """The keys or values of some slots, (n_kv_head, keys, head_dim): a view, or a copy if they are
    scattered."""
    return x[:, slots] if isinstance(slots, slice) else x.index_select(1, slots)
