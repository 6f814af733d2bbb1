"""Does the simulator tell the truth? On the one machine where it can be asked: this one.

    python bench.py validate

fits a cost model to a profile of some seconds, then compares (1) predicted with measured times of
batches that were not in the profile, and (2) runs of `bench.py serve` with their simulation. Read
first: calibration.py, machine.py and experiments/serving.py.
"""

import statistics
from dataclasses import replace
from functools import partial
from itertools import product

from experiments import measure
from experiments.metrics import summarize_latencies
from experiments.options import machine_lines, write_json, wrote
from experiments.run import estimated_qps
from experiments.serving import RealMachine
from experiments.tables import print_table
from experiments.workload import poisson, sample_lengths
from policies.config import EngineConfig
from simulator.machine import FittedMachine, cost_cases, time_batches

MAX_LEN = 2048
# (prefill tokens, context, decodes): what is predicted, and not in the profile
GRID = list(product((0, 48, 96, 300, 512), (64, 1000, 2000), (0, 2, 6, 12, 16)))
GRID = [case for case in GRID if case[0] or case[2]]
POLICIES = ("sarathi-serve", "vllm")
# what is compared of two runs: its name in summarize_latencies, which percentile, its format
NUMBERS = (("tbt_s", "p50", ",.4f"), ("tbt_s", "p99", ",.3f"), ("ttft_s", "p50", ",.3f"))


def add_options(parser):
    """The options of `validate`."""
    parser.add_model_options("llama3-8b on a GPU with 75 GB or more, else llama-160m")
    parser.add_files(json="write all that is printed")


def main(args):
    """Print both comparisons."""
    args.max_len = MAX_LEN
    sizes = dict(chunk=128, max_batch=32, max_len=1024, page_size=64, pages=160)
    config = EngineConfig(**sizes, attention=args.attention)
    real = RealMachine(args, config)
    print(machine_lines(real.machine))
    time = partial(time_batches, real.model, cost_cases(MAX_LEN) + GRID, MAX_LEN, args.attention)
    rows, drift = measure.steadily(time, real.model.device)
    simulated = FittedMachine(real, args, rows[: -len(GRID)])
    print(simulated.lines)
    report = {"machine": real.machine, "law": simulated.machine["law"]}
    report["batches"] = compare_batches(simulated.cost, rows[-len(GRID) :], drift)
    report["runs"] = compare_runs(real, simulated, config)
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


def compare_runs(real, simulated, config, count=32, rounds=3):
    """Real and simulated runs of the same arrivals, at half the rate that might be possible."""
    lengths = sample_lengths("sharegpt4", count, config.max_len, real.seed)
    load = partial(poisson, lengths, seed=real.seed)
    qps = float(f"{estimated_qps(real.base, load(1.0)) / 2:.2g}")
    arrivals, table, found = load(qps), [], {}
    summary = lambda run: summarize_latencies(run.completions, run.seconds)
    for policy in POLICIES:
        its = replace(config, policy=policy)
        serve = partial(real.serve, its, arrivals)
        runs = [measure.steadily(serve, real.model.device) for _ in range(rounds)]
        predicted, drift = summary(simulated.serve(its, arrivals)), max(d for _, d in runs)
        found[policy] = [(summary(run), predicted) for run, _ in runs]
        for key, percentile, spec in NUMBERS:
            seconds = statistics.median(its[key][percentile] for its, _ in found[policy])
            ours = predicted[key][percentile]
            name = f"{policy}: {percentile.upper()} {key.removesuffix('_s').upper()} s"
            name = measure.mark(name, drift > measure.BUSY)
            table.append([name, (seconds, spec), (ours, spec), ours / seconds - 1])
    lengths = f"{count} requests with the lengths of sharegpt4 scaled to 1,024\n   tokens"
    means = f"{qps:g} a second; medians of {rounds} runs each"
    print(f"2. bench.py serve and its simulation: {lengths}, {means}\n")
    print_table({"": "", "measured": "", "simulated": "", "error": "+.1%"}, table)
    return found
