"""Tables: the numbers of a claim, a column for each name, which a picture shows as lines.

    times = Table("time of a batch", x="tokens", y="ms", spec=".1f")
    times.add(512, {"prefill": 40.0})
    times["prefill"].at(512)

A number that is not known, None, is a gap. Read next: claim.py, which compares lines."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from cli.tables import markdown, show
from lab.measure.capacity import Bounded

X = float | str
Y = float | None
Extreme = Callable[..., Any]  # max or min


@dataclass(frozen=True)
class Line:
    """A column of a table, or what is computed from columns: a number at each x."""

    table: "Table"  # may have more x, where the line has gaps
    name: str
    spec: str  # the format of its numbers
    timed: bool  # whether its numbers depend on times that were measured
    values: Mapping[X, Y]

    def at(self, x: X) -> Y:
        """The number at x, None in a gap."""
        return self.values.get(x)

    @property
    def known(self) -> dict[X, float]:
        """Its numbers but for gaps, in order."""
        numbers = {x: self.at(x) for x in self.table.xs}
        return {x: y for x, y in numbers.items() if y is not None}

    def __rmul__(self, factor: float) -> "Line":
        """This line, each number multiplied."""
        values: dict[X, Y] = {}
        for x, y in self.values.items():
            values[x] = None if y is None else factor * y
        return replace(self, name=f"{factor:g} * {self.name}", values=values)

    def __truediv__(self, other: "Line") -> "Line":
        """The ratio of this line to another one, where both are known."""
        ratios = {x: over(self.at(x), other.at(x)) for x in self.table.xs}
        return replace(
            self,
            name=f"{self.name} / {other.name}",
            spec=".2fx",
            timed=self.timed or other.timed,
            values=ratios,
        )

    def x_of(self, extreme: Extreme) -> X:
        """Where its largest or smallest number is, by max or min; the first x if none is known."""
        numbers = self.known
        first, *_ = self.table.xs
        return extreme(numbers, key=lambda x: numbers[x], default=first)


def over(a: Y, b: Y) -> Y:
    """a / b. None if one is not known, b is 0, or their bounds leave it open."""
    if isinstance(a, Bounded) and isinstance(b, Bounded):
        return a.over(b)
    return a / b if a is not None and b else None


def plain(y: Y) -> float | str | None:
    """A number for JSON. One that is a bound is a text, such as "at least 6"."""
    return f"{y:.4g}" if isinstance(y, Bounded) and y.bound else y


def from_text(text: Any) -> Any:
    """A number, or a bound of one, that was written to JSON as a text; anything else as it is."""
    bound, _, number = str(text).rpartition(" ")
    if bound in ("at least", "below"):
        return Bounded(float(number), bound)
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return text


@dataclass
class Table:
    """Numbers by a name and an x: columns of a table, or lines of a diagram."""

    title: str = ""
    x: str = ""  # what is on the axes, with units
    y: str = ""
    spec: str = ".2fx"  # the format of a number, as of cli.tables.show
    log: Literal["", "x", "y", "xy"] = ""  # the axes that are logarithmic
    form: Literal["", "stacked", "steps"] = ""  # of the picture: lines or bars, stacked bars, lanes
    ticks: tuple[float, ...] = ()  # of x in the picture, which ends at the last; (): as they come
    timed: bool = True  # whether the numbers depend on measured times, or are counted or computed
    lines: dict[str, dict[X, Y]] = field(default_factory=dict)  # {name: {x: number}}

    def add(self, x: X, numbers: Mapping[str, Y]) -> None:
        """Add a number at x to each of these lines. None is a gap."""
        for line, y in numbers.items():
            self.lines.setdefault(line, {})[x] = y

    @property
    def xs(self) -> tuple[X, ...]:
        """All x of all lines, in the order in which they were first added."""
        xs: dict[X, None] = {}
        for values in self.lines.values():
            xs |= dict.fromkeys(values)
        return tuple(xs)

    def __getitem__(self, name: str) -> Line:
        """The line of that name. Raises KeyError if there is none."""
        if name not in self.lines:
            raise KeyError(f"{name}: no line of {self.title!r}, which has {', '.join(self.lines)}")
        return Line(self, name, self.spec, self.timed, self.lines[name])

    def __iter__(self) -> Iterator[Line]:
        """All lines, in order."""
        return map(self.__getitem__, self.lines)

    def best(self, name: str, variants: Sequence[str]) -> Line:
        """At each x the largest number of some lines, as a line called `name`."""
        lines = [self[variant] for variant in variants]
        values: dict[X, Y] = {}
        for x in self.xs:
            numbers = [line.at(x) for line in lines]
            known_numbers = [number for number in numbers if number is not None]
            values[x] = max(known_numbers, default=None)
        return replace(lines[0], name=name, values=values)

    def markdown(self, published: Mapping[tuple[str, X], str]) -> str:
        """The table, a row for each x, under the title. `published` has texts of the paper's
        numbers, {(line, x): "1.33x"}, which stand beside ours."""
        rows = []
        for x in self.xs:
            cells = [show(line.at(x), self.spec) for line in self]
            papers = [published.get((name, x)) for name in self.lines]
            beside = zip(cells, papers, strict=True)
            texts = [f"{cell} (paper: {paper})" if paper else cell for cell, paper in beside]
            rows.append([show(x, ","), *texts])
        heading = f"{self.title}: {self.y}".removeprefix(": ")
        return f"{heading}\n\n{markdown(dict.fromkeys([self.x, *self.lines], ''), rows)}"

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        lines = {}
        for name, values in self.lines.items():
            lines[name] = {x: plain(y) for x, y in values.items()}
        return asdict(self) | {"lines": lines}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "Table":
        """The Table of to_json()."""
        lines: dict[str, dict[X, Y]] = {}
        for name, values in row["lines"].items():
            lines[name] = {from_text(x): from_text(y) for x, y in values.items()}
        return cls(**{**row, "lines": lines})


def line(
    name: str,
    values: Mapping[Any, Y],  # by x
    *,
    title: str = "",
    x: str = "",
    spec: str = ".2fx",
    timed: bool = True,
) -> Line:
    """A line that no table shows."""
    table = Table(title, x, spec=spec, timed=timed)
    table.lines[name] = dict(values)
    return table[name]
