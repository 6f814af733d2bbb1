"""Policies on a clock that only counts: nothing is lost or early, and the real engine makes the same schedule.

All times here are sums of binary fractions, unless a CostModel makes them: no sum is rounded, and == may be asked.
"""

import random
from collections import Counter, defaultdict
from dataclasses import replace

import pytest

import serving
import simulator
from conftest import tiny_model
from cost_model import DEVICES, GEOMETRIES, CostModel
from engine import Engine
from scheduler import POLICIES, make_scheduler
from serving import Settings, serve
from simulator import bubble_kinds, simulate
from workload import Arrival, prompts

MODEL = tiny_model()
SETTINGS = Settings(chunk=8, max_batch=4, max_len=32, page_size=4)
# tokens of memory for each micro-batch: for max_batch requests of max_len, and for hardly more than one
AMPLE, LITTLE = 4 * 32, 40
GROWING = ["vllm", "sarathi-serve", "chunked-only", "hybrid-only", "priority"]  # they take memory page by page
SHAPES = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2)]  # stages of a pipeline, and replicas


class Law:
    """The cost of a batch: `seconds` of it on every stage, and on odd stages half as much again if `uneven`."""

    cpu_s, tile = 0.0, 1

    def __init__(self, pp=1, hop=0.0, seconds=None, uneven=False):
        self.pp, self.hop, self.seconds, self.uneven = pp, hop, seconds or by_tokens, uneven

    def stages(self, batch):
        seconds = self.seconds(batch)
        return [seconds * (1.5 if self.uneven and stage % 2 else 1) for stage in range(self.pp)], self.hop


def by_tokens(batch):
    """Flat for a few tokens, then as many as there are, and some time for each (query, key) pair."""
    tokens = sum(length for _, _, length in batch)
    return max(8, tokens) / 64 + sum(length * (start + 1) for _, start, length in batch) / 1024


def random_arrivals(seed, count=16, mean_gap=0.25):
    """Requests of 2 to 32 tokens, which arrive at random at multiples of 1 / 1024 s, or some of them all at once."""
    rng, time, arrivals = random.Random(seed), 0, []
    for _ in range(count):
        time += rng.choice([0, 1]) * round(1024 * rng.expovariate(1 / mean_gap)) if mean_gap else 0
        arrivals.append(Arrival(time / 1024, rng.randint(1, 20), rng.randint(1, 12)))
    return arrivals


def at_once(*lengths, time=0.0):
    return [Arrival(time, *pair) for pair in lengths]


def replay(result, arrivals, law):
    """Follow the chunks of a run, and check at the end that the tokens came when their batches left the last stage.

    Yields for each batch its Iteration, its StageRuns, the ids of all that run in its micro-batch before it, those of
    them that decode, the batch as (id, start, length), and what runs in all micro-batches: (replica, number) -> ids.
    """
    computed, times, running = Counter(), [[] for _ in arrivals], defaultdict(set)
    assert len(result.stage_runs) == law.pp * len(result.run.iterations)
    for n, iteration in enumerate(result.run.iterations):
        runs = result.stage_runs[n * law.pp : (n + 1) * law.pp]
        mine = running[runs[0].replica, runs[0].micro_batch]
        for i in iteration.preempted:
            mine.remove(i)
            computed[i] = 0
        decoding = {i for i in mine if times[i] and computed[i] + 1 == arrivals[i].prompt_len + len(times[i])}
        batch = [(i, computed[i], length) for i, length, _ in iteration.chunks]
        yield iteration, runs, set(mine), decoding, batch, running
        for i, length, is_decode in iteration.chunks:
            assert is_decode == (i in decoding)
            mine.add(i)
            computed[i] += length
            if computed[i] == arrivals[i].prompt_len + len(times[i]):
                times[i].append(runs[-1].end)
                if len(times[i]) == arrivals[i].output_len:
                    mine.remove(i)
    assert [completion.token_times for completion in result.run.completions] == times


# -----------------------------------------------------------------------------------------------------
# nothing is lost


