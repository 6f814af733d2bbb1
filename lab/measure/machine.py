"""A machine that serves loads: this one with a model, or another kind with the same interface.

Read first: run_loop.py, capacity.py. Other kinds: lab/simulator/machine.py."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from config import EngineConfig
from lab.measure import capacity, load_run, run_loop, timing
from lab.measure.capacity import Base
from lab.measure.machine_info import MachineInfo, measure_machine
from lab.measure.run_loop import Recorder, Run
from lab.measure.workload import Arrival
from model import GPT


class Machine(Protocol):
    """What a load is served by, real or simulated."""

    @property
    def info(self) -> MachineInfo:
        """What is known of it."""
        ...

    @property
    def base(self) -> Base:
        """How fast it is."""
        ...

    @property
    def micro_batches(self) -> int:
        """How many batches it computes at once."""
        ...

    @property
    def notes(self) -> str:
        """More lines for a heading. Each ends with a newline."""
        ...

    def serve(
        self,
        config: EngineConfig,
        arrivals: Sequence[Arrival],
        *,
        progress: Callable[[], object],
        recorder: Recorder | None,
    ) -> Run:
        """Serve a load by an engine of `config`."""
        ...


MakePrompts = Callable[[Sequence[Arrival], int], list[list[int]]]  # of a load, and a vocabulary


class RealMachine:
    """This machine with a model. `make_prompts` is workload.prompts with a seed."""

    def __init__(
        self,
        model: GPT,
        name: str,
        *,
        chunk: int,
        max_len: int,
        attention: str,
        make_prompts: MakePrompts,
    ) -> None:
        """Measures the base of SLOs and the limits of the machine. `name` is that of the model."""
        self.model = model
        self.make_prompts = make_prompts
        self.base, drift = capacity.measure_base(model, chunk, max_len, attention)
        info = measure_machine(model, name, chunk, attention)
        self.micro_batches = 1
        self.notes = ""
        self.info = replace(info, base_busy=drift > timing.BUSY)

    def serve(
        self,
        config: EngineConfig,
        arrivals: Sequence[Arrival],
        *,
        progress: Callable[[], object] = run_loop.no_progress,
        recorder: Recorder | None = None,
    ) -> Run:
        """Serve a load by an engine of `config`, in real time: see load_run.serve."""
        return load_run.serve(
            self.model,
            config,
            arrivals,
            self.make_prompts(arrivals, self.model.config.vocab_size),
            progress=progress,
            recorder=recorder,
        )
