"""Draw what the simulator saw: batches and bubbles in a pipeline, capacities of whole deployments.

The pictures follow SARATHI's Figures 1, 5 and 12 and Sarathi-Serve's Figures 8 and 10 to 12.
Read first: serving.py, simulator/simulation.py. Read next: chrome_trace.py, the same as a trace.
"""

import re

import numpy as np
from matplotlib.patches import Patch, Rectangle

from views import style
from views.serving import cumulative
from views.style import DECODE, PREFILL, STYLES, log_scale, new_figure, policy_colors

HYBRID, BUBBLE, EDGE = "#a6d3cf", "#e4e4e4", "#777777"
COLORS = {PREFILL: "prefill only", HYBRID: "hybrid: prefill and decodes", DECODE: "decodes only"}
WAITS = {"facecolor": BUBBLE, "edgecolor": EDGE, "hatch": "////"}
WIDTH, LANE_WIDTH, SIGN = 10, 9.0, 0.165  # inches: a picture, about its lanes, a sign such as A_p
WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # behind a text
CENTRED = {"ha": "center", "va": "center", "linespacing": 1.05}
LINE = {"arrowstyle": "-", "lw": 0.8, "shrinkA": 0, "shrinkB": 0}
BOX = 0.64  # the height of a box, as a share of its lane's
KINDS = ("PB1", "PB2", "PB3")
LEGEND = """
$A_p$: a prefill chunk of request A, $A_d$: a decode of A. Bubbles, by what is before and after:
PB1: prefills of different length; PB2: a prefill and decodes; PB3: decodes of different context"""


def plot_pipeline(runs, kinds, title, file):
    """Draw when the stages of a pipeline worked and when they waited, and write it to `file`.

    `runs` maps a name to the StageRuns of one replica, in the order in which batches entered,
    `kinds` to its bubbles, [(StageRun, "PB1", "PB2" or "PB3")]. A panel for each has a lane for
    each stage and a box for each batch (SARATHI, Figures 1 and 5; Sarathi-Serve, Figure 8), and
    labels at the longest bubbles. One more enlarges the first PB3 that is too narrow to be seen.
    """
    ends = [(run.stage, run.end) for own in runs.values() for run in own] or [(0, 1.0)]
    stages, end = 1 + max(stage for stage, _ in ends), max(end for _, end in ends)
    panels = []
    for name, own in runs.items():
        sums = [sum(run.bubble for run, k in kinds[name] if k == kind) for kind in KINDS]
        head = f"makespan {_duration(max((run.end for run in own), default=0))}; bubbles of all "
        head += "stages: " + ", ".join(f"{k} {_duration(s)}" for k, s in zip(KINDS, sums))
        panels.append((name, head, own, _longest(kinds[name]), (0.0, 1.01 * end)))
    zoomed, zoom = _find_zoom(kinds, end)
    if zoom:
        head = f"{zoomed}, enlarged", "what is in the black frame above"
        panels.append((*head, runs[zoomed], kinds[zoomed], zoom))
    lane = max(0.36, min(0.8, 2.4 / stages))  # its height in inches
    figure = new_figure(WIDTH, 1.7 + len(panels) * (0.6 + lane * stages))
    axes = figure.subplots(max(1, len(panels)), 1, squeeze=False)[:, 0]
    for axis, (name, head, own, bubbles, window) in zip(axes, panels):
        _draw_stages(axis, own, window, lane)
        _draw_labels(axis, bubbles, window)
        axis.set(xlim=window, ylim=(stages - 0.5, -0.62))
        axis.set_yticks(range(stages), [f"stage {stage + 1}" for stage in range(stages)])
        axis.tick_params(axis="y", length=0)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.set_title(name, **style.BOLD)
        axis.set_title(head, loc="right", fontsize=10)
        if name == zoomed:
            size = zoom[1] - zoom[0], stages - 1 + BOX
            axis.add_patch(Rectangle((zoom[0], -BOX / 2), *size, fill=False, lw=1.3, zorder=4))
    axes[-1].set_xlabel("time in s")
    signs = [Patch(color=color, label=label) for color, label in COLORS.items()]
    signs.append(Patch(**WAITS, label="bubble: the stage waits"))
    signs.append(Patch(facecolor="white", edgecolor=EDGE, label="idle for want of work"))
    figure.legend(handles=signs, ncols=5, **style.BELOW)
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


