"""Goodput: the requests per second that met their SLOs, worked out by hand and as `serve` says."""

import csv
import json

import bench
from lab.measure.metrics import goodput
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


def test_serve_counts_goodput_by_both_options(tmp_path, capsys):
    report = tmp_path / "serve.json"
    rows = tmp_path / "serve.csv"
    machine = "--simulate a100-80gb --preset llama3-8b --max-len 1024 --policies sarathi-serve"
    load = "--requests 60 --qps 20 --slo 0.02 --ttft-slo 0.05"
    files = f"--json {report} --csv {rows}"
    bench.main(["serve", *machine.split(), *load.split(), *files.split()])
    with rows.open() as file:
        requests = list(csv.DictReader(file))
    good = sum(
        float(row["ttft_s"]) <= 0.05 and float(row["p99_tbt_s"] or 0) <= 0.02 for row in requests
    )
    ends = [float(row["arrival"]) + float(row["latency_s"]) for row in requests]
    run = json.loads(report.read_text())["runs"]["sarathi-serve"]
    assert 0 < good < len(requests)
    assert run["goodput_per_s"] == good / max(ends)
    assert f" {good / max(ends):.2f} " in capsys.readouterr().out
