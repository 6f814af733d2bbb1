"""How many operators a layer calls: at a few microseconds each they bound a decode iteration.

Most launch one kernel. Flash attention of decodes that share KV heads launches some more. These
are 16 with flash; --compile fuses them to 12 or fewer, see test_compile.py."""

from collections import Counter

import pytest
import torch

from model import GPT, FlatBatch, GPTConfig
from runtime.lone_chunk import lone_chunk
from runtime.runner import Runner
from tests.cuda import cpu_time
from tests.cuda.batches import CUDA_BACKENDS, reads_pages

MAX_LEN = 2048
CLASSES = {  # of operators, by their names
    "addmm": "product",
    "mm": "product",
    "_fused_rms_norm": "norm",
    "index_copy_": "cache write",
    "silu": "activation",
    "mul_": "activation",
    "add_": "residual",
    "_to_copy": "RoPE",
    "mul": "RoPE",
    "roll": "RoPE",
    "addcmul": "RoPE",
    "copy_": "RoPE",
    "index_select": "copy of pages",
    "flash_fwd": "attention",
    "_varlen_attn": "attention",
    "_flash_attention_forward": "attention",
    "split_k": "attention",
    "split_k_reduce": "attention",
    "cat": "join of calls",
    "constant_pad_nd": "padding",
}
# What a layer launches beside attention; `attention` is that of the backend.
LAYER = {"norm": 2, "product": 4, "RoPE": 4, "cache write": 1, "activation": 2, "residual": 2}


def table_of(request, page_size):
    """The block table of a request, which has all of its pages."""
    width = MAX_LEN // page_size
    return list(range(request * width, (request + 1) * width))


def kernels_of_a_layer(gpu, attention, page_size, lengths):
    """{class of operators: kernels} of a layer in the hybrid batch of spans with these lengths."""
    counts = []
    for n_layer in (2, 3):  # the difference is one layer
        config = GPTConfig(
            n_layer=n_layer, n_head=8, n_kv_head=2, n_embd=1024, vocab_size=64, n_inner=512
        )
        model = GPT(config, "cuda", torch.bfloat16)
        pages = len(lengths) * MAX_LEN // page_size
        runner = Runner(model, pages, page_size, MAX_LEN, attention)
        tables = [table_of(request, page_size) for request in range(len(lengths))]
        spans = [lone_chunk(table, 1000, [1] * n) for table, n in zip(tables, lengths, strict=True)]
        batch = FlatBatch.build(spans, runner.attention)
        gpu.kernels.clear()
        runner.model(batch, runner.cache)
        counts.append(Counter(gpu.kernels))
    layer = Counter()
    for name, count in (counts[1] - counts[0]).items():
        layer[CLASSES.get(name, name)] += count
    return dict(layer)


@pytest.mark.cuda_build
@pytest.mark.parametrize("page_size", [MAX_LEN, 256, 64])
@pytest.mark.parametrize("attention", CUDA_BACKENDS)
def test_kernels_of_a_decode_only_layer(gpu, attention, page_size):
    if not reads_pages(attention, page_size, MAX_LEN):
        pytest.skip(f"{attention} does not read pages of {page_size}")
    kernels = kernels_of_a_layer(gpu, attention, page_size, [1] * 6)
    split_k = attention == "xformers-split-k" or (attention == "xformers" and page_size < MAX_LEN)
    expected = LAYER | {"attention": 1}
    if split_k:  # adds up its pieces, and six decodes are padded to eight
        expected |= {"attention": 2, "padding": 1}
    assert kernels == expected


@pytest.mark.cuda_build
@pytest.mark.parametrize("page_size", [MAX_LEN, 256, 64])
@pytest.mark.parametrize("attention", CUDA_BACKENDS)
def test_kernels_of_a_hybrid_layer(gpu, attention, page_size):
    """Two calls of attention, whose results are joined; xformers copies small pages of chunks."""
    if not reads_pages(attention, page_size, MAX_LEN):
        pytest.skip(f"{attention} does not read pages of {page_size}")
    kernels = kernels_of_a_layer(gpu, attention, page_size, [1] * 5 + [250])
    copies = attention != "flash" and page_size < MAX_LEN
    split_k = attention == "xformers-split-k" or copies
    expected = LAYER | {"attention": 2, "join of calls": 1}
    if split_k:
        expected |= {"attention": 3, "padding": 1}
    if copies:
        expected["copy of pages"] = 2
    assert kernels == expected


@pytest.mark.cuda_build
def test_the_cpu_time_of_a_layer_is_printed_for_each_backend(capsys):
    cpu_time.main(["--layers", "1", "--repeats", "4"])
    heads, *rows = capsys.readouterr().out.splitlines()
    assert heads.split()[-len(cpu_time.PARTS) :] == list(cpu_time.PARTS)
    assert {row.split()[0] for row in rows} == {"sdpa", *CUDA_BACKENDS}
    for row in rows:
        assert all(float(cell) > 0 for cell in row.split()[2:])
