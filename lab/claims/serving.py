"""Claims about latency: requests arrive while others run.

Each function serves loads under several policies, or searches the highest rate that meets an SLO.
Short ones to begin with: ss_t4 and ss_f12.

The lengths of the data sets are scaled to the longest request that is served here, and so are the
token budgets: 512 and 2,048 of 8,192 are 128 and 512 of 2,048.

SS is Sarathi-Serve, B a post on schedulers; F is a figure, T a table, a number alone a section.
Read first: offline.py. Read next: claims.py."""

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import product

from lab.claims.checks import Condition, falls, less, rises
from lab.claims.claim import MISTRAL_7B, SAME_SIZE, YI_34B, Finding, claim
from lab.claims.labs import Lab, Served
from lab.claims.offline import EVERYTHING_AT_ONCE
from lab.claims.table import Table, over
from lab.measure.capacity import Bounded
from lab.measure.token_budget import SLOS
from lab.measure.workload import Arrival
from lab.pictures.timelines import plot_serving

BUDGET = 128  # tokens: a sixteenth or an eighth of the longest request
SARATHI_SERVE = f"sarathi-serve:{BUDGET}"
BUDGETS = [SARATHI_SERVE, "sarathi-serve:512"]
STRICT = "A strict SLO has no room for the stall of a whole prompt, but for a chunk."
RELAXED = "A relaxed SLO allows stalls of whole prompts."
NEXT_REQUEST = "Orca gives a slot to the next request as soon as one ends."
LATE = 3  # decode iterations of a full batch, after which C and D come, while A and B run
POINTS = 24  # of a line over time
ALL = 1.0  # the load that would take all that the device is estimated to do: none keeps up with it

# What the papers publish: gains of Sarathi-Serve in capacity, by the system that it is over
FIGURE_10 = {  # Mistral-7B, strict SLO: as a summary of the paper reads them off
    "sharegpt4": {"vLLM": 2.15, "Orca": 2.78},
    "arxiv": {"vLLM": 1.97, "Orca": 1.82},
}
YI_34B_GAINS = {"vLLM": 3.7, "Orca": 4.0}  # section 5.1
FIGURE_12 = {"100 ms": 3.5, "1 s": 1.65}  # Mistral-7B and Yi-34B, over vLLM
TABLE_4 = {  # trace -> {policy: its P50 TTFT and P99 TBT, s}
    "sharegpt4": {
        "hybrid-only": (0.53, 0.68),
        "chunked-only": (1.04, 0.17),
        "sarathi-serve": (0.76, 0.14),
    },
    "arxiv": {
        "hybrid-only": (3.78, 1.38),
        "chunked-only": (5.38, 0.20),
        "sarathi-serve": (3.90, 0.17),
    },
}
POST: dict[str, dict[str, float]] = {  # what it says of each policy
    "request-level": {"tokens/s": 1200, "P99 TBT": 0.85, "P99 TTFT": 3.2},
    "orca": {"tokens/s": 2800, "P99 TBT": 0.42, "P99 TTFT": 1.8},
    "sarathi-serve:512": {"tokens/s": 2650, "P99 TBT": 0.085, "P99 TTFT": 2.1},
    "sarathi-serve:256": {"tokens/s": 2550, "P99 TBT": 0.065, "P99 TTFT": 2.4},
    "sarathi-serve:128": {"tokens/s": 2400, "P99 TBT": 0.055, "P99 TTFT": 2.8},
}


@claim("Requests A to D over time, under four policies", seconds=(30, 35))
def ss_f7(lab: Lab) -> Finding:
    """SS-F7: only Sarathi-Serve neither stalls A and B nor lets C and D wait.

    The figure is drawn, not measured: it has no numbers."""
    served = serve_a_to_d(lab)
    finding = Finding(has_picture=True)
    in_stall = "prompt tokens in the longest stall"
    stalls = finding.table(x="requests", y=in_stall, spec=",.0f", timed=False)
    ttft = finding.table(x="requests", y="s until D, or C, has its first token", spec=".2f")
    tbt = finding.table(x="requests", y="longest TBT in s", spec=".3f")
    for name, run in served.runs.items():
        longest = run.stalls.longest
        stalls.add("A to D", {name: longest.prefill_tokens if longest else 0})
        ttft.add("A to D", {name: run.ttft_s.max})
        tbt.add("A to D", {name: run.tbt_s.max})
    stall = "A and B wait for two whole prompts, or for no more than a chunk of them."
    finding.expect(
        less(stalls["request-level"], 1), "Nobody is let in before A and B have all their output."
    )
    our_stall = 3 * stalls["sarathi-serve"]
    our_tbt = 2.5 * tbt["sarathi-serve"]
    for policy in ("vllm", "orca"):
        finding.expect(less(our_stall, stalls[policy]), stall)
        finding.expect(
            less(ttft[policy], ttft["request-level"]),
            "C and D wait until A and B have all their output, or for no longer than a prompt.",
        )
        finding.expect(less(our_tbt, tbt[policy]), stall)
    finding.tables.append(prompts_in_turn(served))
    of_d = finding.tables[-1]
    finding.expect(
        less(of_d["sarathi-serve"], 1, at="start"),
        "What was started is finished before a new prompt begins.",
    )
    for policy in ("vllm", "sarathi-serve"):
        finding.expect(
            less(0, of_d[policy], at="end"), "New prompts get what is left of a batch's tokens."
        )
    return finding


