"""What torchrun tells a process in environment variables. Without torchrun there is one process.

Plain Python: every program reads it before it imports anything slow."""

import os
import socket
from contextlib import suppress
from typing import NamedTuple

from errors import INT64_MAX, check_whole, shorten


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


def find_meeting() -> tuple[str, int]:
    """The host and the port where all processes meet: MASTER_ADDR and MASTER_PORT.

    Raises ValueError if one is not set, the host has no address, or the port is no number."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise ValueError(f"{name} is not set: torchrun sets it")
    host = os.environ["MASTER_ADDR"]
    port = _whole("MASTER_PORT", default=0, minimum=1, maximum=2**16 - 1)
    try:
        socket.getaddrinfo(host or ".", port)  # "" would be this machine
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"MASTER_ADDR={shorten(host)}: must be the name or address of a machine: {error}"
        ) from None
    return host, port


def _whole(name: str, default: int, minimum: int, maximum: int = INT64_MAX) -> int:
    """The whole number in an environment variable, or the default if it is not set."""
    text = os.environ.get(name)
    if text is None:
        return default
    value: object = text
    with suppress(ValueError):  # then the error shows the text
        value = int(text)
    return check_whole(name, value, minimum, maximum)


def _check_below(name: str, value: int, limit_name: str, limit: int) -> None:
    if value >= limit:
        raise ValueError(f"{name}={value}: must be below {limit_name}={limit}")
