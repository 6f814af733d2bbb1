"""metrics.py and chrome_trace.py: what they say of histories that were worked out by hand."""

import csv
import io
import json
import random
from collections import Counter, defaultdict

import pytest

from chrome_trace import write_chrome_trace
from metrics import find_stalls, meets_slo, percentiles, request_rows, summarize_run
from records import Completion, Iteration


def an_iteration(start, end, chunks, waiting=0, running=0, free_pages=0, **more):
    return Iteration(start, end, chunks, waiting=waiting, running=running, free_pages=free_pages, **more)


def a_completion(request_id, prompt, arrival, finish_reason=None, scheduled=None, token_times=(), **more):
    times = dict(scheduled=scheduled, token_times=list(token_times))
    return Completion(request_id, prompt, arrival, finish_reason=finish_reason, **times, **more)


def prefill(request_id, length):
    return (request_id, length, False)


def decode(request_id):
    return (request_id, 1, True)


def three_requests():
    """Request 1 makes 0 wait, 2 rides in hybrid batches, 1 is preempted and computed again, 2 is aborted; 3 waits."""
    iterations = [
        an_iteration(0.0, 1.0, [prefill(0, 4)], 0, 1, 9),
        an_iteration(1.0, 1.25, [decode(0)], 0, 1, 9),
        an_iteration(1.25, 3.25, [prefill(1, 8)], 0, 2, 7),  # as vllm does: 0 waits for all of 1
        an_iteration(3.25, 3.5, [decode(0), decode(1)], 1, 2, 7),
        an_iteration(3.5, 4.0, [decode(0), decode(1), prefill(2, 2)], 0, 3, 6, budget=4),
        an_iteration(4.0, 4.75, [decode(0), decode(1), prefill(2, 3)], 0, 3, 5, budget=5),
        an_iteration(4.75, 5.0, [decode(0), decode(2)], 1, 2, 8, preempted=(1,)),
        an_iteration(5.0, 6.0, [prefill(1, 12)], 0, 2, 6),  # prompt and 4 tokens again, while 2 waits
        an_iteration(6.0, 6.25, [decode(1), decode(2)], 1, 2, 6),
    ]
    completions = [
        a_completion(0, [7] * 4, 0.0, "length", 0.0, [1.0, 1.25, 3.5, 4.0, 4.75, 5.0], priority=1),
        a_completion(
            1, [7] * 8, 1.0, "stop", 1.25, [3.25, 3.5, 4.0, 4.75, 6.0, 6.25], preemptions=1, recomputed_tokens=11
        ),
        a_completion(2, [7] * 5, 2.0, "abort", 3.5, [4.75, 5.0, 6.25]),
        a_completion(3, [7] * 6, 5.5),
    ]
    return completions, iterations


# -----------------------------------------------------------------------------------------------------
# percentiles


def test_percentiles_are_interpolated_linearly():
    assert percentiles([3, 1, 2, 0]) == pytest.approx({"p50": 1.5, "p90": 2.7, "p99": 2.97, "max": 3})


def test_percentiles_of_nothing_are_none_and_none_is_no_value():
    nothing = {"p50": None, "p90": None, "p99": None, "max": None}
    assert percentiles([]) == percentiles([None]) == nothing
    assert percentiles([None, 5.0]) == {"p50": 5.0, "p90": 5.0, "p99": 5.0, "max": 5.0}


# -----------------------------------------------------------------------------------------------------
# generation stalls


def test_a_stall_is_a_gap_with_others_prefill_and_names_its_cause():
    assert find_stalls(*three_requests()) == [
        (0, 1.25, 3.5, 8, 1),  # the whole gap: the prefill of 1 and the decode after it
        (0, 3.5, 4.0, 2, 2),
        (0, 4.0, 4.75, 3, 2),
        (1, 3.5, 4.0, 2, 2),
        (1, 4.0, 4.75, 3, 2),  # but not 4.75 to 6.0: request 1 waited for nobody's prefill but its own
        (2, 5.0, 6.25, 12, 1),  # recomputation of others is prefill of others
    ]


def test_only_stalls_longer_than_the_threshold_are_listed():
    stalls = find_stalls(*three_requests(), longer_than=0.75)
    assert [(s.request_id, s.seconds) for s in stalls] == [(0, 2.25), (2, 1.25)]


