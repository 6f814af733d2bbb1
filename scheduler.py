"""The policies: which tokens to compute next. Plain Python, no tensors.

A batch is a list of chunks. A whole prefill is a chunk that covers the prompt. A decode is a chunk
of length 1. So every scheduler of SARATHI and Sarathi-Serve is one function, `schedule()`, from the
waiting and running requests to a batch:

    batch = scheduler.next_batch()          # calls schedule(), which admits and preempts
    tokens = ...                            # compute it (engine.py), or add up its time (simulator)
    scheduler.advance(batch, tokens, now)   # requests move on, and end

All policies here serve requests in order of arrival and never skip the first in the queue. Decodes
may exceed the token budget. On a first reading, skip what follows the line "Skip on a first
reading", up to the policies, which are short.

policies/ has all others, and the names of all. Read first: request.py. Read next: kv_cache.py."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from errors import ArgumentError, check_whole
from kv_cache import Pages
from request import Batch, Chunk, Request  # noqa: F401
from runtime.journal import Journal


class Admission(NamedTuple):
    """The memory that a request gets when it is admitted."""

    cached_pages: list[int]  # these hold its first tokens already
    new_pages: int  # so many are allocated


class Scheduler:
    """What all policies share. A policy is a subclass that defines `schedule`.

    `chunk` is C, the chunk size or token budget. `max_batch` is B, the number of requests that may
    run at once. `max_len` is the length of the longest request, prompt and output."""

    cuts_prompts = False  # into chunks of at most `chunk` tokens: for tables and pages
    drops_decodes = False  # for the referee: a batch may leave out decodes it has no room for
    shares_in_batch = False  # for the referee: a batch may read pages that it computes itself
    watermark_percent = 0  # of the pages: admission leaves them for running requests to grow into

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
        self.running: list[Request] = []  # in the order of admission
        self.batch = Batch()  # the one that is not yet computed, if any
        self.preempted: list[int] = []  # ids, since the last batch was computed
        self.observers: list[Any] = []  # see policies/observers.py
        self.journal: Journal
        Journal().join(self)  # sets it

    @property
    def requests(self) -> dict[int, Request]:
        """All requests that have not ended, by id."""
        return self.journal.requests

    @property
    def waiting(self) -> deque[Request]:
        """The queue. A policy may assign another one, even a list."""
        return self.journal.waiting

    @waiting.setter
    def waiting(self, requests: Any) -> None:
        self.journal.waiting = requests if hasattr(requests, "appendleft") else deque(requests)

    def schedule(self) -> Batch:
        """The next Batch, admitting waiting requests; empty only if there is nothing to do."""
        raise NotImplementedError

    # What a policy calls, and may override.

    def grow_decodes(self) -> list[Request]:
        """The running requests that decode, each with a page for its next token.

        If memory runs out, running requests are preempted, the one of the highest rank first."""
        decodes = [request for request in self.running if request.is_decoding]
        for request in decodes:
            if request.num_computed == len(request.pages) * self.pages.page_size:
                self.grow(request, request.num_computed + 1)
        return [request for request in decodes if request.pages]

    def prefilling(self) -> list[Request]:
        """The running requests whose prompt is not yet computed to its end."""
        return [request for request in self.running if not request.is_decoding]

    def reserved(self, request: Request) -> int:
        """How many tokens a request gets memory for when it is admitted; then it grows by pages."""
        return self.max_len

    def rank(self, request: Request) -> tuple[float, ...]:
        """The order of preemption: the highest rank goes first. Here it is the newest request."""
        return request.arrival, request.id

    def admit(self) -> Request | None:
        """Give the first waiting request its pages and let it run.

        Returns None if no request waits, or if there is no room for the first one."""
        if not self.waiting:
            return None
        request = self.waiting[0]
        admission = self.room_for(request)
        if admission is None:
            return None
        self.pages.take(admission.cached_pages)
        new_pages = self.pages.allocate(admission.new_pages)
        assert new_pages is not None, "room_for() has counted pages that are not free"
        request.pages = admission.cached_pages + new_pages
        request.num_computed = len(admission.cached_pages) * self.pages.page_size
        request.cached_tokens += request.num_computed
        self.running.append(request)
        self.waiting.remove(request)
        if request.scheduled is None:
            request.scheduled = self.clock()
        return request

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

    # What an engine calls.

    def check_fits(self, prompt_len: int, max_new_tokens: int) -> None:
        """Raise ValueError if such a request could never fit: it would be queued for ever."""
        if prompt_len + max_new_tokens > self.max_len:
            total = f"prompt of {prompt_len} tokens + max_new_tokens={max_new_tokens}"
            raise ArgumentError(f"{total}: must not exceed max_len={self.max_len}", "prompt")

    def add(self, request: Request) -> None:
        """Put a request at the end of the queue."""
        with self.journal:
            self.waiting.append(request)
            self.requests[request.id] = request
        for observer in self.observers:
            observer.added(self, request)

    def next_batch(self) -> Batch:
        """The policy's next Batch, the same until `advance`; empty if there is nothing to do."""
        with self.journal:
            # A request without pages was aborted, or has ended, since the batch was made.
            self.batch[:] = [chunk for chunk in self.batch if chunk.request.pages]
            if not self.batch:
                self.batch = self.schedule()
                if not self.batch:
                    self.check_progress()
                self.batch.preempted = self.preempted
        for observer in self.observers:
            observer.decided(self, self.batch)
        return self.batch

    def check_progress(self) -> None:
        """Raise RuntimeError if there is no batch, although requests wait, run or were lost."""
        schedule = f"{type(self).__name__}.schedule()"
        schedulers: list[Scheduler] = self.journal.schedulers
        kept = {r.id for other in schedulers for r in (*other.running, *other.waiting)}
        lost = sorted(self.requests.keys() - kept)
        if lost:
            raise RuntimeError(f"{schedule} lost requests {lost}: they neither wait nor run")
        if self.running or self.waiting:
            raise RuntimeError(f"{schedule} returned {self.batch!r}, but there are requests")

    def observe(self, batch: Batch, seconds: float) -> None:
        """Called with the time that a batch took, before its requests move on."""

    def advance(
        self, batch: Batch, tokens: Sequence[int | None], now: float
    ) -> list[tuple[Request, int]]:
        """Move the requests of a computed batch on. Returns each new token with its request.

        `tokens` holds the token that was sampled after each chunk at time `now`, or None. After an
        interrupt the engine calls this again, so each line checks whether it was done already."""
        self.journal.mend()
        new_tokens: list[tuple[Request, int]] = []
        for (request, start, length), token in zip(batch, tokens, strict=True):
            if request.finish_reason == "abort":
                continue
            end = start + length
            if request.pages:  # if not, it has lost them since the batch was made
                request.num_computed = end
                self.pages.keep(request, start)
            if token is None:
                continue
            output_index = end - request.prompt_len  # 0 for the first output token
            if output_index == len(request.token_times):
                request.token_times.append(now)
            if end == len(request.tokens):
                request.tokens.append(token)
            new_tokens.append((request, token))
            if token in request.stop:
                self.finish(request, "stop")
            elif output_index + 1 == request.max_new_tokens:
                self.finish(request, "length")
        self.batch = Batch()
        self.preempted = []
        for observer in self.observers:
            observer.advanced(self, batch)
        return new_tokens

    def finish(self, request: Request, reason: str) -> None:
        """End a waiting or running request and free its pages. The second time does nothing."""
        with self.journal:
            if request in self.running:
                self._stop(request)
            elif request in self.waiting:
                self.waiting.remove(request)
            request.finish_reason = reason
            self.requests.pop(request.id, None)

    def forget(self, preempted: list[int]) -> None:
        """Start over: nothing runs, the cache is empty. `preempted` are ids, see journal.py."""
        self.pages = self.pages.emptied()
        self.batch = Batch()
        self.running = []
        self.preempted = preempted

    # Skip on a first reading: memory.

    def plan_admission(self, request: Request) -> Admission:
        """The cached pages that hold the first tokens of a request, and how many more it needs."""
        cached_pages = self.pages.find(request)
        reserved_pages = self.pages.needed(self.reserved(request))
        return Admission(cached_pages, reserved_pages - len(cached_pages))

    def cached_tokens_of_head(self) -> int:
        """How many tokens of the first waiting request need not be computed."""
        if not self.waiting:
            return 0
        return len(self.plan_admission(self.waiting[0]).cached_pages) * self.pages.page_size

    def preempt(self, request: Request) -> None:
        """Take a running request's pages. It waits at the front, and is computed again.

        Its chunk, if a batch has it already, would stay there."""
        request.preemptions += 1
        request.recomputed_tokens += request.num_computed
        request.num_computed = 0
        self.preempted.append(request.id)
        self._stop(request)
        self.waiting.appendleft(request)

    def grow(self, request: Request, tokens: int) -> None:
        """Give a running request memory for so many tokens. Preempts others, or itself, for it."""
        while request.pages and len(request.pages) * self.pages.page_size < tokens:
            new_page = self.pages.allocate(1, after=request.pages[-1])
            if new_page is not None:
                request.pages += new_page
            else:
                self.preempt(max(self.running, key=self.rank))

    def _stop(self, request: Request) -> None:
        self.running.remove(request)
        self.pages.free(request.pages)
        request.pages = []


