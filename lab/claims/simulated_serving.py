"""Sarathi-Serve's loads on its machines, and a post's, simulated, each beside the numbers that
they say.

Each run has `requests` requests, and each iteration `cpu_ms` of CPU in each stage. What the paper
leaves open (loads, budgets, batch sizes) is that of the scripts that its authors published. Budgets
are of 512 tokens, but for policies such as "sarathi-serve:2048". Read first: systems.py,
comparison.py. Read next: simulated.py."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations, product
from statistics import median
from typing import Any, NamedTuple

from lab.claims.comparison import (
    Cell,
    Table,
    beside_published,
    only_simulated,
    paper_beside,
)
from lab.claims.systems import (
    FALCON_180B,
    LLAMA2_70B,
    MISTRAL_7B,
    YI_34B,
    CapacityJob,
    ServingJob,
    ServingSystem,
    Setup,
    Target,
    decodes,
    falcon_180b_without_pipeline,
    find_capacities,
    latencies,
    llama2_70b_on_h100,
)
from lab.measure.capacity import Bounded, slo_seconds
from lab.measure.token_budget import SLOS
from lab.measure.workload import LENGTHS
from lab.simulator.machine import base_of
from views.tables import show

# --- capacity under an SLO

CAPACITY_GAINS: dict[str, dict[str, Cell]] = {  # published, with "up to" or without
    # "up to", in abstract, §1 and §7, for no trace or SLO in particular
    "Mistral-7B, sharegpt4, strict": {"over vllm": 2.6},
    "Yi-34B, sharegpt4, strict": {"over orca": 4.0, "over vllm": 3.7},  # §5.1
    "LLaMA2-70B, sharegpt4, strict": {"over orca": 6.3, "over vllm": 4.3},
}
CAPACITY_NOTE = (
    "SLO: 5 or 25 decode iterations of this cost model. Budgets and batches as in the\n"
    "paper's scripts; Orca's 16 or 8 requests (its activations take memory that the\n"
    "formula does not see) are for each micro-batch. No sliding window."
)
GAINS_NOTE = (
    "0.1 and 0.2 s are five decode iterations of this cost model, as Table 3 says, without CPU\n"
    "time. The text also has 3.5x over vllm for Mistral-7B at 0.1 s (SS-F12). Iterations of\n"
    "Yi-34B with 512 to 2,048 tokens take as long as in the authors' data of Figure 14."
)
FIGURE_10_GAINS = [  # under the strict SLO; (model and trace, over which server, gain)
    ("Mistral-7B, sharegpt4", "orca", 2.78),
    ("Mistral-7B, sharegpt4", "vllm", 2.15),
    ("Mistral-7B, arxiv", "orca", 1.82),
    ("Mistral-7B, arxiv", "vllm", 1.97),
    ("Yi-34B, sharegpt4", "vllm", 2.44),
]
PIPELINES_NOTE = (
    "A strict SLO of 1 s is 11 and 14 decode iterations of this cost model, 94 and 72 ms, where\n"
    "the paper says five. The links are measured ones (devices.py), so that these are not it. As\n"
    "CPU time the rest, 50 and 64 ms a stage, makes the gains larger still. Falcon-180B: the\n"
    "paper's gains are up to 5.6x, and 3.6x (strict) and 1.48x (relaxed) over vllm with a pipeline."
)


Capacities = Mapping[Target, Bounded]  # in requests/s


@dataclass(frozen=True)
class Load:
    """A system and a trace, whose capacities are rows of the tables of `claim`."""

    claim: str
    system: ServingSystem
    trace: str
    ratio: float  # how close a search comes

    @property
    def name(self) -> str:
        """The system and the trace."""
        return f"{self.system.name}, {self.trace}"


LOADS = [
    Load(claim, system, trace, ratio)
    for claim, system, ratio in [
        ("SS-F10", MISTRAL_7B, 1.05),
        ("SS-F10", YI_34B, 1.05),
        ("SS-F11", LLAMA2_70B, 1.1),
        ("SS-F11", FALCON_180B, 1.1),
    ]
    for trace in LENGTHS
]


class Limit(NamedTuple):
    """An SLO of P99 TBT under which capacities are searched."""

    is_published: bool  # that of the paper's Table 3, or a multiple of a simulated iteration
    kind: str  # "strict" or "relaxed"
    slo_s: float


def serving_capacity(setup: Setup) -> Iterator[Table]:
    """SS-F10 and SS-F11: capacity of four models on both traces under both SLOs. They are multiples
    of the cost model's decode iteration, and those of the paper's Table 3."""
    jobs = {
        (load.name, name): capacity_job(setup, load, name)
        for load in LOADS
        for name in load.system.servers
    }
    results = setup.run_all(find_capacities, jobs)
    for claim, note in [("SS-F10", GAINS_NOTE), ("SS-F11", PIPELINES_NOTE)]:
        title = f"simulated capacity, {setup.cpu}, {setup.run_length}"
        multiples = capacity_table(claim, title, CAPACITY_NOTE)
        title = f"capacity at the SLOs of the paper's Table 3, gains of sarathi-serve, {setup.cpu}"
        seconds = capacity_table(claim, title, note)
        for load in LOADS:
            if load.claim == claim:
                capacities = {name: results[load.name, name] for name in load.system.servers}
                add_capacities(setup, load, capacities, multiples, seconds)
        seconds.draw_bars()
        yield multiples
        yield seconds
        if claim == "SS-F10":
            yield gains_of_figure_10(setup, seconds)


def gains_of_figure_10(setup: Setup, seconds: Table) -> Table:
    """The gains that Figure 10 shows, where they are others than the text's. `seconds` has ours."""
    table = Table(
        claim="SS-F10",
        title=f"gains under the strict SLO as Figure 10 shows them, {setup.cpu}",
        row_head="gain of sarathi-serve",
        quantities=[paper_beside(".2f")],
        note="As a summary of the paper reads them off the figure. The text has 2.6x for "
        "Mistral-7B over\nvllm, in abstract, §1 and §7, of no trace or SLO in particular, and 3.7x "
        "for Yi-34B.",
    )
    rows = {row[seconds.row_head]: row for row in seconds.rows}
    for load, server, published in FIGURE_10_GAINS:
        simulated = rows[f"{load}, strict"][f"simulated over {server}"]
        table.compare(f"{load}, over {server}", published, simulated)
    return table


