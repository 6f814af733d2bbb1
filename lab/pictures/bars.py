"""Draw numbers as bars, a panel for each quantity. Read first: style.py."""

from collections.abc import Callable, Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab.pictures import style

COLUMNS = 4  # panels in a row


def plot_bars(
    panels: Mapping[str, Mapping[str, float]],
    title: str,
    file: str | Path,
    machine: Mapping[str, object] | None = None,
) -> Figure:
    """Draw a panel for each of `panels`, {its quantity: {name: number}}, up to four side by side,
    and write the picture to `file`. Shorter is not always better: the quantities say what a bar
    is."""
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    names = max(len(numbers) for numbers in panels.values())
    figure = style.new_figure(0.4 + rows * (0.6 + 0.24 * names))
    axes = figure.subplots(rows, columns, sharey="row", squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (quantity, numbers) in zip(axes.flat, panels.items(), strict=False):
        draw_bars(axis, numbers, color_of)
        axis.set_xlabel(quantity)
    return style.finish(figure, title, file, machine)


def color_of(name: str) -> str:
    """The colour of the policy with which a name ends: "chats, sarathi:256"."""
    return style.POLICY_COLORS.get(name.split(", ")[-1].split(":")[0], style.OURS)


def draw_bars(axis: Axes, numbers: Mapping[str, float], color_of: Callable[[str], str]) -> None:
    """Draw a row for each name, with a bar, and the number at the end.

    A bound is hatched. On a log axis, where no bar has a length, the numbers are dots."""
    known = [number for number in numbers.values() if number]
    is_log = max(known, default=0) > style.LOG_FROM * min(known, default=1)
    if is_log:
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter(style.PLAIN)
    for row, (name, number) in enumerate(numbers.items()):
        color = color_of(name)
        if is_log:
            axis.plot([number], [row], "o", color=color)
        else:
            hatch = "////" if style.bound_of(number) else ""
            axis.barh([row], [number], 0.72, color=color, hatch=hatch, edgecolor="white")
        axis.text(
            1,  # the right end of the panel, where no bar is
            row,
            style.short(number),
            transform=axis.get_yaxis_transform(),
            ha="right",
            va="center",
            fontsize=8,
        )
    axis.margins(x=0.4)
    axis.set_yticks(range(len(numbers)), [*numbers])
    axis.set_ylim(len(numbers) - 0.4, -0.6)
    axis.tick_params(axis="y", length=0)
    style.bare(axis)
