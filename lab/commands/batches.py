"""Single iterations, whole and by operation, as in SARATHI's Table 2 and Figures 3, 4 and 7.

    python bench.py batches 2048 2048/256 6x1@1024 "250@2048 + 6x1@1024"

times a prompt; the same prompt in chunks, one after another; six decodes that read 1,024 tokens
each; and a chunk beside them. The iteration is timed without the model's head, as in the papers;
its attention and its matrix products are also timed alone, by the names of SARATHI's Table 1.

    python bench.py batches --slo 0.3

times hybrid batches until it knows the largest token budget within that SLO (Sarathi-Serve §4.3).
Read first: lab/measure/batch_times.py, lab/measure/token_budget.py."""

import re
from argparse import ArgumentTypeError, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

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
    PerDevice,
    from_args,
    json_option,
    number,
    option,
    whole,
)
from cli.tables import Cell, format_table
from lab.commands.frame import reporting
from lab.measure import timing, token_budget
from lab.measure.batch_times import (
    Batch,
    BatchTime,
    SequenceTime,
    chunks_of,
    longest,
    time_sequences,
)
from lab.measure.capacity import time_steadily
from lab.measure.machine_info import measure_machine
from lab.measure.token_budget import Case, Profiled
from model import GPT
from parallel.stages import runner_for
from runtime.runner import Runner

NUMBER = r"([1-9]\d{0,6})"
CHUNKS = re.compile(
    rf"(?:{NUMBER}x)?{NUMBER}(?:@{NUMBER})?(?:/{NUMBER})?"
)  # "6x1@1024", "2048/256"
TIMES = re.compile(rf"(?:{NUMBER} *\*)?(.*)", re.DOTALL)  # "2 * 2048/256"


NOTE = (
    "the parts are timed alone; limit of attention: flops at the rate of the products, or K and V "
    "at the bandwidth,\n"
    "whichever takes longer; other: norms, rotation, activation, what lies between, embedding\n"
)


def named_sequence(text: str) -> tuple[str, list[Batch]]:
    """The type of one argument: the name of "name=2 * 2048/256 + 6x1@1024, 512", and its batches.

    "512" is a prompt, "1@1024" a decode that reads 1,024 tokens, "6x" repeats it for six requests,
    and "/256" cuts it into chunks, a batch for each. "+" puts requests into the same batch, "2 *"
    repeats the batches, and "," appends others. Without a name the text is the name."""
    name, _, sequences = text.rpartition("=")
    batches: list[Batch] = []
    for sequence in sequences.split(","):
        match = TIMES.fullmatch(sequence.strip())
        assert match  # it matches every text
        times, summands = match.groups()
        alternatives = [parse_chunks(summand.strip(), text) for summand in summands.split("+")]
        combined = [sum(parts, start=()) for parts in product(*alternatives)]
        batches += combined * int(times or 1)
    return name or text, batches


def parse_chunks(word: str, text: str) -> list[Batch]:
    """The batches of a word such as "6x1@1024" or "2048/256" in an argument `text`."""
    match = CHUNKS.fullmatch(word)
    if match:
        count, tokens, end, chunk = (int(number or 0) for number in match.groups())
        end = end or tokens
        if tokens <= end:
            return [batch * (count or 1) for batch in chunks_of(tokens, chunk or tokens, end)]
    raise ArgumentTypeError(f"{text:.60}: {word!r} must be like 6x1@1024 or 2048/256")


ONLY_BUDGET = ("decodes", "max_len", "tile")  # options that go with --slo


