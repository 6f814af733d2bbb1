"""The policies on a clock that only counts: no model, no tensors, a cost model instead.

    simulated = simulate(CostModel(...), EngineConfig("vllm", ...), arrivals)

A Simulation is a server for experiments/run.py, as an engine is, but a batch goes through the S
stages of a pipeline (SARATHI §5.3), and others follow it. There are S *micro-batches*, each with a
scheduler, running requests and a share of the memory of its own; all take from one line. The next
iteration of a micro-batch begins when its last one has left the last stage. Stages are first come,
first served: no batch overtakes another, and all its times are known when it enters.

A *bubble* is the time that a stage has been idle when a batch reaches it, and is charged to every
request in that batch (SARATHI §5.3). It is none where there is too little to do to keep all stages
busy: while a micro-batch has no requests, and until a stage has had its first batch after that.

Read first: scheduler.py, experiments/run.py, cost_model.py. Read next: sarathi.py.
"""

import heapq
import math
from collections import deque
from typing import NamedTuple

from checks import check_whole
from engine import Completion, Event, Iteration, QueueFull
from experiments.run import LoadRun
from kv_cache import Pages
from policies.priority import check_promise
from scheduler import Request, Scheduler


class StageRun(NamedTuple):
    """A batch on a stage. Times in seconds; `chunks` as in engine.Iteration."""

    replica: int
    stage: int
    micro_batch: int
    start: float
    end: float
    bubble: float
    chunks: list


class Pipeline:
    """One replica: when each stage has finished all that entered, and how long each has worked.

    `idle` are the micro-batches without requests, `all_busy_since` when there ceased to be any.
    """

    def __init__(self, number, stages):
        self.number, self.free, self.busy = number, [0.0] * stages, [0.0] * stages
        self.idle, self.all_busy_since = set(), 0.0

    def enter(self, now, seconds, hop):
        """Send a batch through that takes seconds[s] on stage s: [(start, end, bubble)] of them."""
        spans, free, time = [], self.free, now
        for stage, duration in enumerate(seconds):
            idle = time - free[stage]
            all_busy = not self.idle and free[stage] > self.all_busy_since  # else: too little to do
            bubble = idle if idle > 0.0 and all_busy else 0.0
            time = max(time, free[stage])  # the stage may still be at work
            free[stage] = end = time + duration
            self.busy[stage] += duration
            spans.append((time, end, bubble))
            time = end + hop
        return spans


class MicroBatch(NamedTuple):
    """A scheduler with its share of the memory, and its pipeline; numbered over all pipelines."""

    number: int
    scheduler: Scheduler
    pipeline: Pipeline


def simulate(cost, config, arrivals, *, progress=None, **more):
    """Serve `arrivals`, sorted by time: a Simulation, and its `run` is as of a real engine.

    The rest: see Simulation and LoadRun. Raises ValueError where an engine would.
    """
    simulation = Simulation(cost, config, **more)
    run = LoadRun(simulation, arrivals, progress=progress).run()
    own = simulation.batches * cost.pp * cost.cpu_s / (sum(simulation.busy.values()) or 1.0)
    simulation.run = run._replace(own_fraction=own)
    return simulation


