"""Draw the tables of a claim, lines side by side. Read first: style.py, lab/papers/finding.py."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from math import nan
from pathlib import Path
from typing import Any, Protocol

from matplotlib.figure import Figure

from views import style

COLUMNS = 2  # panels in a row
LEGEND_LETTERS = 110  # in a row of the legend


class Panel(Protocol):
    """A diagram with a line for each name. lab.papers.finding.Plot is one."""

    @property
    def title(self) -> str: ...

    @property
    def x(self) -> str: ...  # the labels of the axes

    @property
    def y(self) -> str: ...

    @property
    def log(self) -> str: ...  # the axes that are logarithmic: "", "x", "y" or "xy"

    @property
    def lines(self) -> Mapping[str, Mapping[Any, float | None]]: ...  # name -> {x: y}


def plot_panels(
    panels: Sequence[Panel],
    title: str,
    file: str | Path,
    machine: Mapping[str, object] | None = None,
) -> Figure:
    """Draw the panels, at least one, and write the picture to `file`.

    A name looks alike in all of them. Where a line has a None it is broken."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    colors = line_colors(names)
    markers = dict(zip(names, cycle(style.MARKERS), strict=False))
    rows = -(-len(panels) // COLUMNS)
    letters = 6 + max(len(name) for name in names)  # of a name in the legend, with its line
    legend_columns = min(len(names), max(1, LEGEND_LETTERS // letters))
    legend_rows = -(-len(names) // legend_columns)
    figure = style.new_figure(0.7 + 2.9 * rows + 0.2 * legend_rows)
    drawn_lines = {}
    for number, panel in enumerate(panels, 1):
        axis = figure.add_subplot(rows, min(COLUMNS, len(panels)), number)
        for name, line in panel.lines.items():
            (drawn_lines[name],) = axis.plot(
                list(line),
                [nan if y is None else y for y in line.values()],
                color=colors[name],
                marker=markers[name],
                ms=4,
                lw=1.5,
            )
        axis.set(xlabel=panel.x, ylabel=panel.y)
        axis.set_title(panel.title, **style.BOLD)
        style.log_scale(panel.log, axis)
    figure.legend(
        drawn_lines.values(), drawn_lines.keys(), ncols=legend_columns, **style.LEGEND_BELOW
    )
    return style.finish(figure, title, file, machine)


def line_colors(names: Sequence[str]) -> dict[str, str]:
    """The colour of each line: those of policies if one of the names is a policy's."""
    if not style.POLICY_COLORS.keys().isdisjoint(names):
        return style.policy_colors(names)
    return dict(zip(names, cycle(style.LINE_COLORS), strict=False))