@dataclass(frozen=True, kw_only=True)
class BatchesOptions:
    """The options of `bench.py batches`."""

    command: str
    batches: list[tuple[str, list[Batch]]]  # names, and the batches that follow each other
    repeats: int = option("how often each is timed", type=whole(minimum=2), default=5)
    slo: float | None = option(
        "find the largest token budget within this SLO of the time between tokens, in seconds, "
        "instead",
        type=number(above=0),
    )
    decodes: int = option(
        "with --slo, requests that decode beside the chunk",
        type=whole(minimum=1),
        default=PerDevice(cpu=16, gpu=64),
    )
    max_len: int = option(
        "with --slo, the longest request and largest budget",
        type=whole(minimum=1),
        default=PerDevice(cpu=1024, gpu=8192),
    )
    tile: int = option(
        "with --slo, budgets are multiples of it",
        type=whole(minimum=1),
        default=PerDevice(cpu=32, gpu=128),
    )
    json: str | None = json_option()
    model: ModelOptions

    @property
    def contexts(self) -> list[int]:
        """Those of the decodes, and at the end of the chunk: a short and a long one."""
        return [max(1, self.max_len // 8), max(1, self.max_len // 2)]

    @property
    def whole_tile(self) -> int:
        """The tile, or the longest request if that is shorter."""
        return min(self.tile, self.max_len)


def add_options(parser: OptionParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "batches",
        help="each maybe with a name, as in 'chunks=2048/256'; 2 * 6x1@512 are twice six decodes",
        nargs="*",
        type=named_sequence,
    )
    parser.add_fields(BatchesOptions)
    add_layers_option(parser)
    add_model_options(
        parser,
        "llama-13b on a GPU with 40 GB or more, with --slo llama3-8b on one with 75; else "
        "llama-160m",
    )


def resolve(parser: OptionParser, args: Namespace) -> BatchesOptions:
    """The options. Exits with a message if two batches have one name, or if there is not one of
    batches and --slo."""
    names = dict(args.batches)
    if len(names) < len(args.batches):
        parser.error(f"batches: {len(args.batches)} have {len(names)} names, {', '.join(names)}")
    if (args.slo is None) == (not names):
        parser.error("batches: give some, as in 2048/256 6x1@1024, or else --slo")
    for name in ONLY_BUDGET:
        if args.slo is None and getattr(args, name) is not None:
            parser.error(f"--{name.replace('_', '-')}: goes with --slo")
    large = {"gpu_preset": "llama3-8b", "gpu_bytes": 75e9} if args.slo else {}
    model = resolve_model(model_options(args), **large)
    return from_args(BatchesOptions, args, model=model)


def main(options: BatchesOptions) -> None:
    """The command."""
    sequences = dict(options.batches)
    if options.slo is None:
        model = load_model(options.model, longest(sequences), positions_from="batch-length")
        rows = 256
    else:
        model = load_model(options.model, options.max_len, positions_from="--max-len")
        rows = options.whole_tile
    machine = measure_machine(model, options.model.title, rows, options.model.attention)
    print(machine.heading())
    report: dict[str, Any] = {"machine": machine.to_json()}
    with reporting(options, report):
        if options.slo is not None:
            find_budget(make_runner(model, options), options, options.slo, report)
            return
        report["batches"] = rows = time_sequences(
            model,
            machine,
            sequences,
            repeats=options.repeats,
            attention=options.model.attention,
        )
        print_batches(rows)


def find_budget(
    runner: Runner, options: BatchesOptions, slo_s: float, report: dict[str, Any]
) -> None:
    """Find the largest token budget within the SLO, and print the times that it rests on. What is
    timed when it is interrupted is printed, too, and is in the report."""
    profile: list[Profiled] = []

    def time_and_keep(runner: Runner, cases: Sequence[Case]) -> list[Profiled]:
        rows = time_steadily(runner, cases)
        profile.extend(rows)
        report["profile"] = [row._asdict() for row in profile]
        return rows

    try:
        budget, _ = token_budget.choose_budget(
            runner,
            slo_s,
            options.decodes,
            options.contexts,
            options.whole_tile,
            options.max_len,
            time_and_keep,
        )
    finally:
        if profile:
            print_profile(profile, options.decodes, slo_s)
    conclusion = (
        f"Token budget {budget}: the largest of whole tiles of {options.whole_tile} that "
        "meets the SLO."
    )
    if max(row.spread for row in profile) > timing.BUSY:
        budget = None
        conclusion = f"Token budget: {timing.TOO_BUSY}."
    print(conclusion)
    report |= {"budget": budget, "conclusion": conclusion}


def make_runner(model: GPT, options: BatchesOptions) -> Runner:
    """A runner with room for the decodes at the long context, and for the largest chunk."""
    page_size = min(64, options.max_len)
    decode_pages = -(-options.contexts[-1] // page_size) * options.decodes
    chunk_pages = -(-options.max_len // page_size)
    make = runner_for(model)
    return make(
        model, decode_pages + chunk_pages, page_size, options.max_len, options.model.attention
    )


def print_profile(profile: Sequence[Profiled], decodes: int, slo_s: float) -> None:
    """Print the table of what was timed: each budget with its times at both contexts, from the
    smallest to the largest."""
    ordered = sorted(profile)  # by budget, then by context
    rows = {}
    for short, long in zip(ordered[::2], ordered[1::2], strict=True):
        busy = max(short.spread, long.spread) > timing.BUSY
        meets_slo = max(short.seconds, long.seconds) <= slo_s
        rows[timing.mark(str(short.budget), busy)] = [
            ("prefill + decodes", f"{short.budget - decodes} + {decodes}", ""),
            (f"ms at {short.context}", 1e3 * short.seconds, ".1f"),
            (f"at {long.context}", 1e3 * long.seconds, ".1f"),
            (f"meets {1e3 * slo_s:.0f} ms", "yes" if meets_slo else "no", ""),
        ]
    print(format_table("token budget", rows) + "\n")


def print_batches(rows: Mapping[str, SequenceTime]) -> None:
    """Print the table of what was timed."""
    cells: dict[str, list[Cell]] = {}
    for name, row in rows.items():
        cells[timing.mark(name, row.busy)] = [
            ("tokens", row.tokens, ",d"),
            ("preproj", row.preproj_ms, ",.2f"),
            ("postproj", row.postproj_ms, ",.2f"),
            ("ffn_ln1", row.ffn_ln1_ms, ",.2f"),
            ("ffn_ln2", row.ffn_ln2_ms, ",.2f"),
            ("attention", row.attention_ms, ",.2f"),
            ("limit", row.attention_limit_ms, ",.2f"),
            ("other", row.other_ms, ",.2f"),
            ("total", row.total_ms, ",.2f"),
            ("spread", row.spread, ".0%"),
            ("tokens/ms", row.tokens_per_ms, ".3g"),
            *launch_cells(row),
        ]
    print(f"{format_table('ms', cells)}\n\n{NOTE}{launch_note(rows)}")


def launch_cells(row: BatchTime) -> list[Cell]:
    """The CPU's time to launch a batch, and the GPU's to compute it. [] on a CPU, which computes
    what it launches."""
    if row.device_ms is None:
        return []
    return [("launch", row.launch_ms, ",.2f"), ("device", row.device_ms, ",.2f")]


def launch_note(rows: Mapping[str, BatchTime]) -> str:
    """What these columns are, and which rows say more of the CPU than of the GPU."""
    if all(row.device_ms is None for row in rows.values()):
        return ""
    slow = [name for name, row in rows.items() if row.launch_bound]
    bound = f"bound by launches, not by the device: {', '.join(slow) or 'none'}"
    return (
        "launch: of the CPU, until all kernels are launched; device: of the GPU, when it need not "
        "wait for launches,\n"
        f"as are the parts; total: until the CPU has the tokens, with launches\n{bound}\n"
    )
