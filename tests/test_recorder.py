"""page/records.py, held against batches by hand: why the queue waits, and a step that failed."""

import pytest

from engine import Engine
from tests.helpers import tiny_model
from tests.pages import Truth, in_turn, recorded


@pytest.mark.parametrize(
    "policy, sizes, why",
    [
        ("sarathi-serve", dict(max_batch=2), ["batch", 2]),
        ("sarathi-serve", dict(chunk=80, pages=8), ["pages", 3, 2]),
        ("sarathi-serve", dict(chunk=64), ["budget", 0, 40]),
        ("orca-best", {}, ["policy"]),
        ("orca", dict(pages=8), ["pages", 4, 0]),  # of max_len
        ("vllm", {}, ["budget", 9, 40]),  # of max_len = 49, which it does not cut
    ],
)
def test_the_reason_why_the_head_of_the_queue_waits_is_recorded(policy, sizes, why):
    sizes = dict(chunk=32, max_batch=4, page_size=16, pages=16) | sizes
    recorder = recorded(policy, requests=[(0, 40, 9)] * 4, **sizes)
    assert why in [record["why"] for record in in_turn(recorder)]


def test_a_failed_step_is_recorded_once_with_all_its_pages(monkeypatch):
    recorder = Truth()
    model = tiny_model()
    engine = Engine(
        model,
        chunk=16,
        max_batch=2,
        max_len=128,
        page_size=16,
    )
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
    assert record["start"] <= record["launch"] <= record["end"]
    assert record["pages"] == [[0, 0, 0, 1, 2]]
    assert record["chunks"] == [[0, 0, 16]]
    (live,) = recorder.snapshot()["live"]
    assert live["num_computed"] == 16
    assert live["pages"] == [0, 1, 2]
    assert live["output"] == 0
