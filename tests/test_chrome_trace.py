"""The trace that the page saves, held against histories by hand and all that a run recorded."""

import json
import re
from collections import defaultdict

import pytest

from lab.measure.metrics import find_stalls
from page.records import Recorder
from tests.helpers import with_slow
from tests.pages import LOADS, SLO_S, a_load, opened_runs, simulated
from tests.test_metrics import a_completion, an_iteration, prefill, three_requests


def recorded(completions, iterations):
    """A Recorder of a history: of micro-batches 0 and 1 if there is a 1."""
    recorder = Recorder()
    micro_batches = 1 + max((each.micro_batch for each in iterations), default=0)
    recorder.settings = dict(
        policy="VLLM",
        micro_batches=micro_batches,
        chunk=256,
        max_batch=8,
        max_len=64,
        pages=64,
        page_size=16,
    )
    for c in completions:
        request = dict(id=c.id, arrival=c.arrival, prompt_len=c.prompt_len, priority=2)
        recorder.records.append({"request": request | {"max_new_tokens": 9}})
    for iteration in iterations:
        chunks = [chunk[:3] for chunk in iteration.chunks if not chunk.is_decode]
        ended = []
        for c in completions:
            end = c.token_times[-1] if c.token_times else iteration.end
            if c.finish_reason == "abort":
                end = iterations[-1].end
            if c.finish_reason and end == iteration.end:
                ended.append([c.id, c.finish_reason])
        recorder.records.append(
            iteration._asdict()
            | dict(
                chunks=chunks,
                decodes=[chunk.request_id for chunk in iteration.chunks if chunk.is_decode],
                pages=[
                    [request_id, 0, request_id] for request_id, start, _ in chunks if start == 0
                ],
                ended=ended,
                queue=[],
                why=None,
            )
        )
    return recorder


def save(tab):
    """The file that a click on the button saves."""
    with tab.expect_download() as download:
        tab.click("#save")
    assert download.value.suggested_filename == "A test.trace.json"
    return download.value.path()


def read(file):
    """(events, (process, lane) -> [(name, start, end)] of the slices, times in seconds)."""
    content = json.loads(file.read_text("utf-8"))
    assert content["displayTimeUnit"] == "ms"
    events = content["traceEvents"]
    assert len(file.read_text("utf-8").splitlines()) == 2 + max(1, len(events))  # one a line
    timed = [(e["pid"], e["ts"]) for e in events if e["ph"] != "M"]
    assert timed == sorted(timed)
    processes = {}
    lanes = {}
    slices = {}
    for e in events:
        if e["name"] == "process_name":
            processes[e["pid"]] = e["args"]["name"]
        elif e["name"] == "thread_name":
            lane = processes[e["pid"]], e["args"]["name"]
            lanes[e["pid"], e["tid"]] = lane
            slices[lane] = []
        elif e["ph"] in "Xi":
            e["lane"] = lanes[e["pid"], e["tid"]]
        if e["ph"] == "X":
            assert e["dur"] >= 0
            assert type(e["ts"]) is type(e["dur"]) is int  # whole microseconds
            slices[e["lane"]].append((e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6))
    return events, slices


def texts_of(slices):
    """{lane: "name start-end | ..."} of the slices in it."""
    return {
        lane: " | ".join(f"{name} {start:g}-{end:g}" for name, start, end in rows)
        for lane, rows in slices.items()
    }


def traced(browser, tmp_path, runs):
    """(events, texts of the lanes) of the trace of {name: (completions, iterations)}, which a page
    shows."""
    recorders = {name: recorded(*run) for name, run in runs.items()}
    with opened_runs(browser, tmp_path, recorders) as tab:
        events, slices = read(save(tab))
    return events, texts_of(slices)


@pytest.fixture(scope="module")
def two_runs(browser, tmp_path_factory):
    """The trace of three_requests, of which the last is aborted, beside that of a pipeline."""
    completions, iterations = three_requests()
    completions[-1].finish_reason = "abort"  # it never ran
    pipeline = [
        a_completion(7, 3, 0.0, "length", 0.5, [1.0]),
        a_completion(8, 3, 0.5, "length", 0.5, [1.0]),
        a_completion(9, 3, 0.75),  # it waits to the end
    ]
    batches = [
        an_iteration(0.5, 1.0, [prefill(7, 3)], micro_batch=0),
        an_iteration(0.5, 1.0, [prefill(8, 3)], micro_batch=1),
    ]
    runs = {"vllm": (completions, iterations), "orca": (pipeline, batches)}
    return traced(browser, tmp_path_factory.mktemp("trace"), runs)


