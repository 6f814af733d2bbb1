"""The trace that the page saves, held against histories by hand and all that a run recorded."""

import json
import re
from collections import defaultdict

import pytest

from lab.measure.metrics import find_stalls
from tests.helpers import with_slow
from tests.pages import LOADS, SLO_S, a_load, opened_runs, simulated


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
