"""The KV cache: allocated once, written in place, handed out in pages.

A *page* holds the keys and values of `page_size` tokens in every layer. A request owns a list of
pages, its *block table* (PagedAttention, Kwon et al. 2023, §4). Token t lies in the *slot*

    pages[t // page_size] * page_size + t % page_size

of the one long row of slots that the cache is. With pages of max_len tokens each request has one
page. This is SARATHI's layout (§4.5: "we pre-allocate the KV cache as per the maximum sequence
length"). Small pages are taken as a request grows, and prompts that begin alike can share them.

`KVCache` holds the tensors. `Pages` knows the owners of pages, and no tensors: a scheduler runs
without. Read next: attention/, which reads the cache."""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple, Protocol

from errors import check_bool, check_whole

if TYPE_CHECKING:  # a scheduler needs Pages, and no torch
    import torch
    from torch import Tensor


MAX_PAGES = 2**28  # they take some gigabytes to count


class Span(NamedTuple):
    """A chunk as model and attention see it: tokens start, start + 1, ... of a request."""

    pages: list[int]  # the request's block table
    start: int
    tokens: Sequence[int]
    wants_logits: bool = True  # those after the last token

    @property
    def length(self) -> int:
        """The number of tokens that are computed: the queries of attention."""
        return len(self.tokens)

    @property
    def end(self) -> int:
        """The number of keys that the last of these tokens attends to: 0, ..., end - 1."""
        return self.start + len(self.tokens)

    def used_pages(self, page_size: int) -> list[int]:
        """The pages that hold these keys, in order."""
        return self.pages[: -(-self.end // page_size)]


def slot_mapping(pages: Sequence[int], page_size: int, start: int, end: int) -> list[int]:
    """The slots of tokens start, ..., end - 1 of a request with the block table `pages`."""
    slots: list[int] = []
    for i in range(start // page_size, -(-end // page_size)):
        first_token = i * page_size
        first_slot = pages[i] * page_size
        begin = max(start - first_token, 0)
        stop = min(end - first_token, page_size)
        slots += range(first_slot + begin, first_slot + stop)
    return slots


class ModelShape(Protocol):
    """The fields of a model.GPTConfig that cache and attention read."""

    @property
    def n_layer(self) -> int: ...
    @property
    def n_head(self) -> int: ...
    @property
    def n_kv_head(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def max_positions(self) -> int: ...


def kv_bytes_per_token(config: ModelShape, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of one token in all layers (m_kv in SARATHI §4.3.1)."""
    return config.n_layer * 2 * config.n_kv_head * config.head_dim * dtype.itemsize


class KVCache:
    """Keys and values of `pages` pages of `page_size` tokens each.

    `data` has the logical shape (n_layer, K and V, n_kv_head, pages * page_size, head_dim). As the
    kernels prefer, on CUDA the heads of a slot lie side by side, elsewhere the slots of a head.
    Unwritten slots hold garbage. On CUDA a *scratch slot* behind them takes rows of padding."""

    def __init__(
        self,
        config: ModelShape,
        pages: int,
        page_size: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        max_len: int | None = None,
    ) -> None:
        """`max_len` is the longest request. By default cache and model set the limit."""
        import torch

        slots = pages * page_size
        self.pages = pages
        self.page_size = page_size
        self.scratch_slot = slots
        self.max_len = min(slots, config.max_positions) if max_len is None else max_len
        on_cuda = torch.device(device).type == "cuda"
        shape = (config.n_layer, 2, config.n_kv_head, slots + int(on_cuda), config.head_dim)
        order = (0, 1, 3, 2, 4) if on_cuda else (0, 1, 2, 3, 4)
        self._data = torch.empty_permuted(shape, order, device=device, dtype=dtype)
        self.data = self._data[:, :, :, :slots]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, two views of shape (n_kv_head, slots, head_dim)."""
        return self.data[layer, 0], self.data[layer, 1]

    def write(self, layer: int, kv: Tensor, slot_mapping: Tensor) -> None:
        """Store kv, (num_tokens, 2 * n_kv_head, head_dim), in the slots (num_tokens,)."""
        kv = kv.unflatten(1, (2, -1)).permute(1, 2, 0, 3)  # as a layer of the cache
        self._data[layer].index_copy_(2, slot_mapping, kv)


class Pages:
    """Which pages are free, which are in block tables, and which hold a known prefix.

    A request gets pages that follow each other wherever possible: then attention on a CPU reads
    its keys and values in place.

    With `prefix_caching`, a full page is identified by a hash: the SHA-256 of its tokens and of the
    hash of the page before. It stands for all tokens up to the end of the page. A request whose
    prompt begins with these tokens reuses the page. Pages are reference-counted. An unreferenced
    page stays cached until its memory is needed. The least recently used page is evicted first."""

    def __init__(self, total: int, page_size: int, prefix_caching: bool = False) -> None:
        self.total = check_whole("total", total, minimum=0, maximum=MAX_PAGES)
        self.page_size = check_whole("page_size", page_size, minimum=1)
        check_bool("prefix_caching", prefix_caching)
        self.prefix_caching = prefix_caching
        self.num_free = self.total  # pages in no block table, cached or not
        self.ref_counts = [0] * self.total  # of each page: in how many block tables it is
        self._occupied = bytearray(self.total)  # 1 for pages in a block table or cached, else 0
        self._page_of: dict[bytes, int] = {}  # hash -> the page that is cached under it
        self._hash_of: dict[int, bytes] = {}  # page -> its hash, or the one it had last
        self._evictable: OrderedDict[int, None] = OrderedDict()  # the least recently used first

    def needed(self, tokens: int) -> int:
        """The number of pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, count: int, after: int | None = None) -> list[int] | None:
        """Take `count` pages. Returns None if fewer are free.

        A new request gets them from the longest runs of free pages. `after` is the last page of a
        request that needs one page more: the next page if that is free, or else any."""
        if count > self.num_free:
            return None
        while self.num_free - len(self._evictable) < count:
            page, _ = self._evictable.popitem(last=False)
            del self._page_of[self._hash_of[page]]
            self._occupied[page] = 0
        pages = self._longest_runs(count) if after is None else [self._page_after(after)]
        for page in pages:
            self._occupied[page] = 1
            self.ref_counts[page] = 1
        self.num_free -= count
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Take the pages out of one block table. Raises RuntimeError if one of them is in none."""
        for page in reversed(pages):  # evict the last first: it needs those before it
            if not self.ref_counts[page]:
                raise RuntimeError(f"page {page} was freed but is not owned")
            self.ref_counts[page] -= 1
            if self.ref_counts[page]:
                continue
            self.num_free += 1
            if self.is_cached(page):
                self._evictable[page] = None
            else:
                self._occupied[page] = 0

    # The rest is for prefix caching.

    def extend_hashes(self, hashes: list[bytes], tokens: Sequence[int]) -> None:
        """Append the hashes of those full pages of `tokens` that are missing in `hashes`."""
        if not self.prefix_caching:
            return
        size = self.page_size
        for end in range((len(hashes) + 1) * size, len(tokens) + 1, size):
            page_tokens = array("q", tokens[end - size : end]).tobytes()
            previous_hash = hashes[-1] if hashes else b""
            hashes.append(sha256(previous_hash + page_tokens).digest())

    def publish(self, pages: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Let other requests reuse the pages that have a hash. A hash keeps the page it has."""
        for page, page_hash in zip(pages, hashes, strict=False):  # a last page may not be full
            self._hash_of[page] = page_hash  # first, or an interrupt could leave a page for ever
            self._page_of.setdefault(page_hash, page)

    def is_cached(self, page: int) -> bool:
        """Whether other requests can reuse this page."""
        page_hash = self._hash_of.get(page)
        return page_hash is not None and self._page_of.get(page_hash) == page

    def match_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """The cached pages of these hashes, up to the first hash that has none."""
        pages: list[int] = []
        for page_hash in hashes:
            page = self._page_of.get(page_hash)
            if page is None:
                break
            pages.append(page)
        return pages

    def count_free(self, pages: Sequence[int]) -> int:
        """How many of these pages are in no block table."""
        return sum(not self.ref_counts[page] for page in pages)

    def acquire(self, pages: Sequence[int]) -> None:
        """Put cached pages into one more block table."""
        for page in pages:
            if not self.ref_counts[page]:
                del self._evictable[page]
                self.num_free -= 1
            self.ref_counts[page] += 1

    def _longest_runs(self, count: int) -> list[int]:
        """`count` unoccupied pages, from the longest runs of such pages."""
        # finds the runs of zero bytes much faster than a loop would
        runs = [range(*match.span()) for match in re.finditer(rb"\0+", self._occupied)]
        runs.sort(key=len, reverse=True)
        return list(islice(chain.from_iterable(runs), count))

    def _page_after(self, page: int) -> int:
        """The next page if it is unoccupied, else the first page that is."""
        next_page = page + 1
        if next_page < self.total and not self._occupied[next_page]:
            return next_page
        return self._occupied.index(0)
