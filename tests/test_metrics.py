"""Metrics, held against histories worked out by hand, and a quadratic loop over random ones."""

import random
from collections import Counter, defaultdict
from dataclasses import astuple
from itertools import pairwise

import numpy as np
import pytest

from cli.files import plain
from lab.measure.metrics import (
    Percentiles,
    Stall,
    find_stalls,
    goodput,
    missed,
    percentiles,
    summarize_queue,
    summarize_run,
)
from policies.observers import ChunkRecord, Iteration
from request import Request, Service


def an_iteration(start, end, chunks, waiting=0, running=0, free_pages=0, **more):
    """An Iteration that was launched when it began."""
    return Iteration(start, end, chunks, start, waiting, running, free_pages, **more)


def a_completion(
    request_id, prompt_len, arrival, reason=None, scheduled=None, times=(), priority=2, **more
):
    """A Request whose prompt and output are of no interest."""
    more |= dict(finish_reason=reason, scheduled=scheduled, token_times=list(times))
    tokens = [7] * (prompt_len + len(times))
    return Request(request_id, tokens, prompt_len, 99, arrival, service=Service(priority), **more)


def prefill(request_id, length, start=0):
    """A record of a chunk."""
    return ChunkRecord(request_id, start, length, is_decode=False)


def decode(request_id, start=50):
    """A record of a decode."""
    return ChunkRecord(request_id, start, 1, is_decode=True)


def three_requests():
    """1 makes 0 wait, 2 rides in hybrid batches, 1 is preempted, 2 is aborted, 3 only waits."""
    iterations = [
        an_iteration(0.0, 1.0, [prefill(0, 4)], 0, 1, 9),
        an_iteration(1.0, 1.25, [decode(0)], 0, 1, 9),
        an_iteration(1.25, 3.25, [prefill(1, 8)], 0, 2, 7),  # as vllm does: 0 waits for all of 1
        an_iteration(3.25, 3.5, [decode(0), decode(1)], 1, 2, 7),
        an_iteration(3.5, 4.0, [decode(0), decode(1), prefill(2, 2)], 0, 3, 6, budget=4),
        an_iteration(4.0, 4.75, [decode(0), decode(1), prefill(2, 3, 2)], 0, 3, 5, budget=5),
        an_iteration(4.75, 5.0, [decode(0), decode(2)], 1, 2, 8, preempted=(1,)),
        an_iteration(5.0, 6.0, [prefill(1, 12)], 0, 2, 6),  # prompt and 4 tokens again; 2 waits
        an_iteration(6.0, 6.25, [decode(1), decode(2)], 1, 1, 6),
    ]
    lost = dict(preemptions=1, recomputed_tokens=11)
    completions = [
        a_completion(0, 4, 0.0, "length", 0.0, [1.0, 1.25, 3.5, 4.0, 4.75, 5.0], priority=1),
        a_completion(1, 8, 1.0, "stop", 1.25, [3.25, 3.5, 4.0, 4.75, 6.0, 6.25], **lost),
        a_completion(2, 5, 2.0, "abort", 3.5, [4.75, 5.0, 6.25]),
        a_completion(3, 6, 5.5),
    ]
    return completions, iterations


def marks(percentiles):
    """Percentiles as a tuple that another may equal nearly."""
    return pytest.approx(astuple(percentiles))


def test_percentiles_are_interpolated_linearly_and_none_is_no_value():
    assert marks(percentiles([3, 1, 2, 0])) == (1.5, 2.7, 2.97, 3)
    assert percentiles([None, 5.0]) == Percentiles(5.0, 5.0, 5.0, 5.0)
    nothing = Percentiles(p50=None, p90=None, p99=None, max=None)
    assert percentiles([]) == percentiles([None]) == nothing


