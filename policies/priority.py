"""Requests that are not equal: classes, and targets for TTFT and TBT, beyond both papers.

Read first: scheduler.py, dynamic.py.
"""

import math
from bisect import bisect_left, insort

from checks import check_one_of, check_positive
from policies.dynamic import Dynamic
from policies.iteration_time import BatchShape
from scheduler import Batch

PRIORITIES = ("realtime", "high", "normal", "low")  # Request.priority is the index: less is urgent
HIGH = 1


def check_promise(priority="normal", ttft_slo=None, tbt_slo=None):
    """These fields of a Request: its class by name, its targets in seconds. Raises ValueError."""
    check_one_of("priority", priority, PRIORITIES)
    targets = dict(ttft_slo=ttft_slo, tbt_slo=tbt_slo)
    for name, value in targets.items():
        targets[name] = None if value is None else check_positive(name, value)
    return {"priority": PRIORITIES.index(priority), **targets}


class ClassLine:
    """A waiting line with the methods of a deque that a scheduler uses, and little more cost.

    It is ordered by class, and within a class by `deadline`, a function of a request, asked when it
    joins. Each `ageing` seconds lift who waits by one class, so that no class starves: in the end
    it stands in the most urgent one, where only the deadline counts, and of those that arrive later
    only so many have an earlier one.
    """

    def __init__(self, deadline, ageing, clock):
        self.deadline, self.ageing, self.clock = deadline, ageing, clock
        self._classes = [[] for _ in PRIORITIES]  # (deadline, arrival, id, request), sorted
        self._lifts = []  # (when it is lifted by a class, id, request), sorted
        self._entries = {}  # request -> (its class, its entry there, its entry in _lifts)

    def __len__(self):
        return len(self._entries)

    def __iter__(self):
        return iter(self._entries)

    def __contains__(self, request):
        return request in self._entries

    def aged_class(self, request):
        """The class of a request after the time it has been there."""
        lifts = max(0.0, (self.clock() - request.arrival) / self.ageing)
        return request.priority - int(min(lifts, request.priority))  # it may be infinity

    def append(self, request):
        """Let a request join its class."""
        self._join(request, self.aged_class(request), self.deadline(request))

    def appendleft(self, request):
        """Let a request join its class in front, behind those that did so and arrived earlier."""
        self._join(request, self.aged_class(request), -math.inf)

    def remove(self, request):
        """Take a request out, wherever it stands. Raises KeyError if it does not wait."""
        its_class, entry, lift = self._entries.pop(request)
        for line, place in ((self._classes[its_class], entry), (self._lifts, lift)):
            del line[bisect_left(line, place)]

    def clear(self):
        """Take all of them out."""
        self.__init__(self.deadline, self.ageing, self.clock)

    def __getitem__(self, index):
        """line[0] is the head, and all that can be asked for. Raises IndexError if nobody waits."""
        now = self.clock()
        while self._lifts and self._lifts[0][0] <= now:
            request = self._lifts[0][-1]
            its_class, entry, _ = self._entries[request]
            self.remove(request)
            self._join(request, its_class - 1, entry[0])
        return [line[0] for line in self._classes if line][index][-1]

    def _join(self, request, its_class, deadline):
        lifts = request.priority - its_class + 1
        lifted_at = request.arrival + self.ageing * lifts if its_class else math.inf
        entry = (deadline, request.arrival, request.id, request)
        lift = (lifted_at, request.id, request)
        self._entries[request] = its_class, entry, lift
        insort(self._classes[its_class], entry)
        insort(self._lifts, lift)


class Priority(Dynamic):
    """Stall-free batching in which prefills are ordered by class, then by the time to the deadline.

    The deadline is the arrival, the TTFT target (`ttft_slo` seconds for those without one) and the
    time its own prefill takes: of two requests with the same target the short prompt goes first,
    even if the long one has begun, and waits for it only if it came that much later. `ageing`
    seconds lift a request by one class. The token budget is dynamic where decodes have TBT targets,
    and meets the tightest; without a decode it is `chunk`, for whoever comes next not to be stuck.
    When a realtime or high request is at risk, lower classes are preempted.
    """

    def __init__(self, *args, ttft_slo=2.0, ageing=30.0, **options):
        super().__init__(*args, **options)
        self.ttft_slo = check_positive("ttft_slo", ttft_slo)
        self.waiting = ClassLine(self.deadline, check_positive("ageing", ageing), self.clock)
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

    def tightest_target(self, decodes, least_class=len(PRIORITIES)):
        """The smallest TBT target of decodes of this class or a more urgent one, or infinity."""
        targets = [r.tbt_slo for r in decodes if r.tbt_slo and r.priority <= least_class]
        return min(targets, default=math.inf)

    def too_slow(self, decodes):
        """Whether these miss the TBT target of a realtime or high one even without any prefill."""
        predicted = self.iteration_time.predict(BatchShape.of_decodes(decodes))
        return predicted > self.tightest_target(decodes, HIGH)

    def is_late(self, request):
        """Whether a realtime or high request has waited for half its TTFT target."""
        ttft_slo = request.ttft_slo or self.ttft_slo
        return request.priority <= HIGH and self.clock() - request.arrival >= ttft_slo / 2

    def in_the_way(self, decodes):
        """The lower classes whose decodes or memory put a realtime or high request at risk.

        It is at risk if these decodes take too long for its TBT target, or if half its TTFT target
        has gone and there is no token budget left for it beside them, or no room.
        """
        prefills = self.prefilling() if len(decodes) < len(self.running) else []
        head = self.waiting[0] if self.waiting else None
        head = head if head and self.is_late(head) else None
        late = head or any(self.is_late(request) for request in prefills)
        full = late and self.token_budget(decodes, prefills) <= len(decodes)
        if self.too_slow(decodes) or full:
            if lower := [request for request in decodes if self.aged_class(request) > HIGH]:
                return lower
        if head and not self.room_for(head):
            return [request for request in self.running if self.aged_class(request) > HIGH]
        return []

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

    def token_budget(self, decodes, prefills):
        target = min(self.tightest_target(decodes), self.tbt_slo or math.inf)
        if not decodes or target == math.inf:
            return self.chunk
        return self.budget_within(target, decodes, prefills)

    def schedule(self):
        decodes, prefills = self.decoding(), self.prefilling()
        batch = Batch(self.token_budget(decodes, prefills))
        batch.add_decodes(decodes)
        started = sorted(prefills, key=self.urgency, reverse=True)
        while batch.left > 0:
            head = self.waiting[0] if self.waiting else None
            first = head and (not started or self.urgency(head) < self.urgency(started[-1]))
            request = (first and self.admit()) or (started.pop() if started else None)
            if request is None:
                break
            batch.add(request)
        return batch
