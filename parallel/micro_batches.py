"""The micro-batches of a pipeline: their schedulers, and when the stages worked on their batches.

A batch goes through the S stages of a pipeline, and others follow it (SARATHI §5.3). So there are S
*micro-batches*. Each has its own scheduler, running requests and share of the memory, and all take
requests from one queue. A micro-batch goes on when its last batch has left the last stage.

A *bubble* is the time that a stage has been idle when a batch reaches it. It is charged to every
request in that batch (SARATHI §5.3). Idle time is no bubble while some micro-batch has no requests,
nor before the stage's first batch after that.

Read next: stages.py, lab/simulator/simulation.py."""

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from policies.observers import ChunkRecord
from request import Batch, Request
from scheduler import Scheduler


class StageRun(NamedTuple):
    """A batch on a stage. Times are in seconds."""

    replica: int
    stage: int
    micro_batch: int  # numbered over all replicas
    start: float
    end: float
    bubble: float
    chunks: list[ChunkRecord]


class StageTime(NamedTuple):
    """When a batch was on a stage, in seconds."""

    start: float
    end: float
    most_waited: float  # the stage waited for this batch at most so long


class MicroBatches:
    """The micro-batches of one pipeline of `pp` stages, or of several, its replicas.

    Each has one of the `schedulers`, which share a queue from here on. Times are in seconds."""

    def __init__(self, schedulers: Sequence[Scheduler], pp: int) -> None:
        self.pp = pp
        self.replicas = len(schedulers) // pp
        self.schedulers = schedulers
        self.reset()
        for scheduler in schedulers:
            scheduler.share_queue(schedulers)

    def reset(self) -> None:
        """Let time begin at 0."""
        stages = [(i, stage) for i in range(self.replicas) for stage in range(self.pp)]
        self.free = dict.fromkeys(stages, 0.0)  # when a stage has finished all that entered it
        self.busy = dict.fromkeys(stages, 0.0)  # how long a stage worked
        self.bubbles: dict[int, float] = defaultdict(float)  # by request id
        self.stage_runs: list[StageRun] = []  # of the batches that were booked with their chunks
        # of each micro-batch: since when it has had requests; infinity if it has none
        self.since = [0.0] * len(stages)

    @property
    def requests(self) -> dict[int, Request]:
        """By id, all that have not ended."""
        return self.schedulers[0].requests

    @property
    def queue(self) -> deque[Request]:
        """The requests that wait for any of the micro-batches."""
        return self.schedulers[0].waiting

    def next_batch(self, number: int, now: float) -> Batch | None:
        """The next Batch of a micro-batch; None if it has no requests. Raises RuntimeError if the
        policy has lost some, and nothing else is left to do."""
        scheduler = self.schedulers[number]
        if not (self.queue or scheduler.running):
            self.since[number] = math.inf
            if self.requests and not any([other.running for other in self.schedulers]):
                scheduler.next_batch()  # names the lost requests
            return None
        batch = scheduler.next_batch()
        self.since[number] = min(self.since[number], now)
        return batch

    def full_since(self, number: int) -> float:
        """Since when all micro-batches of its replica have had requests; infinity if one has none.

        The idle time of a stage that has had no batch since then is no bubble."""
        first = number // self.pp * self.pp
        return max(self.since[first : first + self.pp])

    def book(
        self,
        number: int,
        times: Sequence[StageTime],
        full_since: float,
        batch: Batch,
        chunks: list[ChunkRecord] | None = None,
    ) -> None:
        """Account for a batch: it was on each stage of its replica at these StageTimes.

        With its `chunks` it is recorded in `stage_runs`, too."""
        replica = number // self.pp
        bubbles_s = 0.0
        for stage, (start, end, most_waited) in enumerate(times):
            free = self.free[replica, stage]
            bubble = 0.0
            if free > full_since:  # before that, a micro-batch had nothing to do
                bubble = min(start - free, most_waited)
            if chunks is not None:
                self.stage_runs.append(StageRun(replica, stage, number, start, end, bubble, chunks))
            self.free[replica, stage] = end
            self.busy[replica, stage] += end - start
            bubbles_s += bubble
        if bubbles_s:
            for chunk in batch:
                self.bubbles[chunk.request.id] += bubbles_s
