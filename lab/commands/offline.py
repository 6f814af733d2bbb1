"""SARATHI's claims on this machine: `bench.py --chunk 256`.

Prints Table 2, what a decode costs alone and beside a prefill chunk, each time with its limit; then
the policies end to end at the balanced ratio of prefill to decode tokens, P:D = C / (B - 1); then
a conclusion. Read first: engine.py, lab/measure/decode_maximal.py and offline_load.py. Read next:
serve.py, where requests arrive while others run: Sarathi-Serve's half."""

import textwrap
import time
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
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
from cli.tables import format_table, show
from config import EngineConfig
from lab.commands.batches import launch_cells, launch_note
from lab.commands.frame import reporting
from lab.measure import gain, timing
from lab.measure.batch_times import time_layer
from lab.measure.decode_maximal import DecodeMaximal, measure_decode_maximal
from lab.measure.machine_info import RealMachineInfo, measure_machine
from lab.measure.offline_load import OfflineLoad, PolicyRun, policy_runs, run_policies
from lab.measure.run_loop import Run
from lab.measure.run_plan import run_plan
from model import GPT, GPTConfig
from page.html import page
from page.records import Recorder
from parallel import runner_for
from policies.referee import Violation
from policies.trial import broken_rules, mark_broken

DEFAULT_POLICIES = "request-level,orca-best,vllm,sarathi,sarathi-serve"
MORE_REQUESTS_S = 25  # more than 2 B + 1 are served while all policies together take so long
ALL_LAYERS_S = 65  # with fewer layers if they would take longer, on a CPU


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
    lockstep: bool = option(
        "requests that begin and end together, where the policy lets them: the worst case of Orca",
        action="store_true",
    )
    seq_len: int = option(
        "prompt and output tokens of a request, together", type=whole(minimum=3), default=1000
    )
    pd_ratio: float = option(
        "prompt tokens per output token",
        type=number(above=0),
        default_text="C / (B - 1), which is balanced",
    )
    explain: bool = option(
        "also say where the gain goes that the matrix products promise: the batches of "
        "request-level and sarathi once more, part by part",
        action="store_true",
    )
    requests: int = option("requests to serve", type=whole(minimum=1, maximum=1_000_000))
    requests_given: bool  # or fewer may be served, see affordable_requests
    model: ModelOptions

    @property
    def fewest_requests(self) -> int:
        """As many as leave a full round of B to measure, see metrics.steady."""
        return 2 * self.batch + 1

    @property
    def load(self) -> OfflineLoad:
        """The requests that the policies serve."""
        return OfflineLoad(
            seq_len=self.seq_len,
            pd_ratio=self.pd_ratio,
            batch=self.batch,
            requests=self.requests,
            lockstep=self.lockstep,
            seed=self.model.seed,
        )


def add_options(parser: OptionParser) -> None:
    """Add the options of the command."""
    limit = f"while that takes {MORE_REQUESTS_S} s for all policies"
    parser.add_fields(OfflineOptions, requests=f"2 B + 1, and up to 3 B + 1 {limit}")
    add_layers_option(parser, "all; on a CPU that would take minutes, fewer")
    add_model_options(parser, "llama-13b on a GPU with 40 GB or more, else llama-160m")


def resolve(parser: OptionParser, args: Namespace) -> OfflineOptions:
    """The options, with those filled in that were left open. Exits with a message if they make no
    sense together."""
    if not args.batch <= args.chunk <= args.seq_len:
        limits = f"at least --batch {args.batch} and at most --seq-len {args.seq_len}"
        parser.error(f"--chunk {args.chunk}: must be {limits}")
    if "dynamic" in args.policies:
        parser.error("--policies dynamic: follows an SLO, see bench.py serve and capacity")
    plan(args.policies)  # raises ValueError for a chunk size of a policy that has none
    options = from_args(
        OfflineOptions,
        args,
        pd_ratio=args.pd_ratio or args.chunk / max(1, args.batch - 1),
        requests=args.requests or 3 * args.batch + 1,
        requests_given=args.requests is not None,
        model=resolve_model(model_options(args)),
    )
    if options.explain and not {*gain.COMPARED} <= {*options.policies}:
        parser.error(f"--explain: needs --policies {','.join(gain.COMPARED)}, others too")
    if options.explain and options.requests < options.fewest_requests:
        limit = f"must be at least {options.fewest_requests}, 2 B + 1, with --explain"
        parser.error(f"--requests {options.requests}: {limit}")
    return options


def plan(labels: list[str]) -> dict[str, EngineConfig]:
    """A config for each label, a policy or one with a chunk size."""
    return run_plan(labels, [1], EngineConfig(page_size=1, pages=1))


