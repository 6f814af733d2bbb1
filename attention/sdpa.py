"""Attention by torch's own kernel, one call for each chunk: a backend for any device."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attention.plan import SIXTEEN_BITS, AttentionPlan, gather, page_rows, staircase
from kv_cache import KVCache, ModelShape, Span

QUERY_BLOCK = 128  # queries per call on a CPU: a block skips the keys that lie after its last query


class Block(NamedTuple):
    """Some queries of a chunk, computed by one call of the kernel."""

    first_row: int  # of q
    queries: int
    keys: int  # read from the first on
    mask: Tensor | None  # (queries * group, keys), or of the last keys; None: all are seen


class ChunkPlan(NamedTuple):
    """A chunk, and where its request's keys are."""

    first_slot: int  # of the cache, if the pages follow each other
    gather_rows: Tensor | None  # else the page_rows to copy
    blocks: list[Block]


class SDPA:
    """One `scaled_dot_product_attention` call per chunk, or per block of QUERY_BLOCK queries of it.

    Each call reads exactly the keys it needs. Pages that follow each other are read in place, as a
    view of the cache. Scattered ones are first copied side by side, one request at a time. The
    query heads that share a KV head are folded into the query length, (length, n_kv_head, group,
    head_dim) -> (n_kv_head, length * group, head_dim), so keys are read once per group."""

    def __init__(
        self, config: ModelShape, cache: KVCache, past: int | None = None, key_block: int = 1
    ) -> None:
        """cpu_matmul.py masks only a chunk's own keys (past=0), and reads keys in whole blocks."""
        self.cache = cache
        self.page_size = cache.page_size
        self.device = cache.data.device
        self.group = config.n_head // config.n_kv_head
        self.key_block = key_block
        self.past = cache.max_len if past is None else past
        if self.device.type == "cuda":  # cuDNN plans for each new number of keys: for each decode
            torch.backends.cuda.enable_cudnn_sdp(False)
        self.bias = staircase(
            queries=min(QUERY_BLOCK, cache.max_len),
            past=self.past,
            group=self.group,
            dtype=cache.data.dtype,
            device=self.device,
            beyond=key_block - 1,
        )

    def plan(self, spans: Sequence[Span]) -> AttentionPlan:
        """The plan of a batch, see plan.AttentionBackend."""
        return partial(self.attend, self.plan_chunks(spans))

    def plan_chunks(self, spans: Sequence[Span]) -> list[ChunkPlan]:
        """Where the keys of each span are, and its blocks."""
        tables = [span.used_pages(self.page_size) for span in spans]
        scattered = [table != list(range(table[0], table[0] + len(table))) for table in tables]
        copied_pages = []
        for table, is_scattered in zip(tables, scattered, strict=True):
            if is_scattered:
                copied_pages += table
        rows = page_rows(copied_pages, self.cache) if copied_pages else None  # all in one transfer
        chunks = []
        first_row = copied = 0
        for span, table, is_scattered in zip(spans, tables, scattered, strict=True):
            gather_rows = None
            if rows is not None and is_scattered:
                gather_rows = rows[..., copied : copied + len(table)].flatten()
                copied += len(table)
            blocks = self.plan_blocks(span, first_row, len(table) * self.page_size)
            chunks.append(ChunkPlan(table[0] * self.page_size, gather_rows, blocks))
            first_row += span.length
        return chunks

    def plan_blocks(self, span: Span, first_row: int, max_keys: int) -> list[Block]:
        """The blocks of a span whose first query is row `first_row` of q."""
        key_block = self.key_block if span.length > 1 else 1
        blocks = []
        for start in range(span.start, span.end, QUERY_BLOCK):
            queries = min(QUERY_BLOCK, span.end - start)
            keys = -(-(start + queries) // key_block) * key_block  # rounded up to whole blocks
            keys = min(keys, max_keys)
            blocks.append(Block(first_row, queries, keys, self.mask(start, queries, keys)))
            first_row += queries
        return blocks

    def mask(self, start: int, length: int, keys: int) -> Tensor | None:
        """The additive mask of queries start, start + 1, ... over the first `keys` keys.

        (length * group, keys), or fewer columns: of the last keys, if all queries see those before.
        None if they see all."""
        if start + 1 == keys:
            return None
        first = self.past - start  # the column of key 0
        window = self.bias[: length * self.group, max(0, first) : first + keys]
        return window.contiguous() if window.is_cuda else window  # CUDA wants aligned rows

    def attend(
        self,
        chunks: Sequence[ChunkPlan],
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attention of these chunks, written to `out` if given; shapes as in AttentionPlan."""
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        head_dim = q.shape[2]
        for chunk in chunks:
            if chunk.gather_rows is None:
                k, v = keys[:, chunk.first_slot :], values[:, chunk.first_slot :]
            else:
                k = gather(keys, chunk.gather_rows, self.page_size)
                v = gather(values, chunk.gather_rows, self.page_size)
            for row, n, read, mask in chunk.blocks:
                folded = q[row : row + n].view(n, -1, self.group, head_dim).transpose(0, 1)
                folded = folded.reshape(-1, n * self.group, head_dim)
                y = self.attend_block(folded, k[:, :read], v[:, :read], mask)
                # y (n_kv_head, n * group, head_dim)
                y = y.unflatten(1, (n, self.group)).transpose(0, 1)
                out[row : row + n].view(n, -1, self.group, head_dim).copy_(y)
        return out

    def attend_block(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """q (n_kv_head, rows, head_dim), k and v (n_kv_head, keys, head_dim), `mask` as made above
        -> (n_kv_head, rows, head_dim)"""
        # torch's CPU kernel is slow for one query in 16 bits: two of them take half the time
        twice = q.shape[1] == 1 and q.dtype in SIXTEEN_BITS and not q.is_cuda
        rows = q.expand(-1, 2, -1) if twice else q
        y = F.scaled_dot_product_attention(rows[None], k[None], v[None], attn_mask=mask)[0]
        return y[:, :1] if twice else y
