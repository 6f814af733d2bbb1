"""Draw what each policy did when, in the manner of Sarathi-Serve's Figures 1 and 7."""

import matplotlib

matplotlib.use("Agg")  # files only, no screen needed
import matplotlib.pyplot as plt
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.ticker import MaxNLocator

PREFILL, DECODE = "#4878a8", "#4f9d55"
GAPS = LinearSegmentedColormap.from_list("gaps", [DECODE, "#e8c547", "#c8302b"])


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
        "Lower panels: prefill (blue) and decode (green) tokens in each iteration.\n"
        f"{machine['model']}, {machine['dtype']}, {machine['device']}, {machine['threads']} threads", fontsize=10)
    figure.savefig(file, dpi=120)
    plt.close(figure)


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
