"""The numbers of a geometry that model.GPTConfig accepts, and how RoPE is scaled."""

from dataclasses import dataclass
from typing import Any

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


def check_geometry(config: Any) -> None:
    """Check the fields of a model.GPTConfig that are no sizes, in its __post_init__ alone.

    Raises ValueError, naming the field, where one makes no sense."""
    check_one_of("family", config.family, ("gpt2", "llama"))
    for field in ("qkv_bias", "qk_norm", "tie_embeddings"):
        check_bool(field, getattr(config, field))
    allowed = "a number above 0 and at most 1"
    set_field(config, "norm_eps", check_number("norm_eps", config.norm_eps, allowed, SMALLEST, 1))
    allowed = "a finite number of at least 1"
    theta = check_number("rope_theta", config.rope_theta, allowed, minimum=1)
    set_field(config, "rope_theta", theta)
    check_type("rope_scaling", config.rope_scaling, RopeScaling | None, "a RopeScaling or None")
    if config.n_head % config.n_kv_head:
        raise ValueError(f"n_kv_head={config.n_kv_head}: must divide n_head={config.n_head}")
    if config.family == "llama" and config.head_dim % 2:
        raise ValueError(f"head_dim={config.head_dim}: must be even, RoPE rotates pairs")
