"""How to time, what to compare the times with, and the machine that they depend on.

A time says little without its limit: the matrix products of the same shapes run bare, the bytes
that must be read over the measured bandwidth. Timings are warmed up, synchronised and interleaved
(A B C A B C …): a machine whose speed drifts slows all variants alike. Quoted are medians. And a
machine that works for others cannot be timed: `steadily` finds that out, and tries again."""

import importlib
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from tqdm import tqdm

from kv_cache import kv_bytes_per_token
from model import ROWS_PER_PIECE

Result = TypeVar("Result")
LINEAR = "preproj", "postproj", "ffn_ln1", "ffn_ln2"  # products of a block, SARATHI, Table 1
WARMUP = 2  # runs that are not counted
BUSY = 0.20  # drift, of a machine, or spread, of times: above it no number is believed
TOO_BUSY = "this machine is too busy to tell"
PROBE_S, GLANCE_S = 0.02, 0.01  # of a probe: beside a measurement; every second within one


class Timing(NamedTuple):
    """A median in milliseconds, and the distance between the quartiles as a fraction of it."""

    ms: float
    spread: float


def synchronize(device):
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleaved(variants, device, repeats=9, title=None):
    """Time {name: function} in turn: {name: Timing}. With a title there is a progress bar."""
    samples, hidden = {name: [] for name in variants}, None if title else True
    for repeat in tqdm(range(WARMUP + repeats), title, leave=False, disable=hidden):
        for name, function in variants.items():
            synchronize(device)
            start = time.perf_counter()
            function()
            synchronize(device)
            if repeat >= WARMUP:
                samples[name].append((time.perf_counter() - start) * 1e3)
    return {name: summarize(values) for name, values in samples.items()}


def summarize(values_ms):
    """The Timing of two or more samples in milliseconds."""
    low, median, high = statistics.quantiles(values_ms, n=4, method="inclusive")
    return Timing(median, (high - low) / median if median else 0.0)


class Probe:
    """Asks a device how much of itself it gives: the same short computation, over and over. All
    threads get an equal share of it; matrix products some libraries spread otherwise."""

    def __init__(self, device):
        here = getattr(os, "sched_getaffinity", lambda process: range(os.cpu_count() or 1))(0)
        self.device, self.threads = device, min(torch.get_num_threads(), len(here))
        x = torch.ones(2**24 if device.type == "cuda" else self.threads * 2**17, device=device)
        self.compute, self.fastest = partial(torch.sin, x, out=torch.empty_like(x)), math.inf

    def take(self, at_least_s=PROBE_S):
        """The share of the machine that is missing, 0 … 1, the larger of two: of its speed, beside
        the fastest that this process has seen; and on a CPU of the time that the threads asked for,
        which was all of it: that tells of a load that never went away."""
        self.compute()  # wakes threads up
        synchronize(self.device)
        count, start, cpu_start = 0, time.perf_counter(), time.process_time()
        while (seconds := time.perf_counter() - start) < at_least_s or not count:
            self.compute()
            synchronize(self.device)
            count += 1
        self.fastest = min(self.fastest, seconds / count)
        got = (time.process_time() - cpu_start) / seconds / self.threads
        got = got if self.device.type == "cpu" else 1.0
        return 1 - min(got, self.fastest * count / seconds)


probe_of = cache(Probe)  # one in a process for each device, as it remembers the fastest


def steadily(
    function: Callable[[], Result],
    device: torch.device,
    tries: int = 3,
    spread_of: Callable[[Result], float] | None = None,
) -> tuple[Result, float]:
    """Call `function()` on a machine that is not BUSY: (what it returned, drift). The drift is the
    share of the machine that was missing in a probe before or after, or what `spread_of` says of
    the result, if that is more. Of at most `tries` calls the steadiest counts."""
    probe = probe_of(device)
    runs: list[tuple[Result, float]] = []
    after = probe.take()
    for _ in range(tries):
        before = after
        result = function()
        after = probe.take()
        drift = max(before, after, spread_of(result) if spread_of else 0.0)
        runs.append((result, drift))
        if drift <= BUSY:
            break
    return min(runs, key=lambda run: run[1])


def mark(name, busy):
    """The name of a row in a table, marked if the machine was too busy for it to be believed."""
    return f"{name} (busy)" if busy else name


def fastest_cpu_dtype():
    """bfloat16 if this CPU multiplies it faster than float32, else float32. Takes milliseconds."""
    dtypes, shapes = (torch.bfloat16, torch.float32), ((128, 1024), (1024, 1024))
    products = {d: partial(F.linear, *(torch.ones(s, dtype=d) for s in shapes)) for d in dtypes}
    timings = interleaved(products, torch.device("cpu"), repeats=25)  # somebody may disturb some
    return min(dtypes, key=lambda dtype: timings[dtype].ms)


def linear_layers(model, names=LINEAR):
    """The linear layers of these names of a model's blocks, in the order of computation. Of a
    parallel.shard.Shard its own, once for each stage."""
    blocks = [*model.blocks] * model.stages
    return [getattr(block, name) for block in blocks for name in names]


def bare_products(model, rows, layers):
    """A function that runs some linear layers on so many rows, in the model's pieces, alone."""
    like = dict(device=model.device, dtype=model.dtype)
    x = {n: torch.randn(rows, n, **like) for n in {layer.in_features for layer in layers}}
    x = {n: its.split(ROWS_PER_PIECE.get(model.device.type, 8192)) for n, its in x.items()}

    @torch.inference_mode()
    def run():
        for layer in layers:
            for piece in x[layer.in_features]:
                layer(piece)

    return run


def attention_alone(runner, spans):
    """A function that runs the attention of one iteration of engine.Runner, nothing else."""
    model, batch = runner.model, runner.flatten(spans)
    shape = (len(batch.tokens), model.config.n_head, model.config.head_dim)
    q = torch.randn(shape, device=model.device, dtype=model.dtype)

    @torch.inference_mode()
    def run():
        for layer in [*range(model.config.n_layer)] * model.stages:
            batch.attend(q, *runner.cache.layer(layer))

    return run


def attention_cost(config, spans, dtype):
    """(flops, bytes) in all layers: two products per visible key, each key and value read once."""
    visible = sum(s.length * s.start + s.length * (s.length + 1) // 2 for s in spans)
    flops = config.n_layer * 4 * visible * config.n_head * config.head_dim
    return flops, sum(span.end for span in spans) * kv_bytes_per_token(config, dtype)


def describe_machine(model, args, rows):
    """machine_info.measure_machine as a dict, for those that take one."""
    machine_info = importlib.import_module("lab.measure.machine_info")  # which imports this module
    return machine_info.measure_machine(model, args.init_from or args.model, rows).to_json()


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
