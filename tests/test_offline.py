"""Table 2, the policies end to end and the conclusion. No timing is asserted here."""

import json
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import bench
from lab.commands import offline
from lab.measure import metrics, offline_load, timing
from lab.measure.batch_times import BatchTime
from lab.measure.decode_maximal import compare_decodes
from lab.measure.load_run import Clock
from lab.measure.offline_load import OfflineLoad, PolicyRun, policy_runs
from lab.measure.run_loop import Run
from policies.observers import ChunkRecord, Iteration
from request import Request
from tests.helpers import machine_info

TOTAL_MS = {"prompt": 200.0, "prefill-only": 100.0, "decode-only": 30.0, "decode-maximal": 110.0}
PRODUCTS_MS = {"prompt": 154.0, "prefill-only": 80.0, "decode-only": 20.0, "decode-maximal": 81.0}
HEAD_MS = 14.0  # of the products of a whole prompt


@pytest.fixture(autouse=True)
def idle_machine(monkeypatch):
    """Nobody else uses the machine."""
    monkeypatch.setattr(timing.Probe, "take", lambda self, *_: 0.0)


def load_of(**changes):
    """An OfflineLoad that is small."""
    defaults = {"seq_len": 20, "pd_ratio": 3.0, "batch": 3, "requests": 7, "seed": 4}
    return OfflineLoad(**defaults | changes)


def table_2(*, total_ms=None, device_ms=None, spread=0.0, busy=False):
    """Table 2 of batches that take so long: of 3 decodes, and of 10 tokens of a prompt of 20 with 2
    decodes. A decode costs 10 ms alone and 5 ms riding."""
    times = {}
    for name, ms in (TOTAL_MS | (total_ms or {})).items():
        parts = dict.fromkeys(("preproj_ms", "postproj_ms", "ffn_ln1_ms", "ffn_ln2_ms"), 0.0)
        times[name] = BatchTime(
            **parts,
            total_ms=ms,
            products_ms=PRODUCTS_MS[name],
            head_ms=HEAD_MS,
            attention_ms=0.0,
            attention_limit_ms=0.0,
            other_ms=0.0,
            spread=spread,
            busy=busy,
            launch_ms=39.0 if device_ms else None,
            device_ms=device_ms[name] if device_ms else None,
        )
    return compare_decodes(times, context=20, batch=3, chunk=12)


def test_a_decode_costs_what_a_batch_takes_longer_with_it():
    """The gain that is promised: the products of 10 tokens of whole prompts and 2 / 3 of a
    decode-only batch, over those of 12 rows that all cost what one of a whole prompt does."""
    table = table_2()
    promised = (10 * 140 / 20 + 20 * 2 / 3) / (12 * 140 / 20)  # without the head
    assert table.promised_gain == pytest.approx(promised)
    rows = table.rows.values()
    assert [row.prefill_tokens for row in rows] == [20, 10, 0, 10]
    assert [row.decodes for row in rows] == [0, 0, 3, 2]
    assert [row.prefill_token_ms for row in rows] == [10, 10, None, 10]
    assert [row.decode_token_ms for row in rows] == [None, None, 10, 5]
    assert table.speedup == pytest.approx(10 / 5) and table.device_speedup is None
    assert not table.busy and table_2(busy=True).busy


def test_a_cost_below_the_noise_is_not_a_speedup():
    assert table_2(spread=0.19).speedup == pytest.approx(10 / 5)  # 10 ms, the noise is 9.5
    assert table_2(spread=0.21).speedup is None
    assert table_2(spread=0.1).products_speedup is None  # 1 ms, the noise is 4


def printed(table, capsys):
    """What is printed of a table."""
    offline.print_decode_maximal(table, SimpleNamespace(chunk=12, batch=3, seq_len=20))
    return capsys.readouterr().out


def test_decodes_that_ride_for_nothing_are_not_launches_that_do(capsys):
    """Every batch takes 40 ms to launch, decodes 5 ms to compute and a chunk 20, both together 24:
    the device's time tells that a decode costs 2 ms riding and 5 / 3 ms alone."""
    device_ms = {"prompt": 35.0, "prefill-only": 20.0, "decode-only": 5.0, "decode-maximal": 24.0}
    table = table_2(total_ms=dict.fromkeys(TOTAL_MS, 40.0), device_ms=device_ms)
    assert table.speedup is None  # for nothing, it seems
    assert table.device_speedup == pytest.approx((5 / 3) / (4 / 2))
    text = printed(table, capsys)
    assert "of the time of the device 0.8x" in text and "launch | device |" in text
    assert f"bound by launches, not by the device: {', '.join(device_ms)}\n" in text


