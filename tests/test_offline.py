"""Table 2, the policies end to end and the advice are what was seen. No timing is asserted here."""

from types import SimpleNamespace

import pytest

from engine import Completion, Iteration
from experiments import measure, offline
from experiments.run import LoadRun, Run
from tests.helpers import tiny_model


def options(**changes):
    """What the functions read of the command line."""
    defaults = dict(batch=3, chunk=12, seq_len=20, attention="auto", compile=False, seed=4)
    return SimpleNamespace(**defaults | changes)


def test_a_cost_below_the_noise_is_not_a_speedup(monkeypatch):
    """Only the hybrid batch's total is worth a number here: its products are lost in the noise."""
    ms = {"prefill-only": (100, 80), "decode-maximal": (110, 81), "decode-only": (30, 20)}
    ms = {(name, part): x for name, row in ms.items() for part, x in zip(("total", "bare"), row)}

    def interleaved(variants, device):
        for _ in range(measure.WARMUP + 3):
            for (_, part), function in variants.items():
                if part == "watched":
                    function()
        return {key: measure.Timing(ms.get(key, 1), 0.1) for key in variants}

    monkeypatch.setattr(measure, "interleaved", interleaved)
    machine = {"flops_per_s": 1e12, "bytes_per_s": 1e10}
    rows, speedup = offline.decode_maximal(tiny_model(), machine, options())
    prefill, decode, hybrid = rows.values()
    assert speedup["total"] == pytest.approx((30 / 3) / (10 / 2)) and speedup["bare"] is None
    assert hybrid["decode_token_ms"] == 5 and decode["decode_token_ms"] == 10
    assert prefill["prefill_token_ms"] == hybrid["prefill_token_ms"] == 100 / 10
    assert prefill["decode_token_ms"] is decode["prefill_token_ms"] is None
    counts = [(row["prefill_tokens"], row["decodes"]) for row in rows.values()]
    assert counts == [(10, 0), (0, 3), (10, 2)]
    for row in rows.values():
        assert row["limit_ms"] == row["bare_ms"] + row["attention_alone_ms"]
        parts = row["linear_ms"] + row["attention_ms"] + row["other_ms"]
        assert parts == pytest.approx(row["total_ms"]) or row["other_ms"] == 0


def test_rows_of_the_policies_are_what_was_seen():
    completions = [
        Completion(0, [1] * 6, 0.0, tokens=[1], token_times=[1.5]),
        Completion(1, [2] * 6, 0.5, tokens=[1, 2, 3], token_times=[1.5, 1.7, 2.7]),
    ]
    iterations = [
        Iteration(0.0, 1.5, [(0, 0, 6, False), (1, 0, 6, False)]),
        Iteration(1.5, 1.7, [(1, 6, 1, True)]),
        Iteration(1.7, 2.7, [(1, 7, 1, True), (2, 0, 4, False)]),
    ]
    expected = dict(tokens_per_s=(6 + 1 + 6 + 3) / 4, iterations=3, tokens_per_iteration=6)
    expected |= dict(p50_ttft_s=(1.5 + 1.0) / 2, p99_tbt_s=0.2 + 0.99 * 0.8, longest_stall_s=1.0)
    row = offline.row_of(Run(completions, iterations, 2.7, 0.0), 4.0)
    assert row == pytest.approx(expected)
    row = offline.row_of(Run(completions[:1], iterations[:1], 1.5, 0.0), 4.0)
    assert row["p99_tbt_s"] == row["longest_stall_s"] == 0  # one token, no gaps


def test_a_busy_clock_stands_still_while_others_run(monkeypatch):
    now = [10.0]
    monkeypatch.setattr(offline.time, "perf_counter", lambda: now[0])
    clock = offline.BusyClock()
    with clock:
        now[0] = 13.0
        assert clock() == 3.0
    now[0] = 99.0
    assert clock() == clock.elapsed == 3.0


