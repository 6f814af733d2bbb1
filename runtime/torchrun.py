"""What torchrun tells a process in environment variables. Without torchrun there is one process.

Plain Python: every program reads it before it imports anything slow."""

import os
from contextlib import suppress
from typing import NamedTuple

from errors import INT64_MAX, check_whole


class Place(NamedTuple):
    """Which of all processes this one is."""

    rank: int  # of all processes, below world_size
    world_size: int
    local_rank: int  # of the processes of this node, below local_world_size
    local_world_size: int


def find_place() -> Place:
    """The place of this process: RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE.

    Without the latter two all processes are on one node. Raises ValueError if one makes no
    sense."""
    world_size = _whole("WORLD_SIZE", default=1, minimum=1)
    rank = _whole("RANK", default=0, minimum=0)
    _check_below("RANK", rank, "WORLD_SIZE", world_size)
    local_world_size = _whole("LOCAL_WORLD_SIZE", default=world_size, minimum=1)
    local_rank = _whole("LOCAL_RANK", default=rank % local_world_size, minimum=0)
    _check_below("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world_size)
    return Place(rank, world_size, local_rank, local_world_size)


def _whole(name: str, default: int, minimum: int) -> int:
    """The whole number in an environment variable, or the default if it is not set."""
    text = os.environ.get(name)
    if text is None:
        return default
    value: object = text
    with suppress(ValueError):  # then the error shows the text
        value = int(text)
    return check_whole(name, value, minimum, INT64_MAX)


def _check_below(name: str, value: int, limit_name: str, limit: int) -> None:
    if value >= limit:
        raise ValueError(f"{name}={value}: must be below {limit_name}={limit}")
