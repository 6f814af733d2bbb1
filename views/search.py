"""Draw what was searched for under an SLO: the capacity of each policy (Sarathi-Serve, Figures 10
to 12), the token budget (§4.3), and who is best in the playground. Read first: style.py. Read next:
pipelines.py.
"""

from itertools import cycle
from math import nan

from experiments.metrics import MAX_DELAY_S
from views import style

CAPACITY = "The highest rate that meets the SLO, and the latencies against the load"
SCOREBOARDS = "Each policy on each load: the left is better, of capacity the right (hollow: below)"
SHOWN = ("capacity_qps", "p50_ttft_s", "p99_ttft_s", "p99_tbt_s")  # of simulator.play.SCORES


def plot_capacity(results, machine, file, slo_s):
    """Draw what the search for the capacity found, {name: what run.found_so_far says}, and write
    the picture to `file`: the capacities, and both latencies against the rate, with their limits.
    What was not met is hollow."""
    colors, height = style.policy_colors(results), 1.1 + 0.3 * len(results)
    figure = style.new_figure(height + 3.1)
    top, bottom = figure.subfigures(2, 1, height_ratios=[height, 3.1])
    bars, found = top.subplots(), [its["capacity_qps"] for its in results.values()]
    names = [style.label(name) + " (busy)" * its["busy"] for name, its in results.items()]
    drawn = bars.barh(names, found, 0.7, color=[*colors.values()])
    bars.bar_label(drawn, map(style.three_digits, found), padding=4)
    bars.margins(x=0.2)
    bars.set(ylim=(len(results) - 0.4, -0.6), xlabel="capacity in requests/s", xlim=(0, None))
    bars.spines[["top", "right"]].set_visible(False)
    curves = [("p99_tbt_s", "P99 time between tokens in s", slo_s, "SLO")]
    curves += [("p50_delay_s", "median scheduling delay in s", MAX_DELAY_S, "limit")]
    for axis, (key, title, limit, word) in zip(bottom.subplots(1, 2), curves):
        for name, result in results.items():
            last = {point["qps"]: point for point in result["points"]}  # its last run is a rate's
            for met, look in ((True, {"ls": "-"}), (False, {"ls": "", "mfc": "white"})):
                its = sorted((q, p[key]) for q, p in last.items() if p["met"] == met)
                x, y = ([pair[i] for pair in its if pair[1] is not None] for i in (0, 1))
                axis.plot(x, y, marker="o", ms=5, lw=1.4, color=colors[name], **look)
        axis.axhline(limit, **style.LIMIT)
        style.log_scale("x", axis)
        style.log_scale("y", axis)
        axis.set_title(f"{title} (dashed: {word} {limit:.3g} s)", loc="left")
        axis.set_xlabel("load in requests/s (hollow: not met)")
    return style.finish(figure, CAPACITY, file, machine)


def plot_budget(rows, machine, file, slo_s, chosen):
    """Draw the time of an iteration against its token budget, and write the picture to `file`.
    `rows` is a list of (budget in tokens, context in tokens, decodes, seconds), with the same
    decodes in all; for each context there is a line, which begins with the decodes alone. `slo_s`
    is the SLO of TBT in seconds, `chosen` the budget that was taken, maybe None."""
    decodes, figure = rows[0][2], style.new_figure(4.8)
    axis = figure.subplots()
    for marker, context in zip(cycle("os^D"), sorted({row[1] for row in rows})):
        times = sorted((row[0], row[3]) for row in rows if row[1] == context)
        axis.plot(*zip(*times), marker=marker, label=f"{decodes} decodes, context {context:,}")
    axis.axhline(slo_s, label=f"SLO {slo_s:.3g} s", **style.LIMIT)
    style.log_scale("y", axis)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(style.PLAIN)
    if chosen is not None:
        look = {"color": style.POLICY_COLORS["sarathi-serve"], "lw": 6, "alpha": 0.25}
        axis.axvline(chosen, label=f"chosen: {chosen} tokens", **look)
    axis.set_xlabel(f"token budget of a batch in tokens, of which {decodes} are decodes")
    axis.set_ylabel("time of an iteration in s")
    axis.legend(loc="lower right")
    return style.finish(figure, "One-time profile for the token budget", file, machine)


def plot_scoreboards(boards, scores, machine, file):
    """Draw {load: {policy: {score: number or None}}}, a row for each load, a dot for each policy,
    and write the picture to `file`. `scores` are simulator.play.SCORES; those SHOWN are drawn."""
    figure = style.new_figure(2.8 * len(boards))
    rows = figure.subplots(len(boards), len(SHOWN), sharex="col", sharey=True, squeeze=False)
    for axes, (load, board) in zip(rows, boards.items()):
        axes[0].set_yticks(range(len(board)), map(style.label, board))
        axes[0].set_ylabel(load, fontweight="bold")
        colors = list(style.policy_colors(board).values())
        for axis, key in zip(axes, SHOWN):
            found = [row[key] or nan for row in board.values()]
            faces = ["white" if getattr(its, "bound", "") else c for its, c in zip(found, colors)]
            axis.scatter(found, range(len(board)), color=faces, edgecolors=colors, zorder=2)
    rows[0, 0].invert_yaxis()
    for column, key in zip(rows.T, SHOWN):
        column[0].set_title(scores[key][0][0])
        style.log_scale("x", *column)
    return style.finish(figure, SCOREBOARDS, file, machine)
