"""Claims about pipelines and nodes, which only a cost model answers.

S is SARATHI, SS is Sarathi-Serve, D DistServe; F is a figure. Read first: throughput.py,
lab/simulator/simulation.py. Read next: latency.py."""

import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import fmean, median

from lab.claims.claim import Result, claim
from lab.claims.labs import PaperLab
from lab.claims.systems import (
    A100_13B,
    FALCON_180B,
    FALCON_180B_TP_8,
    GPT3_PIPELINE,
    GPT3_REPLICA,
    GPT3_TWO_STAGES,
)
from lab.measure.capacity import Bounded, possible_qps
from lab.measure.metrics import FEWEST, SERVED, served_rate
from lab.measure.run_loop import Run
from lab.measure.workload import Arrival, make_lengths, poisson, zipf_lengths
from lab.simulator.cost_model import CostModel
from lab.simulator.devices import LINKS
from lab.simulator.machine import base_of
from lab.simulator.pools import KVLink, simulate_pools
from lab.simulator.simulation import Simulated, bubble_kinds
from lab.simulator.two_pools import Pools
from parallel.micro_batches import StageRun


@dataclass(frozen=True)
class OfflineRun:
    """What a picture shows of a run, in seconds: bubbles of each request, and when it was done."""

    bubbles: list[float]
    ends: list[float]

    @classmethod
    def of(cls, simulated: Simulated) -> "OfflineRun":
        """That of a simulation."""
        ends = [completion.token_times[-1] for completion in simulated.run.completions]
        return cls(list(simulated.bubbles.values()), ends)


def draw_bubbles(runs: dict[str, OfflineRun], file: str) -> None:
    """Write the picture of S-F12."""
    from lab.pictures.pipelines import plot_bubbles  # matplotlib takes a second

    plot_bubbles(runs, "S-F12: GPT-3 on 64 A100, 10,000 requests", file)


def gpt_3_with(layer_s: float) -> tuple[PaperLab, PaperLab]:
    """A pipeline and a replica of GPT-3 with CPU time for each layer. In a pipeline it is in the
    hops, so that its last stage has none."""
    pipeline = GPT3_PIPELINE.cost
    replica = GPT3_REPLICA.cost
    link = pipeline.pp_link
    hop = link._replace(step_s=link.step_s + pipeline.layers * layer_s)
    return (
        PaperLab(replace(GPT3_PIPELINE, cost=replace(pipeline, pp_link=hop))),
        PaperLab(replace(GPT3_REPLICA, cost=replace(replica, cpu_s=replica.layers * layer_s))),
    )


def serve_gpt_3(
    arrivals: list[Arrival], chunk: int, tile: int, layer_s: float
) -> dict[str, OfflineRun]:
    """Orca in a pipeline and on replicas, SARATHI in the pipeline; `layer_s`: see gpt_3_with."""
    pipeline, replica = gpt_3_with(layer_s)
    orca = pipeline.offline("orca-best", arrivals)
    replicas = replica.offline("orca-best", arrivals, replicas=8)
    sarathi = pipeline.offline("sarathi", arrivals, chunk=chunk, tile=tile)
    return {
        "orca-best, TP 8 x PP 8": OfflineRun.of(orca),
        "TP 8, 8 replicas": OfflineRun.of(replicas),
        "sarathi, TP 8 x PP 8": OfflineRun.of(sarathi),
    }


@claim(
    "S-F12",
    "A pipeline under SARATHI beats replicas, these one under Orca",
    GPT3_PIPELINE,
    measured="no",
)
def pipeline_and_replicas(lab: PaperLab) -> Result:
    """Chunks make micro-batches of one length, which leave few bubbles.

    10,000 requests of 1K to 4K tokens (Zipf 0.4), P:D 10, are all there at time 0. Fitted: 282
    tokens are a chunk of 256 and 26 decodes; 0.3 ms of CPU for each layer, some 25 microseconds for
    each kernel and three times what S-F7 leaves, holds up the batch, not the stage."""
    papers = {
        "SARATHI over replicas": 1.48,
        "SARATHI over Orca": 1.91,
        "replicas over Orca": 1.28,
        "bubbles of Orca over SARATHI's": 6.29,
    }
    lengths = zipf_lengths(1024, 4096, 0.4, 10, 10_000, 0)
    arrivals = [Arrival(0.0, prompt, output) for prompt, output in lengths]
    result = Result("variant")
    for variant, chunk, tile, layer_s in [("as published", 256, 128, 0), ("fitted", 282, 1, 3e-4)]:
        runs = serve_gpt_3(arrivals, chunk, tile, layer_s)
        orca, replicas, sarathi = runs.values()
        gains = {
            "SARATHI over replicas": max(replicas.ends) / max(sarathi.ends),
            "SARATHI over Orca": max(orca.ends) / max(sarathi.ends),
            "replicas over Orca": max(orca.ends) / max(replicas.ends),
            "bubbles of Orca over SARATHI's": median(orca.bubbles) / median(sarathi.bubbles),
        }
        result.add(variant, gains)
        source = "text" if variant == "as published" else "fitted"
        for name, gain in gains.items():
            result.publish(f"{name}, {variant}", papers[name], gain, source)
        result.picture = result.picture or partial(draw_bubbles, runs)  # as published
    over_replicas = result.column("SARATHI over replicas")["as published"]
    over_orca = result.column("SARATHI over Orca")["as published"]
    result.expect("Orca < replicas < SARATHI", over_orca > over_replicas > 1)
    return result


