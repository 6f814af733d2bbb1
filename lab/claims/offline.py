"""Claims about throughput: all requests are there at the start.

Each function serves requests under several policies and holds the paper's gains against ours. Some
claims are counted or computed: the policies run on a clock that counts iterations, without a model,
so that each number depends on their decisions alone. Short ones to begin with: s_f11 and b_1.

S is SARATHI, B a post on schedulers; F is a figure, T a table, a number alone a section. Read
first: batches.py. Read next: serving.py."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from config import EngineConfig
from lab.claims.checks import Condition, less, rises
from lab.claims.claim import LLAMA_13B, Finding, claim
from lab.claims.labs import Lab, Lockstep
from lab.claims.table import Table, over
from lab.measure import metrics
from lab.measure.run_loop import Run
from lab.measure.workload import Arrival
from lab.simulator.cost_model import Chunks, StageTimes
from lab.simulator.simulation import simulate
from policies.observers import Iteration

EVERYTHING_AT_ONCE = math.inf  # requests per second
RIDING = "Riding decodes need no reading of the weights of their own."
WHOLE_PROMPT = "A prompt that is computed whole carries decodes in one iteration only."


CPU_CASES = [Lockstep(256, 6, 64, 25), Lockstep(512, 3, 64, 13), Lockstep(768, 2, 64, 9)]
QUICK_CASES = [Lockstep(256, 6, 64, 13), Lockstep(512, 3, 64, 7), Lockstep(768, 2, 64, 5)]
ORCA_AND_SARATHI = ["request-level", "orca", "orca-best", "sarathi"]


@claim("Throughput gains of SARATHI over request-level, three contexts", seconds=(85, 130))
def s_t4(lab: Lab) -> Finding:
    """S-T4: SARATHI serves more tokens per second than request-level, at each context.

    The cost model has 4 ms for what is not in the operations of S-T2, and decodes that take 1.22
    times as long in attention beside a chunk as alone."""
    gpu_cases = [Lockstep(context, 6, 256, 25) for context in (1024, 2048, 3072)]
    cases = lab.pick(gpu_cases, cpu=CPU_CASES, quick=QUICK_CASES)
    ratios = lab.pick([50.0] * 3, cpu=[case.pd_ratio for case in cases])
    published = {"1K, B = 6": (1.33, 5.45), "2K, B = 6": (1.26, 3.26), "3K, B = 6": (1.22, 2.51)}
    return gains_at_contexts(lab, LLAMA_13B, dict(zip(cases, ratios, strict=True)), published)


def gains_at_contexts(
    lab: Lab,
    device: str,
    cases: dict[Lockstep, float],
    published: dict[str, tuple[float, float]],
) -> Finding:
    """Gains and decode speedups of some loads at their P:D, beside published pairs of them."""
    finding = Finding(device)
    gains = finding.table(x="context", y="gain")
    expected = finding.table(x="context", y="times")
    for case, ratio in cases.items():
        hybrid = lab.decode_maximal(context=case.length, batch=case.batch, chunk=case.chunk)
        gains.add(case.length, lab.gains(ORCA_AND_SARATHI, case, ratio))
        promised = {"gain that bare products promise": hybrid.promised_gain}
        expected.add(case.length, {"decode speedup": hybrid.speedup} | promised)
    sarathi = gains["sarathi"]
    speedup = expected["decode speedup"]
    finding.expect(less(1.02, sarathi), RIDING, lab.riding_pays_for(list(cases)))
    finding.expect(less(1, speedup), RIDING, lab.ridge_above(next(iter(cases)).batch))
    for case, (text, (paper_gain, _)) in zip(cases, published.items(), strict=True):
        finding.publish(f"gain at {text}", paper_gain, sarathi, case.length)
    for case, (text, (_, paper_speedup)) in zip(cases, published.items(), strict=True):
        finding.publish(f"decode speedup at {text}", paper_speedup, speedup, case.length)
    return finding


@claim("SARATHI and Orca's best and worst case over request-level", seconds=(1, 1))
def s_f11(lab: Lab) -> Finding:
    """S-F11: SARATHI beats Orca at its best. Orca in lockstep makes request-level's batches.

    Orca at its best gains 1.11x at 1K, and near 1 at 2K and 3K. In the cost model prompts of 960
    lose to tiles one by one, but not 18 at once."""
    cases = lab.pick(
        [Lockstep(1024, 18, 256, 73), Lockstep(2048, 10, 256, 41), Lockstep(3072, 6, 256, 25)],
        cpu=CPU_CASES,
        quick=QUICK_CASES,
    )
    finding = Finding(LLAMA_13B)
    gains = finding.table(x="context", y="gain")
    for case in cases:
        gains.add(case.length, lab.gains(ORCA_AND_SARATHI, case, case.pd_ratio))
    sarathi = gains["sarathi"]
    orca_best = gains["orca-best"]
    pays = lab.riding_pays_for(cases)
    finding.expect(less(1.02, sarathi), RIDING, pays)
    finding.expect(less(1.02 * orca_best, sarathi), WHOLE_PROMPT, pays)
    papers = {"1K, B = 18": 1.27, "2K, B = 10": 1.25, "3K, B = 6": 1.23}
    for case, paper in zip(cases, papers.items(), strict=True):
        finding.publish(f"gain of SARATHI at {paper[0]}", paper[1], sarathi, case.length)
    finding.publish("gain of Orca at its best, 1K", 1.11, orca_best, cases[0].length)
    return finding


@dataclass(frozen=True)
class GainsOverRatios:
    """The throughput of SARATHI and Orca over that of request-level, for several P:D."""

    gains: Table
    names: list[str]  # of SARATHI with half a chunk, one, and twice that: those of lines
    chunk_sizes: list[int]
    pays: Condition  # under which riding pays, with the chunk in the middle


def gains_over_ratios(lab: Lab) -> GainsOverRatios:
    """Serve requests of one length with more and less prompt, as in Figures 9a and 11b."""
    case = lab.pick(
        Lockstep(1024, 18, 256, 73),
        cpu=Lockstep(256, 6, 64, 25),
        quick=Lockstep(256, 6, 64, 13),
    )
    ratios = lab.pick(
        [4, 7, 14, 28, 56, 112], cpu=[3.2, 6.4, 12.8, 25.6, 51.2], quick=[6.4, 12.8, 25.6]
    )
    chunk_sizes = [case.chunk // 2, case.chunk, 2 * case.chunk]
    names = [f"sarathi:{size}" for size in chunk_sizes]
    gains = Table(x="P:D", y="gain", log="x")
    for ratio in ratios:
        gains.add(ratio, lab.gains(["request-level", "orca-best", *names], case, ratio))
    return GainsOverRatios(gains, names, chunk_sizes, lab.riding_pays_for([case]))


@claim(
    "Throughput gain over P:D, for chunks of 128, 256 and 512, or a quarter of that",
    seconds=(65, 210),
)
def s_f9(lab: Lab) -> Finding:
    """S-F9: SARATHI gains over request-level, larger chunks the more the higher P:D is.

    The gain is largest at P:D = C / (B - 1), where all decodes ride and each chunk carries some:
    7.5, 15 and 30 for the paper's chunks."""
    load = gains_over_ratios(lab)
    half, middle, double = [load.gains[name] for name in load.names]
    peaks = Table("peak", x="chunk", y="P:D of the largest gain", spec=".3g")
    for size, line in zip(load.chunk_sizes, (half, middle, double), strict=True):
        peaks.add(size, {"P:D": float(line.x_of(max))})
    peak = peaks["P:D"]
    _, chunk, double_chunk = load.chunk_sizes
    finding = Finding(LLAMA_13B, tables=[load.gains])
    finding.expect(less(1.02, load.gains.best("sarathi", load.names)), RIDING, load.pays)
    finding.expect(
        rises(double / half), "A higher P:D has fewer decodes for a chunk to carry.", load.pays
    )
    finding.expect(
        rises(peak), "Prompts and outputs run out together at P:D = C / (B - 1).", load.pays
    )
    finding.publish("gain, C = 256", 1.27, middle, max)
    finding.publish("gain, C = 512", 1.23, double, max)
    finding.publish("P:D of the peak, C = 256", 14, peak, chunk)
    finding.publish("P:D of the peak, C = 512", 28, peak, double_chunk)
    return finding


