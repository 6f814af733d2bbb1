"""GPTConfig, the geometry of a model, and EngineConfig, all else that an engine is told.

Plain Python: simulator, exercises and schedule page need both, and no torch. Read next:
engine.py."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from pretrained.presets import PRESETS

GPT_SIZES = ("vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd", "head_dim", "n_inner")
DERIVED: Any = None  # the default of a field that is computed from others


class TooLong(ValueError):  # noqa: N818
    """A request was rejected because prompt and output together exceed max_len."""


class QueueFull(ValueError):  # noqa: N818
    """A request was rejected because max_waiting others wait."""


def check_sizes(config: object, names: tuple[str, ...]) -> None:
    """Raise ValueError if one of these fields is below 1. None is no size."""
    for name in names:
        size = getattr(config, name)
        if size is not None and size < 1:
            raise ValueError(f"{name}={size}: must be at least 1")


@dataclass(frozen=True)
class RopeScaling:
    """LLaMA 3's scaling of RoPE's frequencies, for contexts longer than trained."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class GPTConfig:
    """The geometry of a model. Raises ValueError, naming the field, for sizes that do not fit."""

    family: str = "llama"  # RMSNorm, RoPE, SwiGLU; "gpt2": LayerNorm, learned positions, GELU
    vocab_size: int = 32000
    n_layer: int = 32
    n_head: int = 32
    n_embd: int = 4096
    n_kv_head: int = DERIVED  # n_head
    head_dim: int = DERIVED  # n_embd // n_head
    n_inner: int = DERIVED  # 4 * n_embd
    max_positions: int = 2048
    norm_eps: float = 1e-5
    qkv_bias: bool = False  # GPT-2 has biases everywhere in any case
    qk_norm: bool = False  # RMSNorm of each head's queries and keys, as Qwen3 has it
    tie_embeddings: bool = False
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        check_sizes(self, (*GPT_SIZES, "max_positions"))
        head_dim = self.n_embd // self.n_head
        derived = {"n_kv_head": self.n_head, "head_dim": head_dim, "n_inner": 4 * self.n_embd}
        for name, default in derived.items():
            if getattr(self, name) is DERIVED:
                object.__setattr__(self, name, default)
        if self.family not in ("gpt2", "llama"):
            raise ValueError(f"family={self.family!r}: must be 'gpt2' or 'llama'")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_kv_head={self.n_kv_head}: must divide n_head={self.n_head}")
        if self.family == "llama" and self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: must be even, RoPE rotates pairs")

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """A geometry by name (pretrained/presets.py), some fields changed. Raises ValueError."""
        if name not in PRESETS:
            raise ValueError(f"preset={name!r}: must be one of {', '.join(PRESETS)}")
        return replace(cls(**PRESETS[name]), **changes)


@dataclass(frozen=True)
class EngineConfig:
    """All that an engine is told besides its model. Raises ValueError for a size below 1."""

    policy: str = "sarathi-serve"  # a name in ALL_POLICIES, or "my_policy.py:ClassName"
    chunk: int = 256  # C, the chunk size or token budget
    max_batch: int | None = None  # B, the most requests at once; None: as many as fit, at most 256
    max_len: int | None = None  # the longest prompt and output; None: 2,048, or the model's limit
    page_size: int | None = None  # tokens; None: max_len, for prefix_caching small_page_size
    pages: int | None = None  # None: enough for max_batch requests of max_len tokens
    prefix_caching: bool = False  # share the pages of prompts that begin alike
    max_waiting: int | None = None  # the most requests that may wait; None: no limit
    attention: str = "auto"  # the backend, see fast.make_attention
    policy_options: Mapping[str, Any] = field(default_factory=dict)  # as {"tbt_slo": 0.1}

    def __post_init__(self) -> None:
        check_sizes(self, ("chunk", "max_batch", "max_len", "page_size", "pages", "max_waiting"))

    @property
    def cache_sizes(self) -> tuple[int, int, int]:
        """(pages, page_size, max_len), once runtime.memory.fill_in has filled them in."""
        assert self.pages and self.page_size and self.max_len
        return self.pages, self.page_size, self.max_len

    def check_fits(self, prompt_len: int, max_new_tokens: int) -> None:
        """Raise TooLong if such a request could never fit: it would be queued for ever."""
        assert self.max_len
        if prompt_len + max_new_tokens > self.max_len:
            total = f"prompt of {prompt_len} tokens + max_new_tokens={max_new_tokens}"
            raise TooLong(f"{total}: must not exceed max_len={self.max_len}")

    def check_queue(self, waiting: int) -> None:
        """Raise QueueFull if so many requests wait that no other may."""
        if self.max_waiting is not None and waiting >= self.max_waiting:
            raise QueueFull(f"max_waiting={self.max_waiting}: as many requests wait")
