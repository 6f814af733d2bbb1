"""Pictures of runs under one load: latencies, and when each request was computed.

Latencies are drawn as in Sarathi-Serve's Figure 1b, lanes as in its Figures 1 and 7. A lane has a
bar for each prefill chunk and, from token to token, one coloured by the time between them: a
generation stall is a long red bar. Read first: style.py, engine.py. Next: capacities.py."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Patch

from lab.pictures import style
from policies.observers import Iteration
from request import Request

LEGEND = {
    "prefill": style.PREFILL,
    "waiting": style.WAITING,
    "hybrid batch": style.HYBRID,
    "decodes only": style.DECODE,
}
FEW_LANES = 40  # up to here all of a run is shown, above it what is around the longest gap


class RecordedRun(Protocol):
    """The part of a lab.measure.run_loop.Run that is drawn."""

    @property
    def completions(self) -> Sequence[Request]: ...

    @property
    def iterations(self) -> Sequence[Iteration]: ...


def plot_timelines(
    runs: Mapping[str, RecordedRun],
    machine: Mapping[str, object],
    file: str | Path,
    limit_s: float,
    title: str = "One load under each policy",
    letters: str = "",
) -> Figure:
    """Draw the runs of policies, and write the picture to `file`.

    It shows latencies, with dots at P50 and P99; then for each policy the lanes of its requests,
    and the tokens of each batch. A gap between tokens of more than `limit_s` is red. Few requests
    may have `letters` instead of numbers, "ABCD"."""
    lanes_height = 0.8 + 2.0 * len(runs)
    figure = style.new_figure(3.0 + lanes_height)
    top, bottom = style.parts_of(figure, [3.0, lanes_height])
    draw_latencies(top, runs, limit_s)
    axes = bottom.subplots(2 * len(runs), 1, sharex=True, height_ratios=[2, 1] * len(runs))
    norm = LogNorm(limit_s / 10, limit_s)
    scale = bottom.colorbar(
        ScalarMappable(norm, style.GAPS),
        ax=axes,
        location="top",
        extend="max",
        shrink=0.4,
        anchor="SE",
        aspect=32,
        pad=0.01,
    )
    scale.minorticks_off()
    ticks = [share * limit_s for share in (0.1, 0.2, 0.5, 1)]
    scale.set_ticks(ticks, labels=[style.three_digits(tick) for tick in ticks])
    scale.set_label("time between tokens in s; red: longer")
    handles = [Patch(color=color, label=label) for label, color in LEGEND.items()]
    scale.ax.legend(handles=handles, ncols=2, loc="center right", bbox_to_anchor=(-0.12, 1.5))
    axes[0].set_xlim(window_of(runs.values()))
    axes[-1].set_xlabel("time in s")
    colors = style.policy_colors(runs)
    for (name, run), lanes, batches in zip(runs.items(), axes[::2], axes[1::2], strict=True):
        draw_lanes(lanes, run, norm, letters)
        lanes.set_title(name, **style.BOLD, color=colors[name])
        draw_batches(batches, run.iterations)
    return style.finish(figure, title, file, machine)


def draw_latencies(part: SubFigure, runs: Mapping[str, RecordedRun], limit_s: float) -> None:
    """Draw which share of each latency is longer than x."""
    panels = part.subplots(1, 3, sharey=True)
    for name, color in style.policy_colors(runs).items():
        completions = runs[name].completions
        latencies = [
            [each.ttft for each in completions if each.ttft is not None],
            [gap for each in completions for gap in each.tbt],
            [each.scheduling_delay or 0 for each in completions if each.scheduled is not None],
        ]
        for panel, values in zip(panels, latencies, strict=True):
            if values:
                panel.ecdf(values, complementary=True, label=name, color=color)
                panel.plot(np.percentile(values, [50, 99]), [0.5, 0.01], "o", ms=4, color=color)
    first, tbt, delay = panels
    for panel in panels:
        style.log_scale("x", panel)
        panel.set(yscale="log", ylim=(5e-4, 1.3))
    first.set(xlabel="time to first token (TTFT) in s", ylabel="share that is longer")
    tbt.set(xlabel="time between tokens (TBT) in s", title=f"dashed: {limit_s:.3g} s")
    delay.set(xlabel="scheduling delay in s")
    tbt.axvline(limit_s, **style.LIMIT_LINE)
    first.set_yticks([0.001, 0.01, 0.1, 0.5, 1], ["0.1 %", "1 % (P99)", "10 %", "P50", "100 %"])
    first.set_yticks([], minor=True)
    part.legend(*first.get_legend_handles_labels(), ncols=4, **style.LEGEND_BELOW)


def window_of(runs: Iterable[RecordedRun]) -> tuple[float, float]:
    """The times to show: all of runs of few requests, else what is around the longest gap between
    tokens, three times its length."""
    completions = [each for run in runs for each in run.completions]
    if max(each.id for each in completions) < FEW_LANES:
        return 0.0, 1.02 * max(time for each in completions for time in each.token_times)
    gaps = [gap for each in completions for gap in pairwise(each.token_times)]
    start, end = max(gaps, key=lambda gap: gap[1] - gap[0])
    return max(0.0, 2 * start - end), 2 * end - start


def draw_lanes(axis: Axes, run: RecordedRun, norm: LogNorm, letters: str) -> None:
    """Draw a lane for each request, the first on top, and say how long the longest gap is: that of
    the whole run. A request that only waits while `axis` shows it has no lane."""
    left, right = axis.get_xlim()
    waiting = [
        (each.id, each.arrival, each.scheduled, style.WAITING)
        for each in run.completions
        if each.scheduled is not None and each.scheduled > each.arrival
    ]
    gaps = [
        (each.id, start, end, style.GAPS(norm(end - start)))
        for each in run.completions
        for start, end in pairwise(each.token_times)
    ]
    prefills = [  # after a preemption they lie in a gap
        (chunk.request_id, iteration.start, iteration.end, style.PREFILL)
        for iteration in run.iterations
        for chunk in iteration.chunks
        if not chunk.is_decode
    ]
    seen = {i for i, start, end, _ in gaps + prefills if start < right and end > left}
    lanes = {request_id: lane for lane, request_id in enumerate(sorted(seen))}
    bars: dict[int, list] = defaultdict(list)
    for request_id, start, end, color in waiting + gaps + prefills:
        if request_id in lanes and start < right and end > left:
            bars[lanes[request_id]].append((start, end - start, color))
    few = len(lanes) <= FEW_LANES
    for lane, lane_bars in bars.items():
        axis.broken_barh(
            [(start, length) for start, length, _ in lane_bars],
            (lane - 0.42, 0.84) if few else (lane - 0.5, 1),
            facecolors=[color for *_, color in lane_bars],
            edgecolors="white",
            linewidths=[
                0.3 if few and length > (right - left) / 200 else 0 for _, length, _ in lane_bars
            ],
        )
    tick_every = 1 + len(lanes) // 5
    ids = [letters[i] if letters else str(i) for i in lanes]
    axis.set_yticks(range(0, len(lanes), tick_every), ids[::tick_every])
    axis.set(ylim=(len(lanes) - 0.4, -0.6), ylabel="request")
    longest = max((end - start for _, start, end, _ in gaps), default=None)
    axis.set_title(f"longest time between tokens: {style.three_digits(longest)} s", loc="right")


def draw_batches(axis: Axes, iterations: Sequence[Iteration]) -> None:
    """Draw a bar for each iteration, as high as its batch has tokens."""
    heights = [each.prefill_tokens + each.decode_tokens for each in iterations]
    colors = [style.batch_color(each.prefill_tokens, each.decode_tokens) for each in iterations]
    axis.bar(
        [each.start for each in iterations],
        heights,
        [each.end - each.start for each in iterations],
        align="edge",
        color=colors,
        edgecolor=colors,  # else a batch of few tokens cannot be seen
        lw=0.8,
    )
    highest = max(heights, default=1)
    axis.set(ylim=(-0.02 * highest, 1.1 * highest), ylabel="tokens")
    axis.set_yticks([0, highest], ["0", f"{highest:,}"])
    style.bare(axis, "bottom")
