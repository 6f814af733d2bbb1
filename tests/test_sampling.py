"""Sampled tokens, held against a plain definition: sort, cut, and add noise of a hash in ints."""

import math
import random
from itertools import accumulate

import pytest
import torch

import sampling
from sampling import SamplingParams, sample

WORD = 2**64


def mixed(x):
    """splitmix64 without its last shift, of an int of 64 bits without a sign."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % WORD
    return (x ^ x >> 27) * 0x94D049BB133111EB % WORD


def noise_by_definition(seed, position, token):
    """Gumbel noise of the upper 52 bits of a hash, in the middle between their two neighbours."""
    bits = mixed(mixed(mixed((seed + 1) % WORD) ^ position) ^ token)
    signed = bits - WORD if bits >= WORD // 2 else bits
    uniform = 0.5 + (2 * (signed // 2**12) + 1) / 2**53
    return -math.log(-math.log(uniform))


def drawn_by_definition(logits, params, position):
    """The token of a row of logits: tokens sorted by logit and then id, top_k of them, the fewest
    of those that make up top_p, and of these the one with the largest logit and noise."""
    logits = logits.tolist()
    tokens = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    tokens = tokens[: params.top_k or len(tokens)]
    largest = logits[tokens[0]]
    weights = [math.exp((logits[token] - largest) / params.temperature) for token in tokens]
    total = sum(weights)
    sums = accumulate(weight / total for weight in weights)
    tokens = tokens[: 1 + sum(end < params.top_p for end in list(sums)[:-1])]

    def score(token):
        noise = noise_by_definition(params.seed, position, token)
        return logits[token] + params.temperature * noise

    return max(tokens, key=score)


@pytest.mark.parametrize("vocab_size", [1, 40, 1500])
@pytest.mark.parametrize("kind", ["all differ", "hardly differ", "ties", "few are possible"])
def test_each_token_is_the_one_that_the_definition_draws(kind, vocab_size, monkeypatch):
    """Also where only some tokens are sorted, where these end within a tie, where float32 would see
    no difference, and where rows are drawn in several blocks: none of it depends on other rows."""
    monkeypatch.setattr(sampling, "FEW_TOKENS", 32)
    rng = random.Random(vocab_size)
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(200, vocab_size, generator=generator)
    if kind == "hardly differ":
        logits = 1 + 1e-9 * logits.double()
    if kind == "ties":
        logits = (2 * logits).round() / 2
    if kind == "few are possible":
        logits[:, 1:].masked_fill_(logits[:, 1:] < 1, float("-inf"))
    params = [
        SamplingParams(
            temperature=rng.choice([0.5, 1.0, 4.0]),
            top_k=rng.choice([0, 0, 1, 5, 31, 32, 33, 10**6]),
            top_p=rng.choice([1.0, 1.0, 0.9, 0.3]),
            seed=seed,
        )
        for seed in range(len(logits))
    ]
    positions = [rng.randrange(9) for _ in params]
    tokens = sample(logits, params, positions)[0].tolist()
    rows = zip(logits, params, positions, strict=True)
    assert tokens == [drawn_by_definition(*row) for row in rows]
    few = rng.sample(range(len(logits)), 3)
    few_params = [params[i] for i in few]
    few_positions = [positions[i] for i in few]
    few_tokens, _ = sample(logits[few], few_params, few_positions)
    assert few_tokens.tolist() == [tokens[i] for i in few]


def test_float64_logits_keep_all_their_digits():
    logits = torch.tensor([[1.0, 1 + 1e-12, 0.5]], dtype=torch.float64)
    tokens, logprobs = sample(logits, [SamplingParams(logprobs=True)], [0])
    expected = logits[0, 1] - logits[0].exp().sum().log()
    assert tokens.tolist() == [1] and logprobs.dtype == torch.float64
    torch.testing.assert_close(logprobs[0], expected, rtol=0, atol=1e-14)


def draws(logits, keys, **options):
    """A token for each (seed, position)."""
    options = {"temperature": 1.0} | options
    params = [SamplingParams(seed=seed, **options) for seed, _ in keys]
    positions = [position for _, position in keys]
    return sample(torch.tensor([logits]).expand(len(keys), -1), params, positions)[0]


def chi_squared(tokens, probs):
    """The statistic of Pearson's test of tokens that should be drawn with these probabilities."""
    expected = torch.as_tensor(probs) * len(tokens)
    counts = tokens.bincount(minlength=len(expected))
    return ((counts - expected) ** 2 / expected).sum()


KEYS = {
    "seeds": [(seed, 0) for seed in range(8000)],
    "positions": [(0, position) for position in range(8000)],
    "both": [(n // 90, n % 90) for n in range(8000)],
}


@pytest.mark.parametrize("keys", KEYS)
def test_sampling_follows_the_distribution(keys):
    logits = [2.0, 1.0, 0.0, -1.0, float("-inf")]
    tokens = draws(logits, KEYS[keys], temperature=0.5)
    probs = (torch.tensor(logits) / 0.5).softmax(-1)[:4]
    assert tokens.max() == 3
    assert chi_squared(tokens, probs) < 16.3  # P = 0.001, 3 degrees of freedom


def test_a_tiny_temperature_is_greedy_and_nan_does_no_harm():
    keys = KEYS["seeds"][:20]
    for options in ({}, {"top_p": 0.9}, {"top_k": 2}):
        assert draws([1.0, 3.0, 2.0], keys, temperature=1e-300, **options).tolist() == [1] * 20
        assert draws([float("nan"), 1.0, 2.0], keys, **options).max() < 3


@pytest.mark.parametrize(
    "probs, options, kept",
    [
        ([0.05, 0.4, 0.3, 0.2, 0.05], dict(top_p=1e-9), [1]),
        ([0.4, 0.3, 0.3], dict(top_k=2, top_p=0.5), [0]),  # of the two kept, the first holds 4/7
        ([0.5, 0.25, 0.25], dict(top_p=0.5), [0]),  # reached, not passed
        ([0.25] * 4, dict(top_p=0.5), [0, 1]),  # to the bit
    ],
)
def test_top_k_and_top_p_keep_what_they_say(probs, options, kept):
    tokens = draws(torch.tensor(probs).log().tolist(), KEYS["both"][:400], **options)
    assert tokens.unique().tolist() == kept
