"""A trial of a policy: small loads under a referee, without a model, on a clock that only counts.

    violation = find_violation("my_policy.py:Eager")

The server and the commands that measure try a policy from a file so before they run it: beside a
model a referee would take time in each iteration. Plain Python. Read first: referee.py. `bench.py
check` simulates larger loads."""

from collections.abc import Iterable
from itertools import count, product

from policies import ALL_POLICIES, make_scheduler
from policies.custom import PolicyError
from policies.pages import make_pages
from policies.priority import PRIORITIES
from policies.referee import Referee, Violation
from request import Request, Service
from scheduler import Scheduler

REQUESTS = 40  # one arrives in each iteration: more than can be served
OUTPUT_LEN = 24
MAX_LEN = 128
PAGE_SIZE = 8
MAX_BATCH = 8
CHUNKS = (16, 64)
MEMORY = {"ample": MAX_BATCH, "tight": 2}  # how many requests of MAX_LEN fit


def find_violation(policy: str) -> Violation | None:
    """The first rule that a policy from a file breaks; None if it keeps all.

    Raises ValueError if it cannot be made, and TimeoutError if it loops without an end."""
    if policy in ALL_POLICIES:
        return None
    loads = product(MEMORY.items(), CHUNKS, (False, True))
    for (memory, longest_that_fit), chunk, prefix_caching in loads:
        pages = make_pages(longest_that_fit * MAX_LEN // PAGE_SIZE, PAGE_SIZE, prefix_caching)
        sizes = {"chunk": chunk, "max_batch": MAX_BATCH, "max_len": MAX_LEN}
        scheduler = make_scheduler(policy, pages, clock=count().__next__, **sizes)
        sharing = ", prefix caching" if prefix_caching else ""
        referee = Referee(scheduler, f"{policy}, chunk {chunk}, {memory} memory{sharing}")
        try:
            serve(scheduler)
        except PolicyError as error:
            violation = referee.violation_of(error)
            if isinstance(violation.error, TimeoutError):
                raise violation.error from error
            return violation
    return None


def broken_rules(policies: Iterable[str]) -> dict[str, Violation]:
    """{policy: the first rule that it breaks} of those from files that break one. Raises as
    find_violation."""
    violations = {policy: find_violation(policy) for policy in dict.fromkeys(policies)}
    return {policy: violation for policy, violation in violations.items() if violation}


def mark_broken(name: str, rule: str | None) -> str:
    """The name of a run as tables show it, with the rule that its policy broke, if it did."""
    return f"{name} (breaks {rule!r})" if rule else name


def serve(scheduler: Scheduler) -> None:
    """Let the requests arrive, and step until all have ended."""
    arriving = [make_request(i) for i in range(REQUESTS)]
    while arriving or scheduler.requests:
        if arriving:
            scheduler.add(arriving.pop(0))
        batch = scheduler.next_batch()
        scheduler.observe(batch, seconds=1.0)
        tokens = [0 if chunk.yields_token else None for chunk in batch]
        scheduler.advance(batch, tokens, scheduler.clock())


def make_request(i: int) -> Request:
    """A request of a length of its own; prompts begin like every fourth one before them, whose
    classes are others."""
    prompt_len = 1 + 37 * i % (MAX_LEN - OUTPUT_LEN)
    return Request(
        id=i,
        tokens=[i % 4] * prompt_len,
        prompt_len=prompt_len,
        max_new_tokens=1 + i % OUTPUT_LEN,
        arrival=i,
        service=Service(priority=(i + i // 4) % len(PRIORITIES)),
    )
