"""What serves the requests of a claim: this machine, or a simulation that is fitted to it.

Read first: lab/measure/capacity.py and lab/simulator/machine.py. Read next: bench.py."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from config import EngineConfig
from lab.measure import timing, workload
from lab.measure.capacity import Base, measure_base
from lab.measure.load_run import Run, serve
from lab.measure.workload import Arrival
from lab.simulator.cost_model import FittedCost
from lab.simulator.machine import profile_cases
from lab.simulator.simulation import simulate
from model import GPT
from parallel import runner_for
from policies.token_budget import Profiled, time_iterations


@dataclass(frozen=True)
class ServingLimits:
    """What a server is limited to, whatever its policy."""

    chunk: int
    batch: int
    max_len: int
    page_size: int
    kv_tokens: int  # tokens that fit into the cache
    attention: str

    @property
    def config(self) -> EngineConfig:
        """The EngineConfig, without a policy."""
        return EngineConfig(
            chunk=self.chunk,
            max_batch=self.batch,
            max_len=self.max_len,
            page_size=self.page_size,
            pages=self.kv_tokens // self.page_size,
            attention=self.attention,
        )


class ServingMachine(Protocol):
    """A machine that can serve requests under any policy."""

    base: Base
    base_busy: bool  # whether the machine was too busy while its base was timed

    def serve(
        self, config: EngineConfig, arrivals: Sequence[Arrival], progress: Callable[[], object]
    ) -> Run:
        """Serve the arrivals by an engine of this config; `progress` is called after each."""
        ...


class RealMachine:
    """This machine, in real time."""

    def __init__(self, model: GPT, limits: ServingLimits, seed: int) -> None:
        self.model = model
        self.seed = seed
        self.base, drift = measure_base(model, limits.chunk, limits.max_len, limits.attention)
        self.base_busy = drift > timing.BUSY

    def serve(
        self, config: EngineConfig, arrivals: Sequence[Arrival], progress: Callable[[], object]
    ) -> Run:
        """Serve the arrivals with random prompts."""
        prompts = workload.prompts(arrivals, self.model.config.vocab_size, self.seed)
        return serve(self.model, config, arrivals, prompts, progress=progress)


class FittedMachine(RealMachine):
    """This machine, simulated: iterations take what a law says that is fitted to a profile."""

    def __init__(self, model: GPT, limits: ServingLimits, seed: int) -> None:
        super().__init__(model, limits, seed)
        max_len = limits.max_len
        cases, _ = profile_cases(max_len)
        page_size = min(64, max_len)
        pages = max(
            -(-context // page_size) * decodes + -(-max(budget - decodes, context) // page_size)
            for budget, context, decodes in cases
        )
        runner = runner_for(model)(model, pages, page_size, max_len, limits.attention)

        def time_cases() -> list[Profiled]:
            return time_iterations(runner, cases)

        rows, self.drift = timing.steadily(time_cases, model.device)
        self.cost = FittedCost([[(row.shape, row.seconds) for row in rows]])

    def serve(
        self, config: EngineConfig, arrivals: Sequence[Arrival], progress: Callable[[], object]
    ) -> Run:
        """Serve the arrivals on a clock that counts."""
        run = simulate(self.cost, config, arrivals, progress=progress).run
        return replace(run, drift=self.drift)
