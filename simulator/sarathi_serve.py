"""Sarathi-Serve's experiments, and those of the post on schedulers, each beside what is published.

What the paper leaves open is in the notes: loads, budgets and batch sizes are those of the scripts
that its authors published. A policy with a chunk size or token budget of its own is called
"sarathi-serve:2048"; others have 512.

Read first: sarathi.py. Read next: report.py, which prints the tables.
"""

import math
from functools import cache
from itertools import islice, product
from statistics import median

from experiments.metrics import meets_slo, summarize_latencies
from experiments.run import capacity, estimated_qps, plan
from experiments.tables import Table
from experiments.workload import LENGTHS, Arrival, poisson, sample_lengths
from policies.config import EngineConfig
from policies.slo import SLOS, STRICT
from simulator.cost_model import System
from simulator.machine import base_of, base_seconds
from simulator.sarathi import beside, compared, decodes
from simulator.simulation import simulate

# Table 1 and §5. GPUs are joined in pairs by NVLink, so that four or eight talk through PCIe.
SYSTEMS = {
    "Mistral-7B": System("mistral-7b"),
    "Yi-34B": System("yi-34b", tp=2),
    "LLaMA2-70B": System("llama2-70b", "a40", 4, 2, "pcie4", "pcie4"),
    "Falcon-180B": System("falcon-180b", tp=4, pp=2, tp_link="pcie4", pp_link="ethernet"),
}
PAPER_SLOS = dict(zip(SYSTEMS, ((0.1, 0.5), (0.2, 1), (1, 5), (1, 5))))  # Table 3
GAINS = {"Yi-34B": (4.0, 3.7), "LLaMA2-70B": (6.3, 4.3)}  # over orca and vllm; in the text of §5.1
MAX_BATCH = 128
ORCA_BATCH = dict(zip(SYSTEMS, (16, 16, 8, 8)))  # set in the scripts
RELAXED_BUDGET = {"LLaMA2-70B": 1536}  # §5.1; others 2,048
ABLATION = ("hybrid-only", "chunked-only", "sarathi-serve")


