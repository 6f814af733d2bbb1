"""What a claim returns: plots, and checks of what must show in them.

    times = Plot("time of a batch", x="tokens", y="ms", spec=".1f")
    times.add("prefill", x=512, y=40.0)
    Finding(plots=[times], checks=[rises(times.line("prefill"))])

A plot is drawn as lines and printed as a table. A check compares whole lines of a plot. A number
that is not known, None, is a gap, and nothing is claimed about it. Read next: measured_batches.py.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Literal

from lab.measure.capacity import Bounded
from views.tables import markdown, show

NOISE = 1.1  # up to this factor a number that should rise may fall
X = float | str
Y = float | None


@dataclass(frozen=True)
class Line:
    """A line of a plot, or what is computed from lines: a number at each x of the plot."""

    name: str
    title: str  # of the plot
    spec: str  # the format of its numbers
    xs: tuple[X, ...]  # of the whole plot, in order; the line may have gaps
    values: dict[X, Y]

    def at(self, x: X) -> Y:
        """The number at x, None in a gap."""
        return self.values.get(x)

    def times(self, factor: float) -> "Line":
        """This line, each number multiplied."""
        values = {x: None if y is None else factor * y for x, y in self.values.items()}
        return replace(self, name=f"{factor:g} * {self.name}", values=values)

    def over(self, other: "Line | float") -> "Line":
        """This line over another one, where both are known, or over a number."""
        values = {}
        for x in self.xs:
            divisor = other.at(x) if isinstance(other, Line) else other
            values[x] = over(self.at(x), divisor)
        return replace(self, name=f"{self.name} / {name_of(other)}", values=values)

    def text(self) -> str:
        """Its numbers in a line, with the title of the plot: "share of the time decode 62%, -"."""
        numbers = ", ".join(show(self.at(x), self.spec) for x in self.xs)
        return f"{self.title} {self.name} {numbers}".lstrip()


def name_of(term: Line | float) -> str:
    """The text of a line or a number in the description of a check."""
    return term.name if isinstance(term, Line) else f"{term:g}"


def over(a: Y, b: Y) -> Y:
    """a / b. None if one is not known, b is 0, or their bounds leave it open."""
    if isinstance(a, Bounded) and isinstance(b, Bounded):
        return a.over(b)
    return a / b if a is not None and b else None


@dataclass
class Plot:
    """Numbers as a diagram with a line for each name, and as a table with a column for each."""

    title: str
    x: str  # what is on the axes, with units
    y: str
    spec: str  # the format of a number, as of views.tables.show
    log: Literal["", "x", "y", "xy"] = ""  # the axes that are logarithmic
    lines: dict[str, dict[X, Y]] = field(default_factory=dict)  # {name: {x: number}}

    def add(self, line: str, x: X, y: Y) -> None:
        """Add a number to a line. None is a gap."""
        self.lines.setdefault(line, {})[x] = y

    @property
    def xs(self) -> tuple[X, ...]:
        """All x of all lines, in the order in which they were first added."""
        return tuple(dict.fromkeys(x for values in self.lines.values() for x in values))

    def line(self, name: str) -> Line:
        """The line of that name. Raises KeyError if there is none."""
        if name not in self.lines:
            raise KeyError(f"{name}: no line of {self.title!r}, which has {', '.join(self.lines)}")
        return self._line(name, self.lines[name])

    def all_lines(self) -> list[Line]:
        """All lines, in order."""
        return [self.line(name) for name in self.lines]

    def best(self, name: str, variants: Sequence[str]) -> Line:
        """At each x the largest number of some lines, as a line called `name`."""
        lines = [self.line(variant) for variant in variants]
        values: dict[X, Y] = {}
        for x in self.xs:
            numbers = [y for line in lines if (y := line.at(x)) is not None]
            values[x] = max(numbers, default=None)
        return self._line(name, values)

    def _line(self, name: str, values: dict[X, Y]) -> Line:
        return Line(name=name, title=self.title, spec=self.spec, xs=self.xs, values=values)

    def markdown(self) -> str:
        """The table, a row for each x, under the title."""
        rows = []
        for x in self.xs:
            numbers = [values.get(x) for values in self.lines.values()]
            rows.append([show(x, ","), *numbers])
        heading = f"{self.title}: {self.y}".removeprefix(": ")
        columns = {self.x: ""} | dict.fromkeys(self.lines, self.spec)
        return f"{heading}\n\n{markdown(columns, rows)}"

    def to_json(self) -> dict[str, object]:
        """What paper.json keeps."""
        return asdict(self)


@dataclass(frozen=True)
class Check:
    """Something that must show on any device, as it follows from the arithmetic."""

    description: str  # "decode falls"
    holds: bool
    title: str = ""  # of the plot
    reason: str = ""  # why it does not hold: "not at 2, 3", "not so", or "not known"

    def __str__(self) -> str:
        """What is wrong with it, if it does not hold."""
        return f"{self.title}: {self.description}: {self.reason}".removeprefix(": ")


def rises(line: Line) -> Check:
    """The line ends above its start, and between two x it falls by noise of 10 % at most."""
    return _goes(line, "rises", [y for x in line.xs if (y := line.at(x)) is not None])


def falls(line: Line) -> Check:
    """The line ends below its start, and between two x it rises by noise of 10 % at most."""
    values = [y for x in line.xs if (y := line.at(x)) is not None]
    return _goes(line, "falls", values[::-1])


def _goes(line: Line, direction: str, values: Sequence[float]) -> Check:
    """The Check that these values rise; `direction` is what the line does then."""
    description = f"{line.name} {direction}"
    if len(values) < 2:
        return Check(description, False, line.title, "not known")
    steady = all(low <= NOISE * high for low, high in pairwise(values))
    holds = values[0] < values[-1] and steady
    return Check(description, holds, line.title, "" if holds else "not so")


def less(*terms: Line | float, at: Literal["start", "end", ""] = "") -> Check:
    """Each term is less than the next, at every x, or only at the first or the last one.

    Nothing is claimed of an x at which one of the terms is not known, but one must be known."""
    line = next(term for term in terms if isinstance(term, Line))
    description = " < ".join(name_of(term) for term in terms)
    xs = line.xs
    if at == "start":
        description += ", at the start"
        xs = xs[:1]
    if at == "end":
        description += ", at the end"
        xs = xs[-1:]
    failed_at: list[str] = []
    is_known = False
    for x in xs:
        numbers = [term.at(x) if isinstance(term, Line) else term for term in terms]
        known = [number for number in numbers if number is not None]
        if len(known) < len(numbers):
            continue
        is_known = True
        if not all(low < high for low, high in pairwise(known)):
            failed_at.append(show(x, ","))
    reason = f"not at {', '.join(failed_at)}" if is_known else "not known"
    holds = is_known and not failed_at
    return Check(description, holds, line.title, "" if holds else reason)


@dataclass(frozen=True)
class Finding:
    """What was found of a claim."""

    plots: list[Plot]
    checks: list[Check]
    quoted: list[Line] = field(default_factory=list)  # what is held against the paper's numbers
    because: str = ""  # why it may not show, known from the machine
    has_picture: bool = False  # whether it was drawn already, otherwise than as its plots

    @property
    def here(self) -> str:
        """The quoted numbers, in a line."""
        return "; ".join(line.text() for line in self.quoted)

    @property
    def must_show(self) -> str:
        """All that is checked, in a line."""
        return "; ".join(dict.fromkeys(check.description for check in self.checks))

    @property
    def failures(self) -> list[str]:
        """What must show, but does not."""
        return [str(check) for check in self.checks if not check.holds]


@dataclass(frozen=True, kw_only=True)
class Headline:
    """The one number of a claim that a summary shows, and the paper's number beside it."""

    text: str  # what the number is
    paper: str  # the published number, with its unit
    line: str = ""  # the name of the quoted line that has it; "": of any quoted line
    title: str = ""  # of the plot of that line
    pick: Literal["first", "largest"] = "first"
    unit: str = ""  # stands after our number

    def number(self, finding: Finding) -> str:
        """Our number with its unit, "-" if it is not known. Raises KeyError if no line has it."""
        lines = [
            line
            for line in finding.quoted
            if self.line in ("", line.name) and self.title in ("", line.title)
        ]
        if not lines:
            raise KeyError(f"no line {self.line!r} is quoted, to be the headline {self.text!r}")
        line = lines[0]
        number = line.at(line.xs[0])
        if self.pick == "largest":
            known = [y for each in lines for x in each.xs if (y := each.at(x)) is not None]
            number = max(known, default=None)
        return "-" if number is None else f"{show(number, line.spec)}{self.unit}"
