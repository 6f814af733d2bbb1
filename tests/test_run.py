"""Runs under load: what is measured, when a run has failed, how a capacity is found.

Most runs live in a time of their own, in which looking at the clock takes a tick.
"""

import gc
import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from config import EngineConfig
from engine import Engine
from lab.measure import capacity, token_budget
from lab.measure import timing as measure
from lab.measure.capacity import (
    Base,
    Bounded,
    Verdict,
    estimated_qps,
    judge,
    measure_base,
    search_capacity,
    slo_seconds,
    summarize_search,
)
from lab.measure.load_run import Clock, EngineServer, serve
from lab.measure.run_loop import LoadRun
from lab.measure.run_plan import run_plan
from lab.measure.token_budget import Profiled
from lab.measure.workload import Arrival, prompts
from model import GPT
from parallel.stages import ParallelEngine
from policies import POLICIES
from request import Service
from sampling import SamplingParams
from tests.helpers import alone, tiny_model

MODEL = tiny_model()
RUNNER = SimpleNamespace(cache=SimpleNamespace(data=torch.zeros(1)))
SMALL = EngineConfig(chunk=8, max_batch=4, max_len=32, page_size=4, pages=16)
TIMES = [(0, 9, 5), (0.1, 20, 12), (0.1, 3, 1), (0.35, 14, 8), (4.0, 6, 6), (4.001, 2, 20)]
ARRIVALS = [Arrival(*times) for times in TIMES]
TOKENS = prompts(ARRIVALS, 61, 0)


class Time:
    """A clock that advances by `tick` seconds whenever it is looked at, and by what is slept."""

    def __init__(self, tick):
        self.time = 1000.0
        self.tick = tick

    def now(self):
        self.time += self.tick
        return self.time

    def sleep(self, seconds):
        self.time += seconds


class Silent(GPT):
    """A model that computes nothing: for runs of which only the times matter."""

    config = MODEL.config
    device = MODEL.device
    dtype = MODEL.dtype
    compiled = False

    def __init__(self):
        """It has no weights."""

    def __call__(self, batch, cache):
        return torch.zeros(len(batch.logit_rows), self.config.vocab_size)


def serve_small(policy="vllm", tick=0.01, arrivals=ARRIVALS, model=Silent(), **more):  # noqa: B008
    options = {"tbt_slo": 1.0} if policy == "dynamic" else {}
    config = replace(SMALL, policy=policy, policy_options=options, **more)
    time = Time(tick)
    tokens = prompts(arrivals, 61, 0)
    return serve(model, config, arrivals, tokens, now=time.now, sleep=time.sleep)


@pytest.fixture(scope="module", autouse=True)
def alone_on_the_machine():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure.Probe, "take", lambda *_: 0.125)
        yield


@pytest.fixture(scope="module")
def expected():
    """The text of each request, computed without an engine."""
    return [
        alone(MODEL, p, SamplingParams(a.output_len)) for p, a in zip(TOKENS, ARRIVALS, strict=True)
    ]


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_serves_the_same_arrivals_to_their_full_length(name, expected):
    run = serve_small(name, model=MODEL)
    assert [c.id for c in run.completions] == list(range(6)) and not run.cut_short
    assert [c.prompt for c in run.completions] == TOKENS
    assert [c.output for c in run.completions] == expected
    assert [(c.arrival, c.prompt_len, len(c.output)) for c in run.completions] == TIMES
    computed = Counter()  # the warm-up is not in the iterations, and ids begin after it
    for iteration in run.iterations:
        for i, _, length, _ in iteration.chunks:
            computed[i] += length
    for c in run.completions:
        assert computed[c.id] == c.prompt_len + len(c.output) - 1 + c.recomputed_tokens
    assert run.seconds == run.iterations[-1].end == max(c.token_times[-1] for c in run.completions)


def test_no_request_runs_before_arrival_or_waits_for_an_idle_engine():
    run = serve_small("sarathi-serve")
    for iteration in run.iterations:
        assert all(ARRIVALS[i].time <= iteration.start for i, *_ in iteration.chunks)
    idle_until = run.completions[4]
    meanwhile = run.completions[1]
    before = [i.end for i in run.iterations if i.start < idle_until.arrival]
    assert before[-1] < idle_until.arrival - 1  # the engine was idle, and slept
    assert idle_until.scheduling_delay < 0.1
    # arrived during the first iteration: the delay counts from then, not from its end
    assert run.iterations[0].start < meanwhile.arrival < meanwhile.scheduled


