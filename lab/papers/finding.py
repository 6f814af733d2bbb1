"""What a claim returns: plots, checks of the trend, and the paper's numbers beside ours.

    Finding(
        plots=[speedups],
        checks=[falls(speedup, because="All decodes of a batch share one reading of the weights.")],
        published=[Published("decode speedup, B = 4", 10.4, speedup, at=4)],
    )

The checks say whether the paper's trend shows here. The published numbers say whether ours are of
its size: each states a factor within which they count as the same. Both together are the verdict.
Read first: plot.py, checks.py. Read next: measured_batches.py."""

from dataclasses import dataclass, field
from typing import Literal

from cli.tables import show
from lab.measure.capacity import Bounded
from lab.papers.checks import Check
from lab.papers.plot import Line, Plot, X, Y

Verdict = Literal["as in the paper", "trend only", "not seen here", "too busy to tell"]
SAME_SIZE = 2.0  # the factor within which an effect counts as one of the paper's size


@dataclass(frozen=True)
class Published:
    """A number of the paper, and ours beside it.

    Their effects are compared. That of a ratio, printed as "1.33x", is how far it is from 1: a gain
    of 1.1x is a third of one of 1.3x. A Bounded number of a paper is met by any on its side."""

    text: str  # what the paper measured: "gain at 1K, B = 6"
    paper: float
    line: Line  # which has our number
    at: X
    device: str = ""  # the paper's model and GPU: "LLaMA-13B, A6000"
    within: float | None = SAME_SIZE  # None: depends on the machine, and is shown only
    unit: str = ""  # stands after both numbers, with its space

    @property
    def here(self) -> Y:
        """Our number; None if it is not known."""
        return self.line.at(self.at)

    @property
    def is_same_size(self) -> bool:
        """Whether our effect is of the paper's size; True if it is not compared."""
        if self.within is None:
            return True
        if self.here is None:
            return False
        no_effect = 1.0 if self.line.spec.endswith("x") else 0.0
        share = (self.here - no_effect) / (self.paper - no_effect)
        bound = self.paper.bound if isinstance(self.paper, Bounded) else ""
        is_large_enough = bound == "below" or share >= 1 / self.within
        is_small_enough = bound == "at least" or share <= self.within
        return is_large_enough and is_small_enough

    def is_in(self, plot: Plot) -> bool:
        """Whether a plot shows the line that has our number."""
        line = self.line
        return plot.title == line.title and plot.lines.get(line.name) == line.values

    @property
    def paper_text(self) -> str:
        """The paper's number with its unit: "1.33x"."""
        return f"{show(self.paper, self.line.spec)}{self.unit}"

    @property
    def here_text(self) -> str:
        """Our number with its unit and where it was measured: "1.26x at context 512"."""
        if self.here is None:
            return "-"
        number = f"{show(self.here, self.line.spec)}{self.unit}"
        if isinstance(self.at, str):
            return f"{number}, {self.at}"
        return f"{number} at {self.line.x_label} {self.at:,g}"

    def __str__(self) -> str:
        """Both numbers: "gain at 1K, B = 6: 1.33x, here 1.26x at context 512"."""
        return f"{self.text}: {self.paper_text}, here {self.here_text}"


@dataclass(frozen=True)
class Finding:
    """What was found of a claim."""

    plots: list[Plot]
    checks: list[Check]
    published: list[Published] = field(default_factory=list)  # the first stands in summaries
    has_picture: bool = False  # whether it was drawn already, otherwise than as its plots

    @property
    def is_timed(self) -> bool:
        """Whether the verdict depends on measured times, not only on what is counted."""
        compared = [number.line for number in self.published if number.within is not None]
        return any(check.timed for check in self.checks) or any(line.timed for line in compared)

    def failures(self, busy: bool = False) -> list[Check]:
        """The checks that do not hold. Of a busy machine those count that compare no times."""
        return [check for check in self.checks if not (check.holds or (busy and check.timed))]

    def verdict(self, busy: bool) -> Verdict:
        """Whether the claim shows on this machine, which may have been busy with something else."""
        if self.failures(busy):
            return "not seen here"
        if busy and self.is_timed:
            return "too busy to tell"
        if all(number.is_same_size for number in self.published):
            return "as in the paper"
        return "trend only"

    def why(self, busy: bool) -> str:
        """The reason for a verdict other than "as in the paper"; "" for that one."""
        verdict = self.verdict(busy)
        if verdict == "not seen here":
            return "; ".join(str(check) for check in self.failures(busy))
        if verdict == "too busy to tell":
            return "other programs used the machine"
        return "; ".join(str(number) for number in self.published if not number.is_same_size)
