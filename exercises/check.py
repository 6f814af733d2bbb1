"""The check of a solution: of the file in exercises/, or of another one.

Read first: catalog.py, problems.py. Read next: report.py, __main__.py."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any

from exercises.catalog import Exercise
from exercises.guards import MODULE_PREFIX, MissingPolicyError, PolicyError, guarded, load_policy
from exercises.problems import Problem, find_problem
from scheduler import Scheduler


def check_solution(
    exercise: Exercise, file: str, hides_references: bool = False
) -> tuple[type[Scheduler] | None, Problem | None]:
    """The class of a solution, if there is one, and its problem, or None if it holds.

    `hides_references`: it may not use them, see `out_of_reach`."""
    with out_of_reach(exercise.references if hides_references else ()):
        policy, problem = load_solution(exercise, file)
        if policy is not None:
            problem = find_problem(policy, exercise.finder, exercise.loads(), exercise.last_check)
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


@contextmanager
def out_of_reach(references: Sequence[tuple[type, str]]) -> Iterator[None]:
    """Within it, a custom policy fails that calls or inherits one of these methods.

    A pair (class, name) stands for the subclasses, too. The references themselves go on."""
    originals: list[tuple[type, str, Any]] = []
    for root, name in references:
        for cls in dict.fromkeys([root, *subclasses(root)]):
            if name in vars(cls) and not cls.__module__.startswith((MODULE_PREFIX, "exercises.")):
                originals.append((cls, name, vars(cls)[name]))
                setattr(cls, name, refused_to_custom(cls, name))
    try:
        yield
    finally:
        for cls, name, method in originals:
            setattr(cls, name, method)


def subclasses(cls: type) -> list[type]:
    """All subclasses of a class, at any depth."""
    return [each for child in cls.__subclasses__() for each in (child, *subclasses(child))]


def refused_to_custom(cls: type, name: str) -> Any:
    """The method of a class, which raises PolicyError wherever a custom policy is at work."""
    method = vars(cls)[name]

    @wraps(method)
    def guarded_method(*args: Any, **options: Any) -> Any:
        frame: FrameType | None = sys._getframe(1)
        while frame:
            modules = (
                frame.f_globals.get("__name__", ""),
                type(frame.f_locals.get("self")).__module__,
            )
            if any(module.startswith(MODULE_PREFIX) for module in modules):
                raise PolicyError(f"{cls.__name__}.{name}() is out of reach: write your own")
            frame = frame.f_back
        return method(*args, **options)

    return guarded_method
