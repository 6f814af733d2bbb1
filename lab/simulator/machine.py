"""Simulated machines that serve loads: GPUs of a cost model, whose clock counts.

Read first: simulation.py, lab/measure/machine.py. Read next: lab/commands/serve.py."""

from collections.abc import Callable, Sequence
from functools import partial

from config import EngineConfig
from lab.measure import run_loop
from lab.measure.capacity import Base
from lab.measure.machine import MakePrompts
from lab.measure.machine_info import MachineInfo
from lab.measure.run_loop import Recorder, Run
from lab.measure.token_budget import BASE_BATCH, base_context
from lab.measure.workload import Arrival
from lab.simulator.cost_model import CostModel
from lab.simulator.simulation import Simulated, simulate

VOCABULARY = 256  # of random prompts, which matter only where prefixes are shared


def base_of(cost: CostModel, max_len: int = 8192, chunk: int = 2048) -> Base:
    """The Base of a simulated machine, as capacity.measure_base measures that of a real one."""
    context = base_context(max_len)
    chunk = min(chunk, max_len)
    return Base(
        seconds=cost.seconds([(0, context - 1, 1)] * BASE_BATCH),
        prefill_token_s=cost.seconds([(0, 0, chunk)]) / chunk,
        decodes=BASE_BATCH,
        context=context,
    )


class SimulatedMachine:
    """GPUs of a cost model. `model` is the name of the model, `max_len` and `chunk` are of the load
    that the machine is for, `make_prompts` is as of RealMachine."""

    def __init__(
        self,
        cost: CostModel,
        model: str,
        *,
        replicas: int,
        max_len: int,
        chunk: int,
        make_prompts: MakePrompts,
    ) -> None:
        self.simulate = partial(simulate, cost, replicas=replicas)
        self.make_prompts = make_prompts
        self.cost = cost
        self.base = base_of(cost, max_len, chunk)
        self.micro_batches = cost.pp * replicas
        device = cost.device
        copies = f", {replicas} replicas" if replicas > 1 else ""
        self.info = MachineInfo(
            device=(
                f"simulated: {cost.tp * self.micro_batches} x {device.name}, TP {cost.tp} x "
                f"PP {cost.pp}{copies}, {1e3 * cost.cpu_s:g} ms of CPU per iteration and stage"
            ),
            model=model,
            dtype="16 bits",
        )
        self.notes = f"constants: {device.source}\n"
        if self.micro_batches > 1:
            self.notes += (
                f"the batch of each of {self.micro_batches} micro-batches, "
                f"the memory of each of {replicas} replicas\n"
            )

    def serve(
        self,
        config: EngineConfig,
        arrivals: Sequence[Arrival],
        *,
        progress: Callable[[], object] = run_loop.no_progress,
        recorder: Recorder | None = None,
        simulate: Callable[..., Simulated] | None = None,
    ) -> Run:
        """Serve a load by simulated engines of `config`, or as `simulate` has it, for two pools."""
        simulate = simulate or self.simulate
        prompts = None  # only their lengths matter
        if config.prefix_caching:
            prompts = self.make_prompts(arrivals, VOCABULARY)
        return simulate(config, arrivals, prompts=prompts, progress=progress, recorder=recorder).run
