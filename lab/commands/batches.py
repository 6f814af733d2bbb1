"""Single iterations, whole and by operation, as in SARATHI's Table 2 and Figures 3, 4 and 7.

    python bench.py batches 2048 2048/256 6x1@1024 "250@2048 + 6x1@1024"

times a prompt; the same prompt in chunks, one after another; six decodes that read 1,024 tokens
each; and a chunk beside them. The iteration is timed without the model's head, as in the papers;
its attention and its matrix products are also timed alone, by the names of SARATHI's Table 1.

    python bench.py batches --slo 0.3

times hybrid batches until it knows the largest token budget within that SLO (Sarathi-Serve §4.3).
Read first: lab/measure/batch_times.py, lab/measure/token_budget.py. Read next: batches_run.py."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.types import PositiveFloat, PositiveInt

from cli.model import ModelOptions


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class BatchesOptions:
    """The options of `bench.py batches`."""

    slo: PositiveFloat | None = None
    """Find the largest token budget within this SLO of the time between tokens, in seconds,
    instead."""
    decodes: PositiveInt | None = None
    """With --slo, requests that decode beside the chunk. [default: 16 on a CPU, 64 on a GPU]"""
    max_len: PositiveInt | None = None
    """With --slo, the longest request and largest budget. [default: 1024 on a CPU, 8192 on a
    GPU]"""
    json: Path | None = None
    """Write all that is printed, with these options."""


def main(
    *batches: Annotated[str, Parameter(help='Such as 2048, 2048/256 or "250@2048 + 6x1@1024".')],
    options: BatchesOptions = BatchesOptions(),
    model: ModelOptions = ModelOptions(),
) -> None:
    """What single batches take, by operation; or the largest token budget within --slo."""
    from lab.commands.batches_run import find_budget, time_batches

    if (options.slo is None) == (not batches):
        raise ValueError("batches: give some, as in 2048/256 6x1@1024, or else --slo")
    if options.slo is None:
        time_batches(batches, options, model)
    else:
        find_budget(options.slo, options, model)
