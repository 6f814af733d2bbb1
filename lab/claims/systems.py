"""The papers' systems, models on machines, and what is simulated on them.

S is SARATHI, SS is Sarathi-Serve. Each simulation takes one job, a dataclass, so that processes can
share a list of them. Read first: lab/simulator/simulation.py. Read next: simulated_batches.py."""

import math
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol, TypeVar

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
from lab.measure.metrics import LatencySummary
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

Lengths = Sequence[tuple[int, int]]  # (prompt_len, output_len) of each request
Piece = tuple[int, int, int]  # (request, start, length) of a chunk; a decode has length 1

# Capacities of shorter runs are biased, and those of one policy more than those of another: with 64
# requests Mistral-7B's gain over vllm is a fifth larger than with 512.
FEWEST_REQUESTS = 256
FIRST_STEP = 3  # where searches begin: about the upper bound, as runs that fail are given up soon


class Runner(Protocol):
    """Calls a function with each of some jobs, maybe in parallel, and keeps their order."""

    def __call__(self, function: Callable[[Job], Result], jobs: Sequence[Job]) -> list[Result]: ...


def run_all(
    run: Runner, function: Callable[[Job], Result], jobs: Mapping[Name, Job]
) -> dict[Name, Result]:
    """{name: function(job)} of some jobs, maybe in parallel."""
    return dict(zip(jobs, run(function, list(jobs.values())), strict=True))


@dataclass(frozen=True)
class Setup:
    """What the command tells each experiment."""

    run: Runner
    requests: int  # in each run of the serving experiments
    cpu_ms: float  # CPU time of each stage in an iteration, in Sarathi-Serve's experiments

    def run_all(
        self, function: Callable[[Job], Result], jobs: Mapping[Name, Job]
    ) -> dict[Name, Result]:
        """As `run_all`."""
        return run_all(self.run, function, jobs)

    @property
    def cpu_s(self) -> float:
        """The CPU time in seconds."""
        return self.cpu_ms / 1e3

    @property
    def cpu(self) -> str:
        """The CPU time in words, for the title of a table."""
        return f"{self.cpu_ms:g} ms of CPU per stage" if self.cpu_ms else "no CPU time"

    @property
    def run_length(self) -> str:
        """The number of requests, and whether that is too few, for the title of a table."""
        length = f"{self.requests:,} requests"
        if self.requests < FEWEST_REQUESTS:
            length += f": too short a run, gains need {FEWEST_REQUESTS} or more"
        return length


# SARATHI's code on one GPU, nanoGPT's, takes 4 ms of CPU beside its operations. That is the average
# of what its Figure 7 leaves.
NANOGPT_CPU_S = 4e-3
# It calls attention for decodes apart from that for a chunk beside them (S-§4.3.1), which takes
# longer: three decodes add 5.2 ms to that of 1,021 prefill tokens, where four decodes alone take
# 5.68 ms (S-T2).
RIDING = (5.2 / 3) / (5.68 / 4)


def sarathi_code(cost: CostModel, riding: float = 1.0) -> CostModel:
    """A CostModel with the kernels of SARATHI's code. Its attention is xformers', which skips
    masked keys; the profile of an A100 is of Sarathi-Serve's, which does not."""
    return replace(cost, device=replace(cost.device, riding=riding, skips_masked=True))


def nanogpt_on_one_gpu(preset: str, device: str) -> CostModel:
    """The CostModel of SARATHI's code on one GPU."""
    return sarathi_code(CostModel.named(preset, device, cpu_s=NANOGPT_CPU_S), RIDING)


A6000_13B = nanogpt_on_one_gpu("llama-13b", "a6000")
A100_33B = nanogpt_on_one_gpu("llama-33b", "a100-80gb")
A6000_BATCHES = {1024: 18, 2048: 10, 3072: 6}  # length -> 13B's largest batch, S-§4.3.1

GPT3_PIPELINE = sarathi_code(CostModel.named("gpt3-175b", tp=8, pp=8))  # S-F12
GPT3_REPLICA = sarathi_code(CostModel.named("gpt3-175b", tp=8))
GPT3_LAYER = sarathi_code(CostModel.named("gpt3-175b"))  # on one A100, S-§4.2
GPT3_MAX_LEN = 4096  # tokens of a request


