"""What `bench.py simulate` and `serve --simulate` print and write, and the papers' claims that must come out of them.

Published numbers are in the docstrings of the tests. Only --validate reads a clock: no time of it is tested.
"""

import csv
import json
import math
import statistics
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import bench
import bench_serve
import simulated_server
import validation
from cost_model import A100, COLUMNS, GEOMETRIES, LINKS, PRESETS, CostModel, FittedCost, linear_seconds
from figures_sarathi import A6000_13B, BEST_ORCA, PIPELINE, TP_ONLY, offline, throughput
from figures_serving import MAX_BATCH, STRICT, SYSTEMS, base_seconds, capacity_against_slo, find_capacities
from figures_serving import latencies_of, serving_capacity
from iteration_time import BatchShape, IterationTime
from metrics import summarize_latencies, summarize_run
from profiling import Profiled
from serving import Settings, serve
from simulator import simulate
from workload import poisson, sample_lengths, zipf_lengths

YI = "--simulate a100-80gb --model yi-34b --tp 2".split()
TINY = "--model llama-tiny --device cpu --dtype float32 --max-len 64 --chunk 16 --batch 4 --page-size 8".split()


def printed_tables(text):
    """The Markdown tables in a text, as lists of rows of cells, their heads among them."""
    tables, last = [], ""
    for line in text.splitlines():
        if line.startswith("| "):
            if not last.startswith("|"):
                tables.append([])
            tables[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        last = line
    return tables


def error_line(capsys, *argv):
    """Run a command that must end in one line of error, and return that line."""
    with pytest.raises(SystemExit) as done:
        bench.main(list(argv))
    out, err = capsys.readouterr()
    usage, line = err.rstrip().rsplit("\n", 1)
    assert done.value.code == 2 and not out and usage.startswith("usage:") and ": error: " in line
    return line


# -----------------------------------------------------------------------------------------------------
# bench.py simulate


def test_every_claim_is_printed_and_written_alike(tmp_path, capsys):
    report, trace = tmp_path / "all.json", tmp_path / "two-stages.trace"
    files = ["--json", str(report), "--plot", str(tmp_path / "picture.png"), "--chrome-trace", str(trace)]
    chosen = "sarathi, bubbles,ablation"
    bench.main(["simulate", "--only", chosen, "--requests", "16", "--cpu-ms", "3", "--processes", "1", *files])
    text, found = capsys.readouterr().out, json.loads(report.read_text())
    assert (found["options"]["requests"], found["options"]["cpu_ms"]) == (16, 3)
    tables = {table["claim"]: table for table in found["tables"]}  # none has two here
    assert list(tables) == ["S-T2", "S-F7", "S-F3", "S-F8", "S-§4.3.1", "SS-F8", "SS-T4"]
    assert printed_tables(text) == [table["rows"] for table in found["tables"]]
    for claim, table in tables.items():
        assert f"{claim}: {table['title']}\n" in text and f"\n{table['note']}\n" in text
    assert "3 ms of CPU" in tables["SS-T4"]["title"]
    assert ["prefill 1,024: linear", "224.80"] in [row[:2] for row in tables["S-T2"]["rows"]]
    compared = 0
    for table in tables.values():
        for i in [i for i, head in enumerate(table["rows"][0]) if head == "error"]:
            for row in table["rows"][1:]:
                paper, simulated, error = float(row[i - 2]), float(row[i - 1]), float(row[i].rstrip("%")) / 100
                assert simulated / paper - 1 == pytest.approx(error, abs=0.015)  # all three are rounded
                compared += 1
    assert compared == 6 + 3 + 3 + 2 * 6
    assert [file.name for file in tmp_path.glob("*.png")] == ["picture-SS-F8.png"]
    assert (tmp_path / "picture-SS-F8.png").read_bytes().startswith(b"\x89PNG")
    names = [e["args"]["name"] for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "process_name"]
    assert names == ["orca-best: replica 1", "sarathi-serve: replica 1"]


def test_sarathi_has_shorter_bubbles_than_orca_of_every_kind(capsys):
    bench.main(["simulate", "--only", "bubbles", "--processes", "1"])
    ((_, orca, sarathi),) = printed_tables(capsys.readouterr().out)
    orca, sarathi = ([float(cell.replace(",", "")) for cell in row[1:]] for row in (orca, sarathi))
    for kinds in (orca, sarathi):
        assert sum(kinds[:3]) == pytest.approx(kinds[3], abs=0.21)  # four rounded numbers
    assert all(ours < theirs for ours, theirs in zip(sarathi, orca)) and min(orca) > 0


@pytest.mark.parametrize("experiment", [serving_capacity, capacity_against_slo])
def test_a_table_of_capacities_says_what_the_cpu_takes(experiment):
    def rates(function, jobs):
        assert function is find_capacities
        return [[2.0] * len(job[5]) for job in jobs]  # one for each SLO

    for table in experiment(rates, 16, 7.5e-3):
        assert "7.5 ms of CPU" in table.title or [row[1] for row in table.rows] == ["CPU ms", *2 * ["0", "5", "10"]]
        gains = {cell for row in table.rows[1:] for cell in row if cell.endswith("x") and cell[0].isdigit()}
        assert {"1.00x"} <= gains <= {"1.00x", "4.0x", "3.7x", "6.3x", "4.3x"}  # and what the paper says


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--only pipelines", "--only pipelines: must be from sarathi, throughput, bubbles, pipeline,"),
        ("--only sarathi,", "--only : must be from sarathi"),
        ("--requests 0", "--requests 0: must be at least"),
        ("--processes 0", "--processes 0: must be at least 1"),
        ("--cpu-ms -1", "--cpu-ms -1: must be at least 0"),
        ("--cpu-ms nan", "--cpu-ms nan: must be at least 0"),
        ("--json /no/such/dir/f", "--json /no/such/dir/f: must be a file in a directory that exists"),
        ("--chrome-trace /no/such/dir/f", "--chrome-trace /no/such/dir/f"),
        ("--plot x.txt", "--plot x.txt: must end in .png, .pdf or .svg"),
        ("--validate --model llama-9b", "--model 'llama-9b': must be one of llama-tiny"),
        ("--only sarathi --chrome-trace t.json", "--chrome-trace: is of the experiment `bubbles`"),
        ("--only sarathi,ablation --plot p.png", "--plot: --only leaves out all that is drawn"),
        ("--validate --plot p.png", "--plot: goes not with --validate"),
        ("fit", "required: file"),
    ],
)
def test_experiments_that_make_no_sense_are_refused(arguments, message, capsys):
    assert message in error_line(capsys, "simulate", *arguments.split())


