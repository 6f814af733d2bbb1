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
    write_json,
    write_text,
    wrote,
)
from cli.tables import Cell, format_table
from config import EngineConfig
from lab.measure import workload
from lab.measure.machine_info import measure_machine
from lab.measure.run_plan import run_plan
from lab.measure.timing import TOO_BUSY, mark
from lab.simulator.cost_model import FittedCost
from lab.simulator.machine import profile_cases
from lab.simulator.pipeline import (
    PipelineSummary,
    StageSummary,
    fit_stages,
    serve_pipeline,
    summarize,
)
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

    @property
    def makespan_off(self) -> float:
        """How far the simulated makespan is off, as a share."""
        return self.simulated.makespan_s / self.real.makespan_s - 1

    @property
    def bubbles_off(self) -> float | None:
        """How far the simulated bubbles are off, as a share; None if there were none."""
        if not self.real.bubbles_s:
            return None
        return self.simulated.bubbles_s / self.real.bubbles_s - 1

    def to_json(self) -> list[dict[str, object]]:
        """Both summaries."""
        return [self.real.to_json(), self.simulated.to_json()]


def run_cells(row: PipelineRow) -> list[Cell]:
    """The row of a policy."""
    return [
        ("tokens/s", row.real.tokens_per_s, ",.0f"),
        ("makespan", row.real.makespan_s, ".2f"),
        ("simulated", row.simulated.makespan_s, ".2f"),
        ("off", row.makespan_off, "+.0%"),
        ("bubbles", row.real.bubbles_s, ".2f"),
        ("simulated", row.simulated.bubbles_s, ".2f"),
        ("off", row.bubbles_off, "+.0%"),
        ("PB1", row.real.kinds_s["PB1"], ".2f"),
        ("PB2", row.real.kinds_s["PB2"], ".2f"),
        ("PB3", row.real.kinds_s["PB3"], ".2f"),
        ("median", row.real.median_bubble_s, ".2f"),
    ]


def stage_cells(stage: StageSummary) -> list[Cell]:
    """The row of a stage."""
    return [
        ("busy s", stage.busy_s, ".2f"),
        ("bubble s", stage.bubble_s, ".2f"),
        ("idle s", stage.idle_s, ".2f"),
        ("own", stage.own, ".1%"),
        ("sums", stage.sums, ".1%"),
    ]


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
    machine = measure_machine(model, options.model.name, options.chunk)
    page_size = min(64, options.max_len)
    cost = fit_cost(model, options, page_size)
    arrivals = make_arrivals(options)
    prompts = workload.prompts(arrivals, model.config.vocab_size, options.model.seed)
    print(machine.heading())
    rows: dict[str, PipelineRow] = {}
    stage_runs: dict[str, list[StageRun]] = {}
    try:
        for name, config in plan_configs(options, page_size).items():
            real = serve_pipeline(model, config, arrivals, prompts)
            simulated = simulate(cost, real.config, arrivals)
            summary = summarize(
                simulated.run, simulated.busy, simulated.bubbles, simulated.stage_runs
            )
            rows[name] = PipelineRow(real=real.summary, simulated=summary)
            stage_runs[name] = real.stage_runs
            stage_runs[f"{name}, simulated"] = simulated.stage_runs
    finally:
        if rows:
            conclusion = conclude(rows)
            print_rows(rows)
            print(conclusion)
            report = {
                "machine": machine.to_json(),
                "hop_s": cost.hop_s,
                "runs": {name: row.to_json() for name, row in rows.items()},
                "conclusion": conclusion,
            }
            write_json(options, report)
            if options.chrome_trace:
                write_text(options.chrome_trace, chrome_trace(stage_runs))
            if options.plot:
                draw_beginnings(rows, stage_runs, options.plot, machine.to_json())
            wrote(options.json, options.chrome_trace, options.plot)


