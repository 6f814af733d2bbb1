"""The dynamic token budget keeps a TBT SLO and wastes nothing of it: runs on a virtual clock."""

import itertools
import random

import numpy as np
import pytest

from kv_cache import Pages
from policies import make_scheduler
from policies.iteration_time import BatchShape
from request import Service
from scheduler import Request
from tests.helpers import VirtualRun, with_slow
from tests.test_iteration_time import cpu

SLO = 0.2
SEEDS = pytest.mark.parametrize("seed", range(2))


def gpu(shape):
    """Seconds on a device that reads its weights in 10 ms: in these it could compute 400 tokens."""
    p, n, context, pairs = shape
    return max(10e-3, (p + n) * 25e-6) + 0.3e-6 * context + 1e-9 * pairs


LAWS = pytest.mark.parametrize("law, slo", [(cpu, SLO), (gpu, 25e-3)], ids=["cpu", "gpu"])


def p99_of(times):
    """The smallest of the times that at least 99 % of them do not exceed."""
    return np.percentile(times, 99, method="inverted_cdf")


def under_slo(seed, law, slo):
    return VirtualRun("dynamic", law, 0.03, seed, tbt_slo=slo, tile=16)


COUNT = {cpu: 50, gpu: 150}  # requests: a gpu prefills most of a prompt in an iteration


def work(seed, count=50, prompts=(100, 1500), outputs=(40, 120)):
    draw = random.Random(seed)
    prompt_lens = [draw.randrange(*prompts) for _ in range(count)]
    return [Request(i, [0] * n, n, draw.randrange(*outputs)) for i, n in enumerate(prompt_lens)]


def serve(seed, law=cpu, noise=0.03, **options):
    """(tokens per second, P99 TBT, VirtualRun) of requests that all are there from the start."""
    requests = work(seed, COUNT[law])
    simulation = VirtualRun("dynamic", law, noise, seed, **options).run(requests)
    total = sum(request.prompt_len + request.max_new_tokens for request in requests)
    return total / simulation.now, p99_of(simulation.tbt()), simulation


@pytest.mark.slow
@LAWS
@pytest.mark.parametrize("noise", [0.03, 0.1])
def test_it_is_as_fast_as_the_best_static_budget_that_meets_the_same_slo(law, slo, noise):
    best = 0.0
    too_large = 64  # in tiles: the static ones are searched by halves
    for step in (32, 16, 8, 4, 2, 1):
        throughput, p99, _ = serve(0, law, noise, chunk=(too_large - step) * 16)
        if p99 <= slo:
            best = max(best, throughput)
        else:
            too_large -= step
    throughput, p99, _ = serve(0, law, noise, tbt_slo=slo, tile=16)
    assert best and p99 <= slo and throughput >= 0.95 * best


@SEEDS
def test_the_slo_is_kept_where_some_iterations_take_twice_as_long(seed):
    chance = random.Random(seed)
    simulation = under_slo(seed, cpu, SLO)
    simulation.run(work(seed), slowdown=lambda now: 2.0 if chance.random() < 0.02 else 1.0)
    late = [seconds > SLO for _, seconds, *_ in simulation.log]
    assert sum(late) > 1 and p99_of(simulation.tbt()) <= SLO


@pytest.mark.slow
@SEEDS
@LAWS
def test_the_slo_is_kept_when_contexts_double_in_mid_run(law, slo, seed):
    first = work(seed, COUNT[law], (100, 700))
    second = work(seed + 9, COUNT[law], (700, 1400))
    for request in second:
        request.id += len(first)
    simulation = under_slo(seed, law, slo).run(first + second)
    for requests in (first, second):
        assert p99_of(simulation.tbt(requests)) <= slo


