"""Simulated schedules, held against a replay chunk by chunk, times by hand, and nano.py.

All times here are sums of binary fractions, unless a CostModel makes them: no sum is rounded, and
== may be asked."""

import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from config import EngineConfig
from engine import Engine
from lab.measure.load_run import serve
from lab.measure.run_loop import LoadRun
from lab.measure.workload import Arrival, prompts
from lab.simulator.cost_model import CostModel, StageTimes
from lab.simulator.simulation import STEADY_POLICIES, Simulation, bubble_kinds, simulate
from policies import POLICIES
from runtime.runner import Runner
from tests.helpers import GROWING, IN_ORDER, facts, tiny_model

MODEL = tiny_model()
# pages for each micro-batch: for max_batch requests of max_len, and for hardly more than one
AMPLE = 32
LITTLE = 10
CONFIG = EngineConfig("vllm", chunk=8, max_batch=4, max_len=32, page_size=4, pages=AMPLE)
under_all_policies = pytest.mark.parametrize("policy", POLICIES)
in_much_and_little_memory = pytest.mark.parametrize("pages", [AMPLE, LITTLE])


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
        stages = [seconds * (factor if stage % 2 else 1) for stage in range(self.pp)]
        return StageTimes(stages, self.hop)


def by_tokens(batch):
    """Flat for a few tokens, then as many as there are, and time for each (query, key) pair."""
    tokens = sum(length for _, _, length in batch)
    pairs = sum(length * (start + 1) for _, start, length in batch)
    return max(8, tokens) / 64 + pairs / 1024


def random_arrivals(seed, count=16, mean_gap=0.25):
    """Requests of 2 to 32 tokens, at random multiples of 1 / 1024 s, or some of them at once."""
    rng = random.Random(seed)
    time = 0
    arrivals = []
    for _ in range(count):
        if rng.random() < 0.5 and mean_gap:
            time += round(1024 * rng.expovariate(1 / mean_gap))
        arrivals.append(Arrival(time / 1024, rng.randint(1, 20), rng.randint(1, 12)))
    return arrivals


def at_once(*lengths):
    return [Arrival(0.0, *pair) for pair in lengths]


def replay(simulation, run, arrivals):
    """The times of all tokens, followed chunk by chunk: each goes on where the last one ended, and
    its batch is on each stage as soon as the stage and the batch are ready."""
    pp = simulation.pp
    computed = Counter()
    token_times = [[] for _ in arrivals]
    free = Counter()  # when a stage has finished
    left = Counter()  # when a micro-batch has left its last stage
    busy = Counter()
    waited = Counter()
    rows = iter(simulation.stage_runs)
    for iteration in run.iterations:
        for i in iteration.preempted:
            computed[i] = 0
        chunks = iteration.chunks
        assert 0 < len(chunks) <= CONFIG.max_batch
        ready = iteration.start
        assert ready >= left[iteration.micro_batch]
        assert ready >= max(arrivals[i].time for i, *_ in chunks)
        seconds, hop = simulation.cost.stages([chunk[:3] for chunk in chunks])
        for stage, duration in enumerate(seconds):
            row = next(rows)
            place = iteration.micro_batch // pp, stage
            start = max(ready, free[place])
            end = start + duration
            assert (row.replica, row.stage) == place
            assert (row.start, row.end, row.chunks) == (start, end, chunks)
            assert 0 <= row.bubble <= start - free[place]
            waited.update({i: row.bubble for i, *_ in chunks})
            busy[place] += duration
            free[place] = end
            ready = end + hop
        assert iteration.end == end
        left[iteration.micro_batch] = end
        for i, start, length, is_decode in chunks:
            known = arrivals[i].prompt_len + len(token_times[i])
            assert start == computed[i]
            assert is_decode == (bool(token_times[i]) and start + 1 == known)
            computed[i] += length
            if computed[i] == known:
                token_times[i].append(end)
    assert next(rows, None) is None
    assert run.seconds == max(left.values())
    assert simulation.busy == busy
    assert list(simulation.bubbles.values()) == [waited[i] for i in range(len(arrivals))]
    return token_times


def check_order(iterations):
    """Who begins, for the first time or again, leaves no older request waiting."""
    begun = set()
    for iteration in iterations:
        begun.difference_update(iteration.preempted)
        computed = {chunk.request_id for chunk in iteration.chunks}
        new = computed - begun
        begun |= computed
        assert begun.issuperset(range(max(new, default=0)))


