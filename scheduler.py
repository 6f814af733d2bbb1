"""The policies: which tokens to compute next. Plain Python, no tensors.

A request is a list of tokens and one counter, `num_computed`: how many of them have their keys and values in
the cache. A chunk is (request, start, length). A batch is a list of chunks. Then

    a whole prefill     is a chunk that covers the prompt
    a chunked prefill   is several chunks
    a decode            is a chunk of length 1

and every scheduler of SARATHI and Sarathi-Serve is one function, `schedule()`, from what is waiting, what is
running and how many pages are free to a batch. The rules that all policies share are in `Scheduler`: first
come, first served; the head of the line blocks; a running decode is never dropped for want of budget.

To add a policy, write a subclass with a `schedule` and add it to POLICIES.

Read next: kv_cache.py.
"""

import math
import time
from collections import deque
from dataclasses import dataclass, field
from numbers import Real
from typing import NamedTuple

from iteration_time import BatchShape, IterationTime
from waiting import ClassLine, aged_class

PRIORITIES = ("realtime", "high", "normal", "low")  # a request's priority is the index, so less is more urgent
HIGH = 1


@dataclass(eq=False, slots=True)
class Request:
    """`tokens` holds the prompt (its first `prompt_len`) and up to `max_new_tokens` that were generated so far.

    `num_computed` of them have their keys and values in the cache, in `pages`, its block table, empty while it waits.

    priority      its class, an index of PRIORITIES
    arrival       when it arrived, in seconds on the scheduler's clock
    ttft_slo      the time to its first token that its user was promised, in seconds, or None; tbt_slo likewise
    preemptions   how often it lost its pages; `recomputed` counts the tokens in them, which are computed again
    """

    id: int
    tokens: list
    prompt_len: int
    max_new_tokens: int
    num_computed: int = 0
    pages: list = field(default_factory=list)
    priority: int = 2
    arrival: float = 0.0
    ttft_slo: float | None = None
    tbt_slo: float | None = None
    preemptions: int = 0
    recomputed: int = 0

    @property
    def is_decoding(self):
        """Whether all it waits for is the last token that it generated itself."""
        return self.num_computed + 1 == len(self.tokens) > self.prompt_len


class Chunk(NamedTuple):
    """Compute request.tokens[start : start + length]."""

    request: Request
    start: int
    length: int


class Batch(list):
    """The chunks of one iteration, at most one for each request."""

    def add(self, request, budget=None):
        """Add the next chunk of `request`, at most `budget` tokens long, and return its length. 0 adds nothing."""
        length = len(request.tokens) - request.num_computed
        if budget is not None:
            length = max(0, min(length, budget))
        if length:
            self.append(Chunk(request, request.num_computed, length))
        return length

    def add_decodes(self, requests):
        """Add a decode of each of these requests, and return how many that is."""
        self += [Chunk(request, request.num_computed, 1) for request in requests]
        return len(requests)


def check_whole(name, value, least):
    """Raise ValueError, naming the argument, unless `value` is a whole number of at least `least`."""
    if not hasattr(value, "__index__") or value < least:
        raise ValueError(f"{name}={value!r}: must be a whole number of at least {least}")


def check_positive(name, value, most=math.inf):
    """Raise ValueError, naming the argument, unless `value` is a finite number above 0 and at most `most`."""
    if not isinstance(value, Real) or not 0 < value <= most or value == math.inf:
        limit = "" if most == math.inf else f" and at most {most}"
        raise ValueError(f"{name}={value!r}: must be a finite number above 0{limit}")