# -----------------------------------------------------------------------------------------------------
# constants of a device


def test_fit_prints_the_constants_that_times_were_made_from(tmp_path, capsys):
    device = replace(A100, flops_per_s=200e12, bytes_per_s=1.5e12, op_s=6e-6, tile=64)
    file, sizes = tmp_path / "times.csv", [*range(1, 64, 9), *range(70, 1000, 62), *range(1100, 4097, 333)]
    with open(file, "w", newline="") as lines:
        rows = csv.writer(lines)
        rows.writerow(["num_tokens", *COLUMNS])
        for tokens in sizes:
            times = linear_seconds(PRESETS["llama-13b"], device, tokens, 2)
            rows.writerow([tokens, *(1e3 * times[product] for product in COLUMNS.values())])
    bench.main(["simulate", "fit", str(file), "--model", "llama-13b", "--tp", "2"])
    text = capsys.readouterr().out
    ((head, *rows),) = printed_tables(text)
    assert f"{file}: matrix products of a layer of llama-13b, TP 2, {len(sizes)} sizes" in text
    assert [row[0] for row in rows] == [n + t for n in ("fitted", "A100-80GB") for t in ("", ", without tiles")]
    found = {row[0]: dict(zip(head[1:], (float(cell.rstrip(" %")) for cell in row[1:]))) for row in rows}
    constants = {"TFLOP/s": 200, "TB/s": 1.5, "us to start": 6, "tile": 64}
    assert {name: found["fitted"][name] for name in constants} == pytest.approx(constants, rel=0.02)
    for error in ("its P90", "P90"):
        assert found["fitted"][error] < 1 < found["fitted, without tiles"][error]
    assert [its["tile"] for its in found.values()] == [64, 1, A100.tile, 1]
    assert found["A100-80GB"]["TFLOP/s"] == pytest.approx(A100.flops_per_s / 1e12, abs=0.5)


