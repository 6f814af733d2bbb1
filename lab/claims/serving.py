"""Claims about latency: requests arrive while others run.

Each function serves loads under several policies, or searches the highest rate that meets an SLO.
Short ones to begin with: ss_t4 and ss_f12.

The lengths of the data sets are scaled to the longest request that is served here, and so are the
token budgets: 512 and 2,048 of 8,192 are 128 and 512 of 2,048.

SS is Sarathi-Serve, B a post on schedulers; F is a figure, T a table, a number alone a section.
Read first: offline.py. Read next: claims.py."""

from bisect import bisect_right
from dataclasses import dataclass

from lab.claims.checks import Condition, falls, less, rises
from lab.claims.claim import MISTRAL_7B, YI_34B, Finding, claim
from lab.claims.labs import Lab, Served
from lab.claims.offline import EVERYTHING_AT_ONCE
from lab.claims.table import Table, over
from lab.measure.capacity import Bounded
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


@claim("Requests A to D over time, under four policies", seconds=(30, 35))
def ss_f7(lab: Lab) -> Finding:
    """SS-F7: only Sarathi-Serve neither stalls A and B nor lets C and D wait.

    The figure is drawn, not measured: it has no numbers."""
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
    whole = "A and B wait for two whole prompts, or for no more than a chunk of them."
    finding.expect(
        less(stalls["request-level"], 1), "Nobody is let in before A and B have all their output."
    )
    for policy in ("vllm", "orca"):
        finding.expect(less(stalls["sarathi-serve"].times(3), stalls[policy]), whole)
        finding.expect(
            less(ttft[policy], ttft["request-level"]),
            "C and D wait until A and B have all their output, or for no longer than a prompt.",
        )
        finding.expect(less(tbt["sarathi-serve"].times(2.5), tbt[policy]), whole)
    return finding


@claim(
    "Capacity under the strict and the relaxed SLO, both datasets",
    seconds=(60, 550),
    covers=("SS-F11",),
)
def ss_f10(lab: Lab) -> Finding:
    """SS-F10: Sarathi-Serve serves the highest rate, by more the stricter the SLO is.

    The abstract says up to 2.6x over vLLM for Mistral-7B, without a data set; section 5.1 says 3.7x
    for Yi-34B, the figure 2.44x. LLaMA2-70B gains up to 6.3x over Orca and 4.3x over vLLM,
    Falcon-180B up to 5.6x."""
    requests = {
        "sharegpt4": lab.pick(gpu=100, cpu=20, quick=60),
        "arxiv": lab.pick(gpu=100, cpu=60),
    }
    # arxiv takes an hour on a CPU: there it is simulated
    simulated = lab.pick(gpu=(), cpu=("arxiv",), quick=("sharegpt4", "arxiv"))
    published = {  # from Figure 10, strict SLO: over vLLM, over Orca
        "sharegpt4": (2.15, 2.78),
        "arxiv": (1.97, 1.82),
    }
    finding = Finding(MISTRAL_7B)
    for lengths, count in requests.items():
        title = lengths + (", simulated" if lengths in simulated else "")
        table = finding.table(title, x="SLO s", y="requests/s", spec=".2f", log="x")
        for slo in ("strict", "relaxed"):
            capacities = lab.capacity(
                ["orca", "vllm", *BUDGETS],
                slo=slo,
                lengths=lengths,
                requests=count,
                batch=lab.pick(gpu=128, cpu=32),
                simulated=lengths in simulated,
            )
            table.add(round(capacities.slo_s, 3), capacities.qps)
        sarathi_serve = table.best("sarathi-serve", BUDGETS)
        over_vllm = sarathi_serve.over(table["vllm"], spec=".2fx")
        over_orca = sarathi_serve.over(table["orca"], spec=".2fx")
        finding.expect(less(1.05, over_vllm, at="start"), STRICT)
        finding.expect(less(1.05, over_orca, at="start"), STRICT)
        finding.expect(falls(over_vllm), RELAXED)
        strict = table.xs[0]
        paper_vllm, paper_orca = published[lengths]
        finding.publish(f"over vLLM, {lengths}, strict", paper_vllm, over_vllm, strict)
        finding.publish(f"over Orca, {lengths}, strict", paper_orca, over_orca, strict)
        if lengths == "sharegpt4":  # whose requests are far from the longest
            finding.expect(
                less(table["orca"].times(1.05), table["vllm"], at="end"),
                "Who reserves memory page by page runs more requests at once.",
            )
            for system, paper, line in (("vLLM", 3.7, over_vllm), ("Orca", 4.0, over_orca)):
                finding.publish(
                    f"over {system}, as the text says",
                    paper,
                    line,
                    strict,
                    device=YI_34B,
                    within=None,
                )
    return finding