def random_history(seed):
    """Nonsense, as an engine would record it: random batches, idle times, preemptions, aborts."""
    rng = random.Random(seed)
    iterations = []
    times = defaultdict(list)
    now = 0.0
    for _ in range(rng.randint(1, 30)):
        now += rng.choice([0.0, 0.0, rng.random()])
        end = now + 0.01 + rng.random()
        chunks = []
        for request_id in rng.sample(range(6), rng.randint(1, 4)):
            is_decode = request_id in times and rng.random() < 0.6
            chunks.append((request_id, 0, 1 if is_decode else rng.randint(1, 3), is_decode))
            if is_decode or rng.random() < 0.5:
                times[request_id].append(end)
        iterations.append(an_iteration(now, end, chunks))
        now = end
    return [a_completion(i, 1, 0.0, times=times[i]) for i in range(6)], iterations


def stalls_by_definition(completions, iterations):
    """The definition, word by word: for each gap, all iterations are searched for its own."""
    stalls = []
    for c in completions:
        for start, end in pairwise(c.token_times):
            tokens = Counter()
            inside = [i for i in iterations if start < i.end <= end]
            for request_id, _, length, is_decode in (chunk for i in inside for chunk in i.chunks):
                if not is_decode and request_id != c.id:
                    tokens[request_id] += length
            if tokens:
                cause = tokens.most_common(1)[0][0]
                stall = Stall(c.id, start, end, tokens.total(), cause, end - start)
                stalls.append(stall)
    return stalls


def test_stalls_equal_their_definition_on_random_histories():
    num_stalls = 0
    for seed in range(300):
        history = random_history(seed)
        stalls = find_stalls(*history)
        assert stalls == stalls_by_definition(*history), f"seed {seed}"
        num_stalls += len(stalls)
    assert num_stalls > 1000


def test_the_summary_of_a_run_equals_a_calculation_by_hand():
    def summary_of(**slo):
        return summarize_run(*three_requests(), seconds=8.0, **slo)

    summary = summary_of()
    expected = {
        "requests": 4, "finished": 2, "aborted": 1,
        "tokens_per_s": (4 + 8 + 5 + 6 + 6 + 3) / 8,  # not the prompt of 3, which nobody computed
        "preemptions": 1, "recomputed_tokens": 11, "iterations": 9,
        "prefill_only": 3 / 9, "decode_only": 4 / 9, "hybrid": 2 / 9,
        "tokens_per_iteration": 40 / 9, "running_peak": 3,
        "running_mean": (1 * 1.5 + 2 * 3.5 + 3 * 1.25) / 6.25,  # not 17 / 9
    }  # fmt: skip
    assert {key: getattr(summary, key) for key in expected} == pytest.approx(expected)
    # the gaps: 0.25 five times, 0.5 and 0.75 and 1.25 twice, 2.25
    assert marks(summary.tbt_s) == (0.5, 1.25, 1.25 + 0.89, 2.25)
    assert marks(summary.ttft_s) == (2.25, 2.65, 2.74, 2.75)
    assert marks(summary.scheduling_delay_s) == (0.25, 1.25, 1.475, 1.5)
    assert marks(summary.latency_s) == (5.125, 5.225, 5.2475, 5.25)
    stalls = summary.stalls  # of 0 three, of 1 two, of 2 one: that of 1 from 4.75 on is its own
    assert stalls.longest == Stall(0, 1.25, 3.5, 8, 1, 2.25)
    assert (stalls.count, stalls.over_slo) == (6, None)
    assert marks(stalls.length_s) == (0.75, 1.75, 2.2, 2.25)
    report = plain(summary)
    properties = dict(p50_tbt_s=0.5, p99_tbt_s=2.14, p50_ttft_s=2.25, p99_ttft_s=2.74)
    properties |= dict(longest_stall_s=2.25, p50_delay_s=0.25)
    assert {key: report[key] for key in properties} == pytest.approx(properties)
    over = [summary_of(tbt_slo_s=slo).stalls.over_slo for slo in (1.0, 1.25)]
    assert over == [2, 1]  # 1.25 meets 1.25


