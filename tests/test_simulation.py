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


class CheckedSimulation(Simulation):
    """A Simulation that looks at each batch before it is computed."""

    def next_batch(self, number, now):
        batch = super().next_batch(number, now)
        scheduler = self.schedulers[number]
        pages = scheduler.pages
        check_integrity(pages, [request.pages for request in scheduler.running])  # only its share
        assert batch is None or 0 < len(batch) <= len(scheduler.running) <= CONFIG.max_batch
        for request, start, length in batch or ():
            assert start == request.num_computed
            assert start + length <= len(request.pages) * pages.page_size
        return batch


def replay(simulation, run, arrivals):
    """Follow the chunks of a run: each goes on where the last one ended, and its batch is on each
    stage as soon as stage, requests and micro-batch are ready. Tokens come when it leaves."""
    law = simulation.cost
    computed = Counter()
    times = [[] for _ in arrivals]
    running = defaultdict(set)  # by micro-batch
    free = Counter()  # by stage, when it has finished
    left = Counter()  # by micro-batch, when its last batch has left the last stage
    busy = Counter()
    waited = Counter()
    rows = iter(simulation.stage_runs)
    for iteration in run.iterations:
        stage_runs = [next(rows) for _ in range(law.pp)]
        (micro_batch,) = {(row.replica, row.micro_batch) for row in stage_runs}
        mine = running[micro_batch]
        for i in iteration.preempted:
            mine.remove(i)
            computed[i] = 0
        decoding = {i for i in mine if times[i] and computed[i] + 1 == needs(arrivals, times, i)}
        batch = {i: length for i, _, length, _ in iteration.chunks}
        assert iteration.chunks == [(i, computed[i], n, i in decoding) for i, n in batch.items()]
        if simulation.config.policy == "sarathi-serve":
            assert decoding <= batch.keys()
        if simulation.config.policy == "request-level":
            assert mine in (set(), batch.keys())
        seconds, hop = law.stages([chunk[:3] for chunk in iteration.chunks])
        ready = stage_runs[0].start
        came = max(arrivals[i].time for i in batch)
        assert ready >= max(left[micro_batch], free[micro_batch[0], 0], came)
        for stage, row in enumerate(stage_runs):
            place = row.replica, stage
            start = max(ready, free[place])
            end = start + seconds[stage]
            assert row[1:2] + row[3:5] == (stage, start, end) and row.chunks == iteration.chunks
            assert 0 <= row.bubble <= start - free[place]
            waited.update(dict.fromkeys(batch, row.bubble))
            busy[place] += seconds[stage]
            free[place] = end
            ready = end + hop
        left[micro_batch] = end
        assert (iteration.start, iteration.end) == (stage_runs[0].start, end)
        for i, length in batch.items():
            mine.add(i)
            computed[i] += length
            if computed[i] == needs(arrivals, times, i):
                times[i].append(end)
                if len(times[i]) == arrivals[i].output_len:
                    mine.remove(i)
    assert next(rows, None) is None and run.seconds == max(left.values())
    assert simulation.busy == busy
    assert [*simulation.bubbles.values()] == [waited[i] for i in range(len(arrivals))]
    return times


def needs(arrivals, times, i):
    """The tokens of a request that are known."""
    return arrivals[i].prompt_len + len(times[i])


