"""EngineConfig: all that an engine, real or simulated, is told besides its model.

Read next: engine.py."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from errors import (
    INT64_MAX,
    ArgumentError,
    QueueFull,
    check_bool,
    check_names,
    check_sizes,
    check_type,
    check_whole,
    set_field,
)
from kv_cache import Pages
from policies import check_options, find_policy, make_scheduler, policy_options
from policies.pages import make_pages
from runtime.memory import CUDA_TILE, ModelLike, fill_in
from scheduler import Scheduler

MAX_PAGES = 2**28  # they take some gigabytes to count


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
        optional = ("max_batch", "page_size", "pages", "max_waiting")
        sizes = [name for name in optional if getattr(self, name) is not None]
        limits = dict.fromkeys(["chunk", *sizes], INT64_MAX)
        if self.pages is not None:
            limits["pages"] = MAX_PAGES
        check_sizes(self, limits)
        if self.max_len is not None:
            set_field(self, "max_len", check_whole("max_len", self.max_len, 2))  # prompt, output
        if self.max_len is None or self.page_size is None:
            return
        if self.page_size > self.max_len:
            raise ValueError(f"page_size={self.page_size}: must be at most max_len={self.max_len}")
        if self.prefix_caching and self.page_size == self.max_len:
            below = f"must be below max_len={self.max_len}, for prefix_caching"
            raise ValueError(f"page_size={self.page_size}: {below}")

    def for_model(self, model: ModelLike) -> Self:
        """The same with all numbers filled in. Raises ValueError if model or memory forbid it."""
        sizes = fill_in(
            model,
            max_batch=self.max_batch,
            max_len=self.max_len,
            page_size=self.page_size,
            pages=self.pages,
            prefix_caching=self.prefix_caching,
        )
        filled = replace(self, **sizes)
        return filled.with_tile(CUDA_TILE) if model.device.type == "cuda" else filled

    def check_fits(self, prompt_len: int, max_new_tokens: int) -> None:
        """Raise ValueError if such a request could never fit: it would be queued for ever."""
        assert self.max_len
        if prompt_len + max_new_tokens > self.max_len:
            total = f"prompt of {prompt_len} tokens + max_new_tokens={max_new_tokens}"
            raise ArgumentError(f"{total}: must not exceed max_len={self.max_len}", "prompt")

    def check_queue(self, waiting: int) -> None:
        """Raise QueueFull if so many requests wait that no other may."""
        if self.max_waiting is not None and waiting >= self.max_waiting:
            raise QueueFull(f"max_waiting={self.max_waiting}: as many requests wait")

    def with_tile(self, tile: int) -> Self:
        """The same, with the option `tile` for a policy that has it and was not given one."""
        if "tile" not in policy_options(find_policy(self.policy)):
            return self
        return replace(self, policy_options={"tile": tile, **self.policy_options})

    @property
    def limits(self) -> dict[str, Any]:
        """The sizes that every Scheduler takes, beside its pages and clock."""
        return {"chunk": self.chunk, "max_batch": self.max_batch, "max_len": self.max_len}

    @property
    def cache_sizes(self) -> tuple[int, int, int]:
        """(pages, page_size, max_len). Only after for_model."""
        assert self.pages and self.page_size and self.max_len
        return self.pages, self.page_size, self.max_len

    def pages_of(self, parts: int = 1) -> Pages:
        """The Pages of one of `parts` equal parts of the cache, all free. Only after for_model."""
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
