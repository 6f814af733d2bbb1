"""Whatever arrives, under whatever policy, with whatever going wrong: nothing is lost, leaked or
shared."""

import functools
from collections import Counter, defaultdict
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from engine import Engine
from policies import ALL_POLICIES
from policies.priority import PRIORITIES
from sampling import SamplingParams
from tests.helpers import RESERVING, Ledger, alone, guard, poison, tiny_model

MAX_LEN = 24
MODEL = tiny_model(n_kv_head=2, vocab_size=17)
SGLANG = ("sglang", "sglang-mixed", "free-slots")
NEVER_PREEMPT = {*RESERVING, *SGLANG, "no-evict", "tgi", "peak"}  # or seldom


@functools.cache
def expected(prompt, params):
    """The tokens of a request that has the machine to itself."""
    return alone(MODEL, prompt, params)


class ModelError(Exception):
    """What a broken forward raises."""


@dataclass(frozen=True)
class Case:
    """An engine, and what is done with it: (method of Watched, its arguments) of each action."""

    actions: list
    chunk: int
    max_batch: int
    page_size: int
    spare: int  # tokens, beside the memory for one request of MAX_LEN
    prefix_caching: bool
    tile: int = 1


prompts = st.builds(  # not a list of tokens: hypothesis likes these short, and these always fit
    lambda n, seed: tuple(Random(seed).choices(range(17), k=n)),
    st.sampled_from([4, 8, 1, 3, 5, 7, 12, 16]),
    st.integers(0, 5),
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
services = st.fixed_dictionaries(
    dict(
        priority=st.sampled_from(PRIORITIES),
        ttft_slo=st.sampled_from([None, 1e-6, 1.0]),
        tbt_slo=st.sampled_from([None, 1e-6, 1e-2, 1.0]),
    )
)
requests = st.tuples(st.just("add"), prompts, params, services)
STEP = ("step",)
actions = st.one_of(
    requests,
    st.sampled_from([STEP, ("fail", False), STEP, ("fail", True)]),
    st.tuples(st.just("abort"), st.integers(0, 20)),
    st.tuples(st.just("preempt"), st.integers(0, 3)),
)
beginnings = st.lists(requests, min_size=3, max_size=6)
cases = st.builds(
    Case,
    actions=st.builds(list.__add__, beginnings, st.lists(actions, max_size=40)),
    chunk=st.integers(1, 20),
    max_batch=st.sampled_from([4, 3, 2, 1]),
    page_size=st.sampled_from([4, 1, 4, 1, MAX_LEN]),
    spare=st.sampled_from([0, 4, 8, 12, 16, 24, 32, 3 * MAX_LEN]),
    prefix_caching=st.booleans(),
    tile=st.sampled_from([1, 4]),
)
SAMPLED = [SamplingParams(8, temperature=1.0, seed=seed) for seed in range(4)]
LONG_ONES = [("add", (n,) * 8, SAMPLED[n], {}) for n in range(4)]
URGENT = dict(priority="realtime", tbt_slo=1e-6)
AT_RISK = [("add", (n,) * 4, SAMPLED[n], {} if n else URGENT) for n in range(3)]
ALIKE = []
for n in (16, 12, 9, 16, 13):
    ALIKE += [("add", (1,) * n, SAMPLED[n % 4], {}), STEP]
FAULTS = [STEP] * 9 + [("fail", False), STEP, ("fail", True)] * 8


class Watched(Ledger):
    """An engine of which every action is checked."""

    def __init__(self, **options):
        super().__init__(guard(Engine(MODEL, max_len=MAX_LEN, **options)), expected)
        self.cached_tokens = 0
        # all by request id
        self.times = defaultdict(list)
        self.computed = Counter()
        self.preempted = Counter()
        self.forced = Counter()
        self.schedule = self.engine.scheduler.schedule
        self.engine.scheduler.schedule = self.poisoned

    def poisoned(self):
        batch = self.schedule()
        poison(self.engine)  # whoever was preempted for this batch has lost what was computed
        return batch

    def check(self):
        """What must hold between any two actions."""
        super().check()
        scheduler = self.engine.scheduler
        config = self.engine.config
        assert scheduler.requests.keys() == self.asked.keys()
        # who has max_len keeps it, but `priority` preempts lower classes for targets at risk too
        is_reserved = config.page_size == MAX_LEN and config.policy != "priority"
        for r in scheduler.requests.values():
            assert r.tokens[r.prompt_len :] == self.got[r.id]
            assert 0 <= r.num_computed < len(r.tokens)
            assert self.computed[r.id] == r.num_computed + r.recomputed_tokens - r.cached_tokens
            assert r.cached_tokens == 0 or config.prefix_caching
            assert not is_reserved or r.preemptions == self.forced[r.id]

    def step(self):
        engine = self.engine
        previous = engine.last_iteration
        poison(engine)
        events = engine.step()
        iteration = engine.last_iteration
        if iteration is not previous:
            for i, _, length, _ in iteration.chunks:
                self.computed[i] += length
            self.preempted.update(iteration.preempted)
        for event in events:
            self.times[event.request.id].append(iteration.end)
        self.take(events)
        self.check()

    def fail(self, after):
        """A step whose forward raises, before or after it has written the cache."""
        forward = MODEL.forward

        def broken(batch, cache):
            if after:
                forward(batch, cache)
            raise ModelError

        requests = self.engine.scheduler.requests
        before = {}
        for r in requests.values():
            before[r.id] = r.num_computed, r.cached_tokens, r.preemptions
        MODEL.forward = broken
        try:
            if self.engine.has_work:
                poison(self.engine)
                with pytest.raises(ModelError):
                    self.engine.step()
        finally:
            del MODEL.forward
        for i, (num_computed, cached_tokens, preemptions) in before.items():
            # nobody has advanced, but a victim may have lost its pages to the batch that is kept,
            # and who was admitted to it may have found some
            allowed = (num_computed, preemptions), (0, preemptions + 1)
            found = requests[i].cached_tokens - cached_tokens
            assert (requests[i].num_computed - found, requests[i].preemptions) in allowed
        self.check()

    def abort(self, i):
        request = self.engine.scheduler.requests.get(i)
        if request is not None:
            once = request.num_computed
            super().abort(i)
            assert self.computed[i] == once + request.recomputed_tokens - request.cached_tokens
            self.check()

    def preempt(self, n):
        """Memory need not be short, and a batch may be kept after a fault."""
        running = self.engine.scheduler.running
        if n < len(running):
            self.forced[running[n].id] += 1
            self.engine.scheduler.preempt(running[n])
            self.check()

    def finish(self):
        """Steps until nothing is left."""
        for _ in range(1000):
            if self.engine.has_work:
                self.step()
        self.check_end()

    def end(self, completion):
        super().end(completion)
        i = completion.id
        pending = self.engine.scheduler.preempted.count(i)
        assert self.preempted[i] + pending == completion.preemptions
        assert completion.token_times == self.times[i]
        self.cached_tokens += completion.cached_tokens
        if completion.finish_reason != "abort":
            # each token once, but the last, and once more what a preemption threw away, but for
            # what was found
            once = completion.prompt_len + len(completion.output) - 1
            again = completion.recomputed_tokens - completion.cached_tokens
            assert self.computed[i] == once + again


def check_every_request_ends_as_if_alone(policy, case):
    watched = Watched(
        policy=policy,
        chunk=case.chunk,
        max_batch=case.max_batch,
        page_size=case.page_size,
        pages=-(-MAX_LEN // case.page_size) + case.spare // case.page_size,
        prefix_caching=case.prefix_caching and case.page_size < MAX_LEN,
        policy_options={"tile": case.tile} if policy == "sarathi" else {},
    )
    for method, *arguments in case.actions:
        if method == "add":
            prompt, params, service = arguments
            watched.add(prompt, params, **service)
        else:
            getattr(watched, method)(*arguments)
    watched.finish()
    if case.actions[:4] == LONG_ONES and policy not in NEVER_PREEMPT:
        assert watched.preempted  # or this test would not test it
    if case.actions == ALIKE:
        assert watched.cached_tokens > 0


def in_cases(max_examples):
    """The settings of a test of so many random cases."""
    checks = [HealthCheck.too_slow]
    return settings(max_examples=max_examples, deadline=None, suppress_health_check=checks)


@pytest.mark.parametrize("policy", ALL_POLICIES)
@in_cases(6)
@given(case=cases)
@example(Case(LONG_ONES, 20, 4, 1, 16, False))  # they all begin, and then there is memory for two
@example(Case(LONG_ONES + FAULTS, 20, 4, 4, 16, False))
@example(Case(AT_RISK, 8, 4, MAX_LEN, 24, False))
@example(Case(ALIKE, 8, 4, 4, 16, True))
def test_every_request_ends_as_if_alone(policy, case):
    check_every_request_ends_as_if_alone(policy, case)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ALL_POLICIES)
@in_cases(25)
@given(case=cases)
def test_every_request_ends_as_if_alone_in_many_cases(policy, case):
    check_every_request_ends_as_if_alone(policy, case)