class Scheduler:
    """What the policies share: the waiting line, the running requests, admission, memory and preemption.

    pages        who owns which part of the cache (kv_cache.Pages)
    chunk        C, the chunk size or token budget, in tokens
    max_batch    B, the most requests that run at once
    max_len      the longest request, prompt and output, in tokens
    clock        seconds, for policies that look at it

    Raises ValueError, naming the argument, if one makes no sense or a request of max_len does not fit in memory.
    """

    options = frozenset()  # what the policy takes besides these
    budget = None  # the most tokens in a batch, if the policy limits them
    cuts_prompts = False  # into chunks of at most `chunk` tokens
    reserves_max_len = True  # at admission; otherwise the tokens there are, and then page by page

    def __init__(self, pages, chunk, max_batch, max_len, clock=time.monotonic):
        for name, value in (("chunk", chunk), ("max_batch", max_batch), ("max_len", max_len)):
            check_whole(name, value, least=1)
        if pages.total < pages.needed(max_len):
            raise ValueError(f"pages={pages.total}: a request of max_len={max_len} takes {pages.needed(max_len)} pages "
                             f"of page_size={pages.page_size}")
        self.pages, self.chunk, self.max_batch, self.max_len, self.clock = pages, chunk, max_batch, max_len, clock
        self.watermark = 0 if self.reserves_max_len else pages.total // 100  # pages that admission leaves to growth
        self.waiting = deque()
        self.running = []  # in the order of admission

    def schedule(self):
        """Return the next Batch, admitting waiting requests. It is empty only if there is nothing to do."""
        raise NotImplementedError

    def decoding(self):
        """The running requests whose next chunk is a decode, each with a page for its token.

        Where no page is free, the newest request of the lowest priority is preempted, which may be the decode itself.
        """
        decodes, page_size = [request for request in self.running if request.is_decoding], self.pages.page_size
        full = [request for request in decodes if request.num_computed == len(request.pages) * page_size]
        for request in full:
            while request.pages and not (page := self.pages.allocate(1, after=request.pages[-1])):
                self.preempt(max(self.running, key=self.rank))
            if request.pages:
                request.pages += page
        return [request for request in decodes if request.pages] if full else decodes

    def rank(self, request):
        """Requests of a higher rank are preempted first: those of the lowest priority, and of these the newest."""
        return request.priority, request.arrival, request.id

    def prefilling(self):
        """The running requests whose prompt is not yet computed to its end."""
        return [request for request in self.running if not request.is_decoding]

    def check_fits(self, prompt_len, max_new_tokens):
        """Raise ValueError if such a request could never fit, so that it is not queued for ever."""
        if prompt_len + max_new_tokens > self.max_len:
            raise ValueError(f"prompt of {prompt_len} tokens + max_new_tokens={max_new_tokens}: "
                             f"must not exceed max_len={self.max_len}")

    def add(self, request):
        """Put a request at the end of the line."""
        self.waiting.append(request)

    def pages_at_admission(self, request):
        """How many pages it is given when it is admitted."""
        return self.pages.needed(self.max_len if self.reserves_max_len else len(request.tokens))

    def has_room(self, request):
        """Whether there is a place and memory to admit it."""
        free = self.pages.num_free - (self.watermark if self.running else 0)
        return len(self.running) < self.max_batch and self.pages_at_admission(request) <= free

    def admit(self):
        """Give the head of the line its pages and return it, or None if it must wait or nobody waits."""
        if not self.waiting or not self.has_room(request := self.waiting[0]):
            return None
        request.pages = self.pages.allocate(self.pages_at_admission(request))
        self.running.append(request)
        self.waiting.remove(request)
        return request

    def preempt(self, request):
        """Take a running request's pages: it waits at the front, and all its tokens, output too, are computed again."""
        request.preemptions += 1
        request.recomputed += request.num_computed
        request.num_computed = 0
        self._stop(request)
        self.waiting.appendleft(request)

    def restart(self, requests):
        """Let these requests, and nobody else, wait and be computed again: schedule() was interrupted half-way."""
        self.pages = type(self.pages)(self.pages.total, self.pages.page_size)
        self.running.clear()
        self.waiting.clear()
        for request in requests:
            request.preemptions += request.num_computed > 0
            request.recomputed += request.num_computed
            request.num_computed, request.pages = 0, []
            self.add(request)

    def observe(self, batch, seconds):
        """Be told how long a batch took, before its requests move on. Most policies do not care."""

    def remove(self, request):
        """Forget a request that has finished or is given up, and free its pages. Does nothing the second time."""
        if request in self.running:
            self._stop(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def _stop(self, request):
        self.running.remove(request)
        self.pages.free(request.pages)
        request.pages = []


class RequestLevel(Scheduler):
    """FasterTransformer, Sarathi-Serve's Algorithm 1: a batch of requests runs to its end before the next begins."""

    def schedule(self):
        batch = Batch()
        if not self.running:
            while self.admit():
                pass
        for request in self.running:
            batch.add(request)  # the whole prompt the first time, then one token
        return batch


class Orca(Scheduler):
    """Iteration-level scheduling with hybrid batches: whole prompts join the running decodes.

    `prefills` limits the prompts in one batch. With 1 it is SARATHI's best case for Orca (§5.2), "overlaps the
    full prefill of one new request with the ongoing decodes".
    """

    options = frozenset({"prefills"})

    def __init__(self, *args, prefills=None, **options):
        super().__init__(*args, **options)
        if prefills is not None:
            check_whole("prefills", prefills, least=1)
        self.prefills = prefills

    def schedule(self):
        batch = Batch()
        for request in self.running:
            batch.add(request)
        admitted = 0
        while admitted != self.prefills and (request := self.admit()):
            admitted += 1
            batch.add(request)
        return batch


class VLLM(Scheduler):
    """vLLM's first scheduler, Sarathi-Serve's Algorithm 2: prompts first and alone, so that decodes stall."""

    reserves_max_len = False

    def schedule(self):
        batch = Batch()
        while request := self.admit():
            batch.add(request)
        if not batch:
            batch.add_decodes(self.decoding())
        return batch


class Sarathi(Scheduler):
    """SARATHI §4.3, decode-maximal batching: one prefill chunk, and every decode rides along.

    The chunk shrinks so that chunk and decodes together are `chunk` tokens, rounded down to whole tiles (§4.4).
    `tile` is the matrix product's tile, in tokens; 1 where there is none.
    """

    options = frozenset({"tile"})
    cuts_prompts = True

    def __init__(self, *args, tile=1, **options):
        super().__init__(*args, **options)
        check_whole("tile", tile, least=1)
        self.budget = self.chunk // tile * tile or self.chunk  # a chunk below one tile stays as it is

    def schedule(self):
        batch = Batch()
        room = self.budget - batch.add_decodes(self.decoding())
        if room > 0:
            request = next(iter(self.prefilling()), None) or self.admit()
            if request:
                batch.add(request, room)
        return batch


class SarathiServe(Scheduler):
    """Sarathi-Serve §4.2, Algorithm 3, stall-free batching: decodes first, then prefills in what is left.

    The token budget is `chunk`, or dynamic with `tbt_slo`, seconds: in each iteration as much prefill as is predicted
    to meet it. `profile` is what the prediction begins with, see iteration_time.py; `tile` that of a matrix product.
    """

    options = frozenset({"tbt_slo", "profile", "tile"})
    cuts_prompts = True
    reserves_max_len = False

    def __init__(self, *args, tbt_slo=None, profile=(), tile=1, **options):
        super().__init__(*args, **options)
        if tbt_slo is not None:
            check_positive("tbt_slo", tbt_slo)
        check_whole("tile", tile, least=1)
        self.tbt_slo, self.tile, self.budget = tbt_slo, tile, self.chunk
        self.learns = tbt_slo is not None  # whether predictions are needed
        self.iteration_time = IterationTime(profile)

    def observe(self, batch, seconds):
        if self.learns:
            self.iteration_time.observe(BatchShape.of(batch), seconds)

    def token_budget(self, decodes, prefills):
        """The most tokens in a batch with these decodes, unless there are more decodes than that.

        `prefills` are the requests whose prefill has begun.
        """
        return self.chunk if self.tbt_slo is None else self.dynamic_budget(decodes, prefills, self.tbt_slo)

    def dynamic_budget(self, decodes, prefills, tbt_slo):
        """The decodes and the prefill that fits beside them. With no decode to stall there is no need to chunk."""
        if not decodes:
            return self.max_len
        past = max([request.num_computed for request in prefills], default=0)  # the slowest, whoever gets the budget
        shape = BatchShape.of_decodes(decodes)
        return len(decodes) + self.iteration_time.prefill_that_fits(tbt_slo, shape, past, self.max_len, self.tile)

    def schedule(self):
        batch, decodes, prefills = Batch(), self.decoding(), self.prefilling()
        self.budget = budget = self.token_budget(decodes, prefills)
        budget -= batch.add_decodes(decodes)  # a running decode never waits
        for request in prefills:
            budget -= batch.add(request, budget)  # finish what was started
        while budget > 0 and (request := self.admit()):
            budget -= batch.add(request, budget)  # then let new requests in
        return batch


class HybridOnly(SarathiServe):
    """Ablation (Sarathi-Serve §5.4.2): hybrid batches with a budget of max_len.

    A prompt is cut only where several share a batch.
    """

    options = frozenset()
    cuts_prompts = False

    def token_budget(self, decodes, prefills):
        return self.max_len


class Priority(SarathiServe):
    """Stall-free batching for requests that are not equal: classes, and targets for TTFT and TBT.

    Prefills are ordered by class, then by slack, the time left to the deadline. That is the request's arrival, its TTFT
    target (`ttft_slo` for requests without one) and the time its own prefill takes: of two requests with the same
    target the short prompt goes first, even if the long one has begun, and waits for it only if it came that much
    later. `ageing` seconds lift a request by one class, see waiting.py. The token budget is dynamic where a decode has
    a TBT target, and meets the tightest; without a decode it is `chunk`, for whoever comes next not to be stuck. When a
    realtime or high request is at risk, lower classes are preempted.
    """

    options = SarathiServe.options | {"ttft_slo", "ageing"}

    def __init__(self, *args, ttft_slo=2.0, ageing=30.0, **options):
        super().__init__(*args, **options)
        check_positive("ttft_slo", ttft_slo)
        check_positive("ageing", ageing)
        self.ttft_slo, self.ageing, self.learns = ttft_slo, ageing, True
        self.waiting = ClassLine(self.deadline, ageing, self.clock, len(PRIORITIES))

    def aged_class(self, request):
        """The request's class after the time it has been there."""
        return aged_class(request, self.clock(), self.ageing)

    def rank(self, request):
        return self.aged_class(request), request.arrival, request.id

    def deadline(self, request):
        """When its first token is due."""
        prefill = BatchShape().with_chunk(0, len(request.tokens))  # all of it, or the long would overtake half-way
        return request.arrival + (request.ttft_slo or self.ttft_slo) + self.iteration_time.predict(prefill)

    def urgency(self, request):
        """What prefills are ordered by, the smallest first."""
        return self.aged_class(request), self.deadline(request), request.id

    def tightest_target(self, decodes, least_class=len(PRIORITIES)):
        """The smallest TBT target of decodes of this class or a more urgent one, infinity if there is none."""
        return min([r.tbt_slo for r in decodes if r.tbt_slo and r.priority <= least_class], default=math.inf)

    def too_slow(self, decodes):
        """Whether these decodes miss the TBT target of a realtime or high one even without any prefill."""
        target = self.tightest_target(decodes, HIGH)
        return target < math.inf and self.iteration_time.predict(BatchShape.of_decodes(decodes)) > target

    def is_late(self, request):
        """Whether a realtime or high request has waited for half its TTFT target."""
        ttft_slo = request.ttft_slo or self.ttft_slo
        return request.priority <= HIGH and self.clock() - request.arrival >= ttft_slo / 2

    def in_the_way(self, decodes):
        """The lower classes that put a realtime or high request at risk, with their decodes or with their memory.

        It is at risk if these decodes take too long for its TBT target, or if half its TTFT target has gone and there
        is no token budget left for it beside them, or no room.
        """
        prefills = self.prefilling() if len(decodes) < len(self.running) else []
        head = self.waiting[0] if self.waiting else None
        head = head if head and self.is_late(head) else None
        late = head or any(self.is_late(request) for request in prefills)
        slow = self.too_slow(decodes) or late and self.token_budget(decodes, prefills) <= len(decodes)
        lower = [request for request in decodes if self.aged_class(request) > HIGH] if slow else []
        if not lower and head and not self.has_room(head):
            lower = [request for request in self.running if self.aged_class(request) > HIGH]
        return lower

    def decoding(self):
        """As in Scheduler, after lower classes were preempted for realtime and high requests at risk."""
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
        return self.dynamic_budget(decodes, prefills, target) if decodes and target < math.inf else self.chunk

    def schedule(self):
        batch, decodes, prefills = Batch(), self.decoding(), self.prefilling()
        self.budget = budget = self.token_budget(decodes, prefills)
        budget -= batch.add_decodes(decodes)
        started = sorted(prefills, key=self.urgency, reverse=True)
        while budget > 0:
            head = self.waiting[0] if self.waiting else None
            first = head and (not started or self.urgency(head) < self.urgency(started[-1]))
            request = first and self.admit() or (started.pop() if started else None)
            if request is None:
                break
            budget -= batch.add(request, budget)
        return batch


class ChunkedOnly(Scheduler):
    """Ablation (Sarathi-Serve §5.4.2): chunks without hybrid batches, prefill and decode batches alternate."""

    cuts_prompts = True
    reserves_max_len = False

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.prefilled_last = False

    def schedule(self):
        batch, decoding = Batch(), self.decoding()
        if not (self.prefilled_last and decoding):
            budget = self.chunk
            for request in self.prefilling():
                budget -= batch.add(request, budget)
            while budget > 0 and (request := self.admit()):
                budget -= batch.add(request, budget)
        self.prefilled_last = bool(batch)
        if not batch:
            batch.add_decodes(decoding)
        return batch


POLICIES = {
    "request-level": RequestLevel,
    "orca": Orca,
    "vllm": VLLM,
    "sarathi": Sarathi,
    "sarathi-serve": SarathiServe,
    "chunked-only": ChunkedOnly,
    "hybrid-only": HybridOnly,
    "priority": Priority,
}


def make_scheduler(policy, pages, **options):
    """The scheduler of that name. Raises ValueError for an unknown policy or an option it does not have."""
    if not isinstance(policy, str) or policy not in POLICIES:
        raise ValueError(f"policy={policy!r}: must be one of {', '.join(POLICIES)}")
    known = {"chunk", "max_batch", "max_len", "clock", *POLICIES[policy].options}
    for option in options.keys() - known:
        raise ValueError(f"{option}={options[option]!r}: policy {policy!r} has no such option, only {sorted(known)}")
    return POLICIES[policy](pages, **options)
