"""Serving under load: what is measured, when a run has failed, how a capacity is found. No timing is asserted here.

Most runs live in a time of their own, in which looking at the clock takes a tick and sleeping takes none of ours.
"""

import csv
import gc
import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import bench
import bench_serve
import plot_search
import plot_serving
import profiling
import serving
from conftest import alone, tiny_model
from engine import Iteration
from metrics import meets_slo
from profiling import Profiled, hybrid_spans
from sampling import SamplingParams
from scheduler import POLICIES
from serving import Base, Hopeless, Settings, capacity, plan, serve, specs, summarize
from test_scheduler import simulate
from workload import Arrival, poisson, prompts, sample_lengths

MODEL = tiny_model()
SMALL = Settings(chunk=8, max_batch=4, max_len=32, page_size=4, kv_tokens=64)
ARRIVALS = [Arrival(*a) for a in [(0, 9, 5), (0.1, 20, 12), (0.1, 3, 1), (0.35, 14, 8), (4.0, 6, 6), (4.001, 2, 20)]]
TOKENS = prompts(ARRIVALS, 61, 0)


class Time:
    """A clock that advances by `tick` seconds whenever somebody looks at it, and by what is slept."""

    def __init__(self, tick):
        self.time, self.tick = 1000.0, tick

    def now(self):
        self.time += self.tick
        return self.time

    def sleep(self, seconds):
        self.time += seconds


class Silent:
    """A model that computes nothing: for runs of which only the times matter."""

    config, device, dtype = MODEL.config, MODEL.device, MODEL.dtype

    def __call__(self, batch, cache):
        return torch.zeros(len(batch.logit_rows), self.config.vocab_size)


def serve_small(name="vllm", tick=0.01, arrivals=ARRIVALS, tokens=TOKENS, settings=SMALL, model=Silent(), **more):
    time = Time(tick)
    return serve(model, specs()[name], arrivals, tokens, settings, now=time.now, sleep=time.sleep, **more)


# -----------------------------------------------------------------------------------------------------
# one run


@pytest.fixture(scope="module")
def expected():
    """The text of each request, computed without an engine."""
    return [alone(MODEL, prompt, SamplingParams(a.output_len)) for prompt, a in zip(TOKENS, ARRIVALS)]


@pytest.mark.parametrize("page_size", [4, 32])
@pytest.mark.parametrize("name", specs())
def test_every_policy_serves_the_same_arrivals_to_their_full_length(name, page_size, expected):
    settings = Settings(chunk=8, max_batch=4, max_len=32, page_size=page_size, kv_tokens=64)
    run = serve_small(name, settings=settings, model=MODEL)
    assert [c.request_id for c in run.completions] == list(range(6)) and not run.cut_short
    assert [c.prompt for c in run.completions] == TOKENS and [c.tokens for c in run.completions] == expected
    assert [(c.arrival, len(c.prompt), len(c.tokens)) for c in run.completions] == ARRIVALS  # exactly these times
    assert {c.finish_reason for c in run.completions} == {"length"}
    computed = Counter()  # the warm-up is not in the iterations, and they have the numbers of these requests
    for iteration in run.iterations:
        for number, length, _ in iteration.chunks:
            computed[number] += length
    for c in run.completions:
        assert computed[c.request_id] == len(c.prompt) + len(c.tokens) - 1 + c.recomputed_tokens
    assert run.seconds == run.iterations[-1].end == max(c.token_times[-1] for c in run.completions)
    assert summarize(run, 1000.0)["requests"] == 6


def test_nobody_is_computed_before_arrival_and_nobody_waits_for_an_idle_engine():
    run = serve_small("sarathi-serve")
    arrival = [a.time for a in ARRIVALS]
    for iteration in run.iterations:
        assert all(arrival[number] <= iteration.start for number, _, _ in iteration.chunks)
    idle_until = run.completions[4]
    before = [iteration.end for iteration in run.iterations if iteration.start < idle_until.arrival]
    assert before[-1] < idle_until.arrival - 1  # the engine was idle, and slept
    assert idle_until.scheduling_delay < 0.1
    in_an_iteration = run.completions[1]  # arrived during the first: its delay counts from then, not from its end
    assert run.iterations[0].start < in_an_iteration.arrival < in_an_iteration.scheduled


