"""Draw the tables of a claim side by side, with the paper's numbers hollow where ours stand.

A panel of many x is a diagram of lines. Few x, up to three, are categories, and so are texts: they
are drawn as bars. Read first: style.py, bars.py, lab/claims/table.py."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from cli.tables import show
from lab.pictures import style
from lab.pictures.bars import Beside, draw_bars, draw_beside_published, heights_of

COLUMNS = 2  # panels in a row
LEGEND_COLUMNS = 3
FEW = 3  # so many x are categories
LONG_STEP = 5  # times a decode iteration: the strict SLO of Sarathi-Serve, above it a step is red


class Panel(Protocol):
    """A diagram with a line for each name. lab.claims.table.Table is one."""

    @property
    def title(self) -> str: ...

    @property
    def x(self) -> str: ...  # the labels of the axes

    @property
    def y(self) -> str: ...

    @property
    def spec(self) -> str: ...  # the format of its numbers

    @property
    def log(self) -> str: ...  # the axes that are logarithmic: "", "x", "y" or "xy"

    @property
    def form(self) -> str: ...  # "stacked", "steps", or "": lines or bars

    @property
    def ticks(self) -> Sequence[float]: ...  # of x; the picture ends at the last; (): as they come

    @property
    def lines(self) -> Mapping[str, Mapping[Any, float | None]]: ...  # name -> {x: y}


class Mark(NamedTuple):
    """A number of a paper, at the place of ours."""

    line: str
    x: Any
    y: float


def plot_panels(
    panels: Sequence[Panel],
    title: str,
    file: str | Path,
    machine: Mapping[str, object] | None = None,
    *,
    marks: Sequence[Sequence[Mark]] = (),
    beside: Mapping[str, Mapping[str, Beside]] | None = None,
    source: str = "",
) -> Figure:
    """Draw the panels, at least one, and write the picture to `file`.

    A name looks alike in all of them. Where a line has a None it is broken. `marks` has the paper's
    numbers in each panel. `beside` has those that stand in none, {their unit: {text: Beside}}: a
    strip of bars below the panels. `source` says whose the hollow numbers are."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    colors = style.name_colors(names)
    rows = -(-len(panels) // COLUMNS)
    legend_rows = -(-(len(names) + 1) // LEGEND_COLUMNS)
    heights = [2.9 * rows + 0.2 * legend_rows]
    if beside:
        heights.append(0.4 + sum(heights_of(beside)))
    figure = style.new_figure(0.7 + sum(heights))
    parts = style.parts_of(figure, heights)
    handles: dict[str, Any] = {}  # what stands for each name in the legend
    for number, panel in enumerate(panels):
        axis = parts[0].add_subplot(rows, min(COLUMNS, len(panels)), number + 1)
        axis.set_title(textwrap.fill(panel.title, 40), **style.BOLD)
        marks_here = marks[number] if marks else ()
        _draw_panel(axis, panel, colors, marks_here, is_of_bars(panel, panels))
        artists, labels = axis.get_legend_handles_labels()
        handles |= dict(zip(labels, artists, strict=True))
    if any(marks):
        handles["published"] = Line2D([], [], **style.PUBLISHED)
    parts[0].legend(
        handles.values(),
        handles,
        ncols=LEGEND_COLUMNS,
        **style.LEGEND_BELOW,
    )
    if beside:
        draw_beside_published(parts[1], beside)
    lines = textwrap.wrap(title, 100)
    if any(marks) or beside:
        lines.append(f"hollow: published, {source}")
    return style.finish(figure, "\n".join(lines), file, machine)


def is_of_bars(panel: Panel, panels: Sequence[Panel]) -> bool:
    """Whether the x of a panel are categories. Those with the same axes are drawn alike."""
    if any(isinstance(x, str) for x in _xs(panel)):
        return True
    same_axes = [other for other in panels if (other.x, other.y) == (panel.x, panel.y)]
    return all(len(_xs(other)) <= FEW for other in same_axes)


def _xs(panel: Panel) -> list[Any]:
    return list(dict.fromkeys(x for line in panel.lines.values() for x in line))


def _draw_panel(
    axis: Axes,
    panel: Panel,
    colors: Mapping[str, str],
    marks: Sequence[Mark],
    bars: bool,
) -> None:
    """Draw one panel, as bars where its x are categories."""
    if panel.form:
        _draw_lanes(axis, panel, colors)
    elif bars:
        published = {(mark.line, mark.x): mark.y for mark in marks}
        draw_bars(axis, panel.lines, published, lambda name, _: colors[name], panel.spec)
    else:
        _draw_lines(axis, panel, colors, marks)
    if panel.form or bars:  # numbers go to the right
        number_axis = axis.xaxis
        x_axis = axis.yaxis
        draw_limit = axis.axvline
        categories = [textwrap.fill(label.get_text(), 18) for label in axis.get_yticklabels()]
        axis.set_yticks(axis.get_yticks(), categories)
    else:
        number_axis = axis.yaxis
        x_axis = axis.xaxis
        draw_limit = axis.axhline
    number_axis.set_label_text(panel.y)
    x_axis.set_label_text("" if panel.form == "steps" else panel.x)
    low, high = number_axis.get_view_interval()
    if panel.spec.endswith("x") and not panel.form and low < 1 < high:
        draw_limit(1, color="#444444", lw=0.8, zorder=0)
    if panel.spec.endswith("%"):
        number_axis.set_major_formatter(PercentFormatter(1, decimals=0))


def _draw_lines(
    axis: Axes,
    panel: Panel,
    colors: Mapping[str, str],
    marks: Sequence[Mark],
) -> None:
    """Draw a line for each name, and arrows where a number is a bound."""
    for name, line in panel.lines.items():
        points = {x: y for x, y in line.items() if not panel.ticks or x <= panel.ticks[-1]}
        numbers = np.array(list(points.values()), float)  # None is not a number
        line_style = style.line_look(name) | {"color": colors[name], "lw": 1.5}
        axis.plot(list(points), numbers, **line_style, label=name)
        for x, y in points.items():
            if y is not None and style.bound_of(y):
                axis.plot(
                    [x],
                    [y],
                    **style.BOUND[style.bound_of(y)],
                    color=colors[name],
                )
    for mark in marks:
        marker = style.published_marker(mark.y, colors[mark.line])
        axis.plot([mark.x], [mark.y], **marker, zorder=5)
    style.log_scale(panel.log, axis)
    if panel.ticks:
        axis.set_xticks(panel.ticks)


def _draw_lanes(axis: Axes, panel: Panel, colors: Mapping[str, str]) -> None:
    """Draw lanes in which numbers are lengths, one after another: the numbers of all lines at an x
    ("stacked"), or the steps of a line, coloured by their length; those of a paper are hollow."""
    lanes = panel.lines
    if panel.form == "stacked":
        lanes = {x: {name: panel.lines[name].get(x) for name in panel.lines} for x in _xs(panel)}
    for row, (lane, numbers) in enumerate(lanes.items()):
        lengths = np.array([number or 0.0 for number in numbers.values()])
        ends = lengths.cumsum()
        text = style.three_digits(lengths.sum())
        line_style: dict[str, Any] = {"label": list(numbers)}
        if panel.form == "stacked":
            line_style["color"] = [colors[name] for name in numbers]
        else:
            shades = style.GAPS(Normalize(1, LONG_STEP)(lengths))
            line_style = {"color": shades, "edgecolor": "white", "lw": 0.8}
            text = f"longest {style.three_digits(lengths.max(initial=0.0))}"
            if style.is_published(lane):
                line_style = {"color": "white", "edgecolor": shades, "lw": 1.6}
        axis.barh(row, lengths, 0.62, left=ends - lengths, **line_style)
        end = (lengths.sum(), row)
        axis.annotate(
            text,
            end,
            (4, 0),
            textcoords="offset points",
            va="center",
        )
    axis.set_yticks(range(len(lanes)), [show(lane, ",") for lane in lanes])
    axis.invert_yaxis()
    axis.margins(x=0.15)
    style.bare(axis)