def test_prefill_in_another_micro_batch_stalls_nobody():
    mine = [an_iteration(i, i + 1.0, [chunk]) for i, chunk in enumerate([prefill(0, 3), decode(0), decode(0)])]
    waiting = a_completion(0, [7], 0.0, token_times=[1.0, 2.0, 3.0])
    for number, stalls in ((0, 1), (1, 0)):
        other = an_iteration(1.25, 1.75, [prefill(1, 50)], micro_batch=number)
        assert len(find_stalls([waiting], sorted([*mine, other], key=lambda i: i.start))) == stalls


def test_a_stall_is_blamed_on_the_request_with_most_prefill_in_the_gap():
    def blamed(*chunks):
        iterations = [an_iteration(i, i + 1.0, [chunk]) for i, chunk in enumerate(chunks)]
        stalls = find_stalls([a_completion(0, [7], 0.0, token_times=[0.0, float(len(chunks))])], iterations)
        return [(s.caused_by, s.prefill_tokens) for s in stalls]

    assert blamed(prefill(1, 4), prefill(2, 3), prefill(2, 3), decode(0)) == [(2, 10)]
    assert blamed(prefill(1, 4), prefill(2, 4), decode(0)) == [(1, 8)]  # of equals, the first
    assert blamed(prefill(2, 4), prefill(1, 4), decode(0)) == [(2, 8)]
    assert blamed(prefill(1, 4), prefill(0, 9)) == [(1, 4)]  # its own recomputation is no part of it
    assert blamed(prefill(0, 9)) == []


def test_the_wait_for_the_first_token_is_no_stall():
    iterations = [an_iteration(0.0, 1.0, [prefill(1, 9)]), an_iteration(1.0, 2.0, [prefill(0, 3)])]
    assert find_stalls([a_completion(0, [7] * 3, 0.0, "length", 1.0, [2.0])], iterations) == []


def test_an_iteration_belongs_to_the_gap_it_began_in_even_if_its_end_was_measured_late():
    completions, iterations = three_requests()
    late = [i._replace(start=i.start + 1e-4, end=i.end + 1e-4) for i in iterations]
    assert find_stalls(completions, late) == find_stalls(completions, iterations)


def random_history(seed):
    """Nonsense, as an engine would record it: random batches, idle times, preemptions and aborts."""
    rng = random.Random(seed)
    iterations, times, now = [], defaultdict(list), 0.0
    for _ in range(rng.randint(1, 30)):
        now += rng.choice([0.0, 0.0, rng.random()])
        end = now + 0.01 + rng.random()
        chunks = []
        for request_id in rng.sample(range(6), rng.randint(1, 4)):
            is_decode = request_id in times and rng.random() < 0.6
            chunks.append((request_id, 1 if is_decode else rng.randint(1, 3), is_decode))
            if is_decode or rng.random() < 0.5:
                times[request_id].append(end)
        iterations.append(an_iteration(now, end, chunks))
        now = end
    return [a_completion(request_id, [7], 0.0, token_times=times[request_id]) for request_id in range(6)], iterations


def stalls_by_definition(completions, iterations):
    """The definition, word by word: for each gap, all iterations are searched for those that ended in it."""
    stalls = []
    for completion in completions:
        for start, end in zip(completion.token_times, completion.token_times[1:]):
            tokens = Counter()
            for iteration in iterations:
                for request_id, length, is_decode in iteration.chunks:
                    if start < iteration.end <= end and not is_decode and request_id != completion.request_id:
                        tokens[request_id] += length
            if tokens:
                cause = tokens.most_common(1)[0][0]
                stalls.append((completion.request_id, start, end, tokens.total(), cause))
    return stalls


def test_stalls_equal_their_definition_on_random_histories():
    found = 0
    for seed in range(300):
        history = random_history(seed)
        stalls = find_stalls(*history)
        assert stalls == stalls_by_definition(*history), f"seed {seed}"
        found += len(stalls)
    assert found > 1000


# -----------------------------------------------------------------------------------------------------
# the summary of a run


