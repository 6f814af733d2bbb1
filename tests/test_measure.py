"""Timing, held against a clock that goes on when told, and bytes and FLOPs by hand."""

from itertools import count

import pytest
import torch

from lab.measure import machine_info, timing
from model import GPTConfig
from request import lone_chunk
from tests.helpers import tiny_model

CPU = torch.device("cpu")


class Clock:
    """The clocks of a process, which go on only when they are told to."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        self.cpu_s = 0.0
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(timing.time, "process_time", lambda: self.cpu_s)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_medians_and_quartiles_are_of_runs_in_turn_that_are_warmed_up(clock):
    assert timing.summarize([1, 2, 3, 4, 100]) == (3, (4 - 2) / 3)
    calls = []

    def takes(name, seconds):
        calls.append(name)
        clock.now += seconds if len(calls) > 2 * timing.WARMUP else 1000

    variants = {"a": lambda: takes("a", 0.25), "b": lambda: takes("b", 0.5)}
    timings = timing.interleaved(variants, CPU, 4)
    assert calls == ["a", "b"] * (timing.WARMUP + 4)
    assert timings == {"a": (250, 0), "b": (500, 0)}


@pytest.mark.parametrize("cpu_ms, missing", [(8, 0), (4, 0.5), (2, 0.75), (10, 0)])
def test_a_probe_tells_what_share_of_two_threads_is_missing(cpu_ms, missing, clock):
    probe = timing.Probe(CPU)
    probe.threads = 2

    def compute():
        clock.now += 4e-3
        clock.cpu_s += cpu_ms / 1e3

    probe.compute = compute
    assert probe.take() == pytest.approx(missing)


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
def test_on_a_busy_machine_it_is_tried_again(probed, tries, counts, calls, drift, monkeypatch):
    readings = list(probed)
    monkeypatch.setattr(timing.Probe, "take", lambda self: readings.pop(0))
    numbers = count(1)
    assert timing.steadily(lambda: next(numbers), CPU, tries) == (counts, drift)
    assert next(numbers) == calls + 1
    assert readings == []


def test_bandwidth_and_ridge_are_bytes_and_rows(monkeypatch):
    ms = {"sum": timing.Timing(10.0, 0.0), "products": timing.Timing(2.0, 0.0)}
    monkeypatch.setattr(timing, "interleaved", lambda *_, **__: ms)
    monkeypatch.setattr(timing.Probe, "take", lambda self: 0.1)
    assert machine_info.memory_bandwidth(CPU) == pytest.approx(512 * 2**20 / 0.010)
    monkeypatch.setattr(machine_info, "memory_bandwidth", lambda device, clock: 1e10)
    model = tiny_model(dtype=torch.float32)
    info = machine_info.measure_machine(model, "tiny", 16)
    weights = sum(p.numel() for p in model.blocks.parameters() if p.ndim == 2)
    assert info.flops_per_s == pytest.approx(2 * 16 * weights / 0.002)
    # at the ridge, 2 flops for each row of a weight take as long as reading its 4 bytes
    ridge_s = 2 * info.ridge_tokens / info.flops_per_s
    assert ridge_s == pytest.approx(4 / info.bytes_per_s)
    assert info.parameters == sum(p.numel() for p in model.parameters())
    assert not info.busy
    monkeypatch.setattr(timing.Probe, "take", lambda self: 0.3)
    assert machine_info.measure_machine(model, "tiny", 16).busy


def test_attention_cost_counts_every_visible_key():
    config = GPTConfig("llama", 16, 3, 8, 64, n_kv_head=2, head_dim=16)
    spans = [lone_chunk([0], 5, [1] * 4), lone_chunk([1], 9, [1]), lone_chunk([2], 0, [1] * 3)]
    visible = (6 + 7 + 8 + 9) + 10 + (1 + 2 + 3)
    keys = 9 + 10 + 3
    # per layer and head: q k and p v, two operations for each of 16 dims; K and V, 2 heads of 16
    flops = 3 * visible * 8 * (2 * 16 + 2 * 16)
    moved_bytes = 3 * keys * 2 * (2 * 16 * 2)
    assert timing.attention_cost(config, spans, torch.bfloat16) == (flops, moved_bytes)
