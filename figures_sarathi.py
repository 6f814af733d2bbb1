"""SARATHI's experiments on the machines of the paper, simulated, each beside what the paper says.

Every experiment, here and in figures_serving.py, is a function from (run, requests, cpu_s) to a list of `Table`.
`run(function, jobs)` calls the function with each tuple of arguments, maybe in parallel; `requests` is how many each
run of a serving experiment has, `cpu_s` what an iteration costs on the CPU in the experiments of Sarathi-Serve.

Read first: simulator.py. Read next: figures_serving.py, and bench_simulate.py, which prints the tables.
"""

import statistics
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from cost_model import cost_of
from serving import Settings
from simulator import bubble_kinds, simulate
from workload import Arrival, zipf_lengths

NANOGPT_CPU_S = 4e-3  # SARATHI's code beside its operations: what the three times of S-F7 leave on average


CPU = f"{1e3 * NANOGPT_CPU_S:g} ms for what is not in the operations of S-T2"


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
        return cost_of(*self, cpu_s)


@dataclass
class Table:
    """What is printed of a claim: rows of strings under a heading; what was assumed; `data` for plots."""

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
    riding = (cost.seconds([prefill] + [decode] * (batch - 1)) - cost.seconds([prefill])) / (batch - 1)
    return cost.seconds([decode] * batch) / batch / riding


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
                        f"{CPU} are what these three times leave on average;\nthe steps are predicted."))
    rows = [["decode token / prefill token", "paper", "simulated", "error"]]
    for batch, paper in ((1, 200), (2, 100), (18, 16.7)):
        prefill = cost.seconds([(0, 0, 1024)] * batch) / (1024 * batch)
        rows.append([f"batch {batch}", *beside(paper, cost.seconds([(0, 1023, 1)] * batch) / batch / prefill, 1)])
    tables.append(Table("S-F3", "what a decode costs in prefill tokens, at 1,024 tokens", rows, f"With {CPU}."))
    rows = [["decode speedup", *(f"B = {batch}" for batch in (2, 4, 6, 10, 18))]]
    for length, most in ((1024, 18), (2048, 10), (3072, 6)):
        speedups = [f"{decode_speedup(cost, length, b):.1f}x" if b <= most else "-" for b in (2, 4, 6, 10, 18)]
        rows.append([f"context {length:,}", *speedups])
    tables.append(Table("S-F8", "decodes beside a chunk of 256 (paper: 2.8x to 10x, falling both ways)", rows,
                        f"With {CPU}. B = 2 is one decode beside the chunk;\nthe paper does not say its smallest."))
    rows = [["requests that fit", "paper", "simulated"]]
    for system, length, paper in ((A6000_13B, 1024, 18), (A6000_13B, 2048, 10), (A6000_13B, 3072, 6),
                                  (A100_33B, 1024, 10), (A100_33B, 2048, 5), (A100_33B, 3072, 3),
                                  (PIPELINE, LONGEST, 27), (TP_ONLY, LONGEST, 11)):
        name = f"{system.model}, {system.device}, TP {system.tp} x PP {system.pp}, {length // 1024}K"
        rows.append([name, str(paper), str(system.cost().max_batch(length))])
    tables.append(Table("S-§4.3.1", "the batch that fits in memory, for each micro-batch in flight", rows,
                        "90 % of what the data sheet calls 80 GB makes 27 and 11; with it, less of 33B fits than the "
                        "paper ran\n(S-T4 runs the paper's batches all the same)."))
    return tables


