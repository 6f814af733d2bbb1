"""Functions that count or compute the papers' claims: they are exact, and no clock is read.

The policies run on a clock that counts iterations, without a model. So each number depends on their
decisions alone, and is the same on any machine. The published numbers stand beside ours in each
Finding. To add a claim, write such a function and list it in measured.py.

S is SARATHI, B a post on schedulers; a number alone is a section.
Read first: finding.py and lab/simulator/simulation.py. Read next: measured.py."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from config import EngineConfig
from lab.measure import metrics
from lab.measure.batch_times import decodes
from lab.measure.capacity import Bounded
from lab.measure.load_run import Run
from lab.measure.workload import Arrival
from lab.papers.bench import Bench
from lab.papers.checks import less, rises
from lab.papers.finding import Finding, Published
from lab.papers.measured_phases import LLAMA_13B
from lab.papers.plot import Plot
from lab.simulator.cost_model import BYTES, Chunks, StageTimes, matrices
from lab.simulator.devices import DEVICES, GEOMETRIES
from lab.simulator.simulation import simulate
from model import GPTConfig
from policies.observers import Iteration

EXACT = 1.0  # the factor within which a number that is counted is the paper's


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
    riding = sum(
        iteration.decode_tokens for iteration in iterations if iteration.prefill_tokens > 0
    )
    return riding / decode_tokens


def s_4_4(bench: Bench) -> Finding:
    """S-4.4: from P:D = C / (B - 1) on all decodes ride; the ratio doubles with the chunk.

    A batch of C tokens has B - 1 decodes, so that the chunk beside them has C - (B - 1)."""
    batch = 4
    decode_count = 300  # of a request; many, so that parts of a chunk do not matter
    ratios = [10, 20, 30, 40, 41, 42, 43, 60, 80, 83, 84, 85, 100]
    shares = Plot("", x="P:D", y="share of the decodes that ride", spec=".1%", timed=False)
    first_ratio = Plot(
        "P:D from which all decodes ride", x="chunk", y="P:D", spec=".3g", timed=False
    )
    for chunk in (128, 256):
        rides_from = None
        for ratio in ratios:
            output_len = decode_count + 1  # the prefill yields the first token
            lengths = [(ratio * output_len, output_len)] * (4 * batch)
            run = count_iterations("sarathi", lengths, chunk=chunk, batch=batch)
            share = riding_share(metrics.steady(run.iterations, batch).iterations)
            shares.add(f"chunk {chunk}", ratio, share)
            if share == 1.0 and rides_from is None:
                rides_from = float(ratio)
        first_ratio.add_row(
            chunk,
            {
                "counted": rides_from,
                "(C - (B - 1)) / (B - 1)": (chunk - (batch - 1)) / (batch - 1),
            },
        )
    counted = first_ratio["counted"]
    formula = first_ratio["(C - (B - 1)) / (B - 1)"]
    more_chunks = "The longer a prompt is, the more chunks there are for its decodes to ride with."
    each_chunk = "Each chunk carries B - 1 decodes, and takes C - (B - 1) tokens of a prompt."
    twice = "A chunk of twice the size takes half as many batches, which carry half the decodes."
    return Finding(
        plots=[shares, first_ratio],
        checks=[
            *(rises(line, because=more_chunks) for line in shares.all_lines()),
            less(0.98, counted.over(formula, ".2f"), 1.02, because=each_chunk),
            rises(counted, because=twice),
        ],
        published=[
            Published("P:D, B = 4, C = 128", 42, counted, at=128, within=EXACT),
            Published("P:D, B = 4, C = 256", 84, counted, at=256, within=EXACT),
        ],
    )


POST_LENGTHS = [(128, 500), (64, 50), (256, 200), (32, 30)]  # requests A to D of the post
POST_STEPS = [(1, prompt + output) for prompt, output in POST_LENGTHS]  # it counts one a token


def b_1b(bench: Bench) -> Finding:
    """B-1b: continuous batching fills a slot as soon as it is free, static batching when all are.

    Sixty-four requests with the lengths of the post's A to D share four slots."""
    slots = 4
    rounds = 16
    edges = sorted(output for _, output in POST_STEPS)  # the steps that end A to D
    over_time = Plot("slots used", x="step", y="share of 4 slots", spec=".0%", timed=False)
    means = Plot(
        "slots used, on average", x="a step is", y="share of 4 slots", spec=".1%", timed=False
    )
    for name, policy in (("static", "request-level"), ("continuous", "orca")):
        by_tokens = count_iterations(policy, POST_STEPS * rounds, chunk=1, batch=slots)
        by_iterations = count_iterations(policy, POST_LENGTHS * rounds, chunk=1, batch=slots)
        for begin in (0, edges[-1]):  # of the first two batches under static batching
            over_time.add(name, begin + 1, by_tokens.iterations[begin].running / slots)
            for edge in edges:
                end = begin + edge
                over_time.add(name, end, by_tokens.iterations[end - 1].running / slots)
                over_time.add(name, end + 1, by_tokens.iterations[end].running / slots)
        means.add(name, "a token", mean_share(by_tokens, slots))
        means.add(name, "an iteration", mean_share(by_iterations, slots))
    static = over_time["static"]
    continuous = over_time["continuous"]
    mean_static = means["static"]
    mean_continuous = means["continuous"]
    waits = "A slot stays empty until the longest request of its batch has ended."
    refills = "While requests wait, one of them takes each slot that another has left."
    return Finding(
        plots=[over_time, means],
        checks=[
            less(mean_static.times(1.3), mean_continuous, because=waits),
            less(0.99, continuous, because=refills),
        ],
        published=[
            Published(
                "slots of static batching, a half", 0.5, mean_static, at="a token", within=1.01
            ),
            Published("A to D run", 1.00, static, at=edges[0], within=EXACT),
            Published("D has ended", 0.75, static, at=edges[1], within=EXACT),
            Published("B has ended", 0.50, static, at=edges[2], within=EXACT),
            Published("C has ended", 0.25, static, at=edges[3], within=EXACT),
            Published(
                "slots of continuous batching", 0.95, mean_continuous, at="a token", within=1.05
            ),
            Published("static, 40 to 50 %", 0.45, mean_static, at="an iteration", within=1.2),
        ],
    )


