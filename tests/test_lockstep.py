"""Two checkouts decide the same: their schedulers run in lock step, on the same random loads.

    NANOSARATHI_BASE=../other-checkout python -m pytest tests/test_lockstep.py

Every policy is simulated here and, in a process of its own, in the other checkout. After every
iteration the batch, the preempted, running and waiting requests, their block tables and the free
pages are compared. NANOSARATHI_LOADS says how many loads each policy gets (default: 100).

This file is also the program that the other checkout runs: a policy and a seed, as JSON, for each
line of its input; the states after each iteration, as JSON, for each line of its output.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from lab.measure.run_loop import LoadRun
from lab.simulator.cost_model import CostModel
from lab.simulator.random_loads import random_load
from lab.simulator.simulation import Simulation
from policies import POLICIES

BASE = os.environ.get("NANOSARATHI_BASE")
LOADS = int(os.environ.get("NANOSARATHI_LOADS", "100"))
OPTIONS = {  # each load has some of them
    "sarathi": {"tile": [1, 4, 16]},
    "dynamic": {"tile": [1, 4, 16], "tbt_slo": [None, 0.012, 0.03, 0.1]},
}


class States:
    """A recorder of run_loop.LoadRun. Sometimes it aborts a request, or breaks the journal as if a
    Ctrl-C had come while it changed."""

    def __init__(self, seed):
        self.draw = Random(seed)
        self.rate = self.draw.choice([0.0, 0.0, 0.05])
        self.states = []

    def watch(self, schedulers):
        (self.scheduler,) = schedulers

    def add(self, iteration):
        scheduler = self.scheduler
        state = {
            "chunks": iteration.chunks,
            "budget": iteration.budget,
            "preempted": iteration.preempted,
            "end": iteration.end,
            "waiting": [request.id for request in scheduler.waiting],
            "running": [(r.id, r.num_computed, list(r.pages)) for r in scheduler.running],
            "free_pages": scheduler.pages.num_free,
            "times": [request.token_times[-1:] for request in scheduler.running],
        }
        self.states.append(state)
        if scheduler.requests and self.draw.random() < self.rate:
            scheduler.finish(self.draw.choice([*scheduler.requests.values()]), "abort")
        scheduler.journal.broken |= self.draw.random() < self.rate


def states_of(policy, seed):
    """The states after each iteration of a random load."""
    load = random_load(policy, seed)
    states = States(seed)
    options = {k: states.draw.choice(values) for k, values in OPTIONS.get(policy, {}).items()}
    config = replace(load.config, policy_options=options)
    simulation = Simulation(CostModel.named("llama3-8b"), config)
    run = LoadRun(simulation, load.arrivals, load.prompts, recorder=states)
    while run.step():
        pass
    return states.states


def main():
    """Answer each policy and seed on a line of stdin with a line of states."""
    for line in sys.stdin:
        print(json.dumps(states_of(*json.loads(line))), flush=True)


@pytest.mark.timeout(0)
@pytest.mark.skipif(not BASE, reason="NANOSARATHI_BASE names no other checkout")
def test_two_checkouts_decide_the_same():
    cases = [(policy, seed) for policy in POLICIES for seed in range(LOADS)]
    other = subprocess.run(
        [sys.executable, str(Path(__file__).resolve())],
        cwd=BASE,
        env={**os.environ, "PYTHONPATH": str(Path(BASE).resolve())},
        input="\n".join(map(json.dumps, cases)),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    for case, line in zip(cases, other.stdout.splitlines(), strict=True):
        assert json.loads(json.dumps(states_of(*case))) == json.loads(line), case


@pytest.mark.parametrize("policy", POLICIES)
def test_the_loads_preempt_and_share(policy):
    """Else the comparison would not compare much."""
    states = [state for seed in range(25) for state in states_of(policy, seed)]
    assert any(state["preempted"] for state in states)
    tables = [[page for _, _, pages in state["running"] for page in pages] for state in states]
    assert any(len(set(pages)) < len(pages) for pages in tables)


if __name__ == "__main__":
    main()
