"""Each policy does what its paper says, batch by batch. No model is needed."""

import gc
import math
import random
import re
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from config import EngineConfig
from policies import POLICIES, make_scheduler
from policies.custom import Guard, PolicyError
from policies.micro_batches import MicroBatches
from policies.observers import chunk_records
from policies.pages import make_pages
from request import Service
from scheduler import Batch, Request, SarathiServe
from tests.helpers import GROWING, IN_ORDER, RESERVING, check_integrity, owned

EVERY = pytest.mark.parametrize("policy", POLICIES)
BUDGETED = ["sarathi", "sarathi-serve", "dynamic", "priority"]


def advance(scheduler, batch, now=0.0, token=0):
    """Let `token` be what was sampled for each chunk that yields one."""
    return scheduler.advance(batch, [token if c.yields_token else None for c in batch], now)


def queue(policy, pages, page_size, *requests, **options):
    """A scheduler and the Requests (prompt_len, max_new_tokens, more fields) in its line."""
    options = dict(chunk=64, max_batch=9, max_len=pages * page_size) | options
    scheduler = make_scheduler(policy, make_pages(pages, page_size), **options)
    requests = [Request(i, [0] * n, n, *fields) for i, (n, *fields) in enumerate(requests)]
    for request in requests:
        scheduler.add(request)
    return scheduler, requests


def simulate(policy, requests, chunk=8, max_batch=4, page_size=64, pages=4, max_len=64, **options):
    """Run (prompt_len, max_new_tokens) requests to their end, by default with a page for each.
    Returns {request id: length of its chunk, or 'd'} of each iteration, and the ids of victims."""
    options |= dict(chunk=chunk, max_batch=max_batch, max_len=max_len)
    scheduler, _ = queue(policy, pages, page_size, *requests, **options)
    preempt = scheduler.preempt
    history = []
    victims = []
    preempted = []

    def watched(request):
        running = [r.id for r in scheduler.running]
        assert scheduler.pages.num_free == 0  # never while a page is free
        assert request.id == max(running) != min(running)
        if policy in IN_ORDER:
            assert all(r.id > request.id for r in scheduler.waiting)  # so they wait in order
        victims.append(request.id)
        preempt(request)

    scheduler.preempt = watched
    while batch := scheduler.next_batch():
        preempted += batch.preempted
        history.append({c.request.id: "d" if c.request.is_decoding else c.length for c in batch})
        assert len(history[-1]) == len(batch)  # a request has one chunk in a batch
        for request, start, length in batch:
            assert start == request.num_computed
            assert start + length <= len(request.pages) * page_size
        advance(scheduler, batch)
        check_integrity(scheduler.pages, [request.pages for request in scheduler.running])
        assert len(scheduler.running) <= max_batch and len(history) < 10_000
        assert not any(request.pages or request.num_computed for request in scheduler.waiting)
    assert preempted == victims and scheduler.pages.num_free == pages
    assert not scheduler.waiting and not scheduler.running and not scheduler.requests
    return history, victims


# policy, max_batch, prompt+output of each request = the chunks of each iteration, d for a decode
PAPERS = """
request-level 2 5+2 3+3 4+2 = 0:5 1:3 | 0:d 1:d | 1:d | 2:4 | 2:d  # a batch runs to its end
orca 2 5+2 3+4 20+2 4+1 = 0:5 1:3 | 0:d 1:d | 1:d 2:20 | 1:d 2:d | 3:4  # whole prompts join decodes
orca-best 4 5+3 3+2 4+1 = 0:5 | 0:d 1:3 | 0:d 1:d 2:4  # one prompt at a time
vllm 2 5+2 3+4 20+2 4+1 = 0:5 1:3 | 0:d 1:d | 2:20 | 1:d 2:d | 3:4 | 1:d  # prompts stall decodes
vllm 4 40+2 30+2 24+2 = 0:40 | 1:30 2:24 | 0:d 1:d 2:d  # whole prompts, max_len = 64 together
vllm 4 40+2 24+2 1+2 = 0:40 1:24 | 2:1 | 0:d 1:d 2:d  # and no token more
sarathi 4 12+5 10+3 = 0:8 | 0:4 | 0:d 1:7 | 0:d 1:3 | 0:d 1:d | 0:d 1:d  # one chunk, filled up
sarathi-serve 4 5+4 12+2 3+2 2+1 = 0:5 1:3 | 0:d 1:7 | 0:d 1:2 2:3 3:2 | 0:d 1:d 2:d  # Algorithm 3
dynamic 4 5+4 12+2 3+2 2+1 = 0:5 1:3 | 0:d 1:7 | 0:d 1:2 2:3 3:2 | 0:d 1:d 2:d  # without SLO
chunked-only 4 5+3 12+2 3+1 = 0:5 1:3 | 0:d | 1:8 | 0:d | 1:1 2:3 | 1:d  # never mixes
hybrid-only 4 5+3 40+2 30+1 = 0:5 1:40 2:19 | 0:d 1:d 2:11 | 0:d  # cuts only at max_len = 64
"""


