"""The policies: which tokens to compute next. Plain Python, no tensors.

A batch is a list of chunks. A whole prefill is a chunk that covers the prompt. A decode is a chunk
of length 1. So every scheduler of SARATHI and Sarathi-Serve is one function, `schedule()`, from the
waiting and running requests to a batch:

    batch = scheduler.next_batch()          # calls schedule(), which admits and preempts
    tokens = ...                            # compute it (engine.py), or add up its time (simulator)
    scheduler.advance(batch, tokens, now)   # requests move on, and end

All policies here serve requests in order of arrival and never skip the first in the queue. Decodes
may exceed the token budget. On a first reading, read Request, Chunk, Batch, and Scheduler down to
the line "Skip on a first reading"; then the policies at the end of the file, which are short.

policies/ names them all, and has the ablations and newer ones. Read next: kv_cache.py."""

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from errors import check_whole
from kv_cache import Pages


@dataclass(eq=False, slots=True)
class Request:
    """A prompt, and the output that is generated after it.

    Three fields matter to a policy: `tokens`, `num_computed` and `pages`. The rest is bookkeeping.
    While a request waits it has no pages, and nothing of it is computed."""

    id: int
    tokens: list[int]  # the prompt, and the output so far
    num_computed: int = field(default=0, kw_only=True)  # tokens whose keys and values are in pages
    pages: list[int] = field(default_factory=list, kw_only=True)  # its block table, see kv_cache.py

    # What was asked for. Times are in seconds, on the scheduler's clock.
    prompt_len: int
    max_new_tokens: int
    arrival: float = 0.0
    stop: frozenset[int] = frozenset()  # tokens that end it
    params: Any = None  # sampling.SamplingParams: a policy does not look at them
    priority: int = 2  # this and the targets for TTFT and TBT are for policies/priority.py
    ttft_slo: float | None = None
    tbt_slo: float | None = None
    user: str = ""  # who asks, for policies that are fair between users

    # What has happened to it.
    scheduled: float | None = None  # when it was first admitted
    token_times: list[float] = field(default_factory=list)  # when each output token was known
    logprobs: list[float] = field(default_factory=list)  # of the output tokens, if asked for
    finish_reason: str | None = None  # "stop", "length" or "abort"
    preemptions: int = 0  # how often it lost its pages
    recomputed_tokens: int = 0  # tokens that were in these pages, in all
    page_hashes: list[bytes] = field(default_factory=list)  # of its full pages, see kv_cache.Pages
    cached_tokens: int = 0  # tokens whose pages were cached when it was admitted, in all

    @property
    def is_decoding(self) -> bool:
        """Whether only its last token is left to compute, and is one that it generated.

            tokens     p p p p o o      prompt_len = 4, 2 output tokens
            computed   x x x x x .      num_computed = 5: it decodes

        After a preemption num_computed is 0, and the same tokens are prefilled again."""
        return self.num_computed + 1 == len(self.tokens) > self.prompt_len


class Chunk(NamedTuple):
    """Compute request.tokens[start : start + length]."""

    request: Request
    start: int
    length: int

    @property
    def yields_token(self) -> bool:
        """Whether it reaches the last known token, so that the next one can be sampled."""
        return self.start + self.length == len(self.request.tokens)


class ChunkRecord(NamedTuple):
    """A chunk as it is remembered after its request has moved on."""

    request_id: int
    start: int
    length: int
    is_decode: bool


class Batch(list[Chunk]):
    """The chunks of one iteration, at most one for each request.

    `budget` is the whole number of tokens that it may hold, None for any. `left` is the unused part
    of the budget, below 0 if there are more decodes than the budget allows."""

    def __init__(self, budget: int | None = None) -> None:
        super().__init__()
        self.budget = None if budget is None else check_whole("token_budget", budget, minimum=0)
        self.left = sys.maxsize if self.budget is None else self.budget
        self.preempted: list[int] = []  # ids of the requests that lost their pages for it

    def add(self, request: Request, limit: int = sys.maxsize) -> int:
        """Add the next chunk, cut to the budget and to `limit`. Returns its length; 0: none."""
        length = len(request.tokens) - request.num_computed
        if length > self.left or length > limit:
            length = max(0, min(self.left, limit))
        if length:
            self.append(Chunk(request, request.num_computed, length))
            self.left -= length
        return length

    def add_decodes(self, requests: Sequence[Request]) -> None:
        """Add a decode of each of these requests, even beyond the budget."""
        self += [Chunk(request, request.num_computed, 1) for request in requests]
        self.left -= len(requests)

    def record(self) -> list[ChunkRecord]:
        """A record of each chunk. Call it before the requests move on."""
        return [ChunkRecord(r.id, start, length, r.is_decoding) for r, start, length in self]


class Admission(NamedTuple):
    """The memory that a request gets when it is admitted."""

    cached_pages: list[int]  # these hold its first tokens already
    new_pages: int  # so many are allocated


