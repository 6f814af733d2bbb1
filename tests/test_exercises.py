"""The exercises: references pass, stubs fail, and typical mistakes are named."""

import ast
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from exercises.__main__ import main, parse_args
from exercises.catalog import EXERCISES
from exercises.loads import MAX_PAGES, LoadRequest, random_load, shrink, small_loads
from exercises.lockstep import Trial
from policies import custom
from scheduler import SarathiServe
from tests import mended_policies
from tests.exercise_solutions import IMPORTS, OTHERS, SOLUTIONS, WRONG
from tests.pages import opened

ROOT = Path(__file__).parents[1]
WRITTEN = [exercise for exercise in EXERCISES if not exercise.complaint]
NUMBERS = [exercise.number for exercise in WRITTEN]


def check(number, source, folder, capsys, *options):
    """(exit status, what is printed) for a solution."""
    file = folder / f"exercise_{number}.py"
    file.write_text(IMPORTS.strip() + "\n\n" + source.lstrip())
    status = main(parse_args([str(number), "--file", str(file), *options]))
    return status, capsys.readouterr().out


@pytest.mark.parametrize("number", NUMBERS)
def test_a_reference_passes_and_its_question_is_answered(number, tmp_path, capsys):
    status, text = check(number, SOLUTIONS[number], tmp_path, capsys)
    assert "it holds" in text and "The answer to the question: " in text
    assert status == 0


@pytest.mark.parametrize("number", OTHERS)
def test_another_right_solution_passes(number, tmp_path, capsys):
    assert OTHERS[number] != SOLUTIONS[number]
    status, text = check(number, OTHERS[number], tmp_path, capsys)
    assert status == 0, text


@pytest.mark.parametrize("number, old, new, message", WRONG)
def test_a_typical_mistake_is_named(number, old, new, message, tmp_path, capsys):
    source = SOLUTIONS[number]
    assert old in source
    status, text = check(number, source.replace(old, new), tmp_path, capsys)
    assert status == 1
    print(text)
    assert re.search(message, text)


@pytest.mark.parametrize("exercise", WRITTEN, ids=lambda exercise: exercise.title)
def test_a_stub_fails_in_one_line(exercise, capsys):
    stub = exercise.file.read_text("utf-8")
    if "raise NotImplementedError" not in stub:
        pytest.skip("it is solved here")
    assert main(parse_args([str(exercise.number)])) == 1
    line = 1 + stub[: stub.index("raise NotImplementedError")].count("\n")
    name = exercise.file.relative_to(Path.cwd())
    assert capsys.readouterr().out == f"{name} line {line}: not written yet\n"


SCHEDULE = "class StallFree(SarathiServe):\n    def schedule(self):\n"
BROKEN = [  # (a solution of exercise 6, the line of it that is named, the message)
    (f"{SCHEDULE}        super().schedule()", 4, "schedule() returned None: did you forget"),
    (f"{SCHEDULE}        while True: pass", 5, "a loop without an end?"),
    (f"{SCHEDULE}        return [] [0]", 5, "IndexError: list index out of range"),
    (f"{SCHEDULE}        return list(super().schedule())", 4, "returned a list, and must"),
    (f"{SCHEDULE}        exit()", 5, "SystemExit"),
    (
        f"{SCHEDULE}        batch = super().schedule()\n"
        "        batch += batch\n        return batch",
        4,
        "request 0 has two chunks in one batch",
    ),
    (
        f"{SCHEDULE}        batch = super().schedule()\n"
        "        for request in self.running: request.num_computed += request.is_decoding\n"
        "        return batch",
        4,
        "it changes num_computed of request 0 from",
    ),
    (
        f"{SCHEDULE}        batch = super().schedule()\n        batch[0].request.tokens.append(3)\n"
        "        return batch",
        4,
        "it changes the tokens of request 0: only advance() appends one",
    ),
    (
        f"{SCHEDULE}        self.max_batch += 1\n        return super().schedule()",
        4,
        "it changes chunk, max_batch or max_len",
    ),
    (
        f"{SCHEDULE}        batch = super().schedule()\n        batch.append(self.running[0])\n"
        "        return batch",
        4,
        "a batch holds chunks: use batch.add(request), not Request(",
    ),
    (f"{SCHEDULE}        yield", 4, "returned a generator, and must return a Batch"),
    (f"{SCHEDULE}        self.running = None\n        return super().schedule()", 6, "TypeError: "),
    (
        "class StallFree(SarathiServe):\n    def add(self, request):\n        raise SystemExit(0)",
        5,
        "SystemExit: 0",
    ),
    (
        "class StallFree(SarathiServe):\n    def __init__(self, *args, **options):\n        pass",
        None,
        "AttributeError: ",
    ),
    ("class StallFree(SarathiServe:\n    pass", 3, "SyntaxError"),
    ("class StallFree(SarathiServe):\n    def __init__(self): pass", None, "TypeError"),
    (
        "class Other(SarathiServe): pass",
        None,
        ": no class StallFree(Scheduler) in it",
    ),
]


