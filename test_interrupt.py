"""A Ctrl-C at any line of schedule() loses no request, leaks no page and changes no text."""

import sys

import pytest

from conftest import alone, tiny_model
from engine import Engine
from sampling import SamplingParams
from scheduler import PRIORITIES

FILES = ("scheduler.py", "waiting.py", "kv_cache.py", "iteration_time.py")
PROMPTS = [[7, 8, 9], [1] * 20, [5], [3, 1, 4, 1, 5, 9, 2, 6] * 2, [60, 0, 60]]
MODEL = tiny_model(n_kv_head=2)
PARAMS = SamplingParams(6)


class Interrupt:
    """Counts the lines that run in the scheduler's files, and raises KeyboardInterrupt at one of them."""

    def __init__(self, at=None):
        self.at, self.lines = at, 0

    def __call__(self, frame, event, arg):
        if not frame.f_code.co_filename.endswith(FILES):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                raise KeyboardInterrupt
        return self

    def run(self, function):
        sys.settrace(self)
        try:
            return function()
        finally:
            sys.settrace(None)


def engine_after(policy, steps):
    engine = Engine(MODEL, policy, chunk=6, max_batch=3, max_len=32, page_size=4, pages=9)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, PARAMS, priority=PRIORITIES[i % 4])
    events = [event for _ in range(steps) for event in engine.step()]
    return engine, events


@pytest.mark.parametrize("after", ["step", "abort"])
@pytest.mark.parametrize("policy", ["sarathi-serve", "priority"])
def test_an_interrupt_at_any_line_of_schedule(policy, after):
    expected = [alone(MODEL, prompt, PARAMS) for prompt in PROMPTS]
    interrupted = 0
    for steps in (0, 3, 6, 9):
        engine, _ = engine_after(policy, steps)
        counter = Interrupt()
        counter.run(engine.scheduler.schedule)
        for at in range(1, counter.lines + 1, 10):
            engine, events = engine_after(policy, steps)
            schedule = engine.scheduler.schedule
            engine.scheduler.schedule = lambda: Interrupt(at).run(schedule)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
            del engine.scheduler.schedule
            interrupted += 1
            gone = engine.abort(4).request_id if after == "abort" and 4 in engine._live else None
            while engine.has_work:
                events += engine.step()
                scheduler = engine.scheduler
                scheduler.pages.check_integrity([request.pages for request in scheduler.running])
            for i, tokens in enumerate(expected):
                got = [event.token for event in events if event.request_id == i]
                assert got == tokens or i == gone and got == tokens[: len(got)]
            assert scheduler.pages.num_free == 9 and not scheduler.running and not scheduler.waiting
    assert interrupted > 20
