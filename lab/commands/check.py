"""Name the first rule that a policy breaks: `bench.py check --policies my_policy.py:Eager`.

Loads are simulated under a referee; `--random-loads 2000` adds small ones of all sizes. No rule
says how long a request may wait, so times to first token are printed beside sarathi-serve's. Read
first: policies/template.py, to break rules with a copy of it. Read next: policies/referee.py, the
rules, and lab/simulator/referee.py, the loads.
"""

from cyclopts.types import NonNegativeInt
from tqdm import tqdm

from cli.model import split_names

BESIDE = "sarathi-serve"


def main(policies: str, *, random_loads: NonNegativeInt = 0) -> None:
    """Name the first rule that a policy breaks, with exit status 2, or all rules that it keeps.

    Parameters
    ----------
    policies
        Such as my_policy.py:Eager, several with commas.
    random_loads
        Simulate so many small random loads, too.
    """
    from lab.measure.metrics import percentiles
    from lab.simulator.referee import check_policy, check_random_loads, rules_of

    beside = check_policy(BESIDE)
    beside_s = percentiles(beside.ttfts_s)
    for policy in split_names(policies):
        tried = check_policy(policy)
        verdict = tried
        iterations = tried.iterations
        if tried.violation is None and random_loads:
            seeds = tqdm(range(random_loads), policy, leave=False, disable=None)
            verdict = check_random_loads(policy, seeds)
            iterations += verdict.iterations
        if verdict.violation:
            raise ValueError(verdict.violation.sentence)
        rules = ", ".join(rules_of(policy))
        print(f"{policy} keeps all rules: {rules} ({iterations:,} iterations)")
        p99_s = percentiles(tried.ttfts_s).p99
        print(f"P99 TTFT {p99_s:.2f} s, {BESIDE} {beside_s.p99:.2f} s on the same loads")
        if tried.starves(beside):
            longest_s = max(tried.ttfts_s)
            print(f"starving: somebody waits {longest_s:.2f} s, {max(beside.ttfts_s):.2f} s there")
        if tried.wasteful:
            print(f"wasteful: {tried.wasteful}")
