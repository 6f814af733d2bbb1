"""The cost model against sums done by hand, against the real model's weights, and against times that were published.

Published times are those of SARATHI (Table 2, Figures 3 and 7, §5.3) and of Sarathi-Serve (Table 3). No clock is read.
"""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from cost_model import (
    A100,
    COLUMNS,
    DEVICES,
    GEOMETRIES,
    LINKS,
    PARALLEL_BLOCKS,
    CostModel,
    Device,
    Link,
    find,
    fit_products,
    linear_seconds,
    matrices,
    product_errors,
    product_seconds,
    read_products,
)
from kv_cache import kv_bytes_per_token, max_slots
from model import GPT, PRESETS, GPTConfig

# Rates without limit leave one cost at a time: arithmetic at 1 Mflop/s, bytes at 1 MB/s, or a second for each kernel.
MATH = Device("math", 1e6, math.inf, 1e6, math.inf, 1e6, tile=4, op_s=0.0)
MOVE = Device("move", math.inf, 1e6, math.inf, 1e6, 1e6, tile=4, op_s=0.0)
START = Device("start", math.inf, math.inf, math.inf, math.inf, 1e6, tile=4, op_s=1.0)

# 128 + 64 + 256 + 128 = 576 weights in a layer; a token's keys and values take 2 * 2 heads * 2 numbers = 16 bytes of it
SMALL = GPTConfig("llama", vocab_size=100, n_layer=4, n_head=4, n_embd=8, n_kv_head=2, n_inner=16)
SMALL_MATRICES = {"preproj": (8, 16), "postproj": (8, 8), "ffn_ln1": (8, 32), "ffn_ln2": (16, 8)}

PREFILL = (0, 10, 5)  # a chunk of 5 tokens after 10
DECODES = [(1, 7, 1), (2, 19, 1)]  # they read 8 and 20 keys
BATCH = [PREFILL, *DECODES]


def num_weights(config, tp=1):
    """Of the linear layers on one of tp GPUs."""
    return config.n_layer * sum(rows * columns for rows, columns in matrices(config, tp).values())


def decodes(count, context):
    """So many decodes, each of which attends to `context` tokens, its own among them."""
    return [(i, context - 1, 1) for i in range(count)]


# -----------------------------------------------------------------------------------------------------
# matrices


@pytest.mark.parametrize("name", ["llama-7b", "llama2-70b", "yi-34b", "mistral-7b", "gpt2"])
def test_the_matrices_are_those_of_the_real_model(name):
    config = PRESETS[name]
    with torch.device("meta"):
        model = GPT(config, device="meta", seed=None)
    real = {
        product: getattr(model.blocks[0], product).weight.shape[::-1]
        for product in ("preproj", "postproj", "ffn_ln1", "ffn_ln2")
    }
    assert matrices(config) == real
    in_layers = sum(p.numel() for p in model.blocks.parameters() if p.ndim == 2)
    assert num_weights(config) == in_layers
    in_all = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "position" not in name)
    assert CostModel(config, A100).weight_bytes() == 2 * in_all


def test_each_gpu_has_its_share_of_the_matrices():
    assert matrices(SMALL) == SMALL_MATRICES
    assert matrices(SMALL, 2) == {"preproj": (8, 8), "postproj": (4, 8), "ffn_ln1": (8, 16), "ffn_ln2": (8, 8)}
    # of the two KV heads of SMALL each of four GPUs needs one: preproj makes 1 + 2 heads of 2 numbers
    assert matrices(SMALL, 4) == {"preproj": (8, 6), "postproj": (2, 8), "ffn_ln1": (8, 8), "ffn_ln2": (4, 8)}
    assert 8 * num_weights(PRESETS["llama2-70b"], 8) == num_weights(PRESETS["llama2-70b"])
    repeated = 80 * 8192 * 2 * (16 - 8) * 128  # 8 more heads of keys and of values in each layer
    assert 16 * num_weights(PRESETS["llama2-70b"], 16) == num_weights(PRESETS["llama2-70b"]) + repeated


