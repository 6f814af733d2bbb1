"""Measure the claims of SARATHI and Sarathi-Serve on this machine, or on one that is simulated.

    python bench.py --chunk 256

prints SARATHI's Table 2, what each policy makes of one load, and what to conclude; `python bench.py
--help` names the other commands. A command is a module with `add_options(parser)`, `main(args)`
and, if its options depend on each other, `check(parser, args)`.

Read first: engine.py. Read next: experiments/offline.py.
"""

import sys
from importlib import import_module

from experiments.console import run

COMMANDS = {  # name -> (its module, what it does)
    "offline": ("experiments.offline", "what a decode costs, and all policies end to end"),
    "serve": ("experiments.serving", "requests arrive while others run: latencies of all policies"),
    "capacity": ("experiments.serving", "the highest rate at which each policy meets an SLO"),
    "play": ("simulator.play", "your policy against all others on three simulated loads"),
    "budget": ("experiments.budget", "the largest token budget that meets an SLO"),
    "simulate": ("simulator.report", "the papers' experiments on many GPUs, from a cost model"),
    "fit": ("simulator.calibration", "a device's constants, from times of its matrix products"),
    "validate": ("simulator.validation", "the simulator beside the engine, on this machine"),
}
SERVING = ("serve", "capacity")  # on this machine, or with --simulate on another


def parse_args(argv):
    """The module of the command and its options. Exits with a message if these make no sense.

    The command is offline if `argv` names none. Modules of other commands are not imported.
    """
    from experiments.options import OptionParser

    words = list(argv)
    if not words or words[0].startswith("-") and words[0] not in ("-h", "--help"):
        words = ["offline", *words]
    what = "Measure the claims of SARATHI and Sarathi-Serve on this machine, or on a simulated one."
    parser = OptionParser(prog="bench.py", description=what)
    how = dict(title="commands", description="each has a --help; the first is run if none is named")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", **how)
    for name, (where, what) in COMMANDS.items():
        command = commands.add_parser(name, help=what, description=what)
        if name != words[0]:
            continue
        module = import_module(where)
        if name in SERVING:
            from simulator.machine import THIS, add_options, check_options

            module.add_options(command, name)
            add_options(command)
        else:
            module.add_options(command)
    args = parser.parse_args(words)
    command = commands.choices[args.command]
    if args.command in SERVING:
        module.fill_in(args, args.simulate not in (None, THIS) or args.device.startswith("cuda"))
        check_options(command, args)
    if hasattr(module, "check"):
        module.check(command, args)
    return module, args


def machine_for(args, config):
    """Where to serve: this machine, one that is simulated, or a simulation of this one."""
    from experiments.serving import RealMachine
    from simulator.machine import THIS, FittedMachine, SimulatedMachine

    if args.simulate not in (None, THIS):
        return SimulatedMachine(args)
    real = RealMachine(args, config)
    return FittedMachine(real, args) if args.simulate == THIS else real


def main(argv=None):
    """The command line, whose words are `argv`."""
    module, args = parse_args(sys.argv[1:] if argv is None else argv)
    if args.command in SERVING:
        module.main(args, machine_for)
    else:
        module.main(args)


if __name__ == "__main__":
    run(main)
