"""Errors of one line that name the argument, its value and what is allowed. Plain Python."""

import sys
from collections.abc import Collection
from contextlib import suppress
from numbers import Integral, Real

SMALLEST, LARGEST = sys.float_info.min, sys.float_info.max


def shorten(value: object) -> str:
    """The repr of a value on one line, cut to 60 characters."""
    with suppress(ValueError):  # whole numbers of more than 4,300 digits have none
        return " ".join(repr(value).split())[:60]
    return "a huge number"


def check_whole(name: str, value: object, minimum: int, maximum: int = 2**63 - 1) -> int:
    """`value` as an int. Raises ValueError unless it is a whole number in [minimum, maximum]."""
    limit = ""
    if isinstance(value, Integral):
        number = int(value)
        if minimum <= number <= maximum:
            return number
        limit = f" and at most {maximum}" if number > maximum else ""
    raise ValueError(
        f"{name}={shorten(value)}: must be a whole number of at least {minimum}{limit}"
    )


def check_number(
    name: str, value: object, allowed: str, minimum: float = -LARGEST, maximum: float = LARGEST
) -> float:
    """`value` as a float. Raises ValueError, with the text `allowed`, if it is out of limits."""
    with suppress(OverflowError):  # 10**400
        if isinstance(value, Real):
            number = float(value)
            if minimum <= number <= maximum:
                return number
    raise ValueError(f"{name}={shorten(value)}: must be {allowed}")


def check_positive(name: str, value: object) -> float:
    """`value` as a float. Raises ValueError unless it is finite and above 0."""
    return check_number(name, value, "a finite number above 0", SMALLEST)


def check_one_of(name: str, value: object, allowed: Collection[str]) -> None:
    """Raise ValueError unless `value` is one of the names in `allowed`."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}={shorten(value)}: must be one of {', '.join(allowed)}")


def set_field(record: object, name: str, value: object) -> None:
    """Set a field of a frozen dataclass, in its __post_init__ alone: a default, a checked value."""
    object.__setattr__(record, name, value)
