"""Every figure and table of the papers: measured on this machine, or simulated on theirs.

    python bench.py paper                         all of it; --list says what, and how long it takes
    python bench.py paper --only S-F9,simulated   a claim, and all that need the papers' GPUs

What is done is kept in results/<machine>: paper.json, from which paper.md is made, and pictures. A
run that was interrupted goes on where it was. Read first: experiments/claims.py and published.toml
beside it, for what is measured, and papers.py and published.toml here, for what is simulated."""

import argparse
import io
import json
import os
import re
import shlex
import signal
import time
import tomllib
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from functools import partial
from multiprocessing import active_children, parent_process
from pathlib import Path
from threading import Thread

import torch
from tqdm import tqdm

from experiments import offline, options
from experiments.claims import Finding, Setup, measure
from experiments.console import SIGNALS, explain
from experiments.measure import BUSY as BUSY_DRIFT
from experiments.measure import describe_machine, device_name
from experiments.options import write_text
from experiments.tables import markdown
from simulator import machine, papers
from views.panels import plot_panels
from views.pipelines import plot_bubbles, plot_pipeline

RESULTS = Path(__file__).parents[1] / "results"
MEASURED = tomllib.loads((RESULTS.parent / "experiments/published.toml").read_text("utf-8"))
SIMULATED = papers.PUBLISHED["experiments"]
CLAIMS = MEASURED | SIMULATED  # {claim: what is said of it}, in order
COVERED = {key: [key, *its.get("also", ())] for key, its in CLAIMS.items()}  # by each
NAMES = {key: f"{', '.join(COVERED[key])}: {its['title']}" for key, its in CLAIMS.items()}
VERDICTS = {True: "holds", False: "does not hold", None: "see the numbers"}
AGAIN = BUSY, FAILED = "too busy to tell", "not measured"  # verdicts of what is tried again
BEGIN, END = "<!-- made by bench.py paper -->", "<!-- until here -->"
VENDORS = r"\((r|tm)\)|\b(amd|intel|nvidia|cpu|processor|\d+-core)\b|@.*"
TITLE = "# What SARATHI (S), Sarathi-Serve (SS) and a post (B) claim, and what shows here"
SUMMARY = ("claim", "command", "paper", "here", "verdict")
SAID = ("paper", "must show", "here", "verdict", "why")


def claims(text):
    """A type of options: a list of claims by ids, beginnings such as SS, and experiments."""
    found = []
    for name in map(str.strip, text.split(",")):
        begin = [key for key in MEASURED if key.startswith(f"{name}-")]
        some = [key for key, ids in COVERED.items() if name in ids][:1] or begin  # rather here
        if not some and name != "simulated":
            raise argparse.ArgumentTypeError(f"{name}: no such claim; --list names them")
        found += some or SIMULATED
    return list(dict.fromkeys(found))


def add_options(parser):
    """The options of `paper`."""
    ids = f"ids, such as S-F9,SS-F14, or from simulated, {', '.join(SIMULATED)}"
    parser.add_table("paper", ids=ids, claims=claims)
    parser.set_defaults(only=[*CLAIMS], processes=os.cpu_count() or 1)
    parser.add_model_options("llama-13b on a GPU with 40 GB or more, else llama-160m")


def end_with_parent():
    """Let this process end when the one that started it has ended."""
    Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()


def run_all(count, name, function, jobs):
    """[function(*arguments) for arguments in jobs], by `count` processes, gone when this ends."""
    pool = ProcessPoolExecutor(count, initializer=end_with_parent)
    held = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # for good in processes begun here
    try:
        futures = [pool.submit(function, *arguments) for arguments in jobs]
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        return [future.result() for future in tqdm(futures, name, leave=False, disable=None)]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in active_children():
            process.kill()


def machine_slug(device, threads):
    """The folder of a machine: "epyc-2-threads"; of a GPU, without `threads`, "h100-80gb-hbm3"."""
    name = "-".join(re.findall(r"[a-z0-9]+", re.sub(VENDORS, " ", device.lower()))) or "cpu"
    return f"{name}-{threads}-thread{'s' * (threads > 1)}" if threads else name


