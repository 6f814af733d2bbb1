"""A Ctrl-C anywhere: no request is lost, no page leaks, nobody is stuck, and no text changes.

KeyboardInterrupt is raised where CPython delivers signals, and then some: as functions of the core
and of policies/ begin and return, and as what they call in C returns; and sometimes once more while
the first one is on its way out.
"""

import functools
import sys
from collections import Counter
from itertools import takewhile
from pathlib import Path
from random import Random

import pytest

from engine import Engine
from policies import POLICIES
from policies.priority import PRIORITIES
from sampling import SamplingParams
from tests.helpers import Ledger, alone, finish, guard, poison, tiny_model, with_slow

HERE = Path(__file__).parents[1]
PROGRAMS = ("bench", "sample", "conftest", "test_equivalence")
FILES = {
    str(path)
    for glob in ("*.py", "policies/*.py", "attention/*.py", "runtime/journal.py")
    for path in HERE.glob(glob)
    if path.stem not in PROGRAMS
}
MODEL = tiny_model(n_kv_head=2, n_layer=1)
PI = [3, 1, 4, 1, 5, 9, 2, 6]
PROMPTS = [[7, 8, 9], [1] * 20, [1] * 9, PI * 2, [*PI, 60], [4]]
PARAMS = [
    SamplingParams(6, logprobs=True),
    SamplingParams(7, temperature=1.5, seed=3),
    SamplingParams(1),
    SamplingParams(9, temperature=0.9, top_p=0.9, seed=4),
    SamplingParams(5, temperature=1.0, top_k=9, logprobs=True),
    SamplingParams(25),
]
REQUESTS = list(zip(map(tuple, PROMPTS), PARAMS, strict=True))
NEVER = 10**9


@functools.cache
def expected(prompt, params):
    """The tokens of a request alone."""
    return alone(MODEL, prompt, params)


class Interrupt:
    """Calls a function and raises KeyboardInterrupt at event `at` in FILES, and if `again` is not 0
    so many events after that. `ended`: it came as the function returned, which is not undone."""

    def __init__(self, at, again=0):
        self.at = at
        self.again = again
        self.events = 0  # so far
        self.after = 0  # events after the first interrupt
        self.where = ""  # the function of the first
        self.ended = False

    def __call__(self, function, *args, **options):
        """Its value, also if it was interrupted as it returned, None if earlier."""
        value = None
        sys.settrace(self.trace if self.again else None)
        sys.setprofile(self.profile)
        try:
            value = function(*args, **options)
        except KeyboardInterrupt:
            value = self.value if self.ended else None
        finally:
            sys.setprofile(None)
            sys.settrace(None)
        return value

    @property
    def raised(self):
        return self.events >= self.at

    def profile(self, frame, event, arg):
        if frame.f_code.co_filename in FILES and event in ("call", "return", "c_return"):
            self.events += 1
            if self.events == self.at:
                is_outermost = frame.f_back.f_code is Interrupt.__call__.__code__
                self.ended = is_outermost and event == "return"
                self.value = arg
                self.where = frame.f_code.co_name
                raise KeyboardInterrupt

    def trace(self, frame, event, arg):
        frame.f_trace_lines = False
        if self.raised and frame.f_code.co_filename in FILES and event != "exception":
            self.after += 1
            if self.after == self.again:
                self.ended = False
                raise KeyboardInterrupt
        return self.trace


