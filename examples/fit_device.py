"""Constants of a device, from times of its products: `python -m examples.fit_device times.csv`.

Prints the constants that fit best and the errors that are left, with and without tiles, beside
those of a known device. Read first: lab/simulator/fit.py."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cli.console import run
from cli.options import OptionParser, from_args, nonempty_text, option, whole
from cli.tables import format_table
from lab.simulator.devices import DEVICES, GEOMETRIES, find
from lab.simulator.fit import COLUMNS, fit_products, product_errors, read_products


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """The options of the program."""

    file: str
    preset: str = option(
        "the geometry whose layer was measured",
        metavar="NAME",
        type=nonempty_text,
        default="llama-7b",
    )
    tp: int = option("on one of so many GPUs", default=1, type=whole(minimum=1))
    simulate: str = option(
        "compare with this device's constants",
        type=nonempty_text,
        default="a100-80gb",
        metavar="DEVICE",
    )


def parse_args(argv: Sequence[str] | None) -> FitOptions:
    """The options of the command line."""
    parser = OptionParser(prog="python -m examples.fit_device", description="Fit a device.")
    parser.add_argument(
        "file",
        help=f"CSV with num_tokens and, in ms, {', '.join(COLUMNS)}",
        type=nonempty_text,
    )
    parser.add_fields(FitOptions)
    return from_args(FitOptions, parser.parse_args(argv))


def main(argv: Sequence[str] | None = None) -> None:
    """Fit the constants and print them. Raises ValueError for unknown names and for a bad file."""
    options = parse_args(argv)
    config = find(GEOMETRIES, "preset", options.preset)
    reference = find(DEVICES, "simulate", options.simulate)
    tokens, seconds = read_products(options.file)
    devices = {
        "fitted": fit_products(reference, config, tokens, seconds, options.tp),
        "fitted, without tiles": fit_products(
            reference, config, tokens, seconds, options.tp, tiles=(1,)
        ),
        reference.name: reference,
        f"{reference.name}, without tiles": replace(reference, tile=1),
    }
    rows = {}
    for name, device in devices.items():
        of_layer, of_each = product_errors(device, config, tokens, seconds, options.tp)
        layer_median, layer_p90 = np.quantile(of_layer, (0.5, 0.9))
        product_median, product_p90 = np.quantile(of_each, (0.5, 0.9))
        rows[name] = [
            ("TFLOP/s", device.flops_per_s / 1e12, ".0f"),
            ("TB/s", device.bytes_per_s / 1e12, ".2f"),
            ("us to start", 1e6 * device.op_s, ".1f"),
            ("tile", device.tile, "d"),
            ("of a layer: median", layer_median, ".1%"),
            ("its P90", layer_p90, ".1%"),
            ("of each: median", product_median, ".1%"),
            ("P90", product_p90, ".1%"),
        ]
    sizes = f"TP {options.tp}, {len(tokens)} sizes"
    print(f"{options.file}: matrix products of a layer of {options.preset}, {sizes}\n")
    print(format_table("constants", rows))
    print("\nerrors, over all sizes: of a layer's four products in sum, and of each of them alone")


if __name__ == "__main__":
    run(main)
