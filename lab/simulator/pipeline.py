"""What a pipeline of processes does, measured and simulated: stages that are timed, and bubbles.

    cost = fit_stages(runner, cases)                           a Cost of the stages here
    measured = serve_pipeline(model, config, arrivals, prompts)
    simulated = simulate(cost, measured.config, arrivals)
    summarize(simulated.run, simulated.busy, simulated.bubbles, simulated.stage_runs)

Read first: simulation.py, parallel/stages.py. Read next: lab/commands/pipeline.py."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

from config import EngineConfig
from engine import Engine
from lab.measure import load_run
from lab.measure.run_loop import Run
from lab.measure.timing import BUSY
from lab.measure.token_budget import Profiled, hybrid_spans
from lab.measure.workload import Arrival
from lab.simulator.cost_model import FittedCost
from lab.simulator.simulation import bubble_kinds
from parallel.shard import Shard
from parallel.stages import ParallelEngine, ParallelRunner, SentChunk, StageResult, StageSeconds
from policies.micro_batches import StageRun

FOLLOWING = 4  # batches that follow each other where stages are timed


@dataclass(frozen=True)
class StageSummary:
    """What one stage did, in seconds."""

    busy_s: float
    bubble_s: float
    idle_s: float  # all else, but for bubbles
    own: float | None = None  # neither computing nor waiting, as a share of busy_s
    sums: float | None = None  # sums over ranks with their waiting, as a share of busy_s


@dataclass(frozen=True)
class PipelineSummary:
    """What a pipeline did in a run, measured or simulated."""

    makespan_s: float
    tokens_per_s: float  # prompts and outputs
    median_bubble_s: float  # of a request
    kinds_s: dict[str, float]  # seconds of the bubbles PB1, PB2 and PB3
    stages: list[StageSummary]
    busy: bool  # whether the machine was too busy to tell

    @property
    def bubbles_s(self) -> float:
        """Seconds of the bubbles of all stages."""
        return sum(stage.bubble_s for stage in self.stages)

    def to_json(self) -> dict[str, Any]:
        """What a report has of the run."""
        fields: dict[str, Any] = asdict(self) | {"bubbles_s": self.bubbles_s} | self.kinds_s
        del fields["kinds_s"]
        for stage in fields["stages"]:
            for name in [name for name, value in stage.items() if value is None]:
                del stage[name]
        return fields


@dataclass(frozen=True)
class MeasuredPipeline:
    """What was seen of a run by processes."""

    summary: PipelineSummary
    config: EngineConfig  # with all numbers filled in
    stage_runs: list[StageRun]


def fit_stages(runner: ParallelRunner, cases: Iterable[tuple[int, int, int]]) -> FittedCost:
    """The FittedCost of the stages of a runner, from times of some batches: (budget, context,
    decodes), see token_budget.hybrid_spans. Several of each follow each other, so that each stage
    is timed while the others work."""
    profiles: list[list[tuple[Any, float]]] = [[] for _ in range(runner.ranks.pp)]
    hops_s = []
    for case in cases:
        results = time_following_batches(runner, case)
        for earlier, later in pairwise(results[0]):  # the first batch finds empty stages
            hops_s.append(later.start - earlier.end)
        shape = Profiled(*case, seconds=0.0).shape
        for profile, of_stage in zip(profiles, zip(*results, strict=True), strict=True):
            profile.append((shape, seconds_of_batch(of_stage)))
    return FittedCost(profiles, hop_s=max(0.0, median(hops_s or [0.0])))


def time_following_batches(
    runner: ParallelRunner, case: tuple[int, int, int]
) -> list[list[StageResult]]:
    """The results of all stages, for each of some equal batches that follow each other. The batches
    run twice, and the first time does not count."""
    chunks = [SentChunk.of(chunk) for chunk in hybrid_spans(runner.cache, *case)]
    results = []
    for _ in range(2):
        commands = [runner.send(chunks) for _ in range(FOLLOWING)]
        results = [runner.collect(command) for command in commands]
    return results


def seconds_of_batch(results: Sequence[StageResult]) -> float:
    """How long a stage takes for one of some batches that follow each other: to compute it, and
    for its other work between two batches, without waiting."""
    computing = median(result.end - result.start for result in results)
    between = median(
        later.start - earlier.end - later.waited for earlier, later in pairwise(results)
    )
    return computing + max(0.0, between)


def serve_pipeline(
    model: Shard,
    config: EngineConfig,
    arrivals: Sequence[Arrival],
    prompts: Sequence[list[int]],
) -> MeasuredPipeline:
    """Serve `arrivals` by the processes of `model`."""
    ranks = model.ranks
    engines: list[ParallelEngine] = []
    before: list[StageSeconds] = []

    def begin(engine: Engine) -> None:
        """Let the record of the stages begin with the run."""
        assert isinstance(engine, ParallelEngine)
        engine.micro_batches.reset()
        engine.record = True
        engines.append(engine)
        before.extend(ranks.call("seconds"))

    run = load_run.serve(model, config, arrivals, prompts, before_start=begin)
    after: list[StageSeconds] = ranks.call("seconds")
    (engine,) = engines
    pipeline = engine.micro_batches
    summary = summarize(run, pipeline.busy, pipeline.bubbles, pipeline.stage_runs)
    stages = []
    for number, stage in enumerate(summary.stages):
        first_rank = number * ranks.tp
        start = before[first_rank]
        end = after[first_rank]
        waited_s = end.waited - start.waited
        own_s = end.now - start.now - waited_s - stage.busy_s
        sums_s = end.summing - start.summing
        stages.append(replace(stage, own=own_s / stage.busy_s, sums=sums_s / stage.busy_s))
    return MeasuredPipeline(replace(summary, stages=stages), engine.config, pipeline.stage_runs)


def summarize(
    run: Run,
    busy: Mapping[tuple[int, int], float],
    bubbles: Mapping[int, float],
    stage_runs: Sequence[StageRun],
) -> PipelineSummary:
    """The PipelineSummary of one pipeline. `busy` has the seconds that each (replica, stage)
    computed, `bubbles` those that stages waited for each request."""
    kinds_s = {"PB1": 0.0, "PB2": 0.0, "PB3": 0.0}
    bubbles_s = dict.fromkeys(busy, 0.0)  # of each stage
    for stage_run, kind in bubble_kinds(stage_runs):
        kinds_s[kind] += stage_run.bubble
        bubbles_s[stage_run.replica, stage_run.stage] += stage_run.bubble
    stages = [
        StageSummary(
            busy_s=busy[stage],
            bubble_s=bubbles_s[stage],
            idle_s=run.seconds - busy[stage] - bubbles_s[stage],
        )
        for stage in busy
    ]
    tokens = sum(len(completion.tokens) for completion in run.completions)
    return PipelineSummary(
        makespan_s=run.seconds,
        tokens_per_s=tokens / run.seconds,
        median_bubble_s=median([bubbles.get(completion.id, 0.0) for completion in run.completions]),
        kinds_s=kinds_s,
        stages=stages,
        busy=run.drift > BUSY,
    )
