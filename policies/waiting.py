"""A waiting line with classes, for priority.py. All other policies wait in a deque.

Who waits is ordered by class, and within a class by deadline. Each `ageing` seconds of waiting lift
a request by one class, so that no class starves: in the end it stands in the most urgent one, where
only the deadline counts, and of those that arrive later only so many have an earlier one.
"""

import math
from bisect import bisect_left, insort


def aged_class(request, now, ageing):
    """The class of a request that has waited: one less for each `ageing` seconds."""
    lifted = request.priority - int((now - request.arrival) / ageing)
    return min(request.priority, max(0, lifted))


class ClassLine:
    """Requests in line, with the methods of a deque that a scheduler uses, and little more cost.

    deadline   request -> its deadline, a time on the clock, asked when it joins
    ageing     seconds of waiting that lift a request by one class
    classes    how many there are
    """

    def __init__(self, deadline, ageing, clock, classes):
        self.deadline, self.ageing, self.clock = deadline, ageing, clock
        self._classes = [
            [] for _ in range(classes)
        ]  # for each class (deadline, arrival, id, request), sorted
        self._lifts = []  # (when it is lifted by a class, id, request), sorted
        self._entries = {}  # request -> (its class, its entry there, its entry in _lifts)

    def __len__(self):
        return len(self._entries)

    def __iter__(self):
        return iter(self._entries)

    def __contains__(self, request):
        return request in self._entries

    def append(self, request):
        """Let a request join its class."""
        its_class = aged_class(request, self.clock(), self.ageing)
        self._join(request, its_class, self.deadline(request))

    def appendleft(self, request):
        """Let a request join its class in front, behind those that did so and arrived earlier."""
        self._join(request, aged_class(request, self.clock(), self.ageing), -math.inf)

    def remove(self, request):
        """Take a request out, wherever it stands. Raises KeyError if it does not wait."""
        its_class, entry, lift = self._entries.pop(request)
        for line, place in ((self._classes[its_class], entry), (self._lifts, lift)):
            del line[bisect_left(line, place)]

    def clear(self):
        """Take all of them out."""
        self.__init__(self.deadline, self.ageing, self.clock, len(self._classes))

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
        entry, lift = (
            (deadline, request.arrival, request.id, request),
            (lifted_at, request.id, request),
        )
        self._entries[request] = its_class, entry, lift
        insort(self._classes[its_class], entry)
        insort(self._lifts, lift)
