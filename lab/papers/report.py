"""Measures a claim and keeps its record: in paper.json, paper.md, and tables in results/.

paper.json has a record of each claim. paper.md is made of the records, and so are the tables at the
end of results/README.md. Read first: finding.py and measured.py. Read next:
lab/commands/paper.py."""

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cli import console
from cli.options import write_text
from lab.measure.machine_info import RealMachineInfo
from lab.papers.bench import Bench
from lab.papers.finding import Finding
from lab.papers.measured import CLAIMS, Claim
from views.panels import plot_panels
from views.tables import Column, format_table

RESULTS = Path(__file__).parents[2] / "results"
BEGIN = "<!-- made by bench.py paper -->"  # of the tables in results/README.md
END = "<!-- until here -->"
TITLE = "# What SARATHI (S), Sarathi-Serve (SS) and a post (B) claim, and what shows here"
HOLDS = "holds"
FAILS = "does not hold"
BUSY = "too busy to tell"
NOT_MEASURED = "not measured"
TRIED_AGAIN = (BUSY, NOT_MEASURED)  # by the next run


@dataclass(frozen=True, kw_only=True)
class Record:
    """The result of a claim that was measured."""

    claim: str  # its name
    command: str  # that measures it again
    paper: str
    here: str | None  # the numbers of this device, to compare with the paper's
    verdict: str
    why: str  # the reason why it does not hold, or was not measured
    options: dict[str, Any]  # what it was measured with and on, see `conditions_of`
    text: str  # in Markdown
    tables: list[dict[str, Any]]  # the plots, see Plot.to_json
    number: str = "-"  # of the claim's Headline


@dataclass(frozen=True)
class SummaryRow:
    """A row of the summary."""

    claim: Claim
    record: Record


SUMMARY_COLUMNS: list[Column[SummaryRow]] = [
    Column("here", lambda row: row.record.number),
    Column("paper", lambda row: row.claim.headline.paper),
    Column("verdict", lambda row: row.record.verdict),
]


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
            plot_panels(finding.plots, claim.name, bench.picture, bench.machine.to_json())
        number = claim.headline.number(finding)
        verdict = verdict_of(finding, bench.busy)
        why = reasons(finding)
    except (ValueError, RuntimeError, MemoryError) as error:
        message = console.explain(error)
        if not isinstance(message, str):  # an error of ours
            raise
        finding = Finding(plots=[], checks=[])
        number = "-"
        verdict = NOT_MEASURED
        why = message.removeprefix("error: ")
        picture = ""
    facts = {
        "paper": claim.paper,
        "must show": finding.must_show,
        "here": finding.here,
        "verdict": verdict,
        "why": why,
    }
    facts_text = "\n".join(f"- {name}: {text}" for name, text in facts.items() if text)
    used = ", ".join(f"{name} {value}" for name, value in conditions.items())
    took = f"Took {time.time() - start:.0f} s, {time.strftime('%Y-%m-%d %H:%M')}; {used}."
    tables = [plot.markdown() for plot in finding.plots]
    parts = [f"## {claim.name}", facts_text, *tables, picture, took]
    quick = " --quick" if conditions["quick"] else ""
    return Record(
        claim=claim.name,
        command=f"`paper --only {claim.id}{quick}`",
        paper=claim.paper,
        here=finding.here or None,
        verdict=verdict,
        why=why,
        options=conditions,
        text="\n\n".join(part for part in parts if part),
        tables=[plot.to_json() for plot in finding.plots],
        number=number,
    )


def verdict_of(finding: Finding, busy: bool) -> str:
    """HOLDS if all checks hold, else FAILS; BUSY if the machine was busy."""
    if busy:
        return BUSY
    return FAILS if finding.failures else HOLDS


def reasons(finding: Finding) -> str:
    """The checks that fail, and the reason why they may; "" if all hold."""
    if not finding.failures:
        return ""
    return "; ".join([*finding.failures, finding.because]).removesuffix("; ")


def read_results(directory: Path) -> Results:
    """The records in a directory; none if it has no paper.json."""
    file = directory / "paper.json"
    if not file.exists():
        return Results()
    claims = json.loads(file.read_text("utf-8"))["claims"]
    return Results({claim_id: Record(**record) for claim_id, record in claims.items()})


def save_results(results: Results, machine: RealMachineInfo, directory: Path) -> None:
    """Write paper.json and paper.md and, if they lie in results/, the tables of its README."""
    text = json.dumps(results.to_json(machine), indent=1)
    write_text(directory / "paper.json", text)
    parts = [TITLE, machine.heading().removesuffix("\n"), summary(results, page="")]
    for row in results.rows():
        parts += [f'<a id="{row.claim.id.lower()}"></a>', row.record.text]
    write_text(directory / "paper.md", "\n\n".join(parts) + "\n")
    if directory.resolve().parent == RESULTS:
        write_index()


def summary(results: Results, page: str) -> str:
    """A table in Markdown with a line for each claim: its headline, and the verdict. The ids are
    links to the details in `page`, the address of paper.md; "": in the same page."""
    rows: dict[str, SummaryRow] = {}
    for row in results.rows():
        claim = row.claim
        rows[f"[{claim.id}]({page}#{claim.id.lower()}): {claim.headline.text}"] = row
    return format_table("claim", SUMMARY_COLUMNS, rows)


def write_index() -> None:
    """Write the summaries of all machines into results/README.md, between BEGIN and END."""
    readme = RESULTS / "README.md"
    before, _, rest = readme.read_text("utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    parts = [before + BEGIN]
    for file in sorted(RESULTS.glob("*/paper.json")):
        directory = file.parent
        page = f"{directory.name}/paper.md"
        parts += [f"### [{directory.name}]({page})", summary(read_results(directory), page)]
    write_text(readme, "\n\n".join([*parts, END + after]))
