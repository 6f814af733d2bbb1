"""Draw what each request did when: a lane for each, as in Sarathi-Serve's Figures 1 and 7.

A lane has a bar for each prefill chunk and, from token to token, one coloured by the time between
them: a generation stall is a long red bar. Read first: style.py, engine.py. Read next: serving.py.
"""

from itertools import pairwise
from math import inf

from matplotlib.cm import ScalarMappable
from matplotlib.collections import PolyCollection
from matplotlib.colors import LogNorm
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from views import style
from views.style import DECODE, GAPS, HYBRID, PREFILL

TITLE = "What each request does when, and below it how many tokens each batch has\n"
SIGNS = {"prefill": PREFILL, "waiting": style.WAITING}  # of lanes
BATCHES = {"hybrid batch": HYBRID, "decodes only": DECODE}


def plot_timelines(runs, machine, file, anchor_s):
    """Draw {policy: (completions, iterations)} on one time axis, and write the picture to `file`:
    for each policy the lanes of its requests, counted from 1, and the tokens of each iteration.
    A gap between tokens of more than `anchor_s`, that is ten decode iterations, is red."""
    figure = style.new_figure(1.85 * len(runs) + 1.1)
    axes = figure.subplots(2 * len(runs), 1, sharex=True, height_ratios=[2, 1] * len(runs))
    bars = {policy: lane_bars(*run) for policy, run in runs.items()}
    norm = draw_legend(figure, axes, anchor_s, "10 decode iterations", BATCHES)
    axes[0].set_xlim(0, 1.02 * max((bar[2] for its in bars.values() for bar in its), default=1))
    for (policy, run), lanes, tokens in zip(runs.items(), axes[::2], axes[1::2]):
        draw_lanes(lanes, bars[policy], norm)
        lanes.set_title(style.label(policy), **style.BOLD)
        gaps = [seconds for *_, kind, seconds in bars[policy] if kind == "gap"]
        longest = style.three_digits(max(gaps, default=None))
        lanes.set_title(f"longest time between tokens: {longest} s", loc="right", fontsize=10)
        lanes.set_ylabel("request")
        lanes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        iterations, origin = run[1], run_origin(*run)
        starts = [i.start - origin for i in iterations]
        widths = [i.end - i.start for i in iterations]
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
    return style.finish(figure, TITLE + style.machine_line(machine), file)


def run_origin(completions, iterations):
    """When a run began, in s on its clock: at its first arrival, or its first iteration."""
    times = [c.arrival for c in completions] + [iteration.start for iteration in iterations[:1]]
    return min(times, default=0.0)


def lane_bars(completions, iterations, start=0.0, end=inf):
    """[(request id, start, end, kind, seconds)]: what was done from `start` to `end` of a run.

    In s since it began. Kinds: "waiting" (arrival to first chunk), "gap" (token to token), and
    "prefill". Starts and ends are cut, `seconds` is the whole length; who only waits is left out.
    """
    origin = run_origin(completions, iterations)
    spans = [(c.request_id, *gap, "gap") for c in completions for gap in pairwise(c.token_times)]
    for iteration in iterations:
        for request_id, _, _, is_decode in iteration.chunks:
            if not is_decode:
                spans.append((request_id, iteration.start, iteration.end, "prefill"))

    def cut(spans):
        for request_id, first, last, kind in spans:
            a, b = first - origin, last - origin
            if a < end and b > start:
                yield request_id, max(start, a), min(end, b), kind, last - first

    bars = list(cut(spans))
    served = {request_id for request_id, *_ in bars}
    waits = ((c.request_id, c.arrival, c.scheduled, "waiting") for c in completions)
    return [*bars, *cut(wait for wait in waits if wait[0] in served)]


def draw_legend(figure, axes, anchor_s, anchor, more):
    """Draw above `axes` what the colours of lanes mean, and return the norm of GAPS.

    A gap above `anchor_s` seconds, that is `anchor`, is red, and green from a tenth of that down,
    whatever else there is. `more` is {text: colour}, of what has one beside the lanes.
    """
    norm = LogNorm(anchor_s / 10, anchor_s)
    look = {"location": "top", "extend": "max", "shrink": 0.55, "anchor": (1, 0), "aspect": 32}
    bar = figure.colorbar(ScalarMappable(norm, GAPS), ax=axes, pad=0.01, **look)
    bar.minorticks_off()
    ticks = [share * anchor_s for share in (0.1, 0.2, 0.5, 1)]
    bar.set_ticks(ticks, labels=map(style.three_digits, ticks), fontsize=9)
    bar.set_label(f"time between tokens in s; red: more than {anchor}", fontsize=9)
    handles = [Patch(color=color, label=text) for text, color in (SIGNS | more).items()]
    bar.ax.legend(handles=handles, loc="center right", bbox_to_anchor=(-0.03, 1.5), **style.BARE)
    return norm


def draw_lanes(axis, bars, norm):
    """Draw a lane for each request in `bars`, from 1 at the top, and return the sorted ids."""
    ids = sorted({request_id for request_id, *_ in bars})
    lane = {request_id: number for number, request_id in enumerate(ids, start=1)}
    order = ("waiting", "gap", "prefill")  # a preempted request prefills between its tokens
    bars = sorted(bars, key=lambda bar: order.index(bar[3]))
    few = len(ids) <= 40  # room for white between lanes, and between bars that are not narrow
    half, (left, right) = 0.42 if few else 0.5, axis.get_xlim()
    spans = [(start, end, lane[i] - half, lane[i] + half) for i, start, end, *_ in bars]
    corners = [[(a, low), (b, low), (b, high), (a, high)] for a, b, low, high in spans]
    colors = [SIGNS.get(kind) or GAPS(norm(max(s, norm.vmin))) for *_, kind, s in bars]
    edges = [0.3 * (few and end - start > (right - left) / 200) for start, end, *_ in spans]
    look = {"edgecolors": "white", "linewidths": edges, "antialiased": few}
    axis.add_collection(PolyCollection(corners, facecolors=colors, **look))
    axis.set_ylim(len(ids) + 0.6, 0.4)
    return ids
