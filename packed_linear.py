"""Weights as oneDNN multiplies 16-bit matrices fastest on a CPU: packed once, at load.

A plain weight is packed into the tiles of the processor's dot products at each call, which for a
decode-only batch takes a third of the time of the products. torch.compile uses them, too."""

from collections.abc import Callable
from typing import Self

import torch
import torch.nn as nn
from torch import Tensor

from model import GPT


class PackedLinear(nn.Module):
    """An nn.Linear for inference. Its weight (out_features, in_features) is opaque: an operand."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.bias = linear.bias
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self.weight = nn.Parameter(packed, requires_grad=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        raise ValueError("packed weights cannot be moved or converted: load the model anew")

    def forward(self, x: Tensor) -> Tensor:
        """x (rows, in_features) -> (rows, out_features)"""
        return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")


def pack(model: GPT) -> GPT:
    """Pack the linear layers of a model in place, and return it. Engines do it to their model.

    It is done if the model is in bfloat16 on a CPU that multiplies that itself; layer by layer, so
    that no two copies of the weights are held. A head that is tied to the embedding stays as it is:
    rows of an opaque weight cannot be looked up."""
    if model.compiled or model.device.type != "cpu" or model.dtype != torch.bfloat16:
        return model  # inductor takes no packed weights
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return model
    for parent in [*model.blocks, model]:
        for name, child in list(parent.named_children()):
            tied = child is model.head and model.config.tie_embeddings
            if isinstance(child, nn.Linear) and not tied:
                setattr(parent, name, PackedLinear(child))
    return model
