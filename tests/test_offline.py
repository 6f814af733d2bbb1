"""Table 2, the policies end to end and the advice are what was seen. No timing is asserted here."""

import json
from dataclasses import replace
from itertools import count, pairwise
from types import SimpleNamespace

import pytest

import bench
from engine import Completion, Iteration
from lab.commands import offline
from lab.measure import timing as measure
from lab.measure import workload
from lab.measure.load_run import LoadRun, Run
from tests.helpers import tiny_model

CALM = {"busy": False}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Nobody else uses the machine."""
    monkeypatch.setattr(measure.Probe, "take", lambda self, *_: 0.0)


def options(**changes):
    """What the functions read of the command line."""
    defaults = dict(batch=3, chunk=12, seq_len=20, attention="auto", compile=False, seed=4)
    defaults["lockstep"] = False
    return SimpleNamespace(**defaults | changes)


def test_a_cost_below_the_noise_is_not_a_speedup(monkeypatch):
    """Only the hybrid batch's total is worth a number here: its products are lost in the noise.

    And what is promised: the products of 10 tokens of whole prompts and 2 / 3 of a decode-only
    batch, over those of 12 rows that all cost what one of a whole prompt does.
    """
    ms = {"prefill-only": (100, 80), "decode-maximal": (110, 81), "decode-only": (30, 20)}
    ms = {(name, part): x for name, row in ms.items() for part, x in zip(("total", "ffn_ln1"), row)}
    ms |= {("prompt", "total"): 200, ("prompt", "ffn_ln1"): 140}

    def interleaved(variants, device, repeats, title=None):
        return {key: measure.Timing(ms.get(key, 0), spread) for key in variants}

    spread = 0.1
    monkeypatch.setattr(measure, "interleaved", interleaved)
    machine = {"flops_per_s": 1e12, "bytes_per_s": 1e10}
    rows, speedup, promise = offline.decode_maximal(tiny_model(), machine, options())
    assert promise == pytest.approx((10 * 140 / 20 + 20 * 2 / 3) / (12 * 140 / 20))
    prompt, prefill, decode, hybrid = rows.values()
    assert prompt["prefill_token_ms"] == 200 / 20 and prompt["decode_token_ms"] is None
    assert speedup["total"] == pytest.approx((30 / 3) / (10 / 2)) and speedup["products"] is None
    assert hybrid["decode_token_ms"] == 5 and decode["decode_token_ms"] == 10
    assert prefill["prefill_token_ms"] == hybrid["prefill_token_ms"] == 100 / 10
    assert prefill["decode_token_ms"] is decode["prefill_token_ms"] is None
    counts = [(row["prefill_tokens"], row["decodes"]) for row in rows.values()]
    assert counts == [(20, 0), (10, 0), (0, 3), (10, 2)]
    for row in rows.values():
        parts = row["products_ms"] + row["attention_ms"] + row["other_ms"]
        assert parts == pytest.approx(row["total_ms"]) or row["other_ms"] == 0
        assert not row["busy"]
    spread = 0.21
    rows, *_ = offline.decode_maximal(tiny_model(), machine, options())
    assert all(row["busy"] for row in rows.values())


def test_no_negative_cost_is_printed(capsys):
    row = dict.fromkeys("prefill_tokens decodes products_ms".split(), 7) | {"total_ms": -6.33}
    offline.print_decode_maximal({"a": row | {"busy": False}}, {"a": 1, "b": 2}, options())
    assert "6.33" not in (text := capsys.readouterr().out) and "| 7 + 7" in text.replace("  ", "")


def end_to_end(args):
    """What offline.end_to_end fills in: rows, timelines."""
    offline.end_to_end(tiny_model(), args, {}, rows := {}, timelines := {})
    return rows, timelines


def test_rows_of_the_policies_are_what_was_seen(monkeypatch):
    completions = [
        Completion(0, [1] * 6, 0.0, tokens=[1], token_times=[1.5]),
        Completion(1, [2] * 6, 0.5, tokens=[1, 2, 3], token_times=[1.5, 1.7, 2.7]),
    ]
    iterations = [
        Iteration(0.0, 1.5, [(0, 0, 6, False), (1, 0, 6, False)]),
        Iteration(1.5, 1.7, [(1, 6, 1, True)]),
        Iteration(1.7, 2.7, [(1, 7, 1, True), (2, 0, 4, False)]),
    ]
    # request 3 is let in at 3.0 and request 6 at 8.0: 5 + 5 + 6 tokens in between
    let_in = [(3.0, [(3, 0, 5)]), (5.0, [(4, 0, 5)]), (6.5, [(5, 0, 6)]), (8.0, [(6, 0, 9)])]
    full = [Iteration(at, at + 1, [(*chunk, False) for chunk in its]) for at, its in let_in]
    runs = [Run(completions, its, 4.0, 0.0) for its in (iterations, iterations + full)]
    runs[1] = replace(runs[1], seconds=2.0)
    served, drift = [], 0.1

    def serve(model, configs, arrivals, tokens, progress, recorders):
        served.extend((c.policy, c.chunk, c.max_batch, c.max_len) for c in configs.values())
        assert [len(prompt) for prompt in tokens] == [a.prompt_len for a in arrivals] == [15] * 7
        return {name: replace(runs.pop(0), drift=drift) for name in configs}

    monkeypatch.setattr(offline, "serve_in_turns", serve)
    args = options(policies=["vllm", "request-level"], requests=7, pd_ratio=3.0)
    rows, timelines = end_to_end(args)
    assert list(rows) == list(timelines) == ["request-level", "vllm"]
    assert served == [(name, 12, 3, 20) for name in timelines]
    expected = dict(iterations=3, tokens_per_iteration=6, longest_stall_s=1.0)
    expected |= dict(p50_ttft_s=(1.5 + 1.0) / 2, p99_tbt_s=0.2 + 0.99 * 0.8)
    expected |= dict(whole_run_tokens_per_s=(6 + 1 + 6 + 3) / 4, whole_run_gain=1)
    row = rows["request-level"]
    assert {key: row[key] for key in expected} == pytest.approx(expected)
    assert row["tokens_per_s"] is row["gain"] is None and not row["busy"]  # too few requests
    assert rows["vllm"]["tokens_per_s"] == pytest.approx(16 / 5)
    assert rows["vllm"]["whole_run_gain"] == 2 and rows["vllm"]["gain"] is None  # over nothing
    assert timelines["request-level"][:2] == (completions, iterations)
    runs, drift = (
        [
            Run(completions, full_run, s, 0.0)
            for full_run, s in (
                (iterations + full, 4.0),
                (iterations + [i._replace(start=i.start / 2) for i in full], 2.0),
            )
        ],
        0.3,
    )
    rows, _ = end_to_end(args)
    assert rows["request-level"]["gain"] == 1 and rows["vllm"]["gain"] == pytest.approx(2)
    assert rows["vllm"]["busy"]
    runs, args.policies = [Run(completions, iterations + full, 4.0, 0.0)], ["orca"]
    rows, _ = end_to_end(args)
    assert rows["orca"]["gain"] is rows["orca"]["whole_run_gain"] is None  # over nobody


def test_the_engine_that_has_used_the_least_time_is_next_and_its_clock_goes_on(monkeypatch):
    used, order, looks = {}, [], count()  # of each that is not done; a look at the clock takes 1 s

    class Spy(LoadRun):
        def step(self):
            assert used[self] < self.server.clock() <= min(used.values()) + 2  # and two looks
            order.append(self)
            if alive := super().step():
                used[self] = self.server.clock()
            else:
                del used[self]
            return alive

    def spy(*args, **more):
        load = Spy(*args, **more)
        used[load] = 0.0
        return load

    monkeypatch.setattr(offline, "LoadRun", spy)
    monkeypatch.setattr(offline.time, "perf_counter", lambda: float(next(looks)))
    args = options(policies=["vllm", "request-level", "sarathi"], requests=7, pd_ratio=3.0)
    rows, _ = end_to_end(args)
    assert list(rows) == ["request-level", "vllm", "sarathi"]
    turns = [(a, b) for a, b in zip(order, order[1:]) if a is not b]
    assert not used and len(set(order)) == 3 and len(turns) > 3  # not one after the other
    assert rows["request-level"]["gain"] == rows["request-level"]["whole_run_gain"] == 1
    assert all(row["gain"] > 0 and row["whole_run_gain"] > 0 for row in rows.values())
    for load in order:
        assert len(load.completions) == 7
        assert all(a.start < a.end < b.start for a, b in pairwise(load.iterations))


def test_requests_in_lockstep_are_all_alike():
    args = options(seq_len=1000, pd_ratio=256 / 5, requests=9, batch=6, lockstep=True)
    assert {its[:3] for its in offline.make_load(args)} == {(0.0, 981, 19)}


def test_the_load_is_balanced_and_the_same_for_all():
    args = options(seq_len=1000, pd_ratio=256 / 5, requests=9, batch=6)
    arrivals = offline.make_load(args)
    assert [(a.time, a.prompt_len) for a in arrivals] == [(0.0, 981)] * 9
    assert [a.output_len for a in arrivals] == [3, 6, 9, 12, 15, 19, 19, 19, 19]
    tokens = workload.prompts(arrivals, 256, args.seed)
    assert tokens == workload.prompts(offline.make_load(args), 256, args.seed)
    assert [len(prompt) for prompt in tokens] == [981] * 9
    for ratio, output in ((1e9, 1), (1e-9, 999)):  # at least a token of each
        load = offline.make_load(options(seq_len=1000, pd_ratio=ratio, requests=3))
        assert load[-1][1:3] == (1000 - output, output)


@pytest.mark.parametrize("busy", ["", "table", "policies"])
def test_the_conclusion_says_what_was_measured(busy):
    table = {"decode-only": {"decode_token_ms": 8.0, "busy": busy == "table"}}
    table["decode-maximal"] = dict(decode_token_ms=2.0, busy=False)
    policies = {"vllm": {"longest_stall_s": 1.1149, "busy": busy == "policies"}}
    policies["sarathi"] = dict(longest_stall_s=0.25, gain=1.0) | CALM
    report = {"decode_maximal": table, "end_to_end": policies, "promised_gain": 1.25}

    def conclude(total=4.0):
        its = report | {"decode_speedup": {"total": total}}
        return " ".join(offline.conclude(its, options(chunk=32)).split())

    text = conclude()
    parts = {
        "policies": "3. Longest stalls, which chunks are for: vllm 1.11 s, sarathi 0.25 s. ",
        "table": "Cost of a decode: 8.00 ms in a batch of its own, 2.00 ms riding with a chunk. ",
        "both": "Throughput at chunk 32: bare products promise 1.25x request-level's, sarathi "
        "runs at 1.00x.",
    }
    for part, said in parts.items():
        told = part != busy and not (busy and part == "both")
        assert (said in text) == told
        assert (said.split(":")[0] + f": {measure.TOO_BUSY}." in text) != told
    if not busy:
        assert "its own, less than the noise riding with a chunk." in conclude(total=None)
        policies["sarathi"]["gain"] = None
        text = conclude()
        assert text.startswith("3. Longest") and text.endswith("promise 1.25x request-level's.")


def test_what_was_measured_before_an_interrupt_is_kept(monkeypatch, tmp_path, capsys):
    def row_of(run, batch, real=offline.row_of):
        if seen:  # while the second is summed up
            raise KeyboardInterrupt
        seen.append(run)
        return real(run, batch)

    seen = []
    monkeypatch.setattr(offline, "row_of", row_of)
    monkeypatch.setattr(measure.Probe, "take", lambda self, *_: 0.5)
    words = "--model llama-tiny --chunk 32 --batch 3 --seq-len 80 --device cpu --dtype float32"
    files = [f"--{what}={tmp_path / what}.png" for what in ("json", "plot")]
    with pytest.raises(KeyboardInterrupt):
        bench.main([*words.split(), *files])
    text, report = capsys.readouterr().out, json.loads((tmp_path / "json.png").read_text())
    assert "decode speedup: this machine is too busy to tell\n" in text
    assert "measured limits (busy): " in text and "| decode-only (busy) " in text
    assert "| request-level" in text and list(report["end_to_end"]) == ["request-level"]
    assert text.endswith(f"interrupted: what was measured is above\nwrote {tmp_path}/json.png\n")
    assert (
        report["decode_maximal"]
        and "conclusion" not in report
        and not (tmp_path / "plot.png").exists()
    )
