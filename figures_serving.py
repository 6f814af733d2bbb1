"""Sarathi-Serve's experiments, and those of the post on schedulers, simulated, each beside what is published.

What the paper leaves open is in the notes: loads, budgets and batch sizes are those of the scripts that its authors
published.

Read first: figures_sarathi.py. Read next: bench_simulate.py, which prints the tables.
"""

import statistics
from functools import cache, partial

from figures_sarathi import System, Table, beside
from metrics import meets_slo, summarize_latencies
from profiling import BASE_BATCH, RELAXED, STRICT
from serving import MAX_DELAY_S, Settings, capacity
from simulated_server import base_seconds
from simulator import simulate
from workload import LENGTHS, Arrival, poisson, sample_lengths

# Sarathi-Serve, Table 1 and §5. GPUs are joined in pairs by NVLink, so that four or eight talk through PCIe.
SYSTEMS = {
    "Mistral-7B": System("mistral-7b"),
    "Yi-34B": System("yi-34b", tp=2),
    "LLaMA2-70B": System("llama2-70b", "a40", 4, 2, "pcie4", "pcie4"),
    "Falcon-180B": System("falcon-180b", tp=4, pp=2, tp_link="pcie4", pp_link="ethernet"),
}
PAPER_SLOS = {"Mistral-7B": (0.1, 0.5), "Yi-34B": (0.2, 1), "LLaMA2-70B": (1, 5), "Falcon-180B": (1, 5)}  # Table 3
ORCA_BATCH = {"Mistral-7B": 16, "Yi-34B": 16, "LLaMA2-70B": 8, "Falcon-180B": 8}  # set in the scripts
RELAXED_BUDGET = {"LLaMA2-70B": 1536}  # §5.1; others 2,048
STRICT_BUDGET = 512
MAX_BATCH = 128


def serving_settings(cost, max_len, chunk, batch):
    """All the memory there is, in pages of 64."""
    return Settings(chunk, batch, max_len, 64, cost.kv_tokens())


def serve_at(cost, spec, settings, lengths, qps, seed=0):
    """Poisson arrivals at that rate: metrics.summarize_latencies of the run."""
    run = simulate(cost, spec, poisson(lengths, qps, seed), settings, record=False).run
    return summarize_latencies(run.completions, run.seconds)


def find_capacities(system, spec, trace, chunk, batch, slos_s, requests, cpu_s, ratio=1.05):
    """The capacity under each of these SLOs in seconds, a list; runs at the same rate are shared."""
    cost = system.cost(cpu_s)
    limit = LENGTHS[trace].limit
    settings = serving_settings(cost, limit, chunk, batch)
    lengths = sample_lengths(trace, requests, limit, 0)
    serve = cache(partial(serve_at, cost, spec, settings, lengths))

    def at_rate(slo_s, qps):
        return {"met": meets_slo(serve(qps), slo_s, MAX_DELAY_S)}

    prompt, output = (sum(lengths) / requests for lengths in zip(*lengths))
    per_token = cost.seconds([(0, 0, 2048)]) / cost.pp / 2048
    start = float(f"{0.3 / (prompt * per_token + output * base_seconds(cost) / cost.pp / BASE_BATCH):.1g}")
    return [capacity(partial(at_rate, slo_s), start, ratio)[0] for slo_s in slos_s]


def over(ours, other):
    """How many times the other capacity ours is."""
    return f"{ours / other:.2f}x" if other else "-"


PAPER_GAINS = {  # over (orca, vllm), where the text of §5.1 gives them
    ("Yi-34B", "sharegpt4", "strict"): (4.0, 3.7), ("LLaMA2-70B", "sharegpt4", "strict"): (6.3, 4.3),
}


