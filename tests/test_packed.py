"""Packed weights compute what plain ones do, and are held once."""

from collections import Counter

import pytest
import torch
import torch.nn as nn

from engine import Engine
from runtime import packed_linear
from runtime.packed_linear import (
    MKLLinear,
    OneDNNLinear,
    PackedLinear,
    TimedLayer,
    count_parameters,
    pack,
    pack_as,
    packings_of,
)
from sampling import SamplingParams
from tests.helpers import alone, tiny_model

PROMPT = [(7 * i) % 50 for i in range(40)]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CASES = [
    pytest.param(kind, dtype, id=f"{kind.__name__}, {name}")
    for name, dtype in DTYPES.items()
    for kind in packings_of(dtype)
]
each_packing = pytest.mark.parametrize(("kind", "dtype"), CASES)


def linear_layers(model):
    """The linear layers of a model, packed or not."""
    return [m for m in model.modules() if isinstance(m, (nn.Linear, PackedLinear))]


def packed_layers(model):
    """Those of them that are packed."""
    return [layer for layer in linear_layers(model) if isinstance(layer, PackedLinear)]


@pytest.mark.parametrize("bias", [False, True])
@each_packing
def test_every_number_of_rows_is_multiplied_exactly(kind, dtype, bias):
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(96, 80, bias=bias, dtype=dtype).requires_grad_(False)
    packed = kind(linear)
    ulp = torch.finfo(dtype).eps
    for rows in (1, 2, 3, 6, 7, 16, 31, 64, 100, 251, 255, 256, 257, 300, 1000):
        x = torch.randn(rows, 96, generator=generator).to(dtype)
        exact = nn.functional.linear(
            x.double(), linear.weight.double(), linear.bias.double() if bias else None
        )
        scale = x.double().abs() @ linear.weight.double().abs().T + 1
        with torch.inference_mode():
            assert ((packed(x) - exact).abs() <= 4 * ulp * scale).all(), rows


@pytest.mark.parametrize("tied", [False, True])
@each_packing
def test_weights_are_held_once_but_for_a_tied_head(kind, dtype, tied):
    model = tiny_model(dtype=dtype, tie_embeddings=tied)
    count = sum(p.numel() for p in model.parameters())
    assert count_parameters(model) == count
    for _ in range(2):  # the second time changes nothing
        assert pack_as(kind, model) is model
    assert count_parameters(model) == count
    if kind is OneDNNLinear:  # MKL's have padding
        head = model.head.weight.numel() if tied else 0
        assert sum(p.numel() for p in model.parameters()) == count + head
    assert (model.device.type, model.dtype) == ("cpu", dtype)
    assert all(layer.weight.is_mkldnn for layer in linear_layers(model))
    assert not model.token_embedding.weight.is_mkldnn  # rows of it are looked up
    for layer in packed_layers(model):
        for value in vars(layer).values():  # beside the parameters
            if isinstance(value, torch.Tensor):
                assert value.untyped_storage().nbytes() <= 8
    with pytest.raises(ValueError, match="packed weights cannot be moved"):
        model.to(torch.float64)


@each_packing
def test_an_engine_packs_its_model_and_serves_the_same_tokens(kind, dtype, monkeypatch):
    monkeypatch.setattr(packed_linear, "fastest_layer", lambda dtype, threads: kind)
    prompts = [PROMPT, PROMPT[:7]]
    params = SamplingParams(6)
    model = tiny_model(dtype=dtype)
    engine = Engine(model, policy="sarathi-serve", chunk=16, max_batch=2, max_len=64)
    assert packed_layers(model)
    done = engine.generate(prompts, params, progress=False)
    assert [c.tokens for c in done] == [alone(model, prompt, params) for prompt in prompts]


def test_a_model_stays_plain_where_that_is_fastest(monkeypatch):
    monkeypatch.setattr(packed_linear, "fastest_layer", lambda dtype, threads: nn.Linear)
    assert not packed_layers(pack(tiny_model(dtype=torch.float32)))


def test_other_types_and_other_machines_have_no_packing(monkeypatch):
    for dtype in (torch.float64, torch.float16):
        assert packings_of(dtype) == []
        assert not packed_layers(pack(tiny_model(dtype=dtype)))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    for dtype in DTYPES.values():
        assert packings_of(dtype) == []


@pytest.fixture
def no_fastest_layer():
    """No fastest kind of layer is known, before and after."""
    packed_linear.fastest_layer.cache_clear()
    yield
    packed_linear.fastest_layer.cache_clear()


def test_the_fastest_kind_is_the_one_of_the_highest_rate(no_fastest_layer, monkeypatch):
    rates = {MKLLinear: 2.0, OneDNNLinear: 3.0, nn.Linear: 1.0}
    monkeypatch.setattr(packed_linear, "packings_of", lambda dtype: [MKLLinear, OneDNNLinear])
    monkeypatch.setattr(packed_linear, "steady_rates", lambda dtypes: {t: rates for t in dtypes})
    assert packed_linear.fastest_layer(torch.float32, threads=1) is OneDNNLinear


def test_a_type_without_packings_is_not_timed(no_fastest_layer, monkeypatch):
    monkeypatch.delattr(packed_linear, "steady_rates")
    assert packed_linear.fastest_layer(torch.float64, threads=1) is nn.Linear


@pytest.mark.parametrize("busy_rounds", [0, 1, 9])
def test_a_busy_moment_does_not_decide_which_type_is_fastest(busy_rounds, monkeypatch):
    """Others let bfloat16 run at a tenth of its rate for some rounds, float32 at half of its; later
    they cost each a hundredth."""
    rounds = Counter()

    def measure_layers(dtype):
        rounds[dtype] += 1
        slow, fast = (0.4, 4.0) if dtype == torch.bfloat16 else (1.0, 2.0)
        quiet_rounds = rounds[dtype] - busy_rounds
        rate = slow * (1 + rounds[dtype] / 20)
        if quiet_rounds > 0:
            rate = fast if quiet_rounds == 1 else 0.99 * fast
        return [TimedLayer(nn.Linear, rate), TimedLayer(OneDNNLinear, 0.1)]

    monkeypatch.setattr(packed_linear, "measure_layers", measure_layers)
    rates = packed_linear.steady_rates([torch.bfloat16, torch.float32])
    assert rates == {
        torch.bfloat16: {nn.Linear: 4.0, OneDNNLinear: 0.1},
        torch.float32: {nn.Linear: 2.0, OneDNNLinear: 0.1},
    }
    steady_for_4 = busy_rounds + 5
    assert rounds == {torch.bfloat16: steady_for_4, torch.float32: steady_for_4}


def test_rates_that_never_settle_are_measured_for_some_seconds(monkeypatch):
    calls = []

    def measure_layers(dtype):
        calls.append(dtype)
        return [TimedLayer(nn.Linear, 1.1 ** len(calls))]

    monkeypatch.setattr(packed_linear, "measure_layers", measure_layers)
    packed_linear.steady_rates([torch.bfloat16, torch.float32])
    assert len(calls) == 2 * packed_linear.MOST_ROUNDS


def test_every_kind_of_layer_is_timed():
    kinds = [timed.kind for timed in packed_linear.measure_layers(torch.float32)]
    assert kinds == [nn.Linear, *packings_of(torch.float32)]
    assert all(timed.flops_per_s > 0 for timed in packed_linear.measure_layers(torch.float32))
