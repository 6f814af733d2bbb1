"""The exercises: references pass, stubs fail, and typical mistakes are named."""

import ast
import json
import re
import subprocess
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from exercises import __main__ as program
from exercises import guards as custom
from exercises import problems
from exercises.__main__ import main, parse_args
from exercises.catalog import EXERCISES
from exercises.loads import MAX_PAGES, LoadRequest, random_load, shrink, small_loads
from exercises.lockstep import Trial
from scheduler import SarathiServe
from tests import mended_policies
from tests.exercise_solutions import IMPORTS, OTHERS, SOLUTIONS, WRONG
from tests.pages import opened

pytestmark = pytest.mark.usefixtures("little_garbage")
ROOT = Path(__file__).parents[1]
WRITTEN = [exercise for exercise in EXERCISES if not exercise.complaint]
MENDS = [exercise for exercise in EXERCISES if exercise.complaint]
RIGHT = {number: [IMPORTS + source] for number, source in SOLUTIONS.items()}
for number, source in OTHERS.items():
    RIGHT[number].append(IMPORTS + source)
for number, sources in mended_policies.RIGHT.items():
    RIGHT[number] = [mended_policies.IMPORTS + source for source in sources]
WITH_TITLE = {"ids": lambda exercise: exercise.title}


def call(argv, capsys):
    """(exit status, what is printed) of a command line."""
    status = main(parse_args([str(word) for word in argv]))
    return status, capsys.readouterr().out


@pytest.fixture(autouse=True)
def every_machine_tries_as_many_loads(monkeypatch):
    """Loads shrink for 500 tries, however long these take."""
    clock = count(step=problems.SHRINK_S / 500)
    monkeypatch.setattr(problems, "time", SimpleNamespace(process_time=lambda: next(clock)))


def check(number, source, folder, capsys, *options):
    """(exit status, what is printed) for a solution."""
    file = folder / f"exercise_{number}.py"
    file.write_text(source.lstrip(), "utf-8")
    custom._run_file.cache_clear()
    return call([number, "--file", file, *options], capsys)


def replaced(number, old, new):
    """A solution with a mistake."""
    assert old in SOLUTIONS[number]
    return IMPORTS + SOLUTIONS[number].replace(old, new)


@pytest.mark.parametrize(
    "number, source", [(number, source) for number in RIGHT for source in RIGHT[number]]
)
def test_a_right_solution_passes_and_gets_the_answer(number, source, tmp_path, capsys):
    own = ["--own"] if number in SOLUTIONS else []  # it needs no answer of this repository
    status, text = check(number, source, tmp_path, capsys, *own)
    assert status == 0, text
    assert "it holds" in text and "The answer to the question: " in text


@pytest.mark.parametrize(
    "number, source, message",
    [(number, replaced(number, old, new), message) for number, old, new, message in WRONG]
    + [
        (number, mended_policies.IMPORTS + s, message)
        for number, s, message in mended_policies.WRONG
    ],
)
def test_a_typical_mistake_is_named(number, source, message, tmp_path, capsys):
    status, text = check(number, source, tmp_path, capsys)
    assert status == 1 and re.search(message, text), text
    assert " line " not in text or f"For a hint: `python -m exercises {number} --hint`" in text


@pytest.mark.parametrize("exercise", WRITTEN, **WITH_TITLE)
def test_a_stub_fails_in_one_line(exercise, capsys):
    stub = exercise.file.read_text("utf-8")
    if "raise NotImplementedError" not in stub:
        pytest.skip("it is solved here")
    line = 1 + stub[: stub.index("raise NotImplementedError")].count("\n")
    name = exercise.file.relative_to(Path.cwd())
    assert call([exercise.number], capsys) == (1, f"{name} line {line}: not written yet\n")


