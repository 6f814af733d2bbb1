"""A device's constants from times of its matrix products: `python -m tests.fit_device times.csv`.

Prints the constants that fit best, and the errors that are left, with and without tiles. The A100's
in simulator/devices.py come of it. Read first: lab/simulator/cost_model.py.
"""

import math
import sys
from dataclasses import replace
from itertools import product

import numpy as np

from cli.console import run
from cli.options import OptionParser, whole
from lab.measure.workload import TOKENS, read_columns
from lab.simulator.cost_model import BYTES, matrices, product_seconds
from lab.simulator.devices import DEVICES, GEOMETRIES, find
from views.tables import markdown

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
    shapes = matrices(config, tp)
    seconds = [[product_seconds(device, int(n), *shape) for n in tokens] for shape in shapes]
    return abs(np.sum(seconds, axis=0) / times.sum(axis=0) - 1), abs(seconds / times - 1)


def fit_products(device, config, tokens, times, tp=1, tiles=(1, 32, 64, 128, 256)):
    """The device with the rate, bandwidth, op_s and tile that fit measured times best: with the
    least |log(predicted / measured)|; each product and doubling of the tokens counts alike. For
    every tile, a grid over the three others narrows around its best point."""
    order, found = np.argsort(tokens), []
    tokens, measured = tokens[order], times[:, order]
    shapes = np.array(matrices(config, tp), float)  # (4, 2)
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


def main(argv=None):
    """The command line, whose words are `argv`."""
    parser = OptionParser(prog="python -m tests.fit_device", description="A device's constants.")
    parser.add_argument("file", help=f"CSV with num_tokens and, in ms, {', '.join(COLUMNS)}")
    add = lambda option, what, default, **more: parser.add_argument(
        option, help=f"{what} (default: {default})", default=default, **more
    )
    add("--model", "whose layer was measured", "llama-7b")
    add("--tp", "on one of so many GPUs", 1, type=whole(least=1))
    add("--simulate", "compare with this device's constants", "a100-80gb", metavar="DEVICE")
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
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
    print(markdown(columns, rows))
    print("\nerrors, over all sizes: of a layer's four products in sum, and of each of them alone")


if __name__ == "__main__":
    run(main)
