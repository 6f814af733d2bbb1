"""CUDA graphs on a pretended GPU: what a replay launches, and the memory that graphs keep."""

import pytest
import torch

from fast.padding import padded_sizes
from model import GPT, GPTConfig
from request import lone_chunk
from runtime.runner import Runner

pytestmark = [pytest.mark.cuda_build, pytest.mark.filterwarnings("error:.*without CUDA graphs")]

MAX_BATCH = 48
MAX_LEN = 512
N_EMBD = 256
REPLAYED = 1  # the graph of all layers
# A batch's numbers and those of attention, each in one transfer, and copied into the graph's.
TRANSFERS = 2
COPIES = 5  # tokens, positions, slots, numbers of keys, and where these are
PADDING = 2  # its slots and numbers of keys
HEAD = 4  # rows of logits, norm, product, argmax


def new_runner(n_layer=2, vocab_size=61, page_size=MAX_LEN):
    """A runner on the pretended GPU with pages for MAX_BATCH requests."""
    sizes = dict(
        n_embd=N_EMBD,
        n_head=4,
        n_kv_head=2,
        n_inner=64,
        vocab_size=vocab_size,
    )
    model = GPT(GPTConfig(n_layer=n_layer, max_positions=MAX_LEN, **sizes), "cuda", torch.bfloat16)
    return Runner(model, MAX_BATCH * MAX_LEN // page_size, page_size, MAX_LEN)


def decodes(count, page_size=MAX_LEN):
    """So many decodes of requests with a page each."""
    return [lone_chunk([i], page_size // 2, [1]) for i in range(count)]


@pytest.mark.parametrize("page_size", [MAX_LEN, 256])
@pytest.mark.parametrize("n_layer", [1, 5])
def test_a_replayed_iteration_launches_as_little_for_any_layers(gpu, n_layer, page_size):
    runner = new_runner(n_layer, page_size=page_size)
    runner.greedy(decodes(6, page_size))  # records
    gpu.kernels.clear()
    runner.greedy(decodes(6, page_size))
    assert gpu.kernels["cuda_graph"] == REPLAYED
    assert gpu.kernels.total() <= REPLAYED + TRANSFERS + COPIES + PADDING + HEAD


def test_graphs_keep_a_row_of_the_layers_for_each_decode_and_no_logits(gpu):
    """Logits of 48 decodes and 128,256 tokens take 12 MB, and those of all sizes 32 MB."""
    runner = new_runner(vocab_size=128_256)
    sizes = padded_sizes(MAX_BATCH)
    runner.greedy(decodes(MAX_BATCH))  # what is allocated once for all
    before = gpu.allocated_bytes
    for size in sizes:
        runner.greedy(decodes(size))
    kept_rows = sum(sizes) - MAX_BATCH
    blocks = 12 * len(sizes)  # of 512 bytes, at least one for each tensor of a batch
    assert gpu.allocated_bytes - before <= kept_rows * N_EMBD * 2 + blocks * 512
