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
from lab.measure.decode_cost import measure_decode_cost, table_2_batches
from lab.measure.load_run import Clock
from lab.measure.offline_load import OfflineLoad, policy_runs
from lab.measure.run_loop import Run
from policies import POLICIES
from policies.observers import ChunkRecord, Iteration
from request import Request

MS = {  # of batches: a prompt, a chunk of it, 3 decodes, the chunk and 2 decodes
    (20,): 200.0,
    (10,): 100.0,
    (1, 1, 1): 30.0,
    (10, 1, 1): 110.0,
}
OWN = "from scheduler import VLLM\n\nclass Mine(VLLM):\n    pass\n"
near = pytest.approx


class PretendedRunner:
    """Computes batches that take MS, `drift_ms` more with each batch, and some noise."""

    def __init__(self, drift_ms=0.0, noise_ms=0.0, seed=0):
        self.model = SimpleNamespace(device=torch.device("cpu"))
        self.cache = SimpleNamespace(data=torch.zeros(1))
        self.now = 0.0
        self.drift_ms = drift_ms
        self.noise_ms = noise_ms
        self.noise = random.Random(seed)
        self.calls = 0

    def clock(self):
        return self.now

    def greedy(self, spans):
        self.calls += 1
        taken_ms = MS[tuple(span.length for span in spans)]
        taken_ms += self.drift_ms * self.calls
        taken_ms += self.noise.gauss(0, self.noise_ms)
        self.now += taken_ms / 1e3
        return []


def cost_of(runner, **settings):
    """What a decode costs on that runner."""
    batches = table_2_batches(context=20, batch=3, chunk=12)
    return measure_decode_cost(runner, batches, clock=runner.clock, **settings)


@pytest.fixture(autouse=True)
def idle_machine(monkeypatch):
    """Nobody else uses the machine."""
    monkeypatch.setattr(timing.Probe, "take", lambda self, *_: 0.0)


def test_a_decode_costs_what_a_batch_takes_longer_with_it():
    """The gain that is promised: 10 tokens at the rate of a whole prompt, and 2 decodes alone, over
    the hybrid batch."""
    cost = cost_of(PretendedRunner())
    assert (cost.prefill_tokens, cost.decodes, cost.pairs) == (10, 2, decode_cost.PAIRS)
    assert cost.alone_ms.value == near(30 / 3)
    assert cost.beside_ms.value == near((110 - 100) / 2)
    assert cost.speedup.value == near(10 / 5)
    assert cost.promised_gain.value == near((10 * 200 / 20 + 2 * 10) / 110)
    assert cost_of(PretendedRunner(), limit_s=0.0).pairs == decode_cost.FEWEST_PAIRS


def test_a_drift_of_the_machine_cancels_in_pairs_that_turn_around():
    cost = cost_of(PretendedRunner(drift_ms=0.5))
    assert cost.chunk_ms.value > 105  # each batch is slower than the one before
    assert abs(cost.beside_ms.value - 5) <= 2 * cost.beside_ms.error < 1


def test_the_error_of_a_speedup_is_that_of_many_measurements():
    costs = [cost_of(PretendedRunner(noise_ms=1.0, seed=seed)) for seed in range(300)]
    for name, tolerance in {"speedup": 0.2, "promised_gain": 0.3}.items():
        estimates = [getattr(cost, name) for cost in costs]
        spread = statistics.stdev(each.value for each in estimates)
        error = statistics.fmean(each.error for each in estimates)
        assert error == near(spread, rel=tolerance)


def test_what_is_lost_in_the_noise_is_no_speedup():
    cost = cost_of(PretendedRunner())
    assert replace(cost, beside_ms=timing.Estimate(5, 2.4)).speedup.value == near(2)
    assert replace(cost, beside_ms=timing.Estimate(5, 2.6)).speedup is None
    assert replace(cost, busy=True).speedup is None
    assert offline_report.show_estimate(timing.Estimate(5, 2.4)) == "5 ± 2"
    assert offline_report.show_estimate(timing.Estimate(5, 2.6)) == "-"


