"""Draw what runs under load did: latencies (Sarathi-Serve, Figure 1b), requests and memory over
time, each run at its worst (Figures 1a and 7). Read first: timelines.py. Read next: search.py.
"""

from experiments.metrics import percentiles
from views import style
from views.timelines import draw_lanes, draw_legend, lane_bars

COUNTS = {"free_pages": "#9fb0c4", "running": "#000000", "waiting": "#8e2aa8"}
TAIL = {0.001: "0.1 %", 0.01: "1 % (P99)", 0.1: "10 %", 0.5: "P50", 1: "100 %"}
LATENCIES = {
    "time to first token (TTFT)": lambda c: [c.ttft],
    "time between tokens (TBT)": lambda c: c.tbt,
    "scheduling delay": lambda c: [c.scheduling_delay],
}


def plot_serving(runs, machine, file, slo_s):
    """Draw runs of one load, {name: (completions, iterations)}, and write the picture to `file`. At
    the top the latencies, with dots at P50 and P99. Below, for each run: who ran and waited and how
    many pages were free; a lane for each request, in the same seconds of all runs: see find_window.
    `slo_s` is the SLO of TBT in seconds. Needs a run."""
    bars = {name: lane_bars(*run) for name, run in runs.items()}
    colors, window, count = style.policy_colors(runs), find_window(bars), len(runs)
    figure = style.new_figure(4.3 + 1.65 * count)
    top, bottom = figure.subfigures(2, 1, height_ratios=[2.9, 1.4 + 1.65 * count])
    panels = top.subplots(1, 3, sharey=True)
    for axis, (latency, values_of) in zip(panels, LATENCIES.items()):
        for name, (completions, _) in runs.items():
            x = [its for c in completions for its in values_of(c) if its is not None]
            if x:
                marks, look = percentiles(x), {"color": colors[name]}
                axis.ecdf(x, complementary=True, label=style.label(name), **look)
                axis.plot([marks["p50"], marks["p99"]], [0.5, 0.01], "o", ms=4, **look)
        style.log_scale("x", axis)
        axis.set(xlabel=f"{latency} in s", yscale="log", ylim=(5e-4, 1.3))
    panels[1].axvline(slo_s, **style.LIMIT)
    panels[1].set_title(f"dashed: SLO {slo_s:.3g} s")
    panels[0].set_ylabel("share that is longer")
    panels[0].set_yticks([*TAIL], [*TAIL.values()])
    panels[0].set_yticks([], minor=True)
    top.legend(*panels[0].get_legend_handles_labels(), ncols=min(5, count), **style.BELOW)
    axes = bottom.subplots(count, 2, squeeze=False, sharex="col", width_ratios=[1, 2.2])
    norm = draw_legend(bottom, axes, slo_s, "the SLO", {})
    for name, (counts, lanes) in zip(runs, axes):
        _draw_counts(counts, runs[name][1], window)
        counts.sharey(axes[0, 0])
        counts.set_title(style.label(name), **style.BOLD, color=colors[name])
        lanes.set_xlim(*window)
        draw_lanes(lanes, bars[name], norm)
    axes[0, 0].set(xlim=(0, None), ylim=(0, None))
    bottom.legend(*axes[0, 0].get_legend_handles_labels(), ncols=4, **style.BELOW)
    for axis in axes[-1]:
        axis.set_xlabel("time in s")
    return style.finish(figure, "Online serving", file, machine)


def find_window(bars):
    """(start, end) in s of the longest gap in `bars`, {name: lane_bars}, and as much on both sides
    of it, as far as the longest run goes. Without gaps it is that run."""
    bars = [bar for its in bars.values() for bar in its]
    whole = max((end for _, _, end, _ in bars), default=0.0) or 1.0
    gaps = [(b - a, a, b) for _, a, b, kind in bars if kind == "gap" and b > a]
    seconds, first, last = max(gaps, default=(0.0, 0.0, whole))
    return max(0.0, first - seconds), min(whole, last + seconds)


def _draw_counts(axis, iterations, window):
    """COUNTS over the whole run, and where the window of the lanes is."""
    starts = [iteration.start for iteration in iterations]
    axis.axvspan(*window, color="#000000", alpha=0.13, lw=0, label="shown on the right")
    for key, color in COUNTS.items():
        counts = [getattr(iteration, key) for iteration in iterations]
        label = key.replace("_", " ")
        axis.step(starts, counts, where="post", color=color, lw=1.1, label=label)
    axis.set_yscale("symlog", linthresh=1, linscale=0.4)
    axis.yaxis.set_major_formatter(style.PLAIN)
    axis.set_ylabel("requests, pages")
