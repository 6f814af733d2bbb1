"""The policies on a clock that only counts: no model, no tensors, a cost model instead.

    simulated = simulate(CostModel(...), EngineConfig("vllm", ...), arrivals)

Its pipelines are those of parallel/micro_batches.py. No batch overtakes another, so that all times
of a batch are known when it enters. Read first: scheduler.py, parallel/micro_batches.py,
lab/measure/run_loop.py, cost_model.py. Read next: lab/claims/pipelines.py."""

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from config import EngineConfig
from lab.measure.arrival import Arrival
from lab.measure.run_loop import LoadRun, Run
from lab.simulator.cost_model import CostModel, StageTimes
from parallel.micro_batches import MicroBatches, StageRun, StageTime
from policies import scheduler_of, with_tile
from policies.observers import Iteration
from policies.priority import make_service
from request import Batch, Event, Request
from scheduler import (
    VLLM,
    Orca,
    OrcaBest,
    RequestLevel,
    Sarathi,
    SarathiServe,
    Scheduler,
)

# Policies that decode all running requests, and nothing else, when all decode and none waits
STEADY_POLICIES = (RequestLevel, Orca, OrcaBest, VLLM, Sarathi, SarathiServe)


@dataclass(frozen=True)
class Simulated:
    """What was seen of a simulation."""

    run: Run  # as of a real engine
    busy: dict[tuple[int, int], float]  # (replica, stage) -> seconds that it worked
    bubbles: dict[int, float]  # request -> seconds that stages waited for its batches
    stage_runs: list[StageRun]  # [] without a record


class Ready(NamedTuple):
    """An entry of the heap of micro-batches that can go on. The smallest goes first: the earliest,
    then the one that asked for the earliest time, then the one that asked first."""

    time: float  # when it can go on: when it asked to, or when its first stage is free
    asked_time: float
    turn: int
    micro_batch: int


@dataclass(slots=True)
class SteadyDecodes:
    """A batch that can be computed again, with one more token of each request, without asking the
    policy: all requests of a micro-batch decode, and for `left` more times none ends or needs a
    page. This is what simulations without a record spend most of their iterations on."""

    batch: Batch  # as it was first
    keys: int  # that the decodes read the next time, their own included
    left: int
    times: list[float] = field(default_factory=list)  # of tokens that the requests do not have yet

    @classmethod
    def of(cls, scheduler: Scheduler, batch: Batch) -> "SteadyDecodes | None":
        """The SteadyDecodes that follow a batch whose requests have moved on; None if there are
        none, or if the policy is none of STEADY_POLICIES."""
        if type(scheduler) not in STEADY_POLICIES or scheduler.observers:
            return None
        running = scheduler.running
        if len(batch) != len(running) or not batch[-1].request.is_decoding:
            return None
        page_size = scheduler.pages.page_size
        keys = len(batch)
        left = batch[0].request.max_new_tokens
        for (request, _, _), running_request in zip(batch, running, strict=True):
            computed = request.num_computed
            if request is not running_request or not request.is_decoding:
                return None
            room = len(request.pages) * page_size - computed
            tokens_left = request.prompt_len + request.max_new_tokens - len(request.tokens) - 1
            left = min(left, room, tokens_left)
            keys += computed
        return cls(batch, keys, left) if left > 0 else None

    def move_on(self, now: float) -> None:
        """Note that each request has one more token at time `now`."""
        self.times.append(now)
        self.keys += len(self.batch)
        self.left -= 1

    def settle(self) -> None:
        """Give the requests their tokens, as Scheduler.advance would have done one by one."""
        for request, _, _ in self.batch:
            request.num_computed += len(self.times)
            request.tokens.extend(bytes(len(self.times)))
            request.token_times += self.times