def test_the_summary_of_a_run_is_what_one_gets_by_hand():
    summary = summarize_run(*three_requests(), seconds=8.0, tbt_slo_s=1.25)
    expected = {
        "requests": 4, "finished": 2, "aborted": 1, "unfinished": 1, "never_scheduled": 1,
        "tokens_per_s": (4 + 8 + 5 + 6 + 6 + 3) / 8,  # without the prompt of 3, which nobody computed
        "output_tokens_per_s": (6 + 6 + 3) / 8, "requests_per_s": 2 / 8,
        "preemptions": 1, "recomputed_tokens": 11, "iterations": 9,
        "prefill_only": 3 / 9, "decode_only": 4 / 9, "hybrid": 2 / 9,
        "prefill_tokens_per_iteration": (4 + 8 + 2 + 3 + 12) / 9, "decode_tokens_per_iteration": 11 / 9,
        "tokens_per_iteration": 40 / 9, "free_pages_min": 5, "running_peak": 3,
        "running_mean": (1 * 1.25 + 2 * 2.25 + 3 * 1.25 + 2 * 1.5) / 6.25,
    }  # fmt: skip
    assert {key: summary[key] for key in expected} == pytest.approx(expected)
    # the gaps: 0.25 five times, 0.5 and 0.75 and 1.25 twice, 2.25
    assert summary["tbt_s"] == pytest.approx({"p50": 0.5, "p90": 1.25, "p99": 1.25 + 0.89, "max": 2.25})
    assert summary["ttft_s"] == pytest.approx({"p50": 2.25, "p90": 2.65, "p99": 2.74, "max": 2.75})
    assert summary["scheduling_delay_s"] == pytest.approx({"p50": 0.25, "p90": 1.25, "p99": 1.475, "max": 1.5})
    assert summary["latency_s"] == pytest.approx({"p50": 5.125, "p90": 5.225, "p99": 5.2475, "max": 5.25})


def test_the_summary_counts_stalls_and_names_the_cause_of_the_longest():
    stalls = summarize_run(*three_requests(), seconds=8.0, tbt_slo_s=1.0)["stalls"]
    assert (stalls["count"], stalls["over_slo"], stalls["total_s"]) == (6, 2, 6.0)
    assert stalls["length_s"] == pytest.approx({"p50": 0.75, "p90": 1.75, "p99": 2.2, "max": 2.25})
    longest = {"request_id": 0, "start": 1.25, "end": 3.5, "seconds": 2.25, "prefill_tokens": 8, "caused_by": 1}
    assert stalls["longest"] == longest
    assert summarize_run(*three_requests(), seconds=8.0)["stalls"]["over_slo"] is None
    assert summarize_run(*three_requests(), seconds=8.0, tbt_slo_s=1.25)["stalls"]["over_slo"] == 1  # 1.25 meets 1.25


def test_a_run_of_nothing_has_counts_but_no_measurements():
    summary = summarize_run([], [], seconds=0.0)
    nothing = percentiles([])
    assert summary["requests"] == summary["preemptions"] == summary["iterations"] == summary["stalls"]["count"] == 0
    assert summary["stalls"]["longest"] is None and summary["stalls"]["length_s"] == nothing
    assert all(summary[key] == nothing for key in ("ttft_s", "tbt_s", "scheduling_delay_s", "latency_s"))
    for key in ("tokens_per_s", "requests_per_s", "hybrid", "running_mean", "running_peak", "free_pages_min"):
        assert summary[key] is None
    with pytest.raises(ValueError, match="seconds=-1"):
        summarize_run([], [], seconds=-1)


def test_summary_and_rows_are_plain_json():
    completions, iterations = three_requests()
    report = [summarize_run(completions, iterations, 8.0), request_rows(completions, find_stalls(completions, []))]
    assert json.loads(json.dumps(report, allow_nan=False)) == report


# -----------------------------------------------------------------------------------------------------
# a row per request


def test_each_request_has_a_row_with_its_own_numbers():
    completions, iterations = three_requests()
    rows = request_rows(completions, find_stalls(completions, iterations))
    assert rows[1] == pytest.approx({
        "request_id": 1, "priority": 2, "arrival": 1.0, "prompt_tokens": 8, "output_tokens": 6,
        "finish_reason": "stop", "scheduling_delay_s": 0.25, "ttft_s": 2.25, "p50_tbt_s": 0.5,
        "p99_tbt_s": 0.75 + 0.96 * 0.5, "max_tbt_s": 1.25, "latency_s": 5.25, "stalls": 2, "longest_stall_s": 0.75,
        "caused_by": 2, "preemptions": 1, "recomputed_tokens": 11,
    })  # fmt: skip
    assert [(row["request_id"], row["stalls"], row["caused_by"]) for row in rows] == [
        (0, 3, 1), (1, 2, 2), (2, 1, 1), (3, 0, None)]  # fmt: skip
    assert rows[2]["latency_s"] is None  # aborted: its last token was not its end


def test_what_a_request_never_had_is_an_empty_field():
    completions, iterations = three_requests()
    rows = request_rows(completions, find_stalls(completions, iterations))
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0])
    writer.writeheader()
    writer.writerows(rows)
    assert text.getvalue().splitlines()[-1] == "3,2,5.5,6,0,,,,,,,,0,,,0,0"