def test_classes_and_targets_come_with_the_arrival():
    engine = Engine(Silent(), replace(SMALL, policy="priority"))
    server = EngineServer(engine, Clock(lambda: 0.0))
    server.add(7, Arrival(0.5, 8, 4, "realtime", 0.5, 0.1, user="bob"), [1] * 8)
    request = engine.scheduler.requests[7]
    assert (request.arrival, request.service) == (0.5, Service(0, 0.5, 0.1, "bob"))


def test_a_run_counts_preemptions_and_the_time_outside_the_forward_pass():
    run = serve_small("vllm", pages=8)
    preempted = Counter(i for iteration in run.iterations for i in iteration.preempted)
    assert preempted and all(preempted[c.id] == c.preemptions for c in run.completions)
    # the clock is looked at before and after a step, and in it at its start, before and after
    # forward: 4 ticks, 1 of them in forward; and once more for each of 6 requests, when admitted
    run = serve_small("sarathi-serve")
    ticks = 4 * len(run.iterations) + 6
    assert run.own_fraction == pytest.approx(1 - len(run.iterations) / ticks)


@pytest.mark.slow
def test_an_interrupted_run_is_what_was_seen_of_it():
    """Ctrl-C at looks at the clock: between iterations, before and after forward."""
    tokens = prompts(ARRIVALS, 61, 0)

    def load_run(limit):
        time = Time(0.01)
        looks = iter(range(limit))

        def clock():
            if next(looks, None) is None:
                raise KeyboardInterrupt
            return time.now()

        run_clock = Clock(clock)
        engine = Engine(Silent(), replace(SMALL, policy="vllm"), clock=run_clock)
        return LoadRun(EngineServer(engine, run_clock, time.sleep), ARRIVALS, tokens)

    full = load_run(10**6).run()
    num_completed = set()
    for limit in range(1, 500):
        try:
            load_run(limit).run()
        except KeyboardInterrupt as interrupt:
            run = interrupt.run
        else:
            break  # it was done before
        assert run.cut_short == "interrupted" and not judge(run, 1000.0).met
        assert run.iterations == full.iterations[: len(run.iterations)]
        last = run.iterations[-1].end if run.iterations else 0.0
        for c in full.completions:
            same = [other for other in run.completions if other.id == c.id]
            is_equal = [repr(other) for other in same] == [repr(c)]
            assert is_equal or c.token_times[-1] >= last  # the events of a step may be lost
            assert all(o.token_times == c.token_times[: len(o.output)] for o in same)
        num_completed.add(len(run.completions))
    assert num_completed >= set(range(1, 7)) and max(num_completed) == len(ARRIVALS)


def test_garbage_collection_is_as_it_was_after_a_run_that_failed(monkeypatch):
    def fail(*_):
        assert gc.get_freeze_count() > 0
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no memory"):
        patch.setattr(Engine, "step", fail)
        patch.setattr(Engine, "warm_up", lambda *_: None)
        serve_small()
    assert gc.get_freeze_count() == 0 and gc.isenabled()


def test_a_run_looks_every_second_at_who_else_computes(monkeypatch):
    took = []
    monkeypatch.setattr(measure.Probe, "take", lambda probe, *_: took.append(len(took)) or took[-1])
    run = serve_small()
    assert 5 < run.seconds < 6
    assert len(took) == 4  # at 0, 1, 4 and 5 s: from 1.2 to 4 s it waits
    assert run.drift == sum(took) / len(took) > 0 and judge(run, 1.0).busy


