"""Every figure and table of the papers: measured on this machine, or simulated on theirs.

    python bench.py paper                         all of it; --list says what, and how long it takes
    python bench.py paper --only S-F9,SS-F14      two claims
    python bench.py paper --only simulated        those that need the papers' GPUs

What is done is kept in results/<machine>: paper.json, from which paper.md is made, and pictures. A
run that was interrupted goes on where it was. Read first: experiments/claims.py and published.toml
beside it, for what is measured, and papers.py and published.toml here, for what is simulated."""

import argparse
import json
import os
import re
import signal
import time
import tomllib
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import active_children, parent_process
from pathlib import Path
from threading import Thread

import torch
from tqdm import tqdm

from experiments import options
from experiments.claims import Finding, Setup
from experiments.console import SIGNALS, explain
from experiments.measure import describe_machine, device_name
from experiments.options import number, whole, write_text
from experiments.tables import markdown, show
from simulator import papers

EXPERIMENTS = {
    "sarathi": papers.sarathi_iterations,
    "throughput": papers.sarathi_end_to_end,
    "bubbles": papers.bubble_example,
    "pipeline": papers.sarathi_pipeline,
    "capacity": papers.serving_capacity,
    "slo": papers.capacity_against_slo,
    "nodes": papers.across_nodes,
    "ablation": papers.ablation,
    "post": papers.post,
}
SIMULATED = "simulated-"  # an experiment is a claim of this and its name
RESULTS = Path(__file__).parents[1] / "results"
WORDS = tomllib.loads((RESULTS.parent / "experiments/published.toml").read_text("utf-8"))
SAID = {SIMULATED + name: its for name, its in papers.PUBLISHED["experiments"].items()}
CLAIMS = WORDS | SAID  # {claim: what is said of it}, in order
QUICK_REQUESTS = 32
BESIDE = "side by side"  # the papers' numbers and ours, in tables
DEPENDS = ("dtype", "attention", "compile", "max_len", "seed")  # options, of what is measured
PRODUCT_ROWS = 256  # of the matrix products that the machine's rate is measured with
BEGIN, END = "<!-- made by bench.py paper -->", "<!-- until here -->"
VENDORS = r"\((r|tm)\)|\b(amd|intel|nvidia|cpu|processor|\d+-core)\b|@.*"
TITLE = """# What the papers claim, and what shows here

Made by `bench.py paper` from paper.json. S is SARATHI, SS Sarathi-Serve, B a post on schedulers; F
is a figure, T a table.
"""


def claims(text):
    """Claims with commas, as a list: ids, on the device rather than simulated, names in EXPERIMENTS
    or what some begin with, such as SS or simulated; a type of options."""
    found = []
    for word in map(str.strip, text.split(",")):
        named = lambda key, word=word: word in (key, key.removeprefix(SIMULATED))
        own = [key for key, its in CLAIMS.items() if named(key) or word in its.get("also", ())]
        some = own[:1] or [key for key in CLAIMS if key.startswith(f"{word}-")]
        if not some:
            raise argparse.ArgumentTypeError(f"{word}: no such claim; --list names them")
        found += some
    return list(dict.fromkeys(found))


def add_options(parser):
    """The options of `paper`."""
    add, flag = parser.add, dict(action="store_true")
    some = f"ids, such as S-F9,SS-F14, or from simulated, {', '.join(EXPERIMENTS)}"
    cpu = "what an iteration costs each stage on the CPU in the experiments of Sarathi-Serve, in ms"
    fewer = f"512, or {QUICK_REQUESTS} with --quick"
    add("--only", some, [*CLAIMS], "all", type=claims)
    add("--quick", "fewer sizes, fewer repeats, shorter runs", False, **flag)
    add("--list", "say what there is and what is done already, and measure nothing", False, **flag)
    add("--fresh", "measure again what is done already", False, **flag)
    add("--out", "where results are kept", shown="results/<machine>", metavar="DIRECTORY")
    add("--max-len", "the longest request on the device", by_device=(4096, 16384), type=whole(64))
    add("--requests", "in each simulated run of serving", shown=fewer, type=whole(8, 10**6))
    add("--cpu-ms", cpu, 10.0, type=number(least=0, most=1e6))
    count, shown = os.cpu_count() or 1, "the number of cores"
    add("--processes", "simulate so many at once", count, shown, type=whole(1, 256))
    parser.add_model_options("llama-13b on a GPU with 40 GB or more, else llama-160m")


def check(parser, args):
    """Exit with a message if options make no sense together."""
    if args.tp * args.pp > 1:
        parser.error("--tp, --pp: claims are of one device, see bench.py pipeline")


