"""Two policies on one load, iteration by iteration, until they decide differently.

    difference = compare(load, policy=Mine, reference=SarathiServe)

Both schedulers get the same requests at the same times, and the same tokens. An iteration takes one
second. In each one the chunks, the admitted and the preempted requests, and the pages of all that
run are compared. Read first: loads.py. Read next: rules.py, which names the broken rule."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from exercises.guards import PolicyError, check_batch, guarded, one_line
from exercises.loads import Load
from page.records import Recorder
from policies.observers import ChunkRecord, Iteration, chunk_records
from policies.referee import (
    at_most_max_batch,
    chunks_come_next,
    no_decode_dropped,
    no_page_leaked,
    nothing_lost,
)
from request import Batch, Request
from scheduler import Admission, Scheduler

CALL_LIMIT_S = 2.0  # of CPU time: a call that takes longer is a loop without an end
MAX_ITERATIONS = 2000  # of one run
TOKEN = 0  # each request generates this one, again and again

Seconds = Callable[[Batch], float]  # how long a batch takes


def one_second(batch: Batch) -> float:
    """Every iteration takes as long."""
    return 1.0


class Checked(Scheduler):
    """A policy whose methods raise PolicyError where they return something wrong."""

    def grow_decodes(self) -> list[Request]:
        decodes: Any = super().grow_decodes()
        check_not_none("grow_decodes", decodes)
        if not isinstance(decodes, list):
            kind = type(decodes).__name__
            raise PolicyError(
                f"grow_decodes() returned a {kind}, and must return a list of requests"
            )
        for request in cast("list[object]", decodes):
            if not isinstance(request, Request):
                problem = f"must return a list of requests, not of {request!r:.40}"
                raise PolicyError(f"grow_decodes() {problem}")
            if request.pages and not request.is_decoding:
                problem = "it does not decode: ask request.is_decoding"
                if request.id in self.preempted:
                    problem = (
                        "it has just been preempted, perhaps for itself: it gets no page until it "
                        "is admitted again"
                    )
                raise PolicyError(f"grow_decodes() returned request {request.id}, and {problem}")
        return decodes

    def plan_admission(self, request: Request) -> Admission:
        admission: Any = super().plan_admission(request)
        check_not_none("plan_admission", admission)
        if not (
            isinstance(admission, Admission)
            and isinstance(admission.cached_pages, list)
            and all(isinstance(page, int) for page in admission.cached_pages)
            and isinstance(admission.new_pages, int)
        ):
            raise PolicyError("plan_admission() must return Admission(list of pages, number)")
        return admission

    def check_progress(self) -> None:
        """An empty batch is a decision, too."""


class CheckedBudget(Checked):
    """The same of a policy that has a token budget."""

    def token_budget(self, *requests: Any) -> int:
        policy: Any = super()
        budget: int = policy.token_budget(*requests)
        check_not_none("token_budget", budget)
        return budget


def checked(policy: type[Scheduler]) -> type[Scheduler]:
    """The policy, checked."""
    mixin = CheckedBudget if hasattr(policy, "token_budget") else Checked
    members = {"__module__": policy.__module__, "__doc__": policy.__doc__}
    return type(policy.__name__, (mixin, policy), members)


def check_not_none(name: str, value: object) -> None:
    """Raise PolicyError for None."""
    if value is None:
        raise PolicyError(f"{name}() returned None: did you forget return?")


class Decision(NamedTuple):
    """The decision of a policy in one iteration. Requests are named by their ids."""

    chunks: dict[int, ChunkRecord]
    admitted: frozenset[int]
    preempted: frozenset[int]
    capacity: dict[int, int]  # of each running request: how many tokens its pages hold
    budget: int | None

    @property
    def compared(self) -> tuple[object, ...]:
        """The part that two policies must agree on."""
        return self.chunks, self.admitted, self.preempted, self.capacity

    @property
    def num_tokens(self) -> int:
        """How many tokens are computed."""
        return sum(chunk.length for chunk in self.chunks.values())


class State(NamedTuple):
    """A request between two iterations."""

    is_running: bool
    is_decoding: bool
    num_computed: int
    num_tokens: int  # that are known: its prompt and its output so far
    prompt_len: int
    arrival: float


@dataclass(frozen=True)
class Moment:
    """The iteration of a load in which a policy decides wrongly."""

    load: Load
    iteration: int  # counts from 1
    states: dict[int, State]  # before it, of all requests that had arrived
    free_pages: int  # before it
    history: Sequence[Decision]  # before it
    yours: Decision

    @property
    def running(self) -> list[int]:
        """The requests that ran before, in order of arrival."""
        return [i for i, state in self.states.items() if state.is_running]

    @property
    def decodes(self) -> list[int]:
        """Those of them that decode."""
        return [i for i in self.running if self.states[i].is_decoding]

    @property
    def prefills(self) -> list[int]:
        """Those of them whose prompt has begun and is not computed to its end."""
        return [i for i in self.running if not self.states[i].is_decoding]


class Trial:
    """A scheduler that serves a load, iteration by iteration: see `play`.

    `recorder` keeps the records of a page, see page/records.py."""

    def __init__(
        self,
        policy: type[Scheduler],
        load: Load,
        seconds: Seconds = one_second,
        recorder: Recorder | None = None,
    ) -> None:
        self.now = 0.0
        self.load = load
        self.seconds = seconds
        self.recorder = recorder
        self.requests = load.make_requests()
        self.coming = self.requests[:]
        self.batch = Batch()
        self.iterations: list[Iteration] = []
        with guarded(CALL_LIMIT_S):
            self.scheduler = load.make_scheduler(checked(policy), self.clock)
        if recorder:
            recorder.watch([self.scheduler])

    def clock(self) -> float:
        """The time, in seconds."""
        return self.now

    @property
    def has_ended(self) -> bool:
        """Whether all requests have ended."""
        return not self.coming and not self.scheduler.requests

    @property
    def states(self) -> dict[int, State]:
        """All requests that have arrived and not ended, by id."""
        running = {request.id for request in self.scheduler.running}
        return {
            r.id: State(
                is_running=r.id in running,
                is_decoding=r.is_decoding,
                num_computed=r.num_computed,
                num_tokens=len(r.tokens),
                prompt_len=r.prompt_len,
                arrival=r.arrival,
            )
            for r in self.scheduler.requests.values()
        }

    def arrive(self) -> None:
        """Queue the requests that have arrived. If there is nothing to do, wait for the next."""
        with guarded(CALL_LIMIT_S):
            if not self.scheduler.requests and self.coming:
                self.now = max(self.now, self.coming[0].arrival)
            while self.coming and self.coming[0].arrival <= self.now:
                self.scheduler.add(self.coming.pop(0))

    def decide(self) -> Decision:
        """The policy's decision. Raises PolicyError if it makes none, or changes what it must not.

        An empty batch is a decision, too: nothing is computed."""
        scheduler = self.scheduler
        with guarded(CALL_LIMIT_S):
            before = self.states
            sizes = scheduler.chunk, scheduler.max_batch, scheduler.max_len
            self.batch = self._make_batch()
            if (scheduler.chunk, scheduler.max_batch, scheduler.max_len) != sizes:
                raise PolicyError("it changes chunk, max_batch or max_len of the scheduler")
            after = self.states
            preempted = frozenset(scheduler.preempted)
            running = {i for i, state in after.items() if state.is_running}
            was_waiting = {i for i, state in before.items() if not state.is_running}
            admitted = frozenset(running & (was_waiting | preempted))
            for i, state in after.items():
                self._check_unchanged(before[i], state, i, has_moved=i in admitted | preempted)
            self._check_pages()
            chunks = self._chunks(admitted)
        page_size = scheduler.pages.page_size
        capacity = {r.id: len(r.pages) * page_size for r in scheduler.running}
        return Decision(chunks, admitted, preempted, capacity, self.batch.budget)

    def _chunks(self, admitted: Collection[int]) -> dict[int, ChunkRecord]:
        """The chunks of the batch by request. Raises PolicyError if one has two."""
        chunks: dict[int, ChunkRecord] = {}
        for chunk in chunk_records(self.batch):
            i = chunk.request_id
            other = chunks.setdefault(i, chunk)
            if other is chunk:
                continue
            problem = f"request {i} has two chunks in one batch"
            if i in admitted:
                problem += (
                    ": one that was admitted is in self.running (and in prefilling()) already"
                )
            elif not chunk.is_decode and other.length == 1 < chunk.length:
                problem += ": it does not decode, ask request.is_decoding"
            raise PolicyError(problem)
        return chunks

    def advance(self) -> None:
        """Compute the batch: its requests move on. Raises PolicyError if they never end."""
        if len(self.iterations) == MAX_ITERATIONS:
            raise PolicyError(f"its requests have not ended after {MAX_ITERATIONS} iterations")
        with guarded(CALL_LIMIT_S):
            seconds = self.seconds(self.batch)
            iteration = Iteration.of(self.scheduler, self.batch, self.now, self.now + seconds)
            self.now += seconds
            tokens = [TOKEN if chunk.yields_token else None for chunk in self.batch]
            self.scheduler.observe(self.batch, seconds)
            self.scheduler.advance(self.batch, tokens, self.now)
        self.iterations.append(iteration)
        if self.recorder:
            self.recorder.add(iteration)

    def play(self) -> Iterator[Moment]:
        """Each iteration when it is decided; it is computed when the next one is asked for."""
        history: list[Decision] = []
        while not self.has_ended:
            self.arrive()
            states = self.states
            free_pages = self.scheduler.pages.num_free
            decision = self.decide()
            yield Moment(self.load, len(history) + 1, states, free_pages, history, decision)
            history.append(decision)
            self.advance()

    def run(self) -> None:
        """Serve the load to its end. Raises PolicyError if the policy cannot, or never ends."""
        for moment in self.play():
            if not moment.yours.chunks:
                raise PolicyError("it makes an empty batch, but there are requests")
            broken_rule = self.broken_rule()
            if broken_rule:
                raise PolicyError(broken_rule)

    def broken_rule(self) -> str | None:
        """The first rule of policies/referee.py that this decision breaks, as a sentence."""
        scheduler = self.scheduler
        arrived = [request for request in self.requests if request not in self.coming]
        rules = {
            "nothing is lost": nothing_lost(scheduler, arrived),
            "at most max_batch run": at_most_max_batch(scheduler, scheduler.max_batch),
            "no page is leaked": no_page_leaked(scheduler),
            "a chunk holds the next tokens": chunks_come_next(scheduler, self.batch),
            "a batch has all decodes or none": no_decode_dropped(scheduler, self.batch),
        }
        for rule, breaches in rules.items():
            for breach in breaches:
                if breach.request is None:
                    cause = "did you preempt the request that it was for?"
                    return f"The rule that {rule} is broken: {breach.observation}: {cause}"
                place = f"request {breach.request}: {breach.observation}"
                return f"The rule that {rule} is broken, {place}.{self._cure(breach.request)}"
        return None

    def _cure(self, request_id: object) -> str:
        """What gives a chunk of this request the memory that it lacks; "" if it lacks none."""
        for chunk in self.batch:
            request = chunk.request
            if request.id != request_id:
                continue
            if not request.pages:
                return " Only self.admit() gives a request memory."
            capacity = len(request.pages) * self.scheduler.pages.page_size
            if request.is_decoding and chunk.end > capacity:
                return " Take the decodes from self.grow_decodes(), which finds a page for each."
        return ""

    def _make_batch(self) -> Batch:
        """The scheduler's next batch, which may be empty."""
        scheduler = self.scheduler
        try:
            with guarded(CALL_LIMIT_S):
                batch = scheduler.next_batch()
        except PolicyError:
            check_batch(scheduler.batch)  # which may be why
            raise
        check_batch(batch)
        return batch

    def _check_unchanged(self, before: State, after: State, i: int, has_moved: bool) -> None:
        """Raise PolicyError if a request's tokens or counter were changed by a decision.

        `has_moved`: it was admitted or preempted, which only cached pages let begin above 0."""
        if after.num_tokens != before.num_tokens:
            raise PolicyError(f"it changes the tokens of request {i}: only advance() appends one")
        if has_moved and self.scheduler.pages.prefix_caching:
            return
        expected = 0 if has_moved else before.num_computed
        if after.num_computed != expected:
            change = f"from {expected} to {after.num_computed}"
            raise PolicyError(
                f"it changes num_computed of request {i} {change}: the engine does that"
            )

    def _check_pages(self) -> None:
        """Raise PolicyError if a request has something else than numbers among its pages."""
        for request in self.scheduler.running:
            for page in request.pages:
                if not isinstance(page, int):
                    raise PolicyError(
                        f"request {request.id} has {one_line(repr(page))[:40]} among its pages: "
                        "allocate() returns a list, so use `pages += ...`"
                    )


