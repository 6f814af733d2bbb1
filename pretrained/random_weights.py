"""The weights of a model that is not trained."""

import math
from typing import Any

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


def init_weights(model: Any, seed: int) -> None:
    """Fill all parameters of a GPT, where they are."""
    generator = torch.Generator(model.device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        init_weight(name, parameter, model.config.n_layer, generator)
