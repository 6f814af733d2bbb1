"""Claims about latency and capacity: requests arrive while others run.

SS is Sarathi-Serve, B a post on schedulers; F is a figure, T a table, a number alone a section.
What the paper leaves open (loads, budgets, batches) is that of the scripts that its authors
published. Read first: pipelines.py, lab/measure/capacity.py. Read next: today.py."""

from functools import partial
from itertools import combinations, product
from statistics import median

from lab.claims.claim import Result, claim
from lab.claims.labs import Lab, PaperLab
from lab.claims.systems import FALCON_180B, H100_70B, LLAMA2_70B, MISTRAL_7B, YI_34B
from lab.measure.batch_times import TimedChunk, decodes
from lab.measure.capacity import Bounded, judge
from lab.measure.run_loop import Run
from lab.measure.token_budget import SLOS
from lab.measure.workload import LENGTHS, Arrival


@claim("SS-F1", "Under load vllm stalls, and Sarathi-Serve does not", MISTRAL_7B)
def stalls_under_load(lab: Lab) -> Result:
    """A prompt is computed whole, and until it is done no decode gets a token. Under request-level
    slots stay empty until the longest request of a batch has ended (SS-F2)."""
    result = Result("load, policy", ".3g")
    for share, policy in product((0.25, 0.5, 1), ("request-level", "vllm", "sarathi-serve")):
        run = lab.serve(policy, "sharegpt4", requests=lab.batch, share=share, record=True)
        stall = run.stalls.longest
        result.add(
            f"{share:g}, {policy}",
            {
                "longest stall, s": run.longest_stall_s,
                "prompt tokens in it": stall.prefill_tokens if stall else 0,
                "P99 TBT, s": run.tbt_s.p99,
                "tokens/s": run.tokens_per_s,
            },
        )
    stalls_s = result.column("longest stall, s")
    several = Bounded(2, "at least")
    result.publish("longest stall of vLLM, several seconds", several, stalls_s.get("1, vllm"))
    tokens = result.column("prompt tokens in it")
    relation = "vllm's longest stall has twice the prompt tokens of Sarathi-Serve's"
    result.expect(relation, tokens["1, vllm"] > 2 * tokens["1, sarathi-serve"])
    return result


def draw_serving(runs: dict[str, Run], name: str, slo_s: float, file: str) -> None:
    """Write the picture of SS-F7."""
    from lab.pictures.timelines import plot_timelines  # matplotlib takes a second

    title = "SS-F7: two requests run, A and B, when two others come, C and D"
    plot_timelines(runs, {"device": name, "model": "", "dtype": ""}, file, slo_s, title, "ABCD")


@claim("SS-F7", "Sarathi-Serve neither stalls A and B nor lets C and D wait", MISTRAL_7B)
def requests_a_to_d(lab: Lab) -> Result:
    """A and B wait for two whole prompts, or for no more than a chunk of them.

    Under request-level C and D wait until A and B have all their output. The figure is drawn: it
    has no numbers."""
    late_s = 3 * lab.base.seconds
    arrivals = [Arrival(0.0, 64, 40)] * 2 + [Arrival(late_s, 1000, 20)] * 2
    slo_s = 5 * lab.base.seconds
    result = Result("policy", ".3g")
    runs = {}
    for policy in ("vllm", "orca", "request-level", "sarathi-serve"):
        name = f"{policy}:128" if policy == "sarathi-serve" else policy
        config = lab.config(name, 2048, 8, kv_tokens=8192)
        runs[policy] = lab.run(config, arrivals, record=True)
        run = judge(runs[policy], slo_s)
        stall = run.stalls.longest
        result.add(
            policy, {"prompt tokens in the longest stall": stall.prefill_tokens if stall else 0}
        )
        result.add(policy, {"longest TTFT, s": run.ttft_s.max, "longest TBT, s": run.tbt_s.max})
    result.picture = partial(draw_serving, runs, lab.name, slo_s)
    tbt_s = result.column("longest TBT, s")
    ttft_s = result.column("longest TTFT, s")
    stalls_less = 2 * tbt_s["sarathi-serve"] < min(tbt_s["vllm"], tbt_s["orca"])
    waits_less = ttft_s["sarathi-serve"] < ttft_s["request-level"]
    result.expect("both are short", stalls_less and waits_less)
    return result


