"""The papers' experiments on the machines of the papers, simulated, each beside what the paper says.

Every experiment is a function from (run, requests, cpu_s) to a list of `Table`. `run(function, arguments)` calls the
function with each tuple of arguments, maybe in parallel; `requests` is how many each run of a serving experiment has,
`cpu_s` what an iteration costs on the CPU in the experiments of Sarathi-Serve. What the papers leave open is in the
notes: loads and batch sizes are those of the scripts that Sarathi-Serve's authors published.

Read first: simulator.py. Read next: bench_simulate.py, which prints the tables.
"""

import statistics
from dataclasses import dataclass, field
from functools import cache, partial
from typing import NamedTuple

from cost_model import DEVICES, GEOMETRIES, LINKS, PARALLEL_BLOCKS, CostModel
from metrics import meets_slo, summarize_latencies
from profiling import BASE_BATCH, RELAXED, STRICT, base_context
from serving import MAX_DELAY_S, Settings, capacity
from simulator import bubble_kinds, simulate
from workload import LENGTHS, Arrival, poisson, sample_lengths, zipf_lengths

NANOGPT_CPU_S = 4e-3  # what S-F7's three times leave on average over the operations, for SARATHI's code on an A6000
TILE = {"tile": 128}


class System(NamedTuple):
    """A model on some GPUs."""

    model: str
    device: str = "a100-80gb"
    tp: int = 1
    pp: int = 1
    tp_link: str | None = None
    pp_link: str | None = None

    def cost(self, cpu_s=0.0):
        """Its CostModel."""
        return CostModel(GEOMETRIES[self.model], DEVICES[self.device], self.tp, self.pp, LINKS.get(self.tp_link),
                         LINKS.get(self.pp_link), cpu_s, self.model in PARALLEL_BLOCKS)


# Sarathi-Serve, Table 1 and §5. GPUs are joined in pairs by NVLink, so that four or eight talk through PCIe.
SYSTEMS = {
    "Mistral-7B": System("mistral-7b"),
    "Yi-34B": System("yi-34b", tp=2),
    "LLaMA2-70B": System("llama2-70b", "a40", 4, 2, "pcie4", "pcie4"),
    "Falcon-180B": System("falcon-180b", tp=4, pp=2, tp_link="pcie4", pp_link="ethernet"),
}
PAPER_SLOS = {"Mistral-7B": (0.1, 0.5), "Yi-34B": (0.2, 1), "LLaMA2-70B": (1, 5), "Falcon-180B": (1, 5)}  # Table 3
ORCA_BATCH = {"Mistral-7B": 16, "Yi-34B": 16, "LLaMA2-70B": 8, "Falcon-180B": 8}  # the scripts: more does not fit
RELAXED_BUDGET = {"LLaMA2-70B": 1536}  # §5.1; others 2,048
STRICT_BUDGET = 512
MAX_BATCH = 128


@dataclass
class Table:
    """What is printed of a claim: rows of strings under a heading; `note` says what was assumed, `data` is for plots."""

    claim: str
    title: str
    rows: list
    note: str = ""
    data: dict = field(default_factory=dict)


def beside(paper, simulated, digits=2):
    """Three cells: the paper's number, ours, and by how much ours differs."""
    return [f"{paper:.{digits}f}", f"{simulated:.{digits}f}", f"{simulated / paper - 1:+.0%}"]


# -----------------------------------------------------------------------------------------------------
# SARATHI on one GPU


A6000_13B = System("llama-13b", "a6000")
A100_33B = System("llama-33b")
BEST_ORCA = ("orca", {"prefills": 1})


def throughput(system, spec, batch, length, pd_ratio, chunk, requests=40):
    """Tokens per second, prompts and outputs, of 40 B requests of one length that are all there at time 0."""
    output = max(1, round(length / (pd_ratio + 1)))
    settings = Settings(chunk, batch, length, length, batch * length)
    arrivals = [Arrival(0.0, length - output, output)] * (requests * batch)
    simulated = simulate(system.cost(NANOGPT_CPU_S), spec, arrivals, settings, record=False)
    return len(arrivals) * length / simulated.run.seconds


