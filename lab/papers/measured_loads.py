"""Functions that measure the papers' claims about whole loads on this device.

Each function serves requests under several policies, plots the results, and checks the plots. A
check must hold on any device: it follows from the arithmetic. The published numbers stand in
measured.py. To add a claim, write such a function and list it there. A short one to begin with:
ss_t4.

S is SARATHI, SS Sarathi-Serve, B a post on schedulers; F is a figure, T a table. Read first:
finding.py, bench.py and measured_batches.py. Read next: measured.py."""

from dataclasses import dataclass
from pathlib import Path

from lab.measure.offline_load import PolicyRun
from lab.papers.bench import Bench
from lab.papers.finding import Finding, Plot, falls, less, rises
from views.timelines import plot_serving

TRACE = Path(__file__).with_name("a_to_d.csv")  # A and B, then C and D while those run
EVERYTHING_AT_ONCE = 1e9  # requests per second


def hides_a_read(bench: Bench) -> str:
    """The reason why the gain of decode-maximal batches may not show on this device."""
    return (
        "a chunk hides no more than the time in which weights are read, that of "
        f"{bench.machine.ridge_tokens:.0f} rows here"
    )


@dataclass(frozen=True)
class Lockstep:
    """A load of requests that begin and end together, at the balanced ratio P:D = C / (B - 1)."""

    context: int
    batch: int
    chunk: int
    requests: int


def in_lockstep(bench: Bench, case: Lockstep) -> dict[str, PolicyRun]:
    """Serve the load under SARATHI and its baselines, as in its Table 4 and Figure 11."""
    return bench.run_policies(
        ["request-level", "orca", "orca-best", "sarathi"],
        seq_len=case.context,
        batch=case.batch,
        chunk=case.chunk,
        requests=case.requests,
        pd_ratio=case.chunk / (case.batch - 1),
    )


CPU_CASES = [Lockstep(256, 6, 64, 25), Lockstep(512, 3, 64, 13), Lockstep(768, 2, 64, 9)]
QUICK_CASES = [Lockstep(256, 6, 64, 13), Lockstep(512, 3, 64, 7), Lockstep(768, 2, 64, 5)]


def s_t4(bench: Bench) -> Finding:
    """S-T4: SARATHI serves more tokens per second than request-level, at each context."""
    cases = bench.pick(
        gpu=[Lockstep(context, 6, 256, 25) for context in (1024, 2048, 3072)],
        cpu=CPU_CASES,
        quick=QUICK_CASES,
    )
    gains = Plot("", x="context", y="gain", spec=".2fx")
    expected = Plot("", x="context", y="times", spec=".2fx")
    for case in cases:
        context = case.context
        table = bench.decode_maximal(context=context, batch=case.batch, chunk=case.chunk)
        for name, row in in_lockstep(bench, case).items():
            gains.add(name, context, row.gain)
        expected.add("decode speedup", context, table.speedup)
        expected.add("gain that bare products promise", context, table.promised_gain)
    return Finding(
        plots=[gains, expected],
        checks=[less(1.02, gains.line("sarathi"))],
        quoted=[gains.line("sarathi"), *expected.all_lines()],
        because=hides_a_read(bench),
    )


def s_f9(bench: Bench) -> Finding:
    """S-F9: SARATHI gains over request-level, larger chunks the more the higher P:D is."""
    context = bench.pick(gpu=1024, cpu=256, quick=256)
    batch = bench.pick(gpu=18, cpu=6, quick=6)
    chunk = bench.pick(gpu=256, cpu=64, quick=64)
    requests = bench.pick(gpu=73, cpu=25, quick=13)
    ratios = bench.pick(
        gpu=[3.75, 7.5, 15, 30, 60], cpu=[3.2, 6.4, 12.8, 25.6, 51.2], quick=[6.4, 12.8, 25.6]
    )
    half = f"sarathi:{chunk // 2}"
    middle = f"sarathi:{chunk}"
    double = f"sarathi:{2 * chunk}"
    gains = Plot("", x="P:D", y="gain", spec=".2fx", log="x")
    for ratio in ratios:
        rows = bench.run_policies(
            ["request-level", "orca-best", half, middle, double],
            seq_len=context,
            batch=batch,
            chunk=chunk,
            requests=requests,
            pd_ratio=ratio,
        )
        for name, row in rows.items():
            gains.add(name, ratio, row.gain)
    chunked = [half, middle, double]
    return Finding(
        plots=[gains],
        checks=[
            less(1.02, gains.best("sarathi", chunked)),
            rises(gains.line(double).over(gains.line(half))),
        ],
        quoted=[gains.line(name) for name in chunked],
        because=hides_a_read(bench),
    )