@pytest.mark.parametrize("row", PAPERS.strip().splitlines())
def test_a_policy_does_what_its_paper_says(row):
    load, expected = row.split("  #")[0].split(" = ")
    policy, max_batch, *requests = load.split()
    lengths = [tuple(map(int, request.split("+"))) for request in requests]
    history, _ = simulate(policy, lengths, max_batch=int(max_batch))
    batches = [" ".join(f"{i}:{length}" for i, length in batch.items()) for batch in history]
    assert batches == expected.split(" | ")


TILES = [(256, 128, 256), (300, 128, 256), (128, 128, 128), (100, 128, 100), (100, 1, 100)]


@pytest.mark.parametrize("chunk, tile, total", TILES)
def test_sarathi_aligns_chunk_and_decodes_to_the_tile(chunk, tile, total):
    sizes = dict(max_batch=6, page_size=1000, pages=6, max_len=1000)
    history, _ = simulate("sarathi", [(1, 60)] * 5 + [(700, 1)], chunk, tile=tile, **sizes)
    hybrid = [batch for batch in history if 5 in batch and "d" in batch.values()]
    assert hybrid[:-1]  # the last chunk is a rest
    assert all(batch[5] == total - 5 and len(batch) == 6 for batch in hybrid[:-1])


def decoding(policy, page_size, pages, *requests, **options):
    """A scheduler with running requests (prompt_len, arrival, priority) that all decode next."""
    fields = [(n, 4, arrival, frozenset(), None, Service(*p)) for n, arrival, *p in requests]
    options = dict(max_batch=len(requests) + 1, clock=lambda: 10.0) | options
    scheduler, _ = queue(policy, pages, page_size, *fields, **options)
    while request := scheduler.admit():
        request.num_computed = request.prompt_len
        request.tokens.append(0)
    return scheduler


@EVERY
@pytest.mark.parametrize("chunk", [3, 5])
def test_more_decodes_than_budget_all_run_and_no_prefill_does(policy, chunk):
    scheduler = decoding(policy, 64, 6, *[(2, 0.0)] * 5, chunk=chunk, max_len=64)
    scheduler.add(Request(5, [0] * 4, 4, 9))
    batches = [scheduler.schedule(), scheduler.schedule()]  # chunked-only may prefill first
    decodes = next(batch for batch in batches if len(batch) >= 5)
    assert {c.request.id for c in decodes if c.length == 1} == {0, 1, 2, 3, 4}
    if policy in BUDGETED:
        assert len(decodes) == 5 and scheduler.waiting and scheduler.pages.num_free == 1
        assert decodes.budget == chunk and decodes.left == chunk - 5


@pytest.mark.parametrize("policy", [*BUDGETED, "chunked-only"])
def test_nobody_is_admitted_without_room_for_a_token(policy):
    scheduler, (first, second) = queue(policy, 2, 64, (9, 1), (1, 1), chunk=8, max_len=64)
    assert scheduler.next_batch() == [(first, 0, 8)]
    assert scheduler.running == [first] and second.scheduled is None and not second.pages


def test_a_batch_keeps_within_its_budget():
    sizes = enumerate([(3, 2), (9, 9), (9, 9)])
    decode, prompt, late = (Request(i, [0] * n, prompt_len, 9) for i, (n, prompt_len) in sizes)
    decode.num_computed = 2
    prompt.num_computed = 4
    batch = Batch(5)
    unlimited = Batch()
    batch.add_decodes([decode])
    assert [batch.add(prompt), batch.add(late), batch.left] == [4, 0, 0] and batch.budget == 5
    assert batch == [(decode, 2, 1), (prompt, 4, 4)]
    assert [chunk.yields_token for chunk in batch] == [True, False]  # 8 of 9
    assert chunk_records(batch) == [(0, 2, 1, True), (1, 4, 4, False)]
    assert unlimited.add(late) == 9 and unlimited.left > 1e9 and unlimited.budget is None
    assert unlimited[0].yields_token


