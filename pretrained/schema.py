"""Objects of a file in exact types: what is missing or of another type is named in one line.

Read next: checkpoints.py and gguf_files.py, which read their geometry so."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ValidationError

from pretrained.checks import shorten

MAX_JSON_BYTES = 2**24  # of a file that is read at once


@contextmanager
def naming(place: object) -> Iterator[None]:
    """Put the name of a file in front of the ValueErrors that are raised within."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


class Schema(BaseModel, strict=True, validate_by_name=True, allow_inf_nan=False):
    """The part of a JSON object that is read, in exact types. Its other keys are ignored."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises FileNotFoundError, OSError if the file cannot be read, or ValueError, naming the
        file, the first wrong key and what it must be.

        A key of several types has an error for each type; the types are not named."""
        if not path.is_file():
            raise FileNotFoundError(f"{path}: there is no such file")
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ValueError(f"{path}: has {size:,} bytes, must have at most {MAX_JSON_BYTES:,}")
        with _one_problem(f"{path}: "):
            return cls.model_validate_json(path.read_bytes())

    @classmethod
    def of(cls, place: Path, prefix: str, values: Mapping[str, Any]) -> Self:
        """The same of values that are read already, whose keys begin with `prefix`."""
        keys = [key for key in values if key.startswith(prefix)]
        with _one_problem(f"{place}: {prefix}"):
            named = {key.removeprefix(prefix): values[key] for key in keys}
            return cls.model_validate(named, by_name=False)


@contextmanager
def _one_problem(place: str) -> Iterator[None]:
    """Let pydantic's error be a ValueError of one line that begins with `place`."""
    try:
        yield
    except ValidationError as error:
        raise ValueError(place + _first_problem(error)) from None


def _first_problem(error: ValidationError) -> str:
    """The first wrong key, its value, and what it must be."""
    details = error.errors()[0]
    problem = re.sub(r"^\w+ should", "must", details["msg"])
    keys = [key for key in details["loc"] if str(key).replace(".", "").isidentifier()]
    if not keys:  # only indexes and types
        return problem
    value = "" if details["type"] == "missing" else f"={shorten(details['input'])}"
    return f"{keys[-1]}{value}: {problem}"
