"""Draw what the simulator saw: batches and bubbles in a pipeline, and the capacities of the papers' deployments.

The pictures follow SARATHI's Figures 1, 5 and 12 and Sarathi-Serve's Figures 8 and 10 to 12.

Read first: plot.py and simulator.py. Read next: chrome_trace.write_pipeline_trace, the same pipeline as a trace.
"""

import re

import numpy as np
from matplotlib.patches import Patch, Rectangle

from plot import DECODE, PREFILL, log_scale, plt, policy_colors
from plot_search import STYLES
from plot_serving import cumulative
from simulator import bubble_kinds

HYBRID, BUBBLE, EDGE = "#a6d3cf", "#e4e4e4", "#777777"
WIDTH, LANE_WIDTH, SIGN = 10, 9.0, 0.165  # in inches: of a picture, about that of its lanes, of a sign such as A_p
BOX = 0.64  # the height of a box, as a share of its lane's
KINDS = {"PB1": "two prefills of different length", "PB2": "a prefill and decodes alone",
         "PB3": "decodes of different context"}


# -----------------------------------------------------------------------------------------------------
# a pipeline


def plot_pipeline(runs, title, file):
    """Draw when the stages of a pipeline worked and when they waited, and write the picture to `file`.

    `runs` maps a name to the simulator.StageRuns of one replica, in the order in which batches entered. A panel for
    each run, all on one time axis, has a lane for each stage and a box for each batch (SARATHI, Figures 1 and 5;
    Sarathi-Serve, Figure 8). The heading says when the last batch ended and sums up the bubbles of all stages. The
    longest of each kind is labelled. Where those between decodes, PB3, are too narrow to be seen, one more panel has
    the surroundings of the longest one, of the first such run. `title` is the first line.
    """
    kinds = {name: bubble_kinds(stage_runs) for name, stage_runs in runs.items()}
    stages = 1 + max((run.stage for stage_runs in runs.values() for run in stage_runs), default=0)
    end = max((run.end for stage_runs in runs.values() for run in stage_runs), default=1.0)
    zoomed, zoom = _find_zoom(kinds, end)
    panels, lane = len(runs) + bool(zoom), max(0.36, min(0.8, 2.4 / stages))  # lane: its height in inches
    figure = plt.figure(figsize=(WIDTH, 1.7 + panels * (0.6 + lane * stages)), layout="constrained")
    axes = figure.subplots(max(1, panels), 1, squeeze=False)[:, 0]
    for axis, (name, stage_runs) in zip(axes, runs.items()):
        if axis is not axes[0]:
            axis.sharex(axes[0])
        _draw_stages(axis, stage_runs, (0.0, 1.01 * end), stages, lane)
        _draw_labels(axis, _longest(kinds[name]), (0.0, 1.01 * end))
        sums = ", ".join(f"{kind} {_duration(sum(r.bubble for r, k in kinds[name] if k == kind))}" for kind in KINDS)
        last = _duration(max((run.end for run in stage_runs), default=0.0))
        axis.set_title(name, loc="left", fontsize=10, fontweight="bold")
        axis.set_title(f"makespan {last}; bubbles of all stages: {sums}", loc="right", fontsize=10)
        if name == zoomed:
            corner, height = (zoom[0], -BOX / 2), stages - 1 + BOX
            axis.add_patch(Rectangle(corner, zoom[1] - zoom[0], height, fill=False, lw=1.3, zorder=4))
    if zoom:
        _draw_stages(axes[-1], runs[zoomed], zoom, stages, lane)
        _draw_labels(axes[-1], kinds[zoomed], zoom)
        axes[-1].set_title(f"{zoomed}, enlarged", loc="left", fontsize=10, fontweight="bold")
        axes[-1].set_title("what is in the black frame above", loc="right", fontsize=10)
    axes[-1].set_xlabel("time in s")
    signs = [Patch(color=PREFILL, label="prefill only"), Patch(color=HYBRID, label="hybrid: prefill and decodes"),
             Patch(color=DECODE, label="decodes only"),
             Patch(facecolor=BUBBLE, edgecolor=EDGE, hatch="////", label="bubble: the stage waits"),
             Patch(facecolor="white", edgecolor=EDGE, label="idle for want of work")]
    figure.legend(handles=signs, loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    figure.suptitle(f"{title}\n$A_p$: a prefill chunk of request A, $A_d$: a decode of A. Bubbles, by what is computed "
                    "before and after:\n" + "; ".join(f"{kind}: {what}" for kind, what in KINDS.items()), fontsize=10)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _find_zoom(kinds, end):
    """(name, (from, to)) of the longest PB3 of the first run in which all are below 1 % of `end`, or (None, None)."""
    for name, pairs in kinds.items():
        run = next((run for run, kind in _longest(pairs) if kind == "PB3"), None)
        if run and run.bubble < 0.01 * end:
            middle, half = run.start - run.bubble / 2, max(1.2 * (run.end - run.start), 2 * run.bubble)
            return name, (middle - half, middle + half)
    return None, None


def _longest(pairs):
    """Of (StageRun, kind), the longest bubble of each kind; the last of those that are as long, to the microsecond."""
    longest = {kind: (run, kind) for run, kind in sorted(pairs, key=lambda pair: round(pair[0].bubble, 6))}
    return list(longest.values())


def _duration(seconds):
    if not seconds:
        return "0 s"
    value, unit = (seconds, "s") if seconds >= 1 else (1000 * seconds, "ms")
    return f"{value:#.3g}".rstrip(".") + f" {unit}" if value < 1000 else f"{value:,.0f} {unit}"


def _draw_stages(axis, stage_runs, window, stages, lane):
    """A box for each batch and each bubble that is in the window, (from, to) in s; its signs where there is room."""
    scale = LANE_WIDTH / (window[1] - window[0])  # inches per second
    for run in stage_runs:
        if run.start - run.bubble >= window[1] or run.end <= window[0]:
            continue
        decodes = sum(is_decode for _, _, is_decode in run.chunks)
        color = DECODE if decodes == len(run.chunks) else HYBRID if decodes else PREFILL
        axis.barh(run.stage, run.end - run.start, left=run.start, height=BOX, color=color, edgecolor="white", lw=0.4)
        if run.bubble:
            axis.barh(run.stage, run.bubble, left=run.start - run.bubble, height=BOX, color=BUBBLE, edgecolor=EDGE,
                      hatch="////", lw=0.5)
        left, right = max(run.start, window[0]), min(run.end, window[1])
        text = _signs(run.chunks, (right - left) * scale, int(lane * BOX / 0.15))
        if text:
            axis.text((left + right) / 2, run.stage, text, ha="center", va="center", fontsize=8, linespacing=1.05,
                      color="black" if color == HYBRID else "white")
    axis.set_xlim(window)
    axis.set_ylim(stages - 0.5, -0.62)
    axis.set_yticks(range(stages), [f"stage {stage + 1}" for stage in range(stages)])
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)


