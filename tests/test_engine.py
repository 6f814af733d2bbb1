"""The engine: its answers, its records, its errors, and what a failing step leaves behind."""

import itertools
import random
from fractions import Fraction
from itertools import accumulate

import numpy as np
import pytest
import torch

from config import EngineConfig
from engine import Engine
from errors import QueueFull
from hardware.memory import pages_that_fit, small_page_size
from kv_cache import KVCache, kv_bytes_per_token
from model import GPT, FlatBatch, GPTConfig
from policies import POLICIES
from pretrained.tokenizers import Tokenizer, byte_tokenizer
from request import Completion
from sampling import SamplingParams, sample
from scheduler import Batch, SarathiServe
from speedups import drawing
from speedups.lone_chunk import lone_chunk
from speedups.runner import Runner
from tests.helpers import alone, poison, poisoned_cache, run, tiny_model

PROMPTS = [[7, 8, 9], [1] * 20, [5], [3, 1, 4, 1, 5, 9, 2, 6] * 2, [60, 0, 60]]


@pytest.fixture(scope="module")
def model():
    return tiny_model(n_kv_head=2)


def make_engine(model, policy="sarathi-serve", **options):
    """A small engine whose cache holds NaN where nothing was written."""
    engine = Engine(model, policy=policy, **(dict(chunk=6, max_batch=3, max_len=40) | options))
    engine.runner.cache.data.fill_(float("nan"))
    return engine


def finished(engine):
    """The events of all steps until nothing is left to do."""
    events = []
    while engine.has_work:
        events += engine.step()
    assert engine.step() == [] and not engine.scheduler.running and not engine.scheduler.waiting
    assert engine.scheduler.pages.num_free == engine.scheduler.pages.total
    return events


def word_tokenizer():
    """Every token is a word; the space before the first is dropped, as sentencepiece does."""

    def encode(text):
        return [int(word) for word in text.split()]

    def decode(ids):
        return " ".join(map(str, ids))

    return Tokenizer(encode, decode, stop_token_ids=frozenset({26}))


@pytest.mark.parametrize("policy", POLICIES)
def test_seeded_sampling_is_the_same_under_every_policy(model, policy):
    temperatures = (1.0, 0.7, 1.5, 1.0, 0.0)
    seeds = range(1, 6)
    ways = zip(temperatures, (0, 5, 0, 9, 0), (1.0, 1.0, 0.8, 0.5, 1.0), seeds, strict=True)
    params = [SamplingParams(8, *way) for way in ways]
    completions = make_engine(model, policy).generate(PROMPTS, params)
    assert [c.tokens for c in completions] == [
        alone(model, *request) for request in zip(PROMPTS, params, strict=True)
    ]


def test_every_seed_and_every_position_has_its_own_random_numbers(model):
    params = [SamplingParams(8, temperature=2.0, seed=seed) for seed in range(8)]
    completions = make_engine(model).generate([[1, 2, 3]] * 8, params)
    assert len({tuple(completion.tokens) for completion in completions}) > 4
    params = [SamplingParams(temperature=1.0, seed=3)] * 50
    logits = torch.zeros(50, 1000)
    assert len(set(sample(logits, params, list(range(50)))[0].tolist())) > 40
    assert len(set(sample(logits, params, [7] * 50)[0].tolist())) == 1


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
    assert (shares - (logits / temperature).softmax(-1)).abs().max() < 0.03 and shares[4] == 0
    assert frequencies([1.0, 3.0, 2.0], draws=20, temperature=1e-300)[1] == 1  # greedy and finite
    assert len(frequencies([float("nan"), 1.0, 2.0], draws=1, temperature=temperature)) == 3


UNEQUAL = [0.05, 0.4, 0.3, 0.2, 0.05]
HALVES = [0.5, 0.25, 0.25]


@pytest.mark.parametrize(
    "probs, options, kept",
    [
        *((UNEQUAL, dict(top_k=k), kept) for k, kept in [(0, range(5)), (1, [1]), (2, [1, 2])]),
        *((UNEQUAL, dict(top_p=p), kept) for p, kept in [(0.6, [1, 2]), (0.75, [1, 2, 3])]),
        *((UNEQUAL, dict(top_p=1e-9), [1]), (UNEQUAL, dict(top_k=50), range(5))),
        (UNEQUAL, dict(top_k=2, top_p=0.5), [1]),  # of the two kept, the first holds 4/7
        (HALVES, dict(top_p=0.5), [0]),  # reached, not passed
        ([0.25] * 4, dict(top_p=0.5), [0, 1]),  # to the bit
    ],
)
def test_top_k_and_top_p_keep_what_they_say(probs, options, kept):
    probs = torch.tensor(probs)
    shares = frequencies(probs.log().tolist(), **options)
    assert shares.nonzero().flatten().tolist() == [*kept]
    expected = torch.zeros(len(probs)).index_copy(0, torch.tensor(kept), probs[[*kept]])
    assert (shares - expected / expected.sum()).abs().max() < 0.03


