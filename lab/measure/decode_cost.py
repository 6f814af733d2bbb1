"""What a decode costs alone and beside a prefill chunk, each with its error (SARATHI §5.1.1).

    cost = measure_decode_cost(runner, table_2_batches(context=1000, batch=6, chunk=256))
    cost.alone_ms, cost.beside_ms, cost.speedup

Alone a decode costs its share of a decode-only batch. Beside a chunk it costs its share of the time
by which the hybrid batch is longer than the same chunk alone. These two batches differ by a few
percent, and a machine drifts as much within a second. So they are timed in turn, A B B A, and
quoted is the median of their differences. Read first: timing.py, decode_maximal.py. Read next:
lab/commands/offline.py, which prints it."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

from lab.measure import timing
from lab.measure.batch_times import Batch, count_tokens, spans_of
from lab.measure.timing import Estimate
from model import FlatBatch
from request import Chunk
from runtime.runner import Runner

PAIRS = 36
FEWEST_PAIRS = 8  # however long they take
PROMPT_EVERY = 7  # pairs; an odd number, so that a pair after a prompt begins with either batch


@dataclass(frozen=True, kw_only=True)
class DecodeCost:
    """The times of a chunk, of some decodes, and of both in one batch, by one clock."""

    cpu_time: bool  # of one thread, or wall time of all
    threads: int
    pairs: int  # how often each was timed
    prefill_tokens: int  # of the chunk
    decodes: int  # beside the chunk; one more in the decode-only batch
    chunk_ms: Estimate
    hybrid_ms: Estimate
    decode_only_ms: Estimate
    prompt_token_ms: Estimate  # of a whole prompt
    alone_ms: Estimate  # what a decode costs
    beside_ms: Estimate
    wall_per_clock: float  # seconds of wall time for a second by this clock
    busy: bool  # whether other programs took so much of the machine that this is noise

    @property
    def speedup(self) -> Estimate | None:
        """How many times cheaper a decode is beside the chunk; None if that is lost in the noise:
        its cost there is less than two errors away from nothing."""
        if self.busy or self.beside_ms.value < 2 * self.beside_ms.error:
            return None
        value = self.alone_ms.value / self.beside_ms.value
        return Estimate(value, value * _relative(self.alone_ms, self.beside_ms))

    @property
    def promised_gain(self) -> Estimate:
        """The gain in throughput over request-level that these batches promise (SARATHI §5.1.3).

        The rows of the chunk at the rate of a whole prompt, and the decodes alone, over the hybrid
        batch: the gain at the balanced P:D ratio, where all batches of a run are such batches."""
        prompt = self.prefill_tokens * self.prompt_token_ms.value
        decodes = self.decodes * self.alone_ms.value
        errors = (
            self.prefill_tokens * self.prompt_token_ms.error,
            self.decodes * self.alone_ms.error,
        )
        apart = Estimate(prompt + decodes, math.hypot(*errors))
        value = apart.value / self.hybrid_ms.value
        return Estimate(value, value * _relative(apart, self.hybrid_ms))


def _relative(*estimates: Estimate) -> float:
    """The relative error of a product or quotient of independent estimates."""
    return math.hypot(*(each.error / each.value for each in estimates))


def measure_decode_cost(
    runner: Runner,
    batches: Mapping[str, Batch],
    *,
    clock: Callable[[], float] = timing.wall_time,
    limit_s: float = math.inf,
) -> DecodeCost:
    """Time the batches of Table 2 in PAIRS, or fewer if they take longer than `limit_s`.

    The head is left out, as in the paper. `clock` is wall time, or timing.cpu_time in a block of
    timing.one_thread. What the runner's cache holds is lost."""
    device = runner.model.device
    runner.cache.data.normal_()
    functions = {name: partial(runner.greedy, spans_of(each)) for name, each in batches.items()}
    for function in functions.values():
        function()  # what is compiled or recorded once does not count
    samples: dict[str, list[float]] = defaultdict(list)

    def sample(name: str) -> None:
        samples[name].append(timing.time_once(functions[name], device, clock))

    def time_pairs() -> float:
        """Take all samples. Returns seconds of wall time for a second by the clock."""
        wall_start = time.perf_counter()
        start = clock()
        for turn in tqdm(range(PAIRS), "what a decode costs", leave=False, disable=None):
            if turn >= FEWEST_PAIRS and time.perf_counter() - wall_start > limit_s:
                break
            pair = ("prefill-only", "decode-maximal")
            for name in pair if turn % 2 == 0 else reversed(pair):
                sample(name)
            functions["decode-only"]()  # the first decodes after a prefill take longer
            sample("decode-only")
            if turn % PROMPT_EVERY == 0:
                sample("prompt")
        return (time.perf_counter() - wall_start) / (clock() - start)

    wall_per_clock, drift = timing.steadily(time_pairs, device, tries=1, clock=clock)
    prompt_len = count_tokens([batches["prompt"]])
    prefill_tokens = count_tokens([batches["prefill-only"]])
    decodes = len(batches["decode-only"])
    riding = len(batches["decode-maximal"]) - 1
    pairs = zip(samples["decode-maximal"], samples["prefill-only"], strict=True)
    return DecodeCost(
        cpu_time=clock is timing.cpu_time,
        threads=torch.get_num_threads(),
        pairs=len(samples["prefill-only"]),
        prefill_tokens=prefill_tokens,
        decodes=riding,
        chunk_ms=timing.estimate(samples["prefill-only"]),
        hybrid_ms=timing.estimate(samples["decode-maximal"]),
        decode_only_ms=timing.estimate(samples["decode-only"]),
        prompt_token_ms=timing.estimate([ms / prompt_len for ms in samples["prompt"]]),
        alone_ms=timing.estimate([ms / decodes for ms in samples["decode-only"]]),
        beside_ms=timing.estimate([(hybrid - alone) / riding for hybrid, alone in pairs]),
        wall_per_clock=wall_per_clock,
        busy=drift > timing.BUSY,
    )


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a batch's matrix products and its attention take alone, in ms."""

    products_ms: float
    attention_ms: float
    launch_ms: float | None = None  # of the CPU, until a GPU has got all work; None on a CPU
    device_ms: float | None = None  # of the GPU, without waiting for launches; None on a CPU