@pytest.mark.parametrize(
    "content, options, message",
    [
        ("num_tokens,attn_pre_proj\n1,2\n", "", "times.csv: must have the columns num_tokens and attn_pre_proj"),
        ("num_tokens,{0}\n8,1,1,1,-1\n", "", "times.csv line 2: mlp_down_proj='-1': must be a positive number"),
        ("num_tokens,{0}\n8,1,1,1,1\n", "--tp 3", "tp=3: must divide n_head=32"),
        ("num_tokens,{0}\n8,1,1,1,1\n", "--model llama", "model='llama': must be one of"),
        ("num_tokens,{0}\n8,1,1,1,1\n", "--simulate a1", "simulate='a1': must be one of a100-80gb"),
    ],
)
def test_a_fit_that_makes_no_sense_is_refused(content, options, message, tmp_path):
    file = tmp_path / "times.csv"
    file.write_text(content.format(",".join(COLUMNS)))
    with pytest.raises(ValueError, match=message):
        bench.main(["simulate", "fit", str(file), *options.split()])


# -----------------------------------------------------------------------------------------------------
# a simulated machine in bench.py serve and capacity


def test_a_simulated_machine_is_served_like_a_real_one(tmp_path, capsys, monkeypatch):
    machine = dict(device="-", threads=1, torch="-", model="-", parameters=1, dtype="-", compiled=False)
    monkeypatch.setattr(bench_serve, "describe_machine", lambda *_: machine)
    load = ["--qps", "1", "--classes", "realtime=0.5", "--policies", "vllm,sarathi-serve"]
    bench.main(["serve", *TINY, *load, "--requests", "2"])
    real = printed_tables(capsys.readouterr().out)
    files = {option: tmp_path / f"run.{option}" for option in ("csv", "json", "chrome-trace")}
    options = [word for option, file in files.items() for word in (f"--{option}", str(file))]
    bench.main(["serve", *YI, *load, "--requests", "20", *options])
    text, report = capsys.readouterr().out, json.loads(files["json"].read_text())
    simulated = printed_tables(text)
    assert [table[0] for table in simulated] == [table[0] for table in real] and len(simulated) == 4
    assert text.startswith(
        "simulated: 2 x A100-80GB, TP 2 x PP 1, 0 ms of CPU per iteration and stage\nyi-34b, 16 bits\n"
    )
    cost = CostModel(PRESETS["yi-34b"], A100, tp=2)
    assert report["base"]["seconds"] == pytest.approx(cost.seconds([(0, 4095, 1)] * 32))
    assert report["slo_s"] == pytest.approx(5 * report["base"]["seconds"])
    assert f"memory: {cost.kv_tokens():,} tokens of KV cache" in text and A100.source in text
    with open(files["csv"]) as file:
        rows = list(csv.DictReader(file))
    served = [(int(row["prompt_tokens"]), int(row["output_tokens"]), float(row["arrival"])) for row in rows]
    asked = poisson(sample_lengths("sharegpt4", 20, 8192, 0), 1.0, 0)
    assert served == [(a.prompt_len, a.output_len, a.time) for a in asked] * 2
    for name, row in report["runs"].items():
        own = [r for r in rows if r["policy"] == name]
        ttfts = [float(r["ttft_s"]) for r in own]
        assert row["ttft_s"]["p50"] == pytest.approx(statistics.median(ttfts))
        assert simulated[0][1 + list(report["runs"]).index(name)][:2] == [name, f"{statistics.median(ttfts):.2f}"]
        assert row["finished"] == 20 and row["own_fraction"] == 0
    events = json.loads(files["chrome-trace"].read_text())["traceEvents"]
    assert sum(e["ph"] == "X" and e["pid"] in (1, 3) for e in events) == sum(
        row["iterations"] for row in report["runs"].values()
    )


