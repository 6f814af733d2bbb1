"""The policies on a clock that only counts: no model, no tensors, a cost model instead.

    simulated = simulate(CostModel(...), EngineConfig("vllm", ...), arrivals)

A batch goes through the S stages of a pipeline (SARATHI §5.3), and others follow it: there are S
*micro-batches*, each with a scheduler, running requests and a share of the memory of its own, and
all take from one line. A micro-batch goes on when its last batch has left the last stage. No batch
overtakes another: all its times are known when it enters.

A *bubble* is the time that a stage has been idle when a batch reaches it, and is charged to every
request in that batch (SARATHI §5.3). It is none while a micro-batch has no requests, and until a
stage has had its first batch after that. Read first: scheduler.py, experiments/run.py,
cost_model.py. Read next: papers.py.
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
from scheduler import Request


class StageRun(NamedTuple):
    """A batch on a stage. Times in seconds; `chunks` as in engine.Iteration."""

    replica: int
    stage: int
    micro_batch: int  # numbered over all replicas
    start: float
    end: float
    bubble: float
    chunks: list


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


class Simulation:
    """A server for experiments.run.LoadRun, on a clock of its own, `now`. `cost` is a CostModel, or
    has its `stages`, `pp`, `cpu_s` and `tile`; `config` an EngineConfig with all numbers given:
    max_batch is of each micro-batch, pages are what those of a replica share. `bubbles` has the
    bubble time of each request. `record`: make an Iteration of each batch, its StageRuns, in
    `stage_runs`, and an Event of each token, not only the last of a request."""

    missing = ()  # of the machine: nobody else uses it

    def __init__(self, cost, config, *, replicas=1, record=True):
        sizes = {"replicas": replicas, "page_size": config.page_size, "pages": config.pages}
        for name, size in sizes.items():  # a scheduler checks the other numbers
            check_whole(name, size, least=1)
        config = config.with_tile(cost.tile)
        self.cost, self.config, self.record = cost, config, record
        self.clock = lambda: self.now  # in seconds
        self.now, self.turn, self.batches, self.last_iteration = 0.0, 0, 0, None
        self.ready, self.idle = [], deque()  # micro-batches: a heap of when, and those without work
        self.bubbles, self.stage_runs = [], []
        # (replica, stage) -> when it has finished all that entered, and seconds that it worked
        self.free = {(i, stage): 0.0 for i in range(replicas) for stage in range(cost.pp)}
        self.busy = dict(self.free)
        # of each replica: micro-batches without requests, and since when there are none
        self.workless, self.all_busy_since = [set() for _ in range(replicas)], [0.0] * replicas
        memory = config.pages // cost.pp, config.page_size, config.prefix_caching
        shares = [Pages(*memory) for _ in self.free]
        self.schedulers = [config.scheduler(share, self.clock) for share in shares]
        self.line, self.requests = self.schedulers[0].waiting, self.schedulers[0].requests
        for number, scheduler in enumerate(self.schedulers):
            scheduler.waiting, scheduler.requests = self.line, self.requests
            self._push(0.0, number)

    def _push(self, time, number):
        """Let it go on at that time, after all that may go on earlier, or were told so before."""
        heapq.heappush(self.ready, (time, time, self.turn, number))
        self.turn += 1

    def _wake(self):
        """Let all that are idle look for work, the one that has been idle longest first."""
        while self.idle:
            self._push(self.now, self.idle.popleft())

    def ready_at(self):
        """When the next micro-batch can go on, in seconds; infinity if all wait for requests."""
        ready = self.ready
        while ready and (free := self.free[ready[0][3] // self.cost.pp, 0]) > ready[0][0]:
            heapq.heapreplace(ready, (free, *ready[0][1:]))  # another one has just entered
        return ready[0][0] if ready else math.inf

    def wait_until(self, time):
        """Let time pass until then."""
        self.now = time

    def add(self, i, arrival, prompt=None):
        """Queue a request; without a prompt its tokens are alike. Raises QueueFull, ValueError."""
        self.schedulers[0].check_fits(arrival.prompt_len, arrival.output_len)
        self.bubbles += [0.0] * (i + 1 - len(self.bubbles))
        self._wake()
        if self.config.max_waiting is not None and len(self.line) >= self.config.max_waiting:
            raise QueueFull(f"max_waiting={self.config.max_waiting}: as many requests wait")
        time, n, output_len = arrival[:3]
        tokens, its = bytearray(n) if prompt is None else list(prompt), check_promise(*arrival[3:6])
        self.schedulers[0].add(Request(i, tokens, n, output_len, time, **its))

    def abort(self, i):
        """Give a request up. Returns its Completion."""
        request = self.requests[i]
        its = [its for its in self.schedulers if request in its.running] or self.schedulers
        its[0].finish(request, "abort")
        return Completion.of(request)

    def step(self):
        """Let the next micro-batch that is ready send a batch through its pipeline, if it has work:
        the Events of its tokens, which are known when it leaves the last stage."""
        self.now, self.last_iteration = self.ready_at(), None
        number = heapq.heappop(self.ready)[3]
        scheduler, replica = self.schedulers[number], number // self.cost.pp
        if not (self.line or scheduler.running):
            self.idle.append(number)
            self.workless[replica].add(number)
            return []
        batch = scheduler.next_batch()
        if self.line:
            self._wake()  # what it left, or preempted, is for the others
        if number in self.workless[replica]:
            self.workless[replica].remove(number)
            self.all_busy_since[replica] = self.now
        chunks = batch.record() if self.record else []
        runs = self._send(number, chunks, *self.cost.stages(batch))
        end = runs[-1].end
        self._push(end, number)
        scheduler.observe(batch, end - self.now)  # a TBT has what it waits for stages, too
        self.batches += 1
        bubble = sum([run.bubble for run in runs])
        for request, _, _ in batch:
            self.bubbles[request.id] += bubble
        if self.record:
            running = sum([len(its.running) for its in self.schedulers])
            free_pages = sum([its.pages.num_free for its in self.schedulers])
            state = len(self.line), running, free_pages, batch.budget, batch.preempted, number
            times = self.now, end, chunks, self.now + self.cost.cpu_s
            self.last_iteration = Iteration(*times, *state)
            self.stage_runs += runs
        tokens = [0 if start + n == len(request.tokens) else None for request, start, n in batch]
        return [
            Event(r.id, token, None, r.finish_reason, Completion.of(r) if r.finish_reason else None)
            for r, token in scheduler.advance(batch, tokens, end)
            if self.record or r.finish_reason
        ]

    def _send(self, number, chunks, seconds, hop):
        """The StageRuns of a batch that takes seconds[s] on stage s, and `hop` to the next one."""
        replica, time, runs = number // self.cost.pp, self.now, []
        for stage, duration in enumerate(seconds):
            free = self.free[replica, stage]
            start = max(time, free)  # the stage may still be at work
            end = start + duration
            all_busy = not self.workless[replica] and free > self.all_busy_since[replica]
            bubble = start - free if all_busy else 0.0  # else: too little to do
            runs.append(StageRun(replica, stage, number, start, end, bubble, chunks))
            self.free[replica, stage], time = end, end + hop
            self.busy[replica, stage] += duration
        return runs


def bubble_kinds(stage_runs):
    """[(StageRun, "PB1", "PB2" or "PB3")] for each that a stage waited for, idle after one batch
    while another was still computed elsewhere (SARATHI §3.2). PB1: both have prefill, of different
    length; PB2: one has and one has not; PB3: both are decodes alone, of different context."""
    done, last, kinds = {}, {}, []  # whether there was prefill: last on a stage, in a micro-batch
    for run in stage_runs:
        stage, micro_batch = (run.replica, run.stage), run.micro_batch
        prefill = any(not is_decode for *_, is_decode in run.chunks)
        if run.bubble:  # the first stage waits for this micro-batch's last batch, others for this
            both = (prefill if run.stage else last[micro_batch]) + done[stage]
            kinds.append((run, ("PB3", "PB2", "PB1")[both]))
        done[stage] = last[micro_batch] = prefill
    return kinds
