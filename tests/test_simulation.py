"""Simulated schedules, held against a replay chunk by chunk, times by hand, and the engine.

All times here are sums of binary fractions, unless a CostModel makes them: no sum is rounded, and
== may be asked."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from config import EngineConfig
from lab.measure.run_loop import LoadRun
from lab.measure.workload import Arrival, prompts
from lab.simulator.cost_model import CostModel, StageTimes
from lab.simulator.simulation import STEADY_POLICIES, Simulation, bubble_kinds, simulate
from policies import POLICIES
from tests.helpers import GROWING, IN_ORDER, facts

# pages for each micro-batch: for max_batch requests of max_len, and for hardly more than one
AMPLE = 32
LITTLE = 10
CONFIG = EngineConfig(
    "vllm",
    chunk=8,
    max_batch=4,
    max_len=32,
    page_size=4,
    pages=AMPLE,
)
ALONE = replace(
    CONFIG,
    policy="orca",
    chunk=32,
    max_batch=1,
    page_size=32,
    pages=8,
)
in_much_and_little_memory = pytest.mark.parametrize("pages", [AMPLE, LITTLE])
on_one_and_four = pytest.mark.parametrize("pp, replicas", [(1, 1), (2, 2)])


class Law:
    """The cost of a batch: `seconds` of it on every stage, and half more on odd ones if uneven."""

    cpu_s = 0.0
    tile = 1

    def __init__(self, seconds=None, pp=1, hop=0.0, uneven=False):
        self.seconds = seconds or by_tokens
        self.pp = pp
        self.hop = hop
        self.odd = 1.5 if uneven else 1

    def stages(self, batch):
        seconds = self.seconds(batch)
        return StageTimes([seconds * self.odd ** (stage % 2) for stage in range(self.pp)], self.hop)


def by_tokens(batch):
    """Flat for a few tokens, then as many as there are, and time for each (query, key) pair."""
    tokens = sum(length for _, _, length in batch)
    pairs = sum(length * (start + 1) for _, start, length in batch)
    return max(8, tokens) / 64 + pairs / 1024


def a_second(batch):
    return 1.0


def random_arrivals(seed, count=16, mean_gap=0.25):
    """Requests of 2 to 32 tokens, at random multiples of 1 / 1024 s, or some of them at once."""
    draw = random.Random(seed)
    time = 0
    arrivals = []
    for _ in range(count):
        if draw.random() < 0.5 and mean_gap:
            time += round(1024 * draw.expovariate(1 / mean_gap))
        arrivals.append(Arrival(time / 1024, draw.randint(1, 20), draw.randint(1, 12)))
    return arrivals


def at_once(*lengths):
    return [Arrival(0.0, *pair) for pair in lengths]


class Replay:
    """A run followed chunk by chunk: each goes on where the last one of its request ended, and its
    batch is on each stage as soon as the stage and the batch are ready."""

    def __init__(self, simulation, arrivals):
        self.cost = simulation.cost
        self.arrivals = arrivals
        self.stage_runs = iter(simulation.stage_runs)
        self.token_times = [[] for _ in arrivals]
        self.computed = Counter()  # of each request, since its last preemption
        self.tokens = Counter()  # that were computed for it in all
        self.preemptions = Counter()
        self.waited = Counter()
        self.free = Counter()  # when a stage has finished
        self.busy = Counter()
        self.left = Counter()  # when a micro-batch has left its last stage
        self.begun = set()
        self.overtakes = False

    def follow(self, iteration):
        for request in iteration.preempted:
            self.computed[request] = 0
            self.preemptions[request] += 1
            self.begun.discard(request)
        self.check_times(iteration)
        for request, start, length, is_decode in iteration.chunks:
            known = self.arrivals[request].prompt_len + len(self.token_times[request])
            assert start == self.computed[request]
            assert is_decode == (bool(self.token_times[request]) and start + 1 == known)
            self.begun.add(request)
            self.computed[request] += length
            self.tokens[request] += length
            if self.computed[request] == known:
                self.token_times[request].append(iteration.end)
        newest = max(chunk.request_id for chunk in iteration.chunks)
        self.overtakes |= not self.begun.issuperset(range(newest))

    def check_times(self, iteration):
        chunks = iteration.chunks
        number = iteration.micro_batch
        ready = iteration.start
        assert 0 < len(chunks) <= CONFIG.max_batch
        assert ready >= max(self.arrivals[chunk.request_id].time for chunk in chunks)
        assert ready >= self.left[number]
        seconds, hop = self.cost.stages([chunk[:3] for chunk in chunks])
        for stage, duration in enumerate(seconds):
            place = number // self.cost.pp, stage
            row = next(self.stage_runs)
            start = max(ready, self.free[place])
            end = start + duration
            assert (row.replica, row.stage, row.start, row.end) == (*place, start, end)
            assert 0 <= row.bubble <= start - self.free[place]
            for chunk in chunks:
                self.waited[chunk.request_id] += row.bubble
            self.busy[place] += duration
            self.free[place] = end
            ready = end + hop
        assert iteration.end == end
        self.left[number] = end


@on_one_and_four
@in_much_and_little_memory
@pytest.mark.parametrize("policy", POLICIES)
def test_every_token_is_computed_once_and_as_soon_as_it_can_be(policy, pages, pp, replicas):
    preemptions = 0
    config = replace(CONFIG, policy=policy, pages=pp * pages)
    for mean_gap in (0.25, 0.0):
        arrivals = random_arrivals(0, 24 * pp, mean_gap)
        simulation = Simulation(Law(None, pp, 1 / 64, uneven=True), config, replicas=replicas)
        run = LoadRun(simulation, arrivals).run()
        replay = Replay(simulation, arrivals)
        for iteration in run.iterations:
            replay.follow(iteration)
        assert next(replay.stage_runs, None) is None
        for i, (arrival, request) in enumerate(zip(arrivals, run.completions, strict=True)):
            assert (request.id, request.finish_reason) == (i, "length")
            assert (request.arrival, request.prompt_len, len(request.output)) == arrival[:3]
            assert request.token_times == replay.token_times[i]
            once = arrival.prompt_len + arrival.output_len - 1
            assert replay.tokens[i] == once + request.recomputed_tokens
            assert replay.preemptions[i] == request.preemptions
            assert simulation.bubbles[i] == replay.waited[i]
        assert run.seconds == max(replay.left.values())
        assert simulation.busy == replay.busy
        free = [scheduler.pages.num_free for scheduler in simulation.schedulers]
        assert free == [pages] * pp * replicas
        preemptions += replay.preemptions.total()
        if policy in IN_ORDER and pp * replicas == 1:
            assert not replay.overtakes
    assert bool(preemptions) == (policy in GROWING and pages == LITTLE)  # or it tests nothing


@on_one_and_four
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
        recorded = simulate(cost, config, arrivals, replicas=replicas)
        quick = simulate(cost, config, arrivals, replicas=replicas, record=False)
        requests = [facts(request) for request in quick.run.completions]
        assert requests == [facts(request) for request in recorded.run.completions]
        assert quick.busy == recorded.busy
        assert quick.bubbles == recorded.bubbles
        assert quick.run.seconds == recorded.run.seconds
    assert bool(repeats) == (POLICIES[policy] in STEADY_POLICIES)


def test_bubbles_are_of_three_kinds():
    # A and B have three tokens each. Seconds on each stage: prefills A 1, B 3; decodes a 2, 3,
    # b 1, 1
    #   stage 0   A 0-1   B 1-4       a 4-6   (idle 6-7)   b 7-8   (idle 8-9)     a 9-12   b 12-13
    #   stage 1   A 1-2   (idle 2-4)  B 4-7    a 7-9       b 9-10  (idle 10-12)   a 12-15  b 15-16
    durations = {("A", 0): 1, ("B", 0): 3, ("A", 1): 2, ("B", 3): 1, ("A", 2): 3, ("B", 4): 1}
    law = Law(lambda batch: durations["AB"[batch[0].request.id], batch[0].start], pp=2)
    simulated = simulate(law, ALONE, at_once((1, 3), (3, 3)))
    kinds = [(r.stage, r.start, r.bubble, kind) for r, kind in bubble_kinds(simulated.stage_runs)]
    assert kinds == [(1, 4, 2, "PB1"), (0, 7, 1, "PB2"), (0, 9, 1, "PB3"), (1, 12, 2, "PB3")]
    assert list(simulated.bubbles.values()) == [3, 3]
    assert simulated.run.seconds == 16
    assert simulated.busy == {(0, 0): 11, (0, 1): 11}


def test_a_request_is_aborted_while_it_runs_and_while_it_waits():
    simulation = Simulation(Law(a_second), ALONE)
    simulation.add(0, Arrival(0.0, 2, 3))
    simulation.add(1, Arrival(0.0, 2, 3))
    simulation.step()
    assert simulation.abort(0).token_times == [1.0]
    assert simulation.abort(1).token_times == []
    assert simulation.step() == []
    assert simulation.ready_at() == float("inf")
    assert simulation.schedulers[0].pages.num_free == ALONE.pages


def test_a_micro_batch_takes_what_another_preempted_at_once():
    # two requests of 3 + 5 tokens run on one replica, whose 8 tokens of memory are full at 2; the
    # other has been idle since 0 and computes the newer one again, so that it misses no token
    config = replace(CONFIG, max_len=8, page_size=1, pages=8)
    run = simulate(Law(a_second), config, at_once((3, 5), (3, 5)), replicas=2).run
    first, second = run.completions
    assert first.token_times == second.token_times == [1, 2, 3, 4, 5]
    assert (first.preemptions, first.recomputed_tokens) == (0, 0)
    assert (second.preemptions, second.recomputed_tokens) == (1, 4)


def test_a_shared_prefix_costs_no_time_again_on_the_same_replica():
    """Prefixes of 9 tokens, two pages of 4; a token takes a second. The third is on the other."""
    config = replace(ALONE, page_size=4, prefix_caching=True)
    load = [Arrival(time, 12, 1) for time in (0.0, 20.0, 20.0)]
    law = Law(lambda batch: sum(chunk.length for chunk in batch))
    run = simulate(law, config, load, prompts(load, 61, 0, (9, 1)), replicas=2).run
    assert [iteration.micro_batch for iteration in run.iterations] == [0, 1, 0]
    assert [request.ttft for request in run.completions] == [12, 12, 12 - 8]
    assert [request.cached_tokens for request in run.completions] == [0, 0, 8]
