"""Policies of one's own are compared with all others, and the rule that one breaks is named."""

import json
from argparse import Namespace
from functools import cache
from pathlib import Path

import pytest

import bench
from experiments import run
from experiments.workload import Arrival, prompts
from policies import POLICIES
from policies.config import EngineConfig
from simulator import explore, play
from simulator.cost_model import CostModel
from simulator.simulation import simulate
from tests.helpers import tiny_model

TEMPLATE = "policies/template.py:ShortestFirst"
COST, MODEL = CostModel.named("llama3-8b"), tiny_model(max_positions=64)
ARRIVALS = [Arrival(0.0, 9 + i, 12) for i in range(6)]
LATER, PROMPTS = [Arrival(0.1, 20, 3)], prompts(ARRIVALS, 61, 0)
GPU = Namespace(serve=lambda *its, **more: simulate(COST, *its, **more).run)
ENGINE = Namespace(serve=lambda *its, **more: run.serve(MODEL, *its, PROMPTS, **more))
ALIKE = [[5] * arrival.prompt_len for arrival in ARRIVALS]
SHARING = Namespace(serve=lambda *its, **more: simulate(COST, *its, ALIKE, **more).run)
FEW = {name: POLICIES[name] for name in ("request-level", "sarathi-serve")}
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


TAKEN = "free(r.pages); self.pages.share(self.running[0].pages); r.pages = self.running[0].pages[:]"
OTHERS = f"{BATCH}for r in self.running[1:2]: self.pages.{TAKEN}"
EARLY = "admit(self):\n    if its := super().admit(): its.num_computed -= its.num_computed > 0"
SHARED = [  # (the method of a policy, whether pages may be shared, what is said of it)
    (OTHERS, False, LEAKS + "in 2 block tables, and must be in 1"),
    (OTHERS, True, r"request 0: .*'chunks'.* page \d is written, and others read it"),
    (EARLY, True, r"request \d: .*'chunks'.* page \d is written, and others read it"),
]


def check(name, machine=GPU, **more):
    """Serve with much memory and with little under a referee: the tokens of both runs."""
    runs = []
    for pages in (128, 16):
        sizes = dict(max_batch=3, max_len=64, page_size=4, pages=pages)
        config = EngineConfig(name, 8, **sizes, **more)
        runs.append(machine.serve(config, ARRIVALS, referee=f"a load, {pages} pages"))
    return [[c.tokens for c in seen.completions] for seen in runs]


@cache
def said_alone():
    """What is said under a policy that is beyond doubt."""
    return check("request-level", ENGINE)


@pytest.mark.parametrize("text, message", BROKEN)
def test_the_rule_that_is_broken_is_named_with_iteration_and_request(text, message, tmp_path):
    (tmp_path / "own.py").write_text(f"{OWN}{text}" + "\n    return its" * ("its" in text))
    with pytest.raises(ValueError, match=r"^a load, (128|16) pages, iteration \d+, " + message):
        check(f"{tmp_path}/own.py:Own")


@pytest.mark.parametrize("text, sharing, message", SHARED)
def test_pages_are_shared_by_prefix_caching_only_and_nobody_writes_there(
    text, sharing, message, tmp_path
):
    (tmp_path / "own.py").write_text(f"{OWN}{text}\n    return its")
    with pytest.raises(ValueError, match=r"^a load, 128 pages, iteration \d+, " + message):
        check(f"{tmp_path}/own.py:Own", SHARING, prefix_caching=sharing)
    check("sarathi-serve", SHARING, prefix_caching=sharing)


@pytest.mark.parametrize("name", [*POLICIES, TEMPLATE])
def test_every_policy_keeps_the_rules_and_an_engine_says_the_same_in_any_company(name):
    check(name)
    assert check(name, ENGINE) == said_alone()


def test_the_commands_are_referees_of_ones_own_with_little_memory_too(tmp_path, monkeypatch):
    monkeypatch.setattr(play, "POLICIES", FEW)
    loses = BROKEN[2][0]  # who is preempted
    (tmp_path / "own.py").write_text(f"{OWN}{loses}")
    with pytest.raises(ValueError, match="own.py:Own on 'steady chat', 64 pages, .*'nothing lost'"):
        bench.main(["play", f"{tmp_path}/own.py:Own"])
    monkeypatch.setattr(explore, "LOADS", {"heavy": 1.6})
    where = r"Own \| 128 \| heavy, .* \| tight, 10,240 tokens, iteration \d+, .*'nothing lost'"
    with pytest.raises(ValueError, match=where):
        bench.main(["explore", f"{tmp_path}/own.py:Own", f"--html={tmp_path}/e.html"])


def test_shortest_first_wins_at_the_median_and_pays_at_the_tail():
    machine = play.SimulatedMachine(Namespace(**play.GPU))
    config = EngineConfig(TEMPLATE, 512, 32, 4096, page_size=128, pages=512)
    arrivals = play.make_loads(machine.base, 4096, 100)["bursts of 20"]
    found = run.plan(["sarathi-serve", TEMPLATE], [128], config)
    theirs, ours = (play.score(machine, its, arrivals, 0.08) for its in found.values())
    assert ours["p50_ttft_s"] < 0.7 * theirs["p50_ttft_s"]
    assert ours["p99_ttft_s"] > 1.5 * theirs["p99_ttft_s"]
    words = play.verdict(ours, theirs)
    assert words.startswith("wins P50 TTFT s (") and "; pays P99 TTFT s (" in words
    assert play.verdict(ours, ours) == "wins nothing; pays nothing"


def test_the_command_prints_and_writes_a_scoreboard(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(play, "POLICIES", FEW)
    monkeypatch.setitem(play.GPU, "requests", 21)
    bench.main(["play", TEMPLATE, f"--json={tmp_path}/p.json"])
    text, report = capsys.readouterr().out, json.loads((tmp_path / "p.json").read_text())
    assert len(report["loads"]) == 3 and f"\nwrote {tmp_path}/p.json" in text
    for load, board in report["loads"].items():
        assert [*board] == [*FEW, "ShortestFirst"] and f"\n{load}: " in text
        assert all(row["capacity_qps"] > 0 for row in board.values())
        assert f"\n{load}, ShortestFirst beside sarathi-serve: " in text


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
    text, shown = capsys.readouterr().out, ["ShortestFirst", names[1]]  # both are seen
    for own, name in zip(shown, names):
        assert f"a load, {own} beside sarathi-serve: {name}\n" in text
