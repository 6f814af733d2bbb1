"""Each policy does what its paper says, held against tables by hand, batch by batch."""

import gc
import random
import sys

import pytest

from config import EngineConfig
from kv_cache import Pages
from parallel.micro_batches import MicroBatches
from policies import POLICIES, make_scheduler, scheduler_of
from policies.pages import make_pages
from scheduler import SarathiServe
from tests.by_hand import World, check_row, request_of, rows_of
from tests.helpers import GROWING, IN_ORDER, RESERVING, advance, check_batch, check_integrity

EVERY = pytest.mark.parametrize("policy", POLICIES)
OF_EACH_KIND = ["vllm", "sarathi-serve", "priority"]  # of those that grow page by page


def requests_of(*lengths):
    """Requests of these lengths of prompt and output, all there from the start."""
    return [request_of(i, *pair, arrival=0.0) for i, pair in enumerate(lengths)]


def queue(policy, pages, page_size, requests, **options):
    """A scheduler with these requests in its queue."""
    sizes = dict(
        chunk=64,
        max_batch=9,
        max_len=pages * page_size,
    )
    scheduler = make_scheduler(policy, make_pages(pages, page_size), **sizes | options)
    for request in requests:
        scheduler.add(request)
    return scheduler


# policy options, prompt+output of each request = the chunks of each iteration, d for a decode
PAPERS = """
request-level max_batch=2, 5+2 3+3 4+2 = 0:5 1:3 | 0:d 1:d | 1:d | 2:4 | 2:d  # runs to its end
orca max_batch=2, 5+2 3+4 20+2 4+1 = \
    0:5 1:3 | 0:d 1:d | 1:d 2:20 | 1:d 2:d | 3:4  # whole prompts join decodes
orca-best, 5+3 3+2 4+1 = 0:5 | 0:d 1:3 | 0:d 1:d 2:4  # one prompt at a time
vllm max_batch=2, 5+2 3+4 20+2 4+1 = \
    0:5 1:3 | 0:d 1:d | 2:20 | 1:d 2:d | 3:4 | 1:d  # prompts stall decodes
vllm, 40+2 30+2 24+2 = 0:40 | 1:30 2:24 | 0:d 1:d 2:d  # whole prompts, max_len = 64 together
vllm, 40+2 24+2 1+2 = 0:40 1:24 | 2:1 | 0:d 1:d 2:d  # and no token more
sarathi, 12+5 10+3 = 0:8 | 0:4 | 0:d 1:7 | 0:d 1:3 | 0:d 1:d x2  # one chunk, filled up
sarathi chunk=256 tile=128 pages=256 max_len=512, 1+9 400+1 = 0:1 | 0:d 1:255 | ...  # whole tiles
sarathi chunk=300 tile=128 pages=256 max_len=512, 1+9 400+1 = 0:1 | 0:d 1:255 | ...
sarathi chunk=100 tile=128 pages=256 max_len=512, 1+9 400+1 = 0:1 | 0:d 1:99 x4 | ...  # but not 0
sarathi chunk=101 pages=256 max_len=512, 1+9 400+1 = 0:1 | 0:d 1:100 x4 | ...
sarathi chunk=2, 1+9 4+1 = 0:1 | 0:d 1:1 x4 | ...  # the last token of a budget, too
sarathi, 8+1 9+1 = 0:8 | 1:8 | 1:1  # nobody is admitted without room for a token
sarathi-serve, 9+1 1+1 = 0:8 | 0:1 1:1
dynamic, 9+1 1+1 = 0:8 | 0:1 1:1
priority, 9+1 1+1 = 0:8 | 0:1 1:1
chunked-only, 9+1 1+1 = 0:8 | 0:1 1:1
sarathi-serve, 5+4 12+2 3+2 2+1 = 0:5 1:3 | 0:d 1:7 | 0:d 1:2 2:3 3:2 | 0:d 1:d 2:d  # Algorithm 3
dynamic, 5+4 12+2 3+2 2+1 = 0:5 1:3 | 0:d 1:7 | 0:d 1:2 2:3 3:2 | 0:d 1:d 2:d  # without SLO
chunked-only, 5+3 12+2 3+1 = 0:5 1:3 | 0:d | 1:8 | 0:d | 1:1 2:3 | 1:d  # never mixes
hybrid-only, 5+3 40+2 30+1 = 0:5 1:40 2:19 | 0:d 1:d 2:11 | 0:d  # cuts only at max_len = 64
"""


@pytest.mark.parametrize("row", rows_of(PAPERS))
def test_a_policy_does_what_its_paper_says(row):
    check_row(row)


@EVERY
def test_a_policy_says_whether_it_cuts_prompts(policy):
    is_cut = World(policy, "20+1").step() == "0:8"
    assert POLICIES[policy].cuts_prompts == is_cut


def decoding(policy, pages, page_size, requests, **options):
    """A scheduler of running requests that all decode next."""
    sizes = dict(max_batch=len(requests) + 1, clock=lambda: 10.0)
    scheduler = queue(policy, pages, page_size, requests, **sizes | options)
    while admitted := scheduler.admit():
        admitted.num_computed = admitted.prompt_len
        admitted.tokens.append(0)
    return scheduler


