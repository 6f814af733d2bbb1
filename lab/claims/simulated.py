"""Both papers' experiments on their machines, and a post's, simulated, beside what they say.

    for table in EXPERIMENTS["bubbles"].function(setup): print(table.to_markdown())

S is SARATHI, SS is Sarathi-Serve, B a post on schedulers; F is a figure, T a table, § a section.
Read first: simulated_batches.py, simulated_sarathi.py, simulated_serving.py. Read next:
lab/commands/simulate.py."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lab.claims import simulated_batches as batches
from lab.claims import simulated_sarathi as sarathi
from lab.claims import simulated_serving as serving
from lab.claims.comparison import Table
from lab.claims.systems import Setup


@dataclass(frozen=True)
class Experiment:
    """Some claims that are simulated together."""

    function: Callable[[Setup], Iterator[Table]]
    claims: str
    is_drawn: bool = False  # whether one of its tables has a figure


EXPERIMENTS = {
    "sarathi": Experiment(batches.sarathi_batches, "S-T2, F3, F4a, F7, F8, §4.2, §4.3.1"),
    "serving": Experiment(batches.serving_batches, "SS-T3, §3.3, F6, F9, F14", is_drawn=True),
    "throughput": Experiment(sarathi.end_to_end, "S-T4, F9, F11, F13", is_drawn=True),
    "bubbles": Experiment(sarathi.bubble_example, "SS-F8", is_drawn=True),
    "pipeline": Experiment(sarathi.figure_12, "S-F12", is_drawn=True),
    "capacity": Experiment(serving.serving_capacity, "SS-F10, F11", is_drawn=True),
    "slo": Experiment(serving.capacity_against_slo, "SS-F12"),
    "nodes": Experiment(serving.across_nodes, "SS-F13"),
    "ablation": Experiment(serving.ablation, "SS-T4", is_drawn=True),
    "post": Experiment(serving.post, "B-7", is_drawn=True),
}
