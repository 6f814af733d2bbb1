"""From logits to tokens.

Every request has its own stream of random numbers: its n-th output token depends on its logits, its
`seed` and n. So its text does not depend on who shares its batch, on the policy, or on how often a
step was repeated, as far as rounding leaves its logits alone. Read next: config.py."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from attention.plan import to_device
from errors import (
    SMALLEST,
    check_bool,
    check_list,
    check_names,
    check_number,
    check_texts,
    check_token_ids,
    check_whole,
    set_field,
)

FEW_TOKENS = 1024  # are sorted for a smaller top_k, as a vocabulary may be 100 times as large
ROWS_AT_ONCE = 32  # are drawn, so that memory is bounded: 33 MB a tensor with llama3-8b


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt. Raises ValueError, naming the argument, for senseless values.

    max_new_tokens   the most tokens to generate
    temperature      0 takes the likeliest token; otherwise logits are divided by it
    top_k            sample from the k likeliest tokens; 0 for all
    top_p            sample from the fewest likeliest tokens that make up top_p; 1 for all
    seed             the random stream
    stop_token_ids   generation ends with any of these, which is then the last token returned
    stop             generation ends when the text holds any of these, which it then ends before
    logprobs         whether to return those of the chosen tokens, before temperature and top_*"""

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: str | Sequence[str] = ()
    logprobs: bool = False

    def __new__(cls, *args: Any, **fields: Any) -> Self:
        check_names(cls, fields)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("top_k", 0), ("seed", -(2**63))):
            set_field(self, name, check_whole(name, getattr(self, name), least))
        greedy_or = "0 (greedy) or a positive number"
        temperature = check_number("temperature", self.temperature, greedy_or, minimum=0)
        top_p = check_number("top_p", self.top_p, "in (0, 1]", SMALLEST, maximum=1)
        set_field(self, "temperature", temperature)
        set_field(self, "top_p", top_p)
        set_field(self, "stop_token_ids", check_token_ids("stop_token_ids", self.stop_token_ids))
        set_field(self, "stop", check_texts("stop", self.stop))
        check_bool("logprobs", self.logprobs)


def params_of_each(prompts: Any, params: Any) -> list[tuple[Any, SamplingParams]]:
    """Each prompt with its params: one SamplingParams for all, or a list. Raises ValueError."""
    prompts = check_list("prompts", prompts, "a list of prompts")
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * len(prompts)
    params = check_list("params", params, "SamplingParams, or a list of them")
    if len(params) != len(prompts):
        raise ValueError(f"params: {len(params)} given for {len(prompts)} prompts")
    return list(zip(prompts, params, strict=True))


def sample(
    logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> tuple[Tensor, Tensor | None]:
    """Choose one token for each row of logits, (rows, vocab_size).

    Row i decides output token positions[i] of a request with params[i]. Returns (tokens, logprobs),
    both (rows,) on the device of the logits. `logprobs` is None unless some params want it."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    tokens = logits.argmax(dim=-1)
    vocab_size = logits.shape[1]
    # Rows are drawn with those that sort as many tokens. The order decides what is drawn, so how
    # many that are depends on the row's own parameters only; 0 if all tokens can be drawn.
    groups: dict[tuple[int, int], list[int]] = {}
    for row, p in enumerate(params):
        count = FEW_TOKENS if 0 < p.top_k <= FEW_TOKENS else vocab_size
        count = min(count, vocab_size) if p.top_k or p.top_p < 1 else 0
        if p.temperature > 0:
            groups.setdefault((count, row // ROWS_AT_ONCE), []).append(row)
    for (count, _), rows in groups.items():
        index = _column(rows, logits, torch.int64)[:, 0]
        uniforms = [random.Random(f"{params[row].seed}/{positions[row]}").random() for row in rows]
        tokens[index] = _draw(logits[index].double(), [params[i] for i in rows], uniforms, count)
    if not any(p.logprobs for p in params):
        return tokens, None
    return tokens, logits.log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0]


def _draw(
    logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float], count: int
) -> Tensor:
    """Inverse transform sampling: the first token at which the cumulated probability passes the
    row's uniform. `count` > 0: over so many of the likeliest tokens, from the likeliest down."""
    logits = logits - logits.amax(dim=-1, keepdim=True)  # a tiny temperature cannot overflow
    probs = (logits / _column([p.temperature for p in params], logits)).softmax(dim=-1)
    likeliest = probs.topk(count).values if count else probs
    kept = likeliest
    if count:
        rank = torch.arange(count, device=probs.device)
        kept = kept * (rank < _column([p.top_k or count for p in params], probs))
        kept = kept / kept.sum(dim=-1, keepdim=True)
        before = kept.cumsum(dim=-1) - kept  # a token stays while those before do not reach top_p
        kept = kept * (before < _column([p.top_p for p in params], probs))
    cumulated = kept.cumsum(dim=-1)
    cumulated = cumulated / cumulated[:, -1:]
    drawn = torch.searchsorted(cumulated, _column(uniforms, probs), right=True)
    drawn = drawn.clamp_(max=kept.shape[1] - 1)  # beyond it only if the logits hold NaN
    if count:  # `drawn` is a rank: of equal tokens the first ones have the smaller ids
        prob = likeliest.gather(1, drawn)
        rank = drawn - (likeliest > prob).sum(dim=-1, keepdim=True)  # among the equal ones
        drawn = torch.searchsorted((probs == prob).cumsum(dim=-1), rank + 1)
    return drawn.clamp_(max=probs.shape[1] - 1)[:, 0]


def _column(values: Sequence[float], like: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """One number per row, (rows, 1), on the device of `like`."""
    return to_device(values, like.device, dtype)[:, None]
