"""What runs in the page's Python, held against the same run outside of it."""

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


def asked(source, load=LOAD, **more):
    """A question: about a run, or about the exercise of a `number`."""
    kind = "exercise" if "number" in more else "run"
    question = dict(
        kind=kind,
        source=source,
        load=load.to_json(),
        chunk="256",
        slo_s=SLO_S,
    )
    return json.dumps(question | more)


def run(source, load=LOAD):
    """The answer to a question about a run."""
    return json.loads(answer(asked(source, load)))


def check(number, source):
    """The answer to a question about an exercise."""
    return json.loads(answer(asked(source, number=number)))


@pytest.mark.parametrize(
    "load", [LOAD, TIGHT, Load(ARRIVALS, pp=2), Load(ARRIVALS, prompts=SHARING, letters=True)]
)
def test_a_policy_from_the_page_has_the_run_of_explore(load):
    reply = run(MINE + '    """As it is."""\n', load)
    expected = record_run("sarathi-serve", "256", load, SLO_S)
    assert reply["problem"] == ""
    assert reply["records"] == json.loads(json.dumps(expected.records))
    assert reply["settings"] == expected.settings | {"policy": "Mine", "note": "As it is."}


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
    assert "'no decode dropped'" in reply["problem"]
    kept = record_run("sarathi-serve", "256", LOAD, SLO_S).records
    assert 0 < len(reply["records"]) < len(kept)
    assert reply["records"] == json.loads(json.dumps(kept[: len(reply["records"])]))


@pytest.mark.parametrize("number", SOLUTIONS)
def test_an_exercise_is_solved_and_its_stub_is_not(number):
    solved = check(number, IMPORTS + SOLUTIONS[number])
    assert solved["solved"]
    assert solved["page"].startswith("<!doctype html>")
    stub = check(number, EXERCISES[number - 1].file.read_text("utf-8"))
    assert not stub["solved"]
    assert "NotImplementedError" in stub["line"]


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
