"""What a decode costs, and the policies end to end: held against sums by hand, on clocks that are
pretended. No real timing is asserted here."""

import json
import random
import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import bench
from cli.model import ModelOptions
from lab.commands import offline_report
from lab.commands import offline_run as offline
from lab.commands.options import OfflineOptions
from lab.measure import decode_cost, metrics, offline_load, timing
from lab.measure.batch_times import OPERATIONS, BatchTime
from lab.measure.decode_cost import measure_decode_cost, table_2_batches
from lab.measure.load_run import Clock
from lab.measure.offline_load import OfflineLoad, policy_runs
from lab.measure.run_loop import Run
from policies.observers import ChunkRecord, Iteration
from request import Request
from tests.helpers import machine_info, tiny_model

CHUNK, DECODES, HYBRID, PROMPT = 100.0, 30.0, 110.0, 200.0  # ms of batches by their size


class PretendedRunner:
    """Computes batches of a prompt of 20 tokens, of 10 of them, of 3 decodes, of 10 tokens and 2
    decodes; they take what is said above, and `drift_ms` more with each batch."""

    def __init__(self, drift_ms=0.0, noise_ms=0.0):
        self.model = SimpleNamespace(device=torch.device("cpu"))
        self.cache = SimpleNamespace(data=torch.zeros(1))
        self.now = 0.0
        self.drift_ms = drift_ms
        self.noise = random.Random(0)
        self.noise_ms = noise_ms
        self.calls = []

    def clock(self):
        return self.now

    def greedy(self, spans):
        ms = {(20,): PROMPT, (10,): CHUNK, (1, 1, 1): DECODES, (10, 1, 1): HYBRID}
        lengths = tuple(span.length for span in spans)
        self.calls.append(lengths)
        taken_ms = ms[lengths] + self.drift_ms * len(self.calls)
        self.now += (taken_ms + self.noise.gauss(0, self.noise_ms)) / 1e3
        return []


def cost_of(runner, clock=None, **settings):
    """What a decode costs on that runner."""
    batches = table_2_batches(context=20, batch=3, chunk=12)
    return measure_decode_cost(runner, batches, clock=clock or runner.clock, **settings)


@pytest.fixture(autouse=True)
def idle_machine(monkeypatch):
    """Nobody else uses the machine."""
    monkeypatch.setattr(timing.Probe, "take", lambda self, *_: 0.0)


def test_a_decode_costs_what_a_batch_takes_longer_with_it():
    """The gain that is promised: 10 tokens at the rate of a whole prompt, and 2 decodes alone, over
    the hybrid batch."""
    cost = cost_of(PretendedRunner())
    assert (cost.prefill_tokens, cost.decodes, cost.pairs) == (10, 2, decode_cost.PAIRS)
    assert cost.alone_ms.value == pytest.approx(30 / 3) and cost.alone_ms.error < 1e-6
    assert cost.beside_ms.value == pytest.approx((110 - 100) / 2)
    assert cost.speedup.value == pytest.approx(10 / 5)
    assert cost.promised_gain.value == pytest.approx((10 * 200 / 20 + 2 * 10) / 110)
    assert cost.wall_per_clock > 0 and not cost.busy


def test_a_drift_of_the_machine_cancels_in_pairs_that_turn_around():
    runner = PretendedRunner(drift_ms=0.5)
    cost = cost_of(runner)
    assert cost.chunk_ms.value > 105  # each batch is slower than the one before
    assert cost.beside_ms.value == pytest.approx(5, abs=0.26)
    assert abs(cost.beside_ms.value - 5) <= 2 * cost.beside_ms.error
    pairs = [lengths for lengths in runner.calls[4:] if lengths in ((10,), (10, 1, 1))]
    first = pairs[::2]
    assert len(set(first)) == 2 and abs(first.count((10,)) - first.count((10, 1, 1))) <= 1


def test_the_error_of_a_median_is_that_of_many_repetitions():
    source = random.Random(1)
    runs = [timing.estimate([source.gauss(50, 3) for _ in range(28)]) for _ in range(3000)]
    spread = statistics.stdev(run.value for run in runs)
    assert statistics.fmean(run.error for run in runs) == pytest.approx(spread, rel=0.1)