def _signs(chunks, width, lines):
    """What is in a batch, A_p or A_d for each request, in a row or below each other; "" if it is too much."""
    signs = [f"${chr(65 + i) if i < 26 else i}_{'d' if is_decode else 'p'}$" for i, _, is_decode in chunks]
    if len(signs) > 4:
        decodes = sum(is_decode for _, _, is_decode in chunks)
        signs = [f"{count} {letter}" for count, letter in ((len(chunks) - decodes, "p"), (decodes, "d")) if count]
    size = SIGN * max(len(sign) for sign in signs) / (5 if signs[0][0] == "$" else 2)
    if (size + 0.04) * len(signs) <= width + 0.04:
        return " ".join(signs)
    return "\n".join(signs) if size <= width and len(signs) <= lines else ""


def _draw_labels(axis, pairs, window):
    """Kind and length of the bubbles in the window, from (StageRun, kind): in the box, or above it if it is narrow."""
    pairs = [pair for pair in pairs if window[0] < pair[0].start and pair[0].start - pair[0].bubble < window[1]]
    scale, taken = LANE_WIDTH / (window[1] - window[0]), {}  # lane -> where its last label ends
    for run, kind in sorted(pairs, key=lambda pair: (pair[0].stage, pair[0].start)):
        middle, length = run.start - run.bubble / 2, _duration(run.bubble)
        if run.bubble * scale > 0.52:
            axis.text(middle, run.stage, f"{kind}\n{length}", ha="center", va="center", fontsize=9, linespacing=1.05,
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})
            continue
        half = 0.55 / scale
        x = min(max(middle, taken.get(run.stage, window[0]) + half), window[1] - half)
        taken[run.stage] = x + half
        axis.annotate(f"{kind} {length}", (middle, run.stage - BOX / 2), (x, run.stage - BOX / 2 - 0.04), ha="center",
                      va="bottom", fontsize=9, arrowprops={"arrowstyle": "-", "lw": 0.8, "shrinkA": 0, "shrinkB": 0},
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5}, zorder=5)


