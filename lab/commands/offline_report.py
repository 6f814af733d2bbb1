"""What `bench.py offline` prints: its tables, and sentences to quote.

Read first: offline_run.py, which measures; lab/measure/decode_cost.py."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cli.files import plain
from cli.tables import format_table
from lab.measure.batch_times import BatchTime
from lab.measure.decode_cost import DecodeCost
from lab.measure.machine_info import RealMachineInfo
from lab.measure.offline_load import OfflineLoad, PolicyRun
from lab.measure.timing import Estimate, linear_layers
from model import GPT

SMALL_CHUNK = 64
LAUNCH_NOTE = (
    "launch: the CPU's time until all kernels are launched; device: the GPU's without waiting for "
    "them"
)
GRAPH_NOTE = "decodes alone are replayed as a CUDA graph, other batches launched kernel by kernel"


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a decode costs, by each clock that could tell."""

    cpu: DecodeCost | None  # None on a GPU
    wall: DecodeCost | None  # None: other programs use the machine
    parts: Mapping[str, BatchTime]  # of the batches, by the clock of `table`

    @property
    def table(self) -> DecodeCost:
        """By the clock that other programs change least."""
        cost = self.cpu or self.wall
        assert cost, "on a GPU wall time always counts"
        return cost

    @property
    def served(self) -> DecodeCost:
        """By the clock that the policies are served by."""
        return self.wall or self.table


def limits_line(machine: RealMachineInfo) -> str:
    """The limits that times are compared with."""
    tera_flops = machine.flops_per_s / 1e12
    giga_bytes = machine.bytes_per_s / 1e9
    if tera_flops < 0.005 or machine.ridge_tokens < 0.5:  # of llama-tiny, as it would be printed: 0
        return "limits: none, a product of these shapes takes less time than calling it\n"
    return (
        f"limits of {thread_count(machine.threads)}: {tera_flops:,.2f} TFLOP/s in matrix products "
        f"of these shapes, {giga_bytes:,.0f} GB/s of memory; "
        f"ridge: {machine.ridge_tokens:,.0f} rows\n"
    )


def show_estimate(estimate: Estimate | None, unit: str = "") -> str:
    """A value and its error, with the digits that the error leaves; "-" for what is noise."""
    if estimate is None or estimate.value < 2 * estimate.error:
        return "-"
    digits = max(0, -math.floor(math.log10(estimate.error))) if estimate.error else 2
    return f"{estimate.value:.{digits}f}{unit} ± {estimate.error:.{digits}f}"


def thread_count(threads: int) -> str:
    """So many threads, in words."""
    return "1 thread" if threads == 1 else f"{threads} threads"


def clock_name(cost: DecodeCost) -> str:
    """The clock, and how many threads computed."""
    return f"{'CPU' if cost.cpu_time else 'wall'} time, {thread_count(cost.threads)}"


