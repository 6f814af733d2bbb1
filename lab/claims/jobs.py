"""Runs on the papers' machines, as jobs: processes can share a list of them.

    runs = setup.run_all(offline, {"orca": OfflineJob(cost, config, arrivals), ...})

Read first: systems.py, lab/simulator/simulation.py. Read next: cost_lab.py."""

import math
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol, TypeVar

from config import EngineConfig
from lab.claims.systems import Server
from lab.measure import metrics
from lab.measure.capacity import (
    STEP,
    Bounded,
    Hopeless,
    Verdict,
    possible_qps,
    search_capacity,
)
from lab.measure.metrics import RunSummary
from lab.measure.run_loop import Run
from lab.measure.run_plan import run_plan
from lab.measure.workload import LENGTHS, Arrival, poisson, sample_lengths
from lab.simulator.cost_model import CostModel
from lab.simulator.machine import base_of
from lab.simulator.simulation import simulate
from request import Completion

Job = TypeVar("Job")
Result = TypeVar("Result")
Name = TypeVar("Name", bound=Hashable)

# Capacities of shorter runs are biased, and those of one policy more than those of another: with 64
# requests Mistral-7B's gain over vllm is a fifth larger than with 512.
FEWEST_REQUESTS = 256
FIRST_STEP = 3  # where searches begin: about the upper bound, as runs that fail are given up soon


class Runner(Protocol):
    """Calls a function with each of some jobs, maybe in parallel, and keeps their order."""

    def __call__(self, function: Callable[[Job], Result], jobs: Sequence[Job]) -> list[Result]: ...


def run_one_by_one(function: Callable[[Job], Result], jobs: Sequence[Job]) -> list[Result]:
    """The Runner of this process."""
    return [function(job) for job in jobs]


def run_all(
    run: Runner, function: Callable[[Job], Result], jobs: Mapping[Name, Job]
) -> dict[Name, Result]:
    """{name: function(job)} of some jobs, maybe in parallel."""
    return dict(zip(jobs, run(function, list(jobs.values())), strict=True))


@dataclass(frozen=True)
class Setup:
    """What the command tells each claim."""

    run: Runner = run_one_by_one
    requests: int = 512  # in each run of the serving experiments
    cpu_ms: float = 0.0  # CPU time of each stage in an iteration, in Sarathi-Serve's experiments

    def run_all(
        self, function: Callable[[Job], Result], jobs: Mapping[Name, Job]
    ) -> dict[Name, Result]:
        """As `run_all`."""
        return run_all(self.run, function, jobs)

    @property
    def cpu_s(self) -> float:
        """The CPU time in seconds."""
        return self.cpu_ms / 1e3

    def __str__(self) -> str:
        """The CPU time and the number of requests, and whether that is too few."""
        cpu = f"{self.cpu_ms:g} ms of CPU per stage" if self.cpu_ms else "no CPU time"
        text = f"{cpu}, {self.requests:,} requests"
        if self.requests < FEWEST_REQUESTS:
            text += f": too short a run, gains need {FEWEST_REQUESTS} or more"
        return text


@dataclass(frozen=True)
class OfflineJob:
    """Requests that are all there at time 0."""

    cost: CostModel
    config: EngineConfig
    arrivals: Sequence[Arrival]
    replicas: int = 1


@dataclass(frozen=True)
class OfflineRun:
    """What was seen of an OfflineJob. Times are in seconds."""

    batch: int
    makespan_s: float
    utilisation: float  # share of the time that the stages worked
    bubbles: list[float]  # of each request
    ends: list[float]  # when each request was done

    @property
    def median_bubble_s(self) -> float:
        """The bubble of a request, in the median."""
        return median(self.bubbles)


def offline(job: OfflineJob) -> OfflineRun:
    """Simulate requests that are all there at time 0."""
    simulated = simulate(job.cost, job.config, job.arrivals, replicas=job.replicas, record=False)
    return OfflineRun(
        batch=job.config.max_batch or 0,
        makespan_s=simulated.run.seconds,
        utilisation=simulated.utilisation,
        bubbles=list(simulated.bubbles.values()),
        ends=[completion.token_times[-1] for completion in simulated.run.completions],
    )