def main(options: OfflineOptions) -> None:
    """The command. What is done when it is interrupted is printed and written."""
    began = time.perf_counter()
    tokens = len(options.policies) * options.fewest_requests * options.seq_len
    options = replace(options, model=affordable_layers(options, tokens, ALL_LAYERS_S))
    model = load_model(options.model, options.seq_len, positions_from="--seq-len")
    machine = measure_machine(model, options.model.title, options.chunk)
    print(machine.heading() + limits_line(machine))
    broken = broken_rules(config.policy for config in plan(options.policies).values())
    violations = {
        label: broken[config.policy]
        for label, config in plan(options.policies).items()
        if config.policy in broken
    }
    for violation in violations.values():
        print(f"{violation.sentence}\n")
    table = measure_decode_maximal(
        model,
        machine,
        context=options.seq_len,
        batch=options.batch,
        chunk=options.chunk,
        attention=options.model.attention,
    )
    anchor_s = 10 * table.decode_only.total_ms / 1e3  # gaps between tokens above it are red
    print_decode_maximal(table, options)
    if not options.requests_given:
        options = replace(options, requests=affordable_requests(table, options))
    seconds = all_policies_s(table, options)
    print(f"serving {options.requests} requests under each policy, {seconds:.0f} s in all:")
    recorders = {name: Recorder() for name in options.policies} if options.html else {}
    runs: dict[str, Run] = {}
    report: dict[str, Any] = {"machine": machine.to_json()}

    def draw(file: str) -> None:
        from lab.pictures.timelines import plot_timelines

        plot_timelines(runs, machine.to_json(), file, anchor_s)

    def write_page(file: str) -> None:
        text = page(
            f"{options.requests} requests, all there at the start",
            machine.heading(),
            recorders,
            slo_s=anchor_s,
            slo_source="10 decode iterations",
        )
        write_text(file, text)

    with reporting(options, report, plot=draw, html=write_page):
        report |= {
            "decode_maximal": table.rows,
            "decode_speedup": {
                "total": table.speedup,
                "products": table.products_speedup,
                "device": table.device_speedup,
            },
            "promised_gain": table.promised_gain,
        }
        count = len(options.policies) * options.load.tokens
        try:
            with tqdm(desc="tokens", total=count, leave=False, disable=None) as bar:
                for name, run in run_policies(
                    model,
                    options.policies,
                    options.load,
                    chunk=options.chunk,
                    attention=options.model.attention,
                    progress=bar.update,
                    recorders=recorders,
                ):
                    tqdm.write(f"{name}: {options.requests} requests in {run.seconds:.1f} s")
                    runs[name] = run
            print()
        finally:
            rows = policy_runs(options.policies, runs, options.batch)
            report["end_to_end"] = {name: row_json(row) for name, row in rows.items()}
            print_end_to_end(rows, options, violations)
        if options.explain:
            report["explained"] = explain(model, rows, options)
        conclusion = conclude(table, rows, options.chunk, violations)
        seconds = time.perf_counter() - began
        report |= {"conclusion": conclusion, "seconds": seconds}
        print(f"{conclusion}\n\ntook {seconds:.0f} s")
        if len(rows) > 1:
            print(equal_tokens_line(rows, options.model.dtype))


def affordable_layers(options: OfflineOptions, tokens: int, limit_s: float) -> ModelOptions:
    """The options of the model, of as many layers as a CPU computes for `tokens` in `limit_s`.

    One layer is timed, in chunks of `options.chunk`. All layers are computed where --layers says
    how many, and by a checkpoint, a GPU, several processes, and what --compile makes."""
    model = options.model
    is_fixed = model.layers or model.model or model.compile or model.tp * model.pp > 1
    if is_fixed or not model.device.startswith("cpu"):
        return model
    config = GPTConfig.preset(model.name)
    layer_s = time_layer(
        config,
        getattr(torch, str(model.dtype)),
        chunk=options.chunk,
        context=options.seq_len,
        attention=model.attention,
    )
    all_s = layer_s * config.n_layer * tokens / options.chunk
    if all_s <= limit_s:
        return model
    layers = max(1, int(config.n_layer * limit_s / all_s))
    print(
        f"# {model.name} with {layers} of its {config.n_layer} layers: all of them, "
        f"--layers {config.n_layer}, would take {all_s:,.0f} s and more here"
    )
    return replace(model, layers=layers)