def drawn_by_definition(logits, p, position):
    """The token of a row of logits: tokens sorted by probability and then id, top_k of them, the
    fewest of those that make up top_p, and the first at which the sum passes a random number."""
    uniform = random.Random(f"{p.seed}/{position}").random()
    scores = logits.double() - logits.double().max()
    probs = (scores / p.temperature).softmax(-1).tolist()
    tokens = list(range(len(probs)))
    if p.top_k or p.top_p < 1:
        tokens.sort(key=lambda token: (-probs[token], token))
        tokens = tokens[: p.top_k or len(tokens)]
        total = sum(probs[token] for token in tokens)
        before = [0.0, *accumulate(probs[token] / total for token in tokens)]
        tokens = [
            token for token, sum_before in zip(tokens, before, strict=False) if sum_before < p.top_p
        ]
    total = sum(probs[token] for token in tokens)
    sums = accumulate(probs[token] / total for token in tokens)
    return next(
        (token for token, end in zip(tokens, sums, strict=True) if end > uniform), tokens[-1]
    )


@pytest.mark.parametrize("vocab_size", [1, 40, 1500])
@pytest.mark.parametrize("kind", ["all differ", "ties", "few are possible"])
def test_each_token_is_the_one_that_the_definition_draws(kind, vocab_size, monkeypatch):
    """Also where only some tokens are sorted, where these end within a tie, and where rows are
    drawn in several blocks: none of it depends on the other rows."""
    monkeypatch.setattr(drawing, "FEW_TOKENS", 32)
    rng = random.Random(vocab_size)
    logits = torch.randn(400, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
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
    alone = sample(logits[few], [params[i] for i in few], [positions[i] for i in few])[0]
    assert alone.tolist() == [tokens[i] for i in few]


def test_sampling_never_sorts_more_than_some_rows_of_a_large_vocabulary(monkeypatch):
    shapes = []
    topk = torch.Tensor.topk

    def spy(probs, count):
        shapes.append((*probs.shape, count))
        return topk(probs, count)

    monkeypatch.setattr(torch.Tensor, "topk", spy)
    monkeypatch.setattr(torch.Tensor, "sort", None)
    params = [SamplingParams(temperature=1.0, top_k=50)] * 70 + [SamplingParams(temperature=1.0)]
    params += [SamplingParams(temperature=1.0, top_p=0.9)] * 3
    sample(torch.zeros(74, 5000), params, [0] * 74)
    assert shapes == [(32, 5000, 1024), (32, 5000, 1024), (6, 5000, 1024), (3, 5000, 5000)]


def test_logprobs_are_those_of_the_model(model):
    params = SamplingParams(6, temperature=1.3, top_k=7, seed=3, logprobs=True)
    completions = make_engine(model).generate(
        PROMPTS, [params, SamplingParams(6), params, params, params]
    )
    assert completions.pop(1).logprobs is None
    for completion in completions:
        tokens = completion.prompt + completion.tokens
        logits = run(
            model, poisoned_cache(model, 1, 40), [lone_chunk([0], 0, tokens)], all_rows=True
        )
        rows = logits[len(completion.prompt) - 1 : -1].log_softmax(-1)
        expected = rows.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0].tolist()
        assert completion.logprobs == pytest.approx(expected, abs=1e-10, rel=0)


def test_finish_reasons(model):
    free = alone(model, PROMPTS[0], SamplingParams(10))
    assert len(set(free[:3])) == 3
    stop = dict(stop_token_ids=(free[2],))
    # a stop token that is also the last one allowed counts as a stop
    params = [SamplingParams(10, **stop), SamplingParams(10), SamplingParams(3, **stop)]
    completions = make_engine(model).generate([PROMPTS[0]] * 3, params)
    assert [completion.finish_reason for completion in completions] == ["stop", "length", "stop"]
    assert [completion.tokens for completion in completions] == [free[:3], free, free[:3]]


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_abort_frees_the_slot_and_keeps_what_was_generated(model, steps):
    engine = make_engine(model, max_batch=1)
    params = SamplingParams(10)
    first = engine.add_request(PROMPTS[1], params)
    second = engine.add_request(PROMPTS[2], SamplingParams(3))
    for _ in range(steps):
        engine.step()
    completion = engine.abort(first)
    assert completion.finish_reason == "abort"
    expected = alone(model, PROMPTS[1], params)[: max(0, steps - 3)]  # 20 = 3 chunks of 6 + 2
    assert completion.tokens == expected
    tokens = alone(model, PROMPTS[2], SamplingParams(3))
    assert [event[:2] for event in finished(engine)] == [(second, token) for token in tokens]
    with pytest.raises(ValueError, match=f"request_id={first}"):
        engine.abort(first)


