"""Draw what each request did when: a lane for each, as in Sarathi-Serve's Figures 1 and 7; what
runs under load did: latencies (Figure 1b); and which load is too much (Figures 10 to 12).

A lane has a bar for each prefill chunk and, from token to token, one coloured by the time between
them: a generation stall is a long red bar. Read first: style.py, engine.py. Next: pipelines.py."""

from itertools import pairwise

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PolyCollection
from matplotlib.colors import LogNorm
from matplotlib.patches import Patch

from lab.measure.metrics import MAX_DELAY_S, percentiles
from views import style
from views.style import DECODE, GAPS, HYBRID, PREFILL

SIGNS = {"prefill": PREFILL, "waiting": style.WAITING}  # of lanes
BATCHES = {"hybrid batch": HYBRID, "decodes only": DECODE}


def plot_timelines(runs, machine, file, anchor_s):
    """Draw {policy: (completions, iterations)} on one time axis, and write the picture to `file`:
    for each policy the lanes of its requests, and the tokens of each iteration. A gap between
    tokens of more than `anchor_s`, that is ten decode iterations, is red."""
    figure = style.new_figure(1.85 * len(runs) + 1.1)
    axes = figure.subplots(2 * len(runs), 1, sharex=True, height_ratios=[2, 1] * len(runs))
    draw_runs(figure, axes, axes[::2], runs, anchor_s, "10 decode iterations", BATCHES)
    for (_, iterations), tokens in zip(runs.values(), axes[1::2]):
        starts, widths = [i.start for i in iterations], [i.end - i.start for i in iterations]
        counts = [(i.prefill_tokens, i.decode_tokens) for i in iterations]
        colors = [PREFILL if not d else HYBRID if p else DECODE for p, d in counts]
        sizes = [prefills + decodes for prefills, decodes in counts]
        # with an edge, or a batch of few tokens is not seen
        tokens.bar(starts, sizes, widths, align="edge", color=colors, edgecolor=colors, lw=0.8)
        most = max(sizes, default=1)
        tokens.set(ylim=(-0.02 * most, 1.1 * most), ylabel="tokens")
        tokens.set_yticks([0, most], ["0", f"{most:,}"])
        tokens.spines[["top", "right", "bottom"]].set_visible(False)
    axes[-1].set_xlabel("time in s (each policy on its own clock)")
    return style.finish(figure, style.TIMELINES, file, machine)


def lane_bars(completions, iterations):
    """[(request id, start, end, kind)] in s, in the order in which they are drawn: "waiting", from
    arrival to first chunk; "gap", from token to token; "prefill", in a gap after a preemption."""
    late = [c for c in completions if c.scheduled is not None and c.scheduled > c.arrival]
    bars = [(c.request_id, c.arrival, c.scheduled, "waiting") for c in late]
    bars += [(c.request_id, *gap, "gap") for c in completions for gap in pairwise(c.token_times)]
    chunks = ((i, *chunk) for i in iterations for chunk in i.chunks)
    chunks = [(who, i.start, i.end, "prefill") for i, who, *_, decodes in chunks if not decodes]
    return bars + chunks


def draw_runs(figure, axes, lanes, runs, anchor_s, anchor, more, window=None):
    """Draw the requests of each run in one of `lanes`, some of the `axes`, in a window of seconds,
    or all; above `axes` what their colours mean, and those of `more`, {text: colour}. Gaps are red
    above `anchor_s` seconds, that is `anchor`, and green from a tenth down."""
    bars, colors = [lane_bars(*run) for run in runs.values()], style.policy_colors(runs)
    norm = LogNorm(anchor_s / 10, anchor_s)
    bar = figure.colorbar(ScalarMappable(norm, GAPS), ax=axes, **style.GAP_SCALE)
    bar.minorticks_off()
    ticks = [share * anchor_s for share in (0.1, 0.2, 0.5, 1)]
    bar.set_ticks(ticks, labels=map(style.three_digits, ticks))
    bar.set_label(f"time between tokens in s; red: more than {anchor}")
    handles = [Patch(color=color, label=text) for text, color in (SIGNS | more).items()]
    bar.ax.legend(handles=handles, loc="center right", bbox_to_anchor=(-0.03, 1.5))
    axes[0].set_xlim(window or (0, 1.02 * max((b[2] for its in bars for b in its), default=1)))
    for name, axis, its in zip(runs, lanes, bars):
        draw_lanes(axis, its, norm)
        axis.set_title(name, **style.BOLD, color=colors[name])


