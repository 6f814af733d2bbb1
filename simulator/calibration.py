"""Constants of a device from measured times: of matrix products in a CSV, or of batches run here.

    python bench.py fit times.csv       the constants that fit best, and the errors that are left

Read first: cost_model.py.
"""

import math
from dataclasses import replace
from itertools import product

import numpy as np

from experiments.options import whole
from experiments.tables import print_table
from experiments.workload import TOKENS, read_columns
from policies.iteration_time import BatchShape, IterationTime
from simulator.cost_model import BYTES, CostModel, matrices, product_seconds
from simulator.devices import DEVICES, GEOMETRIES, find

# columns of Vidur's profiles, in the order of cost_model.matrices
COLUMNS = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
MILLISECONDS = "a number of ms from 1e-6 to 1e9", lambda x: 1e-6 <= x <= 1e9


def read_products(file):
    """(tokens, seconds) of a layer's products, (rows,) and (4, rows): a CSV with num_tokens and the
    COLUMNS, in ms. Raises ValueError, naming file, line and column, if it is not that, OSError."""
    columns = {"num_tokens": TOKENS} | dict.fromkeys(COLUMNS, MILLISECONDS)
    tokens, *times = np.array(read_columns(file, columns)).T
    return tokens.astype(int), np.array(times) / 1e3


def product_errors(device, config, tokens, times, tp=1):
    """|predicted / measured - 1| of a layer's products: in sum, (rows,), and of each, (4, rows)."""
    shapes = matrices(config, tp).values()
    seconds = [[product_seconds(device, int(n), *shape) for n in tokens] for shape in shapes]
    return abs(np.sum(seconds, axis=0) / times.sum(axis=0) - 1), abs(seconds / times - 1)


def fit_products(device, config, tokens, times, tp=1, tiles=(1, 32, 64, 128, 256)):
    """The device with the rate, bandwidth, op_s and tile that fit measured times best: with the
    least |log(predicted / measured)|; each product and doubling of the tokens counts alike. For
    every tile, a grid over the three others narrows around its best point."""
    order, found = np.argsort(tokens), []
    tokens, measured = tokens[order], times[:, order]
    shapes = np.array(list(matrices(config, tp).values()), float)  # (4, 2)
    counts = np.gradient(np.log(tokens)) if len(set(tokens)) > 2 else np.ones(len(tokens))
    weights = shapes.prod(axis=1)[:, None]
    moved = BYTES * (weights + tokens * shapes.sum(axis=1)[:, None])
    for tile in tiles:
        flops = 2 * -(-tokens // tile) * tile * weights
        rate, bandwidth, best = (flops / measured).max(), (moved / measured).max(), (math.inf,)
        spans = [(rate / 2, rate), (bandwidth / 2, 2 * bandwidth), (0.0, measured.min())]
        for _ in range(10):
            for rate, bandwidth, op_s in product(*(np.linspace(*span, 9) for span in spans)):
                seconds = op_s + np.maximum(flops / rate, moved / bandwidth)
                error = np.average(abs(np.log(seconds / measured)).mean(axis=0), weights=counts)
                best = min(best, (error, rate, bandwidth, op_s, tile))
            thirds = [(x, (high - low) / 3) for x, (low, high) in zip(best[1:], spans)]
            spans = [(max(x - third, x / 1e6), x + third) for x, third in thirds]  # a rate is not 0
        found.append(best)
    _, rate, bandwidth, op_s, tile = min(found)
    return replace(device, flops_per_s=rate, bytes_per_s=bandwidth, op_s=op_s, tile=tile)


class FittedCost:
    """The cost of iterations on this machine: the law of a profile, [(BatchShape, seconds)]."""

    pp, cpu_s, tile = 1, 0.0, 1

    def __init__(self, profile):
        self.law = IterationTime(profile)

    def stages(self, batch):
        """As CostModel.stages, of chunks whose requests have not moved on."""
        return [self.law.predict(BatchShape.of(batch))], 0.0

    seconds = CostModel.seconds

    def describe(self):
        """The law, in words."""
        base, token, decode, key, pair = (1e3 * coefficient for coefficient in self.law.law)
        tokens = f"{base:.1f} ms, {token:.3f} per prefill token,\n{decode:.2f} per decode"
        keys = f"{1e3 * key:.2f} per 1,000 keys of a decode"
        return f"{tokens}, {keys}, {1e3 * pair:.3f} per 1,000 pairs of a chunk"


def add_options(parser):
    """The options of `fit`."""
    parser.add_argument("file", help=f"CSV with num_tokens and, in ms, {', '.join(COLUMNS)}")
    parser.add("--model", "whose layer was measured", "llama-7b")
    parser.add("--tp", "on one of so many GPUs", 1, type=whole(1))
    parser.add("--simulate", "compare with this device's constants", "a100-80gb", metavar="DEVICE")


def main(args):
    """Print the constants that fit measured times, and the errors left, with and without tiles."""
    config, device = find(GEOMETRIES, "model", args.model), find(DEVICES, "simulate", args.simulate)
    tokens, times = read_products(args.file)
    given = (config, tokens, times, args.tp)
    devices = {"fitted": fit_products(device, *given)}
    devices["fitted, without tiles"] = fit_products(device, *given, tiles=(1,))
    devices |= {device.name: device, f"{device.name}, without tiles": replace(device, tile=1)}
    columns = {"constants": "", "TFLOP/s": ".0f", "TB/s": ".2f", "us to start": ".1f", "tile": "d"}
    columns |= dict.fromkeys(["of a layer: median", "its P90", "of each: median", "P90"], ".1%")
    rows = []
    for name, its in devices.items():
        layer, each = (np.quantile(of, (0.5, 0.9)) for of in product_errors(its, *given))
        constants = (its.flops_per_s / 1e12, its.bytes_per_s / 1e12, 1e6 * its.op_s, its.tile)
        rows.append([name, *constants, *layer, *each])
    sizes = f"TP {args.tp}, {len(tokens)} sizes"
    print(f"{args.file}: matrix products of a layer of {args.model}, {sizes}\n")
    print_table(columns, rows)
    print("\nerrors, over all sizes: of a layer's four products in sum, and of each of them alone")
