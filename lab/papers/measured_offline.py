"""Functions that measure the papers' claims about throughput: all requests are there at the start.

Each function serves requests under several policies, plots the results, checks the trend, and holds
the paper's numbers against ours. A short one to begin with: b_1.

S is SARATHI, B a post on schedulers; F is a figure, T a table. Read first: finding.py,
conditions.py, bench.py and measured_batches.py. Read next: measured_serving.py."""

import math
from dataclasses import dataclass

from lab.measure.offline_load import PolicyRun
from lab.papers.bench import Bench
from lab.papers.checks import Condition, less, rises
from lab.papers.conditions import ridge_above, riding_pays
from lab.papers.finding import Finding, Published
from lab.papers.measured_phases import LLAMA_13B
from lab.papers.plot import Plot, over

EVERYTHING_AT_ONCE = math.inf  # requests per second
POST_LENGTHS = "1+628,1+114,1+456,1+62"  # the post counts a step for each token, prompts too
RIDING = "Riding decodes need no reading of the weights of their own."


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
    """S-T4: SARATHI serves more tokens per second than request-level, at each context.

    LLaMA-33B on an A100 gains 1.25x, 1.22x and 1.14x."""
    cases = bench.pick(
        gpu=[Lockstep(context, 6, 256, 25) for context in (1024, 2048, 3072)],
        cpu=CPU_CASES,
        quick=QUICK_CASES,
    )
    gains = Plot("", x="context", y="gain")
    expected = Plot("", x="context", y="times")
    for case in cases:
        table = bench.decode_maximal(context=case.context, batch=case.batch, chunk=case.chunk)
        for name, row in in_lockstep(bench, case).items():
            gains.add(name, case.context, row.gain)
        expected.add_row(
            case.context,
            {
                "decode speedup": table.speedup,
                "gain that bare products promise": table.promised_gain,
            },
        )
    sarathi = gains["sarathi"]
    speedup = expected["decode speedup"]
    first, second, third = [case.context for case in cases]
    return Finding(
        plots=[gains, expected],
        checks=[
            less(1.02, sarathi, because=RIDING, where=pays_in_all(bench, cases)),
            less(1, speedup, because=RIDING, where=ridge_above(bench, cases[0].batch)),
        ],
        published=[
            Published("gain at 1K, B = 6", 1.33, sarathi, first, LLAMA_13B),
            Published("gain at 2K, B = 6", 1.26, sarathi, second, LLAMA_13B),
            Published("gain at 3K, B = 6", 1.22, sarathi, third, LLAMA_13B),
            Published("decode speedup at 1K, B = 6", 5.45, speedup, first, LLAMA_13B),
            Published("decode speedup at 2K, B = 6", 3.26, speedup, second, LLAMA_13B),
            Published("decode speedup at 3K, B = 6", 2.51, speedup, third, LLAMA_13B),
        ],
    )


def pays_in_all(bench: Bench, cases: list[Lockstep]) -> Condition:
    """The least promising of the Conditions under which riding pays."""
    conditions = [riding_pays(bench, case.batch, case.chunk) for case in cases]
    return next((each for each in conditions if not each.is_met), conditions[0])


@dataclass(frozen=True)
class GainsOverRatios:
    """The throughput of SARATHI and Orca over that of request-level, for several P:D."""

    batch: int
    chunk_sizes: list[int]  # half, once and twice a chunk
    gains: Plot

    @property
    def names(self) -> list[str]:
        """The names of SARATHI with each chunk size, which are those of lines."""
        return [f"sarathi:{size}" for size in self.chunk_sizes]

    def pays(self, bench: Bench) -> Condition:
        """The Condition under which riding pays, with the chunk in the middle."""
        return riding_pays(bench, self.batch, self.chunk_sizes[1])