def instants(events):
    """["request: name time"] of what happened at once; all on one lane, not across the picture."""
    happened = [e for e in events if e["ph"] == "i"]
    assert {e["s"] for e in happened} <= {"t"}
    return [f"{e['lane'][1]}: {e['name']} {e['ts'] / 1e6:g}" for e in happened]


def test_the_lane_of_a_request_shows_waiting_chunks_decodes_and_end(two_runs):
    events, lanes = two_runs
    assert lanes["vllm: requests", "request 0"] == (
        "prefill chunk of 4 0-1 | decodes 1-1.25 | stall, caused by 1 1.25-3.5 | "
        "stall, caused by 2 3.5-4 | stall, caused by 2 4-4.75 | decodes 4.75-5"
    )
    assert lanes["vllm: requests", "request 1"] == (  # preempted at 4.75
        "waiting 1-1.25 | prefill chunk of 8 1.25-3.25 | decodes 3.25-3.5 | "
        "stall, caused by 2 3.5-4 | stall, caused by 2 4-4.75 | "
        "waiting 4.75-5 | prefill chunk of 12 5-6 | decodes 6-6.25"
    )
    assert lanes["vllm: requests", "request 3"] == ""  # aborted, it never ran
    (long,) = [e for e in events if e["name"] == "stall, caused by 1" and e["dur"] == 2.25e6]
    assert long["args"] == {"prefill_tokens": 8}
    assert sorted(instants(events)) == [
        "request 0: finished 5",
        "request 1: finished 6.25",
        "request 1: preempted 4.75",
        "request 2: aborted 6.25",
        "request 3: aborted 5.5",  # nothing is seen of it after it came
        "request 7: finished 1",
        "request 8: finished 1",
    ]


def test_each_run_is_a_process_and_each_micro_batch_a_lane(two_runs):
    _, lanes = two_runs
    assert [*lanes][:5] == [
        ("vllm: engine", "iterations"),
        *(("vllm: requests", f"request {i}") for i in range(4)),
    ]
    assert {lane: text for lane, text in lanes.items() if lane[0].startswith("orca")} == {
        ("orca: engine", "micro-batch 0"): "prefill 0.5-1",
        ("orca: engine", "micro-batch 1"): "prefill 0.5-1",
        ("orca: requests", "request 7"): "waiting 0-0.5 | prefill chunk of 3 0.5-1",
        ("orca: requests", "request 8"): "prefill chunk of 3 0.5-1",
        ("orca: requests", "request 9"): "waiting 0.75-1",
    }


RUNS = LOADS | {"sarathi-serve in a pipeline": dict(pages=80, pp=2)}


@pytest.mark.parametrize("name", with_slow(RUNS, fast=["vllm", "sarathi-serve in a pipeline"]))
def test_a_trace_holds_all_that_happened_in_a_run(name, browser, tmp_path):
    late = [arrival._replace(time=arrival.time + 1e4 / 3) for arrival in a_load()]
    run, recorder = simulated(name.split()[0].strip(","), arrivals=late, **RUNS[name])
    with opened_runs(browser, tmp_path, {"run": recorder}) as tab:
        events, slices = read(save(tab))
    for rows in slices.values():  # are apart, or one in the other
        for i, (_, _, end) in enumerate(rows):
            assert all(b[1] >= end or b[2] <= end for b in rows[i + 1 :])

    def us(seconds):
        return round(1e6 * round(seconds, 6))

    events_of = defaultdict(list)  # by kind
    for e in events:
        kind = re.split("[ ,]", e["name"])[0]
        if "lane" in e and e["lane"][0] == "run: requests":
            events_of[kind].append((e["tid"] - 1, e["ts"], e["name"], *e.get("args", {}).values()))
    expected = defaultdict(list)
    stalls = find_stalls(run.completions, run.iterations)
    for s in stalls:
        kind = "stall" if s.seconds > SLO_S else "gap"
        name = f"{kind}, caused by {s.caused_by}"
        expected[kind].append((s.request_id, us(s.start), name, s.prefill_tokens))
    decodes = set()
    for it in run.iterations:
        start = us(it.start)
        expected["preempted"] += [(i, start, "preempted") for i in it.preempted]
        for i, _, length, is_decode in it.chunks:
            if is_decode:
                decodes.add((i, it.end))
            else:
                expected["prefill"].append((i, start, f"prefill chunk of {length}"))
    for c in run.completions:
        row = c.id, us(c.token_times[-1]), "finished", c.finish_reason
        expected["finished"].append(row)
    for kind, rows in expected.items():
        assert sorted(events_of[kind]) == sorted(rows)
    stalled = {(s.request_id, s.end) for s in stalls}
    assert sum(row[-1] for row in events_of["decodes"]) == len(decodes - stalled)
    assert len(stalls) > 100