@dataclass(frozen=True)
class CapacitiesOverSLO:
    """Capacities over the SLO, and the names of the lines that are of vllm and of Sarathi-Serve."""

    table: Table
    vllm: list[str]  # with three batch sizes
    sarathi_serve: list[str]  # with two token budgets


def capacities_over_slo(lab: Lab) -> CapacitiesOverSLO:
    """Search capacities as in Figure 12."""
    multiples = lab.pick(
        gpu=["strict", "10x", "15x", "relaxed", "50x"],
        cpu=["strict", "15x", "relaxed"],
        quick=["strict", "15x", "50x"],
    )
    small_batches = lab.pick(gpu=[32, 64], cpu=[8, 16])
    large_batch = lab.pick(gpu=128, cpu=32)
    title = "sharegpt4" + lab.pick(gpu="", quick=", simulated")
    table = Table(title, x="SLO s", y="requests/s", spec=".2f", log="x")
    cases = [(batch, ["vllm"]) for batch in small_batches]
    cases.append((large_batch, ["orca", "vllm", *BUDGETS]))
    for batch, policies in cases:
        for slo in multiples:
            capacities = lab.capacity(
                policies,
                slo=slo,
                lengths="sharegpt4",
                requests=lab.pick(gpu=100, cpu=20, quick=60),
                batch=batch,
                kv_tokens=lab.pick(gpu=40960, cpu=10240),  # whatever the batch
            )
            qps = {f"{name}, batch {batch}": rate for name, rate in capacities.qps.items()}
            table.add(round(capacities.slo_s, 3), qps)
    return CapacitiesOverSLO(
        table,
        vllm=[f"vllm, batch {batch}" for batch in (*small_batches, large_batch)],
        sarathi_serve=[f"{name}, batch {large_batch}" for name in BUDGETS],
    )


@claim("Capacity over the SLO: vllm with three batch sizes, two token budgets", seconds=(3, 1150))
def ss_f12(lab: Lab) -> Finding:
    """SS-F12: at a strict SLO the right token budget beats vllm with any batch size.

    The text gives the 3.5x to Mistral-7B, the figure's caption to Yi-34B."""
    capacities = capacities_over_slo(lab)
    table = capacities.table
    best_vllm = table.best("vllm", capacities.vllm)
    best_budget = table.best("sarathi-serve", capacities.sarathi_serve)
    gain = best_budget.over(best_vllm, spec=".2fx")
    finding = Finding(MISTRAL_7B, tables=[table])
    finding.expect(less(1.05, gain, at="start"), STRICT)
    finding.expect(falls(gain), RELAXED)
    finding.publish("over vLLM, 100 ms", 3.5, gain, table.xs[0])
    finding.publish("over vLLM, 1 s", 1.65, gain, table.xs[-1], device=YI_34B)
    return finding