def test_events_are_the_tokens_in_order(model):
    engine = make_engine(model)
    ids = [engine.add_request(p, SamplingParams(4, logprobs=True)) for p in PROMPTS]
    events = finished(engine)
    for i, prompt in zip(ids, PROMPTS, strict=True):
        own_events = [event for event in events if event.request_id == i]
        *before, (_, _, logprob, reason, completion, _) = own_events
        assert all(e.finish_reason is None and e.completion is None for e in before)
        assert reason == completion.finish_reason == "length" and completion.prompt == prompt
        assert (
            [e.token for e in own_events]
            == completion.tokens
            == alone(model, prompt, SamplingParams(4))
        )
        assert [e.logprob for e in own_events] == completion.logprobs and logprob is not None


def test_latencies():
    # the clock is read at a step's start, when one is admitted, before forward, and at the end
    clock = map(float, itertools.count(1)).__next__
    engine = make_engine(tiny_model(), "sarathi", max_batch=1, clock=clock)
    engine.add_request([1] * 14, SamplingParams(3), arrival=0.0)  # 14 = 6 + 6 + 2
    engine.add_request([2], SamplingParams(1), 0.5)
    a, b = (event.completion for event in finished(engine) if event.completion)
    assert (a.scheduling_delay, a.ttft, a.tbt) == (2.0, 10.0, [3.0, 3.0])
    assert a.token_times == [10.0, 13.0, 16.0] and a.latency == 16.0
    assert (b.scheduling_delay, b.ttft, b.tbt) == (17.5, 19.5, [])
    last = engine.last_iteration
    assert last.chunks == [(1, 0, 1, False)] and (last.start, last.launch, last.end) == (17, 19, 20)
    assert (last.prefill_tokens, last.decode_tokens) == (1, 0)
    never = Completion(0, [1], 0.0)
    assert never.tbt == [] and {never.ttft, never.scheduling_delay, never.latency} == {None}


def test_text_in_text_out():
    model = tiny_model()
    params = SamplingParams(15, temperature=3.0)
    model.head.weight.mul_(0.3)  # flatter, so that the stop token comes up now and then
    prompts = ["0 1 2", "25 25 25", "7 4 11 11 14", "16"]
    completions = make_engine(model, tokenizer=word_tokenizer()).generate(prompts, params)
    for prompt, completion in zip(prompts, completions, strict=True):
        expected = alone(model, [int(word) for word in prompt.split()], params, stop=(26,))
        assert completion.tokens == expected
        text = expected[:-1] if completion.finish_reason == "stop" else expected
        assert completion.text == "".join(f" {token}" for token in text)  # it begins with a space
    finish_reasons = {completion.finish_reason for completion in completions}
    assert finish_reasons == {"stop", "length"}  # or not both would be tested
    assert make_engine(model).generate([[1]], SamplingParams(1))[0].text is None


def test_text_of_a_prompt_that_ends_within_a_character(monkeypatch):
    engine = make_engine(tiny_model(vocab_size=256), tokenizer=byte_tokenizer())
    monkeypatch.setattr("speedups.runner.sample", lambda *_: (torch.tensor([0xA9]), None))
    assert engine.generate([[0xC3]], SamplingParams(1))[0].text == "é"
    assert engine.generate([[0x61]], SamplingParams(1))[0].text == "\ufffd"


def test_a_logprob_is_noted_once_however_often_its_batch_is_computed(model):
    engine = make_engine(model)
    engine.add_request([1, 2], SamplingParams(3, logprobs=True))
    batch = engine.scheduler.next_batch()
    flat = FlatBatch.build(batch, engine.runner.attention)
    for _ in range(2):  # as after an interrupt
        engine.runner.sample(engine.runner.forward(flat), batch)
    assert len(batch[0].request.logprobs) == 1


TEXTS = ["once", "a", "stop here"]
LETTERS = Tokenizer(lambda text: [ord(c) % 61 for c in text], lambda ids: "".join(map(chr, ids)))


def test_a_stream_has_each_token_with_its_text_as_it_appears(model):
    params = [SamplingParams(n) for n in (3, 7, 5)]
    expected = make_engine(model, tokenizer=LETTERS).generate(TEXTS, params)
    engine = make_engine(model, tokenizer=LETTERS)
    events = list(engine.stream(TEXTS, params))
    for i, completion in enumerate(expected):
        of_request = [event for event in events if event.request_id == i]
        assert [event.token for event in of_request] == completion.tokens
        assert "".join(event.text for event in of_request) == completion.text
        assert [bool(event.completion) for event in of_request].index(True) == len(of_request) - 1
    assert len({event.request_id for event in events[:3]}) > 1  # side by side
    assert not any(event.text for event in make_engine(model).stream([[1]], SamplingParams(2)))


