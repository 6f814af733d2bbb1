"""Whatever a solution does wrong becomes a PolicyError, a sentence with a file and a line."""

import runpy
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from scheduler import Batch, Chunk, Request, Scheduler

MODULE_PREFIX = "nanosarathi_policy_"  # with the path behind it, the __name__ of such a file
CALL_LIMIT_S = 10.0  # of CPU time: what takes longer is a loop without an end
SLEEP_LIMIT_S = 5.0  # of time that a call may wait, at least


def one_line(text: str) -> str:
    """The text on one line; its repr if there is more in it that cannot be printed."""
    line = " ".join(text.split())
    return line if line.isprintable() else repr(line)


class PolicyError(ValueError):
    """A custom policy cannot go on. `place` is a file and a line, where an error came from one."""

    def __init__(self, problem: str, place: str | None = None) -> None:
        super().__init__(problem)
        self.place = place


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
    if policy is Scheduler:
        raise MissingPolicyError(f"{file} names Scheduler itself, which has no schedule()")
    return policy


def _is_file(path: str) -> bool:
    with suppress(OSError, ValueError, RuntimeError):  # too long, a null byte, links in a circle
        return Path(path).resolve().is_file()
    return False


@cache  # a file that raises is not remembered, and can be mended
def _run_file(path: str) -> dict[str, Any]:
    try:
        with time_limit(CALL_LIMIT_S):
            return runpy.run_path(path, run_name=MODULE_PREFIX + path)
    except (SystemExit, GeneratorExit) as error:  # would end this process as if all were well
        raise PolicyError(problem_of(error), where_it_failed(error)) from error


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


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError within the `with` block after so many seconds of CPU time, or of sleep.

    Sleep has SLEEP_LIMIT_S at least, as others may use the machine. The outermost limit counts.
    Signals reach only the main thread: in another one there is no limit, nor where there are no
    timers, as in a browser. A loop in C, such as sum() of what never ends, is not stopped."""
    has_timer = hasattr(signal, "setitimer")
    is_main = threading.current_thread() is threading.main_thread()
    if not has_timer or not is_main or signal.getitimer(signal.ITIMER_VIRTUAL)[0]:
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"one call took more than {seconds:g} s")

    numbers = (signal.SIGVTALRM, signal.SIGALRM)
    handlers = {number: signal.signal(number, stop) for number in numbers}
    before = signal.getitimer(signal.ITIMER_REAL)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 1.0)  # and again: it may be caught
        signal.setitimer(signal.ITIMER_REAL, max(SLEEP_LIMIT_S, 2 * seconds), 1.0)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_REAL, *before)  # of who else has a limit
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def guarded(limit_s: float | None = None) -> Iterator[None]:
    """Turn whatever a policy raises, SystemExit too, into a PolicyError with file and line. So is a
    call that takes more than `limit_s`, by default CALL_LIMIT_S, see time_limit."""
    try:
        with time_limit(limit_s or CALL_LIMIT_S):
            yield
    except (KeyboardInterrupt, PolicyError):
        raise
    except BaseException as error:
        raise PolicyError(problem_of(error), where_it_failed(error)) from error


def problem_of(error: BaseException) -> str:
    """What a policy raised, as a sentence."""
    if isinstance(error, NotImplementedError):
        return "not written yet"
    if isinstance(error, MissingPolicyError):
        return str(error)
    if isinstance(error, AttributeError) and error.obj is None and error.name == "tokens":
        return "this request is None: admit() returned None, nobody fits"
    if isinstance(error, TimeoutError):
        return f"a loop without an end? {error}"
    return one_line(f"{type(error).__name__}: {error}")[:200]


def check_batch(batch: object, place: str | None = None) -> None:
    """Raise PolicyError, with the `place` if it is known, unless this is a Batch of Chunks."""
    if batch is None:
        raise PolicyError("schedule() returned None: did you forget return?", place)
    if not isinstance(batch, Batch):
        kind = type(batch).__name__
        raise PolicyError(f"schedule() returned a {kind}, and must return a Batch", place)
    for chunk in batch:
        is_chunk = isinstance(chunk, Chunk) and isinstance(chunk.request, Request)
        if not is_chunk or type(chunk.start) is not int or type(chunk.length) is not int:
            chunk_text = one_line(repr(chunk))[:40]
            problem = f"a batch holds chunks: use batch.add(request), not {chunk_text}"
            raise PolicyError(problem, place)
