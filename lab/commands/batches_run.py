"""How `bench.py batches` measures, and what it prints and writes.

Read first: batches.py."""

import re
from collections.abc import Mapping, Sequence
from itertools import product

from cli.files import options_json, write_json, wrote
from cli.loading import load_model, resolve_model
from cli.model import ModelOptions
from cli.tables import Cell, format_table
from lab.commands.options import BatchesOptions
from lab.measure import timing, token_budget
from lab.measure.batch_times import Batch, SequenceTime, chunks_of, longest, time_sequences
from lab.measure.machine_info import measure_machine
from lab.measure.token_budget import Profiled
from parallel.stages import runner_for

NUMBER = r"([1-9]\d{0,6})"
CHUNKS = re.compile(rf"(?:{NUMBER}x)?{NUMBER}(?:@{NUMBER})?(?:/{NUMBER})?")  # "6x1@1024"
NOTE = """
the parts are timed alone; limit of attention: flops at the rate of the products, or K and V at the
bandwidth, whichever takes longer; other: norms, rotation, activation, what lies between, embedding
"""
GPU_NOTE = """\
launch: of the CPU, until all kernels are launched; device: of the GPU, when it need not wait for
launches, as are the parts; total: until the CPU has the tokens, with launches
"""


def parse_batches(text: str) -> list[Batch]:
    """The batches of "2048/256 + 6x1@1024".

    "512" is a prompt, "1@1024" a decode that reads 1,024 tokens, "6x" repeats it for six requests,
    and "/256" cuts it into chunks, a batch for each. "+" puts requests into the same batch. Raises
    ValueError for another text."""
    alternatives = [parse_chunks(word.strip()) for word in text.split("+")]
    return [sum(parts, start=()) for parts in product(*alternatives)]


def parse_chunks(word: str) -> list[Batch]:
    """The batches of a word such as "6x1@1024" or "2048/256". Raises ValueError for another."""
    match = CHUNKS.fullmatch(word)
    if not match:
        raise ValueError(f"batches: {word!r} must be like 6x1@1024 or 2048/256")
    count, tokens, end, chunk = (int(number or 0) for number in match.groups())
    end = end or tokens
    if tokens > end:
        raise ValueError(f"batches: {word!r} has more tokens than it reads")
    return [batch * (count or 1) for batch in chunks_of(tokens, chunk or tokens, end)]


def time_batches(
    texts: Sequence[str], options: BatchesOptions, model_options: ModelOptions
) -> None:
    """Time the batches of each text, and print and write what they take."""
    sequences = {text: parse_batches(text) for text in texts}
    model_options = resolve_model(model_options)
    attention = model_options.attention
    model = load_model(model_options, longest(sequences), positions_from="batch-length")
    machine = measure_machine(model, model_options.title, 256, attention)
    print(machine.heading())
    rows = time_sequences(model, machine, sequences, attention=attention)
    print_batches(rows)
    report = {
        "options": options_json(options, model_options) | {"batches": texts},
        "machine": machine.to_json(),
        "batches": rows,
    }
    write_json(options.json, report)
    wrote(options.json)


def find_budget(slo_s: float, options: BatchesOptions, model_options: ModelOptions) -> None:
    """Find the largest token budget within the SLO, and print the times that it rests on."""
    model_options = resolve_model(model_options, gpu_preset="llama3-8b", gpu_bytes=75e9)
    on_gpu = str(model_options.device).startswith("cuda")
    decodes = 64 if on_gpu else 16
    max_len = options.max_len or (8192 if on_gpu else 1024)
    tile = min(128 if on_gpu else 32, max_len)  # budgets are multiples of it
    contexts = [max(1, max_len // 8), max(1, max_len // 2)]  # of decodes, and where a chunk ends
    attention = model_options.attention
    model = load_model(model_options, max_len, positions_from="--max-len")
    machine = measure_machine(model, model_options.title, tile, attention)
    print(machine.heading())
    page_size = min(64, max_len)
    pages = -(-contexts[-1] // page_size) * decodes + -(-max_len // page_size)
    runner = runner_for(model)(model, pages, page_size, max_len, attention)
    profile: list[Profiled] = []

    def slowest(budget: int) -> float:
        """The seconds of a batch at the slower context."""
        cases = [(budget, context, decodes) for context in contexts]
        rows = token_budget.time_iterations(runner, cases)
        profile.extend(rows)
        return max(row.seconds for row in rows)

    budget = token_budget.choose_budget(slowest, slo_s, decodes, tile, max_len)
    print_profile(profile, slo_s)
    conclusion = f"Token budget {budget}: the largest of whole tiles of {tile} that meets the SLO."
    if max(row.spread for row in profile) > timing.BUSY:
        budget = None
        conclusion = f"Token budget: {timing.TOO_BUSY}."
    print(conclusion)
    report = {
        "options": options_json(options, model_options) | {"decodes": decodes, "max_len": max_len},
        "machine": machine.to_json(),
        "profile": [row._asdict() for row in profile],
        "budget": budget,
        "conclusion": conclusion,
    }
    write_json(options.json, report)
    wrote(options.json)


def print_profile(profile: Sequence[Profiled], slo_s: float) -> None:
    """Print the table of what was timed, from the smallest budget to the largest."""
    rows: dict[str, list[Cell]] = {}
    for row in sorted(profile):
        name = f"{row.budget} at {row.context}"
        rows[timing.mark(name, row.spread > timing.BUSY)] = [
            ("prefill + decodes", f"{row.budget - row.decodes} + {row.decodes}", ""),
            ("ms", 1e3 * row.seconds, ".1f"),
            (f"meets {1e3 * slo_s:.0f} ms", "yes" if row.seconds <= slo_s else "no", ""),
        ]
    print(format_table("budget at context", rows) + "\n")


def print_batches(rows: Mapping[str, SequenceTime]) -> None:
    """Print the table of what was timed. On a GPU it says which rows tell more of the CPU."""
    cells: dict[str, list[Cell]] = {}
    for name, row in rows.items():
        cells[timing.mark(name, row.busy)] = [
            ("tokens", row.tokens, ",d"),
            *((part, part_ms, ",.2f") for part, part_ms in row.parts_ms.items()),
            ("limit of attention", row.attention_limit_ms, ",.2f"),
            ("total", row.total_ms, ",.2f"),
            ("spread", row.spread, ".0%"),
            ("tokens/ms", row.tokens_per_ms, ".3g"),
            *((part, part_ms, ",.2f") for part, part_ms in row.gpu_ms.items()),
        ]
    print(f"{format_table('ms', cells)}\n{NOTE}")
    slow = [name for name, row in rows.items() if row.launch_bound]
    if any(row.gpu_ms for row in rows.values()):
        print(f"{GPU_NOTE}bound by launches, not by the device: {', '.join(slow) or 'none'}\n")
