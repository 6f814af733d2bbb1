"""Errors of one line that name the argument, its value and what is allowed. Plain Python."""

import math
from numbers import Real


def check_whole(name, value, least):
    """Raise ValueError unless `value` is a whole number of at least `least`."""
    if not hasattr(value, "__index__") or value < least:
        raise ValueError(f"{name}={value!r}: must be a whole number of at least {least}")


def check_positive(name, value, most=math.inf):
    """Raise ValueError unless `value` is a finite number above 0 and at most `most`."""
    if not isinstance(value, Real) or not 0 < value <= most or value == math.inf:
        limit = "" if most == math.inf else f" and at most {most}"
        raise ValueError(f"{name}={value!r}: must be a finite number above 0{limit}")


def check_one_of(name, value, allowed):
    """Raise ValueError unless `value` is one of the names in `allowed`."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(allowed)}")
