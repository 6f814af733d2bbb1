"""What one call of a policy's `schedule()` costs: `python -m examples.schedule_cost`.

Many requests decode and share pages, and many more wait. Read first: scheduler.py."""

import statistics
import timeit
from argparse import ArgumentParser

from cli.console import run
from cli.tables import format_table
from policies import ALL_POLICIES, make_scheduler
from policies.pages import CachedPages
from scheduler import Request, Scheduler

CALLS = 200
RUNNING = 128
WAITING = 1000
PROMPT_LEN = 1000
PAGE_SIZE = 64
PAGES_EACH = 32  # for each running request: enough for max_len


def loaded_scheduler(policy: str) -> Scheduler:
    """A scheduler under load: RUNNING requests decode, with shared pages, and WAITING wait."""
    pages = CachedPages(PAGES_EACH * RUNNING, PAGE_SIZE)
    max_len = PAGE_SIZE * PAGES_EACH
    scheduler = make_scheduler(policy, pages, chunk=512, max_batch=RUNNING, max_len=max_len)
    for i in range(RUNNING + WAITING):
        prompt = [0] * PROMPT_LEN
        scheduler.add(Request(i, prompt, PROMPT_LEN, max_new_tokens=100))
    while request := scheduler.admit():
        new_pages = pages.needed(PROMPT_LEN) - len(request.pages)  # some admit without memory
        request.pages += pages.allocate(max(0, new_pages)) or []
        request.num_computed = PROMPT_LEN
        pages.keep(request, start=0)
        request.tokens.append(0)  # it decodes
    return scheduler


def main() -> None:
    """Print the median microseconds of one `schedule()` of each policy."""
    ArgumentParser(description=__doc__).parse_args()  # --help prints the text above
    medians = {}
    for policy in ALL_POLICIES:
        schedule = loaded_scheduler(policy).schedule
        seconds = timeit.repeat(schedule, number=1, repeat=CALLS)
        medians[policy] = 1e6 * statistics.median(seconds)
    rows = {policy: [("median us", us, ".0f")] for policy, us in medians.items()}
    print(f"schedule() with {RUNNING} requests running and {WAITING:,} waiting\n")
    print(format_table("policy", rows))
    slowest = max(medians, key=lambda policy: medians[policy])
    print(f"\nslowest: {slowest}, {medians[slowest]:.0f} us")


if __name__ == "__main__":
    run(main)
