"""Prompts that begin alike share pages: what can be found, who may write, and that nobody notices.

That texts are those without sharing, under every policy and with faults, is in test_properties.py.
Pages alone are in test_pages.py, interrupts in test_interrupt.py, long runs in test_soak.py."""

from random import Random

import pytest

from config import EngineConfig
from engine import Engine
from policies import POLICIES, make_scheduler
from policies.pages import CachedPages
from policies.referee import Referee
from request import Request
from sampling import SamplingParams
from tests.helpers import (
    advance,
    alone,
    check_integrity,
    guard,
    named,
    tiny_model,
)

MODEL = tiny_model(n_kv_head=2)
EVERY = pytest.mark.parametrize("policy", POLICIES)
SYSTEM = Random(1).choices(range(61), k=19)
PARAMS = SamplingParams(7)


def new_engine(policy="sarathi-serve", **options):
    """A small engine that shares pages, and says so when one is written that others read."""
    sizes = dict(
        chunk=6,
        max_batch=3,
        max_len=48,
        page_size=4,
        pages=60,
        prefix_caching=True,
    )
    return guard(Engine(MODEL, policy=policy, **sizes | options))


class Line:
    """A scheduler that shares pages, under the eyes of a referee."""

    def __init__(self, policy, page_size=4, pages=32, **options):
        sizes = dict(chunk=64, max_batch=9, max_len=64)
        self.pages = CachedPages(pages, page_size)
        self.scheduler = make_scheduler(policy, self.pages, **sizes | options)
        self.count = 0
        Referee(self.scheduler, policy)

    def add(self, prompt, output_len):
        """A Request that arrives after all others."""
        prompt = list(prompt)
        arrival = float(self.count)
        request = Request(self.count, prompt, len(prompt), output_len, arrival)
        self.count += 1
        self.scheduler.add(request)
        return request

    def step(self, token=99):
        """One iteration in which this token is sampled: {request id: (start, length)}."""
        batch = self.scheduler.next_batch()
        chunks = {request.id: (start, length) for request, start, length in batch}
        advance(self.scheduler, batch, token=token)
        check_integrity(self.pages, [r.pages for r in self.scheduler.running])
        return chunks

    def run(self):
        """Until nothing is left: [what step returns]."""
        steps = []
        while self.scheduler.requests:
            steps.append(self.step())
        return steps


# what is found, batch by batch


def test_vllm_counts_what_is_to_be_computed_of_whole_prompts():
    line = Line("vllm")  # of at most 64 tokens in a batch of prompts
    line.add(range(60), 1)
    line.run()
    for _ in range(4):
        line.add(range(60), 1)
    assert line.step() == {n: (56, 4) for n in range(1, 5)}


def test_found_pages_of_running_requests_take_no_memory():
    line = Line("sarathi-serve", pages=17)
    line.add(range(60), 4)  # 15 pages, and one to grow into
    line.step()
    line.add([*range(56), 9, 9], 2)  # 14 of them, and the last one that is left
    line.step()
    assert len(line.scheduler.running) == 2


@EVERY
@pytest.mark.parametrize("output_len, cached_tokens", [(6, 8), (7, 12)])
def test_the_next_turn_of_a_chat_finds_what_was_generated(policy, output_len, cached_tokens):
    # the last token is not computed: of 6 + 6 tokens 11 are, of 6 + 7 it is 12
    line = Line(policy)
    first = line.add(range(6), output_len)
    line.run()
    changed = list(first.tokens)
    changed[7] = 7  # the last token of the second page
    turn = line.add([*first.tokens, 5, 5, 5], 1)
    other = line.add([*changed, 5, 5, 5], 1)
    line.run()
    assert [r.cached_tokens for r in (first, turn, other)] == [0, cached_tokens, 4]