def test_the_engine_that_has_used_the_least_time_is_next(monkeypatch):
    active, order = [], []

    class Spy(LoadRun):
        def step(self):
            others = [load.server.clock for load in active if load is not self]
            assert all(clock.since is None for clock in others)
            assert all(self.server.clock.elapsed <= clock.elapsed for clock in others)
            order.append(self)
            return super().step() or active.remove(self)

    spy = lambda *args: active.append(Spy(*args)) or active[-1]
    monkeypatch.setattr(offline, "LoadRun", spy)
    policies = ["request-level", "vllm", "sarathi"]
    args = options(policies=policies, requests=4, pd_ratio=3.0)
    rows, timelines = offline.end_to_end(tiny_model(), args)
    turns = [(a, b) for a, b in zip(order, order[1:]) if a is not b]
    assert not active and len(set(order)) == 3 and len(turns) > 3  # not one after the other
    assert list(rows) == list(timelines) == policies and rows["request-level"]["gain"] == 1
    for load in order:
        assert len(load.completions) == 4
        assert all(i.start < i.end <= load.server.clock.elapsed for i in load.iterations)


def test_the_load_is_balanced_and_the_same_for_all():
    args = options(seq_len=1000, pd_ratio=256 / 5, requests=9, batch=6)
    arrivals = offline.make_load(args)
    assert [(a.time, a.prompt_len) for a in arrivals] == [(0.0, 981)] * 9
    assert [a.output_len for a in arrivals] == [3, 6, 9, 12, 15, 19, 19, 19, 19]
    tokens = offline.prompts(arrivals, 256, args.seed)
    assert tokens == offline.prompts(offline.make_load(args), 256, args.seed)
    assert [len(prompt) for prompt in tokens] == [981] * 9
    for ratio, output in ((1e9, 1), (1e-9, 999)):  # at least a token of each
        assert offline.output_tokens(options(seq_len=1000, pd_ratio=ratio)) == output


def test_the_advice_is_the_largest_predicted_gain(monkeypatch):
    ms = {3: 9.0, 32: 16.0, 64: 24.0, 128: 40.0}  # 8 ms a pass, 0.25 a token: none rides for free
    monkeypatch.setattr(measure, "bare_products", lambda model, tokens, logits: tokens)
    interleaved = lambda variants, *_, **__: {c: measure.Timing(ms[c], 0.0) for c in variants}
    monkeypatch.setattr(measure, "interleaved", interleaved)
    prefill, decode = {"attention_ms": 3.0, "prefill_tokens": 30}, {"attention_ms": 6.0}
    rows = {"prefill-only": prefill, "decode-only": decode}
    advice = offline.advise(tiny_model(), rows, options(chunk=64, seq_len=128))
    expected = {}
    for chunk in (32, 64, 128):
        attention = (chunk - 2) * 0.1 + 2 * 2.0
        expected[chunk] = ((chunk - 2) * 40 / 128 + 2 * 3.0 + attention) / (ms[chunk] + attention)
    assert advice["predicted_gain"] == pytest.approx(expected)
    assert advice["favoured_chunk"] == max(expected, key=expected.get) == 128
    assert advice["product_ms"] == ms


def test_the_conclusion_says_what_was_measured():
    rows = {"decode-only": {"decode_token_ms": 8.0}, "decode-maximal": {"decode_token_ms": 2.0}}
    advice = {"product_ms": {3: 9.0, 64: 16.0}, "predicted_gain": {32: 1.01, 64: 1.25}}
    args, gains = options(chunk=32), {"sarathi": {"gain": 1.12}}
    text = offline.conclude(rows, gains, advice | {"favoured_chunk": 64}, args)
    assert "8.00 ms in a batch of its own and 2.00 ms riding with a chunk, 4.0x less." in text
    assert "1.12x request-level's" in text and "3.00 at 3, 0.25 at 64 tokens" in text
    assert "favours --chunk 64" in text and "its own P:D of 32, against 1.01x at 32." in text
    rows["decode-maximal"]["decode_token_ms"] = -0.1
    text = offline.conclude(rows, {}, advice | {"favoured_chunk": 32}, args)
    assert "and nothing riding.\n" in text and "Chunk 32 is what this machine's" in text
