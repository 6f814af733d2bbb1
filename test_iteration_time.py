"""The model of the iteration time keeps its promises against laws that are written here. No clock is read."""

import math
import random
from bisect import bisect_left

import pytest

from iteration_time import BatchShape, IterationTime
from scheduler import Batch, Request


def cpu(shape):
    """Seconds on two cores with a 160M model: a pass over the weights, then each token, key and pair for itself."""
    p, n, context, pairs = shape
    return 14e-3 + 0.95e-3 * p + 0.7e-3 * n + 0.8e-6 * context + 0.2e-6 * pairs


def gpu(shape):
    """Seconds on a device that reads its weights in 10 ms, in which it could compute 400 tokens."""
    p, n, context, pairs = shape
    return max(10e-3, (p + n) * 25e-6) + 0.3e-6 * context + 1e-9 * pairs


def batch(prefill=0, decodes=6, context=1000, past=500):
    """One chunk after `past` tokens and decodes that read `context` keys each."""
    shape = BatchShape(decodes=decodes, context_tokens=decodes * context)
    return shape.with_chunk(past, prefill) if prefill else shape


DECODES, HYBRID = batch(), batch(256)


class Machine:
    """Runs batches at the speed of a law, with seeded noise, and tells the model how long each took."""

    def __init__(self, law, noise=0.05, seed=0, profile=False):
        self.law, self.noise, self.random, self.slowdown = law, noise, random.Random(seed), 1.0
        shapes = [batch(p, n, c) for p in (0, 64, 256, 512, 1024) for n in (1, 4, 8) for c in (300, 1500)] * profile
        self.model = IterationTime([(shape, self.measure(shape)) for shape in shapes])

    def measure(self, shape):
        return self.law(shape) * self.slowdown * self.random.lognormvariate(0, self.noise)

    def run(self, shape):
        """Returns the error of the prediction that was made before, relative to the law without its noise."""
        error = self.model.predict(shape) / (self.law(shape) * self.slowdown) - 1
        self.model.observe(shape, self.measure(shape))
        return error

    def run_mixed(self, count):
        """Chunks of many sizes, and a decode-only iteration for every four of them."""
        draw, errors = self.random, []
        for _ in range(count):
            prefill = draw.choice([0, 64, 128, 192, 256])
            errors.append(
                self.run(batch(prefill, draw.randrange(2, 9), draw.randrange(200, 1500), draw.randrange(1000)))
            )
        return errors

    def error(self, shape):
        return self.model.predict(shape) / (self.law(shape) * self.slowdown) - 1


