"""A preempted request goes on as if nothing had happened, whenever it happens, under every policy.

No page is short here: between two steps a test takes a request's pages itself. That the scheduler
does so when it must, and from whom, is in test_scheduler.py; what happens when it does so often, in
test_properties.py and test_soak.py.
"""

import functools
import itertools

import pytest

from engine import Engine
from model import GPT
from policies import POLICIES
from sampling import SamplingParams
from tests.helpers import alone, check_integrity, poison, tiny_model, with_slow

MODEL = tiny_model(n_kv_head=2, vocab_size=29)
PROMPTS = [[7, 8, 9], [1] * 11, [5], [3, 1, 4, 1, 5, 9, 2]]
SAMPLED = dict(temperature=1.0, top_k=9, seed=1)
FREE = alone(MODEL, PROMPTS[3], SamplingParams(9, **SAMPLED))
PARAMS = [
    SamplingParams(7, logprobs=True),
    SamplingParams(6, temperature=1.5, seed=3),
    SamplingParams(4, temperature=0.8, top_p=0.9, seed=5),
    SamplingParams(9, **SAMPLED, stop_token_ids=(FREE[3],)),
]
EXPECTED = [alone(MODEL, *request) for request in zip(PROMPTS, PARAMS, strict=True)]


def make_engine(policy, pages=36, **sizes):
    small = dict(chunk=6, max_batch=3, max_len=20, page_size=4) | sizes
    return Engine(MODEL, policy=policy, pages=pages, **small)


def stepped(engine, completions):
    """One step in a cache of NaN wherever nothing is computed; who ended is put in `done`."""
    poison(engine)
    completions |= {
        event.request_id: event.completion for event in engine.step() if event.completion
    }
    check_integrity(engine.scheduler.pages, [r.pages for r in engine.scheduler.running])


