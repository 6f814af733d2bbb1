"""Where a model can be, how much memory there is, and the sizes of an engine that fits into it.

How many requests fit is SARATHI's §4.3.1, see `pages_that_fit`. Read first: kv_cache.py."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from config import EngineConfig
from kv_cache import FLASH_PAGE, kv_bytes_per_token

if TYPE_CHECKING:
    import torch  # a simulation runs without

    from config import GPTConfig

MAX_BATCH = 256  # the largest default of max_batch, however much memory there is
MAX_LEN = 2048  # the largest default of max_len
CUDA_TILE = 128  # tokens in a tile of matrix products on a GPU (SARATHI §4.4)
SMALL_PAGE = 64  # tokens


class ModelLike(Protocol):
    """The parts of a model.GPT that decide on sizes."""

    @property
    def config(self) -> GPTConfig: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...


def fill_in(config: EngineConfig, model: ModelLike) -> EngineConfig:
    """The config with all sizes filled in, for as many requests as fit.

    Raises ValueError if model or memory forbid it."""
    limit = model.config.max_positions
    max_len = config.max_len or min(MAX_LEN, limit)
    if max_len > limit:
        reason = "this model's limit (max_positions, or its sliding window)"
        raise ValueError(f"max_len={max_len}: must be at most {limit}, {reason}")
    page_size = config.page_size or max_len
    if config.prefix_caching and config.page_size is None:
        page_size = small_page_size(max_len, model.device)
    max_batch = config.max_batch
    pages = config.pages
    description = f"pages={pages}, page_size={page_size}"
    if pages is None:
        description = f"max_batch={max_batch}, max_len={max_len}"
        pages = (max_batch or MAX_BATCH) * -(-max_len // page_size)
        if max_batch is None:
            pages = min(pages, pages_that_fit(model, max_len, page_size))
    cache_bytes = pages * page_size * kv_bytes_per_token(model.config, model.dtype)
    check_memory(description, cache_bytes, model.device)
    max_batch = max_batch or min(pages, MAX_BATCH)
    return replace(config, max_batch=max_batch, max_len=max_len, page_size=page_size, pages=pages)


def check_memory(description: str, wanted_bytes: int, device: torch.device) -> None:
    """Raise ValueError if `description`, such as "max_len=8192", takes more than is free."""
    free = free_bytes(device)
    if wanted_bytes > free:
        sizes = f"takes {wanted_bytes / 1e9:,.1f} GB, {free / 1e9:,.1f} GB are free"
        raise ValueError(f"{description}: {sizes}")


def free_bytes(device: torch.device) -> int:
    """The memory that a device can still give to this process, in bytes, without swap."""
    if device.type == "cuda":
        import torch

        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    free = min(_free_in_system(), _free_in_container())
    return free // int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # processes of one node share it


def pages_that_fit(model: ModelLike, max_len: int, page_size: int) -> int:
    """How many pages fit into the free memory of the model's device.

    With one page for each request it is SARATHI's B = floor((M_G - M_S) / (L * m_kv)), §4.3.1.
    Raises ValueError if not even one request of max_len tokens fits."""
    free = free_bytes(model.device)
    room = free - free // 2  # half is for other processes
    if model.device.type == "cuda":
        import torch

        room = free - torch.cuda.mem_get_info(model.device)[1] // 10  # a tenth is for activations
    token_bytes = kv_bytes_per_token(model.config, model.dtype)
    pages = room // (page_size * token_bytes)
    if pages * page_size < max_len:
        takes = f"one request takes {max_len * token_bytes / 1e9:.1f} GB of KV cache"
        raise ValueError(f"max_len={max_len}: {takes}, {room / 1e9:.1f} GB are free")
    return pages


def small_page_size(max_len: int, device: torch.device | str) -> int:
    """The default size of pages that a request takes one by one, as its tokens come.

    64 tokens, on CUDA 256: FlashAttention reads pages of a multiple of that. Pages of 64 go to
    Triton's kernels there, which are slower, and are in no CUDA graph. Two pages or more must make
    up max_len."""
    half = -(-max_len // 2)
    on_cuda = str(device).startswith("cuda")
    return FLASH_PAGE if on_cuda and half >= FLASH_PAGE else min(SMALL_PAGE, half)


def _free_in_system() -> int:
    """The bytes that Linux calls available; all memory on other systems, which do not say."""
    with suppress(OSError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_in_container() -> int:
    """The bytes that the limit of this container leaves; its file caches count as free."""
    with suppress(OSError, ValueError):  # there is no such file, or the limit is "max"
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines():
            name, value = line.split()
            if name == "anon":
                return max(0, limit - int(value))
    return sys.maxsize
