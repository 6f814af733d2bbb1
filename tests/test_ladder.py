"""The ladder of inventions, held against what each rung is known to cure, on a simulated A100."""

import contextlib
import io

import pytest

from examples import ladder


@pytest.fixture(scope="module")
def table():
    """{rung: {head: cell}} as it is printed."""
    text = io.StringIO()
    load = "--max-len 4096 --requests 120 --qps 8 --kv-tokens 65536 --batch 64".split()
    with contextlib.redirect_stdout(text):
        ladder.main(["--simulate", "a100-80gb", "--preset", "llama3-8b", *load])
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.getvalue().splitlines()
        if line.startswith("|")
    ]
    heads = lines[0][1:]
    return {name: dict(zip(heads, cells, strict=True)) for name, *cells in lines[2:]}


def test_each_rung_cures_what_it_was_invented_for(table):
    def number(rung, head):
        return float(table[rung][head].replace(",", ""))

    one, level, orca, paged, vllm, chunks, maximal, stall_free, slo = table
    assert number(level, "tokens/s") > 2 * number(one, "tokens/s")
    assert number(level, "longest stall") == 0  # a batch runs to its end
    assert number(orca, "TTFT P50") < number(level, "TTFT P50") / 2
    assert number(orca, "longest stall") > 0
    assert number(paged, "TTFT P50") < number(orca, "TTFT P50")
    assert number(vllm, "longest stall") > number(paged, "longest stall")
    assert number(chunks, "TBT P99") < number(vllm, "TBT P99") / 2
    assert number(maximal, "tokens/s") > number(chunks, "tokens/s")
    assert number(stall_free, "TTFT P50") < number(maximal, "TTFT P50")
    assert number(stall_free, "goodput") > 10 * number(vllm, "goodput")
