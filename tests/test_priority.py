"""The policy `priority` and its queue: the order, the preemptions, and that no class starves."""

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.iteration_time import BatchShape
from policies.priority import PRIORITIES, ClassQueue, make_service
from request import Service
from scheduler import Request
from tests.helpers import VirtualRun

REALTIME, HIGH, NORMAL, LOW = range(4)
NEVER = 1e6  # seconds


def linear(shape):
    """Seconds of a batch: a pass over the weights, and a millisecond for each token."""
    return 10e-3 + 1e-3 * (shape.prefill_tokens + shape.decodes)


def of_decodes(count):
    return linear(BatchShape(decodes=count))


PROFILE = [
    (shape, linear(shape))
    for prefill, decodes in [(0, 1), (0, 16), (64, 0), (64, 8), (512, 0), (512, 4), (2048, 1)]
    for shape in [BatchShape(prefill, decodes, 100 * decodes, 300 * prefill)]
]


def simulation(*requests, **options):
    """With a model of the iteration time that knows the law, one step after these came."""
    sim = VirtualRun("priority", linear, profile=PROFILE, **options)
    for each in requests:
        sim.add(each)
    if requests:
        sim.step()
    return sim


def request(id, priority=NORMAL, prompt_len=100, output=20, arrival=0.0, **targets):
    return Request(
        id, [0] * prompt_len, prompt_len, output, arrival, service=Service(priority, **targets)
    )


def ids(requests):
    return [r.id for r in requests]


def step(sim):
    return ids(chunk.request for chunk in sim.step())  # the ids in the next batch


def test_a_promise_is_a_service():  # what is refused: test_memory.py
    assert make_service() == Service(NORMAL)
    targets = dict(ttft_slo=2, tbt_slo=0.1)
    for priority, name in enumerate(PRIORITIES):
        assert make_service(name, **targets) == Service(priority, **targets)


# the queue


class NaiveLine(list):
    """ClassQueue: sorted by class, then preempted ones, then deadline, then who came first."""

    front = ()  # ids of the preempted

    def head(self, now, ageing):
        def key(r):
            lifts = min(r.service.priority, max(0, int((now - r.arrival) / ageing)))
            deadline = 0.0 if r.id in self.front else r.service.ttft_slo
            return r.service.priority - lifts, r.id not in self.front, deadline, r.arrival, r.id

        return min(self, key=key)


NAMES = st.sampled_from(["append", "append", "preempt", "remove", "pop", "sleep"])
ACTIONS = st.lists(st.tuples(NAMES, *map(st.integers, [0] * 3, [3, 9, 40])), max_size=60)


@settings(max_examples=200, deadline=None)
@given(ACTIONS, st.sampled_from([1.0, 4.0, 64.0]))
def test_the_queue_is_sorted_by_rank(actions, ageing):
    now = 0.0
    naive = NaiveLine()
    queue = ClassQueue(lambda r: r.service.ttft_slo, ageing, lambda: now)
    actions += [("pop", 0, 0, 0)] * len(actions)  # at last all leave in order
    for number, (name, its_class, a, b) in enumerate(actions):
        if name == "append":
            arrival = now + b - 20  # long ago, or yet to come
            naive.append(request(number, its_class, arrival=arrival, ttft_slo=float(a % 6)))
            queue.append(naive[-1])
        elif name == "preempt":  # one that has run for a while
            naive.append(request(number, its_class, arrival=now - a, ttft_slo=9.0))
            naive.front = *naive.front, number
            queue.appendleft(naive[-1])
        elif name == "sleep":
            now += b / 4  # a power of two, so that times are exact
        elif naive:
            gone = naive.head(now, ageing) if name == "pop" else naive[b % len(naive)]
            queue.remove(gone)
            naive.remove(gone)
        assert len(queue) == len(naive)
        assert set(queue) == set(naive)
        if naive:
            assert queue[0] is naive.head(now, ageing)
    with pytest.raises(IndexError):
        queue[0]
    with pytest.raises(KeyError):
        queue.remove(request(-1))
    queue.append(request(-1))
    queue.clear()
    assert not queue


