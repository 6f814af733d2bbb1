"""The dynamic token budget keeps a TBT SLO and wastes nothing of it: whole runs on a virtual clock, no model."""

import random

import pytest

from conftest import VirtualRun, percentile
from iteration_time import BatchShape
from kv_cache import Pages
from scheduler import Request, make_scheduler
from test_iteration_time import cpu, gpu

SLO = 0.2
SEEDS = pytest.mark.parametrize("seed", range(2))


COUNT = {cpu: 50, gpu: 150}  # requests: a gpu prefills most of a prompt in an iteration
LAWS = pytest.mark.parametrize("law, slo", [(cpu, SLO), (gpu, 25e-3)], ids=["cpu", "gpu"])


def work(seed, count=50, prompts=(100, 1500), outputs=(40, 120), arrival=0.0):
    draw = random.Random(seed)
    prompt_lens = [draw.randrange(*prompts) for _ in range(count)]
    return [Request(i, [0] * n, n, draw.randrange(*outputs), arrival=arrival) for i, n in enumerate(prompt_lens)]


def serve(seed, law=cpu, **options):
    """(tokens per second, P99 TBT, VirtualRun) of requests that all are there from the start."""
    requests = work(seed, COUNT[law])
    simulation = VirtualRun("sarathi-serve", law, 0.03, seed, **options).run(requests)
    total = sum(request.prompt_len + request.max_new_tokens for request in requests)
    return total / simulation.now, percentile(simulation.tbt(), 99), simulation


def best_static(seed, law, slo, tile=16):
    """The throughput of the largest static budget that meets the SLO, found by halves."""
    low, high, best = 0, 1024 // tile, 0.0
    while high - low > 1:
        middle = (low + high) // 2
        throughput, p99, _ = serve(seed, law, chunk=middle * tile)
        low, high, best = (middle, high, max(best, throughput)) if p99 <= slo else (low, middle, best)
    assert low  # or there was nothing to compare with
    return best


@LAWS
def test_it_is_as_fast_as_the_best_static_budget_that_meets_the_same_slo(law, slo, seed=0):
    throughput, p99, _ = serve(seed, law, tbt_slo=slo, tile=16)
    assert p99 <= slo
    assert throughput >= 0.95 * best_static(seed, law, slo)


