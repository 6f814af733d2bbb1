"""Policies of one's own are compared with all others, and the rule that one breaks is named."""

import json
from argparse import Namespace
from pathlib import Path

import pytest

import bench
from experiments import measure, run, serving
from experiments.workload import Arrival, prompts
from policies import POLICIES
from policies.config import EngineConfig
from simulator import play
from simulator.cost_model import CostModel
from simulator.simulation import simulate
from tests.helpers import tiny_model
from views.search import plot_scoreboards

TEMPLATE = "policies/template.py:ShortestFirst"
COST, MODEL = CostModel.named("llama3-8b"), tiny_model(max_positions=64)
ARRIVALS = [Arrival(0.0, 9 + i, 12) for i in range(6)]
LATER, PROMPTS = [Arrival(0.1, 20, 3)], prompts(ARRIVALS, 61, 0)
GPU = Namespace(serve=lambda *its, **more: simulate(COST, *its, **more).run)
ENGINE = Namespace(serve=lambda *its, **more: run.serve(MODEL, *its, PROMPTS, **more))
FEW = {name: POLICIES[name] for name in ("request-level", "sarathi-serve")}
MACHINE = {"model": "llama-tiny", "dtype": "float64", "device": "a CPU"}
OWN = "from scheduler import Chunk, SarathiServe\nclass Own(SarathiServe):\n  def "
BATCH, DONE = "schedule(self):\n    its = super().schedule()\n    ", "return super().schedule()"
LOST, ENDS, LEAKS = (
    rf"request .*'{r}'.*" for r in ("nothing lost", "everybody ends", "no page l.*")
)
BROKEN = [  # (the method of a policy, what is said of it)
    (f"schedule(self): self.waiting.pop(); {DONE}", LOST + "not ended.*runs 0 times"),
    (f"schedule(self): self.waiting += self.running; {DONE}", LOST + "runs 2 times"),
    ("preempt(self, r): super().preempt(r); self.waiting.remove(r)", LOST + "runs 0 times"),
    (f"{BATCH}self.finish(its[0][0], 'length')", LOST + "length, lacks 12 tokens"),
    (f"schedule(self): self.max_batch += 1; {DONE}", "request .*'at most max_batch'.* of 4"),
    (f"{BATCH}its[0][0].is_decoding and its[0][0].pages.pop()", LEAKS + "in 0"),
    (f"{BATCH}self.running[-1].pages = self.running[0].pages", LEAKS + "in 2"),
    (f"{BATCH}its[0] = Chunk(its[0][0], 1, 2)", "request 0: .*'chunks'.*2 tokens from 1"),
    (f"{BATCH}its.append(its[0])", "request 0: .*'chunks'.*another"),
    (f"{BATCH}del its[: len(its) > 1]", "request 0: .*'no decode dropped'.* 1 others"),
    ("schedule(self): return []", ENDS + "returned .*nothing to do"),
    ("schedule(self): return {}['none']", ENDS + "own.py line 3: KeyError: 'none'"),
    (f"schedule(self): list(map(self.preempt, self.prefilling())); {DONE}", ENDS + "last new one"),
]


def check(name, machine=GPU, chunk=8):
    sizes = dict(chunk=chunk, max_batch=3, max_len=64, page_size=4, pages=128)
    alone = machine.serve(EngineConfig("request-level", **sizes), ARRIVALS).completions
    play.check_rules(machine, EngineConfig(name, **sizes), "a load", ARRIVALS, alone)


@pytest.mark.parametrize("text, message", BROKEN)
def test_the_rule_that_is_broken_is_named_with_iteration_and_request(text, message, tmp_path):
    (tmp_path / "own.py").write_text(f"{OWN}{text}" + "\n    return its" * ("its" in text))
    where = r"own.py:Own on 'a load', (128|16) pages, iteration \d+, "
    with pytest.raises(ValueError, match=where + message):
        check(f"{tmp_path}/own.py:Own")


def test_the_engine_holds_tokens_to_those_of_others(tmp_path):
    swap = "if len(b.pages) == len(a.pages): a.pages, b.pages = b.pages, a.pages\n    return its"
    (tmp_path / "own.py").write_text(
        f"{OWN}{BATCH}a, b = self.running[0], self.running[-1]\n    {swap}"
    )
    check(f"{tmp_path}/own.py:Own", chunk=99)  # a simulation sees nothing wrong
    with pytest.raises(ValueError, match="request 0: .*'same tokens in any company'"):
        check(f"{tmp_path}/own.py:Own", ENGINE, chunk=99)


