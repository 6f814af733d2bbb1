"""Schedulers that share a queue, as a pipeline's, held against by-hand ends of what was aborted."""

from policies import make_scheduler
from policies.pages import make_pages
from tests.by_hand import request_of
from tests.helpers import advance


def two_schedulers(policy, **options):
    """Two schedulers on one queue, each with pages of one token that can be found."""
    sizes = dict(
        chunk=8,
        max_batch=4,
        max_len=8,
    )
    pair = []
    for _ in range(2):
        pages = make_pages(64, 1, prefix_caching=True)
        pair.append(make_scheduler(policy, pages, **sizes | options))
    for scheduler in pair:
        scheduler.share_queue(pair)
    return pair


def ids(batch):
    """The requests of a batch."""
    return [chunk.request.id for chunk in batch]


def test_a_request_that_has_moved_on_is_not_moved_by_the_batch_it_was_in():
    """0 is aborted while the pages that 1 reads of it are computed, and 1 begins elsewhere."""
    first, second = two_schedulers("vllm-v1")
    request = request_of(1, [5, 5, 6])
    first.add(request_of(0, [5, 5, 5]))
    first.add(request)
    in_flight = first.next_batch()
    assert ids(in_flight) == [0, 1]
    first.abort(0)
    elsewhere = second.next_batch()
    assert ids(elsewhere) == [1]
    advance(first, in_flight)
    assert (request.num_computed, request.output) == (0, [])
    assert first.pages.find(request_of(2, [5, 5, 6, 9])) == []
    advance(second, elsewhere)
    assert (request.num_computed, request.output) == (3, [0])


def test_users_are_those_of_all_schedulers():
    first, second = two_schedulers("vtc", max_batch=1)
    for number, user in enumerate("aab"):
        first.add(request_of(number, number + 1, user=user))
    assert ids(first.next_batch()) == [0]
    assert ids(second.next_batch()) == [2]
