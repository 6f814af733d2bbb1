"""Where numbers become text: the cells of a table, and tables in Markdown.

Read next: options.py, what the command lines share.
"""

from dataclasses import dataclass, field


def show(value, spec=""):
    """The text of a cell: None is "-", a string itself, and a number has the format `spec`.

    An "x" at the end of `spec` is printed, as in "1.33x". `value` may be (value, spec of its own).
    """
    if isinstance(value, tuple):
        value, spec = value
    if value is None or isinstance(value, str):
        return "-" if value is None else value
    number = spec.removesuffix("x")
    return format(value, number) + spec[len(number) :]


def print_table(columns, rows):
    """Print a Markdown table whose numbers are aligned to the right.

    `columns` maps each head to the format of what is below it; where heads repeat it is a list of
    (head, format). `rows` are lists of what `show` takes.
    """
    heads, specs = zip(*(columns.items() if isinstance(columns, dict) else columns))
    lines = [heads, *([show(*cell) for cell in zip(row, specs)] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    rule = "|" + "|".join("-" * (w + 1) + ":" for w in widths).replace(":", "-", 1) + "|"
    for number, line in enumerate(lines):
        cells = [cell.rjust(width) for cell, width in zip(line, widths)]
        cells[0] = line[0].ljust(widths[0])
        print("| " + " | ".join(cells) + " |" + ("" if number else "\n" + rule))


@dataclass
class Table:
    """A table with the claim that it is about, as a paper numbers it, and what it assumes.

    `columns` and `rows` are those of `print_table`; `data` is what a picture is drawn from.
    """

    claim: str
    title: str
    columns: dict
    rows: list
    note: str = ""
    data: dict = field(default_factory=dict)

    def json(self):
        """The claim, the title, the rows as {head: value} with numbers as numbers, and the note."""
        values = [[cell[0] if isinstance(cell, tuple) else cell for cell in r] for r in self.rows]
        rows = [dict(zip(self.columns, row)) for row in values]
        return {"claim": self.claim, "title": self.title, "rows": rows, "note": self.note}