def decode_speedup(cost, length, batch, chunk=256):
    """How many times cheaper a decode is beside a chunk than in a batch of its own, S-§5.1.1."""
    prefill, decode = (0, length - chunk, chunk - (batch - 1)), (0, length - 1, 1)
    beside = (cost.seconds([prefill] + [decode] * (batch - 1)) - cost.seconds([prefill])) / (batch - 1)
    return cost.seconds([decode] * batch) / batch / beside


def sarathi_iterations(run, requests, cpu_s):
    """S-T2, S-F7, S-F3 and S-F8: single iterations of LLaMA-13B on an A6000."""
    cost = A6000_13B.cost(NANOGPT_CPU_S)
    prefill, decode = cost.parts([(0, 0, 1024)]), cost.parts([(0, 1023, 1)] * 4)
    hybrid = cost.parts([(0, 0, 1021)] + [(0, 1023, 1)] * 3)
    rows = [["ms", "paper", "simulated", "error"]]
    for name, parts, linear, attention in (("prefill 1,024", prefill, 224.8, 10), ("4 decodes", decode, 44.28, 5.68),
                                           ("1,021 + 3", hybrid, 223.2, 15.2)):
        rows.append([f"{name}: linear", *beside(linear, 1e3 * parts["linear"])])
        rows.append([f"{name}: attention", *beside(attention, 1e3 * parts["attention"])])
    tables = [Table("S-T2", "time of operations, LLaMA-13B on an A6000", rows,
                    "The first two batches are what the constants of the A6000 were set by.")]
    rows = [["ms", "paper", "simulated", "error"]]
    for tokens, paper in ((128, 55), (256, 69.8), (257, 92.33)):
        rows.append([f"prompt of {tokens}", *beside(paper, 1e3 * cost.seconds([(0, 0, tokens)]))])
    tables.append(Table("S-F7", "tile quantization: one iteration", rows,
                        f"With {1e3 * NANOGPT_CPU_S:g} ms for what is not in S-T2's operations."))
    rows = [["decode token / prefill token", "paper", "simulated", "error"]]
    for batch, paper in ((1, 200), (2, 100), (18, 16.7)):
        prefill = cost.seconds([(0, 0, 1024)] * batch) / (1024 * batch)
        rows.append([f"batch {batch}", *beside(paper, cost.seconds([(0, 1023, 1)] * batch) / batch / prefill, 1)])
    tables.append(Table("S-F3", "what a decode costs in prefill tokens, at 1,024 tokens", rows))
    rows = [["decode speedup", *(f"B = {batch}" for batch in (2, 4, 6, 10, 18))]]
    for length, most in ((1024, 18), (2048, 10), (3072, 6)):
        speedups = [f"{decode_speedup(cost, length, b):.1f}x" if b <= most else "-" for b in (2, 4, 6, 10, 18)]
        rows.append([f"context {length:,}", *speedups])
    tables.append(Table("S-F8", "decodes beside a chunk of 256 (paper: 2.8x to 10x, falling both ways)", rows,
                        "B = 2 is one decode beside the chunk; the paper's smallest batch is not said."))
    return tables