STALL_FREE = "from scheduler import *\n\nclass StallFree(SarathiServe):\n"
BATCH = "    def schedule(self):\n        batch = super().schedule()\n"
BROKEN = [  # (a part of a solution of exercise 6, the line that is named, the message)
    ("def schedule(self):\n      while True: pass", 5, "a loop without an end?"),
    (
        f"{BATCH} self.running[0].tokens.append(3); return batch",
        4,
        "changes the tokens of request 0",
    ),
    (f"{BATCH} self.max_batch += 1; return batch", 4, "it changes chunk, max_batch or max_len"),
    ("def __init__(self, *args, **options): pass", None, "AttributeError: "),
    ("def schedule(self:", 4, "SyntaxError"),
]  # what else a policy may do: test_check_policy.py


@pytest.mark.parametrize("part, line, message", BROKEN)
def test_a_solution_that_cannot_go_on_gets_one_line(part, line, message, tmp_path, capsys):
    part = part.replace("\n batch", "\n        batch").replace("\n self", "\n        self")
    source = STALL_FREE + (part if part.startswith(" ") else f"    {part}") + "\n"
    status, text = check(6, source, tmp_path, capsys)
    file = f"{tmp_path}/exercise_6.py"
    assert status == 1 and text.count("\n") == 1 and message in text, text
    assert text.startswith(f"{file} line {line}: " if line else file)


def test_a_file_or_a_class_that_is_not_there_is_named(tmp_path, capsys):
    file = tmp_path / "none.py"
    assert call([6, "--file", file], capsys) == (1, f"{file}: there is no such file\n")
    status, text = check(6, "import scheduler\n", tmp_path, capsys)
    assert status == 1 and text.endswith(": no class StallFree(Scheduler) in it\n")


def test_no_page_is_written_where_no_batch_was_made(tmp_path, capsys):
    page = tmp_path / "blank.html"
    for statement in ("raise NotImplementedError", "return Batch()"):
        source = f"{STALL_FREE}    def schedule(self): {statement}\n"
        status, text = check(6, source, tmp_path, capsys, "--html", page)
        assert status == 1 and not page.exists() and "To see it" not in text
        assert text.endswith("no page: the policy made no batch\n")


