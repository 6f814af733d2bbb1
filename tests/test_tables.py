"""Numbers become text in one place."""

import pytest

from cli.tables import format_table, markdown, show

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


def test_a_cell_has_the_head_of_its_column():
    rows = {
        "vllm": [("tokens/s", 1234.5, ",.0f"), ("gain", None, ".2fx")],
        "sarathi-serve": [("tokens/s", 2e4, ",.0f"), ("gain", 1.5, ".2fx")],
    }
    assert format_table("policy", rows).split("\n") == [
        "| policy        | tokens/s |  gain |",
        "|---------------|---------:|------:|",
        "| vllm          |    1,234 |     - |",
        "| sarathi-serve |   20,000 | 1.50x |",
    ]
    assert format_table("policy", {}) == ""