class Bench:
    """Runs commands of the bench on a model that is there. What is run alike is run once."""

    def __init__(self, args, model):
        self.model, self.machines, self.reports = model, {}, {}
        its = {name: getattr(args, name) for name in ("device", "dtype", "attention", "seed")}
        its |= {"init-from": args.init_from} if args.init_from else {"model": args.model}
        self.words = [f"--{name}={value}" for name, value in its.items()]

    def __call__(self, words):
        """The report of a command such as "offline --chunk 64", as --json writes it."""
        if words not in self.reports:
            name, *more = shlex.split(words)
            parser, module = (
                options.OptionParser(prog=name),
                offline if name == "offline" else machine,
            )
            parser.set_defaults(command=name)
            module.add_options(parser)
            args = parser.parse_args([*more, *self.words])
            options.complete(args, module, parser)
            with redirect_stdout(io.StringIO()):
                on = self.model if module is offline else self.machine
                self.reports[words] = module.main(args, on)
        return self.reports[words]

    def machine(self, args, config):
        """machine.make_machine, for commands alike the same; it knows what it has served."""
        key = args.simulate, args.max_len, args.chunk
        if key not in self.machines:
            self.machines[key] = its = machine.make_machine(args, config, self.model)
            known, serve = {}, its.serve

            def remember(config, arrivals, **more):
                key = repr(config), tuple(arrivals)
                run = known.get(key) or serve(config, arrivals, **more)
                return run if run.drift > BUSY_DRIFT else known.setdefault(key, run)

            its.serve = remember
        return self.machines[key]


def simulate(key, args, picture):
    """The Finding of an experiment; what tables cannot show is drawn to the file `picture`."""
    experiment, requests = getattr(papers, SIMULATED[key]["function"]), 32 if args.quick else 512
    run, tables, errors = partial(run_all, args.processes, key), [], []
    for table in experiment(run, requests, args.cpu_ms / 1e3):
        title = table.title.format(requests=requests, cpu_ms=args.cpu_ms)
        tables.append((title, table.columns, table.rows, table.note))
        errors += table.errors
        if table.data:
            plot = {"bubbles": plot_pipeline, "pipeline": plot_bubbles}[key]
            plot(*table.data, title, picture)
    nearer, near = (sum(error <= limit for error in errors) for limit in (0.1, 0.25))
    ours = f"of {len(errors)} published numbers {nearer} within 10 %, {near} within 25 %"
    return Finding(tables, here=ours if errors else "")


def record_of(key, args, setup, directory):
    """What is kept of a claim: what is said of it, what was found, or why that cannot be here."""
    start, picture, claim = time.time(), directory / f"paper-{key}.png", CLAIMS[key]
    try:
        if key in MEASURED:
            its = measure(claim, setup._replace(picture=str(picture)))
            if "{picture}" not in claim.get("run", ""):
                plot_panels(its.panels, NAMES[key], picture, setup.machine)
        else:
            its = simulate(key, args, picture)
        verdict = BUSY if its.busy else VERDICTS[None if its.wrong is None else not its.wrong]
        why = [*its.wrong, claim.get("because", "").format_map(setup.machine)] if its.wrong else []
    except (ValueError, RuntimeError, MemoryError) as error:
        if not isinstance(line := explain(error), str):
            raise
        its, why, verdict = Finding([]), [line.removeprefix("error: ")], FAILED
    must = [relation for table in claim.get("shows", ()) for relation in table.get("must", ())]
    said = {"claim": NAMES[key], "command": f"`paper --only {key}{' --quick' * args.quick}`"}
    said |= {"paper": claim["paper"], "must show": "; ".join(must), "here": its.here}
    said |= {"verdict": verdict, "why": "; ".join(filter(None, why)), "tables": its.tables}
    said |= {"when": time.strftime("%Y-%m-%d %H:%M"), "seconds": round(time.time() - start)}
    return said | {"picture": picture.name * (verdict != FAILED and picture.exists())}


