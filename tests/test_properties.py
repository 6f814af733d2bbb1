"""Whatever arrives, under whatever policy, with whatever going wrong: nothing is lost, leaked or
shared."""

import functools
from collections import Counter
from random import Random

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from engine import Engine
from policies import ALL_POLICIES
from policies.priority import PRIORITIES
from sampling import SamplingParams
from tests.helpers import RESERVING, alone, check_integrity, guard, poison, tiny_model

MAX_LEN = 24
MODEL = tiny_model(n_kv_head=2, vocab_size=17)
NEVER_PREEMPT = {*RESERVING, "no-evict", "tgi", "sglang", "sglang-mixed", "peak"}  # or seldom


@functools.cache
def expected(prompt, params):
    """The tokens of a request that has the machine to itself."""
    return alone(MODEL, prompt, params)


class ModelError(Exception):
    """What a broken forward raises."""


prompts = (
    st.builds(  # not a list of tokens: hypothesis likes these short, and short ones always fit
        lambda n, seed: tuple(Random(seed).choices(range(17), k=n)),
        st.sampled_from([4, 8, 1, 3, 5, 7, 12, 16]),
        st.integers(0, 5),
    )
)
params = st.builds(
    SamplingParams,
    max_new_tokens=st.sampled_from([8, 7, 6, 5, 4, 3, 2, 1]),
    temperature=st.sampled_from([0.0, 1.0]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.7]),
    seed=st.integers(0, 3),
    stop_token_ids=st.sampled_from([(), (), (3, 4)]),
)
promises = st.fixed_dictionaries(
    dict(
        priority=st.sampled_from(PRIORITIES),
        ttft_slo=st.sampled_from([None, 1e-6, 1.0]),
        tbt_slo=st.sampled_from([None, 1e-6, 1e-2, 1.0]),
    )
)
requests = st.tuples(st.just("add"), prompts, params, promises)
action = st.one_of(
    requests,
    *[st.just(it) for it in (("step",), ("step",), ("fail", False), ("fail", True))],
    st.tuples(st.just("abort"), st.integers(0, 20)),
    st.tuples(st.just("preempt"), st.integers(0, 3)),
)
beginnings = st.lists(requests, min_size=3, max_size=6)
rest = st.lists(action, max_size=40)
actions = st.builds(list.__add__, beginnings, rest)
sampled = [SamplingParams(8, temperature=1.0, seed=seed) for seed in range(4)]
long_ones = [("add", (n,) * 8, sampled[n], {}) for n in range(4)]
urgent = dict(priority="realtime", tbt_slo=1e-6)
at_risk = [("add", (n,) * 4, sampled[n], {} if n else urgent) for n in range(3)]
alike = [(("add", (1,) * n, sampled[n % 4], {}), ("step",)) for n in (16, 12, 9, 16, 13)]
alike = [action for both in alike for action in both]
faults = [("step",)] * 9 + [("fail", False), ("step",), ("fail", True)] * 8


class Watched:
    """An engine of which every action is checked, and what its requests should have got."""

    def __init__(self, **options):
        self.engine = guard(Engine(MODEL, max_len=MAX_LEN, **options))
        # all by request id
        self.asked = {}
        self.got = {}
        self.times = {}
        self.ended = {}
        self.computed = Counter()
        self.preempted = Counter()
        self.forced = Counter()
        self.schedule = self.engine.scheduler.schedule
        self.engine.scheduler.schedule = self.poisoned

    def poisoned(self):
        batch = self.schedule()
        poison(self.engine)  # whoever was preempted for this batch has lost what was computed
        return batch

    @property
    def live(self):
        """All requests that run or wait."""
        return [*self.engine.scheduler.running, *self.engine.scheduler.waiting]

    def check(self):
        """What must hold between any two actions."""
        scheduler = self.engine.scheduler
        config = self.engine.config
        # who has max_len keeps it, but `priority` preempts lower classes for targets at risk too
        reserved = config.page_size == MAX_LEN and config.policy != "priority"
        check_integrity(scheduler.pages, [r.pages for r in scheduler.running])
        assert not any(r.pages or r.num_computed for r in scheduler.waiting)
        assert {r.id for r in self.live} == set(self.asked) - set(self.ended)
        assert {r.id: r for r in self.live} == scheduler.requests
        for r in self.live:
            assert r.tokens[r.prompt_len :] == self.got[r.id]
            assert 0 <= r.num_computed < len(r.tokens)
            assert self.computed[r.id] == r.num_computed + r.recomputed_tokens - r.cached_tokens
            assert r.cached_tokens == 0 or config.prefix_caching
            assert not reserved or r.preemptions == self.forced[r.id]

    def add(self, prompt, params, promised):
        i = self.engine.add_request(prompt, params, **promised)
        self.asked[i], self.got[i], self.times[i] = (prompt, params), [], []

    def step(self):
        engine = self.engine
        previous = self.engine.last_iteration
        poison(engine)
        events = engine.step()
        if engine.last_iteration is not previous:
            for i, _, length, _ in engine.last_iteration.chunks:
                self.computed[i] += length
            self.preempted.update(engine.last_iteration.preempted)
        for i, token, _, _, completion in events:
            assert i not in self.ended
            self.got[i].append(token)
            self.times[i].append(engine.last_iteration.end)
            if completion:
                self.ended[i] = completion
        self.check()

    def fail(self, after):
        """A step whose forward raises, before or after it has written the cache."""
        forward = MODEL.forward

        def broken(batch, cache):
            if after:
                forward(batch, cache)
            raise ModelError

        before = {
            r.id: (r.num_computed, r.cached_tokens, r.preemptions, r.tokens[:]) for r in self.live
        }
        MODEL.forward = broken
        try:
            if self.engine.has_work:
                poison(self.engine)
                with pytest.raises(ModelError):
                    self.engine.step()
        finally:
            del MODEL.forward
        for r in self.live:
            num_computed, cached, preemptions, tokens = before.pop(r.id)
            assert r.tokens == tokens
            # nobody has advanced, but a victim may have lost its pages to the batch that is kept,
            # and who was admitted to it may have found some
            allowed = (num_computed, preemptions), (0, preemptions + 1)
            found = r.cached_tokens - cached
            assert (r.num_computed - found, r.preemptions) in allowed
        assert not before
        self.check()

    def abort(self, i):
        if i in self.asked and i not in self.ended:
            r = self.engine.scheduler.requests[i]
            self.ended[i] = self.engine.abort(i)
            done = self.ended[i]
            assert self.computed[i] == r.num_computed + done.recomputed_tokens - done.cached_tokens
            self.check()

    def preempt(self, n):
        """Memory need not be short, and a batch may be kept after a fault."""
        running = self.engine.scheduler.running
        if n < len(running):
            self.forced[running[n].id] += 1
            self.engine.scheduler.preempt(running[n])
            self.check()


