"""Policies on a clock that only counts: nothing is lost or early, and an engine decides the same.

All times here are sums of binary fractions, unless a CostModel makes them: no sum is rounded, and
== may be asked.
"""

import random
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from config import EngineConfig
from engine import Engine
from lab.measure.load_run import serve
from lab.measure.run_loop import LoadRun
from lab.measure.workload import Arrival, chats, prompts
from lab.simulator.cost_model import CostModel
from lab.simulator.devices import DEVICES, GEOMETRIES
from lab.simulator.simulation import STEADY_POLICIES, Simulation, bubble_kinds, simulate
from policies import POLICIES
from runtime.runner import Runner
from scheduler import SarathiServe
from tests.helpers import GROWING, check_integrity, tiny_model

MODEL = tiny_model()
# pages for each micro-batch: for max_batch requests of max_len, and for hardly more than one
AMPLE = 32
LITTLE = 10
CONFIG = EngineConfig("vllm", chunk=8, max_batch=4, max_len=32, page_size=4, pages=AMPLE)
SHAPES = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2)]  # stages of a pipeline, and replicas
in_all_shapes = pytest.mark.parametrize("pp, replicas", SHAPES)
under_all_policies = pytest.mark.parametrize("policy", POLICIES)


class Law:
    """The cost of a batch: `seconds` of it on every stage, on odd ones half more if `uneven`."""

    cpu_s = 0.0
    tile = 1

    def __init__(self, pp=1, hop=0.0, seconds=None, uneven=False):
        self.pp = pp
        self.hop = hop
        self.seconds = seconds or by_tokens
        self.uneven = uneven

    def stages(self, batch):
        seconds = self.seconds(batch)
        factor = 1.5 if self.uneven else 1
        return [seconds * (factor if stage % 2 else 1) for stage in range(self.pp)], self.hop


def by_tokens(batch):
    """Flat for a few tokens, then as many as there are, and time for each (query, key) pair."""
    tokens = sum(length for _, _, length in batch)
    return max(8, tokens) / 64 + sum(length * (start + 1) for _, start, length in batch) / 1024


@pytest.mark.parametrize("pp, replicas", [(1, 1), (2, 1), (2, 2)])
def test_a_pipeline_names_a_request_that_its_policy_lost(pp, replicas, monkeypatch):
    admit = SarathiServe.admit

    def lose_one(scheduler):
        if scheduler.waiting and scheduler.waiting[0].id == 3:
            scheduler.waiting.popleft()
        return admit(scheduler)

    monkeypatch.setattr(SarathiServe, "admit", lose_one)
    config = replace(CONFIG, policy="sarathi-serve", pages=pp * CONFIG.pages)
    arrivals = [Arrival(0.0, 8, 4) for _ in range(12)]
    simulation = Simulation(Law(pp), config, replicas=replicas)
    run = LoadRun(simulation, arrivals)
    with pytest.raises(RuntimeError, match=r"^SarathiServe.schedule\(\) lost requests \[3\]"):
        run.run()
    assert len(run.completions) == 11  # all others have ended
    assert simulation.abort(3).finish_reason == "abort" and not simulation.requests


def random_arrivals(seed, count=16, mean_gap=0.25):
    """Requests of 2 to 32 tokens, at random multiples of 1 / 1024 s, or some of them at once."""
    rng = random.Random(seed)
    time = 0
    arrivals = []
    for _ in range(count):
        time += rng.choice([0, 1]) * round(1024 * rng.expovariate(1 / mean_gap)) if mean_gap else 0
        arrivals.append(Arrival(time / 1024, rng.randint(1, 20), rng.randint(1, 12)))
    return arrivals


def at_once(*lengths, time=0.0):
    return [Arrival(time, *pair) for pair in lengths]


def simulated(policy, pp, replicas, seed, pages, mean_gap):
    """A law, 16 requests for each micro-batch of a pipeline, and all that was seen of them."""
    law = Law(pp, 1 / 64, uneven=True)
    arrivals = random_arrivals(seed, 16 * pp, mean_gap)
    config = replace(CONFIG, policy=policy, pages=pp * pages)
    return law, arrivals, simulate(law, config, arrivals, replicas=replicas)