def sarathi_end_to_end(run, requests, cpu_s):
    """S-T4, S-F9 and S-F11: throughput of SARATHI and Orca over the baseline on one GPU."""
    table_4 = [(A6000_13B, 1024, 6, 50, 5.45, 1.33), (A6000_13B, 2048, 6, 50, 3.26, 1.26),
               (A6000_13B, 3072, 6, 50, 2.51, 1.22), (A100_33B, 1024, 10, 28, 3.83, 1.25),
               (A100_33B, 2048, 5, 63, 4.25, 1.22), (A100_33B, 3072, 3, 127, 3.51, 1.14)]
    figure_9 = [(chunk, pd) for chunk in (128, 256, 512) for pd in (4, 7, 14, 28, 56, 112)]
    figure_11 = [(1024, 18, 1.27, 1.11), (2048, 10, 1.25, None), (3072, 6, 1.23, None)]
    baseline, sarathi = ("request-level", {}), ("sarathi", TILE)
    ratios = (7, 14, 28, 56, 112)
    jobs = [(system, spec, batch, length, pd, 256) for system, length, batch, pd, *_ in table_4
            for spec in (baseline, sarathi)]
    jobs += [(A6000_13B, spec, 18, 1024, pd, chunk) for chunk, pd in figure_9 for spec in (baseline, sarathi)]
    jobs += [(A6000_13B, spec, batch, length, 256 / (batch - 1), 256) for length, batch, *_ in figure_11
             for spec in (baseline, sarathi, BEST_ORCA)]
    jobs += [(A6000_13B, spec, 18, 1024, pd, 256) for pd in ratios for spec in (baseline, BEST_ORCA)]
    results = iter(run(throughput, jobs))
    rows = [["", "decode speedup", "simulated", "error", "throughput gain", "simulated", "error"]]
    for system, length, batch, pd, speedup, gain in table_4:
        base, ours = next(results), next(results)
        name = f"{system.model}, {length // 1024}K, B {batch}, P:D {pd}"
        rows.append([name, *beside(speedup, decode_speedup(system.cost(NANOGPT_CPU_S), length, batch)),
                     *beside(gain, ours / base)])
    tables = [Table("S-T4", "peak gains with chunks of 256 (A6000: 13B; A100: 33B)", rows)]
    gains = {key: 1 / next(results) * next(results) for key in figure_9}
    rows = [["gain at 1K, B = 18", *(f"P:D {pd}" for pd in sorted({pd for _, pd in figure_9}))]]
    rows += [[f"chunk {chunk}", *(f"{gain:.2f}x" for key, gain in gains.items() if key[0] == chunk)]
             for chunk in (128, 256, 512)]
    tables.append(Table("S-F9", "gain over P:D (paper: 1.27x at P:D 14 with 256, 1.23x at 28 with 512, lower with 128)",
                        rows, "The peak is at P:D = C / (B - 1): 7.5, 15 and 30."))
    rows = [["gain at P:D = 256 / (B - 1)", "paper", "simulated", "error", "Orca best case", "simulated", "error"]]
    for length, batch, ours, best in figure_11:
        base, sarathi, orca = next(results), next(results), next(results)
        rows.append([f"{length // 1024}K, B {batch}", *beside(ours, sarathi / base),
                     *(beside(best, orca / base) if best else ["near 1", f"{orca / base:.2f}", ""])])
    over = {pd: 1 / next(results) * next(results) for pd in ratios}
    best = max(over, key=over.get)
    rows.append([f"1K, Orca's best P:D, {best}", "", "", "", *beside(1.11, over[best])])
    tables.append(Table("S-F11", "SARATHI and Orca's best case over the baseline", rows,
                        "Orca's worst case is the baseline. A prompt of 960 rounds up to a tile alone, but not with 17 "
                        "others; so\nwhole prompts one by one lose what the baseline's batch of prompts does not."))
    return tables


# -----------------------------------------------------------------------------------------------------
# SARATHI's pipeline


PIPELINE = System("gpt3-175b", tp=8, pp=8)
TP_ONLY = System("gpt3-175b", tp=8)
LONGEST = 4096


def offline(system, spec, lengths, replicas=1, chunk=256, link=None):
    """Requests of these lengths, all at time 0, in as much memory as there is: (makespan, bubbles, ends, utilisation).

    Seconds; bubbles and ends of each request.
    """
    cost = replace_link(system, link).cost()
    batch = cost.max_batch(LONGEST)
    settings = Settings(chunk, batch, LONGEST, LONGEST, batch * cost.pp * LONGEST)
    simulated = simulate(cost, spec, [Arrival(0.0, *pair) for pair in lengths], settings, replicas=replicas,
                         record=False)
    ends = [completion.token_times[-1] for completion in simulated.run.completions]
    return simulated.run.seconds, simulated.bubbles, ends, simulated.utilisation


