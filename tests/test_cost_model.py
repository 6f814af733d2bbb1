"""The cost model, held against sums by hand, the real model's weights, and measured kernels."""

import random
from dataclasses import replace
from math import inf

import numpy as np
import pytest
import torch

from kv_cache import kv_bytes_per_token
from lab.simulator.cost_model import CostModel, interpolate, matrices, product_seconds
from lab.simulator.devices import (
    A100,
    DEVICES,
    GEOMETRIES,
    LINKS,
    Device,
    Link,
)
from model import GPT, GPTConfig

# Rates without limit leave one cost: arithmetic at 1 Mflop/s, bytes at 1 MB/s, a second a kernel
MATH = Device("math", 1e6, inf, 1e6, inf, 1e6, tile=4, op_s=0.0)
MOVE = Device("move", inf, 1e6, inf, 1e6, 1e6, tile=4, op_s=0.0)
START = Device("start", inf, inf, inf, inf, 1e6, tile=4, op_s=1.0)

# 128 + 64 + 256 + 128 = 576 weights in a layer, in which a token's keys and values take 16 bytes
SMALL = GPTConfig("llama", vocab_size=100, n_layer=4, n_head=4, n_embd=8, n_kv_head=2, n_inner=16)

PREFILL = (0, 10, 5)  # a chunk of 5 tokens after 10
DECODES = [(1, 7, 1), (2, 19, 1)]  # they read 8 and 20 keys
BATCH = [PREFILL, *DECODES]


@pytest.mark.parametrize("name", ["llama-7b", "llama2-70b", "gpt2"])
def test_the_matrices_are_those_of_the_real_model(name):
    config = GEOMETRIES[name]
    with torch.device("meta"):
        model = GPT(config, device="meta", seed=None)
    for product, shape in matrices(config)._asdict().items():
        assert getattr(model.blocks[0], product).weight.shape[::-1] == shape
    weights = [p.numel() for name, p in model.named_parameters() if p.ndim == 2]
    positions = config.max_positions * config.n_embd if config.family == "gpt2" else 0
    assert CostModel(config, A100).weight_bytes() == 2 * (sum(weights) - positions)


def test_each_gpu_has_its_share_of_the_matrices():
    assert list(matrices(SMALL)) == [(8, 16), (8, 8), (8, 32), (16, 8)]
    assert list(matrices(SMALL, 2)) == [(8, 8), (4, 8), (8, 16), (8, 8)]
    # each of four GPUs needs one of the two KV heads: preproj makes 1 + 2 heads of 2 numbers
    assert list(matrices(SMALL, 4)) == [(8, 6), (2, 8), (8, 8), (4, 8)]


def test_a_product_computes_whole_tiles():
    seconds = [product_seconds(MATH, n, 10, 20) * 1e6 for n in (1, 4, 5, 8, 9)]
    assert seconds == pytest.approx([1600, 1600, 3200, 3200, 4800])  # 2 * 200 for each row of tiles


def test_a_product_takes_the_longer_of_arithmetic_and_memory_time():
    device = Device("round", 1e12, 1e9, 1e12, 1e9, 1e9, tile=4, op_s=0.0)
    # one row: 200 weights, 10 numbers in, 20 out are 460 bytes, 460 ns; 2 * 4 * 200 flop are 1.6 ns
    assert product_seconds(device, 1, 10, 20) == pytest.approx(460e-9)
    assert product_seconds(replace(device, op_s=1e-3), 1, 10, 20) == pytest.approx(1e-3 + 460e-9)
    # 4,000 rows and 1e6 weights: 8e9 flop are 8 ms; 2 * (1e6 + 8e6) bytes are 18 ms, or 1.8 ms
    assert product_seconds(device, 4000, 1000, 1000) == pytest.approx(18e-3)
    faster = replace(device, bytes_per_s=1e10)
    assert product_seconds(faster, 4000, 1000, 1000) == pytest.approx(8e-3)


# In BATCH 7 tokens are 8 rows. The chunk's 8 padded queries see 10 + 5 / 2 keys: 2 flop for each of
# the 8 dimensions, twice. Rows and columns of the four are 24 + 16 + 40 + 24. Each chunk has a row
# of the head and reads its own keys. There are four products and five others; attention starts for
# each chunk, and for all decodes together.
PARTS = [
    (
        MATH,
        {"linear": 8 * 2 * 576e-6, "elementwise": 0, "attention": 8 * 12.5 * 32e-6},
        2 * 4 * 8 * 100e-6,
    ),
    (
        MOVE,
        {
            "linear": 2e-6 * (576 + 7 * 104),
            "elementwise": 2e-6 * 7 * (8 * 8 + 2 * 16 + 2 * 32),
            "attention": 16e-6 * (15 + 8 + 20),
        },
        2e-6 * (800 + 3 * 108),
    ),
    (START, {"linear": 4, "elementwise": 5, "attention": 2}, 1),
]


