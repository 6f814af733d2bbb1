"""How much memory a device can still give."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch  # a simulation runs without


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
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # those of torchrun share the memory
    return min(_free_in_system(), _free_in_container()) // processes


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