def one_server(gaps, services):
    """Completions of requests that came with these gaps, served one by one in so many seconds."""
    arrivals = np.cumsum(gaps).tolist()
    free = 0.0
    completions = []
    for i, (arrival, service) in enumerate(zip(arrivals, services, strict=True)):
        start = max(arrival, free)
        free = start + service
        completions.append(a_completion(i, 1, arrival, "length", start, [free]))
    return completions


STEADY = [1.0] * 40  # gaps between arrivals


def test_a_queue_grows_where_more_arrive_than_are_scheduled():
    completions = one_server(STEADY, [1.1] * 40)
    queue = summarize_queue(completions)
    assert queue.grew
    assert (queue.arrived_per_s, queue.scheduled_per_s) == pytest.approx((1.0, 1 / 1.1))
    delays = queue.second_quarter_s, queue.last_quarter_s
    assert delays == pytest.approx((14.5 * 0.1, 34.5 * 0.1))  # of requests 10 … 19, 30 … 39
    assert missed(summarize_run(completions, [], 44.0), 1.0)
    for one, other in zip(completions[::2], completions[1::2], strict=True):
        one.scheduled, other.scheduled = other.scheduled, one.scheduled
    assert summarize_queue(completions).grew  # also if not first come, first served


@pytest.mark.parametrize(
    "gaps, services",
    [
        (STEADY, [0.5] * 40),  # nobody waited
        ([1.0] * 30 + [0.25] * 10, [0.5] * 40),  # a late rush: the server can do 2 a second
        ([0.25] * 20 + [2.5] * 20, [1.5] * 40),  # more than can be, but at first
        *[(STEADY[:n], [2.0] * n) for n in range(6)],
    ],
)
def test_a_queue_that_will_be_empty_again_has_not_grown(gaps, services):
    assert not summarize_queue(one_server(gaps, services)).grew


def finished_run(delays, gaps):
    """Completions with these scheduling delays, and these gaps after each first token."""
    times = np.cumsum([0.25, *gaps])
    which = enumerate(delays)
    return [a_completion(i, 1, 0.0, "length", delay, delay + times) for i, delay in which]


@pytest.mark.parametrize(
    "delays, gaps, is_met",
    [
        ([0.0, 2.0, 9.0], [0.5, 0.5], True),  # limits may be reached; the median delay counts
        ([0.0, 2.01, 9.0], [0.5, 0.5], False),
        ([0.0, 2.0, 9.0], [0.5] * 199 + [3.0], True),  # 1 of 200 is beyond P99
        ([0.0, 2.0, 9.0], [0.5] * 9 + [3.0] * 2, False),
        ([0.0], [], True),  # one token each: no gap is too long
        ([], [], False),  # nothing finished
    ],
)
def test_the_slo_is_met_by_p99_tbt_and_median_scheduling_delay(delays, gaps, is_met):
    summary = summarize_run(finished_run(delays, gaps), [], 10.0)
    assert (not missed(summary, tbt_slo_s=0.5)) == is_met


def test_goodput_counts_finished_requests_within_both_slos():
    stalled = [0.05] * 19 + [1.0]  # gaps whose mean of 0.0975 s would pass
    rows = [
        (2.0, [], "length", True),
        (0.5, [0.09, 0.05], "length", True),
        (1.0, [], "stop", True),
        (2.25, [], "length", False),
        (0.5, stalled, "length", False),
        (0.5, [0.05], "abort", False),
    ]
    requests = []
    for ttft, gaps, reason, _ in rows:
        times = np.cumsum([3.0 + ttft, *gaps]).tolist()
        requests.append(a_completion(0, 1, 3.0, reason, 3.0, times))
    slos = {"ttft_slo_s": 2.0, "tbt_slo_s": 0.1}
    assert goodput(requests, 4.0, **slos) == sum(row[-1] for row in rows) / 4.0
    assert goodput([], 0.0, **slos) is None


@pytest.mark.parametrize("reason", [None, "abort"])
def test_a_request_that_did_not_finish_does_not_meet_the_slo(reason):
    completions = [*finished_run([0.0] * 3, [0.5]), a_completion(3, 1, 0.0, reason)]
    assert missed(summarize_run(completions, [], 10.0), 0.5)
