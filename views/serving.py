"""Draw what runs under load did: latencies, requests and memory over time, each run at its worst.

The distributions are those behind Sarathi-Serve's Figure 1b, the lanes those of its Figures 1a and
7. Read first: timelines.py. Read next: search.py.
"""

from itertools import pairwise

import numpy as np
from matplotlib.ticker import NullLocator

from experiments.metrics import percentiles
from views import style
from views.timelines import draw_lanes, draw_legend, lane_bars, run_origin

FREE, PAGES = "#dfe6ee", "#7f92a8"
TAIL = {0.001: "0.1 %", 0.01: "1 % (P99)", 0.1: "10 %", 0.5: "P50", 1: "100 %"}


def plot_serving(runs, machine, file, slo_s):
    """Draw runs of one load, {name: (completions, iterations)}, and write the picture to `file`.

    At the top the distributions of TTFT, TBT and scheduling delay, with dots at P50 and P99. Below,
    for each run: who ran and waited and how many pages were free; a lane for each request, in the
    same seconds of all runs: see find_window. `slo_s` is the SLO of TBT in seconds. Needs a run.
    """
    colors, window, count = style.policy_colors(runs), find_window(runs), len(runs)
    figure = style.new_figure(4.3 + 1.65 * count)
    top, bottom = figure.subfigures(2, 1, height_ratios=[2.9, 1.4 + 1.65 * count])
    panels = top.subplots(1, 3, sharey=True)
    _draw_latencies(panels, runs, colors, slo_s)
    top.legend(*panels[0].get_legend_handles_labels(), ncols=min(5, count), **style.BELOW)
    axes = bottom.subplots(count, 2, squeeze=False, sharex="col", width_ratios=[1, 2.2])
    norm = draw_legend(bottom, axes, slo_s, "the SLO", {})
    for (name, run), (counts, lanes) in zip(runs.items(), axes):
        _draw_counts(counts, *run, window)
        counts.sharey(axes[0, 0])
        counts.set_title(style.label(name), **style.BOLD, color=colors[name])
        lanes.set_xlim(*window)
        ids = draw_lanes(lanes, lane_bars(*run, *window), norm)
        lanes.set_yticks(*([1, len(ids)], [ids[0], ids[-1]]) if ids else ([], []))
        lanes.set_ylabel("request", fontsize=9)
        longest = style.three_digits(max((gap for c in run[0] for gap in c.tbt), default=None))
        lanes.set_title(f"longest gap of the run: {longest} s", loc="right", fontsize=9)
    axes[0, 0].set(xlim=(0, None), ylim=(0, None))
    signs = axes[0, 0].get_legend_handles_labels()
    bottom.legend(*signs, ncols=4, **style.BELOW)
    for axis in axes[-1]:
        axis.set_xlabel("time since the first arrival in s")
    return style.finish(figure, f"Online serving: {style.machine_line(machine)}", file)


def cumulative(values):
    """(x, share): the values but None, sorted, and the share up to each; before it the least, 0."""
    x = np.sort(np.array([value for value in values if value is not None], dtype=float))
    return np.append(x[:1], x), np.arange(len(x) + 1 if len(x) else 0) / len(x)


def find_window(runs):
    """(start, end), in s since a run began: the longest gap between tokens of all, and as much on
    both sides of it, as far as the longest run goes. Without gaps it is that run."""
    gaps, whole = [], 0.0  # (seconds, start, end) of each
    for completions, iterations in runs.values():
        origin = run_origin(completions, iterations)
        pairs = (pair for c in completions for pair in pairwise(c.token_times))
        gaps += [(b - a, a - origin, b - origin) for a, b in pairs if b > a]
        whole = max([whole, *(iteration.end - origin for iteration in iterations[-1:])])
    seconds, first, last = max(gaps, default=(0.0, 0.0, whole or 1.0))
    return max(0.0, first - seconds), min(whole or 1.0, last + seconds)


def _draw_latencies(panels, runs, colors, slo_s):
    """The shares of TTFTs, TBTs and scheduling delays that are longer than that."""
    labels = "time to first token (TTFT)", "time between tokens (TBT)", "scheduling delay"
    kinds = lambda c: [c.ttft], lambda c: c.tbt, lambda c: [c.scheduling_delay]
    for axis, label, values_of in zip(panels, labels, kinds):
        seen = [slo_s] if axis is panels[1] else []
        for name, (completions, _) in runs.items():
            x, share = cumulative(value for c in completions for value in values_of(c))
            axis.step(x, 1 - share, where="post", color=colors[name], label=style.label(name))
            marks = percentiles(x[1:])
            axis.plot([marks["p50"], marks["p99"]], [0.5, 0.01], "o", ms=4, color=colors[name])
            seen += list(x)
        style.log_scale(axis, "x", seen)
        axis.grid(alpha=0.25)
        axis.tick_params(labelsize=9)
        axis.set(xlabel=f"{label} in s", yscale="log", ylim=(5e-4, 1.3))
    panels[0].set_ylabel("share that is longer")
    panels[0].set_yticks([*TAIL], [*TAIL.values()])
    panels[0].yaxis.set_minor_locator(NullLocator())
    style.mark_column(panels[1], slo_s, f"SLO {slo_s:.3g} s", ls="--", lw=1.2)


def _draw_counts(axis, completions, iterations, window):
    """Running, waiting and free pages over the whole run, and where the window of the lanes is."""
    origin, pages = run_origin(completions, iterations), axis.twinx()
    starts = [iteration.start - origin for iteration in iterations]
    free = [iteration.free_pages for iteration in iterations]
    pages.fill_between(starts, free, step="post", color=FREE)
    pages.set_ylim(0, 1.05 * max([1, *free]))
    pages.set_ylabel("free pages", fontsize=9, color=PAGES)
    pages.tick_params(axis="y", colors=PAGES, labelsize=8)
    axis.set_zorder(pages.get_zorder() + 1)  # the lines above the area
    axis.patch.set_visible(False)
    axis.axvspan(*window, color="#000000", alpha=0.13, lw=0, label="shown on the right")
    for word, color in (("running", "#000000"), ("waiting", "#8e2aa8")):
        counts = [getattr(iteration, word) for iteration in iterations]
        axis.step(starts, counts, where="post", color=color, lw=1.1, label=word)
    axis.fill_between([], [], color=FREE, label="free pages")
    axis.set_yscale("symlog", linthresh=1, linscale=0.4)
    axis.yaxis.set_major_formatter(style.PLAIN)
    axis.set_ylabel("requests", fontsize=9)
