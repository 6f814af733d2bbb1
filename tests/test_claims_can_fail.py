"""The claims about counts, costs, gains and stalls can fail: each is shown a system that is broken.

No timing is asserted here: policies run on a clock that counts, or are given made-up numbers."""

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from lab.measure.batch_times import count_tokens
from lab.measure.capacity import Bounded
from lab.papers import measured_counts
from lab.papers.bench import Bench
from lab.papers.measured import CLAIMS
from lab.simulator.cost_model import CostModel
from lab.simulator.devices import GEOMETRIES
from lab.simulator.machine import CountingMachine, base_of
from lab.simulator.simulation import simulate
from scheduler import Batch, RequestLevel, Sarathi, SarathiServe
from tests.helpers import machine_info, tiny_model
from tests.test_claims import MadeUpBench

FUNCTIONS = {claim.id: claim.function for claim in CLAIMS}


class SimulatedBench(Bench):
    """A Bench whose machine is a simulated A100, on which only the policies decide."""

    def __init__(self):
        model = tiny_model()
        model.config = replace(model.config, max_positions=10**6)
        options = SimpleNamespace(attention="auto", seed=0)
        super().__init__(model, machine_info(), options, "quick")

    def _real_machine(self, limits):
        cost = CostModel.named("llama3-8b")
        machine = CountingMachine(partial(simulate, cost), seed=0, shared_prefix=(0, 1))
        machine.base = base_of(cost, limits.max_len, limits.chunk)
        machine.info = SimpleNamespace(base_busy=False)
        return machine


def failures(finding):
    """The relations that do not show, without their places and reasons."""
    return [check.description for check in finding.failures()]


def is_small(finding):
    """Whether a number that is compared is not of the paper's size."""
    return any(not number.is_same_size for number in finding.published)


def admits_while_some_run(self):
    """RequestLevel.schedule as Orca's."""
    while self.admit():
        pass
    batch = Batch()
    for request in self.running:
        batch.add(request)
    return batch


def cuts_nothing(self):
    """A schedule of decodes and whole prompts."""
    batch = Batch()
    batch.add_decodes(self.grow_decodes())
    prefills = self.prefilling()
    request = prefills[0] if prefills else self.admit()
    if request:
        batch.add(request)
    return batch


def keeps_decodes_apart(self):
    """A schedule of chunks alone until no prompt is left, then of decodes."""
    batch = Batch(self.chunk)
    prefills = self.prefilling()
    request = prefills[0] if prefills else self.admit()
    if request:
        batch.add(request)
    else:
        batch.add_decodes(self.grow_decodes())
    return batch


@pytest.mark.parametrize("claim_id", ["S-3.1", "S-4.4", "B-1b"])
def test_what_is_counted_is_as_in_the_paper_on_any_machine(claim_id):
    bench = MadeUpBench("quick")
    finding = FUNCTIONS[claim_id](bench)
    assert not bench.asked and not finding.is_timed
    assert finding.verdict(busy=True) == "as in the paper"


def test_the_posts_four_requests_use_the_slots_as_it_says():
    over_time, means = FUNCTIONS["B-1b"](MadeUpBench("quick")).plots
    used = over_time["static"]
    assert [used.at(step) for step in (1, 62, 63, 114, 115, 456, 457, 628, 629, 690, 691)] == [
        1, 1, 0.75, 0.75, 0.5, 0.5, 0.25, 0.25, 1, 1, 0.75,
    ]  # fmt: skip
    assert means["static"].at("a token") == (628 + 114 + 456 + 62) / (4 * 628)
    assert means["static"].at("an iteration") == (500 + 50 + 200 + 30) / (4 * 500)


@pytest.mark.slow
def test_s_4_4_notices_whole_prompts_and_decodes_that_are_kept_apart(monkeypatch):
    for broken in (cuts_nothing, keeps_decodes_apart):
        monkeypatch.setattr(Sarathi, "schedule", broken)
        finding = FUNCTIONS["S-4.4"](None)
        assert "0.98 < counted / (C - (B - 1)) / (B - 1) < 1.02" in failures(finding)
        assert is_small(finding)


def test_b_1b_notices_static_batching_that_admits_while_some_run(monkeypatch):
    monkeypatch.setattr(RequestLevel, "schedule", admits_while_some_run)
    finding = FUNCTIONS["B-1b"](None)
    assert failures(finding) == ["1.3 * static < continuous"] and is_small(finding)


def test_s_3_1_notices_decodes_that_share_no_weights(monkeypatch):
    shares_none = measured_counts.linear_intensity
    monkeypatch.setattr(
        measured_counts, "linear_intensity", lambda config, _: shares_none(config, 1)
    )
    finding = FUNCTIONS["S-3.1"](MadeUpBench("quick"))
    assert failures(finding) == ["linear layers rises"] and is_small(finding)


