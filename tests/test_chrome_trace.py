"""The trace that the page saves for Perfetto, held against all that a run recorded."""

import json

import pytest

from lab.measure.metrics import find_stalls
from tests.pages import SLO_S, a_load, opened_runs, simulated

RUNS = {"vllm": dict(pages=48), "sarathi-serve": dict(pages=80, pp=2)}


def us(seconds):
    """Whole microseconds."""
    return round(1e6 * round(seconds, 6))


def expected_events(run):
    """{(request, µs, name)} of all that happened to the requests of a run."""
    rows = set()
    for stall in find_stalls(run.completions, run.iterations):
        kind = "stall" if stall.seconds > SLO_S else "gap"
        rows.add((stall.request_id, us(stall.start), f"{kind}, caused by {stall.caused_by}"))
    for iteration in run.iterations:
        start = us(iteration.start)
        rows |= {(i, start, "preempted") for i in iteration.preempted}
        for i, _, length, is_decode in iteration.chunks:
            if not is_decode:
                rows.add((i, start, f"prefill chunk of {length}"))
    return rows | {(each.id, us(each.token_times[-1]), "finished") for each in run.completions}


@pytest.mark.parametrize("policy", RUNS)
def test_a_trace_holds_all_that_happened_in_a_run(policy, browser, tmp_path):
    late = [arrival._replace(time=arrival.time + 1e4 / 3) for arrival in a_load()]
    run, recorder = simulated(policy, arrivals=late, **RUNS[policy])
    with opened_runs(browser, tmp_path, {"run": recorder}) as tab:
        with tab.expect_download() as download:
            tab.click("#save")
        events = json.loads(download.value.path().read_text("utf-8"))["traceEvents"]
    names = {each["args"]["name"]: each["pid"] for each in events if each["name"] == "process_name"}
    seen = [
        (each["tid"] - 1, each["ts"], each["name"])
        for each in events
        if each["pid"] == names["run: requests"] and each["ph"] in "Xi"
    ]
    known = ("stall", "gap", "preempted", "prefill", "finished")
    expected = expected_events(run)
    assert sorted(row for row in seen if row[2].startswith(known)) == sorted(expected)
    assert sum(" caused by " in name for _, _, name in expected) > 100
