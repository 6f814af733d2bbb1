"""Serve arriving requests, and find the rate that a policy can keep up with.

    python bench.py serve --qps 1.5                     every policy on the same arrivals
    python bench.py capacity --slo strict               the highest rate at which each meets the SLO
    python bench.py serve --simulate a100-80gb --preset yi-34b --tp 2     on a simulated machine

The SLO is a multiple of the time of a decode iteration, which is measured first (Sarathi-Serve
§5.1). Read first: lab/measure/capacity.py. Read next: serve_run.py."""

from cli.model import ModelOptions
from lab.commands.options import CapacityOptions, ServeOptions


def main(options: ServeOptions = ServeOptions(), model: ModelOptions = ModelOptions()) -> None:
    """Requests arrive while others run: the latencies of all policies."""
    from lab.commands.serve_run import serve

    serve(options, model)


def capacity(
    options: CapacityOptions = CapacityOptions(), model: ModelOptions = ModelOptions()
) -> None:
    """The highest rate at which each policy meets an SLO."""
    from lab.commands.serve_run import find_capacities

    find_capacities(options, model)
