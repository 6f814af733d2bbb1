"""Pictures of numbers: a table as bars, and the searches for a capacity. Read first: style.py."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab.measure.metrics import MAX_DELAY_S
from lab.pictures import style
from policies.cards import CARDS

COLUMNS = 4  # panels in a row


def plot_table(panels: Mapping[str, Mapping[str, float]], title: str, file: str | Path) -> Figure:
    """Draw a panel of bars for each of `panels`, {its quantity: {name: number}}, up to four side by
    side, and write the picture to `file`."""
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    names = max(len(numbers) for numbers in panels.values())
    figure = style.new_figure(0.4 + rows * (0.6 + 0.24 * names))
    axes = list(figure.subplots(rows, columns, sharey="row", squeeze=False).flat)
    for axis, (quantity, numbers) in zip(axes, panels.items(), strict=False):
        draw_bars(axis, numbers)
        axis.set_xlabel(quantity)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    return style.finish(figure, title, file)


def draw_bars(axis: Axes, numbers: Mapping[str, float]) -> None:
    """Draw a row for each name, with a bar, and the number at the end."""
    for row, (name, number) in enumerate(numbers.items()):
        policy = name.split(", ")[-1].split(":")[0]  # of "chats, sarathi:256"
        color = CARDS[policy].color if policy in CARDS else style.OURS
        axis.barh(row, number, 0.72, color=color)
        axis.text(
            1,  # the right end of the panel, where no bar is
            row,
            style.three_digits(number),
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


def plot_capacities(
    results: Mapping[str, Mapping[str, Any]],
    machine: Mapping[str, object],
    file: str | Path,
    slo_s: float,
) -> Figure:
    """Draw the searches for a capacity, by policy, and write the picture to `file`.

    It shows the capacities, and two latencies against the rate with their limits. Points that did
    not meet them are hollow. A result is that of lab.commands.serve_run.search_json."""
    heights = [1.1 + 0.3 * len(results), 3.1]
    figure = style.new_figure(sum(heights))
    top, bottom = style.parts_of(figure, heights)
    bars = top.subplots()
    draw_bars(bars, {name: result["capacity_qps"] for name, result in results.items()})
    bars.set_xlabel("capacity in requests per second")
    panels = {
        "p99_tbt_s": ("P99 time between tokens in s", slo_s),
        "p50_delay_s": ("median scheduling delay in s", MAX_DELAY_S),
    }
    for axis, (key, (latency, limit_s)) in zip(bottom.subplots(1, 2), panels.items(), strict=True):
        for name, color in style.policy_colors(results).items():
            points = [point for point in results[name]["points"] if point[key] is not None]
            points.sort(key=lambda point: point["qps"])
            for met, line in {True: "-o", False: "o"}.items():
                chosen = [point for point in points if point["met"] == met]
                axis.plot(
                    [point["qps"] for point in chosen],
                    [point[key] for point in chosen],
                    line,
                    color=color,
                    mfc=color if met else "white",
                )
        axis.axhline(limit_s, **style.LIMIT_LINE)
        style.log_scale("xy", axis)
        axis.set_title(f"{latency} (dashed: {limit_s:.3g})", loc="left")
        axis.set_xlabel("requests per second (hollow: not met)")
    title = "The highest rate that meets the SLO, and the latencies against the load"
    return style.finish(figure, title, file, machine)
