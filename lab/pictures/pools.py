"""A picture of chunks beside two pools: goodput by targets and by P:D ratio, and what a link costs.

Read first: style.py, lab/commands/pools.py. Read next: timelines.py."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab.pictures import style


class Goodputs(NamedTuple):
    """Goodput per GPU, in requests per second."""

    chunks: float
    pools: Mapping[str, float]  # by split


class SecondToken(NamedTuple):
    """Seconds from the first token to the second."""

    at_end: float
    layer_wise: float
    no_link: float


def plot_pools(
    targets: Mapping[str, Goodputs],
    ratios: Mapping[str, Goodputs],
    links: Mapping[str, SecondToken],
    machine: Mapping[str, object],
    file: str | Path,
) -> Figure:
    """Draw the sweeps of `bench.py pools`, and write the picture to `file`.

    The links are those of a model whose keys and values are many bytes."""
    figure = style.new_figure(8.5)
    top, middle, bottom = figure.subplots(3, 1, height_ratios=[4, 2.4, 2.4])
    _draw_goodputs(top, targets)
    top.set_title("chat, by targets", **style.BOLD)
    _draw_goodputs(middle, ratios)
    middle.set_title("by prompt + output tokens", **style.BOLD)
    _draw_links(bottom, links)
    handles, names = top.get_legend_handles_labels()
    figure.legend(handles, names, ncols=len(names), **style.LEGEND_BELOW)
    return style.finish(figure, "Chunks or two pools", file, machine)


def _draw_goodputs(axis: Axes, rows: Mapping[str, Goodputs]) -> None:
    """Draw a group of bars for each row: chunks, and each split."""
    splits = list(next(iter(rows.values())).pools)
    names = ["chunks", *(f"pools {split}" for split in splits)]
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        values = [row.pools[splits[i - 1]] if i else row.chunks for row in rows.values()]
        places = [number + (i - (len(names) - 1) / 2) * width for number in range(len(rows))]
        axis.bar(places, values, width, label=name, color=style.LINE_COLORS[i])
    axis.set_xticks(range(len(rows)), [name.replace(", ", "\n") for name in rows], fontsize=7)
    axis.set_ylabel("goodput\nper second and GPU")
    axis.grid(axis="y")
    axis.set_axisbelow(True)


def _draw_links(axis: Axes, links: Mapping[str, SecondToken]) -> None:
    """Draw the time to the second token over each link, sent at the end and layer by layer."""
    for shift, label, color, values in (
        (-0.2, "sent at the end", style.WAITING, [row.at_end for row in links.values()]),
        (0.2, "layer by layer", style.DECODE, [row.layer_wise for row in links.values()]),
    ):
        places = [number + shift for number in range(len(links))]
        bars = axis.bar(places, [1e3 * value for value in values], 0.4, label=label, color=color)
        axis.bar_label(bars, fmt="{:.0f}", fontsize=7)
    (no_link,) = {row.no_link for row in links.values()}
    axis.axhline(1e3 * no_link, **style.LIMIT_LINE)
    axis.set_yscale("log")
    axis.margins(y=0.2)
    axis.set_xticks(range(len(links)), list(links))
    axis.set_ylabel("ms to the second token")
    axis.set_title("llama-13b, prompts of 1,500 tokens (dashed: without a link)", **style.BOLD)
    axis.legend(loc="upper left")
