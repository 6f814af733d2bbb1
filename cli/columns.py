"""Texts that grow side by side in a terminal; elsewhere they come at the end, one after another.

    with Columns(["a title", "another"]) as columns:
        columns.draw(["a text", "that grows"])

Read first: console.py."""

from collections.abc import Sequence
from typing import Any, Self

from rich.live import Live
from rich.table import Table
from rich.text import Text

from cli.console import visible


class Columns:
    """Columns of text below their titles."""

    def __init__(self, titles: Sequence[str]) -> None:
        self.titles = titles
        self.texts: Sequence[str] = [""] * len(titles)
        self.live = Live(auto_refresh=False)

    def draw(self, texts: Sequence[str]) -> None:
        """Draw these texts over those before."""
        self.texts = [visible(text).strip() for text in texts]
        if self.live.is_started:
            table = Table(box=None)
            for title in self.titles:
                table.add_column(Text(title), overflow="fold")
            table.add_row(*map(Text, self.texts))
            self.live.update(table, refresh=True)

    def __enter__(self) -> Self:
        if self.live.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.live.is_started:
            self.live.stop()
        else:
            for title, text in zip(self.titles, self.texts, strict=True):
                print(f"--- {title}\n{text}")
