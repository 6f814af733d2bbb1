"""Each policy does what its paper says, batch by batch. No model is needed."""

import random

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_cache import Pages, max_slots
from scheduler import POLICIES, Request, make_scheduler


def simulate(
    policy, requests, chunk=8, max_batch=4, max_len=64, page_size=None, pages=None, on_preempt=None, **options
):
    """Run (prompt_len, max_new_tokens) requests to their end.

    Without a `page_size` each has a slot of its own. `on_preempt` is called with the scheduler and each victim, before
    it loses its pages. Returns one dict for each iteration: request id -> length of its chunk, 'd' for a decode.
    """
    slots = Pages(pages or max_batch, page_size or max_len)
    scheduler = make_scheduler(policy, slots, chunk=chunk, max_batch=max_batch, max_len=max_len, **options)
    if on_preempt:
        preempt = scheduler.preempt
        scheduler.preempt = lambda request: (on_preempt(scheduler, request), preempt(request))
    for i, (prompt_len, max_new_tokens) in enumerate(requests):
        scheduler.add(Request(i, [0] * prompt_len, prompt_len, max_new_tokens))
    history = []
    while batch := scheduler.schedule():
        history.append({c.request.id: "d" if c.request.is_decoding else c.length for c in batch})
        assert len(history[-1]) == len(batch)  # a request has one chunk in a batch
        for request, start, length in batch:
            assert start == request.num_computed and start + length <= len(request.pages) * slots.page_size
            request.num_computed += length
            if request.num_computed == len(request.tokens):
                request.tokens.append(0)
                if len(request.tokens) == request.prompt_len + request.max_new_tokens:
                    scheduler.remove(request)
        slots.check_integrity([request.pages for request in scheduler.running])
        assert len(scheduler.running) <= max_batch
        assert all(not request.pages and not request.num_computed for request in scheduler.waiting)
        assert len(history) < 10_000
    assert slots.num_free == slots.total and not scheduler.waiting and not scheduler.running
    return history


def test_request_level_runs_a_batch_to_its_end():
    assert simulate("request-level", [(5, 2), (3, 3), (4, 2)], max_batch=2) == [
        {0: 5, 1: 3},
        {0: "d", 1: "d"},
        {1: "d"},
        {2: 4},
        {2: "d"},
    ]


def test_orca_lets_whole_prompts_join_the_decodes():
    assert simulate("orca", [(5, 2), (3, 4), (20, 2), (4, 1)], max_batch=2) == [
        {0: 5, 1: 3},
        {0: "d", 1: "d"},
        {1: "d", 2: 20},
        {1: "d", 2: "d"},
        {3: 4},
    ]


def test_orca_best_case_takes_one_prompt_at_a_time():
    assert simulate("orca", [(5, 3), (3, 2), (4, 1)], prefills=1) == [{0: 5}, {0: "d", 1: 3}, {0: "d", 1: "d", 2: 4}]


def test_vllm_stalls_decodes_for_prompts():
    assert simulate("vllm", [(5, 2), (3, 4), (20, 2), (4, 1)], max_batch=2) == [
        {0: 5, 1: 3},
        {0: "d", 1: "d"},
        {2: 20},
        {1: "d", 2: "d"},
        {3: 4},
        {1: "d"},
    ]


def test_sarathi_fills_the_chunk_up_with_decodes():
    assert simulate("sarathi", [(12, 5), (10, 3)], chunk=8) == [
        {0: 8},
        {0: 4},  # one prefill chunk in a batch, though the second prompt would have fitted
        {0: "d", 1: 7},
        {0: "d", 1: 3},
        {0: "d", 1: "d"},
        {0: "d", 1: "d"},
    ]


@pytest.mark.parametrize(
    "chunk, tile, total", [(256, 128, 256), (300, 128, 256), (128, 128, 128), (100, 128, 100), (100, 1, 100)]
)
def test_sarathi_aligns_chunk_and_decodes_to_the_tile(chunk, tile, total):
    decodes = 5
    history = simulate("sarathi", [(1, 60)] * decodes + [(700, 1)], chunk, 6, 1000, tile=tile)
    hybrid = [batch for batch in history if decodes in batch and "d" in batch.values()][:-1]  # the last chunk is a rest
    assert hybrid
    for batch in hybrid:
        assert batch[decodes] == total - decodes and len(batch) == decodes + 1