def fit_cost(model: Shard, options: PipelineOptions, page_size: int) -> FittedCost:
    """The cost model of the stages, fitted to times of batches."""
    runner = ParallelRunner(
        model,
        pages=PROFILE_SLOTS * pages_of_request(options, page_size),
        page_size=page_size,
        max_len=options.max_len,
        attention=options.model.attention,
    )
    fitted, _ = profile_cases(options.max_len)
    return fit_stages(runner, tqdm(fitted, "profile", leave=False, disable=None))


def pages_of_request(options: PipelineOptions, page_size: int) -> int:
    """How many pages a request of max_len has."""
    return -(-options.max_len // page_size)


def plan_configs(options: PipelineOptions, page_size: int) -> dict[str, EngineConfig]:
    """The EngineConfig of each policy, with memory for full batches of the longest requests."""
    requests = options.model.pp * options.batch
    config = EngineConfig(
        chunk=options.chunk,
        max_batch=options.batch,
        max_len=options.max_len,
        page_size=page_size,
        pages=requests * pages_of_request(options, page_size),
        attention=options.model.attention,
    )
    return run_plan(options.policies, [page_size], config)


def make_arrivals(options: PipelineOptions) -> list[workload.Arrival]:
    """Requests of max_len / 4 to max_len tokens, which are all there at time 0."""
    lengths = workload.zipf_lengths(
        options.max_len // 4,
        options.max_len,
        ZIPF_THETA,
        options.pd_ratio,
        options.requests,
        options.model.seed,
    )
    return [workload.Arrival(0.0, prompt_len, output_len) for prompt_len, output_len in lengths]


def print_rows(rows: Mapping[str, PipelineRow]) -> None:
    """Print the tables of policies and of stages."""
    policies = {}
    stages = {}
    for policy, row in rows.items():
        name = mark(policy, row.real.busy)
        policies[name] = run_cells(row)
        for number_of_stage, stage in enumerate(row.real.stages, start=1):
            stages[f"{name}, {number_of_stage}"] = stage_cells(stage)
    print(format_table("seconds", policies))
    print(
        "\nbubbles: of all stages, by what is before and after: PB1, prefills of different length;"
        "\nPB2, a prefill and decodes; PB3, decodes of different context; median: of a request\n"
    )
    print(format_table("policy, stage", stages))
    print(
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


def chrome_trace(stage_runs: Mapping[str, Sequence[StageRun]]) -> str:
    """A trace for Perfetto: a process for each name, a track for each stage."""
    events = [
        trace_event(name, f"stage {run.stage + 1}", run)
        for name, runs in stage_runs.items()
        for run in runs
    ]
    return json.dumps({"traceEvents": events})


def trace_event(process: str, track: str, run: StageRun) -> dict[str, Any]:
    """A batch on a stage, as an event of a trace."""
    return {
        "name": f"micro-batch {run.micro_batch}",
        "pid": process,
        "tid": track,
        "ph": "X",  # a complete event
        "ts": 1e6 * run.start,
        "dur": 1e6 * (run.end - run.start),
        "args": {
            "chunks": [
                f"{chunk.request_id}: {chunk.length} from {chunk.start}" for chunk in run.chunks
            ]
        },
    }


def draw_beginnings(
    rows: Mapping[str, PipelineRow],
    stage_runs: Mapping[str, Sequence[StageRun]],
    file: str,
    machine: Mapping[str, object],
) -> None:
    """Draw how two of the runs begin, or all if these two are not there."""
    from lab.pictures.pipelines import plot_pipeline  # matplotlib takes a second

    names = []
    for name in compared_policies(rows) or rows:
        names += [name, f"{name}, simulated"]
    end_s = stage_runs[names[0]][:DRAWN][-1].end
    drawn = {name: [run for run in stage_runs[name] if run.end <= end_s] for name in names}
    kinds = {name: bubble_kinds(runs) for name, runs in drawn.items()}
    plot_pipeline(drawn, kinds, "The beginning of each run", file, machine, end_label="in")
