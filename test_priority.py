"""The policy `priority` and its line: who goes first, who is preempted, and that nobody starves. On a virtual clock."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import VirtualRun, percentile
from iteration_time import BatchShape
from kv_cache import Pages
from scheduler import PRIORITIES, Request, make_scheduler
from waiting import ClassLine, aged_class

REALTIME, HIGH, NORMAL, LOW = range(4)


def linear(shape):
    """Seconds of a batch: a pass over the weights, and a millisecond for each token."""
    return 10e-3 + 1e-3 * (shape.prefill_tokens + shape.decodes)


PROFILE = [
    (shape, linear(shape))
    for prefill, decodes in [(0, 1), (0, 16), (64, 0), (64, 8), (512, 0), (512, 4), (2048, 1)]
    for shape in [BatchShape(prefill, decodes, 100 * decodes, 300 * prefill)]
]


def simulation(policy="priority", law=linear, **options):
    """With a model of the iteration time that knows the law."""
    return VirtualRun(policy, law, **(dict(profile=PROFILE) | options))


def request(id, priority=NORMAL, prompt_len=100, output=20, arrival=0.0, **targets):
    return Request(id, [0] * prompt_len, prompt_len, output, priority=priority, arrival=arrival, **targets)


def ids(batch):
    return [chunk.request.id for chunk in batch]


# -----------------------------------------------------------------------------------------------------
# the line


class NaiveLine:
    """ClassLine, said in one sentence: sorted by class, then preempted ones, then deadline, then who came first."""

    def __init__(self):
        self.requests, self.front = [], set()

    def head(self, now, ageing):
        def key(r):
            lifts = min(r.priority, max(0, int((now - r.arrival) / ageing)))
            return r.priority - lifts, r.id not in self.front, 0 if r.id in self.front else r.ttft_slo, r.arrival, r.id

        return min(self.requests, key=key)


operations = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 3), st.integers(0, 5)),
        st.tuples(st.just("append"), st.integers(0, 3), st.integers(0, 5)),
        st.tuples(st.just("preempt"), st.integers(0, 3), st.integers(0, 9)),
        st.tuples(st.just("remove"), st.integers(0, 99), st.none()),
        st.tuples(st.just("pop"), st.none(), st.none()),
        st.tuples(st.just("sleep"), st.integers(0, 40), st.none()),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(operations, st.sampled_from([1.0, 4.0, 64.0]))
def test_the_line_is_a_sorted_list(operations, ageing):
    now, naive, gone = 0.0, NaiveLine(), []
    line = ClassLine(lambda r: r.ttft_slo, ageing, lambda: now, len(PRIORITIES))
    for number, (name, a, b) in enumerate(operations):
        if name == "append":
            r = Request(number, [0], 1, 1, priority=a, arrival=now, ttft_slo=float(b))
            line.append(r)
            naive.requests.append(r)
        elif name == "preempt":  # one that has run for a while
            r = Request(number, [0], 1, 1, priority=a, arrival=now - b, ttft_slo=0.0)
            line.appendleft(r)
            naive.requests.append(r)
            naive.front.add(r.id)
        elif name == "sleep":
            now += a / 4  # a power of two, so that times are exact
        elif naive.requests:
            r = naive.head(now, ageing) if name == "pop" else naive.requests[a % len(naive.requests)]
            line.remove(r)
            naive.requests.remove(r)
            gone.append(r)
        assert len(line) == len(naive.requests) and set(line) == set(naive.requests)
        assert all(r not in line for r in gone) and all(r in line for r in naive.requests)
        if naive.requests:
            assert line[0] is naive.head(now, ageing)
        else:
            with pytest.raises(IndexError):
                line[0]
    while naive.requests:
        r = naive.head(now, ageing)
        assert line[0] is r
        line.remove(r)
        naive.requests.remove(r)
    with pytest.raises(KeyError):
        line.remove(request(-1))


def test_the_line_keeps_nothing_of_those_who_left():
    now = 0.0
    line = ClassLine(lambda r: r.arrival + r.ttft_slo, 10.0, lambda: now, len(PRIORITIES))
    draw, there = random.Random(0), []
    for i in range(3000):
        now += 0.1
        there.append(request(i, draw.randrange(4), arrival=now, ttft_slo=draw.choice([1.0, 1e9])))
        line.append(there[-1])
        if i > 50:
            r = line[0] if i % 2 else draw.choice(there)  # admitted, or aborted
            there.remove(r)
            line.remove(r)
    assert sum(len(entries) for entries in (*line._classes, line._lifts)) == 2 * len(there) == 2 * 51
    line.clear()
    assert not line and list(line) == []


def test_a_class_is_one_of_those_there_are_whatever_the_clock_says():
    for arrival in (-1e9, 0.0, 5.0, 99.0, 1e9):  # long ago, or yet to come
        for priority in range(4):
            assert 0 <= aged_class(request(0, priority, arrival=arrival), 7.0, 2.0) <= priority
    assert [aged_class(request(0, LOW), now, 10.0) for now in (0.0, 9.9, 10.0, 19.9, 20.0, 30.0, 99.0)] == [
        *(LOW, LOW, NORMAL, NORMAL, HIGH, REALTIME, REALTIME)
    ]
    sim = simulation()
    sim.add(request(0, LOW, arrival=1e9))
    assert ids(sim.step()) == [0]


def test_a_class_that_is_lifted_in_the_middle_of_schedule_does_no_harm():
    ticks = itertools.count()  # the clock moves whenever it is read, and some class is lifted each time
    scheduler = make_scheduler(
        "priority",
        Pages(12, 4),
        chunk=8,
        max_batch=4,
        max_len=32,
        clock=lambda: next(ticks) * 1e-3,
        ageing=1e-2,
        profile=PROFILE,
    )
    for i in range(200):
        scheduler.add(request(i, priority=i % 4, prompt_len=1 + i % 13, output=2, arrival=i * 1e-3))
    ended = 0
    while batch := scheduler.schedule():
        for r, start, length in batch:
            assert r in scheduler.running and r not in scheduler.waiting and start + length <= 4 * len(r.pages)
            r.num_computed += length
            if r.num_computed == len(r.tokens):
                r.tokens.append(0)
                if len(r.tokens) == r.prompt_len + r.max_new_tokens:
                    scheduler.remove(r)
                    ended += 1
    assert ended == 200


# -----------------------------------------------------------------------------------------------------
# the order


def first_chunks(sim):
    """The ids in the order of their first chunks."""
    return sorted(
        sim.scheduled, key=lambda i: (sim.scheduled[i][0], [c[0] for row in sim.log for c in row[3]].index(i))
    )


def test_classes_go_first_and_within_one_the_least_slack():
    requests = [
        request(0, LOW, ttft_slo=0.1),
        request(1, NORMAL, ttft_slo=9.0),
        request(2, NORMAL, ttft_slo=3.0),
        request(3, HIGH, ttft_slo=8.0),
        request(4, HIGH),  # 2 s, as nothing else was asked for
        request(5, REALTIME, ttft_slo=30.0),
        request(6, NORMAL, 1500, ttft_slo=3.0),  # the same target as 2, but more to do
        request(7, NORMAL, ttft_slo=3.0),  # as 2, but later
    ]
    assert first_chunks(simulation(chunk=32).run(requests)) == [5, 4, 3, 2, 7, 6, 1, 0]


def test_ties_go_to_who_came_first_even_between_two_that_have_begun():
    sim = simulation(chunk=60, max_batch=4)
    for i in range(4):
        sim.add(request(i, prompt_len=30))
    assert [sim.step() and sim.log[-1][3] for _ in range(2)][0] == [(0, 30), (1, 30)]
    sim = simulation(chunk=50, max_batch=4)
    for i in range(2):
        sim.add(request(i, prompt_len=100))
    while sim.scheduler.admit():
        pass  # both have begun
    sim.step()
    assert sim.log[-1][3] == [(0, 50)]


def test_nobody_is_admitted_past_a_higher_class_that_finds_no_room():
    sim = simulation(pages=130, page_size=16, max_len=2048)  # 128 pages for the longest
    sim.add(request(0, HIGH, 1600, 300))
    sim.step()
    sim.add(request(1, HIGH, 1000, ttft_slo=1e6))
    sim.add(request(2, LOW, 10))
    for _ in range(40):
        assert ids(sim.step()) == [0]
    assert len(sim.scheduler.waiting) == 2


@pytest.mark.parametrize("arrival", [1.0, 9.0])
@pytest.mark.parametrize("policy, stuck", [("sarathi-serve", True), ("priority", False)])
def test_a_short_prompt_is_not_stuck_behind_a_long_one_of_its_class(policy, stuck, arrival):
    options = dict(max_len=20_000, chunk=256)
    long, short = request(0, prompt_len=16_000), request(1, prompt_len=100, arrival=arrival)
    sim = simulation(policy, **options).run([long, short])
    alone = {r.id: simulation(policy, **options).run([request(r.id, prompt_len=r.prompt_len)]) for r in (long, short)}
    rest = alone[0].token_times[0][0] - arrival  # what the long one still has to do when the short one comes
    if stuck:
        assert sim.ttft(short) > rest > 4
    else:  # the iteration that runs, and its own
        assert sim.ttft(short) <= 2 * linear(BatchShape(256)) < 0.6
        assert sim.ttft(long) <= alone[0].token_times[0][0] + 20 * linear(BatchShape(256, 1))


@pytest.mark.parametrize("tbt_slo", [None, 0.2])
def test_nor_behind_a_long_one_that_has_the_machine_to_itself_under_an_slo(tbt_slo):
    long, short = request(0, prompt_len=16_000), request(1, prompt_len=100, arrival=1.0)
    sim = simulation(max_len=20_000, tbt_slo=tbt_slo).run([long, short])
    assert sim.ttft(short) <= 2 * linear(BatchShape(256))


def test_a_long_prompt_ends_in_bounded_time_under_a_stream_of_short_ones():
    # short ones alone would fill 90 % of the machine: 100 tokens and a decode take 0.111 s or less when they share
    long = request(0, prompt_len=16_000, output=1)
    stream = [request(1 + i, prompt_len=100, output=1, arrival=0.12 * i) for i in range(2000)]
    sim = simulation(max_len=20_000, ageing=1e6).run([long, *stream])
    own = simulation(max_len=20_000).run([request(0, prompt_len=16_000, output=1)]).ttft(long)
    # those that come later than its own prefill takes have a later deadline: at worst it waits for those that come
    # before that, does its own work, and is held up by no other
    before = sum(r.arrival <= own for r in stream)
    assert sim.ttft(long) <= before * linear(BatchShape(100)) + own + linear(BatchShape(256))
    assert percentile([sim.ttft(r) for r in stream[: int(0.9 * own / 0.12)]], 99) < 1.0  # and these did not wait for it


# -----------------------------------------------------------------------------------------------------
# ageing


@pytest.mark.parametrize("ageing", [2.0, 5.0])
@pytest.mark.parametrize("priority", [NORMAL, LOW])
@pytest.mark.parametrize("lax", [0.0, 20.0])
def test_no_class_starves_under_a_stream_of_realtime_requests_that_never_ends(priority, ageing, lax):
    # Twice as many come as can be served. After `priority * ageing` seconds the request is in the stream's class,
    # where it is before all that arrive later than its own deadline allows. Those that arrived earlier are gone when
    # half of their number, as they come twice as fast, could have come: at two times that.
    prompt_len, targets = 240, {"ttft_slo": 2.0}
    service = linear(BatchShape(prompt_len))  # one at a time, with one token each
    stream = [request(1 + i, REALTIME, prompt_len, 1, arrival=i * service / 2, **targets) for i in range(1500)]
    poor = request(0, priority, prompt_len, 1, arrival=1.0, ttft_slo=2.0 + lax)
    sim = simulation(chunk=prompt_len, ageing=ageing, max_batch=1).run([poor, *stream], until=100.0)
    bound = max(priority * ageing, poor.arrival + 2 * lax) + 2 * service
    assert sim.ttft(poor) <= bound + service
    assert sim.ttft(poor) > min(priority * ageing, lax or 1e9)  # it did wait: the stream is more urgent


def test_a_request_that_has_aged_is_not_preempted_for_a_younger_one():
    for age, preempted in ((0.0, 1), (25.0, 0)):
        sim = simulation(pages=130, ageing=10.0)
        sim.now = age
        old = request(0, LOW, 1600, 300, arrival=0.0)
        sim.add(old)
        sim.step()
        sim.add(request(1, REALTIME, 1000, 5, arrival=sim.now - 1.5))
        sim.step()
        assert old.preemptions == preempted


# -----------------------------------------------------------------------------------------------------
# preemption


def crowded(*priorities, **options):
    """So many requests of these classes run that no page is left for another prompt of 1,000 tokens."""
    sim = simulation(pages=130, chunk=2048, **options)
    for i, priority in enumerate(priorities):
        sim.add(request(i, priority, 1650 // len(priorities), 100))
    sim.step()
    sim.step()
    assert len(sim.scheduler.running) == len(priorities) and all(r.is_decoding for r in sim.scheduler.running)
    return sim


@pytest.mark.parametrize("priority", [REALTIME, HIGH])
def test_a_low_class_is_preempted_when_half_of_a_ttft_target_has_gone_and_not_before(priority):
    sim = crowded(LOW, NORMAL, HIGH)
    waits = request(9, priority, 500, 5, arrival=sim.now, ttft_slo=1.6)
    sim.add(waits)
    while sim.now < waits.arrival + 0.8:
        assert 9 not in ids(sim.step()) and len(sim.scheduler.running) == 3
    assert 9 in ids(sim.step())  # at once
    assert sorted(r.id for r in sim.scheduler.running) == [1, 2, 9]  # the lowest class, and no more than it takes
    assert [r.preemptions for r in sorted(sim.scheduler.waiting, key=lambda r: r.id)] == [1]


@pytest.mark.parametrize("priority, running", [(NORMAL, LOW), (LOW, LOW), (HIGH, HIGH), (REALTIME, HIGH)])
def test_nobody_is_preempted_for_a_low_one_nor_a_high_one_for_another(priority, running):
    sim = crowded(*[running] * 3, ageing=1e6)
    sim.add(request(9, priority, 500, 5, arrival=sim.now - 50.0, ttft_slo=1.0))
    for _ in range(60):
        sim.step()
    assert not any(r.preemptions for r in sim.scheduler.running) and sim.scheduler.waiting[0].id == 9


def test_nobody_is_preempted_for_one_that_has_room():
    sim = crowded(LOW, LOW)
    sim.add(request(9, REALTIME, 10, 5, arrival=sim.now - 50.0))
    assert 9 in ids(sim.step()) and len(sim.scheduler.running) == 3


def test_a_late_realtime_request_gets_token_budget_from_the_decodes_of_lower_classes():
    # eight decodes fill a budget of eight; there are places and pages, but no tokens
    sim = simulation(chunk=8)
    for i in range(8):
        sim.add(request(i, LOW if i % 2 else NORMAL, 1, 500))
    sim.step()
    waits = request(9, REALTIME, 40, 5, arrival=sim.now, ttft_slo=1.0)
    sim.add(waits)
    while sim.now < waits.arrival + 0.5:
        assert sorted(ids(sim.step())) == list(range(8))
    while not sim.token_times[9]:
        sim.step()
    assert sim.ttft(waits) < 1.5
    assert {r.id for r in sim.scheduler.waiting} <= {1, 3, 5, 7}  # the lowest class went first


def test_a_low_request_with_a_target_that_cannot_be_met_does_not_hold_up_a_realtime_prefill():
    sim = simulation()
    sim.add(request(0, LOW, 100, 1500, tbt_slo=1e-6))
    sim.step()
    waits = request(1, REALTIME, 100, 5, arrival=sim.now, ttft_slo=1.0)
    sim.add(waits)
    while not sim.token_times[1]:
        sim.step()
    assert sim.ttft(waits) <= 0.5 + linear(BatchShape(decodes=1)) + linear(BatchShape(256))


def decodes_with_a_target(target, lower=6):
    """A realtime decode with a TBT target, and others of lower classes beside it, without one."""
    sim = simulation(chunk=2048)
    sim.add(request(0, REALTIME, 10, 400, tbt_slo=target))
    for i in range(lower):
        sim.add(request(1 + i, LOW if i % 2 else NORMAL, 10, 400))
    while sim.scheduler.waiting:  # whatever the target says
        r = sim.scheduler.waiting[0]
        r.pages = sim.scheduler.pages.allocate(1)
        sim.scheduler.running.append(r)
        sim.scheduler.waiting.remove(r)
        r.num_computed, r.tokens = 10, [0] * 11
        sim.token_times[r.id].append(0.0)
    return sim


def test_lower_decodes_are_preempted_that_make_the_iteration_too_slow_and_no_more():
    target = linear(BatchShape(decodes=4)) + 2e-4  # of the seven
    sim = decodes_with_a_target(target)
    assert len(sim.step()) == 4 and sim.log[-1][1] <= target
    assert ids(sim.step()) == [0, 1, 3, 5]  # the three of the lowest class are gone
    assert {r.id for r in sim.scheduler.waiting} == {2, 4, 6}
    assert len(decodes_with_a_target(linear(BatchShape(decodes=7)) + 2e-4).step()) == 7  # no risk, no preemption


def test_a_prefill_is_not_preempted_for_decodes_that_are_too_slow():
    sim = decodes_with_a_target(linear(BatchShape(decodes=2)) + 2e-4, lower=3)
    prefills = request(20, LOW, 1500, 5)
    prefills.pages, prefills.num_computed = sim.scheduler.pages.allocate(100), 1000
    sim.scheduler.running.append(prefills)
    sim.scheduled[20], sim.token_times[20] = [], []
    sim.step()
    assert len(sim.scheduler.running) == 3 and prefills.preemptions == 0


def test_decodes_of_the_same_class_are_never_preempted_for_a_target():
    sim = simulation()
    for i in range(6):
        sim.add(request(i, HIGH, 10, 50, tbt_slo=1e-3))
    sim.run([])
    assert all(len(times) == 50 for times in sim.token_times.values())
    assert all(row[2].decodes == 6 for row in sim.log[2:-8])


def test_no_more_are_let_in_at_once_than_may_decode_together():
    sim = decodes_with_a_target(linear(BatchShape(decodes=4)) + 2e-4, lower=1)
    for i in range(10):
        sim.add(request(20 + i, LOW, 5, 400, arrival=sim.now))
    while sim.scheduler.admit():
        pass
    assert len(sim.scheduler.running) == 4  # two that decode, two that will


@pytest.mark.parametrize("seed", range(2))
def test_who_was_preempted_for_a_target_is_not_let_in_to_be_preempted_again(seed):
    # low requests for ever, and one realtime decode whose target leaves room for about four of them
    sim = simulation(law=linear, noise=0.05, seed=seed, ageing=1e6)
    target = linear(BatchShape(decodes=5)) * 1.05
    sim.add(request(0, REALTIME, 10, 1500, tbt_slo=target))
    low = [request(1 + i, LOW, 30, 60) for i in range(300)]
    for r in low:
        sim.add(r)
    while 0 in {r.id for r in sim.scheduler.running} or not sim.token_times[0]:
        sim.step()
    ended = sum(len(sim.token_times[r.id]) == 60 for r in low)
    assert ended > 1500 / 60  # more than one at a time
    assert sum(r.preemptions for r in low) <= 0.1 * ended


def test_a_preempted_request_waits_at_the_front_of_its_class_and_ends_as_if_it_were_alone():
    sim = crowded(LOW, LOW, LOW)
    for i, priority in ((4, LOW), (5, NORMAL)):
        sim.add(request(i, priority, 700, 10, arrival=sim.now, ttft_slo=0.5))
    sim.add(request(9, REALTIME, 1800, 100, arrival=sim.now - 5.0))
    sim.step()
    line, order = sim.scheduler.waiting, []
    assert [r.id for r in sim.scheduler.running] == [9] and len(line) == 5
    for r in [0, 1, 2]:
        assert next(w for w in line if w.id == r).num_computed == 0
    copy = sim.scheduler.waiting
    waiting = {r.id: r for r in copy}
    while line:
        order.append(line[0].id)
        line.remove(line[0])
    assert order == [5, 0, 1, 2, 4]  # the newest was preempted first and still comes after the others
    for i in order:
        (line.appendleft if i < 3 else line.append)(waiting[i])
    sim.run([])
    assert [len(sim.token_times[i]) for i in (0, 1, 2, 4, 5, 9)] == [100, 100, 100, 10, 10, 100]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("ageing", [5.0, 1e6])
def test_under_overload_with_little_memory_all_ends_and_little_is_computed_twice(ageing, seed):
    draw = random.Random(seed)
    requests = [
        request(
            i,
            draw.randrange(4),
            draw.randrange(1, 600),
            draw.randrange(1, 80),
            draw.uniform(0, 60),
            ttft_slo=draw.choice([None, 0.5, 5.0]),
            tbt_slo=draw.choice([None, None, 0.02, 0.1]),
        )
        for i in range(200)
    ]
    sim = simulation(pages=130, noise=0.05, seed=seed, max_batch=12, ageing=ageing, tile=8).run(requests)
    assert all(len(sim.token_times[r.id]) == r.max_new_tokens for r in requests)
    assert sim.scheduler.pages.num_free == 130 and not sim.scheduler.running and not sim.scheduler.waiting
    total = sum(r.prompt_len + r.max_new_tokens for r in requests)
    assert sum(r.recomputed for r in requests) < total
    waited = [max(sim.ttft(r) for r in requests if r.priority == p) for p in range(4)]
    if ageing == 5.0:  # in an overload all end up in one class: the longest wait is not the low ones' alone
        assert waited[LOW] < 2 * waited[REALTIME]
    else:
        assert max(waited[:NORMAL]) < 0.25 * waited[LOW]