def started(*requests, **options):
    """A stall-free scheduler of 8 pages of 4 tokens, and a budget of 6."""
    return queue("sarathi-serve", 8, 4, *requests, **dict(chunk=6, max_len=20) | options)


def test_advance_is_exact_and_twice_is_as_good_as_once():
    scheduler, (a, b) = started((8, 3), (3, 1))
    computed = []
    tokens_by_call = []
    for now in (1.0, 2.0, 3.0, 4.0):
        batch = scheduler.next_batch()
        states = []
        tokens = [10 * now if chunk.yields_token else None for chunk in batch]
        for _ in range(2):
            tokens_by_call.append(
                [(r.id, token) for r, token in scheduler.advance(batch, tokens, now)]
            )
            states.append(repr((a, b, vars(scheduler), vars(scheduler.pages))))
        assert states[0] == states[1]
        computed.append((a.num_computed, b.num_computed))
    assert (
        tokens_by_call[::2]
        == tokens_by_call[1::2]
        == [[], [(0, 20), (1, 20)], [(0, 30)], [(0, 40)]]
    )
    assert computed == [(6, 0), (8, 3), (9, 3), (10, 3)]  # the last token is never computed
    assert a.tokens == [0] * 8 + [20, 30, 40] and a.token_times == [2.0, 3.0, 4.0]
    assert b.tokens == [0] * 3 + [20] and b.token_times == [2.0]
    assert scheduler.next_batch() == [] and scheduler.pages.num_free == 8 and not a.pages


LENGTH = [([1, 2, 3, 4], {9}, [1, 2, 3]), ([0, 0, 0], {}, [0, 0, 0])]  # of 3; a prompt's token
STOP = [([1, 9, 3], {7, 9}, [1, 9]), ([9], {9}, [9]), ([1, 2, 9], {9}, [1, 2, 9])]  # or the last


@pytest.mark.parametrize("sampled, stop, output", [*LENGTH, *STOP])
def test_a_request_ends_by_a_stop_token_or_its_length(sampled, stop, output):
    reason = "stop" if output[-1] in stop else "length"
    scheduler, (request, other) = started((4, 3, 0.0, frozenset(stop)), (2, 9))
    for now, token in enumerate(sampled):
        if not request.finish_reason:
            assert scheduler.requests == {0: request, 1: other}
            advance(scheduler, scheduler.next_batch(), now, token)
    assert request.finish_reason == reason and request.tokens[4:] == output
    assert request.token_times == list(range(len(output)))
    assert scheduler.running == [other] and scheduler.requests == {1: other}
    check_integrity(scheduler.pages, [other.pages])


def test_advance_skips_an_aborted_request():
    scheduler, (gone, stays, waits) = started((3, 4), (3, 4), (3, 4))
    batch = scheduler.next_batch()
    assert [chunk.request for chunk in batch] == [gone, stays]
    for request in (gone, waits) * 2:  # the second time does nothing
        scheduler.finish(request, "abort")
    assert [request for request, _ in advance(scheduler, batch, 1.0)] == [stays]
    assert gone.num_computed == 0 and gone.tokens == [0] * 3 and gone.token_times == []
    assert gone.finish_reason == waits.finish_reason == "abort" and stays.finish_reason is None
    assert scheduler.requests == {1: stays} and not scheduler.waiting
    check_integrity(scheduler.pages, [stays.pages])


@pytest.mark.parametrize("chunk, again", [(6, [(0, 6), (6, 1), (7, 1)]), (16, [(0, 7), (7, 1)])])
def test_a_preempted_request_keeps_its_tokens_and_their_times(chunk, again):
    clock = iter(range(100, 200))
    chunks = []
    scheduler, [request] = started((4, 5), clock=lambda: next(clock), chunk=chunk)
    for now in (1.0, 2.0, 3.0):
        advance(scheduler, scheduler.next_batch(), now, token=7)
    scheduler.preempt(request)
    assert request.num_computed == 0 and request.tokens == [0] * 4 + [7] * 3 and not request.pages
    for now in range(len(again)):
        batch = scheduler.next_batch()
        assert batch.preempted == ([] if now else [0])
        chunks += [(start, length) for _, start, length in batch]
        advance(scheduler, batch, now, token=8)
    assert chunks == again  # prompt and output again, then one token more
    assert request.tokens == [0] * 4 + [7] * 3 + [8] * 2 and request.finish_reason == "length"
    assert request.token_times == [1.0, 2.0, 3.0, now - 1, now]  # the TTFT is the first time's
    assert request.scheduled == 100 and request.preemptions == 1 and request.recomputed_tokens == 6