class Storm(Ledger):
    """An engine that is interrupted again and again. With `calm` more calls are left alone, so that
    something can be found in its cache."""

    def __init__(self, policy, seed, calm=1, pages=9, **more):
        small = dict(
            chunk=6,
            max_batch=3,
            max_len=32,
            page_size=4,
            pages=pages,
        )
        super().__init__(guard(Engine(MODEL, policy=policy, **small, **more)), expected)
        self.random = Random(seed)
        self.calm = calm
        self.cached_tokens = 0
        self.usual = Counter()  # function -> how many events it has
        self.seen = Counter()  # function -> how often it was interrupted
        self.peace = False

    def call(self, function, *args, **options):
        """As Interrupt does, if not in peace."""
        name = function.__name__
        draw = self.random
        usual = self.usual[name] or 400
        anywhere = draw.randint(1, usual)
        early = draw.randint(1, 40)
        late = max(1, usual - draw.randint(0, 15))
        places = [anywhere, early, late] + [NEVER] * self.calm
        at = NEVER if self.peace else draw.choice(places)
        again = draw.choice([0, 0, draw.randint(1, 6), draw.randint(1, 60)])
        interrupt = Interrupt(at, again)
        value = interrupt(function, *args, **options)
        if interrupt.raised:
            self.seen[name] += 1
            self.seen["again"] += interrupt.after >= interrupt.again > 0
        else:
            self.usual[name] = interrupt.events
        self.check()
        return value, interrupt

    def check(self):
        """What must hold as soon as nothing has to be mended."""
        if not self.engine.scheduler.journal.broken:
            super().check()

    def step(self):
        if not self.engine._computed:  # its keys and values are written, and not yet counted
            poison(self.engine)
        events, _ = self.call(self.engine.step)
        self.take(events or [])

    def end(self, completion):
        super().end(completion)
        self.cached_tokens += completion.cached_tokens

    def add_one(self):
        request = REQUESTS[self.random.randrange(len(REQUESTS))]
        before = set(self.engine.scheduler.requests)
        i, _ = self.call(
            self.engine.add_request,
            *request,
            priority=self.random.choice(PRIORITIES),
            tbt_slo=self.random.choice([None, 1]),
        )
        new = self.engine.scheduler.requests.keys() - before
        assert new == {i} if i is not None else len(new) < 2  # it is in, or nothing of it is
        self.asked |= dict.fromkeys(new, request)

    def abort_one(self):
        """Once, or until it is done: who is interrupted may try again."""
        requests = self.engine.scheduler.requests
        i = self.random.choice([*requests, -1])
        for _ in range(self.random.choice([1, 50])):
            if i not in requests:
                return
            completion, interrupt = self.call(self.engine.abort, i)
            if completion:
                self.end(completion)
            elif i not in requests:  # an interrupt took it
                assert interrupt.where in ("finish", "__exit__") or interrupt.after
                del self.asked[i]

    def generate(self):
        engine = self.engine
        scheduler = engine.scheduler
        done, interrupt = self.call(engine.generate, PROMPTS, PARAMS, progress=False)
        assert not engine.has_work
        assert not scheduler.requests
        for completion, request in zip(done or (), REQUESTS, strict=done is not None):
            assert completion.tokens == expected(*request)
        if interrupt.after:
            assert engine.step() == []  # interrupted while it cleaned up
        assert finish(engine) == []

    def run(self, interrupts):
        """Until there were so many of them, and then in peace until nothing is left."""
        requests = self.engine.scheduler.requests
        while self.seen.total() - self.seen["again"] < interrupts or not self.seen["abort"]:
            calls = [self.step] * 8 + [self.abort_one] * 2
            if len(requests) < 6:
                calls += [self.add_one] * 2
            self.random.choice(calls)()
            if self.random.random() < 0.05:
                self.drain()
                self.generate()
        self.drain()
        while not self.seen["generate"]:
            self.generate()
        return self.seen

    def drain(self):
        """Nobody is lost, and nobody is stuck."""
        self.peace = True
        for _ in takewhile(lambda _: self.engine.has_work, range(300)):
            self.step()
        self.peace = False
        self.check_end()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a generator
@pytest.mark.parametrize("policy", with_slow(POLICIES, fast=["vllm", "sarathi-serve", "priority"]))
def test_an_interrupt_anywhere_loses_no_page_and_changes_no_text(policy):
    seen = Storm(policy, seed=1).run(interrupts=250)
    assert seen.keys() >= {"step", "add_request", "abort", "again"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a generator
@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_found_after_an_interrupt_is_what_was_computed(policy):
    storm = Storm(
        policy,
        seed=1,
        calm=12,
        pages=20,
        prefix_caching=True,
    )
    seen = storm.run(interrupts=60)
    assert seen.keys() >= {"step", "add_request", "abort", "again"}
    assert storm.cached_tokens > 0  # or this test would not test it
