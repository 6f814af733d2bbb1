"""Goodput per GPU: the highest rate at which both latency targets are met, over the GPUs.

    find_goodputs(Search(cluster, load, [Targets(ttft_s=0.5, tbt_s=0.05)], steps=12))

Targets are met where 90 % of the requests meet both, that
for TTFT and that for the mean TBT of a request (DistServe §1), and P99 of all TBT meets the second,
too (Sarathi-Serve §5.1). Read first: pools.py. Read next: lab/commands/pools.py."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from statistics import fmean
from typing import NamedTuple

from config import EngineConfig
from lab.measure import workload
from lab.measure.capacity import LinkSummary, estimated_qps
from lab.measure.metrics import FEWEST, SERVED, percentiles, served_rate
from lab.measure.workload import Arrival
from lab.simulator.cost_model import CostModel
from lab.simulator.devices import LINKS
from lab.simulator.machine import base_of
from lab.simulator.pools import KVLink, simulate_pools
from lab.simulator.simulation import Simulated, simulate
from policies.pools import Pools

MAX_BATCH = 256  # requests at once, of an instance
PAGE_SIZE = 64
PREFILL_TOKENS = 2048  # in a batch of whole prompts (Splitwise §IV-B)
ATTAINMENT = 0.9  # the share of requests that are to meet both targets (DistServe §1)
LOWEST = 0.25  # the rates that are tried, as shares of what is estimated to be possible for
HIGHEST = 2.0  # batches of 32


class Targets(NamedTuple):
    """What a request shall meet, in seconds."""

    ttft_s: float
    tbt_s: float
    all_gaps: bool = True  # P99 of all TBT counts; else only the mean TBT of a request


class Load(NamedTuple):
    """Requests that arrive at random for some time: several times as long as they take."""

    lengths: str  # as of --lengths
    seconds: float
    max_len: int

    def arrivals(self, qps: float) -> list[Arrival]:
        """The requests, so many a second."""
        requests = max(FEWEST, round(self.seconds * qps))
        lengths = workload.make_lengths(self.lengths, requests, self.max_len, seed=0)
        return workload.poisson(lengths, qps, seed=0)


@dataclass(frozen=True)
class Cluster:
    """Instances of a model, one GPU each: in two pools, or replicas under a policy."""

    preset: str
    device: str
    instances: int
    pools: Pools | None = None  # None: replicas
    policy: str = "sarathi-serve"  # of replicas
    chunk: int = 512  # of replicas
    link: str = "infiniband"
    layer_wise: bool = True

    @property
    def name(self) -> str:
        """The pools, or the policy and its chunk."""
        if self.pools:
            return f"pools {self.pools}"
        return f"chunks of {self.chunk}" if self.policy == "sarathi-serve" else self.policy

    @cached_property
    def cost(self) -> CostModel:
        """The cost model of an instance."""
        return CostModel.named(self.preset, self.device)

    def simulate(self, load: Load, qps: float, record: bool = False) -> Simulated:
        """Serve a load at this rate."""
        config = EngineConfig(
            "sarathi-serve" if self.pools else self.policy,
            chunk=PREFILL_TOKENS if self.pools else self.chunk,
            max_batch=MAX_BATCH,
            max_len=load.max_len,
            page_size=PAGE_SIZE,
            pages=self.cost.kv_tokens() // PAGE_SIZE,
        )
        arrivals = load.arrivals(qps)
        if self.pools is None:
            return simulate(self.cost, config, arrivals, replicas=self.instances, record=record)
        kv_link = KVLink.of(self.cost, LINKS[self.link], self.layer_wise)
        return simulate_pools(self.cost, config, arrivals, self.pools, kv_link, record=record)


@dataclass(frozen=True)
class Trial:
    """What was seen of a load at a rate. Times are in seconds."""

    qps_per_gpu: float
    latencies_s: Sequence[tuple[float, float]]  # TTFT and mean TBT of each request; 0 without a TBT
    second_p50_s: float  # from the first token to the second
    tbt_p99_s: float
    keeps_up: bool  # whether requests are served about as fast as they arrive
    link: LinkSummary | None

    def meets(self, targets: Targets) -> bool:
        """Whether the rate can be served within these targets."""
        met = sum(
            ttft_s <= targets.ttft_s and tbt_s <= targets.tbt_s
            for ttft_s, tbt_s in self.latencies_s
        )
        no_stalls = not targets.all_gaps or self.tbt_p99_s <= targets.tbt_s
        return self.keeps_up and no_stalls and met >= ATTAINMENT * len(self.latencies_s)


class Job(NamedTuple):
    """A Trial that is to be run."""

    cluster: Cluster
    load: Load
    qps: float


def run_job(job: Job) -> Trial:
    """Serve the load of a job, and return its Trial."""
    cluster, load, qps = job
    run = cluster.simulate(load, qps).run
    completions = run.completions
    gaps = [completion.tbt for completion in completions if len(completion.token_times) > 1]
    served_per_s = served_rate(completions)
    return Trial(
        qps_per_gpu=qps / cluster.instances,
        latencies_s=[
            (each.ttft, fmean(each.tbt or [0.0])) for each in completions if each.ttft is not None
        ],
        second_p50_s=percentiles(tbt[0] for tbt in gaps).p50 or 0.0,
        tbt_p99_s=percentiles(gap for tbt in gaps for gap in tbt).p99 or 0.0,
        keeps_up=served_per_s is None or served_per_s >= SERVED * qps,
        link=LinkSummary.of(run.transfers),
    )


def rates(cluster: Cluster, load: Load, count: int) -> list[float]:
    """`count` rates with equal ratios, around the one that is estimated to be possible. Those per
    GPU are the same for all clusters of a model."""
    base = base_of(cluster.cost, load.max_len)
    possible_qps = cluster.instances * estimated_qps(base, load.arrivals(10.0))
    ratio = (HIGHEST / LOWEST) ** (1 / (count - 1))
    return [possible_qps * LOWEST * ratio**i for i in range(count)]


class Search(NamedTuple):
    """The goodput of a cluster that is to be found for each of the targets, among so many rates."""

    cluster: Cluster
    load: Load
    targets: Sequence[Targets]
    steps: int


def find_goodputs(search: Search) -> list[float]:
    """For each of the targets the highest rate per GPU that meets them, in requests per second; 0:
    none does. A rate above one that fails is not tried. The same trials serve all targets."""
    cluster, load, all_targets, steps = search
    all_rates = rates(cluster, load, steps)

    @cache
    def trial_at(qps: float) -> Trial:
        return run_job(Job(cluster, load, qps))

    def find_goodput(targets: Targets) -> float:
        met = bisect_left(all_rates, True, key=lambda qps: not trial_at(qps).meets(targets))
        return all_rates[met - 1] / cluster.instances if met else 0.0

    return [find_goodput(targets) for targets in all_targets]
