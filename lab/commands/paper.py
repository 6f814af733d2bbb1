"""The papers' figures and tables that one device can show, on this one.

    python bench.py paper                      all of it; --list says what, and how long it takes
    python bench.py paper --only S-F9,'SS-*'   some claims, by their ids

What is done is kept in results/<machine>: paper.json, from which paper.md is made, and pictures. A
run that was interrupted goes on where it was. Read first: claims.py and published.toml."""

import argparse
import fnmatch
import io
import json
import re
import shlex
import time
import tomllib
from contextlib import redirect_stdout
from pathlib import Path

import torch
from tqdm import tqdm

from cli import console, options
from lab.measure import timing as measure
from lab.papers import claims
from views import tables
from views.panels import plot_panels

CLAIMS = tomllib.loads(Path(__file__).with_name("published.toml").read_text("utf-8"))
COVERED = {key: [key, *its.get("also", ())] for key, its in CLAIMS.items()}  # by each
NAMES = {key: f"{', '.join(COVERED[key])}: {its['title']}" for key, its in CLAIMS.items()}
RESULTS = Path(__file__).parents[2] / "results"
AGAIN = BUSY, FAILED = "too busy to tell", "not measured"  # verdicts of what is tried again
BEGIN, END = "<!-- made by bench.py paper -->", "<!-- until here -->"
VENDORS = r"\((r|tm)\)|\b(amd|intel|nvidia|cpu|processor|\d+-core)\b|@.*"
TITLE = "# What SARATHI (S), Sarathi-Serve (SS) and a post (B) claim, and what shows here"
OPTIONS = ("device", "dtype", "attention", "seed")  # that commands share
SUMMARY = ("claim", "command", "paper", "here", "verdict")


def some_claims(text):
    """A type of options: a list of claims, by ids, or such as SS-*."""
    found = {}
    for name in map(str.strip, text.split(",")):
        some = [key for key, ids in COVERED.items() if fnmatch.filter(ids, name)]
        if not some:
            raise argparse.ArgumentTypeError(f"{name}: no such claim; --list names them")
        found |= dict.fromkeys(some)
    return [*found]


def add_options(parser):
    """The options of `paper`."""
    parser.add_table("paper", ids="such as S-F9,SS-F12", claims=some_claims)
    parser.set_defaults(only=[*CLAIMS])
    parser.add_model_options("llama-13b on a GPU with 40 GB or more, else llama-160m")


class Setup:
    """What claims are measured with: a model, what is known of the `machine`; `size` says which
    sizes in published.toml, and `picture` in which file commands draw."""

    def __init__(self, args, model, machine):
        self.model, self.machine, self.servers, self.reports = model, machine, {}, {}
        self.size = "gpu" if model.device.type == "cuda" else "quick" if args.quick else "cpu"
        which = f"--init-from={args.init_from}" if args.init_from else f"--model={args.model}"
        self.options = [which, *(f"--{n}={vars(args)[n]}" for n in OPTIONS)]

    def bench(self, words):
        """The report of a command such as "offline --chunk 64", as --json writes it, on the model
        that is there. What is run alike is run once."""
        if words not in self.reports:
            from bench import parse_args  # which knows all commands, this one too

            module, args = parse_args([*shlex.split(words), *self.options])
            lengths = {"offline": "seq_len", "batches": "batch_length"}  # options of these
            length = getattr(args, lengths.get(args.command, "max_len"))
            if length > (limit := self.model.config.max_positions):
                raise ValueError(f"{length} tokens: this model is limited to {limit}")
            known = (self.model, self.machine) if args.command in lengths else (self.server,)
            with redirect_stdout(io.StringIO()):
                self.reports[words] = module.main(args, *known)
        return self.reports[words]

    def server(self, args, config, make):
        """make(args, config, model), for commands alike the same."""
        key = args.simulate, args.max_len, args.chunk
        if key not in self.servers:
            self.servers[key] = make(args, config, self.model)
        return self.servers[key]


def folder_of(device, threads):
    """The folder of a machine: "epyc-2-threads"; of a GPU, without `threads`, "h100-80gb-hbm3"."""
    name = "-".join(re.findall(r"[a-z0-9]+", re.sub(VENDORS, " ", device.lower()))) or "cpu"
    return f"{name}-{threads}-thread{'s' * (threads > 1)}" if threads else name