def test_a_stream_that_is_given_up_leaves_no_request(model):
    engine = make_engine(model, tokenizer=LETTERS)
    stream = engine.stream(TEXTS, SamplingParams(9))
    next(stream)
    assert engine.has_work
    stream.close()
    assert not engine.has_work and engine.scheduler.pages.num_free == engine.config.pages
    assert [c.request_id for c in engine.generate(TEXTS, SamplingParams(1))] == [0, 1, 2]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_stop_string_ends_the_text_before_it_and_no_other_request(model, length):
    engine = make_engine(model, tokenizer=LETTERS)
    params = SamplingParams(20, temperature=2.0)
    free, other = engine.generate(TEXTS[:2], params)
    stop = free.text[7 : 7 + length]
    end = free.text.index(stop)
    stopping = [SamplingParams(20, temperature=2.0, stop=["\n" * 9, stop]), params]
    stopped, same = engine.generate(TEXTS[:2], stopping)
    assert stopped.text == free.text[:end] and stopped.finish_reason == "stop"
    assert stopped.tokens == free.tokens[: end + length]
    assert same.text == other.text and same.finish_reason == "length"
    streamed = [event.text for event in engine.stream(TEXTS[:1], stopping[:1])]
    assert "".join(streamed) == stopped.text
    assert engine.scheduler.pages.num_free == engine.config.pages


def test_stop_strings_need_a_tokenizer_and_some_letters(model):
    with pytest.raises(ValueError, match=r"stop=\('a',\): no tokenizer here"):
        make_engine(model).generate([[1]], SamplingParams(1, stop="a"))
    for wrong in (5, [""], [1], b"x", None):
        with pytest.raises(ValueError, match="^stop=.*: must be a text or a list of texts"):
            SamplingParams(stop=wrong)


def test_an_engine_says_what_it_is(model):
    engine = make_engine(model)
    engine.add_request([1], SamplingParams(1))
    words = f"Engine of a llama model, sarathi-serve, chunk={engine.config.chunk}"
    assert words in repr(engine) and "1 requests" in repr(engine)


def good(ids):
    return " ".join(map(str, ids))


def broken(failure):
    """A tokenizer that cannot decode token 25: `failure` is what it does then."""
    return Tokenizer(lambda text: [int(text)], lambda ids: failure() if 25 in ids else good(ids))


def panic():
    raise BaseException("a panic")


