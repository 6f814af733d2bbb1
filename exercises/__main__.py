"""Check an exercise, or name the next one: `python -m exercises`.

    python -m exercises                           which are solved, and which one comes next
    python -m exercises 6                         check exercise 6; exit status 0 if it holds
    python -m exercises 6 --hint                  a hint; --hint 2 says more
    python -m exercises 6 --html stall.html       and write the page of both schedules
    python -m exercises 6 --file mine/other.py    check a solution that lies elsewhere
    python -m exercises 11 --iteration 9          is that where the policy first goes wrong?
    python -m exercises --all --json --own        a line for each, for a grader: see README.md

Read first: README.md here, 01_request_level.py."""

import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from cli.console import run
from cli.files import write_text, wrote_page
from cli.options import OptionParser, output_file, whole
from exercises.catalog import EXERCISES, FOLDER, Exercise
from exercises.check import check_solution, load_solution
from exercises.problems import Problem
from exercises.report import (
    answer_question,
    describe_decisions,
    describe_problem,
    draw_page,
    shorten_path,
)

CHECK_LIMIT_S = 60.0  # of the time that a process of --all may take


def parse_args(argv: Sequence[str] | None = None) -> Namespace:
    """The command line."""
    parser = OptionParser(
        prog="python -m exercises",
        description="Write a scheduler yourself: each exercise is checked against a reference.",
    )
    parser.add_argument(
        "number",
        help="the exercise to check; without it, all are listed",
        type=whole(minimum=1, maximum=len(EXERCISES)),
        nargs="?",
    )
    parser.add_argument(
        "--hint",
        help="print a hint instead; --hint 2 says more",
        type=whole(minimum=1, maximum=2),
        nargs="?",
        const=1,
    )
    parser.add_argument(
        "--html",
        help="write the page of your schedule beside another one",
        type=output_file,
        metavar="FILE",
    )
    parser.add_argument(
        "--file", help="your solution (default: the file in exercises/)", metavar="FILE"
    )
    parser.add_argument(
        "--iteration",
        help="where the policy of an exercise from 11 on first goes wrong",
        type=whole(minimum=1),
        metavar="N",
    )
    parser.add_argument(
        "--own",
        help="a solution may not call or inherit what answers the exercise in this repository",
        action="store_true",
    )
    parser.add_argument(
        "--all",
        help=f"check each in a process of its own, which is ended after {CHECK_LIMIT_S:g} s",
        action="store_true",
    )
    parser.add_argument("--json", help="print a line of JSON for each", action="store_true")
    args = parser.parse_args(argv)
    single_options = [name for name in ("hint", "html", "file", "iteration") if getattr(args, name)]
    if args.number is None and single_options:
        parser.error(f"--{single_options[0]}: say which exercise, 1 to {len(EXERCISES)}")
    complaints = [exercise.number for exercise in EXERCISES if exercise.complaint]
    if args.iteration and args.number not in complaints:
        parser.error(f"--iteration: the exercises from {min(complaints)} on ask for it")
    if args.json and args.number is None and not args.all:
        parser.error("--json: goes with --all, or with the number of an exercise")
    return args


def main(args: Namespace) -> int:
    """Do what the command line says. Returns the exit status: 0 if the solution holds."""
    if args.number is None:
        return check_all(args)
    exercise = EXERCISES[args.number - 1]
    if args.hint:
        print(exercise.hints[args.hint - 1])
        return 0
    file = args.file or str(exercise.file)
    if args.iteration:
        return check_iteration(exercise, file, args.iteration)
    if args.json:
        _, problem = check_solution(exercise, file, args.own)
        print(json.dumps(row_of(exercise, problem)))
        return 1 if problem else 0
    return check_exercise(exercise, args)


def check_exercise(exercise: Exercise, args: Namespace) -> int:
    """Check a solution, print what is wrong with it, or the answer to the question."""
    html: str | None = args.html
    policy, problem = check_solution(exercise, args.file or str(exercise.file), args.own)
    if problem:
        command = f"python -m exercises {exercise.number}"
        if args.file:
            command += f" --file {args.file}"
        print(describe_problem(exercise, policy, problem, command))
    else:
        assert policy is not None
        print(f"Exercise {exercise.number}, {exercise.title}: it holds.\n")
        print(f"The answer to the question: {answer_question(exercise, policy)}\n")
        print(f"Now read {exercise.read_next}. Then: `python -m exercises`.")
    if html and policy is not None:
        page = draw_page(exercise, policy, problem)
        if page is None:
            print("no page: the policy made no batch")
        else:
            write_text(html, page)
            wrote_page(html)
    return 1 if problem else 0


def check_iteration(exercise: Exercise, file: str, iteration: int) -> int:
    """Say whether a policy first goes wrong in this iteration, and why if it does."""
    policy, problem = load_solution(exercise, file)
    assert exercise.complaint is not None
    difference = exercise.complaint.first_wrong(policy) if policy else None
    if problem:
        print(describe_problem(exercise, policy, problem, ""))
    elif difference is None:
        print("It decides as the reference in every iteration: there is nothing to find.")
    elif difference.iteration != iteration:
        side = "earlier" if difference.iteration < iteration else "later"
        print(f"Iteration {iteration}: no, it goes wrong {side}.")
    else:
        print(f"Iteration {iteration}: yes.\n\n{describe_decisions(difference)}\n\nNow mend it.")
        return 0
    return 1


def row_of(exercise: Exercise, problem: Problem | None) -> dict[str, Any]:
    """Whether an exercise is solved, and what is wrong if not."""
    row = {"exercise": exercise.number, "title": exercise.title, "solved": problem is None}
    if problem:
        row |= {"rule": problem.rule, "sentence": problem.sentence}
    return row


def check_apart(exercise: Exercise, hides_references: bool) -> dict[str, Any]:
    """The row of an exercise, from a process of its own: whatever a solution does ends with it."""
    command = [sys.executable, "-m", "exercises", str(exercise.number), "--json"]
    command += ["--file", str(exercise.file), *(["--own"] if hides_references else [])]
    try:
        check = subprocess.run(
            command, cwd=FOLDER.parent, capture_output=True, text=True, timeout=CHECK_LIMIT_S
        )
        return json.loads(check.stdout.splitlines()[-1])  # after what the solution has printed
    except subprocess.TimeoutExpired:
        sentence = f"its check has not ended after {CHECK_LIMIT_S:g} s"
    except (IndexError, ValueError):
        sentence = "its check has ended without a result"
    return row_of(exercise, Problem("error", sentence))


def check_all(args: Namespace) -> int:
    """Print which exercises are solved, and the next one. Returns 0 if all are."""
    next_one: Exercise | None = None
    for exercise in EXERCISES:
        if args.all:
            row = check_apart(exercise, args.own)
        else:
            row = row_of(exercise, check_solution(exercise, str(exercise.file), args.own)[1])
        state = "solved"
        if not row["solved"]:
            next_one = next_one or exercise
            state = "not written yet" if row["sentence"] == "not written yet" else "not yet"
        line = f"{exercise.number:>3}  {exercise.title:<41}{state}"
        print(json.dumps(row) if args.json else line)
    if args.json:
        return 1 if next_one else 0
    if next_one is None:
        print("\nAll are solved. policies/template.py is the way to a policy of your own.")
        return 0
    file = shorten_path(str(next_one.file))
    print(f"\nNext: {file}. Read its docstring, predict, write {next_one.method}(),")
    print(f"then `python -m exercises {next_one.number}`.")
    return 1


if __name__ == "__main__":
    run(lambda: sys.exit(main(parse_args())))