def test_the_error_of_a_speedup_is_that_of_many_measurements():
    costs = []
    for seed in range(300):
        runner = PretendedRunner(noise_ms=1.0)
        runner.noise.seed(seed)
        costs.append(cost_of(runner))
    spread = statistics.stdev(cost.speedup.value for cost in costs)
    error = statistics.fmean(cost.speedup.error for cost in costs)
    assert error == pytest.approx(spread, rel=0.2)
    spread = statistics.stdev(cost.promised_gain.value for cost in costs)
    error = statistics.fmean(cost.promised_gain.error for cost in costs)
    assert error == pytest.approx(spread, rel=0.3)  # a prompt is timed 4 times


def test_what_is_lost_in_the_noise_is_no_speedup(monkeypatch):
    cost = cost_of(PretendedRunner())
    assert replace(cost, beside_ms=timing.Estimate(5, 2.4)).speedup.value == pytest.approx(2)
    assert replace(cost, beside_ms=timing.Estimate(5, 2.6)).speedup is None
    assert replace(cost, beside_ms=timing.Estimate(-1, 0.1)).speedup is None
    monkeypatch.setattr(timing.Probe, "take", lambda self, *_: 0.5)
    assert cost_of(PretendedRunner()).speedup is None


@pytest.mark.parametrize("beside_ms, cell", [((5, 1), "5.00"), ((-1, 0.1), "-"), ((5, 3), "-")])
def test_the_cost_of_a_decode_is_no_number_where_it_is_noise(beside_ms, cell, capsys):
    cost = replace(cost_of(PretendedRunner()), beside_ms=timing.Estimate(*beside_ms))
    names = ("prefill-only", "decode-only", "decode-maximal")
    time = BatchTime(total_ms=6.0, operations_ms=dict.fromkeys(OPERATIONS, 1.0), gpu_ms={})
    parts = dict.fromkeys(names, time)
    costs = offline_report.Costs(cpu=cost, wall=None, parts=parts)
    offline_report.print_costs(costs, tiny_model(), machine_info(), context=20)
    rows = [line.strip("|").split("|") for line in capsys.readouterr().out.splitlines()]
    (maximal,) = (row for row in rows if row[0].strip() == "decode-maximal")
    assert maximal[-1].strip() == cell


def test_fewer_pairs_are_timed_where_they_take_longer(monkeypatch):
    runner = PretendedRunner()
    monkeypatch.setattr(decode_cost.time, "perf_counter", runner.clock)
    cost = cost_of(runner, limit_s=4.0)  # a pair takes 0.27 s with the decodes, and some prompts
    assert decode_cost.FEWEST_PAIRS < cost.pairs < decode_cost.PAIRS
    assert runner.now < 4.0 + 1.0
    assert cost_of(runner, limit_s=0.0).pairs == decode_cost.FEWEST_PAIRS


def test_one_thread_computes_in_its_block():
    threads = torch.get_num_threads()
    with timing.one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == threads


def costs_of(wall_per_clock=1.0, token_ms=0.2):
    """Costs of a hybrid batch of 256 tokens, each of which takes so long."""
    cost = replace(
        cost_of(PretendedRunner()),
        hybrid_ms=timing.Estimate(256 * token_ms, 0.0),
        wall_per_clock=wall_per_clock,
    )
    return offline_report.Costs(cpu=cost, wall=None, parts={})


@pytest.mark.parametrize(
    "token_ms, wall_per_clock, requests",
    [
        (0.1, 1.0, 37),  # MOST_ROUNDS and the first: more would take less than 40 s
        (0.3125, 1.0, 25),  # 5 policies x 1,000 tokens x 0.3125 ms = 1.5625 s for each: 25.6
        (0.3125, 1.5, 13),  # on a machine that others use
        (5.0, 1.0, 7),
    ],
)
def test_a_slow_machine_serves_fewer_rounds(token_ms, wall_per_clock, requests):
    costs = costs_of(wall_per_clock, token_ms)
    assert offline.affordable_requests(costs, OfflineOptions(), policies=5) == requests


@pytest.mark.parametrize(
    "options, layers",
    [
        ({}, 2),
        ({"layers": 6}, 6),
        ({"preset": "llama-tiny"}, None),  # it has two
        ({"preset": "llama-7b"}, 2),
        ({"model": "gpt2"}, None),  # a checkpoint is computed as it is
    ],
)
def test_a_cpu_computes_few_layers_unless_it_is_told_how_many(options, layers):
    assert offline.with_few_layers(ModelOptions(device="cpu", **options)).layers == layers


