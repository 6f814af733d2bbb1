"""Errors of one line that name the argument, its value and what is allowed. Plain Python.

A number may be of any type that is one, numpy's too, and becomes an int or a float. A bool is no
number. Only True and False are bools: 1, "yes" and the bools of numpy and torch are not."""

import operator
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from inspect import signature
from numbers import Integral, Real
from typing import Any

SMALLEST = sys.float_info.min
LARGEST = sys.float_info.max
INT64_MAX = 2**63 - 1
LONGEST_LIST = 2**24  # elements, as many as a prompt may ever have
NO_LISTS = (str, bytes, bytearray, Mapping, Set)  # text is one element, a dict or a set is no list


class QueueFull(ValueError):  # noqa: N818
    """A request was rejected because max_waiting others wait."""


class ArgumentError(ValueError):
    """An argument makes no sense: `argument` is its name."""

    def __init__(self, message: str, argument: str = "") -> None:
        super().__init__(message)
        self.argument = argument


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


def wrong(name: str, value: object, allowed: str) -> ArgumentError:
    """The error for an argument of this name and value, where others are allowed."""
    return ArgumentError(f"{name}={shorten(value)}: must be {allowed}", name)


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


def check_bool(name: str, value: object) -> None:
    """Raise ValueError unless `value` is True or False."""
    check_type(name, value, bool, "True or False")


def check_whole(name: str, value: object, minimum: int, maximum: int = INT64_MAX) -> int:
    """`value` as an int. Raises ValueError unless it is a whole number in [minimum, maximum]."""
    limit = ""
    if isinstance(value, Integral) and not isinstance(value, bool):
        with suppress(TypeError):  # timedelta64 of numpy calls itself integral
            number = operator.index(value)
            if minimum <= number <= maximum:
                return number
            limit = f" and at most {maximum}" if number > maximum else ""
    raise wrong(name, value, f"a whole number of at least {minimum}{limit}")


def check_number(
    name: str,
    value: object,
    allowed: str,
    minimum: float = -LARGEST,
    maximum: float = LARGEST,
) -> float:
    """`value` as a float. Raises ValueError, with the text `allowed`, if it is out of limits."""
    with suppress(OverflowError, TypeError):  # 10**400; timedelta64 of numpy calls itself integral
        if isinstance(value, Real) and not isinstance(value, bool):
            number = float(operator.index(value) if isinstance(value, Integral) else value)
            if minimum <= number <= maximum:
                return number
    raise wrong(name, value, allowed)


def check_positive(name: str, value: object) -> float:
    """`value` as a float. Raises ValueError unless it is finite and above 0."""
    return check_number(name, value, "a finite number above 0", SMALLEST)


def check_one_of(name: str, value: object, allowed: Collection[str]) -> None:
    """Raise ValueError unless `value` is one of the names in `allowed`."""
    if not isinstance(value, str) or value not in allowed:
        raise wrong(name, value, f"one of {', '.join(allowed)}")


def check_list(name: str, value: object, allowed: str) -> list[Any]:
    """`value` as a list. Raises ValueError, with the text `allowed`, unless it has elements."""
    limit = ""
    if isinstance(value, Collection) and not isinstance(value, NO_LISTS):
        # an array without dimensions, a tensor without values, a range that has no length
        with suppress(TypeError, RuntimeError, OverflowError):
            if len(value) <= LONGEST_LIST:
                elements: Any = value
                if hasattr(elements, "tolist"):  # an array of numpy, a tensor of torch
                    return elements.tolist()
                return list(elements)
            limit = f" with at most {LONGEST_LIST} elements"
    raise wrong(name, value, f"{allowed}{limit}")


def check_whole_list(name: str, value: object, allowed: str) -> list[int]:
    """`value` as a list of ints. Raises ValueError, with the text `allowed`, unless it is one."""
    elements = check_list(name, value, allowed)
    with suppress(TypeError, RuntimeError):  # an element is no whole number
        numbers = [operator.index(element) for element in elements]
        if bool not in map(type, elements):
            return numbers
    raise wrong(name, value, allowed)


def check_token_ids(name: str, value: object) -> tuple[int, ...]:
    """`value`, in any order, as a tuple of ints. Raises ValueError unless it has token ids only."""
    allowed = "a list of token ids"
    if isinstance(value, Set):
        value = list(value)
    token_ids = check_whole_list(name, value, allowed)
    if min(token_ids, default=0) < 0:
        raise wrong(name, value, allowed)
    return tuple(token_ids)


def check_texts(name: str, value: object) -> tuple[str, ...]:
    """A text, or a list of them, as a tuple. Raises ValueError for another or an empty one."""
    allowed = "a text or a list of texts"
    texts = [value] if isinstance(value, str) else check_list(name, value, allowed)
    if not all(isinstance(text, str) and text for text in texts):
        raise wrong(name, value, allowed)
    return tuple(texts)


def check_names(function: Callable[..., object], arguments: Iterable[str]) -> None:
    """Raise TypeError for an argument that a function or a dataclass does not have."""
    allowed = signature(getattr(function, "__init__", function)).parameters
    for name in arguments:
        if name not in allowed:
            near = get_close_matches(name, allowed, n=1)
            hint = f"did you mean {near[0]}?" if near else "there is no such argument"
            raise TypeError(f"{name}: {hint}")


def set_field(record: object, name: str, value: object) -> None:
    """Set a field of a frozen dataclass, in its __post_init__ alone: a default, a checked value."""
    object.__setattr__(record, name, value)


def check_sizes(record: object, maximums: Mapping[str, int]) -> None:
    """Check and set those fields of a frozen dataclass, in its __post_init__ alone, that are whole
    numbers from 1 to a maximum. Raises ValueError."""
    for name, maximum in maximums.items():
        set_field(record, name, check_whole(name, getattr(record, name), 1, maximum))
