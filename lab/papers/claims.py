"""What the papers claim of one device, measured here.

A claim is data, in published.toml, where its keys are explained: commands of the bench that are
run, the tables made of what they report, and what must show in them. Read first: offline.py and
serving.py. Read next: paper.py."""

import re
import shlex
from functools import reduce
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple

from lab.measure.capacity import Bounded
from views.tables import markdown, show

TRACE = Path(__file__).with_name("a_to_d.csv")  # two requests, and two more in the midst of them
ROWS = "decode_maximal", "end_to_end", "batches", "runs", "results"  # of reports
TEXTS = {"title": "", "line": "{name}"}  # of a table, which sizes and names are filled in
NOISE = 1.1  # up to this factor a number that should rise may fall


class Table(NamedTuple):
    """Numbers as a table, and as a diagram with a line for each name."""

    title: str
    x: str  # what is on the axes, with units
    y: str
    log: str  # the axes that are logarithmic: "", "x", "y", "xy"
    spec: str  # the format of a number
    lines: dict  # {name: {x: number, or None}}

    @property
    def xs(self):
        """All x, in order."""
        return list(dict.fromkeys(x for line in self.lines.values() for x in line))

    def markdown(self):
        """Its text: a row for each x."""
        rows = [[show(x, ","), *(y.get(x) for y in self.lines.values())] for x in self.xs]
        heading = f"{self.title}: {self.y}".removeprefix(": ")
        return f"{heading}\n\n{markdown({self.x: ''} | dict.fromkeys(self.lines, self.spec), rows)}"


class Finding(NamedTuple):
    """What was measured."""

    tables: list  # of Table
    here: str  # the numbers to be held against the paper's
    wrong: list  # what must show, but does not
    busy: bool  # whether the machine was too busy for it to be believed


def points(sizes):
    """Each combination of sizes, {name: a number or a list}; or of several such, one by one."""
    for its in sizes if isinstance(sizes, list) else [sizes]:
        lists = [value if isinstance(value, list) else [value] for value in its.values()]
        yield from (dict(zip(its, values)) for values in product(*lists))


def lookup(report, path):
    """{name: number} of what is at a path such as "runs.*.tbt_s.p99" in a report: the names are
    those that stand for the *. What is not there is None."""
    first, *rest = path
    if first == "*":
        return {name: lookup(its, rest)[""] for name, its in report.items()}
    its = report.get(first) if rest else report[first]
    return lookup(its, rest) if rest and its is not None else {"": its}


def over(a, b):
    """a / b, None if one is not known."""
    return a.over(b) if type(a) is type(b) is Bounded else a / b if b and a is not None else None


def value(term, lines, x):
    """The number of a term such as "2 * vllm / orca" at x; for a name that is none of the lines'
    stands the largest of all that begin with it."""
    if " / " in term:
        return reduce(over, (value(part, lines, x) for part in term.split(" / ")))
    factor, _, name = term.rpartition(" * ")
    some = [name] if name in lines else [its for its in lines if its.startswith(name)]
    if not some:
        return float(name)
    most = max((y for its in some if (y := lines[its].get(x)) is not None), default=None)
    return float(factor) * most if factor and most is not None else most


def not_so(relation, table):
    """What is wrong with a relation between the lines of a table, in words: "" if nothing."""
    lines, xs = table.lines, table.xs
    if "*" in relation.split()[:1] + relation.split()[-1:]:
        each = (not_so(relation.replace("*", name), table) for name in lines)
        return "; ".join(filter(None, each))
    chain, _, where = relation.partition(", ")
    xs = {"at the start": xs[:1], "at the end": xs[-1:]}.get(where, xs)
    if match := re.fullmatch(r"(.+) (falls|rises)", chain):
        its = [y for x in xs if (y := value(match[1], lines, x)) is not None]
        its = its[::-1] if match[2] == "falls" else its
        holds = its[1:] and its[0] < its[-1] and all(a <= NOISE * b for a, b in pairwise(its))
        return "" if holds else f"{relation}: not {'so' if its[1:] else 'known'}"
    terms = {x: [value(term, lines, x) for term in chain.split(" < ")] for x in xs}
    known = {x: its for x, its in terms.items() if None not in its}
    wrong = [show(x, ",") for x, its in known.items() if not all(a < b for a, b in pairwise(its))]
    if known and not wrong:
        return ""
    return f"{relation}: not {'at ' + ', '.join(wrong) if known else 'known'}"


def tables_of(its, done):
    """The Tables of one in published.toml, from [(sizes, report)] of what was done."""
    found, values = {}, its["value"] if isinstance(its["value"], dict) else {"": its["value"]}
    for at, report in done:
        for what, path in values.items():
            columns = [lookup(report, part.split(".")) for part in path.split(" / ")]
            for name in columns[0]:
                words = at | {"name": name, "value": what}
                x = words[its["x"]] if its["x"] in words else round(report[its["x"]], 3)
                x = int(x) if str(x).isdecimal() else x
                title, line = ((TEXTS | its)[text].format_map(words) for text in TEXTS)
                line = found.setdefault(title, {}).setdefault(line, {})
                line[x] = reduce(over, (column[name] for column in columns))
    how = its.get("x_name", its["x"]), its["y"], its.get("log", ""), its["format"]
    return [Table(title, *how, lines) for title, lines in found.items()]


def measure(its, setup):
    """The Finding of a claim in published.toml, by a paper.Setup."""
    files = dict(a_to_d=shlex.quote(str(TRACE)), picture=shlex.quote(setup.picture))
    done = [(at, setup.bench(its["run"].format_map(at | files))) for at in points(its[setup.size])]
    rows = (row for _, report in done for key in ROWS for row in report.get(key, {}).values())
    busy = any(row["busy"] for row in rows) or any(report.get("slo_busy") for _, report in done)
    tables, said, wrong = [], [], []
    fill = lambda texts: [text.format_map(done[0][0]) for text in texts]
    for shown in its["shows"]:
        for table in tables_of(shown, done):
            tables.append(table)
            for term in fill(shown.get("say", table.lines)):
                numbers = (show(value(term, table.lines, x), table.spec) for x in table.xs)
                said.append(f"{table.title} {term} {', '.join(numbers)}".lstrip())
            found = [not_so(relation, table) for relation in fill(shown.get("must", ()))]
            wrong += [f"{table.title}: {no}".removeprefix(": ") for no in found if no]
    return Finding(tables, "; ".join(said), wrong, busy)
