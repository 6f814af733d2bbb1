"""Rotary position embeddings: the factors that model.rotate_ multiplies by."""

import math

import torch
from torch import Tensor

from config import GPTConfig


def rope_table(
    config: GPTConfig, device: torch.device | str, dtype: torch.dtype, positions: int | None = None
) -> Tensor:
    """The factors of `rotate_`, (positions, 2, 1, head_dim), at least float32.

    By default these are all positions that the model has.

    At every position there are the cosines of all angles, twice, and their sines, first negative.
    LLaMA 3's `rope_scaling` stretches wavelengths longer than the trained context by `factor`,
    keeps those much shorter, and interpolates between."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequency = config.rope_theta**-exponent  # (head_dim / 2,), the angle per position
    scaling = config.rope_scaling
    if scaling is not None:
        turns = scaling.original_max_positions * frequency / (2 * math.pi)  # in trained contexts
        low = scaling.low_freq_factor
        high = scaling.high_freq_factor
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = frequency * (keep + (1 - keep) / scaling.factor)
    position = torch.arange(positions or config.max_positions, dtype=torch.float64)
    angle = torch.outer(position, frequency)
    cos = angle.cos()
    sin = angle.sin()
    table = torch.stack([torch.cat([cos, cos], 1), torch.cat([-sin, sin], 1)], dim=1).unsqueeze(2)
    return table.to(device=device, dtype=torch.promote_types(dtype, torch.float32))
