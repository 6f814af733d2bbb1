"""The micro-batches of a pipeline: who schedules each, and when the stages worked on its batches.

A batch goes through the S stages of a pipeline (SARATHI §5.3), and others follow it: there are S
*micro-batches*, each with a scheduler, running requests and a share of the memory of its own, and
all take from one queue. A micro-batch goes on when its last batch has left the last stage.

A *bubble* is the time that a stage has been idle when a batch reaches it, and is charged to every
request in that batch (SARATHI §5.3). It is none while a micro-batch has no requests, and until a
stage has had its first batch after that. Read next: parallel/stages.py, lab/simulator/simulation.py."""

import math
from collections import defaultdict
from typing import NamedTuple

from kv_cache import Pages


class StageRun(NamedTuple):
    """A batch on a stage. Times in seconds; `chunks` as in engine.Iteration."""

    replica: int
    stage: int
    micro_batch: int  # numbered over all replicas
    start: float
    end: float
    bubble: float
    chunks: list


class MicroBatches:
    """Those of some pipelines of `pp` stages, under an EngineConfig with all numbers given, where
    max_batch is of each, and pages are what those of a replica share. `bubbles` has the seconds of
    each request, `stage_runs` what was booked with a record."""

    def __init__(self, config, pp, clock, replicas=1):
        self.pp, self.replicas = pp, replicas
        self.reset()
        memory = config.pages // pp, config.page_size, config.prefix_caching
        self.schedulers = [config.scheduler(Pages(*memory), clock) for _ in self.free]
        self.queue, self.requests = self.schedulers[0].waiting, self.schedulers[0].requests
        for scheduler in self.schedulers:
            if scheduler is not self.schedulers[0]:
                scheduler.share_queue(self.schedulers[0])

    def reset(self):
        """Let time begin at 0."""
        # (replica, stage) -> when it has finished all that entered, and seconds that it worked
        self.free = {(i, stage): 0.0 for i in range(self.replicas) for stage in range(self.pp)}
        self.busy, self.bubbles, self.stage_runs = dict(self.free), defaultdict(float), []
        # of each micro-batch: since when it has had requests; infinity if it has none
        self.since = [0.0] * len(self.free)

    @property
    def begun(self):
        """How often all requests have begun anew: batches from before are of no use."""
        return self.schedulers[0].restarts

    def next_batch(self, number, now):
        """The next Batch of a micro-batch; None if it has no requests."""
        self.schedulers[0].mend()
        if not (self.queue or self.schedulers[number].running):
            self.since[number] = math.inf
            return None
        batch = self.schedulers[number].next_batch()
        self.since[number] = min(self.since[number], now)
        return batch

    def full_since(self, number):
        """Since when all micro-batches of its replica have had requests; infinity if one has none.
        A stage that has had no batch since then waits for no bubble."""
        first = number // self.pp * self.pp
        return max(self.since[first : first + self.pp])

    def running_in(self, request_id):
        """The scheduler under which a request runs; any, if it waits."""
        its = (s for s in self.schedulers if any(r.id == request_id for r in s.running))
        return next(its, self.schedulers[0])

    def book(self, number, times, full_since, batch, chunks=None):
        """A batch was on its replica's stages, each with (start, end, most seconds that the stage
        waited for it) of `times`: account for it. With its `chunks` there is a record."""
        replica, waited = number // self.pp, 0.0
        for stage, (start, end, most) in enumerate(times):
            free = self.free[replica, stage]
            bubble = min(start - free, most) if free > full_since else 0.0  # else: too little to do
            if chunks is not None:
                self.stage_runs.append(StageRun(replica, stage, number, start, end, bubble, chunks))
            self.free[replica, stage] = end
            self.busy[replica, stage] += end - start
            waited += bubble
        for request, _, _ in batch:
            self.bubbles[request.id] += waited