def test_a_class_that_is_lifted_in_the_middle_of_schedule_does_no_harm():
    ticks = itertools.count()  # the clock moves whenever it is read, and with it the classes
    sizes = dict(pages=12, page_size=4, chunk=8, max_batch=4, max_len=32)
    sim = simulation(**sizes, clock=lambda: next(ticks) * 1e-3, ageing=1e-2)
    for i in range(200):
        sim.add(request(i, i % 4, 1 + i % 13, 2, arrival=i * 1e-3))
    sim.run([])
    assert all(len(sim.token_times[i]) == 2 for i in range(200))


# the order


def test_classes_go_first_and_within_one_the_least_slack():
    rows = [  # class, target, prompt: the last two have the target of 2, and 6 has more to do
        (LOW, 0.1, 100),
        (NORMAL, 9.0, 100),
        (NORMAL, 3.0, 100),
        (HIGH, 8.0, 100),
        (HIGH, None, 100),  # which is a target of 2 s
        (REALTIME, 30.0, 100),
        (NORMAL, 3.0, 1500),
        (NORMAL, 3.0, 100),
    ]
    requests = [request(i, c, length, ttft_slo=slo) for i, (c, slo, length) in enumerate(rows)]
    chunks = [chunk for row in simulation(chunk=32).run(requests).log for chunk in row[3]]
    assert list(dict(chunks)) == [5, 4, 3, 2, 7, 6, 1, 0]


@pytest.mark.parametrize("targets", [(0.1, 0.5, None), (0.5, None, 0.1)])
def test_the_budget_is_that_of_the_tightest_target(targets):
    decodes = [request(i, prompt_len=10, output=400, tbt_slo=s) for i, s in enumerate(targets)]
    sim = simulation(*decodes, chunk=2048)
    sim.add(request(9, prompt_len=1500, output=1, arrival=sim.now))
    assert step(sim) == [0, 1, 2, 9] and 0.05 < sim.log[-1][1] <= 0.1


def test_no_request_passes_a_higher_class_that_finds_no_room():
    sim = simulation(request(0, HIGH, 1600, 300), pages=130)  # 128 pages for the longest
    sim.add(request(1, HIGH, 1000, ttft_slo=1e6))
    sim.add(request(2, LOW, 10))
    assert all(step(sim) == [0] for _ in range(40)) and len(sim.scheduler.waiting) == 2


def own_ttft(prompt_len):
    """The TTFT of a prompt that has the machine to itself."""
    undisturbed = request(0, prompt_len=prompt_len)
    return simulation(max_len=20_000).run([undisturbed]).ttft(undisturbed)


@pytest.mark.parametrize("arrival, tbt_slo", [(1.0, None), (9.0, None), (1.0, 0.2)])
def test_a_short_prompt_is_not_stuck_behind_a_long_one_of_its_class(arrival, tbt_slo):
    long = request(0, prompt_len=16_000)
    short = request(1, arrival=arrival)
    sim = simulation(max_len=20_000, tbt_slo=tbt_slo).run([long, short])
    # the iteration that runs, and its own
    assert sim.ttft(short) <= 2 * linear(BatchShape(256)) < 0.6
    assert sim.ttft(long) <= own_ttft(16_000) + 20 * linear(BatchShape(256, 1))


def run_at_once(sim, request, computed, pages):
    """Let a request run, whatever a target says."""
    request.pages = sim.scheduler.pages.allocate(pages)
    request.num_computed = computed
    sim.scheduler.running.append(request)


BEGUN = [  # classes of prefills at 100 tokens or less, class and cached tokens of a new one, start
    ((LOW,), REALTIME, 2000, 2000),  # it goes first
    ((HIGH,), LOW, 2000, 100),  # it waits for one that is more urgent
    ((LOW, HIGH), NORMAL, 2000, 100),  # also if that is not the first that has begun
    ((LOW,), REALTIME, 16, 100),  # the others start later
    ((LOW,) * 14, REALTIME, 2000, 100),  # without room for it
]


