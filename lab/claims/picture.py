"""Draws what a claim found: its tables, with the paper's numbers hollow where ours stand.

A number of the paper whose line is in no table, or that would lie far outside it, stands in a strip
of bars below. Read first: found.py, views/panels.py. Read next: report.py."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from lab.claims.claim import Finding, Published
from lab.claims.table import Table
from views.bars import Beside
from views.panels import Mark, plot_panels

FAR = 4  # times as large as all others in a table: such a number would press them together
PAPERS = {"S": "SARATHI", "SS": "Sarathi-Serve", "B": "the post", "C": "SARATHI"}  # by a claim's id


def draw(found: Finding, title: str, file: str | Path, machine: Mapping[str, object]) -> Figure:
    """Write the picture of a Finding to `file`. The title begins with the id of the claim."""
    marks: list[list[Mark]] = [[] for _ in found.tables]
    beside: dict[str, dict[str, Beside]] = {}
    for number in found.published:
        place = next((i for i, plot in enumerate(found.tables) if has_room(plot, number)), None)
        if place is not None:
            marks[place].append(Mark(number.line.name, number.at, number.paper))
        elif is_comparable(number):
            beside.setdefault(unit_of(number), {})[number.text] = Beside(number.here, number.paper)
    devices = dict.fromkeys(number.device for number in found.published if number.device)
    source = PAPERS[title.partition("-")[0]]
    if devices:
        source += f": {'; '.join(devices)}"
    return plot_panels(
        found.tables,
        title,
        file,
        machine,
        marks=marks,
        beside=beside,
        source=source,
    )


def is_comparable(number: Published) -> bool:
    """Whether it says something about ours: seconds of another machine do not."""
    return number.within is not None or number.line.spec.endswith("x")


def has_room(table: Table, number: Published) -> bool:
    """Whether a table shows the line of a number, and has room for the paper's."""
    if not is_comparable(number) or table.form or number.here is None or not number.is_in(table):
        return False
    known = [y for values in table.lines.values() for y in values.values() if y]
    return min(known) / FAR < number.paper < FAR * max(known)


def unit_of(number: Published) -> str:
    """The label of the axis on which a number is drawn, with others like it."""
    if number.line.spec.endswith("x"):
        return "times"
    if number.line.spec.endswith("%"):
        return "share"
    return number.unit.strip() or "number"
