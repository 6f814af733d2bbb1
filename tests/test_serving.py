"""`bench.py serve` and `capacity`: what they print, write and refuse. No timing is asserted."""

import csv
import json

import pytest
import torch

import bench
from experiments import run, serving
from experiments.measure import Timing
from experiments.run import Base
from experiments.serving import RealMachine, make_workload, paged_attention, print_capacities
from experiments.workload import Arrival, poisson, sample_lengths
from scheduler import Request
from tests.helpers import VirtualRun, tiny_model
from views import search
from views import serving as views_serving

TINY = "--model llama-tiny --device cpu --dtype float32 --max-len 64 --chunk 16 --batch 4"
TINY = f"{TINY} --page-size 8".split()
MACHINE = dict(device="-", threads=1, torch="-", model="-", parameters=1, dtype="-", compiled=False)


def parse(command, *options):
    """The options of `command`, checked, on a CPU."""
    return bench.parse_args([command, "--device", "cpu", *options])[1]


def test_static_batching_leaves_slots_empty():
    """B-1: requests of 128 + 500, 64 + 50, 256 + 200 and 32 + 30 tokens in a batch up to its end.

    The first iteration prefills all and yields their first tokens, so a request of n output tokens
    runs n iterations: 4, 3, 2 and 1 slots are used until iteration 30, 50, 200 and 500, which is
    100, 75, 50 and 25 %. The post says "50 % on average". Weighted by their iterations it is
    (4 * 30 + 3 * 20 + 2 * 150 + 1 * 300) / (4 * 500) = 39 %, and the plain mean is 62.5 %.
    """
    lengths = [(128, 500), (64, 50), (256, 200), (32, 30)]
    requests = [Request(i, [0] * prompt, prompt, n) for i, (prompt, n) in enumerate(lengths)]
    sizes = dict(max_batch=4, max_len=700, pages=4, page_size=700)
    log = VirtualRun("request-level", lambda shape: 1.0, **sizes).run(requests).log
    used = [len(chunks) / 4 for *_, chunks in log]
    assert used == [1.0] * 30 + [0.75] * (50 - 30) + [0.5] * (200 - 50) + [0.25] * (500 - 200)
    assert sum(used) / len(used) == pytest.approx(0.39)


@pytest.fixture
def plots(monkeypatch):
    """What was to be drawn."""
    drawn = []
    for module, name in ((views_serving, "plot_serving"), (search, "plot_capacity")):
        draw = lambda *args, name=name, **more: drawn.append((name, args, more))
        monkeypatch.setattr(module, name, draw)
    return drawn


def test_serve_prints_and_writes_everything(tmp_path, capsys, plots):
    files = {option: tmp_path / option for option in ("csv", "json", "plot", "chrome-trace")}
    files["plot"] = tmp_path / "run.png"
    options = [f"--{option}={file}" for option, file in files.items()]
    names = ["hybrid-only", "chunked-only", "sarathi-serve:8"]
    load = f"--requests 5 --qps 30 --classes low=0.4 --policies {','.join(names)}"
    bench.main(["serve", *TINY, *load.split(), *options])
    text, report = capsys.readouterr().out, json.loads(files["json"].read_text())
    heading = "llama-tiny|batch 32, context 32|64 tokens of KV cache|30 a second|strict, 5 of these"
    assert all(part in text for part in heading.split("|"))
    assert report["options"]["seed"] == 0 and report["machine"]["model"] == "llama-tiny"
    assert report["slo_s"] == pytest.approx(5 * report["base"]["seconds"])
    with open(files["csv"]) as file:
        rows = list(csv.DictReader(file))
    keys = ("request_id", "arrival", "prompt_tokens", "output_tokens")
    arrivals = list(enumerate(poisson(sample_lengths("sharegpt4", 5, 64, 0), 30.0, 0)))
    expected = [(name, i, *arrival[:3]) for name in names for i, arrival in arrivals]
    assert [(row["policy"], *(float(row[key]) for key in keys)) for row in rows] == expected
    assert {row["priority"] for row in rows} == {"2", "3"}
    assert list(report["runs"]) == names
    for name, row in report["runs"].items():
        assert row["finished"] == 5 and 0 < row["own_fraction"] < 1
        assert text.count(f"| {name} ") == 3 + 2 and f" {row['tokens_per_s']:,.0f} " in text
    assert report["runs"]["chunked-only"]["hybrid"] == 0
    assert len(json.loads(files["chrome-trace"].read_text())["traceEvents"]) > 100
    ((name, (runs, machine, file), more),) = plots
    assert name == "plot_serving" and more == {"slo_s": report["slo_s"]}
    assert list(runs) == names and file == str(files["plot"]) and machine["threads"]
    completions, iterations = runs["chunked-only"]
    assert len(completions) == 5 and iterations[0].chunks