def test_sarathi_serve_is_algorithm_3():
    # decodes first, then what was started, then new requests, while the budget of 8 lasts
    assert simulate("sarathi-serve", [(5, 4), (12, 2), (3, 2), (2, 1)], chunk=8) == [
        {0: 5, 1: 3},
        {0: "d", 1: 7},
        {0: "d", 1: 2, 2: 3, 3: 2},
        {0: "d", 1: "d", 2: "d"},
    ]


def test_chunked_only_alternates_and_never_mixes():
    assert simulate("chunked-only", [(5, 3), (12, 2), (3, 1)], chunk=8) == [
        {0: 5, 1: 3},
        {0: "d"},
        {1: 8},
        {0: "d"},
        {1: 1, 2: 3},
        {1: "d"},
    ]


def test_hybrid_only_cuts_a_prompt_only_where_several_share_a_batch():
    assert simulate("hybrid-only", [(5, 3), (40, 2), (30, 1)], chunk=8, max_len=64) == [
        {0: 5, 1: 40, 2: 19},
        {0: "d", 1: "d", 2: 11},
        {0: "d"},
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_more_decodes_than_budget_all_run_and_no_prefill_does(policy):
    slots = Pages(6, 64)
    scheduler = make_scheduler(policy, slots, chunk=3, max_batch=6, max_len=64)
    for i in range(5):
        scheduler.add(Request(i, [0, 0], 2, 9))
    while request := scheduler.admit():
        request.tokens.append(0)
        request.num_computed = 2
    scheduler.add(Request(5, [0] * 4, 4, 9))
    batches = [scheduler.schedule(), scheduler.schedule()]  # chunked-only may take its turn to prefill first
    decodes = next(batch for batch in batches if len(batch) >= 5)
    assert {c.request.id for c in decodes if c.length == 1} == {0, 1, 2, 3, 4}
    if policy in ("sarathi", "sarathi-serve"):
        assert len(decodes) == 5 and scheduler.waiting and slots.num_free == 1


@pytest.mark.parametrize("policy", ["sarathi", "sarathi-serve", "chunked-only"])
def test_nobody_is_admitted_without_room_for_a_token(policy):
    slots = Pages(6, 64)
    scheduler = make_scheduler(policy, slots, chunk=5, max_batch=6, max_len=64)
    for i in range(5):  # one for each token of the budget: decodes, or prefills that fill it
        scheduler.add(Request(i, [0] * (2 if policy != "chunked-only" else 8), 2 if policy != "chunked-only" else 8, 9))
    while request := scheduler.admit():
        if policy != "chunked-only":
            request.tokens.append(0)
            request.num_computed = 2
    scheduler.add(Request(5, [0] * 4, 4, 9))
    assert sum(chunk.length for chunk in scheduler.schedule()) == 5
    assert len(scheduler.waiting) == 1 and slots.num_free == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_first_come_first_served(policy):
    history = simulate(policy, [(9, 4), (1, 1), (20, 3), (2, 2), (6, 6), (3, 1)], max_batch=2)
    first_seen = list(dict.fromkeys(i for batch in history for i in batch))
    assert first_seen == sorted(first_seen)


@pytest.mark.parametrize("policy", ["sarathi", "sarathi-serve", "orca", "hybrid-only"])
def test_a_running_decode_is_never_skipped(policy):
    history = simulate(policy, [(9, 9), (30, 4), (1, 7), (17, 5), (8, 8)], chunk=5)
    for i in range(5):
        at = [n for n, batch in enumerate(history) if batch.get(i) == "d"]
        assert at == list(range(at[0], at[-1] + 1))


def test_max_slots_is_the_formula():
    # LLaMA-13B in 16 bits, SARATHI §4.3.1: 40 layers, 5,120 wide, K and V, 2 bytes; 26 GB of weights on 48 GB
    m_kv = 40 * 5120 * 2 * 2
    assert m_kv == 819_200
    assert max_slots(48 * 10**9, 26 * 10**9, 1024, m_kv) == 26  # 22e9 / 838,860,800 = 26.2
    assert max_slots(48 * 10**9, 26 * 10**9, 2048, m_kv) == 13
    assert max_slots(10, 20, 1024, m_kv) == 0


# -----------------------------------------------------------------------------------------------------
# memory

WHOLE = ["request-level", "orca", "sarathi"]  # reserve max_len at admission, by DESIGN.md's table
FIRST_COME = ["vllm", "sarathi-serve", "chunked-only", "hybrid-only"]  # the prompt, then page by page
GROWING = [*FIRST_COME, "priority"]


def test_every_policy_reserves_one_way_or_the_other():
    assert sorted(WHOLE + GROWING) == sorted(POLICIES)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("page_size", [1, 4, 16, 32])
def test_a_request_holds_what_its_policy_reserves(policy, page_size):
    pages = Pages(4 * 32 // page_size, page_size)
    scheduler = make_scheduler(policy, pages, chunk=32, max_batch=2, max_len=32)
    request = Request(0, [0] * 10, 10, 20)
    scheduler.add(request)
    for computed in range(10, 30):
        [chunk] = scheduler.schedule()
        assert chunk.start + chunk.length == computed
        holds = 32 if policy in WHOLE else computed
        assert len(request.pages) == -(-holds // page_size)
        assert pages.num_free == pages.total - len(request.pages)
        assert request.pages == list(range(request.pages[0], request.pages[0] + len(request.pages)))  # room to grow
        request.num_computed = computed
        request.tokens.append(0)
    scheduler.remove(request)
    assert pages.num_free == pages.total and request.pages == []
    scheduler.remove(request)  # does nothing
    pages.check_integrity([])


def decoding(policy, page_size, pages, *requests, **options):
    """A scheduler with running requests (prompt_len, priority, arrival) that all have to decode next."""
    options = dict(chunk=64, max_batch=len(requests) + 1, max_len=page_size * pages) | options
    scheduler = make_scheduler(policy, Pages(pages, page_size), **options)
    for i, (prompt_len, priority, arrival) in enumerate(requests):
        scheduler.add(Request(i, [0] * prompt_len, prompt_len, 4, priority=priority, arrival=arrival))
        request = scheduler.admit()
        request.num_computed = prompt_len
        request.tokens.append(0)
    return scheduler


@pytest.mark.parametrize("policy", FIRST_COME)
@pytest.mark.parametrize(
    "requests, victims",
    [
        ([(4, 2, 0.0), (3, 2, 1.0), (3, 2, 2.0)], [2]),  # the newest
        ([(3, 2, 2.0), (4, 2, 1.0), (3, 2, 0.0)], [0]),  # by its arrival
        ([(4, 2, 5.0), (3, 2, 5.0), (3, 2, 5.0)], [2]),  # all at once: the last one added
        ([(3, 3, 0.0), (4, 2, 1.0), (3, 0, 2.0)], [0]),  # the lowest priority, though it is the oldest
        ([(4, 1, 0.0), (3, 3, 1.0), (3, 3, 2.0), (3, 0, 9.0)], [2]),  # the newest of the lowest priority
        ([(4, 2, 0.0), (4, 2, 1.0), (3, 2, 2.0), (3, 2, 3.0)], [3, 2]),  # two for two
        ([(3, 2, 0.0), (4, 2, 1.0)], [1]),  # the decode itself
        ([(4, 3, 0.0), (3, 2, 1.0)], [0]),  # the decode itself, whoever came later
        ([(4, 2, 0.0), (4, 2, 1.0), (4, 2, 2.0)], [2, 1]),  # another, and the next itself
        ([(3, 2, 0.0), (3, 2, 1.0)], []),  # nobody needs a page
    ],
)
def test_the_newest_of_the_lowest_priority_is_preempted(policy, requests, victims):
    scheduler = decoding(policy, 4, len(requests), *requests)
    running = list(scheduler.running)
    computed = [request.num_computed for request in running]
    assert scheduler.pages.num_free == 0
    batch = scheduler.schedule()
    assert [request.id for request in scheduler.waiting] == victims[::-1]  # the oldest of them at the front
    assert {chunk.request.id for chunk in batch} == {request.id for request in running} - set(victims)
    for request in running:
        if request.id in victims:
            assert request.num_computed == 0 and request.pages == [] and request.preemptions == 1
            assert request.recomputed == computed[request.id] and len(request.tokens) == computed[request.id] + 1
        else:
            assert request.num_computed == computed[request.id] and request.preemptions == request.recomputed == 0
            assert len(request.pages) == -(-len(request.tokens) // 4)
    scheduler.pages.check_integrity([request.pages for request in scheduler.running])


@pytest.mark.parametrize("policy", FIRST_COME)
def test_a_decode_may_be_its_own_victim_and_goes_on_later(policy):
    scheduler = decoding(policy, 4, 2, (3, 2, 0.0), (4, 2, 1.0))
    old, new = scheduler.running
    scheduler.add(Request(2, [0], 1, 1, arrival=2.0))
    [chunk] = scheduler.schedule()
    assert chunk.request is old and scheduler.running == [old]
    assert [request.id for request in scheduler.waiting] == [1, 2]  # at the front, though it has run before
    scheduler.remove(old)
    batch = scheduler.schedule()
    assert (new, 0, 5) in batch and len(new.pages) == 2  # prompt and output, and pages for both


@pytest.mark.parametrize("policy", GROWING)
def test_a_request_grows_into_the_next_page_if_it_is_free(policy):
    for next_is_free in (True, False):
        scheduler = decoding(policy, 4, 12, (4, 2, 0.0), max_len=12)
        [request] = scheduler.running
        taken = scheduler.pages.allocate(2)
        assert (request.pages, taken) == ([0], [1, 2])
        scheduler.pages.free(taken[: int(next_is_free)])  # most of the free pages are behind page 2
        scheduler.schedule()
        assert request.pages == ([0, 1] if next_is_free else [0, 3])


@pytest.mark.parametrize("policy", GROWING)
@pytest.mark.parametrize("page_size, pages", [(1, 24), (4, 6), (4, 9), (8, 3), (1, 60), (4, 40)])
def test_a_little_memory_is_enough(policy, page_size, pages):
    rng = random.Random(1)
    requests = [(rng.randint(1, 12), rng.randint(1, 12)) for _ in range(30)]
    victims = []

    def on_preempt(scheduler, request):
        assert scheduler.pages.num_free == 0  # never while a page is free
        assert request.id == max(r.id for r in scheduler.running) != min(r.id for r in scheduler.running)
        assert all(r.id > request.id for r in scheduler.waiting)  # so they wait in order
        victims.append(request.id)

    history = simulate(policy, requests, 8, 6, 24, page_size, pages, on_preempt)
    assert bool(victims) == (page_size * pages < 100)  # or this test would test nothing
    # each token once, and those of the victims again: they begin at their first token
    first = list(dict.fromkeys(i for batch in history for i in batch))
    assert first == sorted(first)


@pytest.mark.parametrize("policy", WHOLE)
def test_who_has_max_len_reserved_is_never_preempted(policy):
    never = lambda scheduler, request: pytest.fail("preempted")
    simulate(policy, [(n % 12 + 1, n % 7 + 1) for n in range(20)], 8, 6, 24, 4, 13, never)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_watermark_is_left_to_those_who_run(policy):
    pages = Pages(250, 1)
    scheduler = make_scheduler(policy, pages, chunk=64, max_batch=9, max_len=50)
    scheduler.add(Request(0, [0] * 50, 50, 0))
    assert scheduler.admit() and pages.num_free == 200
    taken = pages.allocate(149)  # 51 are free, and a hundredth of 250 is 2
    scheduler.add(Request(1, [0] * 50, 50, 0))
    assert bool(scheduler.admit()) == (policy in WHOLE)
    pages.free(taken[:1])
    if policy in GROWING:
        assert scheduler.admit() and pages.num_free == 2


@pytest.mark.parametrize("policy", POLICIES)
def test_who_is_alone_may_have_every_page(policy):
    pages = Pages(200, 1)
    scheduler = make_scheduler(policy, pages, chunk=64, max_batch=9, max_len=200)
    scheduler.add(Request(0, [0] * 200, 200, 0))
    assert scheduler.admit() and pages.num_free == 0
    scheduler.add(Request(1, [0], 1, 0))
    assert scheduler.admit() is None


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_must_hold_one_request_of_max_len(policy):
    options = dict(chunk=8, max_batch=4, max_len=33)
    for page_size, pages in ((33, 1), (16, 3), (1, 33)):
        scheduler = make_scheduler(policy, Pages(pages, page_size), **options)
        scheduler.check_fits(30, 3)
        with pytest.raises(ValueError, match="prompt of 30 tokens .* max_new_tokens=4.*max_len=33"):
            scheduler.check_fits(30, 4)
    for page_size, pages, needed in ((16, 2, 3), (1, 32, 33)):
        with pytest.raises(ValueError, match=f"pages={pages}: a request of max_len=33 takes {needed} pages"):
            make_scheduler(policy, Pages(pages, page_size), **options)


@given(st.data(), st.integers(1, 24))
def test_pages_are_a_set_of_which_some_are_taken(data, total):
    pages, free, tables = Pages(total, 4), set(range(total)), []
    for _ in range(data.draw(st.integers(0, 30))):
        action = data.draw(st.sampled_from(["new", "grow", "free", "free one"]))
        if action == "new" or not tables:
            count = data.draw(st.integers(1, total + 1))
            longest = max((len(run) for run in "".join(".x"[i in free] for i in range(total)).split(".")), default=0)
            got = pages.allocate(count)
            if count > len(free):
                assert got is None
            else:
                assert len(got) == len(set(got)) == count and free.issuperset(got)
                assert got == list(range(got[0], got[0] + count)) or count > longest  # consecutive where possible
                free -= set(got)
                tables.append(got)
        else:
            table = data.draw(st.sampled_from(tables))
            if action == "grow":
                got = pages.allocate(1, after=table[-1])
                if not free:
                    assert got is None
                else:
                    [page] = got
                    assert page in free and (page == table[-1] + 1 or table[-1] + 1 not in free)
                    free.remove(page)
                    table.append(page)
            else:
                given_back = [table.pop()] if action == "free one" else data.draw(st.permutations(table))
                pages.free(given_back)
                free |= set(given_back)
                if action == "free" or not table:
                    tables = [other for other in tables if other is not table]
                with pytest.raises(RuntimeError, match=f"page {given_back[0]} "):
                    pages.free(given_back)
        assert pages.num_free == len(free)
        pages.check_integrity(tables)
    assert [pages.needed(tokens) for tokens in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]
    for table in tables:
        pages.free(table)
    assert pages.allocate(total) == list(range(total))  # all runs have joined


@pytest.mark.parametrize(
    "damage",
    [
        lambda pages: pages._owned.discard(2),  # a leak
        lambda pages: pages._owned.add(0),  # free and owned
        lambda pages: pages._runs.clear(),
        lambda pages: pages._runs.update({5: 7}),  # free twice
        lambda pages: pages._starts.clear(),
        lambda pages: setattr(pages, "num_free", 4),
    ],
)
def test_integrity_is_checked(damage):
    pages = Pages(8, 4)
    table = pages.allocate(4)
    pages.free([table.pop(0)])
    pages.check_integrity([table])
    for tables in ([], [table[:2]], [table, [3]], [table, [4]], [[1, 2, 2]]):
        with pytest.raises(RuntimeError, match="block tables"):
            pages.check_integrity(tables)
    damage(pages)
    with pytest.raises(RuntimeError, match="leaked or shared"):
        pages.check_integrity()


def test_pages_are_not_handed_out_twice():
    pages = Pages(3, 16)
    assert pages.allocate(2) == [0, 1] and pages.allocate(2) is None and pages.allocate(1) == [2]
    pages.free([1])
    with pytest.raises(RuntimeError, match="page 1"):
        pages.free([1])
    assert pages.num_free == 1 and pages.allocate(1) == [1]
    pages.check_integrity([[0], [1, 2]])
    with pytest.raises(RuntimeError, match="block tables"):
        pages.check_integrity([[0], [1]])
    pages.free([2, 0, 1])
    pages.check_integrity([])
    pages._owned.add(9)
    with pytest.raises(RuntimeError, match="leaked"):
        pages.check_integrity()


def test_bad_options_are_refused():
    good = dict(chunk=8, max_batch=2, max_len=16)
    for bad in (dict(chunk=0), dict(max_batch=0), dict(max_len=0), dict(tile=0)):
        name, value = next(iter(bad.items()))
        with pytest.raises(ValueError, match=f"{name}={value}"):
            make_scheduler("sarathi", Pages(2, 16), **(good | bad))
    with pytest.raises(ValueError, match="policy='sarati'.*sarathi-serve"):
        make_scheduler("sarati", Pages(2, 16), **good)
    with pytest.raises(ValueError, match="prefills=1"):
        make_scheduler("vllm", Pages(2, 16), prefills=1, **good)
    with pytest.raises(ValueError, match="tile=128.*'orca' has no such option"):
        make_scheduler("orca", Pages(2, 16), tile=128, **good)
    with pytest.raises(ValueError, match="prefills=0"):
        make_scheduler("orca", Pages(2, 16), prefills=0, **good)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_work_of_schedule_does_not_grow_with_the_line(policy):
    def calls_in_schedule(waiting):
        scheduler = make_scheduler(policy, Pages(40, 16), chunk=16, max_batch=8, max_len=64, clock=lambda: 0.0)
        for i in range(8 + waiting):
            scheduler.add(Request(i, [0] * 8, 8, 9, priority=i % 4))
        for _ in range(3):  # all that run decode
            for request, _, length in scheduler.schedule():
                request.num_computed += length
                if request.num_computed == len(request.tokens):
                    request.tokens.append(0)
        scheduler.remove(scheduler.running[0])  # there is room for one
        calls = []
        sys.setprofile(lambda frame, event, arg: calls.append(event))
        try:
            scheduler.schedule()
        finally:
            sys.setprofile(None)
        return len(calls)

    assert calls_in_schedule(10) == calls_in_schedule(1000)