@pytest.mark.parametrize("name", [*POLICIES, TEMPLATE])
def test_every_policy_keeps_the_rules(name):
    check(name)


def test_shortest_first_wins_at_the_median_and_pays_at_the_tail():
    machine = play.SimulatedMachine(Namespace(**play.GPU))
    config = EngineConfig(TEMPLATE, 512, 32, 4096, page_size=128, pages=512)
    arrivals = play.make_loads(machine.base, 4096, 100)["bursts of 20"]
    found = run.plan(["sarathi-serve", TEMPLATE], [128], config)
    theirs, ours = (play.score(GPU, its, arrivals, 0.08) for its in found.values())
    assert ours["p50_ttft_s"] < 0.7 * theirs["p50_ttft_s"]
    assert ours["p99_ttft_s"] > 1.5 * theirs["p99_ttft_s"]
    words = play.verdict(ours, theirs)
    assert words.startswith("wins P50 TTFT s (") and "; pays P99 TTFT s (" in words
    assert play.verdict(ours, ours) == "wins nothing; pays nothing"
    assert play.verdict(ours, theirs | {"busy": True}) == measure.TOO_BUSY


@pytest.mark.parametrize("options", [[], ["--real"]])
def test_the_command_prints_draws_and_writes_a_scoreboard(options, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(play, "POLICIES", FEW)
    monkeypatch.setattr(serving, "describe_machine", lambda *_: MACHINE)
    monkeypatch.setattr(run, "measure_base", lambda *_: (run.Base(0.01, 1e-4, 32, 256), 0.0))
    monkeypatch.setitem(play.GPU, "requests", 21)
    if options:  # in real time one load will do
        monkeypatch.setattr(play, "make_loads", lambda *_: {"a load": ARRIVALS[:1] + LATER})
    files = [f"--json={tmp_path}/p.json", f"--plot={tmp_path}/p.png"]
    named = [*FEW, "ShortestFirst"]
    bench.main(["play", TEMPLATE, *options, *files])
    text, report = capsys.readouterr().out, json.loads((tmp_path / "p.json").read_text())
    assert len(report["loads"]) == (1 if options else 3)
    for load, board in report["loads"].items():
        assert [*board] == named and f"\n{load}: " in text
        assert all((row["capacity_qps"] is None) == bool(options) for row in board.values())
        assert f"\n{load}, ShortestFirst beside sarathi-serve: " in text
    assert (tmp_path / "p.png").stat().st_size > 10_000 and f"wrote {tmp_path}/p.png" in text
    assert ("capacity: " in text) != bool(options)


def test_two_files_with_a_class_of_one_name_are_two_policies(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(play, "POLICIES", FEW)
    monkeypatch.setattr(play, "make_loads", lambda *_: {"a load": ARRIVALS[:1] + LATER})
    monkeypatch.setattr(play, "verdict", lambda ours, theirs: ours["policy"])
    monkeypatch.setattr(play, "SCORES", {"policy": (("policy", ""), min)})
    names = [f"{tmp_path}/{file}.py:ShortestFirst" for file in ("one", "two")]
    for file in ("one", "two"):
        (tmp_path / f"{file}.py").write_text(Path(TEMPLATE.partition(":")[0]).read_text())
    monkeypatch.setattr(play, "score", lambda m, c, *_: {"policy": c.policy, "busy": False})
    bench.main(["play", ",".join(names)])
    text = capsys.readouterr().out
    assert all(f"a load, {name} beside sarathi-serve: {name}\n" in text for name in names)


def test_a_dot_is_where_the_score_is(tmp_path):
    board = {"vllm": dict.fromkeys(play.SCORES, 2.0), "Mine": dict.fromkeys(play.SCORES)}
    board["vllm"]["capacity_qps"] = run.Bounded(2.0, "below")
    figure = plot_scoreboards({"a load": board}, play.SCORES, MACHINE, tmp_path / "p.png")
    dots = [axis.collections[0].get_offsets().tolist() for axis in figure.axes]
    assert dots == 4 * [[[2.0, 0.0], [None, None]]]
    hollow = [axis.collections[0].get_facecolor()[0].tolist() == [1] * 4 for axis in figure.axes]
    assert hollow == [True, False, False, False]
    names = [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
    assert names == ["vllm (2023)", "Mine"]
