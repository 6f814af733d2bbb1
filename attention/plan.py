"""What all attention backends share: which pages to copy, and the mask of a chunk.

Read first: the top of attention/__init__.py. Read next: sdpa.py."""

import torch

SIXTEEN_BITS = (torch.float16, torch.bfloat16)


def page_rows(pages, cache):
    """What `gather` needs to copy these pages: a tensor whose last dimension goes with `pages`."""
    rows = torch.tensor(pages, pin_memory=cache.data.is_cuda)  # or the copy would wait
    rows = rows.to(cache.data.device, non_blocking=True)
    if cache.layer(0)[0].is_contiguous():  # head h keeps page p in row h * cache.pages + p
        heads = torch.arange(cache.data.shape[2], device=rows.device)
        rows = heads[:, None] * cache.pages + rows
    return rows


def gather(x, rows, page_size):
    """Copy pages of a layer's keys or values side by side, as rows of a matrix: the fastest way.

    x (n_kv_head, slots, head_dim), in either layout of KVCache; `rows` are those of n pages
    -> (n_kv_head, n * page_size, head_dim)."""
    heads, _, head_dim = x.shape
    if x.is_contiguous():
        x = x.view(-1, page_size * head_dim)
        return x.index_select(0, rows.flatten()).view(heads, -1, head_dim)
    x = x.transpose(0, 1).view(-1, page_size * heads * head_dim)
    return x.index_select(0, rows).view(-1, heads, head_dim).transpose(0, 1)


def staircase(queries, past, group, dtype, device="cpu", beyond=0):
    """The mask of every possible chunk, as an additive bias: 0 = attend, -inf = do not.

    Shape (queries * group, past + queries + beyond). Row i * group + g belongs to query i; column
    `past + i` is the query's own key. A chunk of `length` at `start` sees the window

        staircase[: length * group, past - start : past + length]

    of it, which is SARATHI's Figure 6 for that chunk, every row repeated for the group's heads. The
    window may go on to the right, up to `beyond` more columns: keys that nobody attends to."""
    column = torch.arange(past + queries + beyond, device=device) - past
    row = torch.arange(queries, device=device).repeat_interleave(group)
    bias = torch.zeros(len(row), len(column), dtype=dtype, device=device)
    return bias.masked_fill_(column > row[:, None], float("-inf"))
