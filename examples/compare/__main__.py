"""Other engines on the same requests: `python -m examples.compare --against transformers,openvino`.

Prints the tokens per second of each engine, in turns with ours. Random weights, of llama-160m or of
--preset, are saved first, for all to load. Read first: README.md. Read next: engines.py.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from cyclopts import Parameter
from cyclopts.types import PositiveFloat, PositiveInt
from tqdm import tqdm

from cli.console import make_app, run
from cli.files import options_json, write_json, wrote
from cli.loading import load_model, resolve_model
from cli.model import ModelOptions
from cli.tables import format_table
from examples.compare.engines import (
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
from lab.measure import timing
from lab.measure.machine_info import measure_machine
from lab.measure.offline_load import OfflineLoad
from model import GPTConfig
from pretrained.checkpoints import find

app = make_app("python -m examples.compare", "Other engines, in turns.")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """The load that all engines get. Raises ValueError for sizes that do not go together."""

    chunk: PositiveInt = 256
    """C, the chunk size and token budget, in tokens."""
    batch: PositiveInt = 6
    """B, the most requests at once."""
    seq_len: PositiveInt = 1000
    """Prompt and output tokens of a request, together."""
    pd_ratio: PositiveFloat | None = None
    """Prompt tokens per output token. [default: C / (B - 1), which is balanced]"""
    requests: PositiveInt | None = None
    """Requests to serve. [default: 2 B]"""
    json: Path | None = None
    """Write all that is printed, with these options."""

    def __post_init__(self) -> None:
        if not self.batch <= self.chunk <= self.seq_len:
            limits = f"at least --batch {self.batch} and at most --seq-len {self.seq_len}"
            raise ValueError(f"--chunk {self.chunk}: must be {limits}")


def engines(text: str) -> dict[str, str]:
    """{engine: the Python that has its packages} of --against. Raises ValueError for an engine that
    is unknown, or not installed."""
    pythons = {}
    for part in text.split(","):
        engine, _, python = part.strip().partition("=")
        if engine not in PACKAGES:
            raise ValueError(f"--against {engine!r}: must be one of {', '.join(PACKAGES)}")
        pythons[engine] = python or sys.executable
        if not has_package(pythons[engine], engine):
            raise ValueError(f"--against {engine}: {pythons[engine]} has not {PACKAGES[engine]}")
    return pythons


@app.default
def compare(
    *,
    against: str,
    options: CompareOptions = CompareOptions(),
    model_options: ModelOptions = ModelOptions(),
) -> None:
    """Other engines serve the same requests, in turns with ours.

    What there is when it is interrupted is printed and written, too.

    Parameters
    ----------
    against
        Engines, comma-separated; openvino=/its/bin/python where another Python has its packages.
    """
    pythons = engines(against)
    resolved = resolve_model(model_options)
    if not resolved.model and not can_save_random(GPTConfig.preset(resolved.name)):
        raise ValueError(f"--against: random weights like those of {resolved.name} cannot be saved")
    began = time.perf_counter()
    load = OfflineLoad(
        seq_len=options.seq_len,
        pd_ratio=options.pd_ratio or options.chunk / max(1, options.batch - 1),
        batch=options.batch,
        requests=options.requests or 2 * options.batch,
        seed=resolved.seed,
    )
    interrupt = None
    with TemporaryDirectory() as folder:
        resolved = with_checkpoint(resolved, load.seq_len, folder)
        model = load_model(resolved, load.seq_len, positions_from="--seq-len")
        machine = measure_machine(model, resolved.title, options.chunk, resolved.attention)
        print(machine.heading())
        try:
            results = compare_engines(
                model,
                find(str(resolved.model)),
                pythons,
                load,
                chunk=options.chunk,
                attention=resolved.attention,
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
        "options": options_json(options, resolved),
        "machine": machine.to_json(),
        "against": {name: asdict(result) for name, result in results.items()},
        "seconds": seconds,
    }
    write_json(options.json, report)
    wrote(options.json)
    if interrupt:
        raise interrupt


def main(argv: Sequence[str] | None = None) -> None:
    """The command line `argv`, or that of this process."""
    app(argv, exit_on_error=False, print_error=False)


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
