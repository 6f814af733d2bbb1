"""Requests that are not equal: classes, and targets for TTFT and TBT, beyond both papers.

Read first: scheduler.py, dynamic.py. Read next: waiting.py, the line of this policy.
"""

import math

from checks import check_one_of, check_positive
from policies.dynamic import Dynamic
from policies.iteration_time import BatchShape
from policies.waiting import ClassLine, aged_class
from scheduler import Batch

PRIORITIES = ("realtime", "high", "normal", "low")  # Request.priority is the index: less is urgent
HIGH = 1


def check_promise(priority="normal", ttft_slo=None, tbt_slo=None):
    """These fields of a Request: its class by name, its targets in seconds. Raises ValueError."""
    check_one_of("priority", priority, PRIORITIES)
    for name, value in (("ttft_slo", ttft_slo), ("tbt_slo", tbt_slo)):
        if value is not None:
            check_positive(name, value)
    return dict(priority=PRIORITIES.index(priority), ttft_slo=ttft_slo, tbt_slo=tbt_slo)


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
        check_positive("ttft_slo", ttft_slo)
        check_positive("ageing", ageing)
        self.ttft_slo, self.ageing = ttft_slo, ageing
        self.waiting = ClassLine(self.deadline, ageing, self.clock, len(PRIORITIES))

    def aged_class(self, request):
        """The request's class after the time it has been there."""
        return aged_class(request, self.clock(), self.ageing)

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
        target = self.tightest_target(decodes, HIGH)
        predict = self.iteration_time.predict
        return target < math.inf and predict(BatchShape.of_decodes(decodes)) > target

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
        if head and not self.has_room(head):
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
