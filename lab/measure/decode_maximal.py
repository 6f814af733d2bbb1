"""What a decode costs alone and beside a prefill chunk: SARATHI's Table 2 on this machine.

    table = measure_decode_maximal(model, machine, context=1024, batch=4, chunk=256)
    table.speedup     how many times cheaper a decode is in the hybrid batch

Read first: batch_times.py. Read next: lab/commands/offline.py, which prints the table."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from lab.measure.batch_times import (
    Batch,
    BatchTime,
    TimedChunk,
    decodes,
    prompts,
    time_batches,
)
from lab.measure.machine_info import RealMachineInfo
from model import GPT
from parallel import runner_for

REPEATS = 7
LIMIT_S = 12  # a slow machine is timed less often


@dataclass(frozen=True, kw_only=True)
class HybridTime(BatchTime):
    """A row of the table: the time of a batch, and what each of its tokens costs."""

    prefill_tokens: int
    decodes: int
    prefill_token_ms: float | None  # None without prefill
    decode_token_ms: float | None  # None without decodes


@dataclass(frozen=True, kw_only=True)
class DecodeMaximal:
    """Table 2: a whole prompt of `context` tokens; and at its end a chunk, decodes, and both.

    A decode of the hybrid batch costs what that batch takes longer than the same chunk alone
    (SARATHI §5.1.1)."""

    prompt: HybridTime
    prefill_only: HybridTime
    decode_only: HybridTime  # one decode more than in the hybrid batch
    decode_maximal: HybridTime
    speedup: float | None  # of a decode, over one in the decode-only batch; None: lost in the noise
    products_speedup: float | None  # the same of the matrix products alone
    promised_gain: float  # in throughput over request-level, see `promise_gain`
    device_speedup: float | None = None  # the same as speedup of a GPU's time alone; None on a CPU

    @property
    def rows(self) -> dict[str, HybridTime]:
        """The four batches, by the names that the table prints."""
        return {
            "prompt": self.prompt,
            "prefill-only": self.prefill_only,
            "decode-only": self.decode_only,
            "decode-maximal": self.decode_maximal,
        }

    @property
    def busy(self) -> bool:
        """Whether the machine was too busy for one of the rows to be believed."""
        return any(row.busy for row in self.rows.values())

    def to_json(self) -> dict[str, object]:
        """What the report of `bench.py offline` holds of the table."""
        return {
            "decode_maximal": {name: row.to_json() for name, row in self.rows.items()},
            "decode_speedup": {
                "total": self.speedup,
                "products": self.products_speedup,
                "device": self.device_speedup,
            },
            "promised_gain": self.promised_gain,
        }


def measure_decode_maximal(
    model: GPT,
    machine: RealMachineInfo,
    *,
    context: int,
    batch: int,
    chunk: int,
    attention: str = "auto",
) -> DecodeMaximal:
    """Time the batches of Table 2, and compare a decode alone with one beside a chunk.

    There are `batch` decodes alone and one fewer beside the chunk, where chunk and decodes are
    `chunk` tokens together. All requests end at `context` tokens."""
    runner = runner_for(model)(model, batch, context, context, attention)
    times = time_batches(
        runner,
        machine,
        table_2_batches(context, batch, chunk),
        REPEATS,
        head=True,
        title="Table 2",
        limit_s=LIMIT_S,
    )
    return compare_decodes(times, context, batch, chunk)


def table_2_batches(context: int, batch: int, chunk: int) -> dict[str, Batch]:
    """The four batches of the table, by the names of its rows. All requests end at `context`."""
    riding = batch - 1
    chunk_alone: Batch = (TimedChunk(chunk - riding, context),)
    return {
        "prompt": prompts(1, context),
        "prefill-only": chunk_alone,
        "decode-only": decodes(batch, context),
        "decode-maximal": chunk_alone + decodes(riding, context),
    }


def compare_decodes(
    times: Mapping[str, BatchTime], context: int, batch: int, chunk: int
) -> DecodeMaximal:
    """The table, from the times of its four batches."""
    riding = batch - 1
    prefill_tokens = chunk - riding
    prefill_alone_ms = times["prefill-only"].total_ms
    prompt = hybrid_time(times["prompt"], context, 0, times["prompt"].total_ms)
    prefill_only = hybrid_time(times["prefill-only"], prefill_tokens, 0, prefill_alone_ms)
    decode_only = hybrid_time(times["decode-only"], 0, batch, 0.0)
    hybrid = hybrid_time(times["decode-maximal"], prefill_tokens, riding, prefill_alone_ms)
    return DecodeMaximal(
        prompt=prompt,
        prefill_only=prefill_only,
        decode_only=decode_only,
        decode_maximal=hybrid,
        speedup=decode_speedup(
            decode_ms=decode_only.total_ms / batch,
            hybrid_ms=hybrid.total_ms,
            prefill_ms=prefill_only.total_ms,
            riding=riding,
            spread=prefill_only.spread,
        ),
        products_speedup=decode_speedup(
            decode_ms=decode_only.products_ms / batch,
            hybrid_ms=hybrid.products_ms,
            prefill_ms=prefill_only.products_ms,
            riding=riding,
            spread=prefill_only.spread,
        ),
        promised_gain=promise_gain(prompt, decode_only, context, batch, chunk),
        device_speedup=device_speedup(prefill_only, decode_only, hybrid),
    )


def hybrid_time(
    time: BatchTime, prefill_tokens: int, decode_count: int, prefill_alone_ms: float
) -> HybridTime:
    """A row of the table, where the prefill of the batch takes `prefill_alone_ms` alone."""
    prefill_token_ms = prefill_alone_ms / prefill_tokens if prefill_tokens else None
    decode_ms = time.total_ms - prefill_alone_ms
    return HybridTime(
        **asdict(time),
        prefill_tokens=prefill_tokens,
        decodes=decode_count,
        prefill_token_ms=prefill_token_ms,
        decode_token_ms=decode_ms / decode_count if decode_count else None,
    )


def decode_speedup(
    *, decode_ms: float, hybrid_ms: float, prefill_ms: float, riding: int, spread: float
) -> float | None:
    """How many times cheaper each of `riding` decodes is beside a chunk than at `decode_ms` alone.

    None if what they add to the chunk is lost in the noise: half the spread of the chunk's times.
    """
    added_ms = hybrid_ms - prefill_ms
    noise_ms = prefill_ms * spread / 2
    return decode_ms / (added_ms / riding) if added_ms > noise_ms else None


def device_speedup(
    prefill_only: BatchTime, decode_only: HybridTime, hybrid: HybridTime
) -> float | None:
    """The decode speedup, of the time that a GPU computes: the time of launches is no part of it.
    None on a CPU, or lost in the noise."""
    decode_ms = decode_only.device_ms
    hybrid_ms = hybrid.device_ms
    prefill_ms = prefill_only.device_ms
    if decode_ms is None or hybrid_ms is None or prefill_ms is None:
        return None
    return decode_speedup(
        decode_ms=decode_ms / decode_only.decodes,
        hybrid_ms=hybrid_ms,
        prefill_ms=prefill_ms,
        riding=hybrid.decodes,
        spread=prefill_only.spread,
    )


def promise_gain(
    prompt: BatchTime, decode_only: BatchTime, context: int, batch: int, chunk: int
) -> float:
    """The gain in throughput over request-level that the matrix products promise (§4.4, §5.1.3).

    It is that of the balanced P:D ratio, if each row of a hybrid batch cost what a row of a whole
    prompt costs. The head is left out of the prompt: it has one row."""
    riding = batch - 1
    row_ms = (prompt.products_ms - prompt.head_ms) / context
    decodes_alone_ms = riding * decode_only.products_ms / batch
    return ((chunk - riding) * row_ms + decodes_alone_ms) / (chunk * row_ms)
