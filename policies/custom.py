"""Custom policies: a Scheduler subclass in a user's own file, named "path/to/file.py:ClassName"."""

import runpy
import traceback
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from errors import one_line
from scheduler import Scheduler

MODULE_PREFIX = "nanosarathi_policy_"  # with the path behind it, the __name__ of such a file


class MissingPolicyError(ValueError):
    """The file of a custom policy does not exist, or lacks the class."""


def load_policy(file: str, class_name: str) -> type[Scheduler]:
    """The class of that name in a file, which runs once. An error in the file passes through.

    Raises MissingPolicyError if there is no such file or class."""
    if not _is_file(file):
        raise MissingPolicyError(f"there is no file {one_line(file)[:200]}")
    policy = _run_file(str(Path(file).resolve())).get(class_name)
    if not (isinstance(policy, type) and issubclass(policy, Scheduler)):
        raise MissingPolicyError(f"{file} has no subclass of Scheduler of that name")
    return policy


def _is_file(path: str) -> bool:
    with suppress(OSError, ValueError, RuntimeError):  # too long, a null byte, links in a circle
        return Path(path).resolve().is_file()
    return False


@cache  # a file that raises is not remembered, and can be mended
def _run_file(path: str) -> dict[str, Any]:
    return runpy.run_path(path, run_name=MODULE_PREFIX + path)


def where_it_failed(error: BaseException) -> str | None:
    """The place in a custom policy where an error came from, such as "my_policy.py line 12".

    There is no line if the error came from something that the policy returned. Returns None if
    the error has nothing to do with a custom policy."""
    if isinstance(error, SyntaxError):
        file = error.filename or "the policy's file"  # a null byte has no file name
        return f"{file} line {error.lineno}"
    line_in_policy: str | None = None
    file_of_policy: str | None = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").startswith(MODULE_PREFIX):
            line_in_policy = f"{frame.f_code.co_filename} line {line}"
        module = type(frame.f_locals.get("self")).__module__
        if module.startswith(MODULE_PREFIX):
            file_of_policy = module.removeprefix(MODULE_PREFIX)
    return line_in_policy or file_of_policy