@in_all_shapes
@pytest.mark.parametrize("pages", [AMPLE, LITTLE])
@under_all_policies
def test_every_token_is_computed_once_and_as_soon_as_it_can_be(policy, pages, pp, replicas):
    preemptions = 0
    config = replace(CONFIG, policy=policy, pages=pp * pages)
    for seed, mean_gap in ((0, 0.25), (1, 0.0), (2, 2.0)):
        arrivals = random_arrivals(seed, 24 * pp, mean_gap)
        ended = []
        simulation = CheckedSimulation(Law(pp, 1 / 64, uneven=True), config, replicas=replicas)
        observed = []
        for scheduler in simulation.schedulers:
            scheduler.observe = lambda batch, seconds, observed=observed: observed.append(seconds)
        run = LoadRun(simulation, arrivals, progress=partial(ended.append, 1)).run()
        times = replay(simulation, run, arrivals)
        assert observed == [each.end - each.start for each in run.iterations]  # with all waiting
        computed = Counter()
        preempted = Counter(i for iteration in run.iterations for i in iteration.preempted)
        for iteration in run.iterations:
            computed.update({i: length for i, _, length, _ in iteration.chunks})
        for i, (arrival, done) in enumerate(zip(arrivals, run.completions, strict=True)):
            assert (done.request_id, done.finish_reason) == (i, "length")
            assert (done.arrival, len(done.prompt)) == arrival[:2]
            assert done.token_times == times[i] and len(done.tokens) == arrival.output_len
            once = arrival.prompt_len + arrival.output_len - 1
            assert computed[i] == once + done.recomputed_tokens
            assert preempted[i] == done.preemptions <= done.recomputed_tokens
            assert arrival.time <= done.scheduled < done.token_times[0]
        preemptions += preempted.total()
        assert simulation.batches == len(run.iterations)
        assert len(ended) == len(arrivals) and not run.refused and run.cut_short is None
        assert not simulation.queue and not simulation.requests
        assert [each.pages.num_free for each in simulation.schedulers] == [pages] * pp * replicas
    assert bool(preemptions) == (policy in GROWING and pages == LITTLE)  # or it tests nothing


@pytest.mark.parametrize("pp, replicas", [(1, 1), (2, 2)])
@pytest.mark.parametrize("pages", [AMPLE, LITTLE])
@under_all_policies
def test_a_simulation_without_a_record_computes_the_same(policy, pages, pp, replicas):
    law = Law(pp, 1 / 64, uneven=True)
    config = replace(CONFIG, policy=policy, pages=pp * pages)
    arrivals = random_arrivals(0, 16 * pp, 0.25)
    recorded, other = (
        simulate(law, config, arrivals, replicas=replicas, record=record)
        for record in (True, False)
    )
    assert replace(recorded.run, iterations=[]) == replace(other.run, own_fraction=0.0)
    assert replace(recorded, run=other.run, stage_runs=[]) == other
    share = sum(other.busy.values()) / pp / replicas / other.run.seconds
    assert other.utilisation == pytest.approx(share)


@pytest.mark.parametrize("pp, replicas", [(1, 1), (2, 2)])
@pytest.mark.parametrize("pages", [AMPLE, LITTLE])
@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "dynamic"])
def test_decodes_that_are_repeated_are_those_of_the_policy(
    policy, pages, pp, replicas, monkeypatch
):
    repeats = []
    repeat = Simulation._repeat
    monkeypatch.setattr(Simulation, "_repeat", lambda *args: repeats.append(args) or repeat(*args))
    cost = CostModel.named("llama-7b", pp=pp, cpu_s=1e-3)
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
    assert result.busy == {(0, 0): 11, (0, 1): 11} and result.utilisation == 22 / 32


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


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_the_cpu_takes_its_time_on_every_stage(pp):
    costs = [CostModel.named("gpt3-175b", tp=8, pp=pp, cpu_s=cpu_s) for cpu_s in (0.125, 0.0)]
    with_cpu, without = [simulate(cost, ALONE, at_once((3, 5))) for cost in costs]
    for stage, seconds in without.busy.items():
        assert with_cpu.busy[stage] == pytest.approx(seconds + 5 * 0.125)
    assert with_cpu.run.seconds == pytest.approx(without.run.seconds + 5 * pp * 0.125)
    assert all(each.launch == each.start + 0.125 for each in with_cpu.run.iterations)
    own_fraction = 5 * pp * 0.125 / sum(with_cpu.busy.values())
    assert with_cpu.run.own_fraction == pytest.approx(own_fraction)


