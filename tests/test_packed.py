"""Packed weights, held against torch's Linear in float64: the same products, and held once."""

import copy

import pytest
import torch
import torch.nn as nn

import fast
from engine import Engine
from fast import packed_linear
from fast.packed_linear import MKLLinear, OneDNNLinear, PackedLinear, pack, packing_of
from sampling import SamplingParams
from tests.helpers import alone, tiny_model

CASES = []  # what this CPU has
if torch.backends.mkl.is_available():
    CASES.append((MKLLinear, torch.float32))
if torch.backends.mkldnn.is_available():
    CASES.append((OneDNNLinear, torch.float32))
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        CASES.append((OneDNNLinear, torch.bfloat16))
each_packing = pytest.mark.parametrize("kind, dtype", CASES)


def linear_layers(model):
    """The linear layers of a model, packed or not."""
    return [m for m in model.modules() if isinstance(m, (nn.Linear, PackedLinear))]


@pytest.mark.parametrize("bias", [False, True])
@each_packing
def test_every_number_of_rows_is_multiplied_exactly(kind, dtype, bias):
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(96, 80, bias, dtype=dtype)
    linear.requires_grad_(False)
    packed = kind(linear)
    exact = copy.deepcopy(linear).double()
    weight = exact.weight.abs()
    ulp = torch.finfo(dtype).eps
    for rows in (1, 2, 7, 31, 64, 255, 256, 257, 1000):
        x = torch.randn(rows, 96, generator=generator).to(dtype)
        expected = exact(x.double())
        scale = x.double().abs() @ weight.T + 1
        with torch.inference_mode():
            y = packed(x)
        difference = (y - expected).abs()
        assert (difference <= 4 * ulp * scale).all(), rows


@pytest.mark.parametrize("tied", [False, True])
@each_packing
def test_weights_are_held_once_but_for_a_tied_head(kind, dtype, tied, monkeypatch):
    monkeypatch.setattr(packed_linear, "packing_of", lambda dtype: kind)
    model = tiny_model(dtype=dtype, tie_embeddings=tied)
    count = sum(p.numel() for p in model.parameters())
    for _ in range(2):  # the second time changes nothing
        pack(model)
    if kind is OneDNNLinear:  # MKL's have padding
        head = model.head.weight.numel() if tied else 0
        assert sum(p.numel() for p in model.parameters()) == count + head
    assert model.device.type == "cpu"
    assert model.dtype == dtype
    assert not model.token_embedding.weight.is_mkldnn  # rows of it are looked up
    for layer in linear_layers(model):
        assert layer.weight.is_mkldnn
        if kind is MKLLinear:  # only the shape of the plain weight is kept
            assert layer.plain_weight.untyped_storage().nbytes() <= 8
    with pytest.raises(ValueError):
        model.to(torch.float64)


@each_packing
def test_an_engine_packs_its_model_and_serves_the_same_tokens(kind, dtype, monkeypatch):
    monkeypatch.setattr(packed_linear, "packing_of", lambda dtype: kind)
    prompts = [list(range(40)), [3] * 7]
    params = SamplingParams(6)
    model = tiny_model(dtype=dtype)
    engine = Engine(
        model,
        policy="sarathi-serve",
        chunk=16,
        max_batch=2,
        max_len=64,
    )
    assert any(isinstance(layer, PackedLinear) for layer in linear_layers(model))
    done = engine.generate(prompts, params, progress=False)
    for request in done:
        assert request.output == alone(model, request.prompt, params)


@pytest.mark.parametrize(
    "name, has_bfloat16, dtype, packing",
    [
        ("AMD EPYC 7282", False, torch.float32, OneDNNLinear),
        ("AMD EPYC", True, torch.bfloat16, OneDNNLinear),
        ("Intel(R) Xeon(R) Gold 6148", False, torch.float32, MKLLinear),
    ],
)
def test_type_and_packing_follow_the_cpu(name, has_bfloat16, dtype, packing, monkeypatch):
    cpu = dict(cpu_name=name, avx512_bf16=has_bfloat16)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: cpu)
    libraries = [torch.backends.mkldnn, torch.backends.mkl]
    for library in libraries:
        monkeypatch.setattr(library, "is_available", lambda: True)
    cpu_device = torch.device("cpu")
    assert fast.fastest_dtype(cpu_device) == dtype
    assert packing_of(torch.float32) == packing
    for library in libraries:
        monkeypatch.setattr(library, "is_available", lambda: False)
    assert packing_of(torch.float32) is None


def test_a_long_batch_in_pieces_has_the_rows_of_a_whole_one():
    model = tiny_model()
    block = model.blocks[0]
    config = model.config
    x = torch.randn(2500, config.n_embd, dtype=model.dtype)
    y = torch.randn(2500, config.n_head, config.head_dim, dtype=model.dtype)
    whole = block.finish(x, y)
    fast.cut_long_batches(model)
    fast.cut_long_batches(model)  # a second engine
    assert block.finish.func is fast.pieces.by_rows
    torch.testing.assert_close(block.finish(x, y), whole)