@SEEDS
@LAWS
@pytest.mark.parametrize("slowdown", with_slow([1.4, 0.6], fast=[1.4]))
def test_a_machine_that_changes_speed_is_followed(law, slo, slowdown, seed):
    _, _, before = serve(seed, law, tbt_slo=slo, tile=16)
    change = before.now / 2
    simulation = under_slo(seed, law, slo)
    simulation.run(work(seed, COUNT[law]), slowdown=lambda now: slowdown if now > change else 1.0)
    hybrid = [row for row in simulation.log if row[2].decodes and row[2].prefill_tokens]
    learning = [row for row in hybrid if row[0] > change][:20]
    settled = [row for row in simulation.log if not learning[0][0] <= row[0] <= learning[-1][0]]
    tbt = [seconds for _, seconds, shape, _ in settled for _ in range(shape.decodes)]
    assert p99_of(tbt) <= slo and max(seconds for _, seconds, *_ in hybrid) < 1.6 * slo
    assert sum(seconds > slo for _, seconds, *_ in learning) <= 10
    decodes = BatchShape(0, 15, 15 * 900)
    fitting = [n for n in range(0, 2048, 16) if law(decodes.with_chunk(400, n)) * slowdown <= slo]
    after = [shape.prefill_tokens for at, _, shape, _ in hybrid if at > learning[-1][0]]
    assert len(after) > 40 and max(after) > 0.7 * max(fitting)  # it takes what it may


def scheduler_with(decodes, context=500, **options):
    """A scheduler in which so many requests decode, and one of 2,000 tokens waits."""
    options = dict(chunk=256, max_batch=16, max_len=2048, clock=lambda: 0.0) | options
    scheduler = make_scheduler("dynamic", Pages(4096, 16), **options)
    for i in range(decodes):
        scheduler.add(Request(i, [0] * context, context, 100))
        request = scheduler.admit()
        request.num_computed = context
        request.tokens.append(0)
        request.token_times.append(scheduler.clock())
        request.pages += scheduler.pages.allocate(1)
    scheduler.add(Request(decodes, [0] * 2000, 2000, 10))
    return scheduler


PROFILE = [
    (shape, cpu(shape))
    for decodes, context in itertools.product((1, 4, 8), (200, 1000))
    for prefill in (0, 64, 128, 256, 512)
    for shape in [BatchShape(0, decodes, decodes * context).with_chunk(200, prefill)]
]
COLD = dict(tbt_slo=SLO)  # no profile
FIRST = [
    (0, dict(tbt_slo=1e-6, profile=PROFILE), [2000], 2048),  # nobody to stall: no chunks
    (6, COLD, [1] * 6 + [16], 22),  # a cold start is cautious
    (6, COLD | dict(tile=64), [1] * 6 + [58], 64),  # and tries one tile
    (8, dict(tbt_slo=0.01, profile=PROFILE), [1] * 8, 8),  # decodes take all of the SLO
    (6, dict(profile=PROFILE), [1] * 6 + [250], 256),  # without an SLO it is `chunk`
]


@pytest.mark.parametrize("decodes, options, lengths, budget", FIRST)
def test_the_first_batch(decodes, options, lengths, budget):
    scheduler = scheduler_with(decodes, **options)
    batch = scheduler.next_batch()
    assert [chunk.length for chunk in batch] == lengths and batch.budget == budget
    assert len(scheduler.waiting) == (len(lengths) == decodes)


@pytest.mark.parametrize("tile", [1, 64])
@pytest.mark.parametrize("decodes", [1, 6])
@pytest.mark.parametrize("slo", [0.05, 0.2, 0.4])
def test_a_profile_is_used_from_the_first_iteration(slo, decodes, tile):
    scheduler = scheduler_with(decodes, tbt_slo=slo, tile=tile, profile=PROFILE)
    shape = BatchShape(0, decodes, 501 * decodes)
    margin = 1 + 3 * 0.1  # wide, as no errors were seen yet
    sizes = [0, *range(tile - decodes % tile, 769, tile)]  # whole tiles, with the decodes
    fits = max(p for p in sizes if margin * cpu(shape.with_chunk(0, p)) <= slo)
    batch = scheduler.next_batch()
    total = sum(chunk.length for chunk in batch)
    assert total == pytest.approx(decodes + fits, abs=1)
    assert batch.budget == total or not fits


