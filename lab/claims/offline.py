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
from lab.claims.checks import less, rises
from lab.claims.claim import LLAMA_13B, Finding, claim
from lab.claims.labs import Lab, Lockstep
from lab.claims.table import Table, line, over
from lab.measure import metrics
from lab.measure.run_loop import Run
from lab.measure.workload import Arrival
from lab.simulator.cost_model import Chunks, StageTimes
from lab.simulator.simulation import simulate
from policies.observers import Iteration

EVERYTHING_AT_ONCE = math.inf  # requests per second
RIDING = "Riding decodes need no reading of the weights of their own."
WHOLE_PROMPT = "A prompt that is computed whole carries decodes in one iteration only."


CPU_CASES = [
    Lockstep(256, 6, 64, 25),
    Lockstep(512, 3, 64, 13),
    Lockstep(768, 2, 64, 9),
]
QUICK_CASES = [
    Lockstep(256, 6, 64, 13),
    Lockstep(512, 3, 64, 7),
    Lockstep(768, 2, 64, 5),
]
# The paper's loads on its A6000, their peak gains, and Orca's at its best with the first.
GPU_CASES = [
    Lockstep(1024, 18, 256, 73),
    Lockstep(2048, 10, 256, 41),
    Lockstep(3072, 6, 256, 25),
]
PEAK_GAINS = {"1K, B = 18": 1.27, "2K, B = 10": 1.25, "3K, B = 6": 1.23}
PEAK_GAIN_1K = PEAK_GAINS["1K, B = 18"]
ORCA_BEST_GAIN = 1.11
CLOSE = 1.1  # the factor within which a gain counts as close to the baseline
ORCA_AND_SARATHI = ["request-level", "orca", "orca-best", "sarathi"]


@claim("Throughput gains of SARATHI over request-level, three contexts", seconds=(85, 130))
def s_t4(lab: Lab) -> Finding:
    """S-T4: SARATHI serves more tokens per second than request-level, at each context.

    The cost model has 4 ms for what is not in the operations of S-T2, and decodes that take 1.22
    times as long in attention beside a chunk as alone."""
    contexts = (1024, 2048, 3072)
    gpu_cases = [Lockstep(context, 6, 256, 25) for context in contexts]
    cases = lab.pick(gpu_cases, cpu=CPU_CASES, quick=QUICK_CASES)
    ratios = {case: lab.pick(50.0, cpu=case.pd_ratio) for case in cases}
    published = {
        "1K, B = 6": (1.33, 5.45),
        "2K, B = 6": (1.26, 3.26),
        "3K, B = 6": (1.22, 2.51),
    }
    return gains_at_contexts(lab, LLAMA_13B, ratios, published)


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
        length = case.length
        hybrid = lab.decode_maximal(context=length, batch=case.batch, chunk=case.chunk)
        gains.add(length, lab.gains(ORCA_AND_SARATHI, case, ratio))
        expected.add(length, {"decode speedup": hybrid.speedup})
        expected.add(length, {"gain that bare products promise": hybrid.promised_gain})
    sarathi = gains["sarathi"]
    speedup = expected["decode speedup"]
    shortest, *_ = cases
    pays = lab.riding_pays_for(list(cases))
    shares_reading = lab.ridge_above(shortest.batch)
    finding.expect(less(1.02, sarathi), RIDING, pays)
    finding.expect(less(1, speedup), RIDING, shares_reading)
    lengths = dict(zip(published, gains.xs, strict=True))
    for text, (paper_gain, _) in published.items():
        finding.publish(f"gain at {text}", paper_gain, sarathi, lengths[text])
    for text, (_, paper_speedup) in published.items():
        finding.publish(f"decode speedup at {text}", paper_speedup, speedup, lengths[text])
    return finding


