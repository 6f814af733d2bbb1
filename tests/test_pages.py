"""Pages and prefixes, held against a dict from all tokens up to a page's end to that page."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from policies import POLICIES
from policies.pages import CachedPages
from tests.by_hand import World, check_row, request_of, rows_of
from tests.helpers import check_integrity, named, owned

EVERY = pytest.mark.parametrize("policy", POLICIES)
TOKEN = st.integers(0, 1)
SIZE = 2  # tokens of a page


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
        request = request_of(0, tokens)
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
            page_hash = self.pages.hashes(request_of(0, tokens))[-1]
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
    last_hashes = set()
    beginnings = [
        [1, 2],
        [2, 1],
        [1, 2, 1, 2],
        [3, 4, 1, 2],
        [0, 0],
        [0, 0, 0, 0],
        [1, 258],  # tokens of more than one byte
        [256, 1],
        [1, 2**40],
    ]
    for tokens in beginnings:
        last_hashes.add(pages.hashes(request_of(0, tokens))[-1])
    assert len(last_hashes) == len(beginnings)
    growing = request_of(0, range(3))
    assert pages.hashes(growing) == pages.hashes(request_of(0, range(2)))
    growing.tokens += [3, 4, 5, 6]  # goes on where it was
    assert pages.hashes(growing) == pages.hashes(request_of(0, range(6)))


@EVERY
@pytest.mark.parametrize("output_len, cached_tokens", [(6, 8), (7, 12)])
def test_the_next_turn_of_a_chat_finds_what_was_generated(policy, output_len, cached_tokens):
    # the last token is not computed: of 6 + 6 tokens 11 are, of 6 + 7 it is 12
    world = World(policy, f"abcdef+{output_len}", chunk=64)
    world.run()
    answer = output_len * "o"
    turn = world.add(f"abcdef{answer}xyz+1")
    other = world.add(f"abcdef!{answer[1:]}xyz+1")  # its second page differs
    world.run()
    assert turn.cached_tokens == cached_tokens
    assert other.cached_tokens == 4


@EVERY
@pytest.mark.parametrize(
    "page_size, computed",
    [
        (1, 1),
        (2, 2),
        (4, 4),
        (8, 8),
    ],
)
def test_at_least_one_token_of_a_prompt_is_computed(policy, page_size, computed):
    world = World(policy, "abcdefgh+2 abcdefgh+2@2", page_size, pages=256 // page_size)
    assert world.run() == f"0:8 | 0:d | 1:{computed} | 1:d"


@EVERY
@pytest.mark.parametrize(
    "gone, found",
    [
        (0, 8),
        (1, 8),
        (2, 4),
        (3, 0),
    ],
)
def test_a_preempted_request_finds_its_remaining_pages(policy, gone, found):
    world = World(policy, "abcdefghij+9", chunk=64)
    pages = world.scheduler.pages
    (request,) = world.requests
    while len(request.tokens) < 13:
        world.step()
    world.scheduler.preempt(request)
    assert len(named(pages)) == 3
    pages.free(pages.allocate(64 - 3 + gone))  # others took them: first the end of the request
    assert world.step() == f"0:{13 - found}"
    world.run()
    assert request.cached_tokens == found
    assert request.recomputed_tokens == 12


@EVERY
@pytest.mark.parametrize("chunk", [2, 64])
def test_a_prefill_of_one_uncached_token_is_not_a_decode(policy, chunk):
    """It would be one that the batch has not counted, which the referee does not allow."""
    world = World(
        policy,
        "abc+9 xyz+9",
        page_size=1,
        pages=256,
        chunk=chunk,
    )
    _, victim = world.requests
    while not (victim.is_decoding and len(victim.tokens) > 4):
        world.step()
    end = len(victim.tokens)
    world.scheduler.preempt(victim)
    world.run()
    assert victim.cached_tokens == end - 2


FOUND = """
sarathi-serve, abcdefghijklmnopqrst+1 abcdefghijklmnopqrst+1 = 0:8 x2 | 0:4 1:4  # once computed
vllm max_len=12, abcdefghij+1 abcdefghij+1@1 abcdefghij+1@1 abcdefghij+1@1 = \
    0:10 | 1:2 2:2 3:2  # a batch of prompts has 12 tokens that are to be computed
sarathi-serve page_size=1 pages=9 max_len=9, abcdef+3 abcdex+1@1 = \
    0:6 | 0:d 1:1 | 0:d  # pages of running requests take no memory
"""


@pytest.mark.parametrize("row", rows_of(FOUND))
def test_what_is_found_is_neither_computed_nor_allocated(row):
    check_row(row)
