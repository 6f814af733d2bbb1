"""What DistServe found about two pools: only a cost model answers it.

D is DistServe, F a figure. Read first: jobs.py, lab/simulator/pools.py. Read next: claims.py."""

from bisect import bisect_left
from dataclasses import dataclass
from statistics import fmean

from config import EngineConfig
from lab.claims.claim import Finding, claim
from lab.claims.cost_lab import CostLab
from lab.measure.capacity import estimated_qps
from lab.measure.metrics import FEWEST, SERVED, served_rate
from lab.measure.run_loop import Run
from lab.measure.workload import Arrival, make_lengths, poisson
from lab.simulator.cost_model import CostModel
from lab.simulator.devices import LINKS
from lab.simulator.machine import base_of
from lab.simulator.pools import KVLink, simulate_pools
from lab.simulator.simulation import simulate
from policies.pools import Pools

LENGTHS = "512+64"  # prompt and output of all requests
MAX_LEN = 2048
SECONDS = 20.0  # that requests arrive
TTFT_S = 0.4  # the targets, as we read the lines of the figure
TBT_S = 0.04
ATTAINMENT = 0.9  # the share of requests that are to meet both (DistServe §1)
LOWEST = 0.25  # the rates that are tried, as shares of what is estimated to be possible for
HIGHEST = 2.0  # batches of 32
RATES = 9
PAGE_SIZE = 64


@dataclass(frozen=True)
class GoodputJob:
    """A model on one GPU, or on one for each instance of two pools."""

    cost: CostModel
    policy: str
    chunk: int
    pools: Pools | None = None


def find_goodput(job: GoodputJob) -> float:
    """The highest rate per GPU at which most requests meet both targets, in requests per second; 0:
    none does. A rate above one that fails is not tried."""
    gpus = job.pools.instances if job.pools else 1
    possible_qps = gpus * estimated_qps(base_of(job.cost, MAX_LEN), arrivals_at(10.0))
    ratio = (HIGHEST / LOWEST) ** (1 / (RATES - 1))
    rates = [possible_qps * LOWEST * ratio**i for i in range(RATES)]
    met = bisect_left(rates, True, key=lambda qps: not is_good(serve(job, qps), qps))
    return rates[met - 1] / gpus if met else 0.0


def arrivals_at(qps: float) -> list[Arrival]:
    """The requests, so many a second."""
    lengths = make_lengths(LENGTHS, max(FEWEST, round(SECONDS * qps)), MAX_LEN, seed=0)
    return poisson(lengths, qps, seed=0)


def serve(job: GoodputJob, qps: float) -> Run:
    """A run at this rate, in all the memory there is."""
    cost = job.cost
    config = EngineConfig(
        job.policy,
        chunk=job.chunk,
        max_batch=256,
        max_len=MAX_LEN,
        page_size=PAGE_SIZE,
        pages=cost.kv_tokens() // PAGE_SIZE,
    )
    arrivals = arrivals_at(qps)
    if job.pools is None:
        return simulate(cost, config, arrivals, record=False).run
    kv_link = KVLink.of(cost, LINKS["infiniband"])
    return simulate_pools(cost, config, arrivals, job.pools, kv_link, record=False).run


def is_good(run: Run, qps: float) -> bool:
    """Whether most requests meet both targets, in TTFT and mean TBT (DistServe §1), and are served
    about as fast as they arrive."""
    good = 0
    for completion in run.completions:
        ttft_s = completion.ttft
        is_early = ttft_s is not None and ttft_s <= TTFT_S
        good += is_early and fmean(completion.tbt or [0.0]) <= TBT_S
    served_per_s = served_rate(run.completions) or qps  # None: there are too few to tell
    return served_per_s >= SERVED * qps and good >= ATTAINMENT * len(run.completions)


@claim("Goodput per GPU of one GPU for both phases, and of two that prefill and one that decodes")
def d_f1(lab: CostLab) -> Finding:
    """D-F1: two pools serve more requests per GPU than whole prompts do, but no more than chunks.

    DistServe has OPT-13B on A100 and compares with vLLM, here it is LLaMA-13B. Goodput is the
    highest rate per GPU, of some 1.3 times apart, at which 90 % of the requests meet a TTFT of 0.4
    s and a mean TBT of 40 ms, as we read the lines of the figure."""
    cost = CostModel.named("llama-13b", "a100-80gb")
    jobs = {
        "vllm": GoodputJob(cost, "vllm", 2048),
        "sarathi-serve:512": GoodputJob(cost, "sarathi-serve", 512),
        "pools 2:1": GoodputJob(cost, "sarathi-serve", 2048, Pools(2, 1)),
    }
    goodputs = lab.setup.run_all(find_goodput, jobs)
    finding = Finding()
    goodput = finding.table(x="server", y="requests/s and GPU", spec=".2f")
    gains = finding.table(x="server", y="pools over it")
    for name, rate in goodputs.items():
        goodput.add(name, {"goodput": rate})
        gains.add(name, {"gain": goodputs["pools 2:1"] / rate if rate else None})
    finding.publish(
        "pools over one GPU, 3.3 / 1.6 requests/s",
        2.1,
        gains["gain"],
        "vllm",
        device="OPT-13B, A100",
    )
    return finding
