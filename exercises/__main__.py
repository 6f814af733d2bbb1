"""Check an exercise, or name the next one: `python -m exercises`.

    python -m exercises                           which are solved, and which one comes next
    python -m exercises 6                         check exercise 6; exit status 0 if it holds
    python -m exercises 6 --hint                  a hint; --hint 2 says more
    python -m exercises 6 --html stall.html       and write the page of both schedules
    python -m exercises 6 --file mine/other.py    check a solution that lies elsewhere

Read first: README.md here, 01_request_level.py."""

import sys
from argparse import Namespace
from collections.abc import Sequence

from cli.console import run
from cli.options import OptionParser, output_file, whole, write_text, wrote_page
from exercises.catalog import EXERCISES, Exercise
from exercises.check import check_solution
from exercises.report import (
    answer_question,
    describe_problem,
    draw_page,
    shorten_path,
)

OVERVIEW_STEP = 3  # the list of all tries one load of so many


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
    args = parser.parse_args(argv)
    given = [name for name in ("hint", "html", "file") if getattr(args, name)]
    if args.number is None and given:
        parser.error(f"--{given[0]}: say which exercise, 1 to {len(EXERCISES)}")
    return args


def main(args: Namespace) -> int:
    """Do what the command line says. Returns the exit status: 0 if the solution holds."""
    if args.number is None:
        return list_exercises()
    exercise = EXERCISES[args.number - 1]
    if args.hint:
        print(exercise.hints[args.hint - 1])
        return 0
    return check_exercise(exercise, args.file or str(exercise.file), args.html)


def check_exercise(exercise: Exercise, file: str, html: str | None) -> int:
    """Check a solution, print what is wrong with it, or the answer to the question."""
    policy, problem = check_solution(exercise, file)
    if problem:
        is_elsewhere = file != str(exercise.file)
        command = f"python -m exercises {exercise.number}" + f" --file {file}" * is_elsewhere
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


def list_exercises() -> int:
    """Print which exercises are solved, and the next one. Returns 0 if all are."""
    next_one: Exercise | None = None
    for exercise in EXERCISES:
        _, problem = check_solution(exercise, str(exercise.file), OVERVIEW_STEP)
        state = "solved"
        if problem:
            state = "not written yet" if problem.sentence == "not written yet" else "not yet"
            next_one = next_one or exercise
        print(f"{exercise.number:>3}  {exercise.title:<34}{state}")
    if next_one is None:
        print("\nAll are solved. policies/template.py is the way to a policy of your own.")
        return 0
    file = shorten_path(str(next_one.file))
    print(f"\nNext: {file}. Read its docstring, predict, write {next_one.method}(),")
    print(f"then `python -m exercises {next_one.number}`.")
    return 1


if __name__ == "__main__":
    run(lambda: sys.exit(main(parse_args())))
