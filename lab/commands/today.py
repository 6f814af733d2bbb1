"""What today's engines decide, and what their users ask: six pages of tables and pictures.

    python bench.py today                       print them all; half a minute
    python bench.py today --only long-prompt    one of them
    python bench.py today --write policies      make policies/README.md and its pictures again

All is simulated. Read first: policies/today.py. Read next: lab/claims/today.py, the pages."""

from argparse import ArgumentTypeError, Namespace
from dataclasses import dataclass
from multiprocessing import Pool
from pathlib import Path

from cli.options import OptionParser, from_args, nonempty_text, option, write_text, wrote
from lab.claims.today import PAGES, Page
from lab.pictures.bars import plot_bars
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


def page_names(text: str) -> list[str]:
    """The type of a text of pages, with commas."""
    names = text.split(",")
    for name in names:
        if name not in PAGES:
            raise ArgumentTypeError(f"{name}: must be from {', '.join(PAGES)}")
    return names


@dataclass(frozen=True, kw_only=True)
class TodayOptions:
    """The options of `bench.py today`."""

    command: str
    only: list[str] = option(
        f"from {', '.join(PAGES)}",
        type=page_names,
        default=list(PAGES),
        default_text="all",
    )
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
    with Pool() as pool:
        for page in pool.imap(make_page, options.only):
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
