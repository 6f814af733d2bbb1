"""Engines on ranks with a whole model each: replicas, or one that prefills and one that decodes.

    torchrun --nproc-per-node 2 bench.py serve --pools 1:1

Rank 0 decides for both and computes its own batches in a thread. So no rank waits for the other
while it has work. A step handles one reply: a batch is computed, or keys and values have arrived.
Read first: policies/pools.py, stages.py, transfer.py."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from parallel.stages import RanksEngine, SentChunk
from parallel.transfer import Link
from policies.pools import Sent, Transfer, TwoPools
from request import Batch
from scheduler import Scheduler

WAIT_S = 0.001  # a step waits so long for a reply; then a request that arrives can be added


class Sending(NamedTuple):
    """A transfer on the link."""

    transfer: Transfer
    prefilled: float  # when its last token was known, on the engine's clock
    start: float


class ReplicasEngine(RanksEngine):
    """An engine whose ranks have a whole model, a cache and a scheduler of the policy each."""

    @property
    def in_flight(self) -> bool:
        """Whether any rank works for this engine."""
        return bool(self.pending())

    def pending(self) -> list[int]:
        """The commands whose replies are to come."""
        return [flight.command for flight in self.flights.values()]

    def wait_for_batch(self) -> int | None:
        """Let all ranks have work, and wait for one reply, but not for long."""
        self.launch()
        pending = self.pending()
        command = self.ranks.first_reply(pending, WAIT_S) if pending else None
        if command is None:
            return None
        ranks = {flight.command: rank for rank, flight in self.flights.items()}
        if command not in ranks:
            self.on_reply(command)
        return ranks.get(command)

    def launch(self) -> None:
        """Let each rank that is free compute the next batch of its scheduler."""
        for rank in range(len(self.schedulers)):
            if rank not in self.flights:
                self._begin_batch(rank)

    def send(self, number: int, batch: Batch) -> int:
        """Let the rank of a scheduler compute a batch, without waiting."""
        chunks = [SentChunk.of(chunk) for chunk in batch]
        return self.ranks.tell(number, "run", self.runner.key, chunks)

    def on_reply(self, command: int) -> None:
        """Handle a reply that is not that of a batch."""


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
            prefill_pages=[config.pages_of()],
            decode_pages=[replace(config, prefix_caching=False).pages_of()],
            **config.limits,
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
        self.link.forget_all_but(self.sending)
        self.pools.start_transfers()
        started = {sending.transfer for sending in self.sending.values()}
        for transfer in self.pools.transfers.values():
            if transfer.target is not None and transfer not in started:
                prefilled = transfer.request.token_times[-1]
                number = next(self.ranks.numbers)
                self.sending[number] = Sending(transfer, prefilled, start=self.clock())
        for number, sending in list(self.sending.items()):
            if number not in self.link.sending:  # begun above, or before an interrupt
                self._send_pages(number, sending.transfer)
        super().launch()

    def _send_pages(self, number: int, transfer: Transfer) -> None:
        """Begin a transfer; but end it if it is of no use since an interrupt."""
        request = transfer.request
        is_dropped = self.pools.transfers.get(request) is not transfer
        if is_dropped or request.finish_reason is not None:
            self.pools.end_transfer(transfer)
            self.sending.pop(number)
        else:
            self.link.send(number, self.runner.cache, request.pages, transfer.tokens)

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
        self.sending.pop(command)
        self.ranks.replies.pop(command)


class ChunkedPoolsEngine(PoolsEngine):
    """As PoolsEngine, with prompts in chunks."""

    cuts_prompts = True
