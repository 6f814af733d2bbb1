"""Two checkouts decide the same: their schedulers run in lock step, on the same random loads.

    NANOSARATHI_BASE=../other-checkout python -m pytest tests/test_lockstep.py

Every policy runs here and, in a process of its own, in the other checkout: the module names are the
same. Both sides follow the same virtual clock and get the same tokens. After every iteration the
test compares the batch, the preempted, running and waiting requests, their block tables and the
free pages. NANOSARATHI_ITERATIONS says how many iterations there are in all (default: 5,000).

This file is also the program that the other checkout runs: a case, as JSON, for each line of its
input; the states after each iteration, as JSON, for each line of its output.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from policies import POLICIES, make_scheduler
from policies.iteration_time import BatchShape
from policies.pages import make_pages
from request import Request, Service

BASE = os.environ.get("NANOSARATHI_BASE")
ITERATIONS = int(os.environ.get("NANOSARATHI_ITERATIONS", "5000"))
LONGEST = 400  # iterations of one case; requests that have not ended by then are left
VOCABULARY = 5  # small, so that stop tokens come and prompts begin alike

# ------------------------------------------------------------------ what both sides run


class LockstepRun:
    """One case: a scheduler on a virtual clock, and the requests that arrive, abort and end."""

    def __init__(self, case):
        self.now = 0.0
        self.random = Random(case["seed"])
        self.abort_rate = case["abort_rate"]
        self.interrupt_rate = case["interrupt_rate"]
        options = case["sizes"] | case["options"]
        if "profile" in options:
            options["profile"] = [(BatchShape(*shape), s) for shape, s in options["profile"]]
        pages = make_pages(*case["pages"])
        self.scheduler = make_scheduler(case["policy"], pages, clock=lambda: self.now, **options)
        self.coming = [make_request(i, fields) for i, fields in enumerate(case["requests"])]

    def run(self):
        """The states after each iteration, until all requests have ended."""
        states = []
        while len(states) < LONGEST and (self.coming or self.scheduler.requests):
            self.let_requests_arrive()
            self.abort_or_interrupt()
            if self.scheduler.requests:
                states.append(self.iterate())
        return states

    def let_requests_arrive(self):
        if not self.scheduler.requests and self.coming:
            self.now = max(self.now, self.coming[0].arrival)
        while self.coming and self.coming[0].arrival <= self.now:
            self.scheduler.add(self.coming.pop(0))

    def abort_or_interrupt(self):
        requests = self.scheduler.requests
        if requests and self.random.random() < self.abort_rate:
            self.scheduler.finish(requests[self.random.choice(sorted(requests))], "abort")
        if self.random.random() < self.interrupt_rate:
            self.scheduler.journal.broken = True  # as if a Ctrl-C had come while it changed

    def iterate(self):
        """One iteration, and the state after it."""
        scheduler = self.scheduler
        batch = scheduler.next_batch()
        chunks = [(r.id, start, length, r.is_decoding) for r, start, length in batch]
        preempted = list(batch.preempted)
        computed = [chunk.request for chunk in batch]
        if self.random.random() < self.abort_rate:  # an abort while the batch is computed
            scheduler.finish(self.random.choice(computed), "abort")
        seconds = self.seconds(batch)
        self.now += seconds
        scheduler.observe(batch, seconds)
        tokens = [None] * len(batch)
        for i, chunk in enumerate(batch):
            if chunk.yields_token:
                tokens[i] = self.random.randrange(VOCABULARY)
        moved = scheduler.advance(batch, tokens, self.now)
        return {
            "chunks": chunks,
            "budget": batch.budget,
            "preempted": preempted,
            "running": [request.id for request in scheduler.running],
            "waiting": [request.id for request in scheduler.waiting],
            "block_tables": [request.pages for request in scheduler.running],
            "num_computed": [request.num_computed for request in scheduler.running],
            "free_pages": scheduler.pages.num_free,
            "moved": [(request.id, token) for request, token in moved],
            "ended": [(r.id, r.finish_reason) for r in computed if r.finish_reason],
            "preemptions": [request.preemptions for request in computed],
            "scheduled": [request.scheduled for request in computed],
            "token_times": [request.token_times[-1:] for request in computed],
        }

    def seconds(self, batch):
        """How long a batch takes: a law of its chunks, and noise."""
        seconds = 0.01
        for request, start, length in batch:
            if request.is_decoding:
                seconds += 2e-4 + 1e-5 * start
            else:
                seconds += 1e-3 * length + 1e-6 * length * start
        return seconds * self.random.lognormvariate(0, 0.1)


def make_request(number, fields):
    """The Request of a case's fields."""
    return Request(
        id=number,
        tokens=list(fields["prompt"]),
        prompt_len=len(fields["prompt"]),
        max_new_tokens=fields["max_new_tokens"],
        arrival=fields["arrival"],
        stop=frozenset(fields["stop"]),
        service=Service(fields["priority"], fields["ttft_slo"], fields["tbt_slo"]),
    )


def main():
    """Answer each case on a line of stdin with a line of states."""
    for line in sys.stdin:
        states = LockstepRun(json.loads(line)).run()
        print(json.dumps(states), flush=True)


