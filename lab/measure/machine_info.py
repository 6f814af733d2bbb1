"""The machine and the model that numbers depend on, and the limits that times are compared with.

    info = measure_machine(model, "wide-160m", rows=256)
    print(info.heading())       what stands above all tables
    info.to_json()              what --json holds

Read first: timing.py."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kv_cache import FLASH_PAGE
from lab.measure import timing
from model import GPT
from parallel.shard import Shard
from request import lone_chunk
from runtime.runner import Runner


@dataclass(frozen=True, kw_only=True)
class MachineInfo:
    """What is known of a machine, simulated or real."""

    device: str  # the name of the CPU or GPUs
    model: str  # a preset or a checkpoint
    dtype: str  # of its numbers

    def heading(self) -> str:
        """The lines that stand above all tables. Each ends with a newline."""
        return f"{self.device}\n{self.model}, {self.dtype}\n"

    def to_json(self) -> dict[str, Any]:
        """What a report has as its "machine": all fields but those that are None."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class RealMachineInfo(MachineInfo):
    """A model on the device of this process. Computing with a batch of `ridge_tokens` rows takes
    as long as reading the weights for it."""

    threads: int
    torch: str  # its version
    parameters: int
    compiled: bool
    flops_per_s: float  # of the matrix products of this model
    bytes_per_s: float  # of reading memory
    ridge_tokens: float
    busy: bool  # whether the machine was too busy while this was measured
    tp: int | None = None  # None: one process
    pp: int | None = None
    attention: str | None = None  # the backend that computes it
    cuda_graphs: bool | None = None  # whether decodes alone are replayed; None: not on CUDA
    base_busy: bool | None = None  # too busy while the base of SLOs was timed; None: was not timed

    def heading(self) -> str:
        """The device, and the model that runs on it."""
        details = f", TP {self.tp} x PP {self.pp}" if self.tp else ""
        details += ", compiled" if self.compiled else ""
        details += f", attention: {self.attention}" if self.attention else ""
        if self.cuda_graphs is not None:
            details += ", CUDA graphs" if self.cuda_graphs else ", no CUDA graphs"
        return (
            f"{self.device}, threads: {self.threads}, torch {self.torch}\n"
            f"{self.model}, {self.parameters:,} parameters, {self.dtype}{details}\n"
        )


def measure_machine(
    model: GPT,
    name: str,
    rows: int,
    attention: str = "auto",
    clock: Callable[[], float] = timing.wall_time,
) -> RealMachineInfo:
    """Measure how fast this machine computes the products of `model`, for `rows` tokens at once,
    and how fast it reads memory. `name` is that of the model.

    With the clock timing.cpu_time, in a block of timing.one_thread, these are the limits of one
    thread, and no other program makes the machine too busy."""
    device = model.device
    layers = timing.linear_layers(model)
    products = {"products": timing.bare_products(model, rows, layers)}

    def time_both() -> tuple[timing.Timing, float]:
        rows_timing = timing.interleaved(products, device, clock=clock)["products"]
        return rows_timing, memory_bandwidth(device, clock)

    (products_timing, bandwidth), drift = timing.steadily(
        time_both, device, spread_of=lambda timed: timed[0].spread, clock=clock
    )
    weights = sum(layer.in_features * layer.out_features for layer in layers)
    flops_per_s = 2 * rows * weights / (products_timing.ms / 1e3)
    config = model.config
    ranks = None
    if isinstance(model, Shard):  # it has a part of the whole model
        config = model.whole_config
        ranks = model.ranks
    plain_model = GPT(config, "meta", seed=None)  # packed weights may have padding
    backend, cuda_graphs = running_attention(model, attention)
    return RealMachineInfo(
        device=timing.device_name(device),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        model=name,
        parameters=sum(weights.numel() for weights in plain_model.parameters()),
        dtype=str(model.dtype).removeprefix("torch."),
        compiled=model.compiled,
        flops_per_s=flops_per_s,
        bytes_per_s=bandwidth,
        ridge_tokens=flops_per_s / bandwidth * model.dtype.itemsize / 2,
        busy=drift > timing.BUSY,
        tp=ranks and ranks.tp,
        pp=ranks and ranks.pp,
        attention=backend,
        cuda_graphs=cuda_graphs,
    )


def running_attention(model: GPT, attention: str) -> tuple[str, bool | None]:
    """The class of the backend that `attention` makes here, as "auto" takes the fastest that runs,
    and whether a batch of decodes alone is a CUDA graph; None without CUDA."""
    runner = Runner(model, 1, FLASH_PAGE, attention=attention)
    cuda_graphs = False if runner.cache.data.is_cuda else None
    if cuda_graphs is not None and runner.fast and not isinstance(model, Shard):
        runner.greedy([lone_chunk([0], 0, [0])])
        cuda_graphs = bool(runner.graphs.graphs)
    return type(runner.attention).__name__, cuda_graphs


def memory_bandwidth(device: torch.device, clock: Callable[[], float] = timing.wall_time) -> float:
    """Bytes per second at which an array much larger than any cache is read, to be summed."""
    array = torch.ones(2**30 if device.type == "cuda" else 2**27, device=device)
    reading = timing.interleaved({"sum": array.sum}, device, repeats=7, clock=clock)["sum"]
    return array.nbytes / (reading.ms / 1e3)
