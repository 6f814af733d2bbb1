"""Tables in Markdown, and the text of their cells.

A command says beside its print what its table shows:

    COLUMNS = [Column("tokens/s", lambda run: run.tokens_per_s, ",.0f"), ...]
    print(format_table("policy", COLUMNS, {"vllm": run}))

Read next: timelines.py, which draws."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Row = TypeVar("Row")


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A column of a table: its head, what it shows of a row, and the format of that, see `show`."""

    head: str
    value: Callable[[Row], object]
    format: str = ""


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


def format_table(row_head: str, columns: Sequence[Column[Row]], rows: Mapping[str, Row]) -> str:
    """A table in Markdown with a line for each of `rows`, {its name: row}. The names stand in the
    first column, under `row_head`."""
    lines = [[row_head, *(column.head for column in columns)]]
    for name, row in rows.items():
        lines.append([name, *(show(column.value(row), column.format) for column in columns)])
    return align(lines)


def markdown(columns: Mapping[str, str], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown of rows of cells that `show` takes. `columns` is {head: format}."""
    lines = [list(columns)]
    for row in rows:
        cells = zip(row, columns.values(), strict=True)
        lines.append([show(value, spec) for value, spec in cells])
    return align(lines)


def align(lines: Sequence[Sequence[str]], numbers: bool = True) -> str:
    """Lines of cells, the first of which are the heads, as Markdown with columns of equal width.
    The first column is aligned to the left, the others too if they hold words, no `numbers`."""
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    rules = ["-" * (widths[0] + 2)]
    for width in widths[1:]:
        rules.append("-" * (width + 1) + ":" if numbers else "-" * (width + 2))
    texts = []
    for first, *others in lines:
        cells = [first.ljust(widths[0])]
        for cell, width in zip(others, widths[1:], strict=True):
            cells.append(cell.rjust(width) if numbers else cell.ljust(width))
        texts.append(f"| {' | '.join(cells)} |")
    return "\n".join([texts[0], f"|{'|'.join(rules)}|", *texts[1:]])