@pytest.mark.parametrize(
    "name, published, rel", [("gpt3-175b", 175e9, 0.01), ("falcon-180b", 180e9, 0.01), ("llama-33b", 32.5e9, 0.002)]
)
def test_geometries_have_as_many_parameters_as_published(name, published, rel):
    config = GEOMETRIES[name]
    embeddings = (1 if config.tie_embeddings else 2) * config.vocab_size * config.n_embd
    assert num_weights(config) + embeddings == pytest.approx(published, rel=rel)


def test_tp_must_divide_heads_and_inner_dimension():
    with pytest.raises(ValueError, match="tp=3: must divide n_head=4"):
        matrices(SMALL, 3)
    with pytest.raises(ValueError, match="tp=4: must divide n_inner=18"):
        CostModel(replace(SMALL, n_inner=18), MATH, tp=4)
    for tp in (0, -1, 1.5, "2"):
        with pytest.raises(ValueError, match=f"tp={tp!r}: must be a whole number of at least 1"):
            matrices(SMALL, tp)


# -----------------------------------------------------------------------------------------------------
# one product


def test_a_product_computes_whole_tiles():
    assert product_seconds(MATH, 5, 10, 20) == pytest.approx(2 * 8 * 200 / 1e6)  # 5 rows are padded to 8
    assert [product_seconds(MATH, n, 10, 20) * 1e6 for n in (1, 4, 8, 9)] == pytest.approx([1600, 1600, 3200, 4800])
    for device in (replace(MATH, tile=128), A100):
        seconds = {n: product_seconds(device, n, 4096, 4096) - device.op_s for n in (257, 385, 512, 513)}
        if device is A100:  # by then it computes for longer than it reads its weights
            assert 2 * 4096 * 4096 / A100.bytes_per_s < 2 * 384 * 4096 * 4096 / A100.flops_per_s
        assert seconds[385] == seconds[512] > seconds[257]
        assert seconds[513] == pytest.approx(seconds[512] * 5 / 4)
    seconds = {n: product_seconds(replace(MATH, tile=128), n, 8, 8) for n in (129, 256, 257)}
    assert seconds[129] == seconds[256] < seconds[257] == pytest.approx(1.5 * seconds[256])


def test_a_product_takes_its_arithmetic_or_its_bytes_whichever_is_longer():
    device = Device("round", 1e12, 1e9, 1e12, 1e9, 1e9, tile=4, op_s=0.0)
    # one row: 200 weights, 10 numbers in and 20 out are 460 bytes, or 460 ns; 2 * 4 * 200 flop are 1.6 ns
    assert product_seconds(device, 1, 10, 20) == pytest.approx(460e-9)
    assert product_seconds(replace(device, op_s=1e-3), 1, 10, 20) == pytest.approx(1e-3 + 460e-9)
    # 4,000 rows and 1,000 x 1,000 weights: 8e9 flop are 8 ms; 2 * (1e6 + 8e6) bytes are 18 ms
    assert product_seconds(device, 4000, 1000, 1000) == pytest.approx(18e-3)
    assert product_seconds(replace(device, bytes_per_s=1e10), 4000, 1000, 1000) == pytest.approx(8e-3)


def test_the_products_of_a_layer():
    weights = {"preproj": 128, "postproj": 64, "ffn_ln1": 256, "ffn_ln2": 128}
    assert linear_seconds(SMALL, MATH, 3) == pytest.approx({name: 2 * 4 * w / 1e6 for name, w in weights.items()})
    shared = {"preproj": 64, "postproj": 32, "ffn_ln1": 128, "ffn_ln2": 64}
    assert linear_seconds(SMALL, MATH, 3, tp=2) == pytest.approx({name: 8 * w / 1e6 for name, w in shared.items()})


