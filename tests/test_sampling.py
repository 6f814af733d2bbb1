"""From logits to tokens: each token is the one that a plain definition draws."""

import random
from itertools import accumulate

import pytest
import torch

from runtime import drawing
from sampling import SamplingParams, sample


def first_above(uniform, probs):
    """The index of the first probability at which the sum of all passes `uniform`."""
    total = sum(probs)
    sums = accumulate(prob / total for prob in probs)
    above = (index for index, end in enumerate(sums) if end > uniform)
    return next(above, len(probs) - 1)


def drawn_by_definition(logits, params, position):
    """The token of a row of logits: tokens sorted by probability and then id, top_k of them, the
    fewest of those that make up top_p, and the first at which the sum passes a random number."""
    uniform = random.Random(f"{params.seed}/{position}").random()
    scores = logits.double() - logits.double().max()
    probs = (scores / params.temperature).softmax(-1).tolist()
    tokens = list(range(len(probs)))
    if params.top_k or params.top_p < 1:
        tokens.sort(key=lambda token: (-probs[token], token))
        tokens = tokens[: params.top_k or len(tokens)]
        total = sum(probs[token] for token in tokens)
        sums = accumulate(probs[token] / total for token in tokens)
        tokens = tokens[: 1 + sum(end < params.top_p for end in list(sums)[:-1])]
    return tokens[first_above(uniform, [probs[token] for token in tokens])]


@pytest.mark.parametrize("vocab_size", [1, 40, 1500])
@pytest.mark.parametrize("kind", ["all differ", "ties", "few are possible"])
def test_each_token_is_the_one_that_the_definition_draws(kind, vocab_size, monkeypatch):
    """Also where only some tokens are sorted, where these end within a tie, and where rows are
    drawn in several blocks: none of it depends on the other rows."""
    monkeypatch.setattr(drawing, "FEW_TOKENS", 32)
    draw = random.Random(vocab_size)
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(400, vocab_size, generator=generator)
    if kind == "ties":
        logits = (2 * logits).round() / 2
    if kind == "few are possible":
        logits[:, 1:].masked_fill_(logits[:, 1:] < 1, float("-inf"))
    params = [
        SamplingParams(
            temperature=draw.choice([0.5, 1.0, 4.0]),
            top_k=draw.choice([0, 0, 1, 5, 31, 32, 33, 10**6]),
            top_p=draw.choice([1.0, 1.0, 0.9, 0.3]),
            seed=seed,
        )
        for seed in range(len(logits))
    ]
    positions = [draw.randrange(9) for _ in params]
    tokens = sample(logits, params, positions)[0].tolist()
    rows = zip(logits, params, positions, strict=True)
    assert tokens == [drawn_by_definition(*row) for row in rows]
    few = draw.sample(range(len(logits)), 3)
    few_params = [params[i] for i in few]
    few_positions = [positions[i] for i in few]
    few_tokens, _ = sample(logits[few], few_params, few_positions)
    assert few_tokens.tolist() == [tokens[i] for i in few]


def frequencies(logits, draws=4000, **options):
    """How often each token is drawn."""
    options = {"temperature": 1.0} | options
    params = [SamplingParams(seed=seed, **options) for seed in range(draws)]
    tokens, _ = sample(torch.tensor([logits]).expand(draws, -1), params, [0] * draws)
    return tokens.bincount(minlength=len(logits)) / draws


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_sampling_follows_the_distribution(temperature):
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, float("-inf")])
    shares = frequencies(logits.tolist(), temperature=temperature)
    expected = (logits / temperature).softmax(-1)
    assert (shares - expected).abs().max() < 0.03
    assert shares[4] == 0
    assert frequencies([1.0, 3.0, 2.0], draws=20, temperature=1e-300)[1] == 1  # greedy and finite
    with_nan = frequencies([float("nan"), 1.0, 2.0], draws=1, temperature=temperature)
    assert len(with_nan) == 3


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
    shares = frequencies(torch.tensor(probs).log().tolist(), draws=400, **options)
    assert shares.nonzero().flatten().tolist() == kept


def test_sampling_never_sorts_more_than_some_rows_of_a_large_vocabulary(monkeypatch):
    shapes = []
    topk = torch.Tensor.topk

    def spy(probs, count):
        shapes.append((*probs.shape, count))
        return topk(probs, count)

    monkeypatch.setattr(torch.Tensor, "topk", spy)
    monkeypatch.setattr(torch.Tensor, "sort", None)
    unlimited = SamplingParams(temperature=1.0)
    params = [SamplingParams(temperature=1.0, top_k=50)] * 70
    params += [unlimited]
    params += [SamplingParams(temperature=1.0, top_p=0.9)] * 3
    sample(torch.zeros(74, 5000), params, [0] * 74)
    assert shapes == [(32, 5000, 1024), (32, 5000, 1024), (6, 5000, 1024), (3, 5000, 5000)]
