"""Time single batches, whole and by operation, each beside its limit (SARATHI, Table 1 and §3).

    times = time_batches(runner, [decodes(6, context=1024)])
    times[decodes(6, context=1024)].total_ms

A batch is a tuple of `TimedChunk`: what one iteration computes of each request. Its matrix products
and its attention are timed alone, too, by the operations of SARATHI's Table 1. Read first:
timing.py. Read next: decode_cost.py."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import NamedTuple

from torch import Tensor

from lab.measure import timing
from lab.measure.machine_info import RealMachineInfo
from model import GPT, FlatBatch
from parallel.shard import Shard, stages_of
from parallel.stages import runner_for
from request import Chunk, lone_chunk
from runtime.runner import Runner

OPERATIONS = ("preproj", "attention", "postproj", "ffn_ln1", "ffn_ln2")  # SARATHI, Table 1


class TimedChunk(NamedTuple):
    """What one iteration computes of a request: its last `tokens` tokens, up to length `end`.

    A decode is a chunk of one token. A prompt that is computed whole ends where it is long."""

    tokens: int
    end: int


Batch = tuple[TimedChunk, ...]


def decodes(count: int, context: int) -> Batch:
    """A batch of `count` decodes, each of which reads `context` tokens, its own included."""
    return (TimedChunk(1, context),) * count


def prompts(count: int, length: int) -> Batch:
    """A batch of `count` whole prompts of `length` tokens."""
    return (TimedChunk(length, length),) * count


def chunks_of(length: int, chunk: int, context: int | None = None) -> list[Batch]:
    """The last `length` tokens of a prompt of `context` tokens, cut into chunks: a batch for each.

    The last chunk may be shorter. By default the prompt has `length` tokens."""
    end = context or length
    starts = range(end - length, end, chunk)
    return [(TimedChunk(min(chunk, end - start), min(start + chunk, end)),) for start in starts]


def spans_of(batch: Batch) -> list[Chunk]:
    """A batch as Chunks of requests that have one page each. The model's head is left out, as in
    the papers."""
    return [
        lone_chunk(
            pages=[page],
            start=chunk.end - chunk.tokens,
            tokens=[1] * chunk.tokens,
            yields_token=False,
        )
        for page, chunk in enumerate(batch)
    ]


def count_tokens(batches: Sequence[Batch]) -> int:
    """How many tokens these batches compute."""
    return sum(chunk.tokens for batch in batches for chunk in batch)


@dataclass(frozen=True, kw_only=True)
class BatchTime:
    """What a batch takes, in milliseconds: medians. The parts are timed alone.

    On a GPU they are times of the device, as a CUDA graph, which may compute the whole, saves
    launches that a part alone would wait for: the parts would seem longer than the whole."""

    total_ms: float
    operations_ms: Mapping[str, float]  # of all in OPERATIONS
    gpu_ms: Mapping[str, float]  # "launch" and "device", see timing.launch_timings; {} on a CPU
    spread: float = 0.0  # between the quartiles of the total, as a fraction of it
    busy: bool = False  # whether others used the machine meanwhile

    @property
    def attention_ms(self) -> float:
        """The time of attention."""
        return self.operations_ms["attention"]

    @property
    def products_ms(self) -> float:
        """The time of the matrix products."""
        return sum(self.operations_ms[name] for name in timing.LINEAR)

    @property
    def other_ms(self) -> float:
        """The time of norms, rotation, activation, embedding, on a GPU launches, what lies
        between."""
        return max(0.0, self.total_ms - self.products_ms - self.attention_ms)

    @property
    def parts_ms(self) -> dict[str, float]:
        """The time of each operation, and of all else, in the order of a batch."""
        operations = {name: self.operations_ms[name] for name in OPERATIONS}
        return operations | {"other": self.other_ms}

    @property
    def launch_bound(self) -> bool:
        """Whether the CPU takes longer to launch the batch than the GPU to compute it."""
        return self.gpu_ms.get("launch", 0.0) > self.gpu_ms.get("device", 0.0)


@dataclass(frozen=True, kw_only=True)
class SequenceTime(BatchTime):
    """What some batches take, one after another: the sums of their times. It is busy, too, if
    their spread is above timing.BUSY."""

    tokens: int
    intensity: float  # of the products, see `intensity`
    attention_limit_ms: float | None = None  # flops or bytes at the rates of a machine

    @property
    def tokens_per_ms(self) -> float:
        """The throughput."""
        return self.tokens / self.total_ms


def time_batches(
    runner: Runner,
    batches: Iterable[Batch],
    repeats: int = 9,
    *,
    clock: Callable[[], float] = timing.wall_time,
) -> dict[Batch, BatchTime]:
    """Time each of these batches in turn, whole and by operation.

    On a CPU the operations of a batch are timed right before the whole. So a change of the
    machine's speed affects both, and the whole does not follow another batch: the first decode
    after a prefill of seconds takes 10 to 30 % longer than the next. `clock` is as of
    timing.interleaved. What the runner's cache holds is lost."""
    device = runner.model.device
    runner.cache.data.normal_()
    batches = list(dict.fromkeys(batches))
    functions: dict[tuple[Batch, str], Callable[[], object]] = {}
    for batch in batches:
        for part, function in _parts_of(runner, batch).items():
            functions[batch, part] = function
    launches = {key: function for key, function in functions.items() if key[1] != "total"}
    on_gpu = timing.launch_timings(launches, device)
    timed_alone = {"launch"} | {part for _, part in on_gpu}
    timed = {key: function for key, function in functions.items() if key[1] not in timed_alone}

    def time_all() -> dict[tuple[Batch, str], timing.Timing]:
        return timing.interleaved(timed, device, repeats, clock=clock)

    def typical_spread(timings: Mapping[tuple[Batch, str], timing.Timing]) -> float:
        return median(timings[batch, "total"].spread for batch in batches)

    timings, drift = timing.steadily(time_all, device, 2, typical_spread, clock)
    ms = {key: each.ms for key, each in timings.items()}
    ms |= {key: each.device for key, each in on_gpu.items()}
    times = {}
    for batch in batches:
        launch = on_gpu.get((batch, "launch"))
        times[batch] = BatchTime(
            total_ms=ms[batch, "total"],
            operations_ms={name: ms[batch, name] for name in OPERATIONS},
            gpu_ms=launch._asdict() if launch else {},
            spread=timings[batch, "total"].spread,
            busy=drift > timing.BUSY,
        )
    return times


