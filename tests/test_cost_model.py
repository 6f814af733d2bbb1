"""The cost model, held against sums by hand, the real model's weights, and measured kernels."""

import random
from dataclasses import replace
from math import inf
from statistics import median

import pytest
import torch

from config import GPTConfig
from kv_cache import kv_bytes_per_token
from lab.simulator.cost_model import CostModel, matrices, product_seconds
from lab.simulator.devices import A100, GEOMETRIES, LINKS, Device, Link
from model import GPT

# Rates without limit leave one cost: arithmetic at 1 Mflop/s, bytes at 1 MB/s, a second a kernel
UNLIMITED = Device(
    "unlimited",
    flops_per_s=inf,
    bytes_per_s=inf,
    attention_flops_per_s=inf,
    attention_bytes_per_s=inf,
    memory_bytes=1e6,
    tile=4,
    op_s=0.0,
)
MATH = replace(UNLIMITED, flops_per_s=1e6, attention_flops_per_s=1e6)
MOVE = replace(UNLIMITED, bytes_per_s=1e6, attention_bytes_per_s=1e6)
START = replace(UNLIMITED, op_s=1.0)

# 128 + 64 + 256 + 128 = 576 weights in a layer, in which a token's keys and values take 16 bytes
SMALL = GPTConfig(
    "llama",
    vocab_size=100,
    n_layer=4,
    n_head=4,
    n_embd=8,
    n_kv_head=2,
    n_inner=16,
)

PREFILL = (0, 10, 5)  # a chunk of 5 tokens after 10
DECODES = [(1, 7, 1), (2, 19, 1)]  # they read 8 and 20 keys
BATCH = [PREFILL, *DECODES]


@pytest.mark.parametrize("name", ["llama2-70b", "gpt2"])
def test_weights_and_memory_are_those_of_the_real_model(name):
    config = GEOMETRIES[name]
    with torch.device("meta"):
        model = GPT(config, device="meta", seed=None)
    for product, shape in matrices(config)._asdict().items():
        assert getattr(model.blocks[0], product).weight.shape[::-1] == shape
    weights = sum(weight.numel() for weight in model.parameters() if weight.ndim == 2)
    if config.family == "gpt2":
        weights -= config.max_positions * config.n_embd
    cost = CostModel(config, replace(A100, memory_bytes=200e9))
    assert cost.weight_bytes() == 2 * weights
    request_bytes = 3000 * kv_bytes_per_token(config, torch.float16)
    assert cost.max_batch(3000) == (180_000_000_000 - 2 * weights) // request_bytes  # §4.3.1


def test_each_gpu_has_its_share_of_the_matrices():
    assert list(matrices(SMALL)) == [(8, 16), (8, 8), (8, 32), (16, 8)]
    assert list(matrices(SMALL, 2)) == [(8, 8), (4, 8), (8, 16), (8, 8)]
    # each of four GPUs needs one of the two KV heads: preproj makes 1 + 2 heads of 2 numbers
    assert list(matrices(SMALL, 4)) == [(8, 6), (2, 8), (8, 8), (4, 8)]


def test_memory_is_what_weights_leave_of_nine_tenths():
    least_bytes = (7808 + 4 * 16) / 0.9  # of weights, and of one token
    assert CostModel(SMALL, replace(MATH, memory_bytes=least_bytes + 1e-6)).kv_tokens() == 1
    with pytest.raises(ValueError):
        CostModel(SMALL, replace(MATH, memory_bytes=least_bytes - 2)).kv_tokens()


