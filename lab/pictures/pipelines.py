"""Pictures of pipelines: the batches on their stages, and the bubbles between them.

Read first: style.py, lab/simulator/simulation.py. Read next: page.py."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from string import ascii_uppercase
from typing import NamedTuple, Protocol

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from lab.pictures import style
from lab.pictures.style import DECODE, HYBRID, PREFILL, duration
from policies.micro_batches import StageRun

LEGEND = {PREFILL: "prefill only", HYBRID: "hybrid: prefill and decodes", DECODE: "decodes only"}
BOX_HEIGHT = 0.64  # as a share of the lane's
MAX_LABELS = 6  # in a box: one for each chunk
LANE_WIDTH = 7.8  # inches
LANE_HEIGHT = 0.8  # inches
LABEL_WIDTH = 0.145  # inches, of a label such as A_p
LABEL_SPACE = 0.04  # inches between two labels
EXPLANATION = """\
$A_p$: a prefill chunk of request A, $A_d$: a decode of A. Bubbles, by what is before and after:
PB1: prefills of different length; PB2: a prefill and decodes; PB3: decodes of different context"""


class LabelPlace(NamedTuple):
    """The place of a bubble's label, another one for each kind, so that labels do not collide."""

    share_after: float  # of the bubble that comes after the place
    alignment: str  # of the text, there


LABEL_PLACES = {
    "PB1": LabelPlace(0, "right"),
    "PB2": LabelPlace(1, "left"),
    "PB3": LabelPlace(0.5, "center"),
}
Bubbles = Sequence[tuple[StageRun, str]]  # what lab.simulator.simulation.bubble_kinds returns


def plot_pipeline(
    pipelines: Mapping[str, Sequence[StageRun]],
    bubbles: Mapping[str, Bubbles],
    title: str,
    file: str | Path,
    machine: Mapping[str, object] | None = None,
    end_label: str = "makespan",
) -> Figure:
    """Draw when the stages of pipelines worked and when they waited, and write it to `file`.

    A stage has a lane, and a batch a box (SARATHI, Figures 1 and 5; Sarathi-Serve, Figure 8).
    Pipelines and their bubbles have the same names. `end_label` names the time of the last end."""
    stage_runs = [run for runs in pipelines.values() for run in runs]
    stages = 1 + max(run.stage for run in stage_runs)
    end = 1.01 * max(run.end for run in stage_runs)
    figure = style.new_figure(1.9 + len(pipelines) * (0.6 + LANE_HEIGHT * stages))
    axes = figure.subplots(len(pipelines), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (name, runs) in zip(axes, pipelines.items(), strict=True):
        for run in runs:
            _draw_batch(axis, run, width=LANE_WIDTH * (run.end - run.start) / end)
        last_end = max(run.end for run in runs)
        heading = f"{end_label} {duration(last_end)}; bubbles of all stages"
        for kind in LABEL_PLACES:
            waits = [run for run, bubble_kind in bubbles[name] if bubble_kind == kind]
            heading += f", {kind} {duration(sum(run.bubble for run in waits))}"
            if waits:
                _label_longest_bubble(axis, kind, waits)
        axis.set_title(name, **style.BOLD)
        axis.set_title(heading, loc="right")
        axis.set(xlim=(0, end), ylim=(stages - 0.5, -0.62))
        axis.set_yticks(range(stages), [f"stage {stage + 1}" for stage in range(stages)])
        axis.tick_params(axis="y", length=0)
        axis.spines[["top", "right", "left"]].set_visible(False)
    axes[-1].set_xlabel("time in s")
    handles = [Patch(color=color, label=label) for color, label in LEGEND.items()]
    handles.append(Patch(**style.BUBBLE, label="bubble: the stage waits"))
    figure.legend(handles=handles, ncols=3, **style.LEGEND_BELOW)
    return style.finish(figure, f"{title}\n{EXPLANATION}", file, machine)


def _draw_batch(axis: Axes, run: StageRun, width: float) -> None:
    """Draw the box of a batch on a stage, `width` inches wide, and its bubble.

    The box names the chunks of the batch if there is room for them."""
    decodes = sum(is_decode for *_, is_decode in run.chunks)
    color = style.batch_color(len(run.chunks) - decodes, decodes)
    seconds = run.end - run.start
    axis.barh(run.stage, seconds, BOX_HEIGHT, run.start, color=color, edgecolor="white", lw=0.4)
    if run.bubble:
        bubble_start = run.start - run.bubble
        axis.barh(run.stage, run.bubble, BOX_HEIGHT, bubble_start, lw=0.5, **style.BUBBLE)
    if width < LABEL_WIDTH or len(run.chunks) > MAX_LABELS:
        return
    labels = [_label(request_id, is_decode) for request_id, *_, is_decode in run.chunks]
    width_in_a_row = (LABEL_WIDTH + LABEL_SPACE) * len(labels) - LABEL_SPACE
    separator = " " if width_in_a_row <= width else "\n"
    axis.text(
        run.start + seconds / 2,
        run.stage,
        separator.join(labels),
        ha="center",
        va="center",
        fontsize=7,
        linespacing=1.05,
        color="k" if color == HYBRID else "w",
    )


def _label(request_id: int, is_decode: bool) -> str:
    """A chunk's label in TeX: A_p for a prefill of request 0, B_d for a decode of request 1.

    Requests after the 26th have no letter."""
    letter = ascii_uppercase[request_id : request_id + 1]
    return f"${letter}_{'d' if is_decode else 'p'}$"


def _label_longest_bubble(axis: Axes, kind: str, waits: Sequence[StageRun]) -> None:
    """Write the length of the longest of these bubbles above it.

    Of those that are equal to the microsecond, the last has the label."""
    longest = max(reversed(waits), key=lambda run: round(run.bubble, 6))
    place = LABEL_PLACES[kind]
    axis.text(
        longest.start - place.share_after * longest.bubble,
        longest.stage - BOX_HEIGHT / 2 - 0.04,
        f"{kind} {duration(longest.bubble)}",
        ha=place.alignment,
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
        color = colors[policy_of[name]]
        median_label = f"{name}: median {duration(median(run.bubbles))}"
        left.ecdf(run.bubbles, label=median_label, color=color, lw=1.8)
        count_label = f"{name}: {len(run.ends):,} in {duration(max(run.ends))}"
        right.ecdf(run.ends, label=count_label, color=color, lw=1.8)
    left.set_xscale("symlog", linthresh=0.1)
    left.set(xlabel="bubble time of a request in s")
    left.set_ylabel("share of the requests, at most that long")
    right.set(xlabel="time in s", xlim=(0, None))
    right.set_ylabel("share of the requests, completed")
    for axis in (left, right):
        axis.grid()
        axis.xaxis.set_major_formatter(style.PLAIN)
        axis.yaxis.set_major_formatter(PercentFormatter(1))
        axis.legend(loc="lower left", bbox_to_anchor=(0, 1))
    return style.finish(figure, title, file)
