"""`bench.py pipeline`: what stages that are processes did adds up, and is compared fairly."""

import json
from collections import defaultdict
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

import bench
from lab.commands import pipeline
from lab.commands.pipeline import PipelineRow
from lab.measure.workload import zipf_lengths
from lab.simulator.pipeline import PipelineSummary, StageSummary
from parallel.shard import Shard
from tests.helpers import machine_info
from tests.test_views import is_png

pytestmark = pytest.mark.timeout(900)  # the first test waits for processes
ARGV = (
    "pipeline --pp 2 --preset llama-tiny --dtype float32 --threads 1 --max-len 64 --chunk 16 "
    "--batch 3 --requests 9 --policies orca-best,sarathi-serve"
)


@pytest.fixture(scope="module")
def files(worlds, tmp_path_factory):
    """(report, trace, picture) of a run."""
    folder = tmp_path_factory.mktemp("pipeline")
    report, trace, picture = (folder / name for name in ("r.json", "t.json", "p.png"))
    argv = f"{ARGV} --json {report} --chrome-trace {trace} --plot {picture}"
    worlds.result(program="command", tp=1, pp=2, words=argv, busy=True)
    return json.loads(report.read_text()), json.loads(trace.read_text()), picture


def test_what_stages_do_is_their_time_and_bubbles_are_of_three_kinds(files):
    report, _, _ = files
    assert report["runs"].keys() == {"orca-best", "sarathi-serve"}
    assert report["machine"]["tp"] == 1 and report["machine"]["pp"] == 2
    assert (report["options"]["pp"], report["options"]["preset"]) == (2, "llama-tiny")
    lengths = zipf_lengths(16, 64, 0.4, 10, 9, 0)
    for real, simulated in report["runs"].values():
        for row in (real, simulated):
            kinds = [row[kind] for kind in ("PB1", "PB2", "PB3")]
            assert sum(kinds) == pytest.approx(row["bubbles_s"])
            bubbles = [stage["bubble_s"] for stage in row["stages"]]
            assert row["bubbles_s"] == pytest.approx(sum(bubbles))
            for stage in row["stages"]:
                parts = stage["busy_s"], stage["bubble_s"], stage["idle_s"]
                assert min(parts) >= 0 and sum(parts) == pytest.approx(row["makespan_s"])
            tokens = row["tokens_per_s"] * row["makespan_s"]
            assert tokens == pytest.approx(sum(map(sum, lengths)))
        assert all(stage.keys() >= {"own", "sums"} for stage in real["stages"])


def test_batches_follow_each_other_from_stage_to_stage(files):
    report, trace, _ = files
    tracks = defaultdict(list)
    for event in trace["traceEvents"]:
        tracks[event["pid"], event["tid"]].append(event)
    names = [f"{name}{side}" for name in report["runs"] for side in ("", ", simulated")]
    assert tracks.keys() == {(name, f"stage {n}") for name in names for n in (1, 2)}
    for name in names:
        first = tracks[name, "stage 1"]
        second = tracks[name, "stage 2"]
        assert [event["args"] for event in first] == [event["args"] for event in second]
        assert {event["name"] for event in first} == {"micro-batch 0", "micro-batch 1"}
        for before, after in zip(first, second, strict=True):
            assert after["ts"] >= before["ts"] + before["dur"] - 1  # microseconds
        for number, track in enumerate((first, second)):
            for before, after in pairwise(track):
                assert after["ts"] >= before["ts"] + before["dur"] - 1
            if name in report["runs"]:
                real, _ = report["runs"][name]
                busy_s = real["stages"][number]["busy_s"]
                assert busy_s == pytest.approx(sum(event["dur"] for event in track) / 1e6)


def test_the_beginning_is_drawn(files):
    assert is_png(files[2])


def row(makespan_s, bubble_s, busy=False):
    """A run of one stage, simulated likewise."""
    summary = PipelineSummary(
        makespan_s=makespan_s,
        tokens_per_s=100.0,
        median_bubble_s=bubble_s,
        kinds_s={"PB1": bubble_s, "PB2": 0.0, "PB3": 0.0},
        stages=[StageSummary(busy_s=1.0, bubble_s=bubble_s, idle_s=0.0)],
        busy=busy,
    )
    return PipelineRow(real=summary, simulated=summary)


def test_the_conclusion_is_of_the_better_chunk():
    rows = {"orca-best": row(30, 6), "vllm": row(1, 1), "sarathi-serve:64": row(25, 1)}
    rows["sarathi-serve:256"] = row(20, 2)
    conclusion = pipeline.conclude(rows)
    assert conclusion.startswith("sarathi-serve:256 beside orca-best")
    assert "3.0x smaller" in conclusion and "1.50x shorter" in conclusion
    assert "too busy" in pipeline.conclude(rows | {"orca-best": row(30, 6, busy=True)})
    assert "needs orca-best" in pipeline.conclude({"vllm": row(1, 1)})


def test_the_tables_have_a_row_for_each_policy_and_each_stage(capsys):
    pipeline.print_rows({"orca-best": row(30, 6), "vllm": row(20, 0, busy=True)})
    lines = capsys.readouterr().out.splitlines()
    policies = [line for line in lines if line.startswith(("| orca-best   |", "| vllm (busy) |"))]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in policies]
    assert cells[0][:8] == ["orca-best", "100", "30.00", "30.00", "+0%", "6.00", "6.00", "+0%"]
    assert cells[1][:8] == ["vllm (busy)", "100", "20.00", "20.00", "+0%", "0.00", "0.00", "-"]
    assert any(line.startswith("| vllm (busy), 1 ") for line in lines)


def test_one_stage_is_refused(capsys):
    with pytest.raises(SystemExit):
        bench.parse_args(["pipeline"])
    assert "--pp 1: a pipeline has two stages or more" in capsys.readouterr().err


def test_an_interrupt_keeps_the_policies_that_are_done(tmp_path, monkeypatch):
    model = object.__new__(Shard)
    model.config = SimpleNamespace(vocab_size=61)
    stage_runs = [SimpleNamespace(stage=0)]
    done = SimpleNamespace(config=None, summary=row(30, 6).real, stage_runs=stage_runs)
    simulated = Mock(stage_runs=stage_runs)
    monkeypatch.setattr(pipeline, "resolve_model", lambda options: options)
    monkeypatch.setattr(pipeline, "load_model", lambda *_, **__: model)
    monkeypatch.setattr(pipeline, "measure_machine", lambda *_: machine_info())
    monkeypatch.setattr(pipeline, "fit_cost", lambda *_: SimpleNamespace(hop_s=0.0))
    monkeypatch.setattr(pipeline, "serve_pipeline", Mock(side_effect=[done, KeyboardInterrupt]))
    monkeypatch.setattr(pipeline, "simulate", lambda *_: simulated)
    monkeypatch.setattr(pipeline, "summarize", lambda *_: row(30, 6).simulated)
    with pytest.raises(KeyboardInterrupt):
        bench.main([*ARGV.split(), "--device=cpu", f"--json={tmp_path}/r"])
    assert [*json.loads((tmp_path / "r").read_text())["runs"]] == ["orca-best"]
