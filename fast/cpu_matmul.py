"""Attention as matrix products, for bfloat16 on a CPU: a backend of attention/.

There a softmax between two products takes a third of the time of torch's fused kernel. Chunks are
computed one by one, as in sdpa.py. Decodes are computed together: each page is read once for all
decodes that share it. Pages with about as many readers form a *group*, which is one product.

    block tables        group of 1 reader       group of 2 readers
    A: pages 3, 7       page 7    page 5        page 3
    B: pages 3, 5       row 0 A   row 1 B       row 2 A, row 3 B

    slot             0: A's page 3   1: A's page 7   2: B's page 3   3: B's page 5
    product_row      2               0               3               1
    owner_slot       of rows 0 to 3: slots 1, 3, 0, 2

A *slot* is a page of a decode, in the order of the block tables. Before the softmax the scores are
brought from rows to slots, so that those of a decode lie side by side; after it, back to rows."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, takewhile
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attention.plan import AttentionPlan, staircase
from attention.sdpa import SDPA, read
from config import GPTConfig
from fast.cpu_blocks import QUERY_BLOCK, blocks_of
from kv_cache import KVCache
from request import Chunk

KEY_BLOCK = 64  # oneDNN compiles a kernel for each shape: keys are read in whole blocks,
PAGE_BLOCK = 16  # and pages that are copied, too

Product = Callable[[Tensor, Tensor], Tensor]


class Block(NamedTuple):
    """Some queries of a chunk, computed by two products."""

    rows: slice  # of q
    keys: int  # how many are read, from the first on
    mask: Tensor | None  # (queries * group, keys from the first query's on); None: all are seen


class ChunkPlan(NamedTuple):
    """A chunk, and where its request's keys are."""

    slots: slice | Tensor  # of the cache
    blocks: list[Block]


