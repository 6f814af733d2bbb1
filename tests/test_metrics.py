"""metrics.py: what it says of histories that were worked out by hand, and of random ones."""

import json
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


def test_an_iteration_belongs_to_the_gap_that_it_began_in():
    """Even if its end was measured late. The wait for a first token is no gap."""
    completions, iterations = three_requests()
    late = [i._replace(start=i.start + 1e-4, end=i.end + 1e-4) for i in iterations]
    assert find_stalls(completions, late) == find_stalls(completions, iterations)
    iterations = [an_iteration(0.0, 1.0, [prefill(1, 9)]), an_iteration(1.0, 2.0, [prefill(0, 3)])]
    assert find_stalls([a_completion(0, 3, 0.0, "length", 1.0, [2.0])], iterations) == []


def test_prefill_in_another_micro_batch_stalls_nobody():
    chunks = [prefill(0, 3), decode(0), decode(0)]
    waiting = a_completion(0, 1, 0.0, times=[1.0, 2.0, 3.0])
    for mine, other, stalls in ((0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 1)):
        iterations = [an_iteration(i, i + 1.0, [c], micro_batch=mine) for i, c in enumerate(chunks)]
        iterations.append(an_iteration(1.25, 1.75, [prefill(1, 50)], micro_batch=other))
        assert len(find_stalls([waiting], sorted(iterations, key=lambda i: i.start))) == stalls


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


def test_a_run_of_nothing_has_counts_but_no_measurements():
    summary = summarize_run([], [], seconds=0.0)
    assert (summary.requests, summary.finished, summary.iterations) == (0, 0, 0)
    times = [summary.ttft_s, summary.tbt_s, summary.scheduling_delay_s, summary.latency_s]
    assert [summary.stalls.length_s, *times] == [percentiles([])] * 5
    rates = ("tokens_per_s", "hybrid", "running_mean", "tokens_per_iteration", "running_peak")
    assert {getattr(summary, key) for key in rates} == {None}


def test_metrics_of_iterations_are_unknown_without_iterations():
    completions, iterations = three_requests()
    known = summarize_run(completions, iterations, 8.0, tbt_slo_s=1.0)
    summary = summarize_run(completions, [], 8.0, tbt_slo_s=1.0)
    names = ("preemptions", "recomputed_tokens", "cached_tokens", "cached", "longest_stall_s")
    assert {getattr(summary, name) for name in names} == {None}
    stalls = summary.stalls
    assert stalls.count is stalls.over_slo is stalls.longest is None
    assert (summary.ttft_s, summary.tbt_s) == (known.ttft_s, known.tbt_s)
    quiet = summarize_run(completions, iterations[:1], 8.0)
    assert quiet.longest_stall_s == quiet.stalls.count == 0


def test_the_cached_share_is_relative_to_the_prompt_tokens():
    """1 finds 8 tokens of its prompt, and after a preemption 12 of the 13 that it had."""
    iterations = [an_iteration(0.0, 1.0, [prefill(0, 10), prefill(1, 2, 8)])]
    lost = dict(preemptions=1, recomputed_tokens=13, cached_tokens=8 + 12)
    completions = [
        a_completion(0, 10, 0.0, "length", 0.0, [1.0]),
        a_completion(1, 10, 0.0, "length", 0.0, [1.0, 2.0], **lost),
        a_completion(2, 10, 0.0, "abort"),  # which waited
    ]
    summary = summarize_run(completions, iterations, 2.0)
    assert summary.cached_tokens == 20
    assert summary.cached == pytest.approx(20 / (10 + 10 + 13))


def test_a_summary_is_json():
    completions, iterations = three_requests()
    queue = summarize_queue(one_server([1.0] * 40, [1.1] * 40))
    json.dumps([summarize_run(completions, iterations, 8.0), queue], allow_nan=False, default=plain)


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
    message = "the queue grew: 1 requests a second arrive, 0.909 are scheduled"
    assert missed(summarize_run(completions, [], 44.0), 1.0) == message
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