def print_costs(costs: Costs, model: GPT, machine: RealMachineInfo, context: int) -> dict[str, Any]:
    """Print Table 2 of this machine, of requests that end at `context` tokens, and what a decode
    costs. Returns what --json has of it."""
    cost = costs.table
    batch = cost.decodes + 1
    chunk = cost.prefill_tokens
    beside_ms = cost.beside_ms.value if cost.speedup else None  # or it is noise
    token_ms = cost.chunk_ms.value / chunk
    counts = {
        "prefill-only": (chunk, 0, cost.chunk_ms, token_ms, None),
        "decode-only": (0, batch, cost.decode_only_ms, None, cost.alone_ms.value),
        "decode-maximal": (chunk, cost.decodes, cost.hybrid_ms, token_ms, beside_ms),
    }
    rows = {}
    for name, (prefill_tokens, decodes, total_ms, prefill_ms, decode_ms) in counts.items():
        parts = costs.parts[name]
        rows[name] = [
            ("prefill + decodes", f"{prefill_tokens} + {decodes}", ""),
            ("products", parts.products_ms, ".1f"),
            ("attention", parts.attention_ms, ".1f"),
            ("total", total_ms.value, ".1f"),
            ("per prefill token", prefill_ms, ".3f"),
            ("per decode", decode_ms, ".2f"),
        ]
        rows[name] += [(part, ms, ".2f") for part, ms in parts.gpu_ms.items()]
    measured = [each for each in (costs.cpu, costs.wall) if each]
    by_clock = {
        clock_name(each): [
            ("alone", show_estimate(each.alone_ms), ""),
            (f"beside {chunk} tokens", show_estimate(each.beside_ms), ""),
            ("decode speedup", show_estimate(each.speedup, "x"), ""),
        ]
        for each in measured
    }
    layers = linear_layers(model)
    weight_bytes = sum(layer.in_features * layer.out_features for layer in layers)
    weight_bytes *= model.dtype.itemsize
    print(
        f"1. What a decode costs (SARATHI, Table 2): chunk {chunk + cost.decodes}, batch {batch}, "
        f"context {context}, ms of {clock_name(cost)}\n\n"
        f"{format_table('batch', rows)}\n\n"
        f"{format_table('ms of a decode', by_clock)}\n\n"
        f"{model.config.n_layer} layers, {weight_bytes / 1e6:,.0f} MB of weights; beside a chunk: "
        "hybrid batch - the same chunk alone, the median of pairs"
    )
    if cost.cpu_time and not costs.wall:
        print("left out: wall time, as other programs use this machine")
    if not cost.cpu_time:
        print(LAUNCH_NOTE)
    if machine.cuda_graphs:
        print(GRAPH_NOTE)
    print()
    return {
        "layers": model.config.n_layer,
        "weight_bytes": weight_bytes,
        "cpu_time": costs.cpu,
        "wall_time": costs.wall,
        "parts": costs.parts,
    }


def row_json(row: PolicyRun) -> dict[str, Any]:
    """The row of a policy as --json has it: its tokens per second are those of a full batch."""
    return plain(row.summary) | {
        "tokens_per_s": row.tokens_per_s,
        "round_rates": row.round_rates,
        "gain": row.gain,
        "gain_range": row.gain_range,
        "busy": row.busy,
    }


def show_gain(row: PolicyRun) -> str:
    """A gain with the range of its rounds; "-" where there were not two."""
    if row.gain is None or row.gain_range is None:
        return "-"
    low, high = row.gain_range
    return f"{row.gain:.2f}x ({low:.2f} to {high:.2f})" if low < high else f"{row.gain:.2f}x"


def print_end_to_end(
    rows: Mapping[str, PolicyRun],
    load: OfflineLoad,
    policies: Sequence[str],
    *,
    chunk: int,
    in_cpu_time: bool,
) -> None:
    """Print the table of the policies, and what was left out of all these `policies`."""
    batch = load.batch
    ratio = load.prompt_len / load.output_len
    cells = {}
    for name, row in rows.items():
        summary = row.summary
        known = not row.busy
        cells[name] = [
            ("tokens/s", row.tokens_per_s if known else None, ",.0f"),
            ("gain (its rounds)", show_gain(row) if known else None, ""),
            ("P50 TTFT s", summary.p50_ttft_s if known else None, ".2f"),
            ("P99 TBT s", summary.p99_tbt_s if known else None, ".3f"),
            ("longest stall s", summary.longest_stall_s if known else None, ".3f"),
            ("iterations", summary.iterations, ""),
            ("tokens/iteration", summary.tokens_per_iteration, ".0f"),
        ]
    clock = ", in CPU time on one thread" if in_cpu_time else ""
    lengths = f"{load.prompt_len} + {load.output_len} tokens (P:D {ratio:.0f}"
    print(
        f"\n2. End to end: {load.requests} requests of {lengths}; the first {batch} want "
        f"1/{batch}, 2/{batch}, ...\n"
        f"   of the output), batch {batch}, chunk {chunk}, all there at time 0{clock}\n\n"
        f"{format_table('policy', cells)}\n\n"
        "tokens/s (prompt and output) and gain over request-level are those of a full batch: "
        f"rounds of\n{batch} requests after the first; a stall is a gap between two tokens with "
        "others' prefill in it"
    )
    left_out = [name for name in policies if name not in rows]
    busy = [name for name, row in rows.items() if row.busy]
    if busy:
        print(f"left out: times of {', '.join(busy)}, as other programs used this machine")
    if left_out:
        print(f"left out: {', '.join(left_out)}, not done in the time that was announced")
    print()