def capacities(claim, names, run, requests, cpu_s, ratio=1.05):
    """SS-F10 or SS-F11: capacity of these models on both traces under both SLOs."""
    cases, jobs = [], []
    for name in names:
        slos = [multiple * base_seconds(SYSTEMS[name].cost(cpu_s)) for multiple in (STRICT, RELAXED)]
        for trace in LENGTHS:
            for policy, spec, chunk, batch, which in (
                    ("orca", ("orca", {}), STRICT_BUDGET, ORCA_BATCH[name], (0, 1)),
                    ("vllm", ("vllm", {}), STRICT_BUDGET, MAX_BATCH, (0, 1)),
                    ("sarathi-serve", ("sarathi-serve", {}), STRICT_BUDGET, MAX_BATCH, (0,)),
                    ("sarathi-serve", ("sarathi-serve", {}), RELAXED_BUDGET.get(name, 2048), MAX_BATCH, (1,))):
                cases.append((name, trace, policy, which))
                its = [slos[i] for i in which]
                jobs.append((SYSTEMS[name], spec, trace, chunk, batch, its, requests, cpu_s, ratio))
    found = {}
    for (name, trace, policy, which), rates in zip(cases, run(find_capacities, jobs)):
        found |= {(name, trace, ("strict", "relaxed")[i], policy): qps for i, qps in zip(which, rates)}
    rows = [["requests/s", "SLO s", "paper's SLO", "orca", "vllm", "sarathi-serve", "over orca", "paper", "over vllm",
             "paper"]]
    for name, trace, slo in dict.fromkeys(key[:3] for key in found):
        orca, vllm, ours = (found[name, trace, slo, policy] for policy in ("orca", "vllm", "sarathi-serve"))
        seconds = (STRICT if slo == "strict" else RELAXED) * base_seconds(SYSTEMS[name].cost(cpu_s))
        paper = [f"{gain:.1f}x" for gain in PAPER_GAINS.get((name, trace, slo), ())] or ["", ""]
        rows.append([f"{name}, {trace}, {slo}", f"{seconds:.3f}", f"{PAPER_SLOS[name][slo == 'relaxed']:g}",
                     *(f"{qps:.3f}" for qps in (orca, vllm, ours)), over(ours, orca), paper[0], over(ours, vllm),
                     paper[1]])
    up_to = {"SS-F10": "2.6x over vllm for Mistral-7B, 3.7x for Yi-34B", "SS-F11":
             "6.3x over Orca and 4.3x over vllm for LLaMA2-70B, 5.6x for Falcon-180B"}[claim]
    groups = [{"group": ", ".join(key[:3]), "system": key[3], "qps": qps,
               "paper": PAPER_GAINS.get(key[:3], (None, None))[1] if key[3] == "sarathi-serve" else None}
              for key, qps in found.items()]
    title = f"capacity; {1e3 * cpu_s:g} ms of CPU per stage, {requests:,} requests (paper: up to {up_to})"
    return Table(claim, title,
                 rows, "SLO: 5 or 25 decode iterations of this cost model. Budgets and batches as in the paper's "
                 "scripts, which give Orca\n16 or 8 requests (its activations take memory that the formula does not "
                 "see), here for each micro-batch. No sliding window.", {"groups": groups})


def headline(run, requests, cpu_s):
    """SS-F10's strict row, and how it moves with the cost of the CPU; with a budget that is too large."""
    cpus = (0.0, 5e-3, 10e-3)
    systems = (("vllm", 512), ("sarathi-serve", 512), ("sarathi-serve", 2048))
    jobs = []
    for name in ("Yi-34B", "Mistral-7B"):
        for cpu in cpus:
            slo_s = STRICT * base_seconds(SYSTEMS[name].cost(cpu))
            jobs += [(SYSTEMS[name], (policy, {}), "sharegpt4", chunk, MAX_BATCH,
                      [slo_s], requests, cpu) for policy, chunk in systems]
    results = iter(run(find_capacities, jobs))
    rows = [["sharegpt4, strict SLO", "CPU ms", "SLO s", "vllm", "budget 512", "over vllm", "budget 2,048",
             "over vllm"]]
    for name in ("Yi-34B", "Mistral-7B"):
        for cpu in cpus:
            (vllm,), (small,), (large,) = next(results), next(results), next(results)
            rows.append([name, f"{1e3 * cpu:g}", f"{STRICT * base_seconds(SYSTEMS[name].cost(cpu)):.3f}",
                         f"{vllm:.2f}", f"{small:.2f}", over(small, vllm), f"{large:.2f}", over(large, vllm)])
    return Table("SS-F10", f"what the CPU's time per iteration changes, {requests:,} requests (paper: 3.7x, 2.6x)",
                 rows)


def serving_capacity(run, requests, cpu_s):
    """SS-F10 and SS-F11: capacities of four models under strict and relaxed SLOs."""
    return [headline(run, requests, cpu_s), capacities("SS-F10", ("Mistral-7B", "Yi-34B"), run, requests, cpu_s),
            capacities("SS-F11", ("LLaMA2-70B", "Falcon-180B"), run, requests, cpu_s, 1.1)]


