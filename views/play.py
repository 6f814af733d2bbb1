"""Draw the scoreboards of the playground: a row for each load, a dot for each policy.

Read first: style.py, simulator/play.py.
"""

from views import style

SHOWN = ("capacity_qps", "p50_ttft_s", "p99_ttft_s", "p99_tbt_s")


def plot_scoreboards(boards, scores, machine, file):
    """Draw {load: {policy: {score: number or None}}}, and write the picture to `file`.

    Of `scores`, which are simulator.play.SCORES, those in SHOWN are drawn, on log axes.
    """
    figure = style.new_figure(2.8 * len(boards))
    rows = figure.subplots(len(boards), len(SHOWN), sharex="col", sharey=True, squeeze=False)
    for axes, (load, board) in zip(rows, boards.items()):
        axes[0].set_yticks(range(len(board)), map(style.label, board), fontsize=9)
        axes[0].set_ylabel(load, fontweight="bold")
        for axis, key in zip(axes, SHOWN):
            values = [row[key] or float("nan") for row in board.values()]
            colors = list(style.policy_colors(board).values())
            bound = [getattr(row[key], "bound", "") for row in board.values()]
            faces = ["white" if its else color for its, color in zip(bound, colors)]
            axis.scatter(values, range(len(board)), color=faces, edgecolors=colors, zorder=2)
            axis.grid(alpha=0.25)
    rows[0, 0].invert_yaxis()
    for axis, key in zip(rows[0], SHOWN):
        axis.set_title(scores[key][0][0], fontsize=9)
        style.log_scale(axis, "x", [row[key] for its in boards.values() for row in its.values()])
    title = "Each policy on each load: the left is better, of capacity the right (hollow: below)\n"
    return style.finish(figure, title + style.machine_line(machine), file)