def test_a_rate_that_does_not_show_is_none():
    together = summarize_queue(one_server([0.0] * 40, [1.0] * 40))
    assert together.arrived_per_s is together.served_per_s is None
    assert summarize_queue(one_server(STEADY, [0.5] * 40)).scheduled_per_s is None  # none waited
    assert summarize_queue(half_served()[:7]).served_per_s is None


def half_served():
    """Completions of 8 requests, a second apart. Of 8 tokens each, 5 of them output, the first four
    get all until the last one comes, the fifth gets two of its output, the others get none."""
    last = 7.0
    times = [[i + 0.5 + n / 10 for n in range(5)] for i in range(4)]
    times += [[6.9, last, 8.0, 9.0, 10.0]] + [[8.0, 9.0, 10.0, 11.0, 12.0]] * 3
    return [a_completion(i, 3, float(i), "length", float(i), times[i]) for i in range(8)]


def test_what_is_served_is_counted_while_requests_arrive():
    summary = summarize_run(half_served(), [], 100.0)
    assert summary.queue.arrived_per_s == 1.0
    assert summary.queue.served_per_s == pytest.approx((4 + (3 + 2) / 8) / 7)
    assert missed(summary, tbt_slo_s=100.0) == "0.661 of 1 requests a second served"
    assert missed(summary, tbt_slo_s=100.0, rate_counts=False) == ""
    steady = summarize_run(one_server(STEADY, [0.5] * 40), [], 100.0)
    assert steady.queue.served_per_s == pytest.approx(1.0, rel=0.03)
    assert missed(steady, tbt_slo_s=100.0) == ""


@pytest.mark.parametrize("load, share", [(0.8, 0.0), (0.9, 0.0), (1.1, 1.0), (1.25, 1.0)])
def test_an_overloaded_queue_is_told_from_a_busy_one(load, share):
    """Poisson arrivals, services that vary like the lengths of requests, 240 of them, 20 times."""
    num_grown = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        gaps = rng.exponential(size=240)
        services = rng.lognormal(0.0, 0.7, size=240)
        completions = one_server(gaps / gaps.mean(), load * services / services.mean())
        num_grown += summarize_queue(completions).grew
    assert num_grown / 20 == pytest.approx(share, abs=0.1)


def finished_run(delays, gaps):
    """Completions with these scheduling delays, and these gaps after each first token."""
    times = np.cumsum([0.25, *gaps])
    which = enumerate(delays)
    return [a_completion(i, 1, 0.0, "length", delay, delay + times) for i, delay in which]


@pytest.mark.parametrize(
    "delays, gaps, what",
    [
        ([0.0, 2.0, 9.0], [0.5, 0.5], ""),  # limits may be reached; the median delay counts
        ([0.0, 2.01, 9.0], [0.5, 0.5], "median delay of 2.01 s"),
        ([0.0, 2.0, 9.0], [0.5] * 199 + [3.0], ""),  # 1 of 200 is beyond P99
        ([0.0, 2.0, 9.0], [0.5] * 9 + [3.0] * 2, "P99 TBT of 3.000 s"),
        ([0.0, 2.5, 9.0], [3.0], "P99 TBT of 3.000 s, median delay of 2.50 s"),
        ([0.0], [], ""),  # one token each: no gap is too long
        ([], [], "0 of 0 requests finished"),
    ],
)
def test_the_slo_is_met_by_p99_tbt_and_median_scheduling_delay(delays, gaps, what):
    summary = summarize_run(finished_run(delays, gaps), [], 10.0)
    assert missed(summary, tbt_slo_s=0.5) == what


@pytest.mark.parametrize("reason", [None, "abort"])
def test_a_request_that_did_not_finish_does_not_meet_the_slo(reason):
    completions = [*finished_run([0.0] * 3, [0.5]), a_completion(3, 1, 0.0, reason)]
    assert missed(summarize_run(completions, [], 10.0), 0.5) == "3 of 4 requests finished"