@claim("Capacity of vllm with three batch sizes", seconds=(1, 1))
def ss_5_2(lab: Lab) -> Finding:
    """SS-5.2: at a strict SLO vllm serves alike with three batch sizes: stalls are its limit.

    The searches are those of SS-F12. Two rates of a search differ by a quarter at the least."""
    capacities = capacities_over_slo(lab)
    table = capacities.table
    finding = Finding(MISTRAL_7B, tables=[table])
    spread = finding.table("vllm", x=table.x, y="largest over smallest", spec=".2f")
    lines = [table[name] for name in capacities.vllm]
    for slo_s in table.xs:
        rates = [rate for line in lines if (rate := line.at(slo_s)) is not None]
        ratio = over(max(rates, default=None), min(rates, default=None))
        spread.add(slo_s, {"three batch sizes": ratio})
    alike = spread["three batch sizes"]
    finding.expect(
        less(alike, 1.6, at="start"),
        "A strict SLO is missed by the stall of a prompt, whatever the batch.",
    )
    finding.publish(
        "largest over smallest capacity of three batch sizes: largely identical",
        1.0,
        alike,
        table.xs[0],
        within=1.3,
    )
    return finding


@claim("Hybrid batches alone, chunks alone, and both: P50 TTFT and P99 TBT", seconds=(65, 100))
def ss_t4(lab: Lab) -> Finding:
    """SS-T4: hybrid batches keep TTFT low, chunks keep TBT low, and both together do both.

    The paper serves 1 chat or half a summary a second, 128 requests; its caption says a budget of
    1,024 tokens, its script 512, here it is a sixteenth or an eighth of the longest request."""
    hybrid = "hybrid-only"
    chunked = f"chunked-only:{BUDGET}"
    policies = [hybrid, chunked, SARATHI_SERVE]
    finding = Finding(YI_34B)
    ttft = finding.table("P50 TTFT", x="lengths", y="s", spec=".3f", log="y")
    tbt = finding.table("P99 TBT", x="lengths", y="s", spec=".3f", log="y")
    for lengths in ("sharegpt4", "arxiv"):
        requests = lab.pick(gpu=128, cpu=32, quick=12)
        served = lab.serve(policies, lengths=lengths, requests=requests)
        ttft.add(lengths, {name: run.ttft_s.p50 for name, run in served.runs.items()})
        tbt.add(lengths, {name: run.tbt_s.p99 for name, run in served.runs.items()})
    ratios = {
        (quantity, policy): table[policy].over(table[SARATHI_SERVE], spec=".2fx")
        for quantity, table in (("P50 TTFT", ttft), ("P99 TBT", tbt))
        for policy in (hybrid, chunked)
    }
    few_decodes = lab.ridge_above(32)
    finding.expect(
        less(ratios["P50 TTFT", hybrid], 1), "A prompt that is not cut is done in one iteration."
    )
    finding.expect(
        less(1, ratios["P50 TTFT", chunked]),
        "Between two chunks there is an iteration of decodes, which reads all weights; in a hybrid "
        "batch decodes take their own number from the chunk.",
        few_decodes,
    )
    finding.expect(
        less(1, ratios["P99 TBT", chunked]),
        "Between two tokens there are a chunk and an iteration, or one of both.",
        few_decodes,
    )
    finding.expect(
        less(1.5, ratios["P99 TBT", hybrid]), "Decodes wait for whole prompts, or for chunks."
    )
    published = {  # of the policy over both, in seconds: chats, arxiv
        ("P99 TBT", hybrid): (0.68 / 0.14, 1.38 / 0.17),
        ("P99 TBT", chunked): (0.17 / 0.14, 0.20 / 0.17),
        ("P50 TTFT", hybrid): (0.53 / 0.76, 3.78 / 3.90),
        ("P50 TTFT", chunked): (1.04 / 0.76, 5.38 / 3.90),
    }
    for (quantity, policy), (chats, papers) in published.items():
        text = f"{quantity}, {policy.partition(':')[0]}"
        line = ratios[quantity, policy]
        finding.publish(f"{text}, chats", chats, line, "sharegpt4")
        finding.publish(f"{text}, arxiv", papers, line, "arxiv")
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
    requests = lab.pick(gpu=128, cpu=32, quick=12)
    served = {}  # load, as a share of the estimated capacity -> runs
    for load in lab.pick(gpu=[0.25, 0.5, ALL], quick=[0.5, ALL]):
        others = ["request-level", "orca"] if load == ALL else []
        policies = [*others, "vllm", SARATHI_SERVE]
        served[load] = lab.serve(policies, requests=requests, load=load)
    finding = Finding(tables=tokens_over_time(served[ALL]))
    stall = finding.table("longest stall", x="load", y="s", spec=".3f", log="y")
    tbt = finding.table("P99 TBT", x="load", y="s", spec=".3f", log="y")
    throughput = finding.table("throughput", x="load", y="tokens/s", spec=",.0f")
    prefill = finding.table(
        "prompt tokens in the longest stall", x="load", y="tokens", spec=",.0f", timed=False
    )
    preempted = 0
    for load, at_load in served.items():
        for name, run in at_load.runs.items():
            summary = run
            longest = summary.stalls.longest
            preempted += summary.preemptions or 0
            stall.add(load, {name: summary.longest_stall_s})
            tbt.add(load, {name: summary.tbt_s.p99})
            throughput.add(load, {name: summary.tokens_per_s})
            prefill.add(load, {name: longest.prefill_tokens if longest else None})
    counted = f"{preempted} preemptions were counted"
    none_loses_pages = Condition("no request is preempted", preempted == 0, counted)
    our_prefill = prefill[SARATHI_SERVE]
    our_tbt = tbt[SARATHI_SERVE]
    whole_prompts = "A prompt is computed whole, and until it is done no decode gets a token."
    static = throughput["request-level"].times(1.1)
    finding.expect(less(our_prefill.times(2), prefill["vllm"], at="end"), whole_prompts)
    finding.expect(
        less(our_prefill, BUDGET),
        "Between two tokens of a request lies one iteration, of no more than the budget.",
        none_loses_pages,
    )
    finding.expect(
        rises(tbt["vllm"]),
        "The more requests arrive, the more prompts are computed one after another.",
    )
    finding.expect(less(our_tbt.times(1.1), tbt["vllm"], at="end"), whole_prompts)
    finding.expect(
        less(tbt["request-level"], our_tbt.times(1.1)),
        "No prompt comes between two tokens of a batch that runs to its end.",
    )
    finding.expect(
        less(static, throughput[SARATHI_SERVE]),
        "Slots stay empty until the longest request of the batch has ended.",
    )
    seconds = Bounded(2.0, "at least")
    finding.publish(
        "the longest stall of vLLM, several seconds",
        seconds,
        stall["vllm"],
        ALL,
        within=None,
        unit=" s",
    )
    return finding


