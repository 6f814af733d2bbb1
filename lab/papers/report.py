"""Measures a claim and keeps its record: in paper.json, paper.md, and tables in results/.

paper.json has a record of each claim. paper.md is made of the records, and so are the tables at the
end of results/README.md. Read first: finding.py and measured.py. Read next:
lab/commands/paper.py."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from cli import console
from cli.options import write_text
from cli.tables import Cell, format_table
from lab.measure.machine_info import RealMachineInfo
from lab.papers.bench import Bench
from lab.papers.checks import ANYWHERE, Check
from lab.papers.finding import Finding, Published
from lab.papers.measured import CLAIMS, Claim
from lab.papers.picture import draw
from lab.papers.plot import Plot, X

RESULTS = Path(__file__).parents[2] / "results"
BEGIN = "<!-- made by bench.py paper -->"  # of the tables in results/README.md
END = "<!-- until here -->"
TITLE = "# What SARATHI (S), Sarathi-Serve (SS) and two posts (B, C) claim, and what shows here"
NOT_MEASURED = "not measured"
TRIED_AGAIN = ("too busy to tell", NOT_MEASURED)  # by the next run


@dataclass(frozen=True, kw_only=True)
class Number:
    """A number of the paper and ours, as texts with their units."""

    text: str  # what is counted
    device: str  # the paper's model and GPU
    paper: str
    here: str
    same_size: str  # within which factor they count as the same, and whether they are

    @classmethod
    def of(cls, published: Published) -> "Number":
        """The texts of a Published number."""
        same_size = "not compared"
        if published.within is not None:
            same_size = f"{'yes' if published.is_same_size else 'no'}, within {published.within:g}x"
        return cls(
            text=published.text,
            device=published.device,
            paper=published.paper_text,
            here=published.here_text,
            same_size=same_size,
        )

    def cells(self) -> list[Cell]:
        """Its row in a table."""
        return [
            ("of", self.device, ""),
            ("paper", self.paper, ""),
            ("here", self.here, ""),
            ("same size?", self.same_size, ""),
        ]


@dataclass(frozen=True, kw_only=True)
class Record:
    """The result of a claim that was measured."""

    claim: str  # its name
    command: str  # that measures it again
    numbers: list[dict[str, str]]  # the fields of each Number; the first stands in summaries
    verdict: str
    why: str  # the reason for another verdict than "as in the paper"
    options: dict[str, Any]  # what it was measured with and on, see `conditions_of`
    text: str  # in Markdown
    tables: list[dict[str, Any]]  # the plots, see Plot.to_json

    @property
    def headline(self) -> Number | None:
        """The number that stands in summaries; None if there is none."""
        return Number(**self.numbers[0]) if self.numbers else None


@dataclass(frozen=True)
class SummaryRow:
    """A row of the summary."""

    claim: Claim
    record: Record


@dataclass
class Results:
    """The records of one machine, which lie in one folder."""

    claims: dict[str, Record] = field(default_factory=dict)  # by the id of the claim

    def to_json(self, machine: RealMachineInfo) -> dict[str, Any]:
        """The content of paper.json: the records in the order of CLAIMS, and the last machine."""
        return {
            "claims": {row.claim.id: asdict(row.record) for row in self.rows()},
            "machine": machine.to_json(),
        }

    def rows(self) -> list[SummaryRow]:
        """The claims that were measured, and their records, in the order of CLAIMS."""
        measured = [claim for claim in CLAIMS if claim.id in self.claims]
        return [SummaryRow(claim, self.claims[claim.id]) for claim in measured]


def conditions_of(machine: RealMachineInfo, bench: Bench) -> dict[str, Any]:
    """The conditions that numbers depend on. If one differs, a claim is measured again."""
    return {
        "device": machine.device,
        "threads": machine.threads,
        "torch": machine.torch,
        "model": machine.model,
        "dtype": machine.dtype,
        "attention": bench.options.attention,
        "seed": bench.options.seed,
        "compile": bench.options.compile,
        "quick": bench.size == "quick",  # on a GPU nothing is
    }


def measure_claim(claim: Claim, bench: Bench, conditions: dict[str, Any]) -> Record:
    """Measure a claim, draw it to `bench.picture`, and return its record.

    An error that a user can cause, such as too little memory, makes it "not measured"."""
    start = time.time()
    picture = f"![{claim.name}]({Path(bench.picture).name})"
    try:
        finding = claim.function(bench)
        if not finding.has_picture:
            draw(finding, claim.name, bench.picture, bench.machine.to_json())
        verdict = finding.verdict(bench.busy)
        why = finding.why(bench.busy)
    except (ValueError, RuntimeError, MemoryError) as error:
        message = console.explain(error)
        if not isinstance(message, str):  # an error of ours
            raise
        finding = Finding(plots=[], checks=[])
        verdict = NOT_MEASURED
        why = message.removeprefix("error: ")
        picture = ""
    numbers = [Number.of(published) for published in finding.published]
    used = ", ".join(f"{name} {value}" for name, value in conditions.items())
    parts = [
        f"## {claim.name}",
        claim.text,
        f"**{verdict}**" + (f": {why}" if why else ""),
        format_table("number", {number.text: number.cells() for number in numbers}),
        "\n".join(f"- {reason}" for reason in reasons(finding.checks)),
        *[plot.markdown(numbers_in(plot, finding.published)) for plot in finding.plots],
        picture,
        f"Took {time.time() - start:.0f} s, {time.strftime('%Y-%m-%d %H:%M')}; {used}.",
    ]
    quick = " --quick" if conditions["quick"] else ""
    return Record(
        claim=claim.name,
        command=f"`paper --only {claim.id}{quick}`",
        numbers=[asdict(number) for number in numbers],
        verdict=verdict,
        why=why,
        options=conditions,
        text="\n\n".join(part for part in parts if part),
        tables=[plot.to_json() for plot in finding.plots],
    )


def numbers_in(plot: Plot, published: Sequence[Published]) -> dict[tuple[str, X], str]:
    """The texts of the paper's numbers whose place is in a plot, {(line, x): text}."""
    texts: dict[tuple[str, X], str] = {}
    for number in published:
        place = (number.line.name, number.at)
        if number.is_in(plot) and number.paper_text not in texts.get(place, ""):
            texts[place] = ", ".join(filter(None, [texts.get(place), number.paper_text]))
    return texts