def gains_over_ratios(bench: Bench) -> GainsOverRatios:
    """Serve requests of one length with more and less prompt, as in Figures 9a and 11b."""
    context = bench.pick(gpu=1024, cpu=256, quick=256)
    batch = bench.pick(gpu=18, cpu=6, quick=6)
    chunk = bench.pick(gpu=256, cpu=64, quick=64)
    requests = bench.pick(gpu=73, cpu=25, quick=13)
    ratios = bench.pick(
        gpu=[3.75, 7.5, 15, 30, 60], cpu=[3.2, 6.4, 12.8, 25.6, 51.2], quick=[6.4, 12.8, 25.6]
    )
    gains = Plot("", x="P:D", y="gain", log="x")
    load = GainsOverRatios(batch, [chunk // 2, chunk, 2 * chunk], gains)
    for ratio in ratios:
        rows = bench.run_policies(
            ["request-level", "orca-best", *load.names],
            seq_len=context,
            batch=batch,
            chunk=chunk,
            requests=requests,
            pd_ratio=ratio,
        )
        for name, row in rows.items():
            gains.add(name, ratio, row.gain)
    return load


def s_f9(bench: Bench) -> Finding:
    """S-F9: SARATHI gains over request-level, larger chunks the more the higher P:D is.

    The gain is largest at P:D = C / (B - 1), where all decodes ride and each chunk carries some."""
    load = gains_over_ratios(bench)
    gains = load.gains
    half, middle, double = [gains[name] for name in load.names]
    peaks = Plot("peak", x="chunk", y="P:D of the largest gain", spec=".3g")
    for size, line in zip(load.chunk_sizes, (half, middle, double), strict=True):
        peaks.add("P:D", size, float(line.x_of_largest()))
    peak = peaks["P:D"]
    pays = load.pays(bench)
    _, chunk, double_chunk = load.chunk_sizes
    return Finding(
        plots=[gains],
        checks=[
            less(1.02, gains.best("sarathi", load.names), because=RIDING, where=pays),
            rises(
                double.over(half),
                because="A higher P:D has fewer decodes for a chunk to carry.",
                where=pays,
            ),
            rises(
                peak,
                because="Prompts and outputs run out together at P:D = C / (B - 1).",
                where=pays,
            ),
        ],
        published=[
            Published("gain, C = 256", 1.27, middle, middle.x_of_largest(), LLAMA_13B),
            Published("gain, C = 512", 1.23, double, double.x_of_largest(), LLAMA_13B),
            Published("P:D of the peak, C = 256", 14, peak, chunk, LLAMA_13B),
            Published("P:D of the peak, C = 512", 28, peak, double_chunk, LLAMA_13B),
        ],
    )


def s_f11(bench: Bench) -> Finding:
    """S-F11: SARATHI beats Orca at its best. Orca in lockstep makes request-level's batches."""
    cases = bench.pick(
        gpu=[Lockstep(1024, 18, 256, 73), Lockstep(2048, 10, 256, 41), Lockstep(3072, 6, 256, 25)],
        cpu=CPU_CASES,
        quick=QUICK_CASES,
    )
    gains = Plot("", x="context", y="gain")
    for case in cases:
        for name, row in in_lockstep(bench, case).items():
            gains.add(name, case.context, row.gain)
    sarathi = gains["sarathi"]
    orca_best = gains["orca-best"]
    pays = pays_in_all(bench, cases)
    first, second, third = [case.context for case in cases]
    return Finding(
        plots=[gains],
        checks=[
            less(1.02, sarathi, because=RIDING, where=pays),
            less(
                orca_best.times(1.02),
                sarathi,
                because="A prompt that is computed whole carries decodes in one iteration only.",
                where=pays,
            ),
        ],
        published=[
            Published("gain of SARATHI at 1K, B = 18", 1.27, sarathi, first, LLAMA_13B),
            Published("gain of SARATHI at 2K, B = 10", 1.25, sarathi, second, LLAMA_13B),
            Published("gain of SARATHI at 3K, B = 6", 1.23, sarathi, third, LLAMA_13B),
            Published("gain of Orca at its best, 1K", 1.11, orca_best, first, LLAMA_13B),
        ],
    )


def b_1(bench: Bench) -> Finding:
    """B-1: under static batching half of the slots are empty: all wait for the longest output.

    The post counts 628 steps of its four requests; (628 + 114 + 456 + 62) / 4 of 628 are 50.2 %.
    Its formula is missing. Continuous batching fills the slots, if more requests wait."""
    slots = Plot("", x="requests", y="share of 4 slots", spec=".1%", timed=False)
    for requests, policies in ((4, ["request-level"]), (16, ["request-level", "orca"])):
        served = bench.serve(
            policies,
            lengths=",".join([POST_LENGTHS] * (requests // 4)),
            requests=requests,
            batch=4,
            max_len=1024,
            kv_tokens=4096,
            qps=EVERYTHING_AT_ONCE,
        )
        for name, run in served.runs.items():
            slots.add(name, requests, over(run.summary.tokens_per_iteration, 4))
    static = slots["request-level"]
    continuous = slots["orca"]
    return Finding(
        plots=[slots],
        checks=[
            less(
                static.times(1.3),
                continuous,
                at="end",
                because="Orca gives a slot to the next request as soon as one ends.",
            ),
            less(
                0.501,
                static,
                0.503,
                at="start",
                because="In 628 iterations, as many as the longest has, 1,260 tokens are computed.",
            ),
        ],
        published=[
            Published("slots used by the post's four", 1260 / 2512, static, 4, within=1.01),
            Published("slots used by static batching, 60 to 75 %", 0.675, static, 16, within=1.5),
            Published(
                "slots used by continuous batching, 90 to 98 %", 0.94, continuous, 16, within=1.1
            ),
        ],
    )