# of Sarathi-Serve, strict SLO: (lengths, over whom) -> in the text, and read off Figure 10
GAINS = {
    MISTRAL_7B.name: {
        ("sharegpt4", "vllm"): (2.6, 2.15),
        ("sharegpt4", "orca"): (None, 2.78),
        ("arxiv", "vllm"): (None, 1.97),
        ("arxiv", "orca"): (None, 1.82),
    },
    YI_34B.name: {("sharegpt4", "vllm"): (3.7, 2.44), ("sharegpt4", "orca"): (4.0, None)},
    LLAMA2_70B.name: {("sharegpt4", "orca"): (6.3, None), ("sharegpt4", "vllm"): (4.3, None)},
}


@claim(
    "SS-F10",
    "The stricter the SLO, the more Sarathi-Serve gains",
    MISTRAL_7B,
    YI_34B,
    measured="slow",
)
@claim("SS-F11", "In pipelines it gains as much, too", LLAMA2_70B, FALCON_180B, measured="no")
def capacities(lab: Lab) -> Result:
    """A strict SLO has no room for the stall of a whole prompt, but for a chunk. Chunks leave no
    bubbles in a pipeline.

    A step of the search is 1.05; here 1.25. The text has up to 2.6x and 5.6x without a load. Figure
    10 is as a summary of the paper reads it. The paper's Orca has 8 or 16 requests, as activations
    take memory, too. A strict SLO of 1 s is 11 and 14 decode iterations of the cost model."""
    result = Result("load")
    servers = ("orca", "vllm", "sarathi-serve")
    loads = ["sharegpt4"] if lab.is_small else list(LENGTHS)
    rates = {  # the longest SLO first: its runs tell what shorter ones miss
        (lengths, slo): {server: lab.capacity(server, lengths, slo) for server in servers}
        for lengths, slo in product(loads, reversed(SLOS))
    }
    for lengths, slo in product(loads, SLOS):
        row = rates[lengths, slo]
        ours = row["sarathi-serve"]
        gains = {f"over {other}": ours.over(row[other]) for other in ("orca", "vllm")}
        result.add(f"{lengths}, {slo}", row | gains)
    for (lengths, other), (paper, reading) in GAINS.get(lab.name, {}).items():
        gain = result.rows[f"{lengths}, strict"][f"over {other}"]
        text = f"{lab.name}, {lengths}, strict, over {other}"
        if paper:
            result.publish(text, paper, gain)
        if reading:
            result.publish(f"{text}: Figure 10", reading, gain, "reading")
    if lab.name == FALCON_180B.name:
        over_all = [*result.column("over orca").values(), *result.column("over vllm").values()]
        result.publish("Falcon-180B, up to", 5.6, max(over_all))
    strict, relaxed = (result.rows[f"sharegpt4, {slo}"]["over vllm"] for slo in SLOS)
    result.expect("the gain over vllm falls with a longer SLO", (strict or 0) > (relaxed or 0))
    return result