@pytest.mark.parametrize(
    "options, cost, replicas, heading",
    [
        ("--model yi-34b --tp 4 --pp 2 --tp-link pcie4 --pp-link ethernet --cpu-ms 2.5",
         CostModel(PRESETS["yi-34b"], A100, 4, 2, LINKS["pcie4"], LINKS["ethernet"], 2.5e-3), 1,
         "8 x A100-80GB, TP 4 x PP 2, 2.5 ms"),
        ("--model falcon-180b --tp 8 --replicas 3", CostModel(GEOMETRIES["falcon-180b"], A100, 8, parallel_block=True),
         3, "24 x A100-80GB, TP 8 x PP 1, 3 replicas, 0 ms"),
    ],
)  # fmt: skip
def test_a_request_alone_takes_what_the_cost_model_says(options, cost, replicas, heading, tmp_path, capsys):
    file = tmp_path / "alone.csv"
    load = ["--lengths", "500+3", "--requests", str(replicas), "--qps", "1e6"]  # all at once, each on its own replica
    options = [*options.split(), *load, "--policies", "sarathi-serve:200", "--csv", str(file)]
    bench.main(["serve", "--simulate", "a100-80gb", *options])
    assert capsys.readouterr().out.startswith(f"simulated: {heading} of CPU per iteration and stage\n")
    chunks = [cost.seconds([(0, start, length)]) for start, length in ((0, 200), (200, 200), (400, 100))]
    decodes = [cost.seconds([(0, start, 1)]) for start in (500, 501)]
    with open(file) as lines:
        rows = list(csv.DictReader(lines))
    assert [float(row["ttft_s"]) for row in rows] == pytest.approx([sum(chunks)] * replicas)
    assert [float(row["latency_s"]) for row in rows] == pytest.approx([sum(chunks + decodes)] * replicas)


def test_a_capacity_is_searched_on_a_simulated_machine(tmp_path, capsys):
    file = tmp_path / "capacity.json"
    load = ["--requests", "40", "--policies", "vllm,sarathi-serve", "--cpu-ms", "5"]
    bench.main(["capacity", *YI, *load, "--json", str(file)])
    text, results = capsys.readouterr().out, json.loads(file.read_text())["results"]
    assert "TP 2 x PP 1, 5 ms of CPU" in text
    ((head, *rows),) = printed_tables(text)
    assert head[0] == "policy" and [row[0] for row in rows] == list(results)
    for name, result in results.items():
        met = [point["qps"] for point in result["points"] if point["met"]]
        assert result["capacity_qps"] == max(met) > 0
        assert text.count(f"\n{name}: ") == len(result["points"])
        failed = min((point for point in result["points"] if not point["met"]), key=lambda point: point["qps"])
        assert result["points"].count(failed) == 2  # it was tried twice, and the same rate gives the same run
    assert results["sarathi-serve"]["capacity_qps"] > results["vllm"]["capacity_qps"]


@pytest.mark.parametrize("command", ["serve", "capacity"])
@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--simulate a1000", "must be one of a100-80gb, a40"),
        ("--simulate a100-80gb --model yi", "--model yi: with --simulate must be one of llama-tiny"),
        ("--simulate a100-80gb --model gpt2", "--max-len 8192: this model is limited to 1024"),
        ("--simulate a100-80gb --model llama2-70b", "138.0 GB of weights do not fit 90% of the 80 GB of an A100-80GB"),
        ("--simulate a100-80gb --pp 7", "pp=7: must divide n_layer=60"),
        ("--simulate a100-80gb --tp 3", "tp=3: must divide n_head=56"),
        ("--simulate a100-80gb --tp 0", "must be a whole number of at least 1"),
        ("--simulate a100-80gb --tp-link rope", "must be one of nvlink3"),
        ("--simulate a100-80gb --pp-link rope", "must be one of nvlink3"),
        ("--simulate a100-80gb --replicas 0", "--replicas 0: must be at least 1"),
        ("--simulate a100-80gb --cpu-ms -1", "--cpu-ms -1: must be at least 0"),
        ("--simulate a100-80gb --cpu-ms nan", "--cpu-ms nan: must be at least 0"),
        ("--simulate a100-80gb --kv-tokens 8191", "--kv-tokens 8191: must be at least 8192"),
        ("--simulate a100-80gb --kv-tokens 400000", "--kv-tokens 400000: must be at least 8192"),
        ("--simulate a100-80gb --compile", "--compile: goes not with --simulate"),
        ("--simulate a100-80gb --dtype float32", "--dtype: goes not with --simulate"),
        ("--simulate a100-80gb --init-from gpt2", "--init-from: goes not with --simulate"),
        ("--tp 2", "--tp: goes only with --simulate"),
        ("--cpu-ms 5", "--cpu-ms: goes only with --simulate"),
    ],
)
def test_a_simulated_machine_that_makes_no_sense_is_refused(command, arguments, message, capsys):
    model = [] if "--model" in arguments else ["--model", "yi-34b"]
    assert message in error_line(capsys, command, *arguments.split(), *model)