@dataclass(frozen=True)
class Server:
    """A policy with the token budget that it has under each SLO, and its batch size."""

    batch: int
    strict: str
    relaxed: str

    def policy(self, kind: str) -> str:
        """The policy under the "strict" or the "relaxed" SLO."""
        return {"strict": self.strict, "relaxed": self.relaxed}[kind]


def prompt_chunks(prompt_len: int, chunk: int) -> list[Piece]:
    """The batches of one prompt in chunks."""
    starts = range(0, prompt_len, chunk)
    return [(0, start, min(chunk, prompt_len - start)) for start in starts]


MEASURED_PROMPT = 2047  # tokens of the prompt whose chunks ServingSystem.prefill_s has


def chunk_seconds(cost: CostModel, chunk: int) -> float:
    """The average time of a chunk of MEASURED_PROMPT without CPU time."""
    chunks = prompt_chunks(MEASURED_PROMPT, chunk)
    return sum(cost.seconds([each]) - cost.pp * cost.cpu_s for each in chunks) / len(chunks)


@dataclass(frozen=True)
class ServingSystem:
    """One of Sarathi-Serve's systems (SS-T1, SS-§5). GPUs are joined in pairs by NVLink, so that
    four or eight talk through PCIe."""

    name: str
    preset: str  # a name in GEOMETRIES
    strict_s: float  # SLOs of P99 TBT (SS-T3)
    relaxed_s: float
    orca_batch: int  # that of the authors' scripts
    relaxed_budget: int = (
        2048  # tokens of sarathi-serve under the relaxed SLO; 512 under the strict
    )
    machine: dict[str, Any] = field(default_factory=dict)  # of CostModel.named
    prefill_s: dict[int, float] = field(default_factory=dict)  # as measured: chunk -> its time

    def cost(self, cpu_s: float) -> CostModel:
        """The CostModel of this system with so much CPU time in each stage, and with prefills that
        take as long as measured where that is known."""
        cost = CostModel.named(self.preset, cpu_s=cpu_s, **self.machine)
        excess = [(chunk, s - chunk_seconds(cost, chunk)) for chunk, s in self.prefill_s.items()]
        return replace(cost, measured_excess=tuple(excess))

    @property
    def slos_s(self) -> dict[str, float]:
        """The paper's SLOs in seconds, by kind."""
        return {"strict": self.strict_s, "relaxed": self.relaxed_s}

    @property
    def servers(self) -> dict[str, Server]:
        """The servers that are compared (SS-§5.1)."""
        return {
            "orca": Server(batch=self.orca_batch, strict="orca", relaxed="orca"),
            "vllm": Server(batch=128, strict="vllm", relaxed="vllm"),
            "sarathi-serve": Server(
                batch=128,
                strict="sarathi-serve:512",
                relaxed=f"sarathi-serve:{self.relaxed_budget}",
            ),
        }


MISTRAL_7B = ServingSystem(
    name="Mistral-7B",
    preset="mistral-7b",
    strict_s=0.1,
    relaxed_s=0.5,
    orca_batch=16,
)
YI_34B = ServingSystem(
    name="Yi-34B",
    preset="yi-34b",
    strict_s=0.2,
    relaxed_s=1,
    orca_batch=16,
    machine={"tp": 2, "tp_link": "nvlink3-pair"},
    # The authors' data of Figure 14 (microsoft/sarathi-serve, osdi-experiments/figure-9): 435.7 ms
    # in chunks of 512, 444.2 in chunks of 1,024, 377.7 in one. The cost model alone has 394, 379
    # and 376. Why an iteration of 512 or 1,024 tokens takes longer there is open.
    prefill_s={512: 0.4357 / 4, 1024: 0.4442 / 2, 2048: 0.3777},
)
LLAMA2_70B = ServingSystem(
    name="LLaMA2-70B",
    preset="llama2-70b",
    strict_s=1,
    relaxed_s=5,
    orca_batch=8,
    relaxed_budget=1536,
    machine={"device": "a40", "tp": 4, "pp": 2, "tp_link": "a40-pairs", "pp_link": "pcie4"},
)
FALCON_180B = ServingSystem(
    name="Falcon-180B",
    preset="falcon-180b",
    strict_s=1,
    relaxed_s=5,
    orca_batch=8,
    machine={"tp": 4, "pp": 2, "tp_link": "nvlink3-pairs", "pp_link": "ethernet"},
)