@pytest.mark.parametrize(
    "token_ms, wall_per_clock, requests",
    [
        (0.1, 1.0, 37),  # MOST_ROUNDS: more would take less than 40 s
        (0.3125, 1.0, 25),  # 5 policies x 6,000 tokens x 0.3125 ms = 9.4 s for a round
        (0.3125, 1.5, 13),  # on a machine that others use
        (5.0, 1.0, 7),
    ],
)
def test_a_slow_machine_serves_fewer_rounds(token_ms, wall_per_clock, requests):
    cost = replace(
        cost_of(PretendedRunner()),
        hybrid_ms=timing.Estimate(256 * token_ms, 0.0),
        wall_per_clock=wall_per_clock,
    )
    assert offline.affordable_requests(cost, OfflineOptions(), policies=5) == requests


def test_a_cpu_computes_few_layers_unless_it_is_told_how_many():
    def layers(**options):
        return offline.with_few_layers(ModelOptions(device="cpu", **options)).layers

    assert [layers(), layers(layers=6)] == [2, 6]
    assert layers(preset="llama-tiny") is None  # it has two
    assert layers(model="gpt2") is None  # a checkpoint is computed as it is


def run_of(iterations, drift=0.1):
    """A Run of two requests."""
    completions = [
        Request(0, [*[1] * 6, 1], 6, 1, 0.0, token_times=[1.5]),
        Request(1, [*[2] * 6, 1, 2, 3], 6, 3, 0.5, token_times=[1.5, 1.7, 2.7]),
    ]
    return Run(completions, iterations, 7.0, drift=drift)


def test_requests_whose_output_depends_on_the_policy_are_counted():
    rows = {name: SimpleNamespace(run=run_of([])) for name in ("vllm", "sarathi")}
    assert offline_report.count_equal_texts(rows) == 2
    rows["sarathi"].run.completions[1].tokens[-1] += 1
    assert offline_report.count_equal_texts(rows) == 1


def admission(start, *requests, tokens=5):
    """An Iteration that computes so many tokens of each of these requests."""
    return Iteration(start, start + 1, [ChunkRecord(i, 0, tokens, False) for i in requests])


def test_a_gain_is_that_of_rounds_which_begin_where_the_batch_is_full():
    """With a batch of 2, request 2 finds it full, and 4 and 6 begin the rounds after: of 10 tokens
    each, in 2 s and 2 s, or 1 s and 4 s."""
    base = [admission(float(i), i) for i in range(7)]
    rounds = metrics.full_rounds(base, 2)
    assert rounds == [(base[2:4], 2.0), (base[4:6], 2.0)]
    assert [each.tokens for each in rounds] == [10, 10]
    starts = (0.0, 0.5, 1.0, 1.5, 2.0, 4.0, 6.0)
    other = [admission(start, i) for i, start in enumerate(starts)]
    runs = {"vllm": run_of(other, drift=0.3), "request-level": run_of(base)}
    rows = policy_runs(["vllm", "sarathi", "request-level"], runs, batch=2)
    assert list(rows) == ["request-level", "vllm"]
    assert rows["request-level"].gain == 1
    assert rows["vllm"].round_rates == [10 / 1, 10 / 4]
    assert rows["vllm"].gain == near((20 / 5) / (20 / 4))
    assert rows["vllm"].gain_range == near((2.5 / 5, 10 / 5))
    assert rows["vllm"].busy and not rows["request-level"].busy
    assert policy_runs(["vllm"], runs, batch=2)["vllm"].gain is None  # without its base


class PretendedLoad:
    """A load of so many steps, each of which takes so long on one clock of all."""

    def __init__(self, steps, step_s, now):
        self.steps = steps
        self.step_s = step_s
        self.now = now
        self.iterations = []

    def step(self):
        if len(self.iterations) == self.steps:
            return False
        self.now[0] += self.step_s
        self.iterations.append(admission(self.now[0], 0, 1, tokens=6))
        return True

    def result(self):
        return [iteration.start for iteration in self.iterations]


