"""Each policy does what its paper says, batch by batch. No model is needed."""

import pytest

from kv_cache import Pages, max_slots
from scheduler import POLICIES, Request, make_scheduler


def simulate(policy, requests, chunk=8, max_batch=4, max_len=64, **options):
    """Run (prompt_len, max_new_tokens) requests to their end.

    Returns one dict for each iteration: request id -> length of its chunk, 'd' for a decode.
    """
    slots = Pages(max_batch, max_len)
    scheduler = make_scheduler(policy, slots, chunk=chunk, max_batch=max_batch, max_len=max_len, **options)
    for i, (prompt_len, max_new_tokens) in enumerate(requests):
        scheduler.add(Request(i, [0] * prompt_len, prompt_len, max_new_tokens))
    history = []
    while batch := scheduler.schedule():
        history.append({c.request.id: "d" if c.request.is_decoding else c.length for c in batch})
        assert len(history[-1]) == len(batch)  # a request has one chunk in a batch
        for request, start, length in batch:
            assert start == request.num_computed
            request.num_computed += length
            if request.num_computed == len(request.tokens):
                request.tokens.append(0)
                if len(request.tokens) == request.prompt_len + request.max_new_tokens:
                    scheduler.remove(request)
        slots.check_integrity()
        assert len(scheduler.running) <= max_batch
    assert slots.num_free == max_batch and not scheduler.waiting and not scheduler.running
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
