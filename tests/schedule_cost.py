"""What a schedule costs: `python -m tests.schedule_cost` prints microseconds, policy by policy.

128 requests decode, and share pages; 1,000 wait. Read first: scheduler.py.
"""

import statistics
import timeit

from cli.console import run
from kv_cache import Pages
from policies import POLICIES, make_scheduler
from scheduler import Request
from views.tables import markdown


def schedule_us(running=128, waiting=1000):
    """{policy: the median microseconds of one `schedule()` of so many}."""
    medians, sizes = {}, dict(chunk=512, max_batch=running, max_len=2048)
    for policy in POLICIES:
        pages = Pages(32 * running, 64, prefix_caching=True)
        scheduler = make_scheduler(policy, pages, **sizes)
        for i in range(running + waiting):
            scheduler.add(Request(i, [0] * 1000, 1000, 100))
        while request := scheduler.admit():
            pages.publish(request.pages, request.page_hashes)
            request.tokens.append(0)
            request.num_computed = 1000  # it decodes
        times = timeit.repeat(scheduler.schedule, number=1, repeat=200)
        medians[policy] = statistics.median(times) * 1e6
    return medians


def main():
    """The command line, which has no options."""
    medians = schedule_us()
    print("schedule() with 128 requests running and 1,000 waiting\n")
    print(markdown({"policy": "", "median us": ".0f"}, medians.items()))
    slowest = max(medians, key=medians.get)
    print(f"\nslowest: {slowest}, {medians[slowest]:.0f} us")


if __name__ == "__main__":
    run(main)