def serve_a_to_d(lab: Lab) -> Served:
    """Serve A and B, and C and D a little later, and draw what happens."""
    a_and_b = [Arrival(0.0, 64, 40)] * 2
    c_and_d = [Arrival(LATE, 1000, 20)] * 2
    served = lab.serve(
        ["vllm", "orca", "request-level", "sarathi-serve"],
        arrivals=[*a_and_b, *c_and_d],
        max_len=2048,
        kv_tokens=8192,
    )
    title = "SS-F7: two requests run, A and B, when two others come, C and D"
    plot_serving(served.records, lab.machine, lab.picture, served.slo_s, title, "ABCD")
    return served


def prompts_in_turn(served: Served) -> Table:
    """How much of D's prompt is computed before the last chunk of C's, and beside it."""
    table = Table("D's prompt", "when", "tokens", ",.0f", timed=False)
    for name, run in served.records.items():
        of_c, of_d = [
            {
                number: length
                for number, iteration in enumerate(run.iterations)
                for request_id, _, length, is_decode in iteration.chunks
                if request_id == request and not is_decode
            }
            for request in (2, 3)
        ]
        last = max(of_c)
        before = sum(length for number, length in of_d.items() if number < last)
        table.add("before C's last chunk", {name: before})
        table.add("beside it", {name: of_d.get(last, 0)})
    return table


@claim(
    "Capacity under the strict and the relaxed SLO, both datasets",
    seconds=(60, 550),
    covers=("SS-F11",),
)
def ss_f10(lab: Lab) -> Finding:
    """SS-F10: Sarathi-Serve serves the highest rate, by more the stricter the SLO is.

    The abstract says up to 2.6x over vLLM for Mistral-7B, without a data set; section 5.1 says 3.7x
    for Yi-34B, the figure 2.44x. LLaMA2-70B gains up to 6.3x over Orca and 4.3x over vLLM,
    Falcon-180B up to 5.6x: `bench.py simulate` compares these."""
    finding = Finding(MISTRAL_7B)
    for lengths, published in FIGURE_10.items():
        table = capacities_at_slos(lab, lengths)
        finding.tables.append(table)
        best = table.best("sarathi-serve", BUDGETS)
        gains = {
            "vLLM": best / table["vllm"],
            "Orca": best / table["orca"],
        }
        for gain in gains.values():
            finding.expect(less(1.05, gain, at="start"), STRICT)
        finding.expect(falls(gains["vLLM"]), RELAXED)
        if lab.size == "gpu":  # a CPU serves too few requests for a queue
            small, large = [table[name] for name in BUDGETS]
            finding.expect(
                less(1.05 * small, large, at="end"),
                "Smaller chunks read the weights more often: their queue grows at a lower rate.",
                lab.ridge_above(BUDGET),
            )
        strict = table.xs[0]
        for system, gain in gains.items():
            text = f"over {system}, {lengths}, strict"
            finding.publish(text, published[system], gain, strict)
        if lengths == "sharegpt4":  # whose requests are far from the longest
            finding.expect(
                less(1.05 * table["orca"], table["vllm"], at="end"),
                "Who reserves memory page by page runs more requests at once.",
            )
            for system, gain in gains.items():
                text = f"over {system}, as the text says"
                paper = YI_34B_GAINS[system]
                finding.publish(text, paper, gain, strict, device=YI_34B, within=None)
    return finding