def capacity_against_slo(run, requests, cpu_s):
    """SS-F12: capacity over the SLO, vllm at three batch sizes and two token budgets."""
    slos = {"Mistral-7B": (0.1, 0.2, 0.3, 0.5, 1.0), "Yi-34B": (0.2, 0.3, 0.5, 0.7, 1.0)}
    configurations = {f"vllm, batch {batch}": (("vllm", {}), 512, batch) for batch in (32, 64, 128)}
    configurations |= {f"sarathi-serve, budget {budget}": (("sarathi-serve", {}), budget, MAX_BATCH)
                       for budget in (512, 2048)}
    jobs = [(SYSTEMS[name], spec, "sharegpt4", chunk, batch, slos[name], requests, cpu_s, 1.1)
            for name in slos for spec, chunk, batch in configurations.values()]
    results = iter(run(find_capacities, jobs))
    tables = []
    for name, values in slos.items():
        found = {label: next(results) for label in configurations}
        curves = {label: list(zip(values, rates)) for label, rates in found.items()}
        rows = [[f"{name}: requests/s at", *(f"{slo:g} s" for slo in values)]]
        rows += [[label, *(f"{qps:.2f}" for qps in rates)] for label, rates in found.items()]
        best = [max(rates) for rates in zip(*(rates for label, rates in found.items() if "budget" in label))]
        rows.append(["best budget over vllm, batch 128", *map(over, best, found["vllm, batch 128"])])
        tables.append(Table("SS-F12", f"capacity against the SLO of P99 TBT, sharegpt4, {1e3 * cpu_s:g} ms of CPU, "
                            f"{requests:,} requests (paper: 3.5x for Mistral at 0.1 s, 1.65x for Yi at 1 s)", rows,
                            data={name: curves}))
    return tables


def across_nodes(run, requests, cpu_s):
    """SS-F13: Falcon-180B on two nodes joined by Ethernet, TP 8 against TP 4 x PP 2."""
    tensor = System("falcon-180b", tp=8, tp_link="ethernet")
    pipeline = SYSTEMS["Falcon-180B"]
    rows = [["decode-only iteration in ms, 2,048 tokens of context", "TP 8", "TP 4 x PP 2", "ratio"]]
    for cpu, batch in ((cpu, batch) for cpu in dict.fromkeys((0.0, cpu_s)) for batch in (8, 32, 128)):
        times = [1e3 * system.cost(cpu).seconds([(0, 2047, 1)] * batch) for system in (tensor, pipeline)]
        rows.append([f"batch {batch}, {1e3 * cpu:g} ms of CPU per stage", *(f"{t:.0f}" for t in times),
                     f"{times[0] / times[1]:.2f}x"])
    tables = [Table("SS-F13", "decodes across nodes (paper: TP 8 takes about 2x)", rows)]
    slos = [multiple * base_seconds(pipeline.cost(cpu_s)) for multiple in (STRICT, RELAXED)]
    systems = {"vllm, TP 8": (tensor, ("vllm", {}), 512, slos),
               "vllm, TP 4 x PP 2": (pipeline, ("vllm", {}), 512, slos),
               "sarathi-serve, TP 4 x PP 2": (pipeline, ("sarathi-serve", {}), 512, slos[:1]),
               "relaxed": (pipeline, ("sarathi-serve", {}), 2048, slos[1:])}
    jobs = [(system, spec, "sharegpt4", chunk, MAX_BATCH, its, requests, cpu_s, 1.1)
            for system, spec, chunk, its in systems.values()]
    tensor_qps, vllm_qps, (strict,), (relaxed,) = run(find_capacities, jobs)
    rows = [["requests/s", f"strict, {slos[0]:.2f} s", f"relaxed, {slos[1]:.2f} s"]]
    rates = {"vllm, TP 8": tensor_qps, "vllm, TP 4 x PP 2": vllm_qps, "sarathi-serve, TP 4 x PP 2": (strict, relaxed)}
    rows += [[name, *(f"{qps:.3f}" for qps in its)] for name, its in rates.items()]
    rows += [["sarathi-serve over TP 8 (paper: 4.3x strict)", *map(over, (strict, relaxed), tensor_qps)],
             ["over vllm, TP 4 x PP 2 (paper: 3.6x, 1.48x)", *map(over, (strict, relaxed), vllm_qps)]]
    tables.append(Table("SS-F13", f"capacity of Falcon-180B on two nodes, sharegpt4, {1e3 * cpu_s:g} ms of CPU per "
                        f"stage, {requests:,} requests", rows))
    return tables