@pytest.mark.parametrize("begun, priority, cached_tokens, start", BEGUN)
def test_the_budget_is_for_the_latest_start_of_all_that_may_run(
    begun, priority, cached_tokens, start
):
    sim = simulation(shares=True, max_len=20_000, max_batch=15)
    prompt = [*range(cached_tokens), *range(10)]  # all but the end is cached
    sim.run([Request(0, prompt, len(prompt), 1)])
    sim.add(request(1, NORMAL, 10, 500, arrival=sim.now, tbt_slo=0.2))
    sim.step()
    for i, its_class in enumerate(begun):
        run_at_once(sim, request(2 + i, its_class, 600), computed=100 - i, pages=38)
    sim.add(Request(99, list(prompt), len(prompt), 1, sim.now, service=Service(priority)))
    assert sim.scheduler.cached_tokens_of_head() == cached_tokens
    sim.scheduler.next_batch()
    assert sim.scheduler.max_start == start


# ageing


@pytest.mark.parametrize(
    "priority, ageing, lax",
    [(NORMAL, 2.0, 0.0), (LOW, 5.0, 0.0), (NORMAL, 5.0, 20.0), (LOW, 2.0, 20.0)],
)
def test_no_class_starves_under_an_endless_stream_of_realtime_requests(priority, ageing, lax):
    # Twice as many come as can be served. After `priority * ageing` seconds the request is in the
    # stream's class, before all that come later than its own deadline allows. Those that came
    # earlier, twice as fast as they are served, are gone at two times that.
    service = linear(BatchShape(240))  # one at a time, with one token each
    arrivals = [i * service / 2 for i in range(1500)]
    stream = [request(1 + i, REALTIME, 240, 1, at, ttft_slo=2.0) for i, at in enumerate(arrivals)]
    poor = request(0, priority, 240, 1, arrival=1.0, ttft_slo=2.0 + lax)
    sim = simulation(chunk=240, ageing=ageing, max_batch=1).run([poor, *stream], until=100.0)
    assert sim.ttft(poor) <= max(priority * ageing, poor.arrival + 2 * lax) + 3 * service
    assert sim.ttft(poor) > min(priority * ageing, lax or NEVER)  # the stream is more urgent


def test_ageing_ends_at_the_class_that_is_named():
    low, high = request(0, LOW, arrival=0.0), request(1, HIGH, arrival=0.0)
    first = request(9, REALTIME, 240, 100)
    sim = simulation(first, ageing=1.0, ageing_to="normal", max_batch=1)
    for queued in (low, high, request(2, NORMAL, arrival=50.0)):
        sim.now = queued.arrival
        sim.add(queued)
    sim.now = 100.0
    scheduler = sim.scheduler
    assert scheduler.waiting[0] is high  # which has not risen, and is not passed
    scheduler.waiting.remove(high)
    assert scheduler.waiting[0] is low  # before the younger one of its new class
    assert (scheduler.aged_class(low), scheduler.aged_class(high)) == (NORMAL, HIGH)


@pytest.mark.parametrize("age, preemptions", [(0.0, 1), (25.0, 0)])
def test_a_request_that_has_aged_is_not_preempted_for_a_younger_one(age, preemptions):
    sim = simulation(pages=130, ageing=10.0)
    old = request(0, LOW, 1600, 300)
    sim.now = age
    sim.add(old)
    sim.step()
    sim.add(request(1, REALTIME, 1000, 5, arrival=sim.now - 1.5))
    sim.step()
    assert old.preemptions == preemptions


def test_an_aged_request_is_preempted_after_younger_ones_of_its_class():
    sim = simulation(ageing=10.0)
    aged = request(0, LOW, arrival=0.0)
    young = request(1, NORMAL, arrival=9.0)
    for sim.now, goes_first in ((9.0, aged), (11.0, young)):
        assert max(aged, young, key=sim.scheduler.rank) is goes_first


# preemption