def record_of(key, setup, how):
    """What is kept of a claim that was measured with the options `how`: a line of the table of all,
    the text about it in Markdown, and the numbers."""
    start, its, name = time.time(), CLAIMS[key], NAMES[key]
    try:
        found = claims.measure(its, setup)
        if "{picture}" not in its["run"]:
            plot_panels(found.tables, name, setup.picture, setup.machine)
        verdict = BUSY if found.busy else "does not hold" if found.wrong else "holds"
    except (ValueError, RuntimeError, MemoryError) as error:
        if not isinstance(line := console.explain(error), str):
            raise
        found, verdict = claims.Finding([], "", [line.removeprefix("error: ")], False), FAILED
    at = next(claims.points(its[setup.size]))
    must = "; ".join(r.format_map(at) for table in its["shows"] for r in table.get("must", ()))
    because = its.get("because", "").format_map(setup.machine) if verdict != FAILED else ""
    why = "; ".join(filter(None, [*found.wrong, because])) if found.wrong else ""
    said = {"paper": its["paper"], "must show": must, "here": found.here, "verdict": verdict}
    said = [f"- {what}: {text}" for what, text in (said | {"why": why}).items() if text]
    parts = [f"## {name}", "\n".join(said), *(table.markdown() for table in found.tables)]
    parts += [f"![{name}]({Path(setup.picture).name})"] if verdict != FAILED else []
    used = ", ".join(map("{} {}".format, how, how.values()))
    parts += [f"Took {time.time() - start:.0f} s, {time.strftime('%Y-%m-%d %H:%M')}; {used}."]
    command = f"`paper --only {key}{' --quick' * how['quick']}`"
    line = dict(zip(SUMMARY, (name, command, its["paper"], found.here or None, verdict)))
    line |= {"why": why, "options": how, "text": "\n\n".join(parts)}
    return line | {"tables": [table._asdict() for table in found.tables]}


def summary(kept):
    """A line for each claim that is kept, in a table in Markdown."""
    rows = [[record[head] for head in SUMMARY] for record in kept["claims"].values()]
    return tables.markdown(dict.fromkeys(SUMMARY, ""), rows)


def read(directory):
    """What is kept in a directory, if anything: of each claim a record, and the machine."""
    file = directory / "paper.json"
    return json.loads(file.read_text("utf-8")) if file.exists() else {"claims": {}}


def save(kept, directory):
    """Write paper.json and paper.md and, if they lie in results/, the tables of its README."""
    kept["claims"] = {key: kept["claims"][key] for key in CLAIMS if key in kept["claims"]}
    options.write_text(directory / "paper.json", json.dumps(kept, indent=1))
    parts = [TITLE, options.machine_lines(kept["machine"])[:-1], summary(kept)]
    parts += [record["text"] for record in kept["claims"].values()]
    options.write_text(directory / "paper.md", "\n\n".join(parts) + "\n")
    if directory.resolve().parent == RESULTS:
        before, _, rest = (RESULTS / "README.md").read_text("utf-8").partition(BEGIN)
        parts = [before + BEGIN]
        for its in sorted(file.parent for file in RESULTS.glob("*/paper.json")):
            parts += [f"### [{its.name}]({its.name}/paper.md)", summary(read(its))]
        text = "\n\n".join([*parts, END + rest.partition(END)[2]])
        options.write_text(RESULTS / "README.md", text)


def main(args):
    """The command. Each claim that is done is printed and kept."""
    if args.tp * args.pp > 1:
        raise ValueError("--tp, --pp: claims are of one device, see bench.py pipeline")
    device = options.find_device(args.device)
    threads = device.type == "cpu" and (args.threads or torch.get_num_threads())
    directory = Path(args.out or RESULTS / folder_of(measure.device_name(device), threads))
    kept, seconds = read(directory), {key: CLAIMS[key]["seconds"][not args.quick] for key in CLAIMS}
    if args.list:
        for key in args.only:
            done = ", done" * (kept["claims"].get(key, {}).get("verdict", BUSY) not in AGAIN)
            print(f"{NAMES[key]} ({seconds[key]} s{done})\n    {CLAIMS[key]['paper']}")
        return
    model = options.load_model(args, "max_len")
    machine = measure.describe_machine(model, args, rows=256)
    kept["machine"] = machine = machine | {"model": Path(machine["model"]).name}
    setup = Setup(args, model, machine)
    how = {name: machine[name] for name in ("device", "threads", "torch", "model", "dtype")}
    how |= {"attention": args.attention, "seed": args.seed, "compile": args.compile}
    how["quick"] = setup.size == "quick"  # on a GPU nothing is
    good = [None] * args.fresh or [how, how | {"quick": False}]
    usable = {key: its for key, its in kept["claims"].items() if its["options"] in good}
    todo = [k for k in args.only if k not in usable or usable[k]["verdict"] in AGAIN]
    directory.mkdir(parents=True, exist_ok=True)
    save(kept, directory)  # if it cannot be written, that is said before anything takes long
    print(f"{options.machine_lines(machine)}\n{len(todo)} of {len(args.only)} claims left to do\n")
    look = dict(bar_format="{desc} |{bar}| {elapsed}, {remaining} left", smoothing=0)
    with tqdm(total=sum(map(seconds.get, todo)), leave=False, disable=None, **look) as bar:
        for key in todo:
            bar.set_description(f"{key}, about {seconds[key]} s")
            setup.picture = str(directory / f"paper-{key}.png")
            kept["claims"][key] = record_of(key, setup, how)
            save(kept, directory)
            bar.write(f"{kept['claims'][key]['text']}\n")
            bar.update(seconds[key])
    options.wrote(directory / "paper.json", directory / "paper.md")