def test_an_interrupted_schedule_is_begun_again(monkeypatch):
    scheduler, requests = started((3, 4), (6, 4), (2, 4))
    add = Batch.add
    advance(scheduler, scheduler.next_batch())

    def interrupted(batch, request):
        add(batch, request)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Batch, "add", interrupted)
        scheduler.next_batch()
    scheduler.journal.mend()
    assert list(scheduler.waiting) == requests and not scheduler.running
    assert scheduler.journal.restarts == 1 and scheduler.preempted == [0, 1]
    assert [(r.preemptions, r.recomputed_tokens) for r in requests] == [(1, 3), (1, 3), (0, 0)]
    assert scheduler.pages.num_free == 8 and not any(r.pages or r.num_computed for r in requests)
    while batch := scheduler.next_batch():
        advance(scheduler, batch)
    assert [len(r.tokens) for r in requests] == [7, 10, 6]


def test_a_request_that_ended_leaves_the_batch_that_failed():
    scheduler, requests = started((3, 4), (6, 4))
    batch = scheduler.next_batch()  # and computing it fails
    assert [chunk.request for chunk in batch] == requests
    scheduler.finish(requests[0], "abort")
    assert [chunk.request for chunk in scheduler.next_batch()] == requests[1:]


def test_requests_that_began_anew_keep_the_token_of_their_batch():
    scheduler, [request] = started((3, 4))
    batch = scheduler.next_batch()
    scheduler.journal.broken = True  # as a Ctrl-C would leave it
    assert advance(scheduler, batch, token=7) == [(request, 7)]
    assert request.tokens[3:] == [7] and request.num_computed == 0 and not request.pages
    assert list(scheduler.waiting) == [request]


class Idle(SarathiServe):
    """Computes nothing."""

    def schedule(self):
        return Batch()


def test_a_policy_with_nothing_to_do_though_there_is_work_is_an_error():
    scheduler, [request] = started((1, 1))
    scheduler.__class__ = Idle
    with pytest.raises(
        RuntimeError, match=r"Idle.schedule\(\) returned \[\], but there are requests"
    ):
        scheduler.next_batch()
    scheduler.finish(request, "abort")
    assert scheduler.next_batch() == []


class Loses(SarathiServe):
    """Loses request 1 when it is first in the queue."""

    def admit(self):
        if self.waiting and self.waiting[0].id == 1:
            self.waiting.popleft()
        return super().admit()


def test_a_lost_request_is_named_when_nothing_else_is_left_to_do():
    scheduler, requests = queue("sarathi-serve", 8, 8, (4, 3), (4, 3), (4, 3), (4, 3))
    scheduler.__class__ = Loses
    while requests[3].finish_reason is None:
        advance(scheduler, scheduler.next_batch())
    for _ in range(2):  # all begin anew, and it is lost again
        lost = r"^Loses.schedule\(\) lost requests \[1\]: they neither wait nor run$"
        with pytest.raises(RuntimeError, match=lost):
            scheduler.next_batch()
    scheduler.finish(requests[1], "abort")
    assert scheduler.next_batch() == [] and not scheduler.requests
    check_integrity(scheduler.pages, [])


def test_a_request_that_runs_in_another_micro_batch_is_not_lost():
    config = EngineConfig("vllm", chunk=8, max_batch=1, max_len=8, page_size=8, pages=2)
    schedulers = [config.scheduler(float, parts=2) for _ in range(2)]
    micro_batches = MicroBatches(schedulers, pp=2)
    for i in range(2):
        schedulers[0].add(Request(i, [0] * 4, 4, 2))
    assert [chunk.request.id for chunk in micro_batches.next_batch(0, 0.0)] == [0]
    schedulers[1].__class__ = Idle
    with pytest.raises(
        RuntimeError, match=r"Idle.schedule\(\) returned \[\], but there are requests"
    ):
        micro_batches.next_batch(1, 0.0)