def end_with_parent():
    """Let this process end when the one that started it has ended."""

    def watch():
        parent_process().join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def run_all(count, name, function, jobs):
    """[function(*arguments) for arguments in jobs], by `count` processes, gone when this ends."""
    pool = ProcessPoolExecutor(count, initializer=end_with_parent)
    held = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # for good in processes begun here
    try:
        futures = [pool.submit(function, *arguments) for arguments in jobs]
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        return [future.result() for future in tqdm(futures, name, leave=False, disable=None)]
    except BrokenProcessPool:
        why = "a process was killed, maybe for lack of memory: try fewer --processes"
        raise ChildProcessError(why) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in active_children():
            process.kill()
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def machine_slug(device, threads):
    """The folder of a machine: "epyc-2-threads"; of a GPU, without `threads`, "h100-80gb-hbm3"."""
    name = "-".join(re.findall(r"[a-z0-9]+", re.sub(VENDORS, " ", device.lower()))) or "cpu"
    return f"{name}-{threads}-thread{'s' * (threads > 1)}" if threads else name


def options_of(key, args, here, quick):
    """What the results of a claim depend on: `here`, if they are measured."""
    if key.startswith(SIMULATED):
        requests = args.requests or (QUICK_REQUESTS if quick else 512)
        here = {"requests": requests, "cpu_ms": args.cpu_ms}
    return here | {"quick": quick}


def device_claims():
    """{claim: its function from a Setup to a Finding}."""
    from experiments import paper_iterations, paper_loads  # no need of them for the others

    return paper_iterations.CLAIMS | paper_loads.CLAIMS


def measure(key, setup, directory):
    """The Finding of a claim on this device, and the names of its pictures."""
    finding, picture = device_claims()[key](setup), f"paper-{key}.png"
    if not finding.panels:
        return finding, []
    from views.panels import plot_panels

    panels = [panel._asdict() for panel in finding.panels]
    plot_panels(panels, title_of(key), directory / picture, setup.machine)
    return finding._replace(panels=panels), [picture]


def simulate(name, args, its, directory):
    """The Finding of an experiment with the options `its`, and the names of its pictures."""
    run, cpu_s = partial(run_all, args.processes, name), args.cpu_ms / 1e3
    found, tables, pictures = [*EXPERIMENTS[name](run, its["requests"], cpu_s)], [], []
    for table in found:
        title = f"{table.claim}: {table.title.format(**its)}"
        tables.append([title, table.columns, table.rows, table.note])
        if table.data:
            from views import pipelines

            plots = {"SS-F8": pipelines.plot_pipeline, "S-F12": pipelines.plot_bubbles}
            pictures.append(f"paper-{table.claim}.png")
            plots[table.claim](*table.data, title, directory / pictures[-1])
    errors = [error for table in found for error in table.errors]
    nearer, near = (sum(error <= limit for error in errors) for limit in (0.1, 0.25))
    why = f"of {len(errors)} published numbers {nearer} within 10 %, {near} within 25 %"
    return Finding(tables, "", None, why if errors else ""), pictures


def record_of(key, args, its, setup, directory):
    """What is kept of a claim with the options `its`: all of its Finding and the names of pictures,
    or the `error` of one that this machine cannot do."""
    start, record = time.time(), {"options": its, "when": time.strftime("%Y-%m-%d %H:%M")}
    try:
        if key.startswith(SIMULATED):
            finding, pictures = simulate(key.removeprefix(SIMULATED), args, its, directory)
        else:
            finding, pictures = measure(key, setup, directory)
        tables = [*map(plain, finding.tables)]
        record |= finding._replace(tables=tables)._asdict() | {"pictures": pictures}
    except (ValueError, RuntimeError, MemoryError, ChildProcessError) as error:
        if not isinstance(line := explain(error), str):
            raise
        record["error"] = line.removeprefix("error: ")
    return record | {"seconds": time.time() - start}


def plain(table):
    """A table of a Finding as JSON takes it: a number that is a bound is text, "at least 2"."""
    title, columns, rows, *note = table
    text = lambda cell, spec: show(cell, spec) if getattr(cell, "bound", "") else cell
    return [title, columns, [[*map(text, row, columns.values())] for row in rows], *note]


def title_of(key):
    """What a claim is called, with those that are measured with it."""
    its = CLAIMS[key]
    return f"{', '.join([key, *its.get('also', ())])}: {its['title']}"


def verdict(record):
    """Whether what a claim says shows, in few words."""
    if "error" in record:
        return "not measured"
    words = {True: "holds", False: "does not hold", None: record["why"] or "nothing to compare"}
    return "too busy to tell" if record["busy"] else words[record["holds"]]


def section(key, record):
    """What is printed of a claim, in Markdown."""
    its, why = CLAIMS[key], record.get("error") or record["why"]
    said = {"paper": its.get("paper"), "must show": its.get("shape"), "here": record.get("ours")}
    said |= {"verdict": verdict(record), "why": why if why != verdict(record) else ""}
    parts = ["\n".join(f"- {head}: {words}" for head, words in said.items() if words)]
    for title, columns, rows, *note in record.get("tables", ()):
        parts += [title, markdown(columns, rows), *note]
    return "\n\n".join(filter(None, parts))