@claim("SARATHI and Orca at its best over P:D: where each peaks", seconds=(1, 1))
def s_f11b(lab: Lab) -> Finding:
    """S-F11b: Orca at its best is SARATHI with a chunk as long as a request: it peaks later, lower.

    The runs are those of S-F9, where SARATHI's own gains are compared."""
    load = gains_over_ratios(lab)
    half = load.gains[load.names[0]]
    orca = load.gains["orca-best"]
    finding = Finding(LLAMA_13B, tables=[load.gains])
    peaks = finding.table("peak", x="", y="P:D of the largest gain", spec=".3g")
    for line in [load.gains[name] for name in (*load.names, "orca-best")]:
        peaks.add("P:D", {line.name: float(line.x_of(max))})
    best = load.gains.best("sarathi", load.names)
    finding.expect(less(orca, 1.02 * best), WHOLE_PROMPT, load.pays)
    finding.expect(
        less(peaks[half.name], peaks["orca-best"]),
        "A chunk of C = L tokens carries all decodes from P:D = L / (B - 1) on.",
        load.pays,
    )
    finding.publish("peak gain of Orca at its best", 1.11, orca, max)
    return finding


BALANCED = "C / (B - 1)"
PLACES = {"a quarter of it": 1 / 4, BALANCED: 1, "four times it": 4}  # P:D over the balanced one