def test_a_lost_request_is_found_again_by_a_policy_that_was_mended():
    scheduler, requests = queue("sarathi-serve", 8, 8, (4, 3), (4, 3))
    scheduler.__class__ = Loses
    with pytest.raises(RuntimeError, match=r"lost requests \[1\]"):
        while batch := scheduler.next_batch():
            advance(scheduler, batch)
    scheduler.__class__ = SarathiServe
    while batch := scheduler.next_batch():
        advance(scheduler, batch)
    assert [len(request.tokens) for request in requests] == [7, 7]


@pytest.mark.parametrize("budget", [170.67, math.inf, "8", np.float32(8), -1])
def test_a_token_budget_that_is_no_whole_number_is_refused(budget, monkeypatch):
    scheduler, _ = queue("sarathi-serve", 8, 8, (20, 3))
    with monkeypatch.context() as patch:
        patch.setattr(SarathiServe, "token_budget", lambda *_: budget)
        refused = re.escape(f"token_budget={budget!r}: must be a whole number of at least 0")
        with pytest.raises(ValueError, match=f"^{refused}$"):
            scheduler.next_batch()
    assert [chunk.length for chunk in scheduler.next_batch()] == [20]


def test_a_batch_with_more_decodes_than_its_budget_takes_no_prefill():
    batch = Batch(2)
    decodes = [Request(i, [0] * 9, 8, 4, num_computed=8) for i in range(3)]
    batch.add_decodes(decodes)
    assert batch.left == -1
    assert batch.add(Request(3, [0] * 20, 20, 4)) == 0
    assert [chunk.request for chunk in batch] == decodes and batch.left == -1


def test_integers_of_numpy_are_whole_numbers(monkeypatch):
    scheduler, _ = queue("sarathi-serve", 8, 8, (20, 3))
    monkeypatch.setattr(SarathiServe, "token_budget", lambda *_: np.int32(8))
    batch = scheduler.next_batch()
    assert [chunk.length for chunk in batch] == [8]
    assert type(batch[0].length) is int and type(batch.budget) is int


def test_a_schedule_without_a_return_is_asked_for_it(monkeypatch):
    scheduler, _ = queue("sarathi-serve", 8, 8, (20, 3))
    monkeypatch.setattr(Idle, "schedule", lambda self: None)
    scheduler.__class__ = type("Guarded", (Guard, Idle), {})
    with pytest.raises(PolicyError, match=r"^schedule\(\) returned None: did you forget return\?$"):
        scheduler.next_batch()


