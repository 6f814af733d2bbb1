"""How a program begins and ends: its streams, and errors of one line.

    if __name__ == "__main__":
        run(main)

A process that torchrun has started writes only if it is the first, of rank 0."""

import os
import re
import sys
from collections.abc import Callable
from io import TextIOWrapper

from cyclopts import App, CycloptsError, Parameter

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline


def make_app(name: str, help: str) -> App:
    """A program of this name. Its flags have no --no-flag, the last of repeated options
    counts, and its errors are those of `run`."""
    return App(
        name=name,
        help=help,
        help_format="plaintext",  # Markdown takes a quarter of the time
        version_flags=(),
        suppress_keyboard_interrupt=False,
        exit_on_error=False,
        print_error=False,
        default_parameter=Parameter(
            negative=(), allow_repeating=True, show_default=default_in_help
        ),
        result_action="return_value",
    )


def default_in_help(default: object) -> str | None:
    """A default as a help shows it. None for what is off or empty, if nobody asks for it."""
    is_empty = default is None or default is False or default in ((), "")
    return None if is_empty else str(default)


def run(main: Callable[[], object]) -> None:
    """Call main(). A wrong option, a ValueError or an OSError is one line and exit status 2, Ctrl-C
    is status 130. Other errors have their traceback."""
    is_first = int(os.environ.get("RANK", 0)) == 0
    if not is_first:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace", line_buffering=True)
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except (CycloptsError, ValueError, OSError) as error:
        if is_first:
            print(f"error: {visible(' '.join(str(error).split()))}", file=sys.stderr)
        sys.exit(2)


def visible(text: str) -> str:
    """The text with its control characters as escapes: a terminal shows them and does not obey."""
    return CONTROLS.sub(lambda match: repr(match.group())[1:-1], text)
