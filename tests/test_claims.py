"""What a claim is made of: relations, tables, batches, and what published.toml says of each."""

import math
import shlex
from argparse import Namespace
from collections import defaultdict

import pytest
import torch

import bench
from experiments import claims, iterations
from experiments.claims import Table, lookup, measure, not_so, over, tables_of, value
from experiments.paper import CLAIMS
from experiments.run import Bounded
from tests.helpers import tiny_model

SIZES = "gpu", "cpu", "quick"
COMMANDS = [key for key, its in CLAIMS.items() if "run" in its]
TIMED = [key for key, its in CLAIMS.items() if "batches" in its]
IDS = "S-F3 SS-F4 S-F4a SS-F3 S-F4b SS-F5 S-F7 SS-F6 S-F8 S-T2 S-T4 S-F9 S-F11 S-F10 S-F13 SS-F7 "
IDS += "SS-F9 SS-F14 SS-F10 SS-F11 SS-F12 SS-T4 B-1 B-2 B-7"  # of all that one device can show


def table(**lines):
    """A Table of lines, numbers at 1, 2, 3, ..."""
    its = {name.replace("_", " "): dict(enumerate(ys, 1)) for name, ys in lines.items()}
    return Table("", "x", "y", "", ".2f", its)


NUMBERS = table(a=[1.0, 2.0, 4.0], b=[4.0, 2.0, 1.0], even=[1.0, 1.4, 1.1], a_half=[None, 1.0, 9.0])
RELATIONS = {  # and what is wrong with them
    "a rises": "",
    "a falls": "a falls: not so",
    "b falls": "",
    "b rises": "b rises: not so",
    "even is even": "",
    "a is even": "a is even: not so",
    "a < b": "a < b: not at 2, 3",
    "a < b, at the start": "",
    "a < b, at the end": "a < b, at the end: not at 3",
    "a is even, from 2": "a is even, from 2: not so",
    "even is even, from 2": "",
    "a falls, at the end": "a falls, at the end: not known",
    "a half < b, at the start": "a half < b, at the start: not known",
    "b < 2 * a, from 2": "",
    "b < a, from 2": "b < a, from 2: not at 2",
    "0.5 < a < 4.5": "",
    "0.5 < a < 4": "0.5 < a < 4: not at 3",
    "a / b rises": "",
    "0.25 < a / b": "0.25 < a / b: not at 1",
    "a half < a": "a half < a: not at 3",  # where one is not known there is nothing to say
    "0.9 < *": "",
    "* rises": "b rises: not so; even rises: not so",
    "ev < 1.5": "",  # a beginning
}


@pytest.mark.parametrize("relation, wrong", RELATIONS.items())
def test_a_relation_says_where_it_does_not_hold(relation, wrong):
    assert not_so(relation, NUMBERS) == wrong


def test_numbers_rise_and_fall_but_for_noise():
    assert not not_so("a falls", table(a=[3.0, 3.2, 1.0])) and not_so(
        "a falls", table(a=[3, 3.4, 1])
    )
    assert not not_so("a rises", table(a=[1.0, 0.95, 2])) and not_so(
        "a rises", table(a=[1, 0.8, 2])
    )
    assert not_so("a falls", table(a=[3.0, 3.1, 3.0])) and not_so("a rises", table(a=[3, 2.9, 3]))
    assert not_so("a falls", table(a=[1.0])) == "a falls: not known"


def test_a_beginning_stands_for_the_largest_of_all_that_have_it():
    lines = {"s:1": {1: 2.0, 2: 5.0}, "s:2": {1: 3.0, 2: None}, "vllm": {1: 1.0, 2: 2.0}}
    assert [value("s", lines, x) for x in (1, 2)] == [3.0, 5.0]
    assert [value("s / vllm", lines, x) for x in (1, 2)] == [3.0, 2.5]
    assert value("2 * vllm", lines, 2) == 4.0 and value("0.5", lines, 1) == 0.5
    with pytest.raises(ValueError, match="orca"):
        value("orca", lines, 1)


def test_a_ratio_of_bounds_is_a_bound_or_unknown():
    low, high = Bounded(2.0, "at least"), Bounded(1.0, "below")
    assert over(low, high) == 2.0 and over(low, high).bound == "at least"
    assert over(low, low) is None and over(3.0, None) is None and over(None, 2.0) is None


def test_a_path_leads_into_a_report():
    report = {"runs": {"a": {"x": {"p": 1}}, "b": {"x": None}}, "n": 3}
    assert lookup(report, ["runs", "*", "x", "p"]) == {"a": 1, "b": None}
    assert lookup(report, ["n"]) == {"": 3}