def all_policies_s(table: DecodeMaximal, options: OfflineOptions) -> float:
    """The seconds that all policies together take to serve the load, if a token costs what it costs
    in the hybrid batch."""
    hybrid = table.decode_maximal
    token_ms = hybrid.total_ms / (hybrid.prefill_tokens + hybrid.decodes)
    return len(options.policies) * options.load.tokens * token_ms / 1e3


def affordable_requests(table: DecodeMaximal, options: OfflineOptions) -> int:
    """How many requests all policies together serve in about MORE_REQUESTS_S.

    At least 2 B + 1, or there is no full round of requests to measure, at most the default."""
    request_s = all_policies_s(table, options) / options.requests
    requests = max(options.fewest_requests, int(MORE_REQUESTS_S / request_s))
    return min(requests, options.requests)


def limits_line(machine: RealMachineInfo) -> str:
    """The limits that times are compared with."""
    name = timing.mark("measured limits", machine.busy)
    tera_flops = machine.flops_per_s / 1e12
    giga_bytes = machine.bytes_per_s / 1e9
    if tera_flops < 0.005 or machine.ridge_tokens < 0.5:  # of llama-tiny, as it would be printed: 0
        return f"{name}: none, a product of these shapes takes less time than calling it\n"
    return (
        f"{name}: {tera_flops:,.2f} TFLOP/s in matrix products of these shapes, "
        f"{giga_bytes:,.0f} GB/s of memory; ridge: {machine.ridge_tokens:,.0f} tokens\n"
    )


def print_decode_maximal(table: DecodeMaximal, options: OfflineOptions) -> None:
    """Print Table 2 of this machine. A cost that is negative is noise."""

    def cost(milliseconds: float | None) -> float | None:
        return None if milliseconds is None or milliseconds < 0 else milliseconds

    def speedup_text(speedup: float | None) -> str:
        return show(speedup, ".1fx") if speedup else "lost in the noise"

    speedup = f"{speedup_text(table.speedup)}; of the products "
    speedup += speedup_text(table.products_speedup)
    if table.decode_only.device_ms is not None:
        speedup += f"; of the time of the device {speedup_text(table.device_speedup)}"
    rows = {
        timing.mark(name, row.busy): [
            ("prefill + decodes", f"{row.prefill_tokens} + {row.decodes}", ""),
            ("products", row.products_ms, ".1f"),
            ("attention", row.attention_ms, ".1f"),
            ("limit", row.attention_limit_ms, ".1f"),
            ("other", row.other_ms, ".1f"),
            ("total", row.total_ms, ".1f"),
            ("spread", row.spread, ".0%"),
            ("per prefill token", cost(row.prefill_token_ms), ".3f"),
            ("per decode token", cost(row.decode_token_ms), ".3f"),
            *launch_cells(row),
        ]
        for name, row in table.rows.items()
    }
    print(
        f"1. What a decode costs (SARATHI, Table 2): chunk {options.chunk}, batch {options.batch}, "
        f"context {options.seq_len}, times in ms\n\n"
        f"{format_table('batch', rows)}\n\n"
        f"decode speedup: {timing.TOO_BUSY if table.busy else speedup}\n"
        "products, operation by operation, and attention are timed alone; limit of attention: "
        "flops at the rate of the\n"
        "products, or K and V at the bandwidth, whichever takes longer\n"
        f"{launch_note(table.rows)}"
    )


def row_json(row: PolicyRun) -> dict[str, Any]:
    """The row of a policy as --json has it: its tokens per second are those of a full pipeline."""
    return plain(row.summary) | {
        "tokens_per_s": row.tokens_per_s,
        "busy": row.busy,
        "whole_run_tokens_per_s": row.summary.tokens_per_s,
        "gain": row.gain,
        "whole_run_gain": row.whole_run_gain,
    }


def print_end_to_end(
    rows: Mapping[str, PolicyRun], options: OfflineOptions, violations: Mapping[str, Violation]
) -> None:
    """Print the table of the policies, if there are any. Those that break a rule are marked."""
    if not rows:
        return
    load = options.load
    batch = options.batch
    lengths = f"{load.prompt_len} + {load.output_len}"
    ratio = load.prompt_len / load.output_len
    marked = {}
    for name, row in rows.items():
        rule = violations[name].rule if name in violations else None
        marked[timing.mark(mark_broken(name, rule), row.busy)] = [
            ("tokens/s", row.tokens_per_s, ",.0f"),
            ("gain", row.gain, ".2fx"),
            ("whole run", row.whole_run_gain, ".2fx"),
            ("P50 TTFT s", row.summary.p50_ttft_s, ".2f"),
            ("P99 TBT s", row.summary.p99_tbt_s, ".3f"),
            ("longest stall s", row.summary.longest_stall_s, ".3f"),
            ("iterations", row.summary.iterations, ""),
            ("tokens/iteration", row.summary.tokens_per_iteration, ".0f"),
        ]
    print(
        f"2. End to end: {options.requests} requests of {lengths} tokens "
        f"(P:D {ratio:.0f}; the first {batch} want 1/{batch}, 2/{batch}, ...\n"
        f"   of the output), batch {batch}, chunk {options.chunk}, all there at time 0\n\n"
        f"{format_table('policy', marked)}\n\n"
        "tokens/s (prompt and output) and gain over request-level are those of a full pipeline: "
        "whole rounds\n"
        f"of {batch} requests, after the first (-: fewer than {2 * batch + 1}); whole run: gain "
        "with ramp and tail; a stall is\n"
        "a gap between two tokens with others' prefill in it\n"
    )


