"""The policies on a clock that only counts: no model, no tensors, a cost model instead.

    simulated = simulate(CostModel(...), EngineConfig("vllm", ...), arrivals)

Its pipelines are those of policies.micro_batches.py; no batch overtakes another: all its times are
known when it enters. Read first: scheduler.py, policies.micro_batches.py, lab/measure/load_run.py,
cost_model.py. Read next: papers.py."""

import heapq
import math
from collections import deque
from itertools import count

from engine import Completion, Event, Iteration, QueueFull, state_of
from errors import check_whole
from lab.measure.load_run import LoadRun
from policies.micro_batches import MicroBatches
from policies.priority import check_promise
from scheduler import Request


def simulate(cost, config, arrivals, prompts=None, *, replicas=1, record=True, **watching):
    """Serve `arrivals`: a Simulation. Its `run` is as of a real engine, its `utilisation` the share
    of the time that the stages worked, on average. `prompts` and `watching`: as of LoadRun. Raises
    ValueError where an engine would, and for prefix caching without prompts."""
    if config.prefix_caching and prompts is None:
        raise ValueError("prompts=None: prefix_caching needs their token ids")
    simulation = Simulation(cost, config, replicas=replicas, record=record)
    run = LoadRun(simulation, arrivals, prompts, **watching).run()
    busy_s, stages = sum(simulation.busy.values()), len(simulation.busy)
    own = simulation.batches * cost.pp * cost.cpu_s / (busy_s or 1.0)
    simulation.run = run._replace(own_fraction=own)
    simulation.utilisation = busy_s / (stages * run.seconds or 1.0)
    return simulation


class Simulation(MicroBatches):
    """A server for lab.measure.load_run.LoadRun, on a clock of its own, `now`. `cost` is a CostModel, or
    has its `stages`, `pp`, `cpu_s` and `tile`; `config` is as of MicroBatches. `record`: make an
    Iteration of each batch, its StageRuns, and an Event of each token, not only of the last."""

    missing = ()  # of the machine: nobody else uses it

    def __init__(self, cost, config, *, replicas=1, record=True):
        sizes = {"replicas": replicas, "page_size": config.page_size, "pages": config.pages}
        for name, size in sizes.items():  # a scheduler checks the other numbers
            check_whole(name, size, least=1)
        config = config.with_tile(cost.tile)
        self.cost, self.config, self.record = cost, config, record
        self.clock = lambda: self.now  # in seconds
        self.now, self.turns, self.batches, self.last_iteration = 0.0, count(), 0, None
        super().__init__(config, cost.pp, self.clock, replicas)
        # micro-batches: a heap of when they can go on, and those that are without work
        self.ready, self.idle = [], deque(range(len(self.schedulers)))
        self._wake()

    def _push(self, time, number):
        """Let it go on at that time, after all that may go on earlier, or were told so before."""
        heapq.heappush(self.ready, (time, time, next(self.turns), number))

    def _wake(self):
        """Let all that are idle look for work, the one that has been idle longest first."""
        while self.idle:
            self._push(self.now, self.idle.popleft())

    def ready_at(self):
        """When the next micro-batch can go on, in seconds; infinity if all wait for requests."""
        ready = self.ready
        while ready and (free := self.free[ready[0][3] // self.pp, 0]) > ready[0][0]:
            heapq.heapreplace(ready, (free, *ready[0][1:]))  # another one has just entered
        return ready[0][0] if ready else math.inf

    def wait_until(self, time):
        """Let time pass until then."""
        self.now = time

    def add(self, i, arrival, prompt=None):
        """Queue a request; without a prompt its tokens are alike. Raises QueueFull, ValueError."""
        self.schedulers[0].check_fits(arrival.prompt_len, arrival.output_len)
        self.bubbles[i] = 0.0
        self._wake()
        if self.config.max_waiting is not None and len(self.queue) >= self.config.max_waiting:
            raise QueueFull(f"max_waiting={self.config.max_waiting}: as many requests wait")
        time, n, output_len = arrival[:3]
        tokens, its = bytearray(n) if prompt is None else list(prompt), check_promise(*arrival[3:6])
        self.schedulers[0].add(Request(i, tokens, n, output_len, time, **its))

    def abort(self, i):
        """Give a request up. Returns its Completion."""
        request = self.requests[i]
        self.running_in(i).finish(request, "abort")
        return Completion.of(request)

    def step(self):
        """Let the next micro-batch that is ready send a batch through its pipeline, if it has work:
        the Events of its tokens, which are known when it leaves the last stage."""
        self.now, self.last_iteration = self.ready_at(), None
        number = heapq.heappop(self.ready)[3]
        scheduler, batch = self.schedulers[number], self.next_batch(number, self.now)
        if batch is None:
            self.idle.append(number)
            return []
        if self.queue:
            self._wake()  # what it left, or preempted, is for the others
        chunks, (seconds, hop) = batch.record() if self.record else None, self.cost.stages(batch)
        times, arrived = [], self.now
        for stage, duration in enumerate(seconds):
            start = max(arrived, self.free[number // self.pp, stage])  # it may still be at work
            times.append((start, end := start + duration, math.inf))
            arrived = end + hop
        self.book(number, times, self.full_since(number), batch, chunks)
        self._push(end, number)
        scheduler.observe(batch, end - self.now)  # a TBT has what it waits for stages, too
        self.batches += 1
        if self.record:
            its = self.now, end, chunks, self.now + self.cost.cpu_s
            self.last_iteration = Iteration(*its, *state_of(self.schedulers, batch), number)
        tokens = [0 if start + n == len(request.tokens) else None for request, start, n in batch]
        return [
            Event(r.id, token, None, r.finish_reason, Completion.of(r) if r.finish_reason else None)
            for r, token in scheduler.advance(batch, tokens, end)
            if self.record or r.finish_reason
        ]


def bubble_kinds(stage_runs):
    """[(StageRun, "PB1", "PB2" or "PB3")] for each that a stage waited for, idle after one batch
    while another was still computed elsewhere (SARATHI §3.2). PB1: both have prefill, of different
    length; PB2: one has and one has not; PB3: both are decodes alone, of different context."""
    done, last, kinds = {}, {}, []  # whether there was prefill: last on a stage, in a micro-batch
    for run in stage_runs:
        stage, micro_batch = (run.replica, run.stage), run.micro_batch
        prefill = any(not is_decode for *_, is_decode in run.chunks)
        if run.bubble:  # the first stage waits for this micro-batch's last batch, others for this
            both = (prefill if run.stage else last.get(micro_batch, prefill)) + done[stage]
            kinds.append((run, ("PB3", "PB2", "PB1")[both]))
        done[stage] = last[micro_batch] = prefill
    return kinds
