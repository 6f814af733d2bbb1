"""Tables in Markdown, and the text of their cells.

A row is a list of cells, each with the head of its column and the format of its value:

    print(format_table("policy", {"vllm": [("tokens/s", run.tokens_per_s, ",.0f")]}))
"""

from collections.abc import Iterable, Mapping, Sequence

Cell = tuple[str, object, str]  # the head of its column, its value, and the format as of `show`


def show(value: object, spec: str = "") -> str:
    """The text of a cell. None is "-" and a string is itself. A number has the format `spec`; an
    "x" at its end is printed, as in "1.33x"."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if spec.endswith("x"):
        return format(value, spec.removesuffix("x")) + "x"
    return format(value, spec)


def format_table(row_head: str, rows: Mapping[str, Sequence[Cell]]) -> str:
    """A table in Markdown with a line for each of `rows`, {its name: its cells}, all of which have
    the same heads; "" without rows. The names stand in the first column, under `row_head`."""
    lines: list[list[str]] = []
    for name, row in rows.items():
        if not lines:
            lines.append([row_head, *(head for head, _, _ in row)])
        lines.append([name, *(show(value, spec) for _, value, spec in row)])
    return align(lines)


def markdown(columns: Mapping[str, str], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown of rows of cells that `show` takes. `columns` is {head: format}."""
    lines = [list(columns)]
    for row in rows:
        lines.append([show(*cell) for cell in zip(row, columns.values(), strict=True)])
    return align(lines)


def align(lines: Sequence[Sequence[str]], numbers: bool = True) -> str:
    """Lines of cells, the first of which are the heads, as Markdown with columns of equal width.
    The first column is aligned to the left, the others too if they hold words, no `numbers`."""
    columns: list[list[str]] = []
    for place, cells in enumerate(zip(*lines, strict=True)):
        width = max(map(len, cells))
        side = ">" if numbers and place > 0 else "<"
        rule = "-" * (width + 1) + (":" if side == ">" else "-")
        head, *texts = [f" {cell:{side}{width}} " for cell in cells]
        columns.append([head, rule, *texts])
    return "\n".join(f"|{'|'.join(row)}|" for row in zip(*columns, strict=True))
