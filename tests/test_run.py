"""Runs under load, held against a clock of their own and a known capacity.

Most runs live in a time in which looking at the clock takes a tick."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from config import EngineConfig
from lab.measure import capacity, token_budget
from lab.measure import timing as measure
from lab.measure.capacity import (
    Base,
    Bounded,
    Verdict,
    estimated_qps,
    measure_base,
    search_capacity,
    slo_seconds,
    summarize_search,
)
from lab.measure.load_run import serve
from lab.measure.token_budget import Profiled
from lab.measure.workload import Arrival, make_lengths, poisson, prompts
from lab.simulator.cost_model import CostModel
from lab.simulator.simulation import simulate
from model import GPT
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


@pytest.mark.parametrize("name", ["vllm", "sarathi-serve", "dynamic"])
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


def test_what_is_made_of_a_base():
    """An SLO is a multiple of it, a rate is prefill at full speed and decodes in full batches."""
    base = Base(seconds=0.064, prefill_token_s=0.001, decodes=32, context=512)
    slos = [slo_seconds(slo, base) for slo in ("strict", "relaxed", 0.2)]
    assert slos == pytest.approx([5 * 0.064, 25 * 0.064, 0.2])
    with pytest.raises(ValueError):
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


def search(meets, start=1.0):
    """What a search finds. `meets` says of a rate whether it was met, or of a busy
    machine (whether it was met, busy)."""

    def run_at_rate(rate):
        answer = meets(rate)
        met, busy = answer if isinstance(answer, tuple) else (answer, False)
        return Verdict(missed="" if met else "x", busy=busy)

    return search_capacity(run_at_rate, start)


@pytest.mark.parametrize("limit", [0.21, 1.0, 7.7])
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


SYSTEMS = ["vllm", "orca-best", "sarathi", "sarathi-serve", "dynamic"]


@pytest.mark.slow
@pytest.mark.parametrize("policy", SYSTEMS)
def test_the_capacity_of_a_system_does_not_depend_on_the_start_of_its_search(policy):
    cost = CostModel.named("llama3-8b", "a100-80gb")
    slots = 16
    sizes = dict(chunk=512, max_batch=slots, max_len=2048, page_size=64, pages=slots * 32)
    config = EngineConfig(policy, **sizes)
    lengths = make_lengths("sharegpt4", capacity.ROUNDS * slots, 2048, 0)

    def judged(qps):
        run = simulate(cost, config, poisson(lengths, qps, 0), record=False).run
        return capacity.judge(run, 0.05)

    low, high = (search_capacity(judged, start).capacity_qps for start in (1, 30))
    assert low.bound == high.bound == "" and low == high


def test_capacity_ends_where_every_answer_is_the_same_or_chance(monkeypatch):
    for met, bound, last in ((False, "below", 1.5**-7), (True, "at least", 1.5**7)):
        result = search(lambda rate, met=met: met)
        assert (result.capacity_qps, result.capacity_qps.bound) == (last, bound)
        assert (result.trials[-1].qps, len(result.trials)) == (last, 8)
        assert (result.best is not None) == met
    rng = np.random.default_rng(0)
    for _ in range(100):
        result = search(lambda rate: rng.random() < 1 / (1 + rate**4))
        assert len(result.trials) < capacity.MAX_RUNS
    answers = iter([True, False, False])  # a machine that becomes ever slower
    monkeypatch.setattr(capacity, "MAX_RUNS", 3)
    result = search(lambda rate: next(answers))
    assert (result.capacity_qps, result.capacity_qps.bound) == (1, "at least")
    assert len(result.trials) == 3


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


def test_a_ratio_of_bounds_is_a_bound_or_not_known():
    exact, least, most = Bounded(8), Bounded(8, "at least"), Bounded(8, "below")
    two = Bounded(2)
    assert (exact.over(two), exact.over(two).bound) == (4, "")
    assert (least.over(two).bound, most.over(two).bound) == ("at least", "below")
    assert exact.over(least).bound == "below"
    assert least.over(most).bound == "at least"
    assert least.over(least) is most.over(most) is None
