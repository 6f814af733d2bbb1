"""Checks: the relations between lines in which the trend of a claim shows.

    falls(decode, because="All decodes of a batch share one reading of the weights.")
    less(1.02, gain, because="...", where=ridge_above(bench, chunk))

A check says why it follows from the arithmetic and, unless that is so on any device, where. Nothing
is claimed about a number that is not known. Read first: plot.py. Read next: finding.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from cli.tables import show
from lab.papers.plot import Line, name_of

NOISE = 1.1  # up to this factor two numbers may differ by chance


@dataclass(frozen=True)
class Condition:
    """A property of the device without which a relation need not show."""

    description: str  # "the ridge is above 256 rows"
    is_met: bool
    here: str  # what is known of this device: "it is at 20"


ANYWHERE = Condition("any device computes", is_met=True, here="")


@dataclass(frozen=True, kw_only=True)
class Check:
    """A relation that shows a trend, and why it must show."""

    description: str  # "decode falls"
    because: str  # a sentence: why it follows from the arithmetic
    holds: bool
    where: Condition = ANYWHERE
    title: str = ""  # of the plot
    timed: bool = True  # whether measured times are compared, which other programs may disturb
    failure: str = ""  # "not at 2, 3", "not so", or "not known"; "" if it holds

    @property
    def is_expected(self) -> bool:
        """Whether it must show on this device."""
        return self.where.is_met

    def __str__(self) -> str:
        """What does not show, and whether that was to be expected; "" if it holds."""
        if self.holds:
            return ""
        text = f"{self.title}: {self.description}: {self.failure}".removeprefix(": ")
        if self.is_expected:
            return f"{text}; it should be so: {self.because.removesuffix('.')}"
        return f"{text}; expected only where {self.where.description}, and {self.where.here}"


def rises(line: Line, *, because: str, where: Condition = ANYWHERE) -> Check:
    """The line ends above its start, by more than noise of 10 %, and falls nowhere by more."""
    return _goes(line, "rises", [*line.known.values()], because, where)


def falls(line: Line, *, because: str, where: Condition = ANYWHERE) -> Check:
    """The line ends below its start, by more than noise of 10 %, and rises nowhere by more."""
    return _goes(line, "falls", [*line.known.values()][::-1], because, where)


def _goes(
    line: Line, direction: str, values: Sequence[float], because: str, where: Condition
) -> Check:
    """The Check that these values rise; `direction` is what the line does then."""
    goes_back = any(low > NOISE * high for low, high in pairwise(values))
    failure = ""
    if len(values) < 2:
        failure = "not known"
    elif goes_back or NOISE * values[0] >= values[-1]:
        failure = "not so"
    return Check(
        description=f"{line.name} {direction}",
        because=because,
        holds=not failure,
        where=where,
        title=line.title,
        timed=line.timed,
        failure=failure,
    )


def less(
    *terms: Line | float,
    because: str,
    where: Condition = ANYWHERE,
    at: Literal["start", "end", ""] = "",
) -> Check:
    """Each term is less than the next, at every x, or only at the first or the last one.

    Nothing is claimed of an x at which one of the terms is not known, but one must be known."""
    lines = [term for term in terms if isinstance(term, Line)]
    description = " < ".join(name_of(term) for term in terms)
    xs = lines[0].xs
    if at == "start":
        description += ", at the start"
        xs = xs[:1]
    if at == "end":
        description += ", at the end"
        xs = xs[-1:]
    failed_at: list[str] = []
    is_known = False
    for x in xs:
        numbers = [term.at(x) if isinstance(term, Line) else term for term in terms]
        known = [number for number in numbers if number is not None]
        if len(known) < len(numbers):
            continue
        is_known = True
        if not all(low < high for low, high in pairwise(known)):
            failed_at.append(show(x, ","))
    failure = ""
    if not is_known:
        failure = "not known"
    elif failed_at:
        failure = f"not at {', '.join(failed_at)}"
    return Check(
        description=description,
        because=because,
        holds=not failure,
        where=where,
        title=lines[0].title,
        timed=any(line.timed for line in lines),
        failure=failure,
    )