@pytest.mark.parametrize("pp, replicas", SHAPES)
@pytest.mark.parametrize("memory", [AMPLE, LITTLE])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_token_is_computed_once_and_all_memory_comes_back(policy, memory, pp, replicas, monkeypatch):
    schedulers = []

    def make(*args, **options):
        scheduler = make_scheduler(*args, **options)
        schedule, pages = scheduler.schedule, scheduler.pages

        def checked():
            batch = schedule()
            pages.check_integrity([request.pages for request in scheduler.running])  # also: no more than its share
            assert 0 < len(batch) <= len(scheduler.running) <= SETTINGS.max_batch
            for request, start, length in batch:
                assert start == request.num_computed and start + length <= len(request.pages) * pages.page_size
            return batch

        scheduler.schedule = checked
        schedulers.append(scheduler)
        return scheduler

    monkeypatch.setattr(simulator, "make_scheduler", make)
    preemptions = 0
    for seed, mean_gap in ((0, 0.25), (1, 0.0), (2, 2.0)):
        arrivals, finished = random_arrivals(seed, 24 * pp, mean_gap), []
        settings = replace(SETTINGS, kv_tokens=pp * memory)
        law, progress = Law(pp, 1 / 64, uneven=True), lambda: finished.append(1)
        result = simulate(law, (policy, {}), arrivals, settings, replicas=replicas, progress=progress)
        run, computed = result.run, Counter()
        for iteration in run.iterations:
            for i, length, _ in iteration.chunks:
                computed[i] += length
        for i, (arrival, done) in enumerate(zip(arrivals, run.completions)):
            assert done.request_id == i and done.finish_reason == "length" and done.arrival == arrival.time
            assert len(done.tokens) == len(done.token_times) == arrival.output_len and len(done.prompt) == arrival[1]
            assert computed[i] == arrival.prompt_len + arrival.output_len - 1 + done.recomputed_tokens
            assert bool(done.preemptions) == bool(done.recomputed_tokens)
            assert arrival.time <= done.scheduled < done.token_times[0]
            assert all(gap > 0 for gap in done.tbt)
        preempted = Counter(i for iteration in run.iterations for i in iteration.preempted)
        assert [preempted[i] for i in range(len(arrivals))] == [done.preemptions for done in run.completions]
        preemptions += preempted.total()
        assert result.tokens == sum(computed.values()) and result.batches == len(run.iterations)
        assert run.seconds == max(done.token_times[-1] for done in run.completions)
        assert len(finished) == len(arrivals) and not run.refused and run.cut_short is None
        assert len(schedulers) == pp * replicas
        assert not schedulers[0].waiting and all(other.waiting is schedulers[0].waiting for other in schedulers)
        for scheduler in schedulers:
            assert scheduler.pages.total == settings.pages // pp == scheduler.pages.num_free and not scheduler.running
            scheduler.pages.check_integrity([])
        schedulers.clear()
    assert bool(preemptions) == (policy in GROWING and memory == LITTLE)  # or this test would not test it


# -----------------------------------------------------------------------------------------------------
# nothing is early


def simulated(policy, pp, replicas, seed, memory=LITTLE, mean_gap=0.25, **changes):
    """A law, 16 requests for each micro-batch of a pipeline, and how they are served, with all that was seen of it."""
    law, arrivals = Law(pp, 1 / 64, uneven=True), random_arrivals(seed, 16 * pp, mean_gap)
    settings = replace(SETTINGS, kv_tokens=pp * memory, **changes)
    return law, arrivals, simulate(law, (policy, {}), arrivals, settings, replicas=replicas, timeline=True)


