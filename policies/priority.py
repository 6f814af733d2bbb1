"""Requests that are not equal: classes, and targets for TTFT and TBT. Read first: dynamic.py."""

import math
from bisect import bisect_left, insort

from errors import check_one_of, check_positive
from policies.dynamic import Dynamic
from policies.iteration_time import BatchShape
from scheduler import Batch

PRIORITIES = ("realtime", "high", "normal", "low")  # Request.priority is the index: less is urgent
HIGH = 1


def check_promise(priority="normal", ttft_slo=None, tbt_slo=None):
    """These fields of a Request: its class by name, its targets in seconds. Raises ValueError."""
    check_one_of("priority", priority, PRIORITIES)
    targets = {"ttft_slo": ttft_slo, "tbt_slo": tbt_slo}.items()
    its = {name: None if s is None else check_positive(name, s) for name, s in targets}
    return its | {"priority": PRIORITIES.index(priority)}


class ClassQueue:
    """A waiting queue with the methods of a deque that a scheduler uses, and little more cost:
    ordered by class, and within a class by `deadline`, a function of a request, asked when it
    joins. Each `ageing` seconds lift who waits by one class, so that no class starves."""

    def __init__(self, deadline, ageing, clock):
        self.deadline, self.ageing, self.clock = deadline, ageing, clock
        self._queue = []  # (class, deadline, arrival, id, request), sorted
        self._lifts = []  # (when it is lifted by a class, id, request), sorted
        self._entries = {}  # request -> its entries in both

    def __len__(self):
        return len(self._entries)

    def __iter__(self):
        return iter(self._entries)

    def __getitem__(self, index):
        """queue[0] is the head, and all that can be asked for. Raises IndexError if nobody waits."""
        now = self.clock()
        while self._lifts and self._lifts[0][0] <= now:
            its_class, deadline, *_, request = self._entries[self._lifts[0][-1]][0]
            self.remove(request)
            self._join(request, its_class - 1, deadline)
        return self._queue[index][-1]

    def aged_class(self, request):
        """The class of a request after the time it has been there."""
        lifts = max(0.0, (self.clock() - request.arrival) / self.ageing)
        return request.priority - int(min(lifts, request.priority))  # it may be infinity

    def append(self, request):
        """Let a request join its class."""
        self._join(request, self.aged_class(request), self.deadline(request))

    def appendleft(self, request):
        """Let a request join its class in front, behind those in front that arrived earlier."""
        self._join(request, self.aged_class(request), -math.inf)

    def _join(self, request, its_class, deadline):
        lifts = request.priority - its_class + 1
        lifted_at = request.arrival + self.ageing * lifts if its_class else math.inf
        place = its_class, deadline, request.arrival, request.id, request
        self._entries[request] = place, (lifted_at, request.id, request)
        for entries, entry in zip((self._queue, self._lifts), self._entries[request]):
            insort(entries, entry)

    def remove(self, request):
        """Take a request out, wherever it stands. Raises KeyError if it does not wait."""
        for entries, entry in zip((self._queue, self._lifts), self._entries.pop(request)):
            del entries[bisect_left(entries, entry)]

    def clear(self):
        """Take all of them out."""
        self.__init__(self.deadline, self.ageing, self.clock)


class Priority(Dynamic):
    """Stall-free batching in which prefills are ordered by class, then by deadline: arrival, TTFT
    target (`ttft_slo` seconds for those without one) and the time its own prefill takes. So the
    short prompt goes first, even if the long one has begun. `ageing` seconds lift a request by one
    class. The token budget is dynamic where decodes have TBT targets, and meets the tightest; else
    it is `chunk`. Lower classes are preempted for a realtime or high request at risk."""

    def __init__(self, *args, ttft_slo=2.0, ageing=30.0, **options):
        super().__init__(*args, **options)
        self.ttft_slo = check_positive("ttft_slo", ttft_slo)
        self.waiting = ClassQueue(self.deadline, check_positive("ageing", ageing), self.clock)
        self.aged_class = self.waiting.aged_class

    def rank(self, request):
        return self.aged_class(request), request.arrival, request.id

    def deadline(self, request):
        """When its first token is due."""
        whole = BatchShape().with_chunk(0, len(request.tokens))  # all of it, half-way too
        target = request.ttft_slo or self.ttft_slo
        return request.arrival + target + self.iteration_time.predict(whole)

    def urgency(self, request):
        """What prefills are ordered by, the smallest first."""
        return self.aged_class(request), self.deadline(request), request.id

    def too_slow(self, decodes):
        """Whether these miss the TBT target of a realtime or high one even without any prefill."""
        targets = [r.tbt_slo for r in decodes if r.tbt_slo and r.priority <= HIGH]
        predicted = self.iteration_time.predict(BatchShape.of_decodes(decodes))
        return predicted > min(targets, default=math.inf)

    def in_the_way(self, decodes):
        """The lower classes whose decodes or memory put a realtime or high request at risk. It is
        at risk if these decodes take too long for its TBT target, or if half its TTFT target has
        gone and there is no token budget left for it beside them, or no room."""
        prefills = self.prefilling()
        head = self.waiting[0] if self.waiting else None
        urgent = [r for r in (head, *prefills) if r and r.priority <= HIGH]
        late = [r for r in urgent if self.clock() - r.arrival >= (r.ttft_slo or self.ttft_slo) / 2]
        full = late and self.token_budget(decodes, prefills) <= len(decodes)
        slow = self.too_slow(decodes) or full
        lower = [r for r in decodes if slow and self.aged_class(r) > HIGH]
        if not lower and head in late and not self.room_for(head):
            lower = [r for r in self.running if self.aged_class(r) > HIGH]
        return lower

    def decoding(self):
        """As in Scheduler, after lower classes were preempted for those at risk."""
        decodes = super().decoding()
        while lower := self.in_the_way(decodes):
            self.preempt(max(lower, key=self.rank))
            decodes = [request for request in decodes if request.pages]
        return decodes

    def admit(self):
        if self.waiting and self.aged_class(head := self.waiting[0]) > HIGH:
            if self.too_slow([*self.running, head]):
                return None  # it would be preempted once it and those that prefill now decode
        return super().admit()

    def tbt_slo_of(self, decodes):
        targets = [slo for slo in (self.tbt_slo, *(r.tbt_slo for r in decodes)) if slo]
        return min(targets) if decodes and targets else None

    def schedule(self):
        decodes, prefills, queue = self.decoding(), self.prefilling(), self.waiting
        batch = Batch(self.token_budget(decodes, prefills))
        batch.add_decodes(decodes)
        prefills.sort(key=self.urgency)
        while batch.left > 0:
            first = queue and (not prefills or self.urgency(queue[0]) < self.urgency(prefills[0]))
            request = first and self.admit() or prefills and prefills.pop(0)
            if not request:
                break
            batch.add(request)
        return batch
