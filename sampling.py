"""From logits to tokens.

Every request has its own stream of random numbers: its n-th output token depends on its logits, its
`seed` and n. So its text does not depend on who shares its batch, on the policy, or on how often a
step was repeated, as far as rounding leaves its logits alone. Read next: config.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from errors import (
    SMALLEST,
    check_bool,
    check_names,
    check_number,
    check_texts,
    check_token_ids,
    check_whole,
    set_field,
)
from runtime.drawing import draw


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt. Raises ValueError, naming the argument, for senseless values.

    max_new_tokens   the most tokens to generate
    temperature      0 takes the likeliest token; otherwise logits are divided by it
    top_k            sample from the k likeliest tokens; 0 for all
    top_p            sample from the fewest likeliest tokens that make up top_p; 1 for all
    seed             the random stream: with one seed, a prompt is continued in one way
    stop_token_ids   generation ends with any of these, which is then the last token returned
    stop             generation ends when the text holds any of these; it is cut before that
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
        for name, minimum in (("max_new_tokens", 1), ("top_k", 0), ("seed", -(2**63))):
            set_field(self, name, check_whole(name, getattr(self, name), minimum))
        greedy_or = "0 (greedy) or a positive number"
        temperature = check_number("temperature", self.temperature, greedy_or, minimum=0)
        top_p = check_number("top_p", self.top_p, "in (0, 1]", SMALLEST, maximum=1)
        set_field(self, "temperature", temperature)
        set_field(self, "top_p", top_p)
        set_field(self, "stop_token_ids", check_token_ids("stop_token_ids", self.stop_token_ids))
        set_field(self, "stop", check_texts("stop", self.stop))
        check_bool("logprobs", self.logprobs)


def sample(
    logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> tuple[Tensor, Tensor | None]:
    """Choose one token for each row of logits, (rows, vocab_size).

    Row i decides output token positions[i] of a request with params[i]. Returns (tokens, logprobs),
    both (rows,) on the device of the logits. `logprobs` is None unless some params want it."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    tokens = logits.argmax(dim=-1)
    draw(tokens, logits, params, positions)
    if not any(p.logprobs for p in params):
        return tokens, None
    return tokens, logits.log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0]