def draw_pipeline(stage_runs: dict[str, list[StageRun]], file: str) -> None:
    """Write the picture of SS-F8."""
    from lab.pictures.pipelines import plot_pipeline  # matplotlib takes a second

    kinds = {policy: bubble_kinds(runs) for policy, runs in stage_runs.items()}
    plot_pipeline(stage_runs, kinds, "SS-F8: bubbles in two stages", file)


@claim(
    "SS-F8", "Chunks make micro-batches of one length: few bubbles", GPT3_TWO_STAGES, measured="no"
)
def bubbles(lab: PaperLab) -> Result:
    """A stage that has decodes waits for one that has a prompt.

    As in S-F1 and S-F5. PB1: prefills of different length; PB2: prefill against decodes; PB3:
    decodes at different contexts, and what the output head adds to the last stage.

    SS-3.3: the paper's 1,150 ms of a prompt of Falcon-180B must be those of one stage: through
    both, four A100 at the 312 Tflop/s of the data sheet take 1,180. The decodes' 200 are those of
    both, if they are a fifth of the SLO (SS-T3)."""
    arrivals = [Arrival(0.0, prompt, 20) for prompt in (2048, 1024, 2040, 1020)]
    result = Result("policy, ms", ".1f")
    stage_runs = {}
    for policy in ("orca-best", "sarathi-serve"):
        simulated = lab.offline(policy, arrivals, batch=2, max_len=8192, record=True)
        stage_runs[policy] = simulated.stage_runs
        milliseconds = {"PB1": 0.0, "PB2": 0.0, "PB3": 0.0}
        for stage_run, kind in bubble_kinds(simulated.stage_runs):
            milliseconds[kind] += 1e3 * stage_run.bubble
        makespan = {"makespan": 1e3 * simulated.run.seconds}
        result.add(policy, milliseconds | {"all bubbles": sum(milliseconds.values())} | makespan)
    result.picture = partial(draw_pipeline, stage_runs)
    prompt_s, _ = FALCON_180B.cost.stages([(0, 0, 4096)]).seconds
    decode_s, _ = FALCON_180B.cost.stages([(0, 4095, 1)] * 32).seconds
    result.publish("ms of a prompt of 4,096 on one stage, Falcon-180B", 1150, 1e3 * prompt_s)
    result.publish("ms of a bubble, less decodes", 950, 1e3 * (prompt_s - decode_s))
    all_bubbles = result.column("all bubbles")
    result.expect("fewer bubbles", all_bubbles["sarathi-serve"] < all_bubbles["orca-best"] / 2)
    return result


@claim(
    "SS-F13",
    "Across nodes a pipeline serves more than tensor parallelism",
    FALCON_180B,
    measured="no",
)
def across_nodes(lab: PaperLab) -> Result:
    """Each layer on all eight GPUs of two nodes waits for Ethernet twice.

    GB/s: what TCP makes of 100 Gb/s. Through NCCL it is 4 to 6 (devices.py), or half of that where
    it is not tuned; 10 are 80 % of the wire. The paper says neither batch nor rate of its decodes:
    32 requests and 5 GB/s are compared."""
    tensor = PaperLab(FALCON_180B_TP_8)
    result = Result("case", ".3g")
    add_decodes(result, tensor.cost, lab.cost)
    rates: dict[tuple[str, str], Bounded] = {}
    for slo in ("strict", "relaxed"):
        for name, lab_of, server in (
            ("vllm, TP 8", tensor, "vllm"),
            ("vllm, TP 4 x PP 2", lab, "vllm"),
            ("sarathi-serve, TP 4 x PP 2", lab, "sarathi-serve"),
        ):
            policy, batch = FALCON_180B.server(server, slo)
            slo_s = FALCON_180B.slos_s[slo]
            rates[name, slo] = lab_of.capacity_at(policy, batch, "sharegpt4", slo_s, ratio=1.1)
            result.add(f"{name}, {slo}", {"requests/s": rates[name, slo]})
    papers = {
        ("vllm, TP 8", "strict"): 4.3,
        ("vllm, TP 4 x PP 2", "strict"): 3.6,
        ("vllm, TP 4 x PP 2", "relaxed"): 1.48,
    }
    for (name, slo), paper in papers.items():
        gain = rates["sarathi-serve, TP 4 x PP 2", slo].over(rates[name, slo])
        result.publish(f"sarathi-serve over {name}, {slo}", paper, gain)
    gap = rates["vllm, TP 4 x PP 2", "strict"] > rates["vllm, TP 8", "strict"]
    result.expect("the pipeline serves more under vllm, too", gap)
    return result


