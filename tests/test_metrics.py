"""metrics.py: what it says of histories that were worked out by hand, and of random ones."""

import csv
import io
import json
import random
from collections import Counter, defaultdict
from dataclasses import asdict, astuple, replace
from itertools import pairwise

import numpy as np
import pytest

from cli.options import plain
from lab.measure.metrics import (
    Percentiles,
    Stall,
    find_stalls,
    missed,
    percentiles,
    request_rows,
    summarize_queue,
    summarize_run,
)
from policies.observers import ChunkRecord, Iteration
from request import Completion


def an_iteration(start, end, chunks, waiting=0, running=0, free_pages=0, **more):
    """An Iteration that was launched when it began."""
    return Iteration(start, end, chunks, start, waiting, running, free_pages, **more)


def a_completion(request_id, prompt_len, arrival, reason=None, scheduled=None, times=(), **more):
    """A Completion whose prompt and output are of no interest."""
    more |= dict(finish_reason=reason, scheduled=scheduled, token_times=list(times))
    return Completion(request_id, [7] * prompt_len, arrival, **more)


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


def test_a_stall_is_a_gap_with_others_prefill_and_names_its_cause():
    stalls = [
        (0, 1.25, 3.5, 8, 1, 2.25),  # the whole gap: the prefill of 1 and the decode after it
        (0, 3.5, 4.0, 2, 2, 0.5),
        (0, 4.0, 4.75, 3, 2, 0.75),
        (1, 3.5, 4.0, 2, 2, 0.5),
        (1, 4.0, 4.75, 3, 2, 0.75),  # but not 4.75 to 6.0: nobody prefilled but itself
        (2, 5.0, 6.25, 12, 1, 1.25),  # recomputation of others is prefill of others
    ]
    stalls = [Stall(*fields) for fields in stalls]
    completions, iterations = three_requests()
    assert find_stalls(completions, iterations) == stalls
    assert [s.seconds for s in find_stalls(completions, iterations)][:3] == [2.25, 0.5, 0.75]
    # an iteration belongs to the gap that it began in, even if its end was measured late
    late = [i._replace(start=i.start + 1e-4, end=i.end + 1e-4) for i in iterations]
    assert find_stalls(completions, late) == stalls
    assert find_stalls(completions, []) == find_stalls([], iterations) == []
    # the wait for the first token is none
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
            for iteration in iterations:
                for request_id, _, length, is_decode in iteration.chunks:
                    inside = start < iteration.end <= end
                    if inside and not is_decode and request_id != c.request_id:
                        tokens[request_id] += length
            if tokens:
                cause = tokens.most_common(1)[0][0]
                stall = Stall(c.request_id, start, end, tokens.total(), cause, end - start)
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
    stalls = summary.stalls
    assert stalls.longest == Stall(
        request_id=0, start=1.25, end=3.5, prefill_tokens=8, caused_by=1, seconds=2.25
    )
    assert (stalls.count, stalls.over_slo) == (6, None)
    assert marks(stalls.length_s) == (0.75, 1.75, 2.2, 2.25)
    summary_fields = dict(p50_tbt_s=0.5, p99_tbt_s=2.14, p50_ttft_s=2.25, p99_ttft_s=2.74)
    summary_fields |= dict(longest_stall_s=2.25, p50_delay_s=0.25)
    report = plain(summary)
    assert {key: report[key] for key in summary_fields} == pytest.approx(summary_fields)
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
    with_iterations = summarize_run(completions, iterations, 8.0, tbt_slo_s=1.0)
    summary = summarize_run(completions, [], 8.0, tbt_slo_s=1.0)
    for key in ("preemptions", "recomputed_tokens", "cached_tokens", "cached"):
        assert getattr(summary, key) is None is not getattr(with_iterations, key)
    for key in ("count", "over_slo", "longest"):
        assert getattr(summary.stalls, key) is None is not getattr(with_iterations.stalls, key)
    assert summary.longest_stall_s is None
    quiet = summarize_run(completions, iterations[:1], 8.0)
    assert quiet.longest_stall_s == quiet.stalls.count == 0
    assert (summary.ttft_s, summary.tbt_s) == (with_iterations.ttft_s, with_iterations.tbt_s)
    for row in request_rows(completions, []):
        none = "stalls longest_stall_s caused_by preemptions recomputed_tokens cached_tokens"
        assert {row[key] for key in none.split()} == {None}


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
    rows = request_rows(completions, iterations)
    assert summary.cached_tokens == 20 and [row["cached_tokens"] for row in rows] == [0, 20, 0]
    assert summary.cached == pytest.approx(20 / (10 + 10 + 13))


def test_each_request_has_a_row_with_its_own_numbers():
    completions, iterations = three_requests()
    rows = list(request_rows(completions, iterations))
    assert rows[1] == pytest.approx({
        "request_id": 1, "class": "normal", "arrival": 1.0, "prompt_tokens": 8, "output_tokens": 6,
        "finish_reason": "stop", "scheduling_delay_s": 0.25, "ttft_s": 2.25, "p50_tbt_s": 0.5,
        "p99_tbt_s": 0.75 + 0.96 * 0.5, "max_tbt_s": 1.25, "latency_s": 5.25, "stalls": 2,
        "longest_stall_s": 0.75, "caused_by": 2, "preemptions": 1, "recomputed_tokens": 11,
        "cached_tokens": 0,
    })  # fmt: skip
    blamed = [(row["request_id"], row["stalls"], row["caused_by"]) for row in rows]
    assert blamed == [(0, 3, 1), (1, 2, 2), (2, 1, 1), (3, 0, None)]
    assert rows[2]["latency_s"] is None  # aborted: its last token was not its end
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0])
    writer.writeheader()
    writer.writerows(rows)
    last = "3,normal,5.5,6,0,,,,,,,,0,,,0,0,0"  # empty: what it never had
    assert text.getvalue().splitlines()[-1] == last
    queue = summarize_queue(one_server([1.0] * 40, [1.1] * 40))
    summary = summarize_run(completions, iterations, 8.0)
    text = json.dumps([summary, rows, queue], allow_nan=False, default=plain)
    assert json.loads(text) == [{**asdict(summary), **numbers_of(summary)}, rows, asdict(queue)]