@claim("SARATHI and Orca's best and worst case over request-level", seconds=(1, 1))
def s_f11(lab: Lab) -> Finding:
    """S-F11: SARATHI beats Orca at its best. Orca in lockstep makes request-level's batches.

    Orca at its best gains 1.11x at 1K, and is close to the baseline at 2K and 3K. In the cost model
    prompts of 960 lose to tiles one by one, but not 18 at once."""
    cases = lab.pick(GPU_CASES, cpu=CPU_CASES, quick=QUICK_CASES)
    finding = Finding(LLAMA_13B)
    gains = finding.table(x="context", y="gain")
    for case in cases:
        of_policies = lab.gains(ORCA_AND_SARATHI, case, case.pd_ratio)
        gains.add(case.length, of_policies)
    sarathi = gains["sarathi"]
    orca_best = gains["orca-best"]
    pays = lab.riding_pays_for(cases)
    finding.expect(less(1.02, sarathi), RIDING, pays)
    finding.expect(less(1.02 * orca_best, sarathi), WHOLE_PROMPT, pays)
    lengths = dict(zip(PEAK_GAINS, gains.xs, strict=True))
    for requests, paper in PEAK_GAINS.items():
        finding.publish(f"gain of SARATHI at {requests}", paper, sarathi, lengths[requests])
    short, *longer = cases
    finding.publish("gain of Orca at its best, 1K", ORCA_BEST_GAIN, orca_best, short.length)
    for case, tokens in zip(longer, ("2K", "3K"), strict=True):
        text = f"gain of Orca at its best, {tokens}: close to the baseline"
        finding.publish(text, 1.0, orca_best, case.length, within=CLOSE)
    return finding


def load_of_1k(lab: Lab) -> Lockstep:
    """Requests of 1K tokens, or fewer."""
    return lab.pick(GPU_CASES[0], cpu=CPU_CASES[0], quick=QUICK_CASES[0])


