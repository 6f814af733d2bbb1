"""A Ctrl-C, held against alone(): it is held back while requests move on, and costs no text."""

import signal

import pytest

from engine import Engine, no_interrupt
from sampling import SamplingParams
from tests.helpers import alone, check_integrity, tiny_model

MODEL = tiny_model(n_layer=1)
PROMPTS = [[7, 8, 9], [1] * 20, [5], [3, 1, 4, 1, 5, 9, 2, 6]]
PARAMS = SamplingParams(8)
EXPECTED = [alone(MODEL, prompt, PARAMS) for prompt in PROMPTS]


@pytest.fixture(autouse=True)
def heard():
    """A process in the background ignores Ctrl-C: not here."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


def ctrl_c():
    signal.raise_signal(signal.SIGINT)


def make_engine():
    sizes = dict(
        chunk=6,
        max_batch=3,
        max_len=32,
        page_size=4,
        pages=9,
        prefix_caching=True,
    )
    return Engine(MODEL, policy="sarathi-serve", **sizes)


def interrupted(function):
    """The function, but every fourth call is broken off, before or after it has done its work."""
    calls = 0

    def call(*args):
        nonlocal calls
        calls += 1
        if calls % 8 == 3:
            ctrl_c()
        result = function(*args)
        if calls % 8 == 7:
            ctrl_c()
        return result

    return call


def test_the_first_ctrl_c_waits_and_the_second_does_not():
    reached = []
    with pytest.raises(KeyboardInterrupt), no_interrupt():
        ctrl_c()
        reached.append("the end of the block")
    with pytest.raises(KeyboardInterrupt), no_interrupt():
        ctrl_c()
        ctrl_c()
        reached.append("never")
    assert reached == ["the end of the block"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("part", ["scheduler.next_batch", "runner.forward", "scheduler.advance"])
def test_a_loop_of_steps_goes_on(part):
    engine = make_engine()
    owner, _, method = part.partition(".")
    target = getattr(engine, owner)
    setattr(target, method, interrupted(getattr(target, method)))
    ids = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS]
    requests = dict(engine.scheduler.requests)
    interrupts = 0
    while engine.has_work:
        try:
            engine.step()
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts > 3
    assert [requests[i].output for i in ids] == EXPECTED
    check_integrity(engine.scheduler.pages, [])