# -----------------------------------------------------------------------------------------------------
# an iteration


def test_arithmetic_of_an_iteration():
    parts = CostModel(SMALL, MATH).parts(BATCH)
    assert parts["linear"] == pytest.approx(4 * 2 * 8 * 576 / 1e6)  # 7 tokens are 8 rows
    # the queries of the chunk, 8 with the padding, see 10 + 5 / 2 keys: 2 flop for each of the 8 dimensions, twice
    assert parts["attention"] == pytest.approx(4 * 8 * 12.5 * 4 * 8 / 1e6)
    assert parts["head"] == pytest.approx(2 * 4 * 8 * 100 / 1e6)  # three rows, one for each chunk
    assert parts["others"] == parts["all_reduce"] == parts["cpu"] == 0


def test_bytes_of_an_iteration():
    parts = CostModel(SMALL, MOVE).parts(BATCH)
    # rows and columns of the four: 24 + 16 + 40 + 24
    assert parts["linear"] == pytest.approx(4 * 2 * (576 + 7 * 104) / 1e6)
    assert parts["attention"] == pytest.approx(4 * 16 * (15 + 8 + 20) / 1e6)  # each reads all its own keys
    assert parts["others"] == pytest.approx(4 * 2 * 7 * (8 * 8 + 2 * 16 + 2 * 32) / 1e6)
    assert parts["head"] == pytest.approx(2 * (800 + 3 * 108) / 1e6)


def test_kernels_of_an_iteration():
    cost = CostModel(SMALL, START)
    # four products and five others; attention starts once for each chunk, and once for all decodes together
    assert cost.parts(BATCH) == pytest.approx(
        {"linear": 16, "others": 20, "all_reduce": 0, "attention": 8, "head": 1, "cpu": 0}
    )
    assert cost.seconds(DECODES) == 4 * (4 + 5 + 1) + 1
    assert cost.seconds([PREFILL, (3, 0, 2), (4, 0, 9)]) == 4 * (4 + 5 + 3) + 1


def test_attention_takes_its_pairs_or_its_keys_whichever_is_longer():
    device = replace(MATH, attention_bytes_per_s=1e6)
    for start, length, seconds in ((10, 5, 8 * 12.5 * 32e-6), (1000, 2, 4 * 1001 * 32e-6)):
        assert CostModel(SMALL, device).chunk_seconds(start, length) == pytest.approx(seconds)
    device = replace(MATH, attention_bytes_per_s=1e5)  # 160 us for each key, where 4 padded queries take 128 us
    assert CostModel(SMALL, device).chunk_seconds(1000, 2) == pytest.approx(1002 * 160e-6)
    for tp, dims, kv_bytes in ((2, 4, 8), (4, 2, 8)):  # the keys are not divided any more, the queries are
        assert CostModel(SMALL, MATH, tp).chunk_seconds(10, 5) == pytest.approx(8 * 12.5 * 4 * dims / 1e6)
        assert CostModel(SMALL, MOVE, tp).chunk_seconds(10, 5) == pytest.approx(15 * kv_bytes / 1e6)


def test_stages_of_a_pipeline():
    link = Link(bytes_per_s=1e3, step_s=0.25)
    cost = CostModel(SMALL, MATH, pp=2, pp_link=link, cpu_s=0.5)
    layer = (2 * 8 * 576 + 8 * 12.5 * 32) / 1e6
    stages, hop = cost.stages(BATCH)
    assert stages == pytest.approx([0.5 + 2 * layer, 0.5 + 2 * layer + 6400e-6])  # the last one has the head
    assert hop == pytest.approx(0.25 + 7 * 8 * 2 / 1e3)
    assert cost.seconds(BATCH) == pytest.approx(1 + 4 * layer + 6400e-6 + hop)
    assert cost.parts(BATCH)["attention"] == pytest.approx(4 * 8 * 12.5 * 32 / 1e6)
    assert cost.parts(BATCH)["cpu"] == 1
    assert CostModel(SMALL, MATH, tp=2, pp=2, pp_link=link).hop_seconds(7) == pytest.approx(0.25 + 7 * 8 / 1e3)
    last = CostModel(SMALL, MATH, tp=2, pp=4).stages(BATCH)[0]
    assert len(last) == 4 and last[3] - last[2] == pytest.approx(2 * 4 * 8 * 50 / 1e6)  # and half the columns
    assert last[0] == last[1] == last[2]


