"""What all policies share: who waits, who runs, and who has which pages. Plain Python.

    scheduler.add(request)
    batch = scheduler.next_batch()          # calls schedule(), the policy: see scheduler.py
    tokens = ...                            # compute it (engine.py), or add up its time (simulator)
    scheduler.advance(batch, tokens, now)   # requests move on, and end

A request waits without pages. `admit` gives it pages and lets it run, `grow` gives it more. If none
is free, `preempt` takes those of the newest request, which waits again, first in the queue, and is
computed anew. By default each has one page of max_len tokens and needs no other. Read first:
scheduler.py. Read next: kv_cache.py."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

from kv_cache import Pages
from request import Batch, Request


class Admission(NamedTuple):
    """The memory that a request gets when it is admitted."""

    cached_pages: list[int]  # these hold its first tokens already
    new_pages: int  # so many are allocated


class Bookkeeping:
    """The requests of one scheduler, and their memory. Sizes are as of scheduler.Scheduler.

    Schedulers that share a queue, as those of micro-batches, are `peers` of each other."""

    watermark_percent = 0  # of the pages: admission leaves them for running requests to grow into
    to_recompute = 2  # tokens of a preempted request, at least: 1 would count as a decode

    def __init__(
        self,
        pages: Pages,
        chunk: int,
        max_batch: int,
        max_len: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pages = pages
        self.chunk = chunk
        self.max_batch = max_batch
        self.max_len = max_len
        self.clock = clock
        self.requests: dict[int, Request] = {}  # all that have not ended, by id
        self.waiting: deque[Request] = deque()  # the queue
        self.running: list[Request] = []  # in the order of admission
        self.batch = Batch()  # the one that is not yet computed, if any
        self.preempted: list[int] = []  # ids, since the last batch was computed
        self.peers: Sequence[Any] = [self]
        self.observers: list[Any] = []  # see policies/observers.py

    def share_queue(self, peers: Sequence[Any]) -> None:
        """Take requests from the queue of the first of these schedulers."""
        self.peers = peers
        self.requests = peers[0].requests
        self.waiting = peers[0].waiting

    # What a policy overrides; Scheduler.admit, too, for another order of the queue.

    def schedule(self) -> Batch:
        """The next Batch, admitting waiting requests; empty only if there is nothing to do."""
        raise NotImplementedError

    def reserved(self, request: Request) -> int:
        """How many tokens a request gets memory for when it is admitted; then it grows by pages."""
        return self.max_len

    def rank(self, request: Request) -> tuple[float, ...]:
        """The order of preemption: the highest rank goes first. Here it is the newest request."""
        return request.arrival, request.id

    def observe(self, batch: Batch, seconds: float) -> None:
        """Called with the time that a batch took, before its requests move on."""

    # What an engine calls.

    def add(self, request: Request) -> None:
        """Put a request at the end of the queue."""
        self.waiting.append(request)
        self.requests[request.id] = request
        for observer in self.observers:
            observer.added(self, request)

    def next_batch(self) -> Batch:
        """The policy's next Batch, the same until `advance`; empty if there is nothing to do."""
        # if computing it has failed, requests of the last batch may have been aborted since
        self.batch[:] = [chunk for chunk in self.batch if chunk.request.pages]
        if not self.batch:
            self.batch = self.schedule()
            assert isinstance(self.batch, Batch), f"schedule() returned {self.batch!r}, no Batch"
            self.batch.preempted = self.preempted
            if not self.batch:
                self.check_progress()
        for observer in self.observers:
            observer.decided(self, self.batch)
        return self.batch

    def check_progress(self) -> None:
        """Raise RuntimeError if no batch was made though requests wait or run here, or none runs at
        any peer."""
        has_own = bool(self.running or self.waiting)
        any_runs = any(peer.running for peer in self.peers)
        if self.requests and (has_own or not any_runs):
            raise RuntimeError(f"schedule() returned no chunk for requests {list(self.requests)}")

    def advance(
        self, batch: Batch, tokens: Sequence[int | None], now: float
    ) -> list[tuple[Request, int]]:
        """Move the requests of a computed batch on. Returns each new token with its request.

        `tokens` holds the token that was sampled after each chunk at time `now`, or None."""
        new_tokens: list[tuple[Request, int]] = []
        others = [peer.running for peer in self.peers if peer is not self]
        elsewhere = set(chain.from_iterable(others))
        for chunk, token in zip(batch, tokens, strict=True):
            request, start, length = chunk
            if request.finish_reason or request in elsewhere:
                continue  # it was aborted while the batch was computed, or preempted, and moved
            if request.pages:  # if not, it was preempted meanwhile, see policies/today.py
                request.num_computed = start + length
                self.pages.keep(request, start)
            if token is None:
                continue
            request.tokens.append(token)
            request.token_times.append(now)
            new_tokens.append((request, token))
            if token in request.stop:
                self.finish(request, "stop")
            elif len(request.tokens) == request.prompt_len + request.max_new_tokens:
                self.finish(request, "length")
        self.batch = Batch()
        self.preempted = []
        for observer in self.observers:
            observer.advanced(self, batch)
        return new_tokens

    def finish(self, request: Request, reason: str) -> None:
        """End a waiting or running request, and free its pages."""
        if request in self.running:
            self.stop(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        request.finish_reason = reason
        self.requests.pop(request.id, None)

    def abort(self, request_id: int) -> Request:
        """End a request, under whichever of the peers it runs, and return it. Raises KeyError."""
        request = self.requests[request_id]
        owner = next((peer for peer in self.peers if request in peer.running), self)
        owner.finish(request, "abort")
        return request

    def reset(self) -> None:
        """Drop all requests and all that is cached, whatever state they are in."""
        for request in self.requests.values():
            request.finish_reason = "abort"
        self.requests.clear()
        self.waiting.clear()
        self.running.clear()
        self.pages = self.pages.emptied()
        self.batch = Batch()
        self.preempted = []

    # Memory.

    def room_for(self, request: Request) -> Admission | None:
        """The Admission of a waiting request. None if too many requests run, or memory is short."""
        if len(self.running) >= self.max_batch:
            return None
        admission = self.plan_admission(request)
        # a cached page that is in no block table counts as free until it is taken
        needed_pages = admission.new_pages + self.pages.count_free(admission.cached_pages)
        if self.running:
            needed_pages += self.pages.total * self.watermark_percent // 100
        return admission if needed_pages <= self.pages.num_free else None

    def plan_admission(self, request: Request) -> Admission:
        """The cached pages that hold the first tokens of a request, and how many more it needs."""
        cached_pages = self.pages.find(request, self.to_recompute)
        reserved_pages = self.pages.needed(self.reserved(request))
        return Admission(cached_pages, reserved_pages - len(cached_pages))

    def grow(self, request: Request, tokens: int) -> None:
        """Give a running request memory for so many tokens. Preempts others, or itself, for it."""
        while request.pages and len(request.pages) * self.pages.page_size < tokens:
            new_page = self.pages.allocate(1, after=request.pages[-1])
            if new_page is not None:
                request.pages += new_page
            else:
                self.preempt(max(self.running, key=self.rank))

    def preempt(self, request: Request) -> None:
        """Take a running request's pages. It waits at the front, and is computed again.

        For a request that has no chunk in the batch yet: the chunk would stay there."""
        request.preemptions += 1
        request.recomputed_tokens += request.num_computed
        request.num_computed = 0
        self.preempted.append(request.id)
        self.stop(request)
        self.waiting.appendleft(request)

    def stop(self, request: Request) -> None:
        """Let a request run no more: it has ended, or lost its memory."""
        self.running.remove(request)
        self.pages.free(request.pages)
        request.pages = []
