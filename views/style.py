"""What all pictures share: colours, names, axes of plain numbers. Read next: timelines.py."""

from itertools import cycle

from matplotlib import rcParams
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

# a README shows 8.5 inches as 830 pixels, so that a letter of 9 pt is 12 high
rcParams.update({"font.size": 9, "axes.titlesize": 10, "figure.titlesize": 10})
rcParams.update({"legend.frameon": False, "grid.alpha": 0.25, "savefig.dpi": 160})
# which the colour-blind can tell apart, as they can the policies' (Okabe and Ito's, and others)
PREFILL, HYBRID, DECODE = "#2f5d9b", "#a6d8d6", "#2aa98a"
OVER, WAITING = "#b5201c", "#d0d0d0"
GAPS = LinearSegmentedColormap.from_list("gaps", [DECODE, "#f2d53c"]).with_extremes(over=OVER)
PLAIN = "{x:g}"  # ticks: 0.01 and 10 on a log scale, instead of powers
BELOW = {"loc": "outside lower center"}  # a legend
LIMIT = {"color": "#444444", "ls": "--", "lw": 1.2}  # the line of a limit
BOLD = {"loc": "left", "fontweight": "bold"}  # the title of a panel
POLICY_COLORS = {
    "request-level": "#7a7a7a", "orca": "#e69f00", "orca-best": "#8c5109", "vllm": "#d55e00",
    "sarathi": "#56b4e9", "sarathi-serve": "#0072b2", "chunked-only": "#cc79a7",
    "hybrid-only": "#009e73", "priority": "#a422e6", "dynamic": "#000000",
}  # fmt: skip
OTHER_COLORS = ("#b3b36b", "#4c004c", "#000099", "#731300")


def policy_colors(names):
    """{name: colour}: that of POLICY_COLORS, or one of OTHER_COLORS, in the order of the names."""
    others = cycle(OTHER_COLORS)
    return {name: POLICY_COLORS.get(name) or next(others) for name in names}


def three_digits(value):
    """0.500 or 12.3 or 1,234 as text; "none" for None."""
    if value is None:
        return "none"
    return f"{value:#.3g}".rstrip(".") if 0 < value < 999.5 else f"{value:,.0f}"


def log_scale(which, panel):
    """Give it a grid and, if it shows anything above 0, axis `which` a log scale of plain ticks."""
    panel.grid(True)
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