class Simulation:
    """A server for experiments.run.LoadRun, on a clock of its own, `now`.

    `cost` is a CostModel, or has its `stages`, `pp`, `cpu_s` and `tile`; `config` an EngineConfig
    whose numbers are all given: max_batch is that of each micro-batch, the pages are what those of
    a pipeline share. All `replicas` take from one line. `record`: make an Iteration for each batch,
    and an Event for each token, not only for the last of a request.

    `bubbles` has the bubble time of each request over all stages, and with `timeline` `stage_runs`
    a StageRun for each batch on each stage, as batches entered. The heap `ready` has each
    micro-batch that may go on, when, and its place among equals.
    """

    missing = ()  # of the machine: nobody else uses it

    def __init__(self, cost, config, *, replicas=1, record=True, timeline=False):
        sizes = {"replicas": replicas, "page_size": config.page_size, "pages": config.pages}
        for name, size in sizes.items():  # a scheduler checks the other numbers
            check_whole(name, size, least=1)
        config = config.with_tile(cost.tile)
        self.cost, self.config, self.record, self.timeline = cost, config, record, timeline
        self.clock = lambda: self.now  # in seconds
        self.now, self.ready, self.idle, self.turn = 0.0, [], deque(), 0  # idle: without work
        self.schedulers, self.pipelines = [], [Pipeline(i, cost.pp) for i in range(replicas)]
        self.bubbles, self.stage_runs, self.batches = [], [], 0
        self.last_iteration = None
        for number in range(replicas * cost.pp):
            pages = Pages(config.pages // cost.pp, config.page_size)
            scheduler = config.scheduler(pages, self.clock)
            self.schedulers.append(scheduler)
            first = self.schedulers[0]
            scheduler.waiting, scheduler.requests = first.waiting, first.requests
            self._push(0.0, MicroBatch(number, scheduler, self.pipelines[number // cost.pp]))
        self.line, self.requests = first.waiting, first.requests

    def _push(self, time, micro_batch):
        """Let it go on at that time, after all that may go on earlier, or were told so before."""
        heapq.heappush(self.ready, (time, time, self.turn, micro_batch))
        self.turn += 1

    def _wake(self):
        """Let all that are idle look for work, the one that has been idle longest first."""
        while self.idle:
            self._push(self.now, self.idle.popleft())

    def ready_at(self):
        """When the next micro-batch can go on, in seconds; infinity if all wait for requests."""
        ready = self.ready
        while ready and (free := ready[0][3].pipeline.free[0]) > ready[0][0]:
            heapq.heapreplace(ready, (free, *ready[0][1:]))  # another one has just entered
        return ready[0][0] if ready else math.inf

    def wait_until(self, time):
        """Let time pass until then."""
        self.now = time

    def add(self, i, arrival):
        """Put a request in the line. Raises QueueFull if max_waiting others stand in it, ValueError
        if it is too long."""
        self.schedulers[0].check_fits(arrival.prompt_len, arrival.output_len)
        self.bubbles.append(0.0)
        self._wake()
        if self.config.max_waiting is not None and len(self.line) >= self.config.max_waiting:
            raise QueueFull(f"max_waiting={self.config.max_waiting}: as many requests wait")
        time, n, output_len, *promise = arrival
        its = check_promise(*promise)
        self.schedulers[0].add(Request(i, bytearray(n), n, output_len, time, **its))

    def abort(self, i):
        """Give a request up. Returns its Completion."""
        request = self.requests[i]
        its = [its for its in self.schedulers if request in its.running] or self.schedulers
        its[0].finish(request, "abort")
        return Completion.of(request)

    def step(self):
        """Let the next micro-batch that is ready send a batch through its pipeline, if it has work.

        Returns the Events of its tokens, which are known when it leaves the last stage.
        """
        self.now, self.last_iteration = self.ready_at(), None
        micro_batch = heapq.heappop(self.ready)[3]
        number, scheduler, pipeline = micro_batch
        if not (self.line or scheduler.running):
            self.idle.append(micro_batch)
            pipeline.idle.add(number)
            return []
        batch = scheduler.next_batch()
        if self.line:
            self._wake()  # what it left, or preempted, is for the others
        if number in pipeline.idle:
            pipeline.idle.remove(number)
            pipeline.all_busy_since = self.now
        spans = pipeline.enter(self.now, *self.cost.stages(batch))
        end = spans[-1][1]
        self._push(end, micro_batch)
        scheduler.observe(batch, end - self.now)  # a TBT has what it waits for stages, too
        self._keep(micro_batch, batch, spans)
        tokens = [0 if start + n == len(request.tokens) else None for request, start, n in batch]
        return [
            Event(r.id, token, None, r.finish_reason, Completion.of(r) if r.finish_reason else None)
            for r, token in scheduler.advance(batch, tokens, end)
            if self.record or r.finish_reason
        ]

    def _keep(self, micro_batch, batch, spans):
        """Count a batch, and record it as was asked for, before its requests move on."""
        number, _, pipeline = micro_batch
        bubble = sum([bubble for _, _, bubble in spans])
        self.batches += 1
        for request, _, _ in batch:
            self.bubbles[request.id] += bubble
        chunks = batch.record() if self.record or self.timeline else []
        if self.timeline:
            where = [(pipeline.number, stage, number) for stage in range(len(spans))]
            self.stage_runs += [StageRun(*at, *its, chunks) for at, its in zip(where, spans)]
        if self.record:
            running = sum([len(scheduler.running) for scheduler in self.schedulers])
            free_pages = sum([scheduler.pages.num_free for scheduler in self.schedulers])
            state = len(self.line), running, free_pages, batch.budget, batch.preempted, number
            times = self.now, spans[-1][1], chunks, self.now + self.cost.cpu_s
            self.last_iteration = Iteration(*times, *state)

    @property
    def busy(self):
        """(replica, stage) -> seconds that it worked."""
        return {(p.number, stage): s for p in self.pipelines for stage, s in enumerate(p.busy)}

    @property
    def utilisation(self):
        """The share of the time of its `run` that the stages worked, on average."""
        return sum(self.busy.values()) / (len(self.busy) * self.run.seconds or 1.0)


def bubble_kinds(stage_runs):
    """Whose fault it was: [(StageRun, "PB1", "PB2" or "PB3")] for each that a stage waited for.

    SARATHI §3.2: while a stage is idle after one batch, another is still computed elsewhere. PB1:
    both have prefill, of different length; PB2: one has prefill and one has not; PB3: both are
    decodes alone, of different context.
    """
    done, last, kinds = {}, {}, []  # whether there was prefill: last on a stage, in a micro-batch
    for run in stage_runs:
        stage, micro_batch = (run.replica, run.stage), run.micro_batch
        prefill = any(not is_decode for *_, is_decode in run.chunks)
        if run.bubble:  # the first stage waits for this micro-batch's last batch, others for this
            both = (prefill if run.stage else last[micro_batch]) + done[stage]
            kinds.append((run, ("PB3", "PB2", "PB1")[both]))
        done[stage] = last[micro_batch] = prefill
    return kinds