def capacities_at_slos(lab: Lab, lengths: str) -> Table:
    """Search capacities under the strict and the relaxed SLO."""
    # arxiv takes an hour on a CPU: there it is simulated
    is_long = lengths == "arxiv"
    simulated = lab.pick(False, cpu=is_long, quick=True)
    requests = lab.pick(100, cpu=60 if is_long else 20, quick=60)
    title = lengths + (", simulated" if simulated else "")
    table = Table(title, "SLO s", "requests/s", ".2f", "x")
    for slo in SLOS:
        capacities = lab.capacity(
            ["orca", "vllm", *BUDGETS],
            slo=slo,
            lengths=lengths,
            requests=requests,
            batch=lab.pick(128, cpu=32),
            simulated=simulated,
        )
        table.add(round(capacities.slo_s, 3), capacities.qps)
    return table


@dataclass(frozen=True)
class CapacitiesOverSLO:
    """Capacities over the SLO, and the names of the lines that are of vllm and of Sarathi-Serve."""

    table: Table
    vllm: list[str]  # with three batch sizes
    sarathi_serve: list[str]  # with two token budgets


def capacities_over_slo(lab: Lab) -> CapacitiesOverSLO:
    """Search capacities as in Figure 12."""
    multiples = lab.pick(
        ["strict", "10x", "15x", "relaxed", "50x"],
        cpu=["strict", "15x", "relaxed"],
        quick=["strict", "15x", "50x"],
    )
    batches = lab.pick([32, 64, 128], cpu=[8, 16, 32])
    largest = batches[-1]
    title = "sharegpt4" + lab.pick("", quick=", simulated")
    table = Table(title, "SLO s", "requests/s", ".2f", "x")
    for batch, slo in product(batches, multiples):
        capacities = lab.capacity(
            ["orca", "vllm", *BUDGETS] if batch == largest else ["vllm"],
            slo=slo,
            lengths="sharegpt4",
            requests=lab.pick(100, cpu=20, quick=60),
            batch=batch,
            kv_tokens=lab.pick(40960, cpu=10240),  # whatever the batch
        )
        qps = {f"{name}, batch {batch}": rate for name, rate in capacities.qps.items()}
        table.add(round(capacities.slo_s, 3), qps)
    return CapacitiesOverSLO(
        table,
        vllm=[f"vllm, batch {batch}" for batch in batches],
        sarathi_serve=[f"{name}, batch {largest}" for name in BUDGETS],
    )


@claim("Capacity over the SLO: vllm with three batch sizes, two token budgets", seconds=(3, 1150))
def ss_f12(lab: Lab) -> Finding:
    """SS-F12: at a strict SLO the right token budget beats vllm with any batch size.

    The text gives the 3.5x to Mistral-7B, the figure's caption to Yi-34B."""
    capacities = capacities_over_slo(lab)
    table = capacities.table
    best_vllm = table.best("vllm", capacities.vllm)
    best_budget = table.best("sarathi-serve", capacities.sarathi_serve)
    gain = best_budget / best_vllm
    finding = Finding(MISTRAL_7B, tables=[table])
    finding.expect(less(1.05, gain, at="start"), STRICT)
    finding.expect(falls(gain), RELAXED)
    strict, *_, relaxed = table.xs
    finding.publish("over vLLM, 100 ms", FIGURE_12["100 ms"], gain, strict)
    finding.publish("over vLLM, 1 s", FIGURE_12["1 s"], gain, relaxed, device=YI_34B)
    return finding


@claim("Capacity of vllm with three batch sizes", seconds=(1, 1))
def ss_5_2(lab: Lab) -> Finding:
    """SS-5.2: at a strict SLO vllm serves alike with three batch sizes: stalls are its limit.

    The searches are those of SS-F12. Two rates of a search differ by a quarter at the least."""
    capacities = capacities_over_slo(lab)
    table = capacities.table
    finding = Finding(MISTRAL_7B, tables=[table])
    spread = finding.table("vllm", table.x, "largest over smallest", ".2f")
    for slo_s in table.xs:
        rates = [table[name].at(slo_s) for name in capacities.vllm]
        known_rates = [rate for rate in rates if rate is not None]
        largest = max(known_rates, default=None)
        smallest = min(known_rates, default=None)
        spread.add(slo_s, {"three batch sizes": over(largest, smallest)})
    (ratio,) = spread
    finding.expect(
        less(ratio, 1.6, at="start"),
        "A strict SLO is missed by the stall of a prompt, whatever the batch.",
    )
    text = "largest over smallest capacity of three batch sizes: largely identical"
    finding.publish(text, 1.0, ratio, table.xs[0], within=1.3)
    return finding


