"""What one call of a policy's `schedule()` costs.

Many requests decode and share pages, and many more wait. Read first: scheduler.py. Read next:
examples/schedule_cost.py, which prints the times."""

import statistics
import timeit

from policies import ALL_POLICIES, make_scheduler
from policies.pages import CachedPages
from scheduler import Request, Scheduler

CALLS = 200
RUNNING = 128
WAITING = 1000
PROMPT_LEN = 1000
PAGE_SIZE = 64
PAGES_EACH = 32  # for each running request: enough for max_len
MAX_LEN = PAGE_SIZE * PAGES_EACH
CHUNK = 512


def schedule_us(running: int = RUNNING, waiting: int = WAITING) -> dict[str, float]:
    """The median microseconds of one `schedule()` of each policy, with so many requests."""
    medians = {}
    for policy in ALL_POLICIES:
        scheduler = loaded_scheduler(policy, running, waiting)
        seconds = timeit.repeat(scheduler.schedule, number=1, repeat=CALLS)
        medians[policy] = statistics.median(seconds) * 1e6
    return medians


def loaded_scheduler(policy: str, running: int, waiting: int) -> Scheduler:
    """A scheduler under load: `running` requests decode, with shared pages, and `waiting` wait."""
    pages = CachedPages(PAGES_EACH * running, PAGE_SIZE)
    scheduler = make_scheduler(policy, pages, chunk=CHUNK, max_batch=running, max_len=MAX_LEN)
    for i in range(running + waiting):
        prompt = [0] * PROMPT_LEN
        scheduler.add(Request(i, prompt, PROMPT_LEN, max_new_tokens=100))
    while request := scheduler.admit():
        new_pages = pages.needed(PROMPT_LEN) - len(request.pages)  # some admit without memory
        request.pages += pages.allocate(max(0, new_pages)) or []
        request.num_computed = PROMPT_LEN
        pages.keep(request, start=0)
        request.tokens.append(0)  # it decodes
    return scheduler
