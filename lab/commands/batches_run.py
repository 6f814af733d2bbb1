"""How `bench.py batches` measures. What is timed when it is interrupted is printed and written.

Read first: batches.py."""

import re
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from cli.files import options_json
from cli.loading import load_model, resolve_model
from cli.model import ModelOptions
from cli.tables import Cell, format_table
from lab.commands.frame import reporting
from lab.commands.options import BatchesOptions
from lab.measure import timing, token_budget
from lab.measure.batch_times import (
    Batch,
    SequenceTime,
    chunks_of,
    longest,
    time_sequences,
)
from lab.measure.machine_info import measure_machine
from lab.measure.token_budget import Profiled
from parallel.stages import runner_for

NUMBER = r"([1-9]\d{0,6})"
CHUNKS = re.compile(rf"(?:{NUMBER}x)?{NUMBER}(?:@{NUMBER})?(?:/{NUMBER})?")  # "6x1@1024"
NOTE = (
    "the parts are timed alone; limit of attention: flops at the rate of the products, or K and V "
    "at the bandwidth,\n"
    "whichever takes longer; other: norms, rotation, activation, what lies between, embedding\n"
)


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
    report: dict[str, Any] = {
        "options": options_json(options, model_options) | {"batches": texts},
        "machine": machine.to_json(),
    }
    with reporting(options, report):
        rows = time_sequences(model, machine, sequences, attention=attention)
        report["batches"] = rows
        print_batches(rows)


def find_budget(slo_s: float, options: BatchesOptions, model_options: ModelOptions) -> None:
    """Find the largest token budget within the SLO, and print the times that it rests on."""
    model_options = resolve_model(model_options, gpu_preset="llama3-8b", gpu_bytes=75e9)
    on_gpu = str(model_options.device).startswith("cuda")
    decodes = options.decodes or (64 if on_gpu else 16)
    max_len = options.max_len or (8192 if on_gpu else 1024)
    tile = min(128 if on_gpu else 32, max_len)  # budgets are multiples of it
    contexts = [max(1, max_len // 8), max(1, max_len // 2)]  # of decodes, and where a chunk ends
    attention = model_options.attention
    model = load_model(model_options, max_len, positions_from="--max-len")
    machine = measure_machine(model, model_options.title, tile, attention)
    print(machine.heading())
    report: dict[str, Any] = {
        "options": options_json(options, model_options) | {"decodes": decodes, "max_len": max_len},
        "machine": machine.to_json(),
    }
    page_size = min(64, max_len)
    pages = -(-contexts[-1] // page_size) * decodes + -(-max_len // page_size)
    runner = runner_for(model)(model, pages, page_size, max_len, attention)
    profile: list[Profiled] = []

    def slowest(budget: int) -> float:
        """The seconds of a batch at the slower context."""
        cases = [(budget, context, decodes) for context in contexts]
        rows = token_budget.time_iterations(runner, cases)
        profile.extend(rows)
        report["profile"] = [row._asdict() for row in profile]
        return max(row.seconds for row in rows)

    with reporting(options, report):
        try:
            budget = token_budget.choose_budget(slowest, slo_s, decodes, tile, max_len)
        finally:
            if profile:
                print_profile(profile, decodes, slo_s)
        conclusion = (
            f"Token budget {budget}: the largest of whole tiles of {tile} that meets the SLO."
        )
        if max(row.spread for row in profile) > timing.BUSY:
            budget = None
            conclusion = f"Token budget: {timing.TOO_BUSY}."
        print(conclusion)
        report |= {"budget": budget, "conclusion": conclusion}


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
            *[(part, ms, ",.2f") for part, ms in row.parts_ms.items()],
            ("limit of attention", row.attention_limit_ms, ",.2f"),
            ("total", row.total_ms, ",.2f"),
            ("spread", row.spread, ".0%"),
            ("tokens/ms", row.tokens_per_ms, ".3g"),
            *[(name, ms, ",.2f") for name, ms in row.gpu_ms.items()],
        ]
    print(f"{format_table('ms', cells)}\n\n{NOTE}{launch_note(rows)}")


def launch_note(rows: Mapping[str, SequenceTime]) -> str:
    """What these columns are, and which rows say more of the CPU than of the GPU."""
    if not any(row.gpu_ms for row in rows.values()):
        return ""
    slow = [name for name, row in rows.items() if row.launch_bound]
    bound = f"bound by launches, not by the device: {', '.join(slow) or 'none'}"
    return (
        "launch: of the CPU, until all kernels are launched; device: of the GPU, when it need not "
        "wait for launches,\n"
        f"as are the parts; total: until the CPU has the tokens, with launches\n{bound}\n"
    )