def replay(result, arrivals, law):
    """Follow the chunks of a run, check at the end that tokens came as their batches left.

    Yields for each batch its Iteration, its StageRuns, the ids of all that run in its micro-batch
    before it, those of them that decode, the batch as (id, start, length), and what runs in all
    micro-batches: (replica, number) -> ids.
    """
    computed = Counter()
    times = [[] for _ in arrivals]
    running = defaultdict(set)
    assert len(result.stage_runs) == law.pp * len(result.run.iterations)

    def num_tokens(i):
        return arrivals[i].prompt_len + len(times[i])

    for n, iteration in enumerate(result.run.iterations):
        runs = result.stage_runs[n * law.pp : (n + 1) * law.pp]
        mine = running[runs[0].replica, runs[0].micro_batch]
        for i in iteration.preempted:
            mine.remove(i)
            computed[i] = 0
        decoding = {i for i in mine if times[i] and computed[i] + 1 == num_tokens(i)}
        batch = [(i, start, length) for i, start, length, _ in iteration.chunks]
        assert batch == [(i, computed[i], length) for i, _, length in batch]
        yield iteration, runs, set(mine), decoding, batch, running
        for i, _, length, is_decode in iteration.chunks:
            assert is_decode == (i in decoding)
            mine.add(i)
            computed[i] += length
            if computed[i] == num_tokens(i):
                times[i].append(runs[-1].end)
                if len(times[i]) == arrivals[i].output_len:
                    mine.remove(i)
    assert [completion.token_times for completion in result.run.completions] == times


def checked(scheduler):
    """The scheduler, whose batches are checked before they are computed."""
    schedule = scheduler.schedule
    pages = scheduler.pages

    def checked_schedule():
        batch = schedule()
        check_integrity(pages, [request.pages for request in scheduler.running])  # only its share
        assert 0 < len(batch) <= len(scheduler.running) <= CONFIG.max_batch
        for request, start, length in batch:
            assert start == request.num_computed
            assert start + length <= len(request.pages) * pages.page_size
        return batch

    scheduler.schedule = checked_schedule
    return scheduler


@in_all_shapes
@pytest.mark.parametrize("pages", [AMPLE, LITTLE])
@under_all_policies
def test_every_token_is_computed_once_and_all_memory_comes_back(policy, pages, pp, replicas):
    preemptions = 0
    config = replace(CONFIG, policy=policy, pages=pp * pages)
    for seed, mean_gap in ((0, 0.25), (1, 0.0), (2, 2.0)):
        arrivals = random_arrivals(seed, 24 * pp, mean_gap)
        ended = []
        simulation = Simulation(Law(pp, 1 / 64, uneven=True), config, replicas=replicas)
        schedulers = [checked(scheduler) for scheduler in simulation.schedulers]
        run = LoadRun(simulation, arrivals, progress=partial(ended.append, 1)).run()
        computed = Counter()
        for iteration in run.iterations:
            for i, _, length, _ in iteration.chunks:
                computed[i] += length
        for i, (arrival, completion) in enumerate(zip(arrivals, run.completions, strict=True)):
            recorded = (
                completion.request_id,
                completion.finish_reason,
                completion.arrival,
                len(completion.prompt),
            )
            assert recorded == (i, "length", arrival.time, arrival.prompt_len)
            assert len(completion.tokens) == len(completion.token_times) == arrival.output_len
            once = arrival.prompt_len + arrival.output_len - 1
            assert computed[i] == once + completion.recomputed_tokens
            assert bool(completion.preemptions) == bool(completion.recomputed_tokens)
            assert arrival.time <= completion.scheduled < completion.token_times[0]
            assert all(gap > 0 for gap in completion.tbt)
        preempted = Counter(i for iteration in run.iterations for i in iteration.preempted)
        assert all(
            preempted[i] == completion.preemptions for i, completion in enumerate(run.completions)
        )
        preemptions += preempted.total()
        assert simulation.batches == len(run.iterations)
        assert run.seconds == max(completion.token_times[-1] for completion in run.completions)
        assert len(ended) == len(arrivals) and not run.refused and run.cut_short is None
        assert len(schedulers) == pp * replicas and not schedulers[0].waiting
        for each in schedulers:
            assert each.waiting is schedulers[0].waiting and not each.running
            assert each.requests is schedulers[0].requests and not each.requests
            assert each.pages.total == each.pages.num_free == pages
            check_integrity(each.pages, [])
    assert bool(preemptions) == (policy in GROWING and pages == LITTLE)  # or it tests nothing