def capacity_limits(setup: Setup, load: Load) -> list[Limit]:
    """The SLOs of a load."""
    base = base_of(load.system.cost(setup.cpu_s))
    multiples = [Limit(False, kind, slo_seconds(kind, base)) for kind in SLOS]
    return multiples + [Limit(True, kind, slo_s) for kind, slo_s in load.system.slos_s.items()]


def server_target(load: Load, name: str, limit: Limit) -> Target:
    """What one of a load's servers is to do under an SLO."""
    server = load.system.servers[name]
    return Target(server.policy(limit.kind), server.batch, limit.slo_s, load.ratio)


def capacity_job(setup: Setup, load: Load, name: str) -> CapacityJob:
    """All searches for one server of a load: those of SS-F12 and SS-F13 are among them, so that
    these share the runs."""
    targets = [server_target(load, name, limit) for limit in capacity_limits(setup, load)]
    if load.trace == "sharegpt4":
        for slo_s in FIGURE_12_SLOS_S.get(load.system.name, ()):
            targets += [
                figure_12_target(server, slo_s)
                for server in FIGURE_12_SERVERS
                if server.startswith(name)
            ]
    return CapacityJob(
        cost=load.system.cost(setup.cpu_s),
        trace=load.trace,
        targets=tuple(targets),
        requests=setup.requests,
    )


