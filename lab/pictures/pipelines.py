"""Pictures of pipelines: the batches on their stages, and the bubbles between them.

Read first: style.py, lab/simulator/simulation.py. Read next: page.py."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from string import ascii_uppercase
from typing import Any, Protocol

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from lab.pictures import style
from parallel.micro_batches import StageRun

LEGEND = {
    style.PREFILL: "prefill only",
    style.HYBRID: "hybrid: prefill and decodes",
    style.DECODE: "decodes only",
}
BOX_HEIGHT = 0.64  # as a share of the lane's
LANE_WIDTH = 7.8  # inches
LANE_HEIGHT = 0.8  # inches
LETTER_WIDTH = 0.085  # inches
EXPLANATION = """\
$A_p$: a prefill chunk of request A, $BC_d$: decodes of B and C. Bubbles: PB1 between prefills of
different length, PB2 between a prefill and decodes, PB3 between decodes of different context"""
# where the longest bubble of a kind is named, so that names do not collide: the share of the bubble
# after the place, and how the text lies there
PLACES = {"PB1": (0, "right"), "PB2": (1, "left"), "PB3": (0.5, "center")}
Bubbles = Sequence[tuple[StageRun, str]]  # what lab.simulator.simulation.bubble_kinds returns


def plot_pipeline(
    pipelines: Mapping[str, Sequence[StageRun]],
    bubbles: Mapping[str, Bubbles],
    title: str,
    file: str | Path,
) -> Figure:
    """Draw when the stages of pipelines worked and when they waited, and write it to `file`.

    A stage has a lane, and a batch a box (SARATHI, Figures 1 and 5; Sarathi-Serve, Figure 8).
    Pipelines and their bubbles have the same names."""
    stage_runs = [run for runs in pipelines.values() for run in runs]
    stages = 1 + max(run.stage for run in stage_runs)
    end = 1.01 * max(run.end for run in stage_runs)
    figure = style.new_figure(1.9 + len(pipelines) * (0.6 + LANE_HEIGHT * stages))
    axes = figure.subplots(len(pipelines), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (name, runs) in zip(axes, pipelines.items(), strict=True):
        for run in runs:
            _draw_batch(axis, run, width=LANE_WIDTH * (run.end - run.start) / end)
        last_end = max(run.end for run in runs)
        heading = f"makespan {style.duration(last_end)}; bubbles of all stages"
        for kind in PLACES:
            waits = [run for run, bubble_kind in bubbles[name] if bubble_kind == kind]
            heading += f", {kind} {style.duration(sum(run.bubble for run in waits))}"
            if waits:
                _label_longest_bubble(axis, kind, waits)
        axis.set_title(name, **style.BOLD)
        axis.set_title(heading, loc="right")
        axis.set(xlim=(0, end), ylim=(stages - 0.5, -0.62))
        axis.set_yticks(range(stages), [f"stage {stage + 1}" for stage in range(stages)])
        axis.tick_params(axis="y", length=0)
        style.bare(axis, "left")
    axes[-1].set_xlabel("time in s")
    handles = [Patch(color=color, label=label) for color, label in LEGEND.items()]
    handles.append(Patch(**style.BUBBLE, label="bubble: the stage waits"))
    figure.legend(handles=handles, ncols=3, **style.LEGEND_BELOW)
    return style.finish(figure, f"{title}\n{EXPLANATION}", file)


def _draw_batch(axis: Axes, run: StageRun, width: float) -> None:
    """Draw the box of a batch on a stage, `width` inches wide, and its bubble.

    If there is room for their letters, the box names the requests that decode, and below them
    those with a prefill chunk."""
    decodes = [chunk.request_id for chunk in run.chunks if chunk.is_decode]
    prefills = [chunk.request_id for chunk in run.chunks if not chunk.is_decode]
    color = style.batch_color(len(prefills), len(decodes))
    seconds = run.end - run.start
    axis.barh(run.stage, seconds, BOX_HEIGHT, run.start, color=color, edgecolor="white", lw=0.4)
    if run.bubble:
        bubble_start = run.start - run.bubble
        axis.barh(run.stage, run.bubble, BOX_HEIGHT, bubble_start, lw=0.5, **style.BUBBLE)
    lines = []
    for ids, kind in ((decodes, "d"), (prefills, "p")):
        if max(ids, default=0) >= len(ascii_uppercase) or (len(ids) + 1) * LETTER_WIDTH > width:
            return  # there is no letter for one, or no room for all
        if ids:
            lines.append(f"${''.join(ascii_uppercase[i] for i in ids)}_{kind}$")
    axis.text(
        run.start + seconds / 2,
        run.stage,
        "\n".join(lines),
        ha="center",
        va="center",
        fontsize=8,
        color="k" if color == style.HYBRID else "w",
    )


def _label_longest_bubble(axis: Axes, kind: str, waits: Sequence[StageRun]) -> None:
    """Write the length of the longest of these bubbles above it.

    Of those that are equal to the microsecond, the last has the label."""
    longest = max(reversed(waits), key=lambda run: round(run.bubble, 6))
    share_after, alignment = PLACES[kind]
    axis.text(
        longest.start - share_after * longest.bubble,
        longest.stage - BOX_HEIGHT / 2 - 0.04,
        f"{kind} {style.duration(longest.bubble)}",
        ha=alignment,
    )


class OfflineRun(Protocol):
    """A simulated run of requests that are all there at the start, as `plot_bubbles` draws it."""

    @property
    def bubbles(self) -> Sequence[float]: ...  # the bubble time of each request, in s

    @property
    def ends(self) -> Sequence[float]: ...  # when each request was done, in s


def plot_bubbles(runs: Mapping[str, OfflineRun], title: str, file: str | Path) -> Figure:
    """Draw how long bubbles delayed requests, and how many were done by when, to `file`.

    This is SARATHI's Figure 12. A name of a run begins with that of a policy and a comma."""
    figure = style.new_figure(4.6)
    left, right = figure.subplots(1, 2)
    policy_of = {name: name.split(",")[0] for name in runs}
    colors = style.policy_colors(policy_of.values())
    for name, run in runs.items():
        line_style: Any = {"color": colors[policy_of[name]], "lw": 1.8}
        middle = style.duration(median(run.bubbles))
        end = style.duration(max(run.ends))
        left.ecdf(run.bubbles, label=f"{name}: median {middle}", **line_style)
        right.ecdf(run.ends, label=f"{name}: {len(run.ends):,} in {end}", **line_style)
    left.set_xscale("symlog", linthresh=0.1)
    left.set(xlabel="bubble time of a request in s")
    left.set_ylabel("share of the requests, at most that long")
    right.set(xlabel="time in s", xlim=(0, None), ylabel="share of the requests, completed")
    for axis in (left, right):
        axis.grid()
        axis.xaxis.set_major_formatter(style.PLAIN)
        axis.yaxis.set_major_formatter(PercentFormatter(1))
        axis.legend(loc="lower left", bbox_to_anchor=(0, 1))
    return style.finish(figure, title, file)