@pytest.mark.parametrize("pp, replicas", SHAPES)
@pytest.mark.parametrize("policy", POLICIES)
def test_no_batch_starts_before_its_stage_its_requests_and_its_micro_batch_are_ready(policy, pp, replicas):
    for seed in range(4):
        law, arrivals, result = simulated(policy, pp, replicas, seed, mean_gap=(0.0, 0.1, 0.25, 1.0)[seed])
        free, left, busy = Counter(), Counter(), Counter()
        for iteration, runs, _, _, batch, _ in replay(result, arrivals, law):
            [micro_batch] = {(run.replica, run.micro_batch) for run in runs}
            seconds, hop = law.stages(batch)
            ready = runs[0].start
            assert ready >= max(left[micro_batch], free[micro_batch[0], 0], *(arrivals[i].time for i, _, _ in batch))
            assert [run.stage for run in runs] == list(range(pp))
            for run in runs:
                stage = run.replica, run.stage
                assert run.start == max(ready, free[stage]) and run.end == run.start + seconds[run.stage]
                assert run.chunks == iteration.chunks and 0 <= run.bubble <= run.start - free[stage]
                ready, free[stage] = run.end + hop, run.end
                busy[stage] += seconds[run.stage]
            left[micro_batch] = runs[-1].end
            assert (iteration.start, iteration.end) == (runs[0].start, runs[-1].end)
        assert result.busy == busy and max(busy.values()) <= result.run.seconds == max(left.values())
        assert result.utilisation == pytest.approx(sum(busy.values()) / pp / replicas / result.run.seconds)


def gaps(policy, pp, replicas, seed, mean_gap):
    """Every time that a stage was idle between two batches: (the StageRun that ended it, from when, who had work).

    That is "all" if all micro-batches of its pipeline had requests all the time, "not all" if one had none all the
    time, and None for what lies between. Of stages after the first only "all" is told.
    """
    law, arrivals, result = simulated(policy, pp, replicas, seed, mean_gap=mean_gap)
    free, left, found, charged = {}, Counter(), [], Counter()
    for iteration, runs, mine, _, _, running in replay(result, arrivals, law):
        replica, number = runs[0].replica, runs[0].micro_batch
        others = [(replica, other) for other in range(replica * pp, (replica + 1) * pp) if other != number]
        all_had = mine and all(running[other] for other in others)
        for run in runs:
            charged.update({i: run.bubble for i, _, _ in iteration.chunks})
            since = free.get((replica, run.stage))
            if since is None:
                assert not run.bubble  # before its first batch a stage waits for nothing
            elif run.start > since:
                one_had_none = [m for m in others if not running[m] and left[m] <= since]
                if not mine and left[replica, number] <= since:
                    one_had_none.append(number)
                found.append((run, since, "all" if all_had else "not all" if one_had_none and not run.stage else None))
            free[replica, run.stage] = run.end
        left[replica, number] = runs[-1].end
    assert result.bubbles == [charged[i] for i in range(len(arrivals))]
    return found