def add_capacities(
    setup: Setup,
    load: Load,
    capacities: Mapping[str, Capacities],
    multiples: Table,
    seconds: Table,
) -> None:
    """Add a row for each SLO of a load to one of its tables. `capacities` has those of each
    server."""
    for limit in capacity_limits(setup, load):
        rates = {
            name: of_server[server_target(load, name, limit)]
            for name, of_server in capacities.items()
        }
        sarathi = rates["sarathi-serve"]
        name = f"{load.name}, {limit.kind}"
        table = seconds if limit.is_published else multiples
        table.add(
            name,
            published=CAPACITY_GAINS.get(name, {}),
            simulated={
                "SLO s": limit.slo_s,
                **rates,
                "over orca": sarathi.over(rates["orca"]),
                "over vllm": sarathi.over(rates["vllm"]),
            },
        )


def capacity_table(claim: str, title: str, note: str) -> Table:
    """A table of capacities, and gains of sarathi-serve."""
    return Table(
        claim=claim,
        title=title,
        row_head="requests/s",
        quantities=[
            only_simulated("SLO s", ".3f"),
            only_simulated("orca", ".3f"),
            only_simulated("vllm", ".3f"),
            only_simulated("sarathi-serve", ".3f"),
            beside_published("over orca", ".2fx", error_head="error"),
            beside_published("over vllm", ".2fx", error_head="its error"),
        ],
        note=note,
    )


# --- capacity against the SLO

FIGURE_12_SERVERS = {  # (policy, batch)
    "vllm, batch 32": ("vllm", 32),
    "vllm, batch 64": ("vllm", 64),
    "vllm, batch 128": ("vllm", 128),
    "sarathi-serve, budget 512": ("sarathi-serve:512", 128),
    "sarathi-serve, budget 2048": ("sarathi-serve:2048", 128),
}


FIGURE_12_SLOS_S = {
    "Mistral-7B": (0.1, 0.2, 0.3, 0.5, 1),
    "Yi-34B": (0.2, 0.3, 0.5, 0.7, 1),
}


def figure_12_target(server: str, slo_s: float) -> Target:
    """One of FIGURE_12_SERVERS under an SLO."""
    policy, batch = FIGURE_12_SERVERS[server]
    return Target(policy, batch, slo_s, ratio=1.1)


def capacity_against_slo(setup: Setup) -> Iterator[Table]:
    """SS-F12: capacity over the SLO, vllm at three batch sizes and two token budgets."""
    loads = [
        load for load in LOADS if load.trace == "sharegpt4" and load.system.name in FIGURE_12_SLOS_S
    ]
    jobs = {
        (load.name, name): capacity_job(setup, load, name)
        for load in loads
        for name in ("vllm", "sarathi-serve")
    }
    results = setup.run_all(find_capacities, jobs)
    gains: dict[str, dict[float, Bounded | None]] = {}  # name of the system -> {SLO: gain}
    for load in loads:
        capacities = {**results[load.name, "vllm"], **results[load.name, "sarathi-serve"]}
        gains[load.system.name] = {
            slo_s: gain_of_best_budget(capacities, slo_s)
            for slo_s in FIGURE_12_SLOS_S[load.system.name]
        }
        yield capacities_over_slos(setup, load.system, capacities, gains[load.system.name])
    table = Table(
        claim="SS-F12",
        title="best budget over vllm, batch 128",
        row_head="gain",
        quantities=[paper_beside(".2f")],
        note="3.5x is Mistral-7B's at 0.1 s in the text; the caption of Figure 12 says Yi-34B.",
    )
    table.compare("Mistral-7B at 0.1 s", 3.5, gains["Mistral-7B"][0.1])
    table.compare("Yi-34B at 1 s", 1.65, gains["Yi-34B"][1])
    yield table


def gain_of_best_budget(capacities: Capacities, slo_s: float) -> Bounded | None:
    """The gain of the better budget over vllm."""
    small = capacities[figure_12_target("sarathi-serve, budget 512", slo_s)]
    large = capacities[figure_12_target("sarathi-serve, budget 2048", slo_s)]
    return max(small, large).over(capacities[figure_12_target("vllm, batch 128", slo_s)])


