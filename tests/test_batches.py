"""Times of batches, held against laws in place of the stopwatch and sums by hand."""

import pytest
import torch

from lab.measure import batch_times, timing
from lab.measure.batch_times import (
    PRODUCTS,
    BatchTime,
    TimedChunk,
    chunks_of,
    decodes,
    intensities,
    prompts,
    spans_of,
    time_batches,
    time_sequences,
)
from model import GPT, GPTConfig
from runtime.runner import Runner
from tests.helpers import machine_info, tiny_model

MACHINE = machine_info(flops_per_s=1e9, bytes_per_s=1e6)


@pytest.fixture(autouse=True)
def idle_machine(monkeypatch):
    """Nobody else uses the machine."""
    monkeypatch.setattr(timing.Probe, "take", lambda self, *_: 0.0)


def batch_of(*chunks):
    """A batch of (tokens, end)."""
    return tuple(TimedChunk(tokens, end) for tokens, end in chunks)


TWO = {"a": batch_of((5, 9), (1, 7)), "b": batch_of((1, 3))}


def test_each_request_of_a_batch_has_a_page_of_its_own():
    assert [chunk.pages for chunk in spans_of(batch_of((4, 10), (1, 7)))] == [[0], [1]]


def stopwatch(monkeypatch, ms_of=lambda key: 1.0, spread=0.1, at=lambda key, run: run()):
    """Let each part take as long as `ms_of` says of its key, after `at` was called with it."""

    def interleaved(variants, *_, **settings):
        for key, run in variants.items():
            at(key, run)
        return {key: timing.Timing(ms_of(key), spread) for key in variants}

    monkeypatch.setattr(timing, "interleaved", interleaved)


def time_two(batches=TWO, **settings):
    """The times of some batches, with the runner of a small model."""
    return time_batches(Runner(tiny_model(), 4, 16), MACHINE, batches, 2, **settings)


def test_parts_of_an_iteration_add_up(monkeypatch):
    ms = {"total": 100, "attention": 20, "preproj": 1, "postproj": 2, "ffn_ln1": 4, "ffn_ln2": 8}
    ms["head"] = 16
    stopwatch(monkeypatch, lambda key: ms[key[1]])
    times = time_two()
    assert list(times) == ["a", "b"]
    model = tiny_model()
    for name, batch in TWO.items():
        time = times[name]
        assert [getattr(time, f"{part}_ms") for part in PRODUCTS] == [1, 2, 4, 8, 16]
        assert (time.total_ms, time.products_ms, time.other_ms) == (100, 31, 100 - 31 - 20)
        assert time.spread == 0.1 and time.busy is False
        flops, moved_bytes = timing.attention_cost(model.config, spans_of(batch), model.dtype)
        assert time.attention_limit_ms == 1e3 * max(flops / 1e9, moved_bytes / 1e6)
        assert time.launch_ms is time.device_ms is None  # on a CPU
        assert not time.launch_bound
    stopwatch(monkeypatch, lambda key: 1 + (key[1] == "ffn_ln1"), spread=0.21)
    assert all(time.busy and time.other_ms == 0 for time in time_two().values())


def test_intensity_is_flops_over_all_that_is_moved_once():
    config = GPTConfig("llama", 64, 3, 4, 64, n_kv_head=2, n_inner=96, max_positions=32)
    model = GPT(config, torch.device("cpu"), torch.bfloat16)
    intensity = intensities(model, [batch_of((4, 10), (1, 8)), batch_of((2, 2))])
    # two batches of 7 rows in all; 16 bits; columns of q, k and v: 64 + 2 * 32
    shapes = {"preproj": (64, 128), "postproj": (64, 64), "ffn_ln1": (64, 192), "ffn_ln2": (96, 64)}
    flops = {name: 2 * 7 * rows * columns for name, (rows, columns) in shapes.items()}
    moved = {
        name: 2 * (2 * rows * columns + 7 * (rows + columns))
        for name, (rows, columns) in shapes.items()
    }
    for name in shapes:
        assert intensity[name] == pytest.approx(flops[name] / moved[name])
    assert intensity["products"] == pytest.approx(sum(flops.values()) / sum(moved.values()))
    pairs = 7 + 8 + 9 + 10 + 8 + 1 + 2  # visible keys; four heads of 16, q k and p v
    keys = 10 + 8 + 2  # K and V of two heads; q and out of four
    moved_bytes = 2 * (2 * keys * 32 + 2 * 7 * 64)
    assert intensity["attention"] == pytest.approx(4 * pairs * 64 / moved_bytes)


def batch_time(ms, *, spread=0.0, busy=False, **launch):
    """A BatchTime in which each part takes `ms`. `launch`: launch_ms and device_ms of a GPU."""
    parts = dict.fromkeys(("total_ms", "attention_ms", "other_ms", "products_ms"), ms)
    parts |= {f"{part}_ms": ms for part in PRODUCTS}
    return BatchTime(**parts, attention_limit_ms=ms, spread=spread, busy=busy, **launch)


def test_batches_that_follow_each_other_are_added_up(monkeypatch):
    times = {
        batch_of((8, 8)): batch_time(1.0, spread=0.01),
        batch_of((8, 16)): batch_time(2.0, spread=0.02, busy=True),
        decodes(2, 5): batch_time(10.0, spread=0.1),
    }
    timed = []

    def time_batches(runner, machine, batches, repeats, title):
        timed.extend(batches.values())
        return {batch: times[batch] for batch in batches}

    monkeypatch.setattr(batch_times, "time_batches", time_batches)
    sequences = {"16/8": chunks_of(16, 8), "three": [*[decodes(2, 5)] * 3, prompts(1, 8)]}
    chunked, three = time_sequences(tiny_model(), MACHINE, sequences).values()
    assert len(timed) == 3  # one that occurs twice is timed once
    assert (chunked.total_ms, chunked.tokens, chunked.busy) == (3, 16, True)
    assert chunked.tokens_per_ms == pytest.approx(16 / 3)
    assert (three.attention_ms, three.tokens, three.busy) == (31, 14, False)
    assert three.spread == 0.1 and three.launch_ms is None
