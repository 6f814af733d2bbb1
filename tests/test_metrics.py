"""Metrics, held against histories worked out by hand, and a quadratic loop over random ones."""

import random
from collections import Counter, defaultdict
from dataclasses import astuple
from itertools import pairwise

import numpy as np
import pytest

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
from request import Request


def a_completion(request_id, prompt_len, arrival, reason=None, scheduled=None, times=(), **lost):
    """A Request whose tokens are of no interest."""
    return Request(
        request_id,
        tokens=[7] * (prompt_len + len(times)),
        prompt_len=prompt_len,
        max_new_tokens=99,
        arrival=arrival,
        scheduled=scheduled,
        token_times=list(times),
        finish_reason=reason,
        **lost,
    )


def prefill(request_id, length):
    return ChunkRecord(request_id, 0, length, is_decode=False)


def decode(request_id):
    return ChunkRecord(request_id, 50, 1, is_decode=True)


def an_iteration(start, end, chunks, running=0):
    return Iteration(start, end, chunks, running=running)


def three_requests():
    """1 makes 0 wait, 2 rides in hybrid batches, 1 is preempted, 2 is aborted, 3 only waits."""
    iterations = [
        an_iteration(0.0, 1.0, [prefill(0, 4)], 1),
        an_iteration(1.0, 1.25, [decode(0)], 1),
        an_iteration(1.25, 3.25, [prefill(1, 8)], 2),  # as vllm does: 0 waits for all of 1
        an_iteration(3.25, 3.5, [decode(0), decode(1)], 2),
        an_iteration(3.5, 4.0, [decode(0), decode(1), prefill(2, 2)], 3),
        an_iteration(4.0, 4.75, [decode(0), decode(1), prefill(2, 3)], 3),
        an_iteration(4.75, 5.0, [decode(0), decode(2)], 2),
        an_iteration(5.0, 6.0, [prefill(1, 12)], 2),  # prompt and 4 tokens again; 2 waits
        an_iteration(6.0, 6.25, [decode(1), decode(2)], 1),
    ]
    lost = {"preemptions": 1, "recomputed_tokens": 11}
    times = [3.25, 3.5, 4.0, 4.75, 6.0, 6.25]
    completions = [
        a_completion(0, 4, 0.0, "length", 0.0, [1.0, 1.25, 3.5, 4.0, 4.75, 5.0]),
        a_completion(1, 8, 1.0, "stop", 1.25, times, **lost),
        a_completion(2, 5, 2.0, "abort", 3.5, [4.75, 5.0, 6.25]),
        a_completion(3, 6, 5.5),
    ]
    return completions, iterations


def marks(percentiles):
    """Percentiles as a tuple that another may equal nearly."""
    return pytest.approx(astuple(percentiles))


def test_percentiles_are_interpolated_linearly_and_none_is_no_value():
    assert marks(percentiles([3, 1, None, 2, 0])) == (1.5, 2.7, 2.97, 3)
    assert percentiles([None]) == Percentiles(p50=None, p90=None, p99=None, max=None)


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
            decodes = request_id in times and rng.random() < 0.6
            chunks.append(decode(request_id) if decodes else prefill(request_id, rng.randint(1, 3)))
            if decodes or rng.random() < 0.5:
                times[request_id].append(end)
        iterations.append(an_iteration(now, end, chunks))
        now = end
    return [a_completion(i, 1, 0.0, times=times[i]) for i in range(6)], iterations


def stalls_by_definition(requests, iterations):
    """The definition, word by word: for each gap, all iterations are searched for its own."""
    stalls = []
    for waiting in requests:
        for start, end in pairwise(waiting.token_times):
            tokens = Counter()
            for iteration in iterations:
                if start < iteration.end <= end:
                    for request_id, _, length, is_decode in iteration.chunks:
                        if not is_decode and request_id != waiting.id:
                            tokens[request_id] += length
            if tokens:
                cause = tokens.most_common(1)[0][0]
                stalls.append(Stall(waiting.id, start, end, tokens.total(), cause))
    return stalls


def test_stalls_equal_their_definition_on_random_histories():
    count = 0
    for seed in range(300):
        history = random_history(seed)
        stalls = find_stalls(*history)
        assert stalls == stalls_by_definition(*history), f"seed {seed}"
        count += len(stalls)
    assert count > 1000


