"""What a decode costs alone and beside a prefill chunk: SARATHI's Table 2 on this machine.

    table = measure_decode_maximal(model, machine, context=1024, batch=4, chunk=256)
    table.decode_maximal.decode_token_ms     what a decode costs in the hybrid batch

Read first: batch_times.py. Read next: decode_cost.py, where it has an error."""

from collections.abc import Mapping
from dataclasses import dataclass

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
from parallel.stages import runner_for

REPEATS = 7
LIMIT_S = 12  # a slow machine is timed less often


@dataclass(frozen=True, kw_only=True)
class HybridTime(BatchTime):
    """A row of the table: the time of a batch, and what each of its tokens costs."""

    prefill_tokens: int
    decodes: int
    prefill_ms: float  # what the prefill of the batch takes alone

    @property
    def decode_token_ms(self) -> float | None:
        """What a decode costs: its share of what the batch takes longer than its prefill alone
        (SARATHI §5.1.1). None without decodes."""
        return (self.total_ms - self.prefill_ms) / self.decodes if self.decodes else None


@dataclass(frozen=True, kw_only=True)
class DecodeMaximal:
    """Table 2: a whole prompt of `context` tokens; and at its end a chunk, decodes, and both."""

    prompt: HybridTime
    prefill_only: HybridTime
    decode_only: HybridTime  # one decode more than in the hybrid batch
    decode_maximal: HybridTime

    @property
    def rows(self) -> dict[str, HybridTime]:
        """The four batches, by the names that the table prints."""
        return {name.replace("_", "-"): row for name, row in vars(self).items()}

    @property
    def busy(self) -> bool:
        """Whether the machine was too busy for one of the rows to be believed."""
        return any(row.busy for row in self.rows.values())

    @property
    def speedup(self) -> float | None:
        """How many times cheaper a decode is in the hybrid batch than in the decode-only batch.

        None if what the decodes add to the chunk is lost in the noise: half the spread of the
        chunk's times."""
        prefill = self.prefill_only
        hybrid = self.decode_maximal
        added_ms = hybrid.total_ms - prefill.total_ms
        if added_ms <= prefill.total_ms * prefill.spread / 2:
            return None
        alone_ms = self.decode_only.total_ms / self.decode_only.decodes
        return alone_ms / (added_ms / hybrid.decodes)


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
    chunk_ms = times["prefill-only"].total_ms

    def row(name: str, prefill_tokens: int, decodes: int, prefill_ms: float) -> HybridTime:
        return HybridTime(
            **vars(times[name]),
            prefill_tokens=prefill_tokens,
            decodes=decodes,
            prefill_ms=prefill_ms,
        )

    return DecodeMaximal(
        prompt=row("prompt", context, 0, times["prompt"].total_ms),
        prefill_only=row("prefill-only", chunk - riding, 0, chunk_ms),
        decode_only=row("decode-only", 0, batch, 0.0),
        decode_maximal=row("decode-maximal", chunk - riding, riding, chunk_ms),
    )
