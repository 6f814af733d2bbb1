"""How much memory a device can still give, and how many pages fit into it."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kv_cache import ModelShape, kv_bytes_per_token
from torchrun import find_place

if TYPE_CHECKING:
    import torch  # a simulation runs without


class ModelLike(Protocol):
    """The parts of a model.GPT that decide on sizes."""

    @property
    def config(self) -> ModelShape: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...


def check_memory(description: str, wanted_bytes: int, device: torch.device) -> None:
    """Raise ValueError if `description`, such as "max_len=8192", takes more than is free."""
    free = free_bytes(device)
    if wanted_bytes > free:
        wanted = min(wanted_bytes, 10**30) / 1e9  # a larger number is no float
        raise ValueError(f"{description}: takes {wanted:,.1f} GB, {free / 1e9:,.1f} GB are free")


def free_bytes(device: torch.device) -> int:
    """The memory that a device can still give, in bytes, without swap."""
    if device.type == "cuda":
        import torch

        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    processes = find_place().local_world_size  # they share the memory
    return min(_free_in_system(), _free_in_container()) // processes


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