def test_no_negative_cost_is_printed(capsys):
    text = printed(table_2(total_ms={"decode-maximal": 90.0}), capsys)
    *_, row = [line for line in text.splitlines() if line.startswith("| ")]
    assert [cell.strip() for cell in row.split("|")][1:3] == ["decode-maximal", "10 + 2"]
    assert row.split("|")[-2].strip() == "-"


@pytest.mark.parametrize(
    "token_ms, requests",
    [
        (0.2, 19),  # 3 B + 1 for a fast machine: 25 would take 25 s
        (0.3125, 16),  # 5 policies x 1,000 tokens x 0.3125 ms = 1.5625 s for each request
        (2.5, 13),  # 2 B + 1 for a slow one: 2 would take 25 s
    ],
)
def test_a_slow_machine_serves_fewer_requests_but_a_full_round(token_ms, requests):
    table = table_2(total_ms={"decode-maximal": 12 * token_ms})
    options = options_of("--pd-ratio", "1e9")  # 1,000 tokens, the one of the output is not computed
    assert (options.requests, len(options.policies)) == (19, 5)
    assert offline.affordable_requests(table, options) == requests


def options_of(*argv):
    """The OfflineOptions of a command line, on a CPU."""
    _, options = bench.parse_args(["--device", "cpu", "--dtype", "float32", *argv])
    return options


@pytest.mark.parametrize(
    "argv, layers",
    [
        ([], 2),  # of 6: 5 policies x 13 requests x 1,000 tokens take 65 s for 2, 97 s for 3
        (["--layers", "6"], 6),
        (["--preset", "llama-tiny"], None),  # it has two
        (["--preset", "llama-7b"], 2),
        (["--model", "gpt2"], None),  # a checkpoint is computed as it is
    ],
)
def test_a_slow_cpu_computes_fewer_layers(argv, layers, monkeypatch, capsys):
    def time_layer(config, dtype, *, chunk, context, attention):
        assert (chunk, context, dtype) == (256, 1000, torch.float32)
        return 0.128  # 0.5 ms for each token

    monkeypatch.setattr(offline, "time_layer", time_layer)
    options = options_of(*argv)
    cut = offline.affordable_layers(options, tokens=65_000, limit_s=70.0)
    assert cut == replace(options.model, layers=layers)
    was_cut = cut != options.model
    assert (f"{options.model.name} with {layers} of its" in capsys.readouterr().out) == was_cut