FAILURES = {
    "raises": lambda: 1 / 0,
    "panics": panic,
    "None": lambda: None,
    "bytes": lambda: b"x",
    "half a surrogate": lambda: "\ud800",
    "a list": lambda: ["x"],
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_tokenizer_that_fails_ends_its_request_and_no_other(model, failure):
    expected = make_engine(model).generate([[1, 2], [3]], SamplingParams(4), progress=False)
    engine = make_engine(model, tokenizer=broken(FAILURES[failure]))
    completions = engine.generate([[1, 2], [25], [3]], SamplingParams(4), progress=False)
    first, bad, last = completions
    assert [c.tokens for c in (first, last)] == [c.tokens for c in expected]
    assert [c.finish_reason for c in completions] == ["length", "error", "length"]
    assert bad.text is None and bad.error.startswith("the tokenizer failed: ")
    assert len(bad.tokens) == 4 and first.error is None
    assert first.text == "".join(f" {token}" for token in first.tokens)


def test_a_request_whose_tokenizer_fails_can_be_aborted(model):
    engine = make_engine(model, tokenizer=broken(FAILURES["raises"]))
    ids = [engine.add_request([25], SamplingParams(n)) for n in (1, 4)]
    (event,) = [e for e in engine.step() if e.request_id == ids[0]]
    assert event.finish_reason == event.completion.finish_reason == "error"
    completion = engine.abort(ids[1])
    assert (completion.finish_reason, completion.text) == ("abort", None)
    assert finished(engine) == []


def test_a_request_may_bring_its_id(model):
    engine = make_engine(model)
    params = SamplingParams(2)

    def add(number=None):
        return engine.add_request([1], params, request_id=number)

    assert [add(), add(7), add(), add(3), add()] == [0, 7, 8, 3, 9]
    for taken in (7, 8):
        with pytest.raises(ValueError, match=f"request_id={taken}: is the id of another"):
            add(taken)
    for nonsense in (-1, 1.0, "7"):
        with pytest.raises(ValueError, match="request_id="):
            add(nonsense)
    assert add() == 10 and len(engine.scheduler.requests) == 6  # what was refused took no number
    assert {event.request_id for event in finished(engine)} == {0, 7, 8, 3, 9, 10}
    assert add(7) == 7 and add() == 11  # it has ended


@pytest.mark.parametrize("options", [{}, dict(max_waiting=2), dict(max_len=24, page_size=4)])
def test_warm_up_leaves_no_trace(model, options, monkeypatch):
    engine = make_engine(model, **options)
    params = SamplingParams(4)
    sizes = []
    forward = GPT.forward

    def count(self, batch, cache):
        return sizes.append(len(batch.tokens)) or forward(self, batch, cache)

    with monkeypatch.context() as patch:
        patch.setattr(GPT, "forward", count)
        engine.warm_up()
    max_waiting = options.get("max_waiting", 3)
    assert {*range(1, max_waiting + 1), 6} <= set(sizes)  # decodes, a chunk
    assert not engine.runner.cache.data.isnan().any()  # all of it was touched
    assert finished(engine) == [] and not engine.scheduler.requests
    poison(engine)
    tokens = [(c.request_id, c.tokens) for c in engine.generate(PROMPTS[:2], params)]
    assert tokens == [(i, alone(model, PROMPTS[i], params)) for i in (0, 1)]


def test_warm_up_serves_no_more_requests_than_have_pages(model, monkeypatch):
    engine = Engine(model, max_len=32, page_size=8, pages=4, max_batch=300_000)
    counts = []
    monkeypatch.setattr(engine, "generate", lambda prompts, *_, **__: counts.append(len(prompts)))
    engine.warm_up()
    assert counts == [1, 4]


def test_the_runner_picks_the_likeliest_token_of_each_span(model):
    runner = Runner(model, pages=3, page_size=40)
    runner.cache.data.fill_(float("nan"))

    def whole(i, **options):
        return lone_chunk([i], 0, PROMPTS[i], **options)

    assert runner.greedy([whole(0), whole(1, yields_token=False), whole(2)]) == [
        alone(model, PROMPTS[i], SamplingParams(1))[0] for i in (0, 2)
    ]
    first, second = alone(model, PROMPTS[1], SamplingParams(2))
    assert runner.greedy([lone_chunk([1], 19, PROMPTS[1][19:])]) == [first]
    assert runner.greedy([lone_chunk([1], 20, [first], yields_token=False)]) == []
    assert runner.greedy([lone_chunk([1], 20, [first])]) == [second]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_failed_step_is_computed_again(model, policy, error, monkeypatch):
    engine = make_engine(model, policy)
    ids = [engine.add_request(p, SamplingParams(5)) for p in PROMPTS]
    forward = GPT.forward
    batches = []
    tokens = {i: [] for i in ids}

    def flaky(self, batch, cache):
        batches.append([t.tolist() for t in (batch.tokens, batch.positions, batch.slot_mapping)])
        logits = forward(self, batch, cache)  # the cache is written before it fails
        if len(batches) % 2:
            raise error
        return logits

    requests = engine.scheduler.requests

    def state():
        return {i: (r.num_computed, len(r.tokens)) for i, r in requests.items()}

    monkeypatch.setattr(GPT, "forward", flaky)
    while engine.has_work:
        before = state()
        with pytest.raises(error):
            engine.step()
        assert state() == before
        for event in engine.step():
            tokens[event.request_id].append(event.token)
        assert batches[-1] == batches[-2]
    monkeypatch.undo()
    assert [tokens[i] for i in ids] == [alone(model, p, SamplingParams(5)) for p in PROMPTS]


@pytest.mark.parametrize(
    "prompt, params, message",
    [
        ([], SamplingParams(), "prompt: must hold at least 1 token"),
        ([1, 61], SamplingParams(), r"token 61 is out of range, the vocabulary is 0 … 60"),
        ([-1], SamplingParams(), "token -1 is out of range"),
        ([1.5], SamplingParams(), "prompt="),
        ("text", SamplingParams(), "no tokenizer"),
        (7, SamplingParams(), "prompt=7"),
        ([1], {"max_new_tokens": 3}, "params="),
        ([1] * 30, SamplingParams(11), r"30 tokens \+ max_new_tokens=11: .* not exceed max_len=40"),
    ],
)
def test_a_bad_request_is_refused_and_changes_nothing(model, prompt, params, message):
    engine = make_engine(model)
    with pytest.raises(ValueError, match=message):
        engine.add_request(prompt, params)
    with pytest.raises(ValueError, match=message):
        engine.generate([[1], prompt], [SamplingParams(2), params], progress=False)
    assert finished(engine) == []
    assert engine.add_request([1] * 30, SamplingParams(10)) == 0  # exactly max_len fits


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(policy="fifo"), "policy='fifo'.*request-level"),
        (dict(max_len=513), r"max_len=513: must be at most 512"),
        (dict(policy="orca", policy_options=dict(tile=2)), "tile=2.*'orca' has no such option"),
        (dict(policy="priority", policy_options=dict(ttft_slo=float("nan"))), "ttft_slo=nan"),
        (
            dict(policy="vllm", policy_options=dict(tbt_slo=0.1)),
            "tbt_slo=0.1.*'vllm' has no such option",
        ),
        (dict(page_size=41), "page_size=41: must be at most max_len=40"),
        (dict(page_size=8, pages=4), "pages=4: a request of max_len=40 takes 5 pages"),
        (dict(policy_options=dict(prefills=2)), "prefills=2.*sarathi-serve"),
    ],
)
def test_a_bad_engine_is_refused(model, options, message):
    with pytest.raises(ValueError, match=message):
        make_engine(model, **options)


