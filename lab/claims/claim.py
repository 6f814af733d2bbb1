"""A claim of a paper: what must show and why, and the paper's numbers beside ours.

    @claim("What small chunks cost", seconds=(15, 105))
    def s_f13(lab: Lab) -> Finding:
        finding = Finding(LLAMA_13B)
        table = finding.table(x="chunk", y="times that of the whole prompt")
        ...
        finding.expect(falls(table["attention"]), "Each chunk reads the keys before it again.")
        finding.publish("attention in chunks of 64", 3, table["attention"], at=64)
        return finding

The relations say whether the paper's trend shows here, why it follows from the arithmetic, and on
which devices. The published numbers say whether ours are of their size: each states a factor within
which they count as the same. Both together are the verdict. Read first: table.py, checks.py,
labs.py. Read next: phases.py."""

import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from cli.tables import show
from lab.claims.checks import ANYWHERE, Check, Condition
from lab.claims.table import Extreme, Line, Table, X, Y, from_text, plain
from lab.measure.capacity import Bounded

Verdict = Literal["as in the paper", "trend only", "not seen here", "too busy to tell"]
SAME_SIZE = 2.0  # the factor within which an effect counts as one of the paper's size
LLAMA_13B = "LLaMA-13B, A6000"  # the models and GPUs of most figures
MISTRAL_7B = "Mistral-7B, A100"
YI_34B = "Yi-34B, two A100"


@dataclass(frozen=True, kw_only=True)
class Published:
    """A number of the paper, and ours beside it.

    Their effects are compared. That of a ratio, printed as "1.33x", is how far it is from 1: a gain
    of 1.1x is a third of one of 1.3x. A paper's ratio of 1 has no effect: with it the ratio itself
    is compared. A Bounded number of a paper is met by any on its side."""

    text: str  # what the paper measured: "gain at 1K, B = 6"
    paper: float
    here: Y  # our number; None if it is not known
    line: str  # the name of the line that has ours
    table: int | None  # the number of the table that shows this line
    x: str  # what is on the axis of that line
    at: X
    spec: str  # the format of both numbers
    timed: bool  # whether ours depends on times that were measured
    device: str  # the paper's model and GPU: "LLaMA-13B, A6000"
    is_of_another_device: bool  # than the other numbers of the claim
    within: float | None  # None: depends on the machine, and is shown only
    unit: str  # stands after both numbers, with its space
    is_fitted: bool = False  # whether a constant of the cost model was fitted to the paper's

    @property
    def is_compared(self) -> bool:
        """Whether the verdict depends on it."""
        return self.within is not None

    @property
    def is_same_size(self) -> bool:
        """Whether our effect is of the paper's size; True if it is not compared."""
        if self.within is None:
            return True
        if self.here is None:
            return False
        no_effect = 1.0 if self.spec.endswith("x") and self.paper != 1 else 0.0
        share = (self.here - no_effect) / (self.paper - no_effect)
        bound = self.paper.bound if isinstance(self.paper, Bounded) else ""
        is_large_enough = bound == "below" or share >= 1 / self.within
        is_small_enough = bound == "at least" or share <= self.within
        return is_large_enough and is_small_enough

    @property
    def error(self) -> float | None:
        """How far ours is off, as a share of the paper's: infinity if ours is only known to be
        above or below; None if it is not known, or if the paper's is a bound, or of another
        device."""
        if self.here is None or isinstance(self.paper, Bounded) or self.is_of_another_device:
            return None
        if isinstance(self.here, Bounded) and self.here.bound:
            return math.inf
        return self.here / self.paper - 1

    @property
    def is_met(self) -> bool | None:
        """Whether ours is on the paper's side of its bound; None if ours is not known, or if the
        paper's is no bound, or of another device."""
        if self.here is None or not isinstance(self.paper, Bounded) or self.is_of_another_device:
            return None
        if self.paper.bound == "at least":
            return self.here >= self.paper
        return self.here < self.paper

    @property
    def paper_text(self) -> str:
        """The paper's number with its unit: "1.33x"."""
        return f"{show(self.paper, self.spec)}{self.unit}"

    @property
    def here_text(self) -> str:
        """Our number with its unit and where it was measured: "1.26x at context 512"."""
        if self.here is None:
            return "-"
        number = f"{show(self.here, self.spec)}{self.unit}"
        return (
            f"{number}, {self.at}"
            if isinstance(self.at, str)
            else f"{number} at {self.x} {self.at:,g}"
        )

    def __str__(self) -> str:
        """Both numbers: "gain at 1K, B = 6: 1.33x, here 1.26x at context 512"."""
        return f"{self.text}: {self.paper_text}, here {self.here_text}"


