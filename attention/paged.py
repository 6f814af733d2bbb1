"""Attention by torch's own kernel over small pages. Read first: sdpa.py."""

from collections.abc import Sequence

import torch
from torch import Tensor

from attention.plan import to_device
from attention.sdpa import SDPA, ChunkPlan
from kv_cache import KVCache
from request import Chunk


class PagedSDPA(SDPA):
    """Pages that follow each other are read in place, as by SDPA. Scattered ones are first copied
    side by side, one request at a time."""

    def plan_chunks(self, chunks: Sequence[Chunk]) -> list[ChunkPlan]:
        """As of SDPA, and which pages are copied."""
        plans = super().plan_chunks(chunks)
        tables = [chunk.used_pages(self.page_size) for chunk in chunks]
        scattered = [table != list(range(table[0], table[0] + len(table))) for table in tables]
        copied_pages = []
        for table, is_scattered in zip(tables, scattered, strict=True):
            if is_scattered:
                copied_pages += table
        if not copied_pages:
            return plans
        rows = page_rows(copied_pages, self.cache)  # all in one transfer
        first = 0
        for i, (table, is_scattered) in enumerate(zip(tables, scattered, strict=True)):
            if is_scattered:
                gather_rows = rows[..., first : first + len(table)].flatten()
                plans[i] = plans[i]._replace(gather_rows=gather_rows)
                first += len(table)
        return plans

    def read(self, plan: ChunkPlan, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """As of SDPA, or a copy."""
        if plan.gather_rows is None:
            return super().read(plan, keys, values)
        k = gather(keys, plan.gather_rows, self.page_size)
        v = gather(values, plan.gather_rows, self.page_size)
        return k, v


def page_rows(pages: Sequence[int], cache: KVCache) -> Tensor:
    """The rows that `gather` copies for these pages. The last dimension goes with `pages`."""
    rows = to_device(pages, cache.data.device)
    if cache.layer(0)[0].is_contiguous():  # head h keeps page p in row h * cache.pages + p
        heads = torch.arange(cache.data.shape[2], device=rows.device)
        rows = heads[:, None] * cache.pages + rows
    return rows


def gather(x: Tensor, rows: Tensor, page_size: int) -> Tensor:
    """Copy pages of a layer's keys or values side by side, as rows of a matrix: the fastest way.

    x (n_kv_head, slots, head_dim), in either layout of KVCache; `rows` are those of n pages
    -> (n_kv_head, n * page_size, head_dim)."""
    heads, _, head_dim = x.shape
    if x.is_contiguous():
        x = x.view(-1, page_size * head_dim)
        return x.index_select(0, rows.flatten()).view(heads, -1, head_dim)
    x = x.transpose(0, 1).view(-1, page_size * heads * head_dim)
    return x.index_select(0, rows).view(-1, heads, head_dim).transpose(0, 1)
