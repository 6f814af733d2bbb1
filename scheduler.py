"""The policies: which tokens to compute next. Plain Python, no tensors.

A chunk is (request, start, length), a batch is a list of chunks. A whole prefill is a chunk that
covers the prompt, a decode is a chunk of length 1, and every scheduler of SARATHI and Sarathi-Serve
is one function, `schedule()`, from what waits and runs to a batch:

    batch = scheduler.next_batch()          # admits and preempts
    tokens = ...                            # compute it (engine.py), or count its time (simulator/)
    scheduler.advance(batch, tokens, now)   # requests move on, and end

All are first come, first served, the head of the queue blocks, and decodes go beyond the budget if
they must. policies/ has their names, and what goes beyond the papers. Read next: kv_cache.py."""

import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from errors import check_whole


@dataclass(eq=False, slots=True)
class Request:
    """`tokens` holds the prompt, its first `prompt_len`, and up to `max_new_tokens` more so far;
    `num_computed` of them have their keys and values in `pages`, its block table, empty while it
    waits. Times are in seconds, on the scheduler's clock."""

    id: int
    tokens: list
    prompt_len: int
    max_new_tokens: int
    arrival: float = 0.0
    stop: frozenset = frozenset()  # tokens that end it
    params: object = None  # for the sampler
    priority: int = 2  # this and the two targets in seconds: for policies/priority.py
    ttft_slo: float | None = None
    tbt_slo: float | None = None
    num_computed: int = 0
    pages: list = field(default_factory=list)
    scheduled: float | None = None  # when it was first admitted
    token_times: list = field(default_factory=list)  # when each output token was known
    logprobs: list = field(default_factory=list)
    finish_reason: str | None = None  # "stop", "length" or "abort"
    preemptions: int = 0  # how often it lost its pages
    recomputed_tokens: int = 0  # tokens that were in them
    page_hashes: list = field(default_factory=list)  # of its full pages, see kv_cache.Pages
    cached_tokens: int = 0  # tokens that were found in the cache when it was admitted, each time

    @property
    def is_decoding(self):
        """Whether all it waits for is the last token that it generated itself."""
        return self.num_computed + 1 == len(self.tokens) > self.prompt_len


class Chunk(NamedTuple):
    """Compute request.tokens[start : start + length]."""

    request: Request
    start: int
    length: int

    @property
    def yields_token(self):
        """Whether it reaches the last known token, so that the next one can be sampled."""
        return self.start + self.length == len(self.request.tokens)


class ChunkRecord(NamedTuple):
    """What remains of a chunk when its request has moved on."""

    request_id: int
    start: int
    length: int
    is_decode: bool


class Batch(list):
    """The chunks of one iteration, at most one for each request. `budget` is the most tokens in it,
    unless there are more decodes, or None; `left`, what is left; `preempted`, who lost pages."""

    def __init__(self, budget=None):
        self.budget, self.left, self.preempted = budget, math.inf if budget is None else budget, []

    def add(self, request):
        """Add the next chunk of `request` within the budget. Returns its length; 0 adds nothing."""
        length = len(request.tokens) - request.num_computed
        if length > self.left:
            length = max(0, self.left)
        if length:
            self.append(Chunk(request, request.num_computed, length))
            self.left -= length
        return length

    def add_decodes(self, requests):
        """Add a decode of each of these requests, whatever the budget."""
        self += [Chunk(request, request.num_computed, 1) for request in requests]
        self.left -= len(requests)

    def record(self) -> list[ChunkRecord]:
        """A record of each chunk. Call it before the requests move on."""
        return [ChunkRecord(r.id, start, length, r.is_decoding) for r, start, length in self]


