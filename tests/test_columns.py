"""cli/columns.py: texts stand side by side, and each drawing covers the one before."""

import io
import os
from unicodedata import east_asian_width

from hypothesis import example, given, settings
from hypothesis import strategies as st

from cli import columns
from cli.columns import GAP, MIN_WIDTH, Columns
from cli.console import Terminal


def test_each_text_stands_below_its_title():
    two = Columns(["one", "a title of many words"])
    lines = two.lines(["a b", "some words\n\nand more"], columns=27, height=9)
    assert lines == [
        "one            a title of",
        "a b            some words",
        "",
        "               and more",
    ]
    cut = two.lines(["a b", "some words\n\nand more"], columns=27, height=3)
    assert cut == [lines[0], "a b", lines[3]]


@settings(deadline=None)
@example(["从前有座山" * 9, "👍" * 9], 30)
@given(st.lists(st.text(max_size=200), min_size=1, max_size=4), st.integers(1, 200))
def test_no_text_is_wider_than_the_terminal_or_higher(texts, width):
    lines = Columns([text[:9] for text in texts]).lines(texts, width, height=5)
    least = len(texts) * (MIN_WIDTH + GAP)
    assert len(lines) <= 5
    for line in lines:
        cells = sum(2 if east_asian_width(c) in "WF" else 1 for c in line)
        assert cells <= max(width, least) and line.isprintable()


def test_a_terminal_shows_the_last_drawing_in_the_place_of_the_one_before(monkeypatch):
    written = io.BytesIO()
    terminal = Terminal(written, "utf-8", write_through=True)
    size = os.terminal_size((30, 10))
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr(columns.shutil, "get_terminal_size", lambda: size)
    drawn = Columns(["one", "two"])
    drawn.draw(["a", "b"])
    drawn.draw(["a\nc", "b\x1b[2J"])
    drawn.finish(["a\nc", "b!"])
    first, second, third = written.getvalue().decode().replace("\x1b[", "^").split("^J")
    assert first == "one             two\na               b\n^2A"
    assert second == "one             two\na               b[2J\nc\n^3A"
    assert third == "one             two\na               b!\nc\n"


def test_elsewhere_only_the_end_is_printed(capsys):
    drawn = Columns(["one", "two"])
    drawn.draw(["a", "b"])
    drawn.finish(["a\nc", "b"])
    assert capsys.readouterr().out == "--- one\n  a\n  c\n--- two\n  b\n"