def capacities_over_slos(
    setup: Setup,
    system: ServingSystem,
    capacities: Capacities,
    gains: Mapping[float, Bounded | None],
) -> Table:
    """A table of the capacities of one system."""
    heads = {slo_s: f"{slo_s:g} s" for slo_s in gains}
    table = Table(
        claim="SS-F12",
        title="simulated capacity against the SLO of P99 TBT, sharegpt4, "
        f"{setup.cpu}, {setup.run_length}",
        row_head="requests/s at",
        quantities=[only_simulated(head, ".2f") for head in heads.values()],
        note='The paper (§5.2): vllm is "largely identical for all the three batch size settings".',
    )
    for server in FIGURE_12_SERVERS:
        row: dict[str, Cell] = {
            head: capacities[figure_12_target(server, slo_s)] for slo_s, head in heads.items()
        }
        table.add(f"{system.name}: {server}", row)
    row = {heads[slo_s]: show(gain, ".2fx") for slo_s, gain in gains.items()}
    table.add("best budget over vllm, batch 128", row)
    return table


# --- across nodes


def across_nodes(setup: Setup) -> Iterator[Table]:
    """SS-F13: Falcon-180B on two nodes joined by Ethernet, TP 8 against TP 4 x PP 2."""
    yield decodes_across_nodes(setup)
    yield from capacity_across_nodes(setup)


def decodes_across_nodes(setup: Setup) -> Table:
    """How much longer a decode takes without a pipeline."""
    table = Table(
        claim="SS-F13",
        title=f"decodes across nodes, {setup.cpu} (paper: about 2x)",
        row_head="decode-only iteration in ms, 2,048 tokens of context",
        quantities=[
            only_simulated("TP 8", ".0f"),
            only_simulated("TP 4 x PP 2", ".0f"),
            beside_published("ratio", ".2fx"),
        ],
        note="GB/s: what TCP makes of 100 Gb/s. Through NCCL it is 4 to 6 (devices.py), or half "
        "of\nthat where it is not tuned; 10 are 80 % of the wire. The paper does not say its "
        "batch. The\nCPU's time is in it once: a stage prepares its part while the one before "
        "computes; in the\nSLOs and capacities below each stage has its own.",
    )
    pipeline = FALCON_180B.cost(setup.cpu_s)
    tensor = falcon_180b_without_pipeline(setup.cpu_s)
    for batch, gb_per_s in product((8, 32, 128), (10, 5, 2.5)):
        link = pipeline.pp_link._replace(bytes_per_s=1e9 * gb_per_s)
        tensor_s = replace(tensor, tp_link=link).seconds(decodes(batch, 2048))
        pipeline_s = replace(pipeline, pp_link=link).seconds(decodes(batch, 2048))
        # of the CPU's part only one stage's: another prepares its own meanwhile
        pipeline_s -= (pipeline.pp - 1) * setup.cpu_s
        table.add(
            f"batch {batch}, {gb_per_s} GB/s",
            published={"ratio": 2},
            simulated={
                "TP 8": 1e3 * tensor_s,
                "TP 4 x PP 2": 1e3 * pipeline_s,
                "ratio": tensor_s / pipeline_s,
            },
        )
    return table