def test_the_engine_that_has_used_the_least_time_is_next():
    now = [0.0]
    loads = {"slow": PretendedLoad(2, 5.0, now), "quick": PretendedLoad(4, 2.0, now)}
    clocks = {name: Clock(lambda: now[0]) for name in loads}
    tokens = []
    turns = list(offline_load.take_turns(loads, clocks, tokens.append))
    assert turns == [("quick", [7, 9, 11, 18]), ("slow", [5, 16])]
    assert tokens == [12] * 6


def test_the_load_is_balanced_and_the_same_for_all():
    load = OfflineLoad(
        seq_len=1000,
        pd_ratio=256 / 5,
        requests=9,
        batch=6,
    )
    arrivals = load.arrivals()
    assert [(a.time, a.prompt_len) for a in arrivals] == [(0.0, 981)] * 9
    assert [a.output_len for a in arrivals] == [3, 6, 9, 12, 15, 19, 19, 19, 19]
    assert load.tokens == 9 * 981 + (2 + 5 + 8 + 11 + 14) + 4 * 18  # the last is not computed


TINY = [
    *("--preset", "llama-tiny", "--device", "cpu", "--dtype", "float32"),
    *("--chunk", "32", "--batch", "3", "--seq-len", "80", "--requests", "10"),
]


def report_of(tmp_path, *argv):
    """What the command writes as JSON."""
    file = tmp_path / "report.json"
    bench.main([*TINY, *argv, f"--json={file}", f"--plot={tmp_path / 'plot.png'}"])
    return json.loads(file.read_text(encoding="utf-8"))


def test_the_report_of_all_policies_adds_up(tmp_path):
    (tmp_path / "own.py").write_text(OWN, "utf-8")
    own = f"{tmp_path}/own.py:Mine"
    policies = [name for name in POLICIES if name != "dynamic"] + [own]
    report = report_of(tmp_path, "--policies", ",".join(policies))
    assert report["options"]["pd_ratio"] == 16 and report["machine"]["model"] == "llama-tiny"
    costs = report["decode_cost"]
    assert costs["layers"] == 2 and costs["cpu_time"]["threads"] == 1
    assert costs["wall_time"]["threads"] == torch.get_num_threads()
    for cost in (costs["cpu_time"], costs["wall_time"]):
        assert cost["alone_ms"]["value"] == near(cost["decode_only_ms"]["value"] / 3)
    rows = report["end_to_end"]
    assert list(rows) == policies and report["equal_texts"] == 10
    # 10 requests of 75 + 5 tokens; the first two want 1 and 3; the last of each is not computed
    computed = 10 * 75 + 8 * 5 + 1 + 3 - 10
    base = rows["request-level"]
    for row in rows.values():
        assert round(row["tokens_per_iteration"] * row["iterations"]) == computed
        rates = zip(row["round_rates"], base["round_rates"], strict=True)
        gains = [rate / base_rate for rate, base_rate in rates]
        assert row["gain_range"] == near([min(gains), max(gains)])
    assert rows[own]["iterations"] == rows["vllm"]["iterations"]
    assert base["longest_stall_s"] == 0 < rows["vllm"]["longest_stall_s"]
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_a_busy_machine_measures_on_one_thread_and_an_interrupt_keeps_what_is_done(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(timing.Probe, "take", lambda self, *_: 0.5)
    seen = []

    def interrupted(*args, now, **settings):
        seen.append((torch.get_num_threads(), now))
        yield "request-level", run_of([admission(float(i), i) for i in range(7)], drift=0.5)
        raise KeyboardInterrupt

    monkeypatch.setattr(offline, "run_policies", interrupted)
    with pytest.raises(KeyboardInterrupt):
        report_of(tmp_path)
    assert seen == [(1, timing.cpu_time)]
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["decode_cost"]["wall_time"] is None and report["machine"]["threads"] == 1
    assert [(name, row["busy"]) for name, row in report["end_to_end"].items()] == [
        ("request-level", False)
    ]
