"""What the papers claim of one device, measured here.

A claim is data, in published.toml, where its keys are explained: commands of the bench that are
run, or batches that are timed (iterations.py), the tables made of what comes out, and what must
show in them. Read first: measure.py, offline.py and serving.py. Read next: simulator/report.py."""

import math
import re
import shlex
from argparse import Namespace
from collections.abc import Callable
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from experiments.iterations import measured, points
from experiments.run import Bounded
from experiments.tables import show
from model import GPT

TRACE = Path(__file__).with_name("a_to_d.csv")  # two requests, and two more in the midst of them
ROWS = "decode_maximal", "end_to_end", "runs", "results"  # of reports
TEXTS = ("title", ""), ("line", "{name}")  # of a table, which sizes and names are filled in
NOISE, EVEN = 1.1, 1.5  # factors up to which numbers fall or rise, or are even


class Setup(NamedTuple):
    """What claims are measured with: the model on its device, and how far to go."""

    model: GPT
    machine: dict  # of measure.describe_machine
    args: Namespace  # with attention, seed, quick
    bench: Callable  # runs a command of the bench, given as text: its report, as of --json
    picture: str = ""  # the file in which that may draw

    @property
    def size(self):
        """Which sizes are run: the papers' own are "gpu"; else "cpu", or less, "quick"."""
        on_gpu = self.model.device.type == "cuda"
        return "gpu" if on_gpu else "quick" if self.args.quick else "cpu"


class Panel(NamedTuple):
    """A diagram: a line through [(x, y)] for each name, None where there is nothing."""

    title: str
    x: str  # what is on the axes, with units
    y: str
    lines: dict
    log: str = ""  # the axes that are logarithmic: "", "x", "y", "xy"


class Finding(NamedTuple):
    """What was measured: all of it can be written as JSON."""

    tables: list  # of (title, {head: format}, rows) for tables.markdown
    panels: list = []  # of Panel
    here: str = ""  # the numbers to be held against the paper's
    wrong: list | None = None  # what must show, but does not; None: nothing can be said
    busy: bool = False  # whether the machine was too busy for it to be believed


def lookup(its, path):
    """{name: number} of what is at a path such as "runs.*.tbt_s.p99" in a report: the names are
    those that stand for the *."""
    first, *rest = path
    if first == "*":
        return {name: number for name in its for number in lookup(its[name], rest).values()}
    return lookup(its[first], rest) if rest and its[first] is not None else {"": its[first]}


def over(a, b):
    """a / b, None if one is not known."""
    if isinstance(a, Bounded):
        return a.over(b)
    return a / b if b and a is not None else None


def value(term, lines, x):
    """The number of a term such as "2 * vllm / orca" at x; for a name that is none of the lines'
    stands the largest of all that begin with it."""
    if " / " in term:
        return reduce(over, (value(part, lines, x) for part in term.split(" / ")))
    factor, _, name = term.rpartition(" * ")
    if re.fullmatch(r"[\d.]+", name):
        return float(name)
    some = [lines[name]] if name in lines else [lines[n] for n in lines if n.startswith(name)]
    known = [line[x] for line in some if line.get(x) is not None]
    return float(factor or 1) * max(known) if factor and known else max(known, default=None)


def not_so(relation, lines):
    """What is wrong with a relation between lines, {name: {x: number}}, in words: "" if nothing."""
    if "*" in relation.split():
        every = (not_so(re.sub(r"(?<!\S)\*(?!\S)", name, relation), lines) for name in lines)
        return "; ".join(filter(None, every))
    xs = list(dict.fromkeys(x for line in lines.values() for x in line))
    if match := re.fullmatch(r"(.+) (falls|rises|is even)", relation):
        its = [y for x in xs if (y := value(match[1], lines, x)) is not None]
        steps = [b / a for a, b in pairwise(its)]
        if len(its) < 2:
            wrong = False
        elif match[2] == "is even":
            wrong = max(its) > EVEN * min(its)
        elif match[2] == "falls":
            wrong = its[-1] >= its[0] or max(steps, default=0) > NOISE
        else:
            wrong = its[-1] <= its[0] or min(steps, default=math.inf) < 1 / NOISE
        return f"{relation}: not so" * wrong
    chain, _, where = relation.partition(", ")
    ends = {"at the start": xs[:1], "at the end": xs[-1:]}
    wrong, tried = [], ends.get(where, xs)
    for x in [x for x in tried if not where.startswith("from ") or x >= float(where[5:])]:
        terms = [value(term, lines, x) for term in chain.split(" < ")]
        if None not in terms and not all(a < b for a, b in pairwise(terms)):
            wrong.append(show(x, ","))
    if where == "somewhere" and len(wrong) < len(tried):
        wrong = []
    return f"{relation}: not at {', '.join(wrong)}" if wrong else ""


