"""Batches as a text, and how long they take by operation. No timing is asserted here."""

import json

import pytest
import torch

import bench
from lab.commands import batches_run as command
from lab.commands.batches_run import parse_batches
from lab.measure import batch_times, timing
from lab.measure.batch_times import (
    PARTS,
    PRODUCTS,
    BatchTime,
    TimedChunk,
    add_up,
    chunks_of,
    decodes,
    intensities,
    keep_layers,
    prompts,
    spans_of,
    time_batches,
    time_sequences,
)
from model import GPT, GPTConfig
from runtime.runner import Runner
from tests.helpers import machine_info, tiny_model

MACHINE = machine_info(flops_per_s=1e9, bytes_per_s=1e6)
TEXTS = {  # and the batches of each, with (tokens, the length where they end)
    "512": [[(512, 512)]],
    "1@1024": [[(1, 1024)]],
    "3x1@9": [[(1, 9)] * 3],
    "10/4": [[(4, 4)], [(4, 8)], [(2, 10)]],
    "8@20/4": [[(4, 16)], [(4, 20)]],
    "5@8 + 2x1@7": [[(5, 8), (1, 7), (1, 7)]],
    "4/2 + 1@9": [[(2, 2), (1, 9)], [(2, 4), (1, 9)]],
    "4@10/3": [[(3, 9)], [(1, 10)]],
    "2x6/3": [[(3, 3)] * 2, [(3, 6)] * 2],
}
WRONG = ["", "a", "0", "4@3", "1@0", "2x", "x2", "4/0", "0x4", "4,", "4+", "-1", "a=1", "4.5"]


@pytest.fixture(autouse=True)
def idle_machine(monkeypatch):
    """Nobody else uses the machine."""
    monkeypatch.setattr(timing.Probe, "take", lambda self, *_: 0.0)


def batch_of(*chunks):
    """A batch of (tokens, end)."""
    return tuple(TimedChunk(tokens, end) for tokens, end in chunks)


TWO = {"a": batch_of((5, 9), (1, 7)), "b": batch_of((1, 3))}


@pytest.mark.parametrize("text, batches", TEXTS.items())
def test_a_text_says_which_batches(text, batches):
    expected = [tuple(batch) for batch in batches]
    assert parse_batches(text) == expected


@pytest.mark.parametrize("text", WRONG)
def test_a_text_that_is_no_batch_is_refused(text):
    with pytest.raises(ValueError, match="^batches: "):
        parse_batches(text)


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


@pytest.mark.parametrize("head", [False, True])
def test_on_a_gpu_the_whole_is_what_one_waits_for_and_the_parts_are_its_own_times(
    monkeypatch, head
):
    """A part that waits for launches could be longer than the whole. A launch is computed as the
    batch is, and not waited for: `greedy`, which waits, is not called."""
    device_ms = {"attention": 20.0, "launch": 70.0}
    logits = []  # how many, of each batch
    timed = set()

    def launch_timings(launches, device):
        with monkeypatch.context() as patch:
            patch.setattr(Runner, "greedy", None)
            results = {key: launch() for key, launch in launches.items()}
        logits.extend(len(result) for (_, part), result in results.items() if part == "launch")
        return {key: timing.LaunchTiming(500.0, device_ms.get(key[1], 8.0)) for key in launches}

    monkeypatch.setattr(timing, "launch_timings", launch_timings)
    stopwatch(monkeypatch, lambda key: 100.0, at=lambda key, run: timed.add(key[1]))
    time = time_two(head=head)["a"]
    assert logits == ([2, 1] if head else [0, 0])
    assert timed == {"total"}
    assert (time.total_ms, time.attention_ms, time.preproj_ms) == (100.0, 20.0, 8.0)
    assert time.products_ms == 5 * 8.0 and time.other_ms == 100 - 40 - 20
    assert (time.launch_ms, time.device_ms, time.launch_bound) == (500.0, 70.0, True)


