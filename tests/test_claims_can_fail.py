"""The checks of the claims about costs, gains and budgets can fail: each is given other answers.

What the claims notice of whole systems that are broken is in test_broken_systems.py."""

import math
from dataclasses import replace

import pytest

from lab.claims import phases
from lab.claims.claims import CLAIMS
from lab.claims.labs import Capacities
from lab.measure.batch_times import count_tokens
from lab.measure.capacity import Bounded
from lab.simulator.devices import GEOMETRIES
from tests.claim_labs import lab_with

FUNCTIONS = {claim.id: claim.function for claim in CLAIMS}


def failures(claim_id, **answers):
    """The relations of a claim that do not show if the lab gives these answers."""
    return [check.description for check in FUNCTIONS[claim_id](lab_with(**answers)).failures()]


@pytest.mark.parametrize("claim_id", ["S-3.1", "S-4.4", "B-1b", "S-F4b"])
def test_what_is_counted_or_computed_needs_no_clock(claim_id):
    no_clock = {"time": None, "serve": None, "gains": None, "server": None}
    finding = FUNCTIONS[claim_id](lab_with(size="gpu", **no_clock))
    assert not finding.is_timed
    assert finding.verdict(busy=True) == finding.verdict(busy=False) == "as in the paper"


def test_the_posts_four_requests_use_the_slots_as_it_says():
    over_time, means = FUNCTIONS["B-1b"](lab_with()).tables
    used = over_time["static"]
    assert [used.at(step) for step in (1, 62, 63, 114, 115, 456, 457, 628, 629, 690, 691)] == [
        1, 1, 0.75, 0.75, 0.5, 0.5, 0.25, 0.25, 1, 1, 0.75,
    ]  # fmt: skip
    assert means["static"].at("a token") == (628 + 114 + 456 + 62) / (4 * 628)
    assert means["static"].at("an iteration") == (500 + 50 + 200 + 30) / (4 * 500)


def test_s_3_1_notices_decodes_that_share_keys(monkeypatch):
    grouped = replace(GEOMETRIES["llama-13b"], n_kv_head=8)  # five heads read the same keys
    monkeypatch.setitem(phases.GEOMETRIES, "llama-13b", grouped)
    assert failures("S-3.1") == ["0.99 < attention < 1.01"]


def test_ss_f1_draws_the_request_that_is_stalled_longest():
    over_time = FUNCTIONS["SS-F1"](lab_with()).tables[0]
    stalled = list(over_time.lines["vllm"].values())
    assert stalled == sorted(stalled) and stalled[0] == 0  # tokens so far
    assert over_time["vllm"].at(over_time.xs[-1]) == stalled[-1] > 1


def test_ss_4_3_notices_budgets_that_do_not_grow_with_the_slo():
    def timer(seconds_of):
        def case_timer(decodes, context, max_budget):
            sizes = lab_with().case_timer(decodes, context, max_budget)
            return lambda cases: [row._replace(seconds=seconds_of(row)) for row in sizes(cases)]

        return case_timer

    assert failures("SS-4.3") == []
    wall = timer(lambda row: row.seconds if row.budget <= 256 else 1e3)
    assert failures("SS-4.3", case_timer=wall) == ["2 * strict chunk < relaxed chunk"]
    flat = timer(lambda row: 1e-3)
    assert "iteration rises" in failures("SS-4.3", case_timer=flat)


def test_ss_5_2_notices_capacity_that_grows_with_the_batch():
    def capacity(power):
        def capacity(policies, *, batch, slo, **_):
            slo_s = {"strict": 0.1, "15x": 0.3}.get(slo, 1.0)
            return Capacities(slo_s, False, dict.fromkeys(policies, Bounded(batch**power)))

        return capacity

    assert failures("SS-5.2", capacity=capacity(0.1)) == []
    assert failures("SS-5.2", capacity=capacity(1)) == ["three batch sizes < 1.6, at the start"]


def test_ss_f12_takes_the_best_batch_size_of_vllm():
    memory = set()

    def capacity(policies, *, slo, kv_tokens, **_):
        memory.add(kv_tokens)
        return Capacities({"strict": 0.1}.get(slo, 1.0), False, dict.fromkeys(policies, Bounded(1)))

    table = FUNCTIONS["SS-F12"](lab_with(capacity=capacity)).tables[0]
    lines = [name for name in table.lines if name.startswith("vllm")]
    assert lines == ["vllm, batch 8", "vllm, batch 16", "vllm, batch 32"]
    assert memory == {10240}  # whatever the batch


def gains(gain):
    """Lab.gains with gain(name, pd_ratio)."""
    return lambda names, load, pd_ratio: {name: gain(name, pd_ratio) for name in names}


def peaks_at(peak, gain):
    """A function of P:D that is `gain` at the peak and falls by a tenth when P:D doubles."""
    return lambda ratio: gain - 0.1 * abs(math.log2(ratio / peak))


