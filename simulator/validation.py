"""Does the simulator tell the truth? On the one machine where it can be asked: this one.

    python bench.py validate

profiles this machine for some seconds and fits a cost model to that, then compares (1) predicted
with measured times of iterations over a grid of batches that were not in the profile, and (2) two
runs of `bench.py serve`, real time and real model, with their simulation on the same arrivals.

Read first: calibration.py, machine.py and experiments/run.py.
"""

import statistics
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np

from experiments import measure
from experiments.machine import describe_machine
from experiments.metrics import summarize_latencies
from experiments.options import load_model, machine_lines, write_json, wrote
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
POLICIES = ("sarathi-serve", "vllm")
NUMBERS = {  # what is compared of two runs: its format, and where it is in summarize_latencies
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
    time = partial(time_batches, model, cases + GRID, MAX_LEN, args.attention)  # in turn
    rows, drift = measure.steadily(time, model.device)
    profile = [(row.shape, row.seconds) for row in rows[: len(cases)]]
    cost, seconds = FittedCost(profile), sum(seconds for _, seconds in profile)
    fitted = f"fitted to {len(profile)} batches that take {seconds:.1f} s"
    print(f"this machine, {fitted}: {cost.describe()}\n")
    report = {"machine": machine, "law": list(cost.law.law)}
    report["batches"] = compare_batches(cost, rows[len(cases) :], drift)
    report["runs"] = compare_runs(model, cost, args)
    write_json(args, report)
    wrote(args.json)


def compare_batches(cost, rows, drift):
    """The grid: measured seconds of each batch, and by how much the predicted ones are off."""
    errors = [cost.law.predict(row.shape) / row.seconds - 1 for row in rows]
    sizes = sorted(map(abs, errors))
    median, p90 = statistics.median(sizes), sizes[int(0.9 * len(sizes))]
    found = f"off by {median:.1%} in the median, by {p90:.1%} at P90, {sizes[-1]:.1%} at most"
    found = measure.TOO_BUSY if drift > measure.BUSY else found
    print(f"1. Iterations, {len(GRID)} that were not in the profile: {found}\n")
    grid = [[*case, row.seconds, error] for case, row, error in zip(GRID, rows, errors)]
    return {"median": median, "p90": p90, "drift": drift, "grid": grid}


def compare_runs(model, cost, args, count=32, rounds=3):
    """Real and simulated runs of the same arrivals, at half the rate that might be possible."""
    sizes = dict(chunk=128, max_batch=32, max_len=1024, page_size=64, pages=160)
    config = EngineConfig(**sizes, attention=args.attention)
    lengths = sample_lengths("sharegpt4", count, config.max_len, args.seed)
    base = base_of(cost, config.max_len, config.chunk)
    qps = float(f"{estimated_qps(base, poisson(lengths, 1.0, args.seed)) / 2:.2g}")
    arrivals = poisson(lengths, qps, args.seed)
    tokens = prompts(arrivals, model.config.vocab_size, args.seed)
    found, drifts, table = {policy: [] for policy in POLICIES}, dict.fromkeys(POLICIES, 0.0), []
    for policy in rounds * POLICIES:
        its = replace(config, policy=policy)
        real, drift = measure.steadily(partial(serve, model, its, arrivals, tokens), model.device)
        drifts[policy] = max(drifts[policy], drift)
        pair = real, simulate(cost, its, arrivals).run
        found[policy].append([summarize_latencies(run.completions, run.seconds) for run in pair])
    for policy, pairs in found.items():
        for name, (spec, get) in NUMBERS.items():
            medians = np.median([[get(summary) for summary in pair] for pair in pairs], axis=0)
            measured, simulated = medians.tolist()
            cells = [(measured, spec), (simulated, spec), simulated / measured - 1]
            name = measure.mark(f"{policy}: {name}", drifts[policy] > measure.BUSY)
            table.append([name, *cells])
    lengths = f"{count} requests with the lengths of sharegpt4 scaled to 1,024\n   tokens"
    means = f"{qps:g} a second; medians of {rounds} runs each"
    print(f"2. bench.py serve and its simulation: {lengths}, {means}\n")
    print_table({"": "", "measured": "", "simulated": "", "error": "+.1%"}, table)
    return found