def serve(policy, preempt_at=None, victim=None):
    """Run PROMPTS to their end; after `preempt_at` steps running request `victim` is preempted.

    Returns (completions, how many requests ran before each step, the victim's Request, its token
    times so far).
    """
    engine = make_engine(policy, clock=map(float, itertools.count(1)).__next__)
    ids = [
        engine.add_request(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    ]
    completions = {}
    running = []
    request = None
    times = None
    while engine.has_work:
        running.append(len(engine.scheduler.running))
        if len(running) - 1 == preempt_at:
            request = engine.scheduler.running[victim]
            times = request.token_times[:]
            engine.scheduler.preempt(request)
            assert engine.scheduler.waiting[0] is request
            assert not request.pages and request.num_computed == 0
        stepped(engine, completions)
        assert len(running) < 200
    assert engine.scheduler.pages.num_free == 36
    return [completions[i] for i in ids], running, request, times


@functools.cache
def undisturbed(policy):
    """The same without a preemption."""
    return serve(policy)[:2]


def test_the_requests_end_in_every_way():
    assert [len(tokens) for tokens in EXPECTED] == [7, 6, 4, 4]  # the last one by its stop token
    assert EXPECTED[1] != alone(MODEL, PROMPTS[1], SamplingParams(6))  # the seeds matter
    other = SamplingParams(4, temperature=0.8, top_p=0.9, seed=6)
    assert EXPECTED[2] != alone(MODEL, PROMPTS[2], other)


@pytest.mark.parametrize("policy", with_slow(POLICIES, fast=["vllm", "sarathi-serve", "priority"]))
def test_preemption_at_every_iteration_leaves_no_trace(policy):
    usual, running = undisturbed(policy)
    assert [c.tokens for c in usual] == EXPECTED
    decoding = prefilling = 0
    for n, victim in ((n, victim) for n, count in enumerate(running) for victim in range(count)):
        completions, _, request, times = serve(policy, n, victim)
        assert [c.tokens for c in completions] == EXPECTED
        assert [c.finish_reason for c in completions] == ["length", "length", "length", "stop"]
        assert [c.preemptions for c in completions] == [int(i == request.id) for i in range(4)]
        for c, other in zip(completions, usual, strict=True):
            assert c.token_times == sorted(set(c.token_times))
            assert len(c.token_times) == len(c.tokens)
            assert c.logprobs == pytest.approx(other.logprobs, abs=1e-10)
        c = completions[request.id]
        other = usual[request.id]
        assert c.token_times[: len(times)] == times == other.token_times[: len(times)]
        assert not times or c.ttft == other.ttft
        assert c.scheduled == other.scheduled and c.recomputed_tokens > 0
        decoding += bool(times)
        prefilling += not times
    whole_prompts = ("request-level", "orca", "orca-best", "vllm", "hybrid-only")
    assert decoding > 10 and (prefilling or policy in whole_prompts)


@pytest.mark.parametrize("policy", POLICIES)
def test_preemption_in_every_iteration_is_only_slow(policy):
    """As often as it can be without standing still: of whoever has just been given a token."""
    engine = make_engine(policy, pages=20)
    ids = [
        engine.add_request(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    ]
    completions = {}
    lengths = dict(zip(ids, map(len, PROMPTS), strict=True))
    for _ in itertools.takewhile(lambda _: engine.has_work, range(2000)):
        stepped(engine, completions)
        for request in list(engine.scheduler.running):
            if len(request.tokens) > lengths[request.id]:
                lengths[request.id] = len(request.tokens)
                engine.scheduler.preempt(request)
    assert [completions[i].tokens for i in ids] == EXPECTED
    for i in ids:  # after each token but the last
        outputs = range(len(EXPECTED[i]) - 1)
        assert completions[i].preemptions == len(outputs)
        assert completions[i].recomputed_tokens == sum(len(PROMPTS[i]) + n for n in outputs)


def test_an_abort_while_a_victim_waits_returns_what_it_had():
    engine = make_engine("sarathi-serve")
    completions = {}
    ids = [engine.add_request(PROMPTS[i], PARAMS[i]) for i in (1, 0)]
    for _ in range(4):
        engine.step()
    request = engine.scheduler.running[0]
    assert request.id == ids[0] and request.is_decoding
    engine.scheduler.preempt(request)
    c = engine.abort(ids[0])
    had = len(c.tokens)
    assert c.finish_reason == "abort" and 0 < had < 6 and c.tokens == EXPECTED[1][:had]
    assert c.preemptions == 1 and c.recomputed_tokens == len(PROMPTS[1]) + had - 1
    assert len(c.token_times) == had
    while engine.has_work:
        stepped(engine, completions)
    assert [(i, c.tokens) for i, c in completions.items()] == [(ids[1], EXPECTED[0])]


@pytest.mark.parametrize("policy", ["vllm", "sarathi-serve", "chunked-only", "hybrid-only"])
@pytest.mark.parametrize("fails, aborted", [(False, False), (True, False), (True, True)])
def test_an_iteration_names_its_victims(policy, fails, aborted, monkeypatch):
    """Also when the first try at it failed, and when before the second one all that it wanted to
    compute is given up."""

    def fail(*_):
        raise MemoryError

    engine = make_engine(policy, pages=6, chunk=20, max_batch=2)
    scheduler = engine.scheduler
    params = SamplingParams(10)
    stays, victim = (engine.add_request([i] * 10, params) for i in (1, 2))

    def in_need(r):
        return r.is_decoding and r.num_computed % 4 == 0

    while scheduler.pages.num_free or not all(in_need(r) for r in scheduler.running):
        assert engine.step(), "memory is never short"
    if fails:
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(GPT, "forward", fail)
            engine.step()
    if aborted:
        engine.abort(stays)
    engine.step()
    last = engine.last_iteration
    assert last.preempted == [victim]
    if not aborted:
        assert (last.free_pages, last.waiting, last.running) == (2, 1, 1)
        engine.step()
        assert engine.last_iteration.preempted == []