def names_of(load: Lockstep) -> list[str]:
    """SARATHI with half a chunk, one, and twice that."""
    sizes = (load.chunk // 2, load.chunk, 2 * load.chunk)
    return [f"sarathi:{size}" for size in sizes]


def gains_over_ratios(lab: Lab) -> Table:
    """Serve requests of one length with more and less prompt, as in Figures 9a and 11b: the gains
    of SARATHI and Orca over request-level."""
    load = load_of_1k(lab)
    ratios = lab.pick(
        [4, 7, 14, 28, 56, 112],
        cpu=[3.2, 6.4, 12.8, 25.6, 51.2],
        quick=[6.4, 12.8, 25.6],
    )
    policies = ["request-level", "orca-best", *names_of(load)]
    gains = Table(x="P:D", y="gain", log="x")
    for ratio in ratios:
        gains.add(ratio, lab.gains(policies, load, ratio))
    return gains


@claim(
    "Throughput gain over P:D, for chunks of 128, 256 and 512, or a quarter of that",
    seconds=(65, 210),
)
def s_f9(lab: Lab) -> Finding:
    """S-F9: SARATHI gains over request-level, larger chunks the more the higher P:D is.

    The gain is largest at P:D = C / (B - 1), where all decodes ride and each chunk carries some:
    7.5, 15 and 30 for the paper's chunks."""
    load = load_of_1k(lab)
    names = names_of(load)
    gains = gains_over_ratios(lab)
    half, middle, double = [gains[name] for name in names]
    sizes = (load.chunk // 2, load.chunk, 2 * load.chunk)
    lines = dict(zip(sizes, (half, middle, double), strict=True))
    peaks = {size: float(of_size.x_of(max)) for size, of_size in lines.items()}
    peak = line("P:D", peaks, title="peak", x="chunk", spec=".3g")
    finding = Finding(LLAMA_13B, tables=[gains])
    pays = lab.riding_pays_for([load])
    sarathi = gains.best("sarathi", names)
    finding.expect(less(1.02, sarathi), RIDING, pays)
    fewer_decodes = "A higher P:D has fewer decodes for a chunk to carry."
    finding.expect(rises(double / half), fewer_decodes, pays)
    finding.expect(rises(peak), "Prompts and outputs run out together at P:D = C / (B - 1).", pays)
    finding.publish("gain, C = 256", PEAK_GAIN_1K, middle, max)
    finding.publish("gain, C = 512", 1.23, double, max)
    finding.publish("P:D of the peak, C = 256", 14, peak, load.chunk)
    finding.publish("P:D of the peak, C = 512", 28, peak, 2 * load.chunk)
    return finding


@claim("SARATHI and Orca at its best over P:D: where each peaks", seconds=(1, 1))
def s_f11b(lab: Lab) -> Finding:
    """S-F11b: Orca at its best is SARATHI with a chunk as long as a request: it peaks later, lower.

    The runs are those of S-F9, where SARATHI's own gains are compared."""
    load = load_of_1k(lab)
    names = names_of(load)
    gains = gains_over_ratios(lab)
    orca = gains["orca-best"]
    finding = Finding(LLAMA_13B, tables=[gains])
    peaks = finding.table("peak", "", "P:D of the largest gain", ".3g")
    for name in [*names, orca.name]:
        ratio = gains[name].x_of(max)
        peaks.add("P:D", {name: float(ratio)})
    pays = lab.riding_pays_for([load])
    sarathi = gains.best("sarathi", names)
    finding.expect(less(orca, 1.02 * sarathi), WHOLE_PROMPT, pays)
    finding.expect(
        less(peaks[names[0]], peaks[orca.name]),
        "A chunk of C = L tokens carries all decodes from P:D = L / (B - 1) on.",
        pays,
    )
    finding.publish("peak gain of Orca at its best", ORCA_BEST_GAIN, orca, max)
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
        GPU_CASES[1:],
        cpu=CPU_CASES[1:],
        quick=[Lockstep(256, 3, 64, 7), Lockstep(384, 2, 64, 5)],
    )
    finding = Finding(LLAMA_13B)
    off_peak = "With less prompt decodes are left without a chunk, with more prompt chunks without "
    off_peak += "decodes."
    _, *longer = PEAK_GAINS.items()
    for case, (requests, paper) in zip(cases, longer, strict=True):
        title = f"{case.length:,} tokens"
        gains = finding.table(title, "P:D", "gain")
        names = names_of(case)
        policies = ["request-level", *names]
        for place, multiple in PLACES.items():
            ratio = multiple * case.pd_ratio
            gains.add(place, lab.gains(policies, case, ratio))
        gain = gains[names[1]]
        peak = finding.table(title, "P:D", "gain at the peak over it", ".3fx")
        for place in PLACES:
            if place != BALANCED:
                over_place = over(gain.at(BALANCED), gain.at(place))
                peak.add(place, {gain.name: over_place})
        pays = lab.riding_pays_for([case])
        finding.expect(less(0.98, gain), RIDING, pays)
        finding.expect(less(1, peak[gain.name]), off_peak, pays)
        finding.publish(f"peak gain at {requests}", paper, gain, BALANCED)
        text = f"gain off the peak at {requests}: around 10 %"
        finding.publish(text, 1.10, gain, "four times it")
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
    load = load_of_1k(lab)
    quarters = (1, 2, 4, 5, 8)
    chunk_sizes = [load.chunk * number // 4 for number in quarters]
    policies = ["request-level", *(f"sarathi:{chunk}" for chunk in chunk_sizes)]
    gain_of = lab.gains(policies, load, load.pd_ratio)
    finding = Finding(LLAMA_13B)
    gains = finding.table(x="chunk", y="gain", log="x")
    for chunk in chunk_sizes:
        gains.add(chunk, {"sarathi": gain_of[f"sarathi:{chunk}"]})
    (gain,) = gains
    smallest, second, middle, odd, _ = chunk_sizes
    of_middle = gain.at(middle)
    ratios = finding.table("of chunks", "", "gain over gain", ".3fx")
    ratios.add("gain", {"256 over the baseline": of_middle})
    ratios.add("gain", {"256 over 64": over(of_middle, gain.at(smallest))})
    over_baseline, over_smallest = ratios
    pays = lab.riding_pays_for([load])
    finding.expect(less(1.02, over_baseline), RIDING, pays)
    finding.expect(
        less(1, over_smallest),
        "Four small chunks read the weights four times, where one does once.",
        lab.ridge_above(smallest),
    )
    odd_over_middle = {"gain": over(gain.at(odd), of_middle)}
    tiled = line("320 over 256", odd_over_middle, title=ratios.title)
    finding.expect(
        less(0.95, tiled, 1.05),
        "A batch is cut to whole tiles of 128 rows, so that chunks of 320 are of 256.",
        lab.has_tiles(),
    )
    finding.publish("gain with chunks of 128, up to", 1.16, gain, second)
    finding.publish("gain with chunks of 256", PEAK_GAIN_1K, gain, middle)
    finding.publish("chunks of 64 almost match", 1.0, gain, smallest, within=CLOSE)
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


FORMULA = "(C - (B - 1)) / (B - 1)"


@claim("P:D from which all decodes ride, counted", seconds=(3, 3))
def s_4_4(lab: Lab) -> Finding:
    """S-4.4: from P:D = C / (B - 1) on all decodes ride; the ratio doubles with the chunk.

    A batch of C tokens has B - 1 decodes, so that the chunk beside them has C - (B - 1)."""
    batch = 4
    output_len = 301  # many, so that parts of a chunk do not matter; the prefill yields the first
    ratios = (10, 20, 30, 40, 41, 42, 43, 60, 80, 83, 84, 85, 100)
    finding = Finding()
    shares = finding.table("", "P:D", "share of the decodes that ride", ".1%", timed=False)
    title = "P:D from which all decodes ride"
    first_ratio = finding.table(title, "chunk", "P:D", ".3g", timed=False)
    for chunk in (128, 256):
        name = f"chunk {chunk}"
        for ratio in ratios:
            lengths = [(ratio * output_len, output_len)] * (4 * batch)
            run = count_iterations("sarathi", lengths, chunk=chunk, batch=batch)
            rounds = metrics.full_rounds(run.iterations, batch)
            steady = [iteration for each in rounds for iteration in each.iterations]
            shares.add(ratio, {name: riding_share(steady)})
        share_of = shares[name].known
        all_ride = [float(ratio) for ratio, share in share_of.items() if share == 1]
        riding = batch - 1
        first_ratio.add(chunk, {"counted": min(all_ride, default=None)})
        first_ratio.add(chunk, {FORMULA: (chunk - riding) / riding})
    counted, formula = first_ratio
    for share in shares:
        finding.expect(
            rises(share),
            "The longer a prompt is, the more chunks there are for its decodes to ride with.",
        )
    finding.expect(
        less(0.98, replace(counted / formula, spec=".2f"), 1.02),
        "Each chunk carries B - 1 decodes, and takes C - (B - 1) tokens of a prompt.",
    )
    finding.expect(
        rises(counted),
        "A chunk of twice the size takes half as many batches, which carry half the decodes.",
    )
    for chunk, paper in {128: 42, 256: 84}.items():
        finding.publish(f"P:D, B = 4, C = {chunk}", paper, counted, chunk, within=1)
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
    slots = finding.table("", "requests", "share of 4 slots", ".1%", timed=False)
    loads = {4: ["request-level"], 16: ["request-level", "orca"]}
    for requests, policies in loads.items():
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
            share = over(run.tokens_per_iteration, 4)
            slots.add(requests, {name: share})
    static, continuous = slots
    finding.expect(
        less(1.3 * static, continuous, at="end"),
        "Orca gives a slot to the next request as soon as one ends.",
    )
    finding.expect(
        less(0.501, static, 0.503, at="start"),
        "In 628 iterations, as many as the longest has, 1,260 tokens are computed.",
    )
    finding.publish("slots used by the post's four", 1260 / 2512, static, 4, within=1.01)
    text = "slots used by static batching, 60 to 75 %"
    finding.publish(text, 0.675, static, 16, within=1.5)
    text = "slots used by continuous batching, 90 to 98 %"
    finding.publish(text, 0.94, continuous, 16, within=1.1)
    return finding


@claim("Slots over steps under static and continuous batching, counted", seconds=(1, 1))
def b_1b(lab: Lab) -> Finding:
    """B-1b: continuous batching fills a slot as soon as it is free, static batching when all are.

    Sixty-four requests with the lengths of the post's A to D share four slots."""
    slots = 4
    edges = sorted(output for _, output in POST_STEPS)  # the steps that end A to D
    offsets = [0]  # of the steps around them
    for edge in edges:
        offsets += [edge - 1, edge]
    finding = Finding()
    over_time = finding.table("slots used", "step", "share of 4 slots", ".0%", timed=False)
    title = "slots used, on average"
    means = finding.table(title, "a step is", "share of 4 slots", ".1%", timed=False)
    for name, policy in {"static": "request-level", "continuous": "orca"}.items():
        by_unit = {"a token": POST_STEPS * 16, "an iteration": POST_LENGTHS * 16}
        for unit, lengths in by_unit.items():
            run = count_iterations(policy, lengths, chunk=1, batch=slots)
            used = [iteration.running / slots for iteration in run.iterations]
            means.add(unit, {name: sum(used) / len(used)})
            if unit == "a token":
                for begin in (0, edges[-1]):  # of the first two batches under static batching
                    for offset in offsets:
                        step = begin + offset
                        over_time.add(step + 1, {name: used[step]})
    static, continuous = means
    finding.expect(
        less(1.3 * static, continuous),
        "A slot stays empty until the longest request of its batch has ended.",
    )
    finding.expect(
        less(0.99, over_time["continuous"]),
        "While requests wait, one of them takes each slot that another has left.",
    )
    finding.publish("slots of static batching, a half", 0.5, static, "a token", within=1.01)
    shares = {
        "A to D run": 1.00,
        "D has ended": 0.75,
        "B has ended": 0.50,
        "C has ended": 0.25,
    }
    for (text, share), edge in zip(shares.items(), edges, strict=True):
        finding.publish(text, share, over_time["static"], edge, within=1)
    finding.publish("slots of continuous batching", 0.95, continuous, "a token", within=1.05)
    finding.publish("static, 40 to 50 %", 0.45, static, "an iteration", within=1.2)
    return finding
