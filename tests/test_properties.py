"""Whatever arrives and whatever fails, under every policy, each request ends as it would alone.

The engine is held against alone(), which computes everything again for each token, and against a
count of what was computed."""

import functools
import random
from collections import Counter, defaultdict

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine import Engine
from policies import ALL_POLICIES
from policies.priority import PRIORITIES
from sampling import SamplingParams
from tests.helpers import (
    IN_ORDER,
    RESERVING,
    alone,
    check_integrity,
    finish,
    guard,
    poison,
    tiny_model,
)

MAX_LEN = 24
MODEL = tiny_model(n_kv_head=2, vocab_size=17)
SGLANG = ("sglang", "sglang-mixed", "free-slots")
NEVER_PREEMPT = {*RESERVING, *SGLANG, "no-evict", "tgi", "peak"}  # or seldom


@functools.cache
def expected(prompt, params):
    """The tokens of a request that has the machine to itself."""
    return alone(MODEL, prompt, params)


class OutOfMemoryError(Exception):
    """What a broken forward raises."""


def prompt_of(length, seed):
    """Prompts of one seed begin alike."""
    return tuple(random.Random(seed).choices(range(17), k=length))


LENGTHS = [4, 8, 1, 3, 5, 7, 12, 16]
prompts = st.builds(prompt_of, st.sampled_from(LENGTHS), st.integers(0, 5))
params = st.builds(
    SamplingParams,
    max_new_tokens=st.sampled_from([8, 7, 6, 5, 4, 3, 2, 1]),
    temperature=st.sampled_from([0.0, 1.0]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.7]),
    seed=st.integers(0, 3),
    stop_token_ids=st.sampled_from([(), (), tuple(range(9))]),
)
services = st.fixed_dictionaries(
    dict(
        priority=st.sampled_from(PRIORITIES),
        ttft_slo=st.sampled_from([None, 1e-6, 1.0]),
        tbt_slo=st.sampled_from([None, 1e-6, 1e-2, 1.0]),
    )
)
requests = st.tuples(prompts, params, services)


