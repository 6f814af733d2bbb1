"""The KV cache: allocated once, written in place, handed out in pages.

A *page* holds the keys and values of `page_size` tokens in every layer. A request owns a list of
pages, its *block table* (PagedAttention, Kwon et al. 2023, §4): token t lies in the *slot*

    pages[t // page_size] * page_size + t % page_size

of the one long row of slots that the cache is. Pages of max_len are SARATHI's layout, one for each
request (§4.5: "we pre-allocate the KV cache as per the maximum sequence length"); small ones are
taken as a request grows. `Pages` says who owns what and knows no tensors: a scheduler runs without.
Read next: attention.py, which reads what is written here.
"""

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


def max_requests(memory_bytes, weight_bytes, max_len, kv_bytes_per_token):
    """How many requests fit, maybe 0: B = floor((M_G - M_S) / (L * m_kv)), SARATHI §4.3.1, of the
    device's memory, what the parameters take of it, and the longest sequence in tokens."""
    return max(0, (memory_bytes - weight_bytes) // (max_len * kv_bytes_per_token))


class KVCache:
    """Keys and values of `pages` pages of `page_size` tokens each.

    Logical shape: (n_layer, K and V, n_kv_head, pages * page_size, head_dim). The strides depend on
    the device, because kernels differ in what they like: on CUDA the heads of a slot lie side by
    side, elsewhere the slots of a head. Slots that were never written hold whatever was there."""

    def __init__(
        self, config, pages, page_size, device="cpu", dtype=None, max_len=None, position_major=None
    ):
        """`dtype` is float32 if None; `max_len`, the longest request, what cache and model allow;
        `position_major`, the layout of CUDA, as the device likes it."""
        import torch  # here, because a scheduler needs Pages alone

        self.pages, self.page_size, slots = pages, page_size, pages * page_size
        self.max_len = min(slots, config.max_positions) if max_len is None else max_len
        if position_major is None:
            position_major = torch.device(device).type == "cuda"
        inner = (slots, config.n_kv_head) if position_major else (config.n_kv_head, slots)
        shape = config.n_layer, 2, *inner, config.head_dim
        self.data = torch.empty(shape, device=device, dtype=dtype or torch.float32)
        if position_major:
            self.data = self.data.transpose(2, 3)

    def layer(self, layer):
        """(keys, values) of one layer, two views of shape (n_kv_head, slots, head_dim)."""
        return self.data[layer, 0], self.data[layer, 1]

    def write(self, layer, k, v, slot_mapping):
        """Store k and v, (num_tokens, n_kv_head, head_dim), in those slots, (num_tokens,)."""
        keys, values = self.layer(layer)
        keys.index_copy_(1, slot_mapping, k.transpose(0, 1))
        values.index_copy_(1, slot_mapping, v.transpose(0, 1))


class Pages:
    """Which pages are free and which are owned. A request is given pages that follow each other
    wherever possible: on a CPU attention then reads its keys and values in place, not a copy."""

    def __init__(self, pages, page_size):
        self.total, self.page_size = pages, page_size
        self.num_free = pages
        self._runs = {0: pages}  # free pages: first of a run -> the page after its last
        self._starts = {pages: 0}  # the same, from its end
        self._owned = set()

    def needed(self, tokens):
        """How many pages hold that many tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, count, after=None):
        """Take `count` pages and return them in a list, or None if that many are not free.

        `after` is the last page that the request owns already: the next one is taken if it is free,
        and any if not. For a new request they come from the longest run of free pages."""
        if count > self.num_free:
            return None
        pages, longest = [], None
        while len(pages) < count:
            if after is not None:
                start = after + 1 if after + 1 in self._runs else next(iter(self._runs))
            else:
                longest = longest or sorted(self._runs, key=lambda start: self._runs[start] - start)
                start = longest.pop()
            end = self._runs.pop(start)
            taken = min(count - len(pages), end - start)
            pages += range(start, start + taken)
            del self._starts[end]
            if start + taken < end:
                self._runs[start + taken], self._starts[end] = end, start + taken
        self._owned.update(pages)
        self.num_free -= count
        return pages

    def free(self, pages):
        """Give pages back. Raises RuntimeError if nobody owned one of them."""
        for page in pages:
            if page not in self._owned:
                raise RuntimeError(f"page {page} was freed but is not owned")
            self._owned.remove(page)
            start, end = self._starts.pop(page, page), page + 1
            if end in self._runs:  # joins the run behind it
                end = self._runs.pop(end)
            self._runs[start], self._starts[end] = end, start
            self.num_free += 1

    def check_integrity(self, tables=None):
        """Raise RuntimeError unless every page is either free or owned, exactly once; and, with
        `tables`, the block tables of all requests, unless these are all that is owned."""
        free = [page for start, end in self._runs.items() for page in range(start, end)]
        whole = sorted([*free, *self._owned]) == list(range(self.total))
        starts = {end: start for start, end in self._runs.items()}
        if not whole or len(free) != self.num_free or starts != self._starts:
            raise RuntimeError(f"pages leaked or shared: {sorted(free)} free, {self._owned} owned")
        if tables is not None and sorted(sum(tables, [])) != sorted(self._owned):
            raise RuntimeError(f"block tables {tables} are not the pages owned, {self._owned}")