def test_a_product_takes_the_longer_of_arithmetic_and_memory_time():
    device = replace(MATH, flops_per_s=1e12, bytes_per_s=1e9)
    # 5 rows are 8 of two tiles: 2 * 8 * 200 flop at 1 Mflop/s
    assert product_seconds(MATH, 5, 10, 20) == pytest.approx(3200e-6)
    # one row: 200 weights, 10 numbers in, 20 out are 460 bytes, 460 ns; 2 * 4 * 200 flop are 1.6 ns
    assert product_seconds(device, 1, 10, 20) == pytest.approx(460e-9)
    # 4,000 rows and 1e6 weights: 2 * (1e6 + 8e6) bytes are 18 ms, 8e9 flop are 8 ms
    assert product_seconds(device, 4000, 1000, 1000) == pytest.approx(18e-3)


# In BATCH 7 tokens are 8 rows. The chunk's 8 padded queries see 10 + 5 / 2 keys: 2 flop for each of
# the 8 dimensions, twice. Rows and columns of the four are 24 + 16 + 40 + 24. Each chunk has a row
# of the head and reads its own keys. There are four products and five others; attention starts for
# each chunk, and for all decodes together.
@pytest.mark.parametrize(
    "device, linear, elementwise, attention, head",
    [
        (MATH, 8 * 2 * 576e-6, 0, 8 * 12.5 * 32e-6, 2 * 4 * 8 * 100e-6),
        (MOVE, 2e-6 * (576 + 7 * 104), 2e-6 * 7 * 160, 16e-6 * 43, 2e-6 * (800 + 3 * 108)),
        (START, 4, 5, 2, 1),
        (replace(MOVE, riding=1.5), 2e-6 * 1304, 2e-6 * 1120, 16e-6 * (15 + 1.5 * 28), 2e-6 * 1124),
    ],
)
def test_parts_of_an_iteration(device, linear, elementwise, attention, head):
    cost = CostModel(SMALL, device)
    seconds = cost.layer_seconds(BATCH)
    assert seconds == pytest.approx((linear, elementwise, 0, attention))
    assert cost.seconds(BATCH) == pytest.approx(4 * sum(seconds) + head)


@pytest.mark.parametrize(
    "device, tp, microseconds",
    [
        (MATH, 1, 8 * 12.5 * 32),
        # a kernel that skips no masked pair computes all of a chunk
        (replace(MATH, skips_masked=False), 1, 8 * 15 * 32),
        # 320 us for each key take longer
        (replace(MATH, attention_bytes_per_s=5e4), 1, 15 * 16 * 20),
        # four GPUs divide the queries, of 8 dimensions, but not two heads' keys, of 16 bytes
        (MATH, 4, 8 * 12.5 * 4 * 2),
        (MOVE, 4, 15 * 8),
    ],
)
def test_attention_takes_the_longer_of_arithmetic_and_memory_time(device, tp, microseconds):
    _, start, length = PREFILL
    cost = CostModel(SMALL, device, tp)
    assert cost.chunk_seconds(start, length) == pytest.approx(microseconds / 1e6)


# {(tokens, keys before): measured us}: FlashAttention on an A100, 32 query and 4 KV heads of 128,
# from Vidur's data/profiling/a100/attention.csv
MEASURED_ATTENTION = {
    (576, 0): 89,
    (576, 1024): 159,
    (544, 3072): 308.8,
    (1984, 0): 651,
    (1984, 2048): 988.4,
    (3392, 512): 1777,
    (3584, 256): 1874.8,
}


def test_attention_over_chunks_of_an_a100_was_measured():
    cost = CostModel(GEOMETRIES["llama2-70b"], A100, tp=2)
    errors = [
        abs(1e6 * cost.chunk_seconds(start, length) / microseconds - 1)
        for (length, start), microseconds in MEASURED_ATTENTION.items()
    ]
    assert median(errors) < 0.15


# (GPUs, link, {MB: measured us}), from Vidur's data/profiling/network and data/profiling/a40
ALL_REDUCES = [
    (2, "nvlink3-pair", {0.46: 57, 26: 172, 131: 718}),
    (4, "nvlink3-pairs", {0.05: 59, 0.5: 89, 1.57: 163}),
    (4, "a40-pairs", {4.19: 190, 33.6: 1260, 100.7: 3754}),
    (8, "nvlink3", {0.5: 32, 6.3: 122, 14.7: 230, 65: 668}),
]


