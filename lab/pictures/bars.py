"""Draw numbers as bars, a panel for each quantity: those of several policies, or ours with those of
a paper beside them. Read first: style.py."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from lab.pictures import style


def plot_bars(panels: Mapping[str, Mapping[str, float]], title: str, file: str | Path) -> Figure:
    """Draw a panel for each of `panels`, {its title: {name: number}}, and write the picture to
    `file`. All panels have the same names, which stand at the left. Shorter is not always better:
    the titles say what a bar is."""
    names = list(next(iter(panels.values())))
    figure = style.new_figure(0.8 + 0.22 * len(names))
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (quantity, numbers), color in zip(
        axes, panels.items(), style.LINE_COLORS, strict=False
    ):
        bars = axis.barh(names, [numbers[name] for name in names], color=color, height=0.7)
        labels = [_show(numbers[name]) for name in names]
        axis.bar_label(bars, labels, padding=2, fontsize=8)
        axis.margins(x=0.25)
        axis.set_title(quantity)
        axis.set_xticks([])
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        axis.tick_params(left=False)
    axes[0].invert_yaxis()
    return style.finish(figure, title, file)


class Beside(NamedTuple):
    """One of our numbers and that of a paper; None if there is none."""

    ours: float | None
    paper: float | None


def height_of(numbers: Mapping[str, Beside]) -> float:
    """The inches that `draw_beside_published` needs for a panel."""
    return 0.9 + 0.24 * len(numbers)


def draw_beside_published(
    figure: FigureBase, panels: Mapping[str, Mapping[str, Beside]], ours: str = "here"
) -> None:
    """Draw our numbers as bars and a paper's hollow on them, a panel below another for each of
    `panels`, {its unit: {name: Beside}}. The legend calls ours so."""
    heights = [height_of(numbers) for numbers in panels.values()]
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, (unit, numbers) in zip(axes, panels.items(), strict=True):
        _draw_beside_published(axis, numbers, room=0.07)
        axis.invert_yaxis()
        axis.set_xlabel(unit)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
    _add_legend(figure, ours)


def plot_beside_published(
    panels: Mapping[str, Mapping[str, Beside]],
    title: str,
    file: str | Path,
    machine: Mapping[str, object] | None = None,
    ours: str = "simulated",
) -> Figure:
    """Draw our numbers as bars, and a paper's as hollow diamonds on them, and write the picture to
    `file`.

    There is a panel for each of `panels`, {its title: {name: Beside}}. All have the same names,
    which stand at the left. The bar of a name that ends with a policy has the policy's colour. A
    bound, such as "at least 1.2", is hatched."""
    names = list(next(iter(panels.values())))
    figure = style.new_figure(1.3 + 0.26 * len(names))
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (quantity, numbers) in zip(axes, panels.items(), strict=True):
        _draw_beside_published(axis, numbers)
        axis.set_title(quantity)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
    axes[0].invert_yaxis()
    _add_legend(figure, ours)
    return style.finish(figure, title, file, machine)


def _add_legend(figure: FigureBase, ours: str) -> None:
    handles = [
        Patch(color=style.OURS, label=ours),
        Line2D([], [], label="published", **style.PUBLISHED),
    ]
    figure.legend(handles=handles, ncols=2, **style.LEGEND_BELOW)


def _draw_beside_published(axis: Axes, numbers: Mapping[str, Beside], room: float = 0.25) -> None:
    """Draw one panel. A number beside a bar takes `room`, a share of its width."""
    values = [value for pair in numbers.values() for value in pair if value]
    if max(values, default=0) > style.LOG_FROM * min(values, default=1):
        axis.set_xscale("log")
        axis.set_xlim(min(values) / 2, 3 * max(values))
        axis.xaxis.set_major_formatter(style.PLAIN)
    else:
        axis.set_xlim(0, 1.25 * max(values, default=1))
    for row, (name, pair) in enumerate(numbers.items()):
        policy = name.split(", ")[-1].split(":")[0]
        color = style.POLICY_COLORS.get(policy, style.OURS)
        is_bound = bool(getattr(pair.ours, "bound", ""))
        (bar,) = axis.barh([row], [pair.ours or 0], height=0.7, color=color)
        if is_bound:
            bar.set(hatch="////", edgecolor="white")
        if pair.ours is not None:
            end = pair.ours
            offset = 2
            width = axis.get_xlim()[1]
            if pair.paper is not None and -0.05 * width < pair.paper - pair.ours < room * width:
                end = max(pair.ours, pair.paper)  # the marker would cover the number
                offset = 7
            axis.annotate(
                style.three_digits(pair.ours),
                (end, row),
                (offset, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        if pair.paper is not None:
            axis.plot([pair.paper], [row], **style.published_marker(pair.paper))
    axis.set_yticks(range(len(numbers)), list(numbers))


def _show(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else style.three_digits(number)
