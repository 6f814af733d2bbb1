"""Functions that measure stalls under load, and the token budget that ends them, on this device.

Each function returns a Finding: what was served or timed, what must show in it and why, and the
published numbers. To add a claim, write such a function and list it in measured.py.

SS is Sarathi-Serve; F is a figure, a number alone a section. Read first: finding.py, bench.py and
measured_serving.py. Read next: measured.py."""

from bisect import bisect_right

from lab.measure.capacity import Bounded
from lab.papers.bench import Bench, Served
from lab.papers.checks import Condition, less, rises
from lab.papers.finding import Finding, Published
from lab.papers.measured_serving import MISTRAL, capacities_over_slo
from lab.papers.plot import Plot, over

BUDGET = 128  # tokens, of sarathi-serve: a sixteenth or an eighth of the longest request
SARATHI_SERVE = f"sarathi-serve:{BUDGET}"
POINTS = 24  # of a line over time
ALL = 1.0  # the load that would take all that the device is estimated to do: none keeps up with it


def chats_at(bench: Bench, load: float) -> Served:
    """Serve chats at a share of the estimated capacity: at the largest under four policies."""
    policies = ["vllm", SARATHI_SERVE]
    if load == ALL:
        policies = ["request-level", "orca", *policies]
    return bench.serve(
        policies,
        requests=bench.pick(gpu=128, cpu=32, quick=12),
        load=load,
    )


def ss_f1(bench: Bench) -> Finding:
    """SS-F1: under load vllm stalls, request-level serves less, Sarathi-Serve does neither.

    Figure 1 shows a stall and the tail of TBT over load; Figure 2 is a sketch of who trades
    throughput for TBT."""
    loads = bench.pick(gpu=[0.25, 0.5, ALL], cpu=[0.25, 0.5, ALL], quick=[0.5, ALL])
    load_label = "load"  # a share of the estimated capacity
    stall = Plot("longest stall", x=load_label, y="s", spec=".3f", log="y")
    tbt = Plot("P99 TBT", x=load_label, y="s", spec=".3f", log="y")
    throughput = Plot("throughput", x=load_label, y="tokens/s", spec=",.0f")
    prefill = Plot(
        "prompt tokens in the longest stall", x=load_label, y="tokens", spec=",.0f", timed=False
    )
    preempted = 0
    for load in loads:
        for name, run in chats_at(bench, load).runs.items():
            summary = run.summary
            preempted += summary.preemptions or 0
            longest = summary.stalls.longest
            stall.add(name, load, summary.longest_stall_s)
            tbt.add(name, load, summary.tbt_s.p99)
            throughput.add(name, load, summary.tokens_per_s)
            prefill.add(name, load, longest.prefill_tokens if longest else None)
    none_loses_pages = Condition(
        "no request is preempted", preempted == 0, f"{preempted} preemptions were counted"
    )
    vllm_tbt = tbt["vllm"]
    our_tbt = tbt[SARATHI_SERVE]
    whole_prompts = "A prompt is computed whole, and until it is done no decode gets a token."
    one_chunk = "Between two tokens of a request lies one iteration, of no more than the budget."
    nobody_enters = "No prompt comes between two tokens of a batch that runs to its end."
    empty_slots = "Slots stay empty until the longest request of the batch has ended."
    many_prompts = "The more requests arrive, the more prompts are computed one after another."
    return Finding(
        plots=[*tokens_over_time(chats_at(bench, ALL)), stall, tbt, throughput, prefill],
        checks=[
            less(
                prefill[SARATHI_SERVE].times(2),
                prefill["vllm"],
                at="end",
                because=whole_prompts,
            ),
            less(prefill[SARATHI_SERVE], BUDGET, because=one_chunk, where=none_loses_pages),
            rises(vllm_tbt, because=many_prompts),
            less(our_tbt.times(1.1), vllm_tbt, at="end", because=whole_prompts),
            less(tbt["request-level"], our_tbt.times(1.1), because=nobody_enters),
            less(
                throughput["request-level"].times(1.1),
                throughput[SARATHI_SERVE],
                because=empty_slots,
            ),
        ],
        published=[
            Published(
                "the longest stall of vLLM, several seconds",
                Bounded(2.0, "at least"),
                stall["vllm"],
                at=ALL,
                within=None,
                unit=" s",
            )
        ],
    )


