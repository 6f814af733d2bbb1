"""An Engine whose model is in several processes: micro-batches in flight through its stages.

Rank 0 schedules. A batch's spans go to all ranks at once, its activations from stage to stage,
without waiting for the next one. The tokens that the last stage has sampled come back to rank 0,
with the times of all stages. Read first: policies/micro_batches.py, ranks.py and shard.py."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from config import MAX_BATCH, EngineConfig
from engine import (
    Completion,
    Computed,
    Engine,
    Event,
    Iteration,
    Runner,
    Sampled,
    StepInputs,
    sampled_by_chunk,
)
from kv_cache import Span
from parallel.shard import Shard
from policies.micro_batches import MicroBatches, StageTime
from sampling import SamplingParams
from scheduler import Batch


class StageResult(NamedTuple):
    """What a stage made of a batch. Times are in seconds, on Ranks.clock."""

    start: float
    end: float
    waited: float  # since the batch before, for commands, replies and activations
    sampled: list[Sampled]  # on the last stage


class StageSeconds(NamedTuple):
    """What a rank has spent its time with, in seconds."""

    now: float  # on Ranks.clock
    waited: float  # so far
    summing: float  # so far, in sums over the ranks of its stage


class Stage:
    """The methods that rank 0 lets all ranks call, on their Shard and the cache of each runner."""

    def __init__(self, model: Shard) -> None:
        self.model = model
        self.runners: dict[int, Runner] = {}  # by ParallelRunner.key
        self.alive: WeakSet[ParallelRunner] = WeakSet()  # on rank 0: those that somebody uses
        self.sending: deque[Any] = deque()  # activations on their way to the next stage
        self.waited_before = 0.0  # Ranks.waited, when the last batch came

    def free_caches_except(self, keys: Sequence[int]) -> None:
        """Forget all runners but those of these keys."""
        self.runners = {key: self.runners[key] for key in keys}

    def available_pages(self, config: EngineConfig) -> int:
        """How many pages a cache has under this config. Raises ValueError if it does not fit."""
        pages = config.for_model(self.model).pages
        assert pages is not None
        return pages

    def make_runner(
        self, key: int, pages: int, page_size: int, max_len: int | None, attention: str
    ) -> bool:
        """Make the Runner of this key. Returns True, so that rank 0 can wait for it."""
        runner = Runner(self.model, pages, page_size, max_len, attention)
        runner.cache.data.zero_()  # memory that was never written may be slow to compute with
        self.runners[key] = runner
        return True

    def seconds(self) -> StageSeconds:
        """What this rank has spent its time with so far."""
        ranks = self.model.ranks
        return StageSeconds(ranks.clock(), ranks.waited, self.model.sum_timer.total_s)

    @torch.inference_mode()
    def run(
        self,
        key: int,
        spans: list[Span],
        params: list[SamplingParams],
        positions: list[int],
    ) -> StageResult | None:
        """Compute a batch: receive the activations of the stage before, compute the layers of this
        one, and send the activations on, or sample. Part 0 of each stage returns a result."""
        model = self.model
        ranks = model.ranks
        runner = self.runners[key]
        is_last = ranks.stage == ranks.pp - 1
        start = ranks.clock()
        batch = runner.flatten(spans)
        if ranks.stage == 0:
            x = model.embed(batch)
        else:
            ready = ranks.clock()
            x = model.final_norm.weight.new_empty(len(batch.tokens), model.config.n_embd)
            dist.recv(x, ranks.rank - ranks.tp)
            runner.fetch(x, [], [])  # waits for a GPU
            start = ranks.clock()
            ranks.waited += start - ready
        waited = ranks.waited - self.waited_before
        self.waited_before = ranks.waited

        x: Tensor = model.compute_layers(x, batch, runner.cache)
        if is_last:
            sampled = runner.fetch(model.logits(x, batch), params, positions)
        else:
            sampled = runner.fetch(x, [], [])
        end = ranks.clock()
        if not is_last:
            self._send_on(x)
        model.sum_timer.read()
        if ranks.part > 0:
            return None
        return StageResult(start, end, waited, sampled)

    def _send_on(self, x: Tensor) -> None:
        """Send activations to the next stage, and do not wait: but for those of long ago."""
        ranks = self.model.ranks
        self.sending.append(dist.isend(x, ranks.rank + ranks.tp))
        if len(self.sending) > 2 * ranks.pp:
            self.sending.popleft().wait()


class ParallelRunner(Runner):
    """The runners of all ranks. Its model, cache and attention are those of rank 0."""

    def __init__(
        self,
        model: Shard,
        pages: int,
        page_size: int,
        max_len: int | None = None,
        attention: str = "auto",
    ) -> None:
        self.ranks = model.ranks
        self.key = next(model.ranks.numbers)
        stage: Stage = self.ranks.work
        self.ranks.command("free_caches_except", [runner.key for runner in stage.alive])
        self.ranks.call("make_runner", self.key, pages, page_size, max_len, attention)
        local_runner = stage.runners[self.key]
        self.model = local_runner.model
        self.cache = local_runner.cache
        self.attention = local_runner.attention
        stage.alive.add(self)

    def send(self, inputs: StepInputs) -> int:
        """Let all stages compute a batch. Returns the number of the command."""
        return self.ranks.command("run", self.key, *inputs)

    def collect(self, command: int) -> list[StageResult]:
        """The results of all stages for a command. Waits for them, and leaves them in
        Ranks.replies."""
        replies = self.ranks.wait_for_replies(command, self.ranks.pp * self.ranks.copies)
        return [replies[rank] for rank in sorted(replies)]

    def forget(self, command: int) -> None:
        """Drop the results that `collect` has left."""
        del self.ranks.replies[command]

    def greedy(self, spans: Sequence[Span]) -> list[int]:
        """As Runner.greedy, through all stages."""
        num_logits = sum(span.wants_logits for span in spans)
        inputs = StepInputs(list(spans), [SamplingParams()] * num_logits, [0] * num_logits)
        command = self.send(inputs)
        sampled = self.collect(command)[-1].sampled
        self.forget(command)
        return [token for token, _ in sampled]


@dataclass(frozen=True)
class InFlight:
    """A batch on its way through the stages."""

    command: int
    generation: int  # MicroBatches.begun: a batch of an earlier one is of no use
    batch: Batch
    iteration: Iteration  # but for its end
    full_since: float  # see MicroBatches


@dataclass(frozen=True)
class PipelineState:
    """What the micro-batches do: each is ready, or in flight. It is replaced as a whole, so that
    an interrupt leaves the old one or the new one."""

    ready: tuple[int, ...]  # numbers of micro-batches
    flights: tuple[InFlight, ...]  # the first was sent first


class ParallelEngine(Engine):
    """An engine on all ranks.

    `max_batch` is of each micro-batch. They share the pages, as many as the smallest rank has room
    for. With `record`, `micro_batches` learns what the stages do."""

    make_runner = ParallelRunner
    runner: ParallelRunner
    record = False

    def _start(
        self, model: Any, config: EngineConfig, tokenizer: Any, clock: Callable[[], float]
    ) -> None:
        ranks = model.ranks
        of_all = replace(config, max_batch=config.max_batch and config.max_batch * ranks.pp)
        ranks.command("free_caches_except", [runner.key for runner in ranks.work.alive])
        pages = min(ranks.call("available_pages", of_all))
        max_batch = config.max_batch or min(pages // ranks.pp, MAX_BATCH)
        config = replace(config, pages=pages, max_batch=max_batch)
        super()._start(model, config, tokenizer, clock)
        self.micro_batches = MicroBatches(self.config.schedulers(clock, ranks.pp), ranks.pp)
        self.schedulers = self.micro_batches.schedulers
        self.scheduler = self.schedulers[0]  # that of the micro-batch whose turn it is
        self.state = PipelineState(ready=tuple(range(ranks.pp)), flights=())

    @property
    def in_flight(self) -> bool:
        """Whether any batch is on its way."""
        return bool(self.state.flights)

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended, or any batch is on its way."""
        return bool(self.scheduler.requests or self.state.flights)

    def abort(self, request_id: int) -> Completion:
        """As of Engine."""
        self.scheduler = self.micro_batches.running_in(request_id)
        return super().abort(request_id)

    def step(self) -> list[Event]:
        """Send the next batch on its way, or else wait for the first: an Event for each new token.

        May end all processes, as Ranks.command does."""
        self.last_iteration = None
        if self._computed is None:  # else the tokens of a batch are there, and recorded first
            for number in self.state.ready:
                if self._send_batch(number):
                    return []
        if not self.state.flights:
            return []
        return self._land_first()

    def _send_batch(self, number: int) -> bool:
        """Let the next batch of a micro-batch begin, if it has any."""
        self.scheduler = self.schedulers[number]
        start = self.clock()
        batch = self.micro_batches.next_batch(number, start)
        if not batch:
            return False
        ready = tuple(other for other in self.state.ready if other != number)
        flight = self._launch(number, batch, start)
        self.state = PipelineState(ready, (*self.state.flights, flight))
        return True

    def _launch(self, number: int, batch: Batch, start: float) -> InFlight:
        """Send a batch to all ranks. The cache has the pages of one micro-batch after the other."""
        inputs = self._inputs(batch)
        first_page = number * self.scheduler.pages.total
        spans = [
            span._replace(pages=[first_page + page for page in span.pages]) for span in inputs.spans
        ]
        iteration = Iteration.begin(batch, self.schedulers, start, micro_batch=number)
        iteration = iteration._replace(launch=self.clock())
        generation = self.micro_batches.begun
        full_since = self.micro_batches.full_since(number)
        command = self.runner.send(inputs._replace(spans=spans))
        return InFlight(command, generation, batch, iteration, full_since)

    def _land_first(self) -> list[Event]:
        """Wait for the batch that was sent first: its Events."""
        flight, *later_flights = self.state.flights
        results = self.runner.collect(flight.command)
        events: list[Event] = []
        if self._computed or flight.generation == self.micro_batches.begun:
            events = self._land(flight, results)  # else its requests have begun anew
        ready = (*self.state.ready, flight.iteration.micro_batch)
        landed = PipelineState(ready, tuple(later_flights))
        self.state, self._computed = landed, None  # in one statement: no interrupt in between
        self.runner.forget(flight.command)
        return events

    def _land(self, flight: InFlight, results: list[StageResult]) -> list[Event]:
        """The Events of a batch, from the results of all stages."""
        batch = flight.batch
        number = flight.iteration.micro_batch
        self.scheduler = self.schedulers[number]
        if self._computed is None:  # else an interrupt came while it was recorded
            now = self.clock()
            shift = now - time.perf_counter()  # from Ranks.clock to this engine's
            times = [StageTime(r.start + shift, r.end + shift, r.waited) for r in results]
            sampled = sampled_by_chunk(batch, results[-1].sampled)
            if self.record:
                chunks = flight.iteration.chunks
                self.micro_batches.book(number, times, flight.full_since, batch, chunks)
            self.scheduler.observe(batch, now - flight.iteration.start)
            self._computed = Computed(batch, sampled, flight.iteration._replace(end=now))
        return self._advance(self._computed)
