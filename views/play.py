"""Draw the scoreboards of the playground. Read first: style.py, simulator/play.py."""

from math import nan

from views import style

SHOWN = ("capacity_qps", "p50_ttft_s", "p99_ttft_s", "p99_tbt_s")
TITLE = "Each policy on each load: the left is better, of capacity the right (hollow: below)"


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
    return style.finish(figure, TITLE, file, machine)
