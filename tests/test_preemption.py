"""A preempted request goes on as if nothing had happened. That its text is the same, whenever it
happens and under every policy, is in test_properties.py; from whom pages are taken, in
test_scheduler.py."""

import itertools

import pytest

from engine import Engine
from model import GPT
from policies import POLICIES
from sampling import SamplingParams
from tests.helpers import completions_of, finish, tiny_model

MODEL = tiny_model(n_kv_head=2, vocab_size=29)
PROMPTS = [[7, 8, 9], [1] * 11, [5], [3, 1, 4, 1, 5, 9, 2]]
PARAMS = SamplingParams(6, temperature=1.5, seed=3, logprobs=True)


def new_engine(policy, pages=36, **sizes):
    small = dict(
        chunk=6,
        max_batch=3,
        max_len=20,
        page_size=4,
    )
    return Engine(MODEL, policy=policy, pages=pages, **small | sizes)


def serve(policy, preempt_at):
    """{request id: Completion} of all prompts, and the token times of the one that is preempted
    after so many steps, up to then."""
    engine = new_engine(policy, clock=map(float, itertools.count(1)).__next__)
    for prompt in PROMPTS:
        engine.add_request(prompt, PARAMS)
    events = []
    for _ in range(preempt_at):
        events += engine.step()
    times = []
    for request in engine.scheduler.running[:1]:
        times = list(request.token_times)
        engine.scheduler.preempt(request)
    return completions_of(events + finish(engine)), times


@pytest.mark.parametrize("policy", POLICIES)
def test_a_preemption_changes_no_time_of_before_and_no_logprob(policy):
    undisturbed, _ = serve(policy, preempt_at=0)
    for preempt_at in (1, 3, 4, 6):
        completions, times = serve(policy, preempt_at)
        assert sum(c.preemptions for c in completions.values()) == 1 or preempt_at > 3
        for i, expected in undisturbed.items():
            c = completions[i]
            assert c.tokens == expected.tokens
            assert c.logprobs == pytest.approx(expected.logprobs, abs=1e-10)
            assert c.token_times == sorted(set(c.token_times))
            if c.preemptions:
                assert c.scheduled == expected.scheduled
                assert c.recomputed_tokens > 0
                assert c.token_times[: len(times)] == times


@pytest.mark.parametrize("policy", ["vllm", "sarathi-serve", "chunked-only", "hybrid-only"])
@pytest.mark.parametrize("fails, aborted", [(False, False), (True, False), (True, True)])
def test_an_iteration_names_its_victims(policy, fails, aborted, monkeypatch):
    """Also when the first try at it failed, and when before the second one all that it wanted to
    compute is given up."""

    def fail(*_):
        raise MemoryError

    def is_in_need(request):
        return request.is_decoding and request.num_computed % 4 == 0

    engine = new_engine(policy, pages=6, chunk=20, max_batch=2)
    scheduler = engine.scheduler
    stays, victim = (engine.add_request([i] * 10, SamplingParams(10)) for i in (1, 2))
    while scheduler.pages.num_free or not all(map(is_in_need, scheduler.running)):
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
        assert (last.prefill_tokens, last.decode_tokens) == (0, 1)
        engine.step()
        assert engine.last_iteration.preempted == []
