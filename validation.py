"""Does the simulator tell the truth? On the one machine where it can be asked: this one.

    python bench.py simulate --validate

profiles this machine for some seconds and fits a cost model to that, then compares (1) predicted with measured times of
iterations over a grid of batches that were not in the profile, and (2) two runs of `bench.py serve`, real time and real
model, with their simulation on the same arrivals.

Read first: cost_model.py, profiling.py and serving.py.
"""

import statistics

import torch

import cli
from cost_model import FittedCost
from experiments import describe_machine
from metrics import summarize_latencies
from profiling import cost_cases, time_batches
from serving import Settings, estimated_qps, serve
from simulated_server import base_of
from simulator import simulate
from workload import poisson, prompts, sample_lengths

MAX_LEN = 2048
# (prefill tokens, context, decodes): what is predicted, and not in the profile
GRID = [(prefill, context, decodes) for prefill in (0, 48, 96, 300, 512) for context in (64, 1000, 2000)
        for decodes in (0, 2, 6, 12, 16) if prefill or decodes]
MOOD = [(0, 256, 4), (0, 256, 16), (128, 256, 4)]  # batches like those of a run, timed again around each
POLICIES = ("sarathi-serve", "vllm")


def validate(args):
    """Print both comparisons, and return their numbers."""
    if args.threads:
        torch.set_num_threads(args.threads)
    args.max_len = MAX_LEN
    model = cli.load_model(args, "max_len")
    machine = describe_machine(model, args, 512)
    print(cli.machine_lines(machine))
    cases = cost_cases(MAX_LEN)
    rows = time_batches(model, cases + GRID, MAX_LEN, args.attention)  # in turn: both see the machine in the same mood
    profile, grid = rows[: len(cases)], rows[len(cases) :]
    cost = FittedCost([(row.shape, row.seconds) for row in profile])
    seconds = sum(row.seconds for row in profile)
    print(f"this machine, fitted to {len(profile)} batches that take {seconds:.1f} s: {cost.describe()}\n")
    batches = compare_batches(cost, grid)
    return {"machine": machine, "law": cost.law.law, "batches": batches, "runs": compare_runs(model, cost, args)}


def compare_batches(cost, rows):
    """The grid: measured and predicted seconds of each batch. Prints a table, returns its numbers."""
    errors = {case: cost.law.predict(row.shape) / row.seconds - 1 for case, row in zip(GRID, rows)}
    measured = {case: row.seconds for case, row in zip(GRID, rows)}
    counts = sorted({decodes for _, _, decodes in GRID})
    table = [["ms measured (predicted)", *(f"{count} decodes" for count in counts)]]
    for prefill, context in dict.fromkeys(case[:2] for case in GRID):
        cells = [(prefill, context, count) for count in counts]
        table.append([f"{prefill} prefill, context {context:,}", *(
            f"{1e3 * measured[c]:.1f} ({errors[c]:+.0%})" if c in measured else "" for c in cells)])
    print("1. Iterations: none of these batches was in the profile\n")
    cli.print_table(table)
    sizes = sorted(abs(error) for error in errors.values())
    median, p90 = statistics.median(sizes), sizes[int(0.9 * len(sizes))]
    print(f"\n|error|: median {median:.1%}, P90 {p90:.1%}, largest {sizes[-1]:.1%}. Context: that of the decodes, and\n"
          "where the chunk ends, unless it is longer: then it starts its request\n")
    return {"median": median, "p90": p90, "grid": [[*case, measured[case], errors[case]] for case in GRID]}


def compare_runs(model, cost, args, count=32, rounds=3):
    """Real and simulated runs on the same arrivals, at half the rate that might be possible. Prints a table, returns
    its numbers."""
    settings = Settings(128, 32, 1024, 64, 10 * 1024, attention=args.attention)
    lengths = sample_lengths("sharegpt4", count, settings.max_len, args.seed)
    base = base_of(cost, settings.max_len, settings.chunk)
    qps = float(f"{estimated_qps(base, poisson(lengths, 1.0, args.seed)) / 2:.2g}")
    arrivals = poisson(lengths, qps, args.seed)
    tokens = prompts(arrivals, model.config.vocab_size, args.seed)
    found, scales = {policy: [] for policy in POLICIES}, []
    for policy in rounds * POLICIES:
        rows = time_batches(model, MOOD, MAX_LEN, args.attention)
        real = serve(model, (policy, {}), arrivals, tokens, settings)
        rows += time_batches(model, MOOD, MAX_LEN, args.attention)
        cost.law.scale = 1.0
        cost.law.scale = statistics.geometric_mean(row.seconds / cost.law.predict(row.shape) for row in rows)
        scales.append(cost.law.scale)
        ours = simulate(cost, (policy, {}), arrivals, settings).run
        found[policy].append([summarize_latencies(run.completions, run.seconds) for run in (real, ours)])
    table = [["", "measured", "simulated", "error"]]
    for policy, pairs in found.items():
        for name, pick, digits in (("tokens/s", lambda s: s["tokens_per_s"], 0),
                                   ("P50 TBT s", lambda s: s["tbt_s"]["p50"], 4),
                                   ("P99 TBT s", lambda s: s["tbt_s"]["p99"], 3),
                                   ("P50 TTFT s", lambda s: s["ttft_s"]["p50"], 3)):
            measured, simulated = (statistics.median(pick(pair[i]) for pair in pairs) for i in (0, 1))
            table.append([f"{policy}: {name}", f"{measured:,.{digits}f}", f"{simulated:,.{digits}f}",
                          f"{simulated / measured - 1:+.1%}"])
    print(f"2. bench.py serve and its simulation: {count} requests with the lengths of sharegpt4 scaled to 1,024\n"
          f"   tokens, {qps:g} a second; medians of {rounds} runs each\n")
    cli.print_table(table)
    print("\nThe speed of this machine changes from minute to minute: the law of each run is scaled to what a few\n"
          f"batches took before and after it, by {min(scales):.2f} to {max(scales):.2f}.")
    return found