def falcon_180b_without_pipeline(cpu_s: float) -> CostModel:
    """Falcon-180B with each layer on all eight GPUs of two nodes."""
    return CostModel.named("falcon-180b", tp=8, tp_link="ethernet", cpu_s=cpu_s)


def llama2_70b_on_h100(cpu_s: float) -> CostModel:
    """The system of the post: LLaMA2-70B on four H100."""
    return CostModel.named("llama2-70b", "h100", tp=4, cpu_s=cpu_s)


def decodes(count: int, context: int) -> list[Piece]:
    """A batch of so many decodes. Each reads `context` tokens, its own among them."""
    return [(0, context - 1, 1)] * count


class ChunkingRatio(NamedTuple):
    """How many times longer a prompt takes in chunks than whole."""

    attention: float
    total: float


def chunking_ratio(cost: CostModel, prompt_len: int, chunk: int) -> ChunkingRatio:
    """The ChunkingRatio of a prompt in batches of its own."""
    chunks = prompt_chunks(prompt_len, chunk)
    whole = [(0, 0, prompt_len)]
    attention_s = sum(cost.layer_seconds([each]).attention for each in chunks)
    total_s = sum(cost.seconds([each]) for each in chunks)
    return ChunkingRatio(
        attention=attention_s / cost.layer_seconds(whole).attention,
        total=total_s / cost.seconds(whole),
    )


@dataclass(frozen=True)
class OfflineJob:
    """Requests that are all there at time 0."""

    cost: CostModel
    policy: str
    lengths: Lengths
    replicas: int = 1
    chunk: int = 256
    tile: int | None = None  # of the policy; None: the device's
    batch: int | None = None  # None: what fits in memory
    max_len: int = GPT3_MAX_LEN


@dataclass(frozen=True)
class OfflineRun:
    """What was seen of an OfflineJob. Times are in seconds."""

    batch: int
    makespan_s: float
    utilisation: float  # share of the time that the stages worked
    median_bubble_s: float
    bubbles: list[float]  # of each request
    ends: list[float]  # when each request was done


def offline(job: OfflineJob) -> OfflineRun:
    """Simulate requests that are all there at time 0."""
    batch = job.batch or job.cost.max_batch(job.max_len)
    config = EngineConfig(
        policy=job.policy,
        chunk=job.chunk,
        max_batch=batch,
        max_len=job.max_len,
        page_size=job.max_len,
        pages=batch * job.cost.pp,
        policy_options={"tile": job.tile} if job.tile else {},
    )
    arrivals = [Arrival(0.0, prompt_len, output_len) for prompt_len, output_len in job.lengths]
    simulated = simulate(job.cost, config, arrivals, replicas=job.replicas, record=False)
    bubbles = list(simulated.bubbles.values())
    return OfflineRun(
        batch=batch,
        makespan_s=simulated.run.seconds,
        utilisation=simulated.utilisation,
        median_bubble_s=median(bubbles),
        bubbles=bubbles,
        ends=[completion.token_times[-1] for completion in simulated.run.completions],
    )


@dataclass(frozen=True)
class Case:
    """A load of SARATHI on one GPU: requests of equal length."""

    cost: CostModel
    batch: int  # B
    length: int  # L, prompt and output tokens
    pd_ratio: float  # prompt tokens per output token
    chunk: int = 256  # C
    rounds: int = 40  # there are so many times B requests


def throughput(policy: str, case: Case) -> float:
    """Tokens per second, prompts and outputs, of requests that are all there at time 0."""
    output_len = max(1, round(case.length / (case.pd_ratio + 1)))
    lengths = [(case.length - output_len, output_len)] * (case.rounds * case.batch)
    job = OfflineJob(
        cost=case.cost,
        policy=policy,
        lengths=lengths,
        chunk=case.chunk,
        batch=case.batch,
        max_len=case.length,
    )
    return len(lengths) * case.length / offline(job).makespan_s


