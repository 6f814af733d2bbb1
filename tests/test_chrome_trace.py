"""chrome_trace.py: what it writes of histories that were worked out by hand, and of random ones."""

import json
import random

import pytest

from tests import test_metrics
from tests.test_metrics import a_completion, an_iteration, decode, prefill, three_requests
from tests.test_pipelines import A_PIPELINE, two_stages
from views.chrome_trace import write_chrome_trace, write_pipeline_trace


def trace(tmp_path, runs, write=write_chrome_trace):
    """(events, (process, lane) -> [(name, start, end)] of the slices, times in seconds)."""
    write(tmp_path / "trace.json", runs)
    content = json.loads((tmp_path / "trace.json").read_text())
    assert content["displayTimeUnit"] == "ms"
    events = content["traceEvents"]
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
    events, slices = trace(tmp_path, {"vllm": three_requests()})
    chunks = [("waiting", 1, 1.25), ("prefill chunk of 8", 1.25, 3.25)]
    chunks += [("decode", 3.25, 3.5), ("decode", 3.5, 4), ("decode", 4, 4.75)]
    chunks += [("waiting", 4.75, 5), ("prefill chunk of 12", 5, 6), ("decode", 6, 6.25)]
    assert slices["vllm: requests", "request 1"] == chunks  # preempted at 4.75
    assert slices["vllm: requests", "request 0"][0] == ("prefill chunk of 4", 0.0, 1.0)
    assert slices["vllm: requests", "request 3"] == [("waiting", 5.5, 6.25)]  # until the end
    ends = [("request 0", "finished", 5.0), ("request 1", "finished", 6.25)]
    more = [("request 1", "preempted", 4.75), ("request 2", "aborted", 6.25)]
    assert sorted(instants(events)) == ends + more


def test_a_preempted_request_waits_until_the_run_ends_unless_it_was_aborted(tmp_path):
    batches = [an_iteration(0, 1, [prefill(0, 4)]), an_iteration(2, 3, [], preempted=(0,))]
    for reason, waits, seen in ((None, [("waiting", 2, 3)], []), ("abort", [], ["aborted"])):
        run = [a_completion(0, 4, 0.0, reason, 0.0, [1.0])], batches
        events, slices = trace(tmp_path, {"vllm": run})
        assert slices["vllm: requests", "request 0"] == [("prefill chunk of 4", 0, 1), *waits]
        assert instants(events) == [("request 0", name, 2.0) for name in ("preempted", *seen)]


def test_the_engines_lane_shows_every_iteration_with_its_curves(tmp_path):
    completions, iterations = three_requests()
    events, slices = trace(tmp_path, {"vllm": (completions, iterations)})
    names = "prefill decode prefill decode hybrid hybrid decode prefill decode".split()
    expected = [(name, i.start, i.end) for name, i in zip(names, iterations)]
    assert slices["vllm: engine", "iterations"] == expected
    for it in iterations:
        curves = {"tokens": {"prefill": it.prefill_tokens, "decode": it.decode_tokens}}
        curves |= {"free pages": {"pages": it.free_pages}}
        curves |= {"requests": {"running": it.running, "waiting": it.waiting}}
        curves |= {"token budget": {"tokens": it.budget}} if it.start in (3.5, 4) else {}
        seen = [e for e in events if e["ph"] == "C" and e["ts"] == 1e6 * it.start]
        assert {e["name"]: e["args"] for e in seen} == curves and len(seen) == len(curves)
    hybrid = next(e for e in events if e["name"] == "hybrid")
    assert hybrid["args"] == {"prefill_tokens": 2, "decodes": 2, "chunks": 3}


def test_slices_of_a_lane_never_overlap(tmp_path):
    """Also at times that are no whole microseconds, far from 0, with preemptions in between."""
    for seed in range(50):
        rng = random.Random(seed)
        completions, iterations = test_metrics.random_history(seed)
        moved = [i._replace(start=1e4 + i.start / 999, end=1e4 + i.end / 999) for i in iterations]
        moved = [i._replace(preempted=rng.sample(range(6), rng.randint(0, 2))) for i in moved]
        for c in completions:
            c.arrival, c.finish_reason = 1e4, rng.choice([None, "stop", "abort"])
        for slices in trace(tmp_path, {"random": (completions, moved)})[1].values():
            assert all(a[2] <= b[1] for a, b in zip(slices, slices[1:]))


