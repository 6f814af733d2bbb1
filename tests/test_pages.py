"""Pages: who owns them, which are found again, and who is evicted first."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.pages import CachedPages
from request import Request
from tests.helpers import check_integrity, named, owned


def hashes_of(pages, tokens):
    """The hashes of all full pages of these tokens."""
    return pages.hashes(Request(0, list(tokens), len(tokens), 1))


class Model:
    """Pages of two tokens, and what must be true of them."""

    def __init__(self, total):
        self.pages = CachedPages(total, 2)
        self.requests = []  # which have a block table
        self.content = {}  # all tokens up to the end of a page -> the page that is found
        self.left = []  # the found ones in no block table, the one left longest ago first

    def allocate(self, count, after=None):
        """Blank pages, and where these are not enough those left longest ago; side by side where
        that is possible."""
        blank = set(range(self.pages.total)).difference(self.content.values(), owned(self.pages))
        evicted = self.left[: max(0, count - len(blank))]
        free = blank.union(evicted)
        pages = self.pages.allocate(count, after)
        assert len(set(pages)) == count and free.issuperset(pages)
        if after is not None:
            assert pages == [after + 1] or after + 1 not in free
        elif any(free.issuperset(range(first, first + count)) for first in free):
            assert pages == [*range(pages[0], pages[0] + count)]
        self.content = {key: page for key, page in self.content.items() if page not in evicted}
        self.left = self.left[len(evicted) :]
        return pages

    def admit(self, tokens):
        """A new request, if there is memory."""
        found = []
        for end in range(2, len(tokens), 2):  # at least one token is left
            if tuple(tokens[:end]) not in self.content:
                break
            found.append(self.content[tuple(tokens[:end])])
        request = Request(0, tokens, len(tokens), 9)
        assert self.pages.find(request) == found
        count = self.pages.needed(len(tokens)) - len(found)
        unread = set(found).difference(owned(self.pages))
        assert self.pages.count_free(found) == len(unread)
        if count + len(unread) > self.pages.num_free:
            assert self.pages.allocate(self.pages.num_free + 1) is None
            return
        self.pages.take(found)
        self.left = [page for page in self.left if page not in found]
        request.pages = found + self.allocate(count)
        request.num_computed = 2 * len(found)
        self.requests.append(request)

    def compute(self, request, count):
        """Some more of its pages are full."""
        start = request.num_computed
        request.num_computed = min(start + 2 * count, len(request.tokens) // 2 * 2)
        self.pages.keep(request, start)
        for end in range(start + 2, request.num_computed + 1, 2):
            self.content.setdefault(tuple(request.tokens[:end]), request.pages[end // 2 - 1])

    def grow(self, request, token):
        """One token more, and a page for it where there is none."""
        if len(request.tokens) == 2 * len(request.pages):
            if not self.pages.num_free:
                assert self.pages.allocate(1, after=request.pages[-1]) is None
                return
            request.pages += self.allocate(1, after=request.pages[-1])
        request.tokens.append(token)

    def free(self, request):
        """Its block table is given back."""
        self.pages.free(request.pages)
        self.requests.remove(request)
        found = set(self.content.values()).difference(owned(self.pages))
        self.left += [page for page in reversed(request.pages) if page in found]

    def check(self):
        """What must hold between any two actions."""
        check_integrity(self.pages, [request.pages for request in self.requests])
        assert named(self.pages) == set(self.content.values())
        for tokens, page in self.content.items():  # whoever began so, and ended or not
            assert self.pages.match_prefix(hashes_of(self.pages, tokens)[-1:]) == [page]
        for page in set(range(self.pages.total)).difference(owned(self.pages)):
            with pytest.raises(AssertionError):
                self.pages.free([page])


@settings(deadline=None)
@given(st.data(), st.integers(4, 12))
def test_pages_are_found_shared_and_given_away_as_they_promise(data, total):
    model = Model(total)
    token = st.integers(0, 1)
    tokens = st.lists(token, min_size=1, max_size=8)
    actions = [model.admit, model.compute, model.admit, model.compute, model.grow, model.free]
    arguments = {model.compute: [st.integers(1, 4)], model.grow: [token], model.free: []}
    for _ in range(data.draw(st.integers(0, 40))):
        action = data.draw(st.sampled_from(actions))
        if action == model.admit or not model.requests:
            model.admit(data.draw(tokens))
        else:
            request = data.draw(st.sampled_from(model.requests))
            action(request, *map(data.draw, arguments[action]))
        model.check()
    for request in list(model.requests):
        model.free(request)
    model.check()
    assert model.allocate(total) == list(range(total))  # all runs have joined
    assert named(model.pages) == set()


def test_a_page_hash_stands_for_all_tokens_up_to_its_end():
    pages = CachedPages(4, 2)
    beginnings = [[1, 2], [2, 1], [1, 258], [256, 1], [1, 2, 1, 2], [3, 4, 1, 2], [1, 2**40]]
    beginnings += [[0, 0], [0, 0, 0, 0]]
    last = {hashes_of(pages, tokens)[-1] for tokens in beginnings}
    assert len(last) == len(beginnings)
    growing = Request(0, [1, 2, 3], 3, 9)
    assert pages.hashes(growing) == hashes_of(pages, [1, 2])
    growing.tokens += [4, 5, 6, 7]  # goes on where it was
    assert pages.hashes(growing) == hashes_of(pages, (1, 2, 3, 4, 5, 6))
