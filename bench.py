"""Measure the claims of SARATHI and Sarathi-Serve on this machine, or on one that is simulated.

    python bench.py --chunk 256

prints SARATHI's Table 2, what each policy makes of one load, and what to conclude; --help names the
other commands. A command is a module with

    add_options(parser)              add its options
    resolve(parser, args) -> options fill in and check them: a frozen dataclass
    main(options)                    measure, print and write

Read first: engine.py. Read next: lab/commands/offline.py."""

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # where python -P does not look

from cli.console import run

DESCRIPTION = (
    "Measure the claims of SARATHI and Sarathi-Serve on this machine, or on a simulated one."
)
COMMANDS = {  # name -> (its module, what it does)
    "offline": ("lab.commands.offline", "what a decode costs, and all policies end to end"),
    "batches": (
        "lab.commands.batches",
        "what single batches take, by operation; the largest token budget within an SLO, --slo",
    ),
    "serve": (
        "lab.commands.serve",
        "requests arrive while others run: the latencies of all policies",
    ),
    "capacity": ("lab.commands.serve", "the highest rate at which each policy meets an SLO"),
    "explore": (
        "lab.commands.explore",
        "a page to play with: what policies do with a load, and why",
    ),
    "paper": (
        "lab.commands.paper",
        "the papers' claims, from a cost model of their machines, and measured on this one",
    ),
    "today": (
        "lab.commands.today",
        "what today's engines decide, and the questions their users ask, simulated",
    ),
    "check": ("lab.commands.check", "the first rule that a policy of your own breaks"),
}
FIRST = "each has a --help; without one, bench.py --chunk 256 is bench.py offline --chunk 256"


def parse_args(argv: Sequence[str]) -> tuple[ModuleType, Any]:
    """The module of the command that `argv` names, and its options, as its `resolve` returns them.

    The command is offline if `argv` names none. Exits with a message if the options make no sense.
    Modules of other commands are not imported."""
    from cli.options import OptionParser

    if not argv or argv[0].startswith("-") and argv[0] not in ("-h", "--help"):
        argv = ["offline", *argv]
    parser = OptionParser(prog="bench.py", description=DESCRIPTION)
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", title="commands", description=FIRST
    )
    for name, (_, description) in COMMANDS.items():
        command = commands.add_parser(name, help=description, description=description)
        command.set_defaults(command=name)
    if argv[0] not in COMMANDS:
        parser.parse_args(argv)  # which ends here, after its help or an error
    module = import_module(COMMANDS[argv[0]][0])
    command = commands.choices[argv[0]]
    module.add_options(command)
    args = parser.parse_args(argv)
    return module, module.resolve(command, args)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line `argv`, or that of this process."""
    module, options = parse_args(sys.argv[1:] if argv is None else argv)
    module.main(options)


if __name__ == "__main__":
    run(main)