@claim("Hybrid batches alone, chunks alone, and both: P50 TTFT and P99 TBT", seconds=(65, 100))
def ss_t4(lab: Lab) -> Finding:
    """SS-T4: hybrid batches keep TTFT low, chunks keep TBT low, and both together do both.

    The paper serves 1 chat or half a summary a second, 128 requests; its caption says a budget of
    1,024 tokens, its script 512, here it is a sixteenth or an eighth of the longest request."""
    policies = ["hybrid-only", f"chunked-only:{BUDGET}", SARATHI_SERVE]
    finding = Finding(YI_34B)
    ttft = finding.table("P50 TTFT", "lengths", "s", ".3f", "y")
    tbt = finding.table("P99 TBT", "lengths", "s", ".3f", "y")
    requests = lab.pick(128, cpu=32, quick=12)
    for lengths in TABLE_4:
        served = lab.serve(policies, lengths=lengths, requests=requests)
        for name, run in served.runs.items():
            ttft.add(lengths, {name: run.ttft_s.p50})
            tbt.add(lengths, {name: run.tbt_s.p99})
    hybrid_only, chunked_only, _ = policies
    hybrid_ttft = ttft[hybrid_only] / ttft[SARATHI_SERVE]
    chunked_ttft = ttft[chunked_only] / ttft[SARATHI_SERVE]
    hybrid_tbt = tbt[hybrid_only] / tbt[SARATHI_SERVE]
    chunked_tbt = tbt[chunked_only] / tbt[SARATHI_SERVE]
    few_decodes = lab.ridge_above(32)
    finding.expect(less(hybrid_ttft, 1), "A prompt that is not cut is done in one iteration.")
    finding.expect(
        less(1, chunked_ttft),
        "Between two chunks there is an iteration of decodes, which reads all weights; in a hybrid "
        "batch decodes take their own number from the chunk.",
        few_decodes,
    )
    finding.expect(
        less(1, chunked_tbt),
        "Between two tokens there are a chunk and an iteration, or one of both.",
        few_decodes,
    )
    finding.expect(less(1.5, hybrid_tbt), "Decodes wait for whole prompts, or for chunks.")
    for policy, number, line in [
        ("hybrid-only", 1, hybrid_tbt),
        ("chunked-only", 1, chunked_tbt),
        ("hybrid-only", 0, hybrid_ttft),
        ("chunked-only", 0, chunked_ttft),
    ]:
        title = line.table.title
        texts = {"sharegpt4": "chats", "arxiv": "arxiv"}
        for lengths, text in texts.items():
            published = TABLE_4[lengths]
            paper = published[policy][number] / published["sarathi-serve"][number]
            finding.publish(f"{title}, {policy}, {text}", paper, line, lengths)
    return finding


@claim(
    "Stalls over time and under load, and what they are traded for",
    seconds=(45, 100),
    covers=("SS-F2",),
)
def ss_f1(lab: Lab) -> Finding:
    """SS-F1: under load vllm stalls, request-level serves less, Sarathi-Serve does neither.

    Figure 1 shows a stall and the tail of TBT over load; Figure 2 is a sketch of who trades
    throughput for TBT."""
    served = {}  # load, as a share of the estimated capacity -> runs
    loads = lab.pick([0.25, 0.5, ALL], quick=[0.5, ALL])
    for load in loads:
        extra_policies = ["request-level", "orca"] if load == ALL else []
        policies = [*extra_policies, "vllm", SARATHI_SERVE]
        requests = lab.pick(128, cpu=32, quick=12)
        served[load] = lab.serve(policies, requests=requests, load=load)
    finding = Finding(tables=tokens_over_time(served[ALL]))
    runs = [run for at_load in served.values() for run in at_load.runs.values()]
    preempted = sum(run.preemptions or 0 for run in runs)
    stall, tbt, throughput, prefill = tables_over_load(finding, served)
    our_prefill = prefill[SARATHI_SERVE]
    our_tbt = tbt[SARATHI_SERVE]
    whole_prompts = "A prompt is computed whole, and until it is done no decode gets a token."
    finding.expect(less(2 * our_prefill, prefill["vllm"], at="end"), whole_prompts)
    finding.expect(
        less(our_prefill, BUDGET),
        "Between two tokens of a request lies one iteration, of no more than the budget.",
        Condition(
            "no request is preempted", not preempted, f"{preempted} preemptions were counted"
        ),
    )
    finding.expect(
        rises(tbt["vllm"]),
        "The more requests arrive, the more prompts are computed one after another.",
    )
    finding.expect(less(1.1 * our_tbt, tbt["vllm"], at="end"), whole_prompts)
    finding.expect(
        less(tbt["request-level"], 1.1 * our_tbt),
        "No prompt comes between two tokens of a batch that runs to its end.",
    )
    finding.expect(
        less(1.1 * throughput["request-level"], throughput[SARATHI_SERVE]),
        "Slots stay empty until the longest request of the batch has ended.",
    )
    text = "the longest stall of vLLM, several seconds"
    seconds = Bounded(2.0, "at least")
    of_vllm = stall["vllm"]
    finding.publish(text, seconds, of_vllm, ALL, within=None, unit=" s")
    return finding


