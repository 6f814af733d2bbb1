"""Draw what the simulator saw: batches in a pipeline, and the bubbles between them.

Read first: serving.py, simulator/simulation.py. Read next: chrome_trace.py.
"""

import numpy as np
from matplotlib.patches import Patch, Rectangle

from views import style
from views.serving import cumulative
from views.style import DECODE, HYBRID, PREFILL, log_scale, new_figure, policy_colors

BUBBLE, EDGE = "#e4e4e4", "#777777"
COLORS = {PREFILL: "prefill only", HYBRID: "hybrid: prefill and decodes", DECODE: "decodes only"}
WAITS = {"facecolor": BUBBLE, "edgecolor": EDGE, "hatch": "////"}
LANE_WIDTH, LANE_HEIGHT, SIGN = 7.8, 0.8, 0.145  # inches; SIGN: the width of one such as A_p
CENTRED = {"ha": "center", "va": "center", "linespacing": 1.05}
LABEL = {"ha": "center", "va": "bottom", "fontsize": 9, "zorder": 5, "linespacing": 1.05}
LABEL |= {"bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.5}}
LABEL |= {"arrowprops": {"arrowstyle": "-", "lw": 0.8, "shrinkA": 0, "shrinkB": 0}}
BOX = 0.64  # the height of a box, as a share of its lane's
KINDS = ("PB1", "PB2", "PB3")
LEGEND = """
$A_p$: a prefill chunk of request A, $A_d$: a decode of A. Bubbles, by what is before and after:
PB1: prefills of different length; PB2: a prefill and decodes; PB3: decodes of different context"""


def plot_pipeline(runs, kinds, title, file):
    """Draw when the stages of a pipeline worked and when they waited, and write it to `file`.

    `runs` maps a name to the StageRuns of one replica, `kinds` to its bubble_kinds. A panel for
    each has a lane for each stage, a box for each batch (SARATHI, Figures 1 and 5; Sarathi-Serve,
    Figure 8), labels at the longest bubbles. One more enlarges the first PB3 too narrow to be seen.
    """
    ends = {name: max(run.end for run in own) for name, own in runs.items()}
    stages, end = 1 + max(run.stage for own in runs.values() for run in own), max(ends.values())
    panels = []
    for name, own in runs.items():
        sums = [sum(run.bubble for run, k in kinds[name] if k == kind) for kind in KINDS]
        head = f"makespan {_duration(ends[name])}; bubbles of all stages: "
        head += ", ".join(f"{kind} {_duration(seconds)}" for kind, seconds in zip(KINDS, sums))
        panels.append((name, head, own, _longest(kinds[name]), (0.0, 1.01 * end)))
    zoomed, zoom = _find_zoom(kinds, end)
    if zoom:
        head = f"{zoomed}, enlarged", "what is in the black frame above"
        panels.append((*head, runs[zoomed], kinds[zoomed], zoom))
    figure = new_figure(1.9 + len(panels) * (0.6 + LANE_HEIGHT * stages))
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axis, (name, head, own, bubbles, window) in zip(axes, panels):
        _draw_stages(axis, own, window)
        _draw_labels(axis, bubbles, window)
        axis.set(xlim=window, ylim=(stages - 0.5, -0.62))
        axis.set_yticks(range(stages), [f"stage {stage + 1}" for stage in range(stages)])
        axis.tick_params(axis="y", length=0)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.set_title(style.label(name), **style.BOLD)
        axis.set_title(head, loc="right", fontsize=10)
        if name == zoomed:
            size = zoom[1] - zoom[0], stages - 1 + BOX
            axis.add_patch(Rectangle((zoom[0], -BOX / 2), *size, fill=False, lw=1.3, zorder=4))
    axes[-1].set_xlabel("time in s")
    signs = [Patch(color=color, label=label) for color, label in COLORS.items()]
    signs.append(Patch(**WAITS, label="bubble: the stage waits"))
    signs.append(Patch(facecolor="white", edgecolor=EDGE, label="idle for want of work"))
    figure.legend(handles=signs, ncols=3, **style.BELOW)
    return style.finish(figure, title + LEGEND, file)


def _find_zoom(kinds, end):
    """(name, (from, to)) of the longest PB3 of the first run where all are below 1 % of `end`."""
    for name, pairs in kinds.items():
        for run, kind in _longest(pairs):
            if kind == "PB3" and run.bubble < 0.01 * end:
                half = max(1.2 * (run.end - run.start), 2 * run.bubble)
                return name, (run.start - run.bubble / 2 - half, run.start - run.bubble / 2 + half)
    return None, None


def _longest(pairs):
    """Of (StageRun, kind), the longest of each kind; the last of those equal to the microsecond."""
    pairs = sorted(pairs, key=lambda pair: round(pair[0].bubble, 6))
    return list({kind: (run, kind) for run, kind in pairs}.values())


def _duration(seconds):
    value, unit = (1000 * seconds, "ms") if 0 < seconds < 1 else (seconds, "s")
    return f"{style.three_digits(value)} {unit}"


def _draw_stages(axis, stage_runs, window):
    """A box for each batch and bubble in the window, (from, to) in s, with the requests in it."""
    for run in stage_runs:
        if run.start - run.bubble >= window[1] or run.end <= window[0]:
            continue
        decodes, y = sum(is_decode for *_, is_decode in run.chunks), run.stage
        color = DECODE if decodes == len(run.chunks) else HYBRID if decodes else PREFILL
        axis.barh(y, run.end - run.start, BOX, run.start, color=color, edgecolor="white", lw=0.4)
        if run.bubble:
            axis.barh(y, run.bubble, BOX, run.start - run.bubble, lw=0.5, **WAITS)
        left, right = max(run.start, window[0]), min(run.end, window[1])
        width = (right - left) * LANE_WIDTH / (window[1] - window[0])
        if width >= SIGN:
            signs = [f"${chr(ord('A') + i)}_{'pd'[is_decode]}$" for i, *_, is_decode in run.chunks]
            in_a_row = (SIGN + 0.04) * len(signs) <= width + 0.04
            text, color = (" " if in_a_row else "\n").join(signs), "k" if color == HYBRID else "w"
            axis.text((left + right) / 2, y, text, fontsize=7, color=color, **CENTRED)


def _draw_labels(axis, bubbles, window):
    """Above each bubble, a (StageRun, kind), that is in the window: its kind and length."""
    scale, taken = LANE_WIDTH / (window[1] - window[0]), {}  # stage -> where its last label ends
    for run, kind in sorted(bubbles, key=lambda pair: (pair[0].stage, pair[0].start)):
        middle, half, y = run.start - run.bubble / 2, 0.55 / scale, run.stage - BOX / 2
        if not window[0] < run.start < window[1] + run.bubble:
            continue
        x = min(max(middle, taken.get(run.stage, window[0]) + half), window[1] - half)
        taken[run.stage] = x + half
        axis.annotate(f"{kind} {_duration(run.bubble)}", (middle, y), (x, y - 0.04), **LABEL)


def plot_bubbles(systems, title, file):
    """Draw how long bubbles held up requests, and how many were done by when (SARATHI, Figure 12).

    `systems` maps a name, which begins with that of a policy and a comma, to a sarathi.Offline. On
    the left the share of the requests, on the right their number.
    """
    figure = new_figure(4.6)
    left, right = figure.subplots(1, 2)
    log_scale(left, "x", [seconds for its in systems.values() for seconds in its.bubbles])
    low, policies = left.get_xlim()[0], [name.split(",")[0] for name in systems]
    colors = policy_colors(policies)
    for (name, its), policy in zip(systems.items(), policies):
        x, share = cumulative(its.bubbles)
        ends, done = cumulative(its.ends)
        count, look = len(ends) - 1, {"where": "post", "color": colors[policy], "lw": 1.8}
        label = f"{style.label(name)}: median {_duration(np.median(x[1:]))}"
        left.step(np.maximum(x, low), share, label=label, **look)
        label = f"{style.label(name)}: {count:,} in {_duration(ends[-1])}"
        right.step([0, *ends], [0, *done * count], label=label, **look)
    xlabel = "bubble time of a request in s, log scale (leftmost: less, or none)"
    left.set(xlabel=xlabel, ylabel="share of the requests, at most that long")
    left.set(xlim=(low / 1.25, None), ylim=(0, 1.03))
    left.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "P50", "75 %", "100 %"])
    right.set(xlabel="time in s", ylabel="completed requests", xlim=(0, None), ylim=(0, None))
    for axis in (left, right):
        axis.legend(**style.ABOVE)
        axis.grid(alpha=0.25)
    return style.finish(figure, title, file)