def test_no_measured_time_holds_a_glance_at_the_machine(monkeypatch):
    """A probe of any length changes nothing of a run: not the times of tokens, not its end."""
    arrivals = [Arrival(0.0, 9, 22), Arrival(0.9, 9, 22), Arrival(1.1, 3, 20)]
    tokens = prompts(arrivals, 61, 0)

    def run(glance_s):
        time = Time(0.01)
        monkeypatch.setattr(measure.Probe, "take", lambda *_: time.sleep(glance_s) or 0.125)
        return serve(Silent(), SMALL, arrivals, tokens, now=time.now, sleep=time.sleep)

    without = run(glance_s=0.0)
    with_probes = run(glance_s=0.3)
    assert max(without.completions[1].tbt) < 0.3
    for quick, slow in zip(without.completions, with_probes.completions, strict=True):
        assert slow.token_times == pytest.approx(quick.token_times)
    assert with_probes.seconds == pytest.approx(without.seconds)


def test_a_pipeline_is_probed_when_no_batch_is_in_flight(monkeypatch):
    """Its other stages would go on while the clock of the run stands still."""
    took = []
    monkeypatch.setattr(measure.Probe, "take", lambda probe, *_: took.append(1) or 0.0)
    engine = object.__new__(ParallelEngine)
    engine.runner = SimpleNamespace(model=MODEL)
    engine.step = engine.abort = None
    engine.scheduler = SimpleNamespace(requests={}, peers=())
    server = EngineServer(engine, Clock(lambda: 0.0))
    for flights, probes in [(("a batch",), 0), ((), 1), ((), 1)]:
        engine.flights = flights
        assert server.ready_at() == (0.0 if flights else np.inf)
        assert len(took) == probes


def test_what_is_made_of_a_base():
    """An SLO is a multiple of it, a rate is prefill at full speed and decodes in full batches."""
    base = Base(seconds=0.064, prefill_token_s=0.001, decodes=32, context=512)
    slos = [slo_seconds(slo, base) for slo in ("strict", "relaxed", 0.2)]
    assert slos == pytest.approx([5 * 0.064, 25 * 0.064, 0.2])
    with pytest.raises(ValueError, match="^SLO of 0.01 s: below .*, which takes 0.064 s here"):
        slo_seconds(0.01, base)
    rate = 1 / (0.2 + 50 * 0.002)
    assert estimated_qps(base, [Arrival(0.0, 200, 50)] * 3) == pytest.approx(rate)


@pytest.mark.parametrize(
    "max_len, context, chunk", [(512, 256, 128), (9000, 4096, 128), (3, 1, 3), (2, 1, 2)]
)
def test_the_base_is_a_decode_of_32_at_half_the_longest_context(
    max_len, context, chunk, monkeypatch
):
    cases = []

    def time_iterations(runner, asked, *_):
        cases.extend(asked)
        return [Profiled(*case, 0.064) for case in asked]

    monkeypatch.setattr(capacity, "runner_for", lambda model: lambda *_: RUNNER)
    monkeypatch.setattr(token_budget, "time_iterations", time_iterations)
    base, _ = measure_base(MODEL, 128, max_len)
    assert base == Base(0.064, 0.064 / chunk, 32, context)
    assert cases == [(32, context, 32), (chunk, chunk, 0)]


@pytest.mark.parametrize("chunk, max_len", [(40, 64), (128, 3)])
def test_the_base_is_measured_in_a_cache_with_room_for_it(chunk, max_len):
    base, _ = measure_base(MODEL, chunk, max_len)
    assert base.seconds > 0 and base.prefill_token_s > 0


def search(meets, start=1.0):
    """What a search finds. `meets` says of a rate whether it was met, or of a busy
    machine (whether it was met, busy)."""

    def run_at_rate(rate):
        answer = meets(rate)
        met, busy = answer if isinstance(answer, tuple) else (answer, False)
        return Verdict(missed="" if met else "x", busy=busy)

    return search_capacity(run_at_rate, start)


@pytest.mark.parametrize("limit", [0.21, 0.9, 1.0, 1.3, 2.0, 7.7, 15.0])
@pytest.mark.parametrize("unlucky", [None, *range(6)])  # which of the runs fails by bad luck
def test_capacity_is_found_to_five_percent_and_one_failure_does_not_decide(limit, unlucky):
    calls = []

    def meets(rate):
        calls.append((rate, rate <= limit and len(calls) != unlucky))
        return calls[-1][1]

    result = search(meets)
    qps = result.capacity_qps
    assert limit / 1.05 <= qps <= limit and qps.bound == ""
    assert [(trial.qps, trial.verdict.met) for trial in result.trials] == calls
    assert result.best.qps == qps and result.best.verdict.met
    assert min(rate for rate, _ in calls if rate > qps) <= 1.05 * qps  # and not just by luck
    assert max(Counter(rate for rate, met in calls if not met).values()) == 2
    assert unlucky is not None or len(calls) <= 13