def test_all_reduces_of_an_iteration():
    link = Link(bytes_per_s=1e3, step_s=0.5)
    # four GPUs: six steps, each with a quarter of 7 tokens of 8 numbers
    once = 2 * 3 * (0.5 + 7 * 8 * 2 / 4 / 1e3)
    for parallel_block, all_reduces in ((False, 2), (True, 1)):
        cost = CostModel(SMALL, MATH, tp=4, tp_link=link, parallel_block=parallel_block)
        assert cost.parts(BATCH)["all_reduce"] == pytest.approx(4 * all_reduces * once)
    assert CostModel(SMALL, START, tp=2, tp_link=link).all_reduce_seconds(7) == pytest.approx(1 + 2 * (0.5 + 56e-3))
    assert CostModel(SMALL, START, tp_link=link).all_reduce_seconds(7) == 0
    assert set(PARALLEL_BLOCKS) == {"falcon-180b"}


def test_links_are_those_of_the_device_unless_given():
    cost = CostModel(SMALL, DEVICES["a40"], tp=2, pp=2)
    assert (cost.tp_link, cost.pp_link) == (LINKS["pcie4"], LINKS["infiniband"])
    assert all(device.link in LINKS for device in DEVICES.values())


def test_devices_of_which_only_the_data_sheet_is_known_reach_the_share_of_an_a100():
    sheets = {
        "a40": (149.7e12, 696e9),
        "h100": (989e12, 3.35e12),
        "h200": (989e12, 4.8e12),
    }  # an A100: 312e12, 2.039e12
    for name, (flops_per_s, bytes_per_s) in sheets.items():
        device, flops_share, bytes_share = DEVICES[name], flops_per_s / 312e12, bytes_per_s / 2.039e12
        for rate, share in (("flops_per_s", flops_share), ("bytes_per_s", bytes_share)):
            assert getattr(device, rate) / getattr(A100, rate) == pytest.approx(share)
            assert getattr(device, f"attention_{rate}") / getattr(A100, f"attention_{rate}") == pytest.approx(share)


# Of all kinds: on one GPU, divided, in a pipeline, with fewer KV heads than GPUs
COSTS = [
    lambda: CostModel(PRESETS["llama-13b"], DEVICES["a6000"], cpu_s=5e-3),
    lambda: CostModel(PRESETS["yi-34b"], A100, tp=2),
    lambda: CostModel(GEOMETRIES["gpt3-175b"], A100, tp=8, pp=8),
    lambda: CostModel(GEOMETRIES["falcon-180b"], A100, tp=4, pp=2, parallel_block=True),
    lambda: CostModel(PRESETS["llama2-70b"], DEVICES["h100"], tp=16, pp=4),
]


@pytest.mark.parametrize("make", COSTS)
def test_more_work_is_never_faster(make):
    draw, used = random.Random(0), make()

    def chunk():
        return (0, draw.randrange(4000), draw.choice([1, 1, 1, 2, draw.randrange(2, 1500)]))

    for _ in range(300):
        batch = [chunk() for _ in range(draw.randrange(1, 30))]
        seconds, i = used.seconds(batch), draw.randrange(len(batch))
        assert 0 < seconds < math.inf
        assert seconds == make().seconds(batch)  # what it remembers of other batches changes nothing
        assert sum(used.parts(batch).values()) + (used.pp - 1) * used.stages(batch)[1] == pytest.approx(seconds)
        assert min(used.parts(batch).values()) >= 0
        assert used.seconds(draw.sample(batch, len(batch))) == pytest.approx(seconds, rel=1e-12)  # in any order
        _, start, length = batch[i]
        more = draw.choice([1, draw.randrange(1, 600)])
        for longer in ((0, start, length + more), (0, start + more, length)):
            assert used.seconds([*batch[:i], longer, *batch[i + 1 :]]) > seconds
        assert used.seconds([*batch, chunk()]) > seconds


