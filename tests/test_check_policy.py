"""The rule that a policy breaks is named; policies of one's own are shown beside others."""

import re
from argparse import Namespace
from functools import cache
from pathlib import Path

import pytest

import bench
from cli.console import explain
from config import EngineConfig
from lab.commands import explore
from lab.measure import load_run as run
from lab.measure.workload import Arrival, prompts
from lab.simulator.cost_model import CostModel
from lab.simulator.simulation import simulate
from policies import POLICIES
from tests.check_policy import main, referees
from tests.helpers import tiny_model

TEMPLATE = "policies/template.py:ShortestFirst"
COST, MODEL = CostModel.named("llama3-8b"), tiny_model(max_positions=64)
ARRIVALS = [Arrival(0.0, 9 + i, 12) for i in range(6)]
PROMPTS = prompts(ARRIVALS, 61, 0)
GPU = Namespace(serve=lambda *its, **more: simulate(COST, *its, **more).run)
ENGINE = Namespace(serve=lambda *its, **more: run.serve(MODEL, *its, PROMPTS, **more))
ALIKE = [[5] * arrival.prompt_len for arrival in ARRIVALS]
SHARING = Namespace(serve=lambda *its, **more: simulate(COST, *its, ALIKE, **more).run)
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


TAKEN = (
    "free(r.pages); self.pages.acquire(self.running[0].pages); r.pages = self.running[0].pages[:]"
)
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
        runs.append(machine.serve(config, ARRIVALS, recorder=referees(f"a load, {pages} pages")))
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


@pytest.mark.parametrize(
    "text, said",
    [
        (BROKEN[2][0], "tight memory, iteration .*'nothing lost'"),  # who is preempted
        (EARLY + "\n    return its", "ample memory, prefix caching, iteration .*'chunks'"),
    ],
)
def test_the_program_names_the_policy_that_breaks_a_rule_and_the_load_in_one_line(
    text, said, tmp_path, capsys
):
    (tmp_path / "own.py").write_text(f"{OWN}{text}")
    names = f"{TEMPLATE},{tmp_path}/own.py:Own"
    with pytest.raises(ValueError) as broken:
        main([names])
    line = rf"error: {tmp_path}/own.py:Own, chunk \d+, {said}.*"
    assert re.fullmatch(line, explain(broken.value))
    line = rf"{TEMPLATE} keeps all rules: nothing lost, .*, everybody ends \([\d,]{{5,}} iter.*\n"
    assert re.fullmatch(line, capsys.readouterr().out)


def test_a_policy_that_there_is_not_is_refused_in_one_line(capsys):
    with pytest.raises(SystemExit):
        main(["my_own.py:Mine"])
    error = capsys.readouterr().err
    assert "tests.check_policy: error: " in error and "there is no file my_own.py" in error


def explored(tmp_path, monkeypatch, names):
    """The names of the runs on the page of `bench.py explore`, for policies of one's own alone."""
    monkeypatch.setattr(explore, "POLICIES", ())
    monkeypatch.setattr(explore, "LOADS", {"heavy": 1.6})
    seen, page = [], explore.page
    monkeypatch.setattr(
        explore, "page", lambda *its, **more: seen.extend(its[2]) or page(*its, **more)
    )
    bench.main(["explore", names, f"--html={tmp_path}/e.html"])
    text = (tmp_path / "e.html").read_text()
    assert all(name in text for name in seen)
    return seen


def test_explore_ends_with_the_line_where_a_policy_fails(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(f"{OWN}schedule(self): return {{}}['none']")
    with pytest.raises(KeyError) as failed:
        explored(tmp_path, monkeypatch, f"{tmp_path}/own.py:Own")
    assert explain(failed.value) == f"error: {tmp_path}/own.py line 3: KeyError: 'none'"


def test_two_files_with_a_class_of_one_name_are_two_policies(tmp_path, monkeypatch):
    for file in ("one", "two"):
        (tmp_path / f"{file}.py").write_text(Path(TEMPLATE.partition(":")[0]).read_text())
    names = [f"{tmp_path}/{file}.py:ShortestFirst" for file in ("one", "two")]
    shown = dict.fromkeys(
        name.split(" | ")[0] for name in explored(tmp_path, monkeypatch, ",".join(names))
    )
    assert [*shown] == names  # "ShortestFirst" would be either
