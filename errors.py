"""Errors of one line that name the argument, its value and what is allowed. Plain Python."""

import sys
from contextlib import suppress
from numbers import Integral, Real

SMALLEST, LARGEST = sys.float_info.min, sys.float_info.max


def shorten(value):
    """Its repr on one line, cut to 60 characters."""
    with suppress(ValueError):  # whole numbers of more than 4,300 digits have none
        return " ".join(repr(value).split())[:60]
    return "a huge number"


def check_whole(name, value, least, most=2**63 - 1):
    """`value` as an int. Raises ValueError unless it is a whole number in [least, most]."""
    whole = isinstance(value, Integral)
    if whole and least <= value <= most:
        return int(value)
    limit = f" and at most {most}" if whole and value > most else ""
    raise ValueError(f"{name}={shorten(value)}: must be a whole number of at least {least}{limit}")


def check_number(name, value, allowed, least=-LARGEST, most=LARGEST):
    """`value` as a float. Raises ValueError unless it is in [least, most], which is `allowed`."""
    with suppress(OverflowError):  # 10**400
        if isinstance(value, Real) and least <= (number := float(value)) <= most:
            return number
    raise ValueError(f"{name}={shorten(value)}: must be {allowed}")


def check_positive(name, value):
    """`value` as a float. Raises ValueError unless it is finite and above 0."""
    return check_number(name, value, "a finite number above 0", SMALLEST)


def check_one_of(name, value, allowed):
    """Raise ValueError unless `value` is one of the names in `allowed`."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}={shorten(value)}: must be one of {', '.join(allowed)}")
