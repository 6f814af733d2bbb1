"""What a program owes whoever runs it: streams, signals, and errors of one line.

Imports next to nothing, so that `run` is in charge before anything slow is imported."""

import errno
import os
import signal
import sys
import time

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TWICE_S = 0.5  # `timeout` and others send a signal to the process and then to its group


def run(main):
    """Call main(). What a user can cause ends with a line and an exit status, not a traceback.
    SIGINT, SIGTERM and SIGHUP are a KeyboardInterrupt in main(), which may keep what there is, then
    an exit with status 130, 143 or 129; a second one, or one during an import, ends at once."""
    ending = []  # (exit status, when that was known), once it is

    def interrupt(signum, frame):
        while frame and not frame.f_code.co_filename.startswith("<frozen importlib"):
            frame = frame.f_back  # in an import it may be lost, or become another error
        if frame or ending and time.monotonic() > ending[0][1] + TWICE_S:
            os._exit(128 + signum)
        if not ending:
            ending.append((128 + signum, time.monotonic()))
            raise KeyboardInterrupt

    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, interrupt)
    if int(os.environ.get("RANK", 0)) and "WORLD_SIZE" in os.environ:
        sys.stdout = None  # of torchrun's processes only the first speaks, but for errors:
        sys.stderr = None if int(os.environ.get("LOCAL_RANK", 1)) else sys.stderr  # one on a node
    sys.stdout, sys.stderr = (its or open(os.devnull, "w") for its in (sys.stdout, sys.stderr))
    for stream in (sys.stdout, sys.stderr):  # a pipe sees each line when it is printed
        stream.reconfigure(errors="replace", line_buffering=True)
    try:
        try:
            main()
        finally:
            sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        status = ending[0][0] if ending else explain(error)
        if status is None:  # an error of ours has its traceback
            raise
        raise SystemExit(status) from None
    finally:
        ending.append((0, 0.0))


def explain(error):
    """The exit status, or the message, for what a user can cause; else None."""
    from policies import where_it_failed

    if isinstance(error, KeyboardInterrupt):
        return 130
    pipe = isinstance(error, BrokenPipeError)
    if pipe or getattr(error, "errno", None) == errno.ENOSPC:  # do not fail again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    place, name = where_it_failed(error), type(error).__name__
    text = str(error).strip().split("\n")[0] or name
    known = isinstance(error, (ValueError, ImportError, OSError, MemoryError))
    known |= name == "OutOfMemoryError" or "can't allocate memory" in text  # torch's
    compiling = type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))
    where = f"{place}: {name}: " if place else "--compile: " if compiling else ""
    return 141 if pipe else f"error: {where}{text}" if where or known else None