class Matmul(SDPA):
    """Chunks one by one; all decodes together, each page once for all of its readers.

    Keys are read in whole KEY_BLOCKs, the last ones behind a mask. The masked keys and values must
    be finite numbers, so the first chunk that writes to a page fills the rest of it with zeros."""

    def __init__(self, config: GPTConfig, cache: KVCache) -> None:
        super().__init__(config, cache)
        self.cache = cache
        self.n_kv_head = config.n_kv_head
        self.head_dim = config.head_dim
        # of a block's own keys, and of those behind them
        self.mask = staircase(QUERY_BLOCK + KEY_BLOCK, 0, self.group, self.dtype)

    def plan(self, chunks: Sequence[Chunk]) -> AttentionPlan:
        """The plan of a batch, see plan.AttentionBackend."""
        decodes = list(takewhile(lambda chunk: chunk.length == 1, chunks))
        decode_plan = self.plan_decodes(decodes)
        together = len(decodes) if decode_plan else 0
        chunk_plans = self.plan_chunks(chunks[together:], together)
        return partial(self.attend_batch, self.unwritten_tails(chunks), decode_plan, chunk_plans)

    def plan_chunks(self, chunks: Sequence[Chunk], first_row: int) -> list[ChunkPlan]:
        """The blocks of each chunk. The first query is row `first_row` of q."""
        plans = []
        for chunk in chunks:
            max_keys = len(chunk.used_pages(self.page_size)) * self.page_size
            blocks = []
            keys = 1
            for block in blocks_of(chunk):
                rows = slice(first_row, first_row + block.length)
                first_row = rows.stop
                if chunk.length == 1:
                    keys = block.end
                    mask = None
                else:
                    whole_blocks = -(-block.end // KEY_BLOCK)
                    keys = min(whole_blocks * KEY_BLOCK, max_keys)
                    mask = self.mask[: block.length * self.group, : keys - block.start]
                blocks.append(Block(rows, keys, mask))
            plans.append(ChunkPlan(self.slots(chunk, keys), blocks))
        return plans

    def unwritten_tails(self, chunks: Sequence[Chunk]) -> list[tuple[int, int]]:
        """(first slot, end) of the rest of each page that is begun by one of these chunks."""
        tails = []
        for chunk in chunks:
            last_page = (chunk.end - 1) // self.page_size  # of its block table
            page_start = last_page * self.page_size
            if chunk.start <= page_start:
                first_slot = chunk.pages[last_page] * self.page_size
                end = first_slot + self.page_size
                tails.append((first_slot + chunk.end - page_start, end))
        return tails

    def plan_decodes(self, decodes: Sequence[Chunk]) -> "DecodePlan | None":
        """The plan of all decodes together, None if they are better computed one by one."""
        if not decodes:
            return None
        ends = [chunk.end for chunk in decodes]
        tables = [chunk.used_pages(self.page_size) for chunk in decodes]
        lengths = [len(table) for table in tables]
        pages = set(chain.from_iterable(tables))
        is_alone = len(decodes) == 1  # torch's kernel computes it without copies
        are_few = len(pages) < min(PAGE_BLOCK, self.cache.pages / 2)
        are_mostly_empty = max(KEY_BLOCK, 2 * max(ends)) < self.page_size  # they are read whole
        are_unequal = len(tables) * max(lengths) > 8 * sum(lengths)  # all are filled up
        if is_alone or are_few or are_mostly_empty or are_unequal:
            return None
        return DecodePlan(self, ends, tables)

    def attend_batch(
        self,
        tails: Sequence[tuple[int, int]],
        decode_plan: "DecodePlan | None",
        chunks: Sequence[ChunkPlan],
        q: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """Attention of a batch; shapes as in plan.AttentionPlan."""
        for first, end in tails:
            keys[:, first:end] = 0
            values[:, first:end] = 0
        out = q.new_empty(q.shape)
        if decode_plan is not None:
            n = decode_plan.decodes
            out[:n] = decode_plan(q[:n], keys, values)
        q = q.unflatten(1, (-1, self.group))
        out = out.unflatten(1, (-1, self.group))
        # q and out (num_tokens, n_kv_head, group, head_dim)
        for plan in chunks:
            k = read(keys, plan.slots)
            v = read(values, plan.slots)
            for rows, n, mask in plan.blocks:
                folded = q[rows].transpose(0, 1).flatten(1, 2)
                y = self.attend_block(folded, k[:, :n], v[:, :n], mask)
                # folded and y (n_kv_head, rows * group, head_dim)
                out[rows] = y.unflatten(1, (-1, self.group)).transpose(0, 1)
        return out.flatten(1, 2)

    def attend_block(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        """q (n_kv_head, rows, head_dim), k and v (n_kv_head, keys, head_dim), `mask` of a Block
        -> (n_kv_head, rows, head_dim)"""
        if mask is None:  # a decode on its own: torch's kernel, which is slow for one row of q
            q = q.expand(-1, max(2, q.shape[1]), -1)
            return F.scaled_dot_product_attention(q[None], k[None], v[None])[0, :, : self.group]
        scores = self.scores(q, k)
        first_column = k.shape[1] - mask.shape[1]
        scores[..., first_column:] += mask
        return torch.bmm(torch.softmax(scores, -1, out=scores), v)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """q (n, rows, head_dim), k (n, keys, head_dim) -> (n, rows, keys)"""
        n, rows, head_dim = q.shape
        scores = q.new_empty(n, rows, k.shape[1])
        keys = k.transpose(1, 2)
        return scores.baddbmm_(q, keys, beta=0, alpha=head_dim**-0.5)


class Group(NamedTuple):
    """Pages that are read by up to `readers` decodes each: rows of one product."""

    pages: Sequence[int]  # a range: all pages of the cache, which are read in place
    readers: int  # a power of 2, so that there are few shapes

    @property
    def rows(self) -> int:
        """How many rows the product has for each KV head."""
        return len(self.pages) * self.readers


def group_pages(tables: Sequence[Sequence[int]], cache_pages: int) -> list[Group]:
    """Group the pages of these block tables, in a cache of `cache_pages`, by their readers."""
    readers_of = Counter(chain.from_iterable(tables))
    pages_by_readers: dict[int, list[int]] = defaultdict(list)
    for page, count in readers_of.items():
        pages_by_readers[1 << (count - 1).bit_length()].append(page)
    groups = []
    for readers, pages in sorted(pages_by_readers.items()):
        if readers == 1 and cache_pages <= 2 * len(pages):
            groups.append(Group(range(cache_pages), readers))  # most are read: no copy is made
        else:
            padding = pages[-1:] * (-len(pages) % PAGE_BLOCK)
            groups.append(Group(pages + padding, readers))
    return groups


def number_rows(
    tables: Sequence[Sequence[int]],
    groups: Sequence[Group],
) -> tuple[list[int], list[int]]:
    """(product_row of each slot, owner_slot of each row), see the picture at the top of this file.

    Short tables are filled up with their last page: it is read again, and hidden."""
    next_row: dict[int, int] = {}  # page -> its next free row
    total = 0
    for group in groups:
        for page in group.pages:
            next_row[page] = total
            total += group.readers
    pages_per_decode = max(map(len, tables))
    owner_slot = [0] * total
    product_row = []
    for table in tables:
        for page in table:
            row = next_row[page]
            owner_slot[row] = len(product_row)
            product_row.append(row)
            next_row[page] = row + 1
        product_row += product_row[-1:] * (pages_per_decode - len(table))
    return product_row, owner_slot


class DecodePlan:
    """The plan of some decodes: a product with the keys of all pages, softmax, one with values."""

    def __init__(
        self,
        backend: Matmul,
        ends: Sequence[int],
        tables: Sequence[Sequence[int]],
    ) -> None:
        """`ends` says how many keys each decode sees, `tables` which pages hold them."""
        self.backend = backend
        self.decodes = len(tables)
        self.pages_per_decode = max(map(len, tables))
        groups = group_pages(tables, backend.cache.pages)
        product_row, owner_slot = number_rows(tables, groups)
        owner_slots = torch.tensor(owner_slot).split([group.rows for group in groups])
        self.product_row = torch.tensor(product_row)
        self.decode_of_row = [slots // self.pages_per_decode for slots in owner_slots]
        self.owner_slots: Sequence[Tensor | None] = owner_slots
        self.gather_rows = [
            page_rows_of(group, backend.n_kv_head, backend.cache.pages) for group in groups
        ]
        # With one page for each decode, and none copied, rows take the place of slots: there is
        # nothing to bring together. Rows without an owner yield NaN, which nobody selects.
        self.rows_are_slots = self.pages_per_decode == 1 and self.gather_rows == [None]
        slot_ends = torch.tensor(ends)
        if self.rows_are_slots:
            self.owner_slots = [None]
            slot_ends = slot_ends.new_zeros(len(owner_slot))
            slot_ends[self.product_row] = torch.tensor(ends)
        first_keys = torch.arange(self.pages_per_decode) * backend.page_size
        self.is_page_used = (first_keys < slot_ends[:, None])[..., None]  # or the slot is filled up
        keys = torch.arange(self.pages_per_decode * backend.page_size)
        hidden = keys >= slot_ends[:, None, None]  # (decodes, 1, keys)
        mask = torch.zeros(hidden.shape, dtype=backend.dtype)
        self.mask = mask.masked_fill_(hidden, float("-inf"))

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Shapes as in plan.AttentionPlan."""
        backend = self.backend
        page_size = backend.page_size
        pages = self.pages_per_decode
        k = keys.reshape(-1, page_size, backend.head_dim)
        v = values.reshape(-1, page_size, backend.head_dim)
        # k and v (n_kv_head * pages of the cache, page_size, head_dim)
        q_of_heads = q.view(len(q), backend.n_kv_head, -1).transpose(0, 1)
        scores = self.multiply(backend.scores, q_of_heads, self.decode_of_row, k)
        # scores (n_kv_head, rows, group, page_size)
        if not self.rows_are_slots:
            scores = scores.index_select(1, self.product_row)
        scores = scores.unflatten(1, (-1, pages)).transpose(2, 3).flatten(3)
        weights = scores.add_(self.mask).softmax(-1)
        # weights (n_kv_head, decodes, group, pages * page_size)
        weights = weights.unflatten(3, (pages, page_size))
        weights = weights.transpose(2, 3).flatten(1, 2).flatten(2)
        y = self.multiply(torch.bmm, weights, self.owner_slots, v).flatten(2)
        y = y.index_select(1, self.product_row)
        y = y.unflatten(1, (-1, pages))
        # y (n_kv_head, decodes, pages, group * head_dim), to be summed over pages
        y = y[:, :, 0] if pages == 1 else (y * self.is_page_used).sum(2)
        return y.transpose(0, 1).reshape(q.shape)

    def multiply(
        self,
        product: Product,
        x: Tensor,
        indices: Sequence[Tensor | None],
        pages: Tensor,
    ) -> Tensor:
        """product(rows of x, pages) for each group: (n_kv_head, rows, group, ...).

        x (n_kv_head, ..., group * n); `indices` select from it what each row of a group needs, None
        selects all; pages (n_kv_head * pages of the cache, page_size, head_dim)."""
        parts = []
        for index, gather_rows in zip(indices, self.gather_rows, strict=True):
            rows = x if index is None else x.index_select(1, index)
            read = pages if gather_rows is None else pages.index_select(0, gather_rows)
            rows = rows.view(len(read), -1, x.shape[2] // self.backend.group)
            out = product(rows, read)
            out = out.view(self.backend.n_kv_head, -1, self.backend.group, out.shape[-1])
            parts.append(out)
        return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


def page_rows_of(group: Group, n_kv_head: int, cache_pages: int) -> Tensor | None:
    """The rows of a group's pages, of keys and values (n_kv_head * cache_pages, ...); None: all."""
    if isinstance(group.pages, range):
        return None
    heads = torch.arange(n_kv_head)[:, None] * cache_pages
    return (heads + torch.tensor(group.pages)).flatten()