class Scheduler:
    """What all policies share. A policy is a subclass that defines `schedule`.

    `chunk` is C, the chunk size or token budget. `max_batch` is B, the number of requests that may
    run at once. `max_len` is the length of the longest request, prompt and output."""

    cuts_prompts = False  # into chunks of at most `chunk` tokens
    drops_decodes = False  # True: a batch may leave out running decodes that it has no room for
    watermark_percent = 0  # of the pages: admission leaves them for running requests to grow into
    _waiting: deque[Request]

    def __init__(
        self,
        pages: Pages,
        chunk: int,
        max_batch: int,
        max_len: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.chunk = check_whole("chunk", chunk, minimum=1)
        self.max_batch = check_whole("max_batch", max_batch, minimum=1)
        self.max_len = check_whole("max_len", max_len, minimum=1)
        if pages.total < pages.needed(self.max_len):
            takes = f"a request of max_len={max_len} takes {pages.needed(self.max_len)} pages"
            raise ValueError(f"pages={pages.total}: {takes} of page_size={pages.page_size}")
        self.pages = pages
        self.clock = clock
        self.peers: Sequence[Scheduler] = [self]  # all on one queue: a pipeline's
        self.waiting = deque()
        self.running: list[Request] = []  # in the order of admission
        self.requests: dict[int, Request] = {}  # by id: all that have not ended
        self.batch = Batch()  # the one that is not yet computed, if any
        self.preempted: list[int] = []  # ids, since the last batch was computed
        self.torn = False  # see `mend`
        self.restarts = 0  # how often it has mended

    @property
    def waiting(self) -> deque[Request]:
        """The queue. A policy may replace it, by a list, too: then all peers have the new one."""
        return self._waiting

    @waiting.setter
    def waiting(self, requests: deque[Request] | list[Request]) -> None:
        queue = deque(requests) if isinstance(requests, list) else requests
        for peer in self.peers:
            peer._waiting = queue

    def schedule(self) -> Batch:
        """The next Batch, admitting waiting requests; empty only if there is nothing to do."""
        raise NotImplementedError

    # What a policy calls, and may override.

    def decoding(self) -> list[Request]:
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
        """How many tokens it gets memory for when it is admitted. More comes page by page."""
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
        self.pages.acquire(admission.cached_pages)
        allocated_pages = self.pages.allocate(admission.new_pages)
        assert allocated_pages is not None  # room_for has counted the free pages
        request.pages = admission.cached_pages + allocated_pages
        request.num_computed = len(admission.cached_pages) * self.pages.page_size
        request.cached_tokens += request.num_computed
        self.running.append(request)
        self.waiting.remove(request)
        if request.scheduled is None:
            request.scheduled = self.clock()
        return request

    # What an engine calls.

    def check_fits(self, prompt_len: int, max_new_tokens: int) -> None:
        """Raise ValueError if such a request could never fit: it would be queued for ever."""
        if prompt_len + max_new_tokens > self.max_len:
            total = f"prompt of {prompt_len} tokens + max_new_tokens={max_new_tokens}"
            raise ValueError(f"{total}: must not exceed max_len={self.max_len}")

    def add(self, request: Request) -> None:
        """Put a request at the end of the queue."""
        self.mend()
        self.pages.extend_hashes(request.page_hashes, request.tokens)
        self.torn = True
        self.waiting.append(request)
        self.requests[request.id] = request
        self.torn = False

    def next_batch(self) -> Batch:
        """The policy's next Batch, the same until `advance`; empty if there is nothing to do."""
        self.mend()
        # A request without pages was aborted, or has ended, since the batch was made.
        self.batch[:] = [chunk for chunk in self.batch if chunk.request.pages]
        if self.batch:
            return self.batch
        self.torn = True
        self.batch = self.schedule()
        if not self.batch:
            self._check_nothing_to_do()
        self.batch.preempted = self.preempted
        self.torn = False
        return self.batch

    def _check_nothing_to_do(self) -> None:
        """Raise RuntimeError if schedule() made no batch, but there are requests, or lost ones."""
        schedule = f"{type(self).__name__}.schedule()"
        kept = {r.id for peer in self.peers for r in (*peer.running, *peer.waiting)}
        lost = sorted(self.requests.keys() - kept)
        if lost:
            raise RuntimeError(f"{schedule} lost requests {lost}: they neither wait nor run")
        if self.running or self.waiting:
            hint = ", did you forget return?" if self.batch is None else ""
            reason = f"nothing to do, but there are requests{hint}"
            raise RuntimeError(f"{schedule} returned {self.batch!r}: {reason}")

    def observe(self, batch: Batch, seconds: float) -> None:
        """Called with the time that a batch took, before its requests move on."""

    def advance(
        self, batch: Batch, tokens: Sequence[int | None], now: float
    ) -> list[tuple[Request, int]]:
        """Move the requests of a computed batch on. Returns each new token with its request.

        `tokens` holds the token that was sampled after each chunk at time `now`, or None. After an
        interrupt the engine calls this again, so each line checks whether it was done already."""
        self.mend()
        new_tokens: list[tuple[Request, int]] = []
        for (request, start, length), token in zip(batch, tokens, strict=True):
            if request.finish_reason == "abort":
                continue
            end = start + length
            if request.pages:  # if not, it has lost them since the batch was made
                request.num_computed = end
                if self.pages.prefix_caching:
                    self._publish_pages(request, start)
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
        return new_tokens

    def finish(self, request: Request, reason: str) -> None:
        """End a waiting or running request and free its pages. The second time does nothing."""
        self.mend()
        self.torn = True
        if request in self.running:
            self._stop(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        request.finish_reason = reason
        self.requests.pop(request.id, None)
        self.torn = False

    # Skip on a first reading: memory.

    def plan_admission(self, request: Request) -> Admission:
        """The cached pages that hold the first tokens of a request, and how many more it needs.

        The last token is always computed, because its logits give the next one: with pages of 4
        tokens, a prompt of 8 uses 1 cached page at most, and a prompt of 9 uses 2. After a
        preemption with some output, 2 tokens are computed: with 1 it would count as a decode, and
        the batch that is being made has its decodes already."""
        to_compute = 1 if len(request.tokens) == request.prompt_len else 2
        most_pages = (len(request.tokens) - to_compute) // self.pages.page_size
        cached_pages = self.pages.match_prefix(request.page_hashes[:most_pages])
        reserved_pages = self.pages.needed(self.reserved(request))
        return Admission(cached_pages, reserved_pages - len(cached_pages))

    def cached_tokens_of_head(self) -> int:
        """How many tokens of the first waiting request need not be computed."""
        if not self.waiting:
            return 0
        return len(self.plan_admission(self.waiting[0]).cached_pages) * self.pages.page_size

    def room_for(self, request: Request) -> Admission | None:
        """The Admission of a waiting request. None if too many requests run, or memory is short."""
        if len(self.running) >= self.max_batch:
            return None
        admission = self.plan_admission(request)
        # cached pages that are in no block table count as free until they are acquired
        needed_pages = admission.new_pages + self.pages.count_free(admission.cached_pages)
        if self.running:
            needed_pages += self.pages.total * self.watermark_percent // 100
        return admission if needed_pages <= self.pages.num_free else None

    def preempt(self, request: Request) -> None:
        """Take a running request's pages. It waits at the front, and is computed again."""
        # A page that it has filled since its last chunk may be found again, too.
        self.pages.extend_hashes(request.page_hashes, request.tokens)
        request.preemptions += 1
        request.recomputed_tokens += request.num_computed
        request.num_computed = 0
        self.preempted.append(request.id)
        self._stop(request)
        self.waiting.appendleft(request)

    def grow(self, request: Request, tokens: int) -> None:
        """Give a running request memory for so many tokens, which may cost it or others theirs."""
        while request.pages and len(request.pages) * self.pages.page_size < tokens:
            new_page = self.pages.allocate(1, after=request.pages[-1])
            if new_page is not None:
                request.pages += new_page
            else:
                self.preempt(max(self.running, key=self.rank))

    def _publish_pages(self, request: Request, start: int) -> None:
        """Let others reuse the pages that became full since num_computed was `start`."""
        first = start // self.pages.page_size
        end = request.num_computed // self.pages.page_size
        if first < end:
            self.pages.extend_hashes(request.page_hashes, request.tokens)
            self.pages.publish(request.pages[first:end], request.page_hashes[first:end])

    def _stop(self, request: Request) -> None:
        self.running.remove(request)
        self.pages.free(request.pages)
        request.pages = []

    # Skip on a first reading: what makes a Ctrl-C harmless.

    def mend(self) -> None:
        """If a change was interrupted, let all requests wait and be computed again.

        A Ctrl-C may leave queue, block tables and free pages in disagreement: `torn` is True while
        they change. Then all is made again from `requests`, the journal. Each method that changes
        anything begins with this."""
        if not any([peer.torn for peer in self.peers]):  # a list: this is called for each token
            return
        for peer in self.peers:
            peer.pages = Pages(peer.pages.total, peer.pages.page_size, peer.pages.prefix_caching)
            peer.batch = Batch()
            peer.running = []
            peer.preempted = []
            peer.restarts += 1
        self.waiting = self.waiting  # one queue again, if it was being replaced
        self.waiting.clear()
        self.peers[0].preempted = [r.id for r in self.requests.values() if r.num_computed]
        for request in self.requests.values():
            request.preemptions += request.num_computed > 0
            request.recomputed_tokens += request.num_computed
            request.num_computed = 0
            request.pages = []
            request.finish_reason = None
            self.waiting.append(request)
        for peer in self.peers:  # not before all of this is done
            peer.torn = False


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
            batch.add_decodes(self.decoding())
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
        batch.add_decodes(self.decoding())
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
        decodes = self.decoding()
        prefills = self.prefilling()
        batch = Batch(self.token_budget(decodes, prefills))
        batch.add_decodes(decodes)  # a running decode never waits
        for request in prefills:
            batch.add(request)  # finish what was started
        while batch.left > 0 and (request := self.admit()):
            batch.add(request)  # then let new requests in
        return batch
