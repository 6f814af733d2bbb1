"""The exercises from 11 on: faults are found, cures pass, and a complaint is not just silenced."""

import json
import re
from pathlib import Path

import pytest

from exercises.__main__ import main, parse_args
from exercises.catalog import EXERCISES
from exercises.check import load_solution
from exercises.lockstep import Trial
from exercises.mending import timeline
from tests.mended_policies import IMPORTS, RIGHT, WRONG

MENDS = [exercise for exercise in EXERCISES if exercise.complaint]
FIRST_WRONG = {11: 9, 12: 9, 13: 9, 14: 7, 15: 25, 16: 5}  # found by hand in the timelines


def check(number, source, folder, capsys):
    """(exit status, what is printed) for a solution."""
    file = folder / f"exercise_{number}.py"
    file.write_text(IMPORTS.strip() + "\n\n" + source.lstrip())
    status = main(parse_args([str(number), "--file", str(file)]))
    return status, capsys.readouterr().out


@pytest.mark.parametrize(
    "number, source", [(number, source) for number in RIGHT for source in RIGHT[number]]
)
def test_a_right_solution_passes(number, source, tmp_path, capsys):
    status, text = check(number, source, tmp_path, capsys)
    assert status == 0, text
    assert "it holds" in text and "What does the cure cost?" in text


@pytest.mark.parametrize("number, source, message", WRONG)
def test_a_cure_that_is_none_is_told_why(number, source, message, tmp_path, capsys):
    status, text = check(number, source, tmp_path, capsys)
    assert status == 1 and message in text, text


def test_an_error_in_a_cure_gets_one_line(tmp_path, capsys):
    source = "class StarvedDecodes(SarathiServe):\n    def schedule(self):\n        return 1 / 0\n"
    status, text = check(11, source, tmp_path, capsys)
    assert status == 1 and text.count("\n") == 1
    assert re.search(r"line \d+: ZeroDivisionError: .*--hint`$", text.strip()), text


@pytest.mark.parametrize("exercise", MENDS, ids=lambda exercise: exercise.title)
def test_a_fault_is_a_complaint_with_figures_and_a_timeline(exercise, capsys):
    assert main(parse_args([str(exercise.number)])) == 1
    text = capsys.readouterr().out
    assert f'A user: "{exercise.complaint.words}"' in text
    assert "P prefill, d decode, x preempted, . waits" in text
    assert len(re.findall(r"(?m)^  request +\d+  ", text)) == len(exercise.complaint.load.requests)
    assert f"`python -m exercises {exercise.number} --iteration N`" in text


@pytest.mark.parametrize("exercise", MENDS, ids=lambda exercise: exercise.title)
def test_the_first_wrong_iteration_is_asked_for(exercise, tmp_path, capsys):
    number = FIRST_WRONG[exercise.number]
    for guess, status, answer in (
        (number - 1, 1, "later"),
        (number + 1, 1, "earlier"),
        (number, 0, "yes"),
    ):
        assert main(parse_args([str(exercise.number), "--iteration", str(guess)])) == status
        assert answer in capsys.readouterr().out
    file = tmp_path / "same.py"
    reference = exercise.complaint.reference
    file.write_text(
        f"from {reference.__module__} import {reference.__name__}\n"
        f"class {exercise.class_name}({reference.__name__}): pass\n"
    )
    argv = [str(exercise.number), "--iteration", "1", "--file", str(file)]
    assert main(parse_args(argv)) == 1
    assert "there is nothing to find" in capsys.readouterr().out


def test_a_timeline_has_a_sign_for_each_iteration():
    exercise = EXERCISES[14]
    policy, _ = load_solution(exercise, str(exercise.file))
    trial = Trial(policy, exercise.complaint.load, exercise.seconds)
    trial.run()
    lines = timeline(trial).splitlines()[1:]
    for request, line in zip(trial.requests, lines, strict=True):
        signs = line.partition("  request")[2][5:]
        shown = trial.iterations[: len(signs)]
        preempted = sum(request.id in iteration.preempted for iteration in shown)
        assert signs.count("x") == preempted
        chunks = [c for i in trial.iterations[:100] for c in i.chunks if c.request_id == request.id]
        assert signs.count("d") == sum(chunk.is_decode for chunk in chunks)
        assert signs.count("P") == sum(not chunk.is_decode for chunk in chunks)


def test_a_grader_gets_a_line_for_each(capsys):
    assert main(parse_args(["--all", "--json"])) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["exercise"] for row in rows] == [exercise.number for exercise in EXERCISES]
    unsolved = [row for row in rows if not row["solved"]]
    assert all(row["rule"] and row["sentence"] for row in unsolved)
    assert {row["rule"] for row in unsolved if row["exercise"] > 10} <= {"complaint", "worse"}


@pytest.mark.parametrize("exercise", MENDS, ids=lambda exercise: exercise.title)
def test_a_policy_to_be_mended_is_short_and_names_its_report(exercise):
    text = Path(exercise.file).read_text("utf-8")
    parts = ["Mend it: ", "Source: ", "**Complaint.**", "**Find.**", "**Mend.**"]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert len(text.rpartition('"""\n\nfrom')[2].splitlines()) <= 40


def test_the_figures_of_the_readme_are_those_that_are_printed(capsys):
    readme = (Path(__file__).parents[1] / "exercises/README.md").read_text("utf-8")
    for exercise in MENDS:
        (row,) = re.findall(rf"(?m)^\| {exercise.number} .*$", readme)
        main(parse_args([str(exercise.number)]))
        printed = re.findall(r"(?m)^\| .*\|$", capsys.readouterr().out)
        before, after = (
            {cell for line in printed for cell in line.split("|")[column : column + 1]}
            for column in (2, 3)
        )
        numbers = re.findall(r"\d+\.\d\d|\b\d{3}\b|\b0\b", row.partition("|")[2])
        for figure in numbers:
            text = figure if "." in figure else f"{figure}.00"
            assert exercise.number == 13 or text in " ".join(before | after), (row, figure)