class Simulation(MicroBatches):
    """A server for LoadRun, on a clock of its own, `now`. `config` is as of MicroBatches. `record`:
    make an Iteration of each batch, its StageRuns, and an Event of each token, not only of a
    request's last."""

    probe_readings = ()  # no other process takes time of the machine

    def __init__(
        self, cost: CostModel, config: EngineConfig, *, replicas: int = 1, record: bool = True
    ) -> None:
        self.cost = cost
        self.config = with_tile(config, cost.tile)
        self.record = record
        self.now = 0.0  # in seconds
        self.batches = 0
        self.last_iteration: Iteration | None = None
        super().__init__(self.make_schedulers(replicas), cost.pp)
        self.turns = count()
        self.ready: list[Ready] = []  # a heap
        self.steady: list[SteadyDecodes | None] = [None] * len(self.schedulers)
        self.idle = deque(range(len(self.schedulers)))  # micro-batches that found no work
        self.coming: deque[float] = deque()  # when requests come, see serve
        self._wake()

    def serve(
        self,
        arrivals: Sequence[Arrival],
        prompts: Sequence[list[int]] | None = None,
        **watching: Any,
    ) -> Simulated:
        """Serve a load. `prompts` and `watching` are as of LoadRun. Raises ValueError where an
        engine would, and for prefix caching without prompts."""
        if self.config.prefix_caching and prompts is None:
            raise ValueError("prompts=None: prefix_caching needs their token ids")
        self.coming.extend(sorted([arrival.time for arrival in arrivals]))
        run = LoadRun(self, arrivals, prompts, **watching).run()
        return Simulated(run, self.busy, self.bubbles, self.stage_runs)

    def make_schedulers(self, replicas: int) -> Sequence[Scheduler]:
        """One for each micro-batch of all replicas."""
        pp = self.cost.pp
        return [scheduler_of(self.config, self.clock, pp) for _ in range(pp * replicas)]

    def clock(self) -> float:
        """The time of the simulation, in seconds."""
        return self.now

    def _push(self, time: float, micro_batch: int) -> None:
        """Let a micro-batch go on at that time."""
        heapq.heappush(self.ready, Ready(time, time, next(self.turns), micro_batch))

    def _wake(self) -> None:
        """Let all that are idle look for work, the one that has been idle longest first."""
        while self.idle:
            self._push(self.now, self.idle.popleft())

    def ready_at(self) -> float:
        """When the next micro-batch can go on, in seconds; infinity if all wait for requests."""
        ready = self.ready
        while ready:
            first = ready[0]
            free = self.free[first.micro_batch // self.pp, 0]  # its replica's first stage
            if free <= first.time:
                return first.time
            heapq.heapreplace(ready, first._replace(time=free))  # another one has just entered
        return math.inf

    def wait_until(self, time: float) -> None:
        """Let time pass until then."""
        self.now = time

    def add(self, i: int, arrival: Arrival, prompt: Sequence[int] | None = None) -> None:
        """Queue request i; without a prompt its tokens are alike. Raises QueueFull, ValueError."""
        self.config.check_fits(arrival.prompt_len, arrival.output_len)
        self.bubbles[i] = 0.0
        if self.coming:
            self.coming.popleft()
        self._wake()
        self.config.check_queue(len(self.queue))
        tokens: Any = bytearray(arrival.prompt_len) if prompt is None else list(prompt)
        request = Request(
            id=i,
            tokens=tokens,
            prompt_len=arrival.prompt_len,
            max_new_tokens=arrival.output_len,
            arrival=arrival.time,
            service=make_service(arrival.priority, arrival.ttft_slo, arrival.tbt_slo, arrival.user),
        )
        self.schedulers[0].add(request)

    def abort(self, i: int) -> Request:
        """Give request i up."""
        for micro_batch in range(len(self.steady)):
            self._settle(micro_batch)
        return self.schedulers[0].abort(i)

    def step(self) -> list[Event]:
        """Let the next micro-batch that is ready send a batch through its pipeline, if it has work.
        Returns the Events of its tokens, which are known when it leaves the last stage."""
        self.now = self.ready_at()
        self.last_iteration = None
        micro_batch = heapq.heappop(self.ready).micro_batch
        steady = self.steady[micro_batch]
        scheduler = self.schedulers[micro_batch]
        if steady and steady.left > 0 and not self._admits(scheduler):
            self._repeat(micro_batch, steady)
            return []
        self._settle(micro_batch)
        batch = self.next_batch(micro_batch, self.now)
        if batch is None:
            self.idle.append(micro_batch)
            return []
        if self.queue:
            self._wake()  # the others may take requests that it left, or preempted
        times = self._send_through(micro_batch, self.cost.stages(batch))
        end = times[-1].end
        self._push(end, micro_batch)
        chunks = None
        if self.record:
            launch = self.now + self.cost.cpu_s
            self.last_iteration = Iteration.of(scheduler, batch, self.now, end, launch)
            chunks = self.last_iteration.chunks
        self.book(micro_batch, times, self.full_since(micro_batch), batch, chunks)
        scheduler.observe(batch, end - self.now)  # a TBT includes waiting for stages, too
        # chunk.yields_token, written out: there are many chunks
        tokens = [0 if start + n == len(request.tokens) else None for request, start, n in batch]
        events = self.events_of(scheduler.advance(batch, tokens, end))
        if not (self.record or self.config.prefix_caching or self._admits(scheduler)):
            self.steady[micro_batch] = SteadyDecodes.of(scheduler, batch)
        return events

    def _admits(self, scheduler: Scheduler) -> bool:
        """Whether a scheduler could let the first in the queue run."""
        return bool(self.queue) and scheduler.room_for(self.queue[0]) is not None

    def events_of(self, new_tokens: list[tuple[Request, int]]) -> list[Event]:
        """The Events of new tokens; without a record of those that end a request, as nobody looks
        at the others."""
        return [
            Event.of(request, token)
            for request, token in new_tokens
            if self.record or request.finish_reason
        ]

    def _send_through(self, micro_batch: int, cost: StageTimes) -> list[StageTime]:
        """When a batch that enters now is on each stage."""
        seconds, hop_s = cost
        times = []
        arrived = end = self.now
        for stage, duration in enumerate(seconds):
            start = max(arrived, self.free[micro_batch // self.pp, stage])  # it may still be busy
            end = start + duration
            times.append(StageTime(start, end, most_waited=math.inf))
            arrived = end + hop_s
        self.batches += 1
        return times

    def _repeat(self, micro_batch: int, steady: SteadyDecodes) -> None:
        """Let a batch of decodes be computed again; that of the only micro-batch until a request
        comes, or the next time one would end or need a page."""
        until = self.now  # once
        if len(self.schedulers) == 1:
            until = self.coming[0] if self.coming else math.inf
        while True:
            cost = self.cost.decode_stages(len(steady.batch), steady.keys)
            times = self._send_through(micro_batch, cost)
            self.book(micro_batch, times, self.full_since(micro_batch), steady.batch)
            end = times[-1].end
            steady.move_on(end)
            if steady.left == 0 or until <= end:
                break
            self.now = end
        self._push(end, micro_batch)

    def _settle(self, micro_batch: int) -> None:
        """Let the policy decide again, of requests that have all their tokens."""
        steady = self.steady[micro_batch]
        if steady:
            steady.settle()
            self.steady[micro_batch] = None


def simulate(
    cost: CostModel,
    config: EngineConfig,
    arrivals: Sequence[Arrival],
    prompts: Sequence[list[int]] | None = None,
    *,
    replicas: int = 1,
    record: bool = True,
    **watching: Any,
) -> Simulated:
    """Serve `arrivals` on a clock that counts. `replicas` and `record` are as of Simulation, the
    rest as of its `serve`."""
    simulation = Simulation(cost, config, replicas=replicas, record=record)
    return simulation.serve(arrivals, prompts, **watching)


def bubble_kinds(stage_runs: Sequence[StageRun]) -> list[tuple[StageRun, str]]:
    """The kind of each bubble, "PB1", "PB2" or "PB3", with the StageRun that ended it (SARATHI
    §3.2). A stage was idle after one batch, while another was still computed elsewhere. PB1: both
    have prefill, of different length. PB2: one of them has. PB3: neither, contexts differ."""
    stage_had_prefill: dict[tuple[int, int], bool] = {}  # the last batch of (replica, stage)
    had_prefill: dict[int, bool] = {}  # the last batch of a micro-batch
    kinds = []
    for run in stage_runs:
        stage = (run.replica, run.stage)
        has_prefill = any(not is_decode for *_, is_decode in run.chunks)
        if run.bubble:
            # the first stage waited for this micro-batch's previous batch, others for this batch
            waited_for_prefill = has_prefill
            if run.stage == 0:
                waited_for_prefill = had_prefill.get(run.micro_batch, has_prefill)
            prefills = waited_for_prefill + stage_had_prefill[stage]
            kinds.append((run, ("PB3", "PB2", "PB1")[prefills]))
        stage_had_prefill[stage] = has_prefill
        had_prefill[run.micro_batch] = has_prefill
    return kinds
