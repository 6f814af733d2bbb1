"""Measures a claim and keeps its record: in paper.json, paper.md, and tables in results/.

paper.json has a record of each claim: numbers, and on what they were measured. paper.md is made of
the records and of the claims as they stand in the code, and so are the tables at the end of
results/README.md. Read first: claim.py and claims.py. Read next: lab/commands/paper.py."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli import console
from cli.files import write_text
from cli.tables import Cell, format_table, markdown
from lab.claims.claim import Claim, Finding, Published
from lab.claims.claims import CLAIMS
from lab.claims.labs import Lab
from lab.claims.picture import draw
from lab.claims.provenance import provenance
from lab.measure.machine_info import RealMachineInfo

RESULTS = Path(__file__).parents[2] / "results"
BEGIN = "<!-- made by bench.py paper -->"  # of the tables in results/README.md
END = "<!-- until here -->"
TITLE = "# What SARATHI (S), Sarathi-Serve (SS) and two posts (B, C) claim, and what shows here"
NOT_MEASURED = "not measured"


@dataclass(frozen=True, kw_only=True)
class Record:
    """The result of a claim that was measured, or why it could not be."""

    finding: Finding
    busy: bool  # whether the machine was too busy
    error: str  # "": it was measured
    seconds: float  # that it took
    options: dict[str, Any]  # what it was measured with and on
    provenance: dict[str, str]

    @property
    def verdict(self) -> str:
        """Whether the claim shows here."""
        return NOT_MEASURED if self.error else self.finding.verdict(self.busy)

    @property
    def is_done(self) -> bool:
        """Whether the next run need not try again."""
        return self.verdict not in ("too busy to tell", NOT_MEASURED)

    @property
    def why(self) -> str:
        """The reason for another verdict than "as in the paper"."""
        return self.error or self.finding.why(self.busy)

    def markdown(self, claim: Claim) -> str:
        """The claim, the verdict, the paper's numbers beside ours, the reasons of the checks, and
        the tables."""
        finding = self.finding
        used = ", ".join(f"{name} {value}" for name, value in self.options.items())
        picture = f"![{claim.name}]({picture_of(claim)})"
        parts = [
            f"## {claim.name}",
            claim.text,
            f"**{self.verdict}**" + (f": {self.why}" if self.why else ""),
            format_table("number", {each.text: cells_of(each) for each in finding.published}),
            "\n".join(dict.fromkeys(f"- {check.reason}" for check in finding.checks)),
            *(table.markdown(finding.numbers_in(table)) for table in finding.tables),
            "" if self.error else picture,
            f"Took {self.seconds:.0f} s, {self.provenance['time']}; {used}.",
        ]
        return "\n\n".join(part for part in parts if part)

    def headline(self, claim: Claim) -> tuple[str, list[str]]:
        """What stands in summaries: the text of the first number that is compared, the paper's and
        ours, and the verdict. If there is no such number, the title of the claim."""
        for number in self.finding.published:
            if number.within is not None:
                return number.text, [number.paper_text, number.here_text, self.verdict]
        return claim.title, ["-", "-", self.verdict]

    def to_json(self, claim: Claim) -> dict[str, Any]:
        """All fields, those of the finding among them, with the verdict and the command that
        measures it again."""
        quick = " --quick" if self.options["quick"] else ""
        return {
            "command": f"`paper --only {claim.id}{quick}`",
            "verdict": self.verdict,
            "why": self.why,
            **self.finding.to_json(),
            **{key: value for key, value in vars(self).items() if key != "finding"},
        }

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> "Record":
        """The Record of to_json()."""
        fields = {name: row[name] for name in cls.__dataclass_fields__ if name != "finding"}
        return cls(finding=Finding.from_json(row), **fields)


Results = Mapping[str, Record]  # by the id of the claim


def picture_of(claim: Claim) -> str:
    """The name of the file in which a claim is drawn."""
    return f"paper-{claim.id}.png"


def cells_of(number: Published) -> list[Cell]:
    """A row of the table of the paper's numbers and ours."""
    same_size = "not compared"
    if number.within is not None:
        same_size = f"{'yes' if number.is_same_size else 'no'}, within {number.within:g}x"
    return [
        ("of", number.device, ""),
        ("paper", number.paper_text, ""),
        ("here", number.here_text, ""),
        ("same size?", same_size, ""),
    ]