def test_capacity_prints_and_writes_everything(tmp_path, capsys, plots, monkeypatch):
    search_two = lambda at, start: (8.0, [at(8.0), at(400.0) | {"met": False}])
    monkeypatch.setattr(serving, "describe_machine", lambda *_: dict(MACHINE))
    monkeypatch.setattr(run, "capacity", search_two)
    files = [f"--json={tmp_path / 'c.json'}", f"--plot={tmp_path / 'c.png'}"]
    names = ["vllm", "sarathi-serve"]
    load = f"--requests 4 --slo 50 --policies {','.join(names)}"
    bench.main(["capacity", *TINY, *load.split(), *files])
    text, report = capsys.readouterr().out, json.loads((tmp_path / "c.json").read_text())
    assert list(report["results"]) == names and report["slo_s"] == 50
    for name, result in report["results"].items():
        met, failed = result["points"]
        assert result["capacity_qps"] == met["qps"] == 8.0 and failed["qps"] == 400.0
        assert met["met"] and met["p99_tbt_s"] > 0
        assert f"{name}: 8.000 requests/s, P99 TBT" in text
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| ")][1:]
    assert [(row[2].strip(), row[3].strip()) for row in rows] == [("8.00", "1.00x")] * 2
    assert "as asked for" in text
    drawn = (report["results"], report["machine"], str(tmp_path / "c.png"))
    assert plots == [("plot_capacity", drawn, {"slo_s": 50})]


def test_a_capacity_that_was_not_bracketed_is_a_bound(capsys):
    point = dict(p50_ttft_s=1, p99_tbt_s=1, tokens_per_s=1)
    always, never = ([dict(point, qps=qps, met=met) for qps in (1, 2)] for met in (True, False))
    results = {"vllm": {"capacity_qps": 2, "points": always}}
    print_capacities(results | {"orca": {"capacity_qps": 0.0, "points": never}})
    text = capsys.readouterr().out
    assert "at least 2.00" in text and "below 1.00" in text


def test_pages_hold_the_same_context_in_every_layout(monkeypatch):
    seen = []
    monkeypatch.setattr(serving, "attention_alone", lambda *args: seen.append(args))
    times = dict(slots=2.0, consecutive=3.0, scattered=5.0).items()
    timings = {name: Timing(ms, 0.0) for name, ms in times}
    monkeypatch.setattr(serving, "interleaved", lambda variants, _: timings)
    model = tiny_model(dtype=torch.float32)
    assert paged_attention(model, 8, 3, 20) == {"consecutive": 1.5, "scattered": 2.5}
    for runner, spans in seen:
        assert [(span.start, span.length) for span in spans] == [(19, 1)] * 3
        pages = [page for span in spans for page in span.pages]
        assert sorted(pages) == list(range(runner.cache.pages))
    slots, together, apart = ([span.pages for span in spans] for _, spans in seen)
    assert slots == [[0], [1], [2]] and together == [[0, 1, 2], [3, 4, 5], [6, 7, 8]] != apart


def test_a_trace_keeps_its_own_rate_or_takes_that_of_qps(tmp_path, monkeypatch, capsys):
    file, rows = tmp_path / "trace.csv", "5,100,20\n9,40,8\n10,900,10\n13,60,4\n"
    file.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows)
    options = ["serve", "--trace", str(file), "--trace-scale", "0.5", "--max-len", "64"]
    at_rate, name = make_workload(parse(*options))
    assert at_rate(None) == [Arrival(0, 50, 10), Arrival(4, 20, 4), Arrival(8, 30, 2)]
    assert [a.time for a in at_rate(2.0)] == [0, 0.5, 1.0] and "1 left out" in name
    served = []
    monkeypatch.setattr(serving, "describe_machine", lambda *_: dict(MACHINE))
    monkeypatch.setattr(serving, "serve_all", lambda *args: served.append(args[2]))
    for more, rate in (([], "at its own rate"), (["--qps", "2"], "at 2 a second")):
        bench.main([*options, *more, *TINY, "--slo", "1000"])
        assert f"(1 left out) {rate}; median prompt 30, output 4" in capsys.readouterr().out
        assert served.pop() == at_rate(float(more[-1]) if more else None)


