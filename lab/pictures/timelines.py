"""Pictures of runs: when each request was computed, latencies under load, and capacities.

`plot_timelines` draws lanes as in Sarathi-Serve's Figures 1 and 7, `plot_serving` latencies as in
Figure 1b, `plot_capacity` capacities as in Figures 10 to 12. A lane has a bar for each prefill
chunk and, from token to token, one coloured by the time between them: a generation stall is a long
red bar. Read first: style.py, engine.py. Next: pipelines.py."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure, FigureBase
from matplotlib.patches import Patch

from lab.measure.metrics import MAX_DELAY_S
from lab.pictures import style
from lab.pictures.bars import draw_bars
from policies.observers import Iteration
from request import Request

LANE_COLORS = {"prefill": style.PREFILL, "waiting": style.WAITING}
BATCH_COLORS = {"hybrid batch": style.HYBRID, "decodes only": style.DECODE}
FEW_LANES = 40  # up to here there is room for white between lanes


class RecordedRun(Protocol):
    """The part of a lab.measure.run_loop.Run that is drawn."""

    @property
    def completions(self) -> Sequence[Request]: ...

    @property
    def iterations(self) -> Sequence[Iteration]: ...


class Bar(NamedTuple):
    """A bar in the lane of a request. Times are in seconds.

    `kind` is "waiting" (from arrival to the first chunk), "gap" (from token to token) or "prefill"
    (a chunk, which after a preemption lies in a gap)."""

    request_id: int
    start: float
    end: float
    kind: str


# ---- Lanes --------------------------------------------------------------------------------------


def plot_timelines(
    runs: Mapping[str, RecordedRun],
    machine: Mapping[str, object],
    file: str | Path,
    anchor_s: float,
) -> Figure:
    """Draw the runs of policies on one time axis, and write the picture to `file`.

    For each policy it shows the lanes of its requests, and the tokens of each iteration. A gap
    between tokens of more than `anchor_s`, the time of ten decode iterations, is red."""
    figure = style.new_figure(1.85 * len(runs) + 1.1)
    axes = figure.subplots(
        2 * len(runs),
        1,
        sharex=True,
        height_ratios=[2, 1] * len(runs),
    )
    legend = LANE_COLORS | BATCH_COLORS
    draw_runs(figure, axes, axes[::2], runs, anchor_s, "10 decode iterations", legend)
    for run, axis in zip(runs.values(), axes[1::2], strict=True):
        draw_batches(axis, run.iterations)
    axes[-1].set_xlabel("time in s (each policy on its own clock)")
    title = "What each request does when, and below it how many tokens each batch has"
    return style.finish(figure, title, file, machine)


def draw_batches(axis: Axes, iterations: Sequence[Iteration]) -> None:
    """Draw a bar for each iteration, as high as its batch has tokens."""
    starts = [iteration.start for iteration in iterations]
    widths = [iteration.end - iteration.start for iteration in iterations]
    heights = [iteration.prefill_tokens + iteration.decode_tokens for iteration in iterations]
    colors = [style.batch_color(i.prefill_tokens, i.decode_tokens) for i in iterations]
    # without an edge a batch of few tokens cannot be seen
    axis.bar(
        starts,
        heights,
        widths,
        align="edge",
        color=colors,
        edgecolor=colors,
        lw=0.8,
    )
    highest = max(heights, default=1)
    axis.set(ylim=(-0.02 * highest, 1.1 * highest), ylabel="tokens")
    axis.set_yticks([0, highest], ["0", f"{highest:,}"])
    style.bare(axis, "bottom")


def lane_bars(completions: Iterable[Request], iterations: Iterable[Iteration]) -> list[Bar]:
    """The bars of all lanes, in the order in which they are drawn: waiting, gaps, prefills."""
    waiting: list[Bar] = []
    gaps: list[Bar] = []
    for each in completions:
        if each.scheduled is not None and each.scheduled > each.arrival:
            waiting.append(Bar(each.id, each.arrival, each.scheduled, "waiting"))
        gaps += [Bar(each.id, *gap, "gap") for gap in pairwise(each.token_times)]
    prefills = [
        Bar(request_id, iteration.start, iteration.end, "prefill")
        for iteration in iterations
        for request_id, _, _, is_decode in iteration.chunks
        if not is_decode
    ]
    return waiting + gaps + prefills


def draw_runs(
    figure: FigureBase,
    axes: Sequence[Axes],
    lanes: Sequence[Axes],
    runs: Mapping[str, RecordedRun],
    limit_s: float,
    limit_name: str,
    legend: Mapping[str, str],
    window: tuple[float, float] | None = None,
) -> None:
    """Draw the requests of each run in one of `lanes`, which are some of the `axes`.

    Gaps are green up to a tenth of the limit, then yellow, and red above it. `window` is the part
    to show, in seconds, by default all of it. Above the axes a scale says how long a gap of a
    colour is, and the legend, {text: colour}, what other colours mean."""
    norm = LogNorm(limit_s / 10, limit_s)
    scale = figure.colorbar(
        ScalarMappable(norm, style.GAPS),
        ax=axes,
        location="top",
        extend="max",
        shrink=0.55,
        anchor="SE",
        aspect=32,
        pad=0.01,
    )
    scale.minorticks_off()
    ticks = [share * limit_s for share in (0.1, 0.2, 0.5, 1)]
    scale.set_ticks(ticks, labels=[style.three_digits(tick) for tick in ticks])
    scale.set_label(f"time between tokens in s; red: more than {limit_name}")
    handles = [Patch(color=color, label=text) for text, color in legend.items()]
    scale.ax.legend(handles=handles, loc="center right", bbox_to_anchor=(-0.03, 1.5))

    bars_of = {name: lane_bars(run.completions, run.iterations) for name, run in runs.items()}
    end = max((bar.end for bars in bars_of.values() for bar in bars), default=1)
    axes[0].set_xlim(window or (0, 1.02 * end))
    colors = style.policy_colors(runs)
    for axis, (name, bars) in zip(lanes, bars_of.items(), strict=True):
        draw_lanes(axis, bars, norm)
        axis.set_title(name, **style.BOLD, color=colors[name])


def draw_lanes(axis: Axes, bars: Sequence[Bar], norm: LogNorm) -> None:
    """Draw a lane for each request, the first on top, and say how long the longest gap is.

    A request that only waits while `axis` shows it has no lane. The longest gap is that of all
    `bars`, shown or not."""
    left, right = axis.get_xlim()
    visible = [bar for bar in bars if bar.start < right and bar.end > left]
    ids = sorted({bar.request_id for bar in visible if bar.kind != "waiting"})
    few = len(ids) <= FEW_LANES
    lanes: dict[int, list[Bar]] = {request_id: [] for request_id in ids}
    for bar in visible:
        if bar.request_id in lanes:
            lanes[bar.request_id].append(bar)
    for lane, bars_of_lane in enumerate(lanes.values()):
        lengths = [bar.end - bar.start for bar in bars_of_lane]
        axis.broken_barh(
            [(bar.start, length) for bar, length in zip(bars_of_lane, lengths, strict=True)],
            (lane - 0.42, 0.84) if few else (lane - 0.5, 1),
            facecolors=[
                LANE_COLORS.get(bar.kind) or style.GAPS(norm(length))
                for bar, length in zip(bars_of_lane, lengths, strict=True)
            ],
            edgecolors="white",
            linewidths=[0.3 if few and s > (right - left) / 200 else 0 for s in lengths],
            antialiased=few,
        )
    tick_every = 1 + len(ids) // 5
    axis.set_yticks(range(0, len(ids), tick_every), [str(i) for i in ids[::tick_every]])
    axis.set(ylim=(len(ids) - 0.4, -0.6), ylabel="request")
    longest = max((bar.end - bar.start for bar in bars if bar.kind == "gap"), default=None)
    axis.set_title(f"longest time between tokens: {style.three_digits(longest)} s", loc="right")


# ---- Latencies under one load -------------------------------------------------------------------


TTFT = "time to first token (TTFT) in s"
TBT = "time between tokens (TBT) in s"
DELAY = "scheduling delay in s"


def latencies_of(completions: Sequence[Request]) -> dict[str, list[float]]:
    """All values of each latency, in seconds."""
    return {
        TTFT: [each.ttft for each in completions if each.ttft is not None],
        TBT: [gap for each in completions for gap in each.tbt],
        DELAY: [each.scheduling_delay for each in completions if each.scheduling_delay is not None],
    }


def plot_serving(
    runs: Mapping[str, RecordedRun],
    machine: Mapping[str, object],
    file: str | Path,
    slo_s: float,
    title: str = "Online serving",
    letters: str = "",
) -> Figure:
    """Draw the runs of one load, at least one, and write the picture to `file`.

    It shows their latencies, with dots at P50 and P99, and their lanes around the longest gap
    between tokens. A gap above the SLO of `slo_s` is red. Few requests may have `letters` instead
    of numbers, "ABCD": then all of their lanes is shown."""
    figure = style.new_figure(4.3 + 1.65 * len(runs))
    heights = [2.9, 1.4 + 1.65 * len(runs)]
    top, bottom = style.parts_of(figure, heights)
    axes = top.subplots(1, 3, sharey=True)
    panels: dict[str, Axes] = dict(zip((TTFT, TBT, DELAY), axes, strict=True))
    for name, color in style.policy_colors(runs).items():
        for label, values in latencies_of(runs[name].completions).items():
            if values:  # the share of them that is longer than x
                panels[label].ecdf(
                    values,
                    complementary=True,
                    label=name,
                    color=color,
                )
                dots = np.percentile(values, [50, 99])
                panels[label].plot(
                    dots,
                    [0.5, 0.01],
                    "o",
                    ms=4,
                    color=color,
                )
    for label, axis in panels.items():
        style.log_scale("x", axis)
        axis.set(xlabel=label, yscale="log", ylim=(5e-4, 1.3))
    panels[TBT].axvline(slo_s, **style.LIMIT_LINE)
    panels[TBT].set_title(f"dashed: SLO {slo_s:.3g} s")
    first = panels[TTFT]
    first.set_ylabel("share that is longer")
    first.set_yticks([0.001, 0.01, 0.1, 0.5, 1], ["0.1 %", "1 % (P99)", "10 %", "P50", "100 %"])
    first.set_yticks([], minor=True)
    handles, names = first.get_legend_handles_labels()
    top.legend(
        handles,
        names,
        ncols=style.legend_columns(names),
        **style.LEGEND_BELOW,
    )

    grid = bottom.subplots(len(runs), 1, squeeze=False, sharex=True)
    lanes = list(grid[:, 0])
    window = None if letters else window_of_longest_gap(runs.values())
    draw_runs(bottom, lanes, lanes, runs, slo_s, "the SLO", LANE_COLORS, window)
    lanes[-1].set_xlabel("time in s" if letters else "time in s, around the longest gap")
    if letters:
        for axis in lanes:
            axis.set_yticks(range(len(letters)), list(letters))
    return style.finish(figure, title, file, machine)


def window_of_longest_gap(runs: Iterable[RecordedRun]) -> tuple[float, float] | None:
    """The times to show around the longest gap between tokens of all runs: three times its length.

    None if no gap is longer than 0."""
    gaps = [gap for run in runs for c in run.completions for gap in pairwise(c.token_times)]
    start, end = max(gaps, key=lambda gap: gap[1] - gap[0], default=(0.0, 0.0))
    if end <= start:
        return None
    return max(0.0, 2 * start - end), 2 * end - start


# ---- Capacity -----------------------------------------------------------------------------------


def plot_capacity(
    results: Mapping[str, Mapping],
    machine: Mapping[str, object],
    file: str | Path,
    slo_s: float,
) -> Figure:
    """Draw the searches for a capacity, by policy, and write the picture to `file`.

    It shows the capacities, and two latencies against the rate with their limits. Points that did
    not meet them are hollow. A result is that of lab.commands.serve_report.search_json."""
    bars_height = 1.1 + 0.3 * len(results)
    curves_height = 3.1
    figure = style.new_figure(bars_height + curves_height)
    heights = [bars_height, curves_height]
    top, bottom = style.parts_of(figure, heights)
    colors = style.policy_colors(results)
    names = [f"{name} (busy)" if result["busy"] else name for name, result in results.items()]
    color_of = dict(zip(names, colors.values(), strict=True))
    capacities = [result["capacity_qps"] for result in results.values()]
    bars = top.subplots()
    draw_bars(bars, dict(zip(names, capacities, strict=True)), color_of.__getitem__)
    bars.set_xlabel("capacity per second")
    if names != list(results):
        bars.set_title("busy: other programs used the machine meanwhile", loc="right")
    tbt, delay = bottom.subplots(1, 2)
    for axis, key, latency, limit, limit_s in (
        (tbt, "p99_tbt_s", "P99 time between tokens in s", "SLO", slo_s),
        (delay, "p50_delay_s", "median scheduling delay in s", "limit", MAX_DELAY_S),
    ):
        draw_against_rate(axis, results, key, colors)
        axis.axhline(limit_s, **style.LIMIT_LINE)
        style.log_scale("xy", axis)
        axis.set_title(f"{latency} (dashed: {limit} {limit_s:.3g} s)", loc="left")
        axis.set_xlabel("load per second (hollow: not met)")
    title = "The highest rate that meets the SLO, and the latencies against the load"
    return style.finish(figure, title, file, machine)


def draw_against_rate(
    axis: Axes,
    results: Mapping[str, Mapping],
    key: str,
    colors: Mapping[str, str],
) -> None:
    """Draw a latency of the last run at each rate: a line where all was met, hollow dots else."""
    for name, result in results.items():
        point_of = {point["qps"]: point for point in result["points"]}  # later runs replace earlier
        points = [point_of[qps] for qps in sorted(point_of) if point_of[qps][key] is not None]
        for met in (True, False):
            selected = [point for point in points if point["met"] == met]
            rates = [point["qps"] for point in selected]
            latencies = [point[key] for point in selected]
            line_style: dict[str, Any] = {} if met else {"ls": "", "mfc": "white"}
            line_style |= {"marker": "o", "ms": 5, "lw": 1.4, "color": colors[name]}
            axis.plot(rates, latencies, **line_style)
