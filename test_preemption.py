"""A preempted request goes on as if nothing had happened, whenever it happens, under every policy.

No page is short here: between two steps a test takes a request's pages itself. That the scheduler does so when it must,
and from whom, is in test_scheduler.py; what happens when it does so often, in test_properties.py and test_soak.py.
"""

import functools

import pytest

from conftest import alone, poison, tiny_model
from engine import Engine
from model import GPT
from sampling import SamplingParams
from scheduler import POLICIES

MODEL = tiny_model(n_kv_head=2, vocab_size=29)
PROMPTS = [[7, 8, 9], [1] * 11, [5], [3, 1, 4, 1, 5, 9, 2]]
SEEDED = SamplingParams(6, temperature=1.5, seed=3)
FREE = alone(MODEL, PROMPTS[3], SamplingParams(9, temperature=1.0, top_k=9, seed=1))
PARAMS = [
    SamplingParams(7, logprobs=True),
    SEEDED,
    SamplingParams(4, temperature=0.8, top_p=0.9, seed=5),
    SamplingParams(9, temperature=1.0, top_k=9, seed=1, stop_token_ids=(FREE[3],)),
]
EXPECTED = [alone(MODEL, *request) for request in zip(PROMPTS, PARAMS)]


class Ticks:
    """A clock that moves by one second whenever it is read."""

    now = 0.0

    def __call__(self):
        self.now += 1
        return self.now


def serve(policy, preempt_at=None, victim=None, pages=36):
    """Run PROMPTS to their end; after `preempt_at` steps the running request number `victim` loses its pages.

    Returns (completions, how many requests ran before each step, the victim's Request, its token times so far).
    """
    engine = Engine(MODEL, policy, 6, 3, 20, page_size=4, pages=pages, clock=Ticks())
    ids = [engine.add_request(prompt, params) for prompt, params in zip(PROMPTS, PARAMS)]
    done, running, request, times = {}, [], None, None
    while engine.has_work:
        running.append(len(engine.scheduler.running))
        if len(running) - 1 == preempt_at:
            request = engine.scheduler.running[victim]
            times = engine._live[request.id].completion.token_times[:]
            engine.scheduler.preempt(request)
            assert engine.scheduler.waiting[0] is request and not request.pages and request.num_computed == 0
        poison(engine)
        for event in engine.step():
            if event.completion:
                done[event.request_id] = event.completion
        assert len(running) < 200
        engine.scheduler.pages.check_integrity([r.pages for r in engine.scheduler.running])
    assert engine.scheduler.pages.num_free == pages
    return [done[i] for i in ids], running, request, times


@functools.cache
def undisturbed(policy):
    """The same without a preemption."""
    return serve(policy)[:2]


def test_the_requests_end_in_every_way():
    assert [len(tokens) for tokens in EXPECTED] == [7, 6, 4, 4]  # the last one by its stop token
    assert EXPECTED[1] != alone(MODEL, PROMPTS[1], SamplingParams(6))  # the seeds matter
    assert EXPECTED[2] != alone(MODEL, PROMPTS[2], SamplingParams(4, temperature=0.8, top_p=0.9, seed=6))


@pytest.mark.parametrize("policy", POLICIES)
def test_preemption_at_every_iteration_leaves_no_trace(policy):
    usual, running = undisturbed(policy)
    assert [completion.tokens for completion in usual] == EXPECTED
    decoding = prefilling = 0
    for n, candidates in enumerate(running):
        for victim in range(candidates):
            done, _, request, times = serve(policy, n, victim)
            assert [completion.tokens for completion in done] == EXPECTED
            assert [completion.finish_reason for completion in done] == ["length", "length", "length", "stop"]
            assert [completion.preemptions for completion in done] == [int(i == request.id) for i in range(4)]
            for completion, other in zip(done, usual):
                assert completion.token_times == sorted(set(completion.token_times))
                assert len(completion.token_times) == len(completion.tokens)
                assert completion.logprobs == pytest.approx(other.logprobs, abs=1e-10)
            completion = done[request.id]
            assert completion.token_times[: len(times)] == times == usual[request.id].token_times[: len(times)]
            if times:
                assert completion.ttft == usual[request.id].ttft
            assert completion.scheduled == usual[request.id].scheduled
            assert completion.recomputed_tokens > 0
            decoding += bool(times)
            prefilling += not times
    assert decoding > 10 and (prefilling or policy in ("request-level", "orca", "vllm", "hybrid-only"))