# how requests move on


def started(*requests, **options):
    """A stall-free scheduler of 8 pages of 4 tokens, and a budget of 6."""
    return queue(
        "sarathi-serve",
        8,
        4,
        requests,
        **dict(chunk=6, max_len=20) | options,
    )


def test_advance_moves_requests_on_and_ends_them():
    a, b = requests_of((8, 3), (3, 1))
    scheduler = started(a, b)
    sampled = []
    for now in (1.0, 2.0, 3.0, 4.0):
        batch = scheduler.next_batch()
        tokens = [10 * now if chunk.yields_token else None for chunk in batch]
        new_tokens = scheduler.advance(batch, tokens, now)
        sampled.append([(r.id, token) for r, token in new_tokens])
    assert sampled == [[], [(0, 20), (1, 20)], [(0, 30)], [(0, 40)]]
    assert a.num_computed == 10  # the last token is never computed
    assert b.num_computed == 3
    assert a.tokens == [0] * 8 + [20, 30, 40]
    assert a.token_times == [2.0, 3.0, 4.0]
    assert b.token_times == [2.0]
    assert scheduler.next_batch() == []
    check_integrity(scheduler.pages, [])
    with pytest.raises(ValueError):
        scheduler.advance([], [7], 5.0)  # a token of no chunk


def test_advance_skips_an_aborted_request():
    gone, stays, waits = requests_of((3, 4), (3, 4), (3, 4))
    scheduler = started(gone, stays, waits)
    batch = scheduler.next_batch()
    assert [chunk.request for chunk in batch] == [gone, stays]
    for each in (gone, waits):
        scheduler.finish(each, "abort")
    assert [r for r, _ in advance(scheduler, batch, 1.0)] == [stays]
    assert gone.tokens == [0] * 3
    assert gone.finish_reason == waits.finish_reason == "abort"
    assert scheduler.requests == {1: stays}
    check_integrity(scheduler.pages, [stays.pages])


class Loses(SarathiServe):
    """Loses request 1 when it is first in the queue."""

    def admit(self):
        if self.waiting and self.waiting[0].id == 1:
            self.waiting.popleft()
        return super().admit()


def test_a_policy_that_leaves_work_undone_is_an_error():
    requests = requests_of((4, 3), (4, 3), (4, 3))
    scheduler = queue("sarathi-serve", 8, 8, requests)
    scheduler.__class__ = Loses
    with pytest.raises(RuntimeError):
        while scheduler.requests:
            advance(scheduler, scheduler.next_batch())
    assert [r.finish_reason for r in requests] == ["length", None, "length"]


def test_micro_batches_share_the_queue_of_the_first():
    config = EngineConfig(
        "vllm",
        chunk=8,
        max_batch=1,
        max_len=8,
        page_size=8,
        pages=3,
    )
    schedulers = [scheduler_of(config, float, parts=3) for _ in range(3)]
    micro_batches = MicroBatches(schedulers, pp=3)
    requests = requests_of((4, 2), (4, 2))
    for each in requests:
        schedulers[0].add(each)
    ids = [[chunk.request.id for chunk in micro_batches.next_batch(i, 0.0)] for i in range(2)]
    assert ids == [[0], [1]]
    assert not micro_batches.next_batch(2, 0.0)  # it has nothing to do, and that is no error
    assert all(s.requests == {0: requests[0], 1: requests[1]} for s in schedulers)
    assert schedulers[0].abort(1) is requests[1]
    assert schedulers[1].running == []


# memory


@EVERY
@pytest.mark.parametrize("page_size", [1, 4, 32])
def test_a_request_holds_what_its_policy_reserves(policy, page_size):
    growing = request_of(0, 10, 20)
    scheduler = queue(
        policy,
        128 // page_size,
        page_size,
        [growing],
        max_len=32,
    )
    pages = scheduler.pages
    for computed in range(10, 30):
        batch = scheduler.next_batch()
        assert batch[0].end == computed
        count = pages.needed(32 if policy in RESERVING else computed)
        first = growing.pages[0]
        assert growing.pages == list(range(first, first + count))  # and there is room to grow
        assert pages.num_free == pages.total - count
        advance(scheduler, batch)
    scheduler.finish(growing, "abort")  # it has ended: frees nothing twice
    check_integrity(pages, [])


# prompt_len@arrival of requests, of which 4 tokens need a page; victims
CROWDS = """
4@0 3@1 3@2 = 2  # the newest
3@2 4@1 3@0 = 0  # by its arrival
4@5 3@5 3@5 = 2  # all at once: the last one added
4@0 4@1 3@2 3@3 = 3 2  # two for two
4@0 4@1 4@2 = 2 1  # another, and the next itself
3@0 3@1 =  # nobody needs a page
"""


