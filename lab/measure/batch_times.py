"""Time single batches, whole and by operation, each beside its limit (SARATHI, Table 1 and §3).

    times = time_batches(runner, machine, {"decodes": decodes(6, context=1024)}, repeats=5)
    times["decodes"].total_ms

A batch is a tuple of `TimedChunk`: what one iteration computes of each request. Its matrix products
and its attention are timed alone, too, by the operations of SARATHI's Table 1. Read first:
timing.py. Read next: decode_maximal.py."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from lab.measure import timing
from lab.measure.machine_info import RealMachineInfo
from model import GPT, FlatBatch
from parallel.shard import Shard, stages_of
from parallel.stages import runner_for
from request import Chunk, lone_chunk
from runtime.runner import Runner

PRODUCTS = (*timing.LINEAR, "head")
PARTS = ("attention", *PRODUCTS)
BatchName = TypeVar("BatchName")


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


def spans_of(batch: Batch, yields_token: bool = False) -> list[Chunk]:
    """A batch as the Spans of requests that have one page each."""
    return [
        lone_chunk(
            pages=[page],
            start=chunk.end - chunk.tokens,
            tokens=[1] * chunk.tokens,
            yields_token=yields_token,
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
    attention_ms: float
    preproj_ms: float
    postproj_ms: float
    ffn_ln1_ms: float
    ffn_ln2_ms: float
    head_ms: float  # 0 if the head is left out, as in the papers
    products_ms: float  # the five before, together
    attention_limit_ms: float  # flops at the rate of the products, or K and V at the bandwidth
    other_ms: float  # norms, rotation, activation, embedding, on a GPU launches, what lies between
    spread: float  # between the quartiles of the total, as a fraction of it
    busy: bool  # whether the machine was too busy for these numbers to be believed
    launch_ms: float | None = None  # of the CPU, until a GPU has got all work; None on a CPU
    device_ms: float | None = None  # of the GPU, without waiting for launches; None on a CPU

    @property
    def parts_ms(self) -> dict[str, float]:
        """The time of each operation, and of all else but the head, in the order of a batch."""
        return {
            "preproj": self.preproj_ms,
            "attention": self.attention_ms,
            "postproj": self.postproj_ms,
            "ffn_ln1": self.ffn_ln1_ms,
            "ffn_ln2": self.ffn_ln2_ms,
            "other": self.other_ms,
        }

    @property
    def launch_bound(self) -> bool:
        """Whether the CPU takes longer to launch the batch than the GPU to compute it."""
        return (self.launch_ms or 0.0) > (self.device_ms or 0.0)


@dataclass(frozen=True, kw_only=True)
class SequenceTime(BatchTime):
    """What some batches take, one after another: the sums of their times."""

    tokens: int
    tokens_per_ms: float
    intensity: dict[str, float]  # flops per byte of each operation


def time_batches(
    runner: Runner,
    machine: RealMachineInfo,
    batches: Mapping[BatchName, Batch],
    repeats: int,
    *,
    head: bool = False,
    title: str | None = None,
    limit_s: float = math.inf,
) -> dict[BatchName, BatchTime]:
    """Time these batches in turn, whole and by operation; with `head` the model's head, too.

    On a CPU the operations of a batch are timed right before the whole. So a change of the
    machine's speed affects both, and the whole does not follow another batch: the first decode
    after a prefill of seconds takes 10 to 30 % longer than the next. There are fewer repeats where
    they take longer than `limit_s`, see timing.interleaved. A `title` shows a progress bar. What
    the runner's cache holds is lost."""
    device = runner.model.device
    runner.cache.data.normal_()
    variants: dict[tuple[BatchName, str], Callable[[], object]] = {}
    for name, batch in batches.items():
        for part, function in _parts_of(runner, batch, head).items():
            variants[name, part] = function
    launches = {key: function for key, function in variants.items() if key[1] != "total"}
    on_gpu = timing.launch_timings(launches, device)
    timed_here = {"total"} if on_gpu else {"total", *PARTS}
    timed = {key: function for key, function in variants.items() if key[1] in timed_here}

    def time_all() -> dict[tuple[BatchName, str], timing.Timing]:
        return timing.interleaved(timed, device, repeats, title=title, limit_s=limit_s)

    def typical_spread(timings: dict[tuple[BatchName, str], timing.Timing]) -> float:
        return median(timings[name, "total"].spread for name in batches)

    timings, drift = timing.steadily(time_all, device, tries=2, spread_of=typical_spread)
    times = {}
    for name, batch in batches.items():
        total = timings[name, "total"]
        parts_ms = {
            part: on_gpu[name, part].device_ms if on_gpu else timings[name, part].ms
            for part in PARTS
        }
        launch = on_gpu.get((name, "launch"))
        products_ms = sum(parts_ms[operation] for operation in PRODUCTS)
        times[name] = BatchTime(
            total_ms=total.ms,
            **{f"{part}_ms": ms for part, ms in parts_ms.items()},
            products_ms=products_ms,
            attention_limit_ms=_attention_limit_ms(runner.model, machine, batch),
            other_ms=max(0.0, total.ms - products_ms - parts_ms["attention"]),
            spread=total.spread,
            busy=max(drift, total.spread) > timing.BUSY,
            launch_ms=launch.cpu_ms if launch else None,
            device_ms=launch.device_ms if launch else None,
        )
    return times


