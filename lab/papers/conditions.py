"""Where a relation follows from the arithmetic: conditions on the device, for the checks of claims.

All are about its ridge: computing with a batch of so many rows takes as long as reading the
weights. Read first: checks.py. Read next: measured_batches.py."""

from lab.papers.bench import Bench
from lab.papers.checks import Condition

# Our choice. SARATHI's products promise 1.63x on an A6000 (B = 6, C = 256), and 1.22x to 1.33x come
# out: a third of the promise is left. Of 1.3x that would be 1.1x, which noise does not hide.
CLEAR_GAIN = 1.3


def ridge_above(bench: Bench, rows: float) -> Condition:
    """A batch of so many rows takes no longer than the reading of the weights."""
    ridge = bench.machine.ridge_tokens
    return Condition(f"the ridge is above {rows:g} rows", ridge > rows, f"it is at {ridge:.0f}")


def ridge_below(bench: Bench, rows: float) -> Condition:
    """A batch of so many rows takes longer than the reading of the weights."""
    ridge = bench.machine.ridge_tokens
    return Condition(f"the ridge is below {rows:g} rows", ridge < rows, f"it is at {ridge:.0f}")


def riding_pays(bench: Bench, batch: int, chunk: int) -> Condition:
    """Matrix products alone promise a clear gain of decode-maximal batches (SARATHI §4.4).

    The unit of time is a row; reading the weights takes `ridge` rows. A batch of `chunk` rows has
    batch - 1 decodes. Request-level computes its other rows with prompts, and the decodes in a
    fraction (batch - 1) / batch of an iteration of their own."""
    ridge = bench.machine.ridge_tokens
    riding = batch - 1
    request_level = chunk - riding + riding / batch * max(ridge, batch)
    gain = request_level / max(ridge, chunk)
    return Condition(
        f"products alone promise {CLEAR_GAIN:g}x with {batch} requests and chunks of {chunk}",
        gain >= CLEAR_GAIN,
        f"they promise {gain:.2f}x, as the ridge is at {bench.machine.ridge_tokens:.0f} rows",
    )


def has_tiles(bench: Bench) -> Condition:
    """Matrix products compute whole tiles of 128 rows."""
    return Condition(
        "matrix products compute whole tiles of 128 rows, as a GPU's do",
        bench.size == "gpu",
        "those of a CPU are smaller",
    )