def s_f11(bench: Bench) -> Finding:
    """S-F11: SARATHI beats Orca at its best, which beats Orca in lockstep, which gains nothing."""
    cases = bench.pick(
        gpu=[Lockstep(1024, 18, 256, 73), Lockstep(2048, 10, 256, 41), Lockstep(3072, 6, 256, 25)],
        cpu=CPU_CASES,
        quick=QUICK_CASES,
    )
    gains = Plot("", x="context", y="gain", spec=".2fx")
    for case in cases:
        for name, row in in_lockstep(bench, case).items():
            gains.add(name, case.context, row.gain)
    sarathi = gains.line("sarathi")
    orca_best = gains.line("orca-best")
    orca = gains.line("orca")
    return Finding(
        plots=[gains],
        checks=[
            less(1.02, sarathi),
            less(orca_best.times(1.02), sarathi),
            less(orca.times(0.98), orca_best),
            less(0.96, orca, 1.04),
        ],
        quoted=[sarathi, orca_best, orca],
        because=hides_a_read(bench),
    )


def ss_f7(bench: Bench) -> Finding:
    """SS-F7: only Sarathi-Serve neither stalls A and B nor lets C and D wait."""
    served = bench.serve(
        ["vllm", "orca", "request-level", "sarathi-serve"],
        trace=TRACE,
        max_len=2048,
        kv_tokens=8192,
    )
    plot_serving(served.records, bench.machine.to_json(), bench.picture, served.slo_s)
    stalls = Plot("", x="requests", y="prompt tokens in the longest stall", spec=",.0f")
    first_token = Plot("", x="requests", y="s until D, or C, has its first token", spec=".2f")
    longest_gap = Plot("", x="requests", y="longest TBT in s", spec=".3f")
    for name, run in served.runs.items():
        longest = run.summary.stalls.longest
        stalls.add(name, "A to D", longest.prefill_tokens if longest else None)
        first_token.add(name, "A to D", run.summary.ttft_s.max)
        longest_gap.add(name, "A to D", run.summary.tbt_s.max)
    return Finding(
        plots=[stalls, first_token, longest_gap],
        checks=[
            less(stalls.line("sarathi-serve").times(3), stalls.line("vllm")),
            less(stalls.line("sarathi-serve").times(3), stalls.line("orca")),
            less(first_token.line("vllm"), first_token.line("request-level")),
            less(first_token.line("orca"), first_token.line("request-level")),
            less(longest_gap.line("sarathi-serve").times(2), longest_gap.line("vllm")),
            less(longest_gap.line("sarathi-serve").times(2), longest_gap.line("orca")),
        ],
        quoted=[*stalls.all_lines(), *first_token.all_lines()],
        has_picture=True,
    )


