"""What all pictures share: colours, names, axes of plain numbers. Read next: timelines.py."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import LogLocator, NullFormatter

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
OVER = "#b5201c"  # a gap between tokens of ten times its limit
WAITING = "#d0d0d0"
# gaps between tokens above their limit, and up to it; a gap of 0 s is "bad" on a log scale
GAPS = LinearSegmentedColormap.from_list("gaps", ["#f2d53c", OVER]).with_extremes(
    bad=DECODE, under=DECODE
)
OTHER_COLORS = ["#b3b36b", "#4c004c", "#000099", "#066b62"]  # of policies without a card
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
PLAIN = "{x:g}"  # ticks: 0.01 and 10 on a log scale, instead of powers


def batch_color(prefills: int, decodes: int) -> str:
    """The colour of a batch: `prefills` are its chunks of prompts, or the tokens in them."""
    if not decodes:
        return PREFILL
    return HYBRID if prefills else DECODE


def policy_colors(names: Iterable[str]) -> dict[str, str]:
    """The colour of each name: that of the policy's card, or else one of OTHER_COLORS."""
    spare_colors = cycle(OTHER_COLORS)
    return {name: CARDS[name].color if name in CARDS else next(spare_colors) for name in names}


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
    """Draw a grid, and give the named axes ("x", "y" or "xy") a log scale with plain ticks."""
    panel.grid(True)
    for name in axes:
        panel.set(**{f"{name}scale": "log"})
        axis = panel.xaxis if name == "x" else panel.yaxis
        low, high = axis.get_view_interval()
        axis.set_major_locator(LogLocator(10, (1, 2, 5) if high < 30 * low else (1,), numticks=5))
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
        facts = [str(machine[key]) for key in ("model", "dtype", "device") if machine[key]]
        if "threads" in machine:
            facts.append(f"threads: {machine['threads']}")
        title += f"\n{', '.join(facts)}"
    figure.suptitle(title)
    with new_file(file) as path:
        figure.savefig(path)
    return figure
