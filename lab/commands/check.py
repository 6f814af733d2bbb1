"""Name the first rule that a policy breaks: `bench.py check my_policy.py:Eager`.

Loads are simulated under a referee; `--random-loads 2000` adds small ones of all sizes. No rule
says how long a request may wait, so times to first token are printed beside sarathi-serve's. Read
first: policies/template.py, to break rules with a copy of it. Read next: policies/referee.py, the
rules, and lab/simulator/referee.py, the loads.
"""

import argparse
from dataclasses import dataclass

from tqdm import tqdm

from cli.options import OptionParser, from_args, option, policy_names, whole
from lab.measure.metrics import percentiles
from lab.simulator.referee import check_policy, check_random_loads, rules_of

BESIDE = "sarathi-serve"


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """The options of `check`."""

    policies: list[str]
    random_loads: int = option(
        "simulate so many small random loads, too",
        type=whole(minimum=0, maximum=1_000_000),
        default=0,
    )


def add_options(parser: OptionParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "policies",
        type=policy_names,
        help="such as my_policy.py:Eager, several with commas",
    )
    parser.add_fields(CheckOptions)


def resolve(parser: OptionParser, args: argparse.Namespace) -> CheckOptions:
    """The options of the command line."""
    return from_args(CheckOptions, args)


def main(options: CheckOptions) -> None:
    """Check the policies. Raises ValueError, which names the rule, for one that breaks a rule."""
    beside = check_policy(BESIDE)
    for policy in options.policies:
        tried = verdict = check_policy(policy)
        wasteful = verdict.wasteful
        iterations = verdict.iterations
        if verdict.violation is None and options.random_loads:
            seeds = tqdm(range(options.random_loads), policy, leave=False, disable=None)
            verdict = check_random_loads(policy, seeds)
            iterations += verdict.iterations
        if verdict.violation:
            raise ValueError(verdict.violation.sentence)
        rules = ", ".join(rules_of(policy))
        print(f"{policy} keeps all rules: {rules} ({iterations:,} iterations)")
        p99_s = percentiles(tried.ttfts_s).p99
        beside_s = percentiles(beside.ttfts_s).p99
        print(f"P99 TTFT {p99_s:.2f} s, {BESIDE} {beside_s:.2f} s on the same loads")
        if tried.starves(beside):
            longest_s = max(tried.ttfts_s)
            print(f"starving: somebody waits {longest_s:.2f} s, {max(beside.ttfts_s):.2f} s there")
        if wasteful:
            print(f"wasteful: {wasteful}")