def test_s_f9b_notices_a_gain_that_grows_with_the_prompt():
    def at(factor):
        # between the balanced ratios of three and of two requests
        ratios = {"sarathi:64": factor * 64 / 1.5}
        return gains(lambda name, ratio: peaks_at(ratios.get(name, 64), 1.25)(ratio))

    assert failures("S-F9b", gains=at(1)) == []
    assert "1 < sarathi:64" in failures("S-F9b", gains=at(100))
    slow = failures("S-F9b", gains=gains(lambda *_: 0.9))
    assert slow == 2 * ["0.98 < sarathi:64", "1 < sarathi:64"]


def test_s_f11b_notices_whole_prompts_that_gain_as_early_and_as_much():
    def orca(peak, gain):
        def gain_of(name, ratio):
            chunk = int(name.partition(":")[2] or 64)
            here = peaks_at(peak, gain) if name == "orca-best" else peaks_at(chunk / 5, 1.25)
            return here(ratio)

        return gains(gain_of)

    assert failures("S-F11b", gains=orca(51.2, 1.11)) == []
    assert failures("S-F11b", gains=orca(51.2, 1.7)) == ["orca-best < 1.02 * sarathi"]
    assert failures("S-F11b", gains=orca(6.4, 1.11)) == ["sarathi:32 < orca-best"]


def test_s_f13c_notices_that_the_smallest_chunk_is_best():
    def of(*numbers):
        names = ["request-level", *(f"sarathi:{chunk}" for chunk in (16, 32, 64, 80, 128))]
        gain_of = dict(zip(names, (1.0, *numbers), strict=True))
        return gains(lambda name, _: gain_of[name])

    assert failures("S-F13c", gains=of(0.97, 1.16, 1.27, 1.2, 1.23)) == []
    assert failures("S-F13c", gains=of(1.3, 1.2, 1.1, 1.0, 1.0)) == ["1 < 256 over 64"]


def changed(**changes):
    """Lab.time with other numbers: {"products_ms": function of the time and its sequence}."""

    def time(sequences):
        times = lab_with().time(sequences)
        for name, each in times.items():
            parts = {part: change(each, sequences[name]) for part, change in changes.items()}
            times[name] = replace(each, **parts)
        return times

    return time


def test_s_f10b_notices_chunks_that_save_as_much():
    in_proportion = changed(products_ms=lambda _, sequence: float(count_tokens(sequence)))
    for check in ("chunks of 512 < chunks of 256, at the start", "1.02 < chunks of 512"):
        assert check in failures("S-F10b", size="gpu", time=in_proportion)
        assert check not in failures("S-F10b", size="gpu")


def test_ss_f9b_notices_a_chunk_that_costs_more_beside_more_decodes():
    def total_ms(time, sequence):
        (batch,) = sequence
        is_hybrid = batch[0].tokens > 1
        return time.total_ms * (len(batch) * batch[-1].end if is_hybrid else 1)

    assert failures("SS-F9b", size="gpu") == []
    grows = failures("SS-F9b", size="gpu", time=changed(total_ms=total_ms))
    assert grows == ["context 2,048 falls", "context 2,048 < 1.05 * context 512, at the end"]


def test_b_3_notices_weights_read_for_each_row_and_rows_that_cost_nothing():
    for_each = changed(products_ms=lambda _, sequence: 1.5 * count_tokens(sequence) - 10)
    assert failures("B-3") == []
    assert failures("B-3", time=for_each) == ["here < 4.9"]
    assert failures("B-3", time=changed(total_ms=lambda *_: 1.0)) == ["here rises"]


def test_the_posts_table_is_of_twice_the_parameters_and_reads_no_weights():
    parameters = 1.7e9 * 80
    ms_of_a_row = 1e3 * 2 * parameters / 800e12
    table = {32: 10.9, 160: 54.4, 288: 97.9, 544: 184.9, 1056: 359.0}  # rows -> "GEMM Time"
    assert {rows: round(rows * ms_of_a_row, 1) for rows in table} == pytest.approx(table, abs=0.1)
    reading_ms = 1e3 * 140e9 / 3.35e12
    assert round(reading_ms) == 42 and parameters == 136e9


def test_c_1_notices_keys_that_are_reused_and_weights_that_are_read_again():
    def riding(attention_ms, products_ms):
        def decode_maximal(**case):
            table = lab_with().decode_maximal(**case)
            alone = table.prefill_only
            riding = case["batch"] - 1
            hybrid = replace(
                table.decode_maximal,
                attention_ms=alone.attention_ms + riding * attention_ms,
                products_ms=alone.products_ms + riding * products_ms,
            )
            decode_only = replace(table.decode_only, attention_ms=18 * 1.4, products_ms=180.0)
            return replace(table, decode_only=decode_only, decode_maximal=hybrid)

        return failures("C-1", decode_maximal=decode_maximal)

    assert riding(1.7, 0.1) == []
    assert riding(0.0, 0.1) == ["0.5 < attention < 2, at the end"]
    assert riding(1.7, 10.0) == ["linear < 0.8"]