def test_a_preempted_request_is_known_by_its_number():
    settings = Settings(chunk=8, max_batch=4, max_len=32, page_size=4, kv_tokens=32)
    run = serve_small("vllm", settings=settings)
    preempted = Counter(number for iteration in run.iterations for number in iteration.preempted)
    assert preempted == {c.request_id: c.preemptions for c in run.completions if c.preemptions} and preempted


def test_own_time_is_a_step_without_its_forward_pass():
    # the clock is looked at before and after a step, and in it at its start, before and after forward: 4 ticks, 1 of
    # them in forward
    assert serve_small("sarathi-serve").own_fraction == pytest.approx(3 / 4)


def test_a_full_queue_refuses_and_the_slo_is_not_met():
    arrivals = [Arrival(0.0, 8, 4)] * 8
    settings = Settings(chunk=8, max_batch=2, max_len=32, page_size=4, max_waiting=3)
    run = serve_small(arrivals=arrivals, tokens=prompts(arrivals, 61, 0), settings=settings)
    assert [c.finish_reason for c in run.completions] == ["length"] * 3 + ["abort"] * 5 and run.refused == 5
    assert not summarize(run, 1000.0)["met"]
    assert summarize(run, 1000.0)["never_scheduled"] == 5


def test_garbage_collection_is_as_it_was_after_a_run_that_failed(monkeypatch):
    def fail(*_):
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no memory"):
        patch.setattr(serving.Engine, "step", fail)
        patch.setattr(serving, "warm_up", lambda *_: None)
        serve_small()
    assert gc.get_freeze_count() == 0 and gc.isenabled()


def test_static_batching_leaves_slots_empty():
    """B-1: requests of 128 + 500, 64 + 50, 256 + 200 and 32 + 30 tokens in one batch that runs to its end.

    The first iteration prefills all and yields their first tokens, so a request of n output tokens runs n iterations:
    4, 3, 2 and 1 slots are used until iteration 30, 50, 200 and 500, which is 100, 75, 50 and 25 %. The post says
    "50 % on average". Weighted by their iterations it is (4 * 30 + 3 * 20 + 2 * 150 + 1 * 300) / (4 * 500) = 39 %, and
    the plain mean of the four shares is 62.5 %.
    """
    history = simulate("request-level", [(128, 500), (64, 50), (256, 200), (32, 30)], max_batch=4, max_len=700)
    used = [len(batch) / 4 for batch in history]
    assert used == [1.0] * 30 + [0.75] * (50 - 30) + [0.5] * (200 - 50) + [0.25] * (500 - 200)
    assert sum(used) / len(used) == pytest.approx(0.39)


# -----------------------------------------------------------------------------------------------------
# the SLO


@pytest.mark.parametrize("count", [1, 2, 3, 50, 99, 100, 101, 102, 200, 201, 202, 1000])
def test_a_run_has_failed_as_soon_as_its_p99_is_decided_and_not_before(count):
    arrivals = [Arrival(0.0, 4, 2)] * count  # one TBT each
    watch, slow = Hopeless(arrivals, 0.1), 0
    events = [SimpleNamespace(request_id=i) for i in range(count)]
    assert watch.check(Iteration(0.0, 1.0, []), events) is None  # first tokens have no TBT
    while not watch.check(Iteration(1.0, 1.2, []), events[slow : slow + 1]):  # one token more, 0.2 s after the last
        slow += 1
        assert np.quantile([0.2] * slow + [0.0] * (count - slow), 0.99) <= 0.2 * 0.999  # its P99 may yet be below
        assert np.quantile([0.1001] * slow + [0.0] * (count - slow), 0.99) <= 0.1
    slow += 1
    assert np.quantile([0.1001] * slow + [0.0] * (count - slow), 0.99) > 0.1


@pytest.mark.parametrize("count, decisive", [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3), (60, 31)])
def test_a_run_has_failed_when_more_than_half_waited_too_long(count, decisive):
    arrivals = [Arrival(0.0, 4, 1)] * count
    watch = Hopeless(arrivals, 0.1)
    for i in range(decisive - 1):
        watch.arrived(i, 0.0)
    assert not watch.check(Iteration(0.0, 100.0, []), [])
    watch.check(Iteration(100.0, 101.0, [(0, 4, False)]), [])  # scheduled too late: counted once, not twice
    assert not watch.check(Iteration(101.0, 102.0, [(0, 1, True)]), [])
    watch.arrived(decisive, 100.5)
    assert not watch.check(Iteration(102.0, 102.5, []), [])  # has waited 2 s, which is allowed
    assert "scheduling delays over 2 s" in watch.check(Iteration(102.5, 102.6, []), [])