def sarathi_end_to_end(run, requests, cpu_s):
    """S-T4, S-F9 and S-F11: throughput of SARATHI and Orca over the baseline on one GPU."""
    table_4 = {(A6000_13B, 6, 1024, 50, 256): (5.45, 1.33), (A6000_13B, 6, 2048, 50, 256): (3.26, 1.26),
               (A6000_13B, 6, 3072, 50, 256): (2.51, 1.22), (A100_33B, 10, 1024, 28, 256): (3.83, 1.25),
               (A100_33B, 5, 2048, 63, 256): (4.25, 1.22), (A100_33B, 3, 3072, 127, 256): (3.51, 1.14)}
    chunks, ratios = (128, 256, 512), (4, 7, 14, 28, 56, 112)
    figure_9 = [(A6000_13B, 18, 1024, pd, chunk) for chunk in chunks for pd in ratios]
    figure_11 = {(A6000_13B, batch, length, 256 / (batch - 1), 256): paper for batch, length, paper in (
        (18, 1024, (1.27, 1.11)), (10, 2048, (1.25, None)), (6, 3072, (1.23, None)))}
    peaks = [case for case in figure_9 if case[-1] == 256]

    specs = {"baseline": ("request-level", {}), "sarathi": ("sarathi", {}), "orca": BEST_ORCA}
    wanted = [(case, name) for case in (*table_4, *figure_9, *figure_11) for name in ("baseline", "sarathi")]
    wanted += [(case, "orca") for case in (*figure_11, *peaks)]
    found = dict(zip(wanted, run(throughput, [(case[0], specs[name], *case[1:]) for case, name in wanted])))

    def gain(case, name="sarathi"):
        return found[case, name] / found[case, "baseline"]

    rows = [["", "decode speedup", "simulated", "error", "throughput gain", "simulated", "error"]]
    for case, (speedup, paper) in table_4.items():
        system, batch, length, pd, _ = case
        rows.append([f"{system.model}, {length // 1024}K, B {batch}, P:D {pd}",
                     *beside(speedup, decode_speedup(system.cost(NANOGPT_CPU_S), length, batch)),
                     *beside(paper, gain(case))])
    tables = [Table("S-T4", "peak gains with chunks of 256 (A6000: 13B; A100: 33B)", rows, f"With {CPU}.")]

    rows = [["gain at 1K, B = 18", *(f"P:D {pd}" for pd in ratios)]]
    for chunk in chunks:
        rows.append([f"chunk {chunk}", *(f"{gain(case):.2f}x" for case in figure_9 if case[-1] == chunk)])
    tables.append(Table("S-F9", "gain over P:D (paper: 1.27x at P:D 14 with 256, 1.23x at 28 with 512, lower with 128)",
                        rows, f"The peak should be at P:D = C / (B - 1): 7.5, 15 and 30. With {CPU}."))

    rows = [["gain at P:D = 256 / (B - 1)", "paper", "simulated", "error", "Orca best case", "simulated", "error"]]
    for case, (ours, best) in figure_11.items():
        orca = gain(case, "orca")
        rows.append([f"{case[2] // 1024}K, B {case[1]}", *beside(ours, gain(case)),
                     *(beside(best, orca) if best else ["near 1", f"{orca:.2f}", ""])])
    peak = max(peaks, key=lambda case: gain(case, "orca"))
    rows.append([f"1K, Orca's peak (S-F11b), P:D {peak[3]}", "", "", "", *beside(1.11, gain(peak, "orca"))])
    tables.append(Table("S-F11", "SARATHI and Orca's best case over the baseline", rows,
                        "Orca's worst case is the baseline. A prompt of 960 rounds up to a tile alone, but not with 17 "
                        "others; so\nwhole prompts one by one lose what the baseline's batch of prompts does not.\n"
                        f"With {CPU}."))
    return tables


# -----------------------------------------------------------------------------------------------------
# SARATHI's pipeline


PIPELINE = System("gpt3-175b", tp=8, pp=8)
TP_ONLY = System("gpt3-175b", tp=8)
LONGEST = 4096


class Offline(NamedTuple):
    """A run of requests that are all there at time 0; seconds. `took` is how long it took to simulate."""

    makespan: float
    bubbles: list
    ends: list
    utilisation: float
    took: float


def offline(system, spec, lengths, replicas=1, chunk=256, cpu_s=0.0):
    """Simulate requests of these lengths in as much memory as there is. Returns an Offline."""
    began = time.perf_counter()
    cost = system.cost(cpu_s)
    batch = cost.max_batch(LONGEST)
    settings = Settings(chunk, batch, LONGEST, LONGEST, batch * cost.pp * LONGEST)
    simulated = simulate(cost, spec, [Arrival(0.0, *pair) for pair in lengths], settings, replicas=replicas,
                         record=False)
    ends = [completion.token_times[-1] for completion in simulated.run.completions]
    return Offline(simulated.run.seconds, simulated.bubbles, ends, simulated.utilisation, time.perf_counter() - began)