# -----------------------------------------------------------------------------------------------------
# the condition for capacity


def finished_run(delays, gaps):
    """The completions of requests with these scheduling delays, and these gaps after each first token."""
    completions = []
    for request_id, delay in enumerate(delays):
        times = [delay + 0.25 + sum(gaps[:n]) for n in range(len(gaps) + 1)]
        completions.append(a_completion(request_id, [7], 0.0, "length", delay, times))
    return completions


@pytest.mark.parametrize(
    "delays, gaps, meets",
    [
        ([0.0, 2.0, 9.0], [0.5, 0.5], True),  # both limits may be reached; only the median delay counts
        ([0.0, 2.1, 9.0], [0.5, 0.5], False),
        ([0.0, 2.0, 9.0], [0.5] * 199 + [3.0], True),  # 1 of 200 is beyond P99
        ([0.0, 2.0, 9.0], [0.5] * 49 + [3.0], False),  # 1 of 50 is not
        ([0.0], [], True),  # one token each: no gap is too long
        ([], [], False),
    ],
)
def test_the_slo_is_met_by_p99_tbt_and_median_scheduling_delay(delays, gaps, meets):
    summary = summarize_run(finished_run(delays, gaps), [], 10.0)
    assert meets_slo(summary, tbt_slo_s=0.5) is meets


@pytest.mark.parametrize("reason, scheduled", [(None, None), ("abort", None), (None, 1.0)])
def test_a_run_that_was_cut_short_does_not_show_that_the_slo_is_met(reason, scheduled):
    completions = finished_run([0.0, 0.0, 0.0], [0.5])
    assert meets_slo(summarize_run(completions, [], 10.0), 0.5)
    completions.append(a_completion(3, [7], 0.0, reason, scheduled))
    assert not meets_slo(summarize_run(completions, [], 10.0), 0.5)


# -----------------------------------------------------------------------------------------------------
# the trace


def trace(tmp_path, runs):
    """The events that were written for the runs."""
    write_chrome_trace(tmp_path / "trace.json", runs)
    with open(tmp_path / "trace.json") as file:
        content = json.load(file)
    assert content["displayTimeUnit"] == "ms"
    return content["traceEvents"]


def slices_by_lane(events):
    """(process, lane) -> [(name, start, end)], by their labels, times in seconds."""
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = {(processes[pid], label): [] for (pid, _), label in lanes.items()}
    for e in events:
        if e["ph"] == "X":
            assert e["dur"] >= 0 and isinstance(e["ts"], int) and isinstance(e["dur"], int)  # whole microseconds
            label = processes[e["pid"]], lanes[e["pid"], e["tid"]]
            slices[label].append((e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6))
    return slices


def test_a_requests_lane_shows_its_waiting_its_chunks_and_its_decodes(tmp_path):
    slices = slices_by_lane(trace(tmp_path, {"vllm": three_requests()}))
    assert slices["vllm: requests", "request 1"] == [
        ("waiting", 1.0, 1.25),
        ("prefill chunk of 8", 1.25, 3.25),
        ("decode", 3.25, 3.5),
        ("decode", 3.5, 4.0),
        ("decode", 4.0, 4.75),
        ("waiting", 4.75, 5.0),  # preempted
        ("prefill chunk of 12", 5.0, 6.0),
        ("decode", 6.0, 6.25),
    ]
    assert slices["vllm: requests", "request 0"][0] == ("prefill chunk of 4", 0.0, 1.0)  # it never waited
    assert slices["vllm: requests", "request 3"] == [("waiting", 5.5, 6.25)]  # until the end of the run


def test_preemptions_and_ends_are_instants_on_the_requests_lane(tmp_path):
    events = trace(tmp_path, {"vllm": three_requests()})
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    instants = {(lanes[e["pid"], e["tid"]], e["name"], e["ts"] / 1e6) for e in events if e["ph"] == "i"}
    assert all(e["s"] == "t" for e in events if e["ph"] == "i")  # on one lane, not across the whole picture
    assert instants == {
        ("request 0", "finished", 5.0),
        ("request 1", "preempted", 4.75),
        ("request 1", "finished", 6.25),
        ("request 2", "aborted", 6.25),
    }


