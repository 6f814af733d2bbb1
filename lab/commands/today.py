"""What today's engines decide, and what their users ask: six pages of tables and pictures.

    python bench.py today                       print them all; half a minute
    python bench.py today --only long-prompt    one of them
    python bench.py today --write policies      make policies/README.md and its pictures again

All is simulated. Read first: policies/today.py. Read next: lab/claims/today.py, the pages."""

from argparse import Namespace
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from cli.options import OptionParser, from_args, nonempty_text, option, write_text, wrote
from lab.claims.today import PAGES, Page
from lab.commands.simulate import names_from, results_of
from lab.pictures.bars import plot_bars
from policies import POLICIES
from policies.cards import CARDS

INTRODUCTION = """\
# What engines decide today

The papers' policies are in [`scheduler.py`](../scheduler.py). [`today.py`](today.py) has the rules
of today's engines, each a short class, with the file that it was read in.
[`remedies.py`](remedies.py) has what their users propose. `--policy vllm-v1` serves with one of
them, `bench.py check vllm-v1 --random-loads 2000` checks it, and `bench.py explore vllm-v1` shows
each of its decisions. A new one is a class with a `@card` above it: commands, tables, pages and
pictures know it from then on. Everything below is printed by `bench.py today`, simulated, and
written here by `bench.py today --write policies`.
"""


@dataclass(frozen=True, kw_only=True)
class TodayOptions:
    """The options of `bench.py today`."""

    command: str
    only: list[str] = option(
        f"from {', '.join(PAGES)}",
        type=names_from(PAGES),
        default=list(PAGES),
        default_text="all",
    )
    processes: int = option("make so many pages at once", type=int, choices=range(1, 6), default=2)
    write: str | None = option(
        "write README.md and the pictures there", type=nonempty_text, metavar="FOLDER"
    )


def add_options(parser: OptionParser) -> None:
    """Add the options of the command."""
    parser.add_fields(TodayOptions)


def resolve(parser: OptionParser, args: Namespace) -> TodayOptions:
    """The options. Exits with a message if there is no such folder."""
    if args.write and not Path(args.write).is_dir():
        parser.error(f"--write {args.write}: is no folder")
    return from_args(TodayOptions, args)


def papers_policies() -> str:
    """A table of the papers' policies and what follows them, in Markdown."""
    rows = [f"| `{name}` | {CARDS[name].note} |" for name in POLICIES]
    head = ["## The papers' policies", "", "| policy | one iteration |", "|---|---|"]
    return "\n".join([*head, *rows]) + "\n"


def make_page(name: str) -> Page:
    """The page of that name."""
    return PAGES[name]()


def main(options: TodayOptions) -> None:
    """Make the pages and print them; write them, too, if asked.

    Each is printed, and its picture written, when it is made; README.md when all are."""
    sections: list[str] = []
    pages = results_of(options.processes, "pages", make_page, options.only)
    with closing(pages):
        for page in pages:
            print(page.to_markdown(), end="\n\n")
            sections.append(page.to_markdown() + "\n")
            if options.write and page.chart is not None:
                file = Path(options.write) / f"{page.name}.png"
                plot_bars(page.chart, page.question, file)
                wrote(file)
                sections.append(f"![{page.question}]({file.name})\n")
    if options.write:
        readme = Path(options.write) / "README.md"
        write_text(readme, "\n".join([INTRODUCTION, papers_policies(), *sections]))
        wrote(readme)
