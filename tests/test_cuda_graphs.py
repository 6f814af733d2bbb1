"""CUDA graphs, held against the engine without them; padding touches nobody's keys.

A recording on a CPU takes the place of a graph: the same callable, on the same tensors."""

import itertools
import warnings

import pytest

import fast
import runtime.runner
from engine import Engine
from fast import cuda_graphs
from fast.cuda_graphs import Recording
from fast.padding import padded_size, padded_sizes
from request import lone_chunk
from runtime.runner import Runner
from sampling import SamplingParams
from test_equivalence import close
from tests.cuda.flash import pretend_flash
from tests.helpers import poisoned_cache, tiny_model

MODEL = tiny_model(n_kv_head=2, head_dim=16, max_positions=1024)
LENGTHS = [1, 30, 7, 290, 12, 3, 44, 9]
PROMPTS = [[j % 61 for j in range(7 * n, 8 * n)] for n in LENGTHS]
PARAMS = [SamplingParams(4 + 3 * i) for i in range(8)]
SIZES = {
    "slots": dict(max_len=330, page_size=330),
    "pages": dict(max_len=330, page_size=256),
}


@pytest.fixture
def flash_calls(monkeypatch):
    """What flash is given, which runs on a CPU."""
    return pretend_flash(monkeypatch)


@pytest.fixture
def replays(flash_calls, monkeypatch):
    """Flash and graphs on a CPU, in a poisoned cache of CUDA's layout: the size of each replay."""
    sizes = []

    def record(compute, stream, pool):
        output = compute().clone()

        def replay():
            sizes.append(len(output))
            output.copy_(compute())

        return Recording(replay, output)

    def cuda_cache(config, pages, page_size, device, dtype, max_len):
        return poisoned_cache(MODEL, pages, page_size, max_len, position_major=True)

    monkeypatch.setattr(cuda_graphs, "record", record)
    monkeypatch.setattr(cuda_graphs.DecodeGraphs, "has_failed", False)  # and again at the end
    monkeypatch.setattr(runtime.runner, "KVCache", cuda_cache)
    monkeypatch.setitem(fast.DEVICES, "flash", "cpu")
    return sizes


def generate(engine, count=8):
    """The tokens of the first prompts."""
    done = engine.generate(PROMPTS[:count], PARAMS[:count], progress=False)
    return [request.output for request in done]


def new_engine(policy="sarathi-serve", backend="flash", max_batch=7, **sizes):
    return Engine(
        MODEL,
        policy=policy,
        attention=backend,
        chunk=48,
        max_batch=max_batch,
        clock=itertools.count().__next__,
        **sizes or SIZES["slots"],
    )


def test_numbers_of_decodes_are_padded_to_few_sizes():
    assert padded_sizes(50) == [1, 2, 4, 8, 16, 24, 32, 48, 64]
    for n in range(1, 257):
        size = padded_size(n)
        assert n <= size <= max(2 * n, 8)
        assert padded_size(size) == size


@pytest.mark.parametrize("policy", ["vllm", "sarathi-serve"])
@pytest.mark.parametrize("layout", SIZES)
def test_graphs_give_the_same_tokens_and_the_same_cache(policy, layout, replays):
    eager = new_engine(policy, "sdpa", **SIZES[layout])
    expected = generate(eager)
    assert not replays
    engine = new_engine(policy, **SIZES[layout])
    assert generate(engine) == expected
    assert len(set(replays)) > 1
    close(engine.runner.cache.data, eager.runner.cache.data, equal_nan=True)


@pytest.mark.parametrize("layout", SIZES)
def test_only_batches_of_decodes_are_replayed(layout, replays):
    runner = Runner(
        MODEL,
        8,
        SIZES[layout]["page_size"],
        330,
        "flash",
    )
    decodes = [lone_chunk([i], 0, [5 + i]) for i in range(5)]
    chunk = lone_chunk([7], 0, [1, 2, 3])
    no_logits = lone_chunk([6], 0, [1], yields_token=False)
    tokens = runner.greedy(decodes)
    assert replays == [8]
    assert runner.greedy([*decodes, chunk])[:5] == tokens
    assert replays == [8]
    assert runner.greedy(decodes[1:4]) == tokens[1:4]
    assert runner.greedy([decodes[0], no_logits, *decodes[1:]]) == tokens
    assert runner.greedy([no_logits]) == []
    assert replays == [8, 4, 8, 1]  # whoever wants logits


def test_padding_attends_to_one_key(replays, flash_calls):
    runner = Runner(MODEL, 8, 330, 330, "flash")
    runner.cache.data.fill_(1)
    runner.greedy([lone_chunk([i], 10 + i, [9]) for i in range(8)])
    flash_calls.clear()
    runner.greedy([lone_chunk([i], 20 + i, [9]) for i in range(5)])
    key_counts = [call.seqused_k.tolist() for call in flash_calls]
    assert key_counts == [[21, 22, 23, 24, 25, 1, 1, 1]] * MODEL.config.n_layer


def test_a_failed_recording_is_said_once_and_decodes_go_on(replays, monkeypatch):
    def fails(*arguments):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(cuda_graphs, "record", fails)
    expected = generate(new_engine(backend="sdpa"))
    with pytest.warns(UserWarning) as warned:
        assert generate(new_engine()) == expected
    assert len(warned) == 1
    with warnings.catch_warnings():  # nor does another engine try
        warnings.simplefilter("error")
        assert generate(new_engine(), count=2) == expected[:2]


@pytest.mark.parametrize("policy", ["vllm", "sarathi-serve"])
def test_nothing_is_recorded_after_warm_up(policy, replays, monkeypatch):
    engine = new_engine(policy)
    engine.warm_up()
    assert set(replays) == set(padded_sizes(7))
    monkeypatch.setattr(cuda_graphs, "record", None)
    generate(engine)
