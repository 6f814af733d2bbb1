"""`serve --simulate` and `capacity --simulate`: a machine that counts time."""

import json
import re
from collections import defaultdict
from itertools import pairwise

import pytest

import bench
from lab.measure import machine as real_machine
from lab.measure.workload import poisson, sample_lengths
from lab.simulator.cost_model import CostModel
from lab.simulator.devices import A100
from tests.helpers import machine_info
from tests.test_simulate import A100S, printed_tables

YI = f"{A100S} --preset yi-34b --tp 2".split()
TINY = "--preset llama-tiny --device cpu --dtype float32 --max-len 64 --chunk 16 --batch 4".split()


@pytest.fixture
def drawn(monkeypatch):
    """[{policy: its Run}] of each picture that was to be drawn."""
    drawn = []
    monkeypatch.setattr("lab.pictures.timelines.plot_serving", lambda runs, *_: drawn.append(runs))
    return drawn


def test_a_simulated_machine_is_served_like_a_real_one(tmp_path, capsys, monkeypatch, drawn):
    monkeypatch.setattr(real_machine, "measure_machine", lambda *_: machine_info())
    load = ["--qps", "1", "--classes", "realtime=0.5", "--policies", "vllm,sarathi-serve"]
    bench.main(["serve", *TINY, "--page-size", "8", *load, "--requests", "2"])
    real = printed_tables(capsys.readouterr().out)
    files = [f"--plot={tmp_path}/run.png", f"--json={tmp_path}/run.json"]
    bench.main(["serve", *YI, *load, "--requests", "20", *files])
    text = capsys.readouterr().out
    report = json.loads((tmp_path / "run.json").read_text("utf-8"))
    tables = printed_tables(text)
    assert [table[0] for table in tables] == [table[0] for table in real]
    heading = "2 x A100-80GB, TP 2 x PP 1, 0 ms of CPU per iteration and stage\nyi-34b, 16 bits\n"
    assert text.startswith(f"simulated: {heading}")
    cost = CostModel.named("yi-34b", tp=2)
    assert report["base"]["seconds"] == pytest.approx(cost.seconds([(0, 4095, 1)] * 32))
    assert f"memory: {cost.kv_tokens():,} tokens of KV cache" in text
    assert A100.source in text
    arrivals = poisson(sample_lengths("sharegpt4", 20, 8192, 0), 1.0, 0)
    for run in drawn[0].values():
        served = [(c.arrival, len(c.prompt), len(c.output)) for c in run.completions]
        assert served == [arrival[:3] for arrival in arrivals]
    for line, (name, row) in zip(tables[0][1:], report["runs"].items(), strict=True):
        assert line[:2] == [name, f"{row['ttft_s']['p50']:.2f}"]
        assert row["finished"] == 20


YI_PIPELINE = CostModel.named("yi-34b", "a100-80gb", 4, 2, "pcie4", "ethernet", 2.5e-3)
FALCON = CostModel.named("falcon-180b", tp=8)


@pytest.mark.parametrize(
    "options, cost, replicas, heading",
    [
        (
            "--preset yi-34b --tp 4 --pp 2 --tp-link pcie4 --pp-link ethernet --cpu-ms 2.5",
            YI_PIPELINE,
            1,
            "8 x A100-80GB, TP 4 x PP 2, 2.5 ms",
        ),
        (
            "--preset falcon-180b --tp 8 --replicas 3",
            FALCON,
            3,
            "24 x A100-80GB, TP 8 x PP 1, 3 rep",
        ),
    ],
)
def test_alone_it_takes_what_the_model_says(
    options, cost, replicas, heading, tmp_path, capsys, drawn
):
    # requests all at once, each on its own replica
    argv = f"serve {A100S} {options} --lengths 500+3 --requests {replicas} --qps 1e6"
    bench.main([*argv.split(), "--policies", "sarathi-serve:200", f"--plot={tmp_path}/p.png"])
    assert capsys.readouterr().out.startswith(f"simulated: {heading}")
    chunks = sum(cost.seconds([(0, *chunk)]) for chunk in ((0, 200), (200, 200), (400, 100)))
    decodes = sum(cost.seconds([(0, start, 1)]) for start in (500, 501))
    completions = drawn[0]["sarathi-serve:200"].completions
    assert [c.ttft for c in completions] == pytest.approx([chunks] * replicas)
    assert [c.latency for c in completions] == pytest.approx([chunks + decodes] * replicas)


@pytest.mark.slow
def test_a_capacity_is_searched_on_a_simulated_machine(tmp_path, capsys):
    file = tmp_path / "capacity.json"
    load = "--requests 40 --batch 10 --policies vllm,sarathi-serve --cpu-ms 5".split()
    bench.main(["capacity", *YI, *load, "--json", str(file)])
    text = capsys.readouterr().out
    results = json.loads(file.read_text("utf-8"))["results"]
    assert "TP 2 x PP 1, 5 ms of CPU" in text
    ((head, *rows),) = printed_tables(text)
    assert head[0] == "policy" and [row[0] for row in rows] == list(results)
    for name, result in results.items():
        met = [point["qps"] for point in result["points"] if point["met"]]
        assert result["capacity_qps"] == max(met) > 0
        assert text.count(f"\n{name}: ") == len(result["points"])
    assert results["sarathi-serve"]["capacity_qps"] > results["vllm"]["capacity_qps"]


@pytest.mark.parametrize(
    "command, options, message",
    [
        ("serve", "--simulate a1000 --preset yi-34b", "device='a1000': must be one of a100-80gb"),
        ("capacity", f"{A100S} --preset yi", "preset='yi': must be one of "),
        ("serve", f"{A100S} --preset llama2-70b", "138.0 GB of weights do not fit 90% of the 80"),
        ("capacity", f"{A100S} --preset yi-34b --pp 7", "pp=7: must divide n_layer=60"),
        ("serve", f"{A100S} --preset yi-34b --tp-link rope", "link='rope': must be one of nvlink3"),
        ("serve", f"{A100S} --preset yi-34b --pp-link rope", "link='rope': must be one of nvlink3"),
    ],
)
def test_an_impossible_machine_is_refused_before_any_output(command, options, message, capsys):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        bench.main([command, *options.split()])
    assert capsys.readouterr() == ("", "")


def test_all_micro_batches_are_counted_and_no_batch_overtakes_another(tmp_path, capsys, drawn):
    report = tmp_path / "two.json"
    options = "--pp 2 --replicas 2 --requests 40 --lengths 900+30 --qps 50 --policies orca".split()
    files = ["--json", str(report), "--plot", str(tmp_path / "two.png")]
    bench.main(["serve", *YI, *options, *files])
    memory = "the batch of each of 4 micro-batches, the memory of each of 2 replicas"
    assert memory in capsys.readouterr().out
    row = json.loads(report.read_text("utf-8"))["runs"]["orca"]
    assert row["running_peak"] == 40  # they come quicker than they end
    batches = defaultdict(list)
    for iteration in drawn[0]["orca"].iterations:
        batches[iteration.micro_batch].append((iteration.start, iteration.end))
    assert len(batches) == 4
    for spans in map(sorted, batches.values()):
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