def run_of(iterations, seconds, drift=0.1):
    """A Run of two requests."""
    completions = [
        Request(0, [*[1] * 6, 1], 6, 1, 0.0, token_times=[1.5]),
        Request(1, [*[2] * 6, 1, 2, 3], 6, 3, 0.5, token_times=[1.5, 1.7, 2.7]),
    ]
    return Run(completions, iterations, seconds, drift=drift)


def test_requests_whose_output_depends_on_the_policy_are_counted():
    rows = {name: SimpleNamespace(run=run_of([], 1.0)) for name in ("vllm", "sarathi")}
    assert offline_report.count_equal_texts(rows) == 2
    rows["sarathi"].run.completions[1].tokens[-1] += 1
    assert offline_report.count_equal_texts(rows) == 1


def admission(start, *requests, tokens=5):
    """An Iteration that computes so many tokens of each of these requests."""
    return Iteration(start, start + 1, [ChunkRecord(i, 0, tokens, False) for i in requests])


def test_a_round_begins_where_the_batch_is_full():
    """With a batch of 2: request 2 finds it full, and 4 and 6 begin the rounds after."""
    iterations = [admission(float(i), i) for i in range(7)]
    rounds = metrics.full_rounds(iterations, 2)
    assert [(each.iterations, each.seconds) for each in rounds] == [
        (iterations[2:4], 2.0),
        (iterations[4:6], 2.0),
    ]
    assert [each.tokens for each in rounds] == [10, 10]
    assert metrics.full_rounds(iterations[:4], 2) == metrics.full_rounds([], 2) == []
    together = [admission(0.0, 0, 1), admission(1.0, 2, 3), admission(3.0, 4, 5)]
    assert metrics.full_rounds(together, 2) == [(together[1:2], 2.0)]


def test_a_gain_has_the_range_of_its_rounds():
    """Rounds of 2 requests, 10 tokens each, that take 2 s and 2 s, or 1 s and 4 s."""
    base = [admission(float(i), i) for i in range(7)]
    starts = (0.0, 0.5, 1.0, 1.5, 2.0, 4.0, 6.0)
    other = [admission(start, i) for i, start in enumerate(starts)]
    runs = {"vllm": run_of(other, 7.0, drift=0.3), "request-level": run_of(base, 7.0)}
    rows = policy_runs(["vllm", "sarathi", "request-level"], runs, batch=2)
    assert list(rows) == ["request-level", "vllm"]
    assert rows["request-level"].gain == 1 and rows["request-level"].gain_range == (1, 1)
    assert rows["vllm"].round_rates == [10 / 1, 10 / 4]
    assert rows["vllm"].gain == pytest.approx((20 / 5) / (20 / 4))
    assert rows["vllm"].gain_range == pytest.approx((2.5 / 5, 10 / 5))
    assert rows["vllm"].busy and not rows["request-level"].busy
    runs = {"vllm": run_of(other[:5], 7.0), "request-level": run_of(base, 7.0)}
    alone = policy_runs(["vllm", "request-level"], runs, batch=2)["vllm"]
    assert alone.gain == pytest.approx(10 / 5) and alone.gain_range is None  # of a single round
    assert policy_runs(["vllm"], runs, batch=2)["vllm"].gain is None  # without its base


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
        self.iterations.append(admission(0.0, 0, 1, tokens=6))
        return True

    def result(self):
        return f"run of {self.name}"


def pretended_loads(now, order):
    """A load of slow steps and one of quick ones."""
    loads = {
        "slow": PretendedLoad("slow", 2, 5.0, now, order),
        "quick": PretendedLoad("quick", 4, 2.0, now, order),
    }
    return loads, {name: Clock(lambda: now[0]) for name in loads}


def test_the_engine_that_has_used_the_least_time_is_next():
    """Its clock stands still while it is the turn of others, and its run is there when it is done,
    so that an interrupt of the others does not lose it."""
    now = [0.0]
    order = []
    loads, clocks = pretended_loads(now, order)
    tokens = []
    turns = offline_load.take_turns(loads, clocks, tokens.append)
    assert next(turns) == ("quick", "run of quick")
    assert order == ["slow", "quick", "quick", "quick", "slow", "quick"]  # 5 s, 6 s, 10 s, 8 s
    assert list(turns) == [("slow", "run of slow")]
    assert tokens == [12] * 6


