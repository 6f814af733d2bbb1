"""Pictures of runs: when each request was computed, latencies under load, and capacities.

`plot_timelines` draws lanes as in Sarathi-Serve's Figures 1 and 7, `plot_serving` latencies as in
Figure 1b, `plot_capacity` capacities as in Figures 10 to 12. A lane has a bar for each prefill
chunk and, from token to token, one coloured by the time between them: a generation stall is a long
red bar. Read first: style.py, engine.py. Next: pipelines.py."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PolyCollection
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure, FigureBase
from matplotlib.patches import Patch

from lab.measure.metrics import MAX_DELAY_S
from lab.pictures import style
from lab.pictures.style import DECODE, GAPS, HYBRID, PREFILL
from policies.observers import Iteration
from request import Completion

LANE_COLORS = {"prefill": PREFILL, "waiting": style.WAITING}
BATCH_COLORS = {"hybrid batch": HYBRID, "decodes only": DECODE}  # a prefill's is in LANE_COLORS
FEW_LANES = 40  # up to here there is room for white between lanes


class RecordedRun(Protocol):
    """The part of a lab.measure.run_loop.Run that is drawn."""

    @property
    def completions(self) -> Sequence[Completion]: ...

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


@dataclass(frozen=True)
class GapScale:
    """The colours of gaps: red above the limit, then yellow, and green from a tenth of it down."""

    limit_s: float
    limit_name: str

    @cached_property
    def norm(self) -> LogNorm:
        """The seconds of a gap as a place on the scale, from 0 to 1."""
        return LogNorm(self.limit_s / 10, self.limit_s)

    def color(self, seconds: float) -> tuple[float, float, float, float]:
        """The colour of a gap of this length."""
        return GAPS(self.norm(max(seconds, self.limit_s / 10)))


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
    axes = figure.subplots(2 * len(runs), 1, sharex=True, height_ratios=[2, 1] * len(runs))
    scale = GapScale(anchor_s, "10 decode iterations")
    draw_runs(figure, axes, axes[::2], runs, scale, extra_legend=BATCH_COLORS)
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
    axis.bar(starts, heights, widths, align="edge", color=colors, edgecolor=colors, lw=0.8)
    highest = max(heights, default=1)
    axis.set(ylim=(-0.02 * highest, 1.1 * highest), ylabel="tokens")
    axis.set_yticks([0, highest], ["0", f"{highest:,}"])
    axis.spines[["top", "right", "bottom"]].set_visible(False)


def lane_bars(completions: Iterable[Completion], iterations: Iterable[Iteration]) -> list[Bar]:
    """The bars of all lanes, in the order in which they are drawn: waiting, gaps, prefills."""
    waiting = []
    gaps = []
    for completion in completions:
        request_id = completion.request_id
        if completion.scheduled is not None and completion.scheduled > completion.arrival:
            waiting.append(Bar(request_id, completion.arrival, completion.scheduled, "waiting"))
        for start, end in pairwise(completion.token_times):
            gaps.append(Bar(request_id, start, end, "gap"))
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
    scale: GapScale,
    *,
    extra_legend: Mapping[str, str] | None = None,
    window: tuple[float, float] | None = None,
) -> None:
    """Draw the requests of each run in one of `lanes`, which are some of the `axes`.

    `window` is the part to show, in seconds, by default all of it. Above the axes a scale says how
    long a gap of a colour is, and a legend what other colours mean: those of lanes, and those of
    `extra_legend`, {text: colour}."""
    bars_of = {name: lane_bars(run.completions, run.iterations) for name, run in runs.items()}
    legend = {**LANE_COLORS, **(extra_legend or {})}
    draw_gap_scale(figure, axes, scale, legend)
    end = max((bar.end for bars in bars_of.values() for bar in bars), default=1)
    axes[0].set_xlim(window or (0, 1.02 * end))
    colors = style.policy_colors(runs)
    for axis, (name, bars) in zip(lanes, bars_of.items(), strict=True):
        draw_lanes(axis, bars, scale)
        axis.set_title(name, **style.BOLD, color=colors[name])


def draw_gap_scale(
    figure: FigureBase,
    axes: Sequence[Axes],
    scale: GapScale,
    legend: Mapping[str, str],
) -> None:
    """Draw the scale of the gaps' colours above the `axes`, and the legend beside it."""
    bar = figure.colorbar(
        ScalarMappable(scale.norm, GAPS),
        ax=axes,
        location="top",
        extend="max",
        shrink=0.55,
        anchor="SE",
        aspect=32,
        pad=0.01,
    )
    bar.minorticks_off()
    ticks = [share * scale.limit_s for share in (0.1, 0.2, 0.5, 1)]
    bar.set_ticks(ticks, labels=[style.three_digits(tick) for tick in ticks])
    bar.set_label(f"time between tokens in s; red: more than {scale.limit_name}")
    handles = [Patch(color=color, label=text) for text, color in legend.items()]
    bar.ax.legend(handles=handles, loc="center right", bbox_to_anchor=(-0.03, 1.5))