@pytest.mark.parametrize("reason, waits", [(None, [("waiting", 2.0, 3.0)]), ("abort", [])])
def test_a_preempted_request_waits_until_the_end_of_the_run_unless_it_was_aborted(tmp_path, reason, waits):
    iterations = [an_iteration(0.0, 1.0, [prefill(0, 4)]), an_iteration(2.0, 3.0, [prefill(1, 4)], preempted=(0,))]
    events = trace(tmp_path, {"vllm": ([a_completion(0, [7] * 4, 0.0, reason, 0.0, [1.0])], iterations)})
    slices = slices_by_lane(events)["vllm: requests", "request 0"]
    assert slices == [("prefill chunk of 4", 0.0, 1.0), *waits]
    instants = [(e["name"], e["ts"] / 1e6) for e in events if e["ph"] == "i"]
    assert instants == [("preempted", 2.0)] + [("aborted", 2.0)] * (reason == "abort")


def test_the_engines_lane_shows_every_iteration_with_its_curves(tmp_path):
    completions, iterations = three_requests()
    events = trace(tmp_path, {"vllm": (completions, iterations)})
    names = ["prefill", "decode", "prefill", "decode", "hybrid", "hybrid", "decode", "prefill", "decode"]
    expected = [(name, i.start, i.end) for name, i in zip(names, iterations)]
    assert slices_by_lane(events)["vllm: engine", "iterations"] == expected
    curves = defaultdict(dict)
    for e in events:
        if e["ph"] == "C":
            curves[e["name"]][e["ts"] / 1e6] = e["args"]
    assert curves == {
        "tokens": {i.start: {"prefill": i.prefill_tokens, "decode": i.decode_tokens} for i in iterations},
        "free pages": {i.start: {"pages": i.free_pages} for i in iterations},
        "requests": {i.start: {"running": i.running, "waiting": i.waiting} for i in iterations},
        "token budget": {3.5: {"tokens": 4}, 4.0: {"tokens": 5}},
    }
    [hybrid] = [e for e in events if e["ph"] == "X" and e["name"] == "hybrid" and e["ts"] == 3_500_000]
    assert hybrid["args"] == {"prefill_tokens": 2, "decodes": 2, "chunks": 3}


def test_slices_of_a_lane_never_overlap(tmp_path):
    """Also at times that are no whole microseconds, far from 0, with preemptions in between."""
    for seed in range(50):
        rng = random.Random(seed)
        completions, iterations = random_history(seed)
        moved = [i._replace(start=1e4 + i.start / 999, end=1e4 + i.end / 999) for i in iterations]
        moved = [i._replace(preempted=rng.sample(range(6), rng.randint(0, 2))) for i in moved]
        for completion in completions:
            completion.arrival, completion.finish_reason = 1e4, rng.choice([None, "stop", "abort"])
        for slices in slices_by_lane(trace(tmp_path, {"random": (completions, moved)})).values():
            assert all(end <= start for (_, _, end), (_, start, _) in zip(slices, slices[1:]))


def test_runs_share_a_file_as_processes_of_their_own_that_all_begin_at_0(tmp_path):
    completions, iterations = three_requests()
    late = (
        [a_completion(7, [7] * 3, 100.0, "length", 100.5, [101.0])],
        [an_iteration(100.5, 101.0, [prefill(7, 3)])],
    )
    slices = slices_by_lane(trace(tmp_path, {"vllm": (completions, iterations), "orca": late}))
    assert slices["orca: engine", "iterations"] == [("prefill", 0.5, 1.0)]
    assert slices["orca: requests", "request 7"] == [("waiting", 0.0, 0.5), ("prefill chunk of 3", 0.5, 1.0)]
    assert len(slices["vllm: engine", "iterations"]) == 9
    assert {lane for process, lane in slices if process == "vllm: requests"} == {f"request {i}" for i in range(4)}


def test_a_trace_of_little_or_nothing_is_still_a_trace(tmp_path):
    assert trace(tmp_path, {}) == []
    assert slices_by_lane(trace(tmp_path, {"idle": ([], [])})) == {("idle: engine", "iterations"): []}
    waiting = [a_completion(0, [7], 3.0), a_completion(1, [7], 3.0, "abort")]
    slices = slices_by_lane(trace(tmp_path, {"idle": (waiting, [])}))
    assert slices["idle: requests", "request 0"] == slices["idle: requests", "request 1"] == []
    too_late = ([a_completion(0, [7], 9.0)], [an_iteration(1.0, 2.0, [decode(5)])])
    assert slices_by_lane(trace(tmp_path, {"idle": too_late}))["idle: requests", "request 0"] == []
    unknown = slices_by_lane(trace(tmp_path, {"running": ([], [an_iteration(1.0, 2.0, [decode(5)])])}))
    assert unknown["running: requests", "request 5"] == [("decode", 0.0, 1.0)]  # it has no Completion yet
