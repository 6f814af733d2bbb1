"""Measure the claims of SARATHI and Sarathi-Serve on this machine, or on one that is simulated.

    python bench.py --chunk 256

prints SARATHI's Table 2, what each policy makes of one load, and what to conclude; --help names the
other commands. A command is a function main(options, model) in a module of its own, which is
imported when it is used. Read first: engine.py. Read next: lab/commands/offline.py."""

import sys
from collections.abc import Sequence

from cli.console import make_app, run

app = make_app("bench.py", str(__doc__).partition("\n\n")[0])
COMMANDS = {
    "offline": "What a decode costs, and all policies end to end: also without its name.",
    "batches": "What single batches take; the largest token budget within an SLO.",
    "serve": "Requests arrive while others run: the latencies of all policies.",
    "capacity": "The highest rate at which each policy meets an SLO.",
    "explore": "A page to play with: what policies do with a load, and why.",
    "paper": "The papers' claims, computed on the papers' machines and measured on this one.",
    "today": "What today's engines decide, and the questions their users ask, simulated.",
    "check": "The first rule that a policy of your own breaks.",
}
for name, description in COMMANDS.items():
    function = "serve:capacity" if name == "capacity" else f"{name}:main"
    app.command(f"lab.commands.{function}", name=name, help=description)


def command_line(argv: Sequence[str]) -> list[str]:
    """The words of a command line with the name of their command: offline, if there is none."""
    is_named = argv and (not argv[0].startswith("-") or argv[0] in ("-h", "--help"))
    return [*argv] if is_named else ["offline", *argv]


def main(argv: Sequence[str] | None = None) -> None:
    """The command line `argv`, or that of this process."""
    app(command_line(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    run(main)