def capacity_across_nodes(setup: Setup) -> Iterator[Table]:
    """The capacity with a pipeline and without, and gains of sarathi-serve."""
    (load,) = [load for load in LOADS if load.system == FALCON_180B and load.trace == "sharegpt4"]
    limits = [limit for limit in capacity_limits(setup, load) if not limit.is_published]
    pipeline_job = capacity_job(setup, load, "vllm")
    jobs = {
        "vllm, TP 8": replace(
            pipeline_job,
            cost=falcon_180b_without_pipeline(setup.cpu_s),
            targets=tuple(server_target(load, "vllm", limit) for limit in limits),
        ),
        "vllm, TP 4 x PP 2": pipeline_job,
        "sarathi-serve, TP 4 x PP 2": capacity_job(setup, load, "sarathi-serve"),
    }
    heads = {limit.kind: f"{limit.kind}, {limit.slo_s:.2f} s" for limit in limits}
    table = Table(
        claim="SS-F13",
        title=f"capacity of Falcon-180B on two nodes, sharegpt4, {setup.cpu}, {setup.run_length}",
        row_head="requests/s",
        quantities=[only_simulated(head, ".3f") for head in heads.values()],
    )
    capacities: dict[str, dict[str, Bounded]] = {}  # system -> {kind of SLO: its capacity}
    for name, of_server in setup.run_all(find_capacities, jobs).items():
        server_name = name.split(",")[0]
        capacities[name] = {
            limit.kind: of_server[server_target(load, server_name, limit)] for limit in limits
        }
        table.add(name, {heads[kind]: qps for kind, qps in capacities[name].items()})
    yield table

    gains = Table(
        claim="SS-F13",
        title="gains of sarathi-serve with TP 4 x PP 2",
        row_head="capacity",
        quantities=[paper_beside(".2f")],
    )
    sarathi = capacities["sarathi-serve, TP 4 x PP 2"]
    for other, kind, published in [
        ("vllm, TP 8", "strict", 4.3),
        ("vllm, TP 4 x PP 2", "strict", 3.6),
        ("vllm, TP 4 x PP 2", "relaxed", 1.48),
    ]:
        gain = sarathi[kind].over(capacities[other][kind])
        gains.compare(f"over {other.replace(',', ' with')}, {kind}", published, gain)
    yield gains


# --- hybrid batches, chunks, and both


def ablation(setup: Setup) -> Iterator[Table]:
    """SS-T4: hybrid batches alone, chunks alone, and both; medians of five seeds."""
    table = Table(
        claim="SS-T4",
        title=f"Yi-34B on two A100, budget 512, 128 requests, {setup.cpu}",
        row_head="trace, requests/s, policy",
        quantities=[
            beside_published("P50 TTFT s", ".2f", error_head="error"),
            beside_published("P99 TBT s", ".3f", error_head="its error"),
        ],
        note="Loads of the published script, 1 and 0.5 requests/s; its budget is 512, the caption "
        "says 1,024.\nTTFT depends on the lengths drawn: these are medians of five draws. "
        "Iterations of 512 to 2,048\ntokens take as long as in the authors' data of Figure 14. "
        "On papers the published numbers\ncontradict these data. A prompt of 4,095 tokens took "
        "0.78 s, one of 8,191 1.75 s, so that a median\npaper, 7,059 tokens, takes 1.5 s: longer "
        "than P99 TBT of hybrid-only, 1.38 s, although at 0.5/s\nabout one gap in ten holds a "
        "whole prompt. And 1,024 tokens took 0.22 s, more than the other two\nP99 TBT, which are "
        "therefore of a budget of 512. With it a median paper takes 14 iterations of at\nleast "
        "0.12 s, almost the two seconds in which the next one comes, so that queues are long.",
    )
    rows = [  # the last two: published P50 TTFT and P99 TBT
        ("sharegpt4", 1, "hybrid-only", 0.53, 0.68),
        ("sharegpt4", 1, "chunked-only", 1.04, 0.17),
        ("sharegpt4", 1, "sarathi-serve", 0.76, 0.14),
        ("arxiv", 0.5, "hybrid-only", 3.78, 1.38),
        ("arxiv", 0.5, "chunked-only", 5.38, 0.20),
        ("arxiv", 0.5, "sarathi-serve", 3.90, 0.17),
        ("arxiv", 0.25, "hybrid-only", None, None),
        ("arxiv", 0.25, "chunked-only", None, None),
        ("arxiv", 0.25, "sarathi-serve", None, None),
        ("arxiv", 0.5, "chunked-only:1024", None, None),
        ("arxiv", 0.5, "sarathi-serve:1024", None, None),
    ]
    yi = YI_34B.cost(setup.cpu_s)
    jobs = {
        (trace, qps, policy, seed): ServingJob(yi, policy, trace, qps, requests=128, seed=seed)
        for trace, qps, policy, _, _ in rows
        for seed in range(5)
    }
    results = setup.run_all(latencies, jobs)
    for trace, qps, policy, ttft_s, tbt_s in rows:
        summaries = [results[trace, qps, policy, seed] for seed in range(5)]
        table.add(
            f"{trace}, {qps}, {policy}",
            published={"P50 TTFT s": ttft_s, "P99 TBT s": tbt_s},
            simulated={
                "P50 TTFT s": median_of(summary.ttft_s.p50 for summary in summaries),
                "P99 TBT s": median_of(summary.tbt_s.p99 for summary in summaries),
            },
        )
    table.draw_bars()
    yield table


