"""EngineConfig: all that an engine, real or simulated, is told besides its model.

Read next: engine.py."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from errors import INT64_MAX, check_bool, check_names, check_sizes, check_type, set_field
from hardware.memory import ModelLike, check_memory, pages_that_fit, small_page_size
from kv_cache import Pages, kv_bytes_per_token
from policies import check_options, find_policy, make_scheduler, policy_options
from policies.pages import make_pages
from scheduler import Scheduler

MAX_BATCH = 256  # the largest default of max_batch, however much memory there is
MAX_LEN = 2048  # the largest default of max_len
MAX_PAGES = 2**28  # they take some gigabytes to count
CUDA_TILE = 128  # tokens in a tile of matrix products on a GPU (SARATHI §4.4)


@dataclass(frozen=True)
class EngineConfig:
    """All that an engine is told besides its model. Raises ValueError, naming the argument."""

    policy: str = "sarathi-serve"  # a name in ALL_POLICIES, or "my_policy.py:ClassName"
    chunk: int = 256  # C, the chunk size or token budget
    max_batch: int | None = None  # B, the most requests at once; None: as many as fit, at most 256
    max_len: int | None = None  # the longest prompt and output; None: 2,048, or the model's limit
    page_size: int | None = None  # tokens; None: max_len, for prefix_caching small_page_size
    pages: int | None = None  # None: enough for max_batch requests of max_len tokens
    prefix_caching: bool = False  # share the pages of prompts that begin alike
    max_waiting: int | None = None  # the most requests that may wait; None: no limit
    attention: str = "auto"  # the backend, see attention.make_attention
    policy_options: Mapping[str, Any] = field(default_factory=dict)  # as {"tbt_slo": 0.1}

    def __new__(cls, *args: Any, **fields: Any) -> Self:
        check_names(cls, fields)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_options(self.policy, self.policy_options)
        set_field(self, "policy_options", dict(self.policy_options))
        check_type("attention", self.attention, str, "the name of a backend")
        check_bool("prefix_caching", self.prefix_caching)
        optional = ("max_batch", "max_len", "page_size", "pages", "max_waiting")
        sizes = [name for name in optional if getattr(self, name) is not None]
        limits = dict.fromkeys(["chunk", *sizes], INT64_MAX)
        if self.pages is not None:
            limits["pages"] = MAX_PAGES
        check_sizes(self, limits)
        if self.max_len is None or self.page_size is None:
            return
        if self.page_size > self.max_len:
            raise ValueError(f"page_size={self.page_size}: must be at most max_len={self.max_len}")
        if self.prefix_caching and self.page_size == self.max_len:
            below = f"must be below max_len={self.max_len}, for prefix_caching"
            raise ValueError(f"page_size={self.page_size}: {below}")

    def for_model(self, model: ModelLike) -> Self:
        """The same with all numbers filled in. Raises ValueError if model or memory forbid it."""
        if model.device.type == "meta":
            raise ValueError("model: is on the device 'meta', must be where there is memory")
        limit = model.config.max_positions
        max_len = self.max_len or min(MAX_LEN, limit)
        if max_len > limit:
            reason = "this model's limit (max_positions, or its sliding window)"
            raise ValueError(f"max_len={max_len}: must be at most {limit}, {reason}")
        page_size = self.page_size
        if page_size is None:
            page_size = small_page_size(max_len, model.device) if self.prefix_caching else max_len
        sized = replace(self, max_len=max_len, page_size=page_size)  # raises if they do not fit
        pages = self.pages
        description = f"pages={pages}, page_size={page_size}"
        if pages is None:
            description = f"max_batch={self.max_batch}, max_len={max_len}"
            pages = (self.max_batch or MAX_BATCH) * -(-max_len // page_size)
            if self.max_batch is None:
                pages = min(pages, pages_that_fit(model, max_len, page_size))
        cache_bytes = pages * page_size * kv_bytes_per_token(model.config, model.dtype)
        check_memory(description, cache_bytes, model.device)
        max_batch = self.max_batch or min(pages, MAX_BATCH)
        tiled = sized.with_tile(CUDA_TILE) if model.device.type == "cuda" else sized
        return replace(tiled, max_batch=max_batch, pages=pages)

    def with_tile(self, tile: int) -> Self:
        """The same; a policy with the option `tile` gets this one, unless it has another."""
        if "tile" not in policy_options(find_policy(self.policy)):
            return self
        return replace(self, policy_options={"tile": tile, **self.policy_options})

    @property
    def limits(self) -> dict[str, Any]:
        """The arguments of any Scheduler, but for its pages and clock."""
        return {"chunk": self.chunk, "max_batch": self.max_batch, "max_len": self.max_len}

    @property
    def cache_sizes(self) -> tuple[int, int, int]:
        """(pages, page_size, max_len). See for_model first."""
        assert self.pages and self.page_size and self.max_len
        return self.pages, self.page_size, self.max_len

    def pages_of(self, parts: int = 1) -> Pages:
        """The Pages of one of `parts` equal parts of the cache, all free. See for_model first."""
        total, page_size, max_len = self.cache_sizes
        pages = make_pages(total // parts, page_size, self.prefix_caching)
        needed = pages.needed(max_len)
        if pages.total < needed:
            takes = f"a request of max_len={max_len} takes {needed} pages"
            raise ValueError(f"pages={pages.total}: {takes} of page_size={page_size}")
        return pages

    def scheduler(self, clock: Callable[[], float], parts: int = 1) -> Scheduler:
        """A scheduler of this policy, with one of `parts` equal parts of the cache."""
        options = {**self.limits, **self.policy_options}
        return make_scheduler(self.policy, self.pages_of(parts), clock=clock, **options)