@claim(
    "SS-F12",
    "The better token budget gains over vllm under a strict SLO",
    MISTRAL_7B,
    YI_34B,
    measured="no",
)
def capacity_over_slo(lab: PaperLab) -> Result:
    """Stalls are vllm's limit, so that three batch sizes serve alike under a strict SLO (SS-5.2).

    A step of the search is 1.1. The text gives the 3.5x at 0.1 s to Mistral-7B, the caption to
    Yi-34B."""
    servers = {f"vllm, batch {batch}": ("vllm", batch) for batch in (32, 64, 128)}
    servers |= {f"budget {size}": (f"sarathi-serve:{size}", 128) for size in (512, 2048)}
    slos_s = (0.2, 0.3, 0.5, 0.7, 1) if lab.name == YI_34B.name else (0.1, 0.2, 0.3, 0.5, 1)
    result = Result("SLO, s")
    rates = {  # the longest SLO first, as above
        slo_s: {
            name: lab.capacity_at(policy, batch, "sharegpt4", slo_s, ratio=1.1)
            for name, (policy, batch) in servers.items()
        }
        for slo_s in reversed(slos_s)
    }
    for slo_s in slos_s:
        row = rates[slo_s]
        best = max(row["budget 512"], row["budget 2048"])
        gain = best.over(row["vllm, batch 128"])
        result.add(slo_s, row | {"best budget over vllm": gain})
    gains = result.column("best budget over vllm")
    if lab.name == YI_34B.name:
        result.publish("Yi-34B at 1 s", 1.65, gains["1"])
    else:
        result.publish("Mistral-7B at 0.1 s", 3.5, gains["0.1"])
    strict, *_, relaxed = gains.values()
    result.expect("the gain falls with a longer SLO", strict > relaxed)
    return result


@claim(
    "SS-T3",
    "The strict SLO is five decode iterations",
    MISTRAL_7B,
    YI_34B,
    LLAMA2_70B,
    FALCON_180B,
    measured="no",
)
def decode_iterations(lab: PaperLab) -> Result:
    """Of 32 requests at 4,096 tokens. The paper has a fifth of its strict SLO, rounded.

    In the authors' data, osdi-experiments/figure-2, 32 decodes take 88 ms, of a model whose
    prefills are as long as Yi-34B's. So its decodes may be too fast here by two."""
    result = Result("decodes at 4,096 tokens", ".1f")
    for batch in (1, 8, 32):
        result.add(batch, {"iteration, ms": 1e3 * lab.cost.seconds([(0, 4095, 1)] * batch)})
    ours = result.rows["32"]["iteration, ms"] or 0
    paper = 1e3 * lab.system.slos_s["strict"] / 5
    result.publish(lab.name, paper, ours)
    if lab.name == YI_34B.name:
        result.publish(f"32 decodes, {lab.name}", 88, ours, "data")
    result.expect("a fifth of the strict SLO has room for it", ours < 1.1 * paper)
    return result


TABLE_4 = {  # lengths, requests/s, policy -> P50 TTFT and P99 TBT, s
    ("sharegpt4", 1, "hybrid-only"): (0.53, 0.68),
    ("sharegpt4", 1, "chunked-only"): (1.04, 0.17),
    ("sharegpt4", 1, "sarathi-serve"): (0.76, 0.14),
    ("arxiv", 0.5, "hybrid-only"): (3.78, 1.38),
    ("arxiv", 0.5, "chunked-only"): (5.38, 0.20),
    ("arxiv", 0.5, "sarathi-serve"): (3.90, 0.17),
}


