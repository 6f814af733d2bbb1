"""Sampled tokens, held against a plain definition: sort, cut, and add noise of a hash in ints."""

import math
import random

import pytest
import torch

import sampling
from sampling import SamplingParams, sample

WORD = 2**64


def mixed(x):
    """splitmix64 without its last shift, of an int of 64 bits without a sign."""
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 % WORD
    x ^= x >> 27
    return x * 0x94D049BB133111EB % WORD


def noise_by_definition(seed, position, token):
    """Gumbel noise of the upper 52 bits of a hash, in the middle between their two neighbours."""
    bits = mixed((seed + 1) % WORD)
    bits = mixed(bits ^ position)
    bits = mixed(bits ^ token)
    if bits >= WORD // 2:
        bits -= WORD
    step = bits // 2**12
    uniform = 0.5 + (2 * step + 1) / 2**53
    return -math.log(-math.log(uniform))


def drawn_by_definition(logits, params, position):
    """The token of a row of logits: tokens sorted by logit and then id, top_k of them, the fewest
    of those that make up top_p, and of these the one with the largest logit and noise."""
    logits = logits.tolist()
    tokens = list(range(len(logits)))
    tokens.sort(key=lambda token: (-logits[token], token))
    tokens = tokens[: params.top_k or None]
    largest = logits[tokens[0]]
    weights = {}
    for token in tokens:
        exponent = (logits[token] - largest) / params.temperature
        weights[token] = math.exp(exponent)
    total = sum(weights.values())
    scores = {}
    kept = 0
    for token, weight in weights.items():
        if scores and kept >= params.top_p:
            break
        kept += weight / total
        noise = noise_by_definition(params.seed, position, token)
        scores[token] = logits[token] + params.temperature * noise
    return max(scores, key=scores.__getitem__)


def random_logits(kind, vocab_size):
    """200 rows of logits."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(200, vocab_size, generator=generator)
    if kind == "hardly differ":
        return 1 + 1e-9 * logits.double()
    if kind == "ties":
        return (2 * logits).round() / 2
    if kind == "few are possible":
        others = logits[:, 1:]
        others[others < 1] = float("-inf")
    return logits


@pytest.mark.parametrize("vocab_size", [1, 40, 1500])
@pytest.mark.parametrize(
    "kind",
    [
        "all differ",
        "hardly differ",
        "ties",
        "few are possible",
    ],
)
def test_each_token_is_the_one_that_the_definition_draws(kind, vocab_size, monkeypatch):
    """Also where only some tokens are sorted, where these end within a tie, where float32 would see
    no difference, and where rows are drawn in several blocks: none of it depends on other rows."""
    monkeypatch.setattr(sampling, "FEW_TOKENS", 32)
    logits = random_logits(kind, vocab_size)
    rng = random.Random(vocab_size)
    params = []
    positions = [rng.randrange(9) for _ in logits]
    expected = []
    for seed, row in enumerate(logits):
        each = SamplingParams(
            temperature=rng.choice([0.5, 1.0, 4.0]),
            top_k=rng.choice([0, 0, 1, 5, 31, 32, 33, 10**6]),
            top_p=rng.choice([1.0, 1.0, 0.9, 0.3]),
            seed=seed,
        )
        params.append(each)
        token = drawn_by_definition(row, each, positions[seed])
        expected.append(token)
    tokens, _ = sample(logits, params, positions)
    assert tokens.tolist() == expected
    for i in rng.sample(range(200), 3):
        token, _ = sample(logits[[i]], [params[i]], [positions[i]])
        assert token.tolist() == [expected[i]]


@pytest.mark.parametrize("seed, token", [(107, 49607), (120, 47401), (5903, 71)])
def test_noise_is_exact_where_float32_would_be_infinite(seed, token):
    keys = [torch.tensor([[key]]) for key in (seed, 0, token)]
    noise = sampling.gumbel_noise(*keys)
    expected = noise_by_definition(seed, 0, token)
    assert expected > 17
    assert noise.item() == pytest.approx(expected, rel=1e-9)


def test_the_defaults_are_greedy():
    assert SamplingParams() == SamplingParams(max_new_tokens=64, temperature=0, top_k=0, top_p=1)


def test_float64_logits_keep_all_their_digits():
    logits = torch.tensor([[1.0, 1 + 1e-12, 0.5]], dtype=torch.float64)
    params = SamplingParams(logprobs=True)
    tokens, logprobs = sample(logits, [params], [0])
    expected = logits[0, 1] - logits[0].logsumexp(0)
    assert tokens.tolist() == [1]
    assert logprobs.dtype == torch.float64
    torch.testing.assert_close(logprobs[0], expected, rtol=0, atol=1e-14)


def draws(logits, keys, **options):
    """A token for each (seed, position)."""
    params = [SamplingParams(seed=seed, **options) for seed, _ in keys]
    positions = [position for _, position in keys]
    rows = torch.tensor([logits] * len(keys))
    tokens, _ = sample(rows, params, positions)
    return tokens


KEYS = {
    "seeds": [(seed, 0) for seed in range(8000)],
    "positions": [(0, position) for position in range(8000)],
    "both": [(n // 90, n % 90) for n in range(8000)],
}


@pytest.mark.parametrize("keys", KEYS)
def test_sampling_follows_the_distribution(keys):
    logits = [2.0, 1.0, 0.0, -1.0, float("-inf")]
    tokens = draws(logits, KEYS[keys], temperature=0.5)
    probs = torch.tensor(logits).div(0.5).softmax(-1)
    expected = 8000 * probs[:4]
    counts = tokens.bincount()
    assert len(counts) == 4
    parts = (counts - expected) ** 2 / expected
    chi_squared = parts.sum()
    assert chi_squared < 16.3  # P = 0.001, 3 degrees of freedom


@pytest.mark.parametrize("options", [{}, dict(top_p=0.9), dict(top_k=2)])
def test_a_tiny_temperature_is_greedy_and_nan_does_no_harm(options):
    keys = KEYS["both"][:20]
    tokens = draws([1.0, 3.0, 2.0], keys, temperature=1e-300, **options)
    assert tokens.unique().tolist() == [1]
    tokens = draws([float("nan"), 1.0, 2.0], keys, temperature=1.0, **options)
    assert tokens.max() < 3


@pytest.mark.parametrize(
    "probs, kept",
    [
        ([0.5, 0.25, 0.25], [0]),  # reached, not passed
        ([0.25] * 4, [0, 1]),  # to the bit
    ],
)
def test_top_p_keeps_what_reaches_it(probs, kept):
    logits = torch.tensor(probs).log().tolist()
    tokens = draws(logits, KEYS["both"], temperature=1.0, top_p=0.5)
    assert tokens.unique().tolist() == kept