@EVERY
@pytest.mark.parametrize("page_size", [1, 4, 16, 32])
def test_a_request_holds_what_its_policy_reserves(policy, page_size):
    scheduler, [request] = queue(policy, 128 // page_size, page_size, (10, 20), max_len=32)
    pages = scheduler.pages
    for computed in range(10, 30):
        batch = scheduler.next_batch()
        [chunk] = batch
        assert chunk.start + chunk.length == computed
        holds = 32 if policy in RESERVING else computed
        first = request.pages[0]
        count = -(-holds // page_size)
        assert request.pages == list(range(first, first + count))  # and there is room to grow
        assert pages.num_free == pages.total - count
        advance(scheduler, batch)
    assert request.finish_reason == "length" and request.pages == []
    scheduler.finish(request, "abort")  # frees nothing twice
    assert pages.num_free == pages.total


CROWDS = [  # requests (prompt_len, arrival, class), victims, victims by priority
    ([(4, 0, 2), (3, 1, 2), (3, 2, 2)], [2], [2]),  # the newest
    ([(3, 2, 2), (4, 1, 2), (3, 0, 2)], [0], [0]),  # by its arrival
    ([(4, 5, 2), (3, 5, 2), (3, 5, 2)], [2], [2]),  # all at once: the last one added
    ([(3, 0, 3), (4, 1, 2), (3, 2, 0)], [2], [0]),  # or the lowest, though the oldest
    ([(4, 0, 1), (3, 1, 3), (3, 2, 3), (3, 9, 0)], [3], [2]),  # the newest of these
    ([(4, 0, 2), (4, 1, 2), (3, 2, 2), (3, 3, 2)], [3, 2], [3, 2]),  # two for two
    *[([(3, 0, 2), (4, 1, 2)], [1], [1]), ([(4, 0, 3), (3, 1, 2)], [1], [0])],  # the decode itself
    ([(4, 0, 2), (4, 1, 2), (4, 2, 2)], [2, 1], [2, 1]),  # another, and the next itself
    ([(3, 0, 2), (3, 1, 2)], [], []),  # nobody needs a page
]


@pytest.mark.parametrize("policy", GROWING)
@pytest.mark.parametrize("requests, victims, of_classes", CROWDS)
def test_the_newest_is_preempted_by_priority_of_the_lowest(policy, requests, victims, of_classes):
    scheduler = decoding(policy, 4, len(requests), *requests)
    victims = of_classes if policy == "priority" else victims
    running = {request: request.num_computed for request in scheduler.running}
    assert scheduler.pages.num_free == 0
    batch = scheduler.next_batch()
    waiting = [request.id for request in scheduler.waiting]  # the oldest of them in front:
    assert waiting == victims[::-1] or policy == "priority" and set(waiting) == set(victims)
    assert batch.preempted == victims
    assert {c.request.id for c in batch} == {request.id for request in running} - set(victims)
    for request, before in running.items():
        assert len(request.tokens) == before + 1
        if request.id in victims:
            assert request.num_computed == 0 and request.pages == []
            assert request.preemptions == 1 and request.recomputed_tokens == before
        else:
            assert request.num_computed == before and len(request.pages) == -(-(before + 1) // 4)
            assert request.preemptions == request.recomputed_tokens == 0
    check_integrity(scheduler.pages, [request.pages for request in scheduler.running])


@pytest.mark.parametrize("policy", GROWING)
@pytest.mark.parametrize("freed, then", [([1], [0, 1]), ([], [0, 3])])
def test_a_request_grows_into_the_next_page_if_it_is_free(policy, freed, then):
    scheduler = decoding(policy, 4, 12, (4, 0.0, 2), max_len=12)
    [request] = scheduler.running
    assert (request.pages, scheduler.pages.allocate(2)) == ([0], [1, 2])
    scheduler.pages.free(freed)  # most of the free pages are behind page 2
    scheduler.next_batch()
    assert request.pages == then


@EVERY
@pytest.mark.parametrize("page_size, pages", [(1, 24), (4, 6), (4, 9), (8, 3), (1, 60), (4, 40)])
def test_a_little_memory_is_enough_and_no_decode_is_skipped(policy, page_size, pages):
    rng = random.Random(1)
    requests = [(rng.randint(1, 12), rng.randint(1, 12)) for _ in range(30)]
    history, victims = simulate(policy, requests, 8, 6, page_size, pages, max_len=24)
    # who has max_len reserved is never preempted; of the others some are in all but the last
    assert bool(victims) == (policy in GROWING and page_size * pages < 100)
    first = list(dict.fromkeys(i for batch in history for i in batch))
    assert policy not in IN_ORDER or first == sorted(first)
    for i in set(range(30 if policy not in ("vllm", "chunked-only") else 0)).difference(victims):
        at = [n for n, batch in enumerate(history) if batch.get(i) == "d"]
        assert not at or at == list(range(at[0], at[-1] + 1))


@EVERY
def test_admission_keeps_the_watermark_free_unless_nothing_runs(policy):
    scheduler, _ = queue(policy, 250, 1, (50, 0), (50, 0), max_len=50)
    assert scheduler.admit() and scheduler.pages.num_free == 200
    taken = scheduler.pages.allocate(149)  # 51 are free, and a hundredth of 250 is 2
    assert bool(scheduler.admit()) == (policy in RESERVING)
    scheduler.pages.free(taken[:1])
    assert policy in RESERVING or scheduler.admit() and scheduler.pages.num_free == 2
    if policy in IN_ORDER:
        scheduler, _ = queue(policy, 200, 1, (200, 0), (1, 0))
        assert scheduler.admit() and scheduler.pages.num_free == 0 and scheduler.admit() is None


@EVERY
def test_memory_must_hold_one_request_of_max_len(policy):
    for page_size, pages in ((33, 1), (16, 3), (1, 33)):
        scheduler, _ = queue(policy, pages, page_size, max_len=33)
        scheduler.check_fits(30, 3)
        with pytest.raises(ValueError, match="of 30 tokens .* max_new_tokens=4.*max_len=33"):
            scheduler.check_fits(30, 4)
    for page_size, pages, needed in ((16, 2, 3), (1, 32, 33)):
        sizes = dict(page_size=page_size, pages=pages, max_batch=9, max_len=33)
        message = f"pages={pages}: a request of max_len=33 takes {needed} pages"
        with pytest.raises(ValueError, match=message):
            EngineConfig(policy, **sizes).scheduler(clock=float)


@given(st.data(), st.integers(1, 24))
def test_pages_are_a_set_with_some_taken(data, total):
    pages = make_pages(total, 4)
    free = set(range(total))
    tables = []
    for _ in range(data.draw(st.integers(0, 30))):
        action = data.draw(st.sampled_from(["new", "grow", "free", "free one"]))
        table = data.draw(st.sampled_from(tables)) if tables and action != "new" else []
        if not table:
            count = data.draw(st.integers(1, total + 1))
            runs = "".join(".x"[i in free] for i in range(total)).split(".")
            got = pages.allocate(count)
            assert (got is None) == (count > len(free))
            if got:
                assert len(got) == count and free.issuperset(got)  # consecutive where possible:
                assert got == list(range(got[0], got[0] + count)) or count > max(map(len, runs))
                tables.append(got)
        elif action == "grow":
            got = pages.allocate(1, after=table[-1])
            following = table[-1] + 1
            assert (got is None) == (not free)
            if got:
                assert len(got) == 1 and free.issuperset(got)
                assert got == [following] or following not in free
                table += got
        else:
            given_back = table[-1:] if action == "free one" else data.draw(st.permutations(table))
            pages.free(given_back)
            any_of = "|".join(map(str, given_back))
            with pytest.raises(RuntimeError, match=f"page ({any_of}) was freed but is not owned"):
                pages.free(given_back)
            del table[len(table) - len(given_back) :]
            tables = [table for table in tables if table]
        taken = [page for table in tables for page in table]
        free = set(range(total)).difference(taken)
        assert len(taken) + len(free) == total  # none twice
        assert pages.num_free == len(free)
        check_integrity(pages, tables)
        assert owned(pages) == sorted(taken)
    assert [pages.needed(tokens) for tokens in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]
    for table in tables:
        pages.free(table)
    assert pages.allocate(total) == list(range(total))  # all runs have joined


def test_integrity_is_checked():
    pages = make_pages(8, 4)
    table = pages.allocate(4)
    assert pages.allocate(5) is None
    pages.free([table.pop(0)])
    with pytest.raises(RuntimeError, match="page 0 was freed but is not owned"):
        pages.free([0])
    check_integrity(pages, [table])
    for tables in ([], [table[:2]], [table, [3]], [table, [4]], [[1, 2, 2]]):
        with pytest.raises(RuntimeError, match="block tables"):
            check_integrity(pages, tables)
    pages.num_free = 4
    with pytest.raises(RuntimeError, match="pages leaked: 4 free"):
        check_integrity(pages)


def test_bad_options_are_refused():
    zeros = "sarathi tile, dynamic tile tbt_slo, priority ttft_slo ageing"
    with pytest.raises(ValueError, match="policy='sarati'.*sarathi-serve"):
        queue("sarati", 2, 16)
    for policy, *options in map(str.split, zeros.split(",")):
        for option in options:
            with pytest.raises(ValueError, match=f"{option}=0: must be a"):
                queue(policy, 2, 16, **{option: 0})
    for policy, option in (("orca", "prefills"), ("orca", "tile"), ("sarathi-serve", "tbt_slo")):
        with pytest.raises(ValueError, match=f"{option}=1: policy '{policy}' has no such option"):
            queue(policy, 2, 16, **{option: 1})


@pytest.mark.parametrize("policy", [*IN_ORDER, "priority"])
def test_the_work_of_schedule_does_not_grow_with_the_queue(policy):
    def calls_in_schedule(waiting):
        requests = [(8, 9, 0.0, frozenset(), None, Service(i % 4)) for i in range(8 + waiting)]
        options = dict(chunk=16, max_batch=8, max_len=64, clock=lambda: 0.0)
        scheduler, _ = queue(policy, 40, 16, *requests, **options)
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

    assert calls_in_schedule(10) == calls_in_schedule(1000)
