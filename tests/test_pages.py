"""Pages and prefixes, held against a dict from all tokens up to a page's end to that page."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from policies import POLICIES, make_scheduler
from policies.pages import CachedPages
from policies.referee import Referee
from request import Request
from tests.helpers import advance, check_integrity, named, owned

EVERY = pytest.mark.parametrize("policy", POLICIES)
TOKEN = st.integers(0, 1)
SIZE = 2  # tokens of a page


def request_of(tokens, number=0, output_len=9):
    return Request(
        number,
        list(tokens),
        len(tokens),
        output_len,
        arrival=float(number),
    )


class SharedPages(RuleBasedStateMachine):
    """Requests that begin alike come, are computed, grow and go."""

    @initialize(total=st.integers(4, 12))
    def start(self, total):
        self.pages = CachedPages(total, SIZE)
        self.requests = []  # those with a block table
        self.content = {}  # all tokens up to the end of a page -> the page that is found
        self.evictable = []  # found, and in no block table: the one left longest ago first

    def allocate(self, count, after=None):
        """Blank pages, then those left longest ago; side by side where that is possible."""
        everything = set(range(self.pages.total))
        found = set(self.content.values())
        blank = everything - found - set(owned(self.pages))
        evicted = self.evictable[: max(0, count - len(blank))]
        free = blank.union(evicted)
        pages = self.pages.allocate(count, after)
        assert len(set(pages)) == count
        assert free.issuperset(pages)
        if after is not None:
            assert pages == [after + 1] or after + 1 not in free
        elif any(free.issuperset(range(first, first + count)) for first in free):
            assert pages == list(range(pages[0], pages[0] + count))
        for key, page in list(self.content.items()):
            if page in evicted:
                del self.content[key]
        self.evictable = self.evictable[len(evicted) :]
        return pages

    @rule(tokens=st.lists(TOKEN, min_size=1, max_size=8))
    def admit(self, tokens):
        found = []
        for end in range(SIZE, len(tokens), SIZE):  # at least one token is left to compute
            page = self.content.get(tuple(tokens[:end]))
            if page is None:
                break
            found.append(page)
        request = request_of(tokens)
        assert self.pages.find(request) == found
        unread = set(found).difference(owned(self.pages))
        assert self.pages.count_free(found) == len(unread)
        count = self.pages.needed(len(tokens)) - len(found)
        if count + len(unread) > self.pages.num_free:
            assert self.pages.allocate(self.pages.num_free + 1) is None
            return
        self.pages.take(found)
        self.evictable = [page for page in self.evictable if page not in found]
        request.pages = found + self.allocate(count)
        request.num_computed = SIZE * len(found)
        self.requests.append(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), count=st.integers(1, 4))
    def compute(self, data, count):
        request = data.draw(st.sampled_from(self.requests))
        start = request.num_computed
        last_full = len(request.tokens) // SIZE * SIZE
        request.num_computed = min(start + SIZE * count, last_full)
        self.pages.keep(request, start)
        for end in range(start + SIZE, request.num_computed + 1, SIZE):
            page = request.pages[end // SIZE - 1]
            self.content.setdefault(tuple(request.tokens[:end]), page)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), token=TOKEN)
    def grow(self, data, token):
        request = data.draw(st.sampled_from(self.requests))
        last = request.pages[-1]
        if len(request.tokens) == SIZE * len(request.pages):
            if not self.pages.num_free:
                assert self.pages.allocate(1, after=last) is None
                return
            request.pages += self.allocate(1, after=last)
        request.tokens.append(token)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def free(self, data):
        request = data.draw(st.sampled_from(self.requests))
        self.requests.remove(request)
        self.pages.free(request.pages)
        found = set(self.content.values()).difference(owned(self.pages))
        self.evictable += [page for page in reversed(request.pages) if page in found]

    @invariant()
    def check(self):
        check_integrity(self.pages, [request.pages for request in self.requests])
        assert named(self.pages) == set(self.content.values())
        for tokens, page in self.content.items():
            page_hash = self.pages.hashes(request_of(tokens))[-1]
            assert self.pages.match_prefix([page_hash]) == [page]
        for page in set(range(self.pages.total)).difference(owned(self.pages)):
            with pytest.raises(AssertionError):
                self.pages.free([page])  # never twice

    def teardown(self):
        if not hasattr(self, "pages"):
            return
        for request in self.requests:
            self.pages.free(request.pages)
        total = self.pages.total
        assert self.pages.allocate(total) == list(range(total))  # all runs have joined
        assert not named(self.pages)


TestSharedPages = SharedPages.TestCase
TestSharedPages.settings = settings(stateful_step_count=40, deadline=None)


def test_a_page_hash_stands_for_all_tokens_up_to_its_end():
    pages = CachedPages(4, SIZE)
    beginnings = ["12", "21", "1212", "3412", "00", "0000"]
    last_hashes = set()
    for digits in beginnings:
        *_, last_hash = pages.hashes(request_of(list(map(int, digits))))
        last_hashes.add(last_hash)
    for large in ([1, 258], [256, 1], [1, 2**40]):  # of more than one byte
        last_hashes.update(pages.hashes(request_of(large)))
    assert len(last_hashes) == len(beginnings) + 3
    growing = request_of(range(3))
    assert pages.hashes(growing) == pages.hashes(request_of(range(2)))
    growing.tokens += [3, 4, 5, 6]  # goes on where it was
    assert pages.hashes(growing) == pages.hashes(request_of(range(6)))


class Line:
    """A scheduler that shares pages, under the eyes of a referee, and its requests."""

    def __init__(self, policy, page_size=4, pages=32, chunk=64):
        sizes = dict(chunk=chunk, max_batch=9, max_len=64)
        self.scheduler = make_scheduler(policy, CachedPages(pages, page_size), **sizes)
        self.count = 0
        Referee(self.scheduler, policy)

    def add(self, tokens, output_len):
        """A Request that arrives after all others."""
        request = request_of(tokens, self.count, output_len)
        self.count += 1
        self.scheduler.add(request)
        return request

    def step(self):
        """One iteration that samples token 99: {request id: (start, length)}."""
        batch = self.scheduler.next_batch()
        chunks = {request.id: (start, length) for request, start, length in batch}
        advance(self.scheduler, batch, token=99)
        return chunks

    def run(self):
        """Iterations until nothing is left."""
        steps = []
        while self.scheduler.requests:
            steps.append(self.step())
        return steps


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
    assert first.cached_tokens == 0
    assert turn.cached_tokens == cached_tokens
    assert other.cached_tokens == 4


@pytest.mark.parametrize(
    "page_size, found",
    [
        (1, 7),
        (2, 6),
        (4, 4),
        (8, 0),
    ],
)
@EVERY
def test_at_least_one_token_of_a_prompt_is_computed(policy, page_size, found):
    line = Line(policy, page_size, pages=256 // page_size)
    line.add(range(8), 2)
    assert line.step() == {0: (0, 8)}
    line.run()
    line.add(range(8), 2)
    assert line.step() == {1: (found, 8 - found)}
    assert line.step() == {1: (8, 1)}


@pytest.mark.parametrize(
    "gone, found",
    [
        (0, 8),
        (1, 8),
        (2, 4),
        (3, 0),
    ],
)
@EVERY
def test_a_preempted_request_finds_its_remaining_pages(policy, gone, found):
    line = Line(policy)
    pages = line.scheduler.pages
    request = line.add(range(10), 9)
    while len(request.tokens) < 13:
        line.step()
    line.scheduler.preempt(request)
    assert len(named(pages)) == 3
    pages.free(pages.allocate(32 - 3 + gone))  # others took them: first the end of the request
    assert line.step() == {0: (found, 13 - found)}
    line.run()
    assert (request.cached_tokens, request.recomputed_tokens) == (found, 12)


@pytest.mark.parametrize("chunk", [2, 64])
@EVERY
def test_a_prefill_of_one_uncached_token_is_not_a_decode(policy, chunk):
    """It would be one that the batch has not counted, which the referee does not allow."""
    line = Line(
        policy,
        page_size=1,
        pages=256,
        chunk=chunk,
    )
    line.add(range(3), 9)
    victim = line.add(range(50, 53), 9)
    while not (victim.is_decoding and len(victim.tokens) > 4):
        line.step()
    end = len(victim.tokens)
    line.scheduler.preempt(victim)
    line.run()
    assert victim.cached_tokens == end - 2


def test_pages_are_found_as_soon_as_they_are_computed_and_not_before():
    line = Line("sarathi-serve", chunk=8)
    line.add(range(20), 1)
    line.add(range(20), 1)
    assert line.step() == {0: (0, 8)}
    assert line.step() == {0: (8, 8)}
    assert line.step() == {0: (16, 4), 1: (16, 4)}


def test_vllm_counts_what_is_to_be_computed_of_whole_prompts():
    line = Line("vllm")  # at most 64 tokens in a batch of prompts
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