@in_all_shapes
@under_all_policies
def test_a_batch_starts_when_stage_requests_and_micro_batch_are_ready(policy, pp, replicas):
    for seed, mean_gap in enumerate((0.0, 0.1, 0.25, 1.0)):
        pages = (AMPLE, LITTLE)[seed % 2]
        law, arrivals, result = simulated(policy, pp, replicas, seed, pages, mean_gap)
        free = Counter()
        left = Counter()
        busy = Counter()
        for iteration, runs, mine, decoding, batch, _ in replay(result, arrivals, law):
            ids = {i for i, *_ in batch}
            promises = {"sarathi-serve": decoding <= ids, "request-level": mine in (set(), ids)}
            assert promises.get(policy, True)  # in each micro-batch
            [micro_batch] = {(run.replica, run.micro_batch) for run in runs}
            seconds, hop = law.stages(batch)
            ready = runs[0].start
            came = max(arrivals[i].time for i, _, _ in batch)
            assert ready >= max(left[micro_batch], free[micro_batch[0], 0], came)
            assert [run.stage for run in runs] == list(range(pp))
            for run in runs:
                stage = run.replica, run.stage
                assert run.start == max(ready, free[stage])
                assert run.end == run.start + seconds[run.stage]
                assert run.chunks == iteration.chunks and 0 <= run.bubble <= run.start - free[stage]
                ready = run.end + hop
                free[stage] = run.end
                busy[stage] += seconds[run.stage]
            left[micro_batch] = runs[-1].end
            assert (iteration.start, iteration.end) == (runs[0].start, runs[-1].end)
        assert result.busy == busy
        assert max(busy.values()) <= result.run.seconds == max(left.values())
        share = sum(busy.values()) / pp / replicas / result.run.seconds
        assert result.utilisation == pytest.approx(share)


@pytest.mark.parametrize("pp, replicas", [(1, 1), (2, 2)])
@pytest.mark.parametrize("pages", [AMPLE, LITTLE])
@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "dynamic"])
def test_a_simulation_without_a_record_computes_the_same(policy, pages, pp, replicas, monkeypatch):
    """Though it repeats batches of decodes without asking the policy."""
    repeats = []
    repeat = Simulation._repeat
    monkeypatch.setattr(Simulation, "_repeat", lambda *args: repeats.append(args) or repeat(*args))
    cost = CostModel(GEOMETRIES["llama-7b"], DEVICES["a100-80gb"], pp=pp, cpu_s=1e-3)
    config = replace(CONFIG, policy=policy, pages=pp * pages)
    for mean_gap in (0.0, 0.02, 0.25):
        arrivals = random_arrivals(0, 16 * pp, mean_gap)
        recorded, other = (
            simulate(cost, config, arrivals, replicas=replicas, record=record)
            for record in (True, False)
        )
        assert other.run.completions == recorded.run.completions
        assert (other.busy, other.bubbles) == (recorded.busy, recorded.bubbles)
        assert (other.batches, other.run.seconds) == (recorded.batches, recorded.run.seconds)
    assert bool(repeats) == (POLICIES[policy] in STEADY_POLICIES)


