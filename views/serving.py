"""Draw what runs under load did: latencies, requests and memory over time, each run at its worst.

The distributions are those behind Sarathi-Serve's Figure 1b, the lanes those of its Figures 1a and
7. Read first: timelines.py. Read next: search.py.
"""

from itertools import pairwise
from math import inf

import numpy as np
from matplotlib.ticker import NullLocator

from experiments.metrics import percentiles
from views import style
from views.timelines import draw_lanes, lane_bars, run_origin, scale_colors

FREE, PAGES = "#dfe6ee", "#7f92a8"
LANES = "waiting (grey), prefill (blue), from token to token (green to red)"
SHARES = {0: "0", 0.25: "25 %", 0.5: "P50", 0.75: "75 %", 0.99: "P99"}
TAIL = {0.001: "0.1 %", 0.01: "1 % (P99)", 0.1: "10 %", 0.5: "P50", 1: "100 %"}


def plot_serving(runs, machine, file, slo_s=None):
    """Draw runs of one load, {name: (completions, iterations)}, and write the picture to `file`.

    At the top the distributions of TTFT, TBT and scheduling delay, with dots at P50 and P99. Below,
    for each run: on the left who ran and waited and how many pages were free; on the right a lane
    for each request around the longest gap between two tokens, in windows that are equally long.
    `slo_s` is the SLO of TBT in seconds. Needs at least one run, which may be empty.
    """
    colors, windows, count = style.policy_colors(runs), find_windows(runs), len(runs)
    figure = style.new_figure(12, 3.9 + 2.1 * count)
    top, bottom = figure.subfigures(2, 1, height_ratios=[3.5, 2.1 * count])
    panels = top.subplots(1, 3)
    _draw_latencies(panels, runs, colors, slo_s)
    top.legend(*panels[0].get_legend_handles_labels(), ncols=min(8, count), **style.BELOW)
    axes = bottom.subplots(count, 2, squeeze=False, width_ratios=[1, 2])
    bars = {name: lane_bars(*run, *windows[name]) for name, run in runs.items()}
    norm = scale_colors(bottom, axes[:, 1], bars.values(), "TBT in s", aspect=max(12, 14 * count))
    for counts in axes[1:, 0]:
        counts.sharex(axes[0, 0])
        counts.sharey(axes[0, 0])
    for (name, run), (counts, lanes) in zip(runs.items(), axes):
        _draw_counts(counts, *over_time(*run), windows[name])
        counts.set_title(name, **style.BOLD, color=colors[name])
        lanes.set_xlim(*windows[name])
        ids = draw_lanes(lanes, bars[name], norm)
        lanes.set_yticks(*([1, len(ids)], [ids[0], ids[-1]]) if ids else ([], []))
        lanes.set_ylabel("request", fontsize=9)
        if not ids:
            lanes.annotate("nothing was served", (0.5, 0.5), xycoords="axes fraction", ha="center")
    axes[0, 0].set(xlim=(0, None), ylim=(0, None))
    axes[0, 1].set_title(f"around the longest time between tokens: {LANES}", loc="left", fontsize=9)
    signs = axes[0, 0].get_legend_handles_labels()
    bottom.legend(*signs, loc="outside upper left", ncols=4, **style.BARE)
    for axis in axes[-1]:
        axis.set_xlabel("time since the first arrival in s")
    return style.finish(figure, f"Online serving: {style.machine_line(machine)}", file)


def cumulative(values):
    """(x, share): the values but None, sorted, and the share up to each; before it the least, 0."""
    x = np.sort(np.array([value for value in values if value is not None], dtype=float))
    return np.append(x[:1], x), np.arange(len(x) + 1 if len(x) else 0) / len(x)


