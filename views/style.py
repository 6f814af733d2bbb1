"""What all pictures share: colours of policies, axes of plain numbers, limits, how one is saved.

Read next: timelines.py.
"""

import re
from itertools import cycle

from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

WIDTH = 8.5  # inches: a README shows them as 830 pixels, so that a letter of 9 pt is 12 high
# which the colour-blind can tell apart, as they can the policies' (Okabe and Ito's, and others)
PREFILL, HYBRID, DECODE = "#2f5d9b", "#a6d8d6", "#2aa98a"
OVER, WAITING, LIMIT = "#b5201c", "#d0d0d0", "#444444"
GAPS = LinearSegmentedColormap.from_list("gaps", [DECODE, "#f2d53c"]).with_extremes(over=OVER)
PLAIN = "{x:g}"  # ticks: 0.01 and 10 on a log scale, instead of powers
BARE = {"fontsize": 9, "frameon": False}  # a legend
BELOW = BARE | {"loc": "outside lower center"}
ABOVE = BARE | {"loc": "lower left", "bbox_to_anchor": (0, 1)}
BOLD = {"loc": "left", "fontsize": 10, "fontweight": "bold"}  # the title of a panel
STYLES = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"))  # of lines that share a colour
POLICY_COLORS = {
    "request-level": "#7a7a7a", "orca": "#e69f00", "orca-best": "#8c5109", "vllm": "#d55e00",
    "sarathi": "#56b4e9", "sarathi-serve": "#0072b2", "chunked-only": "#cc79a7",
    "hybrid-only": "#009e73", "priority": "#a422e6", "dynamic": "#000000",
}  # fmt: skip
OTHER_COLORS = ("#b3b36b", "#4c004c", "#000099", "#731300")


def policy_colors(names):
    """{name: colour}: that of POLICY_COLORS, or one of OTHER_COLORS, in the order of the names."""
    others = (name for name in names if name not in POLICY_COLORS)
    colors = POLICY_COLORS | dict(zip(others, cycle(OTHER_COLORS)))
    return {name: colors[name] for name in names}


def label(name):
    """The name of a policy, or one that begins so, as a picture shows it: which vllm it is."""
    return re.sub(r"^vllm(?=$|[ ,:(])", "vllm (2023)", name)


def machine_line(machine):
    """What the numbers of a picture depend on, in one line; a simulated machine has no threads."""
    line = f"{machine['model']}, {machine['dtype']}, {machine['device']}"
    threads = machine.get("threads")
    return line + (f", {threads} thread{'s' * (threads > 1)}" if threads else "")


def three_digits(value):
    """0.500 or 12.3 or 1,234 as text; "none" for None."""
    if value is None:
        return "none"
    return f"{value:#.3g}".rstrip(".") if 0 < value < 999.5 else f"{value:,.0f}"


def log_scale(axes, which, values):
    """Make axis `which`, "x" or "y", logarithmic with plain ticks, if any value is above 0."""
    values = [value for value in values if value is not None and value > 0]
    if not values:
        return
    low = max(min(values), max(values) / 1e4) / 1.25  # microseconds are as good as none
    high = max(values) * 1.25
    axes.set(**{f"{which}lim": (low, high), f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    subs = (1, 2, 5) if high / low < 30 else (1, 3) if high / low < 300 else (1,)
    axis.set_major_locator(LogLocator(subs=subs, numticks=20))
    axis.set_major_formatter(PLAIN)
    axis.set_minor_formatter(NullFormatter())


def mark_limit(axes, limit, text):
    """A dashed horizontal line at `limit` seconds, and right of the panel its name."""
    axes.axhline(limit, color=LIMIT, ls="--", lw=1.2)
    look = {"xycoords": ("axes fraction", "data"), "ha": "left", "va": "center"}
    axes.annotate(f" {text}\n {limit:.3g} s", (1, limit), fontsize=9, color=LIMIT, **look)


def mark_column(axes, x, text, color=LIMIT, **line):
    """A vertical line at `x`, if there is one, and above the panel what it is."""
    if x is not None:
        axes.axvline(x, color=color, **line)
        look = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "bottom"}
        axes.annotate(text, (x, 1), fontsize=9, color=color, **look)


def new_figure(height):
    """An empty picture, `height` in inches. No window holds it: it is gone with its last name."""
    return Figure(figsize=(WIDTH, height), layout="constrained")


def finish(figure, title, file):
    """Give a picture its title, write it to `file` in the format of its ending, and return it."""
    figure.suptitle(title, fontsize=10)
    figure.savefig(file, dpi=160)
    return figure
