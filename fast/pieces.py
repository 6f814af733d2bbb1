"""Layers that compute a long batch in pieces of some rows, of which each is its own.

A CPU's allocator returns blocks of over 32 MB to the system, and new ones mean page faults. On CUDA
it bounds the memory."""

from collections.abc import Callable

import torch
from torch import Tensor

from model import GPT

ROWS_ON_CPU = 1024
ROWS_ON_CUDA = 8192


class ByRows:
    """A function of tensors with as many rows each, computed in pieces if there are many."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function

    def __call__(self, *tensors: Tensor) -> Tensor:
        """function(*tensors), a row for each of theirs."""
        rows = ROWS_ON_CUDA if tensors[0].is_cuda else ROWS_ON_CPU
        if len(tensors[0]) <= rows:
            return self.function(*tensors)
        pieces = zip(*(tensor.split(rows) for tensor in tensors), strict=True)
        return torch.cat([self.function(*piece) for piece in pieces])


def cut_long_batches(model: GPT) -> None:
    """Let each layer compute long batches in pieces, once and for all."""
    for block in model.blocks:
        if not isinstance(block.project, ByRows):
            block.project = ByRows(block.project)
            block.finish = ByRows(block.finish)