def numbers_of(summary):
    """Those that JSON and tables have by names of their own."""
    names = ("p50_ttft_s", "p99_ttft_s", "p50_tbt_s", "p99_tbt_s", "p50_delay_s", "longest_stall_s")
    return {name: getattr(summary, name) for name in names}


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


def test_a_queue_grows_where_more_arrive_than_are_scheduled():
    steady = [1.0] * 40
    late_rush = [1.0] * 30 + [0.25] * 10
    grows = summarize_queue(one_server(steady, [1.1] * 40))
    assert grows.grew
    assert (grows.arrived_per_s, grows.scheduled_per_s) == pytest.approx((1.0, 1 / 1.1))
    delays = grows.second_quarter_s, grows.last_quarter_s
    assert delays == pytest.approx((14.5 * 0.1, 34.5 * 0.1))  # of requests 10 … 19, 30 … 39
    message = "the queue grew: median delay of 1.45 s in the second quarter and 3.45 s in the last"
    assert missed(summarize_run(one_server(steady, [1.1] * 40), [], 44.0), 1.0) == message
    shuffled = one_server(steady, [1.1] * 40)
    for one, other in zip(shuffled[::2], shuffled[1::2], strict=True):  # not first come first
        one.scheduled, other.scheduled = other.scheduled, one.scheduled
    assert summarize_queue(shuffled).grew
    idle = summarize_queue(one_server(steady, [0.5] * 40))
    assert not idle.grew and idle.scheduled_per_s is None  # nobody waited
    rush = summarize_queue(one_server(late_rush, [0.5] * 40))  # the server can do 2 a second
    assert rush.last_quarter_s > rush.second_quarter_s + 1 and not rush.grew
    drained = one_server([0.25] * 20 + [2.5] * 20, [1.5] * 40)  # more than can be, but at first
    assert not summarize_queue(drained).grew
    together = one_server([0.0] * 40, [1.0] * 40)
    assert summarize_queue(together).arrived_per_s is None  # all at once: at no rate
    assert not any(summarize_queue(one_server(steady[:n], [2.0] * n)).grew for n in range(6))


def all_at_once(rate, count=80, seconds_of_work=0.25):
    """Completions of requests that all run at once on a server which can do 4 a second.

    They arrive at `rate`, have 8 output tokens each, and the server does them in turn, token by
    token, without letting one wait for its first."""
    arrivals = [i / rate for i in range(count)]
    times = [[] for _ in arrivals]
    now = 0.0
    while not all(len(known) == 8 for known in times):
        ready = [i for i in range(count) if arrivals[i] <= now and len(times[i]) < 8]
        if not ready:
            now = min(time for time, known in zip(arrivals, times, strict=True) if not known)
            continue
        i = min(ready, key=lambda i: len(times[i]))
        now += seconds_of_work / 8
        times[i].append(now)
    return [
        a_completion(i, 0, arrival, "length", arrival, known)
        for i, (arrival, known) in enumerate(zip(arrivals, times, strict=True))
    ]


@pytest.mark.parametrize("rate, served", [(1.0, 1.0), (3.5, 3.5), (8.0, 4.0), (30.0, 4.0)])
def test_what_is_served_is_counted_while_requests_arrive(rate, served):
    summary = summarize_run(all_at_once(rate), [], 100.0)
    assert summary.queue.arrived_per_s == pytest.approx(rate)
    assert summary.queue.served_per_s == pytest.approx(served, rel=0.15)
    assert not summary.queue.grew  # nobody waited to be scheduled
    text = f"{summary.queue.served_per_s:,.3g} of {rate:.3g} requests a second served"
    assert missed(summary, tbt_slo_s=100.0) == (text if rate > 4 else "")
    assert missed(summary, tbt_slo_s=100.0, rate_counts=False) == ""


def test_chats_and_few_requests_have_no_rate_that_is_served():
    assert summarize_queue(all_at_once(30.0), offered_per_s=30.0).served_per_s is None
    assert summarize_queue(all_at_once(30.0)[:7]).served_per_s is None
    assert summarize_queue(all_at_once(30.0)[:8]).served_per_s is not None
    together = [replace(completion, arrival=0.0) for completion in all_at_once(30.0)]
    assert summarize_queue(together).served_per_s is None


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


@pytest.mark.parametrize("reason, scheduled", [(None, None), ("abort", None), (None, 1.0)])
def test_a_run_that_was_cut_short_does_not_show_that_the_slo_is_met(reason, scheduled):
    completions = [*finished_run([0.0] * 3, [0.5]), a_completion(3, 1, 0.0, reason, scheduled)]
    assert not missed(summarize_run(completions[:3], [], 10.0), 0.5)
    assert missed(summarize_run(completions, [], 10.0), 0.5) == "3 of 4 requests finished"