class RequestLevel(Scheduler):
    """FasterTransformer, Sarathi-Serve's Algorithm 1: a batch runs to its end, then the next."""

    def schedule(self) -> Batch:
        batch = Batch()
        if not self.running:
            while self.admit():
                pass
        for request in self.running:
            batch.add(request)  # the whole prompt the first time, then one token
        return batch


class Orca(Scheduler):
    """Iteration-level scheduling with hybrid batches: whole prompts join the running decodes."""

    most_prefills: float = math.inf  # that may begin in one batch

    def schedule(self) -> Batch:
        batch = Batch()
        admitted = 0
        while admitted < self.most_prefills and self.admit():
            admitted += 1
        for request in self.running:
            batch.add(request)  # max_len is reserved: no decode needs another page
        return batch


class OrcaBest(Orca):
    """SARATHI's best case for Orca (§5.2): one whole prompt at a time beside the decodes."""

    most_prefills = 1


class VLLM(Scheduler):
    """vLLM's scheduler of 2023, Sarathi-Serve's Algorithm 2: prompts first and alone."""

    watermark_percent = 1  # or the next decode would often preempt the request just admitted

    def reserved(self, request: Request) -> int:
        return len(request.tokens)

    def schedule(self) -> Batch:
        batch = Batch(self.max_len)  # §5.1: max_len tokens in whole prompts
        while self.head_fits(batch) and (request := self.admit()):
            batch.add(request)
        if not batch:
            batch.add_decodes(self.grow_decodes())
        return batch

    def head_fits(self, batch: Batch) -> bool:
        """Whether the first waiting request has a prompt that fits into the batch uncut."""
        if not self.waiting:
            return False
        return len(self.waiting[0].tokens) - self.cached_tokens_of_head() <= batch.left