@pytest.mark.parametrize("device, layer, head", PARTS, ids=["math", "move", "start"])
def test_parts_of_an_iteration(device, layer, head):
    cost = CostModel(SMALL, device)
    seconds = cost.layer_seconds(BATCH)._asdict()
    assert seconds == pytest.approx(layer | {"all_reduce": 0})
    assert cost.seconds(BATCH) == pytest.approx(4 * sum(layer.values()) + head)


@pytest.mark.parametrize(
    "device, tp, chunk, microseconds",
    [
        (replace(MATH, attention_bytes_per_s=1e6), 1, (1000, 2), 4 * 1001 * 32),
        # a kernel that skips no masked pair computes all of a chunk
        (replace(MATH, skips_masked=False), 1, (10, 5), 8 * 15 * 32),
        # 160 us for each key, where 4 padded queries take 128 us
        (replace(MATH, attention_bytes_per_s=1e5), 1, (1000, 2), 1002 * 160),
        # four GPUs divide the queries, of 8 dimensions, but not two heads' keys, of 16 bytes
        (MATH, 2, (10, 5), 8 * 12.5 * 4 * 4),
        (MATH, 4, (10, 5), 8 * 12.5 * 4 * 2),
        (MOVE, 2, (10, 5), 15 * 8),
        (MOVE, 4, (10, 5), 15 * 8),
    ],
)
def test_attention_takes_the_longer_of_arithmetic_and_memory_time(device, tp, chunk, microseconds):
    assert CostModel(SMALL, device, tp).chunk_seconds(*chunk) == pytest.approx(microseconds / 1e6)


# {(tokens, keys before): measured us}: FlashAttention on an A100, 32 query and 4 KV heads of 128,
# from Vidur's data/profiling/a100/attention.csv
MEASURED_ATTENTION = {
    (576, 0): 89,
    (576, 512): 121.6,
    (576, 1024): 159,
    (544, 3072): 308.8,
    (1984, 0): 651,
    (1984, 1024): 809.6,
    (1984, 2048): 988.4,
    (2048, 0): 681.4,
    (3392, 512): 1777,
    (3456, 0): 1699.4,
    (3584, 0): 1821.8,
    (3584, 256): 1874.8,
}


def test_attention_over_chunks_of_an_a100_was_measured():
    two_gpus = CostModel(GEOMETRIES["llama2-70b"], A100, tp=2)
    errors = [
        abs(two_gpus.chunk_seconds(start, length) / (microseconds * 1e-6) - 1)
        for (length, start), microseconds in MEASURED_ATTENTION.items()
    ]
    assert np.median(errors) < 0.15


# (GPUs, link, {MB: measured us}), from Vidur's data/profiling/network and data/profiling/a40
ALL_REDUCES = [
    (2, "nvlink3-pair", {0.46: 57, 26: 172, 131: 718}),
    (4, "nvlink3-pairs", {0.05: 59, 0.5: 89, 1.57: 163}),
    (4, "a40-pairs", {4.19: 190, 33.6: 1260, 100.7: 3754}),
    (8, "nvlink3", {0.5: 32, 6.3: 122, 14.7: 230, 65: 668}),
]


@pytest.mark.parametrize("gpus, link, measured", ALL_REDUCES)
def test_an_all_reduce_takes_what_was_measured(gpus, link, measured):
    wide = GPTConfig("llama", vocab_size=64, n_layer=1, n_head=8, n_embd=5000, head_dim=64)
    cost = CostModel(wide, A100, tp=gpus, tp_link=LINKS[link])
    for megabytes, microseconds in measured.items():
        tokens = round(megabytes * 1e6 / (2 * 5000))
        of_two = cost.layer_seconds([(0, 0, tokens)]).all_reduce
        assert of_two / 2 == pytest.approx(microseconds * 1e-6, rel=0.2)


def test_decodes_beside_a_chunk_take_longer_in_attention():
    cost = CostModel(SMALL, replace(MOVE, riding=1.5))
    for batch, keys in ((DECODES, 28), ([PREFILL], 15), (BATCH, 15 + 1.5 * 28)):
        assert cost.layer_seconds(batch).attention == pytest.approx(16e-6 * keys)  # 16 bytes each


def test_stages_of_a_pipeline():
    link = Link(bytes_per_s=1e3, step_s=0.25)
    cost = CostModel(SMALL, MATH, pp=2, pp_link=link, cpu_s=0.5)
    layer = (2 * 8 * 576 + 8 * 12.5 * 32) / 1e6
    head = 6400e-6
    stages, hop = cost.stages(BATCH)
    assert stages == pytest.approx([0.5 + 2 * layer, 0.5 + 2 * layer + head])
    assert hop == pytest.approx(0.25 + 7 * 8 * 2 / 1e3)
    assert cost.seconds(BATCH) == pytest.approx(1 + 4 * layer + head + hop)
    divided = CostModel(SMALL, MATH, tp=2, pp=2, pp_link=link)
    first, last = divided.stages(BATCH).seconds
    assert last - first == pytest.approx(head / 2)
    assert divided.stages(BATCH).hop_s == pytest.approx(0.25 + 7 * 8 / 1e3)


