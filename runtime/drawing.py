"""Random draws of many requests at once: temperature, top-k and top-p. Read first: sampling.py."""

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attention.plan import to_device

FEW_TOKENS = 1024  # are sorted for a smaller top_k, as a vocabulary may be 100 times as large
ROWS_AT_ONCE = 32  # are drawn, so that memory is bounded: 33 MB a tensor with llama3-8b


def draw(
    tokens: Tensor,
    logits: Tensor,
    params: Sequence[Any],
    positions: Sequence[int],
) -> None:
    """Set the tokens of those rows whose temperature is above 0; arguments as of sampling.sample.

    The n-th output token of a request takes the number n of its own random stream."""
    vocab_size = logits.shape[1]
    # Rows are drawn with those that sort as many tokens. The order decides what is drawn, so how
    # many that are depends on the row's own parameters only; 0 if all tokens can be drawn.
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row, p in enumerate(params):
        if p.temperature == 0:
            continue
        count = 0
        if p.top_k or p.top_p < 1:
            count = FEW_TOKENS if 0 < p.top_k <= FEW_TOKENS else vocab_size
            count = min(count, vocab_size)
        groups[count, row // ROWS_AT_ONCE].append(row)
    for (count, _), rows in groups.items():
        index = _column(rows, logits, torch.int64)[:, 0]
        uniforms = []
        for row in rows:
            stream = random.Random(f"{params[row].seed}/{positions[row]}")
            uniforms.append(stream.random())
        row_params = [params[row] for row in rows]
        tokens[index] = _draw(logits[index].double(), row_params, uniforms, count)


def _draw(
    logits: Tensor,
    params: Sequence[Any],
    uniforms: Sequence[float],
    count: int,
) -> Tensor:
    """Inverse transform sampling: the first token at which the cumulated probability passes the
    row's uniform. `count` > 0: over so many of the likeliest tokens, from the likeliest down."""
    logits = logits - logits.amax(dim=-1, keepdim=True)  # a tiny temperature cannot overflow
    temperatures = _column([p.temperature for p in params], logits)
    probs = (logits / temperatures).softmax(dim=-1)
    if not count:
        return _first_above(uniforms, probs)[:, 0]
    likeliest = probs.topk(count).values
    rank = torch.arange(count, device=probs.device)
    kept = likeliest * (rank < _column([p.top_k or count for p in params], probs))
    kept = kept / kept.sum(dim=-1, keepdim=True)
    before = kept.cumsum(dim=-1) - kept  # a token stays while those before do not reach top_p
    kept = kept * (before < _column([p.top_p for p in params], probs))
    rank = _first_above(uniforms, kept)
    # of equal tokens the first ones have the smaller ids
    prob = likeliest.gather(1, rank)
    rank_among_equals = rank - (likeliest > prob).sum(dim=-1, keepdim=True)
    equals_so_far = (probs == prob).cumsum(dim=-1)
    index = torch.searchsorted(equals_so_far, rank_among_equals + 1)
    return index.clamp_(max=probs.shape[1] - 1)[:, 0]


def _first_above(uniforms: Sequence[float], probs: Tensor) -> Tensor:
    """The first index of each row at which its cumulated share passes the uniform, (rows, 1)."""
    cumulated = probs.cumsum(dim=-1)
    cumulated = cumulated / cumulated[:, -1:]
    index = torch.searchsorted(cumulated, _column(uniforms, probs), right=True)
    return index.clamp_(max=probs.shape[1] - 1)  # beyond it only if the logits hold NaN


def _column(values: Sequence[float], like: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """One number per row, (rows, 1), on the device of `like`."""
    return to_device(values, like.device, dtype)[:, None]
