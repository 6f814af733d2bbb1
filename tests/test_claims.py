"""What a claim is made of: lines, checks, and a function for each figure and table.

No timing is asserted here: the functions are given made-up numbers."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from lab.claims import labs, serving
from lab.claims.checks import ANYWHERE, Condition, falls, less, rises
from lab.claims.claim import Finding
from lab.claims.claims import CLAIMS
from lab.claims.labs import Capacities, RealLab
from lab.claims.table import Table, over
from lab.measure.capacity import Bounded
from tests.claim_labs import lab_with
from tests.helpers import machine_info, tiny_model, with_slow

FUNCTIONS = {claim.id: claim.function for claim in CLAIMS}


def equal_capacities(policies, *, slo, **load):
    """Lab.capacity without a search."""
    slo_s = {"strict": 0.1, "15x": 0.3}.get(slo, 1.0)
    return Capacities(slo_s, False, dict.fromkeys(policies, Bounded(1.0)))


def plot_of(**lines):
    """A Table of lines, numbers at 1, 2, 3, ..."""
    table = Table("", "x", "y", ".2f")
    for name, values in lines.items():
        for x, y in enumerate(values, 1):
            table.add(x, {name: y})
    return table


def expecting(*checks, condition=ANYWHERE):
    """A Finding of these checks, all for the same reason."""
    found = Finding(tables=[PLOT])
    for check in checks:
        found.expect(check, "It must.", condition)
    return found


def number(paper, line, at=2, **more):
    """A number of a paper beside that of a line."""
    found = Finding("A6000")
    found.publish("tokens", paper, line, at, **more)
    return found.published[0]


def real_lab():
    """A RealLab of a tiny model that measures nothing by itself."""
    model = tiny_model()
    model.config = replace(model.config, max_positions=10**6)
    return RealLab(model, machine_info(), SimpleNamespace(attention="auto", seed=0), "quick")


PLOT = plot_of(a=[1.0, 2.0, 4.0], b=[4.0, 2.0, 1.0], even=[1.0, 1.4, 1.1], a_half=[None, 1.0, 9.0])
A, B, EVEN, A_HALF = PLOT
CHECKS = [  # and what is wrong with them
    (rises(A), ""),
    (falls(A), "a falls: not so"),
    (falls(B), ""),
    (rises(EVEN), "even rises: not so"),
    (less(A, B), "a < b: not at 2, 3"),
    (less(A, B, at="start"), ""),
    (less(A, B, at="end"), "a < b, at the end: not at 3"),
    (less(A_HALF, B, at="start"), "a_half < b, at the start: not known"),
    (less(A_HALF, A), "a_half < a: not at 3"),  # nothing is said of a gap
    (less(0.5, A, 4), "0.5 < a < 4: not at 3"),
    (less(0.25, A / B), "0.25 < a / b: not at 1"),
    (less(4 * A, B, at="start"), "4 * a < b, at the start: not at 1"),
]


@pytest.mark.parametrize("check, wrong", CHECKS, ids=lambda value: str(value) or "holds")
def test_a_check_says_where_it_does_not_hold(check, wrong):
    assert check.holds == (not wrong)
    (check,) = expecting(check).checks
    assert str(check) == (f"{wrong}; it should be so: It must" if wrong else "")


def test_a_failed_check_names_its_plot():
    plot = replace(plot_of(a=[2.0, 1.0]), title="one layer")
    assert str(rises(plot["a"])).startswith("one layer: a rises: not so; ")


NOISY = [  # numbers, and whether they rise, but for noise of 10 %
    ([1.0, 0.95, 2.0], True),
    ([1.0, 0.8, 2.0], False),
    ([3.0, 2.9, 3.2], False),  # the last must be above the first by more than that
    ([1.0, 3.2, 3.0], True),
    ([1.0, 3.4, 3.0], False),
]


@pytest.mark.parametrize("numbers, rising", NOISY)
def test_numbers_rise_and_fall_but_for_noise(numbers, rising):
    assert rises(plot_of(a=numbers)["a"]).holds == rising
    assert falls(plot_of(a=numbers[::-1])["a"]).holds == rising


def test_one_number_neither_rises_nor_falls():
    line = plot_of(a=[1.0, None])["a"]
    assert falls(line).failure == rises(line).failure == "not known"


def test_the_best_of_several_lines_is_the_largest_at_each_x():
    plot = plot_of(small=[2.0, 5.0], large=[3.0, None], vllm=[1.0, 2.0])
    best = plot.best("sarathi", ["small", "large"])
    assert (best.name, best.values) == ("sarathi", {1: 3.0, 2: 5.0})
    assert (best / plot["vllm"]).values == {1: 3.0, 2: 2.5}


def test_a_typo_in_the_name_of_a_line_is_an_error():
    with pytest.raises(KeyError, match="orka: no line of '', which has a, b"):
        PLOT["orka"]
    with pytest.raises(KeyError, match="sarathi-serv"):
        plot_of(**{"sarathi-serve:64": [1.0]}).best("sarathi-serve", ["sarathi-serv"])


def test_a_ratio_of_bounds_is_a_bound_or_unknown():
    low = Bounded(2.0, "at least")
    high = Bounded(1.0, "below")
    assert over(low, high) == 2.0 and over(low, high).bound == "at least"
    assert over(low, low) is None and over(3.0, None) is None and over(None, 2.0) is None
    assert over(1.0, 0.0) is None


def test_a_plot_is_a_table_with_a_row_for_each_x():
    plot = Table("L 1", x="B", y="s", spec=".1fx")
    plot.add(3000, {"p over q": 1.0})
    plot.add(4, {"p over q": None, "q": 2.0})
    assert plot.xs == (3000, 4)
    assert plot.markdown({}).splitlines() == [
        "L 1: s",
        "",
        "| B     | p over q |    q |",
        "|-------|---------:|-----:|",
        "| 3,000 |     1.0x |    - |",
        "| 4     |        - | 2.0x |",
    ]
    record = plot.to_json()
    fields = ["title", "x", "y", "spec", "log", "form", "ticks", "timed", "lines"]
    assert list(record) == fields
    assert record["lines"]["q"] == {4: 2.0}


RIDGE = Condition("the ridge is above 256 rows", is_met=False, observed="it is at 20")


def test_a_relation_that_need_not_show_says_where_it_would():
    (check,) = expecting(less(1, A), condition=RIDGE).checks
    assert not check.holds
    assert str(check) == (
        "1 < a: not at 1; expected only where the ridge is above 256 rows, and it is at 20"
    )
    assert expecting(less(0.5, A), condition=RIDGE).failures() == []  # it may show all the same


RATIO = replace(PLOT, spec=".2fx")["a"]  # 1, 2, 4
SIZES_OF_EFFECTS = [  # (paper, ours, within, the same size)
    (3.0, 2.0, 2.0, True),  # a ratio of 2 is half the effect of one of 3
    (3.1, 2.0, 2.0, False),
    (1.5, 2.0, 2.0, True),
    (1.4, 2.0, 2.0, False),
    (0.5, 2.0, 2.0, False),  # a loss is no gain
    (1.4, 2.0, None, True),  # not compared
    (1.0, 2.0, 2.0, True),  # no effect: the ratios themselves are compared
    (1.0, 2.0, 1.9, False),
    (Bounded(2.5, "at least"), 2.0, 1.5, True),
    (Bounded(2.6, "at least"), 2.0, 1.5, False),
    (Bounded(1.1, "at least"), 2.0, 1.5, True),
    (Bounded(1.7, "below"), 2.0, 1.5, True),
    (Bounded(1.6, "below"), 2.0, 1.5, False),
    (Bounded(9.0, "below"), 2.0, 1.5, True),
]


@pytest.mark.parametrize("paper, ours, within, same", SIZES_OF_EFFECTS)
def test_effects_are_of_one_size_within_a_factor(paper, ours, within, same):
    beside = number(paper, RATIO, within=within)
    assert beside.here == ours and beside.is_same_size == same


def test_numbers_that_are_no_ratio_are_compared_from_zero():
    assert number(3.9, A).is_same_size
    assert not number(4.1, A).is_same_size
    assert not number(4.1, A_HALF, at=1).is_same_size  # ours is not known


def test_a_bound_is_met_on_its_side():
    numbers = [number(Bounded(2, "at least"), A, at=x) for x in (1, 2, 3)]
    numbers += [number(Bounded(2, "below"), A, at=x) for x in (1, 2, 3)]
    assert [each.is_met for each in numbers] == [False, True, True, True, False, False]
    assert number(2, A).is_met is None
    assert number(Bounded(2, "below"), A, device="H100").is_met is None


def test_a_number_is_printed_with_its_unit_and_place():
    assert str(number(3, A, unit=" s")) == "tokens: 3.00 s, here 2.00 s at x 2"
    chats = Table("", x="lengths", y="s", spec=".1fx")
    chats.add("sharegpt4", {"a": 1.25})
    assert number(1, chats["a"], "sharegpt4").here_text == "1.2x, sharegpt4"
    assert number(1, A_HALF, 1).here_text == "-"


COUNTED = replace(PLOT, timed=False)["a"]
SAME = number(2.0, A)
SMALL = number(9.0, A)
NOT_COMPARED = number(2.0, A, within=None)
VERDICTS = [  # (checks, numbers, busy, verdict)
    ([less(0, A)], [SAME], False, "as in the paper"),
    ([less(0, A)], [], False, "as in the paper"),
    ([less(0, A)], [NOT_COMPARED], False, "trend only"),
    ([less(0, A)], [NOT_COMPARED, SAME], False, "as in the paper"),
    ([less(0, A)], [SAME, SMALL], False, "trend only"),
    ([less(0, A), less(1, A)], [SAME], False, "not seen here"),
    ([replace(less(1, A), condition=RIDGE)], [SAME], False, "not seen here"),
    ([less(0, A)], [SAME], True, "too busy to tell"),
    ([less(1, A)], [SAME], True, "too busy to tell"),
    ([less(0, COUNTED)], [], True, "as in the paper"),  # nothing in it was timed
    ([less(1, COUNTED)], [], True, "not seen here"),
    ([less(0, COUNTED)], [SAME], True, "too busy to tell"),
    ([less(1, COUNTED / A)], [], True, "too busy to tell"),
]


@pytest.mark.parametrize("relations, numbers, busy, verdict", VERDICTS)
def test_a_verdict_is_of_trend_and_size(relations, numbers, busy, verdict):
    finding = Finding(tables=[PLOT], checks=relations, published=numbers)
    assert finding.verdict(busy) == verdict
    assert bool(finding.why(busy)) == (verdict != "as in the paper")


def test_a_verdict_gives_its_reason():
    def why(*relations):
        found = expecting(*relations)
        found.published = [SAME, SMALL]
        return found.why(busy=False)

    assert why(less(0, A)) == "tokens: 9.00, here 2.00 at x 2"
    assert why(less(0, A), less(1, A), rises(B)) == (
        "1 < a: not at 1; it should be so: It must; b rises: not so; it should be so: It must"
    )


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """No claim draws here."""
    monkeypatch.setattr(serving, "plot_serving", lambda *_: None)


def test_every_claim_is_there_with_all_that_is_said_of_it():
    ids = [claim_id for claim in CLAIMS for claim_id in claim.ids]
    assert len(ids) == len(set(ids))
    covered = {claim_id for claim in CLAIMS for claim_id in claim.ids[1:]}
    assert covered == set("S-T2 S-F9c SS-F2 SS-F3 SS-F4 SS-F5 SS-F6 SS-F11".split())
    for claim in CLAIMS:
        assert claim.title
        assert claim.function.__name__ == re.sub(r"[-.]", "_", claim.id.lower())
        assert claim.function.__doc__.startswith(f"{claim.id}: ")
    for quick, minutes in ((True, 15), (False, 70)):  # on two CPU cores, as the README says
        assert sum(claim.seconds_of(quick) for claim in CLAIMS) <= 60 * minutes


@pytest.mark.parametrize("claim_id", with_slow(FUNCTIONS, fast=FUNCTIONS.keys() - {"S-4.4"}))
def test_each_claim_can_be_measured_at_each_size(claim_id):
    for size in ("cpu", "quick"):  # that of a GPU is in test_broken_systems.py
        finding = FUNCTIONS[claim_id](lab_with(size, capacity=equal_capacities))
        assert finding.tables
        assert finding.checks
        assert finding.published or claim_id == "SS-F7"  # which is drawn
        texts = [number.text for number in finding.published]
        assert len(texts) == len(set(texts))
        for check in finding.checks:  # a sentence
            assert check.because[0].isupper() and check.because.endswith(".")


def test_a_lab_measures_once_what_claims_share_and_says_if_it_was_busy(monkeypatch):
    calls = []

    def measure(*args, context, batch, chunk, attention):
        calls.append((context, batch, chunk))
        return SimpleNamespace(busy=batch == 3)

    monkeypatch.setattr(labs, "measure_decode_maximal", measure)
    lab = real_lab()
    lab.for_claim("a.png").decode_maximal(context=8, batch=3, chunk=4)
    assert lab.busy and not lab.for_claim("b.png").busy
    lab.decode_maximal(context=8, batch=2, chunk=4)
    assert not lab.busy
    lab.decode_maximal(context=8, batch=3, chunk=4)  # also busy if it was measured before
    assert lab.busy and calls == [(8, 3, 4), (8, 2, 4)]


def test_a_request_that_is_too_long_for_the_model_is_refused():
    lab = real_lab()
    lab.model.config = replace(lab.model.config, max_positions=100)
    with pytest.raises(ValueError, match="^1024 tokens: this model is limited to 100$"):
        lab.serve(["vllm"])
    with pytest.raises(ValueError, match="^101 tokens: this model is limited to 100$"):
        lab.decode_maximal(context=101, batch=2, chunk=4)
