"""Sarathi-Serve's experiments, and those of the post on schedulers, each beside what is published.

What the paper leaves open, loads, budgets and batch sizes, is that of the scripts that its authors
published. Budgets are of 512 tokens, but for names such as "sarathi-serve:2048". Read first:
sarathi.py. Read next: report.py, which prints the tables.
"""

import math
from functools import cache
from itertools import combinations, islice, product
from statistics import median

from experiments.metrics import missed, summarize_latencies
from experiments.run import capacity, estimated_qps, plan
from experiments.workload import LENGTHS, poisson, sample_lengths
from policies.config import EngineConfig
from policies.slo import SLOS
from simulator.cost_model import System
from simulator.machine import base_of
from simulator.sarathi import PUBLISHED, decodes, table
from simulator.simulation import simulate

# Table 1 and §5. GPUs are joined in pairs by NVLink, so that four or eight talk through PCIe.
SYSTEMS = {
    "Mistral-7B": System("mistral-7b"),
    "Yi-34B": System("yi-34b", tp=2),
    "LLaMA2-70B": System("llama2-70b", "a40", 4, 2, "pcie4", "pcie4"),
    "Falcon-180B": System("falcon-180b", tp=4, pp=2, tp_link="pcie4", pp_link="ethernet"),
}
PAPER_SLOS = dict(zip(SYSTEMS, ((0.1, 0.5), (0.2, 1), (1, 5), (1, 5))))  # Table 3
MAX_BATCH = 128
ORCA_BATCH = dict(zip(SYSTEMS, (16, 16, 8, 8)))  # set in the scripts
RELAXED_BUDGET = {"LLaMA2-70B": 1536}  # §5.1; others 2,048


def load_of(trace, requests, qps, seed=0):
    """Poisson arrivals with the lengths of a trace, all at time 0 if `qps` is infinite."""
    arrivals = poisson(sample_lengths(trace, requests, LENGTHS[trace].limit, seed), 1.0, seed)
    return [arrival._replace(time=arrival.time / qps) for arrival in arrivals]


