"""Timing, held against a clock that goes on when told, and bytes and FLOPs by hand."""

import math
from contextlib import contextmanager
from itertools import count

import pytest
import torch

from lab.measure import machine_info
from lab.measure import timing as measure
from model import FlatBatch, GPTConfig
from request import lone_chunk
from runtime.runner import Runner
from tests.helpers import tiny_model

CPU = torch.device("cpu")


class Clock:
    """The clock of time.perf_counter, which goes on only when it is told to."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(measure.time, "perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.mark.parametrize(
    "limit_s, warmup, calls",
    [
        (math.inf, 2, 2 + 9),
        (60.0, 2, 7),  # the sixth round ends after 60 s: one more begins
        (1.0, 2, 2 + 3),  # three count, however long they take
        (1.0, 0, 3),
    ],
)
def test_a_slow_machine_is_timed_less_often(limit_s, warmup, calls, clock):
    called = []

    def slow():
        clock.now += 10.0
        called.append(clock.now)

    timings = measure.interleaved({"slow": slow}, CPU, 9, warmup=warmup, limit_s=limit_s)
    assert len(called) == calls
    assert timings == {"slow": (10_000.0, 0.0)}


def test_medians_and_quartiles_are_of_runs_in_turn_that_are_warmed_up(clock):
    assert measure.summarize([1, 2, 3, 4, 100]) == (3, (4 - 2) / 3)
    assert measure.summarize([0.0, 0.0]) == (0.0, 0.0)
    calls = []

    def takes(name, seconds):
        calls.append(name)
        clock.now += seconds if len(calls) > 2 * measure.WARMUP else 1000

    variants = {"a": lambda: takes("a", 0.25), "b": lambda: takes("b", 0.5)}
    timings = measure.interleaved(variants, CPU, 4)
    assert calls == ["a", "b"] * (measure.WARMUP + 4)
    assert timings == {"a": (250, 0), "b": (500, 0)}


def test_a_probe_tells_what_share_of_the_machine_is_missing(monkeypatch):
    probe = measure.Probe(CPU)
    probe.threads = 2
    clock = Clock(monkeypatch)
    cpu_s = product_s = spread_cpu_s = 0.0
    monkeypatch.setattr(measure.time, "process_time", lambda: cpu_s)

    def product():
        clock.now += product_s

    def spread():
        nonlocal cpu_s
        clock.now += 4e-3
        cpu_s += spread_cpu_s

    probe.product = product  # however few threads a library takes for it
    probe.spread = spread
    for product_ms, cpu_ms, missing in (
        (4, 4, 0.5),  # a load from the beginning: one thread of two waits
        (4, 8, 0.0),
        (5, 8, 0.2),  # others slow it down without taking processors
        (8, 8, 0.5),
        (5, 2, 0.75),
        (2, 10, 0.0),  # it was never alone before; and somebody's spinning is no negative load
        (4, 8, 0.5),
    ):
        product_s, spread_cpu_s = product_ms / 1e3, cpu_ms / 1e3
        assert probe.take() == pytest.approx(missing)


@pytest.fixture
def readings(monkeypatch):
    """What a probe will read. All must be read."""
    left = []
    monkeypatch.setattr(measure.Probe, "take", lambda self, *_: left.pop(0))
    monkeypatch.setattr(measure, "probe_of", lambda *_: object.__new__(measure.Probe))
    return left


@pytest.mark.parametrize(
    "probed, tries, counts, calls, drift",
    [
        ([0.2, 0.2], 3, 1, 1, 0.2),
        ([0.5, 0.1, 0.0], 3, 1, 1, 0.1),  # the busy moment ended before the first call
        ([0.5, 0.4, 0.1, 0.0], 3, 2, 2, 0.1),
        ([0.0, 0.5, 0.1, 0.1], 3, 2, 2, 0.1),
        ([0.5, 0.6, 0.3, 0.4, 0.3, 0.5, 0.3], 3, 2, 3, 0.4),
        ([0.5, 0.4, 0.0], 1, 1, 1, 0.4),
    ],
)
def test_on_a_busy_machine_it_is_tried_again(probed, tries, counts, calls, drift, readings):
    readings += probed
    numbers = count(1)
    assert measure.steadily(lambda: next(numbers), CPU, tries) == (counts, drift)
    assert next(numbers) == calls + 1
    assert readings == []


def test_bandwidth_and_ridge_are_bytes_and_rows(monkeypatch):
    ms = {"sum": measure.Timing(10.0, 0.0), "products": measure.Timing(2.0, 0.0)}
    monkeypatch.setattr(measure, "interleaved", lambda *_, **__: ms)
    monkeypatch.setattr(measure.Probe, "take", lambda self: 0.1)
    assert machine_info.memory_bandwidth(CPU) == pytest.approx(512 * 2**20 / 0.010)
    monkeypatch.setattr(machine_info, "memory_bandwidth", lambda device, clock: 1e10)
    model = tiny_model(dtype=torch.float32)
    info = machine_info.measure_machine(model, "tiny", 16)
    weights = sum(p.numel() for p in model.blocks.parameters() if p.ndim == 2)
    assert info.flops_per_s == pytest.approx(2 * 16 * weights / 0.002)
    # at the ridge, 2 flops for each row of a weight take as long as reading its 4 bytes
    ridge_s = 2 * info.ridge_tokens / info.flops_per_s
    assert ridge_s == pytest.approx(4 / info.bytes_per_s) == 4e-10
    assert (info.dtype, info.model, info.compiled) == ("float32", "tiny", False)
    assert info.device == measure.device_name(CPU)
    assert (info.torch, info.threads) == (torch.__version__, torch.get_num_threads())
    assert info.parameters == sum(p.numel() for p in model.parameters())
    assert not info.busy
    assert (info.attention, info.cuda_graphs) == ("Blocks", None)
    monkeypatch.setattr(measure.Probe, "take", lambda self: 0.3)
    assert machine_info.measure_machine(model, "tiny", 16).busy


def test_attention_cost_counts_every_visible_key():
    config = GPTConfig("llama", 16, 3, 8, 64, n_kv_head=2, head_dim=16)
    spans = [lone_chunk([0], 5, [1] * 4), lone_chunk([1], 9, [1]), lone_chunk([2], 0, [1] * 3)]
    visible = sum(span.start + i + 1 for span in spans for i in range(len(span.tokens)))
    keys = 9 + 10 + 3
    # per layer and head: q k and p v, two operations for each of 16 dims; K and V, 2 heads of 16
    expected = 3 * visible * 8 * (2 * 16 + 2 * 16), 3 * keys * 2 * (2 * 16 * 2)
    assert measure.attention_cost(config, spans, torch.bfloat16) == expected


def test_bare_products_are_those_of_an_iteration(monkeypatch, model):
    def shapes_of(function):
        shapes = []
        linear = torch.nn.functional.linear

        def spy(x, weight, *bias):
            shapes.append((*x.shape, *weight.shape))
            return linear(x, weight, *bias)

        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.functional, "linear", spy)
            function()
        return shapes

    runner = Runner(model, 2, 8)
    batch = FlatBatch.build(
        [lone_chunk([0], 0, [1, 2, 3]), lone_chunk([1], 0, [4])], runner.attention
    )
    expected = shapes_of(lambda: model(batch, runner.cache))
    layers = measure.linear_layers(model)
    assert shapes_of(measure.bare_products(model, 4, layers)) == expected[:-1]
    assert shapes_of(measure.bare_products(model, 2, [model.head])) == expected[-1:]
    assert len(layers) == 4 * model.config.n_layer
    each = [measure.linear_layers(model, [name]) for name in measure.LINEAR]
    assert [layer for block in zip(*each, strict=True) for layer in block] == layers


class PretendedGPU:
    """A CPU that launches kernels and a device that computes them in turn, in pretended seconds."""

    def __init__(self, monkeypatch):
        self.now_s = 0.0  # on the CPU
        self.done_s = 0.0  # when the device has computed all that was launched
        monkeypatch.setattr(measure.time, "perf_counter", lambda: self.now_s)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.compute(cycles / 1e9))
        monkeypatch.setattr(torch.cuda, "device", self.use)
        self.device = torch.device("cuda:0")  # whose streams are current
        gpu = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                assert gpu.device == torch.device("cuda:1")
                self.time_s = max(gpu.now_s, gpu.done_s)

            def elapsed_time(self, end):
                assert end.time_s <= gpu.now_s, "read before the device was done"
                return 1e3 * (end.time_s - self.time_s)

        monkeypatch.setattr(torch.cuda, "Event", Event)

    @contextmanager
    def use(self, device):
        self.device = device
        yield
        self.device = torch.device("cuda:0")

    def compute(self, seconds):
        """Launch a kernel. The device begins with it when it is done with those before."""
        self.done_s = max(self.now_s, self.done_s) + seconds

    def synchronize(self, device):
        self.now_s = max(self.now_s, self.done_s)

    def batch(self, kernels, launch_s, kernel_s):
        """A function that launches so many kernels."""

        def launch():
            for _ in range(kernels):
                self.now_s += launch_s
                self.compute(kernel_s)

        return launch


def test_launches_and_kernels_are_timed_apart(monkeypatch):
    """A device that waits for launches is not taken for a slow one, nor a CPU that waits for it."""
    gpu = PretendedGPU(monkeypatch)
    launches = {
        "decodes": gpu.batch(kernels=100, launch_s=1e-4, kernel_s=2e-5),  # bound by the CPU
        "prompt": gpu.batch(kernels=100, launch_s=1e-4, kernel_s=1e-3),  # bound by the GPU
    }
    timings = measure.launch_timings(launches, torch.device("cuda:1"))
    assert timings["decodes"] == pytest.approx((10.0, 2.0))
    assert timings["prompt"] == pytest.approx((10.0, 100.0))
    assert measure.launch_timings(launches, CPU) == {}
