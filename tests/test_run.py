"""Runs under load, held against a clock of their own and a known capacity."""

from collections import Counter
from dataclasses import dataclass

import pytest

from config import EngineConfig
from lab.measure import capacity
from lab.measure.capacity import (
    Base,
    Bounded,
    Verdict,
    estimated_qps,
    search_capacity,
    slo_seconds,
)
from lab.measure.load_run import serve
from lab.measure.workload import Arrival, make_lengths, poisson, prompts
from lab.simulator.cost_model import CostModel
from lab.simulator.simulation import simulate
from sampling import SamplingParams
from tests.helpers import alone, tiny_model


@dataclass
class Time:
    """A clock that advances by a tick whenever it is looked at, and by what is slept."""

    time: float = 1000.0
    tick: float = 0.01

    def now(self):
        self.time += self.tick
        return self.time

    def sleep(self, seconds):
        self.time += seconds


@pytest.mark.parametrize("policy", ["vllm", "sarathi-serve"])
def test_every_policy_serves_the_same_arrivals_to_their_full_length(policy):
    model = tiny_model()
    loads = [(0, 9, 5), (0.1, 20, 12), (0.1, 3, 1), (0.35, 14, 8), (4.0, 6, 6), (4.001, 2, 20)]
    arrivals = [Arrival(*load) for load in loads]
    tokens = prompts(arrivals, 61, 0)
    config = EngineConfig(
        policy,
        chunk=8,
        max_batch=4,
        max_len=32,
        page_size=4,
        pages=16,
    )
    time = Time()
    run = serve(model, config, arrivals, tokens, now=time.now, sleep=time.sleep)
    computed = Counter()  # the warm-up is not in the iterations
    for iteration in run.iterations:
        for request_id, _, length, _ in iteration.chunks:
            computed[request_id] += length
    for i, request in enumerate(run.completions):
        output_len = arrivals[i].output_len
        assert request.id == i
        assert request.arrival == arrivals[i].time <= request.scheduled
        assert request.output == alone(model, tokens[i], SamplingParams(output_len))
        expected = request.prompt_len + output_len - 1 + request.recomputed_tokens
        assert computed[i] == expected
    assert run.seconds == max(request.token_times[-1] for request in run.completions)


def test_what_is_made_of_a_base():
    """An SLO is a multiple of it, a rate is prefill at full speed and decodes in full batches."""
    base = Base(
        seconds=0.064,
        prefill_token_s=0.001,
        decodes=32,
        context=512,
    )
    slos = [slo_seconds(slo, base) for slo in ("strict", "relaxed", 0.2)]
    assert slos == pytest.approx([5 * 0.064, 25 * 0.064, 0.2])
    with pytest.raises(ValueError):
        slo_seconds(0.01, base)
    rate = 1 / (0.2 + 50 * 0.002)
    assert estimated_qps(base, [Arrival(0.0, 200, 50)] * 3) == pytest.approx(rate)


def search(limit, unlucky=None, busy=None, start=1.0):
    """A search for a limit. One run, by its number, fails by bad luck, or as others use the machine
    meanwhile. Returns its result and [(rate, whether it was met)]."""
    calls = []

    def run_at_rate(rate):
        number = len(calls)
        met = rate <= limit and number not in (unlucky, busy)
        calls.append((rate, met))
        return Verdict(missed="" if met else "x", busy=number == busy)

    return search_capacity(run_at_rate, start), calls


@pytest.mark.parametrize("limit", [0.21, 1.0, 7.7])
@pytest.mark.parametrize("unlucky", [None, *range(6)])
def test_capacity_is_found_to_five_percent_and_one_failure_does_not_decide(limit, unlucky):
    for failed_by in ("unlucky", "busy"):
        result, calls = search(limit, **{failed_by: unlucky})
        qps = result.capacity_qps
        assert limit / 1.05 <= qps <= limit
        assert qps.bound == ""
        assert result.best.qps == qps
        assert not result.busy
        assert [(trial.qps, trial.verdict.met) for trial in result.trials] == calls
        above = [rate for rate, met in calls if rate > qps and not met]
        assert min(above) <= 1.05 * qps
        assert above.count(min(above)) == 2


@pytest.mark.parametrize("limit", [0.6, 1.0, 2.0, 4.4])
def test_a_search_finds_the_same_wherever_it_begins(limit):
    found = [search(limit, start=start)[0].capacity_qps for start in (0.3, 1, 1.7, 9)]
    assert len({(qps, qps.bound) for qps in found}) == 1


@pytest.mark.parametrize("limit, bound, last", [(0, "below", 1.5**-7), (99, "at least", 1.5**7)])
def test_a_search_ends_where_every_answer_is_the_same(limit, bound, last):
    result, calls = search(limit)
    assert (result.capacity_qps, result.capacity_qps.bound) == (last, bound)
    assert len(calls) == 8


def test_a_ratio_of_bounds_is_a_bound_or_not_known():
    exact = Bounded(8)
    least = Bounded(8, "at least")
    below = Bounded(2, "below")
    assert exact.over(Bounded(2)) == 4
    assert exact.over(Bounded(2)).bound == ""
    assert exact.over(least).bound == "below"
    assert least.over(exact).bound == least.over(below).bound == "at least"
    assert below.over(least).bound == "below"
    assert least.over(least) is below.over(below) is None


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["vllm", "orca-best", "sarathi", "sarathi-serve", "dynamic"])
def test_the_capacity_of_a_system_does_not_depend_on_the_start_of_its_search(policy):
    cost = CostModel.named("llama3-8b", "a100-80gb")
    slots = 16
    config = EngineConfig(
        policy, chunk=512, max_batch=slots, max_len=2048, page_size=64, pages=slots * 32
    )
    lengths = make_lengths("sharegpt4", capacity.ROUNDS * slots, 2048, 0)

    def judged(qps):
        run = simulate(cost, config, poisson(lengths, qps, 0), record=False).run
        return capacity.judge(run, 0.05)

    low, high = (search_capacity(judged, start).capacity_qps for start in (1, 30))
    assert low.bound == high.bound == ""
    assert low == high
