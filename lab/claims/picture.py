"""Draws what a claim found: its tables, with the paper's numbers hollow where ours stand.

A number of the paper whose line is in no table, or that would lie far outside it, stands in a strip
of bars below. Read first: claim.py, lab/pictures/panels.py. Read next: report.py."""

import textwrap
from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from lab.claims.claim import Finding, Published
from lab.claims.table import Table, X
from lab.pictures.bars import Beside, plot_beside_published
from lab.pictures.panels import Mark, plot_panels

MANY = 6  # so many texts do not fit below a diagram: they stand at the left of bars
FAR = 4  # times as large as all others in a table: such a number would press them together
PAPERS = {  # by a claim's id
    "S": "SARATHI",
    "SS": "Sarathi-Serve",
    "D": "DistServe",
    "B": "the post",
    "C": "SARATHI",
}


def draw(
    finding: Finding, title: str, file: str | Path, machine: Mapping[str, object] | None
) -> Figure:
    """Write the picture of a Finding to `file`. The title begins with the id of the claim. The
    machine is None where it was simulated."""
    if any(has_many_texts(table) for table in finding.tables):
        return plot_beside_published(rows_of(finding), title, file, machine)
    marks: list[list[Mark]] = [[] for _ in finding.tables]
    beside: dict[str, dict[str, Beside]] = {}
    for number in filter(is_comparable, finding.published):
        place = number.table
        if place is not None and has_room(finding.tables[place], number):
            mark = Mark(number.line, number.at, number.paper)
            marks[place].append(mark)
        else:
            of_unit = beside.setdefault(unit_of(number), {})
            of_unit[number.text] = Beside(number.here, number.paper)
    devices = dict.fromkeys(number.device for number in finding.published if number.device)
    source = PAPERS[title.partition("-")[0]]
    if devices:
        source += f": {'; '.join(devices)}"
    return plot_panels(
        finding.tables,
        title,
        file,
        machine,
        marks=marks,
        beside=beside,
        source=source,
    )


def has_many_texts(table: Table) -> bool:
    """Whether the texts on its axis do not fit below a diagram."""
    return len(table.xs) > MANY and isinstance(table.xs[0], str)


def rows_of(finding: Finding) -> dict[str, dict[str, Beside]]:
    """Our numbers beside the paper's, by line and x: the lines that a paper published, or all."""
    papers: dict[tuple[int | None, str], dict[X, float]] = {}
    for number in finding.published:
        of_line = papers.setdefault((number.table, number.line), {})
        of_line[number.at] = number.paper
    rows: dict[str, dict[str, Beside]] = {}
    for index, table in enumerate(finding.tables):
        for name, values in table.lines.items():
            paper = papers.get((index, name), {})
            if paper or not papers:
                head = f"{table.title}: {name}".removeprefix(": ")
                pairs = rows.setdefault(textwrap.fill(head, 28), {})
                for x, y in values.items():
                    pairs[str(x)] = Beside(y, paper.get(x))
    return rows


def is_comparable(number: Published) -> bool:
    """Whether it says something about ours: seconds of another machine do not."""
    return number.within is not None or number.spec.endswith("x")


def has_room(table: Table, number: Published) -> bool:
    """Whether a table that shows the line of a number has room for the paper's."""
    if table.form or number.here is None:
        return False
    numbers: list[float] = []
    for values in table.lines.values():
        numbers += filter(None, values.values())
    smallest = min(numbers) / FAR
    largest = max(numbers) * FAR
    return smallest < number.paper < largest


def unit_of(number: Published) -> str:
    """The label of the axis on which a number is drawn, with others like it."""
    units = {"x": "times", "%": "share"}
    of_spec = units.get(number.spec[-1:])
    return of_spec or number.unit.strip() or "number"