def latencies(system, policy, trace, qps, requests, cpu_s, seed=0, batch=MAX_BATCH):
    """summarize_latencies of a run with Poisson arrivals, or with all at time 0 if qps is infinite.

    It has all the memory there is, in pages of 64. `policy` is what run.plan takes.
    """
    cost, limit = system.cost(cpu_s), LENGTHS[trace].limit
    config = EngineConfig("vllm", 512, batch, limit, page_size=64, pages=cost.kv_tokens() // 64)
    config = plan([policy], [64], config, STRICT * base_seconds(cost))[policy]
    lengths = sample_lengths(trace, requests, limit, seed)
    together = [Arrival(0.0, *pair) for pair in lengths]
    arrivals = together if qps == math.inf else poisson(lengths, qps, seed)
    run = simulate(cost, config, arrivals, record=False).run
    return summarize_latencies(run.completions, run.seconds)


def find_capacities(system, policy, trace, slos_s, requests, cpu_s, ratio=1.05, batch=MAX_BATCH):
    """The capacity under each of these SLOs in seconds; runs at the same rate are shared."""
    cost, limit = system.cost(cpu_s), LENGTHS[trace].limit
    serve = cache(lambda qps: latencies(system, policy, trace, qps, requests, cpu_s, 0, batch))
    load = [Arrival(0.0, *pair) for pair in sample_lengths(trace, requests, limit, 0)]
    start = float(f"{0.3 * cost.pp * estimated_qps(base_of(cost, 8192, 2048), load):.1g}")
    met = lambda slo_s: lambda qps: {"met": meets_slo(serve(qps), slo_s)}
    return [capacity(met(slo_s), start, ratio)[0] for slo_s in slos_s]


def over(ours, other):
    """How many times the other capacity ours is."""
    return ours / other if other else None


def slos_of(name, cpu_s):
    """The strict and the relaxed SLO of a system: so many decode iterations, in seconds."""
    return [multiple * base_seconds(SYSTEMS[name].cost(cpu_s)) for multiple in SLOS.values()]


def headline(run, requests):
    """SS-F10's strict row, with what the CPU costs, and with a budget that is too large."""
    cases, rows = list(product(("Yi-34B", "Mistral-7B"), (0.0, 5e-3, 10e-3))), []
    jobs = [
        (SYSTEMS[name], policy, "sharegpt4", slos_of(name, cpu)[:1], requests, cpu)
        for name, cpu in cases
        for policy in ("vllm", "sarathi-serve:512", "sarathi-serve:2048")
    ]
    found = iter(run(find_capacities, jobs))
    for name, cpu in cases:
        (vllm,), (small,), (large,) = islice(found, 3)
        gains = (small, over(small, vllm), large, over(large, vllm))
        rows.append([name, 1e3 * cpu, slos_of(name, cpu)[0], vllm, *gains])
    columns = {"sharegpt4, strict SLO": "", "CPU ms": "g", "SLO s": ".3f", "vllm": ".2f"}
    for budget in ("512", "2,048"):
        columns |= {f"budget {budget}": ".2f", f"{budget} over vllm": ".2fx"}
    title = "what the CPU's time per iteration changes"
    return Table("SS-F10", f"{title}, {requests:,} requests (paper: 3.7x, 2.6x)", columns, rows)


def capacities(claim, names, up_to, run, requests, cpu_s, ratio=1.05):
    """SS-F10 or SS-F11: capacity of these models on both traces under both SLOs."""
    cases, jobs, rows, groups = list(product(names, LENGTHS)), [], [], []
    for name, trace in cases:
        slos, more = slos_of(name, cpu_s), (requests, cpu_s, ratio)
        large = f"sarathi-serve:{RELAXED_BUDGET.get(name, 2048)}"
        runs = (("orca", slos), ("vllm", slos), ("sarathi-serve:512", slos[:1]), (large, slos[1:]))
        for policy, its in runs:
            batch = ORCA_BATCH[name] if policy == "orca" else MAX_BATCH
            jobs.append((SYSTEMS[name], policy, trace, its, *more, batch))
    found, systems = iter(run(find_capacities, jobs)), ("orca", "vllm", "sarathi-serve")
    for name, trace in cases:
        *others, small, large = islice(found, 4)
        both = slos_of(name, cpu_s), PAPER_SLOS[name]
        for kind, *slos, orca, vllm, ours in zip(SLOS, *both, *others, small + large):
            group = f"{name}, {trace}, {kind}"
            papers = GAINS.get(group.removesuffix(", sharegpt4, strict"), (None, None))
            gains = (over(ours, orca), papers[0], over(ours, vllm), papers[1])
            rows.append([group, *slos, orca, vllm, ours, *gains])
            for system, qps, paper in zip(systems, (orca, vllm, ours), (None, None, papers[1])):
                groups.append({"group": group, "system": system, "qps": qps, "paper": paper})
    columns = {"requests/s": "", "SLO s": ".3f", "paper's SLO": "g"} | dict.fromkeys(systems, ".3f")
    for other in ("orca", "vllm"):
        columns |= {f"over {other}": ".2fx", f"over {other}, paper": ".1fx"}
    note = "SLO: 5 or 25 decode iterations of this cost model. Budgets and batches as in the\n"
    note += "paper's scripts; Orca's 16 or 8 requests (its activations take memory that the\n"
    note += "formula does not see) are for each micro-batch. No sliding window."
    load = f"{1e3 * cpu_s:g} ms of CPU per stage, {requests:,} requests (paper: up to {up_to})"
    return Table(claim, f"capacity; {load}", columns, rows, note, {"groups": groups})


def serving_capacity(run, requests, cpu_s):
    """SS-F10 and SS-F11: capacities of four models under strict and relaxed SLOs."""
    small, large = ("Mistral-7B", "Yi-34B"), ("LLaMA2-70B", "Falcon-180B")
    load = (run, requests, cpu_s)
    of_small = "2.6x over vllm for Mistral-7B, 3.7x for Yi-34B"
    of_large = "6.3x over Orca and 4.3x over vllm for LLaMA2-70B, 5.6x for Falcon-180B"
    tables = [headline(run, requests), capacities("SS-F10", small, of_small, *load)]
    return [*tables, capacities("SS-F11", large, of_large, *load, 1.1)]


def capacity_against_slo(run, requests, cpu_s):
    """SS-F12: capacity over the SLO, vllm at three batch sizes and two token budgets."""
    slos = {"Mistral-7B": (0.1, 0.2, 0.3, 0.5, 1.0), "Yi-34B": (0.2, 0.3, 0.5, 0.7, 1.0)}
    systems = {f"vllm, batch {batch}": ("vllm", batch) for batch in (32, 64, 128)}
    for budget in (512, 2048):
        systems[f"sarathi-serve, budget {budget}"] = (f"sarathi-serve:{budget}", MAX_BATCH)
    jobs = [
        (SYSTEMS[name], policy, "sharegpt4", slos[name], requests, cpu_s, 1.1, batch)
        for name, (policy, batch) in product(slos, systems.values())
    ]
    results, tables = iter(run(find_capacities, jobs)), []
    load = f"sharegpt4, {1e3 * cpu_s:g} ms of CPU, {requests:,} requests"
    paper = "paper: 3.5x for Mistral at 0.1 s, 1.65x for Yi at 1 s"
    title = f"capacity against the SLO of P99 TBT, {load} ({paper})"
    for name, values in slos.items():
        found = {label: next(results) for label in systems}
        *_, vllm, small, large = found.values()
        gains = [(over(max(ours), other), ".2fx") for *ours, other in zip(small, large, vllm)]
        rows = [[label, *rates] for label, rates in found.items()]
        rows.append(["best budget over vllm, batch 128", *gains])
        columns = {f"{name}: requests/s at": ""} | {f"{slo:g} s": ".2f" for slo in values}
        curves = {label: list(zip(values, rates)) for label, rates in found.items()}
        tables.append(Table("SS-F12", title, columns, rows, data={name: curves}))
    return tables


def across_nodes(run, requests, cpu_s):
    """SS-F13: Falcon-180B on two nodes joined by Ethernet, TP 8 against TP 4 x PP 2."""
    tensor, pipeline = System("falcon-180b", tp=8, tp_link="ethernet"), SYSTEMS["Falcon-180B"]
    rows, decode = [], "decode-only iteration in ms, 2,048 tokens of context"
    for cpu, batch in product(dict.fromkeys((0.0, cpu_s)), (8, 32, 128)):
        costs = tensor.cost(cpu), pipeline.cost(cpu)
        ms = [1e3 * cost.seconds(decodes(batch, 2048)) for cost in costs]
        rows.append([f"batch {batch}, {1e3 * cpu:g} ms of CPU per stage", *ms, ms[0] / ms[1]])
    columns = {decode: "", "TP 8": ".0f", "TP 4 x PP 2": ".0f", "ratio": ".2fx"}
    title = "decodes across nodes (paper: TP 8 takes about 2x)"
    tables = [Table("SS-F13", title, columns, rows)]

    slos = slos_of("Falcon-180B", cpu_s)
    cases = [(tensor, "vllm", slos), (pipeline, "vllm", slos)]
    cases += [(pipeline, f"sarathi-serve:{n}", [slo]) for n, slo in zip((512, 2048), slos)]
    jobs = [(system, name, "sharegpt4", its, requests, cpu_s, 1.1) for system, name, its in cases]
    alone, vllm, *ours = run(find_capacities, jobs)
    ours = sum(ours, [])
    gains = [[(over(*pair), ".2fx") for pair in zip(ours, other)] for other in (alone, vllm)]
    rows = [
        ["vllm, TP 8", *alone],
        ["vllm, TP 4 x PP 2", *vllm],
        ["sarathi-serve, TP 4 x PP 2", *ours],
        ["sarathi-serve over TP 8 (paper: 4.3x strict)", *gains[0]],
        ["over vllm, TP 4 x PP 2 (paper: 3.6x, 1.48x)", *gains[1]],
    ]
    columns = {"requests/s": ""} | {f"{kind}, {s:.2f} s": ".3f" for kind, s in zip(SLOS, slos)}
    load = f"sharegpt4, {1e3 * cpu_s:g} ms of CPU per stage, {requests:,} requests"
    title = f"capacity of Falcon-180B on two nodes, {load}"
    return [*tables, Table("SS-F13", title, columns, rows)]


def ablation(run, requests, cpu_s, policies=ABLATION):
    """SS-T4: hybrid batches alone, chunks alone, both, or other policies; medians of five seeds."""
    loads, seeds = {"sharegpt4": 1.0, "arxiv": 0.5}, range(5)
    papers = ((0.53, 0.68), (1.04, 0.17), (0.76, 0.14))  # P50 TTFT and P99 TBT in s
    papers += ((3.78, 1.38), (5.38, 0.20), (3.90, 0.17))
    papers = dict(zip(product(loads, ABLATION), papers))
    cases, yi = list(product(loads.items(), policies, seeds)), SYSTEMS["Yi-34B"]
    jobs = [(yi, policy, *load, 128, cpu_s, seed) for load, policy, seed in cases]
    results, rows = iter(run(latencies, jobs)), []
    for trace, policy in product(loads, policies):
        runs, paper = [next(results) for _ in seeds], papers.get((trace, policy), (None, None))
        ours = median(r["ttft_s"]["p50"] for r in runs), median(r["tbt_s"]["p99"] for r in runs)
        rows.append([f"{trace}, {policy}", *sum(map(beside, paper, ours), [])])
    columns = compared("", paper="P50 TTFT s")
    columns |= {"P99 TBT s": ".3f", "simulated P99 TBT": ".3f", "its error": "+.0%"}
    title = f"Yi-34B on two A100, budget 512, 128 requests, {1e3 * cpu_s:g} ms of CPU"
    note = "Loads of the published script, 1 and 0.5 requests/s; its budget is 512, the caption\n"
    note += "says 1,024. TTFT depends on the lengths drawn: these are medians of five draws."
    return [Table("SS-T4", title, columns, rows, note)]


def post(run, requests, cpu_s):
    """B-7: the post's comparison of schedulers, LLaMA2-70B on four H100, 128 users."""
    paper = {  # tokens/s, P99 TBT and P99 TTFT in s
        "request-level": (1200, 0.85, 3.2),
        "orca": (2800, 0.42, 1.8),
        "sarathi-serve:512": (2650, 0.085, 2.1),
        "sarathi-serve:256": (2550, 0.065, 2.4),
        "sarathi-serve:128": (2400, 0.055, 2.8),
    }
    system, cases = System("llama2-70b", "h100", tp=4), product((math.inf, 1.5), paper)
    jobs = [(system, policy, "sharegpt4", qps, requests, cpu_s) for qps, policy in cases]
    results, rows = run(latencies, jobs), []
    for (name, its), full, load in zip(paper.items(), results, results[len(paper) :]):
        ours = (full["tokens_per_s"], full["tbt_s"]["p99"], load["ttft_s"]["p99"])
        rows.append([name, *sum(zip(its, ours), ())])
    columns = {"": ""}
    for what, spec in (("tokens/s", ",.0f"), ("P99 TBT s", ".3f"), ("P99 TTFT s", ".1f")):
        columns |= {what: spec, f"simulated {what}": spec}
    load = f"{1e3 * cpu_s:g} ms of CPU, {requests} requests"
    title = f"the post's schedulers: LLaMA2-70B on four H100, {load}"
    note = (
        "tokens/s (prompt and output) and TBT with 128 requests running all the time, TTFT at 1.5\n"
    )
    note += "requests/s. The post does not say load and lengths: only the order can be compared."
    return [Table("B-7", title, columns, rows, note)]
