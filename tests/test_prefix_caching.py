"""Prompts that begin alike share pages: what can be found, who may write, and that nobody notices.

Whatever nobody may read holds NaN here, and whoever writes where others read raises. Pages alone
are in test_shared_pages.py, interrupts in test_interrupt.py, long runs in test_soak.py and
test_properties.py.
"""

from random import Random

import pytest
import torch

from config import EngineConfig
from engine import Engine
from model import GPT
from policies import POLICIES, make_scheduler
from policies.pages import make_pages
from policies.referee import Referee
from sampling import SamplingParams, sample
from scheduler import Request, Scheduler
from speedups.lone_chunk import lone_chunk
from tests.helpers import (
    alone,
    check_integrity,
    guard,
    named,
    poison,
    poisoned_cache,
    run,
    tiny_model,
)

MODEL = tiny_model(n_kv_head=2)
MAX_LEN = 48
EVERY = pytest.mark.parametrize("policy", POLICIES)


# logits


SYSTEM = Random(1).choices(range(61), k=19)
PROMPTS = [SYSTEM + [1, 2], SYSTEM[:7] + [50] * 4, SYSTEM[:16], SYSTEM + [1, 2], SYSTEM + [3] * 9]
PROMPTS += [[60, *SYSTEM], SYSTEM[:16], SYSTEM + [1, 2, 9]]
OUTPUTS = [7, 5, 9, 4, 6, 3, 1, 8]
ARRIVE = [0, 0, 2, 3, 5, 6, 9, 9]  # after so many steps


def logits_alone(prompt, tokens):
    """Logits of each output token of a request that shares nothing."""
    tokens_so_far = [*prompt, *tokens]
    logits = run(
        MODEL,
        poisoned_cache(MODEL, 1, len(tokens_so_far)),
        [lone_chunk([0], 0, tokens_so_far)],
        all_rows=True,
    )
    return logits[len(prompt) - 1 : -1]


TOKENS = [
    alone(MODEL, *request) for request in zip(PROMPTS, map(SamplingParams, OUTPUTS), strict=True)
]
LOGITS = [logits_alone(*request) for request in zip(PROMPTS, TOKENS, strict=True)]


@pytest.fixture
def watched(monkeypatch):
    """Makes engines of which every batch meets NaN wherever nobody may read, every write is looked
    at, and all logits are compared with those without sharing. A request's `seed` tells which of
    PROMPTS it is."""
    forward = GPT.forward

    def compared(logits, params, positions):
        for row, p, n in zip(logits, params, positions, strict=True):
            torch.testing.assert_close(row, LOGITS[p.seed][n], rtol=0, atol=1e-10)
        return sample(logits, params, positions)

    def make(policy, **options):
        sizes = dict(chunk=6, max_batch=3, max_len=MAX_LEN, page_size=4, pages=24)
        engine = guard(Engine(MODEL, policy=policy, **sizes | {"prefix_caching": True} | options))
        monkeypatch.setattr(GPT, "forward", lambda *args: poison(engine) or forward(*args))
        monkeypatch.setattr("speedups.runner.sample", compared)
        return engine

    return make


def ask(engine, index):
    """Add one of PROMPTS."""
    return engine.add_request(PROMPTS[index], SamplingParams(OUTPUTS[index], seed=index))