def count_equal_texts(rows: Mapping[str, PolicyRun]) -> int:
    """For how many requests all policies generated the same tokens: chunks change no result."""
    outputs = [[c.output for c in row.run.completions] for row in rows.values()]
    return sum(tokens.count(tokens[0]) == len(tokens) for tokens in zip(*outputs, strict=True))


def conclude(costs: Costs, rows: Mapping[str, PolicyRun], machine: RealMachineInfo) -> str:
    """What a newcomer may quote: what a decode costs, how long answers stand still, and what
    throughput gains here, and why no more."""
    steady_rows = {name: row for name, row in rows.items() if not row.busy}
    sentences = [decode_sentence(costs.table)]
    if steady_rows:
        sentences.append(stall_sentence(steady_rows))
    if costs.served.speedup:
        sentences.append(gain_sentence(costs.served, steady_rows.get("sarathi")))
    sentences.append(
        f"A batch of fewer than {machine.ridge_tokens:,.0f} rows, the ridge, reads weights for "
        f"longer than it computes; a larger one wastes little. {more_sentence(costs.table)}"
    )
    return "\n".join(["3. In short", *(fill(each) for each in sentences)])


def fill(text: str) -> str:
    """A paragraph of the conclusion."""
    return textwrap.fill(text, 100, initial_indent="   ", subsequent_indent="   ")


def decode_sentence(cost: DecodeCost) -> str:
    """What a decode costs alone and beside the chunk."""
    beside = f"beside a chunk of {cost.prefill_tokens} tokens"
    alone = f"A decode costs {show_estimate(cost.alone_ms)} ms in a batch of decodes"
    if cost.speedup is None:
        return f"{alone}; {beside} that is lost in the noise ({clock_name(cost)})."
    return (
        f"{alone} and {show_estimate(cost.beside_ms)} ms {beside}, "
        f"{show_estimate(cost.speedup, 'x')} less ({clock_name(cost)})."
    )


def stall_sentence(rows: Mapping[str, PolicyRun]) -> str:
    """How long an answer stands still under each policy."""
    stalls = [f"{row.summary.longest_stall_s:.2g} s under {name}" for name, row in rows.items()]
    return f"While others' prompts are computed, an answer stands still for {', '.join(stalls)}."


def gain_sentence(cost: DecodeCost, sarathi: PolicyRun | None) -> str:
    """What throughput gains, from what a decode saves and what a chunk loses."""
    saved_ms = cost.decodes * (cost.alone_ms.value - cost.beside_ms.value)
    saved = f"{cost.decodes} decodes save {saved_ms:.1f} of {cost.hybrid_ms.value:.0f} ms"
    token_ms = cost.chunk_ms.value / cost.prefill_tokens
    lost = f"a token of a chunk costs {token_ms / cost.prompt_token_ms.value:.2f}x of a prompt's"
    promise = show_estimate(cost.promised_gain, "x")
    sentence = (
        f"At chunk {cost.prefill_tokens + cost.decodes}, {saved}, and {lost}: that promises "
        f"{promise} the throughput of request-level"
    )
    if sarathi and sarathi.gain and sarathi.gain_range:
        low, high = sarathi.gain_range
        claim = "no gain"
        if abs(sarathi.gain - 1) > high - low:  # more than its rounds differ
            claim = "a gain" if sarathi.gain > 1 else "a loss"
        sentence += f"; sarathi runs at {show_gain(sarathi)}, {claim}"
    return f"{sentence}."


def more_sentence(cost: DecodeCost) -> str:
    """Where riding would save more."""
    more = "on a GPU, whose ridge is above 100 rows"
    if cost.prefill_tokens + cost.decodes > SMALL_CHUNK > cost.decodes:
        more = f"at --chunk {SMALL_CHUNK}, where decodes are a larger part of a batch, and {more}"
    return f"Riding saves more {more}."
