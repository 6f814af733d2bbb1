"""Draw what each request did when: a lane for each, as in Sarathi-Serve's Figures 1 and 7.

A lane has a bar for each prefill chunk and, from token to token, one coloured by the time between
them: a generation stall is a long red bar. Read first: style.py, engine.py. Read next: serving.py.
"""

from itertools import pairwise

from matplotlib.cm import ScalarMappable
from matplotlib.collections import PolyCollection
from matplotlib.colors import LogNorm
from matplotlib.patches import Patch

from views import style
from views.style import DECODE, GAPS, HYBRID, PREFILL

TITLE = "What each request does when, and below it how many tokens each batch has"
SIGNS = {"prefill": PREFILL, "waiting": style.WAITING}  # of lanes
BATCHES = {"hybrid batch": HYBRID, "decodes only": DECODE}


def plot_timelines(runs, machine, file, anchor_s):
    """Draw {policy: (completions, iterations)} on one time axis, and write the picture to `file`:
    for each policy the lanes of its requests, and the tokens of each iteration. A gap between
    tokens of more than `anchor_s`, that is ten decode iterations, is red."""
    figure = style.new_figure(1.85 * len(runs) + 1.1)
    axes = figure.subplots(2 * len(runs), 1, sharex=True, height_ratios=[2, 1] * len(runs))
    norm = draw_legend(figure, axes, anchor_s, "10 decode iterations", BATCHES)
    bars = {policy: lane_bars(*run) for policy, run in runs.items()}
    axes[0].set_xlim(0, 1.02 * max((bar[2] for its in bars.values() for bar in its), default=1))
    for (policy, (_, iterations)), lanes, tokens in zip(runs.items(), axes[::2], axes[1::2]):
        draw_lanes(lanes, bars[policy], norm)
        lanes.set_title(style.label(policy), **style.BOLD)
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
    return style.finish(figure, TITLE, file, machine)


def lane_bars(completions, iterations):
    """[(request id, start, end, kind)] in s, in the order in which they are drawn: "waiting", from
    arrival to first chunk; "gap", from token to token; "prefill", in a gap after a preemption."""
    served = [c for c in completions if c.scheduled is not None]
    bars = [(c.request_id, c.arrival, c.scheduled, "waiting") for c in served]
    bars += [(c.request_id, *gap, "gap") for c in served for gap in pairwise(c.token_times)]
    chunks = ((i, *chunk) for i in iterations for chunk in i.chunks)
    chunks = [(who, i.start, i.end, "prefill") for i, who, *_, decodes in chunks if not decodes]
    return bars + chunks


def draw_legend(figure, axes, anchor_s, anchor, more):
    """Draw above `axes` what the colours of lanes mean, and those of `more`, {text: colour}. Return
    the norm of GAPS: red above `anchor_s` seconds, that is `anchor`, green from a tenth down."""
    norm = LogNorm(anchor_s / 10, anchor_s)
    look = {"location": "top", "extend": "max", "shrink": 0.55, "anchor": (1, 0), "aspect": 32}
    bar = figure.colorbar(ScalarMappable(norm, GAPS), ax=axes, pad=0.01, **look)
    bar.minorticks_off()
    ticks = [share * anchor_s for share in (0.1, 0.2, 0.5, 1)]
    bar.set_ticks(ticks, labels=map(style.three_digits, ticks))
    bar.set_label(f"time between tokens in s; red: more than {anchor}")
    handles = [Patch(color=color, label=text) for text, color in (SIGNS | more).items()]
    bar.ax.legend(handles=handles, loc="center right", bbox_to_anchor=(-0.03, 1.5))
    return norm


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