def draw_lanes(axis: Axes, bars: Sequence[Bar], scale: GapScale) -> None:
    """Draw a lane for each request, the first on top, and say how long the longest gap is.

    A request that only waits while `axis` shows it has no lane. The longest gap is that of all
    `bars`, shown or not."""
    left, right = axis.get_xlim()
    visible = [bar for bar in bars if bar.start < right and bar.end > left]
    ids = sorted({bar.request_id for bar in visible if bar.kind != "waiting"})
    lane_of = {request_id: lane for lane, request_id in enumerate(ids)}
    few = len(ids) <= FEW_LANES
    half_height = 0.42 if few else 0.5
    corners = []
    colors = []
    edge_widths = []
    for bar in visible:
        if bar.request_id not in lane_of:
            continue
        low = lane_of[bar.request_id] - half_height
        high = lane_of[bar.request_id] + half_height
        corners.append([(bar.start, low), (bar.end, low), (bar.end, high), (bar.start, high)])
        seconds = bar.end - bar.start
        color = scale.color(seconds) if bar.kind == "gap" else LANE_COLORS[bar.kind]
        colors.append(color)
        wide = seconds > (right - left) / 200
        edge_widths.append(0.3 if few and wide else 0)
    rectangles = PolyCollection(
        corners,
        facecolors=colors,
        edgecolors="white",
        linewidths=edge_widths,
        antialiased=few,
    )
    axis.add_collection(rectangles)
    tick_every = 1 + len(ids) // 5
    axis.set_yticks(range(0, len(ids), tick_every), [str(i) for i in ids[::tick_every]])
    axis.set(ylim=(len(ids) - 0.4, -0.6), ylabel="request")
    longest = max((bar.end - bar.start for bar in bars if bar.kind == "gap"), default=None)
    axis.set_title(f"longest time between tokens: {style.three_digits(longest)} s", loc="right")


# ---- Latencies under one load -------------------------------------------------------------------


class Latency(NamedTuple):
    """A latency that is drawn: the label of its axis, and its values of a request in seconds."""

    label: str
    values: Callable[[Completion], list[float]]


def _ttft(completion: Completion) -> list[float]:
    return [] if completion.ttft is None else [completion.ttft]


def _tbt(completion: Completion) -> list[float]:
    return completion.tbt


def _scheduling_delay(completion: Completion) -> list[float]:
    return [] if completion.scheduling_delay is None else [completion.scheduling_delay]


TTFT = Latency("time to first token (TTFT) in s", _ttft)
TBT = Latency("time between tokens (TBT) in s", _tbt)
SCHEDULING_DELAY = Latency("scheduling delay in s", _scheduling_delay)


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
    top, bottom = figure.subfigures(2, 1, squeeze=False, height_ratios=heights)[:, 0]
    panels = top.subplots(1, 3, sharey=True)
    for axis, latency in zip(panels, (TTFT, TBT, SCHEDULING_DELAY), strict=True):
        draw_latency(axis, latency, runs)
    panels[1].axvline(slo_s, **style.LIMIT_LINE)
    panels[1].set_title(f"dashed: SLO {slo_s:.3g} s")
    panels[0].set_ylabel("share that is longer")
    panels[0].set_yticks([0.001, 0.01, 0.1, 0.5, 1], ["0.1 %", "1 % (P99)", "10 %", "P50", "100 %"])
    panels[0].set_yticks([], minor=True)
    handles, names = panels[0].get_legend_handles_labels()
    top.legend(handles, names, ncols=min(5, len(runs)), **style.LEGEND_BELOW)

    lanes = bottom.subplots(len(runs), 1, squeeze=False, sharex=True)[:, 0]
    window = None if letters else window_of_longest_gap(runs.values())
    draw_runs(bottom, lanes, lanes, runs, GapScale(slo_s, "the SLO"), window=window)
    lanes[-1].set_xlabel("time in s" if letters else "time in s, around the longest gap")
    if letters:
        for axis in lanes:
            axis.set_yticks(range(len(letters)), list(letters))
    return style.finish(figure, title, file, machine)