def replace_link(system, link):
    """The system with another link between its stages."""
    return system._replace(pp_link=link) if link else system


def sarathi_pipeline(run, requests, cpu_s, count=10_000):
    """S-F12: GPT-3 on 64 A100, a pipeline under Orca and under SARATHI, and eight replicas without a pipeline."""
    mixed = zipf_lengths(1024, LONGEST, 0.4, 10, count, 0)
    sarathi = ("sarathi", TILE)
    names = {"orca-best, TP 8 x PP 8": (PIPELINE, BEST_ORCA, 1), "TP 8, 8 replicas": (TP_ONLY, BEST_ORCA, 8),
             "sarathi, TP 8 x PP 8": (PIPELINE, sarathi, 1)}
    few = mixed[: count // 10]
    mean = sum(map(sum, few)) // len(few)
    same = [(mean - mean // 11, mean // 11)] * len(few)
    variants = {  # name -> (lengths, chunk, link, spec of Orca, spec of the replicas)
        "as above": (few, 256, None, BEST_ORCA, BEST_ORCA),
        "all of one length": (same, 256, None, BEST_ORCA, BEST_ORCA),
        "Orca takes every prompt that fits": (few, 256, None, ("orca", {}), BEST_ORCA),
        "replicas under request-level": (few, 256, None, BEST_ORCA, ("request-level", {})),
        "replicas under SARATHI": (few, 256, None, BEST_ORCA, sarathi),
        "chunk 512": (few, 512, None, BEST_ORCA, BEST_ORCA),
        "Ethernet between stages": (few, 256, "ethernet", BEST_ORCA, BEST_ORCA),
    }
    jobs = [(system, spec, mixed, replicas) for system, spec, replicas in names.values()]
    for lengths, chunk, link, orca, replicas in variants.values():
        jobs += [(PIPELINE, orca, lengths, 1, chunk, link), (TP_ONLY, replicas, lengths, 8, chunk),
                 (PIPELINE, sarathi, lengths, 1, chunk, link)]
    results = run(offline, jobs)
    whole = dict(zip(names, results))
    orca, tp_only, ours = whole.values()
    rows = [["", "batch", "makespan s", "stages busy", "median bubble of a request s"]]
    for (system, _, _), (name, (makespan, bubbles, _, busy)) in zip(names.values(), whole.items()):
        rows.append([name, str(system.cost().max_batch(LONGEST)), f"{makespan:,.0f}", f"{busy:.0%}",
                     f"{statistics.median(bubbles):.2f}"])
    data = {name: {"bubbles": bubbles, "ends": ends} for name, (_, bubbles, ends, _) in whole.items()}
    lengths = f"{count:,} requests of 1K to 4K tokens (Zipf 0.4), P:D 10, all there at time 0"
    tables = [Table("S-F12", f"GPT-3 on 64 A100, {lengths}", rows,
                    "Paper: batches of 27 (each of 8 micro-batches in flight) and 11; ours come from the memory "
                    "formula.", data)]

    def gains(orca, tp_only, ours):
        reduction = statistics.median(orca[1]) / max(statistics.median(ours[1]), 1e-9)
        return [f"{tp_only[0] / ours[0]:.2f}x", f"{orca[0] / ours[0]:.2f}x", f"{orca[0] / tp_only[0]:.2f}x",
                f"{reduction:.1f}x"]

    rows = [["makespan", "SARATHI over replicas", "SARATHI over Orca", "replicas over Orca", "bubbles Orca / SARATHI"],
            ["paper", "1.48x", "1.91x", "1.28x", "6.29x"], ["simulated", *gains(orca, tp_only, ours)]]
    for number, name in enumerate(variants, start=1):
        rows.append([f"{len(few):,} requests: {name}", *gains(*results[3 * number : 3 * number + 3])])
    tables.append(Table("S-F12", "gains, and how they move with what the paper does not say", rows,
                        "With one length most of the gain over Orca goes: it is lost to batches that differ."))
    return tables


EXAMPLE = System("gpt3-175b", tp=8, pp=2)
EXAMPLE_LENGTHS = ((2048, 20), (1024, 20), (2040, 20), (1020, 20))


def bubble_example(run, requests, cpu_s):
    """S-F1, S-F5 and SS-F8: four requests in two stages, and the bubbles PB1, PB2 and PB3."""
    settings = Settings(256, 2, 8192, 8192, 4 * 8192)
    arrivals = [Arrival(0.0, *pair) for pair in EXAMPLE_LENGTHS]
    rows, data = [["ms", "PB1", "PB2", "PB3", "all bubbles", "makespan"]], {}
    for name, spec in (("orca", BEST_ORCA), ("sarathi-serve", ("sarathi-serve", {}))):
        simulated = simulate(EXAMPLE.cost(), spec, arrivals, settings, timeline=True)
        sums = dict.fromkeys(("PB1", "PB2", "PB3"), 0.0)
        for stage_run, kind in bubble_kinds(simulated.stage_runs):
            sums[kind] += stage_run.bubble
        rows.append([name, *(f"{1e3 * s:,.1f}" for s in (*sums.values(), sum(sums.values()), simulated.run.seconds))])
        data[name] = simulated.stage_runs
    lengths = ", ".join(f"{name} {p:,} + {d}" for name, (p, d) in zip("ABCD", EXAMPLE_LENGTHS))
    return [Table("SS-F8", f"bubbles in two stages: GPT-3, TP 8 x PP 2; requests {lengths} tokens", rows,
                  "PB1: prefills of different length; PB2: prefill against decodes; PB3: decodes at different contexts.\n"
                  "Chunk 256.", data)]


# -----------------------------------------------------------------------------------------------------
# Sarathi-Serve's capacities


def serving_settings(cost, max_len, chunk, batch):
    """All the memory there is, in pages of 64."""
    return Settings(chunk, batch, max_len, 64, cost.kv_tokens())


def base_seconds(cost, max_len=8192):
    """The decode iteration that SLOs are multiples of, SS-§5.1."""
    return cost.seconds([(0, base_context(max_len) - 1, 1)] * BASE_BATCH)


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
                    ("sarathi-serve", ("sarathi-serve", TILE), STRICT_BUDGET, MAX_BATCH, (0,)),
                    ("sarathi-serve", ("sarathi-serve", TILE), RELAXED_BUDGET.get(name, 2048), MAX_BATCH, (1,))):
                cases.append((name, trace, policy, which))
                jobs.append((SYSTEMS[name], spec, trace, chunk, batch, [slos[i] for i in which], requests, cpu_s, ratio))
    found = {}
    for (name, trace, policy, which), rates in zip(cases, run(find_capacities, jobs)):
        found |= {(name, trace, ("strict", "relaxed")[i], policy): qps for i, qps in zip(which, rates)}
    rows = [["requests/s", "SLO s", "paper's SLO", "orca", "vllm", "sarathi-serve", "over orca", "paper", "over vllm",
             "paper"]]
    for name, trace, slo in dict.fromkeys(key[:3] for key in found):
        orca, vllm, ours = (found[name, trace, slo, policy] for policy in ("orca", "vllm", "sarathi-serve"))
        seconds = (STRICT if slo == "strict" else RELAXED) * base_seconds(SYSTEMS[name].cost(cpu_s))
        paper = [f"{gain:.1f}x" for gain in PAPER_GAINS.get((name, trace, slo), ())] or ["", ""]
        over = [f"{ours / other:.2f}x" if other else "-" for other in (orca, vllm)]
        rows.append([f"{name}, {trace}, {slo}", f"{seconds:.3f}", f"{PAPER_SLOS[name][slo == 'relaxed']:g}",
                     *(f"{qps:.3f}" for qps in (orca, vllm, ours)), over[0], paper[0], over[1], paper[1]])
    up_to = {"SS-F10": "2.6x over vllm for Mistral-7B, 3.7x for Yi-34B", "SS-F11":
             "6.3x over Orca and 4.3x over vllm for LLaMA2-70B, 5.6x for Falcon-180B"}[claim]
    groups = [{"group": ", ".join(key[:3]), "system": key[3], "qps": qps, "paper": None} for key, qps in found.items()]
    return Table(claim, f"capacity; {1e3 * cpu_s:g} ms of CPU per iteration, {requests:,} requests (paper: up to "
                 f"{up_to})", rows, "SLO: 5 or 25 decode iterations of this cost model. Budgets and batches as in the "
                 "paper's scripts.", {"groups": groups})


def headline(run, requests, cpu_s):
    """SS-F10's strict row, and how it moves with the cost of the CPU; with a budget that is too large."""
    cpus = (0.0, 5e-3, 10e-3)
    systems = (("vllm", 512), ("sarathi-serve", 512), ("sarathi-serve", 2048))
    jobs = []
    for name in ("Yi-34B", "Mistral-7B"):
        for cpu in cpus:
            slo_s = STRICT * base_seconds(SYSTEMS[name].cost(cpu))
            jobs += [(SYSTEMS[name], (policy, {} if policy == "vllm" else TILE), "sharegpt4", chunk, MAX_BATCH,
                      [slo_s], requests, cpu) for policy, chunk in systems]
    results = iter(run(find_capacities, jobs))
    rows = [["sharegpt4, strict SLO", "CPU ms", "SLO s", "vllm", "budget 512", "over vllm", "budget 2,048",
             "over vllm"]]
    for name in ("Yi-34B", "Mistral-7B"):
        for cpu in cpus:
            (vllm,), (small,), (large,) = next(results), next(results), next(results)
            rows.append([name, f"{1e3 * cpu:g}", f"{STRICT * base_seconds(SYSTEMS[name].cost(cpu)):.3f}",
                         f"{vllm:.2f}", f"{small:.2f}", f"{small / vllm:.2f}x", f"{large:.2f}", f"{large / vllm:.2f}x"])
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
    configurations |= {f"budget {budget}": (("sarathi-serve", TILE), budget, MAX_BATCH) for budget in (512, 2048)}
    jobs = [(SYSTEMS[name], spec, "sharegpt4", chunk, batch, slos[name], requests, cpu_s, 1.1)
            for name in slos for spec, chunk, batch in configurations.values()]
    results = iter(run(find_capacities, jobs))
    tables = []
    for name, values in slos.items():
        rows, curves = [[f"{name}: requests/s at", *(f"{slo:g} s" for slo in values)]], {}
        for label in configurations:
            rates = next(results)
            curves[label] = list(zip(values, rates))
            rows.append([label, *(f"{qps:.2f}" for qps in rates)])
        best = [max(float(row[i]) for row in rows[4:]) / max(float(rows[3][i]), 1e-9) for i in range(1, len(rows[0]))]
        rows.append(["best budget over vllm, batch 128", *(f"{gain:.2f}x" for gain in best)])
        tables.append(Table("SS-F12", f"capacity against the SLO of P99 TBT, sharegpt4, {1e3 * cpu_s:g} ms of CPU "
                            "(paper: 3.5x for Mistral at 0.1 s, 1.65x for Yi at 1 s)", rows, data={name: curves}))
    return tables


def across_nodes(run, requests, cpu_s):
    """SS-F13: Falcon-180B on two nodes joined by Ethernet, TP 8 against TP 4 x PP 2."""
    tensor = System("falcon-180b", tp=8, tp_link="ethernet")
    pipeline = SYSTEMS["Falcon-180B"]
    rows = [["decode-only iteration in ms, 2,048 tokens of context", "TP 8", "TP 4 x PP 2", "ratio"]]
    for batch in (8, 32, 128):
        times = [1e3 * system.cost(cpu_s).seconds([(0, 2047, 1)] * batch) for system in (tensor, pipeline)]
        rows.append([f"batch {batch}", *(f"{t:.0f}" for t in times), f"{times[0] / times[1]:.2f}x"])
    tables = [Table("SS-F13", "decodes across nodes (paper: TP 8 takes about 2x)", rows)]
    slos = [multiple * base_seconds(pipeline.cost(cpu_s)) for multiple in (STRICT, RELAXED)]
    systems = {"vllm, TP 8": (tensor, ("vllm", {}), 512, slos),
               "vllm, TP 4 x PP 2": (pipeline, ("vllm", {}), 512, slos),
               "sarathi-serve, TP 4 x PP 2": (pipeline, ("sarathi-serve", TILE), 512, slos[:1]),
               "relaxed": (pipeline, ("sarathi-serve", TILE), 2048, slos[1:])}
    jobs = [(system, spec, "sharegpt4", chunk, MAX_BATCH, its, requests, cpu_s, 1.1)
            for system, spec, chunk, its in systems.values()]
    tensor_qps, vllm_qps, (strict,), (relaxed,) = run(find_capacities, jobs)
    rows = [["requests/s", f"strict, {slos[0]:.2f} s", f"relaxed, {slos[1]:.2f} s"]]
    rates = {"vllm, TP 8": tensor_qps, "vllm, TP 4 x PP 2": vllm_qps, "sarathi-serve, TP 4 x PP 2": (strict, relaxed)}
    rows += [[name, *(f"{qps:.3f}" for qps in its)] for name, its in rates.items()]
    gains = [["-" if not qps else f"{ours / qps:.2f}x" for ours, qps in zip((strict, relaxed), its)]
             for its in (tensor_qps, vllm_qps)]
    rows += [["sarathi-serve over TP 8 (paper: 4.3x strict)", *gains[0]],
             ["over vllm, TP 4 x PP 2 (paper: 3.6x, 1.48x)", *gains[1]]]
    tables.append(Table("SS-F13", "capacity of Falcon-180B on two nodes, sharegpt4", rows))
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


def post(run, requests, cpu_s):
    """B-7: the post's comparison of schedulers, LLaMA2-70B on four H100, 128 users."""
    paper = {"request-level": (1200, 0.85, 3.2), "orca": (2800, 0.42, 1.8), "sarathi-serve:512": (2650, 0.085, 2.1),
             "sarathi-serve:256": (2550, 0.065, 2.4), "sarathi-serve:128": (2400, 0.055, 2.8)}
    system, qps = System("llama2-70b", "h100", tp=4), 2.0
    jobs = []
    for name in paper:
        policy, _, chunk = name.partition(":")
        jobs.append((system, policy, "sharegpt4", int(chunk or 512), qps, 0, requests, cpu_s))
    rows = [["", "tokens/s", "simulated", "P99 TBT s", "simulated", "P99 TTFT s", "simulated"]]
    for (name, (tokens, tbt, ttft)), result in zip(paper.items(), run(latencies_of, jobs)):
        rows.append([name, f"{tokens:,}", f"{result[4]:,.0f}", f"{tbt:.3f}", f"{result[3]:.3f}", f"{ttft:.1f}",
                     f"{result[1]:.1f}"])
    return [Table("B-7", f"the post's schedulers: LLaMA2-70B on four H100, {qps:g} requests/s, {requests} requests",
                  rows, "The post does not say its hardware, load or lengths: only the order can be compared.")]


EXPERIMENTS = {
    "sarathi": sarathi_iterations, "throughput": sarathi_end_to_end, "bubbles": bubble_example,
    "pipeline": sarathi_pipeline, "capacity": serving_capacity, "slo": capacity_against_slo, "nodes": across_nodes,
    "ablation": ablation, "post": post,
}
