"""The papers' experiments on machines that are not here, from a cost model.

    python bench.py simulate                      the claims that need the papers' GPUs, paper beside simulated
    python bench.py simulate --only pipeline      one of them
    python bench.py simulate --validate           the cost model against the engine on this machine
    python bench.py simulate fit times.csv        the constants of a device, from measured times of matrix products

A load of one's own: bench.py serve --simulate and bench.py capacity --simulate.

Read first: cost_model.py, simulator.py, figures_sarathi.py and figures_serving.py: what is printed here is from them.
"""

import json
import math
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

import cli
from cost_model import DEVICES, GEOMETRIES, find, fit_products, product_errors, read_products
from figures_sarathi import bubble_example, sarathi_end_to_end, sarathi_iterations, sarathi_pipeline
from figures_serving import ablation, across_nodes, capacity_against_slo, post, serving_capacity
from simulated_server import REAL

# -----------------------------------------------------------------------------------------------------
# the report

EXPERIMENTS = {  # name -> (function, claims)
    "sarathi": (sarathi_iterations, "S-T2, F3, F7, F8, §4.3.1"), "throughput": (sarathi_end_to_end, "S-T4, F9, F11"),
    "bubbles": (bubble_example, "SS-F8"), "pipeline": (sarathi_pipeline, "S-F12"),
    "capacity": (serving_capacity, "SS-F10, F11"), "slo": (capacity_against_slo, "SS-F12"),
    "nodes": (across_nodes, "SS-F13"), "ablation": (ablation, "SS-T4"), "post": (post, "B-7"),
}
DRAWN = ("bubbles", "pipeline", "capacity", "slo")


def parse_args(argv):
    """The options after "simulate", checked. Exits with a message for one that makes no sense."""
    parser = cli.OptionParser(prog="bench.py simulate", description=__doc__.split("\n\n")[0],
                              epilog="bench.py simulate fit FILE.csv calibrates a device, see its own --help")
    add = parser.add
    names = ", ".join(f"{name} ({what})" for name, (_, what) in EXPERIMENTS.items())
    add("--only", f"comma-separated, from {names}", shown="all")
    add("--requests", "requests in each run of the serving experiments", 512, type=int)
    add("--cpu-ms", "what an iteration costs each stage on the CPU in the experiments of Sarathi-Serve, in ms", 10.0,
        type=float)
    add("--processes", "simulate so many at once", shown="the number of cores", type=int)
    add("--validate", "instead: compare the cost model with the engine on this machine", False, "off",
        action="store_true")
    parser.add_model_options("llama-160m, for --validate")
    add("--json", "write all that is printed", shown="none", metavar="FILE")
    add("--plot", "draw pipelines, bubbles and capacities: name.png makes name-SS-F8.png and others", shown="none",
        metavar="FILE")
    add("--chrome-trace", "write the two-stage pipeline, for https://ui.perfetto.dev", shown="none", metavar="FILE")
    args = parser.parse_args(argv)
    given = dict(vars(args))
    parser.check_model_options(args)
    parser.check_files(args, "json", "plot", "chrome-trace")
    args.only = list(EXPERIMENTS) if args.only is None else [name.strip() for name in args.only.split(",")]
    for name in args.only:
        if name not in EXPERIMENTS:
            parser.error(f"--only {name}: must be from {', '.join(EXPERIMENTS)}")
    if args.validate:
        for option in ("only", "requests", "cpu_ms", "processes", "plot", "chrome_trace"):
            if given[option] != parser.get_default(option):
                parser.error(f"--{option.replace('_', '-')}: goes not with --validate")
    else:
        for option in ("model", *REAL):
            if given[option] != parser.get_default(option):
                parser.error(f"--{option.replace('_', '-')}: goes only with --validate")
    if args.chrome_trace and "bubbles" not in args.only:
        parser.error("--chrome-trace: is of the experiment `bubbles`, which --only leaves out")
    if args.plot and not set(DRAWN) & set(args.only):
        parser.error(f"--plot: --only leaves out all that is drawn: {', '.join(DRAWN)}")
    args.processes = os.cpu_count() or 1 if args.processes is None else args.processes
    for option, least in (("requests", 8), ("processes", 1)):
        if getattr(args, option) < least:
            parser.error(f"--{option} {getattr(args, option)}: must be at least {least}")
    if not 0 <= args.cpu_ms < math.inf:
        parser.error(f"--cpu-ms {args.cpu_ms:g}: must be at least 0")
    return args


def call(job):
    """Call a function with its arguments, in another process."""
    function, arguments = job
    return function(*arguments)


def run_all(pool, name, function, jobs):
    """The results of function(*arguments) for each of `jobs`, in order, with a progress bar."""
    return list(tqdm(pool.map(call, [(function, arguments) for arguments in jobs]), name, len(jobs), leave=False,
                     disable=None))