# -----------------------------------------------------------------------------------------------------
# systems


def plot_bubbles(systems, title, file):
    """Draw how long requests were held up by bubbles, and how many were done by when (SARATHI, Figure 12).

    `systems` maps a name to {"bubbles": the bubble time of each request, "ends": when each was completed}, both in s;
    a None among the latter is a request that was not. On the left the cumulative share of the requests, with the median
    in the legend; on the right their number. `title` is that of the picture, which is written to `file`.
    """
    figure = plt.figure(figsize=(WIDTH, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    seen = [value for system in systems.values() for value in system["bubbles"] if value > 0]
    decades = bool(seen) and max(seen) > 30 * min(seen)
    if decades:
        log_scale(left, "x", seen)
        left.set_xlim(left=left.get_xlim()[0] / 1.25)
    low = left.get_xlim()[0] * 1.25 if decades else 0.0  # what is less, such as no bubble at all, is drawn here
    styles = _styles(systems)
    for name, system in systems.items():
        color, line, _ = styles[name]
        x, share = cumulative(system["bubbles"])
        label = f"{name}: median {_duration(np.median(system['bubbles']))}" if len(x) else f"{name}: no requests"
        left.step(np.maximum(x, low), share, line, where="post", color=color, lw=1.8, label=label)
        ends, share = cumulative(system["ends"])
        label = f"{name}: {len(ends[1:]):,} in {_duration(ends[-1])}" if len(ends) else f"{name}: none"
        right.step(np.append(0.0, ends), np.append(0.0, share * len(ends[1:])), line, where="post", color=color, lw=1.8,
                   label=label)
    left.set_xlabel("bubble time of a request in s" + (", log scale (leftmost: less, or none)" if decades else ""))
    left.set_ylabel("share of the requests, at most that long")
    left.set_ylim(0, 1.03)
    left.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "P50", "75 %", "100 %"])
    right.set_xlabel("time in s")
    right.set_ylabel("completed requests")
    right.set_xlim(left=0)
    right.set_ylim(bottom=0)
    _finish(figure, title, file, legends=systems and (left, right))