def test_tables_are_made_of_what_was_done():
    done = [
        ({"L": n, "B": b}, {"runs": {"p": {"v": n * b}, "q": {"v": b}}})
        for n in (1, 2)
        for b in (3, 4)
    ]
    its = {"value": "runs.*.v", "x": "B", "y": "s", "format": ".0f", "title": "L {L}"}
    first, second = tables_of(its, done)
    assert (first.title, first.lines) == ("L 1", {"p": {3: 3, 4: 4}, "q": {3: 3, 4: 4}})
    assert (second.title, second.lines) == ("L 2", {"p": {3: 6, 4: 8}, "q": {3: 3, 4: 4}})
    its = {"value": {"p over q": "runs.p.v / runs.q.v"}, "line": "{value} at {L}", "x": "B"}
    (only,) = tables_of(its | {"y": "", "format": ".1fx"}, done)
    assert only.lines == {"p over q at 1": {3: 1, 4: 1}, "p over q at 2": {3: 2, 4: 2}}
    assert only.markdown().splitlines()[2:] == [
        "| B | p over q at 1 | p over q at 2 |",
        "|---|--------------:|--------------:|",
        "| 3 |          1.0x |          2.0x |",
        "| 4 |          1.0x |          2.0x |",
    ]


def test_shares_and_steps():
    done = [({"x": x}, {"r": {"a:8": {"v": v}}}) for x, v in ((1, 2.0), (2, 8.0), (4, 8.1))]
    its = {"value": "r.*.v", "x": "x", "y": "", "format": ""}
    lines = lambda how: tables_of(its | how, done)[0].lines
    assert lines({"shares": True}) == {"a:8": {1: 2 / 8.1, 2: 8 / 8.1, 4: 1}}
    assert lines({"steps": True}) == {"a:8": {1: 3.0}}


BATCHES = {
    "512": [[(512, 512)]],
    "2x512": [[(512, 512), (512, 512)]],
    "3x1@1024": [[(1, 1024)] * 3],
    "256@2048": [[(256, 2048)]],
    "10/4": [[(4, 4)], [(4, 8)], [(2, 10)]],
    "8@20/4": [[(4, 16)], [(4, 20)]],
    "8/4 + 2x1@9": [[(4, 4), (1, 9), (1, 9)], [(4, 8), (1, 9), (1, 9)]],
    "2 * 3, 1@4": [[(3, 3)], [(3, 3)], [(1, 4)]],
}


@pytest.mark.parametrize("text, found", BATCHES.items())
def test_batches_are_read(text, found):
    assert iterations.batches(text) == [tuple(batch) for batch in found]


@pytest.mark.parametrize("text", ["", "x", "3x", "1@", "4/", "1 2", "-3", "2 *"])
def test_a_wrong_batch_is_named(text):
    with pytest.raises(ValueError, match="must be like"):
        iterations.batches(text)


def test_spans_compute_what_batches_say():
    (prompt, chunk, decode) = iterations.spans(((8, 8), (4, 20), (1, 16)))
    assert [(its.start, its.length, its.end) for its in (prompt, chunk, decode)] == [
        (0, 8, 8),
        (16, 4, 20),
        (15, 1, 16),
    ]
    assert len({its.pages[0] for its in (prompt, chunk, decode)}) == 3


def test_every_claim_is_there_with_all_that_is_said_of_it():
    assert sorted(n for key, its in CLAIMS.items() for n in [key, *its.get("also", [])]) == sorted(
        IDS.split()
    )
    assert not set(COMMANDS) & set(TIMED) and {*COMMANDS, *TIMED} == {*CLAIMS}
    machine = defaultdict(float)
    for its in CLAIMS.values():
        assert its["title"] and its["paper"] and any(shown.get("must") for shown in its["shows"])
        its.get("because", "").format_map(machine)
    for which, minutes in ((0, 6), (1, 45)):  # on two CPU cores, in all
        assert sum(its["seconds"][which] for its in CLAIMS.values()) <= 60 * minutes


class Anything(dict):
    """A row of a report in which all numbers are 1, and nothing was busy."""

    def __missing__(self, key):
        return Anything() if key in ("stalls", "longest", "ttft_s", "tbt_s") else 1.0