def reasons(checks: Sequence[Check]) -> list[str]:
    """What is checked, and why it must show: a sentence for each relation."""
    texts = []
    for check in checks:
        where = "" if check.where is ANYWHERE else f", where {check.where.description}"
        title = f"{check.title}: " if check.title else ""
        texts.append(f"{title}{check.description}{where}: {check.because}")
    return list(dict.fromkeys(texts))


def read_results(directory: Path) -> Results:
    """The records in a directory; none if it has no paper.json. Records with other fields, of an
    older version, are left out: their claims are measured again."""
    file = directory / "paper.json"
    if not file.exists():
        return Results()
    names = {field.name for field in fields(Record)}
    claims = json.loads(file.read_text("utf-8"))["claims"]
    return Results({key: Record(**row) for key, row in claims.items() if row.keys() == names})


def save_results(results: Results, machine: RealMachineInfo, directory: Path) -> None:
    """Write paper.json and paper.md and, if they lie in results/, the tables of its README."""
    text = json.dumps(results.to_json(machine), indent=1)
    write_text(directory / "paper.json", text)
    parts = [TITLE, machine.heading().removesuffix("\n"), summary(results)]
    for row in results.rows():
        parts += [f'<a id="{row.claim.id.lower()}"></a>', row.record.text]
    write_text(directory / "paper.md", "\n\n".join(parts) + "\n")
    if directory.resolve().parent == RESULTS:
        write_index()


def summary(results: Results) -> str:
    """A table in Markdown with a line for each claim: its first number, and the verdict. The ids
    are links to the details, in the same page."""
    rows: dict[str, list[Cell]] = {}
    for row in results.rows():
        headline = row.record.headline
        text = headline.text if headline else row.claim.title
        rows[f"[{row.claim.id}](#{row.claim.id.lower()}): {text}"] = [
            ("paper", headline and headline.paper, ""),
            ("here", headline and headline.here, ""),
            ("verdict", row.record.verdict, ""),
        ]
    return format_table("claim", rows)


def index_table(results: Results) -> str:
    """A table in Markdown with a short line for each claim: what it says, the paper's first number,
    ours and the verdict. Columns are not aligned, so that no line is long."""
    lines = ["| claim | paper | here | verdict |", "|---|---:|---:|---|"]
    for row in results.rows():
        headline = row.record.headline
        numbers = [headline.paper, headline.here] if headline else ["-", "-"]
        cells = [f"{row.claim.id}: {row.claim.clause}", *numbers, row.record.verdict]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write_index() -> None:
    """Write the summaries of all machines into results/README.md, between BEGIN and END."""
    readme = RESULTS / "README.md"
    before, _, rest = readme.read_text("utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    parts = [before + BEGIN]
    for file in sorted(RESULTS.glob("*/paper.json")):
        directory = file.parent
        page = f"{directory.name}/paper.md"
        parts += [f"### [{directory.name}]({page})", index_table(read_results(directory))]
    write_text(readme, "\n\n".join([*parts, END + after]))
