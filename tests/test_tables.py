"""Numbers become text in one place."""

import pytest

from views.tables import Column, format_table, markdown, show

CELLS = [(None, ",.2f", "-"), ("as it is", ",.2f", "as it is"), (1234.567, ",.2f", "1,234.57")]
CELLS += [(1.333, ".2fx", "1.33x"), (0.5, ".0%", "50%"), (3, "", "3")]


@pytest.mark.parametrize("value, spec, text", CELLS)
def test_a_cell_has_the_format_of_its_column(value, spec, text):
    assert show(value, spec) == text


def test_a_table_is_markdown_with_numbers_to_the_right(capsys):
    columns = {"policy": "", "tokens/s": ",.0f", "gain": ".2fx"}
    print(markdown(columns, [["request-level", 1234.5, 1.0], ["vllm", 99, None]]))
    assert capsys.readouterr().out == (
        "| policy        | tokens/s |  gain |\n"
        "|---------------|---------:|------:|\n"
        "| request-level |    1,234 | 1.00x |\n"
        "| vllm          |       99 |     - |\n"
    )


def test_a_column_says_what_it_shows_of_a_row():
    columns = [
        Column("tokens/s", lambda row: row["rate"], ",.0f"),
        Column("gain", lambda row: row["gain"], ".2fx"),
    ]
    rows = {"vllm": {"rate": 1234.5, "gain": None}, "sarathi-serve": {"rate": 2e4, "gain": 1.5}}
    assert format_table("policy", columns, rows).split("\n") == [
        "| policy        | tokens/s |  gain |",
        "|---------------|---------:|------:|",
        "| vllm          |    1,234 |     - |",
        "| sarathi-serve |   20,000 | 1.50x |",
    ]
