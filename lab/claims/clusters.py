"""Claims about machines that are not here, and about pipelines: only a cost model answers them.

Each function takes a CostLab. Short ones to begin with: s_4_2 and ss_t3.

S is SARATHI, SS is Sarathi-Serve; F is a figure, T a table, a number alone a section. Read first:
batches.py, offline.py, cost_lab.py. Read next: capacities.py."""

from dataclasses import dataclass, replace
from itertools import product
from statistics import median

from config import EngineConfig
from lab.claims.claim import Finding, claim
from lab.claims.cost_lab import CostLab
from lab.claims.jobs import OfflineJob, OfflineRun, offline
from lab.claims.labs import Lockstep
from lab.claims.offline import gains_at_contexts
from lab.claims.phases import saturation_of
from lab.claims.systems import (
    A100_33B,
    A6000_13B,
    FALCON_180B,
    GPT3_LAYER,
    GPT3_MAX_LEN,
    GPT3_PIPELINE,
    GPT3_REPLICA,
    LLAMA2_70B,
    MISTRAL_7B,
    YI_34B,
)
from lab.claims.table import line, over
from lab.measure.batch_times import TimedChunk, decodes, prompts
from lab.measure.workload import Arrival, zipf_lengths
from lab.simulator.cost_model import CostModel
from lab.simulator.simulation import bubble_kinds, simulate
from parallel.micro_batches import StageRun

# --- single iterations


@claim("Prefill throughput of one layer over tokens")
def s_4_2(lab: CostLab) -> Finding:
    """S-4.2: a wider layer needs fewer tokens: GPT-3 peaks at 256 on an A100.

    As in S-F4a an eighth below the peak is marginal. Here 128 tokens are a whole tile, and there
    GPT-3 is 9 % below it."""
    finding = Finding()
    table = finding.table(x="tokens", y="tokens/ms", spec=".1f")
    systems = {"LLaMA-13B on an A6000": A6000_13B, "GPT-3 on an A100": GPT3_LAYER}
    sizes = (64, 128, 256, 512, 1024)
    for tokens, (name, cost) in product(sizes, systems.items()):
        batches = {"prompt": [prompts(1, tokens)]}
        times = lab.on(cost).time(batches, layers=1)
        table.add(tokens, {name: times["prompt"].tokens_per_ms})
    saturations = {name: saturation_of(table[name]) for name in systems}
    saturates = line("saturates", saturations, x="of", spec=",.0f")
    gpt_3 = "GPT-3 on an A100"
    finding.publish("tokens at which a layer of GPT-3 peaks", 256, saturates, gpt_3)
    return finding


@claim("The batch that fits in memory, for each micro-batch in flight")
def s_4_3_1(lab: CostLab) -> Finding:
    """S-4.3.1: B = floor((M_G - M_S) / (L * m_kv)).

    90 % of what the data sheet calls 80 GB makes 27 and 11. The cards have 80 GiB, 86 GB: of these
    it is 84 %, and with 96 % the batches of 33B come out, 10, 5 and 3, so that no single share
    makes both (S-T4 runs the paper's batches all the same). No M_S makes 18, 10 and 6: ten requests
    of 2K take 16.8 GB of KV cache, nineteen of 1K only 15.9 GB."""
    finding = Finding()
    table = finding.table(x="system", y="requests that fit", spec=",.0f")
    for name, cost, length, published in [
        ("llama-13b, a6000, TP 1 x PP 1, 1K", A6000_13B, 1024, 18),
        ("llama-13b, a6000, TP 1 x PP 1, 2K", A6000_13B, 2048, 10),
        ("llama-13b, a6000, TP 1 x PP 1, 3K", A6000_13B, 3072, 6),
        ("llama-33b, a100-80gb, TP 1 x PP 1, 1K", A100_33B, 1024, 10),
        ("llama-33b, a100-80gb, TP 1 x PP 1, 2K", A100_33B, 2048, 5),
        ("llama-33b, a100-80gb, TP 1 x PP 1, 3K", A100_33B, 3072, 3),
        ("gpt3-175b, a100-80gb, TP 8 x PP 8, 4K", GPT3_PIPELINE, GPT3_MAX_LEN, 27),
        ("gpt3-175b, a100-80gb, TP 8 x PP 1, 4K", GPT3_REPLICA, GPT3_MAX_LEN, 11),
    ]:
        table.add(name, {"batch": cost.max_batch(length)})
        is_fitted = cost.config == GPT3_PIPELINE.config
        finding.publish(name, published, table["batch"], name, fitted=is_fitted)
    return finding


