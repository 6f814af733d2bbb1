"""What one call of a policy's `schedule()` costs: `python -m examples.schedule_cost`.

Read first: lab/measure/schedule_cost.py."""

from argparse import ArgumentParser

from cli.console import run
from cli.tables import format_table
from lab.measure.schedule_cost import RUNNING, WAITING, schedule_us


def main() -> None:
    """Print the table of `schedule_us`."""
    ArgumentParser(description=__doc__).parse_args()  # --help prints the text above
    medians = schedule_us()
    rows = {policy: [("median us", us, ".0f")] for policy, us in medians.items()}
    print(f"schedule() with {RUNNING} requests running and {WAITING:,} waiting\n")
    print(format_table("policy", rows))
    slowest = max(medians, key=lambda policy: medians[policy])
    print(f"\nslowest: {slowest}, {medians[slowest]:.0f} us")


if __name__ == "__main__":
    run(main)
