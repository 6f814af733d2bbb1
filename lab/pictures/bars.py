"""Draw numbers as bars, a panel for each quantity: those of several policies, or ours with those of
a paper beside them. Read first: style.py."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from cli.tables import show
from lab.pictures import style

MOST_NUMBERS = 24  # up to so many bars have their numbers on them


class Beside(NamedTuple):
    """One of our numbers and that of a paper; None if there is none."""

    ours: float | None
    paper: float | None


Panels = Mapping[str, Mapping[str, Beside]]  # {label of the axis: {name of the row: numbers}}


def plot_bars(panels: Mapping[str, Mapping[str, float]], title: str, file: str | Path) -> Figure:
    """Draw a panel for each of `panels`, {its quantity: {name: number}}, side by side, and write
    the picture to `file`. Shorter is not always better: the quantities say what a bar is."""
    ours = {
        quantity: {name: Beside(number, None) for name, number in numbers.items()}
        for quantity, numbers in panels.items()
    }
    columns = len(panels)
    figure = style.new_figure(0.4 + sum(heights_of(ours, columns)))
    draw_beside_published(figure, ours, "", columns)
    return style.finish(figure, title, file)


def plot_beside_published(
    panels: Panels,
    title: str,
    file: str | Path,
    machine: Mapping[str, object] | None = None,
    ours: str = "simulated",
) -> Figure:
    """Draw our numbers as bars, and a paper's as hollow diamonds on them, and write the picture to
    `file`. Names stand at the left; panels with the same ones stand side by side."""
    rows = {tuple(numbers) for numbers in panels.values()}
    columns = min(2, len(panels)) if len(rows) == 1 else 1
    figure = style.new_figure(0.9 + sum(heights_of(panels, columns)))
    draw_beside_published(figure, panels, ours, columns)
    return style.finish(figure, title, file, machine)


def heights_of(panels: Panels, columns: int = 1) -> list[float]:
    """The inches that each row of panels needs."""
    return [0.6 + 0.24 * len(numbers) for numbers in list(panels.values())[::columns]]


def draw_beside_published(
    figure: FigureBase, panels: Panels, ours: str = "here", columns: int = 1
) -> None:
    """Draw the panels in so many columns. The legend calls our numbers `ours`; "": no legend."""
    heights = heights_of(panels, columns)
    axes = figure.subplots(
        len(heights),
        columns,
        sharey="row",
        squeeze=False,
        height_ratios=heights,
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (quantity, numbers) in zip(axes.flat, panels.items(), strict=False):
        lines = {"": {name: pair.ours for name, pair in numbers.items()}}
        published = {("", name): pair.paper for name, pair in numbers.items() if pair.paper}
        draw_bars(axis, lines, published, lambda _, name: color_of(name))
        axis.set_xlabel(quantity)
    if ours:
        handles = [Patch(color=style.OURS), Line2D([], [], **style.PUBLISHED)]
        figure.legend(
            handles,
            [ours, "published"],
            ncols=2,
            **style.LEGEND_BELOW,
        )


def color_of(name: str) -> str:
    """The colour of the policy with which a name ends: "chats, sarathi:256"."""
    return style.POLICY_COLORS.get(name.split(", ")[-1].split(":")[0], style.OURS)


def draw_bars(
    axis: Axes,
    lines: Mapping[str, Mapping[Any, float | None]],
    published: Mapping[tuple[str, Any], float],
    color_of: Callable[[str, Any], str],
    spec: str = "",
) -> None:
    """Draw a row for each x of `lines`, {name: {x: number}}, with a bar for each name, and the
    numbers at the end: ours, and that of `published`, {(name, x): number}.

    A bound is hatched. On a log axis, where no bar has a length, ours are dots."""
    xs = list(dict.fromkeys(x for line in lines.values() for x in line))
    values = [y for line in lines.values() for y in line.values() if y] + [*published.values()]
    if max(values, default=0) > style.LOG_FROM * min(values, default=1):
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter(style.PLAIN)
    height = 0.8 / len(lines)
    for number, (name, line) in enumerate(lines.items()):
        for x, y in line.items():
            row = xs.index(x) + (number - (len(lines) - 1) / 2) * height
            bar_style: dict[str, Any] = {"color": color_of(name, x), "label": name}
            texts: list[str] = []
            if y is not None:
                texts.append(style.short(y, spec))
            if y is not None and axis.get_xscale() == "log":
                axis.plot([y], [row], "o", **bar_style)
            elif y is not None:
                hatch = "////" if style.bound_of(y) else ""
                axis.barh(
                    [row],
                    [y],
                    0.9 * height,
                    **bar_style,
                    hatch=hatch,
                    edgecolor="white",
                )
            paper = published.get((name, x))
            if paper is not None:
                texts.append(f"◇{style.short(paper, spec)}")
                marker = style.published_marker(paper)
                axis.plot([paper], [row], **marker, zorder=5)
            if len(xs) * len(lines) <= MOST_NUMBERS:
                axis.text(
                    1,  # the right end of the panel, where no bar is
                    row,
                    " ".join(texts),
                    transform=axis.get_yaxis_transform(),
                    ha="right",
                    va="center",
                    fontsize=8,
                )
    axis.margins(x=0.4)
    axis.set_yticks(range(len(xs)), [show(x, ",") for x in xs])
    axis.set_ylim(len(xs) - 0.4, -0.6)
    axis.tick_params(axis="y", length=0)
    style.bare(axis)