# -----------------------------------------------------------------------------------------------------
# what the papers claim


def test_a_pipeline_under_sarathi_beats_replicas_and_orca():
    """S-F12: batches of 27 and 11; 1.48x over eight replicas, which are 1.28x over Orca's pipeline."""
    assert (PIPELINE.cost().max_batch(4096), TP_ONLY.cost().max_batch(4096)) == (27, 11)
    lengths = zipf_lengths(1024, 4096, 0.4, 10, 1500, 0)
    orca, replicas, sarathi = (
        offline(system, spec, lengths, count).makespan
        for system, spec, count in ((PIPELINE, BEST_ORCA, 1), (TP_ONLY, BEST_ORCA, 8), (PIPELINE, ("sarathi", {}), 1))
    )
    assert sarathi < replicas < orca and 1.3 <= replicas / sarathi <= 1.7


def test_a_small_budget_serves_several_times_the_load_and_a_large_one_less():
    """SS-F10: 3.7x over vllm for Yi-34B on two A100 under the strict SLO."""
    system = SYSTEMS["Yi-34B"]
    slo = STRICT * base_seconds(system.cost(5e-3))
    vllm, small, large = (
        find_capacities(system, spec, "sharegpt4", chunk, MAX_BATCH, [slo], 384, 5e-3)[0]
        for spec, chunk in ((("vllm", {}), 512), (("sarathi-serve", {}), 512), (("sarathi-serve", {}), 2048))
    )
    assert 2.6 <= small / vllm <= 4.4 and 0 < large < vllm


@pytest.mark.parametrize("trace, qps, sarathi, chunked", [("sharegpt4", 1.0, 0.14, 0.17), ("arxiv", 0.5, 0.17, 0.20)])
def test_p99_tbt_of_the_ablation(trace, qps, sarathi, chunked):
    """SS-T4, with 10 ms of CPU: decodes beside chunks of 512 wait for less than decodes that alternate with them."""
    for policy, published in (("sarathi-serve", sarathi), ("chunked-only", chunked)):
        runs = [latencies_of(SYSTEMS["Yi-34B"], policy, trace, 512, qps, seed, 128, 10e-3) for seed in range(3)]
        assert statistics.median(p99_tbt for _, _, _, p99_tbt, _ in runs) == pytest.approx(published, rel=0.2)


def gain(spec, pd_ratio, chunk=256):
    """Throughput over the baseline's: LLaMA-13B on an A6000, requests of 1,024 tokens, batches of 18."""
    ours, base = (throughput(A6000_13B, its, 18, 1024, pd_ratio, chunk, 20) for its in (spec, ("request-level", {})))
    return ours / base


def test_orca_gains_little_even_at_its_best():
    """S-F11: at 1K, 1.11x for Orca's best case."""
    orca = max(gain(BEST_ORCA, pd_ratio) for pd_ratio in (7, 14, 28, 56, 112))
    assert orca == pytest.approx(1.11, rel=0.05)
    assert gain(("sarathi", {}), 256 / 17) > max(orca, gain(BEST_ORCA, 256 / 17))


@pytest.mark.parametrize("chunk", [256, 512])
def test_the_gain_is_largest_where_every_chunk_has_its_decodes(chunk):
    """S-F9: near P:D = C / (B - 1), of those that the figure shows."""
    gains = {pd_ratio: gain(("sarathi", {}), pd_ratio, chunk) for pd_ratio in (4, 7, 14, 28, 56, 112)}
    balanced = min(gains, key=lambda pd_ratio: abs(math.log(pd_ratio * 17 / chunk)))
    assert max(gains, key=gains.get) == balanced


# -----------------------------------------------------------------------------------------------------
# what the experiments are made of