def tokens_over_time(served: Served) -> list[Plot]:
    """The output over time of the request that vllm stalls longest, there and under Sarathi-Serve;
    [] if it stalls none."""
    longest = served.runs["vllm"].summary.stalls.longest
    if longest is None:
        return []
    plot = Plot(
        f"request {longest.request_id}", x="s since it arrived", y="output tokens", spec=",.0f"
    )
    names = ("vllm", SARATHI_SERVE)
    completions = {name: served.records[name].completions[longest.request_id] for name in names}
    seconds = max(completion.latency or 0.0 for completion in completions.values())
    for point in range(POINTS + 1):
        elapsed_s = seconds * point / POINTS
        for name, completion in completions.items():
            tokens = bisect_right(completion.token_times, completion.arrival + elapsed_s)
            plot.add(name, round(elapsed_s, 2), tokens)
    return [plot]


def ss_4_3(bench: Bench) -> Finding:
    """SS-4.3: the budget of an SLO is the largest batch within it, and grows with the SLO.

    Hybrid batches are timed once, of 32 decodes and a chunk."""
    decode_count = 32
    found = bench.token_budgets(
        ["strict", "relaxed"],
        decodes=decode_count,
        max_budget=bench.pick(gpu=8192, cpu=4096, quick=4096),
        tile=bench.pick(gpu=128, cpu=32, quick=128),
    )
    times = Plot("an iteration with 32 decodes", x="token budget", y="ms", spec=".1f")
    for row in sorted(found.profile):
        times.add("iteration", row.budget, 1e3 * row.seconds)
        for slo, seconds in found.slos_s.items():
            times.add(f"{slo} SLO", row.budget, 1e3 * seconds)
    budgets = Plot("the largest within an SLO", x="SLO", y="tokens", spec=",.0f")
    for slo, budget in found.budgets.items():
        budgets.add_row(
            slo,
            {
                "token budget": budget,
                "chunk": Bounded(budget - decode_count, budget.bound),
            },
        )
    compared = Plot("of an SLO", x="", y="tokens", spec=",.0f")
    for slo in found.budgets:
        compared.add_row(
            "tokens",
            {
                f"{slo} budget": budgets["token budget"].at(slo),
                f"{slo} chunk": budgets["chunk"].at(slo),
            },
        )
    ratio = compared["relaxed budget"].over(compared["strict budget"], ".1fx")
    more_tokens = "A batch of more tokens multiplies the same weights by more rows."
    five_times = "Of 5 and 25 decode iterations a chunk has 4 and 24: six times as long."
    return Finding(
        plots=[times, budgets],
        checks=[
            rises(times["iteration"], because=more_tokens),
            less(
                compared["strict chunk"].times(2),
                compared["relaxed chunk"],
                because=five_times,
            ),
        ],
        published=[
            Published(
                "token budget, strict SLO",
                512,
                budgets["token budget"],
                at="strict",
                device="all models",
                within=None,
            ),
            Published(
                "token budget, relaxed SLO",
                2048,
                budgets["token budget"],
                at="relaxed",
                device="all models but LLaMA2-70B",
                within=None,
            ),
            Published("relaxed over strict", 4, ratio, at="tokens", within=2),
        ],
    )


def ss_5_2(bench: Bench) -> Finding:
    """SS-5.2: at a strict SLO vllm serves alike with three batch sizes: stalls are its limit.

    The searches are those of SS-F12. Two rates of a search differ by a quarter at the least."""
    capacities = capacities_over_slo(bench)
    plot = capacities.plot
    largest = plot.best("largest", capacities.vllm)
    spread = Plot("vllm", x=plot.x, y="largest over smallest", spec=".2f")
    for slo_s in plot.xs:
        known = [y for name in capacities.vllm if (y := plot[name].at(slo_s)) is not None]
        spread.add("three batch sizes", slo_s, over(largest.at(slo_s), min(known, default=None)))
    alike = spread["three batch sizes"]
    strict = plot.xs[0]
    return Finding(
        plots=[plot, spread],
        checks=[
            less(
                alike,
                1.6,
                at="start",
                because="A strict SLO is missed by the stall of a prompt, whatever the batch.",
            )
        ],
        published=[
            Published(
                "largest over smallest capacity of three batch sizes: largely identical",
                1.0,
                alike,
                strict,
                MISTRAL,
                within=1.3,
            )
        ],
    )
