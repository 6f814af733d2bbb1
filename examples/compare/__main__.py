"""Other engines on the same requests: `python -m examples.compare --against transformers,openvino`.

Prints the tokens per second of each engine, in turns with ours. Random weights, of llama-160m or of
--preset, are saved first, for all to load. Read first: README.md. Read next: engines.py.
"""

import sys
import time
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from tempfile import TemporaryDirectory

import torch
from tqdm import tqdm

from cli.console import run
from cli.loading import ModelOptions, add_layers_option, add_model_options, load_model
from cli.options import OptionParser, option, whole, write_json, wrote
from cli.tables import format_table
from examples.compare.engines import (
    OUR_POLICIES,
    PACKAGES,
    REPEATS,
    ComparisonInterrupted,
    EngineResult,
    can_save_random,
    compare_engines,
    has_package,
    requests_served,
    save_random,
)
from lab.commands import offline
from lab.commands.offline import OfflineOptions
from lab.measure import timing
from lab.measure.machine_info import measure_machine
from lab.measure.offline_load import OfflineLoad
from model import GPTConfig
from pretrained.checkpoints import find


def engines(text: str) -> dict[str, str]:
    """The type of --against: {engine: the Python that has its packages}."""
    pythons = {}
    for part in text.split(","):
        engine, _, python = part.strip().partition("=")
        if engine not in PACKAGES:
            raise ArgumentTypeError(f"{engine!r}: must be one of {', '.join(PACKAGES)}")
        pythons[engine] = python or sys.executable
        if not has_package(pythons[engine], engine):
            command = f"{pythons[engine]} -m pip install {PACKAGES[engine].replace('_', '-')}"
            problem = f"{pythons[engine]} is no Python with {PACKAGES[engine]}"
            raise ArgumentTypeError(f"{engine}: {problem}: {command}")
    return pythons


@dataclass(frozen=True, kw_only=True)
class CompareOptions(OfflineOptions):
    """The options of `compare`: those of `offline`, and the other engines."""

    batch: int = option("B, the most requests at once", type=whole(minimum=1), default=6)
    against: dict[str, str] = option(  # engine -> the Python that has its packages
        f"engines that serve the requests too, comma-separated, of {', '.join(PACKAGES)} "
        "(packages openvino-genai, optimum-intel), required; openvino=/its/bin/python where "
        "another has them",
        required=True,
        metavar="ENGINES",
        type=engines,
    )


def parse_args(argv: Sequence[str] | None) -> CompareOptions:
    """The options, checked: the engines, and the load of `offline`. Exits with a message for random
    weights that cannot be saved."""
    parser = OptionParser(prog="python -m examples.compare", description="Other engines, in turns.")
    left_out = ("policies", "plot", "html")
    parser.add_fields(CompareOptions, left_out, requests="2 B")
    add_layers_option(parser)
    add_model_options(parser, "llama-13b on a GPU with 40 GB or more, else llama-160m")
    parser.set_defaults(command="compare", policies=list(OUR_POLICIES))
    parser.set_defaults(plot=None, html=None)
    args = parser.parse_args(argv)
    options = CompareOptions(**vars(offline.resolve(parser, args)), against=args.against)
    model = replace(options.model, layers=args.layers)
    options = replace(options, model=model)
    if not model.model and not can_save_random(GPTConfig.preset(model.name)):
        parser.error(f"--against: random weights like those of {model.name} cannot be saved")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Compare, print and write; what there is when it is interrupted, too."""
    options = parse_args(argv)
    began = time.perf_counter()
    load = options.load(options.requests or 2 * options.batch)
    interrupt = None
    with TemporaryDirectory() as folder:
        model_options = with_checkpoint(options.model, load.seq_len, folder)
        model = load_model(model_options, load.seq_len, positions_from="--seq-len")
        machine = measure_machine(
            model, options.model.title, options.chunk, options.model.attention
        )
        print(machine.heading())
        try:
            results = compare_engines(
                model,
                find(str(model_options.model)),
                options.against,
                load,
                chunk=options.chunk,
                attention=options.model.attention,
                report=tqdm.write,
            )
        except ComparisonInterrupted as error:
            interrupt = error
            results = error.results
    print()
    print_results(results, load, options.chunk)
    seconds = time.perf_counter() - began
    print(f"\ntook {seconds:.0f} s")
    report = {
        "machine": machine.to_json(),
        "against": {name: asdict(result) for name, result in results.items()},
        "seconds": seconds,
    }
    write_json(options, report)
    wrote(options.json)
    if interrupt:
        raise interrupt


def with_checkpoint(options: ModelOptions, positions: int, folder: str) -> ModelOptions:
    """The options of a checkpoint. Random weights become one, in this folder."""
    if options.model:
        return options
    config = GPTConfig.preset(options.name)
    config = replace(
        config,
        n_layer=options.layers or config.n_layer,
        max_positions=max(config.max_positions, positions),
    )
    save_random(config, folder, options.seed, getattr(torch, str(options.dtype)))
    return replace(options, preset=None, model=folder, layers=None)


def print_results(results: Mapping[str, EngineResult], load: OfflineLoad, chunk: int) -> None:
    """Print the table of `compare_engines`."""
    print(
        f"Engines of others: same weights, {requests_served(load)} requests of {load.prompt_len} "
        f"+ {load.output_len} tokens, in batches\nof {load.batch}, chunk {chunk}; medians of "
        f"{REPEATS}\n"
    )
    rows = {
        timing.mark(name, result.busy): [
            ("dtype", result.dtype, ""),
            ("tokens/s", result.tokens_per_s, ",.0f"),
            ("ours, sarathi-serve", result.sarathi_serve_gain, ".2fx"),
            ("ours, vllm", result.vllm_gain, ".2fx"),
            ("equal tokens", result.equal_tokens, ".0%"),
        ]
        for name, result in results.items()
    }
    print(format_table("engine, policy", rows))
    print("\nours: over the tokens/s of that engine; equal to sarathi-serve's, but for rounding")


if __name__ == "__main__":
    run(main)
