"""GPTConfig: the geometry of a model, by its numbers or by the name of a preset. Plain Python.

Read next: presets.py; model.py, which is made of one."""

from dataclasses import dataclass, replace
from typing import Any, Self

from errors import (
    SMALLEST,
    check_bool,
    check_number,
    check_one_of,
    check_positive,
    check_sizes,
    check_type,
    set_field,
)
from pretrained.presets import PRESETS

# The largest sizes: far above those of any model, so that no product of them overflows, and no
# loop over layers takes minutes. The derived ones have defaults that are made of the others.
GIVEN_SIZES = {
    "vocab_size": 2**24,
    "n_layer": 2**10,
    "n_head": 2**16,
    "n_embd": 2**24,
    "max_positions": 2**24,
}
DERIVED_SIZES = {
    "n_kv_head": 2**16,
    "head_dim": 2**16,
    "n_inner": 2**26,
}
# Fields of GPTConfig by `model_type`, where they are not as its defaults say.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": {"family": "gpt2", "tie_embeddings": True},
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
}
DERIVED: Any = None  # the default of a field that is computed from others


@dataclass(frozen=True)
class RopeScaling:
    """LLaMA 3's scaling of RoPE's frequencies, for contexts longer than trained.

    Raises ValueError, naming the field, where it makes no sense."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def __post_init__(self) -> None:
        at_least_1 = "a finite number of at least 1"
        set_field(self, "factor", check_number("factor", self.factor, at_least_1, minimum=1))
        for field in ("low_freq_factor", "high_freq_factor"):
            set_field(self, field, check_positive(field, getattr(self, field)))
        if self.low_freq_factor >= self.high_freq_factor:
            allowed = f"must be below high_freq_factor={self.high_freq_factor}"
            raise ValueError(f"low_freq_factor={self.low_freq_factor}: {allowed}")
        check_sizes(self, {"original_max_positions": GIVEN_SIZES["max_positions"]})


@dataclass(frozen=True)
class GPTConfig:
    """The geometry of a model. Raises ValueError, naming the field, where it makes no sense."""

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
        check_sizes(self, GIVEN_SIZES)
        head_dim = self.n_embd // self.n_head
        derived = {"n_kv_head": self.n_head, "head_dim": head_dim, "n_inner": 4 * self.n_embd}
        for field, default in derived.items():
            if getattr(self, field) is DERIVED:
                set_field(self, field, default)
        check_sizes(self, DERIVED_SIZES)
        self._check_others()

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """A geometry by name (pretrained/presets.py), some fields changed. Raises ValueError."""
        check_one_of("preset", name, PRESETS)
        return replace(cls(**PRESETS[name]), **changes)

    @property
    def sizes(self) -> str:
        """All sizes with their names, as one text."""
        names = (*GIVEN_SIZES, *DERIVED_SIZES)
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)

    def _check_others(self) -> None:
        """Check the fields that are no sizes."""
        check_one_of("family", self.family, ("gpt2", "llama"))
        for field in ("qkv_bias", "qk_norm", "tie_embeddings"):
            check_bool(field, getattr(self, field))
        allowed = "a number above 0 and at most 1"
        set_field(self, "norm_eps", check_number("norm_eps", self.norm_eps, allowed, SMALLEST, 1))
        allowed = "a finite number of at least 1"
        theta = check_number("rope_theta", self.rope_theta, allowed, minimum=1)
        set_field(self, "rope_theta", theta)
        check_type("rope_scaling", self.rope_scaling, RopeScaling | None, "a RopeScaling or None")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_kv_head={self.n_kv_head}: must divide n_head={self.n_head}")
        if self.family == "llama" and self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: must be even, RoPE rotates pairs")