def gaps(policy, pp, replicas, seed, mean_gap):
    """Each time that a stage was idle: (the StageRun that ended it, from when, who had work).

    That is "all" if all micro-batches of its pipeline had requests all the time, "not all" if one
    had none all the time (told only of the first stage), and None for what lies between.
    """
    law, arrivals, result = simulated(policy, pp, replicas, seed, LITTLE, mean_gap)
    free = {}
    left = Counter()
    found = []
    charged = Counter()
    for iteration, runs, mine, _, _, running in replay(result, arrivals, law):
        replica = runs[0].replica
        number = runs[0].micro_batch
        other_batches = [(replica, other) for other in range(replica * pp, (replica + 1) * pp)]
        other_batches.remove((replica, number))
        all_had = mine and all(running[other] for other in other_batches)
        for run in runs:
            charged.update({i: run.bubble for i, *_ in iteration.chunks})
            since = free.get((replica, run.stage))
            if since is None:
                assert not run.bubble  # before its first batch a stage waits for nothing
            elif run.start > since:
                none = any(not running[m] and left[m] <= since for m in other_batches)
                none |= not mine and left[replica, number] <= since
                work = "all" if all_had else "not all" if none and not run.stage else None
                found.append((run, since, work))
            free[replica, run.stage] = run.end
        left[replica, number] = runs[-1].end
    assert [*result.bubbles.values()] == [charged[i] for i in range(len(arrivals))]
    return found


@pytest.mark.slow
@in_all_shapes
@under_all_policies
def test_a_bubble_is_idle_time_of_a_stage_with_work(policy, pp, replicas):
    gaps_found = [
        gap for seed in range(3) for gap in gaps(policy, pp, replicas, seed, mean_gap=0.0)
    ]
    bubbles = [(run.bubble, run.start - since) for run, since, work in gaps_found if work == "all"]
    assert all(bubble == idle for bubble, idle in bubbles) and (len(bubbles) > 20 or pp == 1)
    # and it is none while a micro-batch has no requests
    gaps_found = [
        gap for seed in range(3) for gap in gaps(policy, pp, replicas, seed, mean_gap=1.0)
    ]
    gaps_found = [run for run, _, work in gaps_found if work == "not all"]
    assert len(gaps_found) > 3 and not any(run.bubble for run in gaps_found)


@pytest.fixture
def clock(monkeypatch):
    """A clock that advances by what is slept and what batches take in a simulation: `time`."""
    clock = SimpleNamespace(time=0.0)
    sample = Runner.sample

    def sleep(seconds):
        clock.time += seconds

    def takes_its_time(runner, logits, batch):
        sleep(by_tokens(batch))
        return sample(runner, logits, batch)

    monkeypatch.setattr(Runner, "sample", takes_its_time)
    clock.sleep = sleep
    clock.now = lambda: clock.time
    return clock


def seen_of(run):
    """A Run without what a simulation does not know: tokens, but for their number, and `launch`."""
    completions = [
        replace(completion, prompt=len(completion.prompt), tokens=len(completion.tokens))
        for completion in run.completions
    ]
    iterations = [iteration._replace(launch=None) for iteration in run.iterations]
    return replace(run, completions=completions, iterations=iterations, own_fraction=None)


# policy, pages, max_waiting
SERVED = [("request-level", AMPLE, None), ("orca", AMPLE, 3), ("orca-best", LITTLE, None)]
SERVED += [("vllm", LITTLE, None), ("sarathi", AMPLE, 2), ("sarathi-serve", AMPLE, 2)]
SERVED += [("sarathi-serve", LITTLE, 6), ("dynamic", LITTLE, None), ("chunked-only", LITTLE, 4)]
SERVED += [("hybrid-only", LITTLE, None), ("priority", LITTLE, None)]
OPTIONS = {"sarathi": {"tile": 4}, "dynamic": {"tbt_slo": 0.25}}
OPTIONS |= {"priority": {"ttft_slo": 1.0, "ageing": 2.0}}


@pytest.mark.parametrize("policy, pages, line", SERVED)
def test_the_engine_makes_the_same_schedule(policy, pages, line, clock, monkeypatch):
    options = OPTIONS.get(policy, {})
    monkeypatch.setattr(Engine, "warm_up", lambda engine: None)  # some would learn from it
    config = replace(CONFIG, policy=policy, pages=pages, max_waiting=line, policy_options=options)
    preemptions = refused = 0
    for seed in range(3):
        rng = random.Random(seed)
        classes = ["realtime", "high", "normal", "low"]
        arrivals = [
            arrival._replace(priority=rng.choice(classes), tbt_slo=rng.choice([None, 0.5]))
            for arrival in random_arrivals(seed, 16, 0.3)
        ]
        tokens = prompts(arrivals, MODEL.config.vocab_size, seed)
        real = serve(MODEL, config, arrivals, tokens, now=clock.now, sleep=clock.sleep)
        assert seen_of(simulate(Law(), config, arrivals).run) == seen_of(replace(real, drift=0.0))
        preemptions += sum(c.preemptions for c in real.completions)
        refused += real.refused
    assert bool(preemptions) == (policy in GROWING and pages == LITTLE)
    assert bool(refused) == (line is not None)


