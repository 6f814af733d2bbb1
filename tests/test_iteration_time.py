"""The model of the iteration time keeps its promises against laws that are written here.

That a budget made of it keeps an SLO: test_dynamic.py."""

import itertools
import math
import random

import pytest

from policies.iteration_time import BatchShape, IterationTime
from scheduler import Batch, Request


def cpu(shape):
    """Seconds on two cores with a 160M model: a pass over the weights, then each for itself."""
    p, n, context, pairs = shape
    return 14e-3 + 0.95e-3 * p + 0.7e-3 * n + 0.8e-6 * context + 0.2e-6 * pairs


def gpu(shape):
    """Seconds on a device that reads its weights in 10 ms: in these it could compute 400 tokens."""
    p, n, context, pairs = shape
    return max(10e-3, (p + n) * 25e-6) + 0.3e-6 * context + 1e-9 * pairs


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


SEEDS = pytest.mark.parametrize("seed", range(3))
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
@PROFILES
def test_decode_only_iterations_do_not_poison_the_prefill_rate(profile, seed):
    machine = Machine(cpu, 0.03, seed, profile, mixed=60)

    def prefill():
        return machine.model.predict(HYBRID) - machine.model.predict(DECODES)

    before = prefill()
    for i in range(500):
        machine.run(batch(0, 6, 700 + i))
    assert prefill() == pytest.approx(before, rel=0.05)
    for i in range(500):
        machine.run(batch(0, 3, 700 + i))  # and another composition
    assert abs(machine.error(HYBRID)) < 0.05
    machine.model.observe(HYBRID, 2 * cpu(HYBRID))  # the first chunk since does not overrule all
    assert abs(machine.error(HYBRID)) < 0.08


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
@pytest.mark.parametrize("shape", [DECODES, HYBRID], ids=["decodes", "hybrid"])
def test_an_outlier_moves_nothing_much(shape, seed):
    model = Machine(cpu, 0.05, seed, mixed=60).model
    before = [model.predict(s) for s in (DECODES, HYBRID)]
    model.observe(shape, 3 * cpu(shape))
    assert [model.predict(s) for s in (DECODES, HYBRID)] == pytest.approx(before, rel=0.08)


def test_without_any_knowledge_it_finds_out_in_steps():
    model = IterationTime()
    fits = model.prefill_that_fits
    assert model.predict(HYBRID) == 0
    assert fits(0.1, DECODES, 0, 9999) == 16
    assert fits(0.1, DECODES, 0, 9999, tile=64) == 64 - DECODES.decodes
    assert fits(0.1, DECODES, 0, 5, tile=64) == 5
    for _ in range(100):
        model.observe(DECODES, cpu(DECODES))
    assert fits(0.1, DECODES, 0, 9999) == 16  # decodes say nothing of prefill
    sizes = []
    for _ in range(10):
        sizes.append(fits(0.8, DECODES, 0, 9999))
        shape = batch(sizes[-1], past=0)
        assert cpu(shape) <= 0.8
        model.observe(shape, cpu(shape))
    assert all(larger <= 1.5 * size for size, larger in itertools.pairwise(sizes))
    assert sizes[-1] > 300
    crowded = DECODES.with_chunk(0, 2 * max(sizes))  # the whole batch must not grow in a leap
    assert fits(9.0, crowded, 0, 100) == 0


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


def test_the_margin_is_bounded():
    model = IterationTime()
    for i in range(400):
        model.observe(batch(64 + i % 64), cpu(batch(64 + i % 64)) * (0.4, 2.5)[i % 2])  # wild
    assert model.caution * model.spread == pytest.approx(1.5, rel=0.01)
    slo = 2.501 * model.predict(batch(100))
    assert model.prefill_that_fits(slo, DECODES, 500, 200) == 100


def told(decodes, errors, prefill=100):
    """A model that knows the law, and saw batches of so many decodes that were so far off."""
    model = Machine(cpu, 0.0, profile=True).model
    for n, error in zip(decodes, errors, strict=True):
        shape = batch(prefill, n)
        model.observe(shape, model.predict(shape) * (1 + error))
    return model


def test_the_margin_counts_gaps_and_not_iterations():
    wide = told([], []).margin
    assert wide == pytest.approx(0.3)  # 3 times a spread of 0.1, before any error was seen
    full = told([30, 30], [0.0, 1.0])
    few = told([30, 2], [0.0, 1.0])
    assert full.caution > 1.5 * few.caution > 3  # two decodes are few gaps beside thirty
    assert full.margin > 1.0  # as wide as what was seen
    assert told([30], [1.0], prefill=0).caution < 3  # no budget makes decodes alone faster
    calm = told([30] * 200, [0.0] * 200)
    assert calm.margin < wide / 10 and calm.caution == pytest.approx(2, rel=0.01)  # 1.5 ** -1
    for _ in range(400):
        calm.observe(DECODES, calm.predict(DECODES))
    assert calm.caution == pytest.approx(2 / 1.5**0.4, rel=0.01)  # 6 of 30 are a fifth as many


def test_it_is_never_negative_and_never_nan():
    draw = random.Random(3)
    model = IterationTime()
    times = [1e-9, 1e-3, 0.1, 1e4, 0.0, -1.0, math.inf, math.nan]
    for _ in range(3000):
        shape = BatchShape(*(draw.choice([0, 0, 1, 10, 10**4, 10**7]) for _ in range(4)))
        model.observe(shape, draw.choice(times))
        for other in (shape, BatchShape(), BatchShape(-5, -1, -100, -7), DECODES, HYBRID):
            assert 0 <= model.predict(other) < math.inf
        assert 0.01 <= model.spread < math.inf
    before = model.predict(HYBRID)
    for seconds in times[4:]:
        model.observe(HYBRID, seconds)
    assert model.predict(HYBRID) == before


def test_what_was_learned_outlasts_the_memory():
    machine = Machine(cpu, 0.0)
    for i in range(200):
        machine.run(batch(64 + i % 5 * 32, 1 + i % 7, 100 + i * 11 % 900, i * 17 % 1000))
    assert abs(machine.error(HYBRID)) < 0.02 and machine.model.spread == 0.01
    for _ in range(40_000):  # their rows fade until a float cannot hold them
        machine.run(batch(128, decodes=0))
    assert abs(machine.error(HYBRID)) < 0.05


def test_a_profile_is_known_from_the_start():
    model = Machine(cpu, 0.0, profile=True).model
    for shape in (DECODES, HYBRID, batch(700, 3, 2500, past=0)):
        assert model.predict(shape) == pytest.approx(cpu(shape), rel=0.03)
    assert model.prefill_that_fits(9.0, DECODES, 0, 9999) == 1024 * 3 // 2
