"""Name the first rule that a policy breaks: `bench.py check my_policy.py:Eager`.

Loads are simulated under a referee. A schedule() that loops without an end is stopped after 10 s of
CPU time. Other commands check policies from files, too, before they measure them. Read first:
policies/template.py, to break rules with a copy of it. Read next: policies/referee.py, the
rules, and lab/simulator/referee.py, the loads.
"""

import argparse
from dataclasses import dataclass

from cli.options import OptionParser, policy_names
from lab.simulator.referee import check_policy
from policies.referee import RULES


@dataclass(frozen=True)
class CheckOptions:
    """The options of `check`."""

    policies: list[str]


def add_options(parser: OptionParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "policies",
        type=policy_names,
        help="such as my_policy.py:Eager, several with commas",
    )


def resolve(parser: OptionParser, args: argparse.Namespace) -> CheckOptions:
    """The options of the command line."""
    return CheckOptions(policies=args.policies)


def main(options: CheckOptions) -> None:
    """Check the policies. Raises ValueError, which names the rule, for one that breaks a rule."""
    for policy in options.policies:
        verdict = check_policy(policy)
        if verdict.violation:
            raise ValueError(verdict.violation.sentence)
        print(f"{policy} keeps all rules: {', '.join(RULES)} ({verdict.iterations:,} iterations)")
