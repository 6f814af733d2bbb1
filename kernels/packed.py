"""Weights as oneDNN multiplies 16-bit matrices fastest on a CPU: packed once, at load.

A plain weight is packed into the tiles of the processor's dot products at each call, which for a
decode-only batch takes a third of the time of the products. torch.compile uses these operators too,
when it freezes a model for inference.

    model.pack()    # in place: each layer takes the place of the one that it was made from
"""

import warnings

import torch
import torch.nn as nn


class PackedLinear(nn.Module):
    """An nn.Linear for inference. Its weight (out_features, in_features) is opaque: an operand."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self.weight, self.bias = nn.Parameter(packed, requires_grad=False), linear.bias
        self.operator = torch.ops.mkldnn._linear_pointwise.default

    def _apply(self, function, recurse=True):
        raise ValueError("packed weights cannot be moved or converted: load the model anew")

    def forward(self, x):
        """x (rows, in_features) -> (rows, out_features)"""
        return self.operator(x, self.weight, self.bias, "none", [], "")


def can_pack(model):
    """Whether its weights may be packed: bfloat16, on a CPU that multiplies them itself."""
    if model.compiled or model.device.type != "cpu" or model.dtype != torch.bfloat16:
        return False  # inductor takes no packed weights
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    try:
        PackedLinear(nn.Linear(32, 32, dtype=model.dtype))(torch.ones(2, 32, dtype=model.dtype))
    except (AttributeError, RuntimeError) as error:
        warnings.warn(f"weights are not packed, which is slower: {error}", stacklevel=3)
        return False
    return True


def pack(model):
    """Pack the linear layers of a model.GPT, one by one, and return it: no two copies are held. A
    head that is tied to the embedding stays: rows of an opaque weight cannot be looked up."""
    for parent in [*model.blocks, model] if can_pack(model) else []:
        for name, child in list(parent.named_children()):
            tied = child is model.head and model.config.tie_embeddings
            if isinstance(child, nn.Linear) and not tied:
                setattr(parent, name, PackedLinear(child))
    return model
