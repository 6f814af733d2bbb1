"""What a claim is made of: lines, checks, and a function for each figure and table.

No timing is asserted here: the functions are given made-up numbers."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from lab.measure.batch_times import PRODUCTS, SequenceTime, count_tokens
from lab.measure.capacity import Bounded, JudgedRun, SearchResult
from lab.measure.decode_maximal import DecodeMaximal, HybridTime
from lab.measure.metrics import summarize_run
from lab.measure.offline_load import PolicyRun
from lab.papers import bench as bench_module
from lab.papers import measured_loads
from lab.papers.bench import Bench, Capacities, Served
from lab.papers.finding import Finding, Plot, falls, less, over, rises
from lab.papers.measured import CLAIMS
from tests.helpers import machine_info, tiny_model

SIZES = ["gpu", "cpu", "quick"]
IDS = {"S-F3", "SS-F4", "S-F4a", "SS-F3", "S-F4b", "SS-F5", "S-F7", "SS-F6", "S-F8", "S-T2", "S-T4"}
IDS |= {"S-F9", "S-F10", "S-F11", "S-F13", "SS-F7", "SS-F9", "SS-F10", "SS-F11", "SS-F12", "SS-F14"}
IDS |= {"SS-T4", "B-1", "B-2", "B-7"}
FUNCTIONS = {claim.id: claim.function for claim in CLAIMS}


def plot_of(**lines):
    """A Plot of lines, numbers at 1, 2, 3, ..."""
    plot = Plot("", "x", "y", ".2f")
    for name, values in lines.items():
        for x, y in enumerate(values, 1):
            plot.add(name, x, y)
    return plot


PLOT = plot_of(a=[1.0, 2.0, 4.0], b=[4.0, 2.0, 1.0], even=[1.0, 1.4, 1.1], a_half=[None, 1.0, 9.0])
A, B, EVEN, A_HALF = PLOT.all_lines()
CHECKS = [  # and what is wrong with them
    (rises(A), ""),
    (falls(A), "a falls: not so"),
    (falls(B), ""),
    (rises(B), "b rises: not so"),
    (rises(EVEN), "even rises: not so"),
    (less(A, B), "a < b: not at 2, 3"),
    (less(A, B, at="start"), ""),
    (less(A, B, at="end"), "a < b, at the end: not at 3"),
    (less(A_HALF, B, at="start"), "a_half < b, at the start: not known"),
    (less(0.5, A, 4.5), ""),
    (less(0.5, A, 4), "0.5 < a < 4: not at 3"),
    (rises(A.over(B)), ""),
    (less(0.25, A.over(B)), "0.25 < a / b: not at 1"),
    (less(A_HALF, A), "a_half < a: not at 3"),  # nothing is said of a gap
    (less(A.times(2), B, at="start"), ""),
    (less(A.times(4), B, at="start"), "4 * a < b, at the start: not at 1"),
    (less(A.over(4), 1), "a / 4 < 1: not at 3"),
]


@pytest.mark.parametrize("check, wrong", CHECKS, ids=lambda value: str(value) or "holds")
def test_a_check_says_where_it_does_not_hold(check, wrong):
    assert check.holds == (not wrong)
    assert wrong == ("" if check.holds else str(check))


def test_a_failed_check_names_its_plot():
    plot = replace(plot_of(a=[2.0, 1.0]), title="one layer")
    assert str(rises(plot.line("a"))) == "one layer: a rises: not so"


NOISY = [  # numbers, and whether they rise, but for noise of 10 %
    ([1.0, 0.95, 2.0], True),
    ([1.0, 0.8, 2.0], False),
    ([3.0, 2.9, 3.0], False),  # the last must be above the first
    ([1.0, 3.2, 3.0], True),
    ([1.0, 3.4, 3.0], False),
]


@pytest.mark.parametrize("numbers, rising", NOISY)
def test_numbers_rise_and_fall_but_for_noise(numbers, rising):
    assert rises(plot_of(a=numbers).line("a")).holds == rising
    assert falls(plot_of(a=numbers[::-1]).line("a")).holds == rising


def test_one_number_neither_rises_nor_falls():
    line = plot_of(a=[1.0, None]).line("a")
    assert str(falls(line)) == "a falls: not known" == str(rises(line)).replace("rises", "falls")


def test_the_best_of_several_lines_is_the_largest_at_each_x():
    plot = plot_of(small=[2.0, 5.0], large=[3.0, None], vllm=[1.0, 2.0])
    best = plot.best("sarathi", ["small", "large"])
    assert (best.name, best.values) == ("sarathi", {1: 3.0, 2: 5.0})
    assert best.over(plot.line("vllm")).values == {1: 3.0, 2: 2.5}


def test_a_typo_in_the_name_of_a_line_is_an_error():
    with pytest.raises(KeyError, match="orka: no line of '', which has a, b"):
        PLOT.line("orka")
    with pytest.raises(KeyError, match="sarathi-serv"):
        plot_of(**{"sarathi-serve:64": [1.0]}).best("sarathi-serve", ["sarathi-serv"])


def test_a_ratio_of_bounds_is_a_bound_or_unknown():
    low = Bounded(2.0, "at least")
    high = Bounded(1.0, "below")
    assert over(low, high) == 2.0 and over(low, high).bound == "at least"
    assert over(low, low) is None and over(3.0, None) is None and over(None, 2.0) is None
    assert over(1.0, 0.0) is None


def test_a_plot_is_a_table_with_a_row_for_each_x():
    plot = Plot("L 1", x="B", y="s", spec=".1fx")
    plot.add("p over q", 3000, 1.0)
    plot.add("p over q", 4, None)
    plot.add("q", 4, 2.0)
    assert plot.xs == (3000, 4)
    assert plot.markdown().splitlines() == [
        "L 1: s",
        "",
        "| B     | p over q |    q |",
        "|-------|---------:|-----:|",
        "| 3,000 |     1.0x |    - |",
        "| 4     |        - | 2.0x |",
    ]
    assert plot.line("q").text() == "L 1 q -, 2.0x"
    record = plot.to_json()
    assert list(record) == ["title", "x", "y", "spec", "log", "lines"]
    assert record["lines"]["q"] == {4: 2.0}


def test_a_finding_says_what_must_show_once():
    checks = [less(1, A), less(1, A), rises(B)]
    finding = Finding(plots=[PLOT], checks=checks, quoted=[A, A.over(B)])
    assert finding.must_show == "1 < a; b rises"
    assert finding.failures == ["1 < a: not at 1", "1 < a: not at 1", "b rises: not so"]
    assert finding.here == "a 1.00, 2.00, 4.00; a / b 0.25, 1.00, 4.00"


class MadeUpBench(Bench):
    """A Bench that measures nothing. All numbers are 1, but those of `numbers`, by their keys."""

    def __init__(self, size, **numbers):
        model = tiny_model()
        model.config = replace(model.config, max_positions=10**6)
        options = SimpleNamespace(attention="auto", seed=0)
        super().__init__(model, machine_info(), options, size, picture="picture.png")
        self.numbers = numbers
        self.asked = []  # what was asked to be measured

    def time_batches(self, sequences, repeats, layers=None):
        self.asked.append(("batches", sequences))
        return {name: self.time_of(name, sequence) for name, sequence in sequences.items()}

    def time_of(self, name, sequence):
        """The SequenceTime of a sequence; numbers["decode.total_ms"], say, is a function of it."""
        row = {f"{part}_ms": 1.0 for part in ("total", "attention", "other", "products", *PRODUCTS)}
        row |= {"attention_limit_ms": 1.0, "spread": 0.0, "busy": False, "tokens_per_ms": 1.0}
        row |= {"tokens": count_tokens(sequence), "intensity": {}}
        for key, value in self.numbers.items():
            sequence_name, _, part = key.rpartition("__")
            if sequence_name == name or (not sequence_name and part in row):
                row[part] = value(sequence) if callable(value) else value
        return SequenceTime(**row)

    def decode_maximal(self, *, context, batch, chunk):
        self.asked.append(("decode_maximal", context, batch, chunk))
        row = {f"{part}_ms": 1.0 for part in ("total", "attention", "other", "products", *PRODUCTS)}
        row |= {"attention_limit_ms": 1.0, "spread": 0.0, "busy": False, "prefill_tokens": 1}
        row |= {"decodes": 1, "prefill_token_ms": 1.0, "decode_token_ms": 1.0}
        names = ("prompt", "prefill_only", "decode_only", "decode_maximal")
        rows = dict.fromkeys(names, HybridTime(**row))
        speedup = self.numbers.get("speedup", {}).get(batch, 1.0)
        return DecodeMaximal(**rows, speedup=speedup, products_speedup=1.0, promised_gain=1.0)

    def run_policies(self, policies, *, seq_len, batch, chunk, requests, pd_ratio):
        self.asked.append(("policies", policies, seq_len, batch, chunk, requests, pd_ratio))
        gains = self.numbers.get("gain", {})
        summary = summarize_run([], [], 1.0)
        return {
            name: PolicyRun(
                run=None,
                summary=summary,
                busy=False,
                tokens_per_s=1.0,
                gain=gains.get(name, 1.0),
            )
            for name in policies
        }

    def serve(self, policies, **load):
        self.asked.append(("serve", policies, load))
        summary = replace(
            summarize_run([], [], 1.0), tokens_per_iteration=1.0, running_mean=1.0, tokens_per_s=1.0
        )
        run = JudgedRun(
            summary=summary, own_fraction=0.0, refused=0, cut_short=None, drift=0.0, busy=False
        )
        return Served(0.1, False, {}, {name: run for name in policies})

    def capacity(self, policies, *, slo, **load):
        self.asked.append(("capacity", policies, slo, load))
        slo_s = {"strict": 0.1, "relaxed": 0.5}.get(slo, 1.0)
        rates = self.numbers.get("capacity", {})
        results = {}
        for name in policies:
            rate = Bounded(rates.get((name, slo), 1.0))
            results[name] = SearchResult(rate, trials=[], best=None, missed="", busy=False)
        return Capacities(slo_s, False, results)


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """No claim draws here."""
    monkeypatch.setattr(measured_loads, "plot_serving", lambda *_: None)


def test_every_claim_is_there_with_all_that_is_said_of_it():
    ids = [claim_id for claim in CLAIMS for claim_id in claim.ids]
    assert len(ids) == len(set(ids)) and set(ids) == IDS
    for claim in CLAIMS:
        assert claim.title and claim.paper and claim.function.__doc__
        assert claim.function.__name__ == claim.id.lower().replace("-", "_")
        assert claim.function.__doc__.startswith(f"{claim.id}: ")
    for quick, minutes in ((True, 6), (False, 45)):  # on two CPU cores, in all
        assert sum(claim.seconds_of(quick) for claim in CLAIMS) <= 60 * minutes


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_each_claim_can_be_measured_at_each_size(claim, size):
    bench = MadeUpBench(size)
    finding = claim.function(bench)
    assert finding.plots and finding.checks and finding.quoted and finding.here
    assert finding.must_show and not bench.busy
    number = claim.headline.number(finding)
    assert number == "-" or any(
        number.removesuffix(claim.headline.unit) in line.text() for line in finding.quoted
    )


def test_a_claim_that_is_arithmetic_measures_nothing():
    bench = MadeUpBench("cpu")
    finding = FUNCTIONS["S-F4b"](bench)
    assert not bench.asked and not bench.busy
    linear = finding.plots[2]
    assert list(linear.lines) == ["prefill", "decode", "ridge"]
    assert linear.line("prefill").at(18) is None and linear.line("decode").at(18) > 0


def failures(claim_id, size="quick", **numbers):
    """What does not show if these numbers are measured."""
    return FUNCTIONS[claim_id](MadeUpBench(size, **numbers)).failures


def requests_in(sequence):
    """How many requests are in the first batch of a sequence."""
    return len(sequence[0])


def test_s_f3_holds_if_decodes_share_the_reading_of_weights():
    numbers = {
        "decode__total_ms": lambda sequence: 10.0 + requests_in(sequence),
        "prefill__total_ms": lambda sequence: 100.0 * requests_in(sequence),
        "prefill__products_ms": lambda sequence: 80.0 * requests_in(sequence),
        "decode__products_ms": 9.0,
        "decode__attention_ms": lambda sequence: 1.0 * requests_in(sequence),
    }
    assert failures("S-F3", **numbers) == []
    alike = failures("S-F3", **numbers | {"decode__total_ms": lambda s: 20.0 * requests_in(s)})
    assert "decode falls: not so" in alike
    cheap = failures("S-F3", **numbers | {"prefill__total_ms": lambda s: 1000.0 * requests_in(s)})
    assert "10 * prefill < decode, at the start: not at 1" in cheap
    assert "share of the time: 0.5 < prefill: linear: not at 1, 2" in cheap


def test_s_f7_holds_if_a_row_alone_costs_more_than_one_among_256():
    assert failures("S-F7") == []
    assert failures("S-F7", products_ms=count_tokens) == [
        "a token of linear layers, alone and among 256: 2 * among < alone: not at tokens"
    ]


def test_s_f8_holds_if_riding_is_cheaper_by_less_in_larger_batches():
    assert failures("S-F8", speedup={6: 5.0, 18: 2.0}) == []
    assert failures("S-F8", speedup={6: 2.0, 18: 5.0}) == [
        "context 256 falls: not so",
        "context 512 falls: not so",
    ]
    assert "1 < context 256: not at 18" in failures("S-F8", speedup={6: 5.0, 18: 0.9})
    lost = failures("S-F8", speedup={6: None, 18: 2.0})  # in the noise: a gap
    assert lost == ["context 256 falls: not known", "context 512 falls: not known"]


def test_s_f11_holds_if_orca_in_lockstep_gains_nothing():
    gains = {"orca": 1.0, "orca-best": 1.1, "sarathi": 1.25}
    assert failures("S-F11", gain=gains) == []
    lucky = failures("S-F11", gain=gains | {"orca": 1.2})
    assert lucky == [
        "0.98 * orca < orca-best: not at 256, 512, 768",
        "0.96 < orca < 1.04: not at 256, 512, 768",
    ]
    assert "1.02 * orca-best < sarathi: not at 256, 512, 768" in failures(
        "S-F11", gain=gains | {"sarathi": 1.12}
    )


def test_ss_f10_holds_if_the_best_budget_wins_at_the_strict_slo():
    small = "sarathi-serve:128"
    large = "sarathi-serve:512"
    rates = {("vllm", "relaxed"): 3.0, ("orca", "relaxed"): 3.0}
    rates |= {(small, "strict"): 3.0, (large, "strict"): 0.5}
    rates |= {(small, "relaxed"): 2.0, (large, "relaxed"): 3.5}
    assert failures("SS-F10", capacity=rates) == []
    slow = failures("SS-F10", capacity=rates | {(small, "strict"): 1.01})
    assert slow == [
        f"{lengths}, simulated: 1.05 * {other} < sarathi-serve, at the start: not at 0.1"
        if other != "falls"
        else f"{lengths}, simulated: sarathi-serve / vllm falls: not so"
        for lengths in ("sharegpt4", "arxiv")
        for other in ("vllm", "orca", "falls")
    ]


def test_ss_f12_takes_the_best_batch_size_of_vllm():
    rates = {("sarathi-serve:128", slo): 4.0 for slo in ("strict", "15x", "50x")}
    wrong = failures("SS-F12", capacity=rates)
    assert wrong == ["sharegpt4, simulated: sarathi-serve / vllm falls: not so"]
    bench = MadeUpBench("quick")
    plot = FUNCTIONS["SS-F12"](bench).plots[0]
    assert [name for name in plot.lines if name.startswith("vllm")] == [
        "vllm, batch 8",
        "vllm, batch 16",
        "vllm, batch 32",
    ]
    assert all(load["kv_tokens"] == 10240 for *_, load in bench.asked)  # whatever the batch


def test_b_2_compares_the_whole_prompt_with_its_last_chunk():
    assert failures("B-2", prompt__total_ms=5.0, chunk__total_ms=2.0) == []
    assert failures("B-2", prompt__total_ms=3.0, chunk__total_ms=2.0) == [
        "2 * with a chunk < with the prompt, at the end: not at 512"
    ]


def test_measurements_that_claims_share_are_made_once(monkeypatch):
    calls = []

    def measure(*args, context, batch, chunk, attention):
        calls.append((context, batch, chunk))
        return SimpleNamespace(busy=batch == 3)

    monkeypatch.setattr(bench_module, "measure_decode_maximal", measure)
    options = SimpleNamespace(attention="auto", seed=0)
    bench = Bench(tiny_model(), machine_info(), options, "quick")
    first = bench.for_claim("a.png")
    first.decode_maximal(context=8, batch=3, chunk=4)
    assert first.busy and not bench.busy
    second = bench.for_claim("b.png")
    assert not second.busy
    second.decode_maximal(context=8, batch=2, chunk=4)
    assert not second.busy
    second.decode_maximal(context=8, batch=3, chunk=4)  # also busy if it was measured before
    assert second.busy and calls == [(8, 3, 4), (8, 2, 4)]


def test_a_request_that_is_too_long_for_the_model_is_refused():
    bench = MadeUpBench("cpu")
    bench.model.config = replace(bench.model.config, max_positions=100)
    with pytest.raises(ValueError, match="^1024 tokens: this model is limited to 100$"):
        Bench.serve(bench, ["vllm"])
    with pytest.raises(ValueError, match="^101 tokens: this model is limited to 100$"):
        Bench.decode_maximal(bench, context=101, batch=2, chunk=4)
