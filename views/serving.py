"""Draw what runs under load did: latencies (Sarathi-Serve, Figure 1b), each run at its worst
(Figures 1a and 7), and which load is too much (Figures 10 to 12). Read first: timelines.py. Read
next: pipelines.py.
"""

from experiments.metrics import MAX_DELAY_S, percentiles
from views import style
from views.timelines import draw_lanes, draw_legend, lane_bars

TAIL = {0.001: "0.1 %", 0.01: "1 % (P99)", 0.1: "10 %", 0.5: "P50", 1: "100 %"}
LATENCIES = {
    "time to first token (TTFT)": lambda c: [c.ttft],
    "time between tokens (TBT)": lambda c: c.tbt,
    "scheduling delay": lambda c: [c.scheduling_delay],
}
CAPACITY = "The highest rate that meets the SLO, and the latencies against the load"


def plot_serving(runs, machine, file, slo_s):
    """Draw runs of one load, {name: (completions, iterations)}, and write the picture to `file`. At
    the top the latencies, with dots at P50 and P99. Below a lane for each request, in the same
    seconds of all runs: see find_window. `slo_s` is the SLO of TBT in seconds. Needs a run."""
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
    axes = bottom.subplots(count, 1, squeeze=False, sharex=True)[:, 0]
    norm = draw_legend(bottom, axes, slo_s, "the SLO", {})
    axes[0].set_xlim(*window)
    for name, lanes in zip(runs, axes):
        draw_lanes(lanes, bars[name], norm)
        lanes.set_title(style.label(name), **style.BOLD, color=colors[name])
    axes[-1].set_xlabel("time in s")
    return style.finish(figure, "Online serving", file, machine)


def find_window(bars):
    """(start, end) in s of the longest gap in `bars`, {name: lane_bars}, and as much on both sides
    of it, as far as the longest run goes. Without gaps it is that run."""
    bars = [bar for its in bars.values() for bar in its]
    whole = max((end for _, _, end, _ in bars), default=0.0) or 1.0
    gaps = [(b - a, a, b) for _, a, b, kind in bars if kind == "gap" and b > a]
    seconds, first, last = max(gaps, default=(0.0, 0.0, whole))
    return max(0.0, first - seconds), min(whole, last + seconds)


def plot_capacity(results, machine, file, slo_s):
    """Draw {name: what run.found_so_far says} and write the picture to `file`: the capacities, and
    both latencies against the rate, with their limits. What was not met is hollow."""
    colors, height = style.policy_colors(results), 1.1 + 0.3 * len(results)
    figure = style.new_figure(height + 3.1)
    top, bottom = figure.subfigures(2, 1, height_ratios=[height, 3.1])
    bars, found = top.subplots(), [its["capacity_qps"] for its in results.values()]
    names = [style.label(name) + " (busy)" * its["busy"] for name, its in results.items()]
    drawn = bars.barh(names, found, 0.7, color=[*colors.values()])
    bars.bar_label(drawn, map(style.three_digits, found), padding=4)
    bars.margins(x=0.2)
    bars.set(ylim=(len(results) - 0.4, -0.6), xlabel="capacity in requests/s", xlim=(0, None))
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
        style.log_scale("x", axis)
        style.log_scale("y", axis)
        axis.set_title(f"{title} (dashed: {word} {limit:.3g} s)", loc="left")
        axis.set_xlabel("load in requests/s (hollow: not met)")
    return style.finish(figure, CAPACITY, file, machine)
