"""chrome_trace.py: what it writes of histories that were worked out by hand, and of random ones."""

import gzip
import json
import random

from tests import test_metrics
from tests.test_metrics import a_completion, an_iteration, decode, prefill, three_requests
from views.chrome_trace import write_chrome_trace


def trace(tmp_path, runs):
    """(events, (process, lane) -> [(name, start, end)] of the slices, times in seconds)."""
    write_chrome_trace(tmp_path / "trace.json", runs)
    write_chrome_trace(tmp_path / "trace.json.gz", runs)
    text = (tmp_path / "trace.json").read_bytes()
    assert gzip.decompress((tmp_path / "trace.json.gz").read_bytes()) == text
    content = json.loads(text)
    assert content["displayTimeUnit"] == "ms"
    events = content["traceEvents"]
    timed = [(e["pid"], e["ts"]) for e in events if e["ph"] != "M"]
    assert timed == sorted(timed)
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    names = [e for e in events if e["name"] == "thread_name"]
    lanes = {(e["pid"], e["tid"]): (processes[e["pid"]], e["args"]["name"]) for e in names}
    slices = {label: [] for label in lanes.values()}
    for e in events:
        if e["ph"] in "Xi":
            e["lane"] = lanes[e["pid"], e["tid"]]
        if e["ph"] == "X":
            assert e["dur"] >= 0 and type(e["ts"]) is type(e["dur"]) is int  # whole microseconds
            slices[e["lane"]].append((e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6))
    return events, slices


def instants(events):
    """[(lane, name, time)] of what happened at once; all on one lane, not across the picture."""
    assert {e["s"] for e in events if e["ph"] == "i"} <= {"t"}
    return [(e["lane"][1], e["name"], e["ts"] / 1e6) for e in events if e["ph"] == "i"]


def test_a_requests_lane_shows_its_waiting_its_chunks_its_decodes_and_its_end(tmp_path):
    completions, iterations = three_requests()
    completions[-1].finish_reason = "abort"  # it never ran
    events, slices = trace(tmp_path, {"vllm": (completions, iterations)})
    chunks = [("waiting", 1, 1.25), ("prefill chunk of 8", 1.25, 3.25)]
    hybrid = [("stall, caused by 2", 3.5, 4), ("stall, caused by 2", 4, 4.75)]
    chunks += [("decodes", 3.25, 3.5), *hybrid]
    chunks += [("waiting", 4.75, 5), ("prefill chunk of 12", 5, 6), ("decodes", 6, 6.25)]
    assert slices["vllm: requests", "request 1"] == chunks  # preempted at 4.75
    chunks = [("prefill chunk of 4", 0, 1), ("decodes", 1, 1.25), ("stall, caused by 1", 1.25, 3.5)]
    assert slices["vllm: requests", "request 0"] == [*chunks, *hybrid, ("decodes", 4.75, 5)]
    (long,) = [e for e in events if e["name"] == "stall, caused by 1" and e["dur"] == 2.25e6]
    assert long["args"] == {"prefill_tokens": 8}
    ends = [("request 0", "finished", 5.0), ("request 1", "finished", 6.25)]
    more = [("request 1", "preempted", 4.75), ("request 2", "aborted", 6.25)]
    more.append(("request 3", "aborted", 5.5))
    assert sorted(instants(events)) == ends + more


def test_decodes_in_a_row_are_one_slice_and_take_no_more_room_than_one(tmp_path):
    batches = [
        [prefill(0, 4)],
        *[[decode(i) for i in range(8)]] * 998,
        [prefill(1, 4)],
        [decode(0)],
    ]
    iterations = [an_iteration(t, t + 1, batch) for t, batch in enumerate(batches)]
    times = [*range(1, 1000), 1001]
    run = [a_completion(0, 4, 0.0, "length", 0.0, times)], iterations
    events, slices = trace(tmp_path, {"vllm": run})
    rows = [("decodes", 1, 999), ("stall, caused by 1", 999, 1001)]
    assert slices["vllm: requests", "request 0"] == [("prefill chunk of 4", 0, 1), *rows]
    assert next(e for e in events if e["name"] == "decodes")["args"] == {"tokens": 998}
    assert (tmp_path / "trace.json").stat().st_size < 1000 * 90  # one event for each iteration


