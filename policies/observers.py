"""Who looks on as a scheduler decides, and what is remembered of an iteration. Plain Python.

Read first: scheduler.py. Read next: referee.py, which looks on and complains."""

import sys
from collections.abc import Sequence
from typing import NamedTuple, Self

from request import Batch, Request
from scheduler import Scheduler


class Observer:
    """Looks on: put it into `scheduler.observers`."""

    def added(self, scheduler: Scheduler, request: Request) -> None:
        """Called when a request has joined the queue."""

    def decided(self, scheduler: Scheduler, batch: Batch) -> None:
        """Called with each batch; with the same again, if computing it has failed."""

    def advanced(self, scheduler: Scheduler, batch: Batch) -> None:
        """Called when the requests of a batch have moved on."""


class ChunkRecord(NamedTuple):
    """A chunk as it is remembered after its request has moved on."""

    request_id: int
    start: int
    length: int
    is_decode: bool


class Iteration(NamedTuple):
    """What one step computed, and when. Times are in seconds, on the engine's clock.

    waiting, running, free_pages   how many there were after the batch was decided
    budget, preempted              of the Batch: tokens, and request ids"""

    start: float
    end: float  # when its tokens had arrived
    chunks: list[ChunkRecord]
    launch: float | None = None  # when forward was called
    waiting: int = 0
    running: int = 0
    free_pages: int = 0
    budget: int | None = None
    preempted: Sequence[int] = ()
    micro_batch: int = 0  # its number, in a pipeline or with replicas

    @classmethod
    def of(
        cls,
        scheduler: Scheduler,
        batch: Batch,
        start: float,
        end: float,
        launch: float | None = None,
    ) -> Self:
        """The record of a batch of this scheduler whose requests have not moved on."""
        schedulers = scheduler.peers
        return cls(
            start=start,
            end=end,
            chunks=chunk_records(batch),
            launch=launch,
            waiting=len(scheduler.waiting),
            running=sum(len(each.running) for each in schedulers),
            free_pages=sum(each.pages.num_free for each in schedulers),
            budget=batch.budget if batch.budget < sys.maxsize else None,
            preempted=batch.preempted,
            micro_batch=schedulers.index(scheduler),
        )

    @property
    def prefill_tokens(self) -> int:
        """How many tokens of prompts were computed."""
        return sum(chunk.length for chunk in self.chunks if not chunk.is_decode)

    @property
    def decode_tokens(self) -> int:
        """How many decodes there were."""
        return sum(chunk.is_decode for chunk in self.chunks)


class Sent(NamedTuple):
    """A transfer between two pools that has ended. Times are in seconds. Instances are numbered
    from 0, those that prefill first, see lab/simulator/two_pools.py."""

    request_id: int
    source: int
    target: int
    tokens: int
    prefilled: float  # when the first output token was known
    start: float  # when memory was reserved; before `prefilled`, if layers are sent one by one
    end: float

    @property
    def waited_s(self) -> float:
        """How long the request waited for memory on the decode side, after its first token."""
        return max(0.0, self.start - self.prefilled)

    @property
    def exposed_s(self) -> float:
        """How long it was sent after its first token, with all before it on the same link."""
        return self.end - max(self.start, self.prefilled)


def chunk_records(batch: Batch) -> list[ChunkRecord]:
    """A record of each chunk of a batch whose requests have not moved on."""
    return [ChunkRecord(r.id, start, length, r.is_decoding) for r, start, length in batch]
