"""What all pictures share: colours, names, axes of plain numbers. Read next: timelines.py."""

import tomllib
from itertools import cycle
from pathlib import Path

from matplotlib import rcParams
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

STYLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
rcParams.update(STYLE["matplotlib"])
PREFILL, HYBRID, DECODE, OVER, WAITING, OTHER_COLORS, POLICY_COLORS = STYLE["colors"].values()
BELOW, LIMIT, BOLD, BUBBLE, GAP_SCALE, TAIL, LINES, MARKERS, PLACES = STYLE["looks"].values()
TIMELINES, SERVING, CAPACITY, PIPELINE = STYLE["titles"].values()
GAPS = LinearSegmentedColormap.from_list("gaps", [DECODE, "#f2d53c"]).with_extremes(over=OVER)
PLAIN = "{x:g}"  # ticks: 0.01 and 10 on a log scale, instead of powers


def policy_colors(names):
    """{name: colour}: that of POLICY_COLORS, or one of OTHER_COLORS, in the order of the names."""
    others = cycle(OTHER_COLORS)
    return {name: POLICY_COLORS.get(name) or next(others) for name in names}


def three_digits(value):
    """0.500 or 12.3 or 1,234 as text; "none" for None."""
    if value is None:
        return "none"
    return f"{value:#.3g}".rstrip(".") if 0 < value < 999.5 else f"{value:,.0f}"


def log_scale(axes, panel):
    """Give it a grid, and those `axes`, as "xy", that reach above 0 a log scale of plain ticks."""
    panel.grid(True)
    for which in axes:
        if getattr(panel.dataLim, f"{which}1") > 0:
            panel.set(**{f"{which}scale": "log"})
            axis = getattr(panel, f"{which}axis")
            low, high = axis.get_view_interval()
            axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
            axis.set_major_formatter(PLAIN)
            axis.set_minor_formatter(NullFormatter())


def new_figure(height):
    """An empty picture, `height` in inches. No window holds it: it is gone with its last name."""
    return Figure(figsize=(8.5, height), layout="constrained")


def finish(figure, title, file, machine=None):
    """Give a picture its title, with the machine it depends on, write it to `file`, return it."""
    if machine:
        title += "\n{model}, {dtype}, {device}".format_map(machine)
        if threads := machine.get("threads"):  # a simulated machine has none
            title += f", {threads} thread{'s' * (threads > 1)}"
    figure.suptitle(title)
    figure.savefig(file)
    return figure
