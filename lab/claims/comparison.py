"""A table of simulated numbers, with those that a paper published beside them.

    table = Table("S-F7", "tile quantization", row_head="ms", quantities=[paper_beside(".2f")])
    table.compare("prompt of 128", published=55, simulated=53.9)
    table.to_markdown(), table.to_json(), table.errors

Read next: simulated.py, whose experiments return these tables."""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from lab.measure.capacity import Bounded
from views.tables import markdown

Cell = float | str | None  # None: not published, or not known
UNKNOWN: Mapping[str, Cell] = {}


@dataclass(frozen=True)
class Quantity:
    """A number in each row of a table, and the heads of its columns."""

    name: str
    format: str  # as views.tables.show takes it
    simulated_head: str
    published_head: str | None = None  # None: no paper published it
    error_head: str | None = None  # None: only the order of the numbers can be compared

    @property
    def columns(self) -> dict[str, str]:
        """{head: format} of its columns, from left to right."""
        columns = {self.simulated_head: self.format}
        if self.published_head is not None:
            columns = {self.published_head: self.format} | columns
        if self.error_head is not None:
            columns[self.error_head] = "+.0%"
        return columns


def only_simulated(name: str, spec: str) -> Quantity:
    """A quantity that no paper published."""
    return Quantity(name, spec, simulated_head=name)


def beside_published(name: str, spec: str, error_head: str | None = None) -> Quantity:
    """One of several quantities of a table that a paper published."""
    return Quantity(name, spec, f"simulated {name}", name, error_head)


def paper_beside(spec: str) -> Quantity:
    """The only quantity of a table, which a paper published."""
    return Quantity("simulated", spec, "simulated", "paper", "error")


Panels = dict[str, dict[str, tuple[float | None, float | None]]]  # quantity -> row -> both numbers


def draw_beside(panels: Panels, title: str, file: Path) -> None:
    """Draw simulated numbers as bars, and published ones on them, and write them to `file`."""
    from views.bars import Beside, plot_beside_published  # matplotlib takes a second

    bars = {
        quantity: {name: Beside(*both) for name, both in rows.items()}
        for quantity, rows in panels.items()
    }
    plot_beside_published(bars, "\n".join(textwrap.wrap(title, 100)), file)


@dataclass
class Table:
    """Rows of quantities, by name. `errors` has how far each simulated number is off that was
    compared, as a share of the published one: infinity if it is only known to be above or below."""

    claim: str  # such as "S-F7": SARATHI's figure 7
    title: str
    quantities: Sequence[Quantity]
    row_head: str = ""
    note: str = ""
    figure: Callable[[str, Path], None] | None = None  # draws it with a title to a file
    rows: list[dict[str, Cell]] = field(default_factory=list)  # {head of a column: its cell}
    errors: list[float] = field(default_factory=list)

    def add(
        self,
        name: str,
        simulated: Mapping[str, Cell],
        published: Mapping[str, Cell] = UNKNOWN,
    ) -> None:
        """Add a row, the numbers of each quantity by its name. Raises ValueError if one that is
        simulated is missing, or if there is no such quantity."""
        names = {quantity.name for quantity in self.quantities}
        if simulated.keys() != names or not published.keys() <= names:
            raise ValueError(f"{self.claim}, {name}: must have {', '.join(sorted(names))}")
        row: dict[str, Cell] = {self.row_head: name}
        for quantity in self.quantities:
            ours = simulated[quantity.name]
            paper = published.get(quantity.name)
            if quantity.published_head is not None:
                row[quantity.published_head] = paper
            row[quantity.simulated_head] = ours
            if quantity.error_head is not None:
                row[quantity.error_head] = self._compare(paper, ours)
        self.rows.append(row)

    def compare(self, name: str, published: Cell, simulated: Cell) -> None:
        """Add a row to a table of one quantity."""
        (quantity,) = self.quantities
        self.add(name, {quantity.name: simulated}, {quantity.name: published})

    def _compare(self, paper: Cell, ours: Cell) -> float | None:
        """How far `ours` is off, which is counted. None if that is not known."""
        if paper is None or ours is None or isinstance(paper, str) or isinstance(ours, str):
            return None
        if isinstance(ours, Bounded) and ours.bound:
            self.errors.append(math.inf)
            return None
        error = ours / paper - 1
        self.errors.append(abs(error))
        return error

    def draw_bars(self) -> None:
        """Let `figure` show, as it is, each quantity that a paper published."""
        panels: Panels = {}
        for quantity in self.quantities:
            if quantity.published_head is not None:
                panels[quantity.name] = {
                    str(row[self.row_head]): (
                        _number(row[quantity.simulated_head]),
                        _number(row[quantity.published_head]),
                    )
                    for row in self.rows
                }
        self.figure = partial(draw_beside, panels)

    def columns(self) -> dict[str, str]:
        """{head: format} of all columns, the names of the rows first."""
        columns = {self.row_head: ""}
        for quantity in self.quantities:
            columns |= quantity.columns
        return columns

    def to_markdown(self) -> str:
        """The rows as a table in Markdown."""
        return markdown(self.columns(), [row.values() for row in self.rows])

    def to_json(self) -> dict[str, object]:
        """The claim, the title, the rows as {head: value} with numbers as numbers, and the note."""
        rows = [{head: _plain(cell) for head, cell in row.items()} for row in self.rows]
        return {"claim": self.claim, "title": self.title, "rows": rows, "note": self.note}


def _number(cell: Cell) -> float | None:
    """A cell's number, if it has one."""
    return None if isinstance(cell, str) else cell


def _plain(cell: Cell) -> Cell:
    """A cell for JSON: a number that is a bound is a text, such as "at least 6"."""
    if isinstance(cell, Bounded) and cell.bound:
        return f"{cell:.4g}"
    return cell