@pytest.mark.parametrize("pp, replicas", [(1, 1), (2, 2)])
@in_much_and_little_memory
@under_all_policies
def test_every_token_is_computed_once_and_as_soon_as_it_can_be(policy, pages, pp, replicas):
    preemptions = 0
    config = replace(CONFIG, policy=policy, pages=pp * pages)
    for seed, mean_gap in ((0, 0.25), (1, 0.0)):
        arrivals = random_arrivals(seed, 24 * pp, mean_gap)
        simulation = Simulation(Law(pp, 1 / 64, uneven=True), config, replicas=replicas)
        observed = []
        for scheduler in simulation.schedulers:
            scheduler.observe = lambda _, seconds, observed=observed: observed.append(seconds)
        run = LoadRun(simulation, arrivals).run()
        token_times = replay(simulation, run, arrivals)
        assert observed == [each.end - each.start for each in run.iterations]  # with all waiting
        computed = Counter()
        preempted = Counter()
        for iteration in run.iterations:
            preempted.update(iteration.preempted)
            computed.update({i: length for i, _, length, _ in iteration.chunks})
        for i, (arrival, done) in enumerate(zip(arrivals, run.completions, strict=True)):
            assert (done.id, done.finish_reason) == (i, "length")
            assert (done.arrival, done.prompt_len, len(done.output)) == arrival[:3]
            assert done.token_times == token_times[i]
            once = arrival.prompt_len + arrival.output_len - 1
            assert computed[i] == once + done.recomputed_tokens
            assert preempted[i] == done.preemptions
        preemptions += preempted.total()
        if policy in IN_ORDER and pp * replicas == 1:
            check_order(run.iterations)
        assert not simulation.requests
        free_pages = [scheduler.pages.num_free for scheduler in simulation.schedulers]
        assert free_pages == [pages] * pp * replicas
    assert bool(preemptions) == (policy in GROWING and pages == LITTLE)  # or it tests nothing


@pytest.mark.parametrize("pp, replicas", [(1, 1), (2, 2)])
@in_much_and_little_memory
@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "dynamic"])
def test_without_a_record_decodes_are_repeated_and_nothing_else_differs(
    policy, pages, pp, replicas, monkeypatch
):
    repeats = []
    repeat = Simulation._repeat
    monkeypatch.setattr(Simulation, "_repeat", lambda *args: repeats.append(args) or repeat(*args))
    cost = CostModel.named("llama-7b", pp=pp, cpu_s=1e-3)
    config = replace(CONFIG, policy=policy, pages=pp * pages)
    for mean_gap in (0.0, 0.25):
        arrivals = random_arrivals(0, 16 * pp, mean_gap)
        recorded, other = (
            simulate(cost, config, arrivals, replicas=replicas, record=record)
            for record in (True, False)
        )
        completions = [[facts(c) for c in each.run.completions] for each in (recorded, other)]
        assert completions[0] == completions[1]
        assert replace(recorded.run, iterations=[], completions=other.run.completions) == other.run
        assert replace(recorded, run=other.run, stage_runs=[]) == other
    assert bool(repeats) == (POLICIES[policy] in STEADY_POLICIES)


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
    monkeypatch.setattr(Engine, "warm_up", lambda engine: None)  # some would learn from it
    clock.sleep = sleep
    clock.now = lambda: clock.time
    return clock


def without_texts(run):
    """A Run without what a simulation does not know: tokens, but for their number, and `launch`."""
    completions = [facts(completion) for completion in run.completions]
    iterations = [iteration._replace(launch=None) for iteration in run.iterations]
    return replace(run, completions=completions, iterations=iterations, drift=0.0)


def assert_same_schedule(config, load, tokens, clock):
    """An engine and a simulation decide the same. Returns the Requests of the engine."""
    real = serve(MODEL, config, load, tokens, now=clock.now, sleep=clock.sleep)
    simulated = simulate(Law(), config, load, tokens).run
    assert without_texts(simulated) == without_texts(real)
    return real.completions