def test_a_request_is_aborted_while_it_runs_and_while_it_waits():
    simulation = Simulation(Law(seconds=lambda batch: 1.0), ALONE, replicas=2)
    assert simulation.step() == [] == simulation.step()
    assert simulation.ready_at() == float("inf") and simulation.last_iteration is None
    simulation.wait_until(2.5)
    for i in range(3):
        simulation.add(i, Arrival(2.5, 2, 3))
    events = [event for _ in range(2) for event in simulation.step()]
    assert [event[:4] for event in events] == [(i, 0, None, None) for i in range(2)]
    assert simulation.last_iteration.chunks == [(1, 0, 2, False)] and simulation.ready_at() == 3.5
    aborted = [simulation.abort(i) for i in (1, 2)]
    assert [done.finish_reason for done in aborted] == ["abort"] * 2
    assert [done.token_times for done in aborted] == [[3.5], []]
    events = [event for _ in range(3) for event in simulation.step()]
    assert [event.request_id for event in events] == [0, 0]
    assert events[1].finish_reason == "length" and events[1].completion.token_times[-1] == 5.5
    assert all(each.pages.num_free == each.pages.total for each in simulation.schedulers)


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


@pytest.mark.parametrize("options, budget", [({}, 256), ({"tile": 1}, 300)])
def test_a_budget_is_in_whole_tiles_of_the_device_by_default(options, budget):
    config = replace(CONFIG, policy="sarathi", chunk=300, policy_options=options)
    cost = CostModel.named("gpt3-175b", tp=8)
    assert Simulation(cost, config).schedulers[0].budget == budget


FEW = "pages=7: a request of max_len=32 takes 8 pages"
UNKNOWN = "=1: policy 'vllm' has no such option"
BAD = [
    (dict(policy="fifo"), "policy='fifo'.*sarathi-serve"),
    (dict(pages=7), FEW),
    (dict(cost=Law(2), pages=15), FEW),  # enough for one, but not in each half
    (dict(policy="sarathi", policy_options={"tile": 0}), "tile=0"),
    (dict(policy="sarathi", chunk="auto"), "chunk='auto': must be a whole number"),
    (dict(arrivals=at_once((20, 13))), "prompt of 20 .* max_new_tokens=13.*max_len=32"),
    (dict(prefix_caching=True), "prompts=None: prefix_caching needs their token ids"),
    *((dict(replicas=count), f"replicas={count}") for count in (0, 1.5)),
    *((dict(policy_options={name: 1}), name + UNKNOWN) for name in ("prefills", "tile")),
    *(({name: None}, f"{name}=None") for name in ("max_batch", "max_len", "page_size", "pages")),
]


@pytest.mark.parametrize("changes, message", BAD)
def test_bad_arguments_are_refused(changes, message):
    others = dict(cost=Law(), arrivals=at_once((3, 4)), replicas=1)
    others |= {name: value for name, value in changes.items() if name in others}
    config = {name: value for name, value in changes.items() if name not in others}
    with pytest.raises(ValueError, match=message):
        simulate(config=replace(CONFIG, **config), **others)


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


@pytest.mark.parametrize(
    "times, refused",
    [
        ((0.0, 0.25, 0.5, 0.75, 1.125, 1.1875), [3, 5]),  # 2 waits to 1, 4 from 1.125 on
        ((0.0, 0.0, 0.0), [1, 2]),  # nobody is taken before all that came at once have looked
    ],
)
def test_a_full_queue_refuses_requests_of_all_replicas(times, refused):
    arrivals = [Arrival(time, 1, 1) for time in times]
    run = alone(arrivals, config=replace(ALONE, max_waiting=1), replicas=2).run
    reasons = [completion.finish_reason for completion in run.completions]
    assert reasons == ["abort" if i in refused else "length" for i in range(len(times))]
    assert run.refused == len(refused) and not any(run.completions[i].token_times for i in refused)