def _parts_of(runner: Runner, batch: Batch, head: bool) -> dict[str, Callable[[], object]]:
    """Functions that run each of the PARTS of a batch alone, then the "total". A "launch" does not
    wait for its tokens."""
    model = runner.model
    spans = spans_of(batch, yields_token=head)
    head_layers = [model.head] if head and model.head else []
    parts: dict[str, Callable[[], object]] = {
        "attention": timing.attention_alone(runner, spans),
        "head": timing.bare_products(model, len(batch), head_layers),
    }
    for operation in timing.LINEAR:
        layers = timing.linear_layers(model, [operation])
        parts[operation] = timing.bare_products(model, count_tokens([batch]), layers)

    def launch() -> Tensor:
        return runner.forward(FlatBatch.build(spans, runner.attention))

    if not isinstance(model, Shard):  # whose other ranks launch, too
        parts["launch"] = launch
    return parts | {"total": partial(runner.greedy, spans)}


def _attention_limit_ms(model: GPT, machine: RealMachineInfo, batch: Batch) -> float:
    """The least time that the attention of a batch can take."""
    flops, moved_bytes = timing.attention_cost(model.config, spans_of(batch), model.dtype)
    limit_s = max(flops / machine.flops_per_s, moved_bytes / machine.bytes_per_s)
    return 1e3 * stages_of(model) * limit_s


def time_sequences(
    model: GPT,
    machine: RealMachineInfo,
    sequences: Mapping[str, Sequence[Batch]],
    *,
    repeats: int = 5,
    attention: str = "auto",
) -> dict[str, SequenceTime]:
    """Time sequences of batches, by their names. A batch that occurs twice is timed once."""
    batches = {batch: batch for sequence in sequences.values() for batch in sequence}
    max_requests = max(len(batch) for batch in batches)
    max_len = longest(sequences)
    runner = runner_for(model)(model, max_requests, max_len, max_len, attention)
    times = time_batches(runner, machine, batches, repeats, title="batches")
    return {
        name: add_up(model, sequence, [times[batch] for batch in sequence])
        for name, sequence in sequences.items()
    }


def longest(sequences: Mapping[str, Sequence[Batch]]) -> int:
    """The longest request of these sequences, in tokens."""
    return max(
        chunk.end for sequence in sequences.values() for batch in sequence for chunk in batch
    )


def add_up(model: GPT, batches: Sequence[Batch], times: Sequence[BatchTime]) -> SequenceTime:
    """The SequenceTime of batches that follow each other, from the time of each."""
    sums: dict[str, Any] = {}
    for field in fields(BatchTime):
        if field.name.endswith("_ms"):
            parts_ms = [getattr(time, field.name) for time in times]
            sums[field.name] = None if None in parts_ms else sum(parts_ms)
    tokens = count_tokens(batches)
    return SequenceTime(
        **sums,
        spread=max(time.spread for time in times),
        busy=any(time.busy for time in times),
        tokens=tokens,
        tokens_per_ms=tokens / sums["total_ms"],
        intensity=intensities(model, batches),
    )


def intensities(model: GPT, batches: Sequence[Batch]) -> dict[str, float]:
    """Flops per byte of each operation, where all that goes in or out is moved once.

    `products` are the linear layers together. This is arithmetic; nothing is timed."""
    config = model.config
    item_bytes = model.dtype.itemsize
    tokens = count_tokens(batches)

    attention_flops = 0
    attention_bytes = 2 * config.n_layer * tokens * config.n_head * config.head_dim * item_bytes
    for batch in batches:  # above are the queries and the outputs, here come the keys and values
        flops, kv_bytes = timing.attention_cost(config, spans_of(batch), model.dtype)
        attention_flops += flops
        attention_bytes += kv_bytes

    intensity = {"attention": attention_flops / attention_bytes}
    linear_flops = 0
    linear_bytes = 0
    for operation in timing.LINEAR:
        layer = getattr(model.blocks[0], operation)
        weights = layer.in_features * layer.out_features
        columns = layer.in_features + layer.out_features
        flops = config.n_layer * 2 * tokens * weights
        moved_bytes = config.n_layer * item_bytes * (len(batches) * weights + tokens * columns)
        intensity[operation] = flops / moved_bytes
        linear_flops += flops
        linear_bytes += moved_bytes
    return intensity | {"products": linear_flops / linear_bytes}


def keep_layers(model: GPT, n_layer: int, seed: int) -> GPT:
    """A model of the same shape with `n_layer` layers and random weights. Raises ValueError for a
    model that is compiled or spread over ranks."""
    if model.compiled or isinstance(model, Shard):
        raise ValueError("--layers: does not go with --compile, --tp, --pp")
    return GPT(replace(model.config, n_layer=n_layer), model.device, model.dtype, seed)