def report_of(words):
    """What a command would report, if all of its numbers were 1."""
    _, args = bench.parse_args([*words, "--device", "cpu"])
    policies = {name: Anything(busy=False) for name in args.policies}
    found = {"decode_speedup": {"total": 1.0}, "promised_gain": 1.0}
    rows = {"prefill-only": {}, "decode-only": {}, "decode-maximal": {}}
    found["decode_maximal"] = {name: Anything(busy=False) for name in rows}
    key = {"offline": "end_to_end", "serve": "runs", "capacity": "results"}[args.command]
    return found | {
        key: policies,
        "slo_s": {"strict": 0.1, "relaxed": 0.5}.get(getattr(args, "slo", ""), 1),
    }


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("key", COMMANDS)
def test_commands_of_a_claim_can_be_read_and_its_tables_name_what_they_report(key, size):
    setup = Namespace(size=size, picture="p.png", bench=lambda words: report_of(shlex.split(words)))
    found = measure(CLAIMS[key], setup)
    assert found.tables and not found.busy and found.here


def test_a_busy_run_makes_a_busy_finding():
    report = report_of(CLAIMS["SS-F7"]["run"].format(a_to_d=claims.TRACE, picture="p.png").split())
    setup = Namespace(size="quick", picture="p.png", bench=lambda words: report)
    assert not measure(CLAIMS["SS-F7"], setup).busy
    report["runs"]["orca"]["busy"] = True
    assert measure(CLAIMS["SS-F7"], setup).busy


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("key", TIMED)
def test_tables_of_a_claim_name_what_is_timed(key, size, monkeypatch):
    monkeypatch.setattr(iterations, "intensities", lambda setup, batch: defaultdict_of(1.0))
    monkeypatch.setattr(
        iterations,
        "timed",
        lambda setup, its, *more: ({b: defaultdict_of(1.0) for b in its}, False),
    )
    found = measure(CLAIMS[key], Namespace(size=size, picture="p.png", machine={"busy": False}))
    assert found.tables and found.here and not found.busy
    numbers = [y for its in found.tables for line in its.lines.values() for y in line.values()]
    assert all(math.isfinite(y) for y in numbers)


def defaultdict_of(number):
    """A row of all operations, each with the same number."""
    return dict.fromkeys([*iterations.OPERATIONS, "linear", "others", "ridge"], number)


def setup_of(model, quick=True):
    args = Namespace(quick=quick, attention="auto", seed=0)
    machine = {"busy": False, "flops_per_s": 6.0, "bytes_per_s": 2.0}
    return Namespace(model=model, machine=machine, args=args, size="quick")


def test_operations_are_timed_on_a_model():
    setup = setup_of(tiny_model(dtype=torch.float32))
    its = {"batches": {"a": "2 * 8/4 + 2x1@9", "b": "5"}, "quick": {"n": [1, 2]}}
    (one, two), _ = iterations.measured(setup, its)
    assert (one[0], two[0]) == ({"n": 1}, {"n": 2}) and one[1] == two[1]  # the same batches
    row = one[1]["a"]
    assert row["tokens"] == 2 * (8 + 2 * 2) and one[1]["b"]["tokens"] == 5
    parts = [row[name] for name in iterations.OPERATIONS]
    assert min(parts) > 0 and row["linear"] == pytest.approx(sum(parts[:4]))
    assert row["others"] >= 0


def test_of_some_parts_only_those_are_timed_in_as_many_layers_as_asked_for():
    setup, seen = setup_of(tiny_model(dtype=torch.float32)), []
    its = {"batches": {"a": "5"}, "quick": {"n": 1}, "parts": ["whole"], "layers": 1}
    make = iterations.GPT

    def spy(config, *more):
        seen.append(config.n_layer)
        return make(config, *more)

    iterations.GPT = spy
    try:
        ((_, found),), _ = iterations.measured(setup, its)
    finally:
        iterations.GPT = make
    assert set(found["a"]) == {"whole", "tokens"} and seen == [1]


def test_intensity_is_flops_over_bytes_that_are_moved_once():
    model = tiny_model(dtype=torch.float32)
    config, batch = model.config, ((1, 10), (1, 10))  # two decodes at 10 tokens
    found = iterations.intensities(setup_of(model), batch)
    n, m = model.blocks[0].ffn_ln2.in_features, config.n_embd
    assert found["ffn_ln2"] == pytest.approx(2 * 2 * n * m / (4 * (n * m + 2 * n + 2 * m)))
    flops = 2 * 4 * 10 * config.n_head * config.head_dim
    kv, q_and_out = 2 * 10 * 2 * config.n_kv_head, 2 * 2 * config.n_head
    assert found["attention"] == pytest.approx(flops / (4 * config.head_dim * (kv + q_and_out)))
    assert found["ridge"] == 3.0