def test_s_3_1_notices_decodes_that_share_keys(monkeypatch):
    grouped = replace(GEOMETRIES["llama-13b"], n_kv_head=8)  # five heads read the same keys
    monkeypatch.setitem(measured_counts.GEOMETRIES, "llama-13b", grouped)
    finding = FUNCTIONS["S-3.1"](MadeUpBench("quick"))
    assert "0.99 < attention < 1.01" in failures(finding)


def test_ss_f1_shows_with_the_true_policies():
    bench = SimulatedBench()
    finding = FUNCTIONS["SS-F1"](bench)
    assert failures(finding) == [] and finding.verdict(busy=False) == "as in the paper"
    over_time = finding.plots[0]
    stalled = list(over_time.lines["vllm"].values())
    assert stalled == sorted(stalled) and stalled[0] == 0  # tokens so far
    assert over_time["vllm"].at(over_time.xs[-1]) == stalled[-1] > 1


SERVING_BREAKS = [  # (policy, its schedule, what does not show)
    (SarathiServe, cuts_nothing, "sarathi-serve:128 < 128"),
    (RequestLevel, admits_while_some_run, "request-level < 1.1 * sarathi-serve:128"),
    (SarathiServe, keeps_decodes_apart, "sarathi-serve:128 < 128"),
    (SarathiServe, keeps_decodes_apart, "1.1 * sarathi-serve:128 < vllm, at the end"),
]


@pytest.mark.parametrize("policy, broken, relation", SERVING_BREAKS)
def test_ss_f1_notices_policies_that_are_broken(policy, broken, relation, monkeypatch):
    monkeypatch.setattr(policy, "schedule", broken)
    assert relation in failures(FUNCTIONS["SS-F1"](SimulatedBench()))


def test_ss_4_3_shows_if_a_budget_grows_with_its_slo():
    def measure(**numbers):
        return FUNCTIONS["SS-4.3"](MadeUpBench("quick", **numbers))

    six_times = {"strict": 128, "relaxed": 768}
    assert failures(measure(chunk=six_times)) == []
    assert failures(measure(chunk={"strict": 128, "relaxed": 160})) == [
        "2 * strict chunk < relaxed chunk"
    ]
    falling = measure(chunk=six_times, seconds_of=lambda tokens: 1000 - tokens)
    assert failures(falling) == ["iteration rises"]


class CapacityByBatch(MadeUpBench):
    """A Bench on which capacity grows with the batch, by a power."""

    def capacity(self, policies, *, batch, **load):
        found = super().capacity(policies, batch=batch, **load)
        rate = Bounded(batch ** self.numbers["power"])
        for name, result in found.results.items():
            found.results[name] = replace(result, capacity_qps=rate)
        return found


def test_ss_5_2_notices_capacity_that_grows_with_the_batch():
    alike = FUNCTIONS["SS-5.2"](CapacityByBatch("quick", power=0.1))
    assert failures(alike) == [] and not is_small(alike)
    grows = FUNCTIONS["SS-5.2"](CapacityByBatch("quick", power=1.0))
    assert failures(grows) == ["three batch sizes < 1.6, at the start"] and is_small(grows)


class GainsOverRatios(MadeUpBench):
    """A Bench on which the gain of a policy is a function of its name and of P:D."""

    def __init__(self, gain):
        super().__init__("quick")
        self.gain = gain

    def run_policies(self, policies, *, pd_ratio, **load):
        rows = super().run_policies(policies, pd_ratio=pd_ratio, **load)
        return {name: replace(row, gain=self.gain(name, pd_ratio)) for name, row in rows.items()}


def peaks_at(peak, gain):
    """A function of P:D that is `gain` at the peak and falls by a tenth when P:D doubles."""
    return lambda ratio: gain - 0.1 * abs(math.log2(ratio / peak))


def test_s_f9b_notices_a_gain_that_grows_with_the_prompt():
    def measure(factor):
        return FUNCTIONS["S-F9b"](
            GainsOverRatios(lambda name, ratio: peaks_at(factor * ratio_of(name), 1.25)(ratio))
        )

    def ratio_of(name):
        return {"sarathi:64": 64 / 1.5}.get(name, 64)  # between those of three and of two requests

    assert not any("sarathi:64" in text for text in failures(measure(1)))
    assert "1 < sarathi:64" in failures(measure(100))
    slow = FUNCTIONS["S-F9b"](GainsOverRatios(lambda name, ratio: 0.9))
    assert failures(slow) == 2 * ["0.98 < sarathi:64", "1 < sarathi:64"] and is_small(slow)


