"""Does the simulator tell the truth? On the one machine where it can be asked: this one.

    python bench.py validate

profiles this machine for some seconds and fits a cost model to that, then compares (1) predicted
with measured times of iterations over a grid of batches that were not in the profile, and (2) two
runs of `bench.py serve`, real time and real model, with their simulation on the same arrivals.

Read first: calibration.py, machine.py and experiments/run.py.
"""

import statistics
from dataclasses import replace
from itertools import product

import numpy as np

from experiments.machine import describe_machine
from experiments.metrics import summarize_latencies
from experiments.options import load_model, machine_lines, write_json
from experiments.run import estimated_qps, serve
from experiments.tables import print_table
from experiments.workload import poisson, prompts, sample_lengths
from policies.config import EngineConfig
from simulator.calibration import FittedCost
from simulator.machine import base_of, cost_cases, time_batches
from simulator.simulation import simulate

MAX_LEN = 2048
# (prefill tokens, context, decodes): what is predicted, and not in the profile
GRID = list(product((0, 48, 96, 300, 512), (64, 1000, 2000), (0, 2, 6, 12, 16)))
GRID = [case for case in GRID if case[0] or case[2]]
MOOD = [(0, 256, 4), (0, 256, 16), (128, 256, 4)]  # like batches of a run, timed around each again
POLICIES = ("sarathi-serve", "vllm")
NUMBERS = {  # what is compared of two runs: its format, and where it is in summarize_latencies
    "tokens/s": (",.0f", lambda its: its["tokens_per_s"]),
    "P50 TBT s": (",.4f", lambda its: its["tbt_s"]["p50"]),
    "P99 TBT s": (",.3f", lambda its: its["tbt_s"]["p99"]),
    "P50 TTFT s": (",.3f", lambda its: its["ttft_s"]["p50"]),
}


def add_options(parser):
    """The options of `validate`."""
    parser.add_model_options("llama-160m")
    parser.add_files(json="write all that is printed")


def main(args):
    """Print both comparisons."""
    args.max_len = MAX_LEN
    model = load_model(args, "max_len")
    machine = describe_machine(model, args, 512)
    print(machine_lines(machine))
    cases = cost_cases(MAX_LEN)
    rows = time_batches(model, cases + GRID, MAX_LEN, args.attention)  # in turn: in the same mood
    profile = [(row.shape, row.seconds) for row in rows[: len(cases)]]
    cost, seconds = FittedCost(profile), sum(seconds for _, seconds in profile)
    fitted = f"fitted to {len(profile)} batches that take {seconds:.1f} s"
    print(f"this machine, {fitted}: {cost.describe()}\n")
    report = {"machine": machine, "law": list(cost.law.law)}  # before runs scale it
    report["batches"] = compare_batches(cost, rows[len(cases) :])
    report["runs"] = compare_runs(model, cost, args)
    write_json(args, report)


def compare_batches(cost, rows):
    """The grid: measured and predicted seconds of each batch, as a table and as numbers."""
    errors = [cost.law.predict(row.shape) / row.seconds - 1 for row in rows]
    texts = [f"{1e3 * row.seconds:.1f} ({error:+.0%})" for row, error in zip(rows, errors)]
    texts, counts = dict(zip(GRID, texts)), sorted({decodes for *_, decodes in GRID})
    table = []
    for prefill, context in dict.fromkeys(case[:2] for case in GRID):
        cells = [texts.get((prefill, context, count), "") for count in counts]
        table.append([f"{prefill} prefill, context {context:,}", *cells])
    print("1. Iterations: none of these batches was in the profile\n")
    heads = ["ms measured (predicted)", *(f"{count} decodes" for count in counts)]
    print_table(dict.fromkeys(heads, ""), table)
    sizes = sorted(map(abs, errors))
    median, p90 = statistics.median(sizes), sizes[int(0.9 * len(sizes))]
    print(
        f"\n|error|: median {median:.1%}, P90 {p90:.1%}, largest {sizes[-1]:.1%}. Context: that of "
        "the decodes, and\nwhere the chunk ends, unless it is longer: then it starts its request\n"
    )
    grid = [[*case, row.seconds, error] for case, row, error in zip(GRID, rows, errors)]
    return {"median": median, "p90": p90, "grid": grid}


def compare_runs(model, cost, args, count=32, rounds=3):
    """Real and simulated runs of the same arrivals, at half the rate that might be possible."""
    sizes = dict(chunk=128, max_batch=32, max_len=1024, page_size=64, pages=160)
    config = EngineConfig(**sizes, attention=args.attention)
    lengths = sample_lengths("sharegpt4", count, config.max_len, args.seed)
    base = base_of(cost, config.max_len, config.chunk)
    qps = float(f"{estimated_qps(base, poisson(lengths, 1.0, args.seed)) / 2:.2g}")
    arrivals = poisson(lengths, qps, args.seed)
    tokens = prompts(arrivals, model.config.vocab_size, args.seed)
    found, scales, table = {policy: [] for policy in POLICIES}, [], []
    for policy in rounds * POLICIES:
        its = replace(config, policy=policy)
        rows = time_batches(model, MOOD, MAX_LEN, args.attention)
        real = serve(model, its, arrivals, tokens)
        rows += time_batches(model, MOOD, MAX_LEN, args.attention)
        cost.law.scale = 1.0
        scale = statistics.geometric_mean(row.seconds / cost.law.predict(row.shape) for row in rows)
        cost.law.scale = scale
        scales.append(scale)
        pair = real, simulate(cost, its, arrivals).run
        found[policy].append([summarize_latencies(run.completions, run.seconds) for run in pair])
    for policy, pairs in found.items():
        for name, (spec, get) in NUMBERS.items():
            medians = np.median([[get(summary) for summary in pair] for pair in pairs], axis=0)
            measured, simulated = medians.tolist()
            cells = [(measured, spec), (simulated, spec), simulated / measured - 1]
            table.append([f"{policy}: {name}", *cells])
    lengths = f"{count} requests with the lengths of sharegpt4 scaled to 1,024\n   tokens"
    means = f"{qps:g} a second; medians of {rounds} runs each"
    print(f"2. bench.py serve and its simulation: {lengths}, {means}\n")
    print_table({"": "", "measured": "", "simulated": "", "error": "+.1%"}, table)
    print(
        "\nThe speed of this machine changes from minute to minute: the law of each run is scaled "
        f"to what a few\nbatches took before and after it, by {min(scales):.2f} to "
        f"{max(scales):.2f}."
    )
    return found
