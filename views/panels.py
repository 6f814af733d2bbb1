"""Draw the diagrams of a claim, lines side by side. Read first: style.py, experiments/claims.py."""

import math
from itertools import cycle

from matplotlib.lines import Line2D

from views import style

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a7a7a", "#000000")
MARKERS = "osD^vPX*"
ACROSS, LETTERS = 2, 110  # panels in a row, letters in one of the legend


def plot_panels(panels, title, file, machine=None):
    """Draw `panels`, at least one, each a dict of what a claims.Panel holds, and write the picture
    to `file`. A name looks alike in all of them; where it has a None its line is broken."""
    names = [*dict.fromkeys(name for panel in panels for name in panel["lines"])]
    of_policies = not style.POLICY_COLORS.keys().isdisjoint(names)
    colors = style.policy_colors(names) if of_policies else dict(zip(names, cycle(COLORS)))
    markers, rows = dict(zip(names, cycle(MARKERS))), -(-len(panels) // ACROSS)
    beside = min(len(names), max(1, LETTERS // (6 + max(map(len, names)))))  # in the legend
    figure = style.new_figure(0.7 + 2.9 * rows + 0.2 * -(-len(names) // beside))
    axes = [*figure.subplots(rows, min(ACROSS, len(panels)), squeeze=False).flat]
    for axis, panel in zip(axes, panels):
        for name, points in panel["lines"].items():
            y = [math.nan if its is None else its for _, its in points]
            look = {"color": colors[name], "marker": markers[name], "ms": 4, "lw": 1.5}
            axis.plot([its for its, _ in points], y, **look)
        axis.grid(True)
        axis.set(xlabel=panel["x"], ylabel=panel["y"])
        axis.set_title(panel["title"], **style.BOLD)
        for which in panel["log"]:
            style.log_scale(which, axis)
    for axis in axes[len(panels) :]:
        axis.remove()
    lines = [Line2D([], [], color=colors[name], marker=markers[name], label=name) for name in names]
    figure.legend(handles=lines, ncols=beside, **style.BELOW)
    return style.finish(figure, title, file, machine)