@pytest.mark.slow
@pytest.mark.parametrize("pages", [AMPLE, LITTLE])
@under_all_policies
def test_the_engine_finds_the_same_pages(policy, pages, clock, monkeypatch):
    """Chats of two turns that begin with one of two prefixes."""
    monkeypatch.setattr(Engine, "warm_up", lambda engine: None)
    options = OPTIONS.get(policy, {})
    config = replace(
        CONFIG, policy=policy, pages=pages, policy_options=options, prefix_caching=True
    )
    cached_tokens = 0
    for seed in range(2):
        load = chats([a for a in random_arrivals(seed) if sum(a[1:3]) <= 22], 2)
        load = [turn._replace(prompt_len=turn.prompt_len + 10) for turn in load]
        tokens = prompts(load, MODEL.config.vocab_size, seed, (10, 2))
        real = serve(MODEL, config, load, tokens, now=clock.now, sleep=clock.sleep)
        simulated = simulate(Law(), config, load, tokens).run
        assert seen_of(simulated) == seen_of(replace(real, drift=0.0))
        cached_tokens += sum(c.cached_tokens for c in real.completions)
    assert cached_tokens > 100


# one request in a micro-batch
ALONE = EngineConfig("orca", chunk=32, max_batch=1, max_len=32, page_size=32, pages=8)


def alone(arrivals, pp=1, hop=0.0, seconds=lambda batch: 1.0, config=ALONE, **more):
    """A simulation of batches of one request, of one second on each stage if not told otherwise."""
    return simulate(Law(pp, hop, seconds), config, arrivals, **more)


@pytest.mark.parametrize("start, hop", [(0.0, 0.0), (7.0, 0.0), (0.0, 0.25), (7.0, 0.25)])
@in_all_shapes
def test_equal_batches_fill_the_pipeline(pp, replicas, start, hop):
    # each of the pp micro-batches has one request at a time: all of them are in flight, one second
    # apart, and when the first leaves the last stage, the last has left the first stage
    iteration = pp + (pp - 1) * hop
    requests = 2 * 2 * pp
    output = 5
    arrivals = at_once(*[(3, output)] * requests, time=start)
    result = alone(arrivals, pp, hop, replicas=replicas)
    rounds = requests * output // pp // replicas  # each micro-batch makes one batch in each
    assert result.batches == rounds * pp * replicas
    assert result.run.seconds == start + rounds * iteration + pp - 1
    stages = [(replica, stage) for replica in range(replicas) for stage in range(pp)]
    assert result.busy == dict.fromkeys(stages, rounds * pp)
    # once in each round but the first a stage waits, for what the hops took
    assert sum(result.bubbles.values()) == replicas * (rounds - 1) * pp * (pp - 1) * hop
    assert all(tbt == iteration for completion in result.run.completions for tbt in completion.tbt)


