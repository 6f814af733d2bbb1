"""The rules that every policy keeps, and a referee that names the first rule a policy breaks.

A `Referee` watches a scheduler: after every change it applies the rules, one function each. Plain
Python. Read first: template.py. Read next: lab/simulator/referee.py, which simulates
loads under a referee, and exercises/, which does without a simulator.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from policies.observers import Observer
from policies.pages import CachedPages
from request import Batch, Request
from scheduler import Scheduler

RULES = (
    "nothing lost",
    "at most max_batch",
    "no page leaked",
    "chunks",
    "no decode dropped",
    "in order",
    "everybody ends",
)


@dataclass(frozen=True)
class Violation:
    """A rule that a policy broke, where, and what was seen."""

    policy: str  # and its load
    iteration: int
    rule: str  # one of RULES
    request: str  # id, or ids; empty: no request is concerned
    observation: str

    @property
    def sentence(self) -> str:
        """The violation in one line: the rule, the cause, and then where."""
        place = f"iteration {self.iteration} of {self.policy}"
        if self.request:
            place = f"request {self.request}, {place}"
        return f"the rule {self.rule!r} is broken: {self.observation} ({place})"


class BrokenRuleError(ValueError):
    """Ends a run at its first violation."""

    def __init__(self, violation: Violation) -> None:
        super().__init__(violation.sentence)
        self.violation = violation


class Breach(NamedTuple):
    """What a rule finds wrong with a request."""

    request: object  # id, or ids; None: no request is concerned
    observation: str


def nothing_lost(scheduler: Scheduler, requests: Sequence[Request]) -> Iterator[Breach]:
    """A request waits or runs, once, until it ends; one that has ended got all its output, or a
    stop token or string. It knows of no abort."""
    places = Counter([*scheduler.running, *scheduler.waiting])
    for request in requests:
        lacking = request.prompt_len + request.max_new_tokens - len(request.tokens)
        if request.finish_reason:
            may_stop = request.tokens[-1] in request.stop or (
                request.params and request.params.stop
            )
            has_all = lacking == 0 or (request.finish_reason == "stop" and may_stop)
            is_kept = places[request] == 0 and has_all
        else:
            is_kept = places[request] == 1
        if not is_kept:
            state = request.finish_reason or "not ended"
            lacks = f"lacks {lacking} tokens"
            yield Breach(request.id, f"{state}, {lacks}, waits or runs {places[request]} times")


def at_most_max_batch(scheduler: Scheduler, max_batch: int) -> Iterator[Breach]:
    """At most max_batch requests run."""
    running = scheduler.running
    for request in running[max_batch:]:
        yield Breach(request.id, f"is one of {len(running)} that run")


def no_page_leaked(scheduler: Scheduler) -> Iterator[Breach]:
    """Each page is free or in one block table; only prefix caching puts it in several."""
    running = scheduler.running
    in_tables = Counter(page for request in running for page in request.pages)
    max_tables = len(running) if scheduler.pages.prefix_caching else 1
    expected = {
        page: min(readers, max_tables)
        for page, readers in enumerate(scheduler.pages.ref_counts)
        if readers
    }
    for page in {**in_tables, **expected}:
        must_be_in = expected.get(page, 0)
        if in_tables[page] != must_be_in:
            owners = [request.id for request in running if page in request.pages]
            tables = f"{in_tables[page]} block tables, and must be in {must_be_in}"
            yield Breach(owners or None, f"page {page} is in {tables}")


def chunks_come_next(
    scheduler: Scheduler, batch: Batch, admitted: Collection[int] = ()
) -> Iterator[Breach]:
    """A chunk holds the next tokens of a running request, and writes only to pages of its own.

    Where a policy `shares_in_batch`, those `admitted` for this batch may read them, too."""
    pages = scheduler.pages
    may_read = admitted if scheduler.shares_in_batch else ()
    readers = [request for request in scheduler.running if request.id not in may_read]
    block_tables = Counter(page for request in readers for page in request.pages)
    chunks = Counter(chunk.request for chunk in batch)
    for request, start, length in batch:
        end = start + length
        limit = min(len(request.tokens), len(request.pages) * pages.page_size)
        is_next = start == request.num_computed < end <= limit
        if request not in scheduler.running or not is_next or chunks[request] > 1:
            limits = f"{request.num_computed} are computed, {limit} can be"
            chunk = f"{length} tokens from {start}, one of {chunks[request]} chunks"
            yield Breach(request.id, f"{chunk}: {limits}")
        for page in request.pages[start // pages.page_size : pages.needed(end)]:
            is_cached = isinstance(pages, CachedPages) and pages.is_cached(page)
            other_owners = block_tables[page] - (request in readers)
            if other_owners or (is_cached and not scheduler.shares_in_batch):
                yield Breach(request.id, f"page {page} is written, and others read it")


def no_decode_dropped(scheduler: Scheduler, batch: Batch) -> Iterator[Breach]:
    """A batch has all running decodes, or none of them if it is of prefill alone.

    Some policies say of themselves that they break this one."""
    if scheduler.drops_decodes:
        return
    has_chunk = {chunk.request for chunk in batch}
    decodes = [request for request in scheduler.running if request.is_decoding]
    waiting = [request for request in decodes if request not in has_chunk]
    for request in waiting if len(waiting) < len(decodes) else ():
        yield Breach(request.id, f"waits, as {len(waiting)} of {len(decodes)} decodes")


def in_order(scheduler: Scheduler, admitted: Collection[int]) -> Iterator[Breach]:
    """A request that has lost its memory is admitted before those that arrived after it.

    Policies that order their queue otherwise say so: `reorders = True`."""
    if scheduler.reorders:
        return
    newcomers = [(r.arrival, r.id) for r in scheduler.running if r.id in admitted]
    for victim in scheduler.waiting if newcomers else ():
        _, last = max(newcomers)
        if victim.preemptions and (victim.arrival, victim.id) < max(newcomers):
            yield Breach(victim.id, f"was preempted, and request {last} goes before it")


def everybody_ends(
    requests: Sequence[Request], batch: Batch, tokens_in_vain: int
) -> Iterator[Breach]:
    """There is a new token before twice the tokens of all requests were computed."""
    limit = 2 * sum(len(request.tokens) for request in requests)
    if tokens_in_vain > limit:
        ids = [chunk.request.id for chunk in batch]
        yield Breach(ids, f"{tokens_in_vain} tokens were computed since the last new one")


class Referee(Observer):
    """Watches a scheduler. Raises BrokenRuleError, a ValueError, at the first violation."""

    def __init__(self, scheduler: Scheduler, policy: str) -> None:
        self.scheduler = scheduler
        self.policy = policy  # and its load, for the violation
        self.iterations = 0
        self.requests: list[Request] = []  # all that have not ended, in order of arrival
        self.tokens_in_vain = 0  # computed since the last new token
        self.max_batch = scheduler.max_batch  # before the policy can change it
        self.running: set[int] = set()  # the ids of those that run
        self.admitted: set[int] = set()  # and of those admitted for the batch that is decided
        self.wasteful = ""  # the first time that a request was admitted for nothing, in words
        scheduler.observers.append(self)

    def added(self, scheduler: Scheduler, request: Request) -> None:
        """Remember a request, whatever becomes of it."""
        self.requests.append(request)

    def decided(self, scheduler: Scheduler, batch: Batch) -> None:
        """Apply all rules to the next batch."""
        self.iterations += 1
        self._check_requests()
        self._check_batch(batch)

    def advanced(self, scheduler: Scheduler, batch: Batch) -> None:
        """Apply the rules that hold at any time: requests that end give their pages back."""
        self.admitted = set()
        self._check_requests()

    def _expect_none(self, rule: str, breaches: Iterator[Breach]) -> None:
        """Raise BrokenRuleError for the first breach, if there is one."""
        for request, observation in breaches:
            concerned = "" if request is None else str(request)
            violation = Violation(self.policy, self.iterations, rule, concerned, observation)
            raise BrokenRuleError(violation)

    def _check_requests(self) -> None:
        """Apply the rules that hold between any two calls of the scheduler."""
        self._expect_none("nothing lost", nothing_lost(self.scheduler, self.requests))
        self.requests = [request for request in self.requests if not request.finish_reason]
        self._expect_none("at most max_batch", at_most_max_batch(self.scheduler, self.max_batch))
        self._expect_none("no page leaked", no_page_leaked(self.scheduler))

    def _check_batch(self, batch: Batch) -> None:
        """Apply the rules of a batch."""
        running = {request.id for request in self.scheduler.running}
        self.admitted |= running - self.running  # a batch that failed is decided again
        self.running = running
        self._expect_none("chunks", chunks_come_next(self.scheduler, batch, self.admitted))
        self._expect_none("no decode dropped", no_decode_dropped(self.scheduler, batch))
        self._expect_none("in order", in_order(self.scheduler, self.admitted))
        if any(chunk.yields_token for chunk in batch):
            self.tokens_in_vain = 0
        else:
            self.tokens_in_vain += sum(chunk.length for chunk in batch)
        breaches = everybody_ends(self.requests, batch, self.tokens_in_vain)
        self._expect_none("everybody ends", breaches)
        # no rule forbids to admit who gets nothing of a budget that is used up
        wasted = self.admitted.difference(chunk.request.id for chunk in batch)
        if wasted and batch.left <= 0 and not self.wasteful:
            self.wasteful = (
                f"request {min(wasted)} is admitted when the budget is used up, and holds memory "
                f"for nothing (iteration {self.iterations} of {self.policy})"
            )