def crowded(*priorities, **options):
    """So many requests run that no page is left for another prompt of 1,000 tokens."""
    requests = [
        request(i, priority, 1650 // len(priorities), 100) for i, priority in enumerate(priorities)
    ]
    sim = simulation(*requests, pages=130, chunk=2048, **options)
    sim.step()
    assert [r.is_decoding for r in sim.scheduler.running] == [True] * len(priorities)
    return sim


@pytest.mark.parametrize("priority", [REALTIME, HIGH])
def test_a_low_class_is_preempted_after_half_of_a_ttft_target(priority):
    sim = crowded(LOW, LOW)
    sim.add(request(9, REALTIME, 10, 5, arrival=sim.now - 50.0))
    assert 9 in step(sim) and len(sim.scheduler.running) == 3  # it has room: nobody goes
    sim = crowded(LOW, NORMAL, HIGH)
    waits = request(9, priority, 500, 5, arrival=sim.now, ttft_slo=1.6)
    sim.add(waits)
    while sim.now < waits.arrival + 0.8:
        assert 9 not in step(sim) and len(sim.scheduler.running) == 3
    assert 9 in step(sim)  # at once; the lowest class goes, and no more than it takes
    assert sorted(ids(sim.scheduler.running)) == [1, 2, 9]
    assert [(r.id, r.preemptions) for r in sim.scheduler.waiting] == [(0, 1)]


@pytest.mark.parametrize("priority, running", [(2, 3), (3, 3), (1, 1), (0, 1)])
def test_normal_requests_preempt_none_and_high_ones_are_not_preempted(priority, running):
    sim = crowded(*[running] * 3, ageing=NEVER)
    sim.add(request(9, priority, 500, 5, arrival=sim.now - 50.0, ttft_slo=1.0))
    for _ in range(60):
        sim.step()
    assert not any(r.preemptions for r in sim.scheduler.running)
    assert sim.scheduler.waiting[0].id == 9


def until_first_token(sim, request):
    while not request.token_times:
        sim.step()
    return sim.ttft(request)


def test_a_late_realtime_request_takes_the_budget_of_lower_decodes():
    # eight decodes fill a budget of eight; there are places and pages, but no tokens
    sim = simulation(*(request(i, LOW if i % 2 else NORMAL, 1, 500) for i in range(8)), chunk=8)
    waits = request(9, REALTIME, 40, 5, arrival=sim.now, ttft_slo=1.0)
    sim.add(waits)
    while sim.now < waits.arrival + 0.5:
        assert sorted(step(sim)) == list(range(8))
    assert until_first_token(sim, waits) < 1.5
    assert {*ids(sim.scheduler.waiting)} <= {1, 3, 5, 7}  # the lowest


def test_a_low_request_with_a_hopeless_target_delays_no_realtime_one():
    sim = simulation(request(0, LOW, 100, 1500, tbt_slo=1e-6))
    waits = request(1, REALTIME, 100, 5, arrival=sim.now, ttft_slo=1.0)
    sim.add(waits)
    assert until_first_token(sim, waits) <= 0.5 + of_decodes(1) + linear(BatchShape(256))


def decodes_with_a_target(fit, lower=6):
    """A realtime decode with a TBT target that `fit` decodes meet, and `lower` ones without."""
    sim = simulation(chunk=2048)
    classes = [REALTIME, *([NORMAL, LOW] * lower)[:lower]]
    for i, priority in enumerate(classes):
        target = None if i else of_decodes(fit) + 2e-4
        decode = request(i, priority, 10, 400, tbt_slo=target)
        sim.add(decode)
        sim.scheduler.waiting.remove(decode)
        run_at_once(sim, decode, computed=10, pages=1)
        decode.tokens.append(0)
        decode.token_times.append(0.0)
    return sim


def test_only_lower_decodes_that_break_a_tbt_target_are_preempted():
    assert len(decodes_with_a_target(7).step()) == 7  # no risk, no preemption
    sim = decodes_with_a_target(4)  # of the seven
    assert len(sim.step()) == 4 and sim.log[-1][1] <= of_decodes(4) + 2e-4
    assert step(sim) == [0, 1, 3, 5]  # the three of the lowest class are gone
    assert set(ids(sim.scheduler.waiting)) == {2, 4, 6}
    # a prefill is not preempted for decodes that are too slow
    sim = decodes_with_a_target(2, lower=3)
    prefill = request(20, LOW, 1500, 5)
    run_at_once(sim, prefill, computed=1000, pages=100)
    sim.step()
    assert len(sim.scheduler.running) == 3 and prefill.preemptions == 0


@pytest.mark.parametrize("seed", range(2))
def test_a_request_preempted_for_a_target_is_not_preempted_repeatedly(seed):
    # low requests for ever, and one realtime decode whose target leaves room for about four of them
    sim = simulation(noise=0.05, seed=seed, ageing=NEVER)
    first = request(0, REALTIME, 10, 1500, tbt_slo=of_decodes(5) * 1.05)
    low = [request(1 + i, LOW, 30, 60) for i in range(300)]
    for r in (first, *low):
        sim.add(r)
    while not first.finish_reason:
        sim.step()
    ended = sum(r.finish_reason == "length" for r in low)
    assert ended > 1500 / 60  # more than one at a time
    assert sum(r.preemptions for r in low) <= 0.1 * ended


@pytest.mark.parametrize("ageing, seed", [(5.0, 0), (NEVER, 1)])
def test_an_overload_with_little_memory_ends_and_recomputes_little(ageing, seed):
    draw = random.Random(seed)
    requests = []
    for i in range(200):
        sizes = draw.randrange(4), draw.randrange(1, 600), draw.randrange(1, 80)
        r = request(i, *sizes, draw.uniform(0, 60), ttft_slo=draw.choice([None, 0.5, 5.0]))
        r.service = replace(r.service, tbt_slo=draw.choice([None, None, 0.02, 0.1]))
        requests.append(r)
    options = dict(pages=130, max_batch=12, tile=8)
    sim = simulation(noise=0.05, seed=seed, ageing=ageing, **options).run(requests)
    assert all(len(sim.token_times[r.id]) == r.max_new_tokens for r in requests)
    assert sim.scheduler.pages.num_free == 130 and not sim.scheduler.requests
    total = sum(r.prompt_len + r.max_new_tokens for r in requests)
    assert sum(r.recomputed_tokens for r in requests) < total
    waited = [max(sim.ttft(r) for r in requests if r.service.priority == p) for p in range(4)]
    if ageing == NEVER:
        assert max(waited[:NORMAL]) < 0.25 * waited[LOW]
    else:  # in an overload all end up in one class: the longest wait is not the low ones' alone
        assert waited[LOW] < 2 * waited[REALTIME]


def test_nobody_is_preempted_in_vain():
    """5 pages are free then, and 6 are needed: the low one would end in vain."""
    low, high = request(0, LOW, 2, 4), request(1, HIGH, 4, 8)
    sim = simulation(low, high, pages=12, page_size=1, chunk=8, max_len=12)
    sim.step()
    sim.add(request(2, REALTIME, 6, 2, sim.now, ttft_slo=1e-3))
    while not low.finish_reason:
        sim.step()
    assert low.preemptions == 0


def test_a_target_of_a_lower_class_is_given_up_rather_than_its_memory():
    low = request(0, LOW, 2, 6, tbt_slo=0.0115)
    sim = simulation(low, pages=64, page_size=1, chunk=16, max_len=12)
    sim.step()
    sim.add(request(1, REALTIME, 4, 2, sim.now - 1, ttft_slo=0.01))
    assert step(sim) == [0, 1]
    assert low.preemptions == 0


def test_a_victim_is_not_let_in_again_by_the_batch_that_it_lost_its_memory_for():
    low = request(0, LOW, 2, 6)
    sim = simulation(low, pages=64, page_size=1, chunk=16, max_len=12, tbt_slo=0.0115)
    sim.step()
    sim.add(request(1, REALTIME, 4, 2, sim.now - 1, ttft_slo=0.01))
    assert step(sim) == [1]
    assert low.preemptions == 1
