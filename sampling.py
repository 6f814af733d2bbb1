"""From logits to tokens.

A token is drawn by Gumbel's maximum (Maddison, Tarlow, Minka 2014, §2): of the tokens that top_k
and top_p leave, it is the one with the largest logit + temperature * noise. So each is drawn with
its softmax probability. The noise is one number for each seed, output position and token id: a
hash of these three, the same on every device.

So a request's text does not depend on who shares its batch, on the policy, or on how often a step
was repeated. These may round its logits in another way, by 1e-5 or so. That moves each sum by as
much and no more: another token is drawn only if the two largest sums are as close as that.

Read next: config.py."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attention.plan import to_device

FEW_TOKENS = 1024  # are sorted for a smaller top_k, as a vocabulary may be 100 times as large
ROWS_AT_ONCE = 32  # are drawn, so that memory is bounded: 33 MB a tensor with llama3-8b
LIMITS = {  # of fields of SamplingParams
    "max_new_tokens": (1, 2**63),
    "temperature": (0, 1e300),
    "top_k": (0, 2**63),
    "top_p": (1e-300, 1),
}


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt. Raises ValueError, naming the field, for a number out of range.

    max_new_tokens   the most tokens to generate
    temperature      0 takes the likeliest token; otherwise logits are divided by it
    top_k            sample from the k likeliest tokens; 0 for all
    top_p            sample from the fewest likeliest tokens that make up top_p; 1 for all
    seed             with one seed, a prompt is continued in one way, and others draw alike
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
        for name, (smallest, largest) in LIMITS.items():
            value = getattr(self, name)
            if not smallest <= value <= largest:
                raise ValueError(f"{name}={value}: must be from {smallest} to {largest}")
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
    groups = defaultdict(list)  # of rows that sort as many tokens
    for row, p in enumerate(params):
        if p.temperature > 0:
            groups[sorted_tokens(p, logits.shape[1]), row // ROWS_AT_ONCE].append(row)
    for (size, _), rows in groups.items():
        index = to_device(rows, logits.device)
        draws = [(params[row], positions[row]) for row in rows]
        tokens[index] = draw(logits[index], draws, size)
    if not any(p.logprobs for p in params):
        return tokens, None
    return tokens, logits.log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0]


def sorted_tokens(params: SamplingParams, vocab_size: int) -> int:
    """How many of the likeliest tokens are sorted to find those that can be drawn; 0 if all can."""
    if params.top_k == 0 and params.top_p == 1:
        return 0
    return min(FEW_TOKENS, vocab_size) if 0 < params.top_k <= FEW_TOKENS else vocab_size


def draw(logits: Tensor, draws: Sequence[tuple[SamplingParams, int]], size: int) -> Tensor:
    """One token for each row of logits, (rows,), of which draws[i] has the params and the position.

    `size` is what `sorted_tokens` says of each row."""
    device = logits.device
    keys = [(p.seed & (2**63 - 1), position) for p, position in draws]
    numbers = [(p.temperature, min(p.top_k or size, size), p.top_p) for p, _ in draws]
    seed, position = to_device(keys, device)[:, :, None].unbind(1)  # (rows, 1) each
    temperature, top_k, top_p = to_device(numbers, device, torch.float64)[:, :, None].unbind(1)
    token_ids = torch.arange(logits.shape[1], device=device)
    scores = gumbel_noise(seed, position, token_ids).mul_(temperature).add_(logits)
    if size:
        values = logits.topk(size).values.double()  # the largest first
        is_beyond = torch.arange(size, device=device) >= top_k
        probs = (values / temperature).masked_fill(is_beyond, -torch.inf)
        sums = probs.softmax(-1).cumsum(-1)
        # so many tokens are kept, and of those like the last one the smaller ids
        kept = (1 + (sums < top_p).sum(-1, keepdim=True)).minimum(top_k).long()
        smallest = values.gather(1, kept - 1)
        kept_ties = kept - (values > smallest).sum(-1, keepdim=True)
        is_tie = logits == smallest
        is_late_tie = is_tie & (is_tie.cumsum(-1) > kept_ties)
        scores.masked_fill_((logits < smallest) | is_late_tie, -torch.inf)
    return scores.argmax(-1)


def gumbel_noise(seed: Tensor, position: Tensor, token_ids: Tensor) -> Tensor:
    """-log(-log u) for uniform u, a float64 for each seed, position and token id."""
    bits = mix_(mix_(mix_(seed + 1) ^ position) ^ token_ids)
    bits >>= 12
    uniform = bits.double().mul_(2.0**-52).add_(0.5 + 2.0**-53)  # an odd multiple: never 0 or 1
    return uniform.log_().neg_().log_().neg_()


def mix_(x: Tensor) -> Tensor:
    """A hash of int64, in place: splitmix64 (Steele, Lea, Flood 2014) without its last shift."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        shifted = x >> shift
        shifted &= 2 ** (64 - shift) - 1  # >> has copied the sign
        x ^= shifted
        x *= factor - 2**64  # products wrap around
    return x
