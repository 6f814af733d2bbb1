"""Draw what each request did when: a lane for each, as in Sarathi-Serve's Figures 1 and 7.

A lane has a bar for each prefill chunk and, from token to token, one coloured by the time between
them: a generation stall is a long red bar. Read first: style.py, engine.py. Read next: serving.py.
"""

from itertools import pairwise
from math import inf

from matplotlib.cm import ScalarMappable
from matplotlib.collections import PolyCollection
from matplotlib.colors import LogNorm
from matplotlib.ticker import LogLocator, MaxNLocator

from views import style
from views.style import DECODE, GAPS, PREFILL

TITLE = """Upper panels: prefill chunks (blue), and from one token to the next (green to red). \
Lower panels: prefill (blue) and decode (green) tokens in each iteration.
"""


def plot_timelines(timelines, machine, file):
    """Draw {policy: its list of Iteration} on a common time axis, and write the picture to `file`:
    for each policy the lanes of its requests, counted from 1, and the tokens of each iteration."""
    figure, count = style.new_figure(12, 2.4 * len(timelines) + 1), len(timelines)
    axes = figure.subplots(2 * count, 1, sharex=True, height_ratios=[2, 1] * count)
    bars = {policy: lane_bars((), iterations) for policy, iterations in timelines.items()}
    label = "time between tokens in s (the colours span what is in this picture)"
    norm = scale_colors(figure, axes, bars.values(), label, aspect=50)
    axes[0].set_xlim(0, 1.05 * max((bar[2] for its in bars.values() for bar in its), default=1))
    for (policy, iterations), lanes, tokens in zip(timelines.items(), axes[::2], axes[1::2]):
        draw_lanes(lanes, bars[policy], norm)
        lanes.set_title(policy, **style.BOLD)
        lanes.set_ylabel("request")
        lanes.yaxis.set_major_locator(MaxNLocator(integer=True))
        starts = [iteration.start - run_origin((), iterations) for iteration in iterations]
        widths = [iteration.end - iteration.start for iteration in iterations]
        for color, kind in ((PREFILL, "prefill_tokens"), (DECODE, "decode_tokens")):
            counts = [getattr(iteration, kind) for iteration in iterations]
            look = {"color": color, "alpha": 0.75, "edgecolor": "white", "linewidth": 0.2}
            tokens.bar(starts, counts, width=widths, align="edge", **look)
        tokens.set_yscale("symlog", linthresh=1)
        tokens.set_ylabel("tokens")
    axes[-1].set_xlabel("time in s (each policy on its own clock)")
    return style.finish(figure, TITLE + style.machine_line(machine), file)


def run_origin(completions, iterations):
    """When a run began, in s on its clock: at its first arrival, or its first iteration."""
    times = [c.arrival for c in completions] + [iteration.start for iteration in iterations[:1]]
    return min(times, default=0.0)


def lane_bars(completions, iterations, start=0.0, end=inf):
    """[(request id, start, end, kind, seconds)]: what was done from `start` to `end` of a run.

    In s since it began. Kinds: "waiting" (arrival to first chunk), "gap" (a token to the next),
    "prefill" (a chunk). Starts and ends are cut, `seconds` is the whole length. Who only waited is
    left out. Without completions nobody waits, and gaps begin with the request's batch before.
    """
    origin, last = run_origin(completions, iterations), {}
    spans = [(c.request_id, *gap, "gap") for c in completions for gap in pairwise(c.token_times)]
    for iteration in iterations:
        for request_id, _, _, is_decode in iteration.chunks:
            if not is_decode:
                spans.append((request_id, iteration.start, iteration.end, "prefill"))
            elif not completions and request_id in last:
                spans.append((request_id, last[request_id], iteration.end, "gap"))
            last[request_id] = iteration.end

    def cut(spans):
        for request_id, first, last, kind in spans:
            a, b = first - origin, last - origin
            if a < end and b > start:
                yield request_id, max(start, a), min(end, b), kind, last - first

    bars = list(cut(spans))
    served = {request_id for request_id, *_ in bars}
    waits = ((c.request_id, c.arrival, c.scheduled, "waiting") for c in completions)
    return [*bars, *cut(wait for wait in waits if wait[0] in served)]


def scale_colors(figure, axes, bars, label, aspect):
    """Draw the colour bar of all gaps in `bars`, lists of bars, and return its norm."""
    gaps = [seconds for its in bars for *_, kind, seconds in its if kind == "gap" and seconds > 0]
    norm = LogNorm(min(gaps, default=1e-3), max(gaps, default=1.0) * 1.001)
    look = {"aspect": aspect, "pad": 0.01, "format": style.PLAIN, "label": label}
    colors, ticks = ScalarMappable(norm, GAPS), LogLocator(subs=(1, 2, 5))
    figure.colorbar(colors, ax=axes.ravel(), ticks=ticks, **look).minorticks_off()
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
    plain = {"waiting": style.WAITING, "prefill": PREFILL}
    colors = [plain.get(kind) or GAPS(norm(seconds)) for *_, kind, seconds in bars]
    edges = [0.3 * (few and end - start > (right - left) / 400) for start, end, *_ in spans]
    look = {"edgecolors": "white", "linewidths": edges, "antialiased": few}
    axis.add_collection(PolyCollection(corners, facecolors=colors, **look))
    axis.set_ylim(len(ids) + 0.6, 0.4)
    return ids
