"""A Ctrl-C: held back while requests are moved on, and never at the cost of a page or of a text."""

import signal
import threading
from random import Random

import pytest

from engine import Engine, no_interrupt
from sampling import SamplingParams
from tests.helpers import alone, check_integrity, finish, tiny_model

MODEL = tiny_model(n_layer=1)
PROMPTS = [[7, 8, 9], [1] * 20, [5], [3, 1, 4, 1, 5, 9, 2, 6]]
PARAMS = SamplingParams(8)
EXPECTED = [alone(MODEL, prompt, PARAMS) for prompt in PROMPTS]
POLICIES = pytest.mark.parametrize("policy", ["vllm", "sarathi-serve", "priority", "vllm-v1"])


def ctrl_c():
    signal.raise_signal(signal.SIGINT)


def make_engine(policy):
    sizes = dict(chunk=6, max_batch=3, max_len=32, page_size=4, pages=9, prefix_caching=True)
    return Engine(MODEL, policy=policy, **sizes)


def interrupts(seed, once, again=False):
    """Calls `once` until 12 real Ctrl-C have broken it off, each at a random time, some twice."""
    draw = Random(seed)
    armed = []
    signal.signal(signal.SIGALRM, lambda *_: armed and ctrl_c())
    count = 0
    while count < 12:
        repeat = 1e-4 if again and draw.random() < 0.5 else 0
        try:
            try:
                armed.append(True)
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 0.02), repeat)
                once()
            finally:
                armed.clear()
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            count += 1


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
    thread = threading.Thread(target=lambda: reached.append(no_interrupt().__enter__()))
    thread.start()
    thread.join()
    assert reached[-1] is None


@POLICIES
def test_a_loop_of_steps_goes_on(policy):
    engine = make_engine(policy)

    def once():
        if not engine.has_work:
            requests.update({engine.add_request(p, PARAMS): i for i, p in enumerate(PROMPTS)})
            live.update(engine.scheduler.requests)
        engine.step()

    requests, live = {}, {}
    interrupts(1, once)
    finish(engine)
    for i, request in live.items():
        assert request.tokens[request.prompt_len :] == EXPECTED[requests[i]]


@POLICIES
def test_generate_leaves_nothing_and_can_be_called_again(policy):
    engine = make_engine(policy)
    interrupts(2, lambda: engine.generate(PROMPTS, PARAMS, progress=False), again=True)
    assert [c.output for c in engine.generate(PROMPTS, PARAMS, progress=False)] == EXPECTED
    assert not engine.has_work
    check_integrity(engine.scheduler.pages, [])