@pytest.mark.parametrize("pp, replicas", [(2, 1), (4, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_bubble_is_the_time_that_a_stage_was_idle_though_all_had_work(policy, pp, replicas):
    found = [gap for seed in range(3) for gap in gaps(policy, pp, replicas, seed, mean_gap=0.0)]
    bubbles = [(run.bubble, run.start - since) for run, since, work in found if work == "all"]
    assert len(bubbles) > 20 and all(bubble == idle for bubble, idle in bubbles)


@pytest.mark.parametrize("pp, replicas", SHAPES)
@pytest.mark.parametrize("policy", POLICIES)
def test_it_is_no_bubble_while_a_micro_batch_has_no_requests(policy, pp, replicas):
    found = [run for seed in range(3) for run, _, work in gaps(policy, pp, replicas, seed, 1.0) if work == "not all"]
    assert len(found) > 3 and not any(run.bubble for run in found)


# -----------------------------------------------------------------------------------------------------
# policies keep what they promise, in every micro-batch


@pytest.mark.parametrize("pp, replicas", SHAPES)
@pytest.mark.parametrize("policy", ["sarathi-serve", "vllm", "chunked-only", "request-level"])
def test_policies_keep_their_promises(policy, pp, replicas):
    seen = Counter()
    for seed in range(6):
        chunk = (8, 2)[seed // 3]
        law, arrivals, result = simulated(policy, pp, replicas, seed, (AMPLE, LITTLE)[seed % 2], chunk=chunk)
        for iteration, _, mine, decoding, batch, _ in replay(result, arrivals, law):
            decodes = {i for i, _, is_decode in iteration.chunks if is_decode}
            tokens = sum(length for _, _, length in batch)
            kinds = {is_decode for _, _, is_decode in iteration.chunks}
            if policy == "sarathi-serve":
                assert decodes == decoding  # none skips an iteration
                assert tokens <= max(chunk, len(decodes))
                seen.update(hybrid=len(kinds) == 2, full_of_decodes=len(decodes) == chunk)
            elif policy in ("vllm", "chunked-only"):
                assert len(kinds) == 1
                seen.update(stalled=bool(decoding) and not decodes)
            elif kinds == {False}:
                assert not mine  # it admits only when nothing runs
                seen.update(admitted=len(batch) > 1)
            else:
                assert kinds == {True} and decodes == decoding == mine
    assert seen and all(seen.values())  # or this test would test nothing


# -----------------------------------------------------------------------------------------------------
# two other clocks


def one_token_at_a_time(policy, arrivals, chunk, max_batch):
    """The token times of one stage with ample memory. Every token is put in its batch by itself."""
    now, running, computed, times = 0.0, [], Counter(), [[] for _ in arrivals]
    known = lambda i: arrivals[i].prompt_len + len(times[i])
    ended = lambda i: len(times[i]) == arrivals[i].output_len
    while not all(ended(i) for i in range(len(arrivals))):
        waiting = [i for i, a in enumerate(arrivals) if a.time <= now and i not in running and not ended(i)]
        if not running and not waiting:
            now = min(a.time for i, a in enumerate(arrivals) if not ended(i))
            continue
        decodes = [i for i in running if times[i]]
        begun = [i for i in running if not times[i]]
        admitted = waiting[: max_batch - len(running)]
        batch = Counter()
        if policy != "vllm" or not admitted:
            batch.update(decodes)
        for i in begun + admitted:
            while computed[i] + batch[i] < known(i) and (policy != "sarathi-serve" or batch.total() < chunk):
                batch[i] += 1
        chunks = [(i, computed[i], length) for i, length in batch.items() if length]
        now += by_tokens(chunks)
        for i, start, length in chunks:
            computed[i] = start + length
            if i not in running:
                running.append(i)
            if computed[i] == known(i):
                times[i].append(now)
                if ended(i):
                    running.remove(i)
    return times


@pytest.mark.parametrize("policy", ["vllm", "orca", "sarathi-serve"])
def test_token_times_are_those_of_a_loop_over_single_tokens(policy):
    for seed in range(40):
        rng = random.Random(seed)
        arrivals = random_arrivals(seed, rng.randint(1, 30), rng.choice([0.0, 0.1, 0.3, 1.0]))
        chunk, max_batch = rng.randint(1, 24), rng.randint(1, 6)
        settings = replace(SETTINGS, chunk=chunk, max_batch=max_batch, kv_tokens=max_batch * 32)
        run = simulate(Law(), (policy, {}), arrivals, settings).run
        expected = one_token_at_a_time(policy, arrivals, chunk, max_batch)
        assert [completion.token_times for completion in run.completions] == expected


class Time:
    """A clock that advances by what is slept, and by nothing else."""

    def __init__(self):
        self.time = 0.0

    def now(self):
        return self.time

    def sleep(self, seconds):
        self.time += seconds


@pytest.fixture
def clock(monkeypatch):
    """A Time on which each batch of an engine takes as long as in a simulation."""
    clock, compute = Time(), Engine._compute

    def takes_its_time(engine, batch, start):
        clock.time += by_tokens(batch)
        return compute(engine, batch, start)

    monkeypatch.setattr(Engine, "_compute", takes_its_time)
    return clock


@pytest.mark.parametrize(
    "spec, memory, max_waiting",
    [
        (("request-level", {}), AMPLE, None),
        (("orca", {}), AMPLE, 3),
        (("orca", {"prefills": 1}), LITTLE, None),
        (("vllm", {}), LITTLE, None),
        (("sarathi", {"tile": 4}), AMPLE, 2),
        (("sarathi-serve", {}), AMPLE, 2),
        (("sarathi-serve", {}), LITTLE, 6),
        (("sarathi-serve", {"tbt_slo": 0.25}), LITTLE, None),
        (("chunked-only", {}), LITTLE, 4),
        (("hybrid-only", {}), LITTLE, None),
        (("priority", {"ttft_slo": 1.0, "ageing": 2.0}), LITTLE, None),
    ],
)
def test_the_engine_makes_the_same_schedule(spec, memory, max_waiting, clock, monkeypatch):
    if spec[0] == "priority" or "tbt_slo" in spec[1]:
        monkeypatch.setattr(serving, "warm_up", lambda *args: None)  # these would learn from it
    preemptions = refused = 0
    for seed in range(3):
        arrivals = random_arrivals(seed, 16, 0.3)
        classes = random.Random(seed).choices(["realtime", "high", "normal", "low"], k=16)
        settings = replace(SETTINGS, kv_tokens=memory, max_waiting=max_waiting)
        tokens = prompts(arrivals, MODEL.config.vocab_size, seed)
        real = serve(MODEL, spec, arrivals, tokens, settings, classes=classes, now=clock.now, sleep=clock.sleep)
        run = simulate(Law(), spec, arrivals, settings, classes=classes).run
        assert [i._replace(launch=None) for i in run.iterations] == [i._replace(launch=None) for i in real.iterations]
        assert (run.seconds, run.refused, run.cut_short) == (real.seconds, real.refused, None)
        # what was computed is not known here, how much of it is
        known = [replace(done, prompt=len(done.prompt), tokens=len(done.tokens)) for done in run.completions]
        assert known == [replace(done, prompt=len(done.prompt), tokens=len(done.tokens)) for done in real.completions]
        preemptions += sum(c.preemptions for c in real.completions)
        refused += real.refused
    assert bool(preemptions) == (spec[0] in GROWING and memory == LITTLE) and bool(refused) == (max_waiting is not None)


# -----------------------------------------------------------------------------------------------------
# pipelines, by hand

ALONE = Settings(chunk=32, max_batch=1, max_len=32, page_size=32, kv_tokens=8 * 32)  # one request in a micro-batch
one_second = lambda batch: 1.0
prompt_seconds = lambda batch: float(sum(length for _, _, length in batch))


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("hop", [0.0, 0.25])
@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("start", [0.0, 7.0])
def test_equal_batches_fill_the_pipeline(start, pp, hop, replicas):
    # an iteration takes pp + (pp - 1) * hop. Each of the pp micro-batches has one request at a time: all of them are
    # in flight, one second apart, and when the first leaves the last stage, the last has left the first stage
    iteration, requests, output = pp + (pp - 1) * hop, 2 * 2 * pp, 5
    law = Law(pp, hop, one_second)
    result = simulate(law, ("orca", {}), at_once(*[(3, output)] * requests, time=start), ALONE, replicas=replicas)
    rounds = requests * output // pp // replicas  # each micro-batch makes one batch in each
    assert result.batches == rounds * pp * replicas
    assert result.run.seconds == start + rounds * iteration + pp - 1
    assert result.busy == {(replica, stage): rounds * pp for replica in range(replicas) for stage in range(pp)}
    # once in each round but the first a stage waits, for what the hops took
    assert sum(result.bubbles) == replicas * (rounds - 1) * pp * (pp - 1) * hop
    assert all(tbt == iteration for completion in result.run.completions for tbt in completion.tbt)


def test_unequal_batches_leave_bubbles():
    # seconds on each of two stages:  A 1, B 3, C 2, D 1
    #   stage 0   A 0-1   B 1-4           C 4-6   (idle 6-7)   D 7-8      C waits for stage 0, D for B to leave stage 1
    #   stage 1   A 1-2   (idle 2-4)      B 4-7    C 7-9       D 9-10
    arrivals = at_once((1, 1), (3, 1), (2, 1), (1, 1))
    result = simulate(Law(2, 0.0, prompt_seconds), ("orca", {}), arrivals, ALONE, timeline=True)
    a, b, c, d = [result.stage_runs[2 * n : 2 * n + 2] for n in range(4)]
    assert [(run.stage, run.micro_batch, run.start, run.end, run.bubble) for run in (*a, *b, *c, *d)] == [
        (0, 0, 0, 1, 0),
        (1, 0, 1, 2, 0),
        (0, 1, 1, 4, 0),
        (1, 1, 4, 7, 2),
        (0, 0, 4, 6, 0),
        (1, 0, 7, 9, 0),
        (0, 1, 7, 8, 1),
        (1, 1, 9, 10, 0),
    ]
    assert result.bubbles == [0, 2, 0, 1]
    assert [completion.token_times for completion in result.run.completions] == [[2], [7], [9], [10]]
    assert result.busy == {(0, 0): 7, (0, 1): 7} and result.utilisation == 14 / 20
    assert bubble_kinds(result.stage_runs) == [(b[1], "PB1"), (d[0], "PB1")]


def test_bubbles_are_of_three_kinds():
    # A and B have three tokens each. Seconds on each of two stages: prefills A 1, B 3; decodes a 2 and 3, b 1 and 1
    #   stage 0   A 0-1   B 1-4           a 4-6   (idle 6-7)   b 7-8   (idle 8-9)     a 9-12                  b 12-13
    #   stage 1   A 1-2   (idle 2-4)      B 4-7    a 7-9       b 9-10  (idle 10-12)           a 12-15         b 15-16
    takes = {("A", 0): 1, ("B", 0): 3, ("A", 1): 2, ("B", 3): 1, ("A", 2): 3, ("B", 4): 1}  # request, start -> seconds
    law = Law(2, 0.0, lambda batch: float(takes["AB"[batch[0][0].id], batch[0][1]]))
    result = simulate(law, ("orca", {}), at_once((1, 3), (3, 3)), ALONE, timeline=True)
    kinds = [(run.stage, run.start, run.bubble, kind) for run, kind in bubble_kinds(result.stage_runs)]
    assert kinds == [(1, 4, 2, "PB1"), (0, 7, 1, "PB2"), (0, 9, 1, "PB3"), (1, 12, 2, "PB3")]
    assert result.bubbles == [3, 3] and result.run.seconds == 16


def test_a_request_that_comes_later_has_missed_nothing():
    # one request decodes alone on two stages, a second comes at 5.5: stage 0 was idle since 5 because there was nothing
    # to do, stage 1 is idle from 6 until the second gets there at 6.5, and both had work all that time
    arrivals = [Arrival(0.0, 1, 8), Arrival(5.5, 1, 1)]
    result = simulate(Law(2, 0.0, one_second), ("orca", {}), arrivals, ALONE, timeline=True)
    second = [(run.stage, run.start, run.bubble) for run in result.stage_runs if run.chunks[0][0] == 1]
    assert second == [(0, 5.5, 0), (1, 6.5, 0.5)]


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_the_cpu_takes_its_time_on_every_stage(pp):
    costs = [CostModel(GEOMETRIES["gpt3-175b"], DEVICES["a100-80gb"], tp=8, pp=pp, cpu_s=s) for s in (0.125, 0.0)]
    with_cpu, without = [simulate(cost, ("orca", {}), at_once((3, 5)), ALONE) for cost in costs]
    for stage in range(pp):
        assert with_cpu.busy[0, stage] == pytest.approx(without.busy[0, stage] + 5 * 0.125)
    assert with_cpu.run.seconds == pytest.approx(without.run.seconds + 5 * pp * 0.125)
    assert all(i.launch == i.start + 0.125 for i in with_cpu.run.iterations)
    assert with_cpu.run.own_fraction == pytest.approx(5 * pp * 0.125 / sum(with_cpu.busy.values()))
    assert without.run.own_fraction == 0


# -----------------------------------------------------------------------------------------------------
# the papers


def test_chunks_remove_the_bubbles_of_orca():
    # SARATHI, Figure 5, and Sarathi-Serve, Figure 8: two micro-batches of two requests each
    cost = CostModel(GEOMETRIES["gpt3-175b"], DEVICES["a100-80gb"], tp=8, pp=2)
    settings = Settings(chunk=256, max_batch=2, max_len=8192, page_size=8192, kv_tokens=4 * 8192)
    arrivals = at_once((2048, 20), (1024, 20), (2040, 20), (1020, 20))
    specs = ("orca", {"prefills": 1}), ("sarathi-serve", {})
    orca, serve = [simulate(cost, spec, arrivals, settings, timeline=True) for spec in specs]
    assert {kind for _, kind in bubble_kinds(orca.stage_runs)} == {"PB1", "PB2", "PB3"}
    total = lambda result: sum(run.bubble for run in result.stage_runs)
    assert 0 < total(serve) < total(orca) / 10


def test_the_gain_of_chunks_in_a_pipeline_comes_from_requests_of_unlike_lengths():
    # SARATHI §5.3, GPT-3 on 8 x 8 GPUs: prompts that are computed whole are unequal micro-batches, if they are unequal
    cost = CostModel(GEOMETRIES["gpt3-175b"], DEVICES["a100-80gb"], tp=8, pp=8)
    settings = Settings(chunk=256, max_batch=27, max_len=4096, page_size=4096, kv_tokens=27 * 8 * 4096)
    totals = range(1024, 4097)
    zipf = random.Random(0).choices(totals, [rank**-0.4 for rank, _ in enumerate(totals, 1)], k=1000)

    def gain(lengths):
        arrivals = at_once(*[(length - length // 11, length // 11) for length in lengths])  # P:D = 10
        specs = ("orca", {"prefills": 1}), ("sarathi", {"tile": 128})
        orca, sarathi = [simulate(cost, spec, arrivals, settings, record=False).run.seconds for spec in specs]
        return orca / sarathi

    assert gain(zipf) > 2
    assert gain([sum(zipf) // len(zipf)] * len(zipf)) < 1.35


# -----------------------------------------------------------------------------------------------------
# what is refused


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(replicas=0), "replicas=0"),
        (dict(replicas=1.5), "replicas=1.5"),
        (dict(spec=("fifo", {})), "policy='fifo'.*sarathi-serve"),
        (dict(spec=("vllm", {"prefills": 1})), "prefills=1: policy 'vllm' has no such option"),
        (dict(spec=("orca", {"prefills": 0})), "prefills=0"),
        (dict(arrivals=at_once((3, 4), (20, 13))), "prompt of 20 tokens .* max_new_tokens=13.*max_len=32"),
        (dict(settings=replace(SETTINGS, chunk=0)), "chunk=0"),
        (dict(settings=replace(SETTINGS, kv_tokens=31)), "pages=7: a request of max_len=32 takes 8 pages"),
        # enough for one of max_len, but not in each half
        (dict(cost=Law(2), settings=replace(SETTINGS, kv_tokens=63)), "pages=7: a request of max_len=32 takes 8"),
    ],
)
def test_bad_arguments_are_refused(changes, message):
    good = dict(cost=Law(), spec=("vllm", {}), arrivals=at_once((3, 4)), settings=SETTINGS, replicas=1)
    assert len(simulate(**good).run.completions[0].token_times) == 4
    with pytest.raises(ValueError, match=message):
        simulate(**good | changes)


@pytest.mark.parametrize(
    "replicas, times, refused",
    [
        # one request runs from 0 to 1, the next waits from 0.5 to 1 and runs to 2, the next waits from 1.25 on
        (1, (0.0, 0.5, 0.75, 0.875, 1.25, 1.5), [2, 3, 5]),
        # two run, from 0 to 1 and from 0.25 to 1.25. The next waits from 0.5 to 1, the one after from 1.125 to 1.25
        (2, (0.0, 0.25, 0.5, 0.75, 1.125, 1.1875), [3, 5]),
        (2, (0.0, 0.0, 0.0), [1, 2]),  # nobody is taken from the line before all that came at once have looked at it
    ],
)
def test_a_full_line_refuses(replicas, times, refused):
    arrivals, settings = [Arrival(time, 1, 1) for time in times], replace(ALONE, max_waiting=1)
    run = simulate(Law(1, 0.0, one_second), ("orca", {}), arrivals, settings, replicas=replicas).run
    assert [i for i, done in enumerate(run.completions) if done.finish_reason == "abort"] == refused
    assert run.refused == len(refused) and not any(run.completions[i].token_times for i in refused)
    assert all(done.finish_reason == "length" for i, done in enumerate(run.completions) if i not in refused)
