"""Sarathi-Serve's experiments, and those of the post on schedulers, each beside what is published.

What the paper leaves open, loads, budgets and batch sizes, is that of the scripts that its authors
published. Budgets are of 512 tokens, but for names such as "sarathi-serve:2048". Read first:
sarathi.py. Read next: report.py, which prints the tables.
"""

import math
from dataclasses import replace
from functools import cache
from itertools import combinations, product

import numpy as np

from experiments.metrics import missed, summarize_latencies
from experiments.run import capacity, estimated_qps, plan
from experiments.workload import LENGTHS, poisson, sample_lengths
from policies.config import EngineConfig
from policies.slo import SLOS
from simulator.cost_model import CostModel
from simulator.machine import base_of
from simulator.sarathi import PUBLISHED, Table, decodes
from simulator.simulation import simulate

SYSTEMS = PUBLISHED["systems"]
MAX_BATCH = 128


def system(name, cpu_s):
    """The CostModel of one of SYSTEMS, with so much CPU in each iteration of a stage."""
    return CostModel.named(**SYSTEMS[name]["machine"], cpu_s=cpu_s)


def load_of(trace, requests, qps, seed=0):
    """Poisson arrivals with the lengths of a trace, all at time 0 if `qps` is infinite."""
    return poisson(sample_lengths(trace, requests, LENGTHS[trace].limit, seed), qps, seed)


def latencies(cost, policy, trace, qps, requests, seed=0, batch=MAX_BATCH):
    """summarize_latencies of a run in all the memory there is. `policy` is what run.plan takes."""
    limit, pages = LENGTHS[trace].limit, cost.kv_tokens() // 64
    config = EngineConfig("vllm", 512, batch, limit, page_size=64, pages=pages)
    config = plan([policy], [64], config)[policy]
    run = simulate(cost, config, load_of(trace, requests, qps, seed), record=False).run
    return summarize_latencies(run.completions, run.seconds)


def find_capacities(cost, policy, trace, slos_s, requests, ratio=1.05, batch=MAX_BATCH):
    """The capacity under each of these SLOs in seconds, Bounded; runs at one rate are shared."""
    load = load_of(trace, requests, 1.0)
    serve = cache(lambda qps: latencies(cost, policy, trace, qps, requests, 0, batch))
    start = float(f"{0.3 * cost.pp * estimated_qps(base_of(cost), load):.1g}")
    met = lambda slo_s: lambda qps: {"met": not missed(serve(qps), slo_s)}
    return [capacity(met(slo_s), start, ratio)[0] for slo_s in slos_s]


def slos_of(cost):
    """The strict and the relaxed SLO of a machine: so many decode iterations, in seconds."""
    return [multiple * base_of(cost).seconds for multiple in SLOS.values()]


def serving_capacity(run, requests, cpu_s):
    """SS-F10 and SS-F11: capacity of four models on both traces under both SLOs."""
    models = list(SYSTEMS)
    for claim, names, ratio in (("SS-F10", models[:2], 1.05), ("SS-F11", models[2:], 1.1)):
        rows = {}
        for name, trace in product(names, LENGTHS):
            cost, its = system(name, cpu_s), SYSTEMS[name]
            slos_s = slos_of(cost)
            servers = [("orca", slos_s, its["orca_batch"]), ("vllm", slos_s, MAX_BATCH)]
            for budget, slo_s in zip(its["budgets"], slos_s):
                servers.append((f"sarathi-serve:{budget}", [slo_s], MAX_BATCH))
            jobs = [(cost, policy, trace, slos, requests, ratio, b) for policy, slos, b in servers]
            *others, small, large = run(find_capacities, jobs)
            found = zip(SLOS, slos_s, its["slos"], *others, small + large)
            for kind, *slos, orca, vllm, ours in found:
                gains = ours.over(orca), ours.over(vllm)
                rows[f"{name}, {trace}, {kind}"] = [*slos, orca, vllm, ours, *gains]
        yield Table(claim, rows)


