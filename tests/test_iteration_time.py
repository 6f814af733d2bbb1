"""The model of the iteration time, held against laws that are written here."""

import itertools
import random

import pytest

from policies.iteration_time import BatchShape, IterationTime
from scheduler import Batch, Request


def cpu(shape):
    """Seconds on two cores with a 160M model: a pass over the weights, then each for itself."""
    p, n, context, pairs = shape
    return 14e-3 + 0.95e-3 * p + 0.7e-3 * n + 0.8e-6 * context + 0.2e-6 * pairs


def batch(prefill=0, decodes=6, context=1000, past=500):
    """One chunk after `past` tokens and decodes that read `context` keys each."""
    shape = BatchShape(decodes=decodes, context_tokens=decodes * context)
    return shape.with_chunk(past, prefill) if prefill else shape


DECODES = batch()
HYBRID = batch(256)


class Machine:
    """Runs batches at the speed of a law, with seeded noise, and tells the model of each."""

    def __init__(self, law, noise=0.05, seed=0, profile=False, mixed=0):
        self.law = law
        self.noise = noise
        self.random = random.Random(seed)
        shapes = []
        if profile:
            sizes = itertools.product((0, 64, 256, 512, 1024), (1, 4, 8), (300, 1500))
            shapes = [batch(*size) for size in sizes]
        self.model = IterationTime([(shape, self.measure(shape)) for shape in shapes])
        self.fits = self.model.prefill_that_fits
        self.run_mixed(mixed)

    def measure(self, shape):
        return self.law(shape) * self.random.lognormvariate(0, self.noise)

    def error(self, shape):
        """Of the prediction, relative to the law without its noise."""
        return self.model.predict(shape) / self.law(shape) - 1

    def run(self, shape):
        """Returns the error of the prediction that was made before."""
        error = self.error(shape)
        self.model.observe(shape, self.measure(shape))
        return error

    def run_mixed(self, count):
        """Chunks of many sizes, a decode-only iteration for every four of them. Their errors."""
        draw = self.random
        errors = []
        for _ in range(count):
            shape = batch(
                prefill=draw.choice([0, 64, 128, 192, 256]),
                decodes=draw.randrange(2, 9),
                context=draw.randrange(200, 1500),
                past=draw.randrange(1000),
            )
            errors.append(self.run(shape))
        return errors


def median(values):
    return sorted(values)[len(values) // 2]


SEEDS = pytest.mark.parametrize("seed", range(2))
PROFILES = pytest.mark.parametrize("profile", [True, False], ids=["profile", "cold"])


def test_the_shape_of_a_batch():
    shapes = Batch()

    def add(tokens, prompt_len, num_computed):
        return shapes.add(Request(0, [0] * tokens, prompt_len, 9, num_computed=num_computed))

    add(11, 10, 10)  # decodes read 11 and 25 keys
    add(25, 20, 24)
    add(8, 8, 0)
    add(12, 12, 9)
    add(7, 5, 0)  # after a preemption
    pairs = sum(range(1, 9)) + (10 + 11 + 12) + sum(range(1, 8))
    assert BatchShape.of(shapes) == BatchShape(8 + 3 + 7, 2, 36, pairs)
    assert BatchShape.of(Batch()) == BatchShape(0, 0, 0, 0)
    decodes = [chunk.request for chunk in shapes[:2]]
    assert BatchShape.of_decodes(decodes).with_chunk(9, 3) == BatchShape(3, 2, 36, 33)


@SEEDS
@PROFILES
@pytest.mark.parametrize("noise", [0.03, 0.08])
def test_after_thirty_iterations_the_prediction_is_better_than_the_noise(profile, noise, seed):
    machine = Machine(cpu, noise, seed, profile, mixed=30)
    assert median([abs(error) for error in machine.run_mixed(100)]) < 0.67 * noise  # its own median
    assert 0.6 * noise < machine.model.spread < 1.6 * noise


@SEEDS
@pytest.mark.parametrize("slowdown", [1.4, 0.7])
def test_a_change_of_speed_is_followed_within_twenty_iterations(slowdown, seed):
    machine = Machine(cpu, 0.03, seed, mixed=100)
    machine.law = lambda shape: slowdown * cpu(shape)
    assert abs(machine.error(HYBRID)) > 0.25
    machine.run_mixed(20)
    assert abs(machine.error(HYBRID)) < 0.08
    assert abs(machine.error(DECODES)) < 0.13  # of which four were seen


@SEEDS
def test_prefill_that_fits_is_the_most_of_all_sizes(seed):
    machine = Machine(cpu, 0.05, seed, mixed=50)
    machine.model.observe(batch(900), cpu(batch(900)))
    draw = random.Random(seed)
    answers = set()
    margin = 1 + machine.model.caution * machine.model.spread
    for _ in range(200):
        slo = draw.uniform(0.01, 0.8)
        past = draw.randrange(2000)
        limit = draw.randrange(-9, 900)
        tile = draw.choice([1, 7, 64])
        shape = batch(draw.choice([0, 0, 33]), draw.randrange(9), draw.randrange(2000))

        def time(size, shape=shape, past=past):
            return machine.model.predict(shape.with_chunk(past, size)) * margin

        rows = shape.decodes + shape.prefill_tokens
        sizes = [n for n in range(1, limit + 1) if (rows + n) % tile == 0 or n == limit]
        answer = machine.fits(slo, shape, past, limit, tile)
        assert answer == max([size for size in sizes if time(size) <= slo], default=0)
        # a time that just fits, fits
        assert answer in (0, machine.fits(time(answer), shape, past, limit, tile))
        answers.add((answer == 0, answer == limit, (rows + answer) % tile == 0))
    assert len(answers) >= 4  # nothing, all and whole tiles in between were all among them
