"""The model of the iteration time, held against laws that are written here."""

import random

import pytest

from policies.iteration_time import BatchShape, IterationTime
from scheduler import Batch, Request


def cpu(shape):
    """Seconds on two cores with a 160M model: a pass over the weights, then each for itself."""
    prefill, decodes, context, pairs = shape
    return 14e-3 + 0.95e-3 * prefill + 0.7e-3 * decodes + 0.8e-6 * context + 0.2e-6 * pairs


def batch(prefill=0, decodes=6, context=1000, past=500):
    """One chunk after `past` tokens and decodes that read `context` keys each."""
    shape = BatchShape(decodes=decodes, context_tokens=decodes * context)
    return shape.with_chunk(past, prefill) if prefill else shape


class Machine:
    """Runs batches of many sizes at the speed of a law, with seeded noise, and learns."""

    def __init__(self, noise, seed, slowdown=1.0):
        self.model = IterationTime()
        self.noise = noise
        self.slowdown = slowdown
        self.draw = random.Random(seed)

    def error(self, shape):
        """Of the prediction, relative to the law without its noise."""
        return self.model.predict(shape) / (self.slowdown * cpu(shape)) - 1

    def run(self, count):
        """The errors of the predictions that were made before each of so many batches."""
        draw = self.draw
        errors = []
        for _ in range(count):
            shape = batch(
                prefill=draw.choice([0, 64, 128, 192, 256]),
                decodes=draw.randrange(2, 9),
                context=draw.randrange(200, 1500),
                past=draw.randrange(1000),
            )
            errors.append(abs(self.error(shape)))
            seconds = self.slowdown * cpu(shape) * draw.lognormvariate(0, self.noise)
            self.model.observe(shape, seconds)
        return sorted(errors)


def test_the_shape_of_a_batch():
    chunks = Batch()
    rows = [  # tokens, prompt, computed
        (11, 10, 10),  # decodes read 11 and 25 keys
        (25, 20, 24),
        (8, 8, 0),
        (12, 12, 9),
        (7, 5, 0),  # after a preemption
    ]
    for tokens, prompt_len, computed in rows:
        chunks.add(Request(0, [0] * tokens, prompt_len, 9, num_computed=computed))
    pairs = sum(range(1, 9)) + (10 + 11 + 12) + sum(range(1, 8))
    assert BatchShape.of(chunks) == BatchShape(8 + 3 + 7, 2, 36, pairs)
    assert BatchShape.of(Batch()) == BatchShape(0, 0, 0, 0)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("noise", [0.03, 0.08])
def test_after_thirty_iterations_the_prediction_is_better_than_the_noise(noise, seed):
    machine = Machine(noise, seed)
    machine.run(30)
    errors = machine.run(100)
    assert errors[50] < 0.67 * noise  # its own median
    assert 0.6 * noise < machine.model.spread < 1.6 * noise


@pytest.mark.parametrize("slowdown", [1.4, 0.7])
def test_a_change_of_speed_is_followed_within_twenty_iterations(slowdown):
    machine = Machine(0.03, seed=0)
    machine.run(100)
    machine.slowdown = slowdown
    assert abs(machine.error(batch(256))) > 0.25
    machine.run(20)
    assert abs(machine.error(batch(256))) < 0.08
    assert abs(machine.error(batch())) < 0.13  # of which four were seen


def test_prefill_that_fits_is_the_most_of_all_sizes():
    machine = Machine(0.05, seed=0)
    machine.run(50)
    model = machine.model
    model.observe(batch(900), cpu(batch(900)))
    draw = machine.draw
    answers = set()
    for _ in range(200):
        seconds = draw.uniform(0.01, 0.8)
        past = draw.randrange(2000)
        limit = draw.randrange(-9, 900)
        tile = draw.choice([1, 7, 64])
        shape = batch(draw.choice([0, 0, 33]), draw.randrange(9), draw.randrange(2000))
        rows = shape.decodes + shape.prefill_tokens
        fitting = [0]
        for size in range(1, limit + 1):
            slowest = model.predict(shape.with_chunk(past, size)) * (1 + model.margin)
            if slowest <= seconds and ((rows + size) % tile == 0 or size == limit):
                fitting.append(size)
        answer = model.prefill_that_fits(seconds, shape, past, limit, tile)
        assert answer == max(fitting)
        answers.add((answer == 0, answer == limit))
    assert len(answers) >= 3  # nothing, all, and something in between
