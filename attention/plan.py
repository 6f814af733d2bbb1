"""The interface of the attention backends, and what they share: copies of pages, and a mask.

Read first: the top of attention/__init__.py. Read next: sdpa.py."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kv_cache import KVCache, Span

SIXTEEN_BITS = (torch.float16, torch.bfloat16)


class AttentionPlan(Protocol):
    """Attention for one batch: made once, called in each layer."""

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q (num_tokens, n_head, head_dim), the rows of all spans one after the other;
        keys and values (n_kv_head, slots, head_dim), one layer of the cache -> as q."""
        ...


class AttentionBackend(Protocol):
    """Makes plans for batches that are computed in one cache."""

    page_size: int
    device: torch.device

    def plan(self, spans: Sequence[Span]) -> AttentionPlan:
        """The plan of a batch. Spans of one token come first, in the order of the rows of q."""
        ...


def page_rows(pages: Sequence[int], cache: KVCache) -> Tensor:
    """The rows that `gather` copies for these pages. The last dimension goes with `pages`."""
    rows = torch.tensor(pages, pin_memory=cache.data.is_cuda)  # or the copy would wait
    rows = rows.to(cache.data.device, non_blocking=True)
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


def staircase(
    queries: int,
    past: int,
    group: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    beyond: int = 0,
) -> Tensor:
    """One mask from which that of every chunk is cut. It is added to scores: 0 attends, -inf hides.

    Shape (queries * group, past + queries + beyond). Row i * group + g belongs to query i; column
    `past + i` is the query's own key. A chunk of `length` at `start` uses the window

        staircase[: length * group, past - start : past + length]

    and up to `beyond` more columns: keys that no query attends to. It is SARATHI's Figure 6. With
    past = 4 and group = 1, the chunk of length 3 at start 2 (o: 0, .: -inf) is

        key     -   -   0   1   2   3   4   -
        query 2 o   o [ o   o   o   .   . ] .
        query 3 o   o [ o   o   o   o   . ] .
        query 4 o   o [ o   o   o   o   o ] .
    """
    column = torch.arange(past + queries + beyond, device=device) - past
    row = torch.arange(queries, device=device).repeat_interleave(group)
    bias = torch.zeros(len(row), len(column), dtype=dtype, device=device)
    return bias.masked_fill_(column > row[:, None], float("-inf"))
