"""Fit a device's constants to measured times of its matrix products: `bench.py fit times.csv`.

Prints the constants that fit best and the errors that are left, with and without tiles, beside
those of a known device. Read first: lab/simulator/fit.py.
"""

import argparse
from dataclasses import dataclass, replace

import numpy as np

from cli.options import OptionParser, nonempty_text, whole
from lab.simulator.devices import DEVICES, GEOMETRIES, Device, find
from lab.simulator.fit import COLUMNS, fit_products, product_errors, read_products
from views.tables import Column, format_table


@dataclass(frozen=True)
class FitOptions:
    """The options of `fit`."""

    file: str
    preset: str
    tp: int
    simulate: str


@dataclass(frozen=True)
class FitRow:
    """The constants of a device, and how far off its predictions are."""

    device: Device
    layer_median: float  # errors of the sum of a layer's four products
    layer_p90: float
    product_median: float  # errors of each product alone
    product_p90: float


FIT_COLUMNS: list[Column[FitRow]] = [
    Column("TFLOP/s", lambda row: row.device.flops_per_s / 1e12, ".0f"),
    Column("TB/s", lambda row: row.device.bytes_per_s / 1e12, ".2f"),
    Column("us to start", lambda row: 1e6 * row.device.op_s, ".1f"),
    Column("tile", lambda row: row.device.tile, "d"),
    Column("of a layer: median", lambda row: row.layer_median, ".1%"),
    Column("its P90", lambda row: row.layer_p90, ".1%"),
    Column("of each: median", lambda row: row.product_median, ".1%"),
    Column("P90", lambda row: row.product_p90, ".1%"),
]


def add_options(parser: OptionParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "file",
        help=f"CSV with num_tokens and, in ms, {', '.join(COLUMNS)}",
        type=nonempty_text,
    )
    parser.add_option(
        "--preset",
        metavar="NAME",
        type=nonempty_text,
        default="llama-7b",
        help="the geometry whose layer was measured",
    )
    parser.add_option("--tp", default=1, type=whole(minimum=1), help="on one of so many GPUs")
    parser.add_option(
        "--simulate",
        type=nonempty_text,
        default="a100-80gb",
        metavar="DEVICE",
        help="compare with this device's constants",
    )


def resolve(parser: OptionParser, args: argparse.Namespace) -> FitOptions:
    """The options of the command line."""
    return FitOptions(file=args.file, preset=args.preset, tp=args.tp, simulate=args.simulate)


def main(options: FitOptions) -> None:
    """Fit the constants and print them. Raises ValueError for unknown names and for a bad file."""
    config = find(GEOMETRIES, "preset", options.preset)
    known = find(DEVICES, "simulate", options.simulate)
    tokens, seconds = read_products(options.file)
    devices = {
        "fitted": fit_products(known, config, tokens, seconds, options.tp),
        "fitted, without tiles": fit_products(
            known, config, tokens, seconds, options.tp, tiles=(1,)
        ),
        known.name: known,
        f"{known.name}, without tiles": replace(known, tile=1),
    }
    rows = {}
    for name, device in devices.items():
        of_layer, of_each = product_errors(device, config, tokens, seconds, options.tp)
        layer_median, layer_p90 = np.quantile(of_layer, (0.5, 0.9))
        product_median, product_p90 = np.quantile(of_each, (0.5, 0.9))
        rows[name] = FitRow(device, layer_median, layer_p90, product_median, product_p90)
    sizes = f"TP {options.tp}, {len(tokens)} sizes"
    print(f"{options.file}: matrix products of a layer of {options.preset}, {sizes}\n")
    print(format_table("constants", FIT_COLUMNS, rows))
    print("\nerrors, over all sizes: of a layer's four products in sum, and of each of them alone")
