"""Checks: the relations between lines in which the trend of a claim shows.

    less(1.02, gain), falls(decode)

A check says why it follows from the arithmetic and, unless that is so on any device, where. Nothing
is claimed about a number that is not known. Read first: table.py. Read next: labs.py, claim.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from cli.tables import show
from lab.claims.table import Line

NOISE = 1.1  # up to this factor two numbers may differ by chance


@dataclass(frozen=True)
class Condition:
    """A property of the device without which a relation need not show."""

    description: str  # "the ridge is above 256 rows"
    is_met: bool
    observed: str  # what is known of this device: "it is at 20"


ANYWHERE = Condition("any device computes", is_met=True, observed="")


@dataclass(frozen=True, kw_only=True)
class Check:
    """A relation in which a trend shows, and why it must show."""

    description: str  # "decode falls"
    failure: str  # "not at 2, 3", "not so", or "not known"; "" if it holds
    title: str = ""  # of the table
    timed: bool = True  # whether measured times are compared, which other programs may disturb
    because: str = ""  # a sentence: why it follows from the arithmetic
    condition: Condition = ANYWHERE

    @property
    def holds(self) -> bool:
        """Whether the relation shows."""
        return not self.failure

    def __str__(self) -> str:
        """What does not show, and whether that was to be expected; "" if it holds."""
        if self.holds:
            return ""
        text = f"{self.title}: {self.description}: {self.failure}".removeprefix(": ")
        if self.condition.is_met:
            return f"{text}; it should be so: {self.because.removesuffix('.')}"
        condition = self.condition
        return f"{text}; expected only where {condition.description}, and {condition.observed}"

    @property
    def reason(self) -> str:
        """What is checked, where, and why it must show: a sentence."""
        place = "" if self.condition == ANYWHERE else f", where {self.condition.description}"
        title = f"{self.title}: " if self.title else ""
        return f"{title}{self.description}{place}: {self.because}"


def rises(line: Line) -> Check:
    """The line ends above its start, by more than noise of 10 %, and falls nowhere by more."""
    return _goes(line, "rises", list(line.known.values()))


def falls(line: Line) -> Check:
    """The line ends below its start, by more than noise of 10 %, and rises nowhere by more."""
    return _goes(line, "falls", list(line.known.values())[::-1])


def _goes(line: Line, direction: str, values: Sequence[float]) -> Check:
    """The Check that these values rise; `direction` is what the line does then."""
    goes_back = any(low > NOISE * high for low, high in pairwise(values))
    failure = ""
    if len(values) < 2:
        failure = "not known"
    elif goes_back or NOISE * values[0] >= values[-1]:
        failure = "not so"
    description = f"{line.name} {direction}"
    return Check(description=description, failure=failure, title=line.table.title, timed=line.timed)


def less(*terms: Line | float, at: Literal["start", "end", ""] = "") -> Check:
    """Each term is less than the next, at every x, or only at the first or the last one.

    Nothing is claimed of an x at which one of the terms is not known, but one must be known."""
    lines = [term for term in terms if isinstance(term, Line)]
    names = [term.name if isinstance(term, Line) else f"{term:g}" for term in terms]
    xs = lines[0].table.xs
    if at:
        xs = xs[:1] if at == "start" else xs[-1:]
    failed_at: list[str] = []
    is_known = False
    for x in xs:
        numbers = [term.at(x) if isinstance(term, Line) else term for term in terms]
        known_numbers = [number for number in numbers if number is not None]
        if len(known_numbers) < len(numbers):
            continue
        is_known = True
        if not all(low < high for low, high in pairwise(known_numbers)):
            failed_at.append(show(x, ","))
    failure = f"not at {', '.join(failed_at)}" if failed_at else ""
    return Check(
        description=" < ".join(names) + (f", at the {at}" if at else ""),
        failure=failure if is_known else "not known",
        title=lines[0].table.title,
        timed=any(line.timed for line in lines),
    )