@pytest.mark.parametrize("head", [False, True])
def test_each_operation_is_timed_on_the_rows_of_the_batch_right_before_the_whole(monkeypatch, head):
    """The head has the rows of the chunks, if it is timed. Another batch, maybe of seconds, does
    not slow a batch down."""
    shapes = {}  # of the products in each variant, in the order of time
    linear = torch.nn.functional.linear

    def note_shapes(key, run):
        shapes[key] = []

        def spy(x, weight, *bias):
            shapes[key].append((len(x), *weight.shape))
            return linear(x, weight, *bias)

        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.functional, "linear", spy)
            run()

    stopwatch(monkeypatch, at=note_shapes)
    model = tiny_model()
    time_two({"a": batch_of((5, 9), (1, 7), (1, 3)), "b": batch_of((1, 3))}, head=head)
    vocabulary = [(3, model.config.vocab_size, model.config.n_embd)] if head else []
    assert shapes["a", "head"] == vocabulary
    layers = [(7, *layer.weight.shape) for layer in timing.linear_layers(model)]
    linear_shapes = [shape for shape in shapes["a", "total"] if shape[0]]
    assert linear_shapes == layers + vocabulary
    for i, name in enumerate(timing.LINEAR):
        assert shapes["a", name] == layers[i::4]
    assert not shapes["a", "attention"]
    order = list(shapes)
    count = len(order) // 2
    assert order[count - 1] == ("a", "total") and order[-1] == ("b", "total")
    assert {part for name, part in order[:count] if name == "a"} == {"total", *PARTS}


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


def test_the_table_of_a_gpu_tells_launches_from_kernels(capsys):
    """That of a CPU has no such columns: it computes what it launches."""
    model = tiny_model()
    bound = [batch_time(7.0, launch_ms=6.5, device_ms=2.25)] * 2
    quick = [batch_time(9.0, launch_ms=6.0, device_ms=8.0, busy=True)] * 2
    rows = {"6x1@8": add_up(model, [decodes(6, 8)] * 2, bound)}
    rows["16/8"] = add_up(model, chunks_of(16, 8), quick)
    command.print_batches(rows)
    text = capsys.readouterr().out
    assert "launch | device |" in text and "|  13.00 |   4.50 |" in text
    assert "bound by launches, not by the device: 6x1@8\n" in text and "| 16/8 (busy) " in text
    command.print_batches({"8": add_up(model, [prompts(1, 8)], [batch_time(9.0)])})
    assert "launch" not in capsys.readouterr().out


@pytest.fixture
def run(tmp_path, capsys):
    """A function that runs the command: (the rows that it writes, and what it prints)."""

    def run_command(*argv):
        file = tmp_path / "report.json"
        options = ["--preset", "llama-tiny", "--device", "cpu", "--json", str(file)]
        bench.main(["batches", *argv, *options])
        return json.loads(file.read_text("utf-8"))["batches"], capsys.readouterr().out

    return run_command


@pytest.mark.parametrize("layers", [1, 3, None])
def test_as_many_layers_are_timed_as_are_asked_for(layers, run, monkeypatch):
    runners = []
    real = batch_times.time_batches

    def time_batches(runner, *args, **settings):
        runners.append(runner)
        return real(runner, *args, **settings)

    monkeypatch.setattr(batch_times, "time_batches", time_batches)
    words = ["--layers", str(layers)] if layers else []
    rows, text = run("4@8 + 1@8", "3x1@9", *words)
    (runner,) = runners
    assert len(runner.model.blocks) == (layers or GPTConfig.preset("llama-tiny").n_layer)
    assert (runner.cache.pages, runner.cache.max_len) == (3, 9)
    assert (f"cut to --layers {layers}" in text) == bool(layers)
    row = rows["4@8 + 1@8"]
    assert row["total_ms"] > 0 and all(row[f"{name}_ms"] > 0 for name in timing.LINEAR)
    assert set(row["intensity"]) >= set(timing.LINEAR) and text.count("\n| 4@8 + 1@8 ") == 1
    assert list(rows) == ["4@8 + 1@8", "3x1@9"]
    heads = text.partition("| ms ")[2].partition("\n")[0].split()
    assert {*timing.LINEAR, "attention", "limit", "other", "total"} <= set(heads)


def test_layers_of_a_model_that_is_compiled_are_refused():
    model = tiny_model()
    model.compiled = True
    with pytest.raises(ValueError, match="^--layers: does not go with --compile, --tp, --pp$"):
        keep_layers(model, 1, seed=0)


def test_a_batch_that_is_too_long_is_refused_by_its_length():
    with pytest.raises(ValueError, match="^batch-length 1025: this model is limited to 1024"):
        bench.main(["batches", "1@1025", "--preset", "gpt2"])