@claim("SS-T4", "Hybrid batches keep TTFT low, chunks TBT, and both do both", YI_34B)
def hybrid_and_chunks(lab: Lab) -> Result:
    """A prompt that is not cut is done in one iteration, for which decodes wait.

    Loads of the published script; its budget is 512, the caption says 1,024. Medians of five draws
    of the lengths. On papers the published numbers contradict the authors' data of Figure 14: a
    median paper of 7,059 tokens takes 1.5 s, longer than P99 TBT of hybrid-only, although at 0.5/s
    about one gap in ten holds a whole prompt; and 1,024 tokens take more than the other two."""
    draws = 1 if lab.is_small else 5
    result = Result("lengths, policy", ".3f")
    for (lengths, qps, policy), (ttft_s, tbt_s) in TABLE_4.items():
        load = {"requests": 32 if lab.is_small else 128, "qps": qps}
        runs = [lab.serve(policy, lengths, seed=seed, **load) for seed in range(draws)]
        ours = {
            "P50 TTFT, s": median(run.ttft_s.p50 or 0.0 for run in runs),
            "P99 TBT, s": median(run.tbt_s.p99 or 0.0 for run in runs),
        }
        result.add(f"{lengths}, {policy}", ours)
        for (name, number), paper in zip(ours.items(), (ttft_s, tbt_s), strict=True):
            result.publish(f"{name}, {lengths}, {policy}", paper, number)
    tbt = result.column("P99 TBT, s")
    shorter = 1.5 * tbt["sharegpt4, sarathi-serve"] < tbt["sharegpt4, hybrid-only"]
    result.expect("chunks make TBT shorter by half", shorter)
    return result


@claim("SS-4.3", "The token budget of an SLO is the largest batch within it", MISTRAL_7B)
def token_budgets(lab: Lab) -> Result:
    """A batch of more tokens multiplies the same weights by more rows.

    Of 5 and 25 decode iterations a chunk has 4 and 24: six times as long. Budgets are powers of two
    here."""
    context = lab.scaled(4096)
    riding = decodes(32, context)
    alone_ms = lab.time({"alone": [riding]})["alone"].total_ms
    result = Result("token budget")
    for budget in [2**exponent for exponent in range(6, 14 if not lab.is_small else 12)]:
        hybrid = (TimedChunk(budget - 32, max(context, budget)), *riding)
        ms = lab.time({"hybrid": [hybrid]})["hybrid"].total_ms
        result.add(budget, {"ms": ms, "decode iterations": ms / alone_ms})
    iterations = result.column("decode iterations")
    budgets = {
        slo: max((int(x) for x, y in iterations.items() if y <= multiple), default=0)
        for slo, multiple in SLOS.items()
    }
    result.publish("tokens, strict SLO", 512, budgets["strict"])
    result.publish("tokens, relaxed SLO", 2048, budgets["relaxed"])
    result.expect("the relaxed budget is larger", budgets["relaxed"] > budgets["strict"])
    return result


POST = {  # policy -> tokens/s, P99 TBT and P99 TTFT in s
    "request-level": (1200, 0.85, 3.2),
    "orca": (2800, 0.42, 1.8),
    "sarathi-serve:512": (2650, 0.085, 2.1),
    "sarathi-serve:256": (2550, 0.065, 2.4),
    "sarathi-serve:128": (2400, 0.055, 2.8),
}


@claim(
    "B-7", "A post's order of the schedulers by throughput, TBT and TTFT", H100_70B, measured="no"
)
def order_of_schedulers(lab: PaperLab) -> Result:
    """Large chunks raise throughput, small ones lower TBT. The post does not say load and lengths:
    only the order can be compared. It gives static batching the longest TBT, which contradicts
    Sarathi-Serve (2.5): nobody is let in between two tokens.

    tokens/s and TBT with 128 requests running all the time, TTFT at 1.5 requests/s."""
    result = Result("policy", ".3g")
    for policy in POST:
        full = lab.serve(policy, "sharegpt4", requests=512, qps=float("inf"))
        later = lab.serve(policy, "sharegpt4", requests=512, qps=1.5)
        numbers = {"tokens/s": full.tokens_per_s, "P99 TBT, s": full.tbt_s.p99}
        result.add(policy, numbers | {"P99 TTFT, s": later.ttft_s.p99})
    in_order = 0
    for place, name in enumerate(("tokens/s", "P99 TBT, s", "P99 TTFT, s")):
        ours = result.column(name)
        for a, b in combinations(POST, 2):
            in_order += (ours[a] < ours[b]) == (POST[a][place] < POST[b][place])
    result.expect(f"{in_order} of 30 pairs are in the post's order, most", in_order > 15)
    return result