@dataclass(frozen=True)
class ServingJob:
    """Poisson arrivals with lengths of a trace; all are there at time 0 if `qps` is infinite."""

    cost: CostModel
    server: Server  # its token budget is 512 if the policy names none
    trace: str  # a name in LENGTHS
    qps: float
    requests: int
    seed: int = 0


def latencies(job: ServingJob) -> RunSummary:
    """The summary of a run in all the memory there is."""
    run = serve(job)
    return metrics.summarize_run(run.completions, [], run.seconds)


def serve(job: ServingJob, tbt_slo_s: float | None = None) -> Run:
    """A run in all the memory there is. It is cut short when it is sure to miss `tbt_slo_s`."""
    limit = LENGTHS[job.trace].limit
    config = EngineConfig(
        policy="vllm",
        chunk=512,
        max_batch=job.server.batch,
        max_len=limit,
        page_size=64,
        pages=job.cost.kv_tokens() // 64,
    )
    lengths = sample_lengths(job.trace, job.requests, limit, job.seed)
    arrivals = poisson(lengths, job.qps, job.seed)
    config = run_plan([job.server.policy], [64], config)[job.server.policy]
    gives_up = None if tbt_slo_s is None else Hopeless(arrivals, tbt_slo_s)
    return simulate(job.cost, config, arrivals, record=False, gives_up=gives_up).run


@dataclass(frozen=True)
class Target:
    """A capacity that is searched for: the highest rate at which a server meets an SLO."""

    server: Server
    slo_s: float  # of P99 TBT
    ratio: float  # how close the search comes


@dataclass(frozen=True)
class CapacityJob:
    """Searches for capacities on one machine and trace. Targets of one policy share runs."""

    cost: CostModel
    trace: str  # a name in LENGTHS
    targets: tuple[Target, ...]
    requests: int


@dataclass(frozen=True)
class KnownRun:
    """What a search keeps of a run."""

    batch: int
    most_running: int  # requests at once
    summary: RunSummary | None  # None: it missed even the largest SLO of its policy

    def is_that_of(self, batch: int) -> bool:
        """Whether the run is the same with this batch size: neither limit was ever reached."""
        return batch == self.batch or self.most_running < min(batch, self.batch)


def find_capacities(job: CapacityJob) -> dict[Target, Bounded]:
    """The capacity of each target in requests per second."""
    lengths = sample_lengths(job.trace, job.requests, LENGTHS[job.trace].limit, 0)
    start_qps = 0.3 * job.cost.pp * possible_qps(base_of(job.cost), lengths)
    start_qps = float(f"{start_qps:.1g}")
    known_runs: dict[tuple[str, float], list[KnownRun]] = {}  # (policy, rate) -> runs

    def run_at(server: Server, qps: float) -> KnownRun:
        """A run that is known already, or a new one."""
        runs = known_runs.setdefault((server.policy, qps), [])
        for known in runs:
            if known.is_that_of(server.batch):
                return known
        same_policy = [each for each in job.targets if each.server.policy == server.policy]
        largest_slo_s = max(each.slo_s for each in same_policy)
        serving = ServingJob(job.cost, server, job.trace, qps, job.requests)
        run = serve(serving, largest_slo_s)
        summary = None
        if not run.cut_short:
            summary = metrics.summarize_run(run.completions, [], run.seconds)
        runs.append(KnownRun(server.batch, most_at_once(run.completions), summary))
        return runs[-1]

    capacities = {}
    step = FIRST_STEP
    for target in job.targets:

        def verdict(qps: float, target: Target = target) -> Verdict:
            summary = run_at(target.server, qps).summary
            if summary is None:
                return Verdict(missed="given up")
            return Verdict(missed=metrics.missed(summary, target.slo_s))

        search = search_capacity(verdict, start_qps, target.ratio, first_step=step)
        capacities[target] = search.capacity_qps
        step = round(math.log(search.capacity_qps / start_qps, STEP))  # others are not far away
    return capacities


def most_at_once(completions: Iterable[Completion]) -> int:
    """The largest number of requests that had been scheduled and had not ended."""
    starts = []
    ends = []
    for completion in completions:
        if completion.scheduled is not None:
            starts.append(completion.scheduled)
            is_aborted = completion.finish_reason == "abort"
            ends.append(math.inf if is_aborted else completion.token_times[-1])
    starts.sort()
    ends.sort()
    running = [i + 1 - bisect_right(ends, start) for i, start in enumerate(starts)]
    return max(running, default=0)
