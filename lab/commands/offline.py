"""SARATHI's claims on this machine: `bench.py --chunk 256`.

Prints what a decode costs alone and beside a prefill chunk (Table 2); then the policies end to end
at the balanced ratio of prefill to decode tokens, P:D = C / (B - 1); then a conclusion. Where other
programs use the machine, all is measured in CPU time on one thread. Read first: engine.py,
lab/measure/decode_cost.py and offline_load.py. Read next: serve.py, where requests arrive while
others run: Sarathi-Serve's half."""

import math
import textwrap
import time
from argparse import Namespace
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tqdm import tqdm

from cli.loading import (
    ModelOptions,
    add_layers_option,
    add_model_options,
    load_model,
    model_options,
    resolve_model,
)
from cli.options import (
    OptionParser,
    chunk_option,
    file_option,
    from_args,
    json_option,
    number,
    option,
    plain,
    plot_option,
    policies_option,
    whole,
    write_text,
)
from cli.tables import format_table
from config import EngineConfig
from lab.commands.frame import reporting
from lab.measure import timing
from lab.measure.decode_cost import DecodeCost, Parts, measure_decode_cost, measure_parts
from lab.measure.decode_maximal import table_2_batches
from lab.measure.machine_info import RealMachineInfo, measure_machine
from lab.measure.offline_load import OfflineLoad, PolicyRun, policy_runs, run_policies
from lab.measure.run_loop import Run
from lab.measure.run_plan import run_plan
from lab.measure.timing import Estimate, linear_layers
from model import GPT, GPTConfig
from page.html import page
from page.records import Recorder
from parallel import runner_for

DEFAULT_POLICIES = "request-level,orca-best,vllm,sarathi,sarathi-serve"
CPU_LAYERS = 2  # of a geometry on a CPU: each layer does the same work
CPU_S = 12  # of the pairs in CPU time
WALL_S = 4  # and in wall time
SERVE_S = 40  # of all policies together
LATE = 1.5  # times as long as was estimated, but LEAST_S: what is not done then is left out
LEAST_S = 15
MOST_ROUNDS = 5  # with a full batch
SMALL_CHUNK = 64
LAUNCH_NOTE = (
    "launch: the CPU's time until all kernels are launched; device: the GPU's without waiting for "
    "them"
)
GRAPH_NOTE = "decodes alone are replayed as a CUDA graph, other batches launched kernel by kernel"


@dataclass(frozen=True, kw_only=True)
class OfflineOptions:
    """The options of `bench.py offline`."""

    command: str
    policies: list[str] = policies_option(DEFAULT_POLICIES)
    plot: str | None = plot_option("draw each policy's iterations")
    html: str | None = file_option("write a page to step through the decisions of each policy")
    json: str | None = json_option()
    chunk: int = chunk_option()
    batch: int = option("B, the most requests at once", type=whole(minimum=2), default=6)
    seq_len: int = option(
        "prompt and output tokens of a request, together", type=whole(minimum=3), default=1000
    )
    pd_ratio: float = option(
        "prompt tokens per output token",
        type=number(above=0),
        default_text="C / (B - 1), which is balanced",
    )
    requests: int | None = option("requests to serve", type=whole(minimum=1, maximum=1_000_000))
    model: ModelOptions

    def load(self, requests: int) -> OfflineLoad:
        """The requests that the policies serve."""
        return OfflineLoad(
            seq_len=self.seq_len,
            pd_ratio=self.pd_ratio,
            batch=self.batch,
            requests=requests,
            seed=self.model.seed,
        )


def add_options(parser: OptionParser) -> None:
    """Add the options of the command."""
    parser.add_fields(
        OfflineOptions,
        requests=f"as many rounds of B as all policies serve in {SERVE_S} s, at most {MOST_ROUNDS}",
    )
    add_layers_option(parser, f"all of the model; {CPU_LAYERS} of a geometry on a CPU")
    add_model_options(parser, "llama-13b on a GPU with 40 GB or more, else llama-160m")