def latencies_of(system, policy, trace, chunk, qps, seed, requests, cpu_s, batch=MAX_BATCH):
    """(P50 TTFT, P99 TTFT, P50 TBT, P99 TBT, tokens per second) of one run."""
    cost, limit = system.cost(cpu_s), LENGTHS[trace].limit
    summary = serve_at(cost, (policy, {}), serving_settings(cost, limit, chunk, batch),
                       sample_lengths(trace, requests, limit, seed), qps, seed)
    ttft, tbt = summary["ttft_s"], summary["tbt_s"]
    return ttft["p50"], ttft["p99"], tbt["p50"], tbt["p99"], summary["tokens_per_s"]


def ablation(run, requests, cpu_s, seeds=range(5)):
    """SS-T4: hybrid batches alone, chunks alone, and both; the median of five seeds."""
    paper = {("sharegpt4", 1.0): ((0.53, 0.68), (1.04, 0.17), (0.76, 0.14)),
             ("arxiv", 0.5): ((3.78, 1.38), (5.38, 0.20), (3.90, 0.17))}
    policies = ("hybrid-only", "chunked-only", "sarathi-serve")
    jobs = [(SYSTEMS["Yi-34B"], policy, trace, 512, qps, seed, 128, cpu_s)
            for trace, qps in paper for policy in policies for seed in seeds]
    results = iter(run(latencies_of, jobs))
    rows = [["", "P50 TTFT s", "simulated", "error", "P99 TBT s", "simulated", "error"]]
    for (trace, qps), numbers in paper.items():
        for policy, (ttft, tbt) in zip(policies, numbers):
            runs = [next(results) for _ in seeds]
            rows.append([f"{trace}, {policy}", *beside(ttft, statistics.median(r[0] for r in runs)),
                         *beside(tbt, statistics.median(r[3] for r in runs), 3)])
    return [Table("SS-T4", f"Yi-34B on two A100, budget 512, 128 requests, {1e3 * cpu_s:g} ms of CPU", rows,
                  "Loads of the published script, 1 and 0.5 requests/s; it sets the budget to 512, the caption says "
                  "1,024.\nTTFT depends on the lengths that happened to be drawn: these are medians of five draws.")]


def saturated(system, policy, chunk, requests, cpu_s, batch=MAX_BATCH):
    """(tokens per second, P99 TBT) of requests that are all there at time 0, so that `batch` always run."""
    cost, limit = system.cost(cpu_s), LENGTHS["sharegpt4"].limit
    arrivals = [Arrival(0.0, *pair) for pair in sample_lengths("sharegpt4", requests, limit, 0)]
    run = simulate(cost, (policy, {}), arrivals, serving_settings(cost, limit, chunk, batch), record=False).run
    summary = summarize_latencies(run.completions, run.seconds)
    return summary["tokens_per_s"], summary["tbt_s"]["p99"]


def post(run, requests, cpu_s):
    """B-7: the post's comparison of schedulers, LLaMA2-70B on four H100, 128 users."""
    paper = {"request-level": (1200, 0.85, 3.2), "orca": (2800, 0.42, 1.8), "sarathi-serve:512": (2650, 0.085, 2.1),
             "sarathi-serve:256": (2550, 0.065, 2.4), "sarathi-serve:128": (2400, 0.055, 2.8)}
    system, qps = System("llama2-70b", "h100", tp=4), 1.5
    specs = [(policy, int(chunk or 512)) for policy, _, chunk in (name.partition(":") for name in paper)]
    full = run(saturated, [(system, *spec, requests, cpu_s) for spec in specs])
    served = run(latencies_of, [(system, policy, "sharegpt4", chunk, qps, 0, requests, cpu_s)
                                for policy, chunk in specs])
    rows = [["", "tokens/s", "simulated", "P99 TBT s", "simulated", "P99 TTFT s", "simulated"]]
    for (name, (tokens, tbt, ttft)), (our_tokens, our_tbt), latencies in zip(paper.items(), full, served):
        rows.append([name, f"{tokens:,}", f"{our_tokens:,.0f}", f"{tbt:.3f}", f"{our_tbt:.3f}", f"{ttft:.1f}",
                     f"{latencies[1]:.1f}"])
    title = f"the post's schedulers: LLaMA2-70B on four H100, {1e3 * cpu_s:g} ms of CPU, {requests} requests"
    return [Table("B-7", title, rows, "tokens/s (prompt and output) and TBT with 128 requests running all the time, "
                  f"TTFT at {qps:g} requests/s. The post does\nnot say load and lengths, and names the H100 only "
                  "elsewhere: the order is all that can be compared.")]
