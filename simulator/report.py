"""The papers' experiments on machines that are not here, from a cost model.

    python bench.py simulate                      the claims that need the papers' GPUs
    python bench.py simulate --only pipeline      one of them

A load of one's own: bench.py serve --simulate and bench.py capacity --simulate.

Read first: cost_model.py, simulation.py, sarathi.py and sarathi_serve.py, which makes these tables.
"""

import argparse
import os
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from tqdm import tqdm

from experiments.options import number, policy_names, whole, write_json
from experiments.tables import print_table
from policies import where_it_failed
from simulator import sarathi, sarathi_serve
from simulator.simulation import bubble_kinds
from views.chrome_trace import write_pipeline_trace

EXPERIMENTS = {  # name -> (function, claims)
    "sarathi": (sarathi.sarathi_iterations, "S-T2, F3, F7, F8, §4.3.1"),
    "throughput": (sarathi.sarathi_end_to_end, "S-T4, F9, F11"),
    "bubbles": (sarathi.bubble_example, "SS-F8"),
    "pipeline": (sarathi.sarathi_pipeline, "S-F12"),
    "capacity": (sarathi_serve.serving_capacity, "SS-F10, F11"),
    "slo": (sarathi_serve.capacity_against_slo, "SS-F12"),
    "nodes": (sarathi_serve.across_nodes, "SS-F13"),
    "ablation": (sarathi_serve.ablation, "SS-T4"),
    "post": (sarathi_serve.post, "B-7"),
}
DRAWN = ("bubbles", "pipeline", "capacity", "slo")


def experiments(text):
    """Names in EXPERIMENTS with commas, as a list; a type of options."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in EXPERIMENTS:
            raise argparse.ArgumentTypeError(f"{name}: must be from {', '.join(EXPERIMENTS)}")
    return names


def add_options(parser):
    """The options of `simulate`."""
    add, names = parser.add, [f"{name} ({what})" for name, (_, what) in EXPERIMENTS.items()]
    ablated, cores = ",".join(sarathi_serve.ABLATION), "the number of cores"
    cpu = "what an iteration costs each stage on the CPU in the experiments of Sarathi-Serve, in ms"
    add("--only", f"from {', '.join(names)}", [*EXPERIMENTS], "all", type=experiments)
    add("--requests", "in each run of the serving experiments", 512, type=whole(8))
    add("--cpu-ms", cpu, 10.0, type=number(least=0))
    add("--policies", "those of the ablation", ablated, type=policy_names())
    add("--processes", "simulate so many at once", os.cpu_count() or 1, cores, type=whole(1))
    parser.add_files(
        json="write all that is printed",
        plot="draw pipelines, bubbles and capacities: p.png makes p-SS-F8.png and others",
        chrome_trace="write the two-stage pipeline, for https://ui.perfetto.dev",
    )


def check(parser, args):
    """Exit with a message if a file is asked for that nothing is drawn in."""
    if args.chrome_trace and "bubbles" not in args.only:
        parser.error("--chrome-trace: is of the experiment `bubbles`, which --only leaves out")
    if args.plot and not set(DRAWN) & set(args.only):
        parser.error(f"--plot: --only leaves out all that is drawn: {', '.join(DRAWN)}")


def call(function, arguments):
    """function(*arguments), in another process, from which no error brings its traceback."""
    try:
        return function(*arguments)
    except Exception as error:
        if place := where_it_failed(error):
            raise ValueError(f"{place}: {type(error).__name__}: {error}") from None
        raise


def run_all(pool, name, function, jobs):
    """[function(*arguments) for arguments in jobs], in the processes of `pool`, with a bar."""
    results = pool.map(partial(call, function), jobs)
    return list(tqdm(results, name, len(jobs), leave=False, disable=None))


def main(args):
    """Run the experiments, print their tables, draw and write."""
    print(
        "Simulated: times come from the cost model, with the constants in devices.py. Claims as in "
        "the papers: S\nis SARATHI, SS is Sarathi-Serve, B the post on schedulers; F a figure, T a "
        "table.\n"
    )
    began, tables = time.perf_counter(), []
    with ProcessPoolExecutor(args.processes) as pool:
        for name in args.only:
            more = {"policies": args.policies} if name == "ablation" else {}
            run = partial(run_all, pool, name)
            found = EXPERIMENTS[name][0](run, args.requests, args.cpu_ms / 1e3, **more)
            for table in found:
                print(f"{table.claim}: {table.title}\n")
                print_table(table.columns, table.rows)
                print(f"\n{table.note}\n" if table.note else "")
            tables += found
    print(f"took {time.perf_counter() - began:.0f} s")
    if args.plot:
        draw(tables, args.plot)
    if args.chrome_trace:
        pipeline = next(table.data for table in tables if table.claim == "SS-F8")
        write_pipeline_trace(args.chrome_trace, pipeline)
    write_json(args, {"tables": [table.json() for table in tables]})


def draw(tables, file):
    """The pictures of these tables, in files named after `file` and what they show."""
    from views import pipelines  # after all that is long

    file, groups, curves = Path(file), [], {}
    named = lambda what: file.with_stem(f"{file.stem}-{what}")
    for table in tables:
        if table.claim == "SS-F8":
            kinds = {system: bubble_kinds(runs) for system, runs in table.data.items()}
            pipelines.plot_pipeline(table.data, kinds, table.title, named("SS-F8"))
        elif table.claim == "S-F12" and table.data:
            pipelines.plot_bubbles(table.data, table.title, named("S-F12"))
        elif table.claim == "SS-F12":
            curves |= table.data
        groups += table.data.get("groups", ())
    if groups:
        pipelines.plot_capacities(groups, "Capacity, simulated", named("capacity"))
    if curves:
        title = "Capacity against the SLO of P99 TBT, sharegpt4, simulated"
        pipelines.plot_slo_curves(curves, title, named("SS-F12"))
