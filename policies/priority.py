"""Requests that are not equal: classes, and targets for TTFT and TBT. Read first: dynamic.py."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import Any, NamedTuple, cast

from kv_cache import Pages
from policies.cards import card
from policies.dynamic import Dynamic
from policies.iteration_time import BatchShape
from request import Batch, Request, Service

PRIORITIES = ("realtime", "high", "normal", "low")  # Service.priority is the index: 0 is urgent
HIGH = 1


def make_service(
    priority: str = "normal",
    ttft_slo: float | None = None,
    tbt_slo: float | None = None,
    user: str = "",
) -> Service:
    """The Service of these. Raises ValueError for a priority that is not in PRIORITIES."""
    return Service(PRIORITIES.index(priority), ttft_slo, tbt_slo, user)


class Place(NamedTuple):
    """Where a request stands in a ClassQueue. The smallest goes first."""

    request_class: int
    deadline: float
    arrival: float
    id: int
    request: Request


class ClassQueue:
    """A queue ordered by class, and within a class by `deadline`, a function of a request.

    It has the methods of a deque that a scheduler uses, and costs little more. A deadline is
    computed when a request joins. Every `ageing` seconds a waiting request rises by one class, up
    to the class `highest`, so that no class starves. Places and lifts are heaps: a place that its
    request has left is passed over when it comes up."""

    def __init__(
        self,
        deadline: Callable[[Request], float],
        ageing: float,
        clock: Callable[[], float],
        highest: int = 0,
    ) -> None:
        self.deadline = deadline
        self.ageing = ageing
        self.highest = highest
        self.clock = clock
        self._places: list[Place] = []
        self._lifts: list[tuple[float, Place]] = []  # when who stands there rises by one class
        self._place_of: dict[Request, Place] = {}

    def __len__(self) -> int:
        return len(self._place_of)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._place_of)

    def __getitem__(self, index: int) -> Request:
        """queue[0] is the first request. Raises IndexError if the queue is empty."""
        now = self.clock()
        while self._lifts and self._lifts[0][0] <= now:
            _, place = heappop(self._lifts)
            if self._place_of.get(place.request) == place:
                self._join(place.request, place.request_class - 1, place.deadline)
        while self._place_of.get(self._places[0].request) != self._places[0]:
            heappop(self._places)
        return self._places[0].request

    def aged_class(self, request: Request) -> int:
        """The class of a request after the time that has passed since its arrival."""
        lifts = max(0.0, (self.clock() - request.arrival) / self.ageing)
        priority = request.service.priority
        most_lifts = max(0, priority - self.highest)
        return priority - int(min(lifts, most_lifts))  # `lifts` may be infinity

    def append(self, request: Request) -> None:
        """Let a request join its class."""
        self._join(request, self.aged_class(request), self.deadline(request))

    def appendleft(self, request: Request) -> None:
        """Let a request join its class in front, but behind earlier ones that are in front."""
        self._join(request, self.aged_class(request), -math.inf)

    def _join(self, request: Request, request_class: int, deadline: float) -> None:
        place = Place(request_class, deadline, request.arrival, request.id, request)
        self._place_of[request] = place
        heappush(self._places, place)
        if request_class > self.highest:
            lifts = request.service.priority - request_class + 1
            heappush(self._lifts, (request.arrival + self.ageing * lifts, place))

    def remove(self, request: Request) -> None:
        """Take a request out of the queue. Raises KeyError if it is not in it."""
        del self._place_of[request]

    def clear(self) -> None:
        """Take all requests out of the queue."""
        self._place_of.clear()


@card(
    "priority",
    "#a422e6",
    note="dynamic with classes and targets; urgent requests first, others are preempted",
)
class Priority(Dynamic):
    """Stall-free batching in which prefills are ordered by class, then by deadline.

    A deadline is arrival + TTFT target (`ttft_slo` seconds for requests without one) + the time of
    the request's own prefill. So a short prompt goes first, even if a long one has begun. Every
    `ageing` seconds lift a request by one class, up to `ageing_to`. In lasting overload all classes
    that are lifted to one wait alike: with "realtime" none starves, and realtime requests wait as
    long as low ones; with "normal" low ones wait no longer than normal ones, and realtime and high
    ones do not pay for them. The token budget is dynamic where decodes have TBT targets, and meets
    the tightest; else it is `chunk`. For a realtime or high request at risk the targets of lower
    classes are given up, and if that does not help, lower classes are preempted."""

    reorders = True
    ignores_lower_targets = False  # in this iteration: lower classes' TBT targets do not count

    def __init__(
        self,
        pages: Pages,
        *,
        ttft_slo: float = 2.0,
        ageing: float = 30.0,
        ageing_to: str = "realtime",
        **sizes: Any,
    ) -> None:
        super().__init__(pages, **sizes)
        self.ttft_slo = ttft_slo
        highest = PRIORITIES.index(ageing_to)
        self._class_queue = ClassQueue(self.deadline, ageing, self.clock, highest)
        self.waiting = cast("deque[Request]", self._class_queue)  # what is used of one

    def aged_class(self, request: Request) -> int:
        """The class of a request after the time that has passed since its arrival."""
        return self._class_queue.aged_class(request)

    def rank(self, request: Request) -> tuple[float, ...]:
        return self.aged_class(request), request.arrival, request.id

    def deadline(self, request: Request) -> float:
        """When its first token is due."""
        whole_prefill = BatchShape().with_chunk(0, len(request.tokens))  # even if it has begun
        seconds = self.iteration_time.predict(whole_prefill)
        return request.arrival + self.ttft_target(request) + seconds

    def ttft_target(self, request: Request) -> float:
        """How many seconds after its arrival the first token shall be there."""
        return request.service.ttft_slo or self.ttft_slo

    def urgency(self, request: Request) -> tuple[float, ...]:
        """The order of prefills: the smallest goes first."""
        return self.aged_class(request), self.deadline(request), request.id

    def tbt_slo_of(self, decodes: list[Request]) -> float | None:
        if not decodes:
            return None
        lower = self.lower_classes(decodes) if self.ignores_lower_targets else []
        targets = [request.service.tbt_slo for request in decodes if request not in lower]
        return min(filter(None, [self.tbt_slo, *targets]), default=None)

    def latest_start(self, prefills: list[Request]) -> int:
        """As in Dynamic, but a waiting request that is more urgent than all prefills counts, too.

        It may find most of its prompt in the cache, and so start later than all of them."""
        start = super().latest_start(prefills)
        cached_tokens = self.cached_tokens_of_head()
        if cached_tokens > start and self.head_is_first(sorted(prefills, key=self.urgency)):
            return cached_tokens if self.room_for(self.waiting[0]) else start
        return start

    def grow_decodes(self) -> list[Request]:
        """As in Scheduler, after the preemption of lower classes for requests at risk."""
        self.ignores_lower_targets = False
        decodes = super().grow_decodes()
        while lower := self.in_the_way(decodes):
            self.preempt(max(lower, key=self.rank))
            decodes = [request for request in decodes if request.pages]
        return decodes

    def in_the_way(self, decodes: list[Request]) -> list[Request]:
        """The running requests of lower classes that put a realtime or high request at risk.

        It is at risk if these decodes take too long for its TBT target. It is also at risk if half
        its TTFT target has gone, and there is no room for it, or no budget beside the decodes."""
        prefills = self.prefilling()
        head = self.waiting[0] if self.waiting else None
        late = [request for request in (head, *prefills) if request and self.is_late(request)]
        if late and not self.has_budget(decodes, prefills):
            self.ignores_lower_targets = True  # their targets, rather than their memory
        lower: list[Request] = []
        if self.too_slow(decodes) or (late and not self.has_budget(decodes, prefills)):
            lower = self.lower_classes(decodes)
        if not lower and head in late and not self.room_for(head):
            lower = self.lower_classes(self.running)
            return lower if self.would_fit(head, lower) else []
        return lower

    def has_budget(self, decodes: list[Request], prefills: list[Request]) -> bool:
        """Whether any prefill fits beside these decodes."""
        return self.token_budget(decodes, prefills) > len(decodes)

    def would_fit(self, request: Request, victims: list[Request]) -> bool:
        """Whether a waiting request has room once these have lost their memory."""
        staying = [running for running in self.running if running not in victims]
        kept = {page for running in staying for page in running.pages}
        cached_pages, needed_pages = self.plan_admission(request)
        needed_pages += len(kept.union(cached_pages))
        if staying:
            needed_pages += self.pages.total * self.watermark_percent // 100
        return len(staying) < self.max_batch and needed_pages <= self.pages.total

    def is_late(self, request: Request) -> bool:
        """Whether it is realtime or high, and half its TTFT target has gone."""
        waited = self.clock() - request.arrival
        return request.service.priority <= HIGH and waited >= self.ttft_target(request) / 2

    def too_slow(self, decodes: list[Request]) -> bool:
        """Whether these miss the TBT target of a realtime or high one even without any prefill."""
        targets = [r.service.tbt_slo for r in decodes if r.service.priority <= HIGH]
        tightest = min(filter(None, targets), default=math.inf)
        return self.iteration_time.predict(BatchShape.of_decodes(decodes)) > tightest

    def lower_classes(self, requests: list[Request]) -> list[Request]:
        """Those of these requests that are neither realtime nor high."""
        return [request for request in requests if self.aged_class(request) > HIGH]

    def admit(self) -> Request | None:
        """As in Dynamic, but a lower class waits if it would make the decodes too slow, or has lost
        its memory in this iteration."""
        if self.waiting:
            head = self.waiting[0]
            if self.running and head.id in self.preempted:
                return None
            if self.aged_class(head) > HIGH and self.too_slow([*self.running, head]):
                return None  # it would be preempted as soon as all these requests decode
        return super().admit()

    def schedule(self) -> Batch:
        decodes = self.grow_decodes()
        prefills = sorted(self.prefilling(), key=self.urgency)
        batch = Batch(self.token_budget(decodes, prefills))
        batch.add_decodes(decodes)
        while batch.left > 0 and (request := self.next_prefill(prefills)):
            batch.add(request)
        return batch

    def next_prefill(self, prefills: list[Request]) -> Request | None:
        """Take the most urgent request: a waiting one, which is admitted, or the first prefill."""
        if self.waiting and self.head_is_first(prefills) and (request := self.admit()):
            return request
        return prefills.pop(0) if prefills else None

    def head_is_first(self, prefills: list[Request]) -> bool:
        """Whether the first waiting request is more urgent than the first of `prefills`."""
        return not prefills or self.urgency(self.waiting[0]) < self.urgency(prefills[0])
