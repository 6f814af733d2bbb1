"""Draw what each policy did when, in the manner of Sarathi-Serve's Figures 1 and 7.

Also here: what all plots share, such as one colour for each policy. Read next: plot_serving.py and plot_search.py.
"""

import matplotlib

matplotlib.use("Agg")  # files only, no screen needed
import matplotlib.pyplot as plt
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

PREFILL, DECODE = "#4878a8", "#4f9d55"
GAPS = LinearSegmentedColormap.from_list("gaps", [DECODE, "#e8c547", "#c8302b"])
SLO = "#444444"
PLAIN = "{x:g}"  # ticks: 0.01 and 10 on a log scale, instead of powers

# Okabe and Ito's colours, which the colour-blind can tell apart, a grey and a brown
POLICY_COLORS = {
    "request-level": "#7a7a7a", "orca": "#e69f00", "orca-best": "#8c5109", "vllm": "#d55e00", "sarathi": "#56b4e9",
    "sarathi-serve": "#0072b2", "chunked-only": "#cc79a7", "hybrid-only": "#009e73", "priority": "#5e3c99",
    "dynamic": "#000000",
}
OTHER_COLORS = ("#b5a800", "#a6611a", "#44aa99", "#882255")


def plot_timelines(timelines, machine, file):
    """One row of panels per policy, on a common time axis, written to `file`.

    `timelines` maps a policy to its list of engine.Iteration, `machine` is the bench's description of it. Upper
    panel: a lane per request, with its prefill chunks and, from token to token, the time between tokens coloured
    by its length, so that a generation stall is a long red bar. Lower panel: tokens in each iteration.
    """
    bars = {policy: _bars(iterations) for policy, iterations in timelines.items()}
    gaps = [end - start for policy in bars for _, start, end, is_gap in bars[policy] if is_gap]
    norm = LogNorm(min(gaps, default=1e-3), max(gaps, default=1.0) * 1.001)
    figure, axes = plt.subplots(2 * len(timelines), 1, sharex=True, figsize=(12, 2.4 * len(timelines) + 1),
                                layout="constrained", height_ratios=[2, 1] * len(timelines), squeeze=False)
    for (policy, iterations), lanes, tokens in zip(timelines.items(), axes[::2, 0], axes[1::2, 0]):
        for lane, start, end, is_gap in bars[policy]:
            color = GAPS(norm(end - start)) if is_gap else PREFILL
            lanes.barh(lane, end - start, left=start, height=0.8, color=color, edgecolor="white", linewidth=0.2)
        lanes.set_title(policy, loc="left", fontsize=10, fontweight="bold")
        lanes.set_ylabel("request")
        lanes.set_ylim(max(lane for lane, *_ in bars[policy]) + 0.6, 0.4)
        lanes.yaxis.set_major_locator(MaxNLocator(integer=True))
        for color, counts in ((PREFILL, [i.prefill_tokens for i in iterations]),
                              (DECODE, [i.decode_tokens for i in iterations])):
            tokens.bar([i.start for i in iterations], counts, width=[i.end - i.start for i in iterations], align="edge",
                       color=color, alpha=0.75, edgecolor="white", linewidth=0.2)
        tokens.set_yscale("symlog", linthresh=1)
        tokens.set_ylabel("tokens")
    axes[-1, 0].set_xlim(left=0)
    axes[-1, 0].set_xlabel("time in s (each policy on its own clock)")
    bar = figure.colorbar(ScalarMappable(norm, GAPS), ax=axes[:, 0].tolist(), aspect=50, pad=0.01)
    bar.set_label("time between tokens in s (the colours span what is in this picture)")
    figure.suptitle(
        "Upper panels: prefill chunks (blue), and from one token of a request to its next (green to red). "
        f"Lower panels: prefill (blue) and decode (green) tokens in each iteration.\n{machine_line(machine)}",
        fontsize=10)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def machine_line(machine):
    """What the numbers of a plot depend on, in one line."""
    line = f"{machine['model']}, {machine['dtype']}, {machine['device']}"
    if "threads" in machine:  # a simulated one has none
        line += ", 1 thread" if machine["threads"] == 1 else f", {machine['threads']} threads"
    return line


def policy_colors(names):
    """A colour for each name: that of POLICY_COLORS, or one of OTHER_COLORS, in the order of the names."""
    others = [name for name in names if name not in POLICY_COLORS]
    return {name: POLICY_COLORS.get(name) or OTHER_COLORS[others.index(name) % len(OTHER_COLORS)] for name in names}


def log_scale(axes, which, values):
    """Make axis `which` ("x" or "y") logarithmic, if any value is above 0.

    It shows five decades at most: a delay of microseconds is as good as none. Ticks are plain numbers.
    """
    values = [value for value in values if value is not None and value > 0]
    if not values:
        return
    low, high = max(min(values), max(values) / 1e5) / 1.25, max(values) * 1.25
    axes.set(**{f"{which}scale": "log", f"{which}lim": (low, high)})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 300 else (1,), numticks=20))
    axis.set_major_formatter(PLAIN)
    axis.set_minor_formatter(NullFormatter())


def mark_limit(axes, limit, text):
    """A dashed horizontal line at `limit` seconds, if there is one, and what it is."""
    if limit is not None:
        axes.axhline(limit, color=SLO, ls="--", lw=1.2)
        axes.text(1.0, limit, f"{text} {limit:.3g} s ", transform=axes.get_yaxis_transform(), va="bottom", ha="right",
                  fontsize=9, color=SLO)


def _bars(iterations):
    """(request id, start, end, is_gap) for each prefill chunk and each gap between two tokens of a request."""
    bars, last = [], {}
    for iteration in iterations:
        start, end = iteration.start, iteration.end
        for request_id, _, is_decode in iteration.chunks:
            if is_decode:
                bars.append((request_id, last[request_id], end, True))
            else:
                bars.append((request_id, start, end, False))
            last[request_id] = end
    first = min(request_id for request_id, *_ in bars)
    return [(request_id - first + 1, *bar) for request_id, *bar in bars]
