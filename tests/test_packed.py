"""Packed weights compute what plain ones do, and are held once."""

import pytest
import torch
import torch.nn as nn

import packed_linear as packed
from engine import Engine
from kv_cache import Span
from model import GPT
from sampling import SamplingParams
from tests.helpers import alone, poisoned_cache, run, tiny_model

bf16 = torch.bfloat16
can = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
needs_packing = pytest.mark.skipif(not can, reason="no bfloat16 products on this CPU")
PROMPT = [(7 * i) % 50 for i in range(40)]


def linear_layers(model):
    """The linear layers of a model, packed or not."""
    return [m for m in model.modules() if isinstance(m, (nn.Linear, packed.PackedLinear))]


@needs_packing
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_packed_is_as_near_to_the_exact_logits_as_plain(family):
    model = tiny_model(family, dtype=bf16)
    exact = GPT(model.config, dtype=torch.float64)
    exact.load_state_dict(model.state_dict())

    def logits(m):
        return run(m, poisoned_cache(m, 1, 40), [Span([0], 0, PROMPT)], all_rows=True)

    expected, plain = logits(exact), logits(model)
    fast = logits(packed.pack(model))
    assert all(isinstance(layer, packed.PackedLinear) for layer in linear_layers(model.blocks))

    def error(found):
        return (found - expected).abs().max()

    assert 0 < error(fast) <= 2 * error(plain)


@needs_packing
@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_held_once(tied):
    model = tiny_model(dtype=bf16, tie_embeddings=tied)
    count = sum(p.numel() for p in model.parameters())
    for _ in range(2):  # the second time changes nothing
        assert packed.pack(model) is model
    assert sum(p.numel() for p in model.parameters()) == count
    assert (model.device.type, model.dtype) == ("cpu", bf16)
    plain = [layer for layer in linear_layers(model) if not layer.weight.is_mkldnn]
    assert plain == ([model.head] if tied else [])
    assert (model.head.weight is model.token_embedding.weight) == tied
    with pytest.raises(ValueError, match="packed weights cannot be moved"):
        model.to(torch.float32)


@needs_packing
def test_an_engine_packs_its_model_and_serves_the_same_tokens():
    prompts, params = [PROMPT, PROMPT[:7]], SamplingParams(6)
    model = tiny_model(dtype=bf16)
    engine = Engine(model, policy="sarathi-serve", chunk=16, max_batch=2, max_len=64)
    assert any(isinstance(layer, packed.PackedLinear) for layer in linear_layers(model))
    done = engine.generate(prompts, params, progress=False)
    assert [c.tokens for c in done] == [alone(model, prompt, params) for prompt in prompts]


def test_other_numbers_and_other_machines_stay_plain(monkeypatch):
    for dtype in (torch.float32, torch.float64, torch.float16):
        assert not any(p.is_mkldnn for p in packed.pack(tiny_model(dtype=dtype)).parameters())
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not any(p.is_mkldnn for p in packed.pack(tiny_model(dtype=bf16)).parameters())