def plot_capacities(groups, title, file, baseline="vllm"):
    """Draw the capacity of each system in each setting as bars, a panel for each (Sarathi-Serve, Figures 10 and 11).

    `groups` is a list of {"group": "Yi-34B, sharegpt4, strict", "system": "vllm", "qps": requests/s, "paper": ratio}.
    A bar's label is the capacity, how many times that of `baseline` in the same group it is, and what the paper reports
    for that ratio, unless it is None. A capacity of None or 0 is "none". `title` is that of the picture, which is
    written to `file`.
    """
    names, systems = (list(dict.fromkeys(row[key] for row in groups)) for key in ("group", "system"))
    colors, columns = policy_colors(systems), min(4, max(1, len(names)))
    rows = max(1, -(-len(names) // columns))
    figure = plt.figure(figsize=(WIDTH, 1.0 + 2.1 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for name, axis in zip(names, axes.flat):
        bars = {row["system"]: row for row in groups if row["group"] == name}
        most, base = max(row["qps"] or 0 for row in bars.values()), bars.get(baseline, {}).get("qps")
        for system, row in bars.items():
            lines = [f"{row['qps']:#.3g}".rstrip(".") if row["qps"] else "none"]
            lines += [f"{row['qps'] / base:.2f}×"] if row["qps"] and base and system != baseline else []
            lines += [f"paper {row['paper']:.3g}×"] if row.get("paper") and system != baseline else []
            bar = axis.bar(systems.index(system), row["qps"] or 0, width=0.75, color=colors[system])
            axis.bar_label(bar, ["\n".join(lines)], padding=2, fontsize=8)
        axis.set_title(name.replace(", ", "\n", 1), fontsize=8)
        axis.set_xlim(-0.6, len(systems) - 0.4)
        axis.set_ylim(0, 1.65 * most or 1)
        axis.set_xticks([])
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in list(axes.flat)[len(names):]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("capacity in\nrequests/s", fontsize=9)
    if systems:
        figure.legend(handles=[Patch(color=colors[system], label=system) for system in systems], fontsize=10,
                      loc="outside lower center", ncols=len(systems), frameon=False)
    _finish(figure, f"{title}\nOn the bars: capacity, how many times that of {baseline} it is, the paper's ratio", file)


def plot_slo_curves(curves, title, file):
    """Draw the capacity against the SLO of the 99th percentile of the TBT (Sarathi-Serve, Figure 12).

    `curves` maps a model to {label: [(SLO in s, capacity in requests/s)]}. A label begins with the name of the policy
    whose colour it has. A capacity of None, if no rate meets the SLO, is a hollow mark at 0. `title` is that of the
    picture, which is written to `file`.
    """
    figure = plt.figure(figsize=(WIDTH, 4.6), layout="constrained")
    axes = figure.subplots(1, max(1, len(curves)), squeeze=False)[0]
    styles = _styles(dict.fromkeys(label for lines in curves.values() for label in lines))
    for axis, (model, lines) in zip(axes, curves.items()):
        for label, points in lines.items():
            (color, style, marker), points = styles[label], sorted(points, key=lambda point: point[0])
            axis.plot([slo for slo, _ in points], [qps or 0 for _, qps in points], style, marker=marker, ms=6,
                      color=color, lw=1.6, label=label, clip_on=False)
            none = [slo for slo, qps in points if not qps]
            if none:
                axis.plot(none, [0] * len(none), marker, ms=6, color=color, mfc="white", clip_on=False, zorder=3)
        log_scale(axis, "x", [slo for points in lines.values() for slo, _ in points])
        axis.set_title(model, fontsize=10, fontweight="bold")
        axis.set_xlabel("SLO of P99 TBT in s, log scale")
        axis.set_ylim(bottom=0)
    axes[0].set_ylabel("capacity in requests/s (hollow: none)")
    if styles:
        handles = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels())}
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    _finish(figure, title, file)


def _styles(labels):
    """label -> (colour, line, marker): the colour of the policy that it begins with, and what tells them apart."""
    policies = {label: re.split("[ ,:(]", label)[0] for label in labels}
    colors, count, styles = policy_colors(dict.fromkeys(policies.values())), {}, {}
    for label, policy in policies.items():
        count[policy] = count.get(policy, -1) + 1
        styles[label] = (colors[policy], *STYLES[count[policy] % len(STYLES)])
    return styles


def _finish(figure, title, file, legends=()):
    for axis in figure.axes:
        axis.grid(axis="y" if axis.patches else "both", alpha=0.25)
        axis.set_axisbelow(True)
    for axis in legends:
        axis.legend(fontsize=9, frameon=False, loc="lower left", bbox_to_anchor=(0, 1))
    figure.suptitle(title, fontsize=10)
    figure.savefig(file, dpi=120)
    plt.close(figure)
