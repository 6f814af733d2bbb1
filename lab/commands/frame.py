"""The frame of a command: what it found is written at its end, also at an interrupt.

    with reporting(options, report, plot=draw, html=write_page):
        report["runs"] = ...

Read first: cli/files.py."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cli.files import write_json, wrote, wrote_page


@contextmanager
def reporting(
    options: Any,
    report: dict[str, Any],
    show: Callable[[], object] | None = None,
    **files: Callable[[Any], object],
) -> Iterator[None]:
    """Write `report` to --json at the end of this block, if it got anything in it; also if an
    interrupt or an error ends the block.

    `show` prints it before. `files` are functions that write to the file of another option, by the
    name of that option."""
    before = len(report)
    try:
        yield
    except KeyboardInterrupt:
        has_some = len(report) > before
        end = "what was measured until then is kept" if has_some else "nothing was finished"
        print(f"\ninterrupted: {end}")
        raise
    finally:
        if len(report) > before:
            if show:
                show()
            write_json(options.json, report)
            wrote(options.json)
            for name, write in files.items():
                file = getattr(options, name)
                if file:
                    write(file)
                    if name == "html":
                        wrote_page(file)
                    else:
                        wrote(file)
