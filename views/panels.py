"""Draw the tables of a claim, lines side by side. Read first: style.py, lab/papers/claims.py."""

from itertools import cycle

from views import style

ACROSS, LETTERS = 2, 110  # panels in a row, letters in one of the legend


def plot_panels(tables, title, file, machine=None):
    """Draw `tables`, each a claims.Table, at least one, and write the picture to `file`. A name
    looks alike in all of them; where it has a None its line is broken."""
    names = [*dict.fromkeys(name for table in tables for name in table.lines)]
    of_policies = not style.POLICY_COLORS.keys().isdisjoint(names)
    colors = style.policy_colors(names) if of_policies else dict(zip(names, cycle(style.LINES)))
    markers, rows = dict(zip(names, cycle(style.MARKERS))), -(-len(tables) // ACROSS)
    beside = min(len(names), max(1, LETTERS // (6 + max(map(len, names)))))  # in the legend
    figure, lines = style.new_figure(0.7 + 2.9 * rows + 0.2 * -(-len(names) // beside)), {}
    for number, table in enumerate(tables, 1):
        axis = figure.add_subplot(rows, min(ACROSS, len(tables)), number)
        for name, line in table.lines.items():
            look = {"color": colors[name], "marker": markers[name], "ms": 4, "lw": 1.5}
            (lines[name],) = axis.plot([*line], [*line.values()], **look)
        axis.set(xlabel=table.x, ylabel=table.y)
        axis.set_title(table.title, **style.BOLD)
        style.log_scale(table.log, axis)
    figure.legend(lines.values(), lines, ncols=beside, **style.BELOW)
    return style.finish(figure, title, file, machine)