@pytest.mark.parametrize("gpus, link, measured", ALL_REDUCES)
def test_an_all_reduce_takes_what_was_measured(gpus, link, measured):
    wide = GPTConfig(
        "llama",
        vocab_size=64,
        n_layer=1,
        n_head=8,
        n_embd=5000,
        head_dim=64,
    )
    cost = CostModel(wide, A100, tp=gpus, tp_link=LINKS[link])
    for megabytes, microseconds in measured.items():
        tokens = round(megabytes * 1e6 / (2 * 5000))
        of_two = cost.layer_seconds([(0, 0, tokens)]).all_reduce
        assert of_two / 2 == pytest.approx(microseconds * 1e-6, rel=0.2)


@pytest.mark.parametrize("parallel_block, all_reduces", [(False, 2), (True, 1)])
def test_all_reduces_of_an_iteration(parallel_block, all_reduces):
    link = Link(bytes_per_s=1e3, step_s=0.5)
    starting = replace(MATH, op_s=1.0)
    cost = CostModel(SMALL, starting, tp=4, tp_link=link, parallel_block=parallel_block)
    # a kernel starts; four GPUs: six steps, each with a quarter of 7 tokens of 8 numbers
    once = 1 + 2 * 3 * (0.5 + 7 * 8 * 2 / 4 / 1e3)
    assert cost.layer_seconds(BATCH).all_reduce == pytest.approx(all_reduces * once)


@pytest.mark.parametrize("tp", [1, 2])
def test_stages_of_a_pipeline(tp):
    link = Link(bytes_per_s=1e3, step_s=0.25)
    cost = CostModel(
        SMALL,
        MATH,
        tp=tp,
        pp=2,
        tp_link=Link(inf, 0.0),
        pp_link=link,
        cpu_s=0.5,
    )
    layer = (2 * 8 * 576 + 8 * 12.5 * 32) / 1e6 / tp
    stages, hop = cost.stages(BATCH)
    assert stages == pytest.approx([0.5 + 2 * layer, 0.5 + 2 * layer + 6400e-6 / tp])
    assert hop == pytest.approx(0.25 + 7 * 8 * 2 / 1e3 / tp)
    assert cost.seconds(BATCH) == pytest.approx(sum(stages) + hop)


def test_decodes_are_known_by_their_number_and_keys():
    cost = CostModel.named("falcon-180b", tp=4, pp=2)
    assert cost.decode_stages(decodes=2, keys=28) == cost.stages(DECODES)


@pytest.mark.parametrize("preset, tp, pp", [("llama-13b", 1, 1), ("llama2-70b", 16, 4)])
def test_more_work_is_never_faster(preset, tp, pp):
    cost = CostModel.named(preset, tp=tp, pp=pp)
    draw = random.Random(0)
    for _ in range(100):
        lengths = [draw.choice([1, 1, 2, 700]) for _ in range(draw.randrange(2, 30))]
        batch = [(0, draw.randrange(4000), length) for length in lengths]
        seconds = cost.seconds(batch)
        (_, start, length), *others = batch
        assert cost.seconds([*others, batch[0]]) == pytest.approx(seconds)
        assert cost.seconds(others) < seconds
        assert cost.seconds([(0, start, length + 1), *others]) > seconds
        assert cost.seconds([(0, start + 1, length), *others]) > seconds


def test_measured_excess_is_interpolated_from_nothing_at_no_tokens():
    plain = CostModel(SMALL, MATH)
    measured = replace(plain, measured_excess=((8, 0.8), (16, 1.0)))
    for tokens, excess_s in {4: 0.4, 8: 0.8, 12: 0.9, 99: 1.0}.items():
        seconds = measured.seconds([(0, 0, tokens)]) - plain.seconds([(0, 0, tokens)])
        assert seconds == pytest.approx(excess_s)
