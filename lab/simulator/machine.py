"""Simulated machines that serve loads: GPUs of a cost model, or this machine as it was profiled.

Both are a lab.measure.machine.Machine whose clock counts instead of running.

Read first: simulation.py, lab/measure/machine.py. Read next: lab/commands/serve.py."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from config import EngineConfig
from lab.measure import run_loop, timing
from lab.measure.capacity import Base
from lab.measure.machine import MakePrompts, RealMachine
from lab.measure.machine_info import MachineInfo, RealMachineInfo
from lab.measure.metrics import Percentiles, percentiles
from lab.measure.run_loop import Recorder, Run
from lab.measure.token_budget import BASE_BATCH, Case, Profiled, base_context, time_iterations
from lab.measure.workload import Arrival
from lab.simulator.cost_model import CostModel, FittedCost
from lab.simulator.simulation import Simulated, simulate
from parallel import runner_for

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


class CountingMachine:
    """A machine that serves by the times of a cost model, not by those of a clock."""

    def __init__(
        self, run: Callable[..., Simulated], make_prompts: MakePrompts, drift: float = 0.0
    ) -> None:
        """`run` is simulation.simulate, or simulate_pools, with a cost model. `make_prompts` is as
        of RealMachine; `drift` is how far the real machine changed while the cost model was fitted
        to it."""
        self.run = run
        self.make_prompts = make_prompts
        self.drift = drift

    def serve(
        self,
        config: EngineConfig,
        arrivals: Sequence[Arrival],
        *,
        progress: Callable[[], object] = run_loop.no_progress,
        recorder: Recorder | None = None,
    ) -> Run:
        """Serve a load by simulated engines of `config`."""
        prompts = None  # only their lengths matter
        if config.prefix_caching:
            prompts = self.make_prompts(arrivals, VOCABULARY)
        run = self.run(config, arrivals, prompts=prompts, progress=progress, recorder=recorder).run
        return replace(run, drift=self.drift)


class SimulatedMachine(CountingMachine):
    """GPUs of a cost model. `model` is the name of the model, `max_len` and `chunk` are of the load
    that the machine is for."""

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
        super().__init__(partial(simulate, cost, replicas=replicas), make_prompts)
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
            constants=asdict(device),
        )
        self.notes = f"constants: {device.source}\n"
        if self.micro_batches > 1:
            self.notes += (
                f"the batch of each of {self.micro_batches} micro-batches, "
                f"the memory of each of {replicas} replicas\n"
            )


class ProfileCases(NamedTuple):
    """The batches that a FittedCost is fitted to, and others, which tell how well."""

    fitted: list[Case]
    held_out: list[Case]


def profile_cases(max_len: int) -> ProfileCases:
    """The batches to be timed: each chunk at each context with each count of decodes. Chunks and
    contexts are of at most max_len tokens."""

    def grid(
        chunks: Sequence[int], contexts: Sequence[int], decode_counts: Sequence[int]
    ) -> Iterator[Case]:
        for chunk, context, decodes in product(chunks, contexts, decode_counts):
            if chunk or decodes:
                yield min(chunk, max_len) + decodes, max(1, context), decodes

    longest = 3 * max_len // 4
    fitted = [
        *grid((0, 32, 256), (max_len // 8, longest), (0, 4, 16)),
        *grid([512], [max_len], [0]),
    ]
    contexts = (max_len // 32, max_len // 2, max_len)
    held_out = grid((0, min(48, longest), min(300, longest)), contexts, (0, 6, 12))
    return ProfileCases(fitted, list(held_out))


@dataclass(frozen=True, kw_only=True)
class FittedMachineInfo(RealMachineInfo):
    """What is known of a real machine, and of the law that predicts its iterations."""

    law: Sequence[float]  # of an IterationTime
    prediction_error: Percentiles  # relative, of batches that were not fitted
    profile_busy: bool


class FittedMachine(CountingMachine):
    """A real machine, simulated with laws that are fitted to batches that are timed on it."""

    def __init__(self, real: RealMachine, *, max_len: int, attention: str, is_alone: bool) -> None:
        """Times the batches. `is_alone`: nothing runs on the real machine afterwards, and the
        heading says that all is simulated."""
        self.real = real
        self.base = real.base
        self.micro_batches = real.micro_batches
        cases = profile_cases(max_len)
        count = len(cases.fitted)
        rows, drift = _time(real, [*cases.fitted, *cases.held_out], max_len, attention)
        timed = [(row.shape, row.seconds) for row in rows]
        busy = drift > timing.BUSY
        cost = FittedCost([timed[:count]])
        run = partial(simulate, cost, replicas=real.micro_batches)
        super().__init__(run, real.make_prompts, drift)
        self.cost = cost
        (law,) = cost.laws
        error = percentiles(abs(law.predict(shape) / s - 1) for shape, s in timed[count:])
        fields: dict[str, Any] = {**vars(real.info)}
        if is_alone:
            fields["device"] = f"simulated: {real.info.device}"
        self.info = FittedMachineInfo(
            **fields,
            law=law.law,
            prediction_error=error,
            profile_busy=busy,
        )
        quality = (
            f"off by {error.p50:.1%} in the median, {error.p90:.1%} at P90, {error.max:.1%} at most"
        )
        self.notes = (
            f"{real.notes}fitted to {count} batches\n"
            f"predictions of {len(cases.held_out)} others: {timing.TOO_BUSY if busy else quality}\n"
        )


def _time(
    real: RealMachine, cases: Sequence[Case], max_len: int, attention: str
) -> tuple[list[Profiled], float]:
    """The times of batches on a real machine, and its drift."""
    page_size = min(64, max_len)
    pages = 0  # that the largest batch needs
    for budget, context, decodes in cases:
        chunk_pages = -(-max(budget - decodes, context) // page_size)
        pages = max(pages, -(-context // page_size) * decodes + chunk_pages)
    runner = runner_for(real.model)(real.model, pages, page_size, max_len, attention)

    return timing.steadily(partial(time_iterations, runner, cases), real.model.device)
