"""What `bench.py offline` prints: its tables, and sentences to quote.

Read first: offline_run.py, which measures; lab/measure/decode_cost.py."""

import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cli.files import plain
from cli.tables import Cell, format_table
from lab.measure.batch_times import BatchTime
from lab.measure.decode_cost import DecodeCost
from lab.measure.machine_info import RealMachineInfo
from lab.measure.offline_load import OfflineLoad, PolicyRun
from lab.measure.timing import Estimate, linear_layers
from model import GPT


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
    return (
        f"limits: {machine.flops_per_s / 1e12:,.2f} TFLOP/s in matrix products of these shapes, "
        f"{machine.bytes_per_s / 1e9:,.0f} GB/s of memory\nridge: {machine.ridge_tokens:,.0f} "
        "rows, fewer are read for longer than they are computed\n"
    )


def show_estimate(estimate: Estimate | None, unit: str = "") -> str:
    """A value and its error, with the digits that the error leaves; "-" for what is noise."""
    if estimate is None or estimate.value < 2 * estimate.error:
        return "-"
    digits = max(0, -math.floor(math.log10(estimate.error))) if estimate.error else 2
    return f"{estimate.value:.{digits}f}{unit} ± {estimate.error:.{digits}f}"


def clock_name(cost: DecodeCost) -> str:
    """The clock, and how many threads computed."""
    return f"{'CPU' if cost.cpu_time else 'wall'} time, threads: {cost.threads}"


def print_costs(costs: Costs, model: GPT, context: int) -> dict[str, Any]:
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
    rows: dict[str, list[Cell]] = {}
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
    by_clock: dict[str, list[Cell]] = {}
    for each in (costs.cpu, costs.wall):
        if each:
            by_clock[clock_name(each)] = [
                ("alone", show_estimate(each.alone_ms), ""),
                (f"beside {chunk} tokens", show_estimate(each.beside_ms), ""),
                ("decode speedup", show_estimate(each.speedup, "x"), ""),
            ]
    layers = linear_layers(model)
    weights = sum(layer.in_features * layer.out_features for layer in layers)
    weight_bytes = weights * model.dtype.itemsize
    print(
        f"1. What a decode costs (SARATHI, Table 2): chunk {chunk + cost.decodes}, batch {batch}, "
        f"context {context}, ms of {clock_name(cost)}\n\n"
        f"{format_table('batch', rows)}\n\n"
        f"{format_table('ms of a decode', by_clock)}\n\n"
        f"{model.config.n_layer} layers, {weight_bytes / 1e6:,.0f} MB of weights; beside a chunk: "
        "hybrid batch - the same chunk alone, the median of pairs"
    )
    if not costs.wall:
        print("left out: wall time, as other programs use this machine")
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
    return f"{row.gain:.2f}x ({low:.2f} to {high:.2f})"


def print_end_to_end(
    rows: Mapping[str, PolicyRun], load: OfflineLoad, chunk: int, in_cpu_time: bool
) -> None:
    """Print the table of the policies, without times where other programs used the machine."""
    cells: dict[str, list[Cell]] = {}
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
    ratio = load.prompt_len / load.output_len
    print(
        f"\n2. End to end: {load.requests} requests of {load.prompt_len} + {load.output_len} "
        f"tokens (P:D {ratio:.0f}; the first {load.batch} want less), batch\n   {load.batch}, "
        f"chunk {chunk}, all there at time 0{clock}\n\n"
        f"{format_table('policy', cells)}\n\n"
        "tokens/s (prompt and output) and gain over request-level are those of a full batch: "
        f"rounds of\n{load.batch} requests after the first; a stall is a gap between two tokens "
        "with others' prefill in it; -: other\nprograms used this machine\n"
    )


def count_equal_texts(rows: Mapping[str, PolicyRun]) -> int:
    """For how many requests all policies generated the same tokens: chunks change no result."""
    outputs = [[c.output for c in row.run.completions] for row in rows.values()]
    return sum(tokens.count(tokens[0]) == len(tokens) for tokens in zip(*outputs, strict=True))


def conclude(costs: Costs, rows: Mapping[str, PolicyRun]) -> str:
    """What a newcomer may quote: what a decode costs, how long answers stand still, and what
    throughput gains."""
    cost = costs.table
    beside = "what is lost in the noise"
    if cost.speedup:
        speedup = show_estimate(cost.speedup, "x")
        beside = f"{show_estimate(cost.beside_ms)} ms, {speedup} less,"
    sentences = [
        f"A decode costs {show_estimate(cost.alone_ms)} ms in a batch of decodes, and {beside} "
        f"beside a chunk of {cost.prefill_tokens} tokens ({clock_name(cost)})."
    ]
    steady = {name: row for name, row in rows.items() if not row.busy}
    stalls = [f"{row.summary.longest_stall_s:.2g} s under {name}" for name, row in steady.items()]
    if stalls:
        still = ", ".join(stalls)
        sentences.append(f"While others' prompts are computed, an answer stands still for {still}.")
    sarathi = steady.get("sarathi")
    if costs.served.speedup and sarathi and sarathi.gain_range:
        sentences.append(
            f"These batches promise {show_estimate(costs.served.promised_gain, 'x')} the "
            f"throughput of request-level; sarathi runs at {show_gain(sarathi)}."
        )
    paragraphs = [textwrap.indent(textwrap.fill(text, 97), "   ") for text in sentences]
    return "\n".join(["3. In short", *paragraphs])
