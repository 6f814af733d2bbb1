"""SARATHI's claims on this machine: `bench.py --chunk 256`.

Prints what a decode costs alone and beside a prefill chunk (Table 2); then the policies end to end
at the balanced ratio of prefill to decode tokens, P:D = C / (B - 1); then a conclusion. Where other
programs use the machine, all is measured in CPU time on one thread. Read first: engine.py,
lab/measure/decode_cost.py and offline_load.py. Read next: serve.py, where requests arrive while
others run: Sarathi-Serve's half."""

import time
from argparse import Namespace
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
    plot_option,
    policies_option,
    whole,
    write_text,
)
from config import EngineConfig
from lab.commands.frame import reporting
from lab.commands.offline_report import (
    Costs,
    conclude,
    count_equal_texts,
    limits_line,
    print_costs,
    print_end_to_end,
    row_json,
)
from lab.measure import timing
from lab.measure.decode_cost import measure_decode_cost, measure_parts
from lab.measure.decode_maximal import table_2_batches
from lab.measure.machine_info import measure_machine
from lab.measure.offline_load import OfflineLoad, policy_runs, run_policies
from lab.measure.run_loop import Run
from lab.measure.run_plan import run_plan
from model import GPT, GPTConfig
from page.html import page
from page.records import Recorder
from parallel.stages import runner_for

DEFAULT_POLICIES = "request-level,orca-best,vllm,sarathi,sarathi-serve"
CPU_LAYERS = 2  # of a geometry on a CPU: each layer does the same work
CPU_S = 12  # of the pairs in CPU time
WALL_S = 4  # and in wall time
SERVE_S = 40  # of all policies together
LATE = 1.5  # times as long as was estimated, but LEAST_S: what is not done then is left out
LEAST_S = 15
MOST_ROUNDS = 5  # with a full batch


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
        report["decode_cost"] = print_costs(costs, model, machine, options.seq_len)
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
            print_end_to_end(
                rows, load, options.policies, chunk=options.chunk, in_cpu_time=in_cpu_time
            )
        conclusion = conclude(costs, rows, machine)
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
    max_requests = (MOST_ROUNDS + 1) * batch + 1
    seconds = seconds_to_serve(costs, options, options.load(max_requests))
    request_s = seconds / max_requests
    requests = int(SERVE_S / request_s)
    rounds = min((requests - 1) // batch, MOST_ROUNDS + 1)
    return max(rounds, 1) * batch + 1