def test_runs_are_processes_that_begin_at_0_and_micro_batches_are_lanes(tmp_path):
    late = an_iteration(100.5, 101.0, [prefill(7, 3)])
    runs = [a_completion(7, 3, 100.0, "length", 100.5, [101.0])], [late]
    slices = trace(tmp_path, {"vllm": three_requests(), "orca": runs})[1]
    assert slices["orca: engine", "iterations"] == [("prefill", 0.5, 1.0)]
    request = slices["orca: requests", "request 7"]
    assert request == [("waiting", 0.0, 0.5), ("prefill chunk of 3", 0.5, 1.0)]
    assert len(slices["vllm: engine", "iterations"]) == 9
    assert [*slices][1:5] == [("vllm: requests", f"request {i}") for i in range(4)]
    slices = trace(tmp_path, {"orca": ([], [late, late._replace(micro_batch=1)])})[1]
    engine = {("orca: engine", f"micro-batch {i}"): [("prefill", 0, 0.5)] for i in (0, 1)}
    assert slices | engine == slices and len(slices) == 3


def test_a_trace_of_little_or_nothing_is_still_a_trace(tmp_path):
    assert trace(tmp_path, {})[0] == trace(tmp_path, {"a": []}, write_pipeline_trace)[0] == []
    assert trace(tmp_path, {"a": ([], [])})[1] == {("a: engine", "iterations"): []}
    waiting = [a_completion(0, 1, 3.0), a_completion(1, 1, 3.0, "abort")]
    assert [*trace(tmp_path, {"a": (waiting, [])})[1].values()] == [[], [], []]
    decodes = [an_iteration(1.0, 2.0, [decode(5)])]
    slices = trace(tmp_path, {"a": ([a_completion(0, 1, 9.0)], decodes), "b": ([], decodes)})[1]
    assert slices["a: requests", "request 0"] == []  # it came too late
    assert slices["b: requests", "request 5"] == [("decode", 0.0, 1.0)]  # it has no Completion yet


def test_slices_of_a_stage_add_up_to_its_work_and_bubbles(tmp_path):
    slices = trace(tmp_path, two_stages(), write_pipeline_trace)[1]
    names = ["orca-best: replica 1", "sarathi-serve: replica 1"]
    assert [*slices] == [(name, stage) for name in names for stage in ("stage 1", "stage 2")]
    for (name, stage), its in slices.items():
        assert all(a[2] <= b[1] for a, b in zip(its, its[1:]))
        own = [run for run in two_stages()[name.split(":")[0]] if run.stage == int(stage[-1]) - 1]
        bubbles = [run.bubble for run in own if run.bubble]
        for seconds, is_bubble in ((bubbles, True), ([r.end - r.start for r in own], False)):
            found = [end - start for kind, start, end in its if (kind == "bubble") == is_bubble]
            assert len(found) == len(seconds)
            assert sum(found) == pytest.approx(sum(seconds), abs=1e-6 * len(own))


def test_a_slice_says_what_was_in_the_batch_and_replicas_are_processes(tmp_path):
    first, second, last = A_PIPELINE
    second = second._replace(bubble=1.000001)  # as if by rounding: it begins where first ends
    last = last._replace(replica=1, stage=1, micro_batch=3)
    events, slices = trace(tmp_path, {"orca": [first, second, last]}, write_pipeline_trace)
    one, two = ("orca: replica 1", "stage 1"), ("orca: replica 2", "stage 2")
    assert slices.pop(one) == [("prefill", 0, 4), ("bubble", 4, 5), ("hybrid", 5, 9)]
    assert slices == {two: [("bubble", 9, 11), ("decode", 11, 12)]}
    keys = "prefill_tokens", "decodes", "micro_batch"
    seen = [e["args"] for e in events if e["ph"] == "X" and e["name"] != "bubble"]
    assert seen == [dict(zip(keys, values)) for values in ((4, 0, 0), (7, 1, 0), (0, 5, 3))]