def capacity_against_slo(run, requests, cpu_s):
    """SS-F12: capacity over the SLO, vllm at three batch sizes and two token budgets."""
    servers = {f"vllm, batch {batch}": ("vllm", batch) for batch in (32, 64, 128)}
    for budget in (512, 2048):
        servers[f"sarathi-serve, budget {budget}"] = (f"sarathi-serve:{budget}", MAX_BATCH)
    slos_s = {"Mistral-7B": (0.1, 0.2, 0.3, 0.5, 1.0), "Yi-34B": (0.2, 0.3, 0.5, 0.7, 1.0)}
    best = []
    for name, slos in slos_s.items():
        cost, load = system(name, cpu_s), ("sharegpt4", slos, requests, 1.1)
        jobs = [(cost, policy, *load, batch) for policy, batch in servers.values()]
        found = run(find_capacities, jobs)
        rows = {f"{name}: {server}": rates for server, rates in zip(servers, found)}
        gains = [max(ours).over(other) for *ours, other in zip(*found[-2:], found[-3])]
        rows["best budget over vllm, batch 128"] = [(gain, ".2fx") for gain in gains]
        best.append(dict(zip(slos, gains)))
        yield Table("SS-F12", rows, {f"{slo:g} s": ".2f" for slo in slos})
    yield Table("SS-F12 gains", [[best[0][0.1]], [best[1][1.0]]])


def across_nodes(run, requests, cpu_s):
    """SS-F13: Falcon-180B on two nodes joined by Ethernet, TP 8 against TP 4 x PP 2."""
    pipeline = system("Falcon-180B", cpu_s)
    tensor, rows = CostModel.named("falcon-180b", tp=8, tp_link="ethernet", cpu_s=cpu_s), {}
    for cpu, batch in product(dict.fromkeys((0.0, cpu_s)), (8, 32, 128)):
        costs = [replace(cost, cpu_s=cpu) for cost in (tensor, pipeline)]
        ms = [1e3 * cost.seconds(decodes(batch, 2048)) for cost in costs]
        rows[f"batch {batch}, {1e3 * cpu:g} ms of CPU per stage"] = [*ms, ms[0] / ms[1]]
    yield Table("SS-F13", rows)

    slos = slos_of(pipeline)
    cases = [(tensor, "vllm", slos), (pipeline, "vllm", slos)]
    cases += [(pipeline, f"sarathi-serve:{n}", [slo]) for n, slo in zip((512, 2048), slos)]
    jobs = [(cost, name, "sharegpt4", its, requests, 1.1) for cost, name, its in cases]
    alone, vllm, *ours = run(find_capacities, jobs)
    strict, relaxed = sum(ours, [])
    rows = {"vllm, TP 8": alone, "vllm, TP 4 x PP 2": vllm}
    rows["sarathi-serve, TP 4 x PP 2"] = [strict, relaxed]
    columns = {f"{kind}, {slo:.2f} s": ".3f" for kind, slo in zip(SLOS, slos)}
    yield Table("SS-F13 capacity", rows, columns)

    gains = strict.over(alone[0]), strict.over(vllm[0]), relaxed.over(vllm[1])
    yield Table("SS-F13 gains", [[gain] for gain in gains])


def ablation(run, requests, cpu_s):
    """SS-T4: hybrid batches alone, chunks alone, and both; medians of five seeds."""
    loads, yi = {"sharegpt4": 1.0, "arxiv": 0.5}, system("Yi-34B", cpu_s)
    cases = [name.split(", ") for name in PUBLISHED["SS-T4"]["published"]]
    jobs = [(yi, policy, load, loads[load], 128, n) for load, policy in cases for n in range(5)]
    seen = [(its["ttft_s"]["p50"], its["tbt_s"]["p99"]) for its in run(latencies, jobs)]
    yield Table("SS-T4", np.median(np.reshape(seen, (len(cases), 5, 2)), axis=1).tolist())


def post(run, requests, cpu_s):
    """B-7: the post's comparison of schedulers, LLaMA2-70B on four H100, 128 users."""
    cost = CostModel.named("llama2-70b", "h100", tp=4, cpu_s=cpu_s)
    published = PUBLISHED["B-7"]["published"]
    jobs = lambda qps: [(cost, name, "sharegpt4", qps, requests) for name in published]
    full, half = run(latencies, jobs(math.inf)), run(latencies, jobs(1.5))
    rows = [[a["tokens_per_s"], a["tbt_s"]["p99"], b["ttft_s"]["p99"]] for a, b in zip(full, half)]
    pairs, alike = list(combinations(zip(published.values(), rows), 2)), []
    for i, what in enumerate(("tokens/s", "P99 TBT", "P99 TTFT")):
        order = ((a[i] < c[i]) == (b[i] < d[i]) for (a, b), (c, d) in pairs)
        alike.append(f"{sum(order)} of {len(pairs)} by {what}")
    finding = f"pairs of schedulers in the post's order: {', '.join(alike)}"
    yield Table("B-7", rows, finding=finding)
