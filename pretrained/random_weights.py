"""The weights of a model that is not trained."""

import math

import torch
from torch import Tensor


def init_weight(name: str, p: Tensor, n_layer: int, generator: torch.Generator) -> None:
    """Fill the parameter of that name by GPT-2's rule: normal(0, 0.02), scaled down where a layer
    adds to the residual stream."""
    if p.ndim == 1:
        p.fill_(1.0 if name.endswith("norm.weight") else 0.0)
    else:
        residual = name.endswith(("postproj.weight", "ffn_ln2.weight"))
        std = 0.02 / math.sqrt(2 * n_layer) if residual else 0.02
        p.normal_(0, std, generator=generator)


def weight_generator(device: torch.device | str, seed: int) -> torch.Generator:
    """The random numbers that weights of this seed are made of. Raises ValueError."""
    if torch.device(device).type == "meta":
        raise ValueError("device='meta': has no memory for random weights, must have seed=None")
    return torch.Generator(device).manual_seed(seed)