@pytest.mark.parametrize("name", ["vllm", "sarathi-serve", "request-level"])
def test_runs_are_cut_short_only_if_they_would_have_failed(name):
    arrivals = poisson(sample_lengths("sharegpt4", 12, 32, 0), 2.0, 0)
    tokens, seen = prompts(arrivals, 61, 0), Counter()
    for tick in (0.001, 0.05, 0.2):
        full = serve_small(name, tick, arrivals, tokens)
        for slo in (3 * tick, 6 * tick, 12 * tick):
            run = serve_small(name, tick, arrivals, tokens, hopeless=Hopeless(arrivals, slo))
            met = meets_slo(summarize(full, slo), slo)
            assert not (met and run.cut_short)
            assert summarize(run, slo)["met"] == met
            assert met or run.cut_short or run == full
            if run.cut_short:
                assert run.iterations == full.iterations[: len(run.iterations)]  # the same, up to there
                assert {c.finish_reason for c in run.completions} <= {"length", "abort"}
            seen[met, bool(run.cut_short)] += 1
    assert seen[True, False] and seen[False, True]


def test_a_run_that_is_cut_short_before_others_arrive_has_not_met_the_slo():
    arrivals = [Arrival(0.0, 4, 8), Arrival(1000.0, 4, 1)]
    run = serve_small(arrivals=arrivals, tokens=prompts(arrivals, 61, 0), hopeless=Hopeless(arrivals, 1e-6))
    assert run.cut_short == "2 TBTs over 1e-06 s" and len(run.completions) == 1
    finished = run._replace(completions=[replace(run.completions[0], finish_reason="length")])
    assert not summarize(finished, 1000.0)["met"] and summarize(finished._replace(cut_short=None), 1000.0)["met"]


def test_the_slo_is_a_multiple_of_a_decode_iteration():
    base = Base(0.065, 0.001, 32, 512)
    assert serving.slo_seconds("strict", base) == pytest.approx(5 * 0.065)
    assert serving.slo_seconds("relaxed", base) == pytest.approx(25 * 0.065)
    assert serving.slo_seconds(0.2, base) == 0.2
    with pytest.raises(ValueError, match="^SLO of 0.01 s: below one decode iteration, which takes 0.065 s here"):
        serving.slo_seconds(0.01, base)


@pytest.mark.parametrize("max_len, context", [(512, 256), (64, 32), (9000, 4096)])
def test_the_base_is_a_decode_of_32_requests_at_half_the_longest_context(max_len, context, monkeypatch):
    monkeypatch.setattr(serving, "KVCache", lambda *_, **__: None)
    monkeypatch.setattr(serving, "make_attention", lambda *_: None)
    for module in (serving, profiling):
        monkeypatch.setattr(module, "time_iterations", lambda *args, **_: [Profiled(*case, 0.064) for case in args[3]])
    base = serving.measure_base(MODEL, Settings(chunk=128, max_len=max_len))
    assert base == (0.064, 0.064 / min(128, max_len), 32, context)
    # both cases are what they say: decodes only, and a chunk only
    for (budget, at, decodes), (start, length) in (((32, 32, 32), (31, 1)), ((64, 64, 0), (0, 64))):
        spans = hybrid_spans(SimpleNamespace(pages=40, page_size=64), budget, at, decodes)
        assert [(span.start, len(span.tokens)) for span in spans] == [(start, length)] * (decodes or 1)


def test_the_estimated_rate_is_prefill_at_full_speed_and_decodes_in_full_batches():
    base = Base(seconds=0.064, prefill_token_s=0.001, decodes=32, context=512)
    assert serving.estimated_qps(base, [Arrival(0.0, 200, 50)] * 3) == pytest.approx(1 / (0.2 + 50 * 0.002))


# -----------------------------------------------------------------------------------------------------
# capacity


@pytest.mark.parametrize("limit", [0.21, 0.9, 1.0, 1.3, 2.0, 7.7, 15.0])
def test_capacity_is_found_to_five_percent(limit):
    qps, points = capacity(lambda rate: {"qps": rate, "met": rate <= limit}, start=1.0)
    assert limit / 1.05 <= qps <= limit
    assert len(points) <= 13 and Counter(p["qps"] for p in points if not p["met"]).most_common(1)[0][1] == 2