def draw_latency(axis: Axes, latency: Latency, runs: Mapping[str, RecordedRun]) -> None:
    """Draw which share of a latency's values is longer than x, a curve for each run."""
    colors = style.policy_colors(runs)
    for name, run in runs.items():
        values = [value for c in run.completions for value in latency.values(c)]
        if not values:
            continue
        axis.ecdf(values, complementary=True, label=name, color=colors[name])
        axis.plot(np.percentile(values, [50, 99]), [0.5, 0.01], "o", ms=4, color=colors[name])
    style.log_scale("x", axis)
    axis.set(xlabel=latency.label, yscale="log", ylim=(5e-4, 1.3))


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
    top, bottom = figure.subfigures(2, 1, squeeze=False, height_ratios=heights)[:, 0]
    draw_capacity_bars(top.subplots(), results)
    tbt, delay = bottom.subplots(1, 2)
    draw_against_rate(tbt, results, "p99_tbt_s")
    draw_limit(tbt, "P99 time between tokens in s", "SLO", slo_s)
    draw_against_rate(delay, results, "p50_delay_s")
    draw_limit(delay, "median scheduling delay in s", "limit", MAX_DELAY_S)
    title = "The highest rate that meets the SLO, and the latencies against the load"
    return style.finish(figure, title, file, machine)


def draw_capacity_bars(axis: Axes, results: Mapping[str, Mapping]) -> None:
    """Draw a bar for each capacity, with its number behind it; hatched, if that is a bound."""
    colors = style.policy_colors(results)
    names = [f"{name} (busy)" if result["busy"] else name for name, result in results.items()]
    capacities = [result["capacity_qps"] for result in results.values()]
    bars = axis.barh(names, capacities, 0.7, color=list(colors.values()))
    axis.bar_label(bars, [style.three_digits(capacity) for capacity in capacities], padding=4)
    for bar, capacity in zip(bars, capacities, strict=True):
        if capacity.bound:  # the capacity is not where the bar ends
            bar.set(hatch="////", alpha=0.5)
    axis.margins(x=0.2)
    axis.set(ylim=(len(results) - 0.4, -0.6), xlabel="capacity per second", xlim=(0, None))
    axis.spines[["top", "right"]].set_visible(False)


def draw_against_rate(axis: Axes, results: Mapping[str, Mapping], key: str) -> None:
    """Draw a latency of the last run at each rate: a line where all was met, hollow dots else."""
    colors = style.policy_colors(results)
    for name, result in results.items():
        point_of = {point["qps"]: point for point in result["points"]}  # later runs replace earlier
        points = [point_of[qps] for qps in sorted(point_of) if point_of[qps][key] is not None]
        for met in (True, False):
            shown = [point for point in points if point["met"] == met]
            axis.plot(
                [point["qps"] for point in shown],
                [point[key] for point in shown],
                marker="o",
                ms=5,
                lw=1.4,
                color=colors[name],
                ls="-" if met else "",
                mfc=colors[name] if met else "white",
            )


def draw_limit(axis: Axes, latency: str, limit: str, limit_s: float) -> None:
    """Draw the limit of a latency as a dashed line, and label the axes of the panel."""
    axis.axhline(limit_s, **style.LIMIT_LINE)
    style.log_scale("xy", axis)
    axis.set_title(f"{latency} (dashed: {limit} {limit_s:.3g} s)", loc="left")
    axis.set_xlabel("load per second (hollow: not met)")