class Served(RuleBasedStateMachine):
    """An engine whose unused memory is spoilt, and of which every action is checked."""

    policy = "sarathi-serve"
    counts = Counter()  # over all runs: or the tests would not test it

    @initialize(
        chunk=st.integers(1, 20),
        max_batch=st.sampled_from([4, 3, 2, 1]),
        page_size=st.sampled_from([4, 1, 4, 1, MAX_LEN]),
        spare=st.sampled_from([0, 4, 8, 12, 16, 24, 32, 3 * MAX_LEN]),
        prefix_caching=st.booleans(),
        first=st.lists(requests, min_size=3, max_size=6),
    )
    def start(self, chunk, max_batch, page_size, spare, prefix_caching, first):
        """`spare` tokens of memory beside those for one request of MAX_LEN."""
        self.engine = Engine(
            MODEL,
            policy=self.policy,
            chunk=chunk,
            max_batch=max_batch,
            max_len=MAX_LEN,
            page_size=page_size,
            pages=-(-MAX_LEN // page_size) + spare // page_size,
            prefix_caching=prefix_caching and page_size < MAX_LEN,
        )
        guard(self.engine)
        self.params = {}  # of the requests that have not ended, by id
        self.tokens = defaultdict(list)  # of events, by request id
        self.times = defaultdict(list)  # of these tokens
        self.computed = Counter()  # tokens, by request id
        schedule = self.engine.scheduler.schedule

        def poisoned():
            batch = schedule()
            poison(self.engine)  # a victim of this batch has lost what was computed
            return batch

        self.engine.scheduler.schedule = poisoned
        for request in first:
            self.add(request)

    @rule(request=requests)
    def add(self, request):
        prompt, request_params, service = request
        request_id = self.engine.add_request(prompt, request_params, **service)
        self.params[request_id] = request_params

    @rule()
    def step(self):
        previous = self.engine.last_iteration
        poison(self.engine)
        events = self.engine.step()
        iteration = self.engine.last_iteration
        if iteration is not previous:
            for request_id, _, length, _ in iteration.chunks:
                self.computed[request_id] += length
            self.counts["preemptions"] += len(iteration.preempted)
        for event in events:
            self.tokens[event.request.id].append(event.token)
            self.times[event.request.id].append(iteration.end)
            if event.finish_reason:
                self.check_finished(event.request)

    def check_finished(self, request):
        """Each token is computed once, and again what a preemption threw away and nobody kept."""
        tokens = self.check_ended(request)
        assert request.output == tokens
        is_stopped = tokens[-1] in self.params.pop(request.id).stop_token_ids
        assert request.finish_reason == ("stop" if is_stopped else "length")
        once = request.prompt_len + len(request.output) - 1
        again = request.recomputed_tokens - request.cached_tokens
        assert self.computed[request.id] == once + again
        assert request.scheduled <= request.token_times[0]
        self.counts["cached"] += request.cached_tokens
        self.counts[request.finish_reason] += 1

    def check_ended(self, request):
        """Returns the tokens that a request has alone. It may have ended before the last."""
        tokens = expected(tuple(request.prompt), self.params[request.id])
        assert request.output == self.tokens[request.id] == tokens[: len(request.output)]
        assert request.token_times == self.times[request.id]
        return tokens

    @precondition(lambda self: self.engine.has_work)
    @rule(has_written=st.booleans())
    def run_out_of_memory(self, has_written):
        """A step whose forward raises, before or after it has written the cache."""
        forward = MODEL.forward

        def broken(batch, cache):
            if has_written:
                forward(batch, cache)
            raise OutOfMemoryError

        MODEL.forward = broken
        try:
            poison(self.engine)
            with pytest.raises(OutOfMemoryError):
                self.engine.step()
        finally:
            del MODEL.forward

    @precondition(lambda self: self.params)
    @rule(n=st.integers(0, 20))
    def abort(self, n):
        ids = list(self.params)
        request = self.engine.abort(ids[n % len(ids)])
        assert request.finish_reason == "abort"
        self.check_ended(request)
        del self.params[request.id]

    @precondition(lambda self: self.engine.scheduler.running)
    @rule()
    def preempt(self):
        """Memory need not be short, and a batch may be kept after a fault."""
        scheduler = self.engine.scheduler
        scheduler.preempt(max(scheduler.running, key=scheduler.rank))

    @invariant()
    def check(self):
        """Nothing is lost, and no page leaks or is owned by a request that waits."""
        scheduler = self.engine.scheduler
        check_integrity(scheduler.pages, [r.pages for r in scheduler.running])
        queued = [*scheduler.running, *scheduler.waiting]
        assert {r.id: r for r in queued} == scheduler.requests
        assert scheduler.requests.keys() == self.params.keys()
        assert not any(r.pages or r.num_computed for r in scheduler.waiting)
        for r in queued:
            assert r.output == self.tokens[r.id]
            assert 0 <= r.num_computed < len(r.tokens)
            assert self.computed[r.id] == r.num_computed + r.recomputed_tokens - r.cached_tokens
        if self.policy in IN_ORDER:  # of arrival, after any preemption, too
            order = [r.id for r in queued]
            assert order == sorted(order)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(1000):
            if self.engine.has_work:
                self.step()
                self.check()
        assert finish(self.engine) == []
        assert not self.params
        check_integrity(self.engine.scheduler.pages, [])


def run_machine(policy, max_examples, steps):
    """What was seen in so many runs of so many actions. The examples are always the same."""

    class OfPolicy(Served):
        counts = Counter()

    OfPolicy.policy = policy
    options = settings(
        max_examples=max_examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(OfPolicy, settings=options)
    return OfPolicy.counts


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_every_request_ends_as_if_alone(policy):
    counts = run_machine(policy, max_examples=8, steps=30)
    assert counts["length"] > 20
    assert counts["cached"]
    assert counts["preemptions"] or policy in NEVER_PREEMPT


@pytest.mark.slow
@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_every_request_ends_as_if_alone_in_many_runs(policy):
    counts = run_machine(policy, max_examples=10, steps=100)
    assert counts["stop"]
