"""Two policies on one load, iteration by iteration, until they decide differently.

    difference = compare(load, policy=Mine, reference=SarathiServe)

Both schedulers get the same requests at the same times, and the same tokens. An iteration takes one
second. In each one the chunks, the admitted and the preempted requests, and the pages of all that
run are compared. Read first: loads.py. Read next: rules.py, which names the broken rule."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from exercises.loads import Load, make_request
from page.records import Recorder
from policies.observers import ChunkRecord, Iteration, chunk_records
from policies.referee import (
    Breach,
    at_most_max_batch,
    chunks_come_next,
    no_decode_dropped,
    no_page_leaked,
    nothing_lost,
)
from request import Batch
from scheduler import Scheduler

MAX_ITERATIONS = 2000  # of one run
TOKEN = 0  # each request generates this one, again and again

Seconds = Callable[[Batch], float]  # how long a batch takes


def one_second(batch: Batch) -> float:
    """Every iteration takes as long."""
    return 1.0


class Decision(NamedTuple):
    """The decision of a policy in one iteration. Requests are named by their ids."""

    chunks: dict[int, ChunkRecord]
    twice: list[int]  # who has more than one chunk
    admitted: frozenset[int]
    preempted: frozenset[int]
    capacity: dict[int, int]  # of each running request: how many tokens its pages hold

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
    arrival: float


@dataclass(frozen=True)
class Moment:
    """A decision of a policy, and what was before it."""

    load: Load
    iteration: int  # counts from 1
    states: dict[int, State]  # of all requests that had arrived
    free_pages: int
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


@dataclass(frozen=True)
class Difference(Moment):
    """The first decision that is not the reference's, or that breaks a rule of every policy."""

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
        self.requests = [make_request(i, each) for i, each in enumerate(load.requests)]
        self.coming = self.requests[:]
        self.batch = Batch()
        self.iterations: list[Iteration] = []
        self.page_tokens: dict[int, list[int]] = {}  # up to the end of what each page holds
        self.scheduler = load.make_scheduler(policy, self.clock)
        self.scheduler.check_progress = self.allow_an_empty_batch
        if recorder:
            recorder.watch([self.scheduler])

    def clock(self) -> float:
        """The time, in seconds."""
        return self.now

    def allow_an_empty_batch(self) -> None:
        """It is a decision, too, and can be compared with another one."""

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
                arrival=r.arrival,
            )
            for r in self.scheduler.requests.values()
        }

    def arrive(self) -> None:
        """Queue the requests that have arrived. If there is nothing to do, wait for the next."""
        if not self.scheduler.requests and self.coming:
            self.now = max(self.now, self.coming[0].arrival)
        while self.coming and self.coming[0].arrival <= self.now:
            self.scheduler.add(self.coming.pop(0))

    def decide(self) -> Decision:
        """The policy's decision. An empty batch is one, too: nothing is computed."""
        scheduler = self.scheduler
        was_running = set(scheduler.running)
        self.batch = scheduler.next_batch()
        preempted = frozenset(scheduler.preempted)
        chunks = chunk_records(self.batch)
        counts = Counter(chunk.request_id for chunk in chunks)
        return Decision(
            chunks={chunk.request_id: chunk for chunk in chunks},
            twice=[i for i, count in counts.items() if count > 1],
            admitted=frozenset(
                request.id
                for request in scheduler.running
                if request not in was_running or request.id in preempted
            ),
            preempted=preempted,
            capacity={r.id: len(r.pages) * scheduler.pages.page_size for r in scheduler.running},
        )

    def advance(self) -> None:
        """Compute the batch: its requests move on."""
        page_size = self.load.page_size
        for request, start, length in self.batch:
            for number in range(start // page_size, -(-(start + length) // page_size)):
                end = min(start + length, (number + 1) * page_size)
                self.page_tokens[request.pages[number]] = request.tokens[:end]
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
        while self.coming or self.scheduler.requests:
            self.arrive()
            states = self.states
            free_pages = self.scheduler.pages.num_free
            decision = self.decide()
            yield Moment(self.load, len(self.iterations) + 1, states, free_pages, decision)
            self.advance()

    def run(self) -> str | None:
        """Serve the load to its end, or until a rule of every policy is broken: then a sentence."""
        for moment in self.play():
            broken_rule = self.broken_rule()
            if broken_rule:
                return broken_rule
            if not moment.yours.chunks:
                self.advance()  # a drawing has this iteration, too
                return "The batch is empty, and there are requests: it would be so for ever."
            if moment.iteration == MAX_ITERATIONS:
                return f"Its requests have not ended after {MAX_ITERATIONS} iterations."
        for request, asked in zip(self.requests, self.load.requests, strict=True):
            if len(request.output) != asked.output_len:
                return f"Request {request.id} has {len(request.output)} tokens of output."
        return None

    def broken_rule(self) -> str | None:
        """The first rule of every policy that the decision breaks, as a sentence."""
        scheduler = self.scheduler
        arrived = [request for request in self.requests if request not in self.coming]
        rules = {
            "No request is lost": nothing_lost(scheduler, arrived),
            "At most max_batch requests run": at_most_max_batch(scheduler, self.load.max_batch),
            "A page is free, or in a block table": no_page_leaked(scheduler),
            "A chunk holds the next tokens": chunks_come_next(scheduler, self.batch),
            "A batch has all decodes or none": no_decode_dropped(scheduler, self.batch),
            "A shared page holds the same tokens": self.wrong_pages(),
        }
        for rule, breaches in rules.items():
            for breach in breaches:
                place = "" if breach.request is None else f"request {breach.request}: "
                return f"{rule}. {place}{breach.observation}."
        return None

    def wrong_pages(self) -> Iterator[Breach]:
        """The requests that read pages with other tokens than theirs."""
        page_size = self.load.page_size
        sharing = self.scheduler.running if self.load.prefix_caching else []
        for request in sharing:
            for number in range(request.num_computed // page_size):
                page = request.pages[number]
                if self.page_tokens.get(page) != request.tokens[: (number + 1) * page_size]:
                    yield Breach(request.id, f"page {page} does not hold what it reads there")


def compare(
    load: Load,
    policy: type[Scheduler],
    reference: type[Scheduler],
    seconds: Seconds = one_second,
) -> Difference | None:
    """The first difference between two policies on this load. None if they always agree."""
    trial = Trial(policy, load, seconds)
    expected = Trial(reference, load, seconds)
    for theirs, yours in zip(expected.play(), trial.play(), strict=False):
        broken_rule = trial.broken_rule()
        if broken_rule or yours.yours != theirs.yours:
            return Difference(**vars(yours), reference=theirs.yours, broken_rule=broken_rule)
    return None


def serve(policy: type[Scheduler], load: Load, seconds: Seconds) -> Trial:
    """The trial of a load that was served to its end."""
    trial = Trial(policy, load, seconds)
    problem = trial.run()
    assert problem is None, problem
    return trial