def draw_lanes(axis, bars, norm):
    """Draw a lane for each request that does more than wait while `axis` shows it, the first on
    top, and say how long the longest gap of all `bars` is."""
    left, right = axis.get_xlim()
    seen = [bar for bar in bars if bar[1] < right and bar[2] > left]
    ids = sorted({request_id for request_id, *_, kind in seen if kind != "waiting"})
    lane, few = {request_id: number for number, request_id in enumerate(ids)}, len(ids) <= 40
    half = 0.42 if few else 0.5  # room for white between lanes, and between bars that are wide
    corners, colors, edges = [], [], []
    for request_id, start, end, kind in (bar for bar in seen if bar[0] in lane):
        low, high = lane[request_id] - half, lane[request_id] + half
        corners.append([(start, low), (end, low), (end, high), (start, high)])
        colors.append(SIGNS.get(kind) or GAPS(norm(max(end - start, norm.vmin))))
        edges.append(0.3 * (few and end - start > (right - left) / 200))
    look = {"edgecolors": "white", "linewidths": edges, "antialiased": few}
    axis.add_collection(PolyCollection(corners, facecolors=colors, **look))
    every = 1 + len(ids) // 5
    axis.set_yticks(range(len(ids))[::every], ids[::every])
    axis.set(ylim=(len(ids) - 0.4, -0.6), ylabel="request")
    longest = max((end - start for _, start, end, kind in bars if kind == "gap"), default=None)
    axis.set_title(f"longest time between tokens: {style.three_digits(longest)} s", loc="right")


def plot_serving(runs, machine, file, slo_s):
    """Draw {name: (completions, iterations)} of one load, at least one, and write the picture to
    `file`: latencies, with dots at P50 and P99, and lanes around the longest gap between tokens."""
    colors, count = style.policy_colors(runs), len(runs)
    figure = style.new_figure(4.3 + 1.65 * count)
    top, bottom = figure.subfigures(2, 1, height_ratios=[2.9, 1.4 + 1.65 * count])
    panels = top.subplots(1, 3, sharey=True)
    for axis, (field, latency) in zip(panels, style.STYLE["latencies"].items()):
        for name, (completions, _) in runs.items():
            found = [s for c in completions for s in np.atleast_1d(getattr(c, field))]
            x = [seconds for seconds in found if seconds is not None]
            if x:
                marks, look = percentiles(x), {"color": colors[name]}
                axis.ecdf(x, complementary=True, label=name, **look)
                axis.plot([marks["p50"], marks["p99"]], [0.5, 0.01], "o", ms=4, **look)
        style.log_scale("x", axis)
        axis.set(xlabel=f"{latency} in s", yscale="log", ylim=(5e-4, 1.3))
    panels[1].axvline(slo_s, **style.LIMIT)
    panels[1].set_title(f"dashed: SLO {slo_s:.3g} s")
    panels[0].set(**style.TAIL)
    panels[0].set_yticks([], minor=True)
    top.legend(*panels[0].get_legend_handles_labels(), ncols=min(5, count), **style.BELOW)
    axes = bottom.subplots(count, 1, squeeze=False, sharex=True)[:, 0]
    gaps = [gap for run in runs.values() for c in run[0] for gap in pairwise(c.token_times)]
    start, end = max(gaps, key=lambda gap: gap[1] - gap[0], default=(0.0, 0.0))
    window = (max(0.0, 2 * start - end), 2 * end - start) if end > start else None
    draw_runs(bottom, axes, axes, runs, slo_s, "the SLO", {}, window)
    axes[-1].set_xlabel("time in s, around the longest gap between tokens")
    return style.finish(figure, style.SERVING, file, machine)


def plot_capacity(results, machine, file, slo_s):
    """Draw {name: what run.found_so_far says} and write the picture to `file`: the capacities, and
    both latencies against the rate, with their limits. What was not met is hollow."""
    colors, height = style.policy_colors(results), 1.1 + 0.3 * len(results)
    figure = style.new_figure(height + 3.1)
    top, bottom = figure.subfigures(2, 1, height_ratios=[height, 3.1])
    bars, found = top.subplots(), [its["capacity_qps"] for its in results.values()]
    names = [name + " (busy)" * its["busy"] for name, its in results.items()]
    drawn = bars.barh(names, found, 0.7, color=[*colors.values()])
    bars.bar_label(drawn, map(style.three_digits, found), padding=4)
    bars.margins(x=0.2)
    bars.set(ylim=(len(results) - 0.4, -0.6), xlabel="capacity per second", xlim=(0, None))
    bars.spines[["top", "right"]].set_visible(False)
    curves = [("p99_tbt_s", "P99 time between tokens in s", slo_s, "SLO")]
    curves += [("p50_delay_s", "median scheduling delay in s", MAX_DELAY_S, "limit")]
    for axis, (key, title, limit, word) in zip(bottom.subplots(1, 2), curves):
        for name, result in results.items():
            last = {point["qps"]: point for point in result["points"]}  # its last run is a rate's
            for met, look in ((True, {"ls": "-"}), (False, {"ls": "", "mfc": "white"})):
                its = sorted((q, p[key]) for q, p in last.items() if p["met"] == met)
                x, y = ([pair[i] for pair in its if pair[1] is not None] for i in (0, 1))
                axis.plot(x, y, marker="o", ms=5, lw=1.4, color=colors[name], **look)
        axis.axhline(limit, **style.LIMIT)
        style.log_scale("xy", axis)
        axis.set_title(f"{title} (dashed: {word} {limit:.3g} s)", loc="left")
        axis.set_xlabel("load per second (hollow: not met)")
    return style.finish(figure, style.CAPACITY, file, machine)
