"""Measures a claim and keeps its record: in paper.json, paper.md, and tables in results/.

paper.json has a record of each claim. paper.md is made of the records, and so are the tables at the
end of results/README.md. Read first: claim.py and claims.py. Read next: lab/commands/paper.py."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from cli import console
from cli.options import write_text
from cli.tables import Cell, format_table
from lab.claims.claim import Claim, Finding, Published
from lab.claims.claims import CLAIMS
from lab.claims.labs import Lab
from lab.claims.picture import draw
from lab.claims.provenance import provenance
from lab.claims.table import Table, X
from lab.measure.machine_info import RealMachineInfo

RESULTS = Path(__file__).parents[2] / "results"
BEGIN = "<!-- made by bench.py paper -->"  # of the tables in results/README.md
END = "<!-- until here -->"
TITLE = "# What SARATHI (S), Sarathi-Serve (SS) and two posts (B, C) claim, and what shows here"
NOT_MEASURED = "not measured"
TRIED_AGAIN = ("too busy to tell", NOT_MEASURED)  # by the next run


@dataclass(frozen=True, kw_only=True)
class Record:
    """The result of a claim that was measured."""

    claim: str  # its name
    command: str  # that measures it again
    numbers: list[dict[str, str]]  # the paper's and ours as texts; the first stands in summaries
    verdict: str
    why: str  # the reason for another verdict than "as in the paper"
    options: dict[str, Any]  # what it was measured with and on
    text: str  # in Markdown
    tables: list[dict[str, Any]]  # see Table.to_json
    provenance: dict[str, str] = field(default_factory=dict)  # {}: of an older version

    def headline(self, title: str) -> dict[str, str]:
        """The number that stands in summaries; if there is none, the title without numbers."""
        return self.numbers[0] if self.numbers else {"text": title, "paper": "-", "here": "-"}


Results = Mapping[str, Record]  # by the id of the claim


def rows_of(results: Results) -> list[tuple[Claim, Record]]:
    """The claims that were measured, and their records, in the order of CLAIMS."""
    return [(claim, results[claim.id]) for claim in CLAIMS if claim.id in results]


def number_texts(number: Published) -> dict[str, str]:
    """A number of the paper and ours, as texts with their units, and whether they are alike."""
    same_size = "not compared"
    if number.within is not None:
        same_size = f"{'yes' if number.is_same_size else 'no'}, within {number.within:g}x"
    return {
        "text": number.text,
        "device": number.device,
        "paper": number.paper_text,
        "here": number.here_text,
        "same_size": same_size,
    }


def measure_claim(claim: Claim, lab: Lab, options: dict[str, Any]) -> Record:
    """Measure a claim, draw it to `lab.picture`, and return its record.

    An error that a user can cause, such as too little memory, makes it "not measured"."""
    start = time.time()
    picture = f"![{claim.name}]({Path(lab.picture).name})"
    try:
        finding = claim.function(lab)
        if not finding.has_picture:
            draw(finding, claim.name, lab.picture, lab.machine)
        verdict: str = finding.verdict(lab.busy)
        why = finding.why(lab.busy)
    except (ValueError, RuntimeError, MemoryError) as error:
        message = console.explain(error)
        if not isinstance(message, str):  # an error of ours
            raise
        finding = Finding()
        verdict = NOT_MEASURED
        why = message.removeprefix("error: ")
        picture = ""
    quick = " --quick" if options["quick"] else ""
    used = ", ".join(f"{name} {value}" for name, value in options.items())
    parts = [
        f"## {claim.name}",
        claim.text,
        f"**{verdict}**" + (f": {why}" if why else ""),
        *markdown_of(finding),
        picture,
        f"Took {time.time() - start:.0f} s, {time.strftime('%Y-%m-%d %H:%M')}; {used}.",
    ]
    return Record(
        claim=claim.name,
        command=f"`paper --only {claim.id}{quick}`",
        numbers=[number_texts(number) for number in finding.published],
        verdict=verdict,
        why=why,
        options=options,
        text="\n\n".join(part for part in parts if part),
        tables=[table.to_json() for table in finding.tables],
        provenance=provenance(),
    )


def markdown_of(finding: Finding) -> list[str]:
    """The paper's numbers beside ours, the reasons of the checks, and the tables."""
    rows: dict[str, list[Cell]] = {}
    for number in map(number_texts, finding.published):
        rows[number["text"]] = [
            ("of", number["device"], ""),
            ("paper", number["paper"], ""),
            ("here", number["here"], ""),
            ("same size?", number["same_size"], ""),
        ]
    reasons = dict.fromkeys(f"- {check.reason}" for check in finding.checks)
    tables = [table.markdown(numbers_in(table, finding.published)) for table in finding.tables]
    return [format_table("number", rows), "\n".join(reasons), *tables]


def numbers_in(table: Table, published: Sequence[Published]) -> dict[tuple[str, X], str]:
    """The texts of the paper's numbers whose place is in a table, {(line, x): text}."""
    texts: dict[tuple[str, X], str] = {}
    for number in published:
        place = (number.line.name, number.at)
        if number.is_in(table) and number.paper_text not in texts.get(place, ""):
            texts[place] = ", ".join(filter(None, [texts.get(place), number.paper_text]))
    return texts


def read_results(directory: Path) -> dict[str, Record]:
    """The records in a directory; none if it has no paper.json. Records with other fields, of an
    older version, are left out: their claims are measured again."""
    file = directory / "paper.json"
    if not file.exists():
        return {}
    names = {field.name for field in fields(Record)}
    claims = json.loads(file.read_text("utf-8"))["claims"]
    return {
        key: Record(**row) for key, row in claims.items() if row.keys() | {"provenance"} == names
    }


def save_results(results: Results, machine: RealMachineInfo, directory: Path) -> None:
    """Write paper.json and paper.md and, if they lie in results/, the tables of its README."""
    rows = rows_of(results)
    records = {claim.id: asdict(record) for claim, record in rows}
    content = {"claims": records, "machine": machine.to_json()}
    write_text(directory / "paper.json", json.dumps(content, indent=1))
    parts = [TITLE, machine.heading().removesuffix("\n"), summary(results)]
    for claim, record in rows:
        parts += [f'<a id="{claim.id.lower()}"></a>', record.text]
    write_text(directory / "paper.md", "\n\n".join(parts) + "\n")
    if directory.resolve().parent == RESULTS:
        write_index()


def summary(results: Results) -> str:
    """A table in Markdown with a line for each claim: its first number, and the verdict. The ids
    are links to the details, in the same page."""
    rows: dict[str, list[Cell]] = {}
    for claim, record in rows_of(results):
        headline = record.headline(claim.title)
        rows[f"[{claim.id}](#{claim.id.lower()}): {headline['text']}"] = [
            ("paper", headline["paper"], ""),
            ("here", headline["here"], ""),
            ("verdict", record.verdict, ""),
        ]
    return format_table("claim", rows)


def index_table(results: Results) -> str:
    """A table in Markdown with a short line for each claim: what it says, the paper's first number,
    ours and the verdict. Columns are not aligned, so that no line is long."""
    lines = ["| claim | paper | here | verdict |", "|---|---:|---:|---|"]
    for claim, record in rows_of(results):
        headline = record.headline(claim.title)
        cells = [f"{claim.id}: {claim.clause}", headline["paper"], headline["here"], record.verdict]
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
