"""What today's engines decide, and what their users ask: six pages of tables and pictures.

    python bench.py today                       print them all; half a minute
    python bench.py today --write policies      make policies/README.md and its pictures again

All is simulated. Read first: policies/today.py. Read next: lab/claims/today.py, the pages."""

from cyclopts.types import ExistingDirectory

from cli.files import write_text, wrote
from policies import POLICIES
from policies.cards import CARDS

INTRODUCTION = """\
# What engines decide today

Each policy is a short class: the papers' in [`scheduler.py`](../scheduler.py), those of today's
engines in [`today.py`](today.py), with the file that each was read in, and what users propose in
[`remedies.py`](remedies.py). `--policy vllm-v1` serves with one,
`bench.py check vllm-v1 --random-loads 2000` checks it, `bench.py explore vllm-v1` shows each of its
decisions. All below is simulated, and made by `bench.py today --write policies`.
"""


def papers_policies() -> str:
    """A table of the papers' policies and what follows them, in Markdown."""
    rows = [f"| `{name}` | {CARDS[name].note} |" for name in POLICIES]
    head = ["## The papers' policies", "", "| policy | one iteration |", "|---|---|"]
    return "\n".join([*head, *rows]) + "\n"


def main(*, write: ExistingDirectory | None = None) -> None:
    """What today's engines decide, and what their users ask: pages of tables and pictures.

    Each is printed, and its picture written, when it is made; README.md when all are.

    Parameters
    ----------
    write
        Write README.md and the pictures there.
    """
    from lab.claims.today import PAGES
    from lab.pictures.bars import plot_bars

    sections: list[str] = []
    for make_page in PAGES.values():
        page = make_page()
        print(page.to_markdown(), end="\n\n")
        sections.append(page.to_markdown() + "\n")
        if write and page.chart is not None:
            file = write / f"{page.name}.png"
            plot_bars(page.chart, page.question, file)
            wrote(file)
            sections.append(f"![{page.question}]({file.name})\n")
    if write:
        readme = write / "README.md"
        write_text(readme, "\n".join([INTRODUCTION, papers_policies(), *sections]))
        wrote(readme)