@pytest.mark.parametrize(
    "page_size, pages, backend",
    [
        (1, 70, "sdpa"),
        (16, 6, "matmul"),
        pytest.param(1, 70, "matmul", marks=pytest.mark.slow),
        pytest.param(4, 18, "sdpa", marks=pytest.mark.slow),
        pytest.param(4, 18, "matmul", marks=pytest.mark.slow),
        pytest.param(16, 6, "sdpa", marks=pytest.mark.slow),
    ],
)
@EVERY
def test_logits_are_those_without_sharing(watched, policy, page_size, pages, backend):
    """Whoever is preempted or given up meanwhile, and the first is one who computed for others."""
    rng = Random(page_size)
    cached = 0
    for disturbed in range(3):
        options = dict(page_size=page_size, pages=pages, attention=backend)
        engine = watched(policy, **options)
        ids = {}
        completions = {}
        step = 0
        scheduler = engine.scheduler
        while engine.has_work or len(ids) < len(PROMPTS):
            for index in range(len(ids), len(PROMPTS)):
                if ARRIVE[index] <= step:
                    ids[ask(engine, index)] = index
            if disturbed and step % 4 == disturbed and scheduler.running:
                scheduler.preempt(rng.choice(scheduler.running))
            if disturbed == 2 and step == 7 and 0 in scheduler.requests:
                engine.abort(0)
            events = engine.step()
            completions |= {e.request_id: e.completion for e in events if e.completion}
            check_integrity(scheduler.pages, [r.pages for r in scheduler.running])
            step += 1
            assert step < 500
        for i, completion in completions.items():
            assert completion.tokens == TOKENS[ids[i]]
            cached += completion.cached_tokens
        assert {*range(len(PROMPTS))}.difference(completions) <= {0}
        assert scheduler.pages.num_free == pages
    assert cached > 0


def finish(engine):
    """Completions of all that is asked, in the order in which they end."""
    completions = []
    while engine.has_work:
        completions += [event.completion for event in engine.step() if event.completion]
    return completions


@EVERY
def test_a_write_one_token_too_early_is_caught(watched, policy, monkeypatch):
    engine = watched(policy, pages=60)
    admit = Scheduler.admit

    def early(self):
        if request := admit(self):
            request.num_computed -= request.num_computed > 0
        return request

    monkeypatch.setattr(Scheduler, "admit", early)
    ask(engine, 0)
    finish(engine)
    ask(engine, 3)
    with pytest.raises(RuntimeError, match=r"page \d+ is written"):
        finish(engine)


# what is found, batch by batch


class Line:
    """A scheduler under the eyes of a referee, and all requests that were added to it."""

    def __init__(self, policy, page_size=4, pages=32, shares=True, **options):
        options = dict(chunk=64, max_batch=9, max_len=64) | options
        self.scheduler = make_scheduler(policy, make_pages(pages, page_size, shares), **options)
        self.pages = self.scheduler.pages
        self.requests = []
        Referee(self.scheduler, policy)

    def add(self, prompt, output_len):
        """A Request that arrives after all others."""
        i = len(self.requests)
        prompt = list(prompt)
        self.requests.append(Request(i, prompt, len(prompt), output_len, float(i)))
        self.scheduler.add(self.requests[i])
        return self.requests[i]

    def step(self, token=99):
        """One iteration in which this token is sampled: {request id: (start, length)}."""
        batch = self.scheduler.next_batch()
        chunks = {request.id: (start, length) for request, start, length in batch}
        self.scheduler.advance(batch, [token if c.yields_token else None for c in batch], 0.0)
        check_integrity(self.pages, [r.pages for r in self.scheduler.running])
        return chunks

    def run(self):
        """Until nothing is left: [what step returns]."""
        steps = []
        while self.scheduler.requests:
            steps.append(self.step())
        return steps


def test_vllm_counts_what_is_to_be_computed_of_whole_prompts():
    queue = Line("vllm")  # of at most 64 tokens in a batch of prompts
    queue.add(range(60), 1)
    queue.run()
    for _ in range(4):
        queue.add(range(60), 1)
    assert queue.step() == {n: (56, 4) for n in range(1, 5)}


def test_pages_of_running_requests_take_no_memory_again():
    queue = Line("sarathi-serve", pages=17)
    queue.add(range(60), 4)  # 15 pages, and one to grow into
    queue.step()
    queue.add([*range(56), 9, 9], 2)  # 14 of them, and the last one that is left
    queue.step()
    assert len(queue.scheduler.running) == 2