def summary(kept, folder=None):
    """A table of what is kept, in Markdown; with the folder it is in, how to measure it again."""
    rows, more = [], ["command", "file"] if folder else []
    for key, record in kept["claims"].items():
        paper, here = CLAIMS[key].get("paper", BESIDE), record.get("ours", "-") or BESIDE
        quick = " --quick" * record["options"]["quick"]
        how = [f"`paper --only {key}{quick}`", f"[paper.md]({folder}/paper.md)"][: len(more)]
        rows.append([title_of(key), *how, paper, here, verdict(record)])
    return markdown(dict.fromkeys(["claim", *more, "paper", "here", "verdict"], ""), rows)


def page(kept):
    """paper.md."""
    parts = [TITLE, options.machine_lines(kept["machine"]) if "machine" in kept else ""]
    parts.append(summary(kept))
    for key, record in kept["claims"].items():
        parts += [f"## {title_of(key)}", section(key, record)]
        parts += [f"![{key}]({name})" for name in record.get("pictures", ())]
        how = ", ".join(f"{name} {value}" for name, value in record["options"].items())
        parts.append(f"Took {record['seconds']:.0f} s, {record['when']}; {how}.")
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def read(directory):
    """What is kept in a directory, if anything: of each claim a record, and the machine."""
    file = directory / "paper.json"
    try:
        return json.loads(file.read_text("utf-8")) if file.exists() else {"claims": {}}
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def save(kept, directory):
    """Write paper.json and paper.md and, if they lie in results/, the tables of its README."""
    kept["claims"] = {key: kept["claims"][key] for key in CLAIMS if key in kept["claims"]}
    write_text(directory / "paper.json", json.dumps(kept, indent=1, default=float))
    write_text(directory / "paper.md", page(read(directory)))
    if directory.resolve().parent == RESULTS:
        before, begin, rest = (RESULTS / "README.md").read_text("utf-8").partition(BEGIN)
        parts = [before + begin]
        for its in sorted(file.parent for file in RESULTS.glob("*/paper.json")):
            parts += [f"### {its.name}", summary(read(its), its.name)]
        write_text(RESULTS / "README.md", "\n\n".join([*parts, END]) + rest.partition(END)[2])


def main(args):
    """The command. Each claim that is done is printed and kept."""
    device = options.find_device(args.device)
    options.fill_in(args, device)
    here = {name: getattr(args, name) for name in DEPENDS}
    here |= {"model": Path(args.init_from or args.model).name, "device": device_name(device)}
    here |= {"threads": torch.get_num_threads(), "torch": torch.__version__}
    folder = machine_slug(here["device"], device.type == "cpu" and here["threads"])
    directory = Path(args.out or f"results/{folder}")
    kept, todo = read(directory), []
    for key in args.only:
        record = kept["claims"].get(key, {})
        good = [options_of(key, args, here, quick) for quick in (args.quick, False)]
        done = record.get("options") in good and not record.get("busy", "error" in record)
        todo += [key] if args.fresh or not done else []
        if args.list:
            print(f"{title_of(key)} ({CLAIMS[key]['seconds'][not args.quick]} s{', done' * done})")
            print(f"    {CLAIMS[key].get('paper', BESIDE)}")
    if args.list:
        return
    directory.mkdir(parents=True, exist_ok=True)
    setup = None
    if not all(key.startswith(SIMULATED) for key in todo):
        model = options.load_model(args, "max_len")
        setup = Setup(model, describe_machine(model, args, PRODUCT_ROWS), args)
        setup.machine["model"] = here["model"]
        kept["machine"] = setup.machine
        print(options.machine_lines(setup.machine))
    save(kept, directory)  # if it cannot be written, that is said before anything takes long
    print(f"{len(args.only) - len(todo)} of {len(args.only)} claims are done already\n")
    seconds, start = [CLAIMS[key]["seconds"][not args.quick] for key in todo], time.time()
    look = dict(leave=False, disable=None, bar_format="{desc} |{bar}| {n}/{total} [{elapsed}]")
    try:
        for number, key in enumerate(bar := tqdm(todo, **look)):
            pace = (time.time() - start) / sum(seconds[:number]) if number else 1
            left = tqdm.format_interval(pace * sum(seconds[number:]))
            bar.set_description(f"{key}, all in about {left}")
            its = options_of(key, args, here, args.quick)
            record = kept["claims"][key] = record_of(key, args, its, setup, directory)
            save(kept, directory)
            bar.clear()
            print(f"{title_of(key)}\n\n{section(key, record)}\n")
    finally:  # also if this was interrupted
        options.wrote(directory / "paper.json", directory / "paper.md")
