"""Checks that fail on no system of test_broken_systems.py can fail, too: with other answers."""

from dataclasses import replace

import pytest

from lab.claims import phases
from lab.claims.claims import CLAIMS
from lab.claims.labs import Capacities
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


def test_the_posts_table_is_of_twice_the_parameters_and_reads_no_weights():
    parameters = 1.7e9 * 80
    ms_of_a_row = 1e3 * 2 * parameters / 800e12
    table = {32: 10.9, 160: 54.4, 288: 97.9, 544: 184.9, 1056: 359.0}  # rows -> "GEMM Time"
    assert {rows: round(rows * ms_of_a_row, 1) for rows in table} == pytest.approx(table, abs=0.1)
    reading_ms = 1e3 * 140e9 / 3.35e12
    assert round(reading_ms) == 42 and parameters == 136e9
