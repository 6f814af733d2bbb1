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

PRIORITIES = ("realtime", "high", "normal", "low")  # a request's priority is the index, so less is more urgent


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
        return len(self.tokens) - self.num_computed == 1 and len(self.tokens) > self.prompt_len


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
        requests = [request for request in self.running if request.is_decoding]
        page_size = self.pages.page_size
        for request in requests:
            while request.pages and request.num_computed == len(request.pages) * page_size:
                if page := self.pages.allocate(1, after=request.pages[-1]):
                    request.pages += page
                else:
                    self.preempt(max(self.running, key=lambda r: (r.priority, r.arrival, r.id)))
        return [request for request in requests if request.pages]

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

    def admit(self):
        """Give the head of the line its pages and return it, or None if it must wait or nobody waits."""
        if not self.waiting or len(self.running) >= self.max_batch:
            return None
        request = self.waiting[0]
        needed = self.pages.needed(self.max_len if self.reserves_max_len else len(request.tokens))
        if needed + (self.watermark if self.running else 0) > self.pages.num_free:
            return None
        request.pages = self.pages.allocate(needed)
        self.running.append(request)
        self.waiting.popleft()
        return request

    def preempt(self, request):
        """Take a running request's pages: it waits at the front, and all its tokens, output too, are computed again."""
        request.preemptions += 1
        request.recomputed += request.num_computed
        request.num_computed = 0
        self._stop(request)
        self.waiting.appendleft(request)

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
            for request in self.decoding() + self.prefilling():  # none prefills, but after an interrupt
                batch.add(request)
        return batch


class Sarathi(Scheduler):
    """SARATHI §4.3, decode-maximal batching: one prefill chunk, and every decode rides along.

    The chunk shrinks so that chunk and decodes together are `chunk` tokens, rounded down to whole tiles (§4.4).
    `tile` is the matrix product's tile, in tokens; 1 where there is none.
    """

    options = frozenset({"tile"})

    def __init__(self, *args, tile=1, **options):
        super().__init__(*args, **options)
        check_whole("tile", tile, least=1)
        self.budget = self.chunk // tile * tile or self.chunk  # a chunk below one tile stays as it is

    def schedule(self):
        batch = Batch()
        for request in self.decoding():
            batch.add(request)
        room = self.budget - len(batch)
        if room > 0:
            request = next(iter(self.prefilling()), None) or self.admit()
            if request:
                batch.add(request, room)
        return batch


class SarathiServe(Scheduler):
    """Sarathi-Serve §4.2, Algorithm 3, stall-free batching: decodes first, then prefills in what is left."""

    reserves_max_len = False

    def token_budget(self):
        """The most tokens in a batch, unless there are more decodes than that."""
        return self.chunk

    def schedule(self):
        batch, budget = Batch(), self.token_budget()
        for request in self.decoding():
            budget -= batch.add(request)  # a running decode never waits
        for request in self.prefilling():
            budget -= batch.add(request, budget)  # finish what was started
        while budget > 0 and (request := self.admit()):
            budget -= batch.add(request, budget)  # then let new requests in
        return batch


class HybridOnly(SarathiServe):
    """Ablation (Sarathi-Serve §5.4.2): hybrid batches with a budget of max_len.

    A prompt is cut only where several share a batch.
    """

    def token_budget(self):
        return self.max_len


class ChunkedOnly(Scheduler):
    """Ablation (Sarathi-Serve §5.4.2): chunks without hybrid batches, prefill and decode batches alternate."""

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
            for request in decoding:
                batch.add(request)
        return batch


POLICIES = {
    "request-level": RequestLevel,
    "orca": Orca,
    "vllm": VLLM,
    "sarathi": Sarathi,
    "sarathi-serve": SarathiServe,
    "chunked-only": ChunkedOnly,
    "hybrid-only": HybridOnly,
}


def make_scheduler(policy, pages, **options):
    """The scheduler of that name. Raises ValueError for an unknown policy or an option it does not have."""
    if not isinstance(policy, str) or policy not in POLICIES:
        raise ValueError(f"policy={policy!r}: must be one of {', '.join(POLICIES)}")
    known = {"chunk", "max_batch", "max_len", "clock", *POLICIES[policy].options}
    for option in options.keys() - known:
        raise ValueError(f"{option}={options[option]!r}: policy {policy!r} has no such option, only {sorted(known)}")
    return POLICIES[policy](pages, **options)