def median(values):
    return sorted(values)[len(values) // 2]


SEEDS = pytest.mark.parametrize("seed", range(5))
PROFILES = pytest.mark.parametrize("profile", [True, False], ids=["profile", "cold"])


def test_the_shape_of_a_batch():
    def request(num_tokens, prompt_len, num_computed):
        return Request(0, [0] * num_tokens, prompt_len, 9, num_computed)

    requests = [request(11, 10, 10), request(25, 20, 24), request(8, 8, 0), request(12, 12, 9), request(7, 5, 0)]
    shapes = Batch()
    for r in requests:
        shapes.add(r)
    # decodes read 11 and 25 keys; chunks of 8 (from 0), 3 (after 9) and, after a preemption, 7
    pairs = sum(range(1, 9)) + (10 + 11 + 12) + sum(range(1, 8))
    assert BatchShape.of(shapes) == BatchShape(8 + 3 + 7, 2, 36, pairs)
    assert BatchShape.of(Batch()) == BatchShape(0, 0, 0, 0)


@SEEDS
@PROFILES
@pytest.mark.parametrize("noise", [0.03, 0.08])
def test_after_thirty_mixed_iterations_the_prediction_is_better_than_the_noise(profile, noise, seed):
    machine = Machine(cpu, noise, seed, profile)
    machine.run_mixed(30)
    assert median([abs(error) for error in machine.run_mixed(100)]) < 0.67 * noise  # the median of the noise itself
    assert 0.6 * noise < machine.model.spread < 1.6 * noise


@SEEDS
@PROFILES
def test_decode_only_iterations_do_not_poison_the_prefill_rate(profile, seed):
    machine = Machine(cpu, 0.03, seed, profile)
    machine.run_mixed(60)
    before = machine.model.predict(HYBRID) - machine.model.predict(DECODES)
    for i in range(500):
        machine.run(batch(0, 6, 700 + i))
    assert machine.model.predict(HYBRID) - machine.model.predict(DECODES) == pytest.approx(before, rel=0.05)
    for i in range(500):
        machine.run(batch(0, 3, 700 + i))  # and another composition
    assert abs(machine.error(HYBRID)) < 0.05
    machine.model.observe(HYBRID, 2 * cpu(HYBRID))  # the first chunk since does not overrule all those before
    assert abs(machine.error(HYBRID)) < 0.08


class MovingAverage:
    """The post's TokenBudgetScheduler (B-4): a moving average of the time per token, whatever the token."""

    def __init__(self):
        self.time_per_token = 0.0

    def observe(self, shape, seconds):
        self.time_per_token = 0.1 * seconds / (shape.prefill_tokens + shape.decodes) + 0.9 * self.time_per_token

    def prefill_that_fits(self, seconds, decodes):
        return max(0, (int(seconds / self.time_per_token) - decodes) // 64 * 64)


@SEEDS
def test_the_moving_average_collapses_where_this_model_holds(seed):
    slo, tile, average = 0.2, 64, MovingAverage()
    machine = Machine(cpu, 0.03, seed)
    fits = max(p for p in range(0, 1025, tile) if cpu(batch(p)) <= slo)
    for i in range(160):
        shape = batch(random.Random(i).choice([64, 128, 192, 256]) if i < 60 else 0)  # the last hundred only decode
        seconds = machine.measure(shape)
        average.observe(shape, seconds)
        machine.model.observe(shape, seconds)
        if i == 59:
            assert average.prefill_that_fits(slo, 6) >= 128
    assert average.prefill_that_fits(slo, 6) == 0  # it would never prefill again
    assert fits - tile <= machine.model.prefill_that_fits(slo, DECODES, 500, 1024, tile) <= fits


@SEEDS
def test_predictions_follow_the_context(seed):
    machine = Machine(cpu, 0.03, seed)
    machine.run_mixed(60)
    for longer in (batch(0, 8, 3000), batch(256, 8, 3000, past=2000)):  # twice what was seen
        assert abs(machine.error(longer)) < 0.1
    more, fewer = (machine.model.prefill_that_fits(0.2, batch(0, 6, c), 0, 999) for c in (200, 6000))
    assert more > fewer > 0
    assert machine.model.prefill_that_fits(0.2, DECODES, 4000, 999) < machine.model.prefill_that_fits(
        0.2, DECODES, 0, 999
    )


@SEEDS
@PROFILES
@pytest.mark.parametrize("slowdown", [1.4, 0.7])
def test_a_machine_that_changes_speed_is_followed_within_twenty_iterations(profile, slowdown, seed):
    machine = Machine(cpu, 0.03, seed, profile)
    machine.run_mixed(100)
    machine.slowdown = slowdown
    assert abs(machine.error(HYBRID)) > 0.25
    machine.run_mixed(20)
    assert abs(machine.error(HYBRID)) < 0.08
    assert abs(machine.error(DECODES)) < 0.13  # of which four were seen


@SEEDS
@pytest.mark.parametrize("shape", [DECODES, HYBRID], ids=["decodes", "hybrid"])
def test_an_outlier_moves_nothing_much(shape, seed):
    machine = Machine(cpu, 0.05, seed)
    machine.run_mixed(60)
    before = [machine.model.predict(s) for s in (DECODES, HYBRID)]
    machine.model.observe(shape, 3 * cpu(shape))
    after = [machine.model.predict(s) for s in (DECODES, HYBRID)]
    assert after == pytest.approx(before, rel=0.08)


@SEEDS
@pytest.mark.parametrize("law, slo", [(cpu, 0.2), (gpu, 25e-3)], ids=["cpu", "gpu"])
@PROFILES
def test_a_run_under_an_slo_keeps_it_and_uses_it(law, slo, profile, seed):
    machine, late, used = Machine(law, 0.03, seed, profile), [], []
    for i in range(300):
        past = machine.random.choice([0, 256, 512, 1024])
        fits = machine.model.prefill_that_fits(slo, DECODES, past, 2000, 16) if i // 40 % 3 < 2 else 0
        shape = batch(fits, past=past)
        seconds = machine.measure(shape)
        machine.model.observe(shape, seconds)
        if fits:
            late.append(seconds / slo)
        if fits and i >= 40:
            used.append(law(shape) / slo)
    assert max(late) < 1.4  # while it learns: a chord from the flat part of the gpu's law is too low beyond it
    assert max(late[25:]) < 1.15 and sum(x > 1 for x in late[25:]) <= 0.05 * len(late)
    assert 0.85 < median(used) < 1


@SEEDS
def test_on_a_flat_then_linear_law_errors_near_the_operating_point_are_small(seed):
    machine = Machine(gpu, 0.03, seed)
    for _ in range(80):
        machine.run(batch(machine.random.choice([0, 0, 640, 704, 768])))
    for prefill in (640, 700, 768):
        assert abs(machine.error(batch(prefill))) < 0.08
    assert machine.error(batch(450)) > 0.03  # between the flat part and here the chord is above the law: the safe side


def test_without_any_knowledge_it_finds_out_in_steps():
    model, shape = IterationTime(), BatchShape()
    assert model.predict(HYBRID) == 0
    assert model.prefill_that_fits(0.1, DECODES, 0, 9999) == 16
    assert model.prefill_that_fits(0.1, DECODES, 0, 9999, tile=64) == 64
    assert model.prefill_that_fits(0.1, DECODES, 0, 5, tile=64) == 5
    for _ in range(100):
        model.observe(DECODES, cpu(DECODES))
    assert model.prefill_that_fits(0.1, DECODES, 0, 9999) == 16  # decodes say nothing of prefill
    sizes = []
    for _ in range(10):
        sizes.append(model.prefill_that_fits(0.8, DECODES, 0, 9999))
        shape = batch(sizes[-1], past=0)
        assert cpu(shape) <= 0.8
        model.observe(shape, cpu(shape))
    assert all(later <= 1.5 * earlier for earlier, later in zip(sizes, sizes[1:])) and sizes[-1] > 300
    crowded = DECODES.with_chunk(0, 2 * max(sizes))  # the batch as a whole is what must not grow in a leap
    assert model.prefill_that_fits(9.0, crowded, 0, 100) == 0


@SEEDS
def test_prefill_that_fits_is_the_most_of_all_sizes(seed):
    machine = Machine(cpu, 0.05, seed)
    machine.run_mixed(50)
    machine.model.observe(batch(900), cpu(batch(900)))
    model, draw = machine.model, random.Random(seed)
    answers = set()
    for _ in range(200):
        slo, past, limit = draw.uniform(0.01, 0.8), draw.randrange(2000), draw.randrange(900)
        tile, shape = draw.choice([1, 7, 64]), batch(draw.choice([0, 0, 33]), draw.randrange(9), draw.randrange(2000))
        margin = 1 + min(0.3, 2.33 * model.spread)
        fitting = [
            size
            for size in range(1, limit + 1)
            if (size % tile == 0 or size == limit) and model.predict(shape.with_chunk(past, size)) * margin <= slo
        ]
        answer = model.prefill_that_fits(slo, shape, past, limit, tile)
        assert answer == max(fitting, default=0)
        assert answer == 0 or answer == model.prefill_that_fits(  # a time that just fits, fits
            model.predict(shape.with_chunk(past, answer)) * margin, shape, past, limit, tile
        )
        answers.add((answer == 0, answer == limit, answer % tile == 0))
    assert len(answers) >= 4  # nothing, all and whole tiles in between were all among them


@SEEDS
def test_prefill_that_fits_grows_with_the_slo_and_ends_at_the_limit(seed):
    machine = Machine(cpu, 0.05, seed)
    machine.run_mixed(40)
    for tile, limit in ((1, 300), (64, 300), (64, 40), (1, 0), (1, -3)):
        fits = [machine.model.prefill_that_fits(k * 5e-3, DECODES, 200, limit, tile) for k in range(200)]
        assert fits == sorted(fits) and fits[-1] == max(0, limit)
        least = min(tile, max(0, limit))
        assert bisect_left(fits, least) * 5e-3 >= cpu(DECODES) or limit <= 0
        assert fits[int(cpu(DECODES) / 5e-3)] == 0  # the decodes alone take as long


def test_the_margin_is_bounded():
    model = IterationTime()
    for i in range(400):
        model.observe(batch(64 + i % 64), cpu(batch(64 + i % 64)) * (0.4, 2.5)[i % 2])  # wild
    assert model.spread > 0.3
    slo = 1.301 * model.predict(batch(100))
    assert model.prefill_that_fits(slo, DECODES, 500, 200) == 100


def test_it_is_never_negative_and_never_nan():
    draw = random.Random(3)
    model = IterationTime()
    for i in range(3000):
        shape = BatchShape(*(draw.choice([0, 0, 1, 10, 10**4, 10**7]) for _ in range(4)))
        model.observe(shape, draw.choice([1e-9, 1e-3, 0.1, 1e4, 0.0, -1.0, math.inf, math.nan]))
        for other in (shape, BatchShape(), BatchShape(-5, -1, -100, -7), DECODES, HYBRID):
            assert 0 <= model.predict(other) < math.inf
        assert 0.01 <= model.spread < math.inf
    before = model.predict(HYBRID)
    for seconds in (0.0, -1.0, math.inf, math.nan):
        model.observe(HYBRID, seconds)
    assert model.predict(HYBRID) == before
    with pytest.raises(ValueError, match="profile: BatchShape.*took 0 seconds: must be positive"):
        IterationTime([(HYBRID, 0)])


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
