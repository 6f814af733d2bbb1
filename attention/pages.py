"""What kernels need to know of pages: block tables, or where pages are copied side by side."""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from attention.plan import to_device
from kv_cache import KVCache
from request import Chunk


def padded_tables(chunks: Sequence[Chunk], page_size: int, max_len: int) -> list[list[int]]:
    """The block tables of some chunks, padded with 0 to the pages of max_len tokens: the same width
    in every iteration."""
    width = -(-max_len // page_size)
    tables = []
    for chunk in chunks:
        pages = chunk.used_pages(page_size)
        padding = [0] * (width - len(pages))
        tables.append(pages + padding)
    return tables


def page_rows(pages: Sequence[int], cache: KVCache) -> Tensor:
    """The rows that `gather` copies for these pages. The last dimension goes with `pages`."""
    rows = to_device(pages, cache.data.device)
    keys, _ = cache.layer(0)
    if keys.is_contiguous():  # head h keeps page p in row h * cache.pages + p
        heads = torch.arange(len(keys), device=rows.device)
        rows = heads[:, None] * cache.pages + rows
    return rows


def rows_of_scattered(tables: Sequence[list[int]], cache: KVCache) -> list[Tensor | None]:
    """The page_rows of each block table, None if its pages follow each other."""
    scattered = []
    for table in tables:
        first = table[0]
        is_in_place = table == list(range(first, first + len(table)))
        scattered.append([] if is_in_place else table)
    if not any(scattered):
        return [None] * len(tables)
    rows = page_rows([*chain.from_iterable(scattered)], cache)  # all in one transfer
    parts = rows.split([len(table) for table in scattered], dim=-1)
    return [part.flatten() if part.numel() else None for part in parts]


def gather(x: Tensor, rows: Tensor, page_size: int) -> Tensor:
    """Copy pages of a layer's keys or values side by side, as rows of a matrix: the fastest way.

    x (n_kv_head, slots, head_dim), in either layout of KVCache; `rows` are those of n pages
    -> (n_kv_head, n * page_size, head_dim)."""
    heads, _, head_dim = x.shape
    if x.is_contiguous():
        matrix = x.view(-1, page_size * head_dim)
        copied = matrix.index_select(0, rows.flatten())
        return copied.view(heads, -1, head_dim)
    matrix = x.transpose(0, 1).view(-1, page_size * heads * head_dim)
    copied = matrix.index_select(0, rows)
    return copied.view(-1, heads, head_dim).transpose(0, 1)