def test_a_preempted_request_that_is_aborted_ends_where_it_lost_its_pages(tmp_path):
    batches = [an_iteration(0, 1, [prefill(0, 4)]), an_iteration(2, 3, [], preempted=(0,))]
    events, _ = trace(tmp_path, {"vllm": ([a_completion(0, 4, 0.0, "abort", 0.0, [1.0])], batches)})
    assert instants(events) == [("request 0", name, 2.0) for name in ("preempted", "aborted")]


def test_the_engines_lane_shows_every_iteration_with_its_curves(tmp_path):
    completions, iterations = three_requests()
    events, slices = trace(tmp_path, {"vllm": (completions, iterations)})
    names = "prefill decode prefill decode hybrid hybrid decode prefill decode".split()
    expected = [(name, i.start, i.end) for name, i in zip(names, iterations)]
    assert slices["vllm: engine", "iterations"] == expected
    curves, last = {}, {}
    for it in iterations:
        curves |= {"tokens": {"prefill": it.prefill_tokens, "decode": it.decode_tokens}}
        curves |= {"free pages": {"pages": it.free_pages}}
        curves |= {"requests": {"running": it.running, "waiting": it.waiting}}
        curves |= {"token budget": {"tokens": it.budget}} if it.start in (3.5, 4) else {}
        seen = [e for e in events if e["ph"] == "C" and e["ts"] == 1e6 * it.start]
        assert all(last.get(e["name"]) != e["args"] for e in seen)  # it is there for a change
        last |= {e["name"]: e["args"] for e in seen}
        assert last == curves


def test_slices_of_a_lane_are_apart_or_one_in_the_other(tmp_path):
    """Also at times that are no whole microseconds, far from 0, with preemptions in between."""
    for seed in range(50):
        rng = random.Random(seed)
        completions, iterations = test_metrics.random_history(seed)
        moved = [i._replace(start=1e4 + i.start / 999, end=1e4 + i.end / 999) for i in iterations]
        moved = [i._replace(preempted=rng.sample(range(6), rng.randint(0, 2))) for i in moved]
        for c in completions:
            c.arrival, c.finish_reason = 1e4, rng.choice(["stop", "abort"])
            c.token_times = [1e4 + time / 999 for time in c.token_times]
        for slices in trace(tmp_path, {"random": (completions, moved)})[1].values():
            for i, (_, _, end) in enumerate(slices):
                assert all(b[1] >= end or b[2] <= end for b in slices[i + 1 :])


def test_runs_are_processes_and_micro_batches_are_lanes(tmp_path):
    late = an_iteration(0.5, 1.0, [prefill(7, 3)])
    runs = [a_completion(7, 3, 0.0, "length", 0.5, [1.0])], [late]
    slices = trace(tmp_path, {"vllm": three_requests(), "orca": runs})[1]
    assert slices["orca: engine", "iterations"] == [("prefill", 0.5, 1.0)]
    request = slices["orca: requests", "request 7"]
    assert request == [("waiting", 0.0, 0.5), ("prefill chunk of 3", 0.5, 1.0)]
    assert len(slices["vllm: engine", "iterations"]) == 9
    assert [*slices][1:5] == [("vllm: requests", f"request {i}") for i in range(4)]
    slices = trace(tmp_path, {"orca": ([], [late, late._replace(micro_batch=1)])})[1]
    engine = {("orca: engine", f"micro-batch {i}"): [("prefill", 0.5, 1.0)] for i in (0, 1)}
    assert slices | engine == slices and len(slices) == 3


def test_a_trace_of_little_or_nothing_is_still_a_trace(tmp_path):
    assert trace(tmp_path, {})[0] == []
    assert trace(tmp_path, {"a": ([], [])})[1] == {("a: engine", "iterations"): []}
    waiting = [a_completion(0, 1, 3.0), a_completion(1, 1, 3.0, "abort")]
    assert [*trace(tmp_path, {"a": (waiting, [])})[1].values()] == [[], [], []]
    decodes = [an_iteration(1.0, 2.0, [decode(5)])]
    slices = trace(tmp_path, {"a": ([a_completion(0, 1, 9.0)], decodes), "b": ([], decodes)})[1]
    assert slices["a: requests", "request 0"] == []  # it came too late
    assert slices["b: requests", "request 5"] == [("decodes", 1.0, 2.0)]  # it has no Completion yet
