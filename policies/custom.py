"""Custom policies: a Scheduler subclass in a user's own file, named "path/to/file.py:ClassName".

What goes wrong in such a file has Python's own traceback, into the line where it went wrong."""

import runpy
from functools import cache
from pathlib import Path
from typing import Any

from scheduler import Scheduler

MODULE_PREFIX = "nanosarathi_policy_"  # with the path behind it, the __name__ of such a file


def load_policy(file: str, class_name: str) -> type[Scheduler]:
    """The class of that name in a file, which runs once. What the file raises passes through.

    Raises OSError if there is no such file, ValueError if it has no such policy."""
    policy = _run_file(str(Path(file).resolve())).get(class_name)
    if not (isinstance(policy, type) and issubclass(policy, Scheduler)):
        raise ValueError(f"{file} has no subclass of Scheduler named {class_name!r}")
    return policy


@cache  # a file that raises is not remembered, and can be mended
def _run_file(path: str) -> dict[str, Any]:
    return runpy.run_path(path, run_name=MODULE_PREFIX + path)
