"""The papers' experiments on machines that are not here, from a cost model.

    python bench.py simulate                      the claims that need the papers' GPUs
    python bench.py simulate --only pipeline      one of them

Read first: cost_model.py, simulation.py and papers.py, which makes these tables."""

import os
import signal
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from functools import partial
from multiprocessing import active_children, parent_process
from pathlib import Path
from threading import Thread

from tqdm import tqdm

from cli import console, options
from lab.papers import simulated as papers
from views.tables import markdown

EXPERIMENTS = papers.PUBLISHED["experiments"]  # name -> its function and claims
DRAWN = ("bubbles", "pipeline")


def add_options(parser):
    """The options of `simulate`."""
    named = ", ".join(f"{name} ({its['claims']})" for name, its in EXPERIMENTS.items())
    names = lambda text: [name.strip() for name in text.split(",")]
    parser.add_table("simulate", "json", experiments=named, names=names)
    parser.set_defaults(only=[*EXPERIMENTS], processes=os.cpu_count() or 1)


def check(parser, args):
    """Exit with a message if there is no such experiment, or nothing in them to draw."""
    if unknown := [name for name in args.only if name not in EXPERIMENTS]:
        parser.error(f"--only {unknown[0]}: must be from {', '.join(EXPERIMENTS)}")
    if args.plot and not set(DRAWN) & set(args.only):
        parser.error(f"--plot: --only leaves out all that is drawn: {', '.join(DRAWN)}")


def end_with_parent():
    """Let this process end when the one that started it has ended."""
    Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()


def run_all(count, name, function, jobs):
    """[function(*arguments) for arguments in jobs], by `count` processes, gone when this ends."""
    pool = ProcessPoolExecutor(count, initializer=end_with_parent)
    held = signal.pthread_sigmask(signal.SIG_BLOCK, console.SIGNALS)  # for good in who begins here
    try:
        futures = [pool.submit(function, *arguments) for arguments in jobs]
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        return [future.result() for future in tqdm(futures, name, leave=False, disable=None)]
    except BrokenExecutor:
        why = "a process was killed, maybe for lack of memory: try fewer --processes"
        raise ChildProcessError(why) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in active_children():
            process.kill()
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def main(args):
    """Run the experiments, print their tables and how many numbers came out, draw and write."""
    captions, tables = papers.PUBLISHED["captions"], []
    print(captions["before"])
    try:
        for name in args.only:
            experiment = getattr(papers, EXPERIMENTS[name]["function"])
            run = partial(run_all, args.processes, name)
            for table in experiment(run, args.requests, args.cpu_ms / 1e3):
                table.title = table.title.format(**vars(args))
                print(f"{table.claim}: {table.title}\n\n{markdown(table.columns, table.rows)}")
                print(f"\n{table.note}\n" if table.note else "")
                tables.append(table)
    finally:
        if tables:  # what there is, also if this was interrupted
            errors = [error for table in tables for error in table.errors]
            near, nearer = (sum(error <= limit for error in errors) for limit in (0.25, 0.1))
            if errors:
                print(captions["after"].format(count=len(errors), nearer=nearer, near=near))
            options.write_json(args, {"tables": [table.json() for table in tables]})
            options.wrote(args.json)
    if args.plot:
        from views import pipelines  # after all that is long

        plots = {"SS-F8": pipelines.plot_pipeline, "S-F12": pipelines.plot_bubbles}
        for table in filter(lambda table: table.data, tables):
            file = Path(args.plot).with_stem(f"{Path(args.plot).stem}-{table.claim}")
            plots[table.claim](*table.data, table.title, file)
            options.wrote(file)
