"""What a decode costs alone and beside a prefill chunk, each with its error (SARATHI §5.1.1).

    cost = measure_decode_cost(runner, table_2_batches(context=1000, batch=6, chunk=256))
    cost.alone_ms, cost.beside_ms, cost.speedup

Alone a decode costs its share of a decode-only batch. Beside a chunk it costs its share of the time
by which the hybrid batch is longer than the same chunk alone. These two batches differ by a few
percent, and a machine drifts as much within a second. So they are timed in turn, A B B A, and
quoted is the median of their differences. Read first: timing.py, batch_times.py. Read next:
lab/commands/offline.py, which prints it."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from tqdm import tqdm

from lab.measure import timing
from lab.measure.batch_times import Batch, TimedChunk, count_tokens, decodes, prompts, spans_of
from lab.measure.timing import Estimate
from runtime.runner import Runner

PAIRS = 36
FEWEST_PAIRS = 8  # however long they take
PROMPT_EVERY = 7  # pairs; an odd number, so that a pair after a prompt begins with either batch


def table_2_batches(context: int, batch: int, chunk: int) -> dict[str, Batch]:
    """The batches of SARATHI's Table 2 by the names of its rows, after a whole prompt of `context`
    tokens, where all requests end.

    There are `batch` decodes alone and one fewer beside the chunk, where chunk and decodes are
    `chunk` tokens together."""
    riding = batch - 1
    chunk_alone: Batch = (TimedChunk(chunk - riding, context),)
    return {
        "prompt": prompts(1, context),
        "prefill-only": chunk_alone,
        "decode-only": decodes(batch, context),
        "decode-maximal": chunk_alone + decodes(riding, context),
    }


@dataclass(frozen=True, kw_only=True)
class DecodeCost:
    """The times of a chunk, of some decodes, and of both in one batch, by one clock."""

    cpu_time: bool = False  # of one thread, or wall time of all
    threads: int = 1
    pairs: int  # how often each was timed
    prefill_tokens: int  # of the chunk
    decodes: int  # beside the chunk; one more in the decode-only batch
    chunk_ms: Estimate
    hybrid_ms: Estimate
    decode_only_ms: Estimate
    prompt_token_ms: Estimate  # of a whole prompt
    alone_ms: Estimate  # what a decode costs
    beside_ms: Estimate
    wall_per_clock: float = 1.0  # seconds of wall time for a second by this clock
    busy: bool = False  # whether others took so much of the machine that this is noise

    @classmethod
    def of(
        cls, samples_ms: Mapping[str, Sequence[float]], batches: Mapping[str, Batch]
    ) -> "DecodeCost":
        """The costs from two samples or more of each of table_2_batches, in pairs."""
        chunk_ms = samples_ms["prefill-only"]
        hybrid_ms = samples_ms["decode-maximal"]
        prompt_len = count_tokens([batches["prompt"]])
        decodes = len(batches["decode-only"])
        riding = decodes - 1
        pairs = zip(hybrid_ms, chunk_ms, strict=True)
        return cls(
            pairs=len(chunk_ms),
            prefill_tokens=count_tokens([batches["prefill-only"]]),
            decodes=riding,
            chunk_ms=timing.estimate(chunk_ms),
            hybrid_ms=timing.estimate(hybrid_ms),
            decode_only_ms=timing.estimate(samples_ms["decode-only"]),
            prompt_token_ms=timing.estimate([ms / prompt_len for ms in samples_ms["prompt"]]),
            alone_ms=timing.estimate([ms / decodes for ms in samples_ms["decode-only"]]),
            beside_ms=timing.estimate([(hybrid - chunk) / riding for hybrid, chunk in pairs]),
        )

    @property
    def speedup(self) -> Estimate | None:
        """How many times cheaper a decode is beside the chunk; None if that is lost in the noise:
        its cost there is less than two errors away from nothing."""
        if self.busy or self.beside_ms.value < 2 * self.beside_ms.error:
            return None
        return self.alone_ms.over(self.beside_ms)

    @property
    def promised_gain(self) -> Estimate:
        """The gain in throughput over request-level that these batches promise (SARATHI §5.1.3).

        The rows of the chunk at the rate of a whole prompt, and the decodes alone, over the hybrid
        batch: the gain at the balanced P:D ratio, where all batches of a run are such batches."""
        prompt = self.prompt_token_ms
        value = self.prefill_tokens * prompt.value + self.decodes * self.alone_ms.value
        prompt_error = self.prefill_tokens * prompt.error
        error = math.hypot(prompt_error, self.decodes * self.alone_ms.error)
        return Estimate(value, error).over(self.hybrid_ms)


def measure_decode_cost(
    runner: Runner,
    batches: Mapping[str, Batch],
    *,
    clock: Callable[[], float] = timing.wall_time,
    limit_s: float = math.inf,
) -> DecodeCost:
    """Time table_2_batches in PAIRS, or fewer if they take longer than `limit_s`.

    The head is left out, as in the paper. `clock` is wall time, or timing.cpu_time in a block of
    timing.one_thread. What the runner's cache holds is lost."""
    device = runner.model.device
    runner.cache.data.normal_()
    functions = {name: partial(runner.greedy, spans_of(each)) for name, each in batches.items()}
    for function in functions.values():
        function()  # what is compiled or recorded once does not count

    def time_pairs() -> tuple[dict[str, list[float]], float]:
        """All samples, and seconds of wall time for a second by the clock."""
        samples: dict[str, list[float]] = defaultdict(list)

        def sample(name: str) -> None:
            samples[name].append(timing.time_once(functions[name], device, clock))

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
        return samples, (time.perf_counter() - wall_start) / (clock() - start)

    (samples, wall_per_clock), drift = timing.steadily(time_pairs, device, clock=clock)
    return replace(
        DecodeCost.of(samples, batches),
        cpu_time=clock is timing.cpu_time,
        threads=torch.get_num_threads(),
        wall_per_clock=wall_per_clock,
        busy=drift > timing.BUSY,
    )
