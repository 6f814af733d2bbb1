"""Pick a token budget for a TBT SLO on this machine (Sarathi-Serve §4.3).

    python bench.py budget --slo-tbt 0.3

Read first: lab/measure/token_budget.py, which times hybrid batches and chooses the budget. This
command prints the times that the choice rests on."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cli.loading import ModelOptions, add_model_options, load_model, model_options, resolve_model
from cli.options import (
    OptionParser,
    PerDevice,
    from_args,
    json_option,
    keeping,
    number,
    option,
    whole,
)
from cli.tables import format_table
from lab.measure import timing, token_budget
from lab.measure.capacity import time_steadily
from lab.measure.machine_info import measure_machine
from lab.measure.token_budget import Case, Profiled
from model import GPT
from parallel import runner_for
from speedups.runner import Runner


@dataclass(frozen=True, kw_only=True)
class BudgetOptions:
    """The options of `bench.py budget`."""

    command: str
    slo_tbt: float = option(
        "the SLO of the time between tokens, in seconds; required",
        type=number(above=0),
        required=True,
    )
    decodes: int = option(
        "requests that decode beside the chunk",
        type=whole(minimum=1),
        default=PerDevice(cpu=16, gpu=64),
    )
    max_len: int = option(
        "the longest request and largest budget",
        type=whole(minimum=1),
        default=PerDevice(cpu=1024, gpu=8192),
    )
    tile: int = option(
        "budgets are multiples of it", type=whole(minimum=1), default=PerDevice(cpu=32, gpu=128)
    )
    json: str | None = json_option()
    contexts: list[int]  # of the decodes, and at the end of the chunk: a short and a long one
    model: ModelOptions


def add_options(parser: OptionParser) -> None:
    """Add the options of the command."""
    parser.add_fields(BudgetOptions)
    add_model_options(parser, "llama3-8b on a GPU with 75 GB or more, else llama-160m")


def resolve(parser: OptionParser, args: Namespace) -> BudgetOptions:
    """The options, with those filled in that depend on the device."""
    model = resolve_model(model_options(args), gpu_preset="llama3-8b", gpu_bytes=75e9)
    options = from_args(BudgetOptions, args, model=model, contexts=[])
    max_len = options.max_len
    contexts = [max(1, max_len // 8), max(1, max_len // 2)]
    return replace(options, tile=min(options.tile, max_len), contexts=contexts)


def main(options: BudgetOptions) -> None:
    """The command. What is timed when it is interrupted is printed and kept."""
    model = load_model(options.model, options.max_len, positions_from="--max-len")
    machine = measure_machine(model, options.model.name, options.tile)
    print(machine.heading())
    profile: list[Profiled] = []
    report: dict[str, object] = {"machine": machine.to_json()}

    def time_and_keep(runner: Runner, cases: Sequence[Case]) -> list[Profiled]:
        rows = time_steadily(runner, cases)
        profile.extend(rows)
        report["profile"] = [row._asdict() for row in profile]
        return rows

    with keeping(options, report):
        try:
            budget, _ = token_budget.choose_budget(
                make_runner(model, options),
                options.slo_tbt,
                options.decodes,
                options.contexts,
                options.tile,
                options.max_len,
                time_and_keep,
            )
        finally:
            if profile:
                print_profile(profile, options)
        conclusion = (
            f"Token budget {budget}: the largest of whole tiles of {options.tile} that meets the "
            "SLO."
        )
        if max(row.spread for row in profile) > timing.BUSY:
            budget = None
            conclusion = f"Token budget: {timing.TOO_BUSY}."
        print(conclusion)
        report |= {"budget": budget, "conclusion": conclusion}


def make_runner(model: GPT, options: BudgetOptions) -> Runner:
    """A runner with room for the decodes at the long context, and for the largest chunk."""
    page_size = min(64, options.max_len)
    decode_pages = -(-options.contexts[-1] // page_size) * options.decodes
    chunk_pages = -(-options.max_len // page_size)
    make = runner_for(model)
    return make(
        model, decode_pages + chunk_pages, page_size, options.max_len, options.model.attention
    )


def print_profile(profile: Sequence[Profiled], options: BudgetOptions) -> None:
    """Print the table of what was timed: each budget with its times at both contexts, from the
    smallest to the largest."""
    short_context, long_context = options.contexts
    ordered = sorted(profile)  # by budget, then by context
    rows = {}
    for short, long in zip(ordered[::2], ordered[1::2], strict=True):
        busy = max(short.spread, long.spread) > timing.BUSY
        meets_slo = max(short.seconds, long.seconds) <= options.slo_tbt
        sizes = f"{short.budget - options.decodes} + {options.decodes}"
        rows[timing.mark(str(short.budget), busy)] = [
            ("prefill + decodes", sizes, ""),
            (f"ms at {short_context}", 1e3 * short.seconds, ".1f"),
            (f"at {long_context}", 1e3 * long.seconds, ".1f"),
            (f"meets {1e3 * options.slo_tbt:.0f} ms", "yes" if meets_slo else "no", ""),
        ]
    print(format_table("token budget", rows) + "\n")
