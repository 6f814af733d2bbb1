"""`bench.py pipeline`: what stages that are processes did adds up, and is compared fairly."""

import json
from collections import defaultdict

import pytest

import bench
from lab.commands import pipeline
from tests.test_views import is_png

WORDS = "pipeline --pp 2 --model llama-tiny --dtype float32 --threads 1 --max-len 64 --chunk 16 "
WORDS += "--batch 3 --requests 9 --policies orca-best,sarathi-serve "


@pytest.fixture(scope="module")
def files(worlds, tmp_path_factory):
    """(report, trace, picture) of a run."""
    folder = tmp_path_factory.mktemp("pipeline")
    report, trace, picture = (folder / name for name in ("r.json", "t.json", "p.png"))
    words = f"{WORDS} --json {report} --chrome-trace {trace} --plot {picture}"
    worlds.result(program="command", tp=1, pp=2, words=words)
    return json.loads(report.read_text()), json.loads(trace.read_text()), picture


def test_what_stages_do_is_their_time_and_bubbles_are_of_three_kinds(files):
    report, _, _ = files
    assert report["runs"].keys() == {"orca-best", "sarathi-serve"}
    assert report["machine"]["tp"] == 1 and report["machine"]["pp"] == 2
    for real, simulated in report["runs"].values():
        for its in (real, simulated):
            assert sum(its[kind] for kind in pipeline.KINDS) == pytest.approx(its["bubbles_s"])
            assert its["bubbles_s"] == pytest.approx(sum(s["bubble_s"] for s in its["stages"]))
            for stage in its["stages"]:
                parts = stage["busy_s"], stage["bubble_s"], stage["idle_s"]
                assert min(parts) >= 0 and sum(parts) == pytest.approx(its["makespan_s"])
        lengths = pipeline.workload.zipf_lengths(16, 64, 0.4, 10, 9, 0)
        tokens = real["tokens_per_s"] * real["makespan_s"]
        assert tokens == pytest.approx(sum(map(sum, lengths)))
        assert tokens == pytest.approx(simulated["tokens_per_s"] * simulated["makespan_s"])


def test_batches_follow_each_other_from_stage_to_stage(files):
    report, trace, _ = files
    tracks = defaultdict(list)
    for event in trace["traceEvents"]:
        tracks[event["pid"], event["tid"]].append(event)
    sides = [f"{name}{side}" for name in report["runs"] for side in ("", ", simulated")]
    assert tracks.keys() == {(side, f"stage {n}") for side in sides for n in (1, 2)}
    for side in sides:
        first, second = tracks[side, "stage 1"], tracks[side, "stage 2"]
        assert [i["args"] for i in first] == [i["args"] for i in second]
        assert {i["name"] for i in first} == {"micro-batch 0", "micro-batch 1"}
        for before, after in zip(first, second, strict=True):
            assert after["ts"] >= before["ts"] + before["dur"] - 1  # microseconds
        for track in (first, second):
            assert all(b["ts"] >= a["ts"] + a["dur"] - 1 for a, b in zip(track, track[1:]))
            its, _ = report["runs"][side.removesuffix(", simulated")]
            if side in report["runs"]:
                stage = its["stages"][track is second]
                assert stage["busy_s"] == pytest.approx(sum(i["dur"] for i in track) / 1e6)


def test_the_beginning_is_drawn(files):
    assert is_png(files[2])


def row(makespan_s, bubble_s, busy=False):
    """What `conclude` reads of a run, simulated likewise."""
    its = {"makespan_s": makespan_s, "median_bubble_s": bubble_s, "busy": busy}
    return its, its


def test_the_conclusion_is_of_the_better_chunk():
    rows = {"orca-best": row(30, 6), "vllm": row(1, 1), "sarathi-serve:64": row(25, 1)}
    rows["sarathi-serve:256"] = row(20, 2)
    said = pipeline.conclude(rows)
    assert said.startswith("sarathi-serve:256 beside orca-best")
    assert "3.0x smaller" in said and "1.50x shorter" in said
    assert "too busy" in pipeline.conclude(rows | {"orca-best": row(30, 6, busy=True)})
    assert "needs orca-best" in pipeline.conclude({"vllm": row(1, 1)})


def test_one_stage_is_refused(capsys):
    with pytest.raises(SystemExit):
        bench.parse_args(["pipeline"])
    assert "--pp 1: a pipeline has two stages or more" in capsys.readouterr().err