def collected(its, done):
    """{title: {name: {x: number}}} of a table of a claim of what is done, [(sizes, report)]."""
    found, values = {}, its["value"] if isinstance(its["value"], dict) else {"": its["value"]}
    for at, report in done:
        for what, path in values.items():
            columns = [lookup(report, part.split(".")) for part in path.split(" / ")]
            for name in columns[0]:
                words = at | {"name": name, "value": what}
                title, line = (its.get(key, text).format_map(words) for key, text in TEXTS)
                x = at[its["x"]] if its["x"] in at else round(report[its["x"]], 3)
                line = found.setdefault(title, {}).setdefault(line, {})
                line[x] = reduce(over, (column[name] for column in columns))
    for title, lines in found.items():
        for name, line in lines.items():
            if "shares" in its:
                lines[name] = {x: y / max(line.values()) for x, y in line.items()}
            if "steps" in its:
                lines[name] = {x: line[x + 1] / y - 1 for x, y in line.items() if x + 1 in line}
        if "peaks" in its:
            chunks = {name.partition(":")[2]: line for name, line in lines.items() if ":" in name}
            found[title] = {its["peaks"]: {int(c): peak(line) for c, line in chunks.items()}}
    return found


def peak(line):
    """Where {x: gain} is the highest; of all as high but for 2 % the geometric mean."""
    flat = [math.log(x) for x, y in line.items() if y > max(line.values()) - 0.02]
    return math.exp(sum(flat) / len(flat))


def is_busy(report):
    """Was the machine too busy in a run of a command?"""
    rows = [row for name in ROWS for row in report.get(name, {}).values()]
    return report.get("slo_busy", False) or any(row["busy"] for row in rows)


def measure(its, setup):
    """The Finding of a claim in published.toml."""
    if "run" in its:
        files = dict(a_to_d=shlex.quote(str(TRACE)), picture=shlex.quote(setup.picture))
        commands = [(at, its["run"].format_map(at | files)) for at in points(its[setup.size])]
        done = [(at, setup.bench(words)) for at, words in commands]
        busy = any(is_busy(report) for _, report in done)
    else:
        done, busy = measured(setup, its)
    tables, panels, said, wrong = [], [], [], []
    for table in its["shows"]:
        x_name, spec = table.get("x_name", table["x"]), table["format"]
        for title, lines in collected(table, done).items():
            xs = list(dict.fromkeys(x for line in lines.values() for x in line))
            rows = [[show(x, ","), *(line.get(x) for line in lines.values())] for x in xs]
            columns = {x_name: "", **dict.fromkeys(lines, spec)}
            tables.append((f"{title}: {table['y']}".removeprefix(": "), columns, rows))
            points_of = {name: [(x, line.get(x)) for x in xs] for name, line in lines.items()}
            panels.append(Panel(title, x_name, table["y"], points_of, table.get("log", "")))
            terms = [term.format_map(done[0][0]) for term in table.get("say", ())]
            must = [relation.format_map(done[0][0]) for relation in table.get("must", ())]
            for term in terms:
                numbers = [y for x in xs if (y := value(term, lines, x)) is not None]
                said.append(f"{title} {term} {', '.join(show(y, spec) for y in numbers)}".lstrip())
            wrong += [
                f"{title}: {text}".removeprefix(": ") for r in must if (text := not_so(r, lines))
            ]
    return Finding(tables, panels, "; ".join(said), wrong, busy)
