"""Two pools on a clock that counts: prefill here, decode there, and keys and values on a link.

    simulated = simulate_pools(cost, config, arrivals, Pools(2, 2), KVLink.of(cost, link))

The decisions are those of two_pools.py. Each instance is one GPU, or some that share its
layers. It is in a node of its own and has a port, through which all that it sends and receives
goes. A batch of prompts yields its keys and values layer by layer. They are sent meanwhile
(Splitwise §IV-C), so that only the last layer's transfer is exposed, unless the link is slower than
the prefill. Read first: two_pools.py, simulation.py."""

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from config import EngineConfig
from lab.measure.workload import Arrival
from lab.simulator.cost_model import CostModel
from lab.simulator.devices import Link
from lab.simulator.simulation import Simulated, Simulation
from lab.simulator.two_pools import Pools, PrefillInstance, Transfer, TwoPools
from parallel.micro_batches import StageTime
from policies import pages_of
from policies.observers import Iteration, Sent
from request import Event
from scheduler import Batch, Scheduler


class KVLink(NamedTuple):
    """What keys and values are sent over."""

    link: Link
    token_bytes: float  # of a token in all layers, through one link
    layers: int = 1  # that are sent one by one, each when it is computed

    @classmethod
    def of(cls, cost: CostModel, link: Link) -> "KVLink":
        """The KVLink of a model: each GPU sends its part, over its own link or over one for all."""
        gpus_of_link = 1 if link.per_gpu else cost.tp
        token_bytes = cost.kv_bytes * cost.layers * gpus_of_link
        return cls(link, token_bytes, cost.layers)

    def seconds(self, tokens: int, layers: int) -> float:
        """Seconds to send one of so many equal parts of the keys and values."""
        return self.link.step_s + tokens * self.token_bytes / layers / self.link.bytes_per_s


class Ports:
    """The ports of all instances. A port sends or receives one layer at a time, those first that
    are there first."""

    def __init__(self) -> None:
        self.free: dict[int, float] = defaultdict(float)  # when it has done all that it was given
        self.ends: dict[int, float] = defaultdict(float)  # when the last layer is sent

    def send(
        self, source: int, target: int, *, first: float, last: float, layers: int, layer_s: float
    ) -> float:
        """Send `layers`, of which the first is there at `first`, the last at `last`, and the others
        in between. Returns when the last one has arrived."""
        end = max(last, self.ends[source]) + layer_s
        for port in (source, target):
            self.free[port] = max(self.free[port], first) + layers * layer_s
            end = max(end, self.free[port])
        self.ends[source] = end
        return end


class Landing(NamedTuple):
    """A transfer that ends at some time. The first of a heap is the next."""

    end: float
    turn: int
    start: float
    transfer: Transfer


@dataclass
class Flight:
    """A batch that an instance computes."""

    batch: Batch
    start: float
    end: float
    iteration: Iteration | None
    landings: list[Landing] = field(default_factory=list)  # of requests in it