# -----------------------------------------------------------------------------------------------------
# memory


def test_weights_of_the_gpu_that_has_most():
    embedding = 2 * 100 * 8
    assert CostModel(SMALL, MATH).weight_bytes() == 4 * 2 * 576 + 2 * embedding
    assert CostModel(replace(SMALL, tie_embeddings=True), MATH).weight_bytes() == 4 * 2 * 576 + embedding
    assert CostModel(SMALL, MATH, pp=2).weight_bytes() == 2 * 2 * 576 + embedding
    assert CostModel(SMALL, MATH, tp=2, pp=2).weight_bytes() == 2 * 2 * 288 + embedding // 2


@pytest.mark.parametrize("name", ["llama-7b", "llama2-70b", "gpt2"])
def test_memory_on_one_gpu_is_that_of_the_engine(name):
    cost = CostModel(PRESETS[name], replace(A100, memory_bytes=200e9))
    kv_bytes = kv_bytes_per_token(PRESETS[name], torch.float16)
    assert cost.kv_bytes * cost.layers == kv_bytes
    assert cost.max_batch(3000) == max_slots(180_000_000_000, cost.weight_bytes(), 3000, kv_bytes) > 0


@pytest.mark.parametrize("pp, batch", [(8, 27), (1, 11)])
def test_gpt3_runs_the_batches_of_sarathi_on_a100s(pp, batch):
    cost = CostModel(GEOMETRIES["gpt3-175b"], A100, tp=8, pp=pp)
    assert cost.max_batch(4096) == batch  # §5.3
    # a layer of 12 h^2 weights; the embedding; keys and values of a token in one layer: all of 16 bits, on 8 GPUs
    h, layers = 12288, 96 // pp
    weights = (layers * 12 * h * h + 50257 * h) * 2 // 8
    tokens = int((0.9 * 80e9 - weights) / (layers * 2 * h * 2 / 8))
    assert (cost.weight_bytes(), cost.kv_tokens()) == (weights, tokens)
    assert tokens // 4096 // pp == batch  # each of the micro-batches in flight has its share


def test_llama_13b_runs_the_batches_of_sarathi_on_an_a6000():
    cost = CostModel(PRESETS["llama-13b"], DEVICES["a6000"])
    assert [cost.max_batch(n) for n in (2048, 3072)] == [10, 6]  # §4.3.1
    assert 18 <= cost.max_batch(1024) <= 20  # the paper takes 18


def test_a_model_that_does_not_fit_says_what_to_do():
    weights = "138.0"  # 80 * (8192 * (10240 + 8192) + 3 * 8192 * 28672) and 2 * 32000 * 8192 of two bytes
    with pytest.raises(ValueError, match=f"{weights} GB of weights do not fit 90% of the 48 GB of an A6000: try more"):
        CostModel(PRESETS["llama2-70b"], DEVICES["a6000"]).kv_tokens()
    with pytest.raises(ValueError, match="try more tp or pp"):
        CostModel(PRESETS["llama2-70b"], DEVICES["a6000"]).max_batch(1)
    left = (4 * 16) / 0.9  # of 7,808 bytes of weights, and one token
    assert CostModel(SMALL, replace(MATH, memory_bytes=7808 / 0.9 + left + 1e-6)).kv_tokens() == 1
    with pytest.raises(ValueError, match="do not fit"):
        CostModel(SMALL, replace(MATH, memory_bytes=7808 / 0.9 + left - 2)).kv_tokens()


