"""The arrivals of `bench.py serve` for a server that speaks OpenAI's HTTP, and the same tables.

    python -m tests.serve_remote --url http://127.0.0.1:8000/v1 --qps 1.5 --slo 0.3

Seen is what a client sees: when each event came. Read first: lab/commands/serving.py.
"""

import os
import sys

from cli import options
from cli.console import run
from lab.commands import serving
from lab.measure import workload
from lab.measure.remote_server import NO_KEY, RemoteServer

VOCABULARY = 256  # the smallest: every server knows these tokens
OF_LOAD = "requests lengths trace trace_scale shared_prefix long_prompt classes max_len".split()
GOES = (*OF_LOAD, "seed", "json", "csv")


class LoadOptions(options.OptionParser):
    """Of the options of tables those of GOES; the others keep their defaults, of a CPU."""

    def add_argument(self, option, *names, **its):
        """Add an option, or set its default, which those of tables have."""
        name, default = option.lstrip("-").replace("-", "_"), its.get("default")
        if isinstance(default, options.ByDevice):
            its["default"] = default = default.cpu
        if name in GOES or names or "default" not in its:  # -h has another name
            return super().add_argument(option, *names, **its)
        self.set_defaults(**{name: default})


def parse_args(words):
    """The options. Exits with a message if these make no sense."""
    what = "Bring the arrivals of bench.py serve to a server, and print what a client sees."
    parser = LoadOptions(prog="python -m tests.serve_remote", description=what)
    serving.add_options(parser, "serve")
    add, number = parser.add_argument, options.number
    url = "what speaks OpenAI's HTTP, as http://127.0.0.1:8000/v1; a key is in OPENAI_API_KEY"
    add("--url", required=True, help=url)
    add("--model", help="one that it knows (default: its first)")
    rate = "requests per second on average (default: the trace's own; without one required)"
    add("--qps", help=rate, type=number(least=1e-4))
    add("--slo", required=True, help="of P99 TBT, in seconds", type=number(above=0))
    parser.set_defaults(command="serve")
    args = parser.parse_args(words)
    if not (args.qps or args.trace):
        parser.error("the following arguments are required: --qps, or --trace")
    serving.check(parser, args)
    return args


def main(argv=None):
    """The command line, whose words are `argv`."""
    args = parse_args(sys.argv[1:] if argv is None else argv)
    arrivals_at, load = serving.make_workload(args)
    arrivals = arrivals_at(args.qps)
    key = os.environ.get("OPENAI_API_KEY", NO_KEY)
    server = RemoteServer(args.url, args.model, key)

    def serve(arrivals, progress, recorder):
        prompts = workload.prompts(arrivals, VOCABULARY, args.seed, args.shared_prefix)
        run = server.serve(arrivals, prompts, progress)
        if early := sum(completion.finish_reason == "stop" for completion in run.completions):
            print(f"{early} outputs ended early: the server does not know ignore_eos")
        return run

    machine = server.info
    report = {
        "command": args.command,
        "machine": machine.to_json(),
        "load": load,
        "slo_s": args.slo,
    }
    report |= {"slo_busy": False, "base": None, "unit": "requests/s"}  # how fast it is, who knows
    print(
        f"{machine.heading()}{serving.describe_load(args, load, arrivals)}\n"
        f"SLO: P99 TBT at most {args.slo:.3f} s (as asked for), median delay not known\n"
    )
    serving.Session(args, arrivals_at, report).run_all({args.url: serve}, None)


if __name__ == "__main__":
    run(main)
