"""An Engine whose model is in several processes: micro-batches in flight through its stages.

Rank 0 schedules. A step begins the batch of a micro-batch that has work, or else waits for the
oldest batch under way. A batch's chunks go to all ranks at once, its activations from stage to
stage, without waiting for the next one. The tokens that the last stage has sampled come back to
rank 0. Read first: micro_batches.py, ranks.py, shard.py."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from config import EngineConfig
from engine import Engine, no_interrupt
from model import GPT, FlatBatch
from parallel.micro_batches import MicroBatches
from parallel.ranks import Ranks
from parallel.shard import Shard
from policies import scheduler_of
from policies.observers import Iteration
from pretrained.tokenizers import Tokenizer
from request import Batch, Chunk, Event, lone_chunk
from runtime.memory import MAX_BATCH, fill_in
from runtime.runner import Runner, Sampled, tokens_of
from sampling import SamplingParams
from scheduler import Scheduler

NOTHING = [(0, 0.0)]  # what is sent after a batch that yields no token


class SentChunk(NamedTuple):
    """What ranks are told of a chunk: the tokens before it are in their caches."""

    pages: list[int]
    start: int
    tokens: list[int]
    yields_token: bool
    params: SamplingParams
    position: int  # which output token of its request it decides, if it yields one

    @classmethod
    def of(cls, chunk: Chunk, first_page: int = 0) -> Self:
        """The chunk of a request whose pages begin at `first_page` of the cache."""
        request = chunk.request
        return cls(
            pages=[first_page + page for page in request.pages],
            start=chunk.start,
            tokens=chunk.tokens,
            yields_token=chunk.yields_token,
            params=request.params or SamplingParams(),
            position=len(request.tokens) - request.prompt_len,
        )

    def chunk(self) -> Chunk:
        """A chunk that a model computes alike."""
        return lone_chunk(self.pages, self.start, self.tokens, self.yields_token)


class Stage:
    """The methods that rank 0 lets all ranks call, on their Shard and the cache of each runner."""

    def __init__(self, model: Shard) -> None:
        self.model = model
        self.runners: dict[int, Runner] = {}  # by ParallelRunner.key
        self.alive: WeakSet[ParallelRunner] = WeakSet()  # on rank 0: those that somebody uses
        self.sending: deque[Any] = deque()  # what is on its way to another rank
        self.sampled: deque[Tensor] = deque()  # on rank 0, if it is the last stage

    def free_caches_except(self, keys: Sequence[int]) -> None:
        """Forget all runners but those of these keys."""
        self.runners = {key: self.runners[key] for key in keys}

    def available_pages(self, config: EngineConfig) -> int:
        """How many pages a cache has under this config: as many as the smallest rank has room for.

        Raises ValueError on a rank where it does not fit."""
        return min(self.model.ranks.gather(fill_in(config, self.model).pages or 0))

    def make_runner(self, key: int, *arguments: Any) -> None:
        """Make the Runner of this key."""
        runner = Runner(self.model, *arguments)
        runner.cache.data.zero_()  # memory that was never written may be slow to compute with
        self.runners[key] = runner

    @torch.inference_mode()
    def run(self, key: int, sent: list[SentChunk]) -> None:
        """Compute a batch: receive the activations of the stage before, compute the layers of this
        one, and send the activations on, or sample and send the tokens to rank 0."""
        model = self.model
        ranks = model.ranks
        runner = self.runners[key]
        batch = FlatBatch.build([chunk.chunk() for chunk in sent], runner.attention)
        if ranks.stage == 0:
            x = model.embed(batch)
        else:
            x = model.final_norm.weight.new_empty(len(batch.tokens), model.config.n_embd)
            dist.recv(x, ranks.rank - ranks.tp)
        x: Tensor = model.compute_layers(x, batch, runner.cache)
        if ranks.stage < ranks.pp - 1:
            self._send(x, ranks.rank + ranks.tp)
            return
        yielding = [chunk for chunk in sent if chunk.yields_token]
        params = [chunk.params for chunk in yielding]
        positions = [chunk.position for chunk in yielding]
        sampled = runner.fetch(model.logits(x, batch), params, positions)
        if ranks.part > 0:
            return
        pairs = [(token, math.nan if logprob is None else logprob) for token, logprob in sampled]
        rows = torch.tensor(pairs or NOTHING, dtype=torch.float64)
        if ranks.rank == 0:
            self.sampled.append(rows)
        else:
            self._send(rows, 0)

    def _send(self, x: Tensor, rank: int) -> None:
        """Send a tensor, and do not wait: but for those of long ago."""
        self.sending.append(dist.isend(x, rank))
        if len(self.sending) > 2 * self.model.ranks.pp:
            self.sending.popleft().wait()

    def collect(self, chunks: Sequence[Chunk]) -> list[Sampled]:
        """On rank 0: what was sampled after those of these chunks that yield a token. They are the
        batch that was sent first of those under way."""
        ranks = self.model.ranks
        count = sum(chunk.yields_token for chunk in chunks)
        rows = torch.empty(max(count, len(NOTHING)), 2, dtype=torch.float64)
        if ranks.pp == 1:
            rows = self.sampled.popleft()
        else:
            with ranks.unbroken():
                dist.recv(rows, ranks.size - ranks.tp)
        return [(int(token), logprob) for token, logprob in rows[:count].tolist()]


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
        self.stage: Stage = self.ranks.work
        self.ranks.command("free_caches_except", [runner.key for runner in self.stage.alive])
        self.key = max(self.stage.runners, default=0) + 1
        self.ranks.command("make_runner", self.key, pages, page_size, max_len, attention)
        local_runner = self.stage.runners[self.key]
        self.model = local_runner.model
        self.cache = local_runner.cache
        self.attention = local_runner.attention
        self.fast = local_runner.fast
        self.stage.alive.add(self)

    def send(self, chunks: list[SentChunk]) -> None:
        """Let all stages compute a batch, see Stage.collect."""
        self.ranks.command("run", self.key, chunks)

    def greedy(self, chunks: Sequence[Chunk]) -> list[int]:
        """As Runner.greedy, through all stages."""
        self.send([SentChunk.of(chunk) for chunk in chunks])
        return [token for token, _ in self.stage.collect(chunks)]


@dataclass(frozen=True)
class Flight:
    """A batch that ranks compute."""

    batch: Batch
    iteration: Iteration  # but for its end


class ParallelEngine(Engine):
    """An engine whose model is divided among all ranks.

    Each micro-batch has a scheduler, and at most one batch in flight; `self.scheduler` is the first
    one. `max_batch` is of each. They share the pages, as many as the smallest rank has room for."""

    runner: ParallelRunner

    def __init__(
        self,
        model: Any,
        config: EngineConfig | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        clock: Callable[[], float] = time.perf_counter,
        **fields: Any,
    ) -> None:
        config = config or EngineConfig(**fields)
        ranks: Ranks = model.ranks
        self.ranks = ranks
        self.flights: dict[int, Flight] = {}  # by micro-batch, the one that was sent first is first
        self.order = list(range(ranks.pp))  # of micro-batches: who landed first begins first
        of_all = replace(config, max_batch=config.max_batch and config.max_batch * ranks.pp)
        ranks.command("free_caches_except", [runner.key for runner in ranks.work.alive])
        pages = ranks.command("available_pages", of_all)
        max_batch = config.max_batch or min(pages // ranks.pp, MAX_BATCH)
        config = replace(config, pages=pages, max_batch=max_batch)
        super().__init__(model, config, tokenizer=tokenizer, clock=clock)

    def make_scheduler(self) -> Scheduler:
        """The first of all micro-batches' schedulers. All of them take from one queue."""
        pp = self.ranks.pp
        schedulers = [scheduler_of(self.config, self.clock, pp) for _ in range(pp)]
        self.micro_batches = MicroBatches(schedulers, pp)
        return schedulers[0]

    def make_runner(self, model: Any) -> Runner:
        """The runners of all ranks."""
        return ParallelRunner(model, *self.config.cache_sizes, self.config.attention)

    @property
    def in_flight(self) -> bool:
        """Whether any batch is in flight."""
        return bool(self.flights)

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended, or any batch is in flight."""
        return bool(self.scheduler.requests or self.flights)

    def step(self) -> list[Event]:
        """Send the next batch on its way, or else wait for the one that was sent first.

        Returns an Event for each new token. Raises AssertionError if the ranks are out of step."""
        self.ranks.check_in_step()
        self.last_iteration = None
        for number in self.order:
            if number not in self.flights and self._begin_batch(number):
                return []
        if not self.flights:
            return []
        number, flight = next(iter(self.flights.items()))
        with no_interrupt():
            return self._land(number, flight)

    def _begin_batch(self, number: int) -> bool:
        """Let the next batch of a micro-batch begin, if it has any. The cache has the pages of one
        micro-batch after the other."""
        start = self.clock()
        with no_interrupt():
            batch = self.micro_batches.next_batch(number, start)
            if not batch:
                return False
            scheduler = self.schedulers[number]
            iteration = Iteration.of(scheduler, batch, start, end=start, launch=self.clock())
            first_page = number * scheduler.pages.total
            self.runner.send([SentChunk.of(chunk, first_page) for chunk in batch])
            self.flights[number] = Flight(batch, iteration)
        return True

    def _land(self, number: int, flight: Flight) -> list[Event]:
        """Move the requests of a batch on that all stages have computed."""
        sampled = self.runner.stage.collect(flight.batch)
        del self.flights[number]
        self.order.remove(number)
        self.order.append(number)
        scheduler = self.schedulers[number]
        if flight.batch is not scheduler.batch:
            return []  # all was reset since it was sent
        now = self.clock()
        self.last_iteration = flight.iteration._replace(end=now)
        scheduler.observe(flight.batch, now - flight.iteration.start)
        tokens = tokens_of(flight.batch, sampled)
        return self.advance(scheduler, flight.batch, tokens, now)

    def reset(self) -> None:
        """As of Engine. Waits for the ranks, which compute what is of no use any more, unless they
        are out of step."""
        super().reset()
        while self.flights and self.ranks.in_step:
            self.step()
        self.flights.clear()


def engine_for(model: GPT) -> type[Engine]:
    """The class of engines that serve this model: on all ranks if it is a Shard, else here."""
    return ParallelEngine if isinstance(model, Shard) else Engine


def runner_for(model: GPT) -> type[Runner]:
    """The class of runners of this model, which compute batches without a scheduler."""
    return ParallelRunner if isinstance(model, Shard) else Runner