# ------------------------------------------------------------------ the cases


def random_case(policy, seed):
    """A random load and random sizes for a policy, as a dict that JSON can hold."""
    draw = Random(f"{policy} {seed}")
    max_len = draw.choice([8, 24, 60, 120])
    page_size = draw.choice([size for size in (1, 2, 4, 16, 24, 60, 120) if size <= max_len])
    max_batch = draw.choice([1, 2, 4, 8, 16])
    least_pages = -(-max_len // page_size)
    ample_pages = least_pages * max_batch
    few_pages = draw.randint(least_pages, max(least_pages, ample_pages // 2))
    beginnings = [tokens(draw, draw.randint(1, max_len - 2)) for _ in range(3)]
    requests = []
    arrival = 0.0
    gap_s = draw.choice([0.0, 0.01, 0.1, 1.0])
    for _ in range(draw.randint(1, 24)):
        arrival += draw.expovariate(1 / gap_s) if gap_s else 0.0
        requests.append(random_request(draw, arrival, max_len, beginnings))
    return {
        "policy": policy,
        "seed": seed,
        "sizes": {
            "chunk": draw.choice([1, 2, 5, 8, 16, 32, 64]),
            "max_batch": max_batch,
            "max_len": max_len,
        },
        "pages": [
            draw.choice([few_pages, few_pages, ample_pages, 2 * ample_pages]),
            page_size,
            draw.random() < 0.5,  # prefix caching
        ],
        "options": random_options(draw, policy),
        "requests": requests,
        "abort_rate": draw.choice([0.0, 0.0, 0.05]),
        "interrupt_rate": draw.choice([0.0, 0.0, 0.0, 0.02]),
    }


def tokens(draw, count):
    return [draw.randrange(VOCABULARY) for _ in range(count)]


def random_request(draw, arrival, max_len, beginnings):
    """The fields of one request, whose prompt may begin like that of others."""
    beginning = draw.choice([[], *beginnings])
    length = draw.choice([draw.randint(1, max_len - 1), max_len // 4, max_len // 2])
    prompt = (beginning + tokens(draw, max_len))[:length]
    return {
        "arrival": arrival,
        "prompt": prompt,
        "max_new_tokens": draw.randint(1, max_len - len(prompt)),
        "stop": draw.choice([[], [], [0]]),
        "priority": draw.randrange(4),
        "ttft_slo": draw.choice([None, None, 0.1, 1.0]),
        "tbt_slo": draw.choice([None, None, 0.02, 0.1]),
    }


def random_options(draw, policy):
    """The policy's own options, some of them."""
    options = {}
    if policy in ("sarathi", "dynamic", "priority"):
        options["tile"] = draw.choice([1, 1, 4, 16])
    if policy in ("dynamic", "priority"):
        options["tbt_slo"] = draw.choice([None, 0.012, 0.03, 0.1])
        if draw.random() < 0.3:
            shapes = [(0, 4, 80, 0), (16, 4, 80, 136), (32, 0, 0, 528), (64, 2, 100, 2080)]
            options["profile"] = [(shape, 0.01 + 1e-3 * shape[0]) for shape in shapes]
    if policy == "priority":
        options["ttft_slo"] = draw.choice([0.05, 0.5, 2.0])
        options["ageing"] = draw.choice([0.1, 1.0, 30.0])
    return options


# ------------------------------------------------------------------ the test


class OtherCheckout:
    """The process that runs this file's program with the modules of another checkout."""

    def __init__(self, folder):
        assert (Path(folder) / "scheduler.py").is_file(), f"NANOSARATHI_BASE={folder}: no checkout"
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(Path(folder).resolve())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, case):
        """Its states in this case."""
        print(json.dumps(case), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


if BASE:

    @pytest.fixture(scope="module")
    def other():
        checkout = OtherCheckout(BASE)
        yield checkout
        checkout.close()

    @pytest.mark.timeout(0)
    @pytest.mark.parametrize("policy", POLICIES)
    def test_two_checkouts_decide_the_same(policy, other):
        iterations = 0
        seed = 0
        while iterations < math.ceil(ITERATIONS / len(POLICIES)):
            case = random_case(policy, seed)
            expected = other.run(case)
            states = json.loads(json.dumps(LockstepRun(case).run()))
            for i, (state, expected_state) in enumerate(zip(states, expected, strict=False)):
                assert state == expected_state, f"seed {seed}, iteration {i}"
            assert len(states) == len(expected), f"seed {seed}"
            iterations += len(states)
            seed += 1


@pytest.mark.parametrize("policy", POLICIES)
def test_the_cases_preempt_share_stop_and_end(policy):
    """Else the comparison would not compare much."""
    preemptions = 0
    stops = 0
    shared = 0
    for seed in range(60):
        for state in LockstepRun(random_case(policy, seed)).run():
            preemptions += len(state["preempted"])
            stops += sum(reason == "stop" for _, reason in state["ended"])
            tables = state["block_tables"]
            shared += len(set().union(*tables)) < sum(map(len, tables))
    assert preemptions
    assert stops
    assert shared


if __name__ == "__main__":
    main()
