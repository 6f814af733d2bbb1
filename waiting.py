"""A waiting line with classes, for the policy `priority` of scheduler.py. All other policies wait in a deque.

Who waits is ordered by class, and within a class by deadline. Each `ageing` seconds of waiting lift a request by one
class, so that no class starves: in the end it stands in the most urgent class, where only the deadline counts, and of
those that arrive later only so many have an earlier one.

Read next: scheduler.py, class Priority.
"""

import math
from heapq import heappop, heappush
from itertools import count


def aged_class(request, now, ageing):
    """The class of a request that has been there for a while: one less, more urgent, for each `ageing` seconds."""
    return max(0, request.priority - int((now - request.arrival) / ageing))


class ClassLine:
    """Requests in line, with the methods of a deque that a scheduler uses. Their cost hardly grows with the line.

    deadline   request -> its deadline, a time on the clock, asked when it joins
    ageing     seconds of waiting that lift a request by one class
    classes    how many there are
    """

    def __init__(self, deadline, ageing, clock, classes):
        self.deadline, self.ageing, self.clock = deadline, ageing, clock
        self._heaps = [[] for _ in range(classes)]  # for each class (deadline, serial, request)
        self._lifts = []  # (when it is lifted by a class, serial, request), a heap too
        self._places = {}  # request -> (serial, class, deadline); entries with another serial are void
        self._serials = count()

    def __len__(self):
        return len(self._places)

    def __iter__(self):
        return iter(self._places)

    def __contains__(self, request):
        return request in self._places

    def append(self, request):
        """Let a request join its class."""
        self._join(request, aged_class(request, self.clock(), self.ageing), self.deadline(request))

    def appendleft(self, request):
        """Let a request join its class at the front."""
        self._join(request, aged_class(request, self.clock(), self.ageing), -math.inf)

    def remove(self, request):
        """Take a request out, wherever it stands. Raises KeyError if it does not wait."""
        del self._places[request]

    def __getitem__(self, index):
        """line[0] is the head, and all that can be asked for. Raises IndexError if nobody waits."""
        now = self.clock()
        while self._lifts and (self._void(self._lifts[0]) or self._lifts[0][0] <= now):
            entry = heappop(self._lifts)
            if not self._void(entry):
                request = entry[2]
                _, its_class, deadline = self._places[request]
                self._join(request, its_class - 1, deadline)
        for heap in self._heaps:
            while heap and self._void(heap[0]):
                heappop(heap)
        return [heap[0] for heap in self._heaps if heap][index][2]

    def _join(self, request, its_class, deadline):
        serial = next(self._serials)
        self._places[request] = serial, its_class, deadline
        heappush(self._heaps[its_class], (deadline, serial, request))
        if its_class > 0:
            lift = request.arrival + self.ageing * (request.priority - its_class + 1)
            heappush(self._lifts, (lift, serial, request))

    def _void(self, entry):
        _, serial, request = entry
        return self._places.get(request, (None,))[0] != serial
