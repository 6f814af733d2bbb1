"""What all pictures share: colours, names, axes of plain numbers. Read next: timelines.py."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps, rcParams
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from cli.tables import show
from policies.cards import CARDS
from runtime.files import new_file

WIDTH = 8.5  # inches. A README shows them as 830 pixels, so that a letter of 9 pt is 12 high.
rcParams.update(
    {
        "font.size": 9,
        "axes.titlesize": 10,
        "figure.titlesize": 10,
        "legend.frameon": False,
        "grid.alpha": 0.25,
        "savefig.dpi": 160,
    }
)

# ---- Colours that colour-blind readers can tell apart (Okabe and Ito's, and others) -------------

PREFILL = "#2f5d9b"
HYBRID = "#a6d8d6"  # a batch of prefill and decodes
DECODE = "#2aa98a"
OVER = "#b5201c"  # a gap between tokens that exceeds its limit
WAITING = "#d0d0d0"
# gaps between tokens: from short to the limit, and above it; a gap of 0 s is "bad" on a log scale
GAPS = LinearSegmentedColormap.from_list("gaps", [DECODE, "#f2d53c"]).with_extremes(
    bad=DECODE, over=OVER
)

POLICY_COLORS = {name: card.color for name, card in CARDS.items()}
OTHER_COLORS = ["#b3b36b", "#4c004c", "#000099", "#066b62"]  # of policies that are not in there
OURS = "#93a4bd"  # bars of numbers that are no policy's

# ---- Keyword arguments that several pictures give to matplotlib ---------------------------------

LEGEND_BELOW: dict[str, Any] = {"loc": "outside lower center"}
LIMIT_LINE: dict[str, Any] = {"color": "#444444", "ls": "--", "lw": 1.2}
BOLD: dict[str, Any] = {"loc": "left", "fontweight": "bold"}  # the title of a panel
BUBBLE: dict[str, Any] = {  # where a stage waits
    "facecolor": "#e4e4e4",
    "edgecolor": "#777777",
    "hatch": "////",
}
ARROWS = {"at least": "≥", "below": "<"}
LOG_FROM = 50  # times as large as the smallest number of a panel of bars is the largest
LEGEND_WIDTH = 110  # characters in a legend as wide as a picture
LINE_WIDTH = 8  # of these for the line before a name
PLAIN = "{x:g}"  # ticks: 0.01 and 10 on a log scale, instead of powers


def batch_color(prefills: int, decodes: int) -> str:
    """The colour of a batch: `prefills` are its chunks of prompts, or the tokens in them."""
    if not decodes:
        return PREFILL
    return HYBRID if prefills else DECODE


def policy_colors(names: Iterable[str]) -> dict[str, str]:
    """The colour of each name: that of POLICY_COLORS, or else one of OTHER_COLORS; if these do not
    suffice, as of `name_colors`."""
    names = list(names)
    if sum(name not in POLICY_COLORS for name in names) > len(OTHER_COLORS):
        return name_colors(names)
    spare_colors = iter(OTHER_COLORS)
    return {name: POLICY_COLORS.get(name) or next(spare_colors) for name in names}


def name_colors(names: Sequence[str]) -> dict[str, str]:
    """The colour of each line of a picture, so that one colour has one meaning.

    A policy has its own; several settings of one, such as sarathi:64 and sarathi:128, are shades of
    it. Other names are steps of a scale, from dark to light."""
    colors: dict[str, str] = {}
    settings: dict[str, list[str]] = {}  # by the colour that they are shades of; "" for none
    for name in names:
        color = POLICY_COLORS.get(re.split("[:,]", name)[0], "")
        settings.setdefault(color, []).append(name)
    for color, variants in settings.items():
        if color:
            scale = LinearSegmentedColormap.from_list("shades", [color, "white"])
            lightest = 0.6
        else:
            scale = colormaps["viridis"]
            lightest = 0.85
        places = np.linspace(0, lightest, len(variants))
        colors |= {name: to_hex(scale(place)) for name, place in zip(variants, places, strict=True)}
    return colors


def legend_columns(names: Sequence[str]) -> int:
    """How many columns a legend has that is as wide as a picture: at most five."""
    widest = LINE_WIDTH + max(map(len, names), default=0)
    return min(5, max(1, LEGEND_WIDTH // widest))


def bound_of(number: float | None) -> str:
    """The word of a lab.measure.capacity.Bounded, "at least" or "below"; "" of other numbers."""
    return getattr(number, "bound", "")


def short(number: float, spec: str = "") -> str:
    """A number beside its bar, with three digits or in the format `spec`: "≥ 3.50" of a bound."""
    bound = bound_of(number)
    if bound:
        return f"{ARROWS[bound]} {short(float(number), spec)}"
    return show(number, spec) if spec else three_digits(number)


def three_digits(value: float | None) -> str:
    """0.500 or 12.3 or 1,234 as text; "none" for None. What is counted is written in full."""
    if value is None:
        return "none"
    if 0 < value < 999.5 and not isinstance(value, int):
        return f"{value:#.3g}".rstrip(".")
    return f"{value:,.0f}"


def duration(seconds: float) -> str:
    """Seconds as text with three digits: "81.2 ms", "1.23 s" or "0 s"."""
    if 0 < seconds < 1:
        return f"{three_digits(1000 * seconds)} ms"
    return f"{three_digits(seconds)} s"


def log_scale(axes: str, panel: Axes) -> None:
    """Draw a grid, and give the named axes ("x", "y" or "xy") a log scale with plain ticks.

    An axis whose data does not reach above 0 stays linear."""
    panel.grid(True)
    for name, end, axis, set_scale in (
        ("x", panel.dataLim.x1, panel.xaxis, panel.set_xscale),
        ("y", panel.dataLim.y1, panel.yaxis, panel.set_yscale),
    ):
        if name in axes and end > 0:
            set_scale("log")
            low, high = axis.get_view_interval()
            subs = (1, 2, 5) if high < 30 * low else (1,)
            is_narrow = high < 3 * low
            axis.set_major_locator(
                MaxNLocator(2) if is_narrow else LogLocator(10, subs, numticks=5)
            )
            axis.set_major_formatter(PLAIN)
            axis.set_minor_formatter(NullFormatter())


def bare(panel: Axes, *sides: str) -> None:
    """Leave out the frame of a panel at the top, at the right, and on `sides`."""
    panel.spines[["top", "right", *sides]].set_visible(False)


def new_figure(height: float) -> Figure:
    """An empty picture, `height` in inches. No window holds it, so nobody has to close it."""
    return Figure(figsize=(WIDTH, height), layout="constrained")


def parts_of(figure: Figure, heights: Sequence[float]) -> list[SubFigure]:
    """Parts of a picture, of these heights, one below another."""
    return list(figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0])


def finish(
    figure: Figure,
    title: str,
    file: str | Path,
    machine: Mapping[str, object] | None = None,
) -> Figure:
    """Give a picture its title and the machine it was measured on, and write it to `file`.

    `machine` has the keys model, dtype and device, and threads if it is real. Returns figure."""
    if machine:
        title += "\n{model}, {dtype}, {device}".format_map(machine)
        threads = machine.get("threads")
        if threads:
            title += f", {threads} thread" if threads == 1 else f", {threads} threads"
    figure.suptitle(title)
    with new_file(file) as path:
        figure.savefig(path)
    return figure
