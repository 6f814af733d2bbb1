"""Pages that several requests read: names, reference counts, and who is evicted first."""

import sys
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.pages import CachedPages, make_pages
from request import Request
from tests.helpers import check_integrity, named


def names_of(pages, tokens):
    """The names of all full pages of these tokens."""
    return pages.hashes(Request(0, list(tokens), len(tokens), 1))


class SharedPages:
    """Pages of two tokens, and what must be true of them."""

    def __init__(self, total):
        self.pages = CachedPages(total, 2)
        self.total = total
        self.tables = []  # tokens, names and pages, and how many of these are full and kept
        self.content = {}  # all tokens up to the end of a page -> the page that is found
        self.left = []  # the found ones that nobody reads, the one left longest ago first

    @property
    def readers(self):
        """page -> in how many block tables it is."""
        return Counter(page for table in self.tables for page in table.pages)

    def take(self, count, **after):
        """Allocate: blank pages, and where these are not enough those left longest ago."""
        found = set(self.content.values())
        blank = set(range(self.total)).difference(found, self.readers)
        needed = max(0, count - len(blank))
        gone = self.left[:needed]
        left = self.left[needed:]
        pages = self.pages.allocate(count, **after)
        assert len(set(pages)) == count and blank.union(gone).issuperset(pages)
        self.content = {key: page for key, page in self.content.items() if page not in gone}
        self.left = left
        return pages

    def admit(self, tokens):
        """A new block table, if there is memory."""
        names = names_of(self.pages, tokens)
        found = []
        assert len(names) == len(tokens) // 2
        for end in range(2, len(tokens), 2):  # at least one token is left
            if tuple(tokens[:end]) not in self.content:
                break
            found.append(self.content[tuple(tokens[:end])])
        assert self.pages.match_prefix(names[: (len(tokens) - 1) // 2]) == found
        more = -(-len(tokens) // 2) - len(found)
        unread = set(found).difference(self.readers)
        assert self.pages.count_free(found) == len(unread)
        if more + len(unread) <= self.pages.num_free:
            self.pages.take(found)
            self.left = [page for page in self.left if page not in found]
            table = SimpleNamespace(tokens=tokens, names=names, pages=found, full=len(found))
            self.tables.append(table)
            table.pages = found + self.take(more)

    def compute(self, table, count):
        """Some more of its pages are full."""
        end = min(table.full + count, len(table.tokens) // 2)
        table.names = names_of(self.pages, table.tokens)
        self.pages.publish(table.pages[table.full : end], table.names[table.full : end])
        for i in range(table.full, end):
            self.content.setdefault(tuple(table.tokens[: 2 * i + 2]), table.pages[i])
        table.full = end

    def grow(self, table, token):
        """One token more, and a page for it where there is none."""
        if len(table.tokens) == 2 * len(table.pages):
            if not self.pages.num_free:
                assert self.pages.allocate(1, after=table.pages[-1]) is None
                return
            table.pages += self.take(1, after=table.pages[-1])
        table.tokens = [*table.tokens, token]

    def free(self, table):
        """A block table is given back."""
        self.pages.free(table.pages)
        self.tables.remove(table)
        found = self.content.values()
        self.left += [p for p in reversed(table.pages) if p not in self.readers and p in found]

    def check(self):
        """What must hold between any two actions."""
        pages = self.pages
        readers = self.readers
        check_integrity(pages, [table.pages for table in self.tables])
        assert pages.num_free == self.total - len(readers)
        assert named(pages) == set(self.content.values())
        for tokens, page in self.content.items():  # whoever began so, and ended or not
            assert pages.match_prefix(names_of(pages, tokens)[-1:]) == [page]
        for page in set(range(self.total)).difference(readers):
            with pytest.raises(RuntimeError, match=f"page {page} was freed but is not owned"):
                pages.free([page])


@settings(deadline=None)
@given(st.data(), st.integers(4, 9))
def test_pages_are_found_shared_and_given_away_as_they_promise(data, total):
    it = SharedPages(total)
    few = st.integers(0, 1)
    for _ in range(data.draw(st.integers(0, 40))):
        action = data.draw(
            st.sampled_from(["admit", "admit", "compute", "compute", "grow", "free"])
        )
        if action == "admit" or not it.tables:
            it.admit(data.draw(st.lists(few, min_size=1, max_size=8)))
        else:
            table = data.draw(st.sampled_from(it.tables))
            more = {"compute": (st.integers(1, 4),), "grow": (few,), "free": ()}[action]
            getattr(it, action)(table, *map(data.draw, more))
        it.check()
    for table in it.tables[:]:
        it.free(table)
    it.check()
    assert it.pages.num_free == total and sorted(it.take(total)) == list(range(total))
    assert named(it.pages) == set()


def test_a_page_hash_stands_for_all_tokens_up_to_its_end():
    pages = CachedPages(4, 2)
    beginnings = [[1, 2], [2, 1], [1, 258], [0, 1], [256, 1], [1, 0], [1, 2, 1, 2], [3, 4, 1, 2]]
    beginnings += [[1, 2, 1, 2, 1, 2], [0, 0], [0, 0, 0, 0], [2**40, 1], [1, 2**40]]
    last = [names_of(pages, tokens)[-1] for tokens in beginnings]
    assert len(set(last)) == len(beginnings)
    assert names_of(pages, [1, 2, 3, 4, 5])[:1] == names_of(pages, (1, 2)) == last[:1]
    request = Request(0, [1, 2, 3], 3, 9)
    assert len(pages.hashes(request)) == 1
    request.tokens += [4, 5, 6, 7]  # goes on where it was
    names = pages.hashes(request)
    assert names == names_of(pages, [1, 2, 3, 4, 5, 6]) and len(names) == 3


def test_the_least_recently_used_page_goes_first_from_the_end():
    pages = CachedPages(5, 1)
    old = pages.allocate(3)
    new = pages.allocate(2)
    for table, tokens in ((old, [1, 2, 3]), (new, [4, 5])):
        pages.publish(table, names_of(pages, tokens))
        pages.free(table)
    pages.take(old[:1])
    pages.free(old[:1])  # left later than all others
    went = [pages.allocate(1) for _ in range(5)]
    assert went == [old[2:], old[1:2], new[1:], new[:1], old[:1]]
    assert pages.allocate(1) is None and named(pages) == set()


def test_a_request_grows_into_the_next_page_even_if_that_is_the_last():
    pages = make_pages(4, 2)
    assert pages.allocate(3) == [0, 1, 2]
    pages.free([0])
    assert pages.allocate(1, after=2) == [3]
    assert pages.allocate(1, after=3) == [0]


@pytest.mark.parametrize("again", [False, True])
def test_an_interrupt_in_keep_leaves_no_name_of_other_content(again):
    """At each line of it, of two pages that had other names; and then it is done again, or not."""

    def trace(frame, event, arg):
        lines.append(event == "line")
        if sum(lines) == at:
            raise KeyboardInterrupt
        return trace

    for at in range(1, 30):
        pages = CachedPages(2, 1)
        before = pages.allocate(2)
        pages.publish(before, names_of(pages, [1, 2]))
        pages.free(before)
        table = pages.allocate(2)
        names = names_of(pages, [3, 4])
        lines = []
        sys.settrace(trace)
        try:
            pages.publish(table, names)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        if again:
            pages.publish(table, names)
            assert pages.match_prefix(names) == table
        check_integrity(pages, [table])
        pages.free(table)
        check_integrity(pages, [])
        table = pages.allocate(2)
        assert (
            named(pages) == set()
            and not pages.match_prefix(names)
            and not pages.match_prefix(names[1:])
        )
        pages.publish(table, names_of(pages, [5, 6]))
        assert not pages.match_prefix(names) and not pages.match_prefix(names_of(pages, [1, 2]))
        check_integrity(pages, [table])
        if sum(lines) < at:
            break
    assert 5 < at < 29  # all lines, two pages