@claim("A decode iteration of 32 requests at 4,096 tokens")
def ss_t3(lab: CostLab) -> Finding:
    """SS-T3: the strict SLO is five decode iterations, the relaxed one 25.

    The paper: a fifth of the strict SLO, which is 0.1, 0.2, 1 and 1 s, rounded. In the authors'
    data, osdi-experiments/figure-2, one decode takes 47 ms and 32 take 88, of a model whose
    prefills are as long as Yi-34B's."""
    finding = Finding()
    table = finding.table(x="system", y="ms", spec=".1f")
    batch = [(0, 4095, 1)] * 32
    for system in (MISTRAL_7B, YI_34B, LLAMA2_70B, FALCON_180B):
        name = system.name
        cost = system.cost(lab.setup.cpu_s)
        table.add(name, {"iteration": 1e3 * cost.seconds(batch)})
        paper_ms = 1e3 * system.slos_s["strict"] / 5
        finding.publish(name, paper_ms, table["iteration"], name, unit=" ms")
    return finding


@claim("A bubble behind a prompt, Falcon-180B in two stages")
def ss_3_3(lab: CostLab) -> Finding:
    """SS-3.3: a stage that has decodes waits for one that has a prompt.

    The prompt's 1,150 ms must be those of one stage: through both, four A100 at the 312 Tflop/s of
    the data sheet take 1,180. The decodes' 200 are those of both, if they are a fifth of the SLO
    (SS-T3)."""
    cost = FALCON_180B.cost(lab.setup.cpu_s)
    decode_batch = [(0, 4095, 1)] * 32
    prompt_s, _ = cost.stages([(0, 0, 4096)]).seconds
    decode_s, _ = cost.stages(decode_batch).seconds
    milliseconds = {
        "a prompt of 4,096 on one stage": 1e3 * prompt_s,
        "32 decodes on one stage": 1e3 * decode_s,
        "32 decodes through both": 1e3 * cost.seconds(decode_batch),
        "the bubble, their difference": 1e3 * (prompt_s - decode_s),
    }
    finding = Finding()
    table = finding.table(x="what", y="ms", spec=",.0f")
    for name, ms in milliseconds.items():
        table.add(name, {"ms": ms})
    prompt, _, through_both, bubble = milliseconds
    published_ms = {prompt: 1150, through_both: 200, bubble: 950}
    for name, paper_ms in published_ms.items():
        finding.publish(name, paper_ms, table["ms"], name, unit=" ms")
    return finding


@claim("Matrix products of an iteration over its tokens, LLaMA2-70B on A100")
def ss_f6(lab: CostLab) -> Finding:
    """SS-F6: the linear layers take as long for 512 tokens as for 128, and then grow.

    The paper: largely stagnant from 128 to 512 tokens, more so at a high TP, and then linear. It is
    stagnant to 128 here, and linear from there. A published profile (Vidur's, TP 8) is not flat
    either: 512 tokens take 2.8 times as long as 128."""
    finding = Finding()
    table = finding.table(x="tokens", y="ms", spec=",.1f", log="xy")
    title = "512 tokens over 128"
    ratios = finding.table(title, x="GPUs", y="times as long", spec=".1fx")
    for tp in (1, 2, 4, 8):
        cost = CostModel.named("llama2-70b", tp=tp)
        name = f"TP {tp}"
        for tokens in (32, 128, 256, 512, 1024, 4096):
            linear_s, *_ = cost.token_seconds(tokens)
            table.add(tokens, {name: 1e3 * cost.layers * linear_s})
        products_ms = table[name]
        ratio = over(products_ms.at(512), products_ms.at(128))
        ratios.add(name, {"512 / 128": ratio})
    return finding


