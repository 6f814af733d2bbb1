"""Runs on the papers' machines, as jobs: processes can share a list of them.

    runs = setup.run_all(offline, {"orca": OfflineJob(cost, config, arrivals), ...})

Read first: systems.py, lab/simulator/simulation.py. Read next: cost_lab.py."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar

from config import EngineConfig
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

Job = TypeVar("Job")
Result = TypeVar("Result")
Name = TypeVar("Name", bound=Hashable)
# Calls a function with each of some jobs, maybe in parallel, and keeps their order.
Runner = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]

# Capacities of shorter runs are biased, and those of one policy more than those of another: with 64
# requests Mistral-7B's gain over vllm is a fifth larger than with 512.
FEWEST_REQUESTS = 256
FIRST_STEP = 3  # where searches begin: about the upper bound, as runs that fail are given up soon


def run_one_by_one(function: Callable[[Any], Any], jobs: Sequence[Any]) -> list[Any]:
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
    cpu_s: float = 0.0  # CPU time of each stage in an iteration, in Sarathi-Serve's experiments

    def run_all(
        self, function: Callable[[Job], Result], jobs: Mapping[Name, Job]
    ) -> dict[Name, Result]:
        """As `run_all`."""
        return run_all(self.run, function, jobs)

    def __str__(self) -> str:
        """The CPU time and the number of requests, and whether that is too few."""
        cpu = f"{1e3 * self.cpu_s:g} ms of CPU per stage" if self.cpu_s else "no CPU time"
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

    makespan_s: float
    utilisation: float  # share of the time that the stages worked
    bubbles: list[float]  # of each request
    ends: list[float]  # when each request was done


def offline(job: OfflineJob) -> OfflineRun:
    """Simulate requests that are all there at time 0."""
    simulated = simulate(job.cost, job.config, job.arrivals, replicas=job.replicas, record=False)
    return OfflineRun(
        makespan_s=simulated.run.seconds,
        utilisation=simulated.utilisation,
        bubbles=list(simulated.bubbles.values()),
        ends=[completion.token_times[-1] for completion in simulated.run.completions],
    )


@dataclass(frozen=True)
class ServingJob:
    """Poisson arrivals with lengths of a trace; all are there at time 0 if `qps` is infinite."""

    cost: CostModel
    policy: str  # as run_plan takes it; its token budget is 512 if it names none
    batch: int
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
        chunk=512,
        max_batch=job.batch,
        max_len=limit,
        page_size=64,
        pages=job.cost.kv_tokens() // 64,
    )
    lengths = sample_lengths(job.trace, job.requests, limit, job.seed)
    arrivals = poisson(lengths, job.qps, job.seed)
    config = run_plan([job.policy], [64], config)[job.policy]
    gives_up = None if tbt_slo_s is None else Hopeless(arrivals, tbt_slo_s)
    return simulate(job.cost, config, arrivals, record=False, gives_up=gives_up).run


class Target(NamedTuple):
    """A capacity that is searched for: the highest rate at which a server meets an SLO."""

    policy: str
    batch: int
    slo_s: float  # of P99 TBT
    ratio: float  # how close the search comes


@dataclass(frozen=True)
class CapacityJob:
    """Searches for capacities on one machine and trace. Targets of one server share runs."""

    cost: CostModel
    trace: str  # a name in LENGTHS
    targets: tuple[Target, ...]
    requests: int


def find_capacities(job: CapacityJob) -> dict[Target, Bounded]:
    """The capacity of each target in requests per second."""
    lengths = sample_lengths(job.trace, job.requests, LENGTHS[job.trace].limit, 0)
    start_qps = 0.3 * job.cost.pp * possible_qps(base_of(job.cost), lengths)
    start_qps = float(f"{start_qps:.1g}")

    @cache
    def summary_of(policy: str, batch: int, qps: float) -> RunSummary | None:
        """Of a run; None if it is sure to miss even the largest SLO of its policy."""
        largest_slo_s = max(each.slo_s for each in job.targets if each.policy == policy)
        run = serve(
            ServingJob(job.cost, policy, batch, job.trace, qps, job.requests), largest_slo_s
        )
        return None if run.cut_short else metrics.summarize_run(run.completions, [], run.seconds)

    capacities = {}
    step = FIRST_STEP
    for target in job.targets:

        def verdict(qps: float, target: Target = target) -> Verdict:
            summary = summary_of(target.policy, target.batch, qps)
            return Verdict(missed=metrics.missed(summary, target.slo_s) if summary else "given up")

        search = search_capacity(verdict, start_qps, target.ratio)
        capacities[target] = search.capacity_qps
        step = round(math.log(search.capacity_qps / start_qps, STEP))  # others are not far away
    return capacities
