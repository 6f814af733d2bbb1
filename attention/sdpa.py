"""Attention by torch's own kernel, one call for each chunk: a backend for any device.

Read first: plan.py. Read next: model.py."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attention.pages import gather, rows_of_scattered
from attention.plan import SIXTEEN_BITS, AttentionPlan, staircase
from config import GPTConfig
from kv_cache import KVCache
from request import Chunk

QUERY_BLOCK = 128  # queries per call on a CPU: a block skips the keys that lie after its last query


class Block(NamedTuple):
    """Some queries of a chunk, computed by one call of the kernel."""

    first_row: int  # of q
    queries: int
    keys: int  # how many are read, from the first on
    mask: Tensor | None  # (queries * group, keys, or only the last of them); None: all are seen


class ChunkPlan(NamedTuple):
    """A chunk, and where its request's keys are."""

    first_slot: int  # of the cache
    gather_rows: Tensor | None  # of scattered pages, which are copied side by side; None: in place
    blocks: list[Block]


class SDPA:
    """One `scaled_dot_product_attention` call per chunk, or per block of QUERY_BLOCK queries of it.

    Each call reads exactly the keys it needs: in place, as a view of the cache, where a request has
    one page, or pages that follow each other. Others are first copied side by side, one request at
    a time. The query heads that share a KV head are folded into the query length, (length,
    n_kv_head, group, head_dim) -> (n_kv_head, length * group, head_dim): keys are read once per
    group."""

    masks_past = True  # whether a mask covers all keys, or only a chunk's own
    key_block = 1  # a chunk reads a multiple of so many keys

    def __init__(self, config: GPTConfig, cache: KVCache) -> None:
        self.cache = cache
        self.page_size = cache.page_size
        self.device = cache.data.device
        self.group = config.n_head // config.n_kv_head
        self.past = cache.max_len if self.masks_past else 0
        if self.device.type == "cuda":  # cuDNN plans for each new number of keys: for each decode
            torch.backends.cuda.enable_cudnn_sdp(False)
        self.bias = staircase(
            queries=min(QUERY_BLOCK, cache.max_len),
            past=self.past,
            group=self.group,
            dtype=cache.data.dtype,
            device=self.device,
            beyond=self.key_block - 1,
        )

    def plan(self, chunks: Sequence[Chunk]) -> AttentionPlan:
        """The plan of a batch, see plan.AttentionBackend."""
        return partial(self.attend, self.plan_chunks(chunks))

    def plan_chunks(self, chunks: Sequence[Chunk]) -> list[ChunkPlan]:
        """Where the keys of each chunk are, and its blocks."""
        tables = [chunk.used_pages(self.page_size) for chunk in chunks]
        scattered_rows = rows_of_scattered(tables, self.cache)
        plans = []
        first_row = 0
        for chunk, table, rows in zip(chunks, tables, scattered_rows, strict=True):
            blocks = self.plan_blocks(chunk, first_row, max_keys=len(table) * self.page_size)
            plans.append(ChunkPlan(table[0] * self.page_size, rows, blocks))
            first_row += chunk.length
        return plans

    def plan_blocks(self, chunk: Chunk, first_row: int, max_keys: int) -> list[Block]:
        """The blocks of a chunk whose first query is row `first_row` of q."""
        key_block = self.key_block if chunk.length > 1 else 1
        blocks = []
        for start in range(chunk.start, chunk.end, QUERY_BLOCK):
            end = min(start + QUERY_BLOCK, chunk.end)
            whole_blocks = -(-end // key_block)
            keys = min(whole_blocks * key_block, max_keys)
            mask = self.mask(start, end - start, keys)
            blocks.append(Block(first_row, end - start, keys, mask))
            first_row += end - start
        return blocks

    def mask(self, start: int, length: int, keys: int) -> Tensor | None:
        """The additive mask of queries start, ..., start + length - 1 over the first `keys` keys.

        It is (length * group, keys), without `masks_past` (length * group, keys - start): all
        queries see the keys before. None if there is nothing to hide."""
        if start + 1 == keys:
            return None
        first = self.past - start  # the column of key 0
        columns = slice(max(0, first), first + keys)
        window = self.bias[: length * self.group, columns]
        return window.contiguous() if window.is_cuda else window  # CUDA wants aligned rows

    def attend(
        self,
        plans: Sequence[ChunkPlan],
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attention of these chunks, written to `out` if given; shapes as in AttentionPlan."""
        if out is None:
            out = q.new_empty(q.shape)
        head_dim = q.shape[2]
        for plan in plans:
            k = self.keys_of(plan, keys)
            v = self.keys_of(plan, values)
            for first_row, n, read, mask in plan.blocks:
                rows = slice(first_row, first_row + n)
                grouped = q[rows].view(n, -1, self.group, head_dim)
                # grouped (n, n_kv_head, group, head_dim)
                folded = grouped.transpose(0, 1).flatten(1, 2)
                y = self.attend_block(folded, k[:, :read], v[:, :read], mask)
                # folded and y (n_kv_head, n * group, head_dim)
                y = y.unflatten(1, (n, self.group)).transpose(0, 1)
                out[rows].view(n, -1, self.group, head_dim).copy_(y)
        return out

    def keys_of(self, plan: ChunkPlan, x: Tensor) -> Tensor:
        """The keys or values of a chunk's request, (n_kv_head, slots, head_dim)."""
        if plan.gather_rows is None:
            return x[:, plan.first_slot :]
        return gather(x, plan.gather_rows, self.page_size)

    def attend_block(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        """q (n_kv_head, rows, head_dim), k and v (n_kv_head, keys, head_dim), `mask` as made above
        -> (n_kv_head, rows, head_dim)"""
        # torch's CPU kernel is slow for one query in 16 bits: two of them take half the time
        twice = q.shape[1] == 1 and q.dtype in SIXTEEN_BITS and not q.is_cuda
        if twice:
            q = q.expand(-1, 2, -1)
        y = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]
        return y[:, :1] if twice else y
