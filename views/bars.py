"""Draw numbers of several policies as bars, a panel for each quantity. Read first: style.py."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from views import style


def plot_bars(panels: Mapping[str, Mapping[str, float]], title: str, file: str | Path) -> Figure:
    """Draw a panel for each of `panels`, {its title: {name: number}}, and write the picture to
    `file`. All panels have the same names, which stand at the left. Shorter is not always better:
    the titles say what a bar is."""
    names = list(next(iter(panels.values())))
    figure = style.new_figure(0.8 + 0.22 * len(names))
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (quantity, numbers), color in zip(
        axes, panels.items(), style.LINE_COLORS, strict=False
    ):
        bars = axis.barh(names, [numbers[name] for name in names], color=color, height=0.7)
        labels = [_show(numbers[name]) for name in names]
        axis.bar_label(bars, labels, padding=2, fontsize=8)
        axis.margins(x=0.25)
        axis.set_title(quantity)
        axis.set_xticks([])
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        axis.tick_params(left=False)
    axes[0].invert_yaxis()
    return style.finish(figure, title, file)


def _show(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else style.three_digits(number)