def equal_tokens_line(rows: Mapping[str, PolicyRun], dtype: str | None) -> str:
    """For how many requests all policies generated the same tokens: chunks change no result."""
    outputs = [[c.output for c in row.run.completions] for row in rows.values()]
    requests = list(zip(*outputs, strict=True))
    equal = sum(tokens.count(tokens[0]) == len(tokens) for tokens in requests)
    line = f"same text under all {len(rows)} policies: {equal} of {len(requests)} requests"
    if equal == len(requests):
        return f"{line}, token for token"
    reason = f"in {dtype} a token's rounding depends on the batch that it is in"
    return f"{line}; {reason}, see test_equivalence.py"


def explain(model: GPT, rows: Mapping[str, PolicyRun], options: OfflineOptions) -> dict[str, Any]:
    """Print where the gain goes that the matrix products promise, and which step loses most.
    Returns what --json has of it."""
    load = options.load
    make_runner = runner_for(model)
    runner = make_runner(model, load.batch, load.seq_len, load.seq_len, options.model.attention)
    explanation = gain.explain_gain(runner, rows, options.chunk, load.batch)
    table = {
        step.name: [
            ("request-level", step.request_level_ms, ".4f"),
            ("sarathi", step.sarathi_ms, ".4f"),
            ("gain", step.gain, ".3fx"),
        ]
        for step in explanation.steps
    }
    loss = timing.TOO_BUSY
    if not explanation.busy:
        before, after = explanation.largest_loss
        cause = after.name.strip("+ ")
        loss = f"most is lost to {cause}, {before.gain:.2f}x to {after.gain:.2f}x"
    title = timing.mark("Where the gain goes", explanation.busy)
    print(f"{title}: the batches of both once more\n")
    print(format_table("ms per token", table))
    print(f"\n{loss}; the parts add up to the run's gain {explanation.difference:+.1%}\n")
    steps = [
        {"step": name} | {head: value for head, value, _ in cells} for name, cells in table.items()
    ]
    return {"steps": steps, "difference": explanation.difference, "busy": explanation.busy}


def conclude(
    table: DecodeMaximal,
    rows: Mapping[str, PolicyRun],
    chunk: int,
    violations: Mapping[str, Violation],
) -> str:
    """Three paragraphs to take home. One about a busy machine says that it was busy. If policies
    break a rule, a fourth names them."""
    rows_busy = any(row.busy for row in rows.values())
    stalls = ", ".join(f"{name} {row.summary.longest_stall_s:.3g} s" for name, row in rows.items())
    decode_only = f"{table.decode_only.decode_token_ms:.2f} ms in a batch of its own"
    riding = f"{table.decode_maximal.decode_token_ms:.2f} ms"
    if not table.speedup:
        riding = "less than the noise"
    throughput = f"bare products promise {table.promised_gain:.2f}x request-level's"
    sarathi = rows.get("sarathi")
    if sarathi and sarathi.gain:
        throughput += f", sarathi runs at {sarathi.gain:.2f}x"
    paragraphs = [
        ("3. Longest stalls, which chunks are for", stalls, rows_busy),
        ("   Cost of a decode", f"{decode_only}, {riding} riding with a chunk", table.busy),
        (f"   Throughput at chunk {chunk}", throughput, table.busy or rows_busy),
    ]
    if violations:
        broken = [f"{violation.rule!r} by {name}" for name, violation in violations.items()]
        paragraphs.append(("   Rules that were broken", ", ".join(broken), False))
    texts = []
    for subject, text, busy in paragraphs:
        paragraph = f"{subject}: {timing.TOO_BUSY if busy else text}."
        texts.append(textwrap.fill(paragraph, 100, subsequent_indent="   ", break_on_hyphens=False))
    return "\n".join(texts)