@claim(
    "Throughput gain below, at and above P:D = C / (B - 1), longer requests",
    seconds=(65, 235),
    covers=("S-F9c",),
)
def s_f9b(lab: Lab) -> Finding:
    """S-F9b: longer requests, too, gain most at P:D = C / (B - 1), and about 10 % around it.

    Figures 9b and 9c are of requests of 2K and 3K tokens, of which 10 and 6 fit in memory. Their
    gains at the peak are those of Figure 11a."""
    cases = lab.pick(
        [Lockstep(2048, 10, 256, 41), Lockstep(3072, 6, 256, 25)],
        cpu=[Lockstep(512, 3, 64, 13), Lockstep(768, 2, 64, 9)],
        quick=[Lockstep(256, 3, 64, 7), Lockstep(384, 2, 64, 5)],
    )
    finding = Finding(LLAMA_13B)
    for case, paper in zip(cases, {"2K, B = 10": 1.25, "3K, B = 6": 1.23}.items(), strict=True):
        requests, paper_gain = paper
        gains = finding.table(f"{case.length:,} tokens", x="P:D", y="gain")
        names = [f"sarathi:{size}" for size in (case.chunk // 2, case.chunk, 2 * case.chunk)]
        for place, multiple in PLACES.items():
            gains.add(place, lab.gains(["request-level", *names], case, multiple * case.pd_ratio))
        line = gains[names[1]]
        peak = finding.table(
            f"{case.length:,} tokens", x="P:D", y="gain at the peak over it", spec=".3fx"
        )
        for place in PLACES:
            if place != BALANCED:
                peak.add(place, {line.name: over(line.at(BALANCED), line.at(place))})
        finding.expect(less(0.98, line), RIDING, lab.riding_pays_for([case]))
        finding.expect(
            less(1, peak[line.name]),
            "With less prompt decodes are left without a chunk, with more prompt chunks without "
            "decodes.",
            lab.riding_pays_for([case]),
        )
        finding.publish(f"peak gain at {requests}", paper_gain, line, BALANCED)
        finding.publish(
            f"gain off the peak at {requests}: around 10 %", 1.10, line, "four times it"
        )
    return finding


@claim(
    "Throughput over request-level with chunks of 64 to 512, or a quarter",
    seconds=(30, 55),
)
def s_f13c(lab: Lab) -> Finding:
    """S-F13c: the best chunk lies in between: small ones carry more decodes but read weights often.

    Chunks of 64 almost match the baseline, though their prefill takes five times as long, and of
    128 gain up to 1.16x, with a prefill that takes more than twice as long. There 256 beats 320, as
    products compute whole tiles of 128 rows. This cannot be seen here: our scheduler rounds a batch
    down to whole tiles, so that chunks of 320 are of 256 on a GPU. The paper says neither lengths
    nor P:D."""
    case = lab.pick(
        Lockstep(1024, 18, 256, 73),
        cpu=Lockstep(256, 6, 64, 25),
        quick=Lockstep(256, 6, 64, 13),
    )
    unit = case.chunk // 4  # the smallest chunk
    chunk_sizes = [unit, 2 * unit, 4 * unit, 5 * unit, 8 * unit]
    policies = ["request-level", *(f"sarathi:{chunk}" for chunk in chunk_sizes)]
    gain_of = lab.gains(policies, case, case.pd_ratio)
    finding = Finding(LLAMA_13B)
    gains = finding.table(x="chunk", y="gain", log="x")
    for chunk in chunk_sizes:
        gains.add(chunk, {"sarathi": gain_of[f"sarathi:{chunk}"]})
    gain = gains["sarathi"]
    smallest, second, middle, *_ = chunk_sizes
    ratios = finding.table("of chunks", x="", y="gain over gain", spec=".3fx")
    ratios.add("gain", {"256 over the baseline": gain.at(middle)})
    ratios.add("gain", {"256 over 64": over(gain.at(middle), gain.at(smallest))})
    finding.expect(less(1.02, ratios["256 over the baseline"]), RIDING, lab.riding_pays_for([case]))
    finding.expect(
        less(1, ratios["256 over 64"]),
        "Four small chunks read the weights four times, where one does once.",
        lab.ridge_above(smallest),
    )
    finding.publish("gain with chunks of 128, up to", 1.16, gain, second)
    finding.publish("gain with chunks of 256", 1.27, gain, middle)
    finding.publish("chunks of 64 almost match", 1.0, gain, smallest, within=None)
    return finding


# --- claims that are counted


@dataclass(frozen=True)
class IterationClock:
    """The Cost of a machine on which each iteration takes one second: its clock counts them."""

    pp: int = 1
    cpu_s: float = 0.0
    tile: int = 1

    def stages(self, batch: Chunks) -> StageTimes:
        """One second, whatever the batch."""
        return StageTimes([1.0], 0.0)


def count_iterations(
    policy: str, lengths: Sequence[tuple[int, int]], *, chunk: int, batch: int
) -> Run:
    """Serve requests that are all there at the start, in order. Second t is iteration t.

    `lengths` has the prompt and output tokens of each. There is memory for `batch` requests."""
    max_len = max(prompt + output for prompt, output in lengths)
    config = EngineConfig(
        policy=policy,
        chunk=chunk,
        max_batch=batch,
        max_len=max_len,
        page_size=max_len,
        pages=batch,
    )
    arrivals = [Arrival(0.0, prompt, output) for prompt, output in lengths]
    return simulate(IterationClock(), config, arrivals).run


def riding_share(iterations: Sequence[Iteration]) -> float:
    """The share of the decodes that were computed beside a chunk of a prompt."""
    decode_tokens = sum(iteration.decode_tokens for iteration in iterations)
    hybrid = [iteration for iteration in iterations if iteration.prefill_tokens > 0]
    return sum(iteration.decode_tokens for iteration in hybrid) / decode_tokens


@claim("P:D from which all decodes ride, counted", seconds=(3, 3))
def s_4_4(lab: Lab) -> Finding:
    """S-4.4: from P:D = C / (B - 1) on all decodes ride; the ratio doubles with the chunk.

    A batch of C tokens has B - 1 decodes, so that the chunk beside them has C - (B - 1)."""
    batch = 4
    output_len = 301  # many, so that parts of a chunk do not matter; the prefill yields the first
    finding = Finding()
    shares = finding.table(x="P:D", y="share of the decodes that ride", spec=".1%", timed=False)
    first_ratio = finding.table(
        "P:D from which all decodes ride", x="chunk", y="P:D", spec=".3g", timed=False
    )
    for chunk in (128, 256):
        name = f"chunk {chunk}"
        for ratio in (10, 20, 30, 40, 41, 42, 43, 60, 80, 83, 84, 85, 100):
            lengths = [(ratio * output_len, output_len)] * (4 * batch)
            run = count_iterations("sarathi", lengths, chunk=chunk, batch=batch)
            share = riding_share(metrics.steady(run.iterations, batch).iterations)
            shares.add(ratio, {name: share})
        all_ride = [float(ratio) for ratio, share in shares[name].known.items() if share == 1]
        formula = (chunk - (batch - 1)) / (batch - 1)
        rides_from = min(all_ride, default=None)
        first_ratio.add(chunk, {"counted": rides_from, "(C - (B - 1)) / (B - 1)": formula})
    counted = first_ratio["counted"]
    ratio = replace(counted / first_ratio["(C - (B - 1)) / (B - 1)"], spec=".2f")
    for line in shares:
        finding.expect(
            rises(line),
            "The longer a prompt is, the more chunks there are for its decodes to ride with.",
        )
    finding.expect(
        less(0.98, ratio, 1.02),
        "Each chunk carries B - 1 decodes, and takes C - (B - 1) tokens of a prompt.",
    )
    finding.expect(
        rises(counted),
        "A chunk of twice the size takes half as many batches, which carry half the decodes.",
    )
    finding.publish("P:D, B = 4, C = 128", 42, counted, 128, within=1)
    finding.publish("P:D, B = 4, C = 256", 84, counted, 256, within=1)
    return finding


POST_LENGTHS = [(128, 500), (64, 50), (256, 200), (32, 30)]  # requests A to D of the post
POST_STEPS = [(1, prompt + output) for prompt, output in POST_LENGTHS]  # it counts one a token


@claim(
    "Slots used under static batching, as the post counts and in iterations",
    seconds=(85, 85),
)
def b_1(lab: Lab) -> Finding:
    """B-1: under static batching half of the slots are empty: all wait for the longest output.

    The post counts 628 steps of its four requests; (628 + 114 + 456 + 62) / 4 of 628 are 50.2 %.
    Its formula is missing. Continuous batching fills the slots, if more requests wait."""
    finding = Finding()
    slots = finding.table(x="requests", y="share of 4 slots", spec=".1%", timed=False)
    for requests, policies in ((4, ["request-level"]), (16, ["request-level", "orca"])):
        steps = [f"{prompt}+{output}" for prompt, output in POST_STEPS * (requests // 4)]
        served = lab.serve(
            policies,
            lengths=",".join(steps),
            requests=requests,
            batch=4,
            max_len=1024,
            kv_tokens=4096,
            qps=EVERYTHING_AT_ONCE,
        )
        for name, run in served.runs.items():
            slots.add(requests, {name: over(run.summary.tokens_per_iteration, 4)})
    static = slots["request-level"]
    continuous = slots["orca"]
    finding.expect(
        less(1.3 * static, continuous, at="end"),
        "Orca gives a slot to the next request as soon as one ends.",
    )
    finding.expect(
        less(0.501, static, 0.503, at="start"),
        "In 628 iterations, as many as the longest has, 1,260 tokens are computed.",
    )
    finding.publish("slots used by the post's four", 1260 / 2512, static, 4, within=1.01)
    finding.publish("slots used by static batching, 60 to 75 %", 0.675, static, 16, within=1.5)
    finding.publish(
        "slots used by continuous batching, 90 to 98 %", 0.94, continuous, 16, within=1.1
    )
    return finding


@claim("Slots over steps under static and continuous batching, counted", seconds=(1, 1))
def b_1b(lab: Lab) -> Finding:
    """B-1b: continuous batching fills a slot as soon as it is free, static batching when all are.

    Sixty-four requests with the lengths of the post's A to D share four slots."""
    slots = 4
    edges = sorted(output for _, output in POST_STEPS)  # the steps that end A to D
    finding = Finding()
    over_time = finding.table("slots used", x="step", y="share of 4 slots", spec=".0%", timed=False)
    means = finding.table(
        "slots used, on average", x="a step is", y="share of 4 slots", spec=".1%", timed=False
    )
    for name, policy in (("static", "request-level"), ("continuous", "orca")):
        by_tokens = count_iterations(policy, POST_STEPS * 16, chunk=1, batch=slots)
        by_iterations = count_iterations(policy, POST_LENGTHS * 16, chunk=1, batch=slots)
        for begin in (0, edges[-1]):  # of the first two batches under static batching
            steps = [begin]
            for edge in edges:
                steps += [begin + edge - 1, begin + edge]
            for step in steps:
                running = by_tokens.iterations[step].running
                over_time.add(step + 1, {name: running / slots})
        for unit, run in (("a token", by_tokens), ("an iteration", by_iterations)):
            running = sum(iteration.running for iteration in run.iterations)
            means.add(unit, {name: running / (slots * len(run.iterations))})
    static = over_time["static"]
    finding.expect(
        less(1.3 * means["static"], means["continuous"]),
        "A slot stays empty until the longest request of its batch has ended.",
    )
    finding.expect(
        less(0.99, over_time["continuous"]),
        "While requests wait, one of them takes each slot that another has left.",
    )
    finding.publish(
        "slots of static batching, a half", 0.5, means["static"], "a token", within=1.01
    )
    texts = ["A to D run", "D has ended", "B has ended", "C has ended"]
    for text, share, edge in zip(texts, (1.00, 0.75, 0.50, 0.25), edges, strict=True):
        finding.publish(text, share, static, edge, within=1)
    text = "slots of continuous batching"
    finding.publish(text, 0.95, means["continuous"], "a token", within=1.05)
    finding.publish("static, 40 to 50 %", 0.45, means["static"], "an iteration", within=1.2)
    return finding