def test_one_failure_by_bad_luck_does_not_decide():
    for unlucky in range(6):  # whichever of the runs it is
        rates = []

        def run_at_rate(rate):
            rates.append(rate)
            return {"met": rate <= 3.0 and len(rates) != unlucky + 1}

        qps, _ = capacity(run_at_rate, start=1.0)
        assert 3.0 / 1.05 <= qps <= 3.0


def test_capacity_where_nothing_or_everything_is_met():
    qps, points = capacity(lambda rate: {"qps": rate, "met": False}, start=1.0)
    assert qps == 0 and min(p["qps"] for p in points) == 1 / 16 and len(points) == 8  # 1.5 ** 7 is above 16
    qps, points = capacity(lambda rate: {"qps": rate, "met": True}, start=1.0)
    assert qps == 16.0 and len(points) == 8


def test_capacity_ends_where_every_answer_is_chance():
    rng = np.random.default_rng(0)
    for _ in range(100):
        _, points = capacity(lambda rate: {"met": rng.random() < 1 / (1 + rate**4)}, start=1.0)
        assert len(points) < 60


# -----------------------------------------------------------------------------------------------------
# what is to be run


def test_policies_share_the_memory_and_may_have_a_chunk_of_their_own():
    settings = Settings(chunk=256, max_len=1000, kv_tokens=3000)
    runs = plan(["vllm", "orca-best", "sarathi:64"], [64, 1000], settings)
    assert list(runs) == [f"{n}, pages of {p}" for n in ("vllm", "orca-best", "sarathi:64") for p in (64, 1000)]
    assert [spec for spec, _ in runs.values()][::2] == [("vllm", {}), ("orca", {"prefills": 1}), ("sarathi", {})]
    assert [s.chunk for _, s in runs.values()] == [256] * 4 + [64] * 2
    assert [s.pages for _, s in runs.values()] == [46, 3] * 3
    assert list(plan(POLICIES, [64], settings)) == list(POLICIES)
    assert Settings(max_batch=4, max_len=100, page_size=64).pages == 8
    for label in ("vllm:64", "orca:64", "request-level:64", "hybrid-only:64", "dynamic:64"):
        with pytest.raises(ValueError, match=f"'{label}': .* does not go by a chunk size"):
            plan([label], [64], settings)


# -----------------------------------------------------------------------------------------------------
# the command lines

TINY = "--model llama-tiny --device cpu --dtype float32 --max-len 64 --chunk 16 --batch 4 --page-size 8".split()

MACHINE = {"device": "-", "threads": 1, "torch": "-", "model": "-", "parameters": 1, "dtype": "-", "compiled": False}


@pytest.fixture
def plots(monkeypatch):
    """What was to be drawn."""
    drawn = []
    for module, name in ((plot_serving, "plot_serving"), (plot_search, "plot_capacity")):
        monkeypatch.setattr(module, name, lambda *args, name=name, **more: drawn.append((name, args, more)))
    return drawn


def test_serve_prints_and_writes_everything(tmp_path, capsys, plots):
    files = {option: tmp_path / f"run.{suffix}" for option, suffix in
             (("csv", "csv"), ("json", "json"), ("plot", "png"), ("chrome-trace", "trace"))}  # fmt: skip
    options = [text for option, file in files.items() for text in (f"--{option}", str(file))]
    names = ["hybrid-only", "chunked-only", "sarathi-serve:8"]
    bench.main(["serve", *TINY, "--requests", "5", "--qps", "30", "--policies", ",".join(names), *options])
    text, report = capsys.readouterr().out, json.loads(files["json"].read_text())
    for part in ("llama-tiny", "batch 32, context 32", "64 tokens of KV cache", "30 a second", "strict, 5 of these"):
        assert part in text
    assert (
        list(report["runs"]) == names and report["options"]["seed"] == 0 and report["machine"]["model"] == "llama-tiny"
    )
    assert report["slo_s"] == pytest.approx(5 * report["base"]["seconds"])
    with open(files["csv"]) as file:
        rows = list(csv.DictReader(file))
    assert [(row["policy"], row["request_id"]) for row in rows] == [(n, str(i)) for n in names for i in range(5)]
    lengths = [(int(row["prompt_tokens"]), int(row["output_tokens"]), float(row["arrival"])) for row in rows]
    expected = [(a.prompt_len, a.output_len, a.time) for a in poisson(sample_lengths("sharegpt4", 5, 64, 0), 30.0, 0)]
    assert lengths == expected * 3
    for name, row in report["runs"].items():
        assert row["finished"] == 5 and 0 < row["own_fraction"] < 1
        assert text.count(f"| {name} ") == 3 and f" {row['tokens_per_s']:,.0f} " in text
    assert report["runs"]["chunked-only"]["hybrid"] == 0
    assert len(json.loads(files["chrome-trace"].read_text())["traceEvents"]) > 100
    (name, (runs, machine, file), more), = plots  # fmt: skip
    assert (
        more == {"slo_s": report["slo_s"]}
        and name == "plot_serving"
        and list(runs) == names
        and file == str(files["plot"])
    )
    completions, iterations = runs["chunked-only"]
    assert len(completions) == 5 and iterations[0].chunks and machine["threads"]