def test_s_f11b_notices_whole_prompts_that_gain_as_early_and_as_much():
    def measure(orca):
        def gain(name, ratio):
            if name == "orca-best":
                return orca(ratio)
            chunk = int(name.partition(":")[2] or 64)
            return peaks_at(chunk / 5, 1.25)(ratio)

        return FUNCTIONS["S-F11b"](GainsOverRatios(gain))

    assert failures(measure(peaks_at(51.2, 1.11))) == []
    assert failures(measure(peaks_at(51.2, 1.7))) == ["orca-best < 1.02 * sarathi"]
    assert failures(measure(peaks_at(6.4, 1.11))) == ["sarathi:32 < orca-best"]


def test_s_f13c_notices_that_the_smallest_chunk_is_best():
    def measure(**gain):
        gains = {f"sarathi:{chunk[1:]}": number for chunk, number in gain.items()}
        return FUNCTIONS["S-F13c"](MadeUpBench("quick", gain=gains))

    true = measure(c16=0.97, c32=1.16, c64=1.27, c80=1.2, c128=1.23)
    assert true.verdict(busy=False) == "as in the paper"
    assert failures(measure(c16=1.3, c32=1.2, c64=1.1)) == ["1 < 256 over 64"]


def products_ms(sequence):
    """The time of the products of a sequence, in rows: of a batch at least as long as a ridge of 20
    rows."""
    return float(sum(max(20, count_tokens([batch])) for batch in sequence))


def test_s_f10b_notices_slow_attention_and_chunks_that_save_as_much():
    def measure(**numbers):
        return failures(FUNCTIONS["S-F10b"](MadeUpBench("quick", **numbers)))

    assert measure(products_ms=products_ms) == []
    assert "0.4 < attention" in measure(products_ms=products_ms, sarathi__attention_ms=10.0)
    alike = measure(products_ms=lambda sequence: float(count_tokens(sequence)))
    assert "chunks of 512 < chunks of 256, at the start" in alike
    assert "1.02 < chunks of 512" in alike


def test_ss_f9b_notices_a_chunk_that_costs_more_beside_more_decodes():
    def measure(chunk_ms):
        def alone_ms(sequence):
            return 20.0 + sum(chunk.end for batch in sequence for chunk in batch) / 100

        return failures(
            FUNCTIONS["SS-F9b"](
                MadeUpBench(
                    "quick",
                    alone__total_ms=alone_ms,
                    chunk__total_ms=lambda sequence: chunk_ms(alone_ms(sequence)),
                )
            )
        )

    assert measure(lambda alone_ms: alone_ms + 50) == []
    grows = measure(lambda alone_ms: alone_ms**2)
    assert grows == ["context 512 falls", "context 512 < 1.05 * context 128, at the end"]


def test_b_3_notices_weights_that_are_read_for_each_row():
    def measure(**numbers):
        return FUNCTIONS["B-3"](MadeUpBench("quick", total_ms=products_ms, **numbers))

    shared = measure(products_ms=lambda sequence: 137.0 + count_tokens(sequence))
    assert failures(shared) == []
    for_each = measure(products_ms=lambda sequence: 1.5 * count_tokens(sequence) - 10)
    assert failures(for_each) == ["here < 4.9"]
    flat = FUNCTIONS["B-3"](MadeUpBench("quick"))
    assert "here rises" in failures(flat) and is_small(flat)


def test_the_posts_table_is_of_twice_the_parameters_and_reads_no_weights():
    parameters = 1.7e9 * 80
    ms_of_a_row = 1e3 * 2 * parameters / 800e12
    table = {32: 10.9, 160: 54.4, 288: 97.9, 544: 184.9, 1056: 359.0}  # rows -> "GEMM Time"
    assert {rows: round(rows * ms_of_a_row, 1) for rows in table} == pytest.approx(table, abs=0.1)
    reading_ms = 1e3 * 140e9 / 3.35e12
    assert round(reading_ms) == 42 and parameters == 136e9


class HybridTimes(MadeUpBench):
    """A Bench whose Table 2 has these attention and products, in ms, by the name of the row."""

    def __init__(self, **rows):
        super().__init__("quick")
        self.rows = rows

    def decode_maximal(self, **case):
        table = super().decode_maximal(**case)
        changed = {}
        for name, (attention_ms, products_ms) in self.rows.items():
            row = getattr(table, name)
            changed[name] = replace(row, attention_ms=attention_ms, products_ms=products_ms)
        return replace(table, **changed)


def test_c_1_notices_keys_that_are_reused_and_weights_that_are_read_again():
    def measure(riding_attention_ms, riding_products_ms):
        return failures(
            FUNCTIONS["C-1"](
                HybridTimes(
                    decode_only=(18 * 1.4, 18 * 10.0),  # of 18 decodes
                    prefill_only=(10.0, 220.0),
                    decode_maximal=(10 + 17 * riding_attention_ms, 220 + 17 * riding_products_ms),
                )
            )
        )

    assert measure(1.7, 0.1) == []
    assert measure(0.0, 0.1) == ["0.5 < attention < 2, at the end"]
    assert measure(1.7, 10.0) == ["linear < 0.8"]
