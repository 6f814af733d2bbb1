"""Engines on ranks with a whole model each: replicas, or one that prefills and one that decodes.

    torchrun --nproc-per-node 2 bench.py serve --pools 1:1

Rank 0 decides for both and computes its own batches in a thread. So no rank waits for the other
while it has work. A step handles one reply: a batch is computed, or keys and values have arrived.
Read first: policies/pools.py, stages.py, transfer.py."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from config import EngineConfig
from engine import Completion, Computed, Engine, Event, Iteration, sampled_by_chunk
from parallel.stages import ParallelRunner, StageResult
from parallel.transfer import Link
from policies.micro_batches import MicroBatches
from policies.pools import Sent, Transfer, TwoPools
from scheduler import Batch, Scheduler

WAIT_S = 0.001  # a step waits so long for a reply; then a request that arrives can be added


@dataclass(frozen=True)
class Flight:
    """A batch that an instance computes."""

    command: int
    restarts: int  # of its scheduler: a batch from before the last one is of no use
    batch: Batch
    iteration: Iteration  # but for its end


class Sending(NamedTuple):
    """A transfer on the link."""

    transfer: Transfer
    prefilled: float  # when its last token was known, on the engine's clock
    start: float


class ReplicasEngine(Engine):
    """An engine whose ranks have a whole model, a cache and a scheduler of the policy each."""

    make_runner = ParallelRunner
    runner: ParallelRunner

    def _start(
        self, model: Any, config: EngineConfig, tokenizer: Any, clock: Callable[[], float]
    ) -> None:
        self.ranks = model.ranks
        alive = [runner.key for runner in self.ranks.work.alive]
        self.ranks.command("free_caches_except", alive)
        pages = min(self.ranks.call("available_pages", config))
        super()._start(model, replace(config, pages=pages), tokenizer, clock)
        self.micro_batches = MicroBatches(self.make_schedulers(), pp=1)  # one on each rank
        self.schedulers = self.micro_batches.schedulers
        self.scheduler = self.schedulers[0]
        self.flights: dict[int, Flight] = {}  # by rank
        self.landing: int | None = None  # the rank whose batch is recorded, until that is done

    def make_schedulers(self) -> Sequence[Scheduler]:
        """That of each rank. All of them take from one queue."""
        return self.config.schedulers(self.clock, pp=1, replicas=self.ranks.copies)

    @property
    def in_flight(self) -> bool:
        """Whether any rank works for this engine."""
        return bool(self.pending())

    def pending(self) -> list[int]:
        """The commands whose replies are to come."""
        return [flight.command for flight in self.flights.values()]

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended, or any rank works for this engine."""
        return bool(self.scheduler.requests or self.in_flight)

    def abort(self, request_id: int) -> Completion:
        """As of Engine."""
        self.scheduler = self.micro_batches.running_in(request_id)
        completion = super().abort(request_id)
        self.scheduler = self.schedulers[0]
        return completion

    def step(self) -> list[Event]:
        """Let all ranks have work, and wait for one reply, but not for long: its Events.

        May end all processes, as Ranks.command does."""
        self.last_iteration = None
        if self.landing is None:  # else an interrupt came while a batch was recorded
            self.launch()
            pending = self.pending()
            command = self.ranks.first_reply(pending, WAIT_S) if pending else None
            if command is None:
                return []
            ranks = {flight.command: rank for rank, flight in self.flights.items()}
            if command not in ranks:
                self.on_reply(command)
                return []
            self.landing = ranks[command]
        events = self._land(self.landing)
        flights = self._others(self.landing)
        self.scheduler = self.schedulers[0]
        self.flights, self._computed, self.landing = flights, None, None  # no interrupt in between
        return events

    def launch(self) -> None:
        """Let each rank that is free compute the next batch of its scheduler."""
        for rank, scheduler in enumerate(self.schedulers):
            if rank in self.flights:
                continue
            start = self.clock()
            batch = self.micro_batches.next_batch(rank, start)
            if not batch:
                continue
            inputs = self._inputs(batch)
            iteration = Iteration.begin(batch, self.schedulers, start, micro_batch=rank)
            iteration = iteration._replace(launch=self.clock())
            command = self.ranks.tell(rank, "run", self.runner.key, *inputs)
            self.flights[rank] = Flight(command, scheduler.restarts, batch, iteration)

    def on_reply(self, command: int) -> None:
        """Handle a reply that is not that of a batch."""

    def _land(self, rank: int) -> list[Event]:
        """The Events of the batch that a rank has computed. What its model raised is raised."""
        flight = self.flights[rank]
        self.scheduler = self.schedulers[rank]
        if self._computed is None:  # else an interrupt came while it was recorded
            if flight.restarts != self.scheduler.restarts:  # its requests have begun anew
                self.ranks.replies.pop(flight.command, None)
                return []
            result: StageResult | Exception = self.ranks.replies[flight.command][rank]
            if isinstance(result, Exception):
                self.scheduler = self.schedulers[0]
                self.flights, self.landing = self._others(rank), None
                self.ranks.replies.pop(flight.command)
                raise result
            now = self.clock()
            sampled = sampled_by_chunk(flight.batch, result.sampled)
            self.scheduler.observe(flight.batch, now - flight.iteration.start)
            self._computed = Computed(flight.batch, sampled, flight.iteration._replace(end=now))
        self.ranks.replies.pop(flight.command, None)
        return self._advance(self._computed)

    def _others(self, rank: int) -> dict[int, Flight]:
        """The flights of all ranks but one."""
        return {other: flight for other, flight in self.flights.items() if other != rank}