ENGINE = dict(policy=[["orca"]], chunk=[0, 2.5, "8"], max_batch=[0, 2.0], max_len=[0])
ENGINE |= dict(page_size=[0], max_waiting=[0], attention=["cudnn", "flash", "xformers"])
HUGE = 10**400, 10**5000
PARAMS = dict(temperature=[-0.1, float("nan"), "1", *HUGE], top_k=[-1, 1.0, *HUGE])
PARAMS |= dict(max_new_tokens=[0, 2.5, *HUGE], top_p=[0.0, 1.1, Fraction(1, 10**400), *HUGE])
PARAMS |= dict(stop_token_ids=[5, "7", ["7"], [1.0], torch.tensor(5), torch.ones(2, 2)])
PARAMS |= dict(seed=["\ud800", 1.5, None, *HUGE], logprobs=["no", torch.ones(2)])
GEOMETRY = dict(family=["bert"], n_kv_head=[3], n_layer=[0], head_dim=[7])
SENSELESS = [(make_engine, ENGINE), (SamplingParams, PARAMS), (GPTConfig.preset, GEOMETRY)]


@pytest.mark.parametrize("make, arguments", SENSELESS, ids=["engine", "params", "geometry"])
def test_a_senseless_argument_is_named(model, make, arguments):
    positional = {make_engine: [model], GPTConfig.preset: ["llama-tiny"]}.get(make, [])
    for name, values in arguments.items():
        for value in values:
            with pytest.raises(ValueError, match=f"^{name}=.*: ") as error:
                make(*positional, **{name: value})
            assert len(str(error.value)) < 250 and "\n" not in str(error.value)


def test_what_a_request_may_not_bring_is_refused_and_named(model):
    engine = make_engine(model, "priority")
    senseless = dict(arrival=[*HUGE, "1", float("nan")], request_id=[*HUGE, [], -1])
    senseless |= dict(ttft_slo=[*HUGE, 5e-324, 0], tbt_slo=[*HUGE, "1"], priority=[1, [], "\ud800"])
    for name, value in ((key, value) for key in senseless for value in senseless[key]):
        with pytest.raises(ValueError, match=f"^{name}=.*: must be .*$"):
            engine.add_request([1], SamplingParams(1), **{name: value})
    for unknown_id in ([], "1", 10**5000, 7, None):
        with pytest.raises(ValueError, match="^request_id="):
            engine.abort(unknown_id)
    with pytest.raises(ValueError, match="^prompt: token .* is out of range"):
        engine.add_request([1, 10**5000])
    with pytest.raises(ValueError, match="ageing=5e-324: must be a finite number above 0"):
        make_engine(model, "priority", policy_options=dict(ageing=5e-324))
    assert not engine.has_work and engine.step() == []


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_that_is_accepted_makes_a_step_fail(model, policy):
    extremes = [dict(arrival=at, priority=p) for at in (-1e308, 1e308) for p in ("low", "realtime")]
    extremes += [{name: s} for name in ("ttft_slo", "tbt_slo") for s in (3e-308, 1e308, 1e-9)]
    extremes += [dict(request_id=2**62), dict(priority="high", tbt_slo=Fraction(1, 9))]
    small_int = np.uint8
    ids = torch.tensor([60, 60])
    params = [
        SamplingParams(small_int(9), top_k=small_int(200), seed=small_int(7), stop_token_ids=ids)
    ]
    params += [SamplingParams(9, t) for t in (5e-324, 1e308, np.float16(2), Fraction(1, 10**400))]
    params += [SamplingParams(9, 1.0, 2**62, 3e-308, seed) for seed in (-(2**63), 2**63 - 1)]
    sizes = dict(max_batch=4, page_size=4, pages=14)
    if policy == "priority":
        sizes["policy_options"] = {"ageing": 3e-308}
    engine = make_engine(model, policy, **sizes)
    requests = {}
    for i, (fields, request_params) in enumerate(zip(extremes, itertools.cycle(params))):
        prompt = PROMPTS[i % 5]
        request_id = engine.add_request(prompt, request_params, **fields)
        requests[request_id] = (prompt, request_params)
    tokens = {e.request_id: e.completion.tokens for e in finished(engine) if e.completion}
    assert tokens == {
        i: alone(model, *prompt_and_params) for i, prompt_and_params in requests.items()
    }
    with pytest.raises(ValueError, match="max_new_tokens=200: must not exceed max_len=40"):
        engine.add_request([1] * 60, SamplingParams(small_int(200)))  # 260 is 4 in eight bits
    numbers = params[0].max_new_tokens, params[0].stop_token_ids[0], params[4].temperature
    assert [*map(type, numbers)] == [int, int, float]