def ss_f10(bench: Bench) -> Finding:
    """SS-F10: Sarathi-Serve serves the highest rate, by more the stricter the SLO is."""
    requests = bench.pick(
        gpu={"sharegpt4": 100, "arxiv": 100},
        cpu={"sharegpt4": 20, "arxiv": 8},
        quick={"sharegpt4": 60, "arxiv": 60},
    )
    chunked = bench.pick(
        gpu=["sarathi-serve:512", "sarathi-serve:2048"],
        cpu=["sarathi-serve:128", "sarathi-serve:512"],
        quick=["sarathi-serve:128", "sarathi-serve:512"],
    )
    plots = []
    checks = []
    quoted = []
    for lengths, count in requests.items():
        plot = Plot(capacity_title(bench, lengths), x="SLO s", y="requests/s", spec=".2f", log="x")
        for slo in ("strict", "relaxed"):
            capacities = bench.capacity(
                ["orca", "vllm", *chunked],
                slo=slo,
                lengths=lengths,
                requests=count,
                batch=bench.pick(gpu=128, cpu=32, quick=32),
                max_len=bench.pick(gpu=2048, cpu=None, quick=None),
                kv_tokens=bench.pick(gpu=40960, cpu=None, quick=None),
            )
            for name, result in capacities.results.items():
                plot.add(name, round(capacities.slo_s, 3), result.capacity_qps)
        sarathi_serve = plot.best("sarathi-serve", chunked)
        vllm = plot.line("vllm")
        orca = plot.line("orca")
        plots.append(plot)
        checks += [
            less(vllm.times(1.05), sarathi_serve, at="start"),
            less(orca.times(1.05), sarathi_serve, at="start"),
            less(vllm.times(0.95), sarathi_serve),
            less(orca.times(0.95), sarathi_serve),
            falls(sarathi_serve.over(vllm)),
        ]
        quoted += [sarathi_serve.over(orca), sarathi_serve.over(vllm)]
    return Finding(plots=plots, checks=checks, quoted=quoted)


def capacity_title(bench: Bench, lengths: str) -> str:
    """The title of a plot of capacities: the data set, and how they were found."""
    return bench.pick(
        gpu=f"{lengths}, at most 2,048 tokens", cpu=lengths, quick=f"{lengths}, simulated"
    )


def ss_f12(bench: Bench) -> Finding:
    """SS-F12: at a strict SLO the right token budget beats vllm with any batch size."""
    multiples = bench.pick(
        gpu=["strict", "10x", "15x", "relaxed", "50x"],
        cpu=["strict", "15x", "relaxed"],
        quick=["strict", "15x", "50x"],
    )
    small_batches = bench.pick(gpu=[32, 64], cpu=[8, 16], quick=[8, 16])
    large_batch = bench.pick(gpu=128, cpu=32, quick=32)
    chunked = bench.pick(
        gpu=["sarathi-serve:512", "sarathi-serve:2048"],
        cpu=["sarathi-serve:128", "sarathi-serve:512"],
        quick=["sarathi-serve:128", "sarathi-serve:512"],
    )
    plot = Plot(capacity_title(bench, "sharegpt4"), x="SLO s", y="requests/s", spec=".2f", log="x")
    cases = [(batch, ["vllm"]) for batch in small_batches]
    cases.append((large_batch, ["orca", "vllm", *chunked]))
    for batch, policies in cases:
        for slo in multiples:
            capacities = bench.capacity(
                policies,
                slo=slo,
                lengths="sharegpt4",
                requests=bench.pick(gpu=100, cpu=20, quick=60),
                batch=batch,
                max_len=bench.pick(gpu=2048, cpu=None, quick=None),
                kv_tokens=bench.pick(gpu=40960, cpu=10240, quick=10240),  # whatever the batch
            )
            for name, result in capacities.results.items():
                plot.add(f"{name}, batch {batch}", round(capacities.slo_s, 3), result.capacity_qps)
    sarathi_serve = plot.best("sarathi-serve", [f"{name}, batch {large_batch}" for name in chunked])
    vllm = plot.best("vllm", [f"vllm, batch {batch}" for batch in (*small_batches, large_batch)])
    return Finding(
        plots=[plot],
        checks=[
            less(vllm.times(1.05), sarathi_serve, at="start"),
            less(vllm.times(0.95), sarathi_serve),
            falls(sarathi_serve.over(vllm)),
        ],
        quoted=[sarathi_serve.over(vllm)],
    )


