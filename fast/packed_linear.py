"""Weights as a CPU's libraries multiply matrices fastest: packed once, at load.

A plain weight is packed into the tiles of the processor at each call. For a decode-only batch that
takes a third of the time of the products or more, and for a chunk it costs more of each row than
for a whole prompt. torch.compile uses the same operators. For the rule that chooses between them
see fast/__init__.py."""

from collections.abc import Callable
from typing import Self

import torch
import torch.nn as nn
from torch import Tensor

from model import GPT

ROWS = 256  # of a typical chunk: MKL packs for it
FEWEST_ROWS = 4  # oneDNN multiplies one or two rows more slowly than four


class PackedLinear(nn.Module):
    """An nn.Linear for inference. Its weight is opaque: an operand of the library's product."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self._forward_hooks = linear._forward_hooks  # ranks add up their products there
        packed_weight = self.pack_weight(linear.weight.detach())
        self.weight = nn.Parameter(packed_weight, requires_grad=False)

    def pack_weight(self, weight: Tensor) -> Tensor:
        """The packed form of a plain weight, (out_features, in_features)."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        raise ValueError("packed weights cannot be moved or converted: load the model anew")


class OneDNNLinear(PackedLinear):
    """Packed by oneDNN, for bfloat16 and float32."""

    def pack_weight(self, weight: Tensor) -> Tensor:
        return torch.ops.mkldnn._reorder_linear_weight(weight, None)

    def forward(self, x: Tensor) -> Tensor:
        """x (rows, in_features) -> (rows, out_features)"""
        rows = len(x)
        if rows == 1:
            x = x.expand(FEWEST_ROWS, -1)
        elif rows == 2:
            x = x.repeat(FEWEST_ROWS // 2, 1)
        multiply = torch.ops.mkldnn._linear_pointwise.default
        return multiply(x, self.weight, self.bias, "none", [], "")[:rows]


class MKLLinear(PackedLinear):
    """Packed by MKL, for float32. With its padding a small matrix takes up to twice its memory."""

    def pack_weight(self, weight: Tensor) -> Tensor:
        # The product asks for the plain weight, too, but reads its shape alone: one number with
        # the strides of a whole matrix, so that the weight is not held twice.
        self.plain_weight = weight.new_zeros(1).expand(weight.shape)
        return torch.ops.mkl._mkl_reorder_linear_weight(weight, ROWS)

    def forward(self, x: Tensor) -> Tensor:
        """x (rows, in_features) -> (rows, out_features)"""
        return torch.ops.mkl._mkl_linear(x, self.weight, self.plain_weight, self.bias, len(x))


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions that multiply bfloat16, and oneDNN, which uses them."""
    cpu = torch.cpu.get_capabilities()
    has_instructions = cpu.get("avx512_bf16") or cpu.get("amx_bf16")
    return bool(has_instructions and torch.backends.mkldnn.is_available())


def packing_of(dtype: torch.dtype) -> type[PackedLinear] | None:
    """The packing of weights of this type on this CPU. None: they stay plain."""
    has_onednn = torch.backends.mkldnn.is_available()
    if dtype == torch.float32:
        is_intel = "Intel" in str(torch.cpu.get_capabilities().get("cpu_name"))
        if is_intel and torch.backends.mkl.is_available():
            return MKLLinear
        return OneDNNLinear if has_onednn else None
    if dtype == torch.bfloat16 and has_onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return OneDNNLinear
    return None


def pack(model: GPT) -> None:
    """Replace the linear layers of a model on a CPU by packed ones, in place.

    It is done layer by layer, so that no two copies of the weights are held, but for a head that is
    tied to the embedding: rows of an opaque weight cannot be looked up, so the plain one stays
    there. A decode reads the packed one in a third of the time."""
    packing = packing_of(model.dtype)
    if packing is None or model.compiled or model.device.type != "cpu":
        return  # inductor takes no packed weights
    for parent in [*model.blocks, model]:
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, packing(child))
