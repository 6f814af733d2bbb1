"""From logits to tokens.

Every request has its own stream of random numbers: its n-th output token depends on its logits, its
`seed` and n. So its text does not depend on who shares its batch, on the policy, or on how often a
step was repeated, as far as rounding leaves its logits alone. Read next: config.py."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.drawing import draw


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt. Raises ValueError, naming the field, for a number out of range.

    max_new_tokens   the most tokens to generate
    temperature      0 takes the likeliest token; otherwise logits are divided by it
    top_k            sample from the k likeliest tokens; 0 for all
    top_p            sample from the fewest likeliest tokens that make up top_p; 1 for all
    seed             of the noise: with one seed, a prompt is continued in one way
    stop_token_ids   generation ends with any of these, which is then the last token returned
    stop             generation ends when the text holds any of these; it is cut before that
    logprobs         whether to return those of the chosen tokens, before temperature and top_*"""

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: Sequence[int] = ()
    stop: str | Sequence[str] = ()
    logprobs: bool = False

    def __post_init__(self) -> None:
        allowed = {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "temperature": (0 <= self.temperature < float("inf"), "at least 0 and finite"),
            "top_k": (self.top_k >= 0, "at least 0"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "seed": (-(2**63) <= self.seed < 2**63, "of 64 bits"),
        }
        for name, (is_allowed, values) in allowed.items():
            if not is_allowed:
                raise ValueError(f"{name}={getattr(self, name)}: must be {values}")
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))


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