@dataclass
class Finding:
    """What was found of a claim."""

    device: str = ""  # on which the paper measured, unless a number says another
    tables: list[Table] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    published: list[Published] = field(default_factory=list)  # the first stands in summaries
    has_picture: bool = False  # whether it was drawn already, otherwise than as its tables

    def table(self, *fields: Any, **more_fields: Any) -> Table:
        """A new Table of these fields, which is shown."""
        self.tables.append(Table(*fields, **more_fields))
        return self.tables[-1]

    def expect(self, check: Check, because: str, condition: Condition = ANYWHERE) -> None:
        """Add a relation that must show, the sentence that says why, and on which devices."""
        self.checks.append(replace(check, because=because, condition=condition))

    def publish(
        self,
        text: str,
        paper: float,
        line: Line,
        at: X | Extreme,
        *,
        device: str | None = None,
        within: float | None = SAME_SIZE,
        unit: str = "",
        fitted: bool = False,
    ) -> None:
        """Add a number of the paper; ours is that of `line` at `at`, which may be `max` or `min`:
        where the line is largest or smallest. See Published."""
        x = line.x_of(at) if callable(at) else at
        shows_line = [line.values is table.lines.get(line.name) for table in self.tables]
        number = Published(
            text=text,
            paper=paper,
            here=line.at(x),
            line=line.name,
            table=shows_line.index(True) if any(shows_line) else None,
            x=line.table.x,
            at=x,
            spec=line.spec,
            timed=line.timed,
            device=self.device if device is None else device,
            is_of_another_device=device is not None,
            within=within,
            unit=unit,
            is_fitted=fitted,
        )
        self.published.append(number)

    @property
    def is_timed(self) -> bool:
        """Whether the verdict depends on measured times, not only on what is counted."""
        if any(check.timed for check in self.checks):
            return True
        return any(number.timed for number in self.published if number.is_compared)

    def failures(self, busy: bool = False) -> list[Check]:
        """The checks that do not hold. Of a busy machine those count that compare no times."""
        return [check for check in self.checks if not (check.holds or (busy and check.timed))]

    def verdict(self, busy: bool) -> Verdict:
        """Whether the claim shows on this machine, which may have been busy with something else."""
        if self.failures(busy):
            return "not seen here"
        if busy and self.is_timed:
            return "too busy to tell"
        return "trend only" if self.shortfall else "as in the paper"

    @property
    def shortfall(self) -> str:
        """The numbers that are not of the paper's size, or that none of its numbers is compared; ""
        if there is nothing of both."""
        if self.published and not any(number.is_compared for number in self.published):
            return "no number of the paper is compared"
        return "; ".join(str(number) for number in self.published if not number.is_same_size)

    def why(self, busy: bool) -> str:
        """The reason for a verdict other than "as in the paper"; "" for that one."""
        if self.verdict(busy) == "too busy to tell":
            return "other programs used the machine"
        return "; ".join(map(str, self.failures(busy))) or self.shortfall

    def numbers_in(self, table: Table) -> dict[tuple[str, X], str]:
        """The texts of the paper's numbers whose place is in a table, {(line, x): text}."""
        texts: dict[tuple[str, X], dict[str, None]] = {}
        for number in self.published:
            if number.table is not None and self.tables[number.table] is table:
                texts.setdefault((number.line, number.at), {})[number.paper_text] = None
        return {place: ", ".join(each) for place, each in texts.items()}

    def to_json(self) -> dict[str, Any]:
        """All numbers, and what is said of them."""
        return {
            "numbers": [
                asdict(each) | {"paper": plain(each.paper), "here": plain(each.here)}
                for each in self.published
            ],
            "checks": [asdict(check) for check in self.checks],
            "tables": [table.to_json() for table in self.tables],
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "Finding":
        """The Finding of to_json()."""
        finding = cls(tables=[Table.from_json(table) for table in row["tables"]])
        for check in row["checks"]:
            condition = Condition(**check["condition"])
            finding.checks.append(Check(**check | {"condition": condition}))
        for number in row["numbers"]:
            bounded = {name: from_text(number[name]) for name in ("paper", "here")}
            finding.published.append(Published(**number | bounded))
        return finding


@dataclass(frozen=True)
class Claim:
    """A figure or table of a paper: the function that asks a lab, whose docstring begins with its
    id."""

    function: Callable[[Any], Finding]  # of a Lab, or of a CostLab
    title: str
    seconds: tuple[int, int]  # how long it takes, about, with --quick and without, on two CPU cores
    covers: tuple[str, ...]  # other claims that are measured with it

    @property
    def id(self) -> str:
        """Its paper, and the figure, table or section."""
        return (inspect.getdoc(self.function) or "").partition(":")[0]

    @property
    def ids(self) -> tuple[str, ...]:
        """All claims that are measured with it, itself first."""
        return (self.id, *self.covers)

    @property
    def name(self) -> str:
        """The heading of what is found: its ids and its title."""
        return f"{', '.join(self.ids)}: {self.title}"

    @property
    def sentence(self) -> str:
        """The claim in a sentence."""
        return self.text.partition("\n")[0]

    @property
    def clause(self) -> str:
        """The claim in a dozen words: the sentence up to its first colon, semicolon or stop."""
        return re.split(r"[:;.](?= |$)", self.sentence)[0]

    @property
    def text(self) -> str:
        """The claim, and what else is to be said of it: the docstring of the function."""
        text = (inspect.getdoc(self.function) or "").removeprefix(f"{self.id}: ")
        return text[:1].upper() + text[1:]

    def seconds_of(self, quick: bool) -> int:
        """How long it takes, about."""
        quick_s, full_s = self.seconds
        return quick_s if quick else full_s


def claim(
    title: str, *, seconds: tuple[int, int] = (0, 0), covers: tuple[str, ...] = ()
) -> Callable[[Callable[[Any], Finding]], Claim]:
    """Make the function below a Claim."""

    def make(function: Callable[[Any], Finding]) -> Claim:
        return Claim(function, title, seconds, covers)

    return make