def sarathi_pipeline(run, requests, cpu_s, count=10_000):
    """S-F12: GPT-3 on 64 A100, a pipeline under Orca and under SARATHI, and eight replicas without a pipeline."""
    mixed = zipf_lengths(1024, LONGEST, 0.4, 10, count, 0)
    sarathi = ("sarathi", {})
    names = {"orca-best, TP 8 x PP 8": (PIPELINE, BEST_ORCA, 1), "TP 8, 8 replicas": (TP_ONLY, BEST_ORCA, 8),
             "sarathi, TP 8 x PP 8": (PIPELINE, sarathi, 1)}
    few = mixed[: count // 10]
    mean = sum(map(sum, few)) // len(few)
    same = [(mean - mean // 11, mean // 11)] * len(few)
    slow = PIPELINE._replace(pp_link="ethernet")
    variants = {  # name -> (lengths, chunk, pipeline, spec of Orca, spec of the replicas, CPU seconds)
        "as above": (few, 256, PIPELINE, BEST_ORCA, BEST_ORCA, 0.0),
        "all of one length": (same, 256, PIPELINE, BEST_ORCA, BEST_ORCA, 0.0),
        "Orca takes every prompt that fits": (few, 256, PIPELINE, ("orca", {}), BEST_ORCA, 0.0),
        "replicas under request-level": (few, 256, PIPELINE, BEST_ORCA, ("request-level", {}), 0.0),
        "replicas under SARATHI": (few, 256, PIPELINE, BEST_ORCA, sarathi, 0.0),
        "chunk 512": (few, 512, PIPELINE, BEST_ORCA, BEST_ORCA, 0.0),
        "Ethernet between stages": (few, 256, slow, BEST_ORCA, BEST_ORCA, 0.0),
        "4 ms of CPU per stage": (few, 256, PIPELINE, BEST_ORCA, BEST_ORCA, 4e-3),
        "10 ms of CPU per stage": (few, 256, PIPELINE, BEST_ORCA, BEST_ORCA, 10e-3),
    }
    jobs = [(system, spec, mixed, replicas) for system, spec, replicas in names.values()]
    for lengths, chunk, pipeline, orca, of_replicas, cpu in variants.values():
        jobs += [(pipeline, orca, lengths, 1, chunk, cpu), (TP_ONLY, of_replicas, lengths, 8, chunk, cpu),
                 (pipeline, sarathi, lengths, 1, chunk, cpu)]
    results = run(offline, jobs)
    whole = dict(zip(names, results))
    orca, tp_only, ours = whole.values()
    rows = [["", "batch", "makespan s", "stages busy", "median bubble of a request s", "took s"]]
    for (system, _, _), (name, its) in zip(names.values(), whole.items()):
        rows.append([name, str(system.cost().max_batch(LONGEST)), f"{its.makespan:,.0f}", f"{its.utilisation:.0%}",
                     f"{statistics.median(its.bubbles):.2f}", f"{its.took:.1f}"])
    data = {name: {"bubbles": its.bubbles, "ends": its.ends} for name, its in whole.items()}
    lengths = f"{count:,} requests of 1K to 4K tokens (Zipf 0.4), P:D 10, all there at time 0"
    tables = [Table("S-F12", f"GPT-3 on 64 A100, {lengths}", rows,
                    "Paper: batches of 27 (each of 8 micro-batches in flight) and 11; ours come from the memory "
                    "formula.\ntook: how long the simulation took here.", data)]

    def gains(orca, tp_only, ours):
        theirs, its = statistics.median(orca.bubbles), statistics.median(ours.bubbles)
        makespans = [f"{a.makespan / b.makespan:.2f}x" for a, b in ((tp_only, ours), (orca, ours), (orca, tp_only))]
        return [*makespans, f"{theirs / its:.1f}x" if its else "-"]

    rows = [["makespan", "SARATHI over replicas", "SARATHI over Orca", "replicas over Orca", "bubbles Orca / SARATHI"],
            ["paper", "1.48x", "1.91x", "1.28x", "6.29x"], ["simulated", *gains(orca, tp_only, ours)]]
    for number, name in enumerate(variants, start=1):
        rows.append([f"{len(few):,} requests: {name}", *gains(*results[3 * number : 3 * number + 3])])
    tables.append(Table("S-F12", "gains, and how they move with what the paper does not say", rows,
                        "With one length most of the gain over Orca goes: it is lost to batches that differ. An "
                        "iteration of a stage of\nGPT-3 takes 10 ms, so that what the CPU adds weighs on small chunks "
                        "first; above it adds nothing."))
    return tables


EXAMPLE = System("gpt3-175b", tp=8, pp=2)
EXAMPLE_LENGTHS = ((2048, 20), (1024, 20), (2040, 20), (1020, 20))


def bubble_example(run, requests, cpu_s):
    """S-F1, S-F5 and SS-F8: four requests in two stages, and the bubbles PB1, PB2 and PB3."""
    settings = Settings(256, 2, 8192, 8192, 4 * 8192)
    arrivals = [Arrival(0.0, *pair) for pair in EXAMPLE_LENGTHS]
    rows, data = [["ms", "PB1", "PB2", "PB3", "all bubbles", "makespan"]], {}
    for name, spec in (("orca-best", BEST_ORCA), ("sarathi-serve", ("sarathi-serve", {}))):
        simulated = simulate(EXAMPLE.cost(), spec, arrivals, settings, timeline=True)
        sums = dict.fromkeys(("PB1", "PB2", "PB3"), 0.0)
        for stage_run, kind in bubble_kinds(simulated.stage_runs):
            sums[kind] += stage_run.bubble
        rows.append([name, *(f"{1e3 * s:,.1f}" for s in (*sums.values(), sum(sums.values()), simulated.run.seconds))])
        data[name] = simulated.stage_runs
    lengths = ", ".join(f"{name} {p:,} + {d}" for name, (p, d) in zip("ABCD", EXAMPLE_LENGTHS))
    return [Table("SS-F8", f"bubbles in two stages: GPT-3, TP 8 x PP 2; requests {lengths} tokens", rows,
                  "PB1: prefills of different length; PB2: prefill against decodes; PB3: decodes at different "
                  "contexts, and what\nthe output head adds to the last stage. Chunk 256.", data)]