def _draw_stages(axis, stage_runs, window, lane):
    """A box for each batch and bubble in the window, (from, to) in s; `lane`: its inches."""
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
        text, color = _signs(run.chunks, width, lane), "black" if color == HYBRID else "white"
        if text:
            axis.text((left + right) / 2, y, text, fontsize=8, color=color, **CENTRED)


def _signs(chunks, width, lane):
    """A_p or A_d for each request of a batch, in a row or in lines; "" without room, in inches."""
    signs = [f"${chr(65 + i) if i < 26 else i}_{'pd'[is_decode]}$" for i, _, _, is_decode in chunks]
    size = SIGN / 5
    if len(chunks) > 4:
        decodes = sum(is_decode for *_, is_decode in chunks)
        counts = ((len(chunks) - decodes, "p"), (decodes, "d"))
        signs, size = [f"{count} {letter}" for count, letter in counts if count], SIGN / 2
    size *= max(len(sign) for sign in signs)
    if (size + 0.04) * len(signs) <= width + 0.04:
        return " ".join(signs)
    return "\n".join(signs) if size <= width and len(signs) <= int(lane * BOX / 0.15) else ""


def _draw_labels(axis, bubbles, window):
    """Kind and length of each (StageRun, kind) in the window: in the box, or above a narrow one."""
    scale, taken = LANE_WIDTH / (window[1] - window[0]), {}  # stage -> where its last label ends
    for run, kind in sorted(bubbles, key=lambda pair: (pair[0].stage, pair[0].start)):
        middle, length, half = run.start - run.bubble / 2, _duration(run.bubble), 0.55 / scale
        if not window[0] < run.start < window[1] + run.bubble:
            continue
        look = CENTRED | {"fontsize": 9, "bbox": WHITE}
        if run.bubble * scale > 0.52:
            axis.text(middle, run.stage, f"{kind}\n{length}", **look)
            continue
        x = min(max(middle, taken.get(run.stage, window[0]) + half), window[1] - half)
        taken[run.stage], y = x + half, run.stage - BOX / 2
        look |= {"va": "bottom", "arrowprops": LINE, "zorder": 5}
        axis.annotate(f"{kind} {length}", (middle, y), (x, y - 0.04), **look)


def plot_bubbles(systems, title, file):
    """Draw how long bubbles held up requests, and how many were done by when (SARATHI, Figure 12).

    `systems` maps a name to {"bubbles": the bubble time of each request, "ends": when each was
    completed or None}, both in s. On the left the share of the requests, on the right their number.
    """
    figure = new_figure(WIDTH, 4.6)
    left, right = figure.subplots(1, 2)
    seen = [value for system in systems.values() for value in system["bubbles"] if value > 0]
    low, xlabel = 0.0, "bubble time of a request in s"
    if seen and max(seen) > 30 * min(seen):
        log_scale(left, "x", seen)
        low, xlabel = left.get_xlim()[0], f"{xlabel}, log scale (leftmost: less, or none)"
        left.set_xlim(left=low / 1.25)
    for name, (color, line, _) in _styles(systems).items():
        x, share = cumulative(systems[name]["bubbles"])
        ends, done = cumulative(systems[name]["ends"])
        median = f"median {_duration(np.median(x[1:]))}" if len(x) else "no requests"
        count = f"{len(ends) - 1:,} in {_duration(ends[-1])}" if len(ends) else "none"
        ends, done = np.append(0.0, ends), np.append(0.0, done * (len(ends) - 1))
        look = {"where": "post", "color": color, "ls": line, "lw": 1.8}
        left.step(np.maximum(x, low), share, label=f"{name}: {median}", **look)
        right.step(ends, done, label=f"{name}: {count}", **look)
    left.set(xlabel=xlabel, ylabel="share of the requests, at most that long", ylim=(0, 1.03))
    left.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "P50", "75 %", "100 %"])
    right.set(xlabel="time in s", ylabel="completed requests", xlim=(0, None), ylim=(0, None))
    for axis in (left, right) if systems else ():
        axis.legend(**style.ABOVE)
    return _finish(figure, title, file)


