"""Pictures of runs under one load: latencies, and when each request was computed.

Latencies are drawn as in Sarathi-Serve's Figure 1b, lanes as in its Figures 1 and 7. A lane has a
bar for each prefill chunk and, from token to token, one coloured by the time between them: a
generation stall is a long bar, the redder the longer. Read first: style.py, engine.py. Next:
capacities.py."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Patch

from lab.measure.run_loop import Run
from lab.pictures import style
from policies.observers import Iteration

LEGEND = {
    "prefill": style.PREFILL,
    "waiting": style.WAITING,
    "hybrid batch": style.HYBRID,
    "decodes only": style.DECODE,
}
Color = str | tuple[float, float, float, float]
FEW_LANES = 40  # up to here all of a run is shown, above it what is around the longest gap


def plot_timelines(
    runs: Mapping[str, Run],
    machine: Mapping[str, object],
    file: str | Path,
    limit_s: float,
    title: str = "One load under each policy",
    letters: str = "",
) -> Figure:
    """Draw the runs of policies, and write the picture to `file`.

    It shows latencies, with dots at P50 and P99; then for each policy the lanes of its requests,
    and the tokens of each batch. A gap between tokens is green up to `limit_s`, and from there
    yellow to red, at ten times the limit. Few requests may have `letters` instead of numbers,
    "ABCD"."""
    lanes_height = 0.8 + 2.0 * len(runs)
    figure = style.new_figure(3.0 + lanes_height)
    top, bottom = style.parts_of(figure, [3.0, lanes_height])
    draw_latencies(top, runs, limit_s)
    axes = bottom.subplots(2 * len(runs), 1, sharex=True, height_ratios=[2, 1] * len(runs))
    norm = LogNorm(limit_s, 10 * limit_s)
    scale = bottom.colorbar(
        ScalarMappable(norm, style.GAPS),
        ax=axes,
        location="top",
        extend="both",
        shrink=0.4,
        anchor="SE",
        aspect=32,
        pad=0.01,
    )
    scale.minorticks_off()
    ticks = [share * limit_s for share in (1, 2, 5, 10)]
    scale.set_ticks(ticks, labels=[style.three_digits(tick) for tick in ticks])
    scale.set_label("time between tokens in s")
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


def draw_latencies(part: SubFigure, runs: Mapping[str, Run], limit_s: float) -> None:
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


def window_of(runs: Iterable[Run]) -> tuple[float, float]:
    """The times to show: all of runs of few requests, else what is around the longest gap between
    tokens, three times its length."""
    completions = [each for run in runs for each in run.completions]
    if max(each.id for each in completions) < FEW_LANES:
        return 0.0, 1.02 * max(time for each in completions for time in each.token_times)
    gaps = [gap for each in completions for gap in pairwise(each.token_times)]
    start, end = max(gaps, key=lambda gap: gap[1] - gap[0])
    return max(0.0, 2 * start - end), 2 * end - start


def bars_of(run: Run, norm: LogNorm) -> list[tuple[int, float, float, Color]]:
    """(request id, start, end, colour) of all that happened to requests, in the order in which it
    is drawn: after a preemption a prefill lies in a gap."""
    bars: list[tuple[int, float, float, Color]] = []
    for each in run.completions:
        if each.scheduled is not None and each.scheduled > each.arrival:
            bars.append((each.id, each.arrival, each.scheduled, style.WAITING))
        for start, end in pairwise(each.token_times):
            bars.append((each.id, start, end, style.GAPS(norm(end - start))))
    for iteration in run.iterations:
        for chunk in iteration.chunks:
            if not chunk.is_decode:
                bars.append((chunk.request_id, iteration.start, iteration.end, style.PREFILL))
    return bars


def draw_lanes(axis: Axes, run: Run, norm: LogNorm, letters: str) -> None:
    """Draw a lane for each request, the first on top, and say how long the longest gap is: that of
    the whole run. A request that only waits while `axis` shows it has no lane."""
    left, right = axis.get_xlim()
    bars = [bar for bar in bars_of(run, norm) if bar[1] < right and bar[2] > left]
    ids = sorted({bar[0] for bar in bars if bar[3] != style.WAITING})
    few = len(ids) <= FEW_LANES
    for lane, request_id in enumerate(ids):
        lane_bars = [bar[1:] for bar in bars if bar[0] == request_id]
        lengths = [end - start for start, end, _ in lane_bars]
        axis.broken_barh(
            [(start, end - start) for start, end, _ in lane_bars],
            (lane - 0.42, 0.84) if few else (lane - 0.5, 1),
            facecolors=[color for *_, color in lane_bars],
            edgecolors="white",
            linewidths=[0.3 if few and length > (right - left) / 200 else 0 for length in lengths],
        )
    names = [letters[i] if letters else str(i) for i in ids]
    tick_every = 1 + len(ids) // 5
    axis.set_yticks(range(0, len(ids), tick_every), names[::tick_every])
    axis.set(ylim=(len(ids) - 0.4, -0.6), ylabel="request")
    longest = max((gap for each in run.completions for gap in each.tbt), default=None)
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
