"""The papers' claims on their machines, simulated: they are those of results/simulated."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from lab.claims import clusters, jobs
from lab.claims.claims import EXPERIMENTS
from lab.claims.jobs import (
    CapacityJob,
    ServingJob,
    Setup,
    Target,
    find_capacities,
    latencies,
    serve,
)
from lab.claims.systems import FALCON_180B, LLAMA2_70B, MISTRAL_7B, YI_34B
from lab.commands.simulate import json_of
from lab.measure import metrics
from lab.measure.capacity import Bounded, values_above_quantile
from lab.simulator.machine import base_of
from tests.helpers import with_slow

RESULTS = Path(__file__).parents[1] / "results/simulated/simulated.json"
KEPT = {row["claim"]: row for row in json.loads(RESULTS.read_text("utf-8"))["claims"]}


def simulated(name, **setup):
    """What the claims of an experiment find: {id: Finding}."""
    experiment = EXPERIMENTS[name]
    lab = experiment.lab(Setup(**setup))
    return {claim.id: claim.function(lab) for claim in experiment.claims}


FAST = ["sarathi", "serving", "bubbles", "pools"]
SLOW = ["throughput", "ablation", "pipeline"]


@pytest.mark.parametrize("name", with_slow(FAST + SLOW, fast=FAST))
def test_numbers_are_those_of_the_results(name):
    findings = simulated(name)
    for claim in EXPERIMENTS[name].claims:
        row = json.loads(json.dumps(json_of(claim, findings[claim.id])))
        assert nine_digits(row["numbers"]) == nine_digits(KEPT[claim.id]["numbers"])
        assert nine_digits(row["tables"]) == nine_digits(KEPT[claim.id]["tables"])


def nine_digits(value):
    """The same with all numbers rounded: sums may be added up in another order."""
    if isinstance(value, dict):
        return {key: nine_digits(each) for key, each in value.items()}
    if isinstance(value, list):
        return [nine_digits(each) for each in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def test_the_results_have_every_claim_that_is_simulated():
    assert list(KEPT) == [claim.id for each in EXPERIMENTS.values() for claim in each.claims]


@pytest.mark.parametrize("name, added_ms", [("serving", [10, 10, 20, 20]), ("nodes", 18 * [10])])
def test_cpu_time_is_in_every_stage_once(name, added_ms):
    """SS-T3: each iteration; SS-F13: across nodes in that of a pipeline only once."""

    def decodes(cpu_s):
        findings = simulated(name, cpu_s=cpu_s, run=no_capacities)
        table = next(iter(findings.values())).tables[0]
        return [y for line in table.lines.values() for y in line.values()]

    differences = [busy - idle for busy, idle in zip(decodes(0.01), decodes(0.0), strict=True)]
    assert differences == pytest.approx(added_ms)


def no_capacities(function, jobs):
    """A Runner of searches that finds two requests/s everywhere."""
    if function is not find_capacities:
        return list(map(function, jobs))
    return [dict.fromkeys(job.targets, Bounded(2.0)) for job in jobs]


def test_capacities_are_those_at_the_slos_beside_them():
    """SS-F10 and F11: first five and 25 decode iterations, then those of Table 3."""

    def rates(function, jobs):
        assert function is find_capacities and {job.cost.cpu_s for job in jobs} == {7.5e-3}
        scale = {"orca": 1.0, "vllm": 2.0}
        return [
            {
                target: Bounded(scale.get(target.policy, 4.0) * target.slo_s)
                for target in job.targets
            }
            for job in jobs
        ]

    systems = {each.name: each for each in (MISTRAL_7B, YI_34B, LLAMA2_70B, FALCON_180B)}
    for found in simulated("capacity", run=rates, cpu_s=7.5e-3).values():
        at_multiples, _, at_published, gains = found.tables
        for table, is_published in ((at_multiples, False), (at_published, True)):
            assert len(table.xs) == 2 * 2 * 2  # models, traces, SLOs
            for name, slo_s in table.lines["SLO s"].items():
                model, _, slo = name.split(", ")
                system = systems[model]
                base_s = base_of(system.cost(7.5e-3)).seconds
                multiple_s = {"strict": 5, "relaxed": 25}[slo] * base_s
                assert slo_s == pytest.approx(system.slos_s[slo] if is_published else multiple_s)
                servers = ("orca", "vllm", "sarathi-serve")
                rates_of_row = [table.lines[server][name] for server in servers]
                assert rates_of_row == pytest.approx([slo_s, 2 * slo_s, 4 * slo_s])
        assert set(gains.lines["over orca"].values()) == {4.0}
        for number in found.published:
            assert number.here == (2.0 if "over vllm" in number.text else 4.0)
    of_falcon = [number.here for number in found.published if number.paper == 5.6]
    assert of_falcon == [4.0, 4.0]  # over orca, the largest, at both SLOs


def test_across_nodes_gains_are_compared_at_both_slos():
    """SS-F13: five and 25 decode iterations, and 1 and 5 s. Here a gain is four times the SLO."""

    def rates(function, jobs):
        assert function is find_capacities
        return [
            {
                target: Bounded(4.0 * target.slo_s if "sarathi" in target.policy else 1.0)
                for target in job.targets
            }
            for job in jobs
        ]

    base_s = base_of(FALCON_180B.cost(0.0)).seconds
    (found,) = simulated("nodes", run=rates).values()
    gains = {each.text: each.here for each in found.published if each.text.startswith("over")}
    strict, relaxed = [f"over vllm, TP 4 x PP 2, {slo}" for slo in ("strict", "relaxed")]
    expected = {
        "over vllm, TP 8, strict: at 5 and 25 decode iterations": 20 * base_s,
        f"{strict}: at 5 and 25 decode iterations": 20 * base_s,
        f"{relaxed}: at 5 and 25 decode iterations": 100 * base_s,
        "over vllm, TP 8, strict: at the SLOs of the paper's Table 3": 4,
        f"{strict}: at the SLOs of the paper's Table 3": 4,
        f"{relaxed}: at the SLOs of the paper's Table 3": 20,
    }
    assert gains == pytest.approx(expected)


def test_the_numbers_that_constants_were_fitted_to_are_marked():
    """Table 2 without what riding makes of it, the times of Figure 7, 27 and 11, the assumptions of
    S-F12, and the first prompt of SS-F14."""
    fitted = {
        claim_id: [number["text"] for number in row["numbers"] if number["fitted"]]
        for claim_id, row in KEPT.items()
    }
    counts = {claim_id: len(texts) for claim_id, texts in fitted.items() if texts}
    assert counts == {"S-F8": 6, "S-F7": 3, "S-4.3.1": 2, "SS-F14": 4, "S-F12": 4}
    assert all("gpt3" in text for text in fitted["S-4.3.1"])
    assert all("2,047" in text for text in fitted["SS-F14"])


def test_sarathi_serve_has_the_budgets_of_the_paper():
    """SS-§5.1: 512 tokens under the strict SLO, 1,536 or 2,048 under the relaxed one."""
    for system, relaxed in ((MISTRAL_7B, 2048), (LLAMA2_70B, 1536)):
        assert system.servers("strict")["sarathi-serve"] == ("sarathi-serve:512", 128)
        assert system.servers("relaxed")["sarathi-serve"] == (f"sarathi-serve:{relaxed}", 128)
        assert system.servers("strict")["vllm"] == ("vllm", 128)


@pytest.mark.parametrize(
    "name, pipeline_ms, replica_ms", [("stage_ms", 8, 1), ("layer_ms", 84, 96)]
)
def test_cpu_time_of_figure_12_is_in_stages_or_in_layers(name, pipeline_ms, replica_ms):
    """Of all stages, and of 7 hops; 12 layers in a stage, 96 in a replica."""
    batch = [(0, 0, 256), (0, 99, 1)]
    slow = clusters.figure_12_jobs(clusters.Assumptions(**{name: 1}))
    usual = clusters.figure_12_jobs(clusters.Assumptions())
    added_ms = {"orca-best, TP 8 x PP 8": pipeline_ms, "TP 8, 8 replicas": replica_ms}
    for system, milliseconds in added_ms.items():
        added_s = slow[system].cost.seconds(batch) - usual[system].cost.seconds(batch)
        assert added_s == pytest.approx(milliseconds * 1e-3)


@pytest.mark.slow
def test_targets_that_share_runs_have_the_capacities_they_have_alone(monkeypatch):
    runs = []

    def count_run(job, tbt_slo_s):
        runs.append(job)
        return serve(job, tbt_slo_s)

    monkeypatch.setattr(jobs, "serve", count_run)

    def capacities_of(*targets):
        runs.clear()
        capacities = find_capacities(CapacityJob(YI_34B.cost(0.0), "sharegpt4", targets, 48))
        bounds = {target: (float(qps), qps.bound) for target, qps in capacities.items()}
        return bounds, len(runs)

    cases = product((4, 64, 128, 256), (0.3, 1))
    targets = [Target("vllm", batch, slo_s, 1.1) for batch, slo_s in cases]
    together, count = capacities_of(*targets)
    alone = [capacities_of(target) for target in targets]
    assert together == {
        target: bounds[target] for target, (bounds, _) in zip(targets, alone, strict=True)
    }
    assert count < sum(of_target for _, of_target in alone)
    assert len({qps for qps, _ in together.values()}) > 2  # the smallest batch has less capacity


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["vllm", "sarathi-serve", "orca"])
def test_a_run_is_given_up_only_if_it_misses_the_slo_to_its_end(policy):
    given_up = set()
    for qps, slo_s in product((0.2, 0.8, 4.0), (0.05, 0.2, 1.0)):
        job = ServingJob(YI_34B.cost(0.0), policy, 16, "sharegpt4", qps, requests=64)
        run = serve(job, slo_s)
        missed = metrics.missed(latencies(job), slo_s)
        given_up.add(bool(run.cut_short))
        if run.cut_short:
            assert "P99 TBT" in missed or "median delay" in missed
        else:
            assert metrics.summarize_run(run.completions, [], run.seconds) == latencies(job)
    assert given_up == {True, False}


@pytest.mark.parametrize(
    "count, quantile", [(1, 0.99), (2, 0.5), (7, 0.5), (100, 0.99), (350, 0.99)]
)
def test_so_many_long_values_lift_a_quantile(count, quantile):
    needed = values_above_quantile(count, quantile)
    for long, is_above in ((needed, True), (needed - 1, False)):
        values = [1.0] * (count - long) + [2.0] * long
        assert (np.quantile(values, quantile) > 2 - 1e-9) == is_above


def test_a_short_run_says_so():
    short = Setup(requests=16, cpu_s=7.5e-3)
    text = "7.5 ms of CPU per stage, 16 requests: too short a run, gains need 256 or more"
    assert str(short) == text
    assert str(replace(short, requests=256, cpu_s=0)) == "no CPU time, 256 requests"