@pytest.mark.parametrize("limit", [0.6, 1.0, 2.0, 4.4])
def test_a_search_finds_the_same_wherever_it_begins(limit):
    results = [search(lambda rate: rate <= limit, start) for start in (0.3, 1, 1.7, 9)]
    assert len({(r.capacity_qps, r.capacity_qps.bound) for r in results}) == 1


def test_capacity_ends_where_every_answer_is_the_same_or_chance(monkeypatch):
    for met, text, last in ((False, "below 0.06", 1.5**-7), (True, "at least 17.09", 1.5**7)):
        result = search(lambda rate, met=met: met)
        assert f"{result.capacity_qps:.2f}" == text
        assert (result.trials[-1].qps, len(result.trials)) == (last, 8)
        assert (result.best is not None) == met
    rng = np.random.default_rng(0)
    for _ in range(100):
        result = search(lambda rate: rng.random() < 1 / (1 + rate**4))
        assert len(result.trials) < capacity.MAX_RUNS
    answers = iter([True, False, False])  # a machine that becomes ever slower
    monkeypatch.setattr(capacity, "MAX_RUNS", 3)
    result = search(lambda rate: next(answers))
    assert f"{result.capacity_qps:g}" == "at least 1" and len(result.trials) == 3


def test_what_failed_while_others_used_the_machine_is_run_again():
    counts = Counter()

    def meets(rate):
        counts[rate] += 1
        busy = counts[rate] == 1
        return rate <= 4 and not busy, busy

    result = search(meets)
    assert 4 / 1.05 <= result.capacity_qps <= 4 and set(counts.values()) == {2}
    assert not result.busy
    always = [replace(trial, verdict=replace(trial.verdict, busy=True)) for trial in result.trials]
    assert summarize_search(always).busy and summarize_search(always).missed == "x"


@pytest.mark.parametrize("ours, other, text", [
    ("", "", "4"), ("at least", "", "at least 4"), ("", "at least", "below 4"),
    ("below", "", "below 4"), ("", "below", "at least 4"), ("at least", "below", "at least 4"),
    ("below", "at least", "below 4"), ("below", "below", None), ("at least", "at least", None),
])  # fmt: skip
def test_a_ratio_of_bounds_is_a_bound_or_not_known(ours, other, text):
    ratio = Bounded(8, ours).over(Bounded(2, other))
    assert ratio is None if text is None else f"{ratio:g}" == text


PLAN = EngineConfig(chunk=256, max_len=1000, page_size=1, pages=3000)  # pages of a token


def test_policies_share_the_memory_and_can_have_their_own_chunk(tmp_path):
    (tmp_path / "mine.py").write_text("from scheduler import SarathiServe as Mine\n", "utf-8")
    mine = f"{tmp_path}/mine.py:Mine"
    plans = {  # label: its policy and chunk
        "vllm": ("vllm", 256),
        "orca-best": ("orca-best", 256),
        "sarathi:64": ("sarathi", 64),
        mine: (mine, 256),
        f"{mine}:32": (mine, 32),
    }
    runs = run_plan(plans, [64, 1000], PLAN)
    assert list(runs) == [f"{name}, pages of {size}" for name in plans for size in (64, 1000)]
    assert [(c.policy, c.chunk) for c in runs.values()][::2] == list(plans.values())
    assert [(c.page_size, c.pages) for c in runs.values()] == [(64, 46), (1000, 3)] * 5
    (dynamic,) = run_plan(["dynamic"], [64], PLAN, 0.3).values()
    assert dynamic.policy == "dynamic" and dynamic.policy_options == {"tbt_slo": 0.3}
    both = run_plan(["orca"], [64, 128], PLAN, caching=[False, True])
    assert {label: config.prefix_caching for label, config in both.items()} == {
        "orca, pages of 64": False,
        "orca, pages of 64, shared": True,
        "orca, pages of 128": False,
        "orca, pages of 128, shared": True,
    }
