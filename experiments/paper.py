"""Every figure and table of the papers that one device can show, on this one.

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

from experiments import claims, measure, options
from experiments.console import explain
from experiments.tables import markdown
from views.panels import plot_panels

CLAIMS = tomllib.loads(Path(__file__).with_name("published.toml").read_text("utf-8"))
COVERED = {key: [key, *its.get("also", ())] for key, its in CLAIMS.items()}  # by each
NAMES = {key: f"{', '.join(COVERED[key])}: {its['title']}" for key, its in CLAIMS.items()}
RESULTS = Path(__file__).parents[1] / "results"
AGAIN = BUSY, FAILED = "too busy to tell", "not measured"  # verdicts of what is tried again
BEGIN, END = "<!-- made by bench.py paper -->", "<!-- until here -->"
VENDORS = r"\((r|tm)\)|\b(amd|intel|nvidia|cpu|processor|\d+-core)\b|@.*"
TITLE = "# What SARATHI (S), Sarathi-Serve (SS) and a post (B) claim, and what shows here"
SUMMARY = ("claim", "command", "paper", "here", "verdict")
SAID = ("paper", "must show", "here", "verdict", "why")


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
    parser.add_table("paper", ids="such as S-F9,SS-F14", claims=some_claims)
    parser.set_defaults(only=[*CLAIMS])
    parser.add_model_options("llama-13b on a GPU with 40 GB or more, else llama-160m")


class Setup:
    """What claims are measured with: a model, `args`, what is known of the `machine`; `size` says
    which sizes in published.toml, and `picture` in which file commands draw."""

    def __init__(self, args, model, machine):
        self.args, self.model, self.machine, self.picture = args, model, machine, ""
        self.size = "quick" if args.quick else "cpu"
        self.size = "gpu" if model.device.type == "cuda" else self.size
        self.machines, self.reports = {}, {}
        its = {name: getattr(args, name) for name in ("device", "dtype", "attention", "seed")}
        its |= {"init-from": args.init_from} if args.init_from else {"model": args.model}
        self.options = [f"--{name}={value}" for name, value in its.items()]

    def bench(self, words):
        """The report of a command such as "offline --chunk 64", as --json writes it, on the model
        that is there. What is run alike is run once."""
        if words not in self.reports:
            from bench import parse_args  # which knows all commands, this one too

            module, args = parse_args([*shlex.split(words), *self.options])
            on = self.model if args.command == "offline" else self.server
            with redirect_stdout(io.StringIO()):
                self.reports[words] = module.main(args, on)
        return self.reports[words]

    def server(self, args, config, make):
        """make(args, config, model), for commands alike the same; it knows what it has served."""
        key = args.simulate, args.max_len, args.chunk
        if key not in self.machines:
            its = self.machines[key] = make(args, config, self.model)
            known, serve = {}, its.serve

            def remember(config, arrivals, **more):
                key = repr(config), tuple(arrivals)
                run = known.get(key) or serve(config, arrivals, **more)
                return run if run.drift > measure.BUSY else known.setdefault(key, run)

            its.serve = remember
        return self.machines[key]


def folder_of(device, threads):
    """The folder of a machine: "epyc-2-threads"; of a GPU, without `threads`, "h100-80gb-hbm3"."""
    name = "-".join(re.findall(r"[a-z0-9]+", re.sub(VENDORS, " ", device.lower()))) or "cpu"
    return f"{name}-{threads}-thread{'s' * (threads > 1)}" if threads else name


def record_of(key, setup):
    """What is kept of a claim: what is said of it, what was found, or why that cannot be here."""
    start, picture, its = time.time(), Path(setup.picture), CLAIMS[key]
    try:
        found = claims.measure(its, setup)
        if "{picture}" not in its.get("run", ""):
            plot_panels(found.tables, NAMES[key], picture, setup.machine)
        verdict = BUSY if found.busy else "does not hold" if found.wrong else "holds"
    except (ValueError, RuntimeError, MemoryError) as error:
        if not isinstance(line := explain(error), str):
            raise
        found, verdict = claims.Finding([], "", [line.removeprefix("error: ")], False), FAILED
    why = found.wrong
    if why and verdict != FAILED and "because" in its:
        why = [*why, its["because"].format_map(setup.machine)]
    must = [relation for table in its["shows"] for relation in table.get("must", ())]
    said = {"claim": NAMES[key], "command": f"`paper --only {key}{' --quick' * setup.args.quick}`"}
    said |= {"paper": its["paper"], "must show": "; ".join(must), "here": found.here}
    said |= {"verdict": verdict, "why": "; ".join(why)}
    said |= {"when": time.strftime("%Y-%m-%d %H:%M"), "seconds": round(time.time() - start)}
    said["picture"] = picture.name if verdict != FAILED else ""
    said["text"] = "\n\n".join(table.markdown() for table in found.tables)
    return said | {"tables": [table._asdict() for table in found.tables]}


def section(record):
    """All that is kept of a claim, in Markdown."""
    said = "\n".join(f"- {head}: {record[head]}" for head in SAID if record[head])
    drawn = record["picture"] and f"![{record['claim']}]({record['picture']})"
    how = ", ".join(f"{name} {value}" for name, value in record["options"].items())
    took = f"Took {record['seconds']} s, {record['when']}; {how}."
    parts = f"## {record['claim']}", said, record["text"], drawn, took
    return "\n\n".join(filter(None, parts))


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
    options.write_text(directory / "paper.json", json.dumps(kept, indent=1))
    parts = [TITLE, options.machine_lines(kept["machine"])[:-1], summary(kept)]
    parts += map(section, kept["claims"].values())
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
            done = ", done" * (key in kept["claims"])
            print(f"{NAMES[key]} ({seconds[key]} s{done})\n    {CLAIMS[key]['paper']}")
        return
    model = options.load_model(args, "max_len")
    machine = measure.describe_machine(model, args, rows=256)
    kept["machine"] = machine = machine | {"model": Path(machine["model"]).name}
    how = {name: machine[name] for name in ("device", "threads", "torch", "model", "dtype")}
    how |= {"quick": args.quick, "attention": args.attention, "seed": args.seed}
    print(options.machine_lines(machine))
    todo = []
    for key in args.only:
        its = kept["claims"].get(key, {"options": None, "verdict": FAILED})
        good = its["options"] in (how, how | {"quick": False}) and its["verdict"] not in AGAIN
        todo += [] if good and not args.fresh else [key]
    directory.mkdir(parents=True, exist_ok=True)
    save(kept, directory)  # if it cannot be written, that is said before anything takes long
    print(f"{len(todo)} of {len(args.only)} claims are left to do\n")
    setup = Setup(args, model, machine)
    look = dict(bar_format="{desc} |{bar}| {elapsed}, {remaining} left", smoothing=0)
    with tqdm(total=sum(map(seconds.get, todo)), leave=False, disable=None, **look) as bar:
        for key in todo:
            bar.set_description(f"{key}, about {seconds[key]} s")
            setup.picture = str(directory / f"paper-{key}.png")
            kept["claims"][key] = record_of(key, setup) | {"options": how}
            save(kept, directory)
            bar.write(f"{section(kept['claims'][key])}\n")
            bar.update(seconds[key])
    options.wrote(directory / "paper.json", directory / "paper.md")