def test_what_is_not_done_at_the_deadline_is_left_out(monkeypatch):
    now = [0.0]
    order = []
    loads, clocks = pretended_loads(now, order)
    loads["quick"].steps = 2
    monkeypatch.setattr(offline_load.time, "perf_counter", lambda: now[0])
    turns = offline_load.take_turns(loads, clocks, deadline=10.0)
    assert list(turns) == [("quick", "run of quick")]
    assert order == ["slow", "quick", "quick", "slow"]


def test_the_load_is_balanced_and_the_same_for_all():
    load = OfflineLoad(seq_len=1000, pd_ratio=256 / 5, requests=9, batch=6)
    arrivals = load.arrivals()
    assert [(a.time, a.prompt_len) for a in arrivals] == [(0.0, 981)] * 9
    assert [a.output_len for a in arrivals] == [3, 6, 9, 12, 15, 19, 19, 19, 19]
    assert load.tokens == 9 * 981 + (2 + 5 + 8 + 11 + 14) + 4 * 18  # the last is not computed
    alike = replace(load, lockstep=True)
    assert {arrival[:3] for arrival in alike.arrivals()} == {(0.0, 981, 19)}
    for ratio, output in ((1e9, 1), (1e-9, 999)):  # at least a token of each
        arrivals = replace(load, pd_ratio=ratio, requests=3, batch=3).arrivals()
        assert arrivals[-1][1:3] == (1000 - output, output)


TINY = [
    *("--preset", "llama-tiny", "--device", "cpu", "--dtype", "float32"),
    *("--chunk", "32", "--batch", "3", "--seq-len", "80", "--requests", "10"),
]


def report_of(tmp_path, *argv):
    """What the command writes as JSON."""
    file = tmp_path / "report.json"
    bench.main([*TINY, *argv, f"--json={file}"])
    return json.loads(file.read_text(encoding="utf-8"))


def test_the_report_adds_up(tmp_path):
    report = report_of(tmp_path, "--policies=request-level,vllm,sarathi")
    costs = report["decode_cost"]
    assert costs["layers"] == 2 and costs["weight_bytes"] > 0
    assert (costs["cpu_time"]["threads"], costs["cpu_time"]["decodes"]) == (1, 2)
    assert costs["wall_time"]["threads"] == torch.get_num_threads()
    for cost in (costs["cpu_time"], costs["wall_time"]):
        alone = cost["decode_only_ms"]["value"] / 3
        assert cost["alone_ms"]["value"] == pytest.approx(alone)
        if cost["speedup"]:
            speedup = cost["alone_ms"]["value"] / cost["beside_ms"]["value"]
            assert cost["speedup"]["value"] == pytest.approx(speedup)
            assert cost["speedup"]["error"] > 0
    rows = report["end_to_end"]
    assert report["equal_texts"] == 10
    for row in rows.values():
        assert len(row["round_rates"]) == 2
        gains = [
            rate / base
            for rate, base in zip(
                row["round_rates"], rows["request-level"]["round_rates"], strict=True
            )
        ]
        assert row["gain_range"] == pytest.approx([min(gains), max(gains)])


def test_on_a_busy_machine_all_is_measured_in_cpu_time_on_one_thread(monkeypatch, tmp_path):
    monkeypatch.setattr(timing.Probe, "take", lambda self, *_: 0.5)
    threads_while_serving = []
    run_policies = offline.run_policies

    def watched(*args, now, **settings):
        threads_while_serving.append((torch.get_num_threads(), now))
        return run_policies(*args, now=now, **settings)

    monkeypatch.setattr(offline, "run_policies", watched)
    report = report_of(tmp_path, "--policies=request-level,vllm")
    assert report["decode_cost"]["wall_time"] is None and report["machine"]["threads"] == 1
    assert threads_while_serving == [(1, timing.cpu_time)]
    assert not any(row["busy"] for row in report["end_to_end"].values())


def test_what_was_done_before_an_interrupt_is_written(monkeypatch, tmp_path):
    def interrupted(*args, **settings):
        yield "request-level", run_of([admission(float(i), i) for i in range(7)], 4.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(offline, "run_policies", interrupted)
    plot_file = tmp_path / "plot.png"
    with pytest.raises(KeyboardInterrupt):
        report_of(tmp_path, f"--plot={plot_file}")
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert list(report["end_to_end"]) == ["request-level"] and "conclusion" not in report
    assert report["decode_cost"]["cpu_time"] and plot_file.exists()
