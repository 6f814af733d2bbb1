"""The KV cache: allocated once, written in place, handed out in pages.

A *page* holds the keys and values of `page_size` tokens in every layer. A request owns a list of pages, its *block
table* (PagedAttention, Kwon et al. 2023, §4): token t lies in page pages[t // page_size], in the *cell*

    pages[t // page_size] * page_size + t % page_size

of the one long row of cells that the cache is. Pages of max_len are SARATHI's layout, one slot for each request
(§4.5: "we pre-allocate the KV cache as per the maximum sequence length"); small ones are taken as a request grows.
`KVCache` is the memory; `Pages` says who owns which part of it and knows nothing of tensors, so that a scheduler can be
run without any.

Read next: attention.py, which reads what is written here.
"""

import torch


def kv_bytes_per_token(config, dtype):
    """Bytes that the keys and values of one token take in all layers (m_kv in SARATHI §4.3.1)."""
    return config.n_layer * 2 * config.n_kv_head * config.head_dim * dtype.itemsize


def max_slots(memory_bytes, weight_bytes, max_len, kv_bytes_per_token):
    """How many requests fit: B = floor((M_G - M_S) / (L * m_kv)), SARATHI §4.3.1.

    `memory_bytes` (M_G) is the memory of the device, `weight_bytes` (M_S) what the parameters take of
    it, `max_len` (L) the longest sequence in tokens. Returns 0 when not one request fits.
    """
    return max(0, (memory_bytes - weight_bytes) // (max_len * kv_bytes_per_token))


def cells(pages, page_size, start, end):
    """The cells of tokens start … end - 1 of a request with this block table, a list."""
    found = []
    for i in range(start // page_size, -(-end // page_size)):
        first = pages[i] * page_size
        found += range(first + max(start - i * page_size, 0), first + min(end - i * page_size, page_size))
    return found


class KVCache:
    """Keys and values of `pages` pages of `page_size` tokens each.

    Logical shape: (n_layer, 2, n_kv_head, pages * page_size, head_dim), where index 0 of the second dimension is K
    and 1 is V. The strides depend on the device, because kernels differ in what they like: on CUDA the heads of a cell
    lie side by side, as xformers wants them; elsewhere the cells of one head do.

    Cells that were never written hold whatever the memory held. Nothing reads them.
    """

    def __init__(self, config, pages, page_size, device="cpu", dtype=torch.float32, max_len=None, position_major=None):
        """Allocate `kv_bytes(...)` bytes. Raises ValueError if `pages` or `page_size` is below 1.

        `max_len` is the longest request, for which attention makes its masks; None: as long as cache and model allow.
        `position_major` is the layout of CUDA; None: as the device likes it.
        """
        for name, value in (("pages", pages), ("page_size", page_size)):
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        self.pages, self.page_size = pages, page_size
        self.max_len = min(pages * page_size, config.max_positions) if max_len is None else max_len
        if position_major is None:
            position_major = torch.device(device).type == "cuda"
        inner = (pages * page_size, config.n_kv_head) if position_major else (config.n_kv_head, pages * page_size)
        self.data = torch.empty(config.n_layer, 2, *inner, config.head_dim, device=device, dtype=dtype)
        if position_major:
            self.data = self.data.transpose(2, 3)

    @staticmethod
    def kv_bytes(config, pages, page_size, dtype):
        """Bytes that a cache of this size will take, without allocating it."""
        return pages * page_size * kv_bytes_per_token(config, dtype)

    def layer(self, layer):
        """(keys, values) of layer number `layer`, two views of shape (n_kv_head, pages * page_size, head_dim)."""
        return self.data[layer, 0], self.data[layer, 1]

    def write(self, layer, k, v, cells):
        """Store k and v, (num_tokens, n_kv_head, head_dim), in `cells`, (num_tokens,), in place."""
        keys, values = self.layer(layer)
        keys.index_copy_(1, cells, k.transpose(0, 1))
        values.index_copy_(1, cells, v.transpose(0, 1))


class Pages:
    """Which pages are free and which are owned.

    A request is given pages that follow each other wherever that is possible: on a CPU attention then reads its keys
    and values in place, and copies nothing.
    """

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

        `after` is the last page that the request owns already: the next one is taken if it is free, and any if not.
        For a new request they come from the longest run of free pages.
        """
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
        """Give pages back. Raises RuntimeError if nobody owned one (it would be handed out twice)."""
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
        """Raise RuntimeError unless every page is either free or owned, exactly once.

        With `tables`, the block tables of all requests, these must be all that is owned.
        """
        free = [page for start, end in self._runs.items() for page in range(start, end)]
        if sorted([*free, *self._owned]) != list(range(self.total)) or len(free) != self.num_free \
                or {end: start for start, end in self._runs.items()} != self._starts:
            raise RuntimeError(f"pages leaked or shared: free {sorted(free)}, owned {sorted(self._owned)}")
        if tables is not None and sorted(page for table in tables for page in table) != sorted(self._owned):
            raise RuntimeError(f"block tables {tables} do not hold exactly the pages owned, {sorted(self._owned)}")