def _parts_of(runner: Runner, batch: Batch) -> dict[str, Callable[[], object]]:
    """Functions that run each part of a batch alone, then the "total". A "launch" does not wait for
    its tokens."""
    model = runner.model
    spans = spans_of(batch)
    parts: dict[str, Callable[[], object]] = {"attention": timing.attention_alone(runner, spans)}
    for operation in timing.LINEAR:
        layers = timing.linear_layers(model, [operation])
        parts[operation] = timing.bare_products(model, count_tokens([batch]), layers)

    def launch() -> Tensor:
        return runner.forward(FlatBatch.build(spans, runner.attention))

    if not isinstance(model, Shard):  # whose other ranks launch, too
        parts["launch"] = launch
    return parts | {"total": partial(runner.greedy, spans)}


def time_sequences(
    model: GPT,
    machine: RealMachineInfo,
    sequences: Mapping[str, Sequence[Batch]],
    *,
    attention: str = "auto",
) -> dict[str, SequenceTime]:
    """Time sequences of batches, by their names. A batch that occurs twice is timed once."""
    batches = [batch for sequence in sequences.values() for batch in sequence]
    max_requests = max(len(batch) for batch in batches)
    max_len = longest(sequences)
    runner = runner_for(model)(model, max_requests, max_len, max_len, attention)
    times = time_batches(runner, batches)
    block = timing.linear_layers(model)[: len(timing.LINEAR)]
    matrices = [(layer.in_features, layer.out_features) for layer in block]
    results = {}
    for name, sequence in sequences.items():
        sequence_times = [times[batch] for batch in sequence]
        total = add_up(sequence, sequence_times, matrices, model.dtype.itemsize)
        limit_ms = sum(attention_limit_ms(model, machine, batch) for batch in sequence)
        results[name] = replace(total, attention_limit_ms=limit_ms)
    return results


def longest(sequences: Mapping[str, Sequence[Batch]]) -> int:
    """The longest request of these sequences, in tokens."""
    return max(
        chunk.end for sequence in sequences.values() for batch in sequence for chunk in batch
    )


def attention_limit_ms(model: GPT, machine: RealMachineInfo, batch: Batch) -> float:
    """The least time that the attention of a batch can take."""
    flops, moved_bytes = timing.attention_cost(model.config, spans_of(batch), model.dtype)
    limit_s = max(flops / machine.flops_per_s, moved_bytes / machine.bytes_per_s)
    return 1e3 * stages_of(model) * limit_s


def add_up(
    batches: Sequence[Batch],
    times: Sequence[BatchTime],
    matrices: Sequence[tuple[int, int]],
    item_bytes: int,
) -> SequenceTime:
    """The SequenceTime of batches that follow each other, from the time of each. Its spread is
    theirs, weighted by time. The last two arguments are as of `intensity`."""
    operations_ms: Counter[str] = Counter()
    gpu_ms: Counter[str] = Counter()
    for time in times:
        operations_ms.update(time.operations_ms)
        gpu_ms.update(time.gpu_ms)
    total_ms = sum(time.total_ms for time in times)
    spread = sum(time.spread * time.total_ms for time in times) / total_ms
    return SequenceTime(
        total_ms=total_ms,
        operations_ms=operations_ms,
        gpu_ms=gpu_ms,
        spread=spread,
        busy=any(time.busy for time in times) or spread > timing.BUSY,
        tokens=count_tokens(batches),
        intensity=intensity(batches, matrices, item_bytes),
    )


def intensity(
    batches: Sequence[Batch], matrices: Sequence[tuple[int, int]], item_bytes: int
) -> float:
    """Flops per byte of the products of a layer, where all that goes in or out is moved once. Its
    matrices have (rows, columns) of numbers of so many bytes. Nothing is timed."""
    tokens = count_tokens(batches)
    flops = 0
    moved = 0
    for rows, columns in matrices:
        flops += 2 * tokens * rows * columns
        moved += len(batches) * rows * columns + tokens * (rows + columns)
    return flops / (moved * item_bytes)


def keep_layers(model: GPT, n_layer: int, seed: int) -> GPT:
    """A model of the same shape with `n_layer` layers and random weights. Raises ValueError for a
    model that is compiled or spread over ranks."""
    if model.compiled or isinstance(model, Shard):
        raise ValueError("--layers: does not go with --compile, --tp, --pp")
    return GPT(replace(model.config, n_layer=n_layer), model.device, model.dtype, seed)