class PoolSimulation(Simulation):
    """As Simulation, with two pools. `cuts_prompts`: prefill in chunks, not whole. `sent` has the
    transfers that have ended. Raises ValueError for a pipeline."""

    def __init__(
        self,
        cost: CostModel,
        config: EngineConfig,
        pools: Pools,
        kv_link: KVLink,
        *,
        cuts_prompts: bool = False,
        record: bool = True,
    ) -> None:
        if cost.pp > 1:
            raise ValueError(f"pp={cost.pp}: must be 1, the instances of two pools have one stage")
        self.pools = pools
        self.kv_link = kv_link
        self.cuts_prompts = cuts_prompts
        self.ports = Ports()
        self.flights: dict[int, Flight] = {}  # by instance
        self.landings: list[Landing] = []  # a heap
        self.prefilled: dict[int, float] = {}  # request -> when its last prefill had ended
        self.sent: list[Sent] = []
        super().__init__(cost, config, replicas=pools.instances, record=record)

    def make_schedulers(self, replicas: int) -> Sequence[Scheduler]:
        """Those of both pools."""
        config = self.config
        caching = replace(config, prefix_caching=False)
        assert config.max_batch and config.max_len  # of a simulation
        self.two_pools = TwoPools(
            [pages_of(config) for _ in range(self.pools.prefill)],
            [pages_of(caching) for _ in range(self.pools.decode)],
            chunk=config.chunk,
            max_batch=config.max_batch,
            max_len=config.max_len,
            cuts_prompts=self.cuts_prompts,
            clock=self.clock,
        )
        return self.two_pools.schedulers

    def ready_at(self) -> float:
        """When the next batch can begin or has ended, or the next transfer has."""
        batch_at = super().ready_at()
        return min(batch_at, self.landings[0].end) if self.landings else batch_at

    def step(self) -> list[Event]:
        """Let the next transfer or batch end, or begin a batch. Returns the Events of its tokens at
        the end."""
        self.now = self.ready_at()
        self.last_iteration = None
        if self.landings and self.landings[0].end <= self.now:
            self._land(heapq.heappop(self.landings))
            return []
        number = heapq.heappop(self.ready).micro_batch
        if number in self.flights:
            return self._end_batch(number)
        batch = self.next_batch(number, self.now)
        if batch:
            self._begin_batch(number, batch)
        else:
            self.idle.append(number)
        return []

    def _begin_batch(self, number: int, batch: Batch) -> None:
        """Let an instance compute a batch, and send the layers of prompts that end with it."""
        scheduler = self.schedulers[number]
        end = self.now + self.cost.stages(batch).seconds[0]
        iteration = None
        if self.record:
            iteration = Iteration.of(scheduler, batch, self.now, end, self.now + self.cost.cpu_s)
        times = [StageTime(self.now, end, most_waited=end)]
        chunks = iteration.chunks if iteration else None
        self.book(number, times, self.full_since(number), batch, chunks)
        self.flights[number] = Flight(batch, self.now, end, iteration)
        self.batches += 1
        self._push(end, number)
        if isinstance(scheduler, PrefillInstance) and self.kv_link.layers > 1:
            scheduler.announce(batch)
            self._send()

    def _end_batch(self, number: int) -> list[Event]:
        """Let the requests of a batch move on. Returns the Events of its tokens."""
        flight = self.flights.pop(number)
        self.last_iteration = flight.iteration
        scheduler = self.schedulers[number]
        tokens = [0 if chunk.yields_token else None for chunk in flight.batch]
        new_tokens = scheduler.advance(flight.batch, tokens, self.now)
        if isinstance(scheduler, PrefillInstance):
            for request, _ in new_tokens:
                self.prefilled[request.id] = self.now
        for landing in flight.landings:
            heapq.heappush(self.landings, landing)
        self._push(self.now, number)
        self._wake()
        self._send()
        return self.events_of(new_tokens)

    def _send(self) -> None:
        """Start all transfers for which there is memory."""
        for transfer in self.two_pools.start_transfers():
            source = self._number(transfer.source)
            flight = self.flights.get(source)
            layers = 1
            first = last = self.now
            landings = self.landings
            if flight and transfer.request in transfer.source.running:  # its prefill still runs
                layers = self.kv_link.layers
                first = max(self.now, flight.start + (flight.end - flight.start) / layers)
                last = flight.end
                landings = flight.landings
            end = self.ports.send(
                source,
                self._number(transfer.target),
                first=first,
                last=last,
                layers=layers,
                layer_s=self.kv_link.seconds(transfer.tokens, layers),
            )
            landing = Landing(end, next(self.turns), self.now, transfer)
            heapq.heappush(landings, landing)

    def _number(self, instance: Scheduler | None) -> int:
        """The number of an instance."""
        return self.schedulers.index(instance)

    def _land(self, landing: Landing) -> None:
        """Let the request of a transfer decode, and others have the memory that it leaves."""
        transfer = landing.transfer
        if self.two_pools.end_transfer(transfer):
            sent = Sent(
                request_id=transfer.request.id,
                source=self._number(transfer.source),
                target=self._number(transfer.target),
                tokens=transfer.tokens,
                prefilled=self.prefilled[transfer.request.id],
                start=landing.start,
                end=landing.end,
            )
            self.sent.append(sent)
        self._wake()
        self._send()


def simulate_pools(
    cost: CostModel,
    config: EngineConfig,
    arrivals: Sequence[Arrival],
    pools: Pools,
    kv_link: KVLink,
    prompts: Sequence[list[int]] | None = None,
    *,
    cuts_prompts: bool = False,
    record: bool = True,
    **watching: Any,
) -> Simulated:
    """As simulation.simulate, with two pools; the Run has their transfers."""
    simulation = PoolSimulation(
        cost, config, pools, kv_link, cuts_prompts=cuts_prompts, record=record
    )
    simulated = simulation.serve(arrivals, prompts, **watching)
    return replace(simulated, run=replace(simulated.run, transfers=simulation.sent))
