"""`serve --simulate` and `capacity --simulate`: a machine that counts time, or this one, fitted.

Only `--simulate this` reads a clock: no time is tested.
"""

import csv
import json
import re
import statistics
from collections import defaultdict
from itertools import pairwise

import pytest

import bench
from lab.measure import machine as real_machine
from lab.measure import timing as measure
from lab.measure.token_budget import Profiled
from lab.measure.workload import poisson, sample_lengths
from lab.simulator import machine
from lab.simulator.cost_model import CostModel
from lab.simulator.devices import A100, GEOMETRIES, LINKS
from tests.test_serving import MACHINE
from tests.test_simulate import A100S, printed_tables

YI = f"{A100S} --preset yi-34b --tp 2".split()
TINY = "--preset llama-tiny --device cpu --dtype float32 --max-len 64 --chunk 16 --batch 4".split()


def test_a_simulated_machine_is_served_like_a_real_one(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(real_machine, "measure_machine", lambda *_: MACHINE)
    load = ["--qps", "1", "--classes", "realtime=0.5", "--policies", "vllm,sarathi-serve"]
    bench.main(["serve", *TINY, "--page-size", "8", *load, "--requests", "2"])
    real = printed_tables(capsys.readouterr().out)
    files = [f"--csv={tmp_path}/run.csv", f"--json={tmp_path}/run.json"]
    bench.main(["serve", *YI, *load, "--requests", "20", *files])
    text = capsys.readouterr().out
    report = json.loads((tmp_path / "run.json").read_text())
    tables = printed_tables(text)
    assert [table[0] for table in tables] == [table[0] for table in real] and len(tables) == 2
    heading = "2 x A100-80GB, TP 2 x PP 1, 0 ms of CPU per iteration and stage\nyi-34b, 16 bits\n"
    assert text.startswith(f"simulated: {heading}")
    cost = CostModel(GEOMETRIES["yi-34b"], A100, tp=2)
    assert report["base"]["seconds"] == pytest.approx(cost.seconds([(0, 4095, 1)] * 32))
    assert f"memory: {cost.kv_tokens():,} tokens of KV cache" in text and A100.source in text
    rows = list(csv.DictReader((tmp_path / "run.csv").read_text().splitlines()))
    sizes = ("arrival", "prompt_tokens", "output_tokens")
    served = [tuple(float(row[name]) for name in sizes) for row in rows]
    arrivals = poisson(sample_lengths("sharegpt4", 20, 8192, 0), 1.0, 0)
    assert served == [arrival[:3] for arrival in arrivals] * 2
    for line, (name, row) in zip(tables[0][1:], report["runs"].items(), strict=True):
        p50 = statistics.median(float(each["ttft_s"]) for each in rows if each["policy"] == name)
        assert row["ttft_s"]["p50"] == pytest.approx(p50) and line[:2] == [name, f"{p50:.2f}"]
        assert row["finished"] == 20 and row["own_fraction"] == 0


YI_PIPELINE = CostModel(GEOMETRIES["yi-34b"], A100, 4, 2, LINKS["pcie4"], LINKS["ethernet"], 2.5e-3)
FALCON = CostModel(GEOMETRIES["falcon-180b"], A100, 8, parallel_block=True)
YI_WORDS = "--preset yi-34b --tp 4 --pp 2 --tp-link pcie4 --pp-link ethernet --cpu-ms 2.5"
ALONE = [  # options, what they make, replicas, how the heading says that
    (YI_WORDS, YI_PIPELINE, 1, "8 x A100-80GB, TP 4 x PP 2, 2.5 ms"),
    ("--preset falcon-180b --tp 8 --replicas 3", FALCON, 3, "24 x A100-80GB, TP 8 x PP 1, 3 rep"),
]


@pytest.mark.parametrize("options, cost, replicas, heading", ALONE)
def test_alone_it_takes_what_the_model_says(options, cost, replicas, heading, tmp_path, capsys):
    file = tmp_path / "alone.csv"  # of requests all at once, each on its own replica
    argv = f"serve {A100S} {options} --lengths 500+3 --requests {replicas} --qps 1e6"
    bench.main([*argv.split(), "--policies", "sarathi-serve:200", "--csv", str(file)])
    assert capsys.readouterr().out.startswith(f"simulated: {heading}")
    chunks = sum(cost.seconds([(0, *chunk)]) for chunk in ((0, 200), (200, 200), (400, 100)))
    decodes = sum(cost.seconds([(0, start, 1)]) for start in (500, 501))
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert [float(row["ttft_s"]) for row in rows] == pytest.approx([chunks] * replicas)
    assert [float(row["latency_s"]) for row in rows] == pytest.approx([chunks + decodes] * replicas)


@pytest.mark.slow
def test_a_capacity_is_searched_on_a_simulated_machine(tmp_path, capsys):
    file = tmp_path / "capacity.json"
    load = "--requests 40 --batch 10 --policies vllm,sarathi-serve --cpu-ms 5".split()
    bench.main(["capacity", *YI, *load, "--json", str(file)])
    text = capsys.readouterr().out
    results = json.loads(file.read_text())["results"]
    assert "TP 2 x PP 1, 5 ms of CPU" in text
    ((head, *rows),) = printed_tables(text)
    assert head[0] == "policy" and [row[0] for row in rows] == list(results)
    for name, result in results.items():
        points = sorted(result["points"], key=lambda point: point["qps"])
        met = [point["qps"] for point in points if point["met"]]
        assert result["capacity_qps"] == max(met) > 0
        assert text.count(f"\n{name}: ") == len(points)
        failed = next(point for point in points if not point["met"])
        assert points.count(failed) == 2  # it was tried twice: the same rate gives the same run
    assert results["sarathi-serve"]["capacity_qps"] > results["vllm"]["capacity_qps"]


NO_MACHINE = {  # words -> what the ValueError says
    "--simulate a1000 --preset yi-34b": "device='a1000': must be one of a100-80gb, a6000",
    f"{A100S} --preset yi": "preset='yi': must be one of ",
    f"{A100S} --preset llama2-70b": "138.0 GB of weights do not fit 90% of the 80 GB of an A100",
    f"{A100S} --preset yi-34b --pp 7": "pp=7: must divide n_layer=60",
    f"{A100S} --preset yi-34b --tp 3": "tp=3: must divide n_head=56",
}
LINKED = [f"{A100S} --preset yi-34b --{which}-link rope" for which in ("tp", "pp")]
NO_MACHINE |= dict.fromkeys(LINKED, "link='rope': must be one of nvlink3")


@pytest.mark.parametrize("command", ["serve", "capacity"])
@pytest.mark.parametrize("words, message", NO_MACHINE.items())
def test_an_impossible_machine_is_refused_before_any_output(command, words, message, capsys):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        bench.main([command, *words.split()])
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("drift", [0.0, 0.5])
@pytest.mark.parametrize("command, load", [("serve", "--requests 1 --qps 1"), ("capacity", "")])
def test_this_machine_is_simulated_with_the_law_of_its_profile(
    command, load, drift, tmp_path, capsys, monkeypatch
):
    """By both in `serve`, in the same tables; predictions are off by 1 to 24 %."""
    fitted, checked = machine.profile_cases(64)
    timed_cases = []

    def time_iterations(runner, cases):
        timed_cases.extend(cases)
        errors = [0] * len(fitted) + [i / 100 for i in range(1, 25)]
        return [
            Profiled(*case, (0.5 + 0.25 * (case[0] - case[2]) + 0.125 * case[2]) / e)
            for case, e in zip(cases, [1 + error for error in errors], strict=True)
        ]

    monkeypatch.setattr(machine, "time_iterations", time_iterations)
    monkeypatch.setattr(measure, "steadily", lambda function, *_, **__: (function(), drift))
    monkeypatch.setattr(measure.Probe, "take", lambda *_: 0.0)  # of real runs: nobody else is here
    file = tmp_path / "this.json"
    load = f"--lengths 10+3 --policies sarathi-serve,vllm --slo 1000 {load or '--requests 16'}"
    argv = [command, *TINY, "--page-size=8", *load.split(), f"--json={file}", "--simulate=this"]
    bench.main(argv)
    text = capsys.readouterr().out
    report = json.loads(file.read_text())
    assert timed_cases == fitted + checked and not set(fitted) & set(checked)
    assert text.startswith("simulated: ") == (command == "capacity")
    assert f"fitted to {len(fitted)} batches" in text
    info = report["machine"]
    busy = drift > measure.BUSY
    off = {"p50": 0.125, "p90": 0.217, "p99": 0.2377, "max": 0.24}
    assert info["prediction_error"] == pytest.approx(off, abs=1e-4)
    quality = "off by 12.5% in the median, 21.7% at P90, 24.0% at most"
    said = measure.TOO_BUSY if busy else quality
    assert f"\npredictions of 24 others: {said}\n" in text and info["profile_busy"] == busy
    if command == "capacity":
        assert list(report["results"]) == ["sarathi-serve", "vllm"]
        return
    names = [f"{name}{side}" for name in ("sarathi-serve", "vllm") for side in ("", ", simulated")]
    assert list(report["runs"]) == names
    for name, row in report["runs"].items():
        simulated = "simulated" in name
        assert row["finished"] == 1 and row["busy"] == (busy and simulated)
        assert text.count(f"\n| {measure.mark(name, row['busy'])} ") == 2
        assert (row["own_fraction"] == 0) == simulated
        if simulated:
            assert row["ttft_s"]["p50"] == pytest.approx(3.0, rel=1e-3)
            assert row["tbt_s"]["max"] == pytest.approx(0.625, rel=1e-3)
    sure = names[::2] if busy else names
    assert report["conclusion"].endswith(f"met by {'; '.join(sure)}.")


def test_cases_fit_a_machine_of_any_length():
    for max_len in (3, 64, 1024, 8192):
        fitted, checked = machine.profile_cases(max_len)
        for budget, context, decodes in fitted + checked:
            assert max(0, budget - max_len) <= decodes <= budget > 0 and 1 <= context <= max_len
        assert len(fitted) == 17 and len(checked) == 24


def test_all_micro_batches_are_counted_and_no_batch_overtakes_another(
    tmp_path, capsys, monkeypatch
):
    drawn_runs = []
    report = tmp_path / "two.json"
    monkeypatch.setattr(
        "lab.pictures.timelines.plot_serving", lambda runs, *_: drawn_runs.append(runs)
    )
    options = "--pp 2 --replicas 2 --requests 40 --lengths 900+30 --qps 50 --policies orca".split()
    files = ["--json", str(report), "--plot", str(tmp_path / "two.png")]
    bench.main(["serve", *YI, *options, *files])
    assert (
        "the batch of each of 4 micro-batches, the memory of each of 2 replicas"
        in capsys.readouterr().out
    )
    row = json.loads(report.read_text())["runs"]["orca"]
    assert row["running_peak"] == 40  # they come quicker than they end
    batches = defaultdict(list)
    for iteration in drawn_runs[0]["orca"].iterations:
        batches[iteration.micro_batch].append((iteration.start, iteration.end))
    assert len(batches) == 4
    for spans in map(sorted, batches.values()):
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
