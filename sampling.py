"""From logits to tokens.

Every request has its own stream of random numbers: its n-th output token depends on its logits, its
`seed` and n. So its text does not depend on who shares its batch, on the policy, or on how often a
step was repeated, as far as rounding leaves its logits alone. Read next: engine.py."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from errors import SMALLEST, check_bool, check_number, check_token_ids, check_whole, set_field


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt. Raises ValueError, naming the argument, for senseless values.

    max_new_tokens   the most tokens to generate
    temperature      0 takes the likeliest token; otherwise logits are divided by it
    top_k            sample from the k likeliest tokens; 0 for all
    top_p            sample from the fewest likeliest tokens that make up top_p; 1 for all
    seed             the random stream
    stop_token_ids   generation ends with any of these, which is then the last token returned
    logprobs         whether to return those of the chosen tokens, before temperature and top_*"""

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: bool = False

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("top_k", 0), ("seed", -(2**63))):
            set_field(self, name, check_whole(name, getattr(self, name), least))
        greedy_or = "0 (greedy) or a positive number"
        temperature = check_number("temperature", self.temperature, greedy_or, minimum=0)
        set_field(self, "temperature", temperature)
        set_field(
            self, "top_p", check_number("top_p", self.top_p, "in (0, 1]", SMALLEST, maximum=1)
        )
        stop_token_ids = check_token_ids("stop_token_ids", self.stop_token_ids)
        set_field(self, "stop_token_ids", stop_token_ids)
        check_bool("logprobs", self.logprobs)

    @property
    def truncates(self) -> bool:
        """Whether only some of the tokens, the likeliest, can be chosen."""
        return self.top_k > 0 or self.top_p < 1


def sample(
    logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> tuple[Tensor, Tensor | None]:
    """Choose one token for each row of logits, (rows, vocab_size).

    Row i decides output token positions[i] of a request with params[i]. Returns (tokens, logprobs),
    both (rows,) on the device of the logits. `logprobs` is None unless some params want it."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    tokens = logits.argmax(dim=-1)
    # Whether a row is sorted depends on its own parameters only: the order decides what is drawn.
    sampled_rows = [row for row, p in enumerate(params) if p.temperature > 0]
    for truncated in (False, True):
        rows = [row for row in sampled_rows if params[row].truncates == truncated]
        if rows:
            index = _column(rows, logits, torch.int64)[:, 0]
            streams = [random.Random(f"{params[row].seed}/{positions[row]}") for row in rows]
            uniforms = [stream.random() for stream in streams]  # in [0, 1), one decides each token
            row_params = [params[row] for row in rows]
            tokens[index] = _draw(logits[index], row_params, uniforms, truncated)
    if not any(p.logprobs for p in params):
        return tokens, None
    return tokens, logits.log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0]


def _draw(
    logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float], truncated: bool
) -> Tensor:
    """Inverse transform sampling: the first token at which the cumulated probability passes the
    row's number. `truncated`: over the likeliest tokens only, from the likeliest down."""
    logits = logits.double()
    logits = logits - logits.amax(dim=-1, keepdim=True)  # a tiny temperature cannot overflow
    probs = (logits / _column([p.temperature for p in params], logits)).softmax(dim=-1)
    vocab_size = probs.shape[1]
    order = None  # token ids, the likeliest first
    if truncated:
        probs, order = probs.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(vocab_size, device=probs.device)
        probs = probs * (rank < _column([p.top_k or vocab_size for p in params], probs))
        probs = probs / probs.sum(dim=-1, keepdim=True)
        before = probs.cumsum(dim=-1) - probs  # a token stays while those before do not reach top_p
        probs = probs * (before < _column([p.top_p for p in params], probs))
    cumulated = probs.cumsum(dim=-1)
    cumulated = cumulated / cumulated[:, -1:]
    tokens = torch.searchsorted(cumulated, _column(uniforms, probs), right=True)
    tokens = tokens.clamp_(max=vocab_size - 1)  # beyond it only if the logits hold NaN
    return (tokens if order is None else order.gather(1, tokens))[:, 0]


def _column(values: Sequence[float], like: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """One number per row, (rows, 1), on the device of `like`."""
    column = torch.tensor(values, dtype=dtype, pin_memory=like.is_cuda)  # or the copy would wait
    return column.to(like.device, non_blocking=True)[:, None]