def resolve(parser: OptionParser, args: Namespace) -> OfflineOptions:
    """The options, with those filled in that were left open. Exits with a message if they make no
    sense together."""
    if not args.batch <= args.chunk <= args.seq_len:
        limits = f"at least --batch {args.batch} and at most --seq-len {args.seq_len}"
        parser.error(f"--chunk {args.chunk}: must be {limits}")
    if "dynamic" in args.policies:
        parser.error("--policies dynamic: follows an SLO, see bench.py serve and capacity")
    run_plan(args.policies, [1], EngineConfig(page_size=1, pages=1))  # raises for unknown ones
    return from_args(
        OfflineOptions,
        args,
        pd_ratio=args.pd_ratio or args.chunk / max(1, args.batch - 1),
        model=with_few_layers(resolve_model(model_options(args))),
    )


def with_few_layers(model: ModelOptions) -> ModelOptions:
    """The same model with CPU_LAYERS on a CPU, unless it has fewer, is a checkpoint or compiled, or
    layers or processes are asked for."""
    is_fixed = model.layers or model.model or model.compile or model.tp * model.pp > 1
    if is_fixed or not model.device.startswith("cpu"):
        return model
    if GPTConfig.preset(model.name).n_layer <= CPU_LAYERS:
        return model
    return replace(model, layers=CPU_LAYERS)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a decode costs, by each clock that could tell."""

    cpu: DecodeCost | None  # None on a GPU
    wall: DecodeCost | None  # None: other programs use the machine
    parts: Mapping[str, Parts]  # of the batches, by the clock of `table`

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


def main(options: OfflineOptions) -> None:
    """The command. What is done when it is interrupted is printed and written."""
    began = time.perf_counter()
    model = load_model(options.model, options.seq_len, positions_from="--seq-len")
    measure = partial(
        measure_machine, model, options.model.title, options.chunk, options.model.attention
    )
    machine = measure()
    on_gpu = model.device.type == "cuda"
    busy = machine.busy and not on_gpu
    if busy:
        with timing.one_thread():
            machine = measure(clock=timing.cpu_time)
    print(machine.heading() + limits_line(machine))
    costs = measure_costs(model, options, busy)
    report: dict[str, Any] = {"machine": machine.to_json()}
    runs: dict[str, Run] = {}
    recorders = {name: Recorder() for name in options.policies} if options.html else {}
    anchor_s = 10 * costs.served.decode_only_ms.value / 1e3  # gaps between tokens above it are red
    requests = options.requests or affordable_requests(costs, options)
    load = options.load(requests)

    def draw(file: str) -> None:
        from lab.pictures.timelines import plot_timelines

        plot_timelines(runs, machine.to_json(), file, anchor_s)

    def write_page(file: str) -> None:
        text = page(
            f"{requests} requests, all there at the start",
            machine.heading(),
            recorders,
            slo_s=anchor_s,
            slo_source="10 decode iterations",
        )
        write_text(file, text)

    with reporting(options, report, plot=draw, html=write_page):
        report["decode_cost"] = print_costs(costs, model, machine, options)
        serve_s = max(LEAST_S, LATE * seconds_to_serve(costs, options, load))
        print(f"serving {requests} requests under each policy, {serve_s:.0f} s at most")
        in_cpu_time = costs.served.cpu_time
        try:
            with (
                timing.one_thread() if in_cpu_time else nullcontext(),
                tqdm(total=len(options.policies) * load.tokens, leave=False, disable=None) as bar,
            ):
                for name, run in run_policies(
                    model,
                    options.policies,
                    load,
                    chunk=options.chunk,
                    attention=options.model.attention,
                    progress=bar.update,
                    recorders=recorders,
                    now=timing.cpu_time if in_cpu_time else timing.wall_time,
                    limit_s=serve_s,
                ):
                    runs[name] = run
        finally:
            rows = policy_runs(options.policies, runs, options.batch)
            if in_cpu_time:  # which no other program makes busy
                rows = {name: replace(row, busy=False) for name, row in rows.items()}
            report["end_to_end"] = {name: row_json(row) for name, row in rows.items()}
            print_end_to_end(rows, load, options, in_cpu_time)
        conclusion = conclude(costs, rows, machine, options)
        report |= {"conclusion": conclusion, "seconds": time.perf_counter() - began}
        print(f"{conclusion}\n")
        if len(rows) > 1:
            report["equal_texts"] = equal = count_equal_texts(rows)
            print(f"same text under all {len(rows)} policies: {equal} of {requests} requests")
            if equal < requests:
                print(
                    f"(in {options.model.dtype} rounding depends on the batch that a token is in)"
                )
        print(f"took {report['seconds']:.0f} s")


def measure_costs(model: GPT, options: OfflineOptions, busy: bool) -> Costs:
    """What a decode costs in CPU time on one thread, and in wall time on all unless the machine is
    busy; on a GPU in wall time alone."""
    runner = runner_for(model)(
        model, options.batch, options.seq_len, options.seq_len, options.model.attention
    )
    batches = table_2_batches(options.seq_len, options.batch, options.chunk)
    rows = {name: batch for name, batch in batches.items() if name != "prompt"}
    if model.device.type == "cuda":
        wall = measure_decode_cost(runner, batches, limit_s=WALL_S)
        return Costs(cpu=None, wall=wall, parts=measure_parts(runner, rows))
    with timing.one_thread():
        cpu = measure_decode_cost(runner, batches, clock=timing.cpu_time, limit_s=CPU_S)
        parts = measure_parts(runner, rows, clock=timing.cpu_time)
    if busy:
        return Costs(cpu=cpu, wall=None, parts=parts)
    wall = measure_decode_cost(runner, batches, limit_s=WALL_S)
    return Costs(cpu=cpu, wall=None if wall.busy else wall, parts=parts)


def seconds_to_serve(costs: Costs, options: OfflineOptions, load: OfflineLoad) -> float:
    """The seconds of wall time that all policies together take to serve the load, if a token costs
    what it costs in the hybrid batch."""
    cost = costs.served
    token_s = cost.hybrid_ms.value / options.chunk / 1e3 * cost.wall_per_clock
    return len(options.policies) * load.tokens * token_s


def affordable_requests(costs: Costs, options: OfflineOptions) -> int:
    """How many requests all policies together serve in SERVE_S: MOST_ROUNDS of B with a full batch,
    or fewer; always more than B."""
    batch = options.batch
    most = (MOST_ROUNDS + 1) * batch + 1
    request_s = seconds_to_serve(costs, options, options.load(most)) / most
    requests = int(SERVE_S / request_s)
    rounds = min((requests - 1) // batch, MOST_ROUNDS + 1)
    return max(rounds, 1) * batch + 1


def limits_line(machine: RealMachineInfo) -> str:
    """The limits that times are compared with."""
    tera_flops = machine.flops_per_s / 1e12
    giga_bytes = machine.bytes_per_s / 1e9
    if tera_flops < 0.005 or machine.ridge_tokens < 0.5:  # of llama-tiny, as it would be printed: 0
        return "limits: none, a product of these shapes takes less time than calling it\n"
    threads = "1 thread" if machine.threads == 1 else f"{machine.threads} threads"
    return (
        f"limits of {threads}: {tera_flops:,.2f} TFLOP/s in matrix products of "
        f"these shapes, {giga_bytes:,.0f} GB/s of memory; ridge: {machine.ridge_tokens:,.0f} rows\n"
    )


def show_estimate(estimate: Estimate | None, unit: str = "") -> str:
    """A value and its error, with the digits that the error leaves; "-" for what is noise."""
    if estimate is None or estimate.value < 2 * estimate.error:
        return "-"
    digits = max(0, -math.floor(math.log10(estimate.error))) if estimate.error else 2
    return f"{estimate.value:.{digits}f}{unit} ± {estimate.error:.{digits}f}"


def clock_name(cost: DecodeCost) -> str:
    """The clock, and how many threads computed."""
    threads = "1 thread" if cost.threads == 1 else f"{cost.threads} threads"
    return f"{'CPU' if cost.cpu_time else 'wall'} time, {threads}"


def print_costs(
    costs: Costs, model: GPT, machine: RealMachineInfo, options: OfflineOptions
) -> dict[str, Any]:
    """Print Table 2 of this machine, and what a decode costs. Returns what --json has of it."""
    cost = costs.table
    chunk = cost.prefill_tokens
    token_ms = cost.chunk_ms.value / chunk
    counts = {
        "prefill-only": (chunk, 0, cost.chunk_ms, token_ms, None),
        "decode-only": (0, cost.decodes + 1, cost.decode_only_ms, None, cost.alone_ms.value),
        "decode-maximal": (chunk, cost.decodes, cost.hybrid_ms, token_ms, cost.beside_ms.value),
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
        if parts.device_ms is not None:
            rows[name] += [("launch", parts.launch_ms, ".2f"), ("device", parts.device_ms, ".2f")]
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
        f"1. What a decode costs (SARATHI, Table 2): chunk {options.chunk}, batch {options.batch}, "
        f"context {options.seq_len}, ms of {clock_name(cost)}\n\n"
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
    rows: Mapping[str, PolicyRun], load: OfflineLoad, options: OfflineOptions, in_cpu_time: bool
) -> None:
    """Print the table of the policies, and what was left out."""
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
        f"   of the output), batch {batch}, chunk {options.chunk}, all there at time 0{clock}\n\n"
        f"{format_table('policy', cells)}\n\n"
        "tokens/s (prompt and output) and gain over request-level are those of a full batch: "
        f"rounds of\n{batch} requests after the first; a stall is a gap between two tokens with "
        "others' prefill in it"
    )
    missing = [name for name in options.policies if name not in rows]
    busy = [name for name, row in rows.items() if row.busy]
    if busy:
        print(f"left out: times of {', '.join(busy)}, as other programs used this machine")
    if missing:
        print(f"left out: {', '.join(missing)}, not done in the time that was announced")
    print()


def count_equal_texts(rows: Mapping[str, PolicyRun]) -> int:
    """For how many requests all policies generated the same tokens: chunks change no result."""
    outputs = [[c.output for c in row.run.completions] for row in rows.values()]
    return sum(tokens.count(tokens[0]) == len(tokens) for tokens in zip(*outputs, strict=True))


def conclude(
    costs: Costs,
    rows: Mapping[str, PolicyRun],
    machine: RealMachineInfo,
    options: OfflineOptions,
) -> str:
    """What a newcomer may quote: what a decode costs, how long answers stand still, and what
    throughput gains here, and why no more."""
    known = {name: row for name, row in rows.items() if not row.busy}
    sentences = [decode_sentence(costs.table)]
    if known:
        sentences.append(stall_sentence(known))
    if costs.served.speedup:
        sentences.append(gain_sentence(costs.served, known.get("sarathi"), options.chunk))
    sentences.append(
        f"A batch of fewer than {machine.ridge_tokens:,.0f} rows, the ridge, reads weights for "
        f"longer than it computes; a larger one wastes little. {more_sentence(options)}"
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


def gain_sentence(cost: DecodeCost, sarathi: PolicyRun | None, chunk: int) -> str:
    """What throughput gains, from what a decode saves and what a chunk loses."""
    saved_ms = cost.decodes * (cost.alone_ms.value - cost.beside_ms.value)
    saved = f"{cost.decodes} decodes save {saved_ms:.1f} of {cost.hybrid_ms.value:.0f} ms"
    token_ms = cost.chunk_ms.value / cost.prefill_tokens
    lost = f"a token of a chunk costs {token_ms / cost.prompt_token_ms.value:.2f}x of a prompt's"
    promise = show_estimate(cost.promised_gain, "x")
    sentence = f"At chunk {chunk}, {saved}, and {lost}: that promises {promise} the throughput of "
    sentence += "request-level"
    if sarathi and sarathi.gain and sarathi.gain_range:
        low, high = sarathi.gain_range
        claim = "no gain"
        if abs(sarathi.gain - 1) > high - low:  # more than its rounds differ
            claim = "a gain" if sarathi.gain > 1 else "a loss"
        sentence += f"; sarathi runs at {show_gain(sarathi)}, {claim}"
    return f"{sentence}."


def more_sentence(options: OfflineOptions) -> str:
    """Where riding would save more."""
    more = "on a GPU, whose ridge is above 100 rows"
    if options.chunk > SMALL_CHUNK >= options.batch:
        more = f"at --chunk {SMALL_CHUNK}, where decodes are a larger part of a batch, and {more}"
    return f"Riding saves more {more}."
