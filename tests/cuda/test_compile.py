"""--compile makes one graph for each half of a layer, for any number of layers and of rows.

On a GPU a layer then launches fewer kernels than the operators of test_kernels.py."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from attention.sdpa import SDPA
from fast import compile_layers
from model import FlatBatch
from request import lone_chunk
from tests.cuda.inductor import launches_of_a_layer
from tests.cuda.split_k import Worker
from tests.helpers import poisoned_cache, tiny_model

MAX_KERNELS = 12  # of a compiled layer in a decode-only iteration, outside CUDA graphs
BETWEEN = 2  # the halves of a layer: the cache is written, and flash attention reads it
LAUNCHES = {  # of the two halves; "triton" is a kernel that Inductor fused
    "llama": (
        ["triton", "mm", "triton"],  # RMSNorm, preproj, RoPE
        ["addmm", "triton", "mm", "triton", "addmm"],  # postproj + x, RMSNorm, MLP; ffn_ln2 + x
    ),
    "gpt2": (
        ["triton", "addmm"],  # LayerNorm, preproj
        ["addmm", "triton", "addmm", "triton", "addmm", "triton"],  # the sums are in the kernels
    ),
}
COPIES = {"llama": 2, "gpt2": 0}  # addmm copies its summand first, where that is a matrix
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


@pytest.mark.cuda_build
@pytest.mark.parametrize("family, n_kv_head", [("llama", 40), ("llama", 8), ("gpt2", 40)])
def test_kernels_of_a_compiled_layer_on_an_a100(family, n_kv_head):
    """Inductor generates the code for six rows of LLaMA-13B; nothing runs it."""
    worker = Worker(TORCHINDUCTOR_FORCE_DISABLE_CACHES="1")
    halves = worker.call(launches_of_a_layer, family, n_kv_head)
    worker.close()
    assert tuple(halves) == LAUNCHES[family]
    assert sum(map(len, halves)) + COPIES[family] + BETWEEN <= MAX_KERNELS