def test_unequal_batches_leave_bubbles():
    # seconds on each of two stages: A 1, B 3, C 2, D 1. C waits for stage 0, D for B on stage 1
    #   stage 0   A 0-1   B 1-4           C 4-6   (idle 6-7)   D 7-8
    #   stage 1   A 1-2   (idle 2-4)      B 4-7    C 7-9       D 9-10
    arrivals = at_once((1, 1), (3, 1), (2, 1), (1, 1))

    def seconds(batch):
        return batch[0].length

    result = alone(arrivals, 2, seconds=seconds)
    assert [run[1:6] for run in result.stage_runs] == [
        *((0, 0, 0, 1, 0), (1, 0, 1, 2, 0)),  # A: stage, micro-batch, start, end, bubble
        *((0, 1, 1, 4, 0), (1, 1, 4, 7, 2)),
        *((0, 0, 4, 6, 0), (1, 0, 7, 9, 0)),
        *((0, 1, 7, 8, 1), (1, 1, 9, 10, 0)),
    ]
    assert [*result.bubbles.values()] == [0, 2, 0, 1]
    assert [completion.token_times for completion in result.run.completions] == [
        [2],
        [7],
        [9],
        [10],
    ]
    assert result.busy == {(0, 0): 7, (0, 1): 7} and result.utilisation == 14 / 20
    waited = [result.stage_runs[3], result.stage_runs[6]]
    assert bubble_kinds(result.stage_runs) == [(run, "PB1") for run in waited]


def test_bubbles_are_of_three_kinds():
    # A and B have three tokens each. Seconds on each stage: prefills A 1, B 3; decodes a 2, 3,
    # b 1, 1
    #   stage 0   A 0-1   B 1-4       a 4-6   (idle 6-7)   b 7-8   (idle 8-9)     a 9-12   b 12-13
    #   stage 1   A 1-2   (idle 2-4)  B 4-7    a 7-9       b 9-10  (idle 10-12)   a 12-15  b 15-16
    takes = {("A", 0): 1, ("B", 0): 3, ("A", 1): 2, ("B", 3): 1, ("A", 2): 3, ("B", 4): 1}

    def seconds(batch):
        return takes["AB"[batch[0].request.id], batch[0].start]

    result = alone(at_once((1, 3), (3, 3)), 2, seconds=seconds)
    kinds = [(r.stage, r.start, r.bubble, kind) for r, kind in bubble_kinds(result.stage_runs)]
    assert kinds == [(1, 4, 2, "PB1"), (0, 7, 1, "PB2"), (0, 9, 1, "PB3"), (1, 12, 2, "PB3")]
    assert [*result.bubbles.values()] == [3, 3] and result.run.seconds == 16


def test_a_request_that_comes_later_has_missed_nothing():
    # one decodes alone on two stages, a second comes at 5.5: stage 0 was idle since 5 for nothing
    # to do, stage 1 is idle from 6 until the second gets there at 6.5, and both had work
    runs = alone([Arrival(0.0, 1, 8), Arrival(5.5, 1, 1)], 2).stage_runs
    second = [run for run in runs if run.chunks[0][0] == 1]
    assert [(run.stage, run.start, run.bubble) for run in second] == [(0, 5.5, 0), (1, 6.5, 0.5)]


def test_the_request_that_waited_longest_goes_first():
    # B keeps stage 0 of 3 until 3.5, or 3. C comes at 2.75, A has left the last stage at 3
    for b, ends in ((2.5, [[3, 7.5], [5.5], [6.5]]), (2.0, [[3, 7], [5], [6]])):
        run = alone([Arrival(0.0, 1, 2), Arrival(b, 1, 1), Arrival(2.75, 1, 1)], 3).run
        assert [completion.token_times for completion in run.completions] == ends
    run = alone([Arrival(2.0 * i, 1, 1) for i in range(4)], replicas=2).run
    assert [iteration.micro_batch for iteration in run.iterations] == [0, 1, 0, 1]


