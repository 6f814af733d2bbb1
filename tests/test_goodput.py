"""Goodput: the requests per second that met their SLOs, worked out by hand and as `serve` says."""

import json

import bench
from lab.measure.metrics import goodput, percentiles
from request import Request

STALLED = [0.05] * 19 + [1.0]  # gaps whose mean of 0.0975 s would pass


def a_completion(ttft, gaps=(), reason="length"):
    """A Request that arrived at 3 s."""
    times = [3.0 + ttft]
    for gap in gaps:
        times.append(times[-1] + gap)
    return Request(0, [7], 1, 1, 3.0, finish_reason=reason, token_times=times)


def test_goodput_counts_finished_requests_within_both_slos():
    good = [a_completion(2.0), a_completion(0.5, [0.09, 0.05]), a_completion(1.0, reason="stop")]
    bad = [
        a_completion(2.25),
        a_completion(0.5, STALLED),
        a_completion(0.5, [0.05], reason="abort"),
        Request(0, [7], 1, 1, 3.0, finish_reason="abort"),  # rejected
    ]
    slos = {"ttft_slo_s": 2.0, "tbt_slo_s": 0.1}
    assert goodput(good + bad, 4.0, **slos) == 3 / 4.0
    assert goodput([], 0.0, **slos) is None


def test_serve_counts_goodput_by_both_options(tmp_path, capsys, monkeypatch):
    drawn = []
    monkeypatch.setattr("lab.pictures.timelines.plot_serving", lambda runs, *_: drawn.append(runs))
    report = tmp_path / "serve.json"
    machine = "--simulate a100-80gb --preset llama3-8b --max-len 1024 --policies sarathi-serve"
    load = "--requests 60 --qps 20 --slo 0.02 --ttft-slo 0.05"
    files = [f"--json={report}", f"--plot={tmp_path}/serve.png"]
    bench.main(["serve", *machine.split(), *load.split(), *files])
    completions = drawn[0]["sarathi-serve"].completions
    good = sum(c.ttft <= 0.05 and (percentiles(c.tbt).p99 or 0) <= 0.02 for c in completions)
    end = max(c.token_times[-1] for c in completions)
    run = json.loads(report.read_text("utf-8"))["runs"]["sarathi-serve"]
    assert 0 < good < len(completions)
    assert run["goodput_per_s"] == good / end
    assert f" {good / end:.2f} " in capsys.readouterr().out
