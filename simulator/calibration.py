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
from simulator.cost_model import BYTES, CostModel, matrices, products
from simulator.devices import DEVICES, GEOMETRIES, find

# columns of Vidur's profiles, and the names of the same products here
COLUMNS = {"attn_pre_proj": "preproj", "attn_post_proj": "postproj"}
COLUMNS |= {"mlp_up_proj": "ffn_ln1", "mlp_down_proj": "ffn_ln2"}
MILLISECONDS = "a number of ms from 1e-6 to 1e9", lambda x: 1e-6 <= x <= 1e9


def read_products(file):
    """Measured times of a layer's matrix products: (tokens, name -> seconds), arrays as long.

    `file` is CSV with a column num_tokens and the columns of COLUMNS, in ms; others are ignored.
    Raises ValueError, naming file, line and column, if it is not that, OSError if it is unreadable.
    """
    columns = {"num_tokens": TOKENS} | dict.fromkeys(COLUMNS, MILLISECONDS)
    tokens, *times = np.array(read_columns(file, columns)).T
    return tokens.astype(int), {name: ms / 1e3 for name, ms in zip(COLUMNS.values(), times)}


def product_errors(device, config, tokens, times, tp=1):
    """|predicted / measured - 1| of a layer's products: in sum, "layer", and of each, by name."""
    rows = [products(config, device, int(n), tp) for n in tokens]
    predicted = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    errors = {name: abs(predicted[name] / times[name] - 1) for name in predicted}
    return {"layer": abs(sum(predicted.values()) / sum(times.values()) - 1)} | errors


def fit_products(device, config, tokens, times, tp=1, tiles=(1, 32, 64, 128, 256)):
    """The device with the rate, bandwidth, op_s and tile that fit measured times best.

    That is, with the least |log(predicted / measured)|; each product and doubling of the tokens
    counts alike. For every tile, a grid over the three others narrows around its best point.
    """
    order = np.argsort(tokens)
    shapes = np.array([matrices(config, tp)[name] for name in times], float)  # (products, 2)
    measured = np.array([times[name][order] for name in times])  # (products, rows)
    tokens = tokens[order]
    counts = np.gradient(np.log(tokens)) if len(set(tokens)) > 2 else np.ones(len(tokens))
    weights = shapes.prod(axis=1)[:, None]
    moved = BYTES * (weights + tokens * shapes.sum(axis=1)[:, None])

    def fit(tile):
        """The best point with this tile, and before it its error."""
        math_work = 2 * -(-tokens // tile) * tile * weights

        def error(rate, bandwidth, op_s):
            seconds = op_s + np.maximum(math_work / rate, moved / bandwidth)
            return np.average(abs(np.log(seconds / measured)).mean(axis=0), weights=counts)

        rate, bandwidth, best = (math_work / measured).max(), (moved / measured).max(), (math.inf,)
        spans = [(rate / 2, rate), (bandwidth / 2, 2 * bandwidth), (0.0, measured.min())]
        for _ in range(10):
            grid = product(*(np.linspace(*span, 9) for span in spans))
            best = min(best, *((error(*point), *point, tile) for point in grid))
            thirds = [(x, (high - low) / 3) for x, (low, high) in zip(best[1:], spans)]
            spans = [(max(x - third, x / 1e6), x + third) for x, third in thirds]  # a rate is not 0
        return best

    *rates, tile = min(map(fit, tiles))[1:]
    rate, bandwidth, op_s = map(float, rates)
    return replace(device, flops_per_s=rate, bytes_per_s=bandwidth, op_s=op_s, tile=tile)


class FittedCost:
    """The cost of iterations on this machine: the law of a profile, [(BatchShape, seconds)]."""

    pp, cpu_s, tile = 1, 0.0, 1

    def __init__(self, profile):
        self.law = IterationTime(profile)

    def stages(self, batch):
        """As CostModel.stages."""
        decodes = [start + 1 for _, start, length in batch if length == 1]
        shape = BatchShape(decodes=len(decodes), context_tokens=sum(decodes))
        for _, start, length in batch:
            if length > 1:
                shape = shape.with_chunk(start, length)
        return [self.law.predict(shape)], 0.0

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
        layer, *each = product_errors(its, *given).values()
        errors = [error for of in (layer, each) for error in np.quantile(of, (0.5, 0.9))]
        constants = (its.flops_per_s / 1e12, its.bytes_per_s / 1e12, 1e6 * its.op_s, its.tile)
        rows.append([name, *constants, *errors])
    sizes = f"TP {args.tp}, {len(tokens)} sizes"
    print(f"{args.file}: matrix products of a layer of {args.model}, {sizes}\n")
    print_table(columns, rows)
    print("\nerrors, over all sizes: of a layer's four products in sum, and of each of them alone")
