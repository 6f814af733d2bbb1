"""The check of a solution: of the file in exercises/, or of another one.

Read first: catalog.py, problems.py. Read next: report.py, __main__.py."""

from itertools import islice
from pathlib import Path

from exercises.catalog import Exercise
from exercises.problems import Problem, find_problem
from policies.custom import MissingPolicyError, PolicyError, guarded, load_policy
from scheduler import Scheduler


def check_solution(
    exercise: Exercise, file: str, step: int = 1
) -> tuple[type[Scheduler] | None, Problem | None]:
    """The class of a solution, if there is one, and its problem, or None if it holds.

    Tries each load, and shrinks one that fails; or only one load of `step`, as it is."""
    policy, problem = load_solution(exercise, file)
    if policy is not None:
        loads = islice(exercise.loads(), 0, None, step)
        shrinks = exercise.shrinks and step == 1
        problem = find_problem(policy, exercise.finder, loads, shrinks)
        problem = problem or exercise.last_check(policy)
    return policy, problem


def load_solution(exercise: Exercise, file: str) -> tuple[type[Scheduler] | None, Problem | None]:
    """The class of a solution; or None, and the problem of its file."""
    try:
        with guarded():
            return load_policy(file, exercise.class_name), None
    except PolicyError as error:
        problem = str(error)
        if isinstance(error.__cause__, MissingPolicyError):
            problem = "there is no such file"
            if Path(file).exists():
                problem = f"no class {exercise.class_name}(Scheduler) in it"
        return None, Problem("error", problem, place=error.place or file)
