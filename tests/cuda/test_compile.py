"""--compile makes one graph for each half of a layer, held against what Dynamo traced."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from attention.sdpa import SDPA
from fast import compile_layers
from model import FlatBatch
from request import lone_chunk
from tests.helpers import poisoned_cache, tiny_model

HALVES = 2  # of a layer: what lies before attention, and after
SIZES = (60, 21, 8, 5, 33)  # rows of the batches


@pytest.mark.parametrize("n_layer", [1, 2, 6])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_batches_of_any_size_are_compiled_once(family, n_layer, monkeypatch):
    """Dynamo traces, no compiler is called: its time and its code are not tested."""
    counter = CompileCounter()
    real_compile = torch.compile
    torch._dynamo.reset()

    def compile_eagerly(function, dynamic=None):
        return real_compile(function, dynamic=dynamic, backend=counter)

    monkeypatch.setattr(torch, "compile", compile_eagerly)
    model = tiny_model(family, n_layer=n_layer)
    compile_layers(model)
    cache = poisoned_cache(model, 4, 64)
    backend = SDPA(model.config, cache)
    for rows in SIZES:
        batch = FlatBatch.build([lone_chunk([0], 0, [1] * rows)], backend)
        assert not model(batch, cache).isnan().any()
    assert counter.frame_count == HALVES
    torch._dynamo.reset()
