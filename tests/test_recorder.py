"""page/records.py: what a Recorder says of the batches that it watched."""

import pytest

from engine import Engine
from kv_cache import Pages
from page.records import Recorder, why_head_waits
from policies import make_scheduler
from policies.observers import Iteration
from policies.pages import CachedPages
from sampling import SamplingParams
from scheduler import Request
from tests.helpers import advance, tiny_model
from tests.pages import Truth, in_turn


def decided(policy, requests, pages=16, page_size=16, max_batch=4, **options):
    """The records of the first iterations of a scheduler with these (prompt, output) lengths."""
    sizes = dict(max_batch=max_batch, max_len=128, clock=lambda: 0.0)
    scheduler = make_scheduler(policy, Pages(pages, page_size), **sizes | options)
    recorder = Recorder()
    recorder.watch([scheduler])
    for i, (prompt, output) in enumerate(requests):
        scheduler.add(Request(i, [0] * prompt, prompt, output))
    now = 0.0
    while scheduler.requests:
        batch = scheduler.next_batch()
        iteration = Iteration.of(scheduler, batch, now, end=now)
        iteration = iteration._replace(end=now + 1, launch=now + 0.25)
        now += 1
        advance(scheduler, batch, now)
        recorder.add(iteration)
    return in_turn(recorder)


def test_a_record_says_what_was_computed_and_what_the_budget_was():
    first, second, third, *_ = decided("sarathi-serve", [(10, 3), (40, 2)], chunk=32)
    assert first["chunks"] == [[0, 0, 10], [1, 0, 22]] and first["decodes"] == []
    assert first["budget"] == 32 and first["why"] is None
    assert second["chunks"] == [[1, 22, 18]] and second["decodes"] == [0]
    assert (second["start"], second["launch"], second["end"]) == (1.0, 1.25, 2.0)
    assert third["decodes"] == [0, 1] and third["ended"] == [[0, "length"], [1, "length"]]


@pytest.mark.parametrize(
    "policy, options, why",
    [
        ("sarathi-serve", dict(chunk=32, max_batch=2), ["batch", 2]),
        ("sarathi-serve", dict(chunk=80, pages=8), ["pages", 3, 2]),
        ("sarathi-serve", dict(chunk=64), ["budget", 0, 40]),
        ("orca-best", dict(chunk=32), ["policy"]),
        ("orca", dict(chunk=32), ["pages", 8, 0]),  # of max_len
        ("vllm", dict(chunk=32), ["budget", 8, 40]),  # of max_len = 128, which it does not cut
    ],
)
def test_the_reason_why_the_head_of_the_queue_waits_is_recorded(policy, options, why):
    records = decided(policy, [(40, 9)] * 4, **options)
    assert why in [record["why"] for record in records]


def test_pages_needed_are_fewer_when_shared_and_include_unread_ones():
    def make():
        pages = CachedPages(8, 16)
        return make_scheduler("sarathi-serve", pages, chunk=64, max_batch=4, max_len=128)

    def step(scheduler):
        batch = scheduler.next_batch()
        why = why_head_waits(scheduler, batch)
        advance(scheduler, batch)
        return why

    scheduler = make()
    for i, prompt in enumerate((64, 100, 120)):
        scheduler.add(Request(i, [7] * prompt, prompt, 9))
    assert step(scheduler) == ["pages", 7, 4]  # no page of 0 was computed before
    # 0 has 5 of the 8 pages with that of its output, 1 shares 4 of them and has the other 3
    assert step(scheduler) == ["pages", 8 - 4, 0]

    scheduler = make()
    scheduler.add(Request(0, [7] * 64, 64, 1))  # it leaves 4 pages behind
    step(scheduler)
    scheduler.add(Request(1, [8] * 75, 75, 5))  # takes the others and the last of these
    step(scheduler)
    scheduler.add(Request(2, [7] * 80, 80, 9))  # finds 3 of its 5 pages, all of those that are free
    assert step(scheduler) == ["pages", 5, 3]


def test_a_failed_step_is_recorded_once_with_all_its_pages(monkeypatch):
    recorder = Truth()
    model = tiny_model()
    engine = Engine(model, chunk=16, max_batch=2, max_len=128, page_size=16)
    recorder.watch([engine.scheduler])
    engine.add_request([1] * 40)

    def broken(*_):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(model, "forward", broken)
        with pytest.raises(MemoryError):
            engine.step()
    engine.step()
    recorder.add(engine.last_iteration)
    (record,) = in_turn(recorder)
    assert record["pages"] == [[0, 0, 0, 1, 2]] and record["chunks"] == [[0, 0, 16]]
    (live,) = recorder.snapshot()["live"]
    assert (live["num_computed"], live["pages"], live["output"]) == (16, [0, 1, 2], 0)


def test_an_aborted_request_has_ended_in_the_next_record():
    recorder = Recorder()
    engine = Engine(tiny_model(), chunk=16, max_batch=2, max_len=64)
    recorder.watch([engine.scheduler])
    for _ in range(2):
        engine.add_request([1] * 20, SamplingParams(max_new_tokens=9))
    for n in range(3):
        if n == 1:
            engine.abort(0)
        engine.step()
        recorder.add(engine.last_iteration)
    assert [record["ended"] for record in in_turn(recorder)] == [[], [[0, "abort"]], []]
