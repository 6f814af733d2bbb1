"""How many operators a layer calls: at a few microseconds each they bound a decode iteration.

Most launch one kernel. Flash attention of decodes that share KV heads launches some more. These
are 16 with flash; --compile fuses them to 12 or fewer, see test_compile.py."""

import pytest
import torch

from model import GPT, FlatBatch, GPTConfig
from request import lone_chunk
from runtime.runner import Runner
from tests.cuda.batches import CUDA_BACKENDS, reads_pages

MAX_LEN = 2048
LAYER = 16  # norms 2, products 4, RoPE 4, cache write 1, activation 2, residuals 2, attention 1
READ = [  # attention, page_size
    (attention, page_size)
    for attention in CUDA_BACKENDS
    for page_size in (MAX_LEN, 256, 64)
    if reads_pages(attention, page_size, MAX_LEN)
]


def kernels_of_a_layer(gpu, attention, page_size, lengths):
    """How many kernels a layer launches in the hybrid batch of spans with these lengths."""
    counts = []
    width = MAX_LEN // page_size
    spans = []
    for i, length in enumerate(lengths):
        table = list(range(i * width, (i + 1) * width))
        spans.append(lone_chunk(table, 1000, [1] * length))
    for n_layer in (2, 3):  # the difference is one layer
        config = GPTConfig(
            n_layer=n_layer,
            n_head=8,
            n_kv_head=2,
            n_embd=1024,
            vocab_size=64,
            n_inner=512,
        )
        model = GPT(config, "cuda", torch.bfloat16)
        runner = Runner(
            model,
            len(lengths) * width,
            page_size,
            MAX_LEN,
            attention,
        )
        batch = FlatBatch.build(spans, runner.attention)
        gpu.kernels.clear()
        runner.model(batch, runner.cache)
        counts.append(gpu.kernels.total())
    return counts[1] - counts[0]


@pytest.mark.cuda_build
@pytest.mark.parametrize("chunk", [[], [250]], ids=["decode-only", "hybrid"])
@pytest.mark.parametrize("attention, page_size", READ)
def test_kernels_of_a_layer(gpu, attention, page_size, chunk):
    """Six decodes, padded to eight where Triton compiles for their number, or five and a chunk."""
    is_paged = page_size < MAX_LEN
    expected = LAYER
    if chunk:
        expected += 2  # another call of attention, and their results are joined
    if attention == "xformers-split-k" or (attention == "xformers" and is_paged):
        expected += 2  # it adds up its pieces, and queries are padded
    if chunk and is_paged and attention != "flash":
        expected += 2  # copies of the chunk's keys and values
    decodes = [1] * (6 - len(chunk))
    assert kernels_of_a_layer(gpu, attention, page_size, decodes + chunk) == expected
