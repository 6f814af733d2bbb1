"""Whatever arrives, under whatever policy, with whatever going wrong: nothing is lost, leaked or shared."""

import functools
from collections import Counter
from random import Random

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from conftest import alone, poison, tiny_model
from engine import Engine
from sampling import SamplingParams
from scheduler import POLICIES, PRIORITIES

MAX_LEN = 24
MODEL = tiny_model(n_kv_head=2, vocab_size=17)


@functools.cache
def expected(prompt, params):
    """The tokens of a request that has the machine to itself."""
    return alone(MODEL, prompt, params)


class Fault(Exception):
    """What a broken forward raises."""


requests = st.tuples(
    # not a list of tokens: hypothesis likes these short, and short requests need no memory
    st.builds(
        lambda n, seed: tuple(Random(seed).choices(range(17), k=n)),
        st.sampled_from([4, 8, 1, 3, 5, 7, 12, 16]),
        st.integers(0, 5),
    ),
    st.builds(
        SamplingParams,
        max_new_tokens=st.sampled_from([8, 7, 6, 5, 4, 3, 2, 1]),
        temperature=st.sampled_from([0.0, 1.0]),
        top_k=st.sampled_from([0, 3]),
        top_p=st.sampled_from([1.0, 0.7]),
        seed=st.integers(0, 3),
        stop_token_ids=st.sampled_from([(), (), (3, 4)]),
    ),
    st.fixed_dictionaries(
        dict(
            priority=st.sampled_from(PRIORITIES),
            ttft_slo=st.sampled_from([None, 1e-6, 1.0]),
            tbt_slo=st.sampled_from([None, 1e-6, 1e-2, 1.0]),
        )
    ),
)
action = st.one_of(
    requests,
    st.just("step"),
    st.just("step"),
    st.just("fault before"),
    st.just("fault after"),
    st.tuples(st.just("abort"), st.integers(0, 20)),
    st.tuples(st.just("preempt"), st.integers(0, 3)),
)
actions = st.builds(list.__add__, st.lists(requests, min_size=3, max_size=6), st.lists(action, max_size=40))


four_long_ones = [((n,) * 8, SamplingParams(8, temperature=1.0, seed=n), {}) for n in range(4)]


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    actions=actions,
    chunk=st.integers(1, 20),
    max_batch=st.sampled_from([4, 3, 2, 1]),
    tile=st.sampled_from([1, 4]),
    page_size=st.sampled_from([4, 1, 4, 1, MAX_LEN]),
    spare_tokens=st.sampled_from([0, 4, 8, 12, 16, 24, 32, 3 * MAX_LEN]),
)
@example(four_long_ones, 20, 4, 1, 1, 16)  # they all begin, and then there is memory for two
@example(four_long_ones + ["step"] * 9 + ["fault before", "step", "fault after"] * 8, 20, 4, 1, 4, 16)
def test_every_request_ends_as_if_it_were_alone(policy, actions, chunk, max_batch, tile, page_size, spare_tokens):
    pages = -(-MAX_LEN // page_size) + spare_tokens // page_size  # at least what one request of MAX_LEN takes
    options = {"tile": tile} if policy == "sarathi" else {}
    engine = Engine(MODEL, policy, chunk, max_batch, MAX_LEN, page_size=page_size, pages=pages, **options)
    asked, got, times, ended = {}, {}, {}, {}
    computed, preempted, forced = Counter(), Counter(), Counter()
    schedule = engine.scheduler.schedule

    def scheduled():
        batch = schedule()
        poison(engine)  # whoever was preempted for this batch has lost what was computed
        return batch

    engine.scheduler.schedule = scheduled

    def step():
        poison(engine)
        previous = engine.last_iteration
        events = engine.step()
        if engine.last_iteration is not previous:
            for request_id, length, _ in engine.last_iteration.chunks:
                computed[request_id] += length
            preempted.update(engine.last_iteration.preempted)
        for event in events:
            assert event.request_id not in ended
            got[event.request_id].append(event.token)
            times[event.request_id].append(engine.last_iteration.end)
            if event.completion:
                ended[event.request_id] = event.completion
        check()
        return events

    def check():
        scheduler = engine.scheduler
        scheduler.pages.check_integrity([request.pages for request in scheduler.running])
        assert not any(request.pages or request.num_computed for request in scheduler.waiting)
        live = {request.id for request in (*scheduler.running, *scheduler.waiting)}
        assert live == set(asked) - set(ended)
        for request in (*scheduler.running, *scheduler.waiting):
            assert request.tokens[request.prompt_len :] == got[request.id]
            assert 0 <= request.num_computed < len(request.tokens)
            assert computed[request.id] == request.num_computed + request.recomputed
            assert page_size < MAX_LEN or request.preemptions == forced[request.id]

    def everybody():
        return (*engine.scheduler.running, *engine.scheduler.waiting)

    def fail(after):
        forward = engine.model.forward

        def broken(batch, cache):
            if after:
                forward(batch, cache)
            raise Fault

        before = {r.id: (r.num_computed, r.preemptions, r.tokens[:]) for r in everybody()}
        engine.model.forward = broken
        try:
            if engine.has_work:
                poison(engine)
                with pytest.raises(Fault):
                    engine.step()
        finally:
            del engine.model.forward
        for r in everybody():
            num_computed, preemptions, tokens = before.pop(r.id)
            assert r.tokens == tokens
            # nobody has advanced, but a victim may have lost its pages to the batch that is kept
            assert (r.num_computed, r.preemptions) in ((num_computed, preemptions), (0, preemptions + 1))
        assert not before
        check()

    for action in actions:
        if action == "step":
            step()
        elif action in ("fault before", "fault after"):
            fail(action == "fault after")
        elif action[0] == "preempt":  # though memory may not be short; not while a batch is kept after a fault
            running = engine.scheduler.running
            if action[1] < len(running) and engine._batch is None:
                forced[running[action[1]].id] += 1
                engine.scheduler.preempt(running[action[1]])
                check()
        elif action[0] == "abort":
            if action[1] in asked and action[1] not in ended:
                request = next(r for r in everybody() if r.id == action[1])
                ended[action[1]] = engine.abort(action[1])
                assert computed[request.id] == request.num_computed + ended[action[1]].recomputed_tokens
                check()
        else:
            prompt, params, targets = action
            request_id = engine.add_request(prompt, params, **targets)
            asked[request_id], got[request_id], times[request_id] = (prompt, params), [], []
    for _ in range(1000):
        if not engine.has_work:
            break
        step()

    assert set(ended) == set(asked)
    for request_id, (prompt, params) in asked.items():
        completion, alone_tokens = ended[request_id], expected(prompt, params)
        assert completion.tokens == got[request_id] and completion.prompt == list(prompt)
        if completion.finish_reason == "abort":
            assert completion.tokens == alone_tokens[: len(completion.tokens)]
        else:
            assert completion.tokens == alone_tokens
            stopped = alone_tokens[-1] in params.stop_token_ids
            assert completion.finish_reason == ("stop" if stopped else "length")
            # each token once, but the last, and once more what a preemption threw away
            assert computed[request_id] == len(prompt) + len(alone_tokens) - 1 + completion.recomputed_tokens
        assert completion.token_times == times[request_id] == sorted(times[request_id])
        assert preempted[request_id] + forced[request_id] == completion.preemptions
    if actions[:4] == four_long_ones and policy not in ("request-level", "orca", "sarathi"):
        assert preempted  # or this test would not test it
    engine.scheduler.pages.check_integrity()
    assert engine.scheduler.pages.num_free == engine.cache.pages
