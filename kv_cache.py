"""The KV cache: allocated once, written in place, handed out in pages.

A *page* holds the keys and values of `page_size` tokens in every layer. A request owns a list of
pages, its *block table* (PagedAttention, Kwon et al. 2023, §4): token t lies in the *slot*

    pages[t // page_size] * page_size + t % page_size

of the one long row of slots that the cache is. Pages of max_len are SARATHI's layout, one for each
request (§4.5: "we pre-allocate the KV cache as per the maximum sequence length"); small ones are
taken as a request grows, and requests that begin alike can share them. `Pages` says who owns what
and knows no tensors: a scheduler runs without. Read next: attention.py, which reads all this."""

import re
from array import array
from collections import OrderedDict
from hashlib import sha256
from itertools import chain, islice, takewhile
from typing import NamedTuple


class Span(NamedTuple):
    """A chunk as model and attention see it: `tokens` are the tokens start, start + 1, … of a
    request, `pages` its block table, `wants_logits` whether those after the last are needed."""

    pages: list
    start: int
    tokens: list
    wants_logits: bool = True

    @property
    def length(self):
        """How many tokens are computed: queries."""
        return len(self.tokens)

    @property
    def end(self):
        """How many keys the last of them sees: 0 … end - 1."""
        return self.start + len(self.tokens)

    def used_pages(self, page_size):
        """The pages that hold these keys, in order."""
        return self.pages[: -(-self.end // page_size)]


def slot_mapping(pages, page_size, start, end):
    """The slots of tokens start … end - 1 of a request with this block table, a list."""
    slots = []
    for i in range(start // page_size, -(-end // page_size)):
        first, skipped = pages[i] * page_size, i * page_size
        slots += range(first + max(start - skipped, 0), first + min(end - skipped, page_size))
    return slots


def kv_bytes_per_token(config, dtype):
    """Bytes of the keys and values of one token in all layers (m_kv in SARATHI §4.3.1)."""
    return config.n_layer * 2 * config.n_kv_head * config.head_dim * dtype.itemsize


class KVCache:
    """Keys and values of `pages` pages of `page_size` tokens each.

    Logical shape: (n_layer, K and V, n_kv_head, pages * page_size, head_dim). The strides depend on
    the device, because kernels differ in what they like: on CUDA the heads of a slot lie side by
    side, elsewhere the slots of a head. Slots that were never written hold whatever was there."""

    def __init__(self, config, pages, page_size, device="cpu", dtype=None, max_len=None):
        """`max_len`, the longest request, is by default what cache and model allow."""
        import torch  # here, because a scheduler needs Pages alone

        self.pages, self.page_size, slots = pages, page_size, pages * page_size
        self.max_len = min(slots, config.max_positions) if max_len is None else max_len
        shape = config.n_layer, 2, config.n_kv_head, slots, config.head_dim
        order = (0, 1, 3, 2, 4) if torch.device(device).type == "cuda" else (0, 1, 2, 3, 4)
        self.data = torch.empty_permuted(shape, order, device=device, dtype=dtype)

    def layer(self, layer):
        """(keys, values) of one layer, two views of shape (n_kv_head, slots, head_dim)."""
        return self.data[layer, 0], self.data[layer, 1]

    def write(self, layer, k, v, slot_mapping):
        """Store k and v, (num_tokens, n_kv_head, head_dim), in those slots, (num_tokens,)."""
        keys, values = self.layer(layer)
        keys.index_copy_(1, slot_mapping, k.transpose(0, 1))
        values.index_copy_(1, slot_mapping, v.transpose(0, 1))


class Pages:
    """Which pages are free, and which are in block tables. A request is given pages that follow
    each other wherever possible: on a CPU attention then reads keys and values in place, no copy.

    With `prefix_caching` a full page has a *name*, the SHA-256 of its tokens and of the name of the
    page before. It stands for all tokens up to there: two contents of one name would be the first
    collision ever found. Who begins with these tokens finds the page and reads it, too. A page that
    nobody reads any more can be found until it is evicted, the least recently used one first."""

    def __init__(self, pages, page_size, prefix_caching=False):
        self.total, self.page_size, self.prefix_caching = pages, page_size, prefix_caching
        self.num_free, self._readers = pages, [0] * pages  # reference counts: block tables it is in
        self._taken = bytearray(pages)  # 1 for pages that are read or have a name
        self._named, self._name_of = {}, {}  # name -> page, page -> its name, or one it had
        self._evictable = OrderedDict()  # those free with a name, the least recently used first

    def needed(self, tokens):
        """How many pages hold that many tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, count, after=None):
        """Take `count` pages and return them in a list, or None if that many are not free. Pages
        with names are evicted if there are too few without.

        For a new request they come from the longest run of free pages. `after` is the last page of
        a request that needs one more: the next one is taken if it is free, and any if not."""
        if count > self.num_free:
            return None
        while self.num_free - len(self._evictable) < count:
            page, _ = self._evictable.popitem(last=False)
            del self._named[self._name_of[page]]
            self._taken[page] = 0
        if after is None:
            runs = [run.span() for run in re.finditer(rb"\0+", self._taken)]
            runs.sort(key=lambda run: run[0] - run[1])  # the longest first
            pages = list(islice(chain.from_iterable(range(*run) for run in runs), count))
        else:
            is_free = self._taken.startswith(b"\0", after + 1)
            pages = [after + 1 if is_free else self._taken.index(0)]
        for page in pages:
            self._taken[page] = self._readers[page] = 1
        self.num_free -= count
        return pages

    def free(self, pages):
        """Give the pages of a block table back. Raises RuntimeError if one of them is in none."""
        for page in reversed(pages):  # the last is evicted first: who finds it needs all before
            if not self._readers[page]:
                raise RuntimeError(f"page {page} was freed but is not owned")
            self._readers[page] -= 1
            if not self._readers[page]:
                self.num_free += 1
                if self.is_cached(page):
                    self._evictable[page] = None
                else:
                    self._taken[page] = 0

    def is_cached(self, page):
        """Whether it can be found."""
        return self._named.get(self._name_of.get(page)) == page

    def extend_hashes(self, names, tokens):
        """Append the names of all full pages of `tokens` that the list `names` lacks."""
        size = self.page_size
        ends = range((len(names) + 1) * size, len(tokens) + 1, size) if self.prefix_caching else ()
        for end in ends:
            page = array("q", tokens[end - size : end]).tobytes()
            names.append(sha256(b"".join([*names[-1:], page])).digest())

    def publish(self, pages, names):
        """Let these pages, which are full, be found by these names, if no others are found so."""
        for page, name in zip(pages, names):
            self._name_of[page] = name  # first: an interrupt must not leave a name that stays
            self._named.setdefault(name, page)

    def match_prefix(self, names):
        """The pages of these names, a list: as far as all are there."""
        return list(takewhile(lambda page: page is not None, map(self._named.get, names)))

    def count_free(self, pages):
        """How many of these are free."""
        return sum(not self._readers[page] for page in pages)

    def acquire(self, pages):
        """Put pages that were found into one more block table."""
        for page in pages:
            if not self._readers[page]:
                del self._evictable[page]
                self.num_free -= 1
            self._readers[page] += 1
