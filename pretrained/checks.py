"""Errors of one line that name the argument, its value and what is allowed. Plain Python."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def shorten(value: object) -> str:
    """The repr of a value on one line, cut to 60 characters."""
    try:
        text = repr(value)
    except Exception:  # a number of 4,300 digits has none, nor has a value that is nested deeply
        return f"a value of type {type(value).__name__} that cannot be shown"
    return one_line(text)[:60]


def one_line(text: str) -> str:
    """The text on one line; its repr if there is more in it that cannot be printed."""
    line = " ".join(text.split())
    return line if line.isprintable() else repr(line)


def wrong(name: str, value: object, allowed: str) -> ValueError:
    """The error for an argument of this name and value, where others are allowed."""
    return ValueError(f"{name}={shorten(value)}: must be {allowed}")


@contextmanager
def refusing(problem: str) -> Iterator[None]:
    """Turn whatever a library raises into a ValueError of one line: `problem`, and the reason."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust is no Exception
        reason = one_line(f"{type(error).__name__}: {error}")
        raise ValueError(f"{problem}: {reason[:200]}") from error


def check_type(name: str, value: object, kind: Any, allowed: str) -> None:
    """Raise ValueError, with the text `allowed`, unless `value` is of this type."""
    if not isinstance(value, kind):
        raise wrong(name, value, allowed)