def test_zipf_lengths():
    uniform, some, many = (zipf_lengths(100, 400, theta, 10, 4000, 7) for theta in (0, 0.4, 1.0))
    assert some == zipf_lengths(100, 400, 0.4, 10, 4000, 7) != zipf_lengths(100, 400, 0.4, 10, 4000, 8)
    assert many == zipf_lengths(100, 400, 1, 10, 4000, 7)  # a whole number will do
    totals = [np.array([sum(pair) for pair in lengths]) for lengths in (uniform, some, many)]
    for lengths, total in zip((uniform, some, many), totals):
        assert total.min() >= 100 and total.max() <= 400
        assert all(isinstance(n, int) and n >= 1 for pair in lengths for n in pair)
        assert all(abs(output - (prompt + output) / 11) <= 0.5 for prompt, output in lengths)
    assert {100, 400} <= set(totals[0].tolist()) and len(set(totals[0].tolist())) == 301
    for theta, total in zip((0, 0.4, 1.0), totals):
        odds = np.arange(1, 302) ** -theta
        for longest in (150, 250, 350):  # six standard deviations of a share of 4,000
            expected = odds[: longest - 99].sum() / odds.sum()
            assert (total <= longest).mean() == pytest.approx(expected, abs=6 * 0.5 / math.sqrt(4000))
    assert (totals[0] <= 150).mean() < (totals[1] <= 150).mean() < (totals[2] <= 150).mean()
    assert set(zipf_lengths(2, 3, 0.4, 1000, 50, 0)) == {(1, 1), (2, 1)}  # a request has an output


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"shortest": 1}, "^shortest=1: "),
        ({"longest": 99}, "^longest=99: .* at least 100"),
        ({"count": 0}, "^count=0: "),
        ({"pd_ratio": 0}, "^pd_ratio=0: "),
        ({"seed": -1}, "^seed=-1: "),
    ],
)
def test_bad_zipf_lengths_are_named(changes, message):
    arguments = {"shortest": 100, "longest": 400, "theta": 0.4, "pd_ratio": 10, "count": 3, "seed": 0}
    with pytest.raises(ValueError, match=message):
        zipf_lengths(**arguments | changes)


def test_a_fitted_cost_predicts_what_its_law_does():
    law = np.array([3e-3, 1e-4, 5e-4, 1e-6, 1e-7])
    shapes = [(64, 0, 0, 2080), (64, 4, 800, 59_680), (300, 9, 8100, 105_150), (0, 4, 800, 0), (0, 9, 8100, 0)]
    profile = [(BatchShape(*shape), float(law @ [1, *shape])) for shape in shapes]
    cost, ours = FittedCost(profile), IterationTime(profile)
    chunk, decodes = ("a", 100, 50), [("b", 9, 1), ("c", 699, 1)]  # 100 * 50 + (1 + ... + 50) pairs; 10 + 700 keys
    batches = [[chunk], decodes, [chunk, *decodes], [chunk, ("d", 0, 3)]]
    shapes = [(50, 0, 0, 6275), (0, 2, 710, 0), (50, 2, 710, 6275), (53, 0, 0, 6281)]
    for batch, shape in zip(batches, shapes):
        assert cost.seconds(batch) == ours.predict(BatchShape(*shape)) == pytest.approx(law @ [1, *shape], rel=0.02)
        assert cost.stages(batch) == ([cost.seconds(batch)], 0.0)
    words = " ".join(cost.describe().split())
    assert words.startswith("3.0 ms, 0.100 per prefill token, 0.50 per decode, 1.00 per 1,000 keys")


def test_a_summary_of_latencies_is_part_of_that_of_a_run():
    arrivals = poisson(sample_lengths("sharegpt4", 40, 512, 0), 20.0, 0)
    settings = Settings(64, 8, 512, 16, 1024, max_waiting=6)
    run = simulate(CostModel(PRESETS["llama-7b"], A100), ("vllm", {}), arrivals, settings).run
    latencies = summarize_latencies(run.completions, run.seconds)
    whole = summarize_run(run.completions, run.iterations, run.seconds)
    assert latencies == {key: whole[key] for key in latencies}
    assert {"ttft_s", "tbt_s", "scheduling_delay_s", "tokens_per_s", "preemptions"} <= set(latencies) < set(whole)
    assert latencies["aborted"] == run.refused > 0 < latencies["preemptions"]
    finished = [a for a, c in zip(arrivals, run.completions) if c.finish_reason == "length"]
    assert latencies["tokens_per_s"] * run.seconds == pytest.approx(sum(p + d for _, p, d in finished))


