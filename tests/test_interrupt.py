"""A Ctrl-C at any line of schedule(), of observe() or of advance() loses no request, leaks no page
and changes no text."""

import functools
import itertools
import sys
from pathlib import Path

import pytest

from engine import Engine
from policies.priority import PRIORITIES
from sampling import SamplingParams
from tests.helpers import alone, tiny_model

HERE = Path(__file__).parents[1]
CORE = ("scheduler.py", "kv_cache.py")
OWN = ("policies/priority.py", "policies/waiting.py", "policies/iteration_time.py")
PROMPTS = [[7, 8, 9], [1] * 20, [5], [3, 1, 4, 1, 5, 9, 2, 6] * 2, [60, 0, 60]]
MODEL = tiny_model(n_kv_head=2)
PARAMS = SamplingParams(6)
EXPECTED = [alone(MODEL, prompt, PARAMS) for prompt in PROMPTS]


class Interrupt:
    """Runs a function, and raises KeyboardInterrupt before line `at` of those that it runs in the
    files of the scheduler. `hits` counts those lines by file."""

    def __init__(self, at=None):
        self.at, self.hits = at, {str(HERE / file): 0 for file in CORE + OWN}
        assert all(Path(file).is_file() for file in self.hits)

    def __call__(self, frame, event, arg):
        if (file := frame.f_code.co_filename) not in self.hits:
            return None
        if event == "line":
            self.hits[file] += 1
            if sum(self.hits.values()) == self.at:
                raise KeyboardInterrupt
        return self

    def run(self, function, *args):
        sys.settrace(self)
        try:
            return function(*args)
        finally:
            sys.settrace(None)


def engine_after(policy, steps):
    small = dict(chunk=6, max_batch=3, max_len=32, page_size=4, pages=9)
    engine = Engine(MODEL, policy=policy, **small)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, PARAMS, priority=PRIORITIES[i % 4])
    return engine, [event for _ in range(steps) for event in engine.step()]


@pytest.mark.parametrize("after", ["step", "abort"])
@pytest.mark.parametrize(
    "policy, method, every, steps, files",
    [
        ("sarathi-serve", "schedule", 10, (0, 3, 6, 9), CORE),
        ("sarathi-serve", "advance", 1, (0, 5, 9, 17, 18), CORE),  # but for the first, some end
        ("priority", "schedule", 10, (0, 3, 6, 9), CORE + OWN),
        ("priority", "advance", 1, (5, 11, 19), CORE),
        ("priority", "observe", 10, (3, 9), OWN[2:]),
    ],
)
def test_an_interrupt_at_any_line(policy, method, every, steps, files, after):
    hit, interrupted = set(), 0
    for n in steps:
        for at in itertools.count(1, every):
            engine, events = engine_after(policy, n)
            scheduler, interrupt = engine.scheduler, Interrupt(at)
            whole = getattr(scheduler, method)
            setattr(scheduler, method, functools.partial(interrupt.run, whole))
            try:
                engine.step()
                break  # it has fewer lines
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                delattr(scheduler, method)
                hit |= {file for file, lines in interrupt.hits.items() if lines}
            gone = engine.abort(4).request_id if after == "abort" and 4 in scheduler.requests else 5
            events += engine.step()  # the next one puts the pages in order
            while engine.has_work:
                events += engine.step()
                scheduler.pages.check_integrity([request.pages for request in scheduler.running])
            for i, tokens in enumerate(EXPECTED):
                got = [event.token for event in events if event.request_id == i]
                assert got == tokens or i == gone and got == tokens[: len(got)]
                ended = [e.completion.tokens for e in events if e.request_id == i and e.completion]
                assert ended == [tokens] * (i != gone)
            assert engine.step() == [] and scheduler.pages.num_free == 9
            assert not scheduler.running and not scheduler.waiting
    assert interrupted > 20 and hit >= {str(HERE / file) for file in files}
