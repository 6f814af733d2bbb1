"""The KV cache: allocated once, written in place, handed out in pages.

A *page* holds the keys and values of `page_size` tokens in every layer. A request owns a list of
pages, its *block table* (PagedAttention, Kwon et al. 2023, §4). Token t lies in the *slot*

    pages[t // page_size] * page_size + t % page_size

of the one long row of slots that the cache is. With pages of max_len tokens each request has one
page. This is SARATHI's layout (§4.5: "we pre-allocate the KV cache as per the maximum sequence
length"). Small pages are taken as a request grows, and prompts that begin alike can share them.

`KVCache` holds the tensors, for the model. `Pages` counts who uses which page, for the scheduler,
which needs no tensors. Read next: attention/, which reads the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:  # a scheduler needs Pages, and no torch
    import torch
    from torch import Tensor

    from config import GPTConfig
    from request import Request

FLASH_PAGE = 256  # tokens: FlashAttention reads pages of a multiple of it


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


def kv_bytes_per_token(config: GPTConfig, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of one token in all layers (m_kv in SARATHI §4.3.1)."""
    return config.n_layer * 2 * config.n_kv_head * config.head_dim * dtype.itemsize


class KVCache:
    """Keys and values of `pages` pages of `page_size` tokens each.

    `data` has the logical shape (n_layer, K and V, n_kv_head, pages * page_size, head_dim). In
    memory, the heads of one slot lie side by side on CUDA, the slots of one head elsewhere: as the
    kernels prefer. Unwritten slots hold garbage. On CUDA there is one slot more, the *scratch
    slot*: rows of padding are written there."""

    def __init__(
        self,
        config: GPTConfig,
        pages: int,
        page_size: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        max_len: int | None = None,
    ) -> None:
        """`max_len` is the longest request; None: as long as cache and model allow."""
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
    """Which pages are free, and which are in block tables.

    policies/pages.py has pages that follow each other, and pages that several requests share."""

    prefix_caching = False

    def __init__(self, total: int, page_size: int) -> None:
        self.total = total
        self.page_size = page_size
        self.num_free = total  # pages in no block table
        self.ref_counts = [0] * total  # of each page: in how many block tables it is
        self._taken = bytearray(total)  # 1 for each page that cannot be chosen, else 0

    def emptied(self) -> Self:
        """As many pages of this kind and size, all free."""
        return type(self)(self.total, self.page_size)

    def needed(self, tokens: int) -> int:
        """The number of pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def count_free(self, pages: Sequence[int]) -> int:
        """How many of these pages are in no block table."""
        return sum(not self.ref_counts[page] for page in pages)

    def allocate(self, count: int, after: int | None = None) -> list[int] | None:
        """Take `count` pages, for a request whose last page is `after`. None if fewer are free."""
        if count > self.num_free:
            return None
        pages = self.choose(count, after)
        for page in pages:
            self._taken[page] = 1
            self.ref_counts[page] = 1
        self.num_free -= count
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Take the pages out of one block table."""
        for page in reversed(pages):
            assert self.ref_counts[page], f"{page = } was freed, and is in no block table"
            self.ref_counts[page] -= 1
            if not self.ref_counts[page]:
                self.num_free += 1
                self.release(page)

    # What policies/pages.py overrides.

    def choose(self, count: int, after: int | None) -> list[int]:
        """The pages that `allocate` takes: here, the first free ones."""
        pages: list[int] = []
        page = -1
        for _ in range(count):
            page = self._taken.index(0, page + 1)
            pages.append(page)
        return pages

    def release(self, page: int) -> None:
        """A page is in no block table any more. Here, it can be chosen again."""
        self._taken[page] = 0

    def find(self, request: Request, to_recompute: int = 2) -> list[int]:
        """The pages that hold the first tokens of a waiting request already. Here, none."""
        return []

    def take(self, pages: Sequence[int]) -> None:
        """Put pages that `find` returned into one more block table. Here, there are none."""

    def keep(self, request: Request, start: int) -> None:
        """Let others find the pages filled since num_computed was `start`. Here, nobody does."""
