"""Measure the claims of SARATHI and Sarathi-Serve on this machine, or on one that is simulated.

    python bench.py --chunk 256

prints SARATHI's Table 2, what each policy makes of one load, and what to conclude; --help names the
other commands. A command is a module with `add_options(parser)`, `main(args)` and maybe
`check(parser, args)`. Read first: engine.py. Read next: lab/commands/offline.py."""

import sys
from importlib import import_module

from cli.console import run

COMMANDS = {  # name -> (its module, what it does)
    "offline": ("lab.commands.offline", "what a decode costs, and all policies end to end"),
    "batches": ("lab.commands.batches", "what single batches take, whole and by operation"),
    "serve": (
        "lab.simulator.machine",
        "requests arrive while others run: latencies of all policies",
    ),
    "capacity": ("lab.simulator.machine", "the highest rate at which each policy meets an SLO"),
    "explore": (
        "lab.commands.explore",
        "a page with sliders: what policies do with a load, and why",
    ),
    "budget": ("lab.commands.budget", "the largest token budget that meets an SLO"),
    "pipeline": ("lab.commands.pipeline", "what bubbles cost, in stages that are processes here"),
    "paper": ("lab.commands.paper", "the papers' claims about one device, measured on this one"),
    "simulate": (
        "lab.commands.simulate",
        "the papers' experiments on many GPUs, from a cost model",
    ),
}
FIRST = "each has a --help; without one, bench.py --chunk 256 is bench.py offline --chunk 256"


def parse_args(argv):
    """The module of the command and its options. Exits with a message if these make no sense. The
    command is offline if `argv` names none. Modules of other commands are not imported."""
    from cli.options import ByDevice, OptionParser

    if not argv or argv[0].startswith("-") and argv[0] not in ("-h", "--help"):
        argv = ["offline", *argv]
    what = "Measure the claims of SARATHI and Sarathi-Serve on this machine, or on a simulated one."
    parser = OptionParser(prog="bench.py", description=what)
    how = dict(title="commands", description=FIRST)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", **how)
    for name, (_, what) in COMMANDS.items():
        commands.add_parser(name, help=what, description=what).set_defaults(command=name)
    if argv[0] not in COMMANDS:
        parser.parse_args(argv)  # which ends here, after its help or an error
    module, command = import_module(COMMANDS[argv[0]][0]), commands.choices[argv[0]]
    module.add_options(command)
    args = parser.parse_args(argv)
    elsewhere = getattr(args, "simulate", None) not in (None, "this")
    for option, its in vars(args).items():
        if isinstance(its, ByDevice):
            setattr(args, option, its[elsewhere or args.device.startswith("cuda")])
    if hasattr(module, "check"):
        module.check(command, args)
    return module, args


def main(argv=None):
    """The command line, whose words are `argv`."""
    module, args = parse_args(sys.argv[1:] if argv is None else argv)
    module.main(args)


if __name__ == "__main__":
    run(main)
