"""Long prefills go through a layer in pieces. Read first: model.py."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# A CPU's allocator returns blocks of over 32 MB to the system, and new ones mean page faults. On
# CUDA it only bounds the memory of activations.
ROWS_PER_PIECE = {"cpu": 1024, "cuda": 8192}


def by_rows(function: Callable[..., Any], *tensors: Tensor) -> Any:
    """function(*tensors), a tensor or a tuple, in pieces. It must treat rows independently."""
    piece = ROWS_PER_PIECE.get(tensors[0].device.type, 8192)
    if len(tensors[0]) <= piece:
        return function(*tensors)
    pieces = zip(*(tensor.split(piece) for tensor in tensors), strict=True)
    results = [function(*rows) for rows in pieces]
    if isinstance(results[0], tuple):
        return tuple(torch.cat(columns) for columns in zip(*results, strict=True))
    return torch.cat(results)