def section(record):
    """All that is kept of a claim but its panels, in Markdown."""
    parts = ["\n".join(f"- {head}: {record[head]}" for head in SAID if record[head])]
    for title, columns, rows, *note in record["tables"]:
        parts += [title, markdown(columns, rows), *note]
    drawn = record["picture"] and f"![{record['claim']}]({record['picture']})"
    how = ", ".join(f"{name} {value}" for name, value in record["options"].items())
    parts += [drawn, f"Took {record['seconds']} s, {record['when']}; {how}."]
    return "\n\n".join([f"## {record['claim']}", *filter(None, parts)])


def summary(kept):
    """A line for each claim that is kept, in a table in Markdown."""
    rows = [[record[head] or None for head in SUMMARY] for record in kept["claims"].values()]
    return markdown(dict.fromkeys(SUMMARY, ""), rows)


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
    parts = [TITLE, options.machine_lines(kept["machine"])[:-1]] if "machine" in kept else [TITLE]
    parts += [summary(kept), *map(section, kept["claims"].values())]
    write_text(directory / "paper.md", "\n\n".join(parts) + "\n")
    if directory.resolve().parent == RESULTS:
        before, _, rest = (RESULTS / "README.md").read_text("utf-8").partition(BEGIN)
        parts = [before + BEGIN]
        for its in sorted(file.parent for file in RESULTS.glob("*/paper.json")):
            parts += [f"### [{its.name}]({its.name}/paper.md)", summary(read(its))]
        write_text(RESULTS / "README.md", "\n\n".join([*parts, END + rest.partition(END)[2]]))


def main(args):
    """The command. Each claim that is done is printed and kept."""
    if args.tp * args.pp > 1:
        raise ValueError("--tp, --pp: claims are of one device, see bench.py pipeline")
    device = options.find_device(args.device)
    options.fill_in(args, device)
    here = {"device": device_name(device), "threads": torch.get_num_threads()}
    folder = machine_slug(here["device"], device.type == "cpu" and here["threads"])
    here |= {"model": Path(args.init_from or args.model).name, "torch": torch.__version__}
    here |= {name: getattr(args, name) for name in "dtype attention compile max_len seed".split()}
    directory, setup = Path(args.out or f"results/{folder}"), None
    kept, todo = read(directory), {}  # {claim: what its results depend on}
    for key in args.only:
        its = {"quick": args.quick} | (here if key in MEASURED else {"cpu_ms": args.cpu_ms})
        record = kept["claims"].get(key, {"options": None, "verdict": FAILED})
        good = record["options"] in (its, its | {"quick": False}) and record["verdict"] not in AGAIN
        todo |= {} if good and not args.fresh else {key: its}
    seconds = {key: CLAIMS[key]["seconds"][not args.quick] for key in args.only}
    if args.list:
        for key in args.only:
            print(f"{NAMES[key]} ({seconds[key]} s{', done' * (key not in todo)})")
            print(f"    {CLAIMS[key]['paper']}")
        return
    directory.mkdir(parents=True, exist_ok=True)
    if not todo.keys().isdisjoint(MEASURED):
        model = options.load_model(args, "max_len")
        here_is = describe_machine(model, args, rows=256) | {"model": here["model"]}
        kept["machine"], setup = here_is, Setup(model, here_is, args, Bench(args, model))
        print(options.machine_lines(here_is))
    save(kept, directory)  # if it cannot be written, that is said before anything takes long
    print(f"{directory}: {len(todo)} of {len(args.only)} claims are left to do\n")
    look = dict(bar_format="{desc} |{bar}| {elapsed}, {remaining} left", smoothing=0)
    with tqdm(total=sum(map(seconds.get, todo)), leave=False, disable=None, **look) as bar:
        for key, its in todo.items():
            bar.set_description(f"{key}, about {seconds[key]} s")
            kept["claims"][key] = record_of(key, args, setup, directory) | {"options": its}
            save(kept, directory)
            bar.write(f"{section(kept['claims'][key])}\n")
            bar.update(seconds[key])
    options.wrote(directory / "paper.json", directory / "paper.md")