def mean_share(run: Run, slots: int) -> float:
    """The share of the slots that had a request, over all iterations."""
    return sum(iteration.running for iteration in run.iterations) / (slots * len(run.iterations))


def linear_intensity(config: GPTConfig, tokens: int) -> float:
    """Flops per byte of the linear layers of a batch, in 16 bits. All is moved once: weights,
    inputs and outputs."""
    flops = 0
    moved_bytes = 0
    for rows, columns in matrices(config):
        flops += 2 * tokens * rows * columns
        moved_bytes += BYTES * (rows * columns + tokens * (rows + columns))
    return flops / moved_bytes


def decode_attention_intensity(config: GPTConfig) -> float:
    """Flops per byte of the attention of decodes, in 16 bits: two for each number of a key and a
    value, by each query head that shares it."""
    flops = 4 * config.n_head * config.head_dim
    kv_bytes = 2 * BYTES * config.n_kv_head * config.head_dim
    return flops / kv_bytes


def s_3_1(bench: Bench) -> Finding:
    """S-3.1: only some 256 decodes compute as long as they read; 18 decodes a tenth of that.

    Computed for LLaMA-13B on an A6000, at the rates that SARATHI's Table 2 implies."""
    config = GEOMETRIES["llama-13b"]
    device = DEVICES["a6000"]
    ridge = device.flops_per_s / device.bytes_per_s
    intensity = Plot(
        "of LLaMA-13B", x="decodes", y="flops per byte", spec=".3g", log="xy", timed=False
    )
    over_ridge = Plot(
        "over the ridge of an A6000", x="decodes", y="times", spec=".2f", log="x", timed=False
    )
    of_this_model = replace(intensity, title="of the model here", lines={})
    for batch in (1, 2, 4, 8, 18, 64, 256, 512):
        linear = linear_intensity(config, batch)
        intensity.add_row(
            batch,
            {
                "linear layers": linear,
                "attention": decode_attention_intensity(config),
                "ridge": ridge,
            },
        )
        over_ridge.add("linear layers", batch, linear / ridge)
        here = bench.intensities([decodes(batch, 1)])
        of_this_model.add("linear layers", batch, here["products"])
    linear = intensity["linear layers"]
    attention = intensity["attention"]
    compared = over_ridge["linear layers"]
    shared = "All decodes of a batch share one reading of the weights."
    own = "Each decode reads keys and values of its own, so that a batch shares nothing of them."
    return Finding(
        plots=[intensity, over_ridge, of_this_model],
        checks=[
            rises(linear, because=shared),
            rises(of_this_model["linear layers"], because=shared),
            less(0.99, attention, 1.01, because=own),
        ],
        published=[
            Published(
                "256 decodes, where they start to be compute-intensive",
                Bounded(1.0, "at least"),
                compared,
                at=256,
                device=LLAMA_13B,
                within=EXACT,
            ),
            Published(
                "18 decodes, memory-bound",
                Bounded(1.0, "below"),
                compared,
                at=18,
                device=LLAMA_13B,
                within=EXACT,
            ),
        ],
    )
