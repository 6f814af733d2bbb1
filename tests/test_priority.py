"""The policy `priority`, held against a sorted list, and against times by hand of a known law."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.iteration_time import BatchShape
from policies.priority import PRIORITIES, ClassQueue, make_service
from request import Service
from tests.by_hand import request_of
from tests.helpers import VirtualRun

REALTIME, HIGH, NORMAL, LOW = range(4)
NEVER = 1e6  # seconds


def law(shape):
    """Seconds of a batch: a pass over the weights, and a millisecond for each token."""
    return 10e-3 + 1e-3 * (shape.prefill_tokens + shape.decodes)


def simulation(*requests, **options):
    """A run that has learned the law, one step after these requests came."""
    profile = []
    for prefill, decodes in [(0, 1), (0, 16), (64, 0), (64, 8), (512, 0), (512, 4), (2048, 1)]:
        shape = BatchShape(prefill, decodes, 100 * decodes, 300 * prefill)
        profile.append((shape, law(shape)))
    sim = VirtualRun("priority", law, profile=profile, **options)
    for each in requests:
        sim.add(each)
    if requests:
        sim.step()
    return sim


def request(number, priority=NORMAL, prompt=100, output_len=20, arrival=0.0, **targets):
    return request_of(
        number,
        prompt,
        output_len,
        arrival,
        priority=priority,
        **targets,
    )


def step(sim):
    """The ids of the requests in the next batch."""
    return [chunk.request.id for chunk in sim.step()]


def let_run(sim, each, computed):
    """Let a request run, whatever a target says."""
    each.num_computed = computed
    each.pages = sim.scheduler.pages.allocate(38)
    sim.scheduler.running.append(each)


def running(sim):
    return sorted(each.id for each in sim.scheduler.running)


def test_a_service_is_made_of_a_name():
    services = [make_service(name, ttft_slo=2, tbt_slo=0.1) for name in PRIORITIES]
    assert services == [Service(priority, 2, 0.1) for priority in range(4)]
    assert make_service(user="a") == Service(NORMAL, user="a")


# ---- The queue ----------------------------------------------------------------------------------

ACTION = st.tuples(
    st.sampled_from(["append", "append", "preempt", "remove", "pop", "sleep"]),
    st.integers(0, 3),
    st.integers(0, 9),
    st.integers(0, 40),
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(ACTION, max_size=60),
    st.sampled_from([1.0, 4.0, 64.0]),
    st.sampled_from([REALTIME, REALTIME, NORMAL]),
)
def test_the_queue_is_sorted_by_rank(actions, ageing, highest):
    """By class, then preempted ones, then by deadline, then who came first."""
    now = 0.0
    waiting = []
    front = set()
    queue = ClassQueue(lambda each: each.service.ttft_slo, ageing, lambda: now, highest)

    def aged_class(each):
        lifted = each.service.priority - max(0, int((now - each.arrival) / ageing))
        return min(each.service.priority, max(highest, lifted))

    def place(each):
        deadline = -math.inf if each.id in front else each.service.ttft_slo
        return aged_class(each), deadline, each.arrival, each.id

    actions += [("pop", 0, 0, 0)] * len(actions)  # at last all leave in order
    for number, (action, priority, a, b) in enumerate(actions):
        if action == "append":
            arrival = now + b - 20  # long ago, or yet to come
            waiting.append(request(number, priority, arrival=arrival, ttft_slo=float(a % 6)))
            queue.append(waiting[-1])
        elif action == "preempt":
            waiting.append(request(number, priority, arrival=now - a, ttft_slo=9.0))
            front.add(number)
            queue.appendleft(waiting[-1])
        elif action == "sleep":
            now += b / 4  # a power of two, so that times are exact
        elif waiting:
            gone = waiting[b % len(waiting)]
            if action == "pop":
                gone = min(waiting, key=place)
            queue.remove(gone)
            waiting.remove(gone)
        assert len(queue) == len(waiting)
        assert set(queue) == set(waiting)
        assert all(queue.aged_class(each) == aged_class(each) for each in waiting)
        if waiting:
            assert queue[0] is min(waiting, key=place)
    with pytest.raises(IndexError):
        queue[0]


# ---- The order ----------------------------------------------------------------------------------


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
    requests = []
    for i, (priority, ttft_slo, length) in enumerate(rows):
        requests.append(request(i, priority, length, ttft_slo=ttft_slo))
    sim = simulation(chunk=32).run(requests)
    order = sorted(range(8), key=sim.scheduled.__getitem__)
    assert order == [5, 4, 3, 2, 7, 6, 1, 0]


@pytest.mark.parametrize("targets", [(0.1, 0.5, None), (0.5, None, 0.1)])
def test_the_budget_is_that_of_the_tightest_target(targets):
    decodes = []
    for i, tbt_slo in enumerate(targets):
        decodes.append(request(i, NORMAL, 10, 400, tbt_slo=tbt_slo))
    sim = simulation(*decodes, chunk=2048)
    sim.add(request(9, NORMAL, 1500, 1, arrival=sim.now))
    assert step(sim) == [0, 1, 2, 9]
    assert 0.05 < sim.log[-1][1] <= 0.1


def test_no_request_passes_a_higher_class_that_finds_no_room():
    sim = simulation(request(0, HIGH, 1600, 300), pages=130)  # 128 pages for the longest
    sim.add(request(1, HIGH, 1000, ttft_slo=NEVER))
    sim.add(request(2, LOW, 10))
    assert all(step(sim) == [0] for _ in range(40))


def test_a_short_prompt_is_not_stuck_behind_a_long_one_of_its_class():
    long = request(0, prompt=16_000)
    short = request(1, arrival=1.0)
    sim = simulation(max_len=20_000).run([long, short])
    iteration_s = law(BatchShape(256))
    assert sim.ttft(short) <= 2 * iteration_s  # the one that runs, and its own
    assert sim.ttft(long) <= 63 * iteration_s + 20 * law(BatchShape(256, 1))


# ---- Ageing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("priority, ageing, lax", [(LOW, 5.0, 0.0), (NORMAL, 5.0, 20.0)])
def test_no_class_starves_under_an_endless_stream_of_realtime_requests(priority, ageing, lax):
    """Twice as many come as can be served. After `priority * ageing` seconds the request is in the
    stream's class, before all that come later than its own deadline allows. Those that came
    earlier, twice as fast as they are served, are gone at two times that."""
    service_s = law(BatchShape(240))  # one at a time, with one token each
    poor = request(0, priority, 240, 1, arrival=1.0, ttft_slo=2.0 + lax)
    requests = [poor]
    for i in range(1500):
        arrival = i * service_s / 2
        requests.append(request(1 + i, REALTIME, 240, 1, arrival, ttft_slo=2.0))
    sim = simulation(chunk=240, ageing=ageing, max_batch=1).run(requests, until=100.0)
    assert sim.ttft(poor) <= max(priority * ageing, poor.arrival + 2 * lax) + 3 * service_s
    assert sim.ttft(poor) > min(priority * ageing, lax or NEVER)  # the stream is more urgent


def test_ageing_ends_at_the_class_that_is_named():
    sim = simulation(ageing=1.0, ageing_to="normal")
    sim.now = 100.0
    classes = [sim.scheduler.aged_class(request(0, priority)) for priority in range(4)]
    assert classes == [REALTIME, HIGH, NORMAL, NORMAL]


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


# ---- Preemption ---------------------------------------------------------------------------------


def crowded(*priorities, **options):
    """So many requests decode that no page is left for another prompt of 500 tokens."""
    length = 1650 // len(priorities)
    requests = [request(i, priority, length, 100) for i, priority in enumerate(priorities)]
    sim = simulation(
        *requests,
        pages=130,
        chunk=2048,
        **options,
    )
    sim.step()
    return sim


@pytest.mark.parametrize("priority", [REALTIME, HIGH])
def test_a_low_class_is_preempted_after_half_of_a_ttft_target(priority):
    sim = crowded(LOW, NORMAL, HIGH)
    sim.add(request(9, priority, 500, 5, arrival=sim.now, ttft_slo=1.6))
    half = sim.now + 0.8
    while sim.now < half:
        assert 9 not in step(sim)
    assert 9 in step(sim)
    assert running(sim) == [1, 2, 9]  # the lowest is gone, and no more than it takes


@pytest.mark.parametrize("priority, others", [(NORMAL, LOW), (LOW, LOW), (HIGH, HIGH)])
def test_normal_requests_preempt_none_and_high_ones_are_not_preempted(priority, others):
    sim = crowded(others, others, others, ageing=NEVER)
    sim.add(request(9, priority, 500, 5, arrival=sim.now - 50.0, ttft_slo=1.0))
    for _ in range(60):
        sim.step()
    assert running(sim) == [0, 1, 2]


@pytest.mark.parametrize("fit, kept", [(7, [0, 1, 2, 3, 4, 5, 6]), (4, [0, 1, 3, 5])])
def test_only_lower_decodes_that_break_a_tbt_target_are_preempted(fit, kept):
    """A realtime decode with a target that `fit` decodes meet, and six lower ones."""
    sim = simulation(chunk=2048)
    for i, priority in enumerate([REALTIME, *[NORMAL, LOW] * 3]):
        target = None if i else law(BatchShape(decodes=fit)) + 2e-4
        decode = request(i, priority, 10, 400, tbt_slo=target)
        sim.add(decode)
        sim.scheduler.waiting.remove(decode)
        let_run(sim, decode, computed=10)
        decode.tokens.append(0)
        decode.token_times.append(0.0)
    assert sorted(step(sim)) == kept
    assert sorted(step(sim)) == kept  # nobody comes back


def test_a_request_preempted_for_a_target_is_not_preempted_repeatedly():
    """Low ones for ever, and a realtime decode whose target leaves room for about four of them."""
    target = law(BatchShape(decodes=5)) * 1.05
    first = request(0, REALTIME, 10, 1500, tbt_slo=target)
    low = [request(1 + i, LOW, 30, 60) for i in range(300)]
    sim = simulation(first, *low, noise=0.05, ageing=NEVER)
    while not first.finish_reason:
        sim.step()
    gaps = sim.tbt([first])
    assert gaps[len(gaps) * 9 // 10] <= target
    ended = sum(each.finish_reason == "length" for each in low)
    assert ended > 1500 / 60  # more than one at a time
    assert sum(each.preemptions for each in low) <= 0.1 * ended


def test_nobody_is_preempted_in_vain():
    """5 pages would be free then, and 6 are needed."""
    low = request(0, LOW, 2, 4)
    sim = simulation(
        low,
        request(1, HIGH, 4, 8),
        pages=12,
        page_size=1,
        chunk=8,
        max_len=12,
    )
    sim.step()
    sim.add(request(2, REALTIME, 6, 2, sim.now, ttft_slo=1e-3))
    while not low.finish_reason:
        sim.step()
    assert low.preemptions == 0


@pytest.mark.parametrize("own, of_all, batch", [(0.0115, None, [0, 1]), (None, 0.0115, [1])])
def test_a_victim_waits_for_the_next_batch_and_a_target_goes_before_memory(own, of_all, batch):
    """A lower class gives up its own TBT target, or its memory for one that all have."""
    low = request(0, LOW, 2, 6, tbt_slo=own)
    sim = simulation(
        low,
        pages=64,
        page_size=1,
        chunk=16,
        max_len=12,
        tbt_slo=of_all,
    )
    sim.add(request(1, REALTIME, 4, 2, sim.now - 1, ttft_slo=0.01))
    assert step(sim) == batch
    assert low.preemptions == (0 if own else 1)
