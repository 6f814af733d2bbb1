"""A claim: what a figure or table of a paper says, the paper's numbers, and ours beside them.

    @claim("S-F13", "Small chunks make a prefill longer", A6000_13B)
    def small_chunks(lab: Lab) -> Result: ...

A function asks a lab. It adds rows and the paper's numbers, and expects one relation that follows
from the arithmetic. The lab computes on the paper's machine, or measures on this one. Read next:
labs.py, batches.py."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from inspect import getdoc
from typing import Any, Literal

from cli.tables import markdown, show
from lab.measure.capacity import Bounded

# Who published a number: the text, figures and tables of the paper, data that its authors keep in a
# repository, a third party that read a figure. A constant of the cost model was set by one that is
# fitted.
Source = Literal["text", "data", "reading", "fitted"]
# Which claims one device can show: "slow" ones are measured here only with --on here.
Measured = Literal["quick", "slow", "no"]


@dataclass(frozen=True)
class Published:
    """A number of a paper, or a bound, and ours."""

    paper: float
    ours: float | None
    source: Source

    @property
    def error(self) -> float | None:
        """How far ours is off, as a share of the paper's; None if there is none, or for a bound."""
        if self.ours is None or isinstance(self.paper, Bounded):
            return None
        return self.ours / self.paper - 1

    @property
    def is_met(self) -> bool | None:
        """Whether ours is on the paper's side of its bound; None if that is no bound."""
        if self.ours is None or not isinstance(self.paper, Bounded):
            return None
        is_above = self.ours >= self.paper
        return is_above == (self.paper.bound == "at least")


@dataclass
class Result:
    """What a claim comes out at on one machine."""

    x: str  # the head of the first column
    spec: str = ".2f"  # the format of all numbers
    rows: dict[str, dict[str, float | None]] = field(default_factory=dict)
    published: dict[str, Published] = field(default_factory=dict)
    relation: str = ""
    holds: bool = True
    busy: bool = False  # whether others used the machine meanwhile
    picture: Callable[[str], object] | None = None  # writes a file; None: the rows are drawn

    def add(self, x: object, numbers: Mapping[str, float | None]) -> None:
        """Add numbers to the row of x."""
        self.rows.setdefault(str(x), {}).update(numbers)

    def publish(self, text: str, paper: float, ours: float | None, source: Source = "text") -> None:
        """Add a number of the paper, and ours."""
        self.published[text] = Published(paper, ours, source)

    def expect(self, relation: str, holds: bool) -> None:
        """The relation that must show, in words, and whether it does."""
        self.relation = relation
        self.holds = holds

    def column(self, name: str) -> dict[str, float]:
        """The numbers of a column that are known, by x."""
        numbers = {x: row.get(name) for x, row in self.rows.items()}
        return {x: number for x, number in numbers.items() if number is not None}

    def markdown(self) -> str:
        """The table."""
        heads = dict.fromkeys(head for row in self.rows.values() for head in row)
        columns = dict.fromkeys([self.x, *heads], self.spec)
        rows = [[x, *map(row.get, heads)] for x, row in self.rows.items()]
        return markdown(columns, rows)

    def to_json(self) -> dict[str, Any]:
        """All fields but the picture. A bound is a text: "at least 6"."""
        numbers = {text: asdict(number) for text, number in self.published.items()}
        fields = {name: value for name, value in vars(self).items() if name != "picture"}
        return plain(fields | {"published": numbers})


def plain(value: Any) -> Any:
    """The same for JSON: a bound is a text."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return f"{value:.4g}" if isinstance(value, Bounded) and value.bound else value


@dataclass(frozen=True)
class Claim:
    """A figure, table or section of a paper, and the function that asks a lab for it."""

    id: str
    sentence: str
    function: Callable[[Any], Result]
    systems: Sequence[Any]  # the paper's
    measured: Measured
    least_ridge: float  # rows that the weights must be worth, for the relation to show

    def missing_ridge(self, ridge: float) -> str:
        """Why a machine of that ridge cannot show it, in words; "" if it can."""
        if ridge >= self.least_ridge:
            return ""
        return f"needs a ridge of {self.least_ridge:g} rows; here {ridge:.0f}"

    def markdown(self, columns: Mapping[str, Mapping[str, Result]], notes: Iterable[str]) -> str:
        """The claim, the paper's numbers beside those of each column, relations and tables.

        `columns` has what was found on each machine: {"cost model": {"A100": Result}}."""
        rows: dict[str, list[str]] = {}
        for place, machines in enumerate(columns.values()):
            for result in machines.values():
                for text, number in result.published.items():
                    paper = show(number.paper, result.spec)
                    row = rows.setdefault(text, [text, paper, *["-"] * len(columns)])
                    row[2 + place] = show(number.ours, result.spec)
        parts = [f"## {self.id}: {self.sentence}", getdoc(self.function) or "", *notes]
        if rows:
            heads = dict.fromkeys(["number", "paper", *columns], "")
            parts.append(markdown(heads, rows.values()))
        for machines in columns.values():
            for name, result in machines.items():
                holds = "holds" if result.holds else "does not hold"
                busy = " (the machine was busy)" if result.busy else ""
                parts += [f"{name}: {result.relation}: {holds}{busy}", result.markdown()]
        return "\n\n".join(parts)


CLAIMS: dict[str, Claim] = {}  # by id


def claim(
    id: str, sentence: str, *systems: Any, measured: Measured = "quick", least_ridge: float = 0
) -> Callable[[Callable[[Any], Result]], Callable[[Any], Result]]:
    """Enter the function below into CLAIMS."""

    def enter(function: Callable[[Any], Result]) -> Callable[[Any], Result]:
        CLAIMS[id] = Claim(id, sentence, function, systems, measured, least_ridge)
        return function

    return enter


def agreement(result: Iterable[Result]) -> str:
    """How many numbers of the papers come out, by their source."""
    numbers = [number for each in result for number in each.published.values()]
    names: dict[Source, str] = {
        "text": "numbers in the papers' text that nothing was fitted to",
        "data": "in their authors' data",
        "reading": "that a third party read off a figure",
        "fitted": "that constants were fitted to",
    }
    lines = []
    for source, name in names.items():
        errors = [abs(n.error) for n in numbers if n.source == source and n.error is not None]
        if errors:
            close = [sum(error <= limit for error in errors) for limit in (0.1, 0.25)]
            lines.append(f"of {len(errors)} {name}, {close[0]} within 10 %, {close[1]} within 25 %")
    bounds = [number.is_met for number in numbers if number.is_met is not None]
    if bounds:
        lines.append(f'of {len(bounds)} bounds, such as "below 1.2", {sum(bounds)} met')
    return "\n".join(lines)