class Sarathi(Scheduler):
    """SARATHI §4.3, decode-maximal: all decodes and one chunk, `chunk` tokens together.

    A GPU multiplies matrices in tiles: if these are of 128 rows, 129 rows cost as much as 256
    (§4.4). So `chunk` is rounded down to a multiple of `tile` tokens, but not to 0."""

    cuts_prompts = True

    def __init__(self, *args: Any, tile: int = 1, **options: Any) -> None:
        super().__init__(*args, **options)
        tile = check_whole("tile", tile, minimum=1)
        self.budget = self.chunk // tile * tile or self.chunk

    def schedule(self) -> Batch:
        batch = Batch(self.budget)
        batch.add_decodes(self.grow_decodes())
        if batch.left > 0:
            prefills = self.prefilling()
            request = prefills[0] if prefills else self.admit()
            if request:
                batch.add(request)
        return batch


class SarathiServe(Scheduler):
    """Sarathi-Serve's Algorithm 3, stall-free: decodes first, then prefills in what is left."""

    cuts_prompts = True
    watermark_percent = 1

    def reserved(self, request: Request) -> int:
        return len(request.tokens)

    def token_budget(self, decodes: list[Request], prefills: list[Request]) -> int:
        """How many tokens a batch with these decodes may have; `prefills` have begun before."""
        return self.chunk

    def schedule(self) -> Batch:
        decodes = self.grow_decodes()
        prefills = self.prefilling()
        batch = Batch(self.token_budget(decodes, prefills))
        batch.add_decodes(decodes)  # a running decode never waits
        for request in prefills:
            batch.add(request)  # finish what was started
        while batch.left > 0 and (request := self.admit()):
            batch.add(request)  # then let new requests in
        return batch
