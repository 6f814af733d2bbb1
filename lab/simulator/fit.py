"""Constants of a device, fitted to measured times of a layer's matrix products.

`fit_products` searches the rate, the bandwidth, the launch time and the tile with which
`cost_model.product_seconds` predicts the measured times best. The A100's constants in devices.py
come from it. Read first: cost_model.py. Read next: examples/fit_device.py, which prints the result.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lab.measure.workload import TOKENS, FieldType, read_columns
from lab.simulator.cost_model import BYTES, matrices, product_seconds
from lab.simulator.devices import Device
from model import GPTConfig

# columns of Vidur's profiles, in the order of cost_model.matrices
COLUMNS = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
TILES = (1, 32, 64, 128, 256)
ROUNDS = 10  # of the search; each narrows the grid to a third on either side of its best point
GRID_POINTS = 9  # along each of the three constants

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


def is_milliseconds(value: float) -> bool:
    """Whether a measured time can be true."""
    return 1e-6 <= value <= 1e9


MILLISECONDS = FieldType("a number of ms from 1e-6 to 1e9", is_milliseconds)


def read_products(file: str | Path) -> tuple[IntArray, FloatArray]:
    """Read the measured times of a layer's products from a CSV file.

    The columns are num_tokens and COLUMNS, in ms. Returns the tokens, (rows,), and the seconds,
    (4, rows). Raises OSError, or ValueError that names file, line and column.
    """
    columns = {"num_tokens": TOKENS} | dict.fromkeys(COLUMNS, MILLISECONDS)
    tokens, *times_ms = np.array(read_columns(file, columns)).T
    return tokens.astype(int), np.array(times_ms) / 1e3


def product_errors(
    device: Device, config: GPTConfig, tokens: IntArray, seconds: FloatArray, tp: int = 1
) -> tuple[FloatArray, FloatArray]:
    """The errors |predicted / measured - 1| of a layer's products.

    Returns those of the sum of the four, (rows,), and those of each, (4, rows).
    """
    shapes = matrices(config, tp)
    predicted = np.array(
        [[product_seconds(device, int(n), *shape) for n in tokens] for shape in shapes]
    )
    errors_of_sum = abs(predicted.sum(axis=0) / seconds.sum(axis=0) - 1)
    errors_of_each = abs(predicted / seconds - 1)
    return errors_of_sum, errors_of_each


class FittedConstants(NamedTuple):
    """Constants of a device. The error comes first, so that the smallest of them fits best."""

    error: float  # the weighted mean of |log(predicted / measured)|
    flops_per_s: float
    bytes_per_s: float
    op_s: float
    tile: int


def fit_products(
    device: Device,
    config: GPTConfig,
    tokens: IntArray,
    seconds: FloatArray,
    tp: int = 1,
    tiles: Sequence[int] = TILES,
) -> Device:
    """The device with the rate, bandwidth, op_s and tile that fit the measured times best.

    The best constants have the least |log(predicted / measured)|. Each of the four products counts
    alike, and so does each doubling of the tokens.
    """
    order = np.argsort(tokens)
    tokens = tokens[order]
    seconds = seconds[:, order]
    shapes = np.array(matrices(config, tp), float)  # (4, 2)
    best = min(fit_with_tile(tile, shapes, tokens, seconds) for tile in tiles)
    return replace(
        device,
        flops_per_s=best.flops_per_s,
        bytes_per_s=best.bytes_per_s,
        op_s=best.op_s,
        tile=best.tile,
    )


def fit_with_tile(
    tile: int, shapes: FloatArray, tokens: IntArray, measured: FloatArray
) -> FittedConstants:
    """The constants that fit best with this tile.

    A grid over rate, bandwidth and op_s narrows around its best point. `shapes` are those of the
    products, (4, 2); `tokens` are sorted, (rows,); `measured` are seconds, (4, rows).
    """
    weights = shapes.prod(axis=1)[:, None]  # numbers in each matrix, (4, 1)
    flops = 2 * -(-tokens // tile) * tile * weights
    moved_bytes = BYTES * (weights + tokens * shapes.sum(axis=1)[:, None])
    row_weights = np.ones(len(tokens))
    if len(set(tokens)) > 2:
        row_weights = np.gradient(np.log(tokens))
    top_rate = (flops / measured).max()
    top_bandwidth = (moved_bytes / measured).max()
    ranges = [
        (top_rate / 2, top_rate),
        (top_bandwidth / 2, 2 * top_bandwidth),
        (0.0, measured.min()),
    ]
    best = FittedConstants(math.inf, top_rate, top_bandwidth, 0.0, tile)
    for _ in range(ROUNDS):
        axes = [np.linspace(low, high, GRID_POINTS) for low, high in ranges]
        for rate, bandwidth, op_s in product(*axes):
            predicted = op_s + np.maximum(flops / rate, moved_bytes / bandwidth)
            errors = abs(np.log(predicted / measured)).mean(axis=0)
            error = np.average(errors, weights=row_weights)
            best = min(best, FittedConstants(error, rate, bandwidth, op_s, tile))
        centers = (best.flops_per_s, best.bytes_per_s, best.op_s)
        ranges = [
            narrowed(low, high, center) for (low, high), center in zip(ranges, centers, strict=True)
        ]
    return best


def narrowed(low: float, high: float, center: float) -> tuple[float, float]:
    """A third of the range on either side of its best point; a rate stays above 0."""
    third = (high - low) / 3
    return max(center - third, center / 1e6), center + third