@claim("Decodes with a prefill in their batch over decodes alone, Mistral-7B")
def ss_f9c(lab: CostLab) -> Finding:
    """SS-F9c: how much a prompt or its last chunk delays decodes depends on how many there are.

    The paper: up to 28.3x with whole prompts, much less with chunks, and less still with more
    decodes or longer contexts. It does not say for which batch, context and prompt. The prompt has
    4,096 tokens here; with the chunk there are 512 in all."""
    mistral = lab.on(MISTRAL_7B.cost(lab.setup.cpu_s))
    finding = Finding()
    table = finding.table(x="decodes", y="times as long as alone", spec=".1fx")
    batches = (8, 32, 64)
    contexts = (1024, 4096)
    for batch, context in product(batches, contexts):
        decode_batch = decodes(batch, context)
        case = {
            "alone": [decode_batch],
            "a prompt": [decode_batch + prompts(1, 4096)],
            "its last chunk": [(*decode_batch, TimedChunk(512 - batch, 4096 - batch))],
        }
        times = mistral.time(case)
        alone_ms = times.pop("alone").total_ms
        for name, time in times.items():
            table.add(f"{batch} at {context:,}", {name: time.total_ms / alone_ms})
    finding.publish("beside a whole prompt, at most", 28.3, table["a prompt"], max)
    return finding


# --- loads that are all there at the start


@claim("Throughput gains of SARATHI over request-level, LLaMA-33B on an A100")
def s_t4b(lab: CostLab) -> Finding:
    """S-T4b: a larger model on a larger GPU gains as much, at each context.

    The code of SARATHI is the same: its constants are those of S-T4."""
    cases = {
        Lockstep(1024, 10, 256, 41): 28.0,
        Lockstep(2048, 5, 256, 21): 63.0,
        Lockstep(3072, 3, 256, 13): 127.0,
    }
    published = {
        "1K, B = 10": (1.25, 3.83),
        "2K, B = 5": (1.22, 4.25),
        "3K, B = 3": (1.14, 3.51),
    }
    return gains_at_contexts(lab.on(A100_33B), "LLaMA-33B, A100", cases, published)


@dataclass(frozen=True)
class Assumptions:
    """What S-F12 depends on. The paper says the first three, which variants change."""

    requests: int = 1000
    shortest: int = 1024  # tokens of a request
    longest: int = GPT3_MAX_LEN
    replica_policy: str = "orca-best"
    chunk: int = 256
    tile: int = 128  # chunks are cut to multiples of it, together with the decodes
    stage_ms: float = 0  # CPU time that keeps a stage from other work
    layer_ms: float = 0  # CPU time of each layer; the stage may compute other batches meanwhile


THE_LAST_TWO = Assumptions(chunk=282, tile=1, layer_ms=0.3)
FIGURE_12_VARIANTS = {
    "10,000 requests": Assumptions(requests=10_000),
    "1,000 of them": Assumptions(),
    "all of one length": Assumptions(shortest=2236, longest=2236),  # their mean
    "replicas under request-level": Assumptions(replica_policy="request-level"),
    "replicas under SARATHI": Assumptions(replica_policy="sarathi"),
    "chunk 512": Assumptions(chunk=512),
    "4 ms of CPU per stage": Assumptions(stage_ms=4),
    "10 ms of CPU per stage": Assumptions(stage_ms=10),
    "0.1 ms of CPU per layer": Assumptions(layer_ms=0.1),
    "0.3 ms of CPU per layer": Assumptions(layer_ms=0.3),
    "256 tokens beside the decodes": Assumptions(chunk=282, tile=1),
    "the last two": THE_LAST_TWO,
    "the last two, 10,000 requests": replace(THE_LAST_TWO, requests=10_000),
}