def test_lengths_of_one_s_own_follow_each_other():
    lengths = lambda *argv: [a[1:3] for a in make_workload(parse(*argv))[0](1.0)]
    one = ["capacity", "--lengths", "50+7", "--requests", "3"]
    two = ["serve", "--lengths", "50+7, 4+5", "--requests", "3", "--long-prompt", "900"]
    assert lengths(*one) == [(50, 7)] * 3
    assert lengths(*two) == [(900, 16), (50, 7), (4, 5), (4, 5)]


def test_classes_are_drawn_in_their_shares_and_the_same_at_every_rate():
    args = parse("serve", "--requests", "4000", "--classes", "realtime=0.1, low=0.5")
    assert args.classes == {"realtime": 0.1, "low": 0.5, "normal": pytest.approx(0.4)}
    at_rate, _ = make_workload(args)
    drawn = [arrival.priority for arrival in at_rate(1.0)]
    assert drawn == [arrival.priority for arrival in at_rate(7.0)]
    for name, share in args.classes.items():
        assert drawn.count(name) / 4000 == pytest.approx(share, abs=0.03)
    assert {a.priority for a in make_workload(parse("serve"))[0](1.0)} == {"normal"}


@pytest.mark.parametrize("on_gpu, some", [(0, (128, 32, 1024, 10)), (1, (512, 128, 8192, 42))])
def test_the_default_memory_is_a_third_and_pages_shrink_with_the_longest_request(on_gpu, some):
    args, (*sizes, max_len, requests) = parse("serve", "--device", ("cpu", "cuda")[on_gpu]), some
    assert [args.chunk, args.batch, args.max_len] == [*sizes, max_len]
    assert args.page_size == [64] and args.kv_tokens == requests * max_len
    assert args.requests == (500 if on_gpu else 48)
    assert parse("serve", "--max-len", "40").page_size == [40]
    sizes = "16,64, max, 512"
    assert parse("serve", "--page-size", sizes, "--max-len", "512").page_size == [16, 64, 512]


LOADS = [
    ("--policies vllm:64", "'vllm:64': vllm does not go by a chunk size"),
    ("--policies sarathi:0", "'sarathi:0': after the colon must be a chunk size of at least 1"),
    ("--lengths 500", "--lengths '500': must be sharegpt4, arxiv or PROMPT"),
    ("--lengths 5+5,6+6 --requests 1", "--requests 1: must be at least 2"),
    ("--lengths 1000+50", "must not exceed max_len=1024"),
    ("--trace TRACE", "column 'num_decode_tokens' is 0 times in the header"),
]


@pytest.mark.parametrize("arguments, message", LOADS)
@pytest.mark.parametrize("command", ["serve", "capacity"])
def test_a_load_that_makes_no_sense_is_refused_before_a_model_is_loaded(
    command, arguments, message, tmp_path, monkeypatch
):
    monkeypatch.setattr(serving, "load_model", None)
    (tmp_path / "trace.csv").write_text("arrived_at,num_prefill_tokens\n1,2\n")
    arguments = arguments.replace("TRACE", str(tmp_path / "trace.csv")).split()
    with pytest.raises(ValueError, match=message):
        bench.main([command, *arguments, "--device", "cpu"])


@pytest.mark.parametrize("command", ["serve", "capacity"])
def test_an_slo_below_a_decode_iteration_is_refused_before_anything_is_served(command, monkeypatch):
    monkeypatch.setattr(RealMachine, "serve", None)
    monkeypatch.setattr(run, "measure_base", lambda *_: Base(0.065, 0.001, 32, 512))
    message = "SLO of 0.01 s: below one decode iteration, which takes 0.065 s"
    with pytest.raises(ValueError, match=message):
        bench.main([command, *TINY, "--slo", "0.01"])