def test_capacity_prints_and_writes_everything(tmp_path, capsys, plots, monkeypatch):
    monkeypatch.setattr(bench_serve, "describe_machine", lambda *_: MACHINE)
    monkeypatch.setattr(bench_serve, "capacity", lambda run, start: (8.0, [run(8.0), run(400.0) | {"met": False}]))
    file = tmp_path / "capacity.json"
    options = ["--requests", "4", "--slo", "50", "--json", str(file), "--plot", str(tmp_path / "c.png")]
    bench.main(["capacity", *TINY, "--policies", "vllm,sarathi-serve", *options])
    text, report = capsys.readouterr().out, json.loads(file.read_text())
    assert list(report["results"]) == ["vllm", "sarathi-serve"] and report["slo_s"] == 50
    for name, result in report["results"].items():
        assert result["capacity_qps"] == 8.0 and [point["qps"] for point in result["points"]] == [8.0, 400.0]
        assert result["points"][0]["met"] and result["points"][0]["p99_tbt_s"] > 0
        assert f"{name}: 8.000 requests/s, P99 TBT" in text
    assert [line.split("|")[3].strip() for line in text.splitlines() if line.startswith("| ")][1:] == ["1.00x"] * 2
    assert "8.00" in text and "as asked for" in text
    assert plots == [("plot_capacity", (report["results"], report["machine"], str(tmp_path / "c.png")), {"slo_s": 50})]


def test_a_capacity_that_was_not_bracketed_is_a_bound(capsys):
    point = dict(p50_ttft_s=1, p99_tbt_s=1, tokens_per_s=1)
    always, never = ([dict(point, qps=qps, met=met) for qps in (1, 2)] for met in (True, False))
    bench_serve.print_capacities({"vllm": {"capacity_qps": 2, "points": always},
                                  "orca": {"capacity_qps": 0.0, "points": never}})  # fmt: skip
    text = capsys.readouterr().out
    assert "at least 2.00" in text and "below 1.00" in text