@SEEDS
@LAWS
def test_the_slo_is_kept_when_contexts_double_in_mid_run(law, slo, seed):
    first, second = work(seed, COUNT[law], (100, 700)), work(seed + 9, COUNT[law], (700, 1400))
    simulation = VirtualRun("sarathi-serve", law, 0.03, seed, tbt_slo=slo, tile=16)
    for request in second:
        request.id += len(first)
    simulation.run(first + second)
    for requests in (first, second):
        assert percentile(simulation.tbt(requests), 99) <= slo
    halves = [
        [shape.context_tokens / shape.decodes for *_, shape, _ in part if shape.decodes]
        for part in (simulation.log[: len(simulation.log) // 3], simulation.log[-len(simulation.log) // 3 :])
    ]
    assert sum(halves[1]) / len(halves[1]) > 1.8 * sum(halves[0]) / len(halves[0])  # they did double


@SEEDS
@LAWS
@pytest.mark.parametrize("slowdown", [1.4, 0.6])
def test_a_machine_that_changes_speed_is_followed(law, slo, slowdown, seed):
    _, _, before = serve(seed, law, tbt_slo=slo, tile=16)
    change, requests = before.now / 2, work(seed, COUNT[law])
    simulation = VirtualRun("sarathi-serve", law, 0.03, seed, tbt_slo=slo, tile=16)
    simulation.run(requests, slowdown=lambda now: slowdown if now > change else 1.0)
    hybrid = [
        (at, seconds, shape) for at, seconds, shape, _ in simulation.log if shape.decodes and shape.prefill_tokens
    ]
    first = next(i for i, (at, *_) in enumerate(hybrid) if at > change)
    learning, after = hybrid[first : first + 20], hybrid[first + 20 :]
    settled = [row for row in simulation.log if not learning[0][0] <= row[0] <= learning[-1][0]]
    assert percentile([seconds for _, seconds, shape, _ in settled for _ in range(shape.decodes)], 99) <= slo
    assert sum(seconds > slo for _, seconds, _ in learning) <= 10
    assert len(after) > 40
    assert max(seconds for _, seconds, _ in hybrid) < 1.6 * slo
    most = max(p for p in range(0, 2048, 16) if law(BatchShape(0, 15, 15 * 900).with_chunk(400, p)) * slowdown <= slo)
    assert max(shape.prefill_tokens for *_, shape in after) > 0.7 * most  # and what it may take is taken


@SEEDS
def test_a_long_stretch_of_decodes_does_not_close_the_budget(seed):
    simulation = VirtualRun("sarathi-serve", cpu, 0.03, seed, tbt_slo=SLO, tile=16)
    first = work(seed, 6, outputs=(600, 700))
    later = Request(99, [0] * 1500, 1500, 20, arrival=12.0)
    simulation.run([*first, later])
    decode_only = [at for at, _, shape, _ in simulation.log if not shape.prefill_tokens and at < 12.0]
    hybrid = [(seconds, shape) for at, seconds, shape, _ in simulation.log if shape.prefill_tokens and at >= 12.0]
    assert len(decode_only) > 250 and all(shape.decodes for _, shape in hybrid)
    assert hybrid[0][1].prefill_tokens >= 100  # of the 160 that fit
    assert max(seconds for seconds, _ in hybrid) <= 1.05 * SLO


def scheduler_with(decodes, policy="sarathi-serve", context=500, **options):
    """A scheduler in which so many requests decode, and one of 2,000 tokens waits."""
    scheduler = make_scheduler(policy, Pages(4096, 16), **(dict(chunk=256, max_batch=16, max_len=2048) | options))
    for i in range(decodes):
        scheduler.add(Request(i, [0] * context, context, 100))
        request = scheduler.admit()
        request.num_computed = context
        request.tokens.append(0)
        request.pages += scheduler.pages.allocate(1)
    scheduler.add(Request(decodes, [0] * 2000, 2000, 10))
    return scheduler


PROFILE = [
    (shape, cpu(shape))
    for prefill in (0, 64, 128, 256, 512)
    for decodes in (1, 4, 8)
    for context in (200, 1000)
    for shape in [BatchShape(0, decodes, decodes * context).with_chunk(200, prefill)]
]


def test_without_a_decode_there_is_no_reason_to_chunk():
    scheduler = scheduler_with(0, tbt_slo=1e-6, profile=PROFILE)
    assert [chunk.length for chunk in scheduler.schedule()] == [2000] and scheduler.budget == 2048


def test_a_cold_start_is_cautious():
    for tile, first in ((1, 16), (64, 64)):
        scheduler = scheduler_with(6, tbt_slo=SLO, tile=tile)
        assert [chunk.length for chunk in scheduler.schedule()] == [1] * 6 + [first]
        assert scheduler.budget == 6 + first


@pytest.mark.parametrize("tile", [1, 64])
@pytest.mark.parametrize("decodes", [1, 6])
@pytest.mark.parametrize("slo", [0.05, 0.2, 0.4])
def test_a_profile_is_used_from_the_first_iteration(slo, decodes, tile):
    scheduler = scheduler_with(decodes, tbt_slo=slo, tile=tile, profile=PROFILE)
    shape = BatchShape(0, decodes, 501 * decodes)
    margin = 1 + 2.33 * 0.1  # for the 99th percentile of the errors, of which none was seen yet
    fits = max(p for p in range(0, 769, tile) if margin * cpu(shape.with_chunk(0, p)) <= slo)
    batch = scheduler.schedule()
    assert sum(chunk.length for chunk in batch) == pytest.approx(decodes + fits, abs=max(1, tile if fits % tile else 0))
    assert scheduler.budget == sum(chunk.length for chunk in batch) or not fits


def test_decodes_that_take_all_of_the_slo_leave_nothing_and_are_all_run():
    scheduler = scheduler_with(8, tbt_slo=0.01, profile=PROFILE)
    assert [chunk.length for chunk in scheduler.schedule()] == [1] * 8
    assert scheduler.budget == 8 and len(scheduler.waiting) == 1


def test_the_budget_is_for_the_deepest_prefill():
    # whichever of those that have begun gets the budget, its keys were counted
    deep = [(shape, cpu(shape)) for past in (0, 1000, 3000) for shape in [BatchShape(0, 4, 2000).with_chunk(past, 200)]]
    for pasts in ((100, 3000), (3000, 100)):
        scheduler = scheduler_with(4, "priority", tbt_slo=SLO, profile=PROFILE + deep, max_len=4096, clock=lambda: 0.0)
        scheduler.waiting.clear()
        for i, past in enumerate(pasts):
            scheduler.add(Request(10 + i, [0] * 4000, 4000, 10))
            scheduler.admit().num_computed = past
        scheduler.running[4 + pasts.index(3000)].priority = 0
        batch = scheduler.schedule()
        assert batch[-1].start == 3000 and cpu(BatchShape.of(batch)) <= SLO


def test_a_clock_that_stands_still_teaches_nothing_and_stops_nothing():
    simulation = VirtualRun("sarathi-serve", lambda shape: 0.0, tbt_slo=SLO)
    simulation.run(work(0, 8))
    assert all(len(times) >= 40 for times in simulation.token_times.values())
    assert simulation.scheduler.iteration_time.predict(BatchShape(9, 9, 9, 9)) == 0