def figure_12_jobs(assumed: Assumptions) -> dict[str, OfflineJob]:
    """The jobs of S-F12 under these assumptions. CPU time of a pipeline's layers is in the hops, so
    that its last stage has none."""
    lengths = zipf_lengths(assumed.shortest, assumed.longest, 0.4, 10, 10_000, 0)
    arrivals = [Arrival(0.0, *pair) for pair in lengths[: assumed.requests]]
    stage_s = assumed.stage_ms / 1e3
    layer_s = assumed.layer_ms / 1e3
    hop = GPT3_PIPELINE.pp_link
    hop = hop._replace(step_s=hop.step_s + GPT3_PIPELINE.layers * layer_s)
    pipeline = replace(GPT3_PIPELINE, cpu_s=stage_s, pp_link=hop)
    replica = replace(GPT3_REPLICA, cpu_s=stage_s + GPT3_REPLICA.layers * layer_s)
    orca = config_of("orca-best", pipeline)
    sarathi = config_of("sarathi", pipeline, assumed.chunk, assumed.tile)
    apart = config_of(assumed.replica_policy, replica)
    return {
        "orca-best, TP 8 x PP 8": OfflineJob(pipeline, orca, arrivals),
        "TP 8, 8 replicas": OfflineJob(replica, apart, arrivals, replicas=8),
        "sarathi, TP 8 x PP 8": OfflineJob(pipeline, sarathi, arrivals),
    }


def config_of(
    policy: str, cost: CostModel, chunk: int = 256, tile: int | None = None
) -> EngineConfig:
    """The EngineConfig of an engine with as many requests as fit."""
    batch = cost.max_batch(GPT3_MAX_LEN)
    return EngineConfig(
        policy=policy,
        chunk=chunk,
        max_batch=batch,
        max_len=GPT3_MAX_LEN,
        page_size=GPT3_MAX_LEN,
        pages=batch * cost.pp,
        policy_options={"tile": tile} if tile else {},
    )


FIGURE_12_GAINS = {  # published
    "SARATHI over replicas": 1.48,
    "SARATHI over Orca": 1.91,
    "replicas over Orca": 1.28,
    "bubbles Orca / SARATHI": 6.29,
}


def figure_12_gains(runs: dict[str, OfflineRun]) -> dict[str, float | None]:
    """The gains in makespan, and the ratio of median bubbles, by the names of FIGURE_12_GAINS."""
    orca, replicas, sarathi = runs.values()
    orca_bubble = median(orca.bubbles)
    sarathi_bubble = median(sarathi.bubbles)
    return {
        "SARATHI over replicas": replicas.makespan_s / sarathi.makespan_s,
        "SARATHI over Orca": orca.makespan_s / sarathi.makespan_s,
        "replicas over Orca": orca.makespan_s / replicas.makespan_s,
        "bubbles Orca / SARATHI": over(orca_bubble, sarathi_bubble),
    }


