"""Whatever arrives, under whatever policy, with whatever going wrong: nothing is lost, leaked or shared."""

import functools
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import alone, tiny_model
from engine import Engine
from kv_cache import cells
from sampling import SamplingParams
from scheduler import POLICIES

MAX_LEN = 24
MODEL = tiny_model(n_kv_head=2, vocab_size=17)


@functools.cache
def expected(prompt, params):
    """The tokens of a request that has the machine to itself."""
    return alone(MODEL, prompt, params)


class Fault(Exception):
    """What a broken forward raises."""


def poison(engine):
    """Put NaN wherever no running request has something computed: free pages, and what lies beyond num_computed."""
    size = engine.cache.page_size
    used = [i for r in engine.scheduler.running for i in cells(r.pages, size, 0, r.num_computed)]
    unused = sorted(set(range(engine.cache.data.shape[3])) - set(used))
    engine.cache.data[:, :, :, unused] = float("nan")


requests = st.tuples(
    st.lists(st.integers(0, 16), min_size=1, max_size=16).map(tuple),
    st.builds(
        SamplingParams,
        max_new_tokens=st.integers(1, 8),
        temperature=st.sampled_from([0.0, 1.0]),
        top_k=st.sampled_from([0, 3]),
        top_p=st.sampled_from([1.0, 0.7]),
        seed=st.integers(0, 3),
        stop_token_ids=st.sampled_from([(), (3, 4, 5)]),
    ),
)
actions = st.lists(
    st.one_of(
        requests,
        st.just("step"),
        st.just("step"),
        st.just("fault before"),
        st.just("fault after"),
        st.tuples(st.just("abort"), st.integers(0, 20)),
    ),
    max_size=40,
)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(actions=actions, chunk=st.integers(1, 20), max_batch=st.integers(1, 4), tile=st.sampled_from([1, 4]))
def test_every_request_ends_as_if_it_were_alone(policy, actions, chunk, max_batch, tile):
    engine = Engine(MODEL, policy, chunk, max_batch, MAX_LEN, **({"tile": tile} if policy == "sarathi" else {}))
    asked, got, ended, computed = {}, {}, {}, Counter()

    def step():
        poison(engine)
        previous = engine.last_iteration
        events = engine.step()
        if engine.last_iteration is not previous:
            for request_id, length, _ in engine.last_iteration.chunks:
                computed[request_id] += length
        for event in events:
            assert event.request_id not in ended
            got[event.request_id].append(event.token)
            if event.completion:
                ended[event.request_id] = event.completion
        check()
        return events

    def check():
        scheduler = engine.scheduler
        scheduler.pages.check_integrity([request.pages for request in scheduler.running])
        assert not any(request.pages for request in scheduler.waiting)
        live = {request.id for request in (*scheduler.running, *scheduler.waiting)}
        assert live == set(asked) - set(ended)
        for request in scheduler.running:
            assert request.tokens[request.prompt_len :] == got[request.id]
            assert 0 <= request.num_computed < len(request.tokens)

    def fail(after):
        forward = engine.model.forward

        def broken(batch, cache):
            if after:
                forward(batch, cache)
            raise Fault

        state = [(r.id, r.num_computed, len(r.tokens)) for r in (*engine.scheduler.running, *engine.scheduler.waiting)]
        engine.model.forward = broken
        try:
            if engine.has_work:
                with pytest.raises(Fault):
                    engine.step()
        finally:
            del engine.model.forward
        assert sorted(state) == sorted(
            (r.id, r.num_computed, len(r.tokens)) for r in (*engine.scheduler.running, *engine.scheduler.waiting)
        )
        check()

    for action in actions:
        if action == "step":
            step()
        elif action in ("fault before", "fault after"):
            fail(action == "fault after")
        elif action[0] == "abort":
            if action[1] in asked and action[1] not in ended:
                ended[action[1]] = engine.abort(action[1])
                check()
        else:
            request_id = engine.add_request(*action)
            asked[request_id], got[request_id] = action, []
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
            assert computed[request_id] == len(prompt) + len(alone_tokens) - 1  # each token once, but the last
        assert len(completion.token_times) == len(completion.tokens)
        assert completion.token_times == sorted(completion.token_times)
    engine.scheduler.pages.check_integrity()
    assert engine.scheduler.pages.num_free == engine.cache.pages