def ss_t4(bench: Bench) -> Finding:
    """SS-T4: hybrid batches keep TTFT low, chunks keep TBT low, and both together do both."""
    requests = bench.pick(gpu=128, cpu=32, quick=12)
    ttft = Plot("P50 TTFT", x="lengths", y="s", spec=".3f", log="y")
    tbt = Plot("P99 TBT", x="lengths", y="s", spec=".3f", log="y")
    for lengths in ("sharegpt4", "arxiv"):
        served = bench.serve(
            ["hybrid-only", "chunked-only", "sarathi-serve"],
            lengths=lengths,
            requests=requests,
            max_len=bench.pick(gpu=2048, cpu=None, quick=None),
            kv_tokens=bench.pick(gpu=40960, cpu=None, quick=None),
        )
        for name, run in served.runs.items():
            ttft.add(name, lengths, run.summary.ttft_s.p50)
            tbt.add(name, lengths, run.summary.tbt_s.p99)
    return Finding(
        plots=[ttft, tbt],
        checks=[
            less(ttft.line("hybrid-only"), ttft.line("sarathi-serve"), ttft.line("chunked-only")),
            less(tbt.line("sarathi-serve"), tbt.line("chunked-only"), tbt.line("hybrid-only")),
        ],
        quoted=[*ttft.all_lines(), *tbt.all_lines()],
    )


def b_1(bench: Bench) -> Finding:
    """B-1: under static batching half of the slots are empty: all wait for the longest output."""
    per_iteration = Plot("tokens of an iteration", x="lengths", y="of 4 slots", spec=".3f")
    over_time = Plot("mean over the time", x="lengths", y="of 4 slots", spec=".2f")
    for lengths in ("1+628,1+114,1+456,1+62", "128+500,64+50,256+200,32+30"):
        served = bench.serve(
            ["request-level"],
            lengths=lengths,
            requests=4,
            batch=4,
            max_len=1024,
            kv_tokens=4096,
            qps=EVERYTHING_AT_ONCE,
        )
        run = served.runs["request-level"]
        per_iteration.add("tokens", lengths, run.summary.tokens_per_iteration)
        over_time.add("slots used", lengths, run.summary.running_mean)
    tokens = per_iteration.line("tokens")
    return Finding(
        plots=[per_iteration, over_time],
        checks=[less(2.006, tokens, 2.007, at="start")],
        quoted=[tokens, tokens.over(4), *over_time.all_lines()],
    )


def b_7(bench: Bench) -> Finding:
    """B-7: large chunks raise throughput, small chunks lower TBT, static batching does neither."""
    requests = bench.pick(gpu=128, cpu=32, quick=16)
    small_chunk = bench.pick(gpu=128, cpu=32, quick=32)
    small = f"sarathi:{small_chunk}"
    medium = f"sarathi:{2 * small_chunk}"
    large = f"sarathi:{4 * small_chunk}"
    throughput = Plot("throughput", x="when", y="tokens/s", spec=",.0f")
    tbt = Plot("P99 TBT", x="when", y="s", spec=".3f")
    ttft = Plot("P99 TTFT", x="when", y="s", spec=".2f")
    for when, qps in (("all at once", EVERYTHING_AT_ONCE), ("at half of what is possible", None)):
        served = bench.serve(
            ["request-level", "orca", small, medium, large],
            requests=requests,
            qps=qps,
            max_len=bench.pick(gpu=2048, cpu=None, quick=None),
            kv_tokens=bench.pick(gpu=40960, cpu=None, quick=None),
        )
        for name, run in served.runs.items():
            throughput.add(name, when, run.summary.tokens_per_s)
            tbt.add(name, when, run.summary.tbt_s.p99)
            ttft.add(name, when, run.summary.ttft_s.p99)
    slowest_first = ["request-level", small, medium, large, "orca"]
    smoothest_first = [small, medium, large, "orca", "request-level"]
    soonest_first = ["orca", large, medium, small, "request-level"]
    printed = ["request-level", "orca", large, medium, small]
    return Finding(
        plots=[throughput, tbt, ttft],
        checks=[
            less(*(throughput.line(name) for name in slowest_first), at="start"),
            less(*(tbt.line(name) for name in smoothest_first), at="start"),
            less(*(ttft.line(name) for name in soonest_first), at="end"),
        ],
        quoted=[plot.line(name) for plot in (throughput, tbt, ttft) for name in printed],
        because="request-level lets nobody in between two tokens: its TBT is that of decodes alone",
    )
