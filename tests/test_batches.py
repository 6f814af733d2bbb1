"""Batches as a text, and what is said of each when it was timed. No timing is asserted here."""

import json
from argparse import ArgumentTypeError

import pytest
import torch

import bench
from engine import Runner
from lab.commands import batches as module
from lab.commands.batches import intensities, series, spans, timed
from lab.commands.paper import CLAIMS
from lab.measure import timing as measure
from model import GPT, GPTConfig
from tests.helpers import tiny_model

MACHINE = {"flops_per_s": 1e9, "bytes_per_s": 1e6}
TEXTS = {  # and the batches of each, with (tokens, the length where they end)
    "512": [[(512, 512)]],
    "1@1024": [[(1, 1024)]],
    "3x1@9": [[(1, 9)] * 3],
    "10/4": [[(4, 4)], [(4, 8)], [(2, 10)]],
    "8@20/4": [[(4, 16)], [(4, 20)]],
    "2*3": [[(3, 3)], [(3, 3)]],
    "5@8 + 2x1@7": [[(5, 8), (1, 7), (1, 7)]],
    "4/2 + 1@9, 7": [[(2, 2), (1, 9)], [(2, 4), (1, 9)], [(7, 7)]],
    "2 * 4/2, 3x1@6": [[(2, 2)], [(2, 4)], [(2, 2)], [(2, 4)], [(1, 6)] * 3],
    "2x6/3": [[(3, 3)] * 2, [(3, 6)] * 2],
}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Nobody else uses the machine."""
    monkeypatch.setattr(measure.Probe, "take", lambda self, *_: 0.0)


@pytest.mark.parametrize("text, batches", TEXTS.items())
def test_a_text_says_which_batches(text, batches):
    expected = [tuple(batch) for batch in batches]
    assert series(text) == (text, expected)
    assert series(f"a name={text}") == ("a name", expected)


WRONG = ("", "a", "0", "4@3", "1@0", "2x", "x2", "4/0", "0x4", "4,", "4+", "-1 * 4", "a=", "4.5")
WRONG += ("0 * 4", "99999999999")


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_batch_is_refused(text, capsys):
    with pytest.raises(ArgumentTypeError, match="must be like 6x1@1024 or 2048/256"):
        series(text)
    with pytest.raises(SystemExit):
        bench.parse_args(["batches", "--", text])
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "must be" in err


def test_spans_are_of_requests_with_a_page_each():
    chunk, decode = spans(((4, 10), (1, 7)))
    assert (chunk.start, chunk.length, chunk.end, chunk.pages) == (6, 4, 10, [0])
    assert (decode.start, decode.length, decode.end, decode.pages) == (6, 1, 7, [1])
    assert not chunk.wants_logits and spans(((1, 7),), True)[0].wants_logits


def rows_of(monkeypatch, batches, ms, head=False, spread=0.1, **more):
    """What `timed` finds if everything takes as many ms as the function `ms` says of its key."""
    times = lambda variants, *_, **how: {
        key: measure.Timing(ms(key), spread)
        for key in variants
        if [run() for run in [variants[key]]]
    }
    monkeypatch.setattr(measure, "interleaved", times)
    model = tiny_model()
    runner = Runner(model, 4, 16)
    return timed(runner, MACHINE, batches, 3, head=head, **more)


def test_parts_of_an_iteration_add_up(monkeypatch):
    ms = {"total": 100, "attention": 20, "preproj": 1, "postproj": 2, "ffn_ln1": 4, "ffn_ln2": 8}
    batches = {"a": ((5, 9), (1, 7)), "b": ((1, 3),)}
    rows = rows_of(monkeypatch, batches, lambda key: (ms | {"head": 16}).get(key[1], 0))
    assert list(rows) == ["a", "b"] and rows["a"]["total_ms"] == 100
    for row in rows.values():
        assert row["products_ms"] == 1 + 2 + 4 + 8 + 16 and row["other_ms"] == 100 - 31 - 20
        assert {row[f"{name}_ms"] for name in measure.LINEAR} == {1, 2, 4, 8}
        assert row["spread"] == 0.1 and row["busy"] is False
    model = tiny_model()
    for name, batch in batches.items():
        flops, moved = measure.attention_cost(model.config, spans(batch), model.dtype)
        assert rows[name]["attention_limit_ms"] == 1e3 * max(flops / 1e9, moved / 1e6)
    rows = rows_of(monkeypatch, batches, lambda key: 1 + (key[1] == "ffn_ln1"), spread=0.21)
    assert all(row["busy"] and row["other_ms"] == 0 for row in rows.values())


@pytest.mark.parametrize("head", [False, True])
def test_what_is_timed_is_that_batch(monkeypatch, head):
    """Each operation has the rows of the batch, the head those of its chunks, if any."""
    seen, linear = {}, torch.nn.functional.linear
    batch = ((5, 9), (1, 7), (1, 3))

    def interleaved(variants, *_, **how):
        for key, run in variants.items():
            shapes = seen.setdefault(key, [])
            spy = lambda x, w, *b, shapes=shapes: (
                shapes.append((len(x), *w.shape)) or linear(x, w, *b)
            )
            with monkeypatch.context() as patch:
                patch.setattr(torch.nn.functional, "linear", spy)
                run()
        return {key: measure.Timing(1.0, 0.0) for key in variants}

    monkeypatch.setattr(measure, "interleaved", interleaved)
    model = tiny_model()
    timed(Runner(model, 3, 16), MACHINE, {"a": batch}, 3, head=head)
    vocabulary = (3, model.config.vocab_size, model.config.n_embd)
    assert seen["a", "head"] == [vocabulary] * head
    layers = [(7, *its.weight.shape) for its in measure.linear_layers(model)]
    assert [its for its in seen["a", "total"] if its[0]] == layers + [vocabulary] * head
    for i, name in enumerate(measure.LINEAR):
        assert seen["a", name] == layers[i::4]
    assert not seen["a", "attention"]


def test_intensity_is_flops_over_all_that_is_moved_once():
    config = GPTConfig("llama", 64, 3, 4, 64, n_kv_head=2, n_inner=96, max_positions=32)
    model = GPT(config, torch.device("cpu"), torch.bfloat16)
    found = intensities(model, [((4, 10), (1, 8)), ((2, 2),)])
    # 5 rows, then 2; 16 bits; columns of q, k and v: 64 + 2 * 32
    shapes = {"preproj": (64, 128), "postproj": (64, 64), "ffn_ln1": (64, 192), "ffn_ln2": (96, 64)}
    costs = {
        name: [(2 * r * a * b, 2 * (a * b + r * (a + b))) for r in (5, 2)]
        for name, (a, b) in shapes.items()
    }
    sums = {name: [sum(column) for column in zip(*its)] for name, its in costs.items()}
    assert {name: found[name] for name in shapes} == pytest.approx(
        {name: flops / moved for name, (flops, moved) in sums.items()}
    )
    flops, moved = (sum(column) for column in zip(*sums.values()))
    assert found["products"] == pytest.approx(flops / moved)
    pairs = 7 + 8 + 9 + 10 + 8 + 1 + 2  # visible keys; four heads of 16, q k and p v
    keys = 10 + 8 + 2  # K and V of two heads; q and out of four
    moved = 2 * (2 * keys * 32 + 2 * 7 * 64)
    assert found["attention"] == pytest.approx(4 * pairs * 64 / moved)


def run(tmp_path, capsys, *words):
    """(the report, what was printed) of the command, on the smallest model."""
    file = tmp_path / "found.json"
    bench.main(["batches", *words, "--model", "llama-tiny", "--json", str(file)])
    return json.loads(file.read_text())["batches"], capsys.readouterr().out


def test_batches_that_follow_each_other_are_added_up(tmp_path, capsys, monkeypatch):
    rows = {((8, 8),): 1.0, ((8, 16),): 2.0, ((1, 5),) * 2: 10.0}
    keys = [f"{name}_ms" for name in ("total", "attention", "products", *measure.LINEAR)]
    more = lambda ms: {"busy": ms == 2.0, "spread": ms / 100}
    fake = lambda runner, machine, batches, *_, **how: {
        batch: dict.fromkeys(keys, rows[batch]) | more(rows[batch]) for batch in batches
    }
    monkeypatch.setattr(module, "timed", fake)
    its, text = run(tmp_path, capsys, "16/8", "three=3 * 2x1@5, 8")
    assert its["16/8"]["total_ms"] == 3 and its["three"]["attention_ms"] == 31
    assert its["16/8"]["tokens"] == 16 and its["three"]["tokens"] == 14
    assert its["16/8"]["tokens_per_ms"] == pytest.approx(16 / 3)
    assert its["16/8"]["busy"] and not its["three"]["busy"]
    assert its["three"]["spread"] == 0.1 and "| 16/8 (busy) " in text and "| three " in text


def test_the_command_times_layers_too(tmp_path, capsys):
    its, text = run(tmp_path, capsys, "4@8 + 1@8", "--layers", "1", "--repeats", "2")
    (row,) = its.values()
    assert row["total_ms"] > 0 and all(row[f"{name}_ms"] > 0 for name in measure.LINEAR)
    assert "| 4@8 + 1@8 " in text
    assert "cut to --layers 1" in text


def test_a_name_has_one_meaning(capsys):
    with pytest.raises(SystemExit):
        bench.parse_args(["batches", "a=512", "b=3", "a=1@512"])
    assert "batches: 3 have 2 names, a, b" in capsys.readouterr().err


def test_layers_of_a_model_that_is_compiled_are_refused():
    model = tiny_model()
    model.compiled = True
    _, args = bench.parse_args(["batches", "4", "--layers", "1"])
    with pytest.raises(ValueError, match="^--layers: does not go with --compile, --tp, --pp$"):
        module.main(args, model, MACHINE | {"model": "tiny"})


def test_a_batch_that_is_too_long_is_refused_by_its_length():
    with pytest.raises(ValueError, match="^batch-length 9999: this model is limited to "):
        bench.main(["batches", "1@9999", "--model", "gpt2"])


LEAVES = {
    path.partition(".")[2].partition(".")[2]
    for its in CLAIMS.values()
    for shown in its["shows"]
    for paths in [shown["value"]]
    for value in (paths.values() if isinstance(paths, dict) else [paths])
    for path in value.split(" / ")
    if path.startswith("batches.")
}


def test_what_claims_ask_for_is_in_the_report(tmp_path, capsys):
    its, _ = run(tmp_path, capsys, "4", "--repeats", "2")
    assert len(LEAVES) > 10
    for leaf in LEAVES:
        value = its["4"]
        for key in leaf.split("."):
            value = value[key]
        assert value >= 0


def test_as_many_layers_as_are_asked_for(monkeypatch, tmp_path, capsys):
    seen = []
    known = module.timed
    monkeypatch.setattr(module, "timed", lambda r, *a, **b: seen.append(r) or known(r, *a, **b))
    run(tmp_path, capsys, "4", "3x1@9", "--layers", "3", "--repeats", "2")
    run(tmp_path, capsys, "4", "--repeats", "2")
    assert (
        len(seen[0].model.blocks) == 3 and seen[0].cache.pages == 3 and seen[0].cache.max_len == 9
    )
    assert len(seen[1].model.blocks) == GPTConfig.preset("llama-tiny").n_layer
