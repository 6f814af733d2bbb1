"""What a claim is made of: relations, tables, and what published.toml says of each."""

import shlex
from argparse import Namespace
from collections import defaultdict

import pytest

import bench
from lab.commands.batches import PRODUCTS
from lab.commands.paper import CLAIMS
from lab.measure.capacity import Bounded
from lab.papers import claims
from lab.papers.claims import Table, lookup, measure, not_so, over, points, tables_of, value

SIZES = "gpu", "cpu", "quick"
IDS = "S-F3 SS-F4 S-F4a SS-F3 S-F4b SS-F5 S-F7 SS-F6 S-F8 S-T2 S-T4 S-F9 S-F10 S-F11 S-F13 "
IDS += "SS-F7 SS-F9 SS-F10 SS-F11 SS-F12 SS-F14 SS-T4 B-1 B-2 B-7"


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
    "a < b": "a < b: not at 2, 3",
    "a < b, at the start": "",
    "a < b, at the end": "a < b, at the end: not at 3",
    "a falls, at the end": "a falls, at the end: not known",
    "a half < b, at the start": "a half < b, at the start: not known",
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


def test_sizes_are_combined():
    assert [*points({"a": 1, "b": [2, 3]})] == [{"a": 1, "b": 2}, {"a": 1, "b": 3}]
    assert [*points([{"a": 1}, {"a": [2]}])] == [{"a": 1}, {"a": 2}]


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


def test_every_claim_is_there_with_all_that_is_said_of_it():
    assert sorted(n for key, its in CLAIMS.items() for n in [key, *its.get("also", [])]) == sorted(
        IDS.split()
    )
    machine = defaultdict(float)
    for its in CLAIMS.values():
        assert its["title"] and its["paper"] and any(shown.get("must") for shown in its["shows"])
        its.get("because", "").format_map(machine)
    for which, minutes in ((0, 6), (1, 45)):  # on two CPU cores, in all
        assert sum(its["seconds"][which] for its in CLAIMS.values()) <= 60 * minutes


class Anything(dict):
    """A row of a report in which all numbers are 1, and nothing was busy."""

    def __missing__(self, key):
        inner = "stalls", "longest", "ttft_s", "tbt_s", "intensity"
        return Anything() if key in inner else 1.0

    def get(self, key):
        return self[key]


def report_of(words):
    """What a command would report, if all of its numbers were 1."""
    _, args = bench.parse_args([*words, "--device", "cpu"])
    if args.command == "batches":
        parts = "total", "attention", "products", "other", *PRODUCTS
        row = {f"{part}_ms": 1.0 for part in parts} | {"tokens": 1, "tokens_per_ms": 1.0}
        row |= {"busy": False, "intensity": dict.fromkeys(parts, 1.0)}
        rows = {name: row for name, _ in args.batches}
        return {"batches": rows, "machine": {"flops_per_s": 1.0, "bytes_per_s": 1.0}}
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
@pytest.mark.parametrize("key", CLAIMS)
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
