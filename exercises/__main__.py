"""Check an exercise: `python -m exercises 1`.

    python -m exercises                           which are solved, and which one comes next
    python -m exercises 6                         check exercise 6; exit status 0 if it holds
    python -m exercises 6 --hint                  a hint; --hint 2 says more
    python -m exercises 6 --html stall.html       and write the page of both schedules
    python -m exercises 6 --file mine/other.py    check a solution that lies elsewhere
    python -m exercises 11 --iteration 9          is that where the policy first goes wrong?
    python -m exercises --all                     as without a number: exit status 0 if all hold

Read first: README.md here, 01_request_level.py."""

import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from exercises.catalog import EXERCISES, FOLDER, Exercise
from exercises.given import batch_seconds
from exercises.lockstep import compare
from exercises.mending import Complaint
from exercises.problems import check_solution
from exercises.report import answer_question, describe_decisions, describe_problem, draw_page
from policies.custom import load_policy
from scheduler import Scheduler

CHECK_LIMIT_S = 60.0  # of the time that a check of --all may take


def parse_args(argv: Sequence[str] | None = None) -> Namespace:
    """The command line."""
    parser = ArgumentParser(
        prog="python -m exercises",
        description="Write a scheduler yourself: each exercise is checked against a reference.",
    )
    parser.add_argument(
        "number",
        help=f"the exercise to check, 1 to {len(EXERCISES)}",
        type=int,
        choices=[exercise.number for exercise in EXERCISES],
        metavar="number",
        nargs="?",
    )
    parser.add_argument(
        "--all",
        help=f"check all, each in a process of at most {CHECK_LIMIT_S:g} s",
        action="store_true",
    )
    parser.add_argument(
        "--hint",
        help="print a hint instead; --hint 2 says more",
        type=int,
        choices=(1, 2),
        nargs="?",
        const=1,
    )
    parser.add_argument(
        "--html", help="write the page of your schedule beside another one", metavar="FILE"
    )
    parser.add_argument(
        "--file", help="your solution (default: the file in exercises/)", metavar="FILE"
    )
    parser.add_argument(
        "--iteration",
        help="of an exercise from 11 on: is it here that the policy first goes wrong?",
        type=int,
        metavar="N",
    )
    return parser.parse_args(argv)


def main(args: Namespace) -> int:
    """Do what the command line says. Returns the exit status: 0 if the solution holds."""
    if args.number is None or args.all:
        return check_all()
    exercise = EXERCISES[args.number - 1]
    if args.hint:
        print(exercise.hints[args.hint - 1])
        return 0
    policy = load_policy(args.file or str(exercise.file), exercise.class_name)
    if args.iteration and exercise.complaint:
        return check_iteration(exercise.complaint, policy, args.iteration)
    try:
        return check_exercise(exercise, policy, args)
    except NotImplementedError:
        print(f"{exercise.file.name}: {exercise.method}() is not written yet")
        return 1


def check_exercise(exercise: Exercise, policy: type[Scheduler], args: Namespace) -> int:
    """Check a solution, print what is wrong with it, or the answer to the question."""
    problem = check_solution(policy, exercise.finder, exercise.loads(), exercise.last_check)
    if problem:
        print(describe_problem(exercise, policy, problem))
    else:
        print(f"Exercise {exercise.number}, {exercise.title}: it holds.\n")
        print(answer_question(exercise, policy))
        print(f"\nNow read {exercise.read_next}. Then: `python -m exercises`.")
    if args.html:
        Path(args.html).write_text(draw_page(exercise, policy, problem), "utf-8")
        print(f"wrote {args.html}")
    return 1 if problem else 0


def check_iteration(complaint: Complaint, policy: type[Scheduler], iteration: int) -> int:
    """Say whether a policy first goes wrong in this iteration, and why if it does."""
    difference = compare(complaint.load, policy, complaint.reference, batch_seconds)
    if difference is None:
        print("It decides as the reference in every iteration: there is nothing to find.")
    elif difference.iteration != iteration:
        side = "earlier" if difference.iteration < iteration else "later"
        print(f"Iteration {iteration}: no, it goes wrong {side}.")
    else:
        print(f"Iteration {iteration}: yes.\n\n{describe_decisions(difference)}\n\nNow mend it.")
        return 0
    return 1


def holds(exercise: Exercise) -> bool:
    """Whether a solution holds in a process of its own, which ends if the solution does not."""
    command = [sys.executable, "-m", "exercises", str(exercise.number)]
    command += ["--file", str(exercise.file)]
    try:
        done = subprocess.run(
            command, cwd=FOLDER.parent, capture_output=True, text=True, timeout=CHECK_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0 and "it holds" in done.stdout  # it may exit with status 0, too


def check_all() -> int:
    """Print which exercises are solved, and the next one. Returns 0 if all are."""
    unsolved: list[Exercise] = []
    for exercise in EXERCISES:
        is_solved = holds(exercise)
        if not is_solved:
            unsolved.append(exercise)
        state = "solved" if is_solved else "not yet"
        print(f"{exercise.number:>3}  {exercise.title:<41}{state}", flush=True)
    if not unsolved:
        print("\nAll are solved. policies/template.py is the way to a policy of your own.")
        return 0
    exercise = unsolved[0]
    print(f"\nNext: {exercise.file}. Read its docstring, predict, write {exercise.method}(),")
    print(f"then `python -m exercises {exercise.number}`.")
    return 1


if __name__ == "__main__":
    sys.exit(main(parse_args()))
