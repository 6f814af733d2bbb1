"""The exercises: right solutions hold, and wrong ones break the rule that they break."""

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from exercises import __main__ as program
from exercises.__main__ import main, parse_args
from exercises.catalog import EXERCISES
from exercises.loads import MAX_PAGES, LoadRequest, random_load, shrink
from exercises.lockstep import Trial, serve
from exercises.mending import Figures
from exercises.problems import check_solution
from exercises.report import draw_page
from policies import find_policy
from policies.custom import load_policy
from tests.exercise_solutions import IMPORTS, MENDED, OTHERS, SOLUTIONS, WRONG

pytestmark = pytest.mark.usefixtures("little_garbage")
ROOT = Path(__file__).parents[1]
RIGHT = SOLUTIONS | MENDED
MENDS = [exercise for exercise in EXERCISES if exercise.complaint]


def written(number, source, folder):
    """(the file of a solution, its class)."""
    file = folder / f"exercise_{number}.py"
    file.write_text(IMPORTS + source, "utf-8")
    return file, load_policy(str(file), EXERCISES[number - 1].class_name)


def check(number, source, folder):
    """(the class of a solution, its problem)."""
    _, policy = written(number, source, folder)
    exercise = EXERCISES[number - 1]
    problem = check_solution(policy, exercise.finder, exercise.loads(), exercise.last_check)
    return policy, problem


def given(exercise):
    """The class in the file of an exercise."""
    return load_policy(str(exercise.file), exercise.class_name)


@pytest.mark.parametrize("number, source", [*RIGHT.items(), *OTHERS.items()])
def test_a_right_solution_holds(number, source, tmp_path):
    file, _ = written(number, source, tmp_path)
    assert main(parse_args([str(number), "--file", str(file)])) == 0


@pytest.mark.parametrize("number, old, new, rule", WRONG)
def test_a_wrong_solution_breaks_a_rule(number, old, new, rule, tmp_path):
    assert old in RIGHT[number]
    policy, problem = check(number, RIGHT[number].replace(old, new), tmp_path)
    assert problem.rule == rule
    names = ["yours", "reference" if problem.reference else EXERCISES[number - 1].beside]
    page = draw_page(EXERCISES[number - 1], policy, problem)
    _, _, runs = page.partition('"runs":')
    assert re.findall(r'"name": "([\w-]+)"', runs) == names


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.title)
def test_the_file_of_an_exercise_does_not_hold(exercise):
    if exercise.complaint or "raise NotImplementedError" in exercise.file.read_text("utf-8"):
        assert main(parse_args([str(exercise.number)])) == 1


@pytest.mark.parametrize(
    "source, limit_s, holds",
    [
        (RIGHT[1], 60.0, True),
        ("exit()", 60.0, False),
        ("import time; time.sleep(99)", 5.0, False),
    ],
    ids=["right", "exits", "sleeps"],
)
def test_all_solutions_are_checked_in_processes(source, limit_s, holds, tmp_path, monkeypatch):
    exercise = EXERCISES[0]
    file = tmp_path / "solution.py"
    file.write_text(IMPORTS + source, "utf-8")
    monkeypatch.setitem(vars(exercise), "file", file)
    monkeypatch.setattr(program, "EXERCISES", [exercise])
    monkeypatch.setattr(program, "CHECK_LIMIT_S", limit_s)
    status = main(parse_args(["--all"]))
    assert status == (0 if holds else 1)


def test_the_program_needs_no_package(tmp_path):
    file, _ = written(1, RIGHT[1], tmp_path)
    page = tmp_path / "page.html"
    argv = [sys.executable, "-S", "-m", "exercises", "1", "--file", file, "--html", page]
    assert subprocess.run(argv, cwd=ROOT).returncode == 0 and page.exists()


# ---- Questions and figures -----------------------------------------------------------------------


