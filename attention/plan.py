"""The interface of the attention backends, and the mask of a chunk.

Read first: the top of attention/__init__.py. Read next: sdpa.py."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from request import Chunk


class AttentionPlan(Protocol):
    """Attention for one batch: made once, called in each layer."""

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q (num_tokens, n_head, head_dim), the rows of all chunks one after the other;
        keys and values (n_kv_head, slots, head_dim), one layer of the cache -> as q."""
        ...


class AttentionBackend(Protocol):
    """Makes plans for batches that are computed in one cache."""

    page_size: int
    device: torch.device

    def plan(self, chunks: Sequence[Chunk]) -> AttentionPlan:
        """The plan of a batch. Chunks of one token come first, in the order of the rows of q."""
        ...


def to_device(
    numbers: Sequence[float] | Sequence[Sequence[float]],
    device: torch.device,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """The numbers as a tensor on the device, without waiting for it."""
    pinned = device.type == "cuda"  # or the copy would wait
    tensor = torch.tensor(numbers, dtype=dtype, pin_memory=pinned)
    return tensor.to(device, non_blocking=True)


def staircase(
    queries: int,
    past: int,
    group: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The mask of a chunk of so many queries. It is added to scores: 0 attends, -inf hides.

    Shape (queries * group, past + queries). Row i * group + g belongs to query i; column `past + i`
    is the query's own key. It is SARATHI's Figure 6. With past = 4 and group = 1, three queries see
    (o: 0, .: -inf)

        key       0   1   2   3   4   5   6
        query 4   o   o   o   o   o   .   .
        query 5   o   o   o   o   o   o   .
        query 6   o   o   o   o   o   o   o
    """
    column = torch.arange(past + queries, device=device) - past
    row = torch.arange(queries, device=device).repeat_interleave(group)
    bias = torch.zeros(len(row), len(column), dtype=dtype, device=device)
    return bias.masked_fill_(column > row[:, None], float("-inf"))
