"""Real bubbles: a pipeline of processes on this machine, and the same load simulated beside it.

    torchrun --nproc-per-node 2 bench.py pipeline --pp 2

Requests of unequal length are all there at the start (SARATHI §5.3, scaled down). Each stage
reports what it computed when. The time that it waited is a bubble, of one of three kinds (§3.2).
The cost model is fitted to batches that are timed on each stage while the others work, too. Read
first: lab/simulator/pipeline.py."""

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from cli.loading import ModelOptions, add_model_options, load_model, model_options, resolve_model
from cli.options import (
    OptionParser,
    PerDevice,
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
from cli.tables import Cell, format_table
from config import EngineConfig
from lab.commands.frame import reporting
from lab.measure import workload
from lab.measure.machine_info import measure_machine
from lab.measure.run_plan import run_plan
from lab.measure.timing import TOO_BUSY, mark
from lab.simulator.cost_model import FittedCost
from lab.simulator.machine import profile_cases
from lab.simulator.pipeline import PipelineSummary, fit_stages, serve_pipeline, summarize
from lab.simulator.simulation import bubble_kinds, simulate
from parallel.shard import Shard
from parallel.stages import ParallelRunner
from policies.micro_batches import StageRun

POLICIES = (
    "request-level,orca-best,vllm,sarathi,sarathi-serve:128,sarathi-serve:256"  # comma-separated
)
ZIPF_THETA = 0.4  # of the lengths, SARATHI §5.3
PROFILE_SLOTS = 18  # requests of max_len whose memory the timed batches have
DRAWN = 40  # batches on any stage


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """The options of `bench.py pipeline`."""

    command: str
    policies: list[str] = policies_option(POLICIES)
    chunk: int = chunk_option()
    batch: int = option(
        "B, the most requests at once in each micro-batch",
        type=whole(minimum=1),
        default=PerDevice(cpu=27, gpu=6),
    )
    max_len: int = option(
        "L: requests have L/4 to L tokens",
        type=whole(minimum=16),
        default=PerDevice(cpu=1024, gpu=4096),
    )
    requests: int = option(
        "how many there are",
        type=whole(minimum=1, maximum=1_000_000),
        default=PerDevice(cpu=80, gpu=500),
    )
    pd_ratio: float = option("prompt tokens per output token", type=number(above=0), default=10.0)
    plot: str | None = plot_option("draw some of the batches, real and simulated")
    chrome_trace: str | None = file_option(
        "write what each stage did when, for Perfetto or chrome://tracing"
    )
    json: str | None = json_option()
    model: ModelOptions


@dataclass(frozen=True)
class PipelineRow:
    """A policy on this machine, and simulated."""

    real: PipelineSummary
    simulated: PipelineSummary


def add_options(parser: OptionParser) -> None:
    """Add the options of the command."""
    parser.add_fields(PipelineOptions)
    add_model_options(parser, "llama-13b on a GPU with 40 GB or more, else llama-160m")


def resolve(parser: OptionParser, args: Namespace) -> PipelineOptions:
    """The options, with those filled in that depend on the device. Exits with a message if there is
    no pipeline."""
    if args.pp * args.tp < 2:
        parser.error("--pp 1: a pipeline has two stages or more (--tp 2 shows what sums cost)")
    return from_args(PipelineOptions, args, model=model_options(args))


def main(options: PipelineOptions) -> None:
    """The command. What is done when rank 0 is interrupted is printed and kept."""
    options = replace(options, model=resolve_model(options.model))  # in all processes
    model = load_model(options.model, options.max_len, positions_from="--max-len")
    assert isinstance(model, Shard)  # there are several processes
    machine = measure_machine(model, options.model.name, options.chunk, options.model.attention)
    config = make_config(options)
    cost = fit_cost(model, config)
    lengths = workload.zipf_lengths(
        options.max_len // 4,
        options.max_len,
        ZIPF_THETA,
        options.pd_ratio,
        options.requests,
        options.model.seed,
    )
    arrivals = [workload.Arrival(0.0, prompt_len, output_len) for prompt_len, output_len in lengths]
    prompts = workload.prompts(arrivals, model.config.vocab_size, options.model.seed)
    print(machine.heading())
    rows: dict[str, PipelineRow] = {}
    stage_runs: dict[str, list[StageRun]] = {}
    report: dict[str, Any] = {"machine": machine.to_json(), "hop_s": cost.hop_s}

    def show() -> None:
        report["conclusion"] = conclude(rows)
        print_rows(rows)
        print(report["conclusion"])

    def write_trace(file: str) -> None:
        events = [
            trace_event(name, f"stage {run.stage + 1}", run)
            for name, runs in stage_runs.items()
            for run in runs
        ]
        write_text(file, json.dumps({"traceEvents": events}))

    def draw(file: str) -> None:
        draw_beginnings(compared_policies(rows) or [*rows], stage_runs, file, report["machine"])

    with reporting(options, report, show, chrome_trace=write_trace, plot=draw):
        for name, each in run_plan(options.policies, [config.page_size or 1], config).items():
            real = serve_pipeline(model, each, arrivals, prompts)
            simulated = simulate(cost, real.config, arrivals)
            stage_runs[name] = real.stage_runs
            runs = stage_runs[f"{name}, simulated"] = simulated.stage_runs
            summary = summarize(simulated.run, simulated.busy, simulated.bubbles, runs)
            rows[name] = PipelineRow(real=real.summary, simulated=summary)
            report.setdefault("runs", {})[name] = [real.summary.to_json(), summary.to_json()]


def make_config(options: PipelineOptions) -> EngineConfig:
    """The EngineConfig, without a policy, with memory for full batches of the longest requests."""
    page_size = min(64, options.max_len)
    return EngineConfig(
        chunk=options.chunk,
        max_batch=options.batch,
        max_len=options.max_len,
        page_size=page_size,
        pages=options.model.pp * options.batch * -(-options.max_len // page_size),
        attention=options.model.attention,
    )


def fit_cost(model: Shard, config: EngineConfig) -> FittedCost:
    """The cost model of the stages, fitted to times of batches."""
    max_len = config.max_len or 0
    page_size = config.page_size or 1
    pages = PROFILE_SLOTS * -(-max_len // page_size)
    runner = ParallelRunner(model, pages, page_size, max_len, config.attention)
    fitted, _ = profile_cases(max_len)
    return fit_stages(runner, tqdm(fitted, "profile", leave=False, disable=None))


def print_rows(rows: Mapping[str, PipelineRow]) -> None:
    """Print the tables of policies and of stages."""

    def off(simulated: float, real: float) -> float | None:
        return simulated / real - 1 if real else None

    policies: dict[str, list[Cell]] = {}
    stages: dict[str, list[Cell]] = {}
    for policy, row in rows.items():
        real = row.real
        simulated = row.simulated
        name = mark(policy, real.busy)
        policies[name] = [
            ("tokens/s", real.tokens_per_s, ",.0f"),
            ("makespan", real.makespan_s, ".2f"),
            ("simulated", simulated.makespan_s, ".2f"),
            ("off", off(simulated.makespan_s, real.makespan_s), "+.0%"),
            ("bubbles", real.bubbles_s, ".2f"),
            ("simulated", simulated.bubbles_s, ".2f"),
            ("off", off(simulated.bubbles_s, real.bubbles_s), "+.0%"),
            *((kind, seconds, ".2f") for kind, seconds in real.kinds_s.items()),
            ("median", real.median_bubble_s, ".2f"),
        ]
        for number_of_stage, stage in enumerate(real.stages, start=1):
            stages[f"{name}, {number_of_stage}"] = [
                ("busy s", stage.busy_s, ".2f"),
                ("bubble s", stage.bubble_s, ".2f"),
                ("idle s", stage.idle_s, ".2f"),
                ("own", stage.own, ".1%"),
                ("sums", stage.sums, ".1%"),
            ]
    print(
        f"{format_table('seconds', policies)}\n"
        "\nbubbles: of all stages, by what is before and after: PB1, prefills of different length;"
        "\nPB2, a prefill and decodes; PB3, decodes of different context; median: of a request\n\n"
        f"{format_table('policy, stage', stages)}\n"
        "\nidle: all else, at the start, at the end, between batches; own: scheduling, messages,"
        "\nPython, and sums: all-reduces with their waiting, as shares of busy\n"
    )


def compared_policies(rows: Mapping[str, PipelineRow]) -> list[str]:
    """orca-best, and the stall-free schedule that ends first; [] unless both were run."""
    stall_free = [name for name in rows if name.startswith("sarathi-serve")]
    if not stall_free or "orca-best" not in rows:
        return []
    return ["orca-best", min(stall_free, key=lambda name: rows[name].real.makespan_s)]


def conclude(rows: Mapping[str, PipelineRow]) -> str:
    """What chunks change in a pipeline."""
    names = compared_policies(rows)
    if not names:
        return "Conclusion: needs orca-best and sarathi-serve."
    orca, sarathi = (rows[name].real for name in names)
    if orca.busy or sarathi.busy:
        return f"Conclusion: {TOO_BUSY}."
    bubbles = orca.median_bubble_s / (sarathi.median_bubble_s or 1)
    makespan = orca.makespan_s / (sarathi.makespan_s or 1)
    return (
        f"{names[1]} beside orca-best: the median bubble of a request is {bubbles:.1f}x smaller, "
        f"the makespan {makespan:.2f}x shorter."
    )


def trace_event(process: str, track: str, run: StageRun) -> dict[str, Any]:
    """A batch on a stage, as an event of a trace for Perfetto."""
    chunks = [f"{chunk.request_id}: {chunk.length} from {chunk.start}" for chunk in run.chunks]
    return {
        "name": f"micro-batch {run.micro_batch}",
        "pid": process,
        "tid": track,
        "ph": "X",  # a complete event
        "ts": 1e6 * run.start,
        "dur": 1e6 * (run.end - run.start),
        "args": {"chunks": chunks},
    }


def draw_beginnings(
    names: Sequence[str],
    stage_runs: Mapping[str, Sequence[StageRun]],
    file: str,
    machine: Mapping[str, object],
) -> None:
    """Draw how the runs of these policies begin, real and simulated."""
    from lab.pictures.pipelines import plot_pipeline  # matplotlib takes a second

    end_s = stage_runs[names[0]][:DRAWN][-1].end
    beginnings = {
        each: [run for run in stage_runs[each] if run.end <= end_s]
        for name in names
        for each in (name, f"{name}, simulated")
    }
    kinds = {name: bubble_kinds(runs) for name, runs in beginnings.items()}
    plot_pipeline(beginnings, kinds, "The beginning of each run", file, machine, end_label="in")