def print_tables(tables):
    """Each with its claim above it and its assumptions below."""
    for table in tables:
        print(f"{table.claim}: {table.title}\n")
        cli.print_table(table.rows)
        print(f"\n{table.note}\n" if table.note else "")


def report(args):
    """Run the experiments, print their tables, and return them."""
    print("Simulated: times come from the cost model, with the constants in cost_model.py. Claims as in the papers: S\n"
          "is SARATHI, SS is Sarathi-Serve, B the post on schedulers; F a figure, T a table.\n")
    began, tables = time.perf_counter(), []
    with ProcessPoolExecutor(args.processes) as pool:
        for name in args.only:
            experiment, _ = EXPERIMENTS[name]
            found = experiment(partial(run_all, pool, name), args.requests, args.cpu_ms / 1e3)
            print_tables(found)
            tables += found
    print(f"took {time.perf_counter() - began:.0f} s")
    return tables


def draw(tables, file):
    """The pictures of these tables, in files named after `file` and what they show."""
    from plot_simulated import plot_bubbles, plot_capacities, plot_pipeline, plot_slo_curves

    file, groups, curves = Path(file), [], {}
    for table in tables:
        name = file.with_stem(f"{file.stem}-{table.claim}")
        if table.claim == "SS-F8":
            plot_pipeline(table.data, table.title, name)
        elif table.claim == "S-F12" and table.data:
            plot_bubbles(table.data, table.title, name)
        elif table.claim == "SS-F12":
            curves |= table.data
        groups += table.data.get("groups", ())
    if groups:
        plot_capacities(groups, "Capacity, simulated", file.with_stem(f"{file.stem}-capacity"))
    if curves:
        plot_slo_curves(curves, "Capacity against the SLO of P99 TBT, sharegpt4, simulated",
                        file.with_stem(f"{file.stem}-SS-F12"))


# -----------------------------------------------------------------------------------------------------
# constants of a device


def fit(argv):
    """Print the constants that fit measured times, and the errors that are left, with and without rounding to tiles."""
    parser = cli.OptionParser(prog="bench.py simulate fit", description="Calibrate a device from measured times.")
    parser.add_argument("file", help="CSV with num_tokens and, in ms, attn_pre_proj, attn_post_proj, mlp_up_proj, "
                                     "mlp_down_proj")
    parser.add("--model", "whose layer was measured", "llama-7b")
    parser.add("--tp", "on one of so many GPUs", 1, type=int)
    parser.add("--simulate", "compare with this device's constants", "a100-80gb", metavar="DEVICE")
    args = parser.parse_args(argv)
    config, device = find(GEOMETRIES, "model", args.model), find(DEVICES, "simulate", args.simulate)
    tokens, times = read_products(args.file)
    fitted = fit_products(device, config, tokens, times, args.tp)
    smooth = fit_products(device, config, tokens, times, args.tp, tiles=(1,))
    rows = [["constants", "TFLOP/s", "TB/s", "us to start", "tile", "of a layer: median", "its P90", "of each: median",
             "P90"]]
    for name, its in (("fitted", fitted), ("fitted, without tiles", smooth), (device.name, device),
                      (f"{device.name}, without tiles", replace(device, tile=1))):
        errors = product_errors(its, config, tokens, times, args.tp)
        layer = errors.pop("layer")
        quantiles = np.quantile(layer, (0.5, 0.9)), np.quantile(np.concatenate(list(errors.values())), (0.5, 0.9))
        rows.append([name, f"{its.flops_per_s / 1e12:.0f}", f"{its.bytes_per_s / 1e12:.2f}", f"{1e6 * its.op_s:.1f}",
                     str(its.tile), *(f"{100 * q:.1f} %" for q in np.concatenate(quantiles))])
    print(f"{args.file}: matrix products of a layer of {args.model}, TP {args.tp}, {len(tokens)} sizes\n")
    cli.print_table(rows)
    print("\nerrors, over all sizes: of the sum of the four products of a layer, and of each of them alone")


def main(argv):
    """The command line; argv are the words after "simulate"."""
    if argv[:1] == ["fit"]:
        return fit(argv[1:])
    args = parse_args(argv)
    if args.validate:
        from validation import validate

        found = validate(args)
    else:
        tables = report(args)
        if args.plot:
            draw(tables, args.plot)
        if args.chrome_trace:
            from chrome_trace import write_pipeline_trace

            write_pipeline_trace(args.chrome_trace, next(t.data for t in tables if t.claim == "SS-F8"))
        found = {"tables": [{"claim": t.claim, "title": t.title, "rows": t.rows, "note": t.note} for t in tables]}
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"options": vars(args)} | found, file, indent=2)
