"""Where numbers become text: the cells of a table, and tables in Markdown.

Read next: options.py, what the command lines share."""


def show(value, spec=""):
    """The text of a cell: None is "-", a string itself, and a number has the format `spec`; an "x"
    at its end is printed, as in "1.33x"."""
    if value is None or isinstance(value, str):
        return "-" if value is None else value
    return format(value, spec.removesuffix("x")) + "x" * spec.endswith("x")


def print_table(columns, rows):
    """Print `markdown(columns, rows)`."""
    print(markdown(columns, rows))


def markdown(columns, rows):
    """A table in Markdown of rows that `show` takes, under `columns`, {head: format}."""
    lines = [[*columns], *([show(*cell) for cell in zip(row, columns.values())] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    rule = "|" + "|".join("-" * (w + 1) + ":" for w in widths).replace(":", "-", 1) + "|"
    for number, line in enumerate(lines):
        cells = [cell.rjust(width) for cell, width in zip(line, widths)]
        lines[number] = " | ".join(["| " + line[0].ljust(widths[0]), *cells[1:]]) + " |"
    return "\n".join([lines[0], rule, *lines[1:]])
