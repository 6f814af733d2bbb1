"""Times of single batches, held against what a pretended clock says and FLOPs by hand."""

import pytest
import torch

from lab.commands.batches_run import parse_batches
from lab.measure import batch_times, timing
from lab.measure.batch_times import (
    OPERATIONS,
    BatchTime,
    TimedChunk,
    add_up,
    attention_limit_ms,
    chunks_of,
    intensity,
    spans_of,
    time_batches,
)
from runtime.runner import Runner
from tests.helpers import machine_info, tiny_model


def batch_of(*chunks):
    return tuple(TimedChunk(*chunk) for chunk in chunks)


@pytest.mark.parametrize(
    "text, batches",
    [
        ("512", [batch_of((512, 512))]),
        ("3x1@64", [batch_of((1, 64), (1, 64), (1, 64))]),
        ("10/4", [batch_of((4, 4)), batch_of((4, 8)), batch_of((2, 10))]),
        ("6@10/4", [batch_of((4, 8)), batch_of((2, 10))]),
        ("8/4 + 2x1@9", [batch_of((4, end), (1, 9), (1, 9)) for end in (4, 8)]),
    ],
)
def test_a_text_is_the_batches_it_says(text, batches):
    assert parse_batches(text) == batches


@pytest.mark.parametrize("text", ["", "x", "0", "9@8", "4/", "1@2@3"])
def test_a_text_that_is_no_batch_is_refused(text):
    with pytest.raises(ValueError):
        parse_batches(text)


def test_chunks_end_where_the_prompt_does():
    assert chunks_of(5, 2, context=9) == [batch_of((2, 6)), batch_of((2, 8)), batch_of((1, 9))]
    [span] = spans_of(batch_of((3, 8)))
    assert (span.start, span.length, span.end) == (5, 3, 8)


def test_each_part_of_a_batch_is_timed_right_before_the_whole(monkeypatch):
    model = tiny_model(dtype=torch.float32)
    runner = Runner(model, 2, 16)
    batches = [batch_of((4, 8), (1, 9)), batch_of((1, 5))]
    order = []

    def interleaved(variants, *_, **__):
        order.extend(variants)
        for function in variants.values():
            function()
        ms = dict(zip(OPERATIONS, (1, 20, 2, 4, 8), strict=True), total=100)
        return {key: timing.Timing(ms[key[1]], spread=0.1) for key in variants}

    monkeypatch.setattr(timing, "interleaved", interleaved)
    monkeypatch.setattr(timing.Probe, "take", lambda self: 0.0)
    times = time_batches(runner, [*batches, *batches])
    assert [batch for batch, part in order if part == "total"] == batches
    assert order.index((batches[0], "total")) < order.index((batches[1], "attention"))
    for batch in batches:
        time = times[batch]
        assert (time.products_ms, time.attention_ms, time.other_ms) == (15, 20, 65)
        assert list(time.parts_ms.values()) == [1, 20, 2, 4, 8, 65]
        assert not time.busy
    monkeypatch.setattr(timing.Probe, "take", lambda self: 0.5)
    assert all(time.busy for time in time_batches(runner, batches).values())


def test_on_a_gpu_parts_are_times_of_the_device(monkeypatch):
    def launch_timings(launches, device):
        return {key: timing.LaunchTiming(launch=2.0, device=3.0) for key in launches}

    def interleaved(variants, *_, **__):
        return {key: timing.Timing(50.0, spread=0.1) for key in variants}

    monkeypatch.setattr(timing, "launch_timings", launch_timings)
    monkeypatch.setattr(timing, "interleaved", interleaved)
    monkeypatch.setattr(timing.Probe, "take", lambda self: 0.0)
    batch = batch_of((4, 8))
    time = time_batches(Runner(tiny_model(), 1, 16), [batch])[batch]
    assert time.gpu_ms == {"launch": 2, "device": 3}
    assert list(time.parts_ms.values()) == [3, 3, 3, 3, 3, 50 - 15]


def test_the_limit_of_attention_is_the_larger_of_flops_and_bytes():
    model = tiny_model(dtype=torch.float32)
    batch = batch_of((4, 10), (1, 8))
    keys = 7 + 8 + 9 + 10 + 8
    flops = 2 * 4 * keys * 32  # of two layers: products with keys and with values, 32 wide
    moved = 2 * 4 * (10 + 8) * 2 * 32  # bytes of keys and values
    for flops_per_s, bytes_per_s in ((1e9, 1e15), (1e15, 1e6)):
        machine = machine_info(flops_per_s=flops_per_s, bytes_per_s=bytes_per_s)
        limit_ms = 1e3 * max(flops / flops_per_s, moved / bytes_per_s)
        assert attention_limit_ms(model, machine, batch) == pytest.approx(limit_ms)


def test_intensity_is_flops_over_all_that_is_moved_once():
    batches = [batch_of((4, 10), (1, 8)), batch_of((2, 2))]
    flops = 2 * 7 * (3 * 5 + 5 * 2)
    numbers = 2 * (3 * 5 + 5 * 2) + 7 * (3 + 5 + 5 + 2)  # weights for each batch, rows in and out
    assert intensity(batches, [(3, 5), (5, 2)], 4) == pytest.approx(flops / (4 * numbers))


def test_batches_after_each_other_take_the_sum_of_their_times():
    def time(ms, launch, device, **more):
        operations_ms = dict.fromkeys(OPERATIONS, ms)
        gpu_ms = {"launch": launch, "device": device}
        return BatchTime(
            total_ms=6 * ms,
            operations_ms=operations_ms,
            gpu_ms=gpu_ms,
            **more,
        )

    batches = [batch_of((4, 4)), batch_of((1, 5), (3, 3))]
    first = time(1.0, 3.0, 2.0, spread=0.1)
    second = time(2.0, 1.0, 4.0, busy=True)
    total = add_up(batches, [first, second], [(2, 2)], 4)
    assert total.total_ms == 18
    assert total.parts_ms == dict.fromkeys([*OPERATIONS, "other"], 3.0)
    assert (total.spread, total.busy) == (pytest.approx(0.1 * 6 / 18), True)
    assert total.gpu_ms == {"launch": 4, "device": 6}
    assert not total.launch_bound
    assert first.launch_bound
    assert (total.tokens, total.tokens_per_ms) == (8, 8 / 18)


def test_a_model_keeps_some_layers():
    model = tiny_model(dtype=torch.float32)
    kept = batch_times.keep_layers(model, 1, seed=0)
    assert len(kept.blocks) == 1
    assert kept.config.n_embd == model.config.n_embd
