"""Draw what the simulator saw: batches in a pipeline, and the bubbles between them. Read first:
style.py, lab/simulator/simulation.py. Read next: schedule_page.py."""

from statistics import median
from string import ascii_uppercase

from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from views import style
from views.style import DECODE, HYBRID, PREFILL

COLORS = {PREFILL: "prefill only", HYBRID: "hybrid: prefill and decodes", DECODE: "decodes only"}
BOX = 0.64  # the height of a box, as a share of its lane's
MOST_SIGNS = 6  # in a box
LANE_WIDTH, LANE_HEIGHT, SIGN = 7.8, 0.8, 0.145  # inches; SIGN: the width of one such as A_p


def plot_pipeline(runs, kinds, title, file, machine=None, what="makespan"):
    """Draw when the stages of a pipeline worked and when they waited, and write it to `file`: a
    lane for each stage, a box for each batch (SARATHI, Figures 1 and 5; Sarathi-Serve, Figure 8).
    `runs` maps a name to a replica's StageRuns, `kinds` to bubble_kinds; `what` is their end."""
    stages = 1 + max(run.stage for own in runs.values() for run in own)
    end = 1.01 * max(run.end for own in runs.values() for run in own)
    figure = style.new_figure(1.9 + len(runs) * (0.6 + LANE_HEIGHT * stages))
    axes = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (name, own) in zip(axes, runs.items()):
        for run in own:
            _draw_batch(axis, run, LANE_WIDTH * (run.end - run.start) / end)
        head = f"{what} {_duration(max(run.end for run in own))}; bubbles of all stages"
        for kind, (share, side) in style.PLACES.items():
            waits = [run for run, its in kinds[name] if its == kind]
            head += f", {kind} {_duration(sum(run.bubble for run in waits))}"
            # the longest; the last of those equal to the microsecond
            for run in sorted(waits, key=lambda run: round(run.bubble, 6))[-1:]:
                x, y = run.start - share * run.bubble, run.stage - BOX / 2 - 0.04
                axis.text(x, y, f"{kind} {_duration(run.bubble)}", ha=side)
        axis.set_title(name, **style.BOLD)
        axis.set_title(head, loc="right")
        axis.set(xlim=(0, end), ylim=(stages - 0.5, -0.62))
        axis.set_yticks(range(stages), [f"stage {stage + 1}" for stage in range(stages)])
        axis.tick_params(axis="y", length=0)
        axis.spines[["top", "right", "left"]].set_visible(False)
    axes[-1].set_xlabel("time in s")
    signs = [Patch(color=color, label=label) for color, label in COLORS.items()]
    signs.append(Patch(**style.BUBBLE, label="bubble: the stage waits"))
    figure.legend(handles=signs, ncols=3, **style.BELOW)
    return style.finish(figure, style.PIPELINE.format(title), file, machine)


def _draw_batch(axis, run, width):
    """A box for a StageRun, `width` inches wide, with its requests in it, and for its bubble."""
    decodes, seconds = sum(is_decode for *_, is_decode in run.chunks), run.end - run.start
    color = DECODE if decodes == len(run.chunks) else HYBRID if decodes else PREFILL
    axis.barh(run.stage, seconds, BOX, run.start, color=color, edgecolor="white", lw=0.4)
    if run.bubble:
        axis.barh(run.stage, run.bubble, BOX, run.start - run.bubble, lw=0.5, **style.BUBBLE)
    if width >= SIGN and len(run.chunks) <= MOST_SIGNS:
        signs = [f"${ascii_uppercase[i : i + 1]}_{'pd'[d]}$" for i, *_, d in run.chunks]
        text = (" " if (SIGN + 0.04) * len(signs) <= width + 0.04 else "\n").join(signs)
        look = {"fontsize": 7, "linespacing": 1.05, "color": "k" if color == HYBRID else "w"}
        axis.text(run.start + seconds / 2, run.stage, text, ha="center", va="center", **look)


def _duration(seconds):
    value, unit = (1000 * seconds, "ms") if 0 < seconds < 1 else (seconds, "s")
    return f"{style.three_digits(value)} {unit}"


def plot_bubbles(systems, title, file):
    """Draw how long bubbles held up requests, and how many were done by when (SARATHI, Figure 12).
    `systems` maps a name, which begins with that of a policy and a comma, to a sarathi.Offline."""
    figure = style.new_figure(4.6)
    left, right = figure.subplots(1, 2)
    colors = style.policy_colors(name.split(",")[0] for name in systems)
    for name, its in systems.items():
        look = {"color": colors[name.split(",")[0]], "lw": 1.8}
        left.ecdf(its.bubbles, label=f"{name}: median {_duration(median(its.bubbles))}", **look)
        label = f"{name}: {len(its.ends):,} in {_duration(max(its.ends))}"
        right.ecdf(its.ends, label=label, **look)
    left.set_xscale("symlog", linthresh=0.1)
    left.set_xlabel("bubble time of a request in s")
    right.set(xlabel="time in s", xlim=(0, None))
    for axis, of_those in ((left, "at most that long"), (right, "completed")):
        axis.set_ylabel(f"share of the requests, {of_those}")
        axis.grid()
        axis.xaxis.set_major_formatter(style.PLAIN)
        axis.yaxis.set_major_formatter(PercentFormatter(1))
        axis.legend(loc="lower left", bbox_to_anchor=(0, 1))
    return style.finish(figure, title, file)