def test_bad_arrangements_are_refused():
    with pytest.raises(ValueError, match="pp=3: must divide n_layer=4"):
        CostModel(SMALL, MATH, pp=3)
    for pp in (0, -2, 1.5):
        with pytest.raises(ValueError, match=f"pp={pp}: must be a whole number of at least 1"):
            CostModel(SMALL, MATH, pp=pp)
    for cpu_s in (-1e-9, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"cpu_s={cpu_s}: must be a finite number of seconds, at least 0"):
            CostModel(SMALL, MATH, cpu_s=cpu_s)
    with pytest.raises(ValueError, match="device='b200': must be one of a100-80gb, a40, a6000, h100, h200"):
        find(DEVICES, "device", "b200")
    assert find(DEVICES, "device", "a100-80gb") is A100


# -----------------------------------------------------------------------------------------------------
# published times


def a6000(cpu_s=0.0):
    return CostModel(PRESETS["llama-13b"], DEVICES["a6000"], cpu_s=cpu_s)


@pytest.mark.parametrize(
    "batch, linear, attention",
    [([(0, 0, 1024)], 224.8, 10), (decodes(4, 1024), 44.28, 5.68)],
    ids=["prefill", "decode"],
)
def test_table_2_of_sarathi(batch, linear, attention):
    parts = a6000().parts(batch)
    assert parts["linear"] * 1e3 == pytest.approx(linear, rel=0.02)
    assert parts["attention"] * 1e3 == pytest.approx(attention, rel=0.02)


def test_a_piggybacked_decode_costs_a_fraction():
    cost = a6000()
    alone = cost.seconds(decodes(4, 1024)) / 4
    with_prefill = cost.seconds([(9, 0, 1021), *decodes(3, 1024)]) - cost.seconds([(9, 0, 1021)])
    assert 5 < alone / (with_prefill / 3) < 15  # Table 2: 12.49 and 1.2 ms


@pytest.mark.parametrize("prompt_len, published", [(128, 55), (256, 69.8), (257, 92.33)])
def test_figure_7_of_sarathi(prompt_len, published):
    assert a6000(cpu_s=5e-3).seconds([(0, 0, prompt_len)]) * 1e3 == pytest.approx(published, rel=0.08)


@pytest.mark.parametrize("batch, published", [(1, 200), (2, 100), (18, 16.7)])
def test_figure_3_of_sarathi(batch, published):
    cost = a6000()
    decode = cost.seconds(decodes(batch, 1024)) / batch
    prefill = cost.seconds([(i, 0, 1024) for i in range(batch)]) / (batch * 1024)
    assert decode / prefill == pytest.approx(published, rel=0.15)


@pytest.mark.parametrize("name, tp, strict_slo", [("yi-34b", 2, 0.2), ("mistral-7b", 1, 0.1)])
def test_the_strict_slos_of_sarathi_serve_are_five_decode_iterations(name, tp, strict_slo):
    seconds = CostModel(PRESETS[name], A100, tp=tp).seconds(decodes(32, 4096))
    assert 5 * seconds == pytest.approx(strict_slo, rel=0.15)  # Table 3


# -----------------------------------------------------------------------------------------------------
# constants from measured times


@pytest.mark.parametrize("seed, tile", [(0, 1), (1, 32), (2, 64), (3, 128)])
def test_measured_times_give_back_the_device(seed, tile):
    device = replace(A100, flops_per_s=180e12, bytes_per_s=1.2e12, tile=tile, op_s=8e-6)
    config, noise = PRESETS["llama-7b"], np.random.default_rng(seed)
    tokens = noise.permutation([*range(1, 64, 3), *range(64, 1024, 24), *range(1024, 4097, 96)])
    times = {
        name: np.array([product_seconds(device, int(n), *shape) for n in tokens])
        * np.exp(noise.normal(0, 0.05, len(tokens)))
        for name, shape in matrices(config).items()
    }
    found = fit_products(replace(A100, name="new"), config, tokens, times)
    assert found.tile == tile
    assert found.flops_per_s == pytest.approx(180e12, rel=0.03)
    assert found.bytes_per_s == pytest.approx(1.2e12, rel=0.05)
    assert found.op_s == pytest.approx(8e-6, abs=4e-6)
    assert (found.name, found.memory_bytes) == ("new", 80e9)
    assert np.median(product_errors(found, config, tokens, times)["layer"]) < 0.05