def find_windows(runs, gaps=3.0):
    """{name: (start, end)}, in s since the run began: `gaps` times the longest gap of all runs.

    Each window is centred on its own run's longest gap, and moved where it would begin before the
    run or end after it. A shorter run is the window; without any gap, each run is.
    """
    longest, windows = {}, {}  # name -> (seconds, start, end) of the longest gap
    for name, (completions, _) in runs.items():
        pairs = (pair for c in completions for pair in pairwise(c.token_times))
        longest[name] = max(((b - a, a, b) for a, b in pairs), default=(0.0, 0.0, 0.0))
    length = gaps * max(longest.values(), default=(0.0,))[0] or inf
    for name, (completions, iterations) in runs.items():
        origin = run_origin(completions, iterations)
        end = (iterations[-1].end - origin if iterations else 0.0) or 1.0
        middle = sum(longest[name][1:]) / 2 - origin
        first = max(0.0, min(middle - length / 2, end - length))
        windows[name] = (first, min(end, first + length))
    return windows


def over_time(completions, iterations, columns=250):
    """(edges in s, running, waiting, free pages): means over equal parts of a run, by time."""
    starts = np.array([i.start for i in iterations] + [i.end for i in iterations[-1:]])
    starts -= run_origin(completions, iterations)
    if not len(starts) or starts[0] == starts[-1]:
        return (np.linspace(0, 1, columns + 1), *np.zeros((3, columns)))
    edges = np.linspace(starts[0], starts[-1], columns + 1)
    counts = np.array([(i.running, i.waiting, i.free_pages) for i in iterations], dtype=float)
    sums = np.cumsum(counts * np.diff(starts)[:, None], axis=0)
    totals = np.vstack([np.zeros(3), sums])  # up to each start
    return edges, *(np.diff(np.interp(edges, starts, t)) / np.diff(edges) for t in totals.T)


def _draw_latencies(panels, runs, colors, slo_s):
    """The three distributions: TTFT, TBT, scheduling delay."""
    labels = "time to first token (TTFT)", "time between tokens (TBT)", "scheduling delay"
    kinds = lambda c: [c.ttft], lambda c: c.tbt, lambda c: [c.scheduling_delay]
    middle = panels[1]  # the tail of TBT, which is what the SLO is about
    for axis, label, values_of in zip(panels, labels, kinds):
        seen = [slo_s] if axis is middle else []
        for name, (completions, _) in runs.items():
            x, share = cumulative(value for c in completions for value in values_of(c))
            y, p99 = (1 - share, 0.01) if axis is middle else (share, 0.99)
            axis.step(x, y, where="post", color=colors[name], label=name, lw=1.6)
            marks = percentiles(x[1:])
            axis.plot([marks["p50"], marks["p99"]], [0.5, p99], "o", ms=4, color=colors[name])
            seen += list(x)
        style.log_scale(axis, "x", seen)
        axis.grid(alpha=0.25)
        axis.set(xlabel=f"{label} in s", ylim=(0, 1.03), ylabel="requests, at most that long")
        axis.set_yticks([*SHARES], [*SHARES.values()])
    middle.set(yscale="log", ylim=(5e-4, 1.3), ylabel="gaps, longer than that")
    middle.set_yticks([*TAIL], [*TAIL.values()])
    middle.yaxis.set_minor_locator(NullLocator())
    style.mark_column(middle, slo_s, f"SLO {slo_s:.3g} s" if slo_s else "", ls="--", lw=1.2)


def _draw_counts(axis, edges, running, waiting, free, window):
    """Running, waiting and free pages over the whole run, and where the window of the lanes is."""
    pages = axis.twinx()
    pages.stairs(free, edges, fill=True, color=FREE)
    pages.set_ylim(0, 1.05 * max(1, free.max()))
    pages.set_ylabel("free pages", fontsize=9, color=PAGES)
    pages.tick_params(axis="y", colors=PAGES, labelsize=8)
    axis.set_zorder(pages.get_zorder() + 1)  # the lines above the area
    axis.patch.set_visible(False)
    axis.axvspan(*window, color="#000000", alpha=0.13, lw=0, label="shown on the right")
    axis.stairs(running, edges, baseline=None, color="#000000", lw=1.1, label="running")
    axis.stairs(waiting, edges, baseline=None, color="#8e2aa8", lw=1.1, label="waiting")
    axis.fill_between([], [], color=FREE, label="free pages")
    axis.set_yscale("symlog", linthresh=1, linscale=0.4)
    axis.yaxis.set_major_formatter(style.PLAIN)
    axis.set_ylabel("requests", fontsize=9)