@pytest.mark.parametrize("source, line, message", BROKEN)
def test_a_solution_that_cannot_go_on_gets_one_line(source, line, message, tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(f"from scheduler import SarathiServe\n\n{source}\n")
    assert main(parse_args(["6", "--file", str(file)])) == 1
    text = capsys.readouterr().out
    assert text.count("\n") == 1 and message in text
    assert text.startswith(f"{file} line {line}: " if line else str(file))


MISTAKES = {  # of exercises: what takes the place of a part of the solution, and the message
    3: (
        "        while self.waiting and len(self.waiting[0].tokens) <= batch.left:\n",
        "        for first in sorted(self.waiting, key=lambda r: -r.id):\n"
        "            self.waiting.remove(first)\n"
        "            self.waiting.appendleft(first)\n"
        "            if len(first.tokens) > batch.left:\n"
        "                break\n",
        r"request \d overtakes request \d, which arrived before it and waits",
    ),
    4: ("return length", "return", "returned None, and the batch got .*: did you forget return?"),
}


@pytest.mark.parametrize("number", MISTAKES)
def test_a_mistake_has_a_name_and_an_error_a_hint(number, tmp_path, capsys):
    old, new, message = MISTAKES[number]
    assert old in SOLUTIONS[number]
    status, text = check(number, SOLUTIONS[number].replace(old, new), tmp_path, capsys)
    assert status == 1 and re.search(message, text), text
    assert f"For a hint: `python -m exercises {number} --hint`" in text


def test_no_page_is_written_where_no_batch_was_made(tmp_path, capsys):
    page = tmp_path / "blank.html"
    stub = f"{SCHEDULE}        raise NotImplementedError\n"
    for source in (stub, f"{SCHEDULE}        return Batch()\n"):
        status, text = check(6, source, tmp_path, capsys, "--html", str(page))
        assert status == 1 and not page.exists() and "To see it" not in text
        print(text)
        assert text.endswith("no page: the policy made no batch\n")


def test_a_file_that_is_not_there_is_named(tmp_path, capsys):
    file = tmp_path / "none.py"
    assert main(parse_args(["6", "--file", str(file)])) == 1
    assert capsys.readouterr().out == f"{file}: there is no such file\n"


@pytest.mark.parametrize(
    "argv, message",
    [
        (["17"], "at most 16"),
        (["1", "--iteration", "2"], "from 11 on"),
        (["--json"], "--all"),
        (["--hint"], "say which"),
        (["1", "--hint", "3"], "2"),
    ],
)
def test_a_wrong_command_line_ends_in_one_line(argv, message, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_args(argv)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and message in error and error.count("\n") == 1


def test_an_empty_batch_is_a_decision_that_differs(tmp_path, capsys):
    source = f"{SCHEDULE}        return Batch()\n"
    status, text = check(6, source, tmp_path, capsys)
    assert status == 1
    assert "| 0 <     | waits, prompt of 1 | waits    | admitted, token 0 |" in text
    assert "1 of C = 1 are not used, and request 0 gets no token" in text


def test_leaked_pages_are_found_where_both_decide_the_same(tmp_path, capsys):
    source = SOLUTIONS[6].replace("return batch", "self.pages.allocate(1)\n        return batch")
    status, text = check(6, source, tmp_path, capsys)
    assert status == 1
    assert "The rule that no page is leaked is broken: page 1 was allocated, and no running" in text
    assert "did you preempt the request that it was for?" in text and "request -" not in text


def test_all_are_listed_and_the_next_one_is_named(tmp_path, monkeypatch, capsys):
    for exercise in EXERCISES:
        file = tmp_path / f"{exercise.number}.py"
        source = IMPORTS + SOLUTIONS.get(exercise.number, "")
        if exercise.complaint:
            source = mended_policies.IMPORTS + mended_policies.RIGHT[exercise.number][0]
        file.write_text(source)
        monkeypatch.setitem(vars(exercise), "file", file)
    assert main(parse_args([])) == 0
    assert re.findall(r"(?m)^ +(\d+) .* solved$", capsys.readouterr().out) == [
        str(exercise.number) for exercise in EXERCISES
    ]
    stub = "raise NotImplementedError"
    solution = IMPORTS + SOLUTIONS[3]
    (tmp_path / "3.py").write_text(solution.replace("batch = Batch(self.max_len)", stub))
    wrong = SOLUTIONS[7].replace("self.running[-1]", "self.running[0]")
    (tmp_path / "7.py").write_text(IMPORTS + wrong)
    custom._run_file.cache_clear()
    assert main(parse_args([])) == 1
    text = capsys.readouterr().out
    assert re.search(r" 3  prompts first and alone +not written yet\n", text)
    assert re.search(r" 7  out of memory +not yet\n", text)
    assert text.count(" solved\n") == 14
    assert f"Next: {tmp_path}/3.py. " in text and "`python -m exercises 3`" in text


@pytest.mark.parametrize("number", NUMBERS)
def test_there_are_two_hints_and_a_docstring_with_all_parts(number, capsys):
    hints = []
    for step in ("1", "2"):
        assert main(parse_args([str(number), "--hint", step])) == 0
        hints.append(capsys.readouterr().out)
    assert main(parse_args([str(number), "--hint"])) == 0
    assert capsys.readouterr().out == hints[0] != hints[1]
    text = EXERCISES[number - 1].file.read_text("utf-8")
    docstring = ast.get_docstring(ast.parse(text))
    parts = [f"Exercise {number}. ", "Source: ", "**Idea.**", "**Stays true.**", "**Predict.**"]
    places = [docstring.index(part) for part in [*parts, "**You may use**"]]
    assert places == sorted(places)
    idea = docstring.partition("**Idea.**")[2].partition("\n\n")[0]
    assert 5 <= len(re.findall(r"[.:?](?= |\n|$)", idea)) <= 9


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
    status, text = check(number, SOLUTIONS[number], tmp_path, capsys)
    assert f"The answer to the question: {ANSWERS[number]}" in text


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


@pytest.mark.slow
@pytest.mark.parametrize("number, old, new", [row[:3] for row in WRONG if row[0] in (4, 6, 9, 10)])
def test_a_page_can_be_drawn_of_every_difference(number, old, new, tmp_path, capsys):
    page = tmp_path / "difference.html"
    source = SOLUTIONS[number].replace(old, new)
    status, text = check(number, source, tmp_path, capsys, "--html", str(page))
    assert status == 1
    if text.endswith("no page: the policy made no batch\n"):
        assert not page.exists()
        return
    assert f"wrote {page}, open file://" in text
    runs = page.read_text("utf-8").partition('"runs":')[2]
    assert re.findall(r'"name": "([\w-]+)"', runs) in (
        ["yours", "reference"],
        ["yours", "sarathi-serve"],
        ["yours", "orca"],  # an error has no load: the page is that of the question
        ["yours", "vllm"],
    )


def test_the_page_shows_both_decisions_in_the_iteration_that_was_named(browser, tmp_path, capsys):
    page = tmp_path / "difference.html"
    old, new = next(row[1:3] for row in WRONG if row[0] == 5 and "before a new one" in row[3])
    status, text = check(5, SOLUTIONS[5].replace(old, new), tmp_path, capsys, "--html", str(page))
    iteration = int(re.search(r"iteration (\d+)\.", text)[1])
    with opened(browser, f"file://{page}") as tab:
        chunks = "k => panes.map(pane => pane.run.iterations[k].chunks)"
        yours, reference = tab.evaluate(chunks, iteration - 1)
        assert tab.text_content("#position").startswith(f"iteration {iteration} of ")
    assert yours != reference
    (row,) = re.findall(r"(?m)^\| 0 <.*\| +(\S.*?) +\| +(\S.*?) +\|$", text)
    assert row[1] == f"token {reference[0][1]}"


def test_no_exercise_needs_torch(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(IMPORTS + SOLUTIONS[6])
    argv = ["6", "--file", str(file), "--html", str(tmp_path / "page.html")]
    code = f"""
import sys
from exercises.__main__ import main, parse_args
main(parse_args({argv}))
main(parse_args([]))
print(sorted({{"torch", "numpy", "matplotlib"}} & set(sys.modules)))
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.stderr == "" and run.stdout.endswith("\n[]\n")


def test_the_program_exits_with_the_status_of_the_check(tmp_path):
    file = tmp_path / "mine.py"
    for source, status in ((SOLUTIONS[1], 0), (SOLUTIONS[1].replace("if not", "if"), 1)):
        file.write_text(IMPORTS + source)
        argv = [sys.executable, "-m", "exercises", "1", "--file", str(file)]
        assert subprocess.run(argv, cwd=ROOT, capture_output=True).returncode == status