def add_decodes(result: Result, tensor: CostModel, pipeline: CostModel) -> None:
    """Add what decodes take without a pipeline and with one, over links of several rates."""
    for batch, gb_per_s in product((8, 32, 128), (10, 5, 2.5)):
        link = pipeline.pp_link._replace(bytes_per_s=1e9 * gb_per_s)
        riding = [(0, 2047, 1)] * batch
        seconds = {
            "TP 8": replace(tensor, tp_link=link).seconds(riding),
            "TP 4 x PP 2": replace(pipeline, pp_link=link).seconds(riding),
        }
        ratio = seconds["TP 8"] / seconds["TP 4 x PP 2"]
        result.add(f"{batch} decodes, {gb_per_s} GB/s, s", seconds | {"over that": ratio})
    more_than_twice = Bounded(2, "at least")
    ratio = result.rows["32 decodes, 5 GB/s, s"]["over that"]
    result.publish("TBT of decodes with TP 8 over TP 4 x PP 2", more_than_twice, ratio)


TTFT_S = 0.4  # the targets of D-F1, as we read the lines of the figure
TBT_S = 0.04


@claim(
    "D-F1",
    "Two pools serve more per GPU than whole prompts, not than chunks",
    A100_13B,
    measured="no",
)
def goodput_of_pools(lab: PaperLab) -> Result:
    """Nobody's prompt delays a decode in another pool, but each pool waits for the other's load.

    DistServe has OPT-13B and compares with vLLM. Goodput is the highest rate per GPU, of some 1.3
    times apart, at which 90 % of the requests meet a TTFT of 0.4 s and a mean TBT of 40 ms."""
    servers = {
        "vllm": ("vllm", None),
        "sarathi-serve:512": ("sarathi-serve:512", None),
        "pools 2:1": ("sarathi-serve:2048", Pools(2, 1)),
    }
    result = Result("server")
    for name, (policy, pools) in servers.items():
        gpus = pools.instances if pools else 1
        lengths = make_lengths("512+64", 200, 2048, seed=0)
        possible = gpus * possible_qps(base_of(lab.cost, 2048), lengths)
        ratio = 8 ** (1 / 8)
        rates = [possible * 0.25 * ratio**i for i in range(9)]  # up to twice the estimate
        failed = partial(misses_goodput, lab, policy, pools)
        met = bisect_left(rates, True, key=failed)
        result.add(name, {"goodput per GPU": rates[met - 1] / gpus if met else 0.0})
    goodput = result.column("goodput per GPU")
    result.publish("pools over vLLM, OPT-13B", 2.1, goodput["pools 2:1"] / goodput["vllm"])
    in_order = goodput["vllm"] < goodput["pools 2:1"] <= goodput["sarathi-serve:512"]
    result.expect("whole prompts < pools < chunks", in_order)
    return result


def misses_goodput(lab: PaperLab, policy: str, pools: Pools | None, qps: float) -> bool:
    """Whether too many requests of twenty seconds miss a target at a rate, or the queue grows."""
    lengths = make_lengths("512+64", max(FEWEST, round(20 * qps)), 2048, seed=0)
    arrivals = poisson(lengths, qps, seed=0)
    config = lab.config(policy, 2048, 256)
    if pools:
        link = KVLink.of(lab.cost, LINKS["infiniband"])
        run: Run = simulate_pools(lab.cost, config, arrivals, pools, link, record=False).run
    else:
        run = lab.run(config, arrivals)
    good = [
        request
        for request in run.completions
        if (request.ttft or math.inf) <= TTFT_S and fmean(request.tbt or [0.0]) <= TBT_S
    ]
    served_per_s = served_rate(run.completions) or qps  # None: there are too few to tell
    return served_per_s < SERVED * qps or len(good) < 0.9 * len(run.completions)
