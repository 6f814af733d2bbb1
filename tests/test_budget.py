"""`bench.py batches --slo`: what it prints and writes. No clock is believed."""

import json
from unittest.mock import Mock

import pytest

import bench
from lab.commands import batches_run as batches
from lab.measure import timing, token_budget
from tests.helpers import machine_info
from tests.test_simulate import printed_tables

MACHINE = machine_info()
TINY = ["--preset", "llama-tiny", "--device", "cpu", "--dtype", "float32"]


@pytest.fixture
def spread(monkeypatch):
    """A token takes 1 ms in every batch, and times spread as the last number of the list says."""
    spreads = [0.0]

    def time_by_law(runner, cases):
        return [
            token_budget.Profiled(*case, seconds=1e-3 * case[0], spread=spreads[-1])
            for case in cases
        ]

    monkeypatch.setattr(batches, "time_steadily", time_by_law)
    monkeypatch.setattr(batches, "measure_machine", lambda *_: MACHINE)
    return spreads


@pytest.mark.parametrize("decodes, max_len", [(3, 64), (1, 16), (40, 16)])
def test_it_prints_why_and_writes_everything(decodes, max_len, spread, tmp_path, capsys):
    words = [f"--decodes={decodes}", f"--max-len={max_len}", f"--json={tmp_path}/b.json"]
    bench.main(["batches", "--slo=100", *TINY, *words])
    text = capsys.readouterr().out
    report = json.loads((tmp_path / "b.json").read_text("utf-8"))
    tile = min(32, max_len)
    largest = max(max_len, (decodes // tile + 1) * tile)  # an SLO that all meet
    assert report["budget"] == largest // tile * tile
    assert report["machine"] == MACHINE.to_json() and report["conclusion"] in text
    assert f"Token budget {report['budget']}: the largest of whole tiles of {tile}" in text
    contexts = [max(1, max_len // 8), max_len // 2]
    assert {row["context"] for row in report["profile"]} == set(contexts)
    _, *rows = printed_tables(text)[0]
    budgets = sorted({row["budget"] for row in report["profile"]})
    expected = [[str(b), f"{b - decodes} + {decodes}", "yes"] for b in budgets]
    assert [[*row[:2], row[-1]] for row in rows] == expected
    assert text.endswith(f"wrote {tmp_path}/b.json\n")


def test_no_budget_is_told_of_a_busy_machine_or_where_none_meets_the_slo(spread, capsys):
    with pytest.raises(ValueError, match="tbt_slo=1e-09: no token budget meets it"):
        bench.main(["batches", "--slo=1e-9", *TINY])
    capsys.readouterr()
    spread.append(0.3)
    bench.main(["batches", "--slo=100", *TINY, "--decodes=3", "--max-len=32"])
    text = capsys.readouterr().out
    assert f"\nToken budget: {timing.TOO_BUSY}.\n" in text
    assert text.count(" (busy) ") == 2  # of 3 decodes alone, and of 32 tokens


@pytest.mark.parametrize("timed", [0, 2])
def test_an_interrupt_keeps_what_was_timed(timed, tmp_path, capsys, monkeypatch):
    """And a file of an earlier run if nothing was."""
    results = [
        [token_budget.Profiled(budget, context, 3, seconds=0.01) for context in (16, 64)]
        for budget in (3, 32)
    ][:timed]
    interrupted = Mock(side_effect=[*results, KeyboardInterrupt])
    monkeypatch.setattr(batches, "time_steadily", interrupted)
    monkeypatch.setattr(batches, "measure_machine", lambda *_: MACHINE)
    file = tmp_path / "b.json"
    file.write_text('{"profile": "of yesterday"}', "utf-8")
    with pytest.raises(KeyboardInterrupt):
        bench.main(["batches", "--slo=1", *TINY, "--decodes=3", f"--json={file}"])
    text = capsys.readouterr().out
    profile = json.loads(file.read_text("utf-8"))["profile"]
    if not timed:
        assert profile == "of yesterday" and "wrote" not in text
        return
    assert profile == [row._asdict() for rows in results for row in rows]
    assert text.count("\n| ") == 1 + timed and text.endswith(f"wrote {file}\n")