def latencies(system, policy, trace, qps, requests, seed=0, batch=MAX_BATCH):
    """summarize_latencies of a run in all the memory there is, in pages of 64. `policy` is what
    run.plan takes."""
    cost, limit = system.cost(), LENGTHS[trace].limit
    config = EngineConfig("vllm", 512, batch, limit, page_size=64, pages=cost.kv_tokens() // 64)
    config, load = plan([policy], [64], config)[policy], load_of(trace, requests, qps, seed)
    run = simulate(cost, config, load, record=False).run
    return summarize_latencies(run.completions, run.seconds)


def find_capacities(system, policy, trace, slos_s, requests, ratio=1.05, batch=MAX_BATCH):
    """The capacity under each of these SLOs in seconds, Bounded; runs at one rate are shared."""
    cost, load = system.cost(), load_of(trace, requests, 1.0)
    serve = cache(lambda qps: latencies(system, policy, trace, qps, requests, 0, batch))
    start = float(f"{0.3 * cost.pp * estimated_qps(base_of(cost), load):.1g}")
    met = lambda slo_s: lambda qps: {"met": not missed(serve(qps), slo_s)}
    return [capacity(met(slo_s), start, ratio)[0] for slo_s in slos_s]


def slos_of(system):
    """The strict and the relaxed SLO of a system: so many decode iterations, in seconds."""
    return [multiple * base_of(system.cost()).seconds for multiple in SLOS.values()]


def serving_capacity(run, requests, cpu_s):
    """SS-F10 and SS-F11: capacity of four models on both traces under both SLOs."""
    models = list(SYSTEMS)
    for claim, names, ratio in (("SS-F10", models[:2], 1.05), ("SS-F11", models[2:], 1.1)):
        cases, jobs, rows = list(product(names, LENGTHS)), [], []
        for name, trace in cases:
            system = SYSTEMS[name]._replace(cpu_s=cpu_s)
            slos, large = slos_of(system), f"sarathi-serve:{RELAXED_BUDGET.get(name, 2048)}"
            ours = ("sarathi-serve:512", slos[:1]), (large, slos[1:])
            for policy, its in (("orca", slos), ("vllm", slos), *ours):
                batch = ORCA_BATCH[name] if policy == "orca" else MAX_BATCH
                jobs.append((system, policy, trace, its, requests, ratio, batch))
        found = iter(run(find_capacities, jobs))
        for name, trace in cases:
            both = slos_of(SYSTEMS[name]._replace(cpu_s=cpu_s)), PAPER_SLOS[name]
            *others, small, large = islice(found, 4)
            for kind, *slos, orca, vllm, ours in zip(SLOS, *both, *others, small + large):
                gains = ours.over(orca), ours.over(vllm)
                rows.append([f"{name}, {trace}, {kind}", *slos, orca, vllm, ours, *gains])
        yield table(claim, rows)


def capacity_against_slo(run, requests, cpu_s):
    """SS-F12: capacity over the SLO, vllm at three batch sizes and two token budgets."""
    slos = {"Mistral-7B": (0.1, 0.2, 0.3, 0.5, 1.0), "Yi-34B": (0.2, 0.3, 0.5, 0.7, 1.0)}
    servers = {f"vllm, batch {batch}": ("vllm", batch) for batch in (32, 64, 128)}
    for budget in (512, 2048):
        servers[f"sarathi-serve, budget {budget}"] = (f"sarathi-serve:{budget}", MAX_BATCH)
    jobs = [
        (SYSTEMS[name]._replace(cpu_s=cpu_s), policy, "sharegpt4", slos[name], requests, 1.1, batch)
        for name, (policy, batch) in product(slos, servers.values())
    ]
    results, best = iter(run(find_capacities, jobs)), []
    for name, at in (("Mistral-7B", 0.1), ("Yi-34B", 1)):
        found = {f"{name}: {server}": next(results) for server in servers}
        *_, vllm, small, large = found.values()
        gains = [max(ours).over(other) for *ours, other in zip(small, large, vllm)]
        rows = [[server, *rates] for server, rates in found.items()]
        rows.append(["best budget over vllm, batch 128", *((gain, ".2fx") for gain in gains)])
        best.append([f"{name} at {at} s", gains[slos[name].index(at)]])
        columns = {f"{slo:g} s": ".2f" for slo in slos[name]}
        yield table("SS-F12", rows, columns)
    yield table("SS-F12 gains", best)


def across_nodes(run, requests, cpu_s):
    """SS-F13: Falcon-180B on two nodes joined by Ethernet, TP 8 against TP 4 x PP 2."""
    pipeline = SYSTEMS["Falcon-180B"]._replace(cpu_s=cpu_s)
    tensor, rows = System("falcon-180b", tp=8, tp_link="ethernet", cpu_s=cpu_s), []
    for cpu, batch in product(dict.fromkeys((0.0, cpu_s)), (8, 32, 128)):
        costs = [system._replace(cpu_s=cpu).cost() for system in (tensor, pipeline)]
        ms = [1e3 * cost.seconds(decodes(batch, 2048)) for cost in costs]
        rows.append([f"batch {batch}, {1e3 * cpu:g} ms of CPU per stage", *ms, ms[0] / ms[1]])
    yield table("SS-F13", rows)

    slos = slos_of(pipeline)
    cases = [(tensor, "vllm", slos), (pipeline, "vllm", slos)]
    cases += [(pipeline, f"sarathi-serve:{n}", [slo]) for n, slo in zip((512, 2048), slos)]
    jobs = [(system, name, "sharegpt4", its, requests, 1.1) for system, name, its in cases]
    alone, vllm, *ours = run(find_capacities, jobs)
    strict, relaxed = sum(ours, [])
    rows = [["vllm, TP 8", *alone], ["vllm, TP 4 x PP 2", *vllm]]
    rows.append(["sarathi-serve, TP 4 x PP 2", strict, relaxed])
    columns = {f"{kind}, {slo:.2f} s": ".3f" for kind, slo in zip(SLOS, slos)}
    yield table("SS-F13 capacity", rows, columns)

    gains = strict.over(alone[0]), strict.over(vllm[0]), relaxed.over(vllm[1])
    yield table("SS-F13 gains", list(zip(PUBLISHED["SS-F13 gains"]["published"], gains)))


def ablation(run, requests, cpu_s):
    """SS-T4: hybrid batches alone, chunks alone, and both; medians of five seeds."""
    loads, yi = {"sharegpt4": 1.0, "arxiv": 0.5}, SYSTEMS["Yi-34B"]._replace(cpu_s=cpu_s)
    cases = [name.split(", ") for name in PUBLISHED["SS-T4"]["published"]]
    jobs = [(yi, policy, load, loads[load], 128, n) for load, policy in cases for n in range(5)]
    results, rows = iter(run(latencies, jobs)), []
    for trace, policy in cases:
        runs = list(islice(results, 5))
        ours = median(r["ttft_s"]["p50"] for r in runs), median(r["tbt_s"]["p99"] for r in runs)
        rows.append([f"{trace}, {policy}", *ours])
    yield table("SS-T4", rows)


def post(run, requests, cpu_s):
    """B-7: the post's comparison of schedulers, LLaMA2-70B on four H100, 128 users."""
    system, names = System("llama2-70b", "h100", tp=4, cpu_s=cpu_s), PUBLISHED["B-7"]["published"]
    cases = product((math.inf, 1.5), names)
    results = run(latencies, [(system, name, "sharegpt4", qps, requests) for qps, name in cases])
    rows = [
        [name, full["tokens_per_s"], full["tbt_s"]["p99"], load["ttft_s"]["p99"]]
        for name, full, load in zip(names, results, results[len(names) :])
    ]
    its = table("B-7", rows)
    pairs, alike = list(combinations(its.rows, 2)), []
    for i, what in ((1, "tokens/s"), (3, "P99 TBT"), (5, "P99 TTFT")):
        count = sum((a[i] < b[i]) == (a[i + 1] < b[i + 1]) for a, b in pairs)
        alike.append(f"{count} of {len(pairs)} by {what}")
    its.finding = f"pairs of schedulers in the post's order: {', '.join(alike)}"
    yield its
