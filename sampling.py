"""From logits to tokens.

Every request has its own stream of random numbers: the n-th output token of a request depends on its logits, its
`seed` and n, and on nothing else. So a request's text does not depend on who shares its batch, on the policy, or
on how often a step was repeated, as far as rounding leaves its logits alone.

Read next: engine.py.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real

import torch

from scheduler import check_whole


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt. Raises ValueError, naming the argument, for values that make no sense.

    max_new_tokens   the most tokens to generate
    temperature      0 takes the likeliest token; otherwise logits are divided by it
    top_k            sample from the k likeliest tokens; 0 for all
    top_p            sample from the fewest likeliest tokens whose probabilities sum to top_p or more; 1 for all
    seed             the random stream
    stop_token_ids   generation ends with any of these, which is then the last of the tokens returned
    logprobs         whether to return the log-probability of each chosen token, under the model's own
                     distribution (before temperature, top_k and top_p)
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple = ()
    logprobs: bool = False

    def __post_init__(self):
        check_whole("max_new_tokens", self.max_new_tokens, least=1)
        check_whole("top_k", self.top_k, least=0)
        if not isinstance(self.temperature, Real) or not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature!r}: must be 0 (greedy) or a positive number")
        if not isinstance(self.top_p, Real) or not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p!r}: must be in (0, 1]")
        if not isinstance(self.stop_token_ids, Iterable):
            raise ValueError(f"stop_token_ids={self.stop_token_ids!r}: must be a list of token ids")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    @property
    def truncates(self):
        """Whether top_k or top_p leave tokens out."""
        return self.top_k > 0 or self.top_p < 1

    def uniform(self, n):
        """The random number in [0, 1) that decides output token `n` of this request."""
        return random.Random(f"{self.seed}/{n}").random()


def sample(logits, params, positions):
    """Choose one token for each row of logits, (rows, vocab_size).

    `params` holds the SamplingParams of each row and `positions` which output token of its request the row
    decides. Returns (tokens, logprobs), both (rows,) on the device of the logits; reads nothing back from it.
    `logprobs` is None unless some row asked for it.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    tokens = logits.argmax(dim=-1)
    # Whether a row is sorted may depend on its own parameters only: the order decides which token a number draws.
    for draw, rows in ((_draw, [row for row, p in enumerate(params) if p.temperature > 0 and not p.truncates]),
                       (_draw_sorted, [row for row, p in enumerate(params) if p.temperature > 0 and p.truncates])):
        if rows:
            index = torch.tensor(rows).to(logits.device, non_blocking=True)  # a list would make a GPU wait
            tokens[index] = draw(logits[index], [params[row] for row in rows], [positions[row] for row in rows])
    if not any(p.logprobs for p in params):
        return tokens, None
    return tokens, logits.log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0]


def _draw(logits, params, positions):
    """Inverse transform sampling: the first token at which the cumulated probability passes a uniform number."""
    return _pick(_probabilities(logits, params), params, positions)


def _draw_sorted(logits, params, positions):
    """The same over the likeliest tokens only, from the likeliest down."""
    probs, order = _probabilities(logits, params).sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[1], device=probs.device)
    probs = probs * (rank < _column([p.top_k or probs.shape[1] for p in params], probs))
    probs = probs / probs.sum(dim=-1, keepdim=True)
    before = probs.cumsum(dim=-1) - probs  # a token stays while those before it do not reach top_p
    probs = probs * (before < _column([p.top_p for p in params], probs))
    return order.gather(1, _pick(probs, params, positions)[:, None])[:, 0]


def _probabilities(logits, params):
    logits = logits.double()
    logits = logits - logits.amax(dim=-1, keepdim=True)  # so that a tiny temperature cannot overflow
    return (logits / _column([p.temperature for p in params], logits)).softmax(dim=-1)


def _pick(probs, params, positions):
    """Index of the first column at which the cumulated, normalised probability exceeds the row's number."""
    cumulated = probs.cumsum(dim=-1)
    uniform = _column([p.uniform(n) for p, n in zip(params, positions)], probs)
    column = torch.searchsorted(cumulated / cumulated[:, -1:], uniform, right=True)[:, 0]
    return column.clamp_(max=probs.shape[1] - 1)  # beyond it only if the logits hold NaN


def _column(values, like):
    """One number per row, (rows, 1), in double precision on the device of `like`."""
    return torch.tensor(values, dtype=torch.float64).to(like.device, non_blocking=True)[:, None]
