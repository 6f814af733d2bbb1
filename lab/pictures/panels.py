"""Draw the tables of a claim side by side, with the paper's numbers hollow where ours stand.

A panel of many x is a diagram of lines. Few x, up to three, are categories, and so are texts: they
are drawn as bars. Read first: style.py, bars.py, lab/claims/table.py."""

import textwrap
from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from cli.tables import show
from lab.pictures import style
from lab.pictures.bars import Beside, draw_beside_published, height_of

COLUMNS = 2  # panels in a row
LEGEND_LETTERS = 110  # in a row of the legend
FEW = 3  # so many x are categories
WIDEST = 0.3  # bar, where categories are 1 apart
ROOM_FOR_NUMBERS = 24  # up to so many bars have their numbers on them
LONG_STEP = 5  # times a decode iteration: the strict SLO of Sarathi-Serve, above it a step is red

Handles = dict[str, Any]  # artists and containers of bars: what stands for each name in the legend


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
    letters = 6 + max(len(name) for name in names)  # of a name in the legend, with its line
    entries = len(names) + any(marks)
    legend_columns = min(entries, max(1, LEGEND_LETTERS // letters))
    legend_rows = -(-entries // legend_columns)
    panels_height = 2.9 * rows + 0.2 * legend_rows
    strip_height = sum(height_of(numbers) for numbers in (beside or {}).values())
    figure = style.new_figure(0.7 + panels_height + strip_height)
    upper, lower = figure, None
    if beside:
        heights = [panels_height, strip_height]
        upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=heights)[:, 0]
    handles: Handles = {}
    for number, panel in enumerate(panels):
        axis = upper.add_subplot(rows, min(COLUMNS, len(panels)), number + 1)
        marks_here = marks[number] if marks else ()
        handles |= _draw_panel(axis, panel, colors, marks_here, is_of_bars(panel, panels))
        axis.set_title(panel.title, **style.BOLD)
    if any(marks):
        handles["published"] = Line2D([], [], **style.PUBLISHED)
    if lower is not None and beside:
        draw_beside_published(lower, beside)
    upper.legend(handles.values(), handles.keys(), ncols=legend_columns, **style.LEGEND_BELOW)
    lines = textwrap.wrap(title, 100)
    if any(marks) or beside:
        lines.append(f"hollow: published, {source}")
    return style.finish(figure, "\n".join(lines), file, machine)


def is_of_bars(panel: Panel, panels: Sequence[Panel]) -> bool:
    """Whether the x of a panel are categories. Those with the same axes are drawn alike."""
    if any(isinstance(x, str) for x in _xs(panel)):
        return True
    alike = [other for other in panels if (other.x, other.y) == (panel.x, panel.y)]
    return all(len(_xs(other)) <= FEW for other in alike)


def _xs(panel: Panel) -> list[Any]:
    return list(dict.fromkeys(x for line in panel.lines.values() for x in line))


def _draw_panel(
    axis: Axes, panel: Panel, colors: Mapping[str, str], marks: Sequence[Mark], bars: bool
) -> Handles:
    """Draw one panel. Returns what stands for each name in the legend."""
    if panel.form == "steps":
        return _draw_steps(axis, panel)
    axis.set(xlabel=panel.x, ylabel=panel.y)
    if panel.form == "stacked":
        return _draw_stacked(axis, panel, colors)
    draw = _draw_bars if bars else _draw_lines
    handles = draw(axis, panel, colors, marks)
    low, high = axis.get_ylim()
    if panel.spec.endswith("x") and low < 1 < high:
        axis.axhline(1, color="#444444", lw=0.8, zorder=0)
    if panel.spec.endswith("%"):
        axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    return handles


def _draw_lines(
    axis: Axes, panel: Panel, colors: Mapping[str, str], marks: Sequence[Mark]
) -> Handles:
    handles: Handles = {}
    for name, line in panel.lines.items():
        points = {x: y for x, y in line.items() if not panel.ticks or x <= panel.ticks[-1]}
        (handles[name],) = axis.plot(
            list(points),
            [nan if y is None else y for y in points.values()],
            color=colors[name],
            lw=1.5,
            **style.line_look(name),
        )
        for x, y in points.items():
            bound = getattr(y, "bound", "")
            if y is not None and bound:
                axis.plot([x], [y], **style.BOUND[bound], color=colors[name])
    for mark in marks:
        axis.plot([mark.x], [mark.y], **style.published_marker(mark.y, colors[mark.line]), zorder=5)
    style.log_scale(panel.log, axis)
    if panel.ticks:
        axis.set_xticks(panel.ticks)
    return handles


def _draw_bars(
    axis: Axes, panel: Panel, colors: Mapping[str, str], marks: Sequence[Mark]
) -> Handles:
    xs = _xs(panel)
    width = min(0.84 / len(panel.lines), WIDEST)
    places: dict[tuple[str, Any], float] = {}
    handles: Handles = {}
    values = [y for line in panel.lines.values() for y in line.values() if y]
    values += [mark.y for mark in marks]
    highest = max(values, default=1)
    is_log = "y" in panel.log and highest > style.LOG_FROM * min(values, default=1)
    if is_log:
        axis.set_yscale("log")
        axis.set_ylim(min(values) / 2, 3 * highest)
        axis.yaxis.set_major_formatter(style.PLAIN)
    marked = {(mark.line, mark.x): mark.y for mark in marks}
    count = len(xs) * len(panel.lines)
    for number, (name, line) in enumerate(panel.lines.items()):
        for x, y in line.items():
            place = xs.index(x) + (number - (len(panel.lines) - 1) / 2) * width
            places[name, x] = place
            if y is None:
                continue
            bar = axis.bar([place], [y], 0.92 * width, color=colors[name])
            handles.setdefault(name, bar)
            if count > ROOM_FOR_NUMBERS:
                continue
            arrow = style.ARROWS.get(getattr(y, "bound", ""), "")
            paper = marked.get((name, x), -highest)
            covered = -0.05 * highest < paper - y < 0.12 * highest  # by the marker
            axis.annotate(
                arrow + show(float(y), panel.spec),
                (place, max(paper, y) if covered else y),
                (0, 6 if covered else 2),
                textcoords="offset points",
                ha="center",
                va="bottom",
                rotation=90 if count > FEW * 3 else 0,
                fontsize=7,
            )
    for mark in marks:
        place = places[mark.line, mark.x]
        axis.plot([place], [mark.y], **style.published_marker(mark.y), zorder=5)
    axis.set_xlim(-0.6, len(xs) - 0.4)
    axis.set_xticks(range(len(xs)), ["\n".join(textwrap.wrap(show(x, ","), 18)) for x in xs])
    axis.tick_params(axis="x", length=0)
    axis.spines[["top", "right"]].set_visible(False)
    if not is_log:
        axis.set_ylim(0, 1.25 * highest)
    return handles


def _draw_stacked(axis: Axes, panel: Panel, colors: Mapping[str, str]) -> Handles:
    """Draw a bar for each x, with the numbers of all lines on one another."""
    xs = _xs(panel)
    bottoms = dict.fromkeys(xs, 0.0)
    handles: Handles = {}
    for name, line in panel.lines.items():
        heights = [line.get(x) or 0.0 for x in xs]
        handles[name] = axis.bar(
            range(len(xs)), heights, 0.7, bottom=list(bottoms.values()), color=colors[name]
        )
        bottoms = {x: bottoms[x] + height for x, height in zip(xs, heights, strict=True)}
    for place, total in enumerate(bottoms.values()):
        axis.annotate(
            style.three_digits(total),
            (place, total),
            (0, 2),
            textcoords="offset points",
            ha="center",
            fontsize=7,
        )
    axis.set_xticks(range(len(xs)), [show(x, ",") for x in xs])
    axis.tick_params(axis="x", length=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(y=0.12)
    return handles


def _draw_steps(axis: Axes, panel: Panel) -> Handles:
    """Draw each line as a lane of steps, one after another: numbers are their lengths. The lanes of
    a post or a paper are hollow."""
    scale = Normalize(1, LONG_STEP)
    names = list(panel.lines)
    for lane, line in enumerate(panel.lines.values()):
        lengths = [length for length in line.values() if length]
        start = 0.0
        for length in lengths:
            color = style.GAPS(scale(length))
            hollow = style.is_published(names[lane])
            axis.barh(
                [lane],
                [length],
                0.62,
                left=start,
                facecolor="white" if hollow else color,
                edgecolor=color if hollow else "white",
                lw=1.6 if hollow else 0.8,
            )
            start += length
        longest = max(lengths, default=0.0)
        text = f"longest {style.three_digits(longest)}"
        axis.annotate(text, (start, lane), (4, 0), textcoords="offset points", va="center")
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xlabel(panel.y)
    axis.margins(x=0.15)
    axis.spines[["top", "right", "left"]].set_visible(False)
    return {}
