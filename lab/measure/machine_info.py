"""The machine and the model that numbers depend on, and the limits that times are compared with.

    info = measure_machine(model, "llama-160m", rows=256)
    print(info.heading())       what stands above all tables
    info.to_json()              what --json holds

Read first: timing.py."""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from lab.measure import timing
from model import GPT
from parallel.shard import Shard
from runtime import dtypes
from runtime.packed_linear import count_parameters


@dataclass(frozen=True, kw_only=True)
class MachineInfo:
    """What is known of a machine that is simulated, or known by its address; and of any other."""

    device: str  # the name of the CPU or GPUs
    model: str  # a preset or a checkpoint
    dtype: str  # of its numbers
    constants: dict[str, Any] | None = None  # of a simulated device

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
    cpu_flops_per_s: dict[str, float] | None = None  # of a chunk, by type; None on a GPU
    tp: int | None = None  # None: one process
    pp: int | None = None
    base_busy: bool | None = None  # too busy while the base of SLOs was timed; None: was not timed

    def heading(self) -> str:
        """The device, and the model that runs on it."""
        parallel = f", TP {self.tp} x PP {self.pp}" if self.tp else ""
        compiled = ", compiled" if self.compiled else ""
        rates = ""
        if self.cpu_flops_per_s:
            terms = [f"{flops / 1e12:.2f} in {t}" for t, flops in self.cpu_flops_per_s.items()]
            rates = f"TFLOP/s of this CPU for a chunk: {', '.join(terms)}\n"
        return (
            f"{self.device}, threads: {self.threads}, torch {self.torch}\n"
            f"{self.model}, {self.parameters:,} parameters, {self.dtype}{parallel}{compiled}\n"
            f"{rates}"
        )


def measure_machine(model: GPT, name: str, rows: int) -> RealMachineInfo:
    """Measure how fast this machine computes the products of `model`, for `rows` tokens at once,
    and how fast it reads memory. `name` is that of the model."""
    device = model.device
    layers = timing.linear_layers(model)
    products = {"products": timing.bare_products(model, rows, layers)}

    def time_both() -> tuple[timing.Timing, float]:
        return timing.interleaved(products, device)["products"], memory_bandwidth(device)

    (products_timing, bandwidth), drift = timing.steadily(
        time_both, device, spread_of=lambda timed: timed[0].spread
    )
    weights = sum(layer.in_features * layer.out_features for layer in layers)
    flops_per_s = 2 * rows * weights / (products_timing.ms / 1e3)
    whole_model = model
    ranks = None
    if isinstance(model, Shard):  # it has a part of the whole model
        whole_model = model.whole_model()
        ranks = model.ranks
    cpu_flops_per_s = None
    if device.type == "cpu":
        rates = dtypes.cpu_rates(torch.get_num_threads())
        cpu_flops_per_s = {str(t).removeprefix("torch."): rate for t, rate in rates.items()}
    return RealMachineInfo(
        device=timing.device_name(device),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        model=name,
        parameters=count_parameters(whole_model),
        dtype=str(model.dtype).removeprefix("torch."),
        compiled=model.compiled,
        flops_per_s=flops_per_s,
        bytes_per_s=bandwidth,
        ridge_tokens=flops_per_s / bandwidth * model.dtype.itemsize / 2,
        busy=drift > timing.BUSY,
        cpu_flops_per_s=cpu_flops_per_s,
        tp=ranks and ranks.tp,
        pp=ranks and ranks.pp,
    )


def memory_bandwidth(device: torch.device) -> float:
    """Bytes per second at which an array much larger than any cache is read, to be summed."""
    array = torch.ones(2**30 if device.type == "cuda" else 2**27, device=device)
    reading = timing.interleaved({"sum": array.sum}, device, repeats=7)["sum"]
    return array.nbytes / (reading.ms / 1e3)
