"""The load of `bench.py serve` for a server that speaks OpenAI's HTTP, and the same tables.

    python bench.py serve --url http://127.0.0.1:8000/v1 --qps 1.5 --slo 0.3

The numbers are what a client sees: when each event came. Read first: lab/measure/remote_server.py,
lab/commands/serve.py.
"""

import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cli.options import (
    OptionParser,
    file_option,
    from_args,
    nonempty_text,
    number,
    option,
    whole,
)
from lab.commands import serve as serving
from lab.commands.serve_options import LoadOptions, check_load
from lab.commands.serve_report import describe_load
from lab.measure import workload
from lab.measure.remote_server import NO_KEY, RemoteServer
from lab.measure.run_loop import Run

REQUESTS = 48
MAX_LEN = 1024
VOCABULARY = 256  # the smallest that a model has: every server knows these tokens


@dataclass(frozen=True, kw_only=True)
class RemoteOptions(LoadOptions):
    """The options of `serve --url`. `turns` is 1, `plot` and `html` are None."""

    url: str = option(
        "a server that speaks OpenAI's HTTP, as http://127.0.0.1:8000/v1, required; its key "
        "is read from OPENAI_API_KEY",
        type=nonempty_text,
        required=True,
    )
    model: str | None = option(
        "one that the server knows", type=nonempty_text, default_text="its first"
    )
    slo: float = option(
        "the SLO of P99 TBT, in seconds, required", required=True, type=number(above=0)
    )
    seed: int = option("of all that is random", type=whole(minimum=0), default=0)
    csv: str | None = file_option("write a row for each request")


def add_options(parser: OptionParser) -> None:
    """Add the options of the command."""
    parser.add_fields(
        RemoteOptions,
        ("turns", "plot", "html"),
        qps="the trace's own; without a trace required",
        requests=REQUESTS,
        max_len=MAX_LEN,
    )
    parser.set_defaults(requests=REQUESTS, max_len=MAX_LEN, turns=1, plot=None, html=None)


def resolve(parser: OptionParser, args: Namespace) -> RemoteOptions:
    """The options, checked. Exits with a message if they make no sense together."""
    if not (args.qps or args.trace):
        parser.error("the following arguments are required: --qps, or --trace")
    options = from_args(RemoteOptions, args)
    check_load(parser, options)
    return options


def main(options: RemoteOptions) -> None:
    """Send the load, print the tables, and write the files."""
    arrivals_at, load = serving.make_workload(options)
    arrivals = arrivals_at(options.qps)
    server = RemoteServer(options.url, options.model, os.environ.get("OPENAI_API_KEY", NO_KEY))
    report = {
        "command": options.command,
        "machine": server.info.to_json(),
        "load": load,
        "slo_s": options.slo,
        "slo_busy": False,
        "base": None,  # how fast the machine is, no client knows
        "unit": "requests/s",
    }
    print(
        f"{server.info.heading()}{describe_load(options, load, arrivals)}"
        f"SLO: P99 TBT at most {options.slo:.3f} s (as asked for), median delay not known\n"
    )
    comparison = serving.Comparison(
        options=options,
        arrivals_at=arrivals_at,
        servers={options.url: serving.Server(serve_by(server, options))},
        report=report,
        machine=server.info,
    )
    serving.compare_runs(comparison)


def serve_by(server: RemoteServer, options: RemoteOptions) -> Callable[..., Run]:
    """A function that lets another server serve arrivals, as Machine.serve does."""

    def serve(
        arrivals: Sequence[workload.Arrival], progress: Callable[[], object], recorder: None
    ) -> Run:
        prompts = workload.prompts(arrivals, VOCABULARY, options.seed, options.shared_prefix)
        run = server.serve(arrivals, prompts, progress)
        early = sum(completion.finish_reason == "stop" for completion in run.completions)
        if early:
            print(f"{early} outputs ended early: the server does not know ignore_eos")
        return run

    return serve