@pytest.mark.parametrize(
    "policy, pages", [("orca", AMPLE), ("vllm", LITTLE), ("sarathi-serve", LITTLE)]
)
def test_the_engine_makes_the_same_schedule(policy, pages, clock):
    config = replace(CONFIG, policy=policy, pages=pages)
    preemptions = 0
    for seed in range(2):
        arrivals = random_arrivals(seed, 16, 0.3)
        tokens = prompts(arrivals, MODEL.config.vocab_size, seed)
        completions = assert_same_schedule(config, arrivals, tokens, clock)
        preemptions += sum(c.preemptions for c in completions)
    assert bool(preemptions) == (policy in GROWING and pages == LITTLE)


# one request in a micro-batch
ALONE = EngineConfig("orca", chunk=32, max_batch=1, max_len=32, page_size=32, pages=8)


def alone(arrivals, pp=1, hop=0.0, seconds=lambda batch: 1.0, config=ALONE, **options):
    """A simulation of batches of one request, of one second on each stage if not told otherwise."""
    return simulate(Law(pp, hop, seconds), config, arrivals, **options)


def test_bubbles_are_of_three_kinds():
    # A and B have three tokens each. Seconds on each stage: prefills A 1, B 3; decodes a 2, 3,
    # b 1, 1
    #   stage 0   A 0-1   B 1-4       a 4-6   (idle 6-7)   b 7-8   (idle 8-9)     a 9-12   b 12-13
    #   stage 1   A 1-2   (idle 2-4)  B 4-7    a 7-9       b 9-10  (idle 10-12)   a 12-15  b 15-16
    durations = {("A", 0): 1, ("B", 0): 3, ("A", 1): 2, ("B", 3): 1, ("A", 2): 3, ("B", 4): 1}

    def seconds(batch):
        return durations["AB"[batch[0].request.id], batch[0].start]

    result = alone(at_once((1, 3), (3, 3)), 2, seconds=seconds)
    kinds = [(r.stage, r.start, r.bubble, kind) for r, kind in bubble_kinds(result.stage_runs)]
    assert kinds == [(1, 4, 2, "PB1"), (0, 7, 1, "PB2"), (0, 9, 1, "PB3"), (1, 12, 2, "PB3")]
    assert list(result.bubbles.values()) == [3, 3]
    assert result.run.seconds == 16
    assert result.busy == {(0, 0): 11, (0, 1): 11}
    assert result.utilisation == 22 / 32


def test_a_request_is_aborted_while_it_runs_and_while_it_waits():
    simulation = Simulation(Law(seconds=lambda batch: 1.0), ALONE, replicas=2)
    assert simulation.step() == [] == simulation.step()
    assert simulation.ready_at() == float("inf")
    simulation.wait_until(2.5)
    for i in range(3):
        simulation.add(i, Arrival(2.5, 2, 3))
    first = simulation.step() + simulation.step()
    assert [(event.request.id, event.finish_reason) for event in first] == [(0, None), (1, None)]
    assert simulation.ready_at() == 3.5
    assert simulation.abort(1).token_times == [3.5]
    assert simulation.abort(2).token_times == []
    second, last = simulation.step() + simulation.step() + simulation.step()
    assert (second.request.id, last.request.id, last.finish_reason) == (0, 0, "length")
    assert last.request.token_times[-1] == 5.5
    assert all(each.pages.num_free == each.pages.total for each in simulation.schedulers)


def test_a_micro_batch_takes_what_another_preempted_at_once():
    # two requests of 3 + 5 tokens run on one replica, whose 8 tokens of memory are full at 2; the
    # other has been idle since 0 and computes the newer one again, so that it misses no token
    config = replace(CONFIG, max_len=8, page_size=1, pages=8)
    first, second = alone(at_once((3, 5), (3, 5)), config=config, replicas=2).run.completions
    assert first.token_times == second.token_times == [1, 2, 3, 4, 5]
    assert (first.preemptions, first.recomputed_tokens) == (0, 0)
    assert (second.preemptions, second.recomputed_tokens) == (1, 4)


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


def test_the_pages_left_longest_ago_are_evicted_first():
    """A and B leave two pages each, C takes the other four and those of A: B's are found later."""
    config = replace(ALONE, policy="sarathi-serve", page_size=4, prefix_caching=True)
    a, b, c = [1] * 9, [2] * 9, [3] * 21
    tokens = [a, b, c, b, a]
    load = [Arrival(100.0 * i, len(prompt), 1) for i, prompt in enumerate(tokens)]
    completions = simulate(Law(), config, load, tokens).run.completions
    assert [completion.cached_tokens for completion in completions] == [0, 0, 0, 8, 0]