def test_an_unknown_argument_or_preset_is_refused():
    with pytest.raises(TypeError, match=r"^max_tokens: did you mean max_new_tokens\?$"):
        SamplingParams(max_tokens=1)
    with pytest.raises(TypeError, match=r"^polcy: did you mean policy\?$"):
        Engine(tiny_model(), polcy="vllm")
    with pytest.raises(TypeError, match="^no_such: there is no such argument$"):
        EngineConfig(no_such=2)
    with pytest.raises(TypeError, match=r"^chunk: give these to the EngineConfig$"):
        Engine(tiny_model(), EngineConfig(), chunk=2)
    with pytest.raises(ValueError, match="preset='llama-99b'.*llama-13b"):
        GPTConfig.preset("llama-99b")


def test_generate_checks_its_arguments(model):
    engine = make_engine(model)
    with pytest.raises(ValueError, match="prompts='abc': must be a list"):
        engine.generate("abc")
    with pytest.raises(ValueError, match="params: 1 given for 2 prompts"):
        engine.generate([[1], [2]], [SamplingParams()])
    assert engine.generate([]) == []
    few = make_engine(model, max_waiting=2)
    with pytest.raises(QueueFull, match="max_waiting=2"):
        few.generate([[1], [2], [3]], SamplingParams(1))
    assert finished(few) == [] and len(few.generate([[1], [2]], SamplingParams(1))) == 2
    kept = engine.add_request([9, 9], SamplingParams(1))
    with pytest.raises(ValueError, match="other requests are running"):
        engine.generate([[1]])  # it would swallow the events of the other
    assert [event.request_id for event in finished(engine)] == [kept]


def test_a_closed_stderr_costs_the_bar_and_no_request(model, monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    completions = make_engine(model).generate([[1, 2]], SamplingParams(3))
    assert [len(c.tokens) for c in completions] == [3]


def test_a_model_that_could_not_be_moved_is_as_it_was():
    model = tiny_model(tie_embeddings=True)
    with pytest.raises(ZeroDivisionError):
        model._apply(lambda tensor: 1 / 0)
    assert model.head.weight is model.token_embedding.weight and model.device.type == "cpu"


def test_a_policy_that_returns_nothing_is_an_error_and_not_a_loop(model, monkeypatch):
    engine = make_engine(model)
    with monkeypatch.context() as patch:
        patch.setattr(SarathiServe, "schedule", lambda self: Batch())
        assert engine.step() == []  # there is nothing to do
        engine.add_request(PROMPTS[0], SamplingParams(2))
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"SarathiServe.schedule\(\) returned \[\], but"):
                engine.step()
    expected = alone(model, PROMPTS[0], SamplingParams(2))
    assert [event.token for event in finished(engine)] == expected


def test_generate_ends_with_the_ids_that_a_policy_lost(model, monkeypatch):
    engine = make_engine(model)
    admit = SarathiServe.admit

    def lose_one(scheduler):
        if scheduler.waiting and scheduler.waiting[0].id == 1:
            scheduler.waiting.popleft()
        return admit(scheduler)

    with monkeypatch.context() as patch:
        patch.setattr(SarathiServe, "admit", lose_one)
        with pytest.raises(RuntimeError, match=r"lost requests \[1\]: they neither wait nor run"):
            engine.generate(PROMPTS, SamplingParams(3), progress=False)
        assert not engine.has_work
        kept = [engine.add_request(prompt, SamplingParams(3)) for prompt in PROMPTS]
        while list(engine.scheduler.requests) != [1]:
            engine.step()
        assert engine.abort(kept[1]).finish_reason == "abort"
        assert finished(engine) == []
        engine.add_request(PROMPTS[0], SamplingParams(2), request_id=1)
        with pytest.raises(RuntimeError, match=r"lost requests \[1\]"):
            engine.step()
        engine.drop([])
    [_, event] = finished(engine)
    assert event.request_id == 1 and event.finish_reason == "length"


def test_kv_bytes_are_known_before_they_are_allocated(model):
    for slots, max_len, dtype in [(1, 7, torch.float64), (5, 40, torch.bfloat16)]:
        data = KVCache(model.config, slots, max_len, dtype=dtype).data
        assert slots * max_len * kv_bytes_per_token(model.config, dtype) == data.nbytes
    thirteen_b = GPTConfig.preset("llama-13b")  # 40 layers * 2 * 5,120 * 2 bytes
    assert kv_bytes_per_token(thirteen_b, torch.float16) == 819_200