def plot_capacities(groups, title, file, baseline="vllm"):
    """Draw capacities as bars, a panel for each setting (Sarathi-Serve, Figures 10 and 11).

    `groups` is a list of {"group": "Yi-34B, sharegpt4", "system": "vllm", "qps": requests/s,
    "paper": ratio}, a None in it is not known. A bar's label is the capacity, how many times that
    of `baseline` in the same group it is, and what the paper reports for that ratio.
    """
    names = list(dict.fromkeys(row["group"] for row in groups))
    systems = list(dict.fromkeys(row["system"] for row in groups))
    colors, columns = policy_colors(systems), min(4, max(1, len(names)))
    rows = max(1, -(-len(names) // columns))
    figure = new_figure(WIDTH, 1.0 + 2.1 * rows)
    axes = figure.subplots(rows, columns, squeeze=False)
    for name, axis in zip(names, axes.flat):
        bars = {row["system"]: row for row in groups if row["group"] == name}
        base = bars.get(baseline, {}).get("qps")
        for system, row in bars.items():
            qps, paper = row["qps"], row.get("paper")
            text = style.three_digits(qps or None)
            if system != baseline:
                text += f"\n{qps / base:.2f}×" if qps and base else ""
                text += f"\npaper {paper:.3g}×" if paper else ""
            bar = axis.bar(systems.index(system), qps or 0, width=0.75, color=colors[system])
            axis.bar_label(bar, [text], padding=2, fontsize=8)
        axis.set_title(name.replace(", ", "\n", 1), fontsize=8)
        most = max(row["qps"] or 0 for row in bars.values())
        axis.set(xlim=(-0.6, len(systems) - 0.4), xticks=[], ylim=(0, 1.65 * most or 1))
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    for i, axis in enumerate(axes.flat):
        axis.set_visible(i < len(names))
        axis.set_ylabel("" if i % columns else "capacity in\nrequests/s", fontsize=9)
    signs = [Patch(color=color, label=system) for system, color in colors.items()]
    how = f"On the bars: capacity, how many times that of {baseline} it is, the paper's ratio"
    return _finish(figure, f"{title}\n{how}", file, signs)


def plot_slo_curves(curves, title, file):
    """Draw the capacity against the SLO of P99 TBT (Sarathi-Serve, Figure 12).

    `curves` maps a model to {label: [(SLO in s, capacity in requests/s)]}. A label begins with the
    name of the policy whose colour it has. No capacity, None, is a hollow mark at 0.
    """
    figure, handles = new_figure(WIDTH, 4.6), {}
    axes = figure.subplots(1, max(1, len(curves)), squeeze=False)[0]
    styles = _styles(dict.fromkeys(label for lines in curves.values() for label in lines))
    for axis, (model, lines) in zip(axes, curves.items()):
        for label, points in lines.items():
            color, line, marker = styles[label]
            look = {"marker": marker, "ms": 6, "color": color, "clip_on": False}
            points = sorted((slo, qps or 0) for slo, qps in points)
            x, y = ([point[i] for point in points] for i in (0, 1))
            none = [slo for slo, qps in points if not qps]
            handles[label] = axis.plot(x, y, ls=line, lw=1.6, label=label, **look)[0]
            if none:  # an empty line that is not clipped has no place in a layout
                axis.plot(none, [0] * len(none), ls="", mfc="white", zorder=3, **look)
        log_scale(axis, "x", [slo for points in lines.values() for slo, _ in points])
        axis.set_title(model, fontsize=10, fontweight="bold")
        axis.set(xlabel="SLO of P99 TBT in s, log scale", ylim=(0, None))
    axes[0].set_ylabel("capacity in requests/s (hollow: none)")
    return _finish(figure, title, file, handles.values())


def _styles(labels):
    """label -> (colour, line, marker): its policy's colour, and what tells labels of one apart."""
    policies = {label: re.split("[ ,:(]", label)[0] for label in labels}
    colors, seen, styles = policy_colors(dict.fromkeys(policies.values())), [], {}
    for label, policy in policies.items():
        styles[label] = (colors[policy], *STYLES[seen.count(policy) % len(STYLES)])
        seen.append(policy)
    return styles


def _finish(figure, title, file, signs=()):
    for axis in figure.axes:
        axis.grid(axis="y" if axis.patches else "both", alpha=0.25)
        axis.set_axisbelow(True)
    if signs:
        figure.legend(handles=list(signs), ncols=3, **style.BELOW)
    return style.finish(figure, title, file)