@pytest.mark.parametrize("given, served", [([], 7), (["--requests", "8"], 8)])
def test_fewer_requests_are_served_only_where_none_are_asked_for(
    given, served, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(offline, "MORE_REQUESTS_S", 0)
    file = tmp_path / "report.json"
    argv = "--preset llama-tiny --chunk 16 --batch 3 --seq-len 40 --device cpu --policies vllm"
    bench.main([*argv.split(), *given, f"--json={file}"])
    text = capsys.readouterr().out
    assert f"\n2. End to end: {served} requests of" in text
    assert f"\nserving {served} requests under each policy, " in text
    assert len(json.loads(file.read_text())["end_to_end"]) == 1


def test_requests_whose_output_depends_on_the_policy_are_counted():
    rows = {name: SimpleNamespace(run=run_of([], 1.0)) for name in ("vllm", "sarathi")}
    line = offline.equal_tokens_line(rows, "float32")
    assert line == "same text under all 2 policies: 2 of 2 requests, token for token"
    rows["sarathi"].run.completions[1].tokens[-1] += 1
    line = offline.equal_tokens_line(rows, "bfloat16")
    assert line.startswith("same text under all 2 policies: 1 of 2 requests; in bfloat16 a ")


def run_of(iterations, seconds, drift=0.1):
    """A Run of two requests."""
    completions = [
        Request(0, [1] * 7, 6, 1, 0.0, token_times=[1.5]),
        Request(1, [2] * 6 + [1, 2, 3], 6, 3, 0.5, token_times=[1.5, 1.7, 2.7]),
    ]
    return Run(completions, iterations, seconds, 0.0, drift=drift)


STALLING = [
    Iteration(0.0, 1.5, [ChunkRecord(0, 0, 6, False), ChunkRecord(1, 0, 6, False)]),
    Iteration(1.5, 1.7, [ChunkRecord(1, 6, 1, True)]),
    Iteration(1.7, 2.7, [ChunkRecord(1, 7, 1, True), ChunkRecord(2, 0, 4, False)]),
]
FULL = [  # request 3 is admitted at 3.0 and request 6 at 8.0: 5 + 5 + 6 tokens in between
    Iteration(3.0, 4.0, [ChunkRecord(3, 0, 5, False)]),
    Iteration(5.0, 6.0, [ChunkRecord(4, 0, 5, False)]),
    Iteration(6.5, 7.5, [ChunkRecord(5, 0, 6, False)]),
    Iteration(8.0, 9.0, [ChunkRecord(6, 0, 9, False)]),
]
FAST = [iteration._replace(start=iteration.start / 2) for iteration in FULL]


def test_rows_of_the_policies_summarize_their_runs():
    """Those of policies that were run, request-level first; too short a run has no full round."""
    runs = {"vllm": run_of(STALLING + FULL, 2.0), "request-level": run_of(STALLING, 4.0)}
    rows = policy_runs(["vllm", "sarathi", "request-level"], runs, batch=3)
    assert list(rows) == ["request-level", "vllm"]
    base = offline.row_json(rows["request-level"])
    expected = {
        "iterations": 3,
        "tokens_per_iteration": 6,
        "longest_stall_s": 1.0,
        "p50_ttft_s": (1.5 + 1.0) / 2,
        "p99_tbt_s": 0.2 + 0.99 * 0.8,
        "whole_run_tokens_per_s": (6 + 1 + 6 + 3) / 4,
        "whole_run_gain": 1,
    }
    assert {key: base[key] for key in expected} == pytest.approx(expected)
    assert base["tokens_per_s"] is base["gain"] is None
    assert rows["vllm"].tokens_per_s == pytest.approx(16 / 5)
    assert rows["vllm"].whole_run_gain == 2 and rows["vllm"].gain is None  # the base has none


def test_a_gain_is_over_the_full_rounds_of_request_level():
    runs = {
        "request-level": run_of(STALLING + FULL, 4.0),
        "vllm": run_of(STALLING + FAST, 2.0, drift=0.3),
    }
    rows = policy_runs(["vllm", "request-level"], runs, batch=3)
    assert rows["request-level"].gain == 1 and rows["vllm"].gain == pytest.approx(2)
    assert rows["vllm"].busy and not rows["request-level"].busy
    (alone,) = policy_runs(["vllm"], runs, batch=3).values()
    assert alone.gain is alone.whole_run_gain is None  # request-level was not run


class PretendedLoad:
    """A load of so many steps, each of which takes so long on a clock of its own and on all."""

    def __init__(self, name, steps, step_s, now, order):
        self.name = name
        self.steps = steps
        self.step_s = step_s
        self.now = now
        self.order = order
        self.iterations = []

    def step(self):
        if not self.steps:
            return False
        self.steps -= 1
        self.order.append(self.name)
        self.now[0] += self.step_s
        self.iterations.append(STALLING[0])  # of 12 tokens
        return True

    def result(self):
        return f"run of {self.name}"


def test_the_engine_that_has_used_the_least_time_is_next():
    """Its clock stands still while it is the turn of others, and its run is there when it is done,
    so that an interrupt of the others does not lose it."""
    now = [0.0]
    order = []
    loads = {
        "slow": PretendedLoad("slow", 2, 5.0, now, order),
        "quick": PretendedLoad("quick", 4, 2.0, now, order),
    }
    clocks = {name: Clock(lambda: now[0]) for name in loads}
    tokens = []
    turns = offline_load.take_turns(loads, clocks, tokens.append)
    assert next(turns) == ("quick", "run of quick")
    assert order == ["slow", "quick", "quick", "quick", "slow", "quick"]  # 5 s, 6 s, 10 s, 8 s
    assert list(turns) == [("slow", "run of slow")]
    assert tokens == [12] * 6


def test_the_load_is_balanced_and_the_same_for_all():
    load = load_of(seq_len=1000, pd_ratio=256 / 5, requests=9, batch=6)
    arrivals = load.arrivals()
    assert [(a.time, a.prompt_len) for a in arrivals] == [(0.0, 981)] * 9
    assert [a.output_len for a in arrivals] == [3, 6, 9, 12, 15, 19, 19, 19, 19]
    assert load.tokens == 9 * 981 + (2 + 5 + 8 + 11 + 14) + 4 * 18  # the last is not computed
    alike = replace(load, lockstep=True)
    assert {arrival[:3] for arrival in alike.arrivals()} == {(0.0, 981, 19)}
    for ratio, output in ((1e9, 1), (1e-9, 999)):  # at least a token of each
        arrivals = load_of(seq_len=1000, pd_ratio=ratio, requests=3).arrivals()
        assert arrivals[-1][1:3] == (1000 - output, output)


def policy_run(longest_stall_s, *, gain=None, busy=False):
    """A PolicyRun with this longest stall."""
    stall = metrics.Stall(0, 0.0, longest_stall_s, 1, 1, longest_stall_s)
    summary = metrics.summarize_run([], [], 1.0)
    summary = replace(summary, stalls=replace(summary.stalls, longest=stall))
    return PolicyRun(run=None, summary=summary, busy=busy, tokens_per_s=None, gain=gain)


def conclusion(rows_busy=False, gain=1.0, **settings):
    """What is concluded of a table and of two policies, in one line."""
    runs = {"vllm": policy_run(1.1149, busy=rows_busy), "sarathi": policy_run(0.25, gain=gain)}
    return " ".join(offline.conclude(table_2(**settings), runs, 32, {}).split())


STALLS = "3. Longest stalls, which chunks are for: vllm 1.11 s, sarathi 0.25 s."
COST = "Cost of a decode: 10.00 ms in a batch of its own, 5.00 ms riding with a chunk."
PROMISED = "Throughput at chunk 32: bare products promise 0.99x request-level's"


def test_the_conclusion_says_what_was_measured():
    assert conclusion() == f"{STALLS} {COST} {PROMISED}, sarathi runs at 1.00x."
    assert conclusion(gain=None).endswith(f"{PROMISED}.")
    assert "own, less than the noise riding with a chunk." in conclusion(spread=0.3)


def test_nothing_is_concluded_from_what_was_measured_on_a_busy_machine():
    no_stalls = f"3. Longest stalls, which chunks are for: {timing.TOO_BUSY}."
    no_cost = f"Cost of a decode: {timing.TOO_BUSY}."
    no_throughput = f"Throughput at chunk 32: {timing.TOO_BUSY}."
    assert conclusion(rows_busy=True) == f"{no_stalls} {COST} {no_throughput}"
    assert conclusion(busy=True) == f"{STALLS} {no_cost} {no_throughput}"


def test_the_table_before_an_interrupt_is_kept(monkeypatch, tmp_path, capsys):
    def interrupted(*args, **settings):
        yield "request-level", run_of(STALLING + FULL, 4.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(offline, "run_policies", interrupted)
    monkeypatch.setattr(timing.Probe, "take", lambda self, *_: 0.5)
    argv = "--preset llama-tiny --chunk 32 --batch 3 --seq-len 80 --device cpu --dtype float32"
    json_file = tmp_path / "json.png"
    plot_file = tmp_path / "plot.png"
    with pytest.raises(KeyboardInterrupt):
        bench.main([*argv.split(), f"--json={json_file}", f"--plot={plot_file}"])
    text = capsys.readouterr().out
    report = json.loads(json_file.read_text())
    assert "decode speedup: this machine is too busy to tell\n" in text
    assert "measured limits (busy): " in text and "| decode-only (busy) " in text
    assert "| request-level" in text and list(report["end_to_end"]) == ["request-level"]
    files = f"wrote {json_file}\nwrote {plot_file}\n"
    assert text.endswith(f"interrupted: what was measured until then is kept\n{files}")
    assert report["decode_maximal"] and "conclusion" not in report
    assert plot_file.exists()


@pytest.mark.parametrize(
    "flops, ridge, text", [(3e9, 2.0, "none, "), (80e9, 0.4, "none, "), (80e9, 8.0, "0.08 TFLOP/s")]
)
def test_limits_that_would_be_printed_as_0_are_none(flops, ridge, text):
    info = machine_info(flops_per_s=flops, bytes_per_s=20e9, ridge_tokens=ridge)
    assert offline.limits_line(info).startswith(f"measured limits: {text}")


def test_an_interrupt_before_anything_is_measured_leaves_the_files(monkeypatch, tmp_path):
    monkeypatch.setattr(offline, "measure_decode_maximal", Mock(side_effect=KeyboardInterrupt))
    file = tmp_path / "r.json"
    file.write_text("of yesterday")
    with pytest.raises(KeyboardInterrupt):
        bench.main(["--preset=llama-tiny", "--device=cpu", "--dtype=float32", f"--json={file}"])
    assert file.read_text() == "of yesterday"