def test_cached_pages_of_nobody_take_memory_when_they_are_found():
    queue = Line("sarathi-serve", pages=15, max_len=60)
    queue.add(range(56), 1)  # leaves 14 pages in the cache
    queue.run()
    queue.add([100], 3)  # takes the last one
    queue.step()
    assert queue.pages.num_free == 14
    queue.add([*range(56), 9, 9], 1)  # needs the 14, and one more
    assert queue.run() == [{1: (1, 1)}, {1: (2, 1)}, {2: (56, 2)}]


@EVERY
def test_the_next_turn_of_a_chat_finds_what_was_generated(policy):
    # the last token is not computed: of 6 + 6 tokens 11 are, of 6 + 7 it is 12
    for output_len, cached_tokens in ((6, 8), (7, 12)):
        queue = Line(policy)
        first = queue.add(range(6), output_len)
        queue.run()
        changed = [*first.tokens[:7], 7, *first.tokens[8:]]  # the last token of the second page
        turn = queue.add([*first.tokens, 5, 5, 5], 1)
        other = queue.add([*changed, 5, 5, 5], 1)
        queue.run()
        assert first.cached_tokens == 0
        assert turn.cached_tokens == cached_tokens
        assert other.cached_tokens == 4


@pytest.mark.parametrize("page_size, found", [(1, 7), (2, 6), (4, 4), (8, 0)])
@EVERY
def test_at_least_one_token_of_a_prompt_is_computed(policy, page_size, found):
    queue = Line(policy, page_size, pages=256 // page_size)
    queue.add(range(8), 2)
    assert queue.run()[0] == {0: (0, 8)}
    again = queue.add(range(8), 2)
    assert queue.run() == [{1: (found, 8 - found)}, {1: (8, 1)}] and again.cached_tokens == found


@pytest.mark.parametrize("gone, found", [(0, 8), (1, 8), (2, 4), (3, 0)])
@EVERY
def test_a_preempted_request_finds_its_remaining_pages(policy, gone, found):
    queue = Line(policy)
    request = queue.add(range(10), 9)
    pages = queue.pages
    while len(request.tokens) < 13:
        queue.step()
    queue.scheduler.preempt(request)
    assert len(named(pages)) == 3
    pages.free(pages.allocate(32 - 3 + gone))  # others took them: first the end of the request
    assert queue.step() == {0: (found, 13 - found)}
    queue.run()
    assert (request.cached_tokens, request.recomputed_tokens, request.preemptions) == (found, 12, 1)
    queue.scheduler.journal.mend()
    assert len(request.tokens) == 19


def test_a_request_finds_all_pages_after_it_lost_its_own_again_and_again():
    """It loses them while its batch is computed, which yields a token each time."""
    queue = Line("sarathi-serve")
    queue.add(range(6), 10)
    queue.run()  # three pages of these tokens stay in the cache
    request = queue.add(range(6), 10)
    starts = []
    for _ in range(9):
        batch = queue.scheduler.next_batch()
        starts.append(batch[0].start)
        queue.scheduler.preempt(request)
        queue.scheduler.advance(batch, [99], 0.0)
        assert request.num_computed == 0 and request.pages == []  # it waits
    assert len(request.tokens) == 15
    # all full pages but the last two tokens, of which one is to be computed beside the decode
    assert starts == [4, 4, 4, 4, 8, 8, 8, 8, 12]


@pytest.mark.parametrize("chunk", [2, 64])
@EVERY
def test_a_prefill_of_one_uncached_token_is_not_a_decode(policy, chunk):
    """That the batch has not counted: it would be the only one in a batch without decodes, which
    breaks a rule of the referee's."""
    queue = Line(policy, page_size=1, pages=256, chunk=chunk)
    queue.add(range(3), 9)
    victim = queue.add(range(50, 53), 9)
    while not (victim.is_decoding and len(victim.tokens) > 4):
        queue.step()
    n = len(victim.tokens)
    queue.scheduler.preempt(victim)
    chunks = [batch[1] for batch in queue.run() if 1 in batch]
    assert chunks[0] in ((n - 2, 2), (n - 2, 1)) and victim.cached_tokens == n - 2


def test_pages_are_found_as_soon_as_they_are_computed_and_not_before():
    queue = Line("sarathi-serve", chunk=8)
    first = queue.add(range(20), 1)
    again = queue.add(range(20), 1)
    queue.scheduler.next_batch()
    assert named(queue.pages) == set() and first.pages
    assert queue.run() == [{0: (0, 8)}, {0: (8, 8)}, {0: (16, 4), 1: (16, 4)}]
    assert again.cached_tokens == 16


def test_two_equal_prompts_at_once_are_computed_twice_and_cached_once():
    queue = Line("orca")
    queue.add(range(20), 1)
    queue.add(range(20), 3)
    assert queue.step() == {0: (0, 20), 1: (0, 20)}  # the first one has ended
    assert len(named(queue.pages)) == 5 and named(queue.pages).isdisjoint(queue.requests[1].pages)
    third = queue.add(range(20), 1)
    assert queue.run()[0] == {1: (20, 1), 2: (16, 4)} and third.cached_tokens == 16
    assert len(named(queue.pages)) == 5 and queue.pages.num_free == 32


def test_cached_tokens_are_those_that_were_found(watched):
    engine = watched("sarathi-serve", pages=60)
    cached_tokens = []
    for index in (0, 3, 2, 5, 1, 7):  # 21, 21, 16, 20, 11 and 22 tokens, in pages of 4
        ask(engine, index)
        engine.step()
        [(_, start, *_)] = engine.last_iteration.chunks
        [completion] = finish(engine)
        assert completion.cached_tokens == start
        cached_tokens.append(start)
    assert cached_tokens == [0, 20, 12, 0, 4, 20]
    ask(engine, 4)  # of 28 tokens 16 are found, 6 are computed: one page more
    engine.step()
    engine.scheduler.preempt(engine.scheduler.running[0])
    [completion] = finish(engine)
    assert completion.cached_tokens == 16 + 20 and completion.recomputed_tokens == 22


# on and off


NO_SHARING = [[n, *Random(n).choices(range(61), k=3 * n)] for n in (9, 1, 5, 7, 2, 4)]


@EVERY
def test_prefix_caching_without_a_hit_changes_no_batch_and_no_event(policy):
    iterations = []
    for shares in (False, True):
        sizes = dict(chunk=6, max_batch=3, max_len=MAX_LEN, page_size=4, pages=90)
        sizes |= dict(prefix_caching=shares, clock=lambda: 0.0)
        engine = Engine(MODEL, policy=policy, **sizes)
        iterations.append([])
        for n, prompt in enumerate(NO_SHARING):
            engine.add_request(prompt, SamplingParams(3 + n))
        while engine.has_work:
            events = [event[:2] for event in engine.step()]
            pages = [len(request.pages) for request in engine.scheduler.running]
            iteration = engine.last_iteration
            iterations[-1].append(
                (
                    iteration.chunks,
                    iteration.waiting,
                    iteration.running,
                    iteration.free_pages,
                    iteration.budget,
                    iteration.preempted,
                    events,
                    pages,
                )
            )
    assert iterations[0] == iterations[1] and len(iterations[0]) > 5


@EVERY
def test_without_prefix_caching_no_page_is_hashed_or_found(policy, monkeypatch):
    monkeypatch.setattr("policies.pages.sha256", None)
    queue = Line(policy, shares=False)
    for _ in range(3):
        queue.add(range(20), 9)
    queue.run()
    assert not any(request.cached_tokens for request in queue.requests)
    assert named(queue.pages) == set()


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(page_size=16, max_len=16), "^page_size=16: must be below max_len=16, for pref"),
        (dict(page_size=17, max_len=16), "^page_size=17: must be at most max_len=16$"),
        (dict(page_size=512), "^page_size=512: must be below max_len=512"),  # the model's
        (dict(max_len=1), "^page_size=1: must be below max_len=1"),
        (dict(prefix_caching=1), "^prefix_caching=1: must be True or False$"),
        (dict(prefix_caching="no"), "^prefix_caching='no': must be True or False$"),
    ],
)
def test_slots_cannot_be_shared(given, message):
    with pytest.raises(ValueError, match=message):
        Engine(MODEL, **{"prefix_caching": True} | given)


