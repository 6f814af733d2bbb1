"""Weights as a CPU's libraries multiply matrices fastest: packed once, at load.

A plain weight is packed into the tiles of the processor at each call. For a decode-only batch that
takes a third of the time of the products or more, and for a chunk it costs more of each row than
for a whole prompt. 16-bit weights are packed by oneDNN, float32 by MKL. torch.compile uses the same
operators."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple, Self

import torch
import torch.nn as nn
from torch import Tensor

from model import GPT

ROWS = 256  # of a typical chunk: kinds of layers are compared on it, and MKL packs for it
IN_FEATURES = 512  # of the layer that is timed
OUT_FEATURES = 1024
TURNS = 5  # of measure_layers
RATE_GROWTH = 1.02  # steady_rates ends when for 4 rounds in a row no rate has grown by more
STEADY_ROUNDS = 4
MOST_ROUNDS = 40  # 3 s


class PackedLinear(nn.Module):
    """An nn.Linear for inference. Its weight is opaque: an operand of the library's product."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
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
        return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")


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


def packings_of(dtype: torch.dtype) -> list[type[PackedLinear]]:
    """The packings that exist for a type on this CPU."""
    packings: list[type[PackedLinear]] = []
    has_onednn = torch.backends.mkldnn.is_available()
    if dtype == torch.float32:
        if torch.backends.mkl.is_available():
            packings.append(MKLLinear)
        if has_onednn:
            packings.append(OneDNNLinear)
    elif dtype == torch.bfloat16 and has_onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        packings.append(OneDNNLinear)
    return packings


class TimedLayer(NamedTuple):
    """A kind of layer, and how fast it multiplies ROWS rows."""

    kind: type[nn.Module]
    flops_per_s: float


def measure_layers(dtype: torch.dtype) -> list[TimedLayer]:
    """Time each kind of layer that multiplies this type on this CPU, in some milliseconds.

    They run in turns, and the shortest time of each counts: others on this machine can only make a
    time longer."""
    linear = nn.Linear(IN_FEATURES, OUT_FEATURES, bias=False, dtype=dtype).requires_grad_(False)
    layers: list[nn.Module] = [linear]
    layers += [packing(linear) for packing in packings_of(dtype)]
    x = torch.ones(ROWS, IN_FEATURES, dtype=dtype)
    seconds = [math.inf] * len(layers)
    with torch.inference_mode():
        for _ in range(TURNS):
            for i, layer in enumerate(layers):
                start = time.perf_counter()
                layer(x)
                seconds[i] = min(seconds[i], time.perf_counter() - start)
    flops = 2 * ROWS * IN_FEATURES * OUT_FEATURES
    return [TimedLayer(type(layer), flops / s) for layer, s in zip(layers, seconds, strict=True)]


def steady_rates(dtypes: Sequence[torch.dtype]) -> dict[torch.dtype, dict[type[nn.Module], float]]:
    """Flops per second of a chunk's product on this CPU, by type and kind of layer.

    Takes a third of a second. The types take turns, and the highest rate of each kind counts, once
    it has stopped growing: so others on this machine, who can only make a product slower, do not
    decide which is faster."""
    rates: dict[torch.dtype, dict[type[nn.Module], float]]
    rates = {dtype: defaultdict(float) for dtype in dtypes}
    steady = 0
    for _ in range(MOST_ROUNDS):
        steady += 1
        for dtype, rate_of in rates.items():
            for kind, flops_per_s in measure_layers(dtype):
                if flops_per_s > RATE_GROWTH * rate_of[kind]:
                    steady = 0
                rate_of[kind] = max(rate_of[kind], flops_per_s)
        if steady == STEADY_ROUNDS:
            break
    return rates


@cache
def fastest_layer(dtype: torch.dtype, threads: int) -> type[nn.Module]:
    """The kind of layer that multiplies a chunk of this type fastest on this CPU: as measured.

    Libraries differ between processors: MKL's product of packed float32 weights is the fastest on
    an Intel Xeon, oneDNN's on an AMD EPYC. `threads` is torch's number of threads."""
    if not packings_of(dtype):
        return nn.Linear
    rates = steady_rates([dtype])[dtype]
    return max(rates, key=lambda kind: rates[kind])


def pack(model: GPT) -> GPT:
    """Pack the linear layers of a model in place, and return it. Engines do it to their model.

    It is done on a CPU, if a packing is faster there than plain weights."""
    if model.compiled or model.device.type != "cpu":
        return model  # inductor takes no packed weights
    kind = fastest_layer(model.dtype, torch.get_num_threads())
    return pack_as(kind, model) if issubclass(kind, PackedLinear) else model


def pack_as(kind: type[PackedLinear], model: GPT) -> GPT:
    """Replace the plain linear layers of a model by packed ones of this kind, and return it.

    It is done layer by layer, so that no two copies of the weights are held, but for a head that is
    tied to the embedding: rows of an opaque weight cannot be looked up, so the plain one stays
    there. A decode reads the packed one in a third of the time."""
    for parent in [*model.blocks, model]:
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, kind(child))
    return model


def count_parameters(model: GPT) -> int:
    """The number of parameters of a model, packed or not: no padding, a tied head once."""
    count = sum(parameter.numel() for parameter in model.parameters())
    for layer in model.modules():
        if isinstance(layer, PackedLinear):
            is_copy = layer is model.head and model.config.tie_embeddings
            plain = 0 if is_copy else layer.in_features * layer.out_features
            count += plain - layer.weight.numel()
    return count