def tables_over_load(finding: Finding, served: dict[float, Served]) -> list[Table]:
    """Add tables over the load: longest stall, P99 TBT, throughput, and the prompt tokens in the
    longest stall."""
    stall = finding.table("longest stall", "load", "s", ".3f", "y")
    tbt = finding.table("P99 TBT", "load", "s", ".3f", "y")
    throughput = finding.table("throughput", "load", "tokens/s", ",.0f")
    title = "prompt tokens in the longest stall"
    prefill = finding.table(title, "load", "tokens", ",.0f", timed=False)
    for load, at_load in served.items():
        for name, run in at_load.runs.items():
            longest = run.stalls.longest
            stall.add(load, {name: run.longest_stall_s})
            tbt.add(load, {name: run.tbt_s.p99})
            throughput.add(load, {name: run.tokens_per_s})
            prefill.add(load, {name: longest.prefill_tokens if longest else None})
    return [stall, tbt, throughput, prefill]


def tokens_over_time(served: Served) -> list[Table]:
    """The output over time of the request that vllm stalls longest, there and under Sarathi-Serve;
    [] if it stalls none."""
    longest = served.runs["vllm"].stalls.longest
    if longest is None:
        return []
    title = f"request {longest.request_id}"
    table = Table(title, "s since it arrived", "output tokens", ",.0f")
    completions = {
        name: served.records[name].completions[longest.request_id]
        for name in ("vllm", SARATHI_SERVE)
    }
    seconds = max(completion.latency or 0.0 for completion in completions.values())
    points = range(POINTS + 1)
    for point, (name, completion) in product(points, completions.items()):
        elapsed_s = seconds * point / POINTS
        time = completion.arrival + elapsed_s
        tokens = bisect_right(completion.token_times, time)
        table.add(round(elapsed_s, 2), {name: tokens})
    return [table]


@claim("The token budget of the strict and the relaxed SLO, by timing batches", seconds=(25, 60))
def ss_4_3(lab: Lab) -> Finding:
    """SS-4.3: the budget of an SLO is the largest batch within it, and grows with the SLO.

    Hybrid batches are timed once, of 32 decodes and a chunk."""
    decode_count = 32
    budgeted = lab.token_budgets(
        ["strict", "relaxed"],
        decodes=decode_count,
        max_budget=lab.pick(8192, cpu=4096),
        tile=lab.pick(128, cpu=32, quick=128),
    )
    finding = Finding()
    times = finding.table("an iteration with 32 decodes", "token budget", "ms", ".1f")
    for row in sorted(budgeted.profile):
        times.add(row.budget, {"iteration": 1e3 * row.seconds})
        for slo, seconds in budgeted.slos_s.items():
            times.add(row.budget, {f"{slo} SLO": 1e3 * seconds})
    budgets = finding.table("the largest within an SLO", "SLO", "tokens", ",.0f")
    compared = Table("of an SLO")
    for slo, budget in budgeted.budgets.items():
        chunk = Bounded(budget - decode_count, budget.bound)
        budgets.add(slo, {"token budget": budget, "chunk": chunk})
        compared.add("tokens", {f"{slo} budget": budget, f"{slo} chunk": chunk})
    finding.expect(
        rises(times["iteration"]),
        "A batch of more tokens multiplies the same weights by more rows.",
    )
    finding.expect(
        less(2 * compared["strict chunk"], compared["relaxed chunk"]),
        "Of 5 and 25 decode iterations a chunk has 4 and 24: six times as long.",
    )
    models = {"strict": "all models", "relaxed": "all models but LLaMA2-70B"}
    published = {"strict": 512, "relaxed": 2048}
    for slo, paper in published.items():
        text = f"token budget, {slo} SLO"
        line = budgets["token budget"]
        within = SAME_SIZE if lab.size == "gpu" else None  # a CPU has another ridge
        finding.publish(text, paper, line, slo, device=models[slo], within=within)
    ratio = replace(compared["relaxed budget"] / compared["strict budget"], spec=".1fx")
    finding.publish("relaxed over strict", 4, ratio, "tokens")
    return finding