def rows_of(results: Results) -> list[tuple[Claim, Record]]:
    """The claims that were measured, and their records, in the order of CLAIMS."""
    return [(claim, results[claim.id]) for claim in CLAIMS if claim.id in results]


def measure_claim(claim: Claim, lab: Lab, options: dict[str, Any]) -> Record:
    """Measure a claim, draw it to `lab.picture`, and return its record.

    An error that a user can cause, such as too little memory, makes it "not measured"."""
    start = time.time()
    message = ""
    try:
        finding = claim.function(lab)
        if not finding.has_picture:
            draw(finding, claim.name, lab.picture, lab.machine)
    except (ValueError, RuntimeError, MemoryError) as error:
        message = console.explain(error)
        if not isinstance(message, str):  # an error of ours
            raise
        finding = Finding()
    return Record(
        finding=finding,
        busy=lab.busy,
        error=message.removeprefix("error: "),
        seconds=time.time() - start,
        options=options,
        provenance=provenance(),
    )


def read_results(directory: Path) -> dict[str, Record]:
    """The records in a directory; none if it has no paper.json. Records with other fields, of an
    older version, are left out: their claims are measured again."""
    file = directory / "paper.json"
    if not file.exists():
        return {}
    results = {}
    content = json.loads(file.read_text("utf-8"))
    for claim_id, row in content["claims"].items():
        try:
            results[claim_id] = Record.from_json(row)
        except (KeyError, TypeError):
            continue
    return results


def save_results(results: Results, machine: RealMachineInfo, directory: Path) -> None:
    """Write paper.json and paper.md and, if they lie in results/, the tables of its README."""
    rows = rows_of(results)
    records = {claim.id: record.to_json(claim) for claim, record in rows}
    content = {"claims": records, "machine": machine.to_json()}
    write_text(directory / "paper.json", json.dumps(content, indent=1))
    parts = [TITLE, machine.heading().removesuffix("\n"), summary(results)]
    for claim, record in rows:
        parts += [f'<a id="{claim.id.lower()}"></a>', record.markdown(claim)]
    write_text(directory / "paper.md", "\n\n".join(parts) + "\n")
    if directory.resolve().parent == RESULTS:
        write_index()


def summary(results: Results) -> str:
    """A table in Markdown with a line for each claim: its first number, and the verdict. The ids
    are links to the details, in the same page."""
    rows = []
    for claim, record in rows_of(results):
        text, cells = record.headline(claim)
        rows.append([f"[{claim.id}](#{claim.id.lower()}): {text}", *cells])
    return markdown(dict.fromkeys(("claim", "paper", "here", "verdict"), ""), rows)


def index_table(results: Results) -> str:
    """A table in Markdown with a short line for each claim: what it says, the paper's first number,
    ours and the verdict. Columns are not aligned, so that no line is long."""
    lines = ["| claim | paper | here | verdict |", "|---|---:|---:|---|"]
    for claim, record in rows_of(results):
        _, cells = record.headline(claim)
        lines.append(f"| {' | '.join([f'{claim.id}: {claim.clause}', *cells])} |")
    return "\n".join(lines)


def write_index() -> None:
    """Write the summaries of all machines into results/README.md, between BEGIN and END."""
    readme = RESULTS / "README.md"
    before, _, from_begin = readme.read_text("utf-8").partition(BEGIN)
    after = from_begin.partition(END)[2]
    parts = [before + BEGIN]
    for file in sorted(RESULTS.glob("*/paper.json")):
        directory = file.parent
        page = f"{directory.name}/paper.md"
        parts += [f"### [{directory.name}]({page})", index_table(read_results(directory))]
    write_text(readme, "\n\n".join([*parts, END + after]))
