"""The loads on which `bench.py check` holds a policy to the rules of policies/referee.py.

    violation = check_policy("my_policy.py:Eager").violation

`check_policy` simulates loads of all classes, with ample and with tight memory, with small and
large chunks, with and without prefix caching. Read first: policies/referee.py. Read
next: simulation.py.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, product

from config import EngineConfig
from lab.measure.capacity import possible_qps, slo_seconds
from lab.measure.run_plan import run_plan
from lab.measure.workload import poisson, sample_lengths
from lab.simulator.cost_model import CostModel
from lab.simulator.machine import base_of
from lab.simulator.random_loads import RandomLoad, random_load
from lab.simulator.simulation import simulate
from policies import find_policy
from policies.observers import Iteration
from policies.priority import PRIORITIES
from policies.referee import RULES, BrokenRuleError, Referee, Violation
from scheduler import Scheduler

MODEL = "llama3-8b"  # on one simulated A100, which gets more requests than it can serve
REQUESTS = 60
CHUNKS = (128, 1024)
MAX_BATCH = 32
MAX_LEN = 2048
PAGE_SIZE = 64
MEMORY = {"ample": 24, "tight": 5}  # how many requests of MAX_LEN fit
LOAD = 1.6  # the rate of arrivals, as a multiple of the highest rate that is possible
BASE_CHUNK = 512  # of the iteration that measures how fast prefills are
STARVES = 1.4  # times the longest wait for a first token under sarathi-serve


def rules_of(policy: str) -> list[str]:
    """The rules that hold for a policy. Raises ValueError if there is no such policy."""
    cls = find_policy(policy)
    left_out = {"no decode dropped": cls.drops_decodes, "in order": cls.reorders}
    return [rule for rule in RULES if not left_out.get(rule)]


class Referees:
    """A recorder of run_loop.LoadRun that sets a Referee beside each scheduler."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.referees: list[Referee] = []

    def watch(self, schedulers: Sequence[Scheduler]) -> None:
        """Watch each of these schedulers."""
        self.referees = [Referee(scheduler, self.policy) for scheduler in schedulers]

    def add(self, iteration: Iteration) -> None:
        """Referees watch the schedulers, not what comes of them."""


@dataclass(frozen=True)
class Verdict:
    """What the referees say about a policy."""

    iterations: int  # that kept all rules
    violation: Violation | None  # the first; None if all rules were kept
    wasteful: str = ""  # what breaks no rule and helps nobody, in words; "" if there is nothing
    ttfts_s: Sequence[float] = ()  # of all requests

    def starves(self, other: "Verdict") -> bool:
        """Whether some request waits much longer for its first token than any under the other."""
        return max(self.ttfts_s) > STARVES * max(other.ttfts_s)


def check_policy(policy: str) -> Verdict:
    """Simulate the loads under a policy, until it breaks a rule.

    Raises ValueError if there is no such policy.
    """
    base = base_of(CostModel.named(MODEL), MAX_LEN, BASE_CHUNK)
    slo_s = slo_seconds("strict", base)
    lengths = sample_lengths("sharegpt4", REQUESTS, MAX_LEN, seed=0)
    arrivals = poisson(lengths, LOAD * possible_qps(base, lengths), seed=0)
    classes = zip(arrivals, cycle(PRIORITIES), strict=False)
    arrivals = [arrival._replace(priority=priority) for arrival, priority in classes]
    prompts = [[i % 4] * arrival.prompt_len for i, arrival in enumerate(arrivals)]  # share prefixes
    loads: dict[str, RandomLoad] = {}
    for memory, chunk, sharing in product(MEMORY, CHUNKS, (False, True)):
        config = EngineConfig(
            chunk=chunk,
            max_batch=MAX_BATCH,
            max_len=MAX_LEN,
            page_size=PAGE_SIZE,
            pages=MEMORY[memory] * MAX_LEN // PAGE_SIZE,
        )
        (config,) = run_plan([policy], [PAGE_SIZE], config, slo_s, caching=[sharing]).values()
        suffix = ", prefix caching" if sharing else ""
        name = f"{policy}, chunk {chunk}, {memory} memory{suffix}"
        loads[name] = RandomLoad(config, arrivals, prompts)
    return check_loads(loads.items())


def check_random_loads(policy: str, seeds: Iterable[int]) -> Verdict:
    """Simulate a small random load for each seed under a policy, until it breaks a rule.

    Each has sizes of its own: of chunks, batches, pages, prompts and outputs, memory from tight to
    ample, with and without prefix caching. Raises ValueError if there is no such policy."""
    verdict = check_loads((f"{policy}, random load {i}", random_load(policy, i)) for i in seeds)
    return replace(verdict, wasteful="")  # on so small loads that says little


def check_loads(loads: Iterable[tuple[str, RandomLoad]]) -> Verdict:
    """Simulate loads, each with a name, until one breaks a rule."""
    cost = CostModel.named(MODEL)
    iterations = 0
    wasteful = ""
    ttfts_s: list[float] = []
    for name, load in loads:
        referees = Referees(name)
        try:
            simulation = simulate(cost, load.config, load.arrivals, load.prompts, recorder=referees)
        except BrokenRuleError as error:
            return Verdict(iterations, error.violation)
        iterations += len(simulation.run.iterations)
        wasteful = wasteful or referees.referees[0].wasteful
        ttfts_s += [request.ttft or 0.0 for request in simulation.run.completions]
    return Verdict(iterations, None, wasteful, ttfts_s)