@claim("GPT-3 on 64 A100: a pipeline under Orca and SARATHI, and replicas without one")
def s_f12(lab: CostLab) -> Finding:
    """S-F12: a pipeline under SARATHI beats replicas, and these beat a pipeline under Orca.

    10,000 requests of 1K to 4K tokens (Zipf 0.4), P:D 10, are all there at time 0. The paper has
    batches of 27, each of 8 micro-batches in flight, and 11. The variants show how the gains move
    with what it does not say; all but the first and the last are of 1,000 requests. With one length
    most of the gain over Orca goes: it comes from batches that differ. CPU time per stage holds up
    the stage, and weighs on small chunks first, which take 10 ms there; CPU time per layer (of 12
    in a stage, 96 in a replica) only the batch, while the stage may compute others: the 4 ms of
    S-F7 are 0.1 ms in each of 40 layers. 282 tokens are a chunk of 256 and 26 decodes. 0.3 ms, some
    25 microseconds for each kernel of a layer and three times what S-F7 leaves, is fitted."""
    jobs = {
        (variant, system): job
        for variant, assumed in FIGURE_12_VARIANTS.items()
        for system, job in figure_12_jobs(assumed).items()
    }
    results = lab.setup.run_all(offline, jobs)
    runs: dict[str, dict[str, OfflineRun]] = {}
    for (variant, system), run in results.items():
        runs.setdefault(variant, {})[system] = run
    finding = Finding(has_picture=True)
    batches = finding.table("batch", x="system", y="requests", spec=",.0f")
    seconds = finding.table("seconds", x="system", y="s", spec=",.2f")
    busy = finding.table("stages busy", x="system", y="share of the time", spec=".0%")
    all_requests = runs["10,000 requests"]
    for system, run in all_requests.items():
        job = jobs["10,000 requests", system]
        batches.add(system, {"batch": job.config.max_batch})
        seconds.add(system, {"makespan": run.makespan_s})
        seconds.add(system, {"median bubble of a request": median(run.bubbles)})
        busy.add(system, {"stages busy": run.utilisation})
    gains = finding.table("gains in makespan", x="variant", y="gain")
    title = "median bubble of a request"
    medians = finding.table(title, x="variant", y="s", spec=".2f")
    for variant, of_variant in runs.items():
        gains.add(variant, figure_12_gains(of_variant))
        for name, run in of_variant.items():
            medians.add(variant, {name: median(run.bubbles)})
    for variant in ("10,000 requests", "the last two, 10,000 requests"):
        for name, published in FIGURE_12_GAINS.items():
            text = f"{name}, {variant}"
            fitted = variant != "10,000 requests"
            finding.publish(text, published, gains[name], variant, fitted=fitted)
    if lab.picture:
        from lab.pictures.pipelines import plot_bubbles  # matplotlib takes a second

        gains = ", ".join(f"{name} {gain}x" for name, gain in FIGURE_12_GAINS.items())
        title = f"S-F12: GPT-3 on 64 A100, 10,000 requests\npublished: {gains}"
        plot_bubbles(all_requests, title, lab.picture)
    return finding


@claim("Bubbles of four requests in two stages, GPT-3, TP 8 x PP 2")
def ss_f8(lab: CostLab) -> Finding:
    """SS-F8: chunks make micro-batches of one length, which leave few bubbles PB1, PB2 and PB3.

    As in S-F1 and S-F5. Requests A to D have 2,048, 1,024, 2,040 and 1,020 tokens, and 20 outputs.
    PB1: prefills of different length; PB2: prefill against decodes; PB3: decodes at different
    contexts, and what the output head adds to the last stage. Chunk 256."""
    cost = replace(GPT3_PIPELINE, pp=2)
    prompt_lens = (2048, 1024, 2040, 1020)
    arrivals = [Arrival(0.0, prompt_len, 20) for prompt_len in prompt_lens]
    finding = Finding(has_picture=True)
    table = finding.table(x="policy", y="ms", spec=",.1f")
    stage_runs: dict[str, list[StageRun]] = {}
    for policy in ("orca-best", "sarathi-serve"):
        config = EngineConfig(
            policy=policy,
            chunk=256,
            max_batch=2,
            max_len=8192,
            page_size=8192,
            pages=4,
        )
        simulated = simulate(cost, config, arrivals)
        stage_runs[policy] = simulated.stage_runs
        milliseconds = {"PB1": 0.0, "PB2": 0.0, "PB3": 0.0}
        for stage_run, kind in bubble_kinds(simulated.stage_runs):
            milliseconds[kind] += 1e3 * stage_run.bubble
        table.add(policy, milliseconds)
        table.add(policy, {"all bubbles": sum(milliseconds.values())})
        table.add(policy, {"makespan": 1e3 * simulated.run.seconds})
    if lab.picture:
        from lab.pictures.pipelines import plot_pipeline  # matplotlib takes a second

        kinds = {policy: bubble_kinds(runs) for policy, runs in stage_runs.items()}
        plot_pipeline(stage_runs, kinds, "SS-F8: bubbles in two stages", lab.picture)
    return finding