@in_all_shapes
def test_a_policy_observes_what_its_requests_wait_for_stages_too(pp, replicas):
    law = Law(pp, 1 / 64, uneven=True)
    arrivals = random_arrivals(0, 16 * pp)
    simulation = Simulation(law, CONFIG, replicas=replicas)
    observed = []
    for scheduler in simulation.schedulers:
        scheduler.observe = lambda batch, seconds: observed.append(seconds)
    run = LoadRun(simulation, arrivals).run()
    assert observed == [iteration.end - iteration.start for iteration in run.iterations]
    computing = [sum(law.stages([c[:3] for c in it.chunks])[0]) for it in run.iterations]
    hops = (pp - 1) * law.hop
    assert any(
        took > compute_s + hops for took, compute_s in zip(observed, computing, strict=True)
    ) == (pp > 1)


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_the_cpu_takes_its_time_on_every_stage(pp):
    gpt3 = GEOMETRIES["gpt3-175b"], DEVICES["a100-80gb"]
    costs = [CostModel(*gpt3, tp=8, pp=pp, cpu_s=cpu_s) for cpu_s in (0.125, 0.0)]
    with_cpu, without = [simulate(cost, ALONE, at_once((3, 5))) for cost in costs]
    for stage in range(pp):
        assert with_cpu.busy[0, stage] == pytest.approx(without.busy[0, stage] + 5 * 0.125)
    assert with_cpu.run.seconds == pytest.approx(without.run.seconds + 5 * pp * 0.125)
    assert all(i.launch == i.start + 0.125 for i in with_cpu.run.iterations)
    own_fraction = 5 * pp * 0.125 / sum(with_cpu.busy.values())
    assert with_cpu.run.own_fraction == pytest.approx(own_fraction)
    assert without.run.own_fraction == 0


def test_a_simulation_is_a_server():
    # as run.py says: two micro-batches of one stage each; add and abort by hand
    simulation = Simulation(Law(seconds=lambda batch: 1.0), ALONE, replicas=2)
    assert simulation.ready_at() == 0.0 and simulation.step() == [] == simulation.step()
    assert simulation.ready_at() == float("inf") and simulation.last_iteration is None
    simulation.wait_until(2.5)
    assert simulation.clock() == 2.5
    for i in range(3):
        simulation.add(i, Arrival(2.5, 2, 3))
    assert simulation.ready_at() == 2.5
    (event,) = simulation.step()
    assert event[:4] == (0, 0, None, None)
    assert simulation.last_iteration.chunks == [(0, 0, 2, False)]
    assert simulation.ready_at() == 2.5 and simulation.step()[0].request_id == 1
    assert simulation.ready_at() == 3.5
    running = simulation.abort(1)
    waiting = simulation.abort(2)
    assert (running.finish_reason, running.token_times) == ("abort", [3.5])
    assert (waiting.finish_reason, waiting.token_times) == ("abort", [])
    events = [event for _ in range(3) for event in simulation.step()]
    assert [event.request_id for event in events] == [0, 0]
    assert events[1].finish_reason == "length" and events[1].completion.token_times[-1] == 5.5
    assert all(s.pages.num_free == s.pages.total for s in simulation.schedulers)


def test_a_micro_batch_takes_what_another_preempted_at_once():
    # two requests of 3 + 5 tokens run on one replica, whose 8 tokens of memory are full at 2; the
    # other has been idle since 0 and computes the newer one again, so that it misses no token
    config = replace(CONFIG, max_len=8, page_size=1, pages=8)
    run = alone(at_once((3, 5), (3, 5)), config=config, replicas=2).run
    assert [completion.token_times for completion in run.completions] == 2 * [[1, 2, 3, 4, 5]]
    losses = [
        (completion.preemptions, completion.recomputed_tokens) for completion in run.completions
    ]
    assert losses == [(0, 0), (1, 4)]


def test_a_budget_is_in_whole_tiles_of_the_device_by_default():
    cost = CostModel(GEOMETRIES["gpt3-175b"], DEVICES["a100-80gb"], tp=8)
    for options, budget in (({}, 256), ({"tile": 1}, 300)):
        config = replace(CONFIG, policy="sarathi", chunk=300, policy_options=options)
        assert Simulation(cost, config).schedulers[0].budget == budget


FEW = "pages=7: a request of max_len=32 takes 8 pages"
UNKNOWN = "=1: policy 'vllm' has no such option"
BAD = [(dict(policy="fifo"), "policy='fifo'.*sarathi-serve"), (dict(pages=7), FEW)]
BAD += [(dict(cost=Law(2), pages=15), FEW)]  # enough for one, but not in each half
BAD += [(dict(policy="sarathi", policy_options={"tile": 0}), "tile=0")]
BAD += [(dict(policy="sarathi", chunk="auto"), "chunk='auto': must be a whole number")]
BAD += [(dict(arrivals=at_once((3, 4), (20, 13))), "prompt of 20 .* max_new_tokens=13.*max_len=32")]
BAD += [(dict(replicas=count), f"replicas={count}") for count in (0, 1.5)]
BAD += [(dict(policy_options={name: 1}), name + UNKNOWN) for name in ("prefills", "tile")]
BAD += [(dict(prefix_caching=True), "prompts=None: prefix_caching needs their token ids")]
BAD += [({name: None}, f"{name}=None") for name in ("max_batch", "max_len", "page_size", "pages")]