@pytest.mark.parametrize("page_size, found", [(1, 7), (2, 6), (4, 4), (8, 0)])
@EVERY
def test_at_least_one_token_of_a_prompt_is_computed(policy, page_size, found):
    line = Line(policy, page_size, pages=256 // page_size)
    line.add(range(8), 2)
    assert line.run()[0] == {0: (0, 8)}
    line.add(range(8), 2)
    assert line.run() == [{1: (found, 8 - found)}, {1: (8, 1)}]


@pytest.mark.parametrize("gone, found", [(0, 8), (1, 8), (2, 4), (3, 0)])
@EVERY
def test_a_preempted_request_finds_its_remaining_pages(policy, gone, found):
    line = Line(policy)
    request = line.add(range(10), 9)
    while len(request.tokens) < 13:
        line.step()
    line.scheduler.preempt(request)
    assert len(named(line.pages)) == 3
    others = line.pages.allocate(32 - 3 + gone)  # they took them: first the end of the request
    line.pages.free(others)
    assert line.step() == {0: (found, 13 - found)}
    line.run()
    assert (request.cached_tokens, request.recomputed_tokens) == (found, 12)


def test_a_request_finds_all_pages_after_it_lost_its_own_again_and_again():
    """It loses them while its batch is computed, which yields a token each time."""
    line = Line("sarathi-serve")
    line.add(range(6), 10)
    line.run()  # three pages of these tokens stay in the cache
    request = line.add(range(6), 10)
    starts = []
    for _ in range(9):
        batch = line.scheduler.next_batch()
        starts.append(batch[0].start)
        line.scheduler.preempt(request)
        advance(line.scheduler, batch, token=99)
        assert (request.num_computed, request.pages) == (0, [])  # it waits
    # all full pages but the last two tokens, of which one is to be computed beside the decode
    assert starts == [4, 4, 4, 4, 8, 8, 8, 8, 12]


@pytest.mark.parametrize("chunk", [2, 64])
@EVERY
def test_a_prefill_of_one_uncached_token_is_not_a_decode(policy, chunk):
    """That the batch has not counted: it would be the only one in a batch without decodes, which
    breaks a rule of the referee's."""
    line = Line(policy, page_size=1, pages=256, chunk=chunk)
    line.add(range(3), 9)
    victim = line.add(range(50, 53), 9)
    while not (victim.is_decoding and len(victim.tokens) > 4):
        line.step()
    end = len(victim.tokens)
    line.scheduler.preempt(victim)
    first = next(batch[1] for batch in line.run() if 1 in batch)
    assert first in ((end - 2, 2), (end - 2, 1))
    assert victim.cached_tokens == end - 2


def test_pages_are_found_as_soon_as_they_are_computed_and_not_before():
    line = Line("sarathi-serve", chunk=8)
    line.add(range(20), 1)
    line.add(range(20), 1)
    line.scheduler.next_batch()
    assert named(line.pages) == set()
    assert line.run() == [{0: (0, 8)}, {0: (8, 8)}, {0: (16, 4), 1: (16, 4)}]


# on and off


def events_of_each_step(policy, prompts, **options):
    """[what was decided and came of it, and the sizes of the block tables] of each iteration."""
    engine = new_engine(policy, pages=90, clock=lambda: 0.0, **options)
    for n, prompt in enumerate(prompts):
        engine.add_request(prompt, SamplingParams(3 + n))
    steps = []
    while engine.has_work:
        events = [(event.request.id, event.token) for event in engine.step()]
        page_counts = [len(request.pages) for request in engine.scheduler.running]
        steps.append((engine.last_iteration, events, page_counts))
    return steps


@EVERY
def test_prefix_caching_without_a_hit_changes_no_batch_and_no_event(policy, monkeypatch):
    prompts = [[n, *Random(n).choices(range(61), k=3 * n)] for n in (9, 1, 5, 7, 2, 4)]
    shared = events_of_each_step(policy, prompts)
    monkeypatch.setattr("policies.pages.sha256", None)  # nothing is hashed without
    without = events_of_each_step(policy, prompts, prefix_caching=False)
    assert shared == without and len(without) > 5


@pytest.mark.parametrize(
    "max_len, page_size, pages",
    [(None, 64, 16), (128, 64, 4), (127, 64, 4), (65, 33, 4), (2, 1, 4)],
)
def test_pages_hold_64_tokens_or_half_of_max_len_by_default(max_len, page_size, pages):
    assert EngineConfig().prefix_caching is False
    engine = Engine(MODEL, prefix_caching=True, max_len=max_len, max_batch=2)
    assert engine.config.page_size == engine.scheduler.pages.page_size == page_size
    assert engine.config.pages == pages


# what must not be found


def test_after_a_reset_nothing_is_found():
    engine = new_engine()
    engine.generate([SYSTEM], PARAMS)
    assert named(engine.scheduler.pages)
    engine.reset()
    assert named(engine.scheduler.pages) == set()
    (completion,) = engine.generate([[5, *SYSTEM]], PARAMS)
    assert completion.cached_tokens == 0
    assert completion.output == alone(MODEL, [5, *SYSTEM], PARAMS)
