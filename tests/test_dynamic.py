"""The dynamic token budget, held against laws of the time of a batch that are written here."""

import random

import numpy as np
import pytest

from policies.iteration_time import BatchShape
from tests.by_hand import request_of
from tests.helpers import VirtualRun
from tests.test_iteration_time import cpu


def gpu(shape):
    """Seconds on a device that reads its weights in 10 ms: in these it could compute 400 tokens."""
    prefill, decodes, context, pairs = shape
    return max(10e-3, (prefill + decodes) * 25e-6) + 0.3e-6 * context + 1e-9 * pairs


LAWS = pytest.mark.parametrize("law, slo, count", [(cpu, 0.2, 50), (gpu, 25e-3, 150)])


def p99_of(times):
    """The smallest of the times that at least 99 % of them do not exceed."""
    return np.percentile(times, 99, method="inverted_cdf")


def run(law, count, slowdown=lambda now: 1.0, noise=0.03, **options):
    """So many requests that all are there from the start."""
    draw = random.Random(0)
    requests = []
    for i in range(count):
        prompt_len = draw.randrange(100, 1500)
        requests.append(request_of(i, prompt_len, draw.randrange(40, 120), arrival=0.0))
    simulation = VirtualRun(
        "dynamic",
        law,
        noise,
        seed=1,
        **options,
    )
    return simulation.run(requests, slowdown=slowdown)


@pytest.mark.slow
@LAWS
def test_it_is_as_fast_as_the_best_static_budget_that_meets_the_same_slo(law, slo, count):
    seconds = []
    too_large = 64  # in tiles: the static ones are searched by halves
    for step in (32, 16, 8, 4, 2, 1):
        static = run(law, count, chunk=(too_large - step) * 16)
        if p99_of(static.tbt()) <= slo:
            seconds.append(static.now)
        else:
            too_large -= step
    dynamic = run(law, count, tbt_slo=slo, tile=16)
    assert p99_of(dynamic.tbt()) <= slo
    assert dynamic.now <= min(seconds) / 0.95


def test_the_slo_is_kept_where_some_iterations_take_twice_as_long():
    chance = random.Random(0)
    simulation = run(
        cpu,
        50,
        lambda now: 1.0 + (chance.random() < 0.02),
        tbt_slo=0.2,
        tile=16,
    )
    assert max(simulation.tbt()) > 0.2
    assert p99_of(simulation.tbt()) <= 0.2


@LAWS
def test_a_machine_that_slows_down_is_followed(law, slo, count):
    change = run(law, count, tbt_slo=slo, tile=16).now / 2
    simulation = run(
        law,
        count,
        lambda now: 1.4 if now > change else 1.0,
        tbt_slo=slo,
        tile=16,
    )
    hybrid = [row for row in simulation.log if row[2].decodes and row[2].prefill_tokens]
    later = [row for row in hybrid if row[0] > change]
    assert max(seconds for _, seconds, _, _ in hybrid) < 1.6 * slo
    assert sum(seconds > slo for _, seconds, _, _ in later[:20]) <= 10
    decodes = BatchShape(0, 15, 15 * 900)
    fitting = [n for n in range(0, 2048, 16) if 1.4 * law(decodes.with_chunk(400, n)) <= slo]
    prefills = [shape.prefill_tokens for _, _, shape, _ in later[20:]]
    assert max(prefills) > 0.7 * max(fitting)  # it takes what it may


def scheduler_with(decodes, **options):
    """A scheduler in which so many requests decode, and one of 2,000 tokens waits."""
    simulation = VirtualRun("dynamic", cpu, **options)
    scheduler = simulation.scheduler
    for i in range(decodes):
        request = request_of(i, 500, 100)
        scheduler.add(request)
        scheduler.admit()
        request.num_computed = 500
        request.tokens.append(0)
        request.token_times.append(0.0)
    scheduler.add(request_of(decodes, 2000, 10))
    return scheduler


def profile(law=cpu, starts=(200,)):
    """Batches from which a model learns a law."""
    pairs = []
    for decodes in (1, 4, 8):
        for context in (200, 1000):
            shape = BatchShape(0, decodes, decodes * context)
            pairs.append((shape, law(shape)))
            for start in starts:
                for length in (64, 128, 256, 512):
                    hybrid = shape.with_chunk(start, length)
                    pairs.append((hybrid, law(hybrid)))
    return pairs