def test_product_errors():
    # MATH takes 1024, 512, 2048 and 1024 us for four tokens, 4608 in all, and twice that for eight
    us = {"preproj": [2048, 4096], "postproj": [512, 2048], "ffn_ln1": [1024, 8192], "ffn_ln2": [1024, 4096]}
    errors = product_errors(MATH, SMALL, np.array([4, 8]), {name: np.array(t) * 1e-6 for name, t in us.items()})
    expected = {
        "layer": [0, 0.5],
        "preproj": [0.5, 0.5],
        "postproj": [0, 0.5],
        "ffn_ln1": [1, 0.5],
        "ffn_ln2": [0, 0.5],
    }
    assert set(errors) == set(expected)
    for name, error in errors.items():
        assert list(error) == pytest.approx(expected[name], abs=1e-12)


HEADER = ",".join(["num_tokens", *COLUMNS])


def test_read_products(tmp_path):
    file = tmp_path / "profile.csv"
    file.write_text(
        "mlp_down_proj,note,num_tokens,attn_pre_proj,attn_post_proj,mlp_up_proj\n4,x,16,1,2,3\n8,,32,5,6,7\n"
    )
    tokens, times = read_products(file)
    assert tokens.tolist() == [16, 32]
    expected = {"preproj": [1e-3, 5e-3], "postproj": [2e-3, 6e-3], "ffn_ln1": [3e-3, 7e-3], "ffn_ln2": [4e-3, 8e-3]}
    assert set(times) == set(expected)
    assert all(list(times[name]) == pytest.approx(seconds) for name, seconds in expected.items())


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "must have the columns num_tokens and attn_pre_proj.*there is no attn_post_proj, attn_pre_proj, mlp_down"),
        (HEADER.replace(",mlp_up_proj", "") + "\n1,1,1,1\n", "must have the columns.*; there is no mlp_up_proj$"),
        (HEADER + "\n", "no times after the header: must have at least one"),
        (HEADER + "\n1,1,1,1,1\n2,1,fast,1,1\n", "line 3: attn_post_proj='fast': must be a positive number"),
        (HEADER + "\n1,1,1,1,\n", "line 2: mlp_down_proj='': must be a positive number"),
        (HEADER + "\n1,1,1\n", "line 2: mlp_up_proj=None: must be a positive number"),
        (HEADER + "\n0,1,1,1,1\n", "line 2: num_tokens='0': must be a positive whole number"),
        (HEADER + "\n1,-1,1,1,1\n", "line 2: attn_pre_proj='-1': must be a positive number"),
        (HEADER + "\n1,1,1,nan,1\n", "line 2: mlp_up_proj='nan': must be a positive number"),
        (HEADER + "\n1,1,1,1,inf\n", "line 2: mlp_down_proj='inf': must be a positive number"),
        (b"\xff\xfe" + HEADER.encode(), "must be CSV in UTF-8"),
    ],
)
def test_a_bad_file_is_named_with_its_line_and_column(tmp_path, content, message):
    file = tmp_path / "profile.csv"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=f"profile.csv.*{message}"):
        read_products(file)


def test_a_file_that_cannot_be_read_is_an_oserror(tmp_path):
    for path in (tmp_path, tmp_path / "missing.csv"):
        with pytest.raises(OSError, match=path.name):
            read_products(path)
