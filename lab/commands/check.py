"""Name the first rule that a policy breaks: `bench.py check --policies my_policy.py:Eager`.

Loads are simulated under a referee; `--random-loads 2000` adds small ones of all sizes. Read first:
policies/template.py, to break rules with a copy of it. Read next: policies/referee.py, the rules,
and lab/simulator/referee.py, the loads.
"""

from cyclopts.types import NonNegativeInt
from tqdm import tqdm

from cli.model import split_names


def main(policies: str, *, random_loads: NonNegativeInt = 0) -> None:
    """Name the first rule that a policy breaks, with exit status 2, or all rules that it keeps.

    Parameters
    ----------
    policies
        Such as my_policy.py:Eager, several with commas.
    random_loads
        Simulate so many small random loads, too.
    """
    from lab.simulator.referee import check_policy, check_random_loads, rules_of

    for policy in split_names(policies):
        verdict = check_policy(policy)
        wasteful = verdict.wasteful
        iterations = verdict.iterations
        if verdict.violation is None and random_loads:
            seeds = tqdm(range(random_loads), policy, leave=False, disable=None)
            verdict = check_random_loads(policy, seeds)
            iterations += verdict.iterations
        if verdict.violation:
            raise ValueError(verdict.violation.sentence)
        rules = ", ".join(rules_of(policy))
        print(f"{policy} keeps all rules: {rules} ({iterations:,} iterations)")
        if wasteful:
            print(f"wasteful: {wasteful}")
