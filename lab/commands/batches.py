"""Single iterations, whole and by operation, as in SARATHI's Table 2 and Figures 3, 4 and 7.

    python bench.py batches 2048 2048/256 6x1@1024 "250@2048 + 6x1@1024"

times a prompt; the same prompt in chunks, one after another; six decodes that read 1,024 tokens
each; and a chunk beside them. The iteration is timed without the model's head, as in the papers;
its attention and its matrix products are also timed alone, by the names of SARATHI's Table 1. Read
first: lab/measure/batch_times.py."""

import re
from argparse import ArgumentTypeError, Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from cli.loading import (
    ModelOptions,
    add_layers_option,
    add_model_options,
    load_model,
    model_options,
    resolve_model,
)
from cli.options import OptionParser, from_args, json_option, option, whole, write_json, wrote
from cli.tables import Cell, format_table
from lab.measure import timing
from lab.measure.batch_times import (
    Batch,
    BatchTime,
    SequenceTime,
    chunks_of,
    longest,
    time_sequences,
)
from lab.measure.machine_info import measure_machine

NUMBER = r"([1-9]\d{0,6})"
CHUNKS = re.compile(
    rf"(?:{NUMBER}x)?{NUMBER}(?:@{NUMBER})?(?:/{NUMBER})?"
)  # "6x1@1024", "2048/256"
TIMES = re.compile(rf"(?:{NUMBER} *\*)?(.*)", re.DOTALL)  # "2 * 2048/256"


def cells_of(row: SequenceTime) -> list[Cell]:
    """The row of a table."""
    return [
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
    ]


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


@dataclass(frozen=True, kw_only=True)
class BatchesOptions:
    """The options of `bench.py batches`."""

    command: str
    batches: list[tuple[str, list[Batch]]]  # names, and the batches that follow each other
    repeats: int = option("how often each is timed", type=whole(minimum=2), default=5)
    json: str | None = json_option()
    batch_length: int  # of the longest request
    model: ModelOptions


def add_options(parser: OptionParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "batches",
        help="each maybe with a name, as in 'chunks=2048/256'; 2 * 6x1@512 are twice six decodes",
        nargs="+",
        type=named_sequence,
    )
    parser.add_fields(BatchesOptions)
    add_layers_option(parser)
    add_model_options(parser, "llama-13b on a GPU with 40 GB or more, else llama-160m")


def resolve(parser: OptionParser, args: Namespace) -> BatchesOptions:
    """The options. Exits with a message if two batches have one name."""
    names = dict(args.batches)
    if len(names) < len(args.batches):
        parser.error(f"batches: {len(args.batches)} have {len(names)} names, {', '.join(names)}")
    model = resolve_model(model_options(args))
    return from_args(BatchesOptions, args, batch_length=longest(names), model=model)


def main(options: BatchesOptions) -> None:
    """The command."""
    model = load_model(options.model, options.batch_length, positions_from="batch-length")
    machine = measure_machine(model, options.model.title, rows=256)
    rows = time_sequences(
        model,
        machine,
        dict(options.batches),
        repeats=options.repeats,
        attention=options.model.attention,
    )
    print(machine.heading())
    print_batches(rows)
    report = {"machine": machine.to_json()}
    report["batches"] = {name: row.to_json() for name, row in rows.items()}
    write_json(options, report)
    wrote(options.json)


def print_batches(rows: Mapping[str, SequenceTime]) -> None:
    """Print the table of what was timed."""
    marked = {
        timing.mark(name, row.busy): [*cells_of(row), *launch_cells(row)]
        for name, row in rows.items()
    }
    print(f"{format_table('ms', marked)}\n\n{NOTE}{launch_note(rows)}")


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
