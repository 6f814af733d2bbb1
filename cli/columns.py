"""Texts that grow side by side in a terminal, redrawn as they do. Read first: console.py."""

import shutil
import sys
import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from unicodedata import east_asian_width

from cli.console import Terminal

GAP = 3  # spaces between columns
MIN_WIDTH = 12  # of a column


class Columns:
    """Columns of text below their titles, drawn over what was drawn before.

    Where stdout is no terminal, `draw` does nothing."""

    def __init__(self, titles: Sequence[str]) -> None:
        self.titles = titles
        self._drawn = 0  # lines

    @property
    def are_shown(self) -> bool:
        """Whether stdout is a terminal."""
        return isinstance(sys.stdout, Terminal)

    def draw(self, texts: Sequence[str]) -> None:
        """Draw these texts: of each the last lines, as many as the terminal has."""
        terminal = sys.stdout
        if not isinstance(terminal, Terminal):
            return
        size = shutil.get_terminal_size()
        lines = self.lines(texts, size.columns, size.lines - 1)
        terminal.rewind(self._drawn)
        print(*lines, sep="\n", flush=True)
        self._drawn = len(lines)

    def finish(self, texts: Sequence[str]) -> None:
        """Leave these texts as the last; elsewhere than on a terminal, one after the other."""
        self.draw(texts)
        if not self.are_shown:
            for title, text in zip(self.titles, texts, strict=True):
                print(f"--- {title}", *text.strip().splitlines(), sep="\n  ")

    def lines(self, texts: Sequence[str], columns: int, height: int) -> list[str]:
        """The lines to draw in so many columns of characters, at most `height`."""
        width = max(MIN_WIDTH, (columns + GAP) // len(texts) - GAP)
        wrapped = [_wrap(text, width)[1 - height :] for text in texts]
        titles = [_wrap(title, width)[0] for title in self.titles]
        rows = [titles, *zip_longest(*wrapped, fillvalue="")]
        return [(" " * GAP).join(_pad(cell, width) for cell in row).rstrip() for row in rows]


def _cells(text: str) -> int:
    """How many columns of a terminal a text takes: Chinese and emoji take two each."""
    return sum(2 if east_asian_width(character) in "WF" else 1 for character in text)


def _pad(text: str, width: int) -> str:
    """The text with spaces up to this width."""
    return text + " " * (width - _cells(text))


def _wrap(text: str, width: int) -> list[str]:
    """The lines of a text, at least one, each in this width. Control characters are left out."""
    lines: list[str] = []
    for paragraph in text.strip().expandtabs().splitlines():
        line = "".join(character for character in paragraph if character.isprintable())
        limit = width if _cells(line) == len(line) else width // 2
        lines += textwrap.wrap(line, limit) or [""]
    return lines or [""]
