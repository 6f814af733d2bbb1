"""What a claim of the papers comes to on this machine.

A claim is a function from a Setup to a Finding: claims of single iterations are in
paper_iterations.py, of whole runs in paper_loads.py; what the papers say of each is in
published.toml. `bench.py paper` runs them, and says how they compare."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from model import GPT


@dataclass(frozen=True, eq=False)  # hashable: what was run is kept for each
class Setup:
    """What claims are measured with: the model on its device, and how far to go."""

    model: GPT
    machine: dict  # of measure.describe_machine
    args: Namespace  # with attention, seed, quick
    simulated: Callable | None = None  # (EngineConfig, arrivals) -> Run: capacity by a fitted law

    @property
    def big(self):
        """Whether the papers' own sizes can be run."""
        return self.model.device.type == "cuda"


class Panel(NamedTuple):
    """A diagram: a line through [(x, y)] for each name, None where there is nothing."""

    title: str
    x: str  # what is on the axes, with units
    y: str
    lines: dict
    log: str = ""  # the axes that are logarithmic: "", "x", "y", "xy"


class Finding(NamedTuple):
    """What was measured: all of it can be written as JSON."""

    tables: list  # of (title, {head: format}, rows) for tables.print_table
    ours: str  # our number or numbers, in the words of the paper's in published.toml
    holds: bool | None  # whether what the claim says shows here; None: nothing to compare
    why: str = ""  # if it does not hold, why: from the numbers
    panels: list = []  # of Panel
    busy: bool = False  # whether the machine was too busy for it to be believed
