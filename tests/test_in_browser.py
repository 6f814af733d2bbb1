"""What the schedule page runs inside a browser, under CPython. In a browser: test_site.py."""

import json
import subprocess
import sys

import pytest

from exercises.catalog import EXERCISES
from lab.explore.answer import answer
from lab.explore.bundle import bundle
from lab.explore.runs import Load, record_run
from lab.measure.arrival import Arrival
from tests.exercise_solutions import IMPORTS, SOLUTIONS

SLO_S = 0.07
ARRIVALS = [Arrival(0.05 * i, 300 + 700 * (i % 3), 20 + i) for i in range(12)]
LOAD = Load(ARRIVALS)
TIGHT = Load(ARRIVALS, tokens=4096)
SHARING = [[i % 2] * arrival.prompt_len for i, arrival in enumerate(ARRIVALS)]
MINE = "from scheduler import Request, SarathiServe\n\n\nclass Mine(SarathiServe):\n"
LOST = "    def admit(self):\n        return self.waiting.popleft() if self.waiting else None\n"


def asked(source, load=LOAD, **more):
    """A question: about a run, or about the exercise of a `number`."""
    kind = "exercise" if "number" in more else "run"
    question = dict(kind=kind, source=source, load=load.to_json(), chunk="256", slo_s=SLO_S)
    return json.dumps(question | more)


def run(source, load=LOAD):
    """The answer to a question about a run."""
    return json.loads(answer(asked(source, load)))


def check(number, source):
    """The answer to a question about an exercise."""
    return json.loads(answer(asked(source, number=number)))


@pytest.mark.parametrize(
    "load",
    [
        LOAD,
        TIGHT,
        Load(ARRIVALS, pp=2),
        Load(ARRIVALS, prompts=SHARING, letters=True),
    ],
    ids=["ample", "tight", "pipeline", "shared"],
)
def test_a_policy_from_the_page_has_the_run_of_explore(load):
    reply = run(MINE + '    """As it is."""\n', load)
    expected = record_run("sarathi-serve", "256", load, SLO_S)
    assert reply["problem"] == "" and reply["policy"] == "Mine" and reply["has_chunk"]
    assert reply["records"] == json.loads(json.dumps(expected.records))
    named = {"policy": "Mine", "note": "As it is."}
    assert reply["settings"] == expected.settings | named
    assert len(reply["records"]) > 2 * len(ARRIVALS)


def test_a_policy_without_chunks_says_so_and_what_it_prints_is_kept():
    reply = run("from scheduler import VLLM\nclass Whole(VLLM): pass\nprint('here')\n")
    assert (reply["problem"], reply["has_chunk"], reply["printed"]) == ("", False, "here\n")


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (MINE + "    x = (\n", "my_policy.py line 5: SyntaxError: '(' was never closed"),
        ("x = 1 / 0\nclass A: pass\n", "my_policy.py line 1: ZeroDivisionError: division by zero"),
        ("x = 1\n", "no policy in it"),
        (MINE + "    def schedule(self):\n        self.x\n", "my_policy.py line 6: Attrib"),
        (MINE + "    def schedule(self):\n        pass\n", "no Batch"),
        (MINE + LOST, "the rule 'nothing lost' is broken"),
        (MINE + "    def __init__(self):\n        pass\n", "unexpected keyword argument"),
        (
            MINE + "    def token_budget(self, d, p):\n        return 0.5\n",
            "cannot be interpreted as an integer",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(source, problem):
    reply = run(source, TIGHT)
    assert problem in reply["problem"]
    assert "\n" not in reply["problem"] and "/tmp" not in reply["problem"]
    assert len(reply["problem"]) < 250


def test_the_run_is_shown_up_to_the_broken_rule():
    source = """from scheduler import SarathiServe
class Drops(SarathiServe):
    def schedule(self):
        batch = super().schedule()
        if len([chunk for chunk in batch if chunk.request.is_decoding]) > 2:
            batch.pop(0)
        return batch
"""
    reply = run(source)
    assert "'no decode dropped'" in reply["problem"] and "iteration" in reply["problem"]
    kept = record_run("sarathi-serve", "256", LOAD, SLO_S).records
    assert 0 < len(reply["records"]) < len(kept)
    assert reply["records"] == json.loads(json.dumps(kept[: len(reply["records"])]))


@pytest.mark.parametrize("number", SOLUTIONS)
def test_an_exercise_is_solved_and_its_stub_is_not(number):
    solved = check(number, IMPORTS + SOLUTIONS[number])
    assert solved["solved"] and solved["line"].endswith("it holds.")
    assert solved["page"].startswith("<!doctype html>")
    stub = check(number, EXERCISES[number - 1].file.read_text("utf-8"))
    assert not stub["solved"] and "not written yet" in stub["line"]
    assert stub["line"].startswith("my_policy.py line")


def test_the_first_difference_from_the_reference_is_shown():
    wrong = SOLUTIONS[6].replace("batch.add_decodes(", "len(")
    assert wrong != SOLUTIONS[6]
    reply = check(6, IMPORTS + wrong)
    assert not reply["solved"] and "\n" not in reply["line"]
    assert "Iteration" in reply["details"] and "reference" in reply["details"]
    assert "python -m" not in reply["details"]
    assert "reference" in reply["page"]


def test_the_bundle_is_enough_without_any_package(tmp_path):
    for path, text in bundle({})["files"].items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")
    questions = [asked(MINE + "    pass\n"), asked(IMPORTS + SOLUTIONS[6], number=6)]
    code = f"""
import sys
sys.path = [{str(tmp_path)!r}, *(path for path in sys.path if "site-packages" not in path)]
from lab.explore.answer import answer
run, exercise = map(answer, {questions!r})
assert '"problem": ""' in run and '"solved": true' in exercise
print(sorted({{"torch", "numpy", "tqdm"}} & set(sys.modules)))
"""
    argv = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr == "" and done.stdout == "[]\n"
