"""What today's engines decide, and what their users ask: three pages of tables.

    python bench.py today                       print them all; half a minute
    python bench.py today --write policies      make policies/README.md again

All is simulated. Read first: policies/today.py. Read next: lab/claims/today.py, the pages."""

from cyclopts.types import ExistingDirectory

from cli.files import write_text, wrote

INTRODUCTION = """\
# What engines decide today

Each policy is a short class, and another one may be added: the papers' are in
[`scheduler.py`](../scheduler.py), those of today's engines in [`today.py`](today.py), with the file
that each was read in, and what users propose in [`remedies.py`](remedies.py).
`bench.py check --policies vllm-v1 --random-loads 2000` checks one,
`bench.py explore --policies vllm-v1` shows each of its decisions. All below is simulated, and made
by `bench.py today --write policies`.
"""


def main(*, write: ExistingDirectory | None = None) -> None:
    """What today's engines decide, and what their users ask: pages of tables.

    Parameters
    ----------
    write
        Write README.md there.
    """
    from lab.claims.today import PAGES

    sections: list[str] = []
    for make_page in PAGES.values():
        page = make_page()
        print(page.to_markdown(), end="\n\n")
        sections.append(page.to_markdown() + "\n")
    if write:
        readme = write / "README.md"
        write_text(readme, "\n".join([INTRODUCTION, *sections]))
        wrote(readme)
