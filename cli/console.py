"""How a program begins and ends: streams, signals, and errors of one line.

Imports next to nothing, so that `run` is in charge before anything slow is imported."""

import errno
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from runtime.torchrun import find_place

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TWICE_S = 0.5  # `timeout` and others send a signal to the process and then to its group
BROKEN_PIPE_STATUS = 141  # 128 + SIGPIPE
REQUIREMENTS = ("requirements.txt", "server/requirements.txt", "requirements-dev.txt")
USER_ERRORS = (ValueError, ImportError, OSError, MemoryError)  # a user or a machine can cause them


CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline


class Terminal(TextIOWrapper):
    """A terminal that shows control characters and does not obey them: texts of models and of
    servers may have any."""

    def write(self, text: str, /) -> int:
        """As of TextIOWrapper."""
        return super().write(CONTROLS.sub(lambda match: repr(match.group())[1:-1], text))

    def rewind(self, lines: int) -> None:
        """Go up so many lines, and clear all from there on."""
        if lines:
            super().write(f"\x1b[{lines}A\x1b[J")


class Ending(NamedTuple):
    """The exit status of this process, and when that was decided."""

    status: int
    time_s: float


def run(main: Callable[[], object]) -> None:
    """Call main(). An error that a user can cause ends with one line and an exit status.

    SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt in main(), which may keep its results; then
    the process exits with status 130, 143 or 129. A second signal, or one during an import, ends it
    at once. A package that is not installed ends with status 2 and the command that installs it.
    Other errors are ours: they have their traceback."""
    endings: list[Ending] = []  # at most one

    def interrupt(number: int, frame: FrameType | None) -> None:
        if _is_importing(frame):  # there it might be lost, or become another error
            os._exit(128 + number)
        if endings and time.monotonic() > endings[0].time_s + TWICE_S:
            os._exit(128 + number)
        if not endings:
            endings.append(Ending(128 + number, time.monotonic()))
            raise KeyboardInterrupt

    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, interrupt)
    try:
        _open_streams()
        try:
            _prepare_streams()
            main()
        finally:
            sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        status = endings[0].status if endings else explain(error)
        if status is None:
            raise
        raise SystemExit(status) from None
    finally:
        endings.append(Ending(0, 0.0))  # from here on a signal ends the process at once


def _is_importing(frame: FrameType | None) -> bool:
    """Whether this frame, or one that it was called from, is an import."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _open_streams() -> None:
    """Open stdout and stderr if they were closed before this process began."""
    if sys.stdout is None:
        sys.stdout = _null_stream()
    if sys.stderr is None:
        sys.stderr = _null_stream()


def _prepare_streams() -> None:
    """Let stdout and stderr take every text, a line when it is printed. Of torchrun's processes
    the first of all writes to stdout, and the first of each node to stderr."""
    place = find_place()
    if place.rank > 0:
        sys.stdout = _null_stream()
    if place.local_rank > 0:
        sys.stderr = _null_stream()
    if sys.stdout.isatty():
        sys.stdout = Terminal(sys.stdout.buffer, sys.stdout.encoding)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace", line_buffering=True)


def _null_stream() -> TextIOWrapper:
    return open(os.devnull, "w")


def explain(error: BaseException) -> int | str | None:
    """The exit status, or the message, for an error that a user can cause; None for others."""
    from policies.custom import MODULE_PREFIX

    if isinstance(error, KeyboardInterrupt):
        return 130
    is_broken_pipe = isinstance(error, BrokenPipeError)
    is_disk_full = isinstance(error, OSError) and error.errno == errno.ENOSPC
    if is_broken_pipe or is_disk_full:  # do not fail again at exit, when stdout is flushed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if is_broken_pipe:
        return BROKEN_PIPE_STATUS

    name = type(error).__name__
    text = one_line(str(error).strip().split("\n")[0]) or name
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").startswith(MODULE_PREFIX):
            return None  # its traceback says what is wrong with a custom policy
    advice = missing_package(error)
    if advice:
        print(f"error: {advice}", file=sys.stderr)
        return 2
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return f"error: --compile: {text}"
    if isinstance(error, RuntimeError):  # torch's
        is_cuda = name == "OutOfMemoryError" or "CUDA error: out of memory" in text
        if is_cuda or "_ALLOC_FAILED" in text:  # of cuBLAS and its like
            reason = text.partition(" is free.")[0]  # the rest is about how torch reserves memory
            return f"error: no memory on the GPU for this model, batch and length: {reason}"
        if "can't allocate memory" in text:
            return f"error: {text}"
    return f"error: {text}" if isinstance(error, USER_ERRORS) else None


def one_line(text: str) -> str:
    """The text on one line; its repr if there is more in it that cannot be printed."""
    line = " ".join(text.split())
    return line if line.isprintable() else repr(line)


def missing_package(error: BaseException) -> str | None:
    """Which package is not installed, and the command that installs it. None for another error, and
    for a module that is in none of REQUIREMENTS."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    package = error.name.partition(".")[0]
    root = Path(__file__).resolve().parents[1]
    for name in REQUIREMENTS:
        file = root / name
        if re.search(rf"(?m)^{re.escape(package)}==", file.read_text()):
            command = f"{sys.executable} -m pip install -r {os.path.relpath(file)}"
            return f"{package} is not installed: {command}"
    return None