def test_pages_that_fit_are_the_formula(monkeypatch):
    # LLaMA-13B, SARATHI §4.3.1: 40 layers, 5,120 wide, K and V, 2 bytes; 22 GB for them
    model = GPT(GPTConfig.preset("llama-13b"), "meta", torch.float16, seed=None)
    monkeypatch.setattr("hardware.memory.free_bytes", lambda device: 44 * 10**9)  # half is left
    assert pages_that_fit(model, 1024, 1024) == 26  # 22e9 / (819,200 * 1,024) = 26.2
    assert pages_that_fit(model, 2048, 2048) == 13
    assert pages_that_fit(model, 2048, 16) == 1678
    with pytest.raises(ValueError, match="max_len=2048: .* takes 1.7 GB of KV cache, 0.0 GB are"):
        monkeypatch.setattr("hardware.memory.free_bytes", lambda device: 10)
        pages_that_fit(model, 2048, 16)


@pytest.mark.parametrize(
    "device, max_len, size",
    [
        ("cpu", 4096, 64),
        ("cpu", 41, 21),
        ("cuda", 4096, 256),
        ("cuda:1", 512, 256),
        ("cuda", 510, 64),  # not 255, which flash does not read either
        ("cuda", 41, 21),
    ],
)
def test_small_pages_are_those_that_attention_reads_fastest(device, max_len, size):
    assert (
        small_page_size(max_len, torch.device(device)) == small_page_size(max_len, device) == size
    )


def test_a_runner_is_refused_more_pages_than_fit(model, monkeypatch):
    page_bytes = 8 * kv_bytes_per_token(model.config, model.dtype)
    monkeypatch.setattr("hardware.memory.free_bytes", lambda device: 4 * page_bytes)
    assert Runner(model, 4, 8).cache.pages == 4
    with pytest.raises(ValueError, match="pages=5, page_size=8: takes"):
        Runner(model, 5, 8)


def test_without_a_batch_size_memory_decides(model, monkeypatch):
    per_token = 2 * 2 * 2 * 8 * 8
    free = 2 * (7 * 40 * per_token + 99)  # half of it is left to others
    monkeypatch.setattr("hardware.memory.free_bytes", lambda device: free)
    engine = Engine(model, max_len=40)
    assert engine.scheduler.max_batch == engine.runner.cache.pages == 7
    with pytest.raises(ValueError, match="max_len=400: one request takes"):
        Engine(model, max_len=400)
    monkeypatch.setattr("hardware.memory.free_bytes", lambda device: 10**7)
    assert Engine(model, max_len=4).scheduler.max_batch == 256  # however much there is
    with pytest.raises(ValueError, match="max_batch=1000, max_len=40: takes 0.0 GB, 0.0 GB"):
        Engine(model, max_len=40, max_batch=1000)
    with pytest.raises(ValueError, match="pages=9223372036854775807: must be .* at most 268435456"):
        Engine(model, max_len=40, page_size=8, pages=2**63 - 1)  # not even to count them


def test_sarathi_is_aligned_to_the_tile_on_cuda_only(model, monkeypatch):
    sizes = dict(chunk=300, max_batch=3, max_len=400)

    def budget(**options):
        engine = Engine(model, policy="sarathi", **sizes, policy_options=options)
        return engine.scheduler.budget

    assert budget() == 300
    monkeypatch.setattr(GPT, "device", torch.device("cuda"))
    monkeypatch.setattr("engine.Runner", lambda *_: None)
    monkeypatch.setattr("hardware.memory.check_memory", lambda *_: None)
    assert [budget(), budget(tile=64), budget(tile=100)] == [256, 256, 300]


def test_random_weights_follow_gpt2():
    config = GPTConfig("gpt2", 512, 8, 4, 128)
    for name, p in GPT(config).named_parameters():
        if p.ndim == 1:
            assert (p == ("norm.weight" in name)).all()
        else:
            residual = name.endswith(("postproj.weight", "ffn_ln2.weight"))
            std = 0.02 / 4 if residual else 0.02  # 4 = sqrt(2 * 8 layers)
            assert p.std().item() == pytest.approx(std, rel=0.1)
    first, again, other = (GPT(config, seed=seed).head.weight for seed in (5, 5, 6))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_presets_have_their_published_size():
    published = {
        **{"gpt2": 124e6, "gpt2-medium": 355e6, "gpt2-large": 774e6, "gpt2-xl": 1558e6},
        **{"llama-7b": 6.74e9, "llama-13b": 13.02e9, "llama-33b": 32.5e9, "llama-65b": 65.3e9},
        **{"llama2-70b": 69.0e9, "llama3-8b": 8.03e9, "mistral-7b": 7.24e9, "yi-34b": 34.4e9},
    }
    models = {n: GPT(GPTConfig.preset(n), "meta", seed=None) for n in [*published, "llama-160m"]}
    sizes = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    assert 160e6 <= sizes.pop("llama-160m") <= 220e6
    assert sizes == pytest.approx(published, rel=0.01)
