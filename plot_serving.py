"""Draw what runs under load did: latencies, requests and memory over time, and each run at its worst moment.

The distributions are those behind Sarathi-Serve's Figure 1b, the lanes those of its Figures 1a and 7. What is drawn is
prepared by functions that do not know matplotlib.

Read first: plot.py, and engine.py for Completion and Iteration. Read next: plot_search.py.
"""

from bisect import bisect_left, bisect_right
from math import inf

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PolyCollection
from matplotlib.colors import LogNorm, to_rgba
from matplotlib.ticker import NullFormatter, NullLocator

from metrics import percentiles
from plot import GAPS, PLAIN, PREFILL, SLO, log_scale, machine_line, plt, policy_colors

WAITING, FREE, PAGES = "#c9c9c9", "#dfe6ee", "#7f92a8"


def plot_serving(runs, machine, file, slo_s=None):
    """Draw runs of one load, {name: (completions, iterations)}, and write the picture to `file`.

    At the top: which share of the requests had their first token, and were scheduled, by a time; which share of the
    gaps between tokens was longer. Dots mark P50 and P99. Below, for each run: on the left who ran and waited
    and how many pages were free, all the time; on the right a lane for each request around the longest gap between two
    tokens, which is each run at its worst. All these windows are equally long. `machine` is the bench's description of
    it, `slo_s` the SLO of TBT in seconds. Needs at least one run, which may be empty.
    """
    colors, windows = policy_colors(runs), find_windows(runs)
    figure = plt.figure(figsize=(12, 3.9 + 2.1 * len(runs)), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=[3.5, 2.1 * len(runs)])
    panels = top.subplots(1, 3)
    _draw_latencies(panels, {name: completions for name, (completions, _) in runs.items()}, colors, slo_s)
    top.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=min(8, len(runs)),
               fontsize=9, frameon=False)

    axes = bottom.subplots(len(runs), 2, squeeze=False, width_ratios=[1, 2])
    for counts in axes[1:, 0]:
        counts.sharex(axes[0, 0])
        counts.sharey(axes[0, 0])
    bars = {name: lane_bars(*run, *windows[name]) for name, run in runs.items()}
    gaps = [seconds for name in bars for *_, kind, seconds in bars[name] if kind == "gap" and seconds > 0]
    norm = LogNorm(min(gaps, default=1e-3), max(gaps, default=1.0) * 1.001)
    for (name, run), (counts, lanes) in zip(runs.items(), axes):
        _draw_counts(counts, *over_time(*run), windows[name])
        counts.set_title(name, loc="left", fontsize=10, fontweight="bold", color=colors[name])
        lanes.set_xlim(*windows[name])
        _draw_lanes(lanes, bars[name], norm)
    axes[0, 0].set_ylim(bottom=0)
    axes[0, 0].set_xlim(left=0)
    axes[0, 1].set_title("around the longest time between tokens: waiting (grey), prefill (blue), from token to token "
                         "(green to red)", loc="left", fontsize=9)
    bottom.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper left", ncols=4, fontsize=9, frameon=False)
    for axis in axes[-1]:
        axis.set_xlabel("time since the first arrival in s")
    bar = bottom.colorbar(ScalarMappable(norm, GAPS), ax=axes[:, 1].tolist(), aspect=max(12, 14 * len(runs)), pad=0.01)
    bar.ax.yaxis.set_major_formatter(PLAIN)
    bar.ax.yaxis.set_minor_formatter(NullFormatter())
    bar.set_label("TBT in s", fontsize=9)
    figure.suptitle(f"Online serving: {machine_line(machine)}", fontsize=11)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def cumulative(values):
    """(x, share): the values that are not None, sorted, and the share of them up to each, as a curve with steps.

    It begins with the least value and a share of 0, so both arrays have one element more than there are values.
    """
    x = np.sort(np.array([value for value in values if value is not None], dtype=float))
    return np.append(x[:1], x), np.arange(len(x) + 1 if len(x) else 0) / len(x)


def run_origin(completions, iterations):
    """When a run began, in s on its clock: at its first arrival, or its first iteration."""
    return min([c.arrival for c in completions] + [iteration.start for iteration in iterations[:1]], default=0.0)


def longest_gap(completions):
    """(start, end) of the longest time between two tokens of a request, or None."""
    gaps = ((start, end) for c in completions for start, end in zip(c.token_times, c.token_times[1:]))
    return max(gaps, key=lambda gap: gap[1] - gap[0], default=None)


def find_windows(runs, gaps=3.0):
    """{name: (start, end)}, in s since the run began: `gaps` times the longest gap between tokens of all runs.

    Each window is centred on its own run's longest gap, and moved where it would begin before the run or end after it.
    A run that is shorter than that is the window; without any gap, each run is.
    """
    longest = {name: longest_gap(completions) for name, (completions, _) in runs.items()}
    length = gaps * max((gap[1] - gap[0] for gap in longest.values() if gap), default=0) or inf
    windows = {}
    for name, (completions, iterations) in runs.items():
        origin = run_origin(completions, iterations)
        end = (iterations[-1].end - origin if iterations else 0.0) or 1.0
        middle = sum(longest[name]) / 2 - origin if longest[name] else 0.0
        first = max(0.0, min(middle - length / 2, end - length))
        windows[name] = (first, min(end, first + length))
    return windows