def tokens_over_time(served: Served) -> list[Table]:
    """The output over time of the request that vllm stalls longest, there and under Sarathi-Serve;
    [] if it stalls none."""
    longest = served.runs["vllm"].stalls.longest
    if longest is None:
        return []
    title = f"request {longest.request_id}"
    table = Table(title, x="s since it arrived", y="output tokens", spec=",.0f")
    completions = {
        name: served.records[name].completions[longest.request_id]
        for name in ("vllm", SARATHI_SERVE)
    }
    seconds = max(completion.latency or 0.0 for completion in completions.values())
    for point in range(POINTS + 1):
        elapsed_s = seconds * point / POINTS
        for name, completion in completions.items():
            tokens = bisect_right(completion.token_times, completion.arrival + elapsed_s)
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
        max_budget=lab.pick(gpu=8192, cpu=4096),
        tile=lab.pick(gpu=128, cpu=32, quick=128),
    )
    finding = Finding()
    times = finding.table("an iteration with 32 decodes", x="token budget", y="ms", spec=".1f")
    for row in sorted(budgeted.profile):
        times.add(row.budget, {"iteration": 1e3 * row.seconds})
        slos_ms = {f"{slo} SLO": 1e3 * seconds for slo, seconds in budgeted.slos_s.items()}
        times.add(row.budget, slos_ms)
    budgets = finding.table("the largest within an SLO", x="SLO", y="tokens", spec=",.0f")
    compared = Table("of an SLO", y="tokens", spec=",.0f")
    for slo, budget in budgeted.budgets.items():
        chunk = Bounded(budget - decode_count, budget.bound)
        budgets.add(slo, {"token budget": budget, "chunk": chunk})
        compared.add("tokens", {f"{slo} budget": budget, f"{slo} chunk": chunk})
    ratio = compared["relaxed budget"].over(compared["strict budget"], ".1fx")
    twice = less(compared["strict chunk"].times(2), compared["relaxed chunk"])
    finding.expect(
        rises(times["iteration"]),
        "A batch of more tokens multiplies the same weights by more rows.",
    )
    finding.expect(twice, "Of 5 and 25 decode iterations a chunk has 4 and 24: six times as long.")
    for slo, paper, device in (
        ("strict", 512, "all models"),
        ("relaxed", 2048, "all models but LLaMA2-70B"),
    ):
        finding.publish(
            f"token budget, {slo} SLO",
            paper,
            budgets["token budget"],
            slo,
            device=device,
            within=None,
        )
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
    slots = lab.pick(gpu=20, cpu=6, quick=3)
    max_len = lab.pick(gpu=2048, cpu=1024)
    small_chunk = lab.pick(gpu=128, cpu=32)
    small, medium, large = [f"sarathi:{factor * small_chunk}" for factor in (1, 2, 4)]
    static = "request-level"
    finding = Finding("70B, 128 users")
    throughput = finding.table("throughput", x="when", y="tokens/s", spec=",.0f")
    tbt = finding.table("P99 TBT", x="when", y="s", spec=".3f")
    ttft = finding.table("P99 TTFT", x="when", y="s", spec=".2f")
    at_once = "all at once"
    in_turn = "one after another"
    for when, qps, policies in (
        (at_once, EVERYTHING_AT_ONCE, [static, "orca", small, medium, large]),
        (in_turn, None, [static, "orca", small]),
    ):
        served = lab.serve(
            policies,
            requests=lab.pick(gpu=128, cpu=32, quick=16),
            load=lab.pick(gpu=0.5, cpu=0.3),  # of a server with more slots
            qps=qps,
            batch=slots,
            max_len=max_len,
            kv_tokens=slots * max_len,
        )
        for name, run in served.runs.items():
            throughput.add(when, {name: run.tokens_per_s})
            tbt.add(when, {name: run.tbt_s.p99})
            ttft.add(when, {name: run.ttft_s.p99})
    orca_gain = throughput["orca"].over(throughput[static], spec=".2fx")
    chunk_gain = throughput[small].over(throughput["orca"], spec=".2fx")
    stall = tbt["orca"].over(tbt[small], spec=".2fx")
    static_stall = tbt[static].over(tbt[small], spec=".2fx")
    wait = ttft[static].over(ttft["orca"], spec=".2fx")
    tbt_lines = [tbt[name] for name in (static, small, medium, large, "orca")]
    finding.expect(
        less(*tbt_lines, at="start"),
        "Between two tokens there is nobody's prompt, a chunk, or a whole prompt.",
    )
    finding.expect(less(1.05, orca_gain, at="start"), NEXT_REQUEST)
    finding.expect(
        less(1.05, wait, at="end"),
        "Static batching lets prompts wait until the whole batch has ended.",
    )
    finding.publish("P99 TBT, Orca over chunks of 128", 420 / 55, stall, at_once)
    finding.publish("tokens/s, Orca over static", 2800 / 1200, orca_gain, at_once)
    finding.publish(
        "tokens/s, chunks of 128 over Orca: contradicts SARATHI",
        2400 / 2800,
        chunk_gain,
        at_once,
        within=None,
    )
    finding.publish("P99 TTFT, static over Orca", 3.2 / 1.8, wait, in_turn)
    finding.publish(
        "P99 TBT, static over chunks of 128: contradicts Sarathi-Serve",
        850 / 55,
        static_stall,
        at_once,
        within=None,
    )
    return finding