CASES = given(
    actions=actions,
    chunk=st.integers(1, 20),
    max_batch=st.sampled_from([4, 3, 2, 1]),
    tile=st.sampled_from([1, 4]),
    page_size=st.sampled_from([4, 1, 4, 1, MAX_LEN]),
    spare=st.sampled_from([0, 4, 8, 12, 16, 24, 32, 3 * MAX_LEN]),
    shares=st.booleans(),
)


def check_every_request_ends_as_if_alone(
    policy, actions, chunk, max_batch, tile, page_size, spare, shares
):
    # memory for one request of MAX_LEN, and `spare` tokens more
    sizes = dict(chunk=chunk, max_batch=max_batch, page_size=page_size)
    sizes |= dict(prefix_caching=shares and page_size < MAX_LEN)
    sizes |= dict(pages=-(-MAX_LEN // page_size) + spare // page_size)
    options = {"tile": tile} if policy == "sarathi" else {}
    watched = Watched(policy=policy, **sizes, policy_options=options)
    for action in actions:
        getattr(watched, action[0])(*action[1:])
    for _ in range(1000):
        if not watched.engine.has_work:
            break
        watched.step()

    scheduler = watched.engine.scheduler
    assert set(watched.ended) == set(watched.asked)
    for i, (prompt, params) in watched.asked.items():
        c = watched.ended[i]
        tokens = expected(prompt, params)
        assert c.tokens == watched.got[i] and c.prompt == list(prompt)
        if c.finish_reason == "abort":
            assert c.tokens == tokens[: len(c.tokens)]
        else:
            assert c.tokens == tokens
            assert c.finish_reason == ("stop" if tokens[-1] in params.stop_token_ids else "length")
            # each token once, but the last, and once more what a preemption threw away, but for
            # what was found
            once = len(prompt) + len(tokens) - 1
            assert watched.computed[i] == once + c.recomputed_tokens - c.cached_tokens
        assert c.token_times == watched.times[i] == sorted(watched.times[i])
        assert watched.preempted[i] + scheduler.preempted.count(i) == c.preemptions
    if actions[:4] == long_ones and policy not in NEVER_PREEMPT:
        assert watched.preempted  # or this test would not test it
    if actions == alike:
        assert sum(c.cached_tokens for c in watched.ended.values()) > 0
    check_integrity(scheduler.pages, [])
    assert scheduler.pages.num_free == scheduler.pages.total


@pytest.mark.parametrize("policy", ALL_POLICIES)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@CASES
@example(long_ones, 20, 4, 1, 1, 16, False)  # they all begin, and then there is memory for two
@example(long_ones + faults, 20, 4, 1, 4, 16, False)
@example(at_risk, 8, 4, 1, MAX_LEN, 24, False)
@example(alike, 8, 4, 1, 4, 16, True)
def test_every_request_ends_as_if_alone(
    policy, actions, chunk, max_batch, tile, page_size, spare, shares
):
    check_every_request_ends_as_if_alone(
        policy, actions, chunk, max_batch, tile, page_size, spare, shares
    )


@pytest.mark.slow
@pytest.mark.parametrize("policy", ALL_POLICIES)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@CASES
def test_every_request_ends_as_if_alone_in_many_cases(
    policy, actions, chunk, max_batch, tile, page_size, spare, shares
):
    check_every_request_ends_as_if_alone(
        policy, actions, chunk, max_batch, tile, page_size, spare, shares
    )
