"""Schedulers that share a queue, as those of a pipeline: what happens while a batch is computed."""

from policies import make_scheduler
from policies.pages import make_pages
from request import Request, Service
from tests.helpers import advance


def two_schedulers(policy, pages=64, **options):
    """Two schedulers on one queue, each with pages of one token that can be found."""
    sizes = dict(chunk=8, max_batch=4, max_len=8) | options
    pair = [make_scheduler(policy, make_pages(pages, 1, True), **sizes) for _ in range(2)]
    for scheduler in pair:
        scheduler.share_queue(pair)
    return pair


def add(scheduler, number, tokens, output_len=2, user=""):
    request = Request(number, list(tokens), len(tokens), output_len, service=Service(user=user))
    scheduler.add(request)
    return request


def test_a_request_that_has_moved_on_is_not_moved_by_the_batch_it_was_in():
    """0 is aborted while the pages that 1 reads of it are computed, and 1 begins elsewhere."""
    first, second = two_schedulers("vllm-v1")
    add(first, 0, [5, 5, 5])
    request = add(first, 1, [5, 5, 6])
    in_flight = first.next_batch()
    assert [chunk.request.id for chunk in in_flight] == [0, 1]
    first.abort(0)
    elsewhere = second.next_batch()
    assert [chunk.request.id for chunk in elsewhere] == [1]
    advance(first, in_flight)
    assert (request.num_computed, len(request.output)) == (0, 0)
    assert first.pages.find(add(first, 2, [5, 5, 6, 9])) == []
    advance(second, elsewhere)
    assert (request.num_computed, len(request.output)) == (3, 1)


def test_users_are_those_of_all_schedulers():
    first, second = two_schedulers("vtc", max_batch=1)
    for number, user in enumerate("aab"):
        add(first, number, [1] * (number + 1), user=user)
    batches = [first.next_batch(), second.next_batch()]
    assert [chunk.request.id for batch in batches for chunk in batch] == [0, 2]
