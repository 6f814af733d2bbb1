"""The journal: what makes a Ctrl-C harmless, wherever it comes. Read first: scheduler.py."""

from collections import deque
from typing import Any

from request import Request


class Journal:
    """The requests that have not ended, and the queue, of one scheduler or of several.

    A change that is broken off may leave queue, block tables and free pages in disagreement. So
    each one is made in `with journal:`. If it does not come to its end, the next change begins with
    all requests in the queue and nothing computed. A pipeline's schedulers share a journal."""

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}  # by id
        self.waiting: deque[Request] = deque()
        self.schedulers: list[Any] = []
        self.broken = False  # True: a change is being made, or was broken off
        self.restarts = 0  # how often all requests have begun anew

    def join(self, *schedulers: Any) -> None:
        """Let these schedulers take their requests from here, too; some may do so already."""
        for scheduler in schedulers:
            if scheduler not in self.schedulers:
                scheduler.journal = self
                self.schedulers.append(scheduler)

    def __enter__(self) -> None:
        self.mend()
        self.broken = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.broken = kind is not None

    def mend(self) -> None:
        """If a change was broken off, let all requests begin anew."""
        if self.broken:
            self.begin_anew()

    def begin_anew(self) -> None:
        """Let all requests wait and be computed again, in an empty cache."""
        self.broken = True
        self.restarts += 1
        requests = list(self.requests.values())
        preempted = [request.id for request in requests if request.num_computed]
        for scheduler in self.schedulers:
            scheduler.forget(preempted if scheduler is self.schedulers[0] else [])
        self.waiting.clear()
        for request in requests:
            request.preemptions += request.num_computed > 0
            request.recomputed_tokens += request.num_computed
            request.num_computed = 0
            request.pages = []
            request.finish_reason = None
            self.waiting.append(request)
        self.broken = False