def lane_bars(completions, iterations, start, end):
    """What requests did between `start` and `end`, in s since the run began: (request id, start, end, kind, seconds).

    The kinds are "waiting" (arrival to first chunk), "gap" (a token to the next) and "prefill" (a chunk). Start and end
    are cut to the window, `seconds` is the whole length. Requests that did nothing but wait in it are left out.
    """
    origin = run_origin(completions, iterations)
    bars, served = [], set()

    def add(request_id, first, last, kind):
        if first - origin < end and last - origin > start:
            bars.append((request_id, max(start, first - origin), min(end, last - origin), kind, last - first))
            served.add(request_id)

    for c in completions:
        times = c.token_times
        first = max(0, bisect_right(times, origin + start) - 1)
        inside = times[first : bisect_left(times, origin + end) + 1]
        for token, following in zip(inside, inside[1:]):
            add(c.request_id, token, following, "gap")
    first = bisect_right(iterations, origin + start, key=lambda iteration: iteration.end)
    for iteration in iterations[first : bisect_left(iterations, origin + end, key=lambda iteration: iteration.start)]:
        for request_id, _, is_decode in iteration.chunks:
            if not is_decode:
                add(request_id, iteration.start, iteration.end, "prefill")
    for c in completions:
        if c.request_id in served:
            add(c.request_id, c.arrival, c.scheduled, "waiting")
    return bars


def over_time(completions, iterations, columns=250):
    """(edges, running, waiting, free pages): means over `columns` equal parts of a run, of the counts at each batch.

    `edges` has columns + 1 elements, in s since the run began. A count holds until the next batch.
    """
    starts = np.array([iteration.start for iteration in iterations] + [iteration.end for iteration in iterations[-1:]])
    starts -= run_origin(completions, iterations)
    if not len(starts) or starts[0] == starts[-1]:
        return (np.linspace(0, 1, columns + 1), *np.zeros((3, columns)))
    edges = np.linspace(starts[0], starts[-1], columns + 1)
    counts = np.array([(i.running, i.waiting, i.free_pages) for i in iterations], dtype=float)
    totals = np.concatenate([np.zeros((1, 3)), np.cumsum(counts * np.diff(starts)[:, None], axis=0)])
    return edges, *(np.diff(np.interp(edges, starts, total)) / np.diff(edges) for total in totals.T)


def _draw_latencies(panels, completions, colors, slo_s):
    """The three distributions: TTFT, TBT, scheduling delay."""
    kinds = (("time to first token (TTFT) in s", lambda c: [c.ttft]),
             ("time between tokens (TBT) in s", lambda c: c.tbt),
             ("scheduling delay in s", lambda c: [c.scheduling_delay]))
    for axis, (label, values_of) in zip(panels, kinds):
        tail = axis is panels[1]  # of TBT, which is what the SLO is about
        seen = [] if slo_s is None or not tail else [slo_s]
        for name, done in completions.items():
            x, share = cumulative(value for c in done for value in values_of(c))
            axis.step(x, 1 - share if tail else share, where="post", color=colors[name], label=name, lw=1.6)
            if len(x):
                marks = percentiles(x[1:])
                axis.plot([marks["p50"], marks["p99"]], [0.5, 0.01 if tail else 0.99], "o", ms=4, color=colors[name])
            seen += x[x > 0][[0, -1]].tolist() if x.any() else []
        log_scale(axis, "x", seen)
        axis.set_xlabel(label)
        axis.grid(alpha=0.25)
    for axis in panels[::2]:
        axis.set_ylim(0, 1.03)
        axis.set_yticks([0, 0.25, 0.5, 0.75, 0.99], ["0", "25 %", "P50", "75 %", "P99"])
        axis.set_ylabel("requests, at most that long")
    panels[1].set_yscale("log")
    panels[1].set_ylim(5e-4, 1.3)
    panels[1].set_yticks([0.001, 0.01, 0.1, 0.5, 1], ["0.1 %", "1 % (P99)", "10 %", "P50", "100 %"])
    panels[1].yaxis.set_minor_locator(NullLocator())
    panels[1].set_ylabel("gaps, longer than that")
    if slo_s is not None:
        panels[1].axvline(slo_s, color=SLO, ls="--", lw=1.2)
        panels[1].text(slo_s, 1.0, f" SLO {slo_s:.3g} s", transform=panels[1].get_xaxis_transform(), va="bottom",
                       ha="center", fontsize=8, color=SLO)


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
    axis.yaxis.set_major_formatter(PLAIN)
    axis.set_ylabel("requests", fontsize=9)


def _draw_lanes(axis, bars, norm):
    """A lane for each request that is in `bars`, in the order of their ids."""
    ids = sorted({request_id for request_id, *_ in bars})
    lane = {request_id: number for number, request_id in enumerate(ids)}
    order = {"waiting": 0, "gap": 1, "prefill": 2}  # a preempted request prefills in a gap between its tokens
    bars = sorted(bars, key=lambda bar: order[bar[3]])
    few = len(ids) <= 40  # so that there is room for white between lanes, and between bars that are not narrow
    half, width = 0.42 if few else 0.5, np.diff(axis.get_xlim()).item()
    corners = [[(start, lane[i] - half), (end, lane[i] - half), (end, lane[i] + half), (start, lane[i] + half)]
               for i, start, end, *_ in bars]
    colors = GAPS(norm(np.array([seconds for *_, seconds in bars])))  # (bars, 4)
    for kind, color in (("waiting", WAITING), ("prefill", PREFILL)):
        colors[[bar[3] == kind for bar in bars]] = to_rgba(color)
    edges = [0.3 if few and end - start > width / 200 else 0 for _, start, end, *_ in bars]
    axis.add_collection(PolyCollection(corners, facecolors=colors, edgecolors="white", linewidths=edges,
                                       antialiased=few))
    axis.set_ylim(len(ids) - 0.4, -0.6)
    axis.set_yticks(*([], []) if not ids else ([0, len(ids) - 1], [ids[0], ids[-1]]))
    axis.set_ylabel("request", fontsize=9)
    if not bars:
        axis.text(0.5, 0.5, "nothing was served", transform=axis.transAxes, ha="center", va="center")