@pytest.mark.parametrize("parallel_block, all_reduces", [(False, 2), (True, 1)])
def test_all_reduces_of_an_iteration(parallel_block, all_reduces):
    link = Link(bytes_per_s=1e3, step_s=0.5)
    starting = replace(MATH, op_s=1.0)
    cost = CostModel(SMALL, starting, tp=4, tp_link=link, parallel_block=parallel_block)
    # a kernel starts; four GPUs: six steps, each with a quarter of 7 tokens of 8 numbers
    once = 1 + 2 * 3 * (0.5 + 7 * 8 * 2 / 4 / 1e3)
    assert cost.layer_seconds(BATCH).all_reduce == pytest.approx(all_reduces * once)


def test_a_device_known_by_its_data_sheet_reaches_the_share_of_an_a100():
    cost = CostModel.named("yi-34b", "a40", tp=2, pp=2)
    assert (cost.stage_link, cost.pp_link) == (LINKS["pcie4"], LINKS["infiniband"])
    for rate, share in (("flops", 989 / 312), ("bytes", 3.35 / 2.039)):
        for field in (f"{rate}_per_s", f"attention_{rate}_per_s"):
            assert getattr(DEVICES["h100"], field) == pytest.approx(share * getattr(A100, field))


@pytest.mark.parametrize(
    "cost",
    [
        CostModel.named("llama-13b", "a6000", cpu_s=5e-3),
        CostModel.named("falcon-180b", tp=4, pp=2),
        CostModel.named("llama2-70b", "h100", tp=16, pp=4),  # fewer KV heads than GPUs
    ],
    ids=["one GPU", "pipeline", "many GPUs"],
)
def test_more_work_is_never_faster(cost):
    draw = random.Random(0)

    def chunk():
        length = draw.choice([1, 1, 1, 2, draw.randrange(2, 1500)])
        return (0, draw.randrange(4000), length)

    for _ in range(300):
        batch = [chunk() for _ in range(draw.randrange(1, 30))]
        seconds = cost.seconds(batch)
        assert 0 < seconds < inf
        shuffled = draw.sample(batch, len(batch))
        assert cost.seconds(shuffled) == pytest.approx(seconds, rel=1e-12)
        (_, start, length), *others = batch
        more = draw.choice([1, draw.randrange(1, 600)])
        assert cost.seconds([(0, start, length + more), *others]) > seconds
        assert cost.seconds([(0, start + more, length), *others]) > seconds
        assert cost.seconds([*batch, chunk()]) > seconds


@pytest.mark.parametrize("name", ["llama-7b", "llama2-70b", "gpt2"])
def test_memory_on_one_gpu_is_that_of_the_engine(name):
    cost = CostModel(GEOMETRIES[name], replace(A100, memory_bytes=200e9))
    kv_bytes = kv_bytes_per_token(GEOMETRIES[name], torch.float16)
    max_requests = (180_000_000_000 - cost.weight_bytes()) // (3000 * kv_bytes)  # SARATHI §4.3.1
    assert cost.max_batch(3000) == max_requests > 0


def test_memory_is_what_weights_leave_of_nine_tenths():
    least_bytes = (7808 + 4 * 16) / 0.9  # of weights, and of one token
    assert CostModel(SMALL, replace(MATH, memory_bytes=least_bytes + 1e-6)).kv_tokens() == 1
    with pytest.raises(ValueError):
        CostModel(SMALL, replace(MATH, memory_bytes=least_bytes - 2)).kv_tokens()
    with pytest.raises(ValueError):
        CostModel(SMALL, MATH, tp=3)


def test_measured_excess_is_interpolated_from_nothing_at_no_tokens():
    plain = CostModel(SMALL, MATH)
    measured = replace(plain, measured_excess=((8, 0.8), (16, 0.8)))
    for tokens, excess_s in ((4, 0.4), (8, 0.8), (12, 0.8)):
        seconds = measured.seconds([(0, 0, tokens)]) - plain.seconds([(0, 0, tokens)])
        assert seconds == pytest.approx(excess_s)


def test_interpolation_is_linear_and_level_outside_of_the_points():
    points = [(0, 0.0), (10, 2.0), (30, 3.0)]
    values = [interpolate(x, points) for x in (-5, 0, 5, 10, 20, 30, 99)]
    assert values == [0.0, 0.0, 1.0, 2.0, 2.5, 3.0, 3.0]