class PoolsEngine(ReplicasEngine):
    """An engine on two pools of one rank each: rank 0 prefills, rank 1 decodes.

    With `cuts_prompts` it prefills in chunks, else whole prompts; the policy of the config does not
    matter. `sent` has the transfers that have ended, in seconds on the engine's clock."""

    cuts_prompts = False

    def make_schedulers(self) -> Sequence[Scheduler]:
        """The prefill and the decode instance."""
        config = self.config
        self.link = Link(self.ranks, target=1)
        self.sending: dict[int, Sending] = {}  # by number of the transfer
        self.sent: list[Sent] = []
        self.pools = TwoPools(
            prefill_pages=[config.new_pages()],
            decode_pages=[replace(config, prefix_caching=False).new_pages()],
            chunk=self.scheduler.chunk,
            max_batch=self.scheduler.max_batch,
            max_len=self.scheduler.max_len,
            cuts_prompts=self.cuts_prompts,
            clock=self.clock,
        )
        return self.pools.schedulers

    def warm_up(self) -> None:
        """As of Engine."""
        super().warm_up()
        self.sent.clear()

    def pending(self) -> list[int]:
        """The commands whose replies are to come, and the transfers."""
        return [*super().pending(), *self.sending]

    def launch(self) -> None:
        """Send what there is memory for, and let each rank compute its next batch."""
        self.pools.start_transfers()
        on_link = {sending.transfer for sending in self.sending.values()}
        for transfer in list(self.pools.transfers.values()):
            if transfer.target is not None and transfer not in on_link:
                self._send_pages(transfer)
        super().launch()

    def _send_pages(self, transfer: Transfer) -> None:
        """Begin a transfer; but end it if it was aborted since an interrupt."""
        request = transfer.request
        if request.finish_reason is not None:
            self.pools.end_transfer(transfer)
            return
        number = next(self.ranks.numbers)
        start = self.clock()
        self.link.send(number, self.runner.cache, request.pages, transfer.tokens)
        self.sending[number] = Sending(transfer, request.token_times[-1], start)

    def on_reply(self, command: int) -> None:
        """End a transfer: its keys and values are on the decode instance. An interrupt may be
        anywhere; then this is called again."""
        transfer, prefilled, start = self.sending[command]
        end = self.ranks.replies[command][1] + self.clock() - time.perf_counter()
        # before they are reserved for others; a request that was aborted does no harm
        self.ranks.tell(1, "write", self.runner.key, command, transfer.target_pages)
        if self.pools.end_transfer(transfer):
            self.sent.append(
                Sent(transfer.request.id, 0, 1, transfer.tokens, prefilled, start, end)
            )
        self.link.forget(command)
        self.sending.pop(command)
        self.ranks.replies.pop(command)


class ChunkedPoolsEngine(PoolsEngine):
    """As PoolsEngine, with prompts in chunks."""

    cuts_prompts = True
