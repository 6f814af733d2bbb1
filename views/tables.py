"""Where numbers become text: the cells of a table, and tables in Markdown.

What the tables of the bench show, and the words around them, are in tables.toml. Read next:
options.py, what the command lines share."""

import tomllib
from pathlib import Path

TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def show(value, spec=""):
    """The text of a cell: None is "-", a string itself, and a number has the format `spec`; an "x"
    at its end is printed, as in "1.33x"."""
    if value is None or isinstance(value, str):
        return "-" if value is None else value
    return format(value, spec.removesuffix("x")) + "x" * spec.endswith("x")


def markdown(columns, rows):
    """A table in Markdown of rows that `show` takes, under `columns`, {head: format}."""
    lines = [[*columns], *([show(*cell) for cell in zip(row, columns.values())] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    rule = "|" + "|".join("-" * (w + 1) + ":" for w in widths).replace(":", "-", 1) + "|"
    for number, line in enumerate(lines):
        cells = [cell.rjust(width) for cell, width in zip(line, widths)]
        lines[number] = " | ".join(["| " + line[0].ljust(widths[0]), *cells[1:]]) + " |"
    return "\n".join([lines[0], rule, *lines[1:]])


def print_rows(table, rows, /, **words):
    """Print a table of tables.toml and the words around it, with an empty line after each. `rows`
    is {name: {key: value}}, where a value that is not there is None."""
    its = TABLES[table]
    columns = {head.format_map(words): spec for head, (_, spec) in its["columns"].items()}
    keys = [key for key, _ in its["columns"].values()]
    cells = [[name, *map(row.get, keys)] for name, row in rows.items()]
    if "title" in its:
        print(its["title"].format_map(words), end="\n\n")
    print(markdown({its["rows"]: ""} | columns, cells), end="\n\n")
    if "note" in its:
        print(its["note"].format_map(words), end="\n\n")
