"""Timing, held against a clock that goes on when told, and bytes and FLOPs by hand."""

import math
from itertools import count

import pytest
import torch

from lab.measure import machine_info
from lab.measure import timing as measure
from model import GPTConfig
from request import lone_chunk
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
