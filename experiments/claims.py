"""What a claim of the papers comes to on this machine: the types that its measuring shares.

What the papers say of each claim, and the words for what is found, are in published.toml. Read
next: paper_iterations.py, and simulator/report.py, which runs and keeps them all."""

from argparse import Namespace
from collections.abc import Callable
from typing import NamedTuple

from model import GPT


class Setup(NamedTuple):
    """What claims are measured with: the model on its device, and how far to go."""

    model: GPT
    machine: dict  # of measure.describe_machine
    args: Namespace  # with attention, seed, quick
    bench: Callable  # runs a command of the bench, given as text: its report, as of --json
    picture: str = ""  # the file in which that may draw

    @property
    def size(self):
        """Which sizes are run: the papers' own are "gpu"; else "cpu", or less, "quick"."""
        on_gpu = self.model.device.type == "cuda"
        return "gpu" if on_gpu else "quick" if self.args.quick else "cpu"


class Panel(NamedTuple):
    """A diagram: a line through [(x, y)] for each name, None where there is nothing."""

    title: str
    x: str  # what is on the axes, with units
    y: str
    lines: dict
    log: str = ""  # the axes that are logarithmic: "", "x", "y", "xy"


class Finding(NamedTuple):
    """What was measured: all of it can be written as JSON."""

    tables: list  # of (title, {head: format}, rows) for tables.markdown
    said: dict  # what fills in the words `here` and `why` of published.toml
    shows: dict  # {what the claim says: whether that shows}; each may have a word in `why`
    panels: list = []  # of Panel
    busy: bool = False  # whether the machine was too busy for it to be believed
