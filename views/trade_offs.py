"""Draw what each policy gains against what it costs. Read first: style.py."""

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Protocol

from matplotlib.figure import Figure

from views import style


class Dot(Protocol):
    """A point with a name. lab.papers.today.Dot is one."""

    @property
    def name(self) -> str: ...
    @property
    def x(self) -> float: ...
    @property
    def y(self) -> float: ...


def plot_dots(dots: Sequence[Dot], x: str, y: str, title: str, file: str | Path) -> Figure:
    """Draw the points with their names beside, and write the picture to `file`. `x` and `y` are the
    labels of the axes, which begin at 0."""
    figure = style.new_figure(3.8)
    axis = figure.add_subplot()
    colors = cycle(style.LINE_COLORS)
    markers = cycle(style.MARKERS)
    for dot in dots:
        color = next(colors)
        axis.plot(dot.x, dot.y, next(markers), color=color, ms=7, label=dot.name)
    axis.set(xlabel=x, ylabel=y)
    axis.set_ylim(bottom=0)
    axis.set_xlim(left=-0.02 * max(dot.x for dot in dots))
    axis.grid(True)
    figure.legend(loc="outside right center")
    return style.finish(figure, title, file)