def test_the_summary_of_a_run_equals_a_calculation_by_hand():
    summary = summarize_run(*three_requests(), seconds=8.0, tbt_slo_s=1.25)
    expected = {
        "requests": 4,
        "finished": 2,
        "tokens_per_s": (4 + 8 + 5 + 6 + 6 + 3) / 8,  # not the prompt of 3, which nobody computed
        "preemptions": 1,
        "recomputed_tokens": 11,
        "iterations": 9,
        "prefill_only": 3 / 9,
        "decode_only": 4 / 9,
        "hybrid": 2 / 9,
        "tokens_per_iteration": 40 / 9,
        "running_mean": (1 * 1.5 + 2 * 3.5 + 3 * 1.25) / 6.25,  # not 17 / 9
        "p50_tbt_s": 0.5,
        "p99_tbt_s": 2.14,
        "p50_ttft_s": 2.25,
        "p99_ttft_s": 2.74,
        "longest_stall_s": 2.25,
        "p50_delay_s": 0.25,
    }
    assert {key: getattr(summary, key) for key in expected} == pytest.approx(expected)
    # the gaps: 0.25 five times, 0.5 and 0.75 and 1.25 twice, 2.25
    assert marks(summary.tbt_s) == (0.5, 1.25, 1.25 + 0.89, 2.25)
    assert marks(summary.ttft_s) == (2.25, 2.65, 2.74, 2.75)
    assert marks(summary.scheduling_delay_s) == (0.25, 1.25, 1.475, 1.5)
    stalls = summary.stalls  # of 0 three, of 1 two, of 2 one: that of 1 from 4.75 on is its own
    assert stalls.longest == Stall(0, 1.25, 3.5, 8, 1)
    assert (stalls.count, stalls.over_slo) == (6, 1)  # 1.25 meets 1.25


def one_server(gaps, services):
    """Requests that came with these gaps, served one by one in so many seconds."""
    free = 0.0
    requests = []
    for i, (arrival, service) in enumerate(zip(np.cumsum(gaps).tolist(), services, strict=True)):
        start = max(arrival, free)
        free = start + service
        requests.append(a_completion(i, 1, arrival, "length", start, [free]))
    return requests


def test_a_queue_grows_where_more_arrive_than_are_scheduled():
    requests = one_server([1.0] * 40, [1.1] * 40)
    queue = summarize_queue(requests)
    assert queue.grew
    assert (queue.arrived_per_s, queue.scheduled_per_s) == pytest.approx((1.0, 1 / 1.1))
    assert missed(summarize_run(requests, [], 44.0), 1.0)


@pytest.mark.parametrize(
    "gaps, services",
    [
        ([1.0] * 40, [0.5] * 40),  # nobody waited
        ([1.0] * 30 + [0.25] * 10, [0.5] * 40),  # a late rush: the server can do 2 a second
        ([0.25] * 20 + [2.5] * 20, [1.5] * 40),  # more than can be, but at first
        ([], []),
        ([1.0] * 5, [2.0] * 5),
    ],
)
def test_a_queue_that_will_be_empty_again_has_not_grown(gaps, services):
    assert not summarize_queue(one_server(gaps, services)).grew


def finished_run(delays, gaps):
    """Requests with these scheduling delays, and these gaps after each first token."""
    times = np.cumsum([0.25, *gaps])
    return [
        a_completion(i, 1, 0.0, "length", delay, delay + times) for i, delay in enumerate(delays)
    ]


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
    requests = finished_run(delays, gaps)
    assert (not missed(summarize_run(requests, [], 10.0), tbt_slo_s=0.5)) == is_met
    requests.append(a_completion(9, 1, 0.0, "abort"))
    assert missed(summarize_run(requests, [], 10.0), tbt_slo_s=0.5)


def test_goodput_counts_finished_requests_within_both_slos():
    stalled = [0.05] * 19 + [1.0]  # gaps whose mean of 0.0975 s would pass
    rows = [
        (2.0, [], "length", True),
        (0.5, [0.09, 0.05], "stop", True),
        (2.25, [], "length", False),
        (0.5, stalled, "length", False),
        (0.5, [0.05], "abort", False),
    ]
    requests = []
    for ttft_s, gaps, reason, _ in rows:
        times = np.cumsum([3.0 + ttft_s, *gaps]).tolist()
        requests.append(a_completion(0, 1, 3.0, reason, 3.0, times))
    good = sum(is_good for *_, is_good in rows)
    assert goodput(requests, 4.0, ttft_slo_s=2.0, tbt_slo_s=0.1) == good / 4.0