@pytest.mark.parametrize("policy", POLICIES)
def test_preemption_in_every_iteration_is_only_slow(policy):
    """As often as it can be without standing still: whoever has just been given its first token loses its pages."""
    engine = Engine(MODEL, policy, 6, 3, 20, page_size=4, pages=20)
    ids = [engine.add_request(prompt, params) for prompt, params in zip(PROMPTS, PARAMS)]
    done, lengths = {}, dict.fromkeys(ids, 0)
    for _ in range(2000):
        poison(engine)
        for event in engine.step():
            if event.completion:
                done[event.request_id] = event.completion
        for request in list(engine.scheduler.running):
            if len(request.tokens) - request.prompt_len > lengths[request.id]:
                lengths[request.id] = len(request.tokens) - request.prompt_len
                engine.scheduler.preempt(request)
    assert [done[i].tokens for i in ids] == EXPECTED
    for i in ids:  # after each token but the last
        assert done[i].preemptions == len(EXPECTED[i]) - 1
        assert done[i].recomputed_tokens == sum(len(PROMPTS[i]) + n for n in range(len(EXPECTED[i]) - 1))


def test_an_abort_while_a_victim_waits_returns_what_it_had():
    engine = Engine(MODEL, "sarathi-serve", 6, 3, 20, page_size=4, pages=36)
    request_id = engine.add_request(PROMPTS[1], PARAMS[1])
    other = engine.add_request(PROMPTS[0], PARAMS[0])
    for _ in range(4):
        engine.step()
    request = engine.scheduler.running[0]
    assert request.id == request_id and request.is_decoding
    engine.scheduler.preempt(request)
    completion = engine.abort(request_id)
    had = len(completion.tokens)
    assert completion.finish_reason == "abort" and 0 < had < 6 and completion.tokens == EXPECTED[1][:had]
    assert completion.preemptions == 1 and completion.recomputed_tokens == len(PROMPTS[1]) + had - 1
    assert len(completion.token_times) == had
    events = []
    while engine.has_work:
        events += engine.step()
    assert {event.request_id for event in events} == {other} and events[-1].completion.tokens == EXPECTED[0]


@pytest.mark.parametrize("policy", ["vllm", "sarathi-serve", "chunked-only", "hybrid-only"])
def test_an_iteration_names_its_victims(policy, monkeypatch):
    """Also when the first try at it failed, and when all that it wanted to compute is given up before the second."""

    def begun():
        engine = Engine(MODEL, policy, 20, 2, 20, page_size=4, pages=6)
        ids = [engine.add_request([1] * 10, SamplingParams(10)), engine.add_request([2] * 10, SamplingParams(10))]
        for _ in range(100):
            if engine.scheduler.pages.num_free == 0 and all(
                r.is_decoding and r.num_computed % 4 == 0 for r in engine.scheduler.running
            ):
                return engine, ids
            engine.step()
        pytest.fail("memory is never short")

    def fail(*_):
        raise MemoryError

    engine, ids = begun()
    engine.step()
    assert engine.last_iteration.preempted == [ids[1]] and engine.last_iteration.free_pages == 2
    assert engine.last_iteration.waiting == 1 and engine.last_iteration.running == 1
    engine.step()
    assert engine.last_iteration.preempted == []

    engine, ids = begun()
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(GPT, "forward", fail)
        engine.step()
    engine.step()
    assert engine.last_iteration.preempted == [ids[1]]

    engine, ids = begun()
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(GPT, "forward", fail)
        engine.step()
    engine.abort(ids[0])
    engine.step()
    assert engine.last_iteration.preempted == [ids[1]]
