"""How to time, what to compare the times with, and the machine that they depend on.

A time says little without its limit: the matrix products of the same shapes run bare, the bytes
that must be read over the measured bandwidth. Timings are warmed up, synchronised and interleaved
(A B C A B C ...): a machine whose speed drifts slows all variants alike. Quoted are medians. A
machine that works for others cannot be timed: `steadily` finds that out, and tries again.

Read next: machine_info.py."""

import math
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple, TypeVar

import torch
import torch.nn as nn
from torch import Tensor

from kv_cache import kv_bytes_per_token
from model import GPT, FlatBatch, GPTConfig
from parallel.shard import stages_of
from request import Chunk
from runtime.runner import Runner

Name = TypeVar("Name")
Result = TypeVar("Result")
LINEAR = ("preproj", "postproj", "ffn_ln1", "ffn_ln2")  # products of a block, SARATHI, Table 1
WARMUP = 2  # runs that are not counted
BUSY = 0.20  # drift, of a machine, or spread, of times: above it no number is believed
TOO_BUSY = "this machine is too busy to tell"
PROBE_S = 0.02  # of a probe beside a measurement
GLANCE_S = 0.01  # of a probe within one, every second
LAUNCH_REPEATS = 5
PAUSE_HZ = 3e9  # no GPU's clock is much faster: a pause of so many cycles takes a second or longer


class Timing(NamedTuple):
    """A median in milliseconds, and the distance between the quartiles as a fraction of it."""

    ms: float
    spread: float


@dataclass(frozen=True)
class Estimate:
    """A median and its standard error."""

    value: float
    error: float

    def over(self, other: "Estimate") -> "Estimate":
        """The quotient of two that are independent."""
        value = self.value / other.value
        relative = math.hypot(self.error / self.value, other.error / other.value)
        return Estimate(value, value * relative)


class LaunchTiming(NamedTuple):
    """Medians in milliseconds: the CPU's time to launch a computation, and the device's for it."""

    launch: float
    device: float


def wall_time() -> float:
    """A clock in seconds."""
    return time.perf_counter()


def cpu_time() -> float:
    """A clock in seconds that stands still while other programs run. It is this thread's: see
    one_thread."""
    return time.thread_time()


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleaved(
    variants: Mapping[Name, Callable[[], object]],
    device: torch.device,
    repeats: int = 9,
    warmup: int = WARMUP,
    clock: Callable[[], float] = wall_time,
) -> dict[Name, Timing]:
    """Time {name: function} in turn: {name: Timing}. The first `warmup` runs of each do not count.

    `clock` is wall time, or cpu_time in a block of one_thread."""
    samples: dict[Name, list[float]] = defaultdict(list)
    for repeat in range(warmup + repeats):
        for name, function in variants.items():
            milliseconds = time_once(function, device, clock)
            if repeat >= warmup:
                samples[name].append(milliseconds)
    return {name: summarize(values) for name, values in samples.items()}


def time_once(
    function: Callable[[], object], device: torch.device, clock: Callable[[], float]
) -> float:
    """The milliseconds that a function takes until the device has done what it was given."""
    synchronize(device)
    start = clock()
    function()
    synchronize(device)
    return (clock() - start) * 1e3


def summarize(values_ms: Sequence[float]) -> Timing:
    """The Timing of two or more samples in milliseconds."""
    low, median, high = statistics.quantiles(values_ms, n=4, method="inclusive")
    return Timing(median, (high - low) / median if median else 0.0)


def estimate(samples: Sequence[float]) -> Estimate:
    """The median of two or more samples, with its standard error.

    It is 1.25 times that of a mean, whose standard deviation is taken from the quartiles: outliers,
    such as a moment in which another program ran, hardly move it."""
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    deviation = (high - low) / 1.35
    return Estimate(median, 1.25 * deviation / math.sqrt(len(samples)))


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one CPU thread in this block: there cpu_time is what wall_time is on a machine
    that nobody else uses."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def launch_timings(
    launches: Mapping[Name, Callable[[], object]], device: torch.device
) -> dict[Name, LaunchTiming]:
    """Time the CPU and the device apart, {name: function}: for functions that launch and do not
    wait. {} unless the device is CUDA's: a CPU computes what it launches.

    The CPU is timed until the function returns, with an idle device. The device is timed by events,
    in a second call: it pauses until that has launched all, or its kernels would wait for launches,
    and it would seem as slow as the CPU. (CUDA holds about a thousand launches back, not more: of
    a computation with more of them both times are too long.)"""
    if device.type != "cuda":
        return {}
    cpu_ms: dict[Name, list[float]] = defaultdict(list)
    device_ms: dict[Name, list[float]] = defaultdict(list)
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    for launch in launches.values():
        launch()  # what is compiled or recorded once does not count
    for _ in range(LAUNCH_REPEATS):
        for name, launch in launches.items():
            synchronize(device)
            start = time.perf_counter()
            launch()
            launch_s = time.perf_counter() - start
            cpu_ms[name].append(launch_s * 1e3)

            synchronize(device)
            with torch.cuda.device(device):  # whose stream pauses and records events
                torch.cuda._sleep(int(2 * launch_s * PAUSE_HZ))
                begin.record()
                launch()
                end.record()
            synchronize(device)
            device_ms[name].append(begin.elapsed_time(end))
    return {
        name: LaunchTiming(statistics.median(cpu_ms[name]), statistics.median(device_ms[name]))
        for name in launches
    }


