"""Single iterations, whole and by operation, as in SARATHI's Table 2 and Figures 3, 4 and 7.

    python bench.py batches 2048 2048/256 6x1@1024 "250@2048 + 6x1@1024"

times a prompt; the same prompt in chunks, one after another; six decodes that read 1,024 tokens
each; and a chunk beside them. The iteration is timed without the model's head, as in the papers;
its attention and its matrix products are also timed alone, by the names of SARATHI's Table 1.

    python bench.py batches --slo 0.3

times hybrid batches until it knows the largest token budget within that SLO (Sarathi-Serve §4.3).
Read first: lab/measure/batch_times.py, lab/measure/token_budget.py. Read next: batches_run.py."""

from typing import Annotated

from cyclopts import Parameter

from cli.model import ModelOptions
from lab.commands.options import BatchesOptions


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