def test_a_trace_keeps_its_own_rate_or_takes_that_of_qps(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n5,100,20\n9,40,8\n10,900,10\n13,60,4\n")
    options = ["serve", "--trace", str(file), "--trace-scale", "0.5", "--max-len", "64"]
    at_rate, name = bench_serve.make_workload(bench_serve.parse_args(options))
    assert at_rate(None) == [Arrival(0, 50, 10), Arrival(4, 20, 4), Arrival(8, 30, 2)] and "1 left out" in name
    assert [a.time for a in at_rate(2.0)] == [0, 0.5, 1.0]


def test_fixed_lengths():
    at_rate, _ = bench_serve.make_workload(bench_serve.parse_args(["capacity", "--lengths", "50+7", "--requests", "3"]))
    assert [a[1:] for a in at_rate(1.0)] == [(50, 7)] * 3


def test_the_default_memory_is_a_third_and_pages_shrink_with_the_longest_request():
    args = bench_serve.parse_args(["serve", "--device", "cpu"])
    assert (args.chunk, args.batch, args.max_len, args.page_size, args.kv_tokens) == (128, 32, 1024, [64], 10 * 1024)
    args = bench_serve.parse_args(["serve", "--device", "cuda"])
    assert (args.chunk, args.batch, args.max_len, args.page_size, args.kv_tokens) == (512, 128, 8192, [64], 42 * 8192)
    assert bench_serve.parse_args(["serve", "--max-len", "40"]).page_size == [40]
    assert bench_serve.parse_args(["serve", "--page-size", "16,64, max", "--max-len", "512"]).page_size == [16, 64, 512]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("serve --qps 0", "--qps 0: must be a finite number above 0"),
        ("serve --qps nan", "--qps nan"),
        ("capacity --qps 1", "--qps"),
        ("serve --slo 0", "--slo 0: must be a finite number of seconds above 0"),
        ("serve --slo hard", "--slo 'hard': must be strict, relaxed or a number of seconds"),
        ("serve --page-size 0", "--page-size 0: must be 1 … 1024"),
        ("serve --page-size 16,2000", "--page-size 2000: must be 1 … 1024"),
        ("serve --page-size big", "--page-size big"),
        ("serve --kv-tokens 1000", "--kv-tokens 1000: must be at least 1024"),
        ("serve --policies vllm,fifo", "--policies: 'fifo' is not one of request-level"),
        ("serve --policies sarathi:x", "--policies: 'sarathi:x': after the colon must be a chunk size"),
        ("serve --policies ,", "--policies: give at least one"),
        ("serve --requests 0", "--requests 0"),
        ("serve --max-waiting 0", "--max-waiting 0: must be at least 1"),
        ("serve --seed -1", "--seed -1"),
        ("serve --threads 0", "--threads 0"),
        ("serve --model llama-9b", "'llama-9b'"),
        ("capacity --json /no/such/dir/f", "--json /no/such/dir/f"),
        ("serve --chrome-trace /no/such/dir/f", "--chrome-trace /no/such/dir/f"),
        ("serve --plot x.txt", "--plot x.txt: must end in"),
    ],
)
def test_options_that_make_no_sense_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        bench_serve.parse_args([*arguments.split(), "--device", "cpu"])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--lengths 500", "--lengths '500': must be sharegpt4, arxiv or PROMPT"),
        ("--lengths 1000+50", "must not exceed max_len=1024"),
        ("--trace TRACE", "column 'num_decode_tokens' is 0 times in the header"),
        ("--trace TRACE --trace-scale 0", "scale=0"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "capacity"])
def test_a_workload_that_makes_no_sense_is_refused_before_a_model_is_loaded(
    command, arguments, message, tmp_path, monkeypatch
):
    monkeypatch.setattr(bench_serve.cli, "load_model", None)
    (tmp_path / "trace.csv").write_text("arrived_at,num_prefill_tokens\n1,2\n")
    with pytest.raises(ValueError, match=message):
        bench.main([command, *arguments.replace("TRACE", str(tmp_path / "trace.csv")).split(), "--device", "cpu"])


@pytest.mark.parametrize("command", ["serve", "capacity"])
def test_an_slo_below_a_decode_iteration_is_refused_before_anything_is_served(command, monkeypatch):
    monkeypatch.setattr(bench_serve, "serve", None)
    monkeypatch.setattr(bench_serve, "measure_base", lambda *_: Base(0.065, 0.001, 32, 512))
    with pytest.raises(ValueError, match="SLO of 0.01 s: below one decode iteration, which takes 0.065 s"):
        bench.main([command, *TINY, "--slo", "0.01"])


def test_the_bench_knows_its_commands(monkeypatch, capsys):
    called = []
    monkeypatch.setattr(bench_serve, "main", called.append)
    monkeypatch.setattr("sys.argv", ["bench.py", "capacity", "--slo", "relaxed"])
    bench.main()
    assert called == [["capacity", "--slo", "relaxed"]]
    with pytest.raises(SystemExit):
        bench.parse_args(["--help"])
    text = capsys.readouterr().out
    assert "bench.py serve" in text and "bench.py capacity" in text


@pytest.mark.parametrize("command", ["serve", "capacity"])
def test_help_explains_every_option_with_its_default(command, capsys):
    with pytest.raises(SystemExit) as done:
        bench_serve.parse_args([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert done.value.code == 0 and f"bench.py {command}" in text
    options = set(text.split()) & {f"--{o}" for o in ("requests", "lengths", "trace", "slo", "page-size", "kv-tokens")}
    assert len(options) == 6 and ("--qps" in text) == (command == "serve")
    assert text.count("(default:") >= 22