def test_pages_hold_64_tokens_or_half_of_max_len_by_default():
    assert EngineConfig().prefix_caching is False
    engine = Engine(MODEL, prefix_caching=True, max_batch=2)
    assert engine.config.page_size == engine.scheduler.pages.page_size == 64
    assert engine.config.pages == 2 * 512 // 64
    for max_len, page_size in ((128, 64), (127, 64), (65, 33), (2, 1)):
        engine = Engine(MODEL, prefix_caching=True, max_len=max_len, max_batch=2)
        assert engine.config.page_size == page_size and engine.config.pages == 4
    assert Engine(MODEL, prefix_caching=False, max_len=64, max_batch=2).config.page_size == 64


# what must not be found


def test_warm_up_leaves_no_cached_page_and_can_be_repeated():
    sizes = dict(chunk=6, max_batch=3, max_len=MAX_LEN, page_size=4, pages=60)
    engine = guard(Engine(MODEL, prefix_caching=True, **sizes))
    params = SamplingParams(4)
    for prompt in ([0] * 30, SYSTEM, SYSTEM):
        for _ in range(2):
            engine.warm_up()
            assert engine.step() == [] and not engine.has_work
        assert named(engine.scheduler.pages) == set()
        poison(engine)
        for cached in (0, (len(prompt) - 1) // 4 * 4):
            [completion] = engine.generate([prompt], params, progress=False)
            assert completion.tokens == alone(MODEL, prompt, params)
            assert completion.cached_tokens == cached


def test_a_warm_up_that_is_refused_has_spoilt_nothing():
    """It lets the cache be zeros, before it sees that a request runs."""
    sizes = dict(chunk=6, max_batch=3, max_len=MAX_LEN, page_size=4, pages=60)
    engine = Engine(MODEL, prefix_caching=True, **sizes)
    engine.add_request(SYSTEM, SamplingParams(9))
    for _ in range(5):
        engine.step()
    with pytest.raises(ValueError, match="generate: other requests are running"):
        engine.warm_up()
    [completion] = finish(engine)
    assert completion.tokens == alone(MODEL, SYSTEM, SamplingParams(9))


@EVERY
def test_pages_of_a_failed_batch_are_not_cached(watched, policy, monkeypatch):
    engine = watched(policy, chunk=6, pages=60)
    num_cached = []
    ask(engine, 0)
    forward = GPT.forward

    def failing(*args):
        forward(*args)
        raise MemoryError

    while engine.has_work:  # a batch more each time
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(GPT, "forward", failing)
            engine.step()
        [request] = engine.scheduler.running
        num_cached.append(len(named(engine.scheduler.pages)))
        assert num_cached[-1] == request.num_computed // 4
        engine.step()
    assert num_cached[0] == 0 and num_cached[-1] == (21 + 7 - 2) // 4
    assert sorted(num_cached) == num_cached


@EVERY
def test_a_dropped_cache_finds_nothing(watched, policy):
    engine = watched(policy, pages=60)
    ask(engine, 3)
    finish(engine)
    for index in (0, 1):
        ask(engine, index)
    while not any(request.num_computed for request in engine.scheduler.requests.values()):
        engine.step()
    assert named(engine.scheduler.pages)
    engine.drop([engine.scheduler.requests[1]])
    assert named(engine.scheduler.pages) == set()
    ask(engine, 7)
    assert len(finish(engine)) == 2 and engine.scheduler.pages.num_free == 60
