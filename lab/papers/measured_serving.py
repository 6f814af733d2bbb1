"""Functions that measure the papers' claims about latency: requests arrive while others run.

Each function serves loads under several policies, plots the results, checks the trend, and holds
the paper's numbers against ours. A short one to begin with: ss_t4.

The lengths of the data sets are scaled to the longest request that is served here, and so are the
token budgets: 512 and 2,048 of 8,192 are 128 and 512 of 2,048.

SS is Sarathi-Serve, B a post on schedulers; F is a figure, T a table. Read first: finding.py,
conditions.py, bench.py and measured_offline.py. Read next: measured.py."""

from dataclasses import dataclass

from lab.measure.workload import Arrival
from lab.papers.bench import Bench
from lab.papers.checks import Check, falls, less
from lab.papers.conditions import ridge_above
from lab.papers.finding import Finding, Published
from lab.papers.measured_offline import EVERYTHING_AT_ONCE
from lab.papers.plot import Plot
from lab.pictures.timelines import plot_serving

MISTRAL = "Mistral-7B, A100"
YI = "Yi-34B, two A100"
BUDGETS = ["sarathi-serve:128", "sarathi-serve:512"]
STRICT = "A strict SLO has no room for the stall of a whole prompt, but for a chunk."
LATE = 3  # decode iterations of a full batch, after which C and D come, while A and B run


def ss_f7(bench: Bench) -> Finding:
    """SS-F7: only Sarathi-Serve neither stalls A and B nor lets C and D wait.

    The figure is drawn, not measured: it has no numbers."""
    a_and_b = [Arrival(0.0, 64, 40)] * 2
    c_and_d = [Arrival(LATE, 1000, 20)] * 2
    served = bench.serve(
        ["vllm", "orca", "request-level", "sarathi-serve"],
        arrivals=[*a_and_b, *c_and_d],
        max_len=2048,
        kv_tokens=8192,
    )
    title = "SS-F7: two requests run, A and B, when two others come, C and D"
    machine = bench.machine.to_json()
    plot_serving(served.records, machine, bench.picture, served.slo_s, title, "ABCD")
    stalls = Plot(
        "", x="requests", y="prompt tokens in the longest stall", spec=",.0f", timed=False
    )
    first_token = Plot("", x="requests", y="s until D, or C, has its first token", spec=".2f")
    longest_gap = Plot("", x="requests", y="longest TBT in s", spec=".3f")
    for name, run in served.runs.items():
        longest = run.summary.stalls.longest
        stalls.add(name, "A to D", longest.prefill_tokens if longest else 0)
        first_token.add(name, "A to D", run.summary.ttft_s.max)
        longest_gap.add(name, "A to D", run.summary.tbt_s.max)
    chunked = stalls["sarathi-serve"].times(3)
    gap = longest_gap["sarathi-serve"].times(2.5)
    whole = "A and B wait for two whole prompts, or for no more than a chunk of them."
    waits = "C and D wait until A and B have all their output, or for no longer than a prompt."
    return Finding(
        plots=[stalls, first_token, longest_gap],
        checks=[
            less(chunked, stalls["vllm"], because=whole),
            less(chunked, stalls["orca"], because=whole),
            less(
                stalls["request-level"],
                1,
                because="Nobody is let in before A and B have all their output.",
            ),
            less(first_token["vllm"], first_token["request-level"], because=waits),
            less(first_token["orca"], first_token["request-level"], because=waits),
            less(gap, longest_gap["vllm"], because=whole),
            less(gap, longest_gap["orca"], because=whole),
        ],
        has_picture=True,
    )