@pytest.mark.parametrize("changes, message", BAD)
def test_bad_arguments_are_refused(changes, message):
    def served(cost=Law(), arrivals=at_once((3, 4)), replicas=1, **config):  # noqa: B008
        return simulate(cost, replace(CONFIG, **config), arrivals, replicas=replicas).run

    assert len(served().completions[0].token_times) == 4
    with pytest.raises(ValueError, match=message):
        served(**changes)


REFUSED = [  # replicas, times of arrivals, who is refused
    (1, (0.0, 0.5, 0.75, 0.875, 1.25, 1.5), [2, 3, 5]),  # 1 waits to 1, 4 from 1.25 on
    (2, (0.0, 0.25, 0.5, 0.75, 1.125, 1.1875), [3, 5]),  # 2 waits to 1, 4 from 1.125 on
    (2, (0.0, 0.0, 0.0), [1, 2]),  # nobody is taken before all that came at once have looked at it
]


def test_a_shared_prefix_costs_no_time_again_on_the_same_replica():
    """Prefixes of 9 tokens, two pages of 4; a token takes a second. The third is on the other."""
    config = replace(ALONE, page_size=4, prefix_caching=True)
    load = [Arrival(time, 12, 1) for time in (0.0, 20.0, 20.0)]
    tokens = prompts(load, 61, 0, (9, 1))
    law = Law(seconds=lambda batch: sum(chunk.length for chunk in batch))
    run = simulate(law, config, load, tokens, replicas=2).run
    assert [i.micro_batch for i in run.iterations] == [0, 1, 0]
    assert [completion.ttft for completion in run.completions] == [12, 12, 12 - 8]
    assert [completion.cached_tokens for completion in run.completions] == [0, 0, 8]
    run = simulate(law, replace(config, prefix_caching=False), load, tokens, replicas=2).run
    assert [completion.ttft for completion in run.completions] == [12, 12, 12]


def test_requests_come_in_the_order_in_which_they_are_due():
    crowd = [*random_arrivals(0, 16, 0.0), *(Arrival(4.0 + i / 4, 9, 5) for i in range(40))]
    simulation = Simulation(Law(), CONFIG)
    times = []
    load = chats(crowd, 3)
    add = simulation.add
    simulation.add = lambda i, arrival, prompt: times.append(arrival.time) or add(i, arrival)
    LoadRun(simulation, load).run()
    assert times == sorted(times) and len(times) == len(load)


def test_a_turn_that_is_refused_is_the_last_of_its_chat():
    # of 1 + 1 tokens in a second, and a second later the next; a long one and one more are there
    later_arrivals = [Arrival(1.75, 1, 4), Arrival(1.875, 1, 1)]
    first, second, third = chats([Arrival(0.0, 3, 3)], 3)
    load = [first, *later_arrivals, second, third._replace(follows=3)]
    run = alone(load, config=replace(ALONE, max_waiting=1)).run
    reasons = [completion.finish_reason for completion in run.completions]
    assert reasons == ["length"] * 3 + ["abort"]
    assert run.completions[3].arrival == 2.0 and run.refused == 1


@pytest.mark.parametrize("replicas, times, refused", REFUSED)
def test_a_full_queue_refuses_requests(replicas, times, refused):
    arrivals = [Arrival(time, 1, 1) for time in times]
    config = replace(ALONE, max_waiting=1)
    run = alone(arrivals, config=config, replicas=replicas).run
    reasons = [completion.finish_reason for completion in run.completions]
    assert reasons == ["abort" if i in refused else "length" for i in range(len(times))]
    assert run.refused == len(refused) and not any(run.completions[i].token_times for i in refused)