def answer_of(number, trial):
    """The first number of the answer to the question of an exercise, from a run of its load."""

    def iterations_of(i):
        numbers = []
        for n, iteration in enumerate(trial.iterations, start=1):
            if any(chunk.request_id == i for chunk in iteration.chunks):
                numbers.append(n)
        return numbers

    def first_chunk(i):
        iteration = trial.iterations[iterations_of(i)[0] - 1]
        return next(chunk.length for chunk in iteration.chunks if chunk.request_id == i)

    match number:
        case 1 | 2:
            return iterations_of(2)[0]
        case 3:
            return max(after - before - 1 for before, after in pairwise(iterations_of(0)))
        case 4:
            return len(trial.iterations)
        case 5:
            return len(iterations_of(6)) - 1
        case 6:
            return iterations_of(5)[0] + 2 - iterations_of(3)[0]
        case 7:
            return sum(len(it.preempted) for it in trial.iterations)
        case 8:
            return first_chunk(1)
    return first_chunk(4)


@pytest.mark.parametrize("number", range(1, 10))
def test_the_answer_to_a_question_is_what_happens(number, tmp_path):
    exercise = EXERCISES[number - 1]
    _, policy = written(number, RIGHT[number], tmp_path)
    trial = serve(policy, exercise.load, exercise.seconds)
    assert int(re.search(r"\d+", exercise.answer)[0]) == answer_of(number, trial)


def test_the_figures_of_the_readme_are_those_of_the_solutions(tmp_path):
    readme = (ROOT / "exercises/README.md").read_text("utf-8")
    figures = r"(longest gap|longest TTFT|mean TTFT|computed again) ([\d.]+) -> ([\d.]+)"
    count = 0
    for exercise in EXERCISES:
        (row,) = re.findall(rf"(?m)^\| {exercise.number} \|.*$", readme)
        _, policy = written(exercise.number, RIGHT[exercise.number], tmp_path)
        after = Figures.of(serve(policy, exercise.load, exercise.seconds))
        if exercise.complaint:
            before = exercise.complaint.before
        else:
            load = exercise.load_beside or exercise.load
            before = Figures.of(serve(find_policy(exercise.beside), load, exercise.seconds))
        for name, *cells in re.findall(figures, row):
            field = name.lower().replace(" ", "_")
            for cell, run in zip(cells, (before, after), strict=True):
                assert float(cell) == pytest.approx(getattr(run, field), abs=5.1e-4)
                count += 1
    assert count == 56


# ---- Mend it -------------------------------------------------------------------------------------

FIRST_WRONG = {
    11: 9,
    12: 9,
    13: 9,
    14: 7,
    15: 25,
    16: 5,
}  # found by hand in the timelines


@pytest.mark.parametrize("exercise", MENDS, ids=lambda exercise: exercise.title)
def test_the_first_wrong_iteration_is_in_the_timeline(exercise):
    wrong = FIRST_WRONG[exercise.number]
    for iteration in (wrong - 1, wrong, wrong + 1):
        argv = [str(exercise.number), "--iteration", str(iteration)]
        is_right = main(parse_args(argv)) == 0
        assert is_right == (iteration == wrong)


@pytest.mark.parametrize("exercise", MENDS, ids=lambda exercise: exercise.title)
def test_the_figures_before_are_those_of_the_policy_that_is_given(exercise):
    trial = Trial(given(exercise), exercise.load, exercise.seconds)
    if trial.run() is None:  # else somebody waits for ever
        before = vars(exercise.complaint.before)
        assert vars(Figures.of(trial)) == pytest.approx(before, abs=1e-6)


def test_shrinking_leaves_only_what_makes_a_load_fail():
    load = random_load(Random("a load"), size=1.0)
    assert len(load.requests) > 3

    def fails(load):
        return any(r.prompt_len >= 7 and r.output_len >= 2 for r in load.requests)

    smallest = shrink(load, fails)
    assert smallest.requests == (LoadRequest(arrival=0, prompt_len=7, output_len=2),)
    assert smallest.chunk == 1
    assert smallest.max_batch == 1
    assert smallest.pages == MAX_PAGES
