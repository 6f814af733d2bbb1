"""`bench.py budget`: what it prints and writes. No clock is believed."""

import json

import pytest

import bench
from lab.measure import timing as measure
from policies import token_budget as slo

MACHINE = dict(device="-", threads=1, torch="-", model="-", parameters=1, dtype="-", compiled=0)
TINY = "--model llama-tiny --device cpu --dtype float32".split()


@pytest.mark.parametrize("decodes, max_len", [(3, 64), (1, 16), (40, 16)])
def test_it_prints_why_and_writes_everything(decodes, max_len, tmp_path, capsys, monkeypatch):
    missing, times = 0.1, slo.time_iterations
    law = lambda row: row._replace(seconds=1e-3 * row.budget, spread=0.0)
    steady = lambda *args, **more: [law(row) for row in times(*args, **more)]
    monkeypatch.setattr(slo, "time_iterations", steady)
    monkeypatch.setattr(measure.Probe, "take", lambda *_: missing)
    monkeypatch.setattr(measure, "describe_machine", lambda *_: MACHINE)
    options = [*TINY, "--decodes", str(decodes), "--max-len", str(max_len)]
    files = ["--json", str(tmp_path / "b.json")]
    bench.main(["budget", "--slo-tbt", "100", *options, *files])
    text, report = capsys.readouterr().out, json.loads((tmp_path / "b.json").read_text())
    tile = min(32, max_len)
    most = max(max_len, (decodes // tile + 1) * tile)  # an SLO that all meet
    assert report["budget"] == most // tile * tile and report["machine"] == MACHINE
    assert f"Token budget {report['budget']}: the largest of whole tiles of {tile}" in text
    assert report["conclusion"] in text
    assert {row["context"] for row in report["profile"]} == {max(1, max_len // 8), max_len // 2}
    rows = [line.replace(" ", "").split("|")[1:-1] for line in text.splitlines() if line[:1] == "|"]
    budgets = sorted({row["budget"] for row in report["profile"]})
    expected = [[str(b), f"{b - decodes}+{decodes}", "yes"] for b in budgets]
    assert [[*row[:2], row[-1]] for row in rows[2:]] == expected
    assert text.endswith(f"wrote {tmp_path}/b.json\n")
    with pytest.raises(ValueError, match="tbt_slo=1e-09: no token budget meets it"):
        bench.main(["budget", "--slo-tbt", "1e-9", *options])
    missing = 0.3
    bench.main(["budget", "--slo-tbt", "100", *options, *files])
    text, report = capsys.readouterr().out, json.loads((tmp_path / "b.json").read_text())
    assert report["budget"] is None
    assert f"\nToken budget: {measure.TOO_BUSY}.\n" in text
    assert text.count(" (busy) ") == len(budgets)