class Probe:
    """Asks a CPU how much of itself it gives: a short computation on all threads, over and over.

    It is elementwise, as each thread gets an equal share of that; some libraries spread products
    otherwise."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.threads = torch.get_num_threads()
        numbers = torch.ones(self.threads * 2**17)
        self.compute: Callable[[], object] = partial(
            torch.sin, numbers, out=torch.empty_like(numbers)
        )

    def take(self, at_least_s: float = PROBE_S) -> float:
        """The share of the time that the threads could have had and that others took, from 0 to 1.
        A GPU is taken to be used by nobody else: 0."""
        if self.device.type != "cpu":
            return 0.0
        start = time.perf_counter()
        cpu_start = time.process_time()
        seconds = 0.0
        while seconds < at_least_s:
            self.compute()
            seconds = time.perf_counter() - start
        cpu_s = time.process_time() - cpu_start
        return max(0.0, 1 - cpu_s / seconds / self.threads)


probe_of = cache(Probe)  # one in a process for each device


def steadily(
    function: Callable[[], Result],
    device: torch.device,
    tries: int = 3,
    spread_of: Callable[[Result], float] | None = None,
    clock: Callable[[], float] = wall_time,
) -> tuple[Result, float]:
    """Call `function()` on a machine that is not BUSY. Returns (its result, drift).

    The drift is the share of the machine that others took in a probe before or after, or the
    `spread_of` the result, if that is larger. Of at most `tries` calls the steadiest counts. What
    is timed by the `clock` cpu_time does not depend on other programs: one call, and no drift."""
    if clock is cpu_time:
        return function(), 0.0
    probe = probe_of(device)
    runs: list[tuple[Result, float]] = []
    after = probe.take()
    for _ in range(tries):
        before = after if after <= BUSY else probe.take()  # that moment may be over
        result = function()
        after = probe.take()
        drift = max(before, after, spread_of(result) if spread_of else 0.0)
        runs.append((result, drift))
        if drift <= BUSY:
            break
    return min(runs, key=lambda run: run[1])


def mark(name: str, busy: bool) -> str:
    """The name of a row in a table, marked if the machine was too busy for it to be believed."""
    return f"{name} (busy)" if busy else name


def linear_layers(model: GPT, names: Sequence[str] = LINEAR) -> list[nn.Linear]:
    """The linear layers of these names of a model's blocks, in the order of computation.

    Of a parallel.shard.Shard those that it has, once for each stage."""
    blocks = [*model.blocks] * stages_of(model)
    return [getattr(block, name) for block in blocks for name in names]


def bare_products(model: GPT, rows: int, layers: Sequence[nn.Linear]) -> Callable[[], None]:
    """A function that runs linear layers on so many rows, alone: ranks add nothing up."""
    inputs: dict[int, Tensor] = {}  # by width
    for width in {layer.in_features for layer in layers}:
        inputs[width] = torch.randn(rows, width, device=model.device, dtype=model.dtype)

    @torch.inference_mode()
    def run() -> None:
        for layer in layers:
            layer.forward(inputs[layer.in_features])

    return run


def attention_alone(runner: Runner, spans: Sequence[Chunk]) -> Callable[[], None]:
    """A function that runs the attention of one iteration of a Runner, nothing else."""
    model = runner.model
    batch = FlatBatch.build(spans, runner.attention)
    q = torch.randn(
        len(batch.tokens),
        model.config.n_head,
        model.config.head_dim,
        device=model.device,
        dtype=model.dtype,
    )

    @torch.inference_mode()
    def run() -> None:
        for _ in range(stages_of(model)):
            for layer in range(model.config.n_layer):
                keys, values = runner.cache.layer(layer)
                batch.attend(q, keys, values)

    return run


def attention_cost(
    config: GPTConfig, spans: Sequence[Chunk], dtype: torch.dtype
) -> tuple[int, int]:
    """(flops, bytes) in all layers: two products per visible key, each key and value read once."""
    visible = sum(s.length * s.start + s.length * (s.length + 1) // 2 for s in spans)
    flops = config.n_layer * 4 * visible * config.n_head * config.head_dim
    return flops, sum(span.end for span in spans) * kv_bytes_per_token(config, dtype)


def device_name(device: torch.device) -> str:
    """The name of a GPU, or the CPU's as well as it can be found."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
