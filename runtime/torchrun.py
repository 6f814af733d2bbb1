"""What torchrun tells a process in environment variables. Without torchrun there is one process.

Plain Python: every program reads it before it imports anything slow."""

import os
from typing import NamedTuple


class Place(NamedTuple):
    """Which of all processes this one is."""

    rank: int  # of all processes, below world_size
    world_size: int
    local_rank: int  # of the processes of this node, below local_world_size
    local_world_size: int


def find_place() -> Place:
    """The place of this process: RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE.

    Without the latter two all processes are on one node."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    local_rank = int(os.environ.get("LOCAL_RANK", rank % local_world_size))
    return Place(rank, world_size, local_rank, local_world_size)