def median_of(seconds: Iterable[float | None]) -> float:
    """The median of those that are known."""
    return median(value for value in seconds if value is not None)


# --- the post

POST: dict[str, dict[str, float]] = {  # what it says of each policy
    "request-level": {"tokens/s": 1200, "P99 TBT s": 0.85, "P99 TTFT s": 3.2},
    "orca": {"tokens/s": 2800, "P99 TBT s": 0.42, "P99 TTFT s": 1.8},
    "sarathi-serve:512": {"tokens/s": 2650, "P99 TBT s": 0.085, "P99 TTFT s": 2.1},
    "sarathi-serve:256": {"tokens/s": 2550, "P99 TBT s": 0.065, "P99 TTFT s": 2.4},
    "sarathi-serve:128": {"tokens/s": 2400, "P99 TBT s": 0.055, "P99 TTFT s": 2.8},
}


def post(setup: Setup) -> Iterator[Table]:
    """B-7: the post's comparison of schedulers, LLaMA2-70B on four H100, 128 users."""
    table = Table(
        claim="B-7",
        title=f"the post's schedulers: LLaMA2-70B on four H100, {setup.cpu}, {setup.run_length}",
        quantities=[
            beside_published("tokens/s", ",.0f"),
            beside_published("P99 TBT s", ".3f"),
            beside_published("P99 TTFT s", ".1f"),
        ],
        note="tokens/s (prompt and output) and TBT with 128 requests running all the time, TTFT at "
        "1.5\nrequests/s. The post does not say load and lengths: only the order can be compared.",
    )
    cost = llama2_70b_on_h100(setup.cpu_s)
    jobs = {
        (name, qps): ServingJob(cost, name, "sharegpt4", qps, setup.requests)
        for qps in (math.inf, 1.5)
        for name in POST
    }
    results = setup.run_all(latencies, jobs)
    simulated: dict[str, dict[str, Any]] = {}
    for name, published in POST.items():
        simulated[name] = {
            "tokens/s": results[name, math.inf].tokens_per_s,
            "P99 TBT s": results[name, math.inf].tbt_s.p99,
            "P99 TTFT s": results[name, 1.5].ttft_s.p99,
        }
        table.add(name, simulated[name], published)
    table.draw_bars()
    yield table
    yield post_order(simulated)


def post_order(simulated: dict[str, dict[str, Any]]) -> Table:
    """How many pairs of schedulers are in the post's order, by each number."""
    table = Table(
        claim="B-7",
        title="of the ten pairs of schedulers, those in the post's order",
        row_head="by",
        quantities=[only_simulated("pairs", "d")],
    )
    for head, name in [
        ("tokens/s", "tokens/s"),
        ("P99 TBT", "P99 TBT s"),
        ("P99 TTFT", "P99 TTFT s"),
    ]:
        alike = 0
        for one, other in combinations(POST, 2):
            published_below = POST[one][name] < POST[other][name]
            simulated_below = simulated[one][name] < simulated[other][name]
            alike += published_below == simulated_below
        table.add(head, {"pairs": alike})
    return table