def ss_f10(bench: Bench) -> Finding:
    """SS-F10: Sarathi-Serve serves the highest rate, by more the stricter the SLO is.

    The abstract says up to 2.6x over vLLM for Mistral-7B, without a data set; section 5.1 says 3.7x
    for Yi-34B, the figure 2.44x. LLaMA2-70B gains up to 6.3x over Orca and 4.3x over vLLM,
    Falcon-180B up to 5.6x."""
    requests = bench.pick(
        gpu={"sharegpt4": 100, "arxiv": 100},
        cpu={"sharegpt4": 20, "arxiv": 60},
        quick={"sharegpt4": 60, "arxiv": 60},
    )
    # arxiv takes an hour on a CPU: there it is simulated
    simulated = bench.pick(gpu=(), cpu=("arxiv",), quick=("sharegpt4", "arxiv"))
    published = {  # from Figure 10, strict SLO: over Orca, over vLLM
        "sharegpt4": (2.78, 2.15),
        "arxiv": (1.82, 1.97),
    }
    plots = []
    checks: list[Check] = []
    numbers: list[Published] = []
    for lengths, count in requests.items():
        title = lengths + (", simulated" if lengths in simulated else "")
        plot = Plot(title, x="SLO s", y="requests/s", spec=".2f", log="x")
        for slo in ("strict", "relaxed"):
            capacities = bench.capacity(
                ["orca", "vllm", *BUDGETS],
                slo=slo,
                lengths=lengths,
                requests=count,
                batch=bench.pick(gpu=128, cpu=32, quick=32),
                simulated=lengths in simulated,
            )
            for name, result in capacities.results.items():
                plot.add(name, round(capacities.slo_s, 3), result.capacity_qps)
        plots.append(plot)
        sarathi_serve = plot.best("sarathi-serve", BUDGETS)
        vllm = plot["vllm"]
        orca = plot["orca"]
        over_orca = sarathi_serve.over(orca, spec=".2fx")
        over_vllm = sarathi_serve.over(vllm, spec=".2fx")
        checks += [
            less(1.05, over_vllm, at="start", because=STRICT),
            less(1.05, over_orca, at="start", because=STRICT),
            falls(over_vllm, because="A relaxed SLO allows stalls of whole prompts."),
        ]
        strict = plot.xs[0]
        paper_orca, paper_vllm = published[lengths]
        numbers += [
            Published(f"over vLLM, {lengths}, strict", paper_vllm, over_vllm, strict, MISTRAL),
            Published(f"over Orca, {lengths}, strict", paper_orca, over_orca, strict, MISTRAL),
        ]
        if lengths == "sharegpt4":  # whose requests are far from the longest
            checks.append(
                less(
                    orca.times(1.05),
                    vllm,
                    at="end",
                    because="Who reserves memory page by page runs more requests at once.",
                )
            )
            numbers += [
                Published("over vLLM, as the text says", 3.7, over_vllm, strict, YI, within=None),
                Published("over Orca, as the text says", 4.0, over_orca, strict, YI, within=None),
            ]
    return Finding(plots=plots, checks=checks, published=numbers)


@dataclass(frozen=True)
class CapacitiesOverSLO:
    """Capacities over the SLO, and the names of the lines that are of vllm and of Sarathi-Serve."""

    plot: Plot
    vllm: list[str]  # with three batch sizes
    sarathi_serve: list[str]  # with two token budgets


def capacities_over_slo(bench: Bench) -> CapacitiesOverSLO:
    """Search capacities as in Figure 12."""
    multiples = bench.pick(
        gpu=["strict", "10x", "15x", "relaxed", "50x"],
        cpu=["strict", "15x", "relaxed"],
        quick=["strict", "15x", "50x"],
    )
    small_batches = bench.pick(gpu=[32, 64], cpu=[8, 16], quick=[8, 16])
    large_batch = bench.pick(gpu=128, cpu=32, quick=32)
    title = "sharegpt4" + bench.pick(gpu="", cpu="", quick=", simulated")
    plot = Plot(title, x="SLO s", y="requests/s", spec=".2f", log="x")
    cases = [(batch, ["vllm"]) for batch in small_batches]
    cases.append((large_batch, ["orca", "vllm", *BUDGETS]))
    for batch, policies in cases:
        for slo in multiples:
            capacities = bench.capacity(
                policies,
                slo=slo,
                lengths="sharegpt4",
                requests=bench.pick(gpu=100, cpu=20, quick=60),
                batch=batch,
                kv_tokens=bench.pick(gpu=40960, cpu=10240, quick=10240),  # whatever the batch
            )
            for name, result in capacities.results.items():
                plot.add(f"{name}, batch {batch}", round(capacities.slo_s, 3), result.capacity_qps)
    budgets = [f"{name}, batch {large_batch}" for name in BUDGETS]
    batches = [f"vllm, batch {batch}" for batch in (*small_batches, large_batch)]
    return CapacitiesOverSLO(plot, vllm=batches, sarathi_serve=budgets)