def measure_parts(
    runner: Runner,
    batches: Mapping[str, Batch],
    clock: Callable[[], float] = timing.wall_time,
) -> dict[str, Parts]:
    """The Parts of these batches, by name. On a GPU they are times of the device."""
    model = runner.model
    layers = timing.linear_layers(model)
    functions: dict[tuple[str, str], Callable[[], object]] = {}
    for name, each in batches.items():
        spans = spans_of(each)
        functions[name, "products"] = timing.bare_products(model, count_tokens([each]), layers)
        functions[name, "attention"] = timing.attention_alone(runner, spans)
        functions[name, "launch"] = partial(launch, runner, spans)
    on_gpu = timing.launch_timings(functions, model.device)
    if on_gpu:
        return {
            name: Parts(
                products_ms=on_gpu[name, "products"].device_ms,
                attention_ms=on_gpu[name, "attention"].device_ms,
                launch_ms=on_gpu[name, "launch"].cpu_ms,
                device_ms=on_gpu[name, "launch"].device_ms,
            )
            for name in batches
        }
    parts = {key: function for key, function in functions.items() if key[1] != "launch"}
    times = timing.interleaved(parts, model.device, repeats=3, warmup=1, clock=clock)
    return {
        name: Parts(
            products_ms=times[name, "products"].ms, attention_ms=times[name, "attention"].ms
        )
        for name in batches
    }


def launch(runner: Runner, spans: Sequence[Chunk]) -> Tensor:
    """Launch a batch, and do not wait for its tokens."""
    return runner.forward(FlatBatch.build(spans, runner.attention))