@pytest.mark.parametrize(
    "argv, message",
    [
        ("17", "at most 16"),
        ("1 --iteration 2", "from 11 on"),
        ("--json", "--all"),
        ("--hint", "say which"),
        ("1 --hint 3", "2"),
    ],
)
def test_a_wrong_command_line_ends_in_one_line(argv, message, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_args(argv.split())
    error = capsys.readouterr().err
    assert ended.value.code == 2 and message in error and error.count("\n") == 1


def test_an_empty_batch_is_a_decision_that_differs(tmp_path, capsys):
    source = f"{STALL_FREE}    def schedule(self): return Batch()\n"
    status, text = check(6, source, tmp_path, capsys)
    assert status == 1
    assert "| 0 <     | waits, prompt of 1 | waits    | admitted, token 0 |" in text
    assert "1 of C = 1 are not used, and request 0 gets no token" in text


def test_leaked_pages_are_found_where_both_decide_the_same(tmp_path, capsys):
    source = replaced(6, "return batch", "self.pages.allocate(1)\n        return batch")
    status, text = check(6, source, tmp_path, capsys)
    assert status == 1
    assert "The rule that no page is leaked is broken: page 1 was allocated, and no running" in text
    assert "did you preempt the request that it was for?" in text and "request -" not in text


# ---- All of them, and a grader -------------------------------------------------------------------


@pytest.fixture
def solved(tmp_path, monkeypatch):
    """A folder of solutions, which are the files of the exercises."""
    for exercise in EXERCISES:
        file = tmp_path / f"{exercise.number}.py"
        file.write_text(RIGHT[exercise.number][-1], "utf-8")
        monkeypatch.setitem(vars(exercise), "file", file)
    custom._run_file.cache_clear()
    return tmp_path


def test_all_are_listed_and_the_next_one_is_named(solved, capsys):
    status, text = call([], capsys)
    assert status == 0
    assert re.findall(r"(?m)^ +(\d+) .* solved$", text) == [str(e.number) for e in EXERCISES]
    stub = "raise NotImplementedError"
    (solved / "3.py").write_text(replaced(3, "batch = Batch(self.max_len)", stub), "utf-8")
    (solved / "7.py").write_text(replaced(7, "self.running[-1]", "self.running[0]"), "utf-8")
    custom._run_file.cache_clear()
    status, text = call([], capsys)
    assert status == 1 and text.count(" solved\n") == 14
    assert re.search(r" 3  prompts first and alone +not written yet\n", text)
    assert re.search(r" 7  out of memory +not yet\n", text)
    assert f"Next: {solved}/3.py. " in text and "`python -m exercises 3`" in text


def test_a_grader_gets_a_line_for_each_whatever_a_solution_does(solved, capsys):
    (solved / "1.py").write_text("import os\nos._exit(0)\n", "utf-8")
    (solved / "2.py").write_text("print('{}')\n" + RIGHT[2][0], "utf-8")
    (solved / "3.py").write_text("class PromptsFirst: pass\n", "utf-8")
    status, text = call(["--all", "--json"], capsys)
    rows = [json.loads(line) for line in text.splitlines()]
    assert status == 1 and [row["exercise"] for row in rows] == [e.number for e in EXERCISES]
    unsolved = {row["exercise"]: row["sentence"] for row in rows if not row["solved"]}
    assert unsolved == {
        1: "its check has ended without a result",
        3: "no class PromptsFirst(Scheduler) in it",
    }


def test_a_check_that_does_not_end_is_ended(solved, capsys, monkeypatch):
    (solved / "1.py").write_text(
        "import time\nwhile True:\n try: time.sleep(9)\n except: pass\n", "utf-8"
    )
    monkeypatch.setattr(program, "CHECK_LIMIT_S", 1.0)
    monkeypatch.setattr(program, "EXERCISES", EXERCISES[:1])
    status, text = call(["--all", "--json"], capsys)
    assert status == 1 and json.loads(text)["sentence"] == "its check has not ended after 1 s"


ANSWERED = [  # (exercise, a solution that uses an answer of this repository, which one)
    (1, "class RequestLevel(scheduler.RequestLevel): pass", "RequestLevel.schedule"),
    (4, "class CutAPrompt(CutsPrompts): pass", "Batch.add"),
    (6, "class StallFree(SarathiServe):\n  def schedule(self): return super().schedule()", "Sarat"),
    (7, "class OutOfMemory(SarathiServe): pass", "Scheduler.grow_decodes"),
    (10, "from policies.remedies import *\nclass OneLongPrompt(EqualProgress): pass", "EqualPro"),
    (13, "class NothingLeft(SarathiServe): pass", "Bookkeeping.plan_admission"),
    (
        8,
        "class SharedPages(SarathiServe):\n  def plan_admission(self, r):\n"
        "    found = self.pages.find(r)\n"
        "    return Admission(found, self.pages.needed(len(r.tokens)) - len(found))",
        "CachedPages.find",
    ),
]


@pytest.mark.parametrize("number, source, answer", ANSWERED)
def test_an_answer_of_this_repository_is_out_of_reach(number, source, answer, tmp_path, capsys):
    source = f"import scheduler\n{IMPORTS}\n{source}\n"
    assert check(number, source, tmp_path, capsys)[0] == 0
    status, text = check(number, source, tmp_path, capsys, "--own")
    assert status == 1 and answer in text and "is out of reach: write your own" in text
    assert check(number, source, tmp_path, capsys)[0] == 0  # and in reach again


def test_the_program_needs_no_torch_and_exits_with_the_status_of_the_check(tmp_path):
    file = tmp_path / "mine.py"
    page = tmp_path / "page.html"
    argv = [sys.executable, "-X", "importtime", "-m", "exercises", "1"]
    for source, status in ((RIGHT[1][0], 0), (replaced(1, "if not", "if"), 1)):
        file.write_text(source, "utf-8")
        done = subprocess.run(
            [*argv, "--file", file, "--html", page], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == status and page.exists()
        modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        assert "scheduler" in modules and not {"torch", "numpy", "matplotlib"} & modules


# ---- Texts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("exercise", EXERCISES, **WITH_TITLE)
def test_there_are_two_hints_and_a_docstring_with_all_parts(exercise, capsys):
    number = exercise.number
    hints = [call([number, "--hint", step], capsys) for step in (1, 2)]
    assert call([number, "--hint"], capsys) == hints[0] != hints[1]
    text = exercise.file.read_text("utf-8")
    docstring = ast.get_docstring(ast.parse(text))
    parts = ["Source: ", "**Idea.**", "**Stays true.**", "**Predict.**", "**You may use**"]
    if exercise.complaint:
        parts = ["Mend it: ", "Source: ", "**Complaint.**", "**Find.**", "**Mend.**"]
    places = [docstring.index(part) for part in [f"Exercise {number}. ", *parts]]
    assert places == sorted(places)


ANSWERS = {  # found by hand
    1: "in iteration 31. Request 0 ended in iteration 2, request 1 in 30;",
    2: "in iteration 3. Request 0 ended in iteration 2, request 1 in 30;",
    3: "3 iterations. More prompts",
    4: "3 iterations, with chunks of 16, then 4 + 12, then 8 tokens.",
    5: "4 iterations, of 10, 10, 10, 10 tokens of the prompt.",
    6: "2 iterations: ",
    7: "1 preemption. Request 0 ends in iteration 16, ",
    8: "4: ",
    9: "the chunks have 29, ",
}


@pytest.mark.parametrize("number", ANSWERS)
def test_the_answer_to_a_question_is_the_one_found_by_hand(number, tmp_path, capsys):
    status, text = check(number, RIGHT[number][0], tmp_path, capsys)
    assert f"The answer to the question: {ANSWERS[number]}" in text


def test_the_figures_of_the_readme_are_those_that_are_printed(tmp_path, capsys):
    readme = (ROOT / "exercises/README.md").read_text("utf-8")
    figures = r"(longest gap|longest TTFT|mean TTFT|computed again) ([\d.]+) -> ([\d.]+)"
    stated = 0
    for exercise in EXERCISES:
        number = exercise.number
        (row,) = re.findall(rf"(?m)^\| {number} \|.*$", readme)
        if exercise.complaint:
            _, text = call([number], capsys)
        else:
            _, text = check(number, RIGHT[number][0], tmp_path, capsys)
        for name, before, after in re.findall(figures, row):
            (cells,) = re.findall(rf"(?m)^\| {name}.*?\| +([\d.]+) \| +([\d.]+) \|", text)
            yours_first = (before, after) if exercise.complaint else (after, before)
            assert cells == yours_first, row
            stated += 1
    assert stated == 28


# ---- Mend it -------------------------------------------------------------------------------------

FIRST_WRONG = {11: 9, 12: 9, 13: 9, 14: 7, 15: 25, 16: 5}  # found by hand in the timelines


@pytest.mark.parametrize("exercise", MENDS, **WITH_TITLE)
def test_a_fault_is_a_complaint_with_figures_and_a_timeline(exercise, capsys):
    status, text = call([exercise.number], capsys)
    assert status == 1 and f'A user: "{exercise.complaint.quote}"' in text
    assert "P prefill, d decode, x preempted, . waits" in text
    assert len(re.findall(r"(?m)^  request +\d+  ", text)) == len(exercise.complaint.load.requests)
    assert f"`python -m exercises {exercise.number} --iteration N`" in text


@pytest.mark.parametrize("exercise", MENDS, **WITH_TITLE)
def test_the_first_wrong_iteration_is_asked_for(exercise, tmp_path, capsys):
    number = FIRST_WRONG[exercise.number]
    guesses = (number - 1, 1, "later"), (number + 1, 1, "earlier"), (number, 0, "yes")
    for guess, expected, answer in guesses:
        status, text = call([exercise.number, "--iteration", guess], capsys)
        assert status == expected and answer in text
    status, text = check(
        exercise.number, RIGHT[exercise.number][0], tmp_path, capsys, "--iteration", 1
    )
    assert status == 1 and "there is nothing to find" in text


def test_a_timeline_has_a_sign_for_each_iteration(capsys):
    _, text = call([15], capsys)
    exercise = EXERCISES[14]
    policy = custom.load_policy(str(exercise.file), exercise.class_name)
    trial = Trial(policy, exercise.complaint.load, exercise.seconds)
    trial.run()
    lines = re.findall(r"(?m)^  request +\d+  (.*)$", text)
    for request, signs in zip(trial.requests, lines, strict=True):
        preempted = sum(request.id in it.preempted for it in trial.iterations[: len(signs)])
        chunks = [c for i in trial.iterations[:100] for c in i.chunks if c.request_id == request.id]
        decodes = sum(chunk.is_decode for chunk in chunks)
        counts = preempted, decodes, len(chunks) - decodes
        assert tuple(map(signs.count, "xdP")) == counts


# ---- Loads and pages -----------------------------------------------------------------------------


def test_shrinking_leaves_only_what_makes_a_load_fail():
    load = random_load(Random("a load"), size=1.0)
    assert len(load.requests) > 3

    def fails(load):
        return any(r.prompt_len >= 7 and r.output_len >= 2 for r in load.requests)

    smallest = shrink(load, fails)
    assert smallest.requests == (LoadRequest(arrival=0, prompt_len=7, output_len=2),)
    assert (smallest.chunk, smallest.max_batch, smallest.pages) == (1, 1, MAX_PAGES)

    def fails_in_little_memory(load):
        return load.pages <= MAX_PAGES // 2

    tight = replace(load, pages=-(-load.max_len // 8), page_size=8)
    smallest = shrink(tight, fails_in_little_memory)
    assert smallest.pages == 1 and smallest.max_len == 2


def test_the_loads_go_from_tiny_to_tight():
    loads = list(small_loads(6))
    assert len(loads[0].requests) == 2 and max(len(load.requests) for load in loads) == 8
    assert {load.chunk for load in loads} >= {1, 2, 20}
    trials = [Trial(SarathiServe, load) for load in loads]
    for trial in trials:
        trial.run()
    preempting = sum(any(it.preempted for it in trial.iterations) for trial in trials)
    assert preempting >= 10
    assert any(it.waiting for trial in trials for it in trial.iterations)


def test_an_error_has_the_page_of_the_question(tmp_path, capsys):
    page = tmp_path / "difference.html"
    source = replaced(9, "return len(decodes) + length", "return self.chunk / 3")
    status, text = check(9, source, tmp_path, capsys, "--html", page)
    assert status == 1 and f"wrote {page}, open file://" in text
    runs = page.read_text("utf-8").partition('"runs":')[2]
    assert re.findall(r'"name": "([\w-]+)"', runs) == ["yours", "sarathi-serve"]


def test_the_page_shows_both_decisions_in_the_iteration_that_was_named(browser, tmp_path, capsys):
    page = tmp_path / "difference.html"
    old, new = next(row[1:3] for row in WRONG if row[0] == 5 and "before a new one" in row[3])
    status, text = check(5, replaced(5, old, new), tmp_path, capsys, "--html", page)
    iteration = int(re.search(r"iteration (\d+)\.", text)[1])
    with opened(browser, f"file://{page}") as tab:
        chunks = "k => panes.map(pane => pane.run.iterations[k].chunks)"
        yours, reference = tab.evaluate(chunks, iteration - 1)
        assert tab.text_content("#position").startswith(f"iteration {iteration} of ")
    assert yours != reference
    (row,) = re.findall(r"(?m)^\| 0 <.*\| +(\S.*?) +\| +(\S.*?) +\|$", text)
    assert row[1] == f"token {reference[0][1]}"