def ss_f12(bench: Bench) -> Finding:
    """SS-F12: at a strict SLO the right token budget beats vllm with any batch size.

    The text gives the 3.5x to Mistral-7B, the figure's caption to Yi-34B."""
    capacities = capacities_over_slo(bench)
    plot = capacities.plot
    best_vllm = plot.best("vllm", capacities.vllm)
    best_budget = plot.best("sarathi-serve", capacities.sarathi_serve)
    gain = best_budget.over(best_vllm, spec=".2fx")
    return Finding(
        plots=[plot],
        checks=[
            less(1.05, gain, at="start", because=STRICT),
            falls(gain, because="A relaxed SLO allows stalls of whole prompts."),
        ],
        published=[
            Published("over vLLM, 100 ms", 3.5, gain, plot.xs[0], MISTRAL),
            Published("over vLLM, 1 s", 1.65, gain, plot.xs[-1], YI),
        ],
    )


def ss_t4(bench: Bench) -> Finding:
    """SS-T4: hybrid batches keep TTFT low, chunks keep TBT low, and both together do both.

    The paper serves 1 chat or half a summary a second, 128 requests; its caption says a budget of
    1,024 tokens, its script 512, here it is a sixteenth or an eighth of the longest request."""
    requests = bench.pick(gpu=128, cpu=32, quick=12)
    both = "sarathi-serve:128"
    hybrid = "hybrid-only"
    chunked = "chunked-only:128"
    ttft = Plot("P50 TTFT", x="lengths", y="s", spec=".3f", log="y")
    tbt = Plot("P99 TBT", x="lengths", y="s", spec=".3f", log="y")
    for lengths in ("sharegpt4", "arxiv"):
        served = bench.serve(
            [hybrid, chunked, both],
            lengths=lengths,
            requests=requests,
        )
        for name, run in served.runs.items():
            ttft.add(name, lengths, run.summary.ttft_s.p50)
            tbt.add(name, lengths, run.summary.tbt_s.p99)
    tbt_of_hybrid = tbt[hybrid].over(tbt[both], spec=".2fx")
    tbt_of_chunked = tbt[chunked].over(tbt[both], spec=".2fx")
    ttft_of_hybrid = ttft[hybrid].over(ttft[both], spec=".2fx")
    ttft_of_chunked = ttft[chunked].over(ttft[both], spec=".2fx")
    few_decodes = ridge_above(bench, 32)
    return Finding(
        plots=[ttft, tbt],
        checks=[
            less(ttft_of_hybrid, 1, because="A prompt that is not cut is done in one iteration."),
            less(
                1,
                ttft_of_chunked,
                because="Between two chunks there is an iteration of decodes, which reads all "
                "weights; in a hybrid batch decodes take their own number from the chunk.",
                where=few_decodes,
            ),
            less(
                1,
                tbt_of_chunked,
                because="Between two tokens there are a chunk and an iteration, or one of both.",
                where=few_decodes,
            ),
            less(1.5, tbt_of_hybrid, because="Decodes wait for whole prompts, or for chunks."),
        ],
        published=[
            Published("P99 TBT, hybrid-only, chats", 0.68 / 0.14, tbt_of_hybrid, "sharegpt4", YI),
            Published("P99 TBT, hybrid-only, arxiv", 1.38 / 0.17, tbt_of_hybrid, "arxiv", YI),
            Published("P99 TBT, chunked-only, chats", 0.17 / 0.14, tbt_of_chunked, "sharegpt4", YI),
            Published("P99 TBT, chunked-only, arxiv", 0.20 / 0.17, tbt_of_chunked, "arxiv", YI),
            Published("P50 TTFT, hybrid-only, chats", 0.53 / 0.76, ttft_of_hybrid, "sharegpt4", YI),
            Published("P50 TTFT, hybrid-only, arxiv", 3.78 / 3.90, ttft_of_hybrid, "arxiv", YI),
            Published(
                "P50 TTFT, chunked-only, chats", 1.04 / 0.76, ttft_of_chunked, "sharegpt4", YI
            ),
            Published("P50 TTFT, chunked-only, arxiv", 5.38 / 3.90, ttft_of_chunked, "arxiv", YI),
        ],
    )