@dataclass(frozen=True)
class Difference(Moment):
    """The first iteration of a load in which two policies decide differently.

    Or the first one in which your policy breaks a rule of policies/referee.py."""

    reference: Decision
    broken_rule: str | None  # a sentence

    @property
    def new(self) -> list[int]:
        """The requests that are admitted by yours alone."""
        return sorted(self.yours.admitted - self.reference.admitted)

    @property
    def late(self) -> list[int]:
        """The requests that are admitted by the reference alone."""
        return sorted(self.reference.admitted - self.yours.admitted)


def compare(
    load: Load,
    policy: type[Scheduler],
    reference: type[Scheduler],
    seconds: Seconds = one_second,
) -> Difference | None:
    """The first difference between two policies on this load. None if they always agree.

    Raises PolicyError if `policy` fails."""
    trial = Trial(policy, load, seconds)
    expected = Trial(reference, load, seconds)
    for theirs, yours in zip(expected.play(), trial.play(), strict=False):
        broken_rule = trial.broken_rule()
        if broken_rule or yours.yours.compared != theirs.yours.compared:
            return Difference(**vars(yours), reference=theirs.yours, broken_rule=broken_rule)
    return None


def serve(policy: type[Scheduler], load: Load, seconds: Seconds) -> Trial:
    """The trial of a load that was served to its end. Raises PolicyError."""
    trial = Trial(policy, load, seconds)
    trial.run()
    return trial
