"""Where numbers become text: the cells of a table, and tables in Markdown.

Read next: options.py, what the command lines share.
"""

from dataclasses import dataclass
from itertools import chain


def show(value, spec=""):
    """The text of a cell: None is "-", a string itself, and a number has the format `spec`; an "x"
    at its end is printed, as in "1.33x". `value` may be (value, spec of its own)."""
    if isinstance(value, tuple):
        value, spec = value
    if value is None or isinstance(value, str):
        return "-" if value is None else value
    return format(value, spec.removesuffix("x")) + "x" * spec.endswith("x")


def print_table(columns, rows, names=()):
    """Print a Markdown table of rows that `show` takes. `columns` maps each head to the format of
    what is below it; where heads repeat it is a list of (head, format). With `names`, what the
    first column will hold, each row is printed when it comes, in columns as wide as their heads."""
    heads, specs = zip(*(columns.items() if isinstance(columns, dict) else columns))
    lines = chain([heads], ([show(*cell) for cell in zip(row, specs)] for row in rows))
    if names:
        widths = [max(map(len, [heads[0], *names])), *(max(6, len(head)) for head in heads[1:])]
    else:
        lines = list(lines)
        widths = [max(map(len, column)) for column in zip(*lines)]
    rule = "|" + "|".join("-" * (w + 1) + ":" for w in widths).replace(":", "-", 1) + "|"
    for number, line in enumerate(lines):
        cells = [cell.rjust(width) for cell, width in zip(line, widths)]
        cells[0] = line[0].ljust(widths[0])
        print("| " + " | ".join(cells) + " |" + ("" if number else "\n" + rule))


@dataclass
class Table:
    """A table with the claim that it is about, as a paper numbers it."""

    claim: str
    title: str
    columns: dict  # as of print_table
    rows: list
    note: str = ""  # what it assumes
    data: tuple = ()  # the arguments of what draws it
    finding: str = ""  # what is concluded where no number has an error beside it

    def json(self):
        """The claim, the title, the rows as {head: value} with numbers as numbers, and the note."""
        bare = lambda cell: cell[0] if isinstance(cell, tuple) else cell
        plain = lambda cell: f"{cell:.4g}" if getattr(cell, "bound", "") else cell
        rows = [dict(zip(self.columns, map(plain, map(bare, row)))) for row in self.rows]
        return {"claim": self.claim, "title": self.title, "rows": rows, "note": self.note}