@pytest.mark.parametrize(
    "decodes, options, prefill, budget",
    [
        (0, dict(tbt_slo=1e-6), 2000, 2048),  # nobody to stall: no chunks
        (6, dict(tbt_slo=0.2, profile=()), 16, 22),  # a cold start is cautious
        (6, dict(tbt_slo=0.2, profile=(), tile=64), 58, 64),  # and tries one tile
        (8, dict(tbt_slo=0.01), 0, 8),  # decodes take all of the SLO
        (6, {}, 250, 256),  # without an SLO it is `chunk`
    ],
)
def test_the_first_batch(decodes, options, prefill, budget):
    scheduler = scheduler_with(decodes, **dict(profile=profile()) | options)
    batch = scheduler.next_batch()
    assert sum(chunk.length for chunk in batch) == decodes + prefill
    assert batch.budget == budget


@pytest.mark.parametrize("tile", [1, 64])
@pytest.mark.parametrize("slo", [0.05, 0.2, 0.4])
def test_a_profile_is_used_from_the_first_iteration(slo, tile):
    scheduler = scheduler_with(6, tbt_slo=slo, tile=tile, profile=profile())
    shape = BatchShape(0, 6, 501 * 6)
    margin = 1 + 3 * 0.1  # wide, as no errors were seen yet
    sizes = [0, *range(tile - 6 % tile, 769, tile)]  # whole tiles, with the decodes
    fitting = [size for size in sizes if margin * cpu(shape.with_chunk(0, size)) <= slo]
    total = sum(chunk.length for chunk in scheduler.next_batch())
    assert total == pytest.approx(6 + max(fitting), abs=1)


def test_what_has_passed_since_the_last_token_is_no_more_to_be_had():
    budgets = []
    for slo, passed in ((0.2, 0.0), (0.2, 0.0625), (0.1375, 0.0)):
        scheduler = scheduler_with(6, tbt_slo=slo, profile=profile())
        scheduler.clock = lambda passed=passed: passed  # others used the machine meanwhile
        budgets.append(scheduler.next_batch().budget)
    full, late, short = budgets
    assert late == short < full - 20


def test_it_learns_without_an_slo_too():
    model = run(cpu, 8, noise=0.0, chunk=64).scheduler.iteration_time
    shape = BatchShape(0, 4, 3000).with_chunk(300, 60)
    assert model.predict(shape) == pytest.approx(cpu(shape), rel=0.05)


def deep(shape):
    """Seconds, where a prefill far behind its prompt's beginning takes long."""
    seconds = 0.02 + 1e-4 * (shape.prefill_tokens + shape.decodes) + 1e-7 * shape.context_tokens
    return seconds + 2e-8 * shape.prefill_pairs


LONG = range(1000, 17_000)


def deep_run(policy, tbt_slo, max_batch, shares=True):
    """A run in whose cache the tokens of LONG can be found, and in which two requests decode."""
    simulation = VirtualRun(
        policy,
        deep,
        pages=2200,
        shares=shares,
        chunk=512,
        max_batch=max_batch,
        max_len=20_000,
        profile=profile(deep, starts=(0, 4000, 16_000)),
        tile=32,
        tbt_slo=tbt_slo,
    )
    simulation.run([request_of(0, LONG, 1)])
    come(simulation, [0] * 10, 4000)
    come(simulation, [1] * 10, 4000)
    for _ in range(5):
        simulation.step()
    return simulation


def come(simulation, prompt, output_len):
    """A request that arrives now."""
    number = len(simulation.token_times)
    request = request_of(number, prompt, output_len, simulation.now)
    simulation.add(request)
    return request


@pytest.mark.parametrize("policy", ["dynamic", "priority"])
def test_a_request_that_cannot_be_admitted_slows_no_other(policy):
    """At this SLO a chunk fits beside the decodes, but none behind so many tokens."""
    steps = []
    for shares in (False, True):
        simulation = deep_run(policy, 0.034, 3, shares)
        prefill = come(simulation, [77] * 6000, 5)
        simulation.step()
        come(simulation, [*LONG, 5, 5], 1)  # there is no place for it
        first = len(simulation.log)
        while not prefill.token_times and len(simulation.log) < first + 500:
            simulation.step()
        steps.append(len(simulation.log) - first)
    assert steps[0] == steps[1] < 200


@pytest.mark.parametrize("policy", ["dynamic", "priority"])
def test_a_second_request_with_a_deep_context_waits_for_its_own_budget(policy):
    simulation = deep_run(policy, 0.06, 6)
    come(simulation, [55] * 8, 5)
    second = come(simulation, [*LONG, *[5] * 2000], 1)
    for _ in range(20):
        simulation.step()
    assert max(seconds for _, seconds, _, _ in simulation.log[-20:]) <= 0.06
    assert second.cached_tokens == 16_000 < second.num_computed