def batch_without_memory(policy, requests):
    """The batch of requests that decode, when no page is left."""
    scheduler = decoding(policy, len(requests), 4, requests)
    assert scheduler.pages.num_free == 0
    batch = scheduler.next_batch()
    check_batch(scheduler, batch)
    victims = [r.id for r in requests if r.preemptions]
    assert sorted(r.id for r in scheduler.waiting) == victims == sorted(batch.preempted)
    assert len(batch) == len(requests) - len(victims)
    return batch, [r.id for r in scheduler.waiting]


@pytest.mark.parametrize("policy", OF_EACH_KIND)
@pytest.mark.parametrize("row", CROWDS.strip().splitlines())
def test_the_newest_is_preempted_by_priority_of_the_lowest(policy, row):
    crowd, expected = row.partition("#")[0].split("=")
    requests = []
    for i, each in enumerate(crowd.split()):
        prompt_len, arrival = map(int, each.split("@"))
        requests.append(request_of(i, prompt_len, arrival=arrival))
    victims = [int(number) for number in expected.split()]
    batch, waiting = batch_without_memory(policy, requests)
    assert batch.preempted == victims
    if policy != "priority":
        assert waiting == victims[::-1]  # in front, the oldest of them first
    oldest_of_a_low_class = [
        request_of(0, 3, priority=3),
        request_of(1, 4, priority=2),
        request_of(2, 3, priority=0),
    ]
    batch, _ = batch_without_memory(policy, oldest_of_a_low_class)
    assert batch.preempted == ([0] if policy == "priority" else [2])


def simulate(scheduler):
    """Run to the end: {request id: whether it decodes} of each iteration, and ids of victims."""
    history = []
    victims = []
    while batch := scheduler.next_batch():
        check_batch(scheduler, batch)
        running = [request.id for request in scheduler.running]
        assert all(victim > min(running) for victim in batch.preempted)  # the oldest stays
        victims += batch.preempted
        history.append({chunk.request.id: chunk.request.is_decoding for chunk in batch})
        advance(scheduler, batch)
        assert len(history) < 10_000
    assert not scheduler.requests
    check_integrity(scheduler.pages, [])
    return history, victims


@EVERY
@pytest.mark.parametrize(
    "page_size, pages",
    [
        (1, 24),
        (4, 6),
        (8, 3),
        (4, 40),
    ],
)
def test_a_little_memory_is_enough_and_no_decode_is_skipped(policy, page_size, pages):
    draw = random.Random(1)
    lengths = [(draw.randint(1, 12), draw.randint(1, 12)) for _ in range(30)]
    sizes = dict(chunk=4, max_batch=6, max_len=24)  # more decodes than budget, too
    scheduler = queue(policy, pages, page_size, requests_of(*lengths), **sizes)
    history, victims = simulate(scheduler)
    # who has max_len reserved is never preempted; of the others some are in all but the last
    assert bool(victims) == (policy in GROWING and page_size * pages < 100)
    in_order = list(dict.fromkeys(i for batch in history for i in batch))
    assert policy not in IN_ORDER or in_order == sorted(in_order)
    if policy in ("vllm", "chunked-only"):
        return  # prompts stall decodes
    for i in set(range(30)).difference(victims):
        decodes = [n for n, batch in enumerate(history) if batch.get(i)]
        assert not decodes or decodes == list(range(decodes[0], decodes[-1] + 1))


@EVERY
def test_admission_keeps_the_watermark_free_unless_nothing_runs(policy):
    scheduler = queue(
        policy,
        200,
        1,
        requests_of((50, 1), (50, 1)),
        max_len=50,
    )
    assert scheduler.admit()
    taken = scheduler.pages.allocate(99)  # 51 are free, and a hundredth of 200 is 2
    assert bool(scheduler.admit()) == (policy in RESERVING)
    scheduler.pages.free(taken[:1])
    assert policy in RESERVING or scheduler.admit()
    alone = queue(policy, 200, 1, requests_of((200, 1)))
    assert alone.admit()
    assert alone.pages.num_free == 0


def test_pages_without_runs_are_the_first_free_ones():
    pages = Pages(5, 4)
    assert pages.allocate(3) == [0, 1, 2]
    pages.free([1])
    assert pages.allocate(2, after=2) == [1, 3]
    assert pages.allocate(2) is None


@pytest.mark.parametrize("policy", [*IN_ORDER, "priority", "vtc", "hf", "lmdeploy"])
def test_the_work_of_schedule_does_not_grow_with_the_queue(policy):
    def calls_in_schedule(waiting):
        requests = [request_of(i, 8, 9, priority=i % 4) for i in range(8 + waiting)]
        scheduler = queue(policy, 40, 16, requests, chunk=16, max_batch=8, max_len=64)
        for _ in range(3):  # all that run decode
            advance(scheduler, scheduler.next_batch())
        scheduler.finish(scheduler.running[0], "abort")  # there is room for one
        calls = []
        gc.disable()  # hypothesis has it call something
        sys.setprofile(lambda frame, event, arg: calls.append(event))
        try:
            scheduler.next_batch()
        finally:
            sys.setprofile(None)
            gc.enable()
        return len(calls)

    assert calls_in_schedule(1000) <= calls_in_schedule(20) + 10