def test_validate_compares_batches_and_runs_with_this_machine(tmp_path, capsys, monkeypatch):
    grid, real = [(0, 64, 2), (48, 64, 0), (48, 300, 2)], []
    monkeypatch.setattr(validation, "serve", lambda *arguments: real.append(serve(*arguments)) or real[-1])
    monkeypatch.setattr(validation, "GRID", grid)
    monkeypatch.setattr(validation, "compare_runs", partial(validation.compare_runs, count=3, rounds=1))
    file = tmp_path / "validate.json"
    bench.main(["simulate", "--validate", "--model", "llama-tiny", "--device", "cpu", "--json", str(file)])
    text, found = capsys.readouterr().out, json.loads(file.read_text())
    batches, runs = printed_tables(text)
    assert "1. Iterations" in text and "2. bench.py serve and its simulation: 3 requests" in text
    assert "llama-tiny" in text and found["machine"]["model"] == "llama-tiny" and len(found["law"]) == 5
    assert batches[0][1:] == ["0 decodes", "2 decodes"] and len(batches) == 1 + 3
    assert [tuple(case) for *case, _, _ in found["batches"]["grid"]] == grid
    for (prefill, context, decodes, seconds, error), row in zip(found["batches"]["grid"], batches[1:], strict=True):
        assert seconds > 0 and error > -1 and row[0] == f"{prefill} prefill, context {context}"
        assert row[1 + (decodes > 0)] == f"{1e3 * seconds:.1f} ({error:+.0%})"
    (*_, seconds, error), *_ = found["batches"]["grid"]  # two decodes, each of which reads 64 keys
    assert seconds * (1 + error) == pytest.approx(np.dot(found["law"], [1, 0, 2, 128, 0]))
    errors = sorted(abs(error) for *_, error in found["batches"]["grid"])
    assert found["batches"]["median"] == errors[1] and f"median {errors[1]:.1%}" in text
    assert [row[0].split(":")[0] for row in runs[1:]] == [name for name in validation.POLICIES for _ in range(4)]
    assert runs[0][1:] == ["measured", "simulated", "error"]
    assert list(found["runs"]) == list(validation.POLICIES)
    for (name, ((measured, simulated),)), run in zip(found["runs"].items(), real, strict=True):
        assert measured == summarize_latencies(run.completions, run.seconds) and simulated["finished"] == 3
        row = next(row for row in runs if row[0] == f"{name}: tokens/s")
        assert row[1:3] == [f"{summary['tokens_per_s']:,.0f}" for summary in (measured, simulated)]


# -----------------------------------------------------------------------------------------------------
# this machine, and several at once


def test_this_machine_is_simulated_with_the_law_of_its_profile(tmp_path, capsys, monkeypatch):
    shapes = [BatchShape(n, d, d * 9, n * n) for n in (0, 8, 32) for d in (0, 2, 4) if n or d]
    seconds = lambda shape: 0.5 + 0.25 * shape.prefill_tokens + 0.125 * shape.decodes
    rows = [Profiled(0, 0, 0, seconds(shape)) for shape in shapes]
    monkeypatch.setattr(Profiled, "shape", property(lambda row: shapes[rows.index(row)]))
    monkeypatch.setattr(simulated_server, "time_batches", lambda *_: rows)
    file = tmp_path / "this.json"
    load = ["--lengths", "10+3", "--requests", "1", "--policies", "sarathi-serve", "--qps", "1", "--json", str(file)]
    bench.main(["serve", *TINY, *load, "--simulate", "this"])
    text, report = capsys.readouterr().out, json.loads(file.read_text())
    assert text.startswith("simulated: ") and f"fitted to {len(rows)} batches" in text
    row = report["runs"]["sarathi-serve"]
    assert row["ttft_s"]["p50"] == pytest.approx(3.0, rel=1e-3) and row["tbt_s"]["max"] == pytest.approx(
        0.625, rel=1e-3
    )


def test_all_micro_batches_are_counted_and_have_lanes_of_their_own(tmp_path, capsys):
    report, trace = tmp_path / "two.json", tmp_path / "two.trace"
    options = ["--pp", "2", "--replicas", "2", "--requests", "40", "--lengths", "900+30", "--qps", "50"]
    files = ["--json", str(report), "--chrome-trace", str(trace), "--policies", "orca"]
    bench.main(["serve", *YI, *options, *files])
    assert "the batch is that of each of 4 micro-batches" in capsys.readouterr().out
    assert json.loads(report.read_text())["runs"]["orca"]["running_peak"] == 40  # they come quicker than they end
    lanes = {}
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event["ph"] == "X" and event["pid"] == 1:
            lanes.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(lanes) == 4
    for slices in lanes.values():
        assert all(end <= start for (_, end), (start, _) in zip(sorted(slices), sorted(slices)[1:]))