@claim(
    "Static batching, Orca, and Orca with chunks of 512, 256 and 128, or a quarter, at a load that "
    "saturates",
    seconds=(120, 240),
)
def b_7(lab: Lab) -> Finding:
    """B-7: large chunks raise throughput, small chunks lower TBT; static batching has no stalls.

    A fifth of the requests or fewer fit at once: else static batching would have one batch of all.
    The post gives static batching the longest P99 TBT, 850 ms, which contradicts Sarathi-Serve
    (section 2.5): nobody is let in between two tokens. It gives Orca more tokens/s than any chunk
    size, SARATHI fewer. So neither number is compared."""
    static = "request-level"
    chunk = lab.pick(128, cpu=32)
    small, medium, large = [f"sarathi:{factor * chunk}" for factor in (1, 2, 4)]
    at_once = "all at once"
    in_turn = "one after another"
    finding = Finding("70B, 128 users")
    loads = {
        at_once: [static, "orca", small, medium, large],
        in_turn: [static, "orca", small],
    }
    throughput, tbt, ttft = serve_users(lab, finding, loads)
    orca_gain = throughput["orca"] / throughput[static]
    wait = ttft[static] / ttft["orca"]
    by_stall = [tbt[name] for name in (static, small, medium, large, "orca")]
    finding.expect(
        less(*by_stall, at="start"),
        "Between two tokens there is nobody's prompt, a chunk, or a whole prompt.",
    )
    finding.expect(less(1.05, orca_gain, at="start"), NEXT_REQUEST)
    finding.expect(
        less(1.05, wait, at="end"),
        "Static batching lets prompts wait until the whole batch has ended.",
    )
    of_128 = "chunks of 128"
    in_post = {
        "static": POST[static],
        "Orca": POST["orca"],
        of_128: POST["sarathi-serve:128"],
    }
    orca_stall = tbt["orca"] / tbt[small]
    static_stall = tbt[static] / tbt[small]
    chunks_gain = throughput[small] / throughput["orca"]
    for number, one, other, ratio, contradicts, when in (
        ("P99 TBT", "Orca", of_128, orca_stall, "", at_once),
        ("tokens/s", "Orca", "static", orca_gain, "", at_once),
        ("tokens/s", of_128, "Orca", chunks_gain, "SARATHI", at_once),
        ("P99 TTFT", "static", "Orca", wait, "", in_turn),
        ("P99 TBT", "static", of_128, static_stall, "Sarathi-Serve", at_once),
    ):
        text = f"{number}, {one} over {other}"
        if contradicts:
            text += f": contradicts {contradicts}"
        paper = in_post[one][number] / in_post[other][number]
        within = None if contradicts else SAME_SIZE
        finding.publish(text, paper, ratio, when, within=within)
    return finding


def serve_users(lab: Lab, finding: Finding, loads: dict[str, list[str]]) -> list[Table]:
    """Serve the post's users under these policies, all at once or one after another. Adds tables of
    throughput, P99 TBT and P99 TTFT."""
    throughput = finding.table("throughput", "when", "tokens/s", ",.0f")
    tbt = finding.table("P99 TBT", "when", "s", ".3f")
    ttft = finding.table("P99 TTFT", "when", "s", ".2f")
    slots = lab.pick(20, cpu=6, quick=3)
    max_len = lab.pick(2048, cpu=1024)
    for when, policies in loads.items():
        served = lab.serve(
            policies,
            requests=lab.pick(128, cpu=32, quick=16),
            load=lab.pick(0.5, cpu=0.3),  # of a server with more slots
            qps=EVERYTHING_AT_ONCE if when == "all at once" else None,
            batch=slots,
            max_len=max_len,
            kv_tokens=slots * max_len,
        )
        for name, run in served.runs.items():
            throughput.add(when, {name: run.tokens_per_s})
            tbt.add(when, {name: run.tbt_s.p99})
            ttft.add(when, {name: run.ttft_s.p99})
    return [throughput, tbt, ttft]
