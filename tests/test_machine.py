"""`serve` and `capacity` on a machine that counts time, held against sums of the cost model."""

import json

import pytest

import bench
from lab.simulator.cost_model import CostModel

YI_PIPELINE = CostModel.named("yi-34b", "a100-80gb", 4, 2, "pcie4", "ethernet", 2.5e-3)
FALCON = CostModel.named("falcon-180b", tp=8)
PIPELINE = "--preset yi-34b --tp 4 --pp 2 --tp-link pcie4 --pp-link ethernet --cpu-ms 2.5"


def report_of(tmp_path, command, options):
    """The JSON that a command writes of a simulated A100."""
    file = tmp_path / "report.json"
    bench.main([command, "--simulate", "a100-80gb", *options.split(), "--json", str(file)])
    return json.loads(file.read_text("utf-8"))


@pytest.mark.parametrize(
    "options, cost, replicas",
    [(PIPELINE, YI_PIPELINE, 1), ("--preset falcon-180b --tp 8 --replicas 3", FALCON, 3)],
)
def test_alone_it_takes_what_the_model_says(options, cost, replicas, tmp_path):
    """Requests all at once, each on its own replica."""
    load = f"--lengths 500+2 --requests {replicas} --qps 1e6 --policies sarathi-serve:200"
    report = report_of(tmp_path, "serve", f"{options} {load}")
    run = report["runs"]["sarathi-serve:200"]
    chunks = sum(cost.seconds([(0, *chunk)]) for chunk in ((0, 200), (200, 200), (400, 100)))
    for percentile in ("p50", "max"):
        assert run["ttft_s"][percentile] == pytest.approx(chunks)
        assert run["tbt_s"][percentile] == pytest.approx(cost.seconds([(0, 500, 1)]))
    assert report["base"]["seconds"] == pytest.approx(cost.seconds([(0, 4095, 1)] * 32))
    assert run["finished"] == replicas


@pytest.mark.parametrize("options", ["--preset llama2-70b", "--preset yi-34b --pp 7"])
def test_an_impossible_machine_is_refused(options, tmp_path):
    with pytest.raises(ValueError):
        report_of(tmp_path, "serve", options)
