"""Pages that follow each other, and pages that requests share. Read first: kv_cache.py.

Prefix caching: prompts that begin alike share pages. A full page is identified by a hash: the
SHA-256 of its tokens and of the hash of the page before. It stands for all tokens up to the end of
the page. A request whose prompt begins with these tokens reuses the page. An unreferenced page
stays cached until its memory is needed. The least recently used page is evicted first."""

import re
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from itertools import chain, islice

from kv_cache import Pages
from request import Request


def make_pages(total: int, page_size: int, prefix_caching: bool = False) -> Pages:
    """The Pages of a cache, all free."""
    return (CachedPages if prefix_caching else PagesInRuns)(total, page_size)


class PagesInRuns(Pages):
    """Pages that follow each other at admission, and after it as long as the next one is free.

    Then attention on a CPU reads keys and values in place, and need not gather them."""

    def choose(self, count: int, after: int | None) -> list[int]:
        """For a new request, pages from the longest runs of free ones. For one that grows, the next
        page if it is free, or else the first that is."""
        if after is not None:
            is_next_free = after + 1 < self.total and not self._taken[after + 1]
            return [after + 1 if is_next_free else self._taken.index(0)]
        # finds the runs of zero bytes much faster than a loop would
        runs = [range(*match.span()) for match in re.finditer(rb"\0+", self._taken)]
        runs.sort(key=len, reverse=True)
        return list(islice(chain.from_iterable(runs), count))


class CachedPages(PagesInRuns):
    """Pages of which those that are full can be in several block tables."""

    prefix_caching = True

    def __init__(self, total: int, page_size: int) -> None:
        super().__init__(total, page_size)
        self._page_of: dict[bytes, int] = {}  # hash -> the page that is cached under it
        self._hash_of: dict[int, bytes] = {}  # page -> its hash, or the one it had last
        self._evictable: OrderedDict[int, None] = OrderedDict()  # the least recently used first

    def choose(self, count: int, after: int | None) -> list[int]:
        """As of PagesInRuns. Cached pages are evicted where others are too few."""
        while self.num_free - len(self._evictable) < count:
            page, _ = self._evictable.popitem(last=False)
            del self._page_of[self._hash_of[page]]
            self._taken[page] = 0
        return super().choose(count, after)

    def release(self, page: int) -> None:
        """Keep a cached page. The last of a request is released first: it needs those before it."""
        if self.is_cached(page):
            self._evictable[page] = None
        else:
            super().release(page)

    def find(self, request: Request, to_recompute: int = 2) -> list[int]:
        """The cached pages that hold the first tokens of a waiting request.

        The last token is always computed, because its logits give the next one: with pages of 4
        tokens, a prompt of 8 uses 1 cached page at most, and a prompt of 9 uses 2. After a
        preemption with some output, `to_recompute` tokens are computed: with 1 it would count as a
        decode, and the batch that is being made has its decodes already."""
        to_compute = 1 if len(request.tokens) == request.prompt_len else to_recompute
        max_pages = (len(request.tokens) - to_compute) // self.page_size
        return self.match_prefix(self.hashes(request)[:max_pages])

    def take(self, pages: Sequence[int]) -> None:
        """Put cached pages into one more block table."""
        for page in pages:
            if not self.ref_counts[page]:
                del self._evictable[page]
                self.num_free -= 1
            self.ref_counts[page] += 1

    def keep(self, request: Request, start: int) -> None:
        """Let others find the pages that became full since num_computed was `start`."""
        self.publish(request, start, request.num_computed)

    def hashes(self, request: Request) -> list[bytes]:
        """The hashes of the full pages of request.tokens, in order."""
        hashes = request.page_hashes
        size = self.page_size
        for end in range((len(hashes) + 1) * size, len(request.tokens) + 1, size):
            page_tokens = array("q", request.tokens[end - size : end]).tobytes()
            previous_hash = hashes[-1] if hashes else b""
            hashes.append(sha256(previous_hash + page_tokens).digest())
        return hashes

    def publish(self, request: Request, start: int, end: int) -> None:
        """Let others find the pages that tokens start, ..., end - 1 fill. A hash keeps its page."""
        filled = slice(start // self.page_size, end // self.page_size)
        hashes = self.hashes(request)[filled]
        for page, page_hash in zip(request.pages[filled], hashes, strict=True):
            self._hash_of[page] = page_hash
            self._page_of.setdefault(page_hash, page)

    def withdraw(self, request: Request, start: int, end: int) -> set[int]:
        """Let nobody find the pages that these tokens were to fill any more. Returns them."""
        pages = set(request.pages[start // self.page_size : end // self.page_size])
        for page in filter(self.is_cached, pages):
            del self._page_of[self._hash_of[page]]
        return pages

    def match_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """The cached pages of these hashes, up to the first hash that has none."""
        pages: list[int] = []
        for page_hash in hashes:
            page = self._page_of.get(page_hash)
            if page is None:
                break
            pages.append(page)
        return pages

    def is_cached(self, page: int) -> bool:
        """Whether other requests can reuse this page."""
        page_hash = self._hash_of.get(page)
        return page_hash is not None and self._page_of.get(page_hash) == page