def b_7(bench: Bench) -> Finding:
    """B-7: large chunks raise throughput, small chunks lower TBT; static batching has no stalls.

    A fifth of the requests or fewer fit at once: else static batching would have one batch of all.
    The post gives static batching the longest P99 TBT, 850 ms, which contradicts Sarathi-Serve
    (section 2.5): nobody is let in between two tokens. It gives Orca more tokens/s than any chunk
    size, SARATHI fewer. So neither number is compared."""
    requests = bench.pick(gpu=128, cpu=32, quick=16)
    slots = bench.pick(gpu=20, cpu=6, quick=3)
    load = bench.pick(gpu=0.5, cpu=0.3, quick=0.3)  # of a server with more slots
    max_len = bench.pick(gpu=2048, cpu=1024, quick=1024)
    small_chunk = bench.pick(gpu=128, cpu=32, quick=32)
    small = f"sarathi:{small_chunk}"
    medium = f"sarathi:{2 * small_chunk}"
    large = f"sarathi:{4 * small_chunk}"
    throughput = Plot("throughput", x="when", y="tokens/s", spec=",.0f")
    tbt = Plot("P99 TBT", x="when", y="s", spec=".3f")
    ttft = Plot("P99 TTFT", x="when", y="s", spec=".2f")
    for when, qps, policies in (
        ("all at once", EVERYTHING_AT_ONCE, ["request-level", "orca", small, medium, large]),
        ("one after another", None, ["request-level", "orca", small]),
    ):
        served = bench.serve(
            policies,
            requests=requests,
            load=load,
            qps=qps,
            batch=slots,
            max_len=max_len,
            kv_tokens=slots * max_len,
        )
        for name, run in served.runs.items():
            throughput.add(name, when, run.summary.tokens_per_s)
            tbt.add(name, when, run.summary.tbt_s.p99)
            ttft.add(name, when, run.summary.ttft_s.p99)
    tbt_lines = [tbt[name] for name in ("request-level", small, medium, large, "orca")]
    orca_gain = throughput["orca"].over(throughput["request-level"], spec=".2fx")
    chunk_gain = throughput[small].over(throughput["orca"], spec=".2fx")
    stall = tbt["orca"].over(tbt[small], spec=".2fx")
    static_stall = tbt["request-level"].over(tbt[small], spec=".2fx")
    wait = ttft["request-level"].over(ttft["orca"], spec=".2fx")
    at_once = "all at once"
    device = "70B, 128 users"
    return Finding(
        plots=[throughput, tbt, ttft],
        checks=[
            less(
                *tbt_lines,
                at="start",
                because="Between two tokens there is nobody's prompt, a chunk, or a whole prompt.",
            ),
            less(
                1.05,
                orca_gain,
                at="start",
                because="Orca gives a slot to the next request as soon as one ends.",
            ),
            less(
                1.05,
                wait,
                at="end",
                because="Static batching lets prompts wait until the whole batch has ended.",
            ),
        ],
        published=[
            Published("P99 TBT, Orca over chunks of 128", 420 / 55, stall, at_once, device),
            Published("tokens/s, Orca over static", 2800 / 1200, orca_gain, at_once, device),
            Published(
                "tokens/s, chunks of 128 over Orca: contradicts SARATHI",
                2400 / 2800,
                chunk_gain,
                at_once,
                device,
                within=None,
            ),
            Published("P99 TTFT, static over Orca", 3.2 / 1.8, wait, wait.xs[-1], device),
            Published(
                "P99 TBT, static over chunks of 128: contradicts Sarathi-Serve",
                850 / 55,
                static_stall,
                at_once,
                device,
                within=None,
            ),
        ],
    )
