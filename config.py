"""What an engine, real or simulated, is told besides its model. Read next: engine.py."""

import os
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from errors import check_whole
from kv_cache import kv_bytes_per_token
from policies import find_policy, make_scheduler, policy_options

MAX_BATCH = 256  # the most requests at once where no number is named, however much memory there is


@dataclass(frozen=True)
class EngineConfig:
    """All that an engine is told besides its model. Raises ValueError, naming the argument."""

    policy: str = "sarathi-serve"  # a name in policies.POLICIES, or "my_policy.py:ClassName"
    chunk: int | str = 256  # C, the chunk size or token budget; "auto": what meets an SLO (slo.py)
    max_batch: int | None = None  # B, the most requests at once; None: as many as fit, at most 256
    max_len: int | None = None  # the longest prompt and output; None: 2,048, or the model's limit
    page_size: int | None = None  # tokens in a page; None: max_len, or up to 64 if these are shared
    pages: int | None = None  # None: enough for max_batch requests of max_len tokens
    prefix_caching: bool = False  # share the pages of prompts that begin alike
    max_waiting: int | None = None  # the most requests that may wait; None: no limit
    attention: str = "auto"  # the backend, see attention.make_attention
    policy_options: dict[str, Any] = field(default_factory=dict)  # as tbt_slo; tile: 128 on CUDA

    def __post_init__(self):
        if self.chunk != "auto":
            check_whole("chunk", self.chunk, least=1)
        elif not find_policy(self.policy).cuts_prompts:
            raise ValueError(f"chunk='auto': policy {self.policy!r} does not cut prompts")
        for name in ("max_batch", "max_len", "page_size", "pages", "max_waiting"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), least=1)
        if self.max_len and self.page_size and self.page_size > self.max_len:
            raise ValueError(f"page_size={self.page_size}: must be at most max_len={self.max_len}")
        if not isinstance(self.prefix_caching, bool):
            raise ValueError(f"prefix_caching={self.prefix_caching!r}: must be True or False")
        if self.prefix_caching and self.page_size and self.page_size == self.max_len:
            wanted = f"must be below max_len={self.max_len}, for prefix_caching"
            raise ValueError(f"page_size={self.page_size}: {wanted}")

    def scheduler(self, pages, clock, **changes):
        """A scheduler of this policy, for max_batch and max_len that are numbers."""
        sizes = dict(chunk=self.chunk, max_batch=self.max_batch, max_len=self.max_len)
        return make_scheduler(
            self.policy, pages, clock=clock, **sizes | self.policy_options | changes
        )

    def for_model(self, model):
        """The same with all numbers filled in. Raises ValueError if model or memory forbid it."""
        limit = model.config.max_positions
        max_len = self.max_len or min(2048, limit)
        if max_len > limit:
            why = "this model's limit (max_positions, or its sliding window)"
            raise ValueError(f"max_len={max_len}: must be at most {limit}, {why}")
        default = min(64, -(-max_len // 2)) if self.prefix_caching else max_len
        page_size, pages = self.page_size or default, self.pages
        if pages is None:
            pages = (self.max_batch or MAX_BATCH) * -(-max_len // page_size)
            if self.max_batch is None:
                pages = min(pages, pages_that_fit(model, max_len, page_size))
        sizes = dict(max_len=max_len, pages=pages, page_size=page_size)
        needed = pages * page_size * kv_bytes_per_token(model.config, model.dtype)
        check_memory(f"pages={pages}, page_size={page_size}", needed, model.device)
        its = replace(self, max_batch=self.max_batch or min(pages, MAX_BATCH), **sizes)
        return its.with_tile(128) if model.device.type == "cuda" else its

    def with_tile(self, tile):
        """The same: a policy that goes by tiles takes whole ones of so many tokens, or its own."""
        if "tile" not in policy_options(find_policy(self.policy)):
            return self
        return replace(self, policy_options={"tile": tile} | self.policy_options)


def pages_that_fit(model, max_len, page_size):
    """How many pages the memory of the model's device has room for: with one for each request it
    is SARATHI's B = floor((M_G - M_S) / (L * m_kv)), §4.3.1."""
    import torch

    free, cuda = free_bytes(model.device), model.device.type == "cuda"
    kept = torch.cuda.mem_get_info(model.device)[1] // 10 if cuda else free // 2  # for all the rest
    per_token = kv_bytes_per_token(model.config, model.dtype)
    pages = (free - kept) // (page_size * per_token)
    if pages * page_size < max_len:
        takes = f"one request takes {max_len * per_token / 1e9:.1f} GB of KV cache"
        raise ValueError(f"max_len={max_len}: {takes}, {(free - kept) / 1e9:.1f} GB are free")
    return pages


def free_bytes(device):
    """The memory that a torch.device can still give, in bytes, swap aside."""
    if device.type == "cuda":
        import torch

        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # all: macOS tells no more
    with suppress(OSError), open("/proc/meminfo") as file:
        free = next((1024 * int(s.split()[1]) for s in file if s.startswith("MemAvailable:")), free)
    with suppress(OSError, ValueError):  # a container's limit, or "max"; its caches can go
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = dict(map(str.split, Path("/sys/fs/cgroup/memory.stat").read_text().splitlines()))
        free = min(free, max(0, limit - int(used["anon"])))
    return free // int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # torchrun's processes share it


def check_memory(what, wanted_bytes, device):
    """Raise ValueError if `what`, such as "max_len=8192", takes more than free_bytes(device)."""
    if wanted_bytes > (free := free_bytes(device)):
        wanted = min(wanted_bytes, 10**30) / 1e9
        raise ValueError(f"{what}: takes {wanted:,.1f} GB, {free / 1e9:,.1f} GB are free")
