"""Layers that compute a long batch in pieces of some rows, of which each is its own.

A CPU's allocator returns blocks of over 32 MB to the system, and new ones mean page faults. On CUDA
it bounds the memory."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from model import GPT


def by_rows(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """function(*tensors), a row for each of theirs."""
    rows = 8192 if tensors[0].is_cuda else 1024
    if len(tensors[0]) <= rows:
        return function(*tensors)
    pieces = zip(*(tensor.split(rows) for tensor in tensors), strict=True)
    return torch.cat([function(*piece) for piece in pieces])


def cut_long_batches(model: GPT) -> None:
    """Let each layer compute long batches in pieces, once and for all."""
    for block in model.blocks:
        if not isinstance(block.project, partial):
            block.project = partial(by_rows, block.project)
            block.finish = partial(by_rows, block.finish)