def test_what_has_passed_since_the_last_token_is_no_more_to_be_had():
    now = [0.0]
    late, full, short = (
        scheduler_with(6, tbt_slo=slo, profile=PROFILE, clock=lambda: now[0])
        for slo in (SLO, SLO, SLO - 0.0625)
    )
    full = full.next_batch().budget
    short = short.next_batch().budget
    now[0] = 0.0625  # others used the machine between two iterations
    assert late.next_batch().budget == short < full - 20


def test_it_learns_without_an_slo_too():
    simulation = VirtualRun("dynamic", cpu, chunk=64).run(work(0, 8))
    for shape in (BatchShape(0, 6, 4000), BatchShape(0, 4, 3000).with_chunk(300, 60)):
        predicted = simulation.scheduler.iteration_time.predict(shape)
        assert predicted == pytest.approx(cpu(shape), rel=0.05)


def deep(shape):
    """Seconds, where a prefill far behind its prompt's beginning takes long."""
    seconds = 0.02 + 1e-4 * (shape.prefill_tokens + shape.decodes) + 1e-7 * shape.context_tokens
    return seconds + 2e-8 * shape.prefill_pairs


class Deep(VirtualRun):
    """In whose cache the 16,000 tokens of LONG can be found, and in which two requests decode."""

    LONG = list(range(1000, 17_000))

    def __init__(self, policy, tbt_slo, max_batch, shares=True):
        shapes = [BatchShape(0, d, 500 * d) for d in (1, 4, 8)]
        chunks = [(0, 64), (0, 1024), (4000, 512), (8000, 128), (16_000, 512)]
        shapes += [shape.with_chunk(*chunk) for shape in shapes for chunk in chunks]
        options = dict(profile=[(shape, deep(shape)) for shape in shapes], tile=32, tbt_slo=tbt_slo)
        sizes = dict(chunk=512, max_batch=max_batch, max_len=20_000)
        super().__init__(policy, deep, pages=2200, shares=shares, **sizes, **options)
        self.come(self.LONG, 1)
        while self.step():
            pass
        for token in range(2):
            self.come([token] * 10, 4000)
        for _ in range(5):
            self.step()

    def come(self, prompt, output_len):
        """A request that arrives now."""
        request = Request(len(self.token_times), list(prompt), len(prompt), output_len, self.now)
        self.add(request)
        return request


@pytest.mark.parametrize("policy", ["dynamic", "priority"])
def test_a_request_that_cannot_be_admitted_slows_no_other(policy):
    """At this SLO a chunk fits beside the decodes, but none behind so many tokens."""
    until_first_token = []
    for shares in (False, True):
        run = Deep(policy, 0.034, 3, shares)
        prefills = run.come([77] * 6000, 5)
        run.step()
        run.come([*run.LONG, 5, 5], 1)  # there is no place for it
        count = 0
        while not prefills.token_times and count < 500:
            run.step()
            count += 1
        until_first_token.append(count)
    assert until_first_token[0] == until_first_token[1] < 200


@pytest.mark.parametrize("policy", ["dynamic", "priority"])
def test_a_second_request_with_a_deep_context_waits_for_its_own_budget(policy):
    run = Deep(policy, 0.06, 6)
    run.come([55] * 8, 5)
    second = run.come([*run.LONG, *[5] * 2000], 1)
    for _ in range(20):
        run.step()
    assert max(seconds for _, seconds, *_ in run.log[-20:]) <= 0.06
    assert second.cached_tokens == 16_000 < second.num_computed


def test_no_request_waits_for_a_budget_without_a_decode_target():
    run = Deep("priority", None, 6)
    run.come([55] * 8, 3).service = Service(tbt_slo=0.5)
    for _ in range(5):
        run.step()
    late = run.come([*run.LONG, 5, 5], 1)
    run.step()
    assert late.finish_reason and late.cached_tokens == 16_000