def decode_speedup(cost: CostModel, batch: int, length: int, chunk: int = 256) -> float:
    """How many times cheaper a decode is in a batch with a chunk than without, S-§5.1.1."""
    riding = decodes(batch - 1, length)
    prefill = (0, length - chunk, chunk - (batch - 1))
    riding_s = (cost.seconds([prefill, *riding]) - cost.seconds([prefill])) / len(riding)
    return cost.seconds(decodes(batch, length)) / batch / riding_s


def sarathi_gain(case: Case) -> float:
    """The `throughput` of SARATHI as a multiple of the baseline's."""
    return throughput("sarathi", case) / throughput("request-level", case)


@dataclass(frozen=True)
class Gains:
    """The throughput of two policies as multiples of the baseline's."""

    sarathi: float
    orca_best: float


def gains(case: Case) -> Gains:
    """The Gains in a case."""
    baseline = throughput("request-level", case)
    return Gains(
        sarathi=throughput("sarathi", case) / baseline,
        orca_best=throughput("orca-best", case) / baseline,
    )


@dataclass(frozen=True)
class ServingJob:
    """Poisson arrivals with lengths of a trace; all are there at time 0 if `qps` is infinite."""

    cost: CostModel
    policy: str  # as run_plan takes it; its token budget is 512 if it names none
    trace: str  # a name in LENGTHS
    qps: float
    requests: int
    seed: int = 0
    batch: int = 128


def latencies(job: ServingJob) -> LatencySummary:
    """summarize_latencies of a run in all the memory there is."""
    run = serve(job)
    return metrics.summarize_latencies(run.completions, run.seconds)


def serve(job: ServingJob, tbt_slo_s: float | None = None) -> Run:
    """A run in all the memory there is. It is cut short when it is sure to miss `tbt_slo_s`."""
    limit = LENGTHS[job.trace].limit
    config = EngineConfig(
        policy="vllm",
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


@dataclass(frozen=True)
class Target:
    """A capacity that is searched for: the highest rate at which a server meets an SLO."""

    policy: str  # as run_plan takes it
    batch: int
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
    summary: LatencySummary | None  # None: it missed even the largest SLO of its policy

    def is_that_of(self, batch: int) -> bool:
        """Whether the run is the same with this batch size: neither limit was ever reached."""
        return batch == self.batch or self.most_running < min(batch, self.batch)


def find_capacities(job: CapacityJob) -> dict[Target, Bounded]:
    """The capacity of each target in requests per second."""
    lengths = sample_lengths(job.trace, job.requests, LENGTHS[job.trace].limit, 0)
    start_qps = 0.3 * job.cost.pp * possible_qps(base_of(job.cost), lengths)
    start_qps = float(f"{start_qps:.1g}")

    largest_slo_s: dict[str, float] = {}  # of each policy
    for target in job.targets:
        largest_slo_s[target.policy] = max(target.slo_s, largest_slo_s.get(target.policy, 0.0))
    known_runs: dict[tuple[str, float], list[KnownRun]] = {}  # (policy, rate) -> runs

    def run_at(policy: str, batch: int, qps: float) -> KnownRun:
        """A run that is known already, or a new one."""
        runs = known_runs.setdefault((policy, qps), [])
        for known in runs:
            if known.is_that_of(batch):
                return known
        serving = ServingJob(job.cost, policy, job.trace, qps, job.requests, batch=batch)
        run = serve(serving, largest_slo_s[policy])
        summary = None
        if not run.cut_short:
            summary = metrics.summarize_latencies(run.completions, run.seconds)
        runs.append(KnownRun(batch, most_at_once(run.completions), summary))
        return runs[-1]

    def verdict(target: Target, qps: float) -> Verdict:
        """Whether a target's SLO is met at that rate."""
        summary = run_at(target.policy, target.batch, qps).summary
        if summary is None:
            return Verdict(missed="given up")
        return Verdict(missed=metrics.missed(summary, target.slo_s))

    capacities = {}
    step = FIRST_STEP
    for target in job.targets:
        search = search_capacity(partial(verdict, target), start_qps, target.ratio, first_step=step)
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


def draw_bubbles(systems: dict[str, OfflineRun], title: str, file: Path) -> None:
    """Draw how long bubbles held up requests, and when these were done (S-F12). The name of a
    system begins with that of a policy and a comma."""
    from views.pipelines import plot_bubbles  # matplotlib takes a second

    plot_bubbles(systems, title, file)