class Scheduler:
    """What the policies share: the queue, the running requests, admission, memory and preemption.
    Takes C, the chunk size or token budget, B, the most requests that run at once, and the longest
    request, prompt and output; a policy has more options. Raises ValueError if these cannot be."""

    cuts_prompts = False  # into chunks of at most `chunk` tokens
    reserves_max_len = True  # at admission; otherwise the tokens there are, and then page by page

    def __init__(self, pages, chunk, max_batch, max_len, clock=time.monotonic):
        for name, value in (("chunk", chunk), ("max_batch", max_batch), ("max_len", max_len)):
            check_whole(name, value, least=1)
        if pages.total < (needed := pages.needed(max_len)):
            takes = f"a request of max_len={max_len} takes {needed} pages"
            raise ValueError(f"pages={pages.total}: {takes} of page_size={pages.page_size}")
        self.pages, self.chunk, self.max_batch, self.max_len = pages, chunk, max_batch, max_len
        self.watermark = 0 if self.reserves_max_len else pages.total // 100  # left to growth
        self.clock, self.requests = clock, {}  # id -> Request, all that have not ended
        self.waiting, self.running = deque(), []  # in the order of admission
        self.batch, self.preempted = Batch(), []  # not yet computed; ids, since the last that was
        self.torn = False  # while any of these but `requests` changes, or if that was interrupted

    def check_fits(self, prompt_len, max_new_tokens):
        """Raise ValueError if such a request could never fit: it would be queued for ever."""
        if prompt_len + max_new_tokens > self.max_len:
            total = f"prompt of {prompt_len} tokens + max_new_tokens={max_new_tokens}"
            raise ValueError(f"{total}: must not exceed max_len={self.max_len}")

    def add(self, request):
        """Put a request at the end of the queue."""
        self.mend()
        self.pages.extend_hashes(request.page_hashes, request.tokens)
        self.torn = True
        self.waiting.append(request)
        self.requests[request.id] = request
        self.torn = False

    def next_batch(self):
        """The policy's next Batch, the same until `advance`; empty if there is nothing to do."""
        self.mend()
        self.batch[:] = [chunk for chunk in self.batch if chunk.request.pages]
        if not self.batch:
            self.torn = True
            self.batch = self.schedule()
            if not self.batch and (self.running or self.waiting):
                its = f"{type(self).__name__}.schedule() returned {self.batch!r}"
                raise RuntimeError(f"{its}: nothing to do, but there are requests")
            self.batch.preempted, self.torn = self.preempted, False
        return self.batch

    def mend(self):
        """`requests` is the journal. After an interrupt that came while the rest changed, all of
        them wait and are computed again. Whatever changes anything begins with this."""
        if self.torn:
            its = self.pages
            self.pages = type(its)(its.total, its.page_size, its.prefix_caching)
            self.preempted = [r.id for r in self.requests.values() if r.num_computed]
            self.batch, self.running = Batch(), []
            self.waiting.clear()
            for request in self.requests.values():
                request.preemptions += request.num_computed > 0
                request.recomputed_tokens += request.num_computed
                request.num_computed, request.pages, request.finish_reason = 0, [], None
                self.waiting.append(request)
            self.torn = False

    def observe(self, batch, seconds):
        """Be told how long a batch took, before its requests move on."""

    def advance(self, batch, tokens, now):
        """Move the requests of a computed batch on: [(request, its new token)]. `tokens` are what
        was sampled after each chunk at time `now`, or None. Twice is as good as once."""
        self.mend()
        moved = []
        for (request, start, length), token in zip(batch, tokens):
            if request.finish_reason == "abort":
                continue
            if request.pages:  # or it lost them meanwhile
                request.num_computed = start + length
                if self.pages.prefix_caching:
                    self._publish_pages(request, start)
            if token is not None:
                n = start + length - request.prompt_len  # this is output token n
                if n == len(request.token_times):
                    request.token_times.append(now)
                if start + length == len(request.tokens):
                    request.tokens.append(token)
                moved.append((request, token))
                if token in request.stop or n + 1 == request.max_new_tokens:
                    self.finish(request, "stop" if token in request.stop else "length")
        self.batch, self.preempted = Batch(), []
        return moved

    def finish(self, request, reason):
        """End a request, wherever it is, and free its pages. Does nothing more the second time."""
        self.mend()
        self.torn = True
        if request in self.running:
            self._stop(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        request.finish_reason = reason
        self.requests.pop(request.id, None)
        self.torn = False

    def schedule(self):
        """The next Batch, admitting waiting requests; empty only if there is nothing to do."""
        raise NotImplementedError

    def decoding(self):
        """The running decodes, each with a page for its token: the newest may be preempted."""
        decodes, size = [r for r in self.running if r.is_decoding], self.pages.page_size
        full = [request for request in decodes if request.num_computed == len(request.pages) * size]
        for request in full:
            while request.pages and not (page := self.pages.allocate(1, after=request.pages[-1])):
                self.preempt(max(self.running, key=self.rank))
            if request.pages:
                request.pages += page
        return [request for request in decodes if request.pages] if full else decodes

    def rank(self, request):
        """Requests of a higher rank are preempted first: the newest."""
        return request.arrival, request.id

    def prefilling(self):
        """The running requests whose prompt is not yet computed to its end."""
        return [r for r in self.running if not r.is_decoding]

    def plan_admission(self, request):
        """What it is given if it is admitted: the pages that hold its first tokens already, and how
        many more. One token is left to compute, for its logits; two, if it was preempted while it
        generated: with one it would be a decode, and this batch has its decodes already."""
        left = 1 if len(request.tokens) == request.prompt_len else 2
        most = (len(request.tokens) - left) // self.pages.page_size
        found = self.pages.match_prefix(request.page_hashes[:most])
        tokens = self.max_len if self.reserves_max_len else len(request.tokens)
        return found, self.pages.needed(tokens) - len(found)

    def cached_tokens_of_head(self):
        """How many tokens of the head of the queue need not be computed."""
        return (
            len(self.plan_admission(self.waiting[0])[0]) * self.pages.page_size
            if self.waiting
            else 0
        )

    def room_for(self, request):
        """What `plan_admission` says if there is a place and memory for it, else None."""
        if len(self.running) >= self.max_batch:
            return None
        found, more = self.plan_admission(request)
        free = self.pages.num_free - (self.watermark if self.running else 0)
        return (found, more) if more + self.pages.count_free(found) <= free else None

    def admit(self):
        """Give the head of the queue its pages and return it; None if there is none, or no room."""
        if not self.waiting or not (given := self.room_for(request := self.waiting[0])):
            return None
        found, more = given
        self.pages.acquire(found)
        request.pages = found + self.pages.allocate(more)
        request.num_computed = len(found) * self.pages.page_size
        request.cached_tokens += request.num_computed
        self.running.append(request)
        self.waiting.remove(request)
        request.scheduled = self.clock() if request.scheduled is None else request.scheduled
        return request

    def preempt(self, request):
        """Take a running request's pages: it waits in front, and all of it is computed again."""
        request.preemptions += 1
        request.recomputed_tokens += request.num_computed
        request.num_computed = 0
        self.preempted.append(request.id)
        self._stop(request)
        self.waiting.appendleft(request)

    def _publish_pages(self, request, start):
        """Let others find the pages that became full since num_computed was `start`."""
        first, end = (n // self.pages.page_size for n in (start, request.num_computed))
        if first < end:
            self.pages.extend_hashes(request.page_hashes, request.tokens)
            self.pages.publish(request.pages[first:end], request.page_hashes[first:end])

    def _stop(self, request):
        self.running.remove(request)
        self.pages.free(request.pages)
        request.pages = []


class RequestLevel(Scheduler):
    """FasterTransformer, Sarathi-Serve's Algorithm 1: a batch runs to its end, then the next."""

    def schedule(self):
        batch = Batch()
        if not self.running:
            while self.admit():
                pass
        for request in self.running:
            batch.add(request)  # the whole prompt the first time, then one token
        return batch


class Orca(Scheduler):
    """Iteration-level scheduling with hybrid batches: whole prompts join the running decodes."""

    prefills = None  # the most prompts in one batch

    def schedule(self):
        batch, admitted = Batch(), 0
        while admitted != self.prefills and self.admit():
            admitted += 1
        for request in self.running:
            batch.add(request)
        return batch


class OrcaBest(Orca):
    """SARATHI's best case for Orca (§5.2): one whole prompt at a time beside the decodes."""

    prefills = 1


class VLLM(Scheduler):
    """vLLM's scheduler of 2023, Sarathi-Serve's Algorithm 2: prompts first and alone."""

    reserves_max_len = False

    def schedule(self):
        batch, queue = Batch(self.max_len), self.waiting  # §5.1: max_len tokens in whole prompts
        most = lambda: batch.left + self.cached_tokens_of_head()  # tokens of a prompt that fits
        while queue and len(queue[0].tokens) <= most() and (request := self.admit()):
            batch.add(request)
        if not batch:
            batch.add_decodes(self.decoding())
        return batch


class Sarathi(Scheduler):
    """SARATHI §4.3, decode-maximal: all decodes and one chunk, `chunk` tokens in whole tiles."""

    cuts_prompts = True

    def __init__(self, *args, tile=1, **options):
        super().__init__(*args, **options)
        check_whole("tile", tile, least=1)
        self.budget = self.chunk // tile * tile or self.chunk  # below one tile it stays as it is

    def schedule(self):
        batch = Batch(self.budget)
        batch.add_decodes(self.decoding())
        if batch.left > 0 and (request := next(iter(self.prefilling()), None) or self.admit()):
            batch.add(request)
        return batch


class SarathiServe(Scheduler):
    """Sarathi-Serve's Algorithm 3, stall-free: decodes first, then prefills in what is left."""

    cuts_prompts = True
    reserves_max_len = False

    def token_budget(self, decodes, prefills):
        """The most tokens in a batch with these decodes, beside prefills that have begun."""
        return self.chunk

    def schedule(self):
        decodes, prefills = self.decoding(), self.prefilling()
        batch = Batch(self.token_budget(decodes, prefills))
        batch.add_decodes(decodes)  # a running decode never waits
        for request in prefills:
            batch.add(request)  # finish what was started
        while batch.left > 0 and (request := self.admit()):
            batch.add(request)  # then let new requests in
        return batch


class HybridOnly(SarathiServe):
    """Ablation (§5.4.2): a budget of max_len; a prompt is cut only where several share it."""

    cuts_prompts = False

    def token_budget(self, decodes, prefills):
        return self.max_len


class ChunkedOnly(SarathiServe):
    """Ablation (§5.4.2): chunks, but prefill and decode batches alternate."""

    prefilled_last = False

    def schedule(self):
        decodes, batch = self.decoding(), Batch(self.chunk)
        if not (self.prefilled_last and decodes):
            for request in self.prefilling():
                batch.add(request)
            while batch.left > 0 and (request := self.admit()):
                batch.add(request)
        self.prefilled_last = bool(batch)
        if not batch:
            batch.add_decodes(decodes)
        return batch
