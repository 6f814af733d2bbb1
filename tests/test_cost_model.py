"""The cost model against sums by hand, the real model's weights, and the papers' times."""

import random
from dataclasses import replace
from math import inf, nan
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kv_cache import kv_bytes_per_token
from lab.claims.systems import A100_33B, A6000_13B
from lab.simulator.cost_model import (
    CostModel,
    FittedCost,
    interpolate,
    matrices,
    product_seconds,
)
from lab.simulator.devices import (
    A100,
    DEVICES,
    GEOMETRIES,
    LINKS,
    PARALLEL_BLOCKS,
    Device,
    Link,
    find,
)
from model import GPT, GPTConfig
from policies.iteration_time import BatchShape, IterationTime

# Rates without limit leave one cost: arithmetic at 1 Mflop/s, bytes at 1 MB/s, a second a kernel
MATH = Device("math", 1e6, inf, 1e6, inf, 1e6, tile=4, op_s=0.0)
MOVE = Device("move", inf, 1e6, inf, 1e6, 1e6, tile=4, op_s=0.0)
START = Device("start", inf, inf, inf, inf, 1e6, tile=4, op_s=1.0)

# 128 + 64 + 256 + 128 = 576 weights in a layer, in which a token's keys and values take 16 bytes
SMALL = GPTConfig("llama", vocab_size=100, n_layer=4, n_head=4, n_embd=8, n_kv_head=2, n_inner=16)

PREFILL = (0, 10, 5)  # a chunk of 5 tokens after 10
DECODES = [(1, 7, 1), (2, 19, 1)]  # they read 8 and 20 keys
BATCH = [PREFILL, *DECODES]


def num_weights(config, tp=1):
    return config.n_layer * sum(rows * columns for rows, columns in matrices(config, tp))


def decodes(count, context):
    return [(i, context - 1, 1) for i in range(count)]


@pytest.mark.parametrize("name", ["llama-7b", "llama2-70b", "yi-34b", "mistral-7b", "gpt2"])
def test_the_matrices_are_those_of_the_real_model(name):
    config = GEOMETRIES[name]
    with torch.device("meta"):
        model = GPT(config, device="meta", seed=None)
    names = ("preproj", "postproj", "ffn_ln1", "ffn_ln2")
    real = {p: getattr(model.blocks[0], p).weight.shape[::-1] for p in names}
    assert matrices(config)._asdict() == real
    weights = {name: p.numel() for name, p in model.named_parameters() if p.ndim == 2}
    in_layers = sum(n for name, n in weights.items() if name.startswith("blocks."))
    assert num_weights(config) == in_layers
    in_all = sum(n for name, n in weights.items() if "position" not in name)
    assert CostModel(config, A100).weight_bytes() == 2 * in_all


def test_each_gpu_has_its_share_of_the_matrices():
    shapes = {tp: list(matrices(SMALL, tp)) for tp in (1, 2, 4)}
    assert shapes[1] == [(8, 16), (8, 8), (8, 32), (16, 8)]
    assert shapes[2] == [(8, 8), (4, 8), (8, 16), (8, 8)]
    # each of four GPUs needs one of the two KV heads: preproj makes 1 + 2 heads of 2 numbers
    assert shapes[4] == [(8, 6), (2, 8), (8, 8), (4, 8)]
    llama = GEOMETRIES["llama2-70b"]
    assert 8 * num_weights(llama, 8) == num_weights(llama)
    repeated = 80 * 8192 * 2 * (16 - 8) * 128  # 8 more heads of keys and of values in each layer
    assert 16 * num_weights(llama, 16) == num_weights(llama) + repeated


def test_geometries_have_as_many_parameters_as_published():
    published = {"gpt3-175b": (175e9, 0.01), "falcon-180b": (180e9, 0.01)}
    for name, (count, rel) in (published | {"llama-33b": (32.5e9, 0.002)}).items():
        config = GEOMETRIES[name]
        embeddings = (1 if config.tie_embeddings else 2) * config.vocab_size * config.n_embd
        assert num_weights(config) + embeddings == pytest.approx(count, rel=rel)


def test_a_product_computes_whole_tiles():
    seconds = [product_seconds(MATH, n, 10, 20) * 1e6 for n in (1, 4, 5, 8, 9)]
    assert seconds == pytest.approx([1600, 1600, 3200, 3200, 4800])  # 2 * 200 for each row of tiles


def test_a_product_takes_the_longer_of_arithmetic_and_memory_time():
    device = Device("round", 1e12, 1e9, 1e12, 1e9, 1e9, tile=4, op_s=0.0)
    # one row: 200 weights, 10 numbers in, 20 out are 460 bytes, 460 ns; 2 * 4 * 200 flop are 1.6 ns
    assert product_seconds(device, 1, 10, 20) == pytest.approx(460e-9)
    assert product_seconds(replace(device, op_s=1e-3), 1, 10, 20) == pytest.approx(1e-3 + 460e-9)
    # 4,000 rows and 1e6 weights: 8e9 flop are 8 ms; 2 * (1e6 + 8e6) bytes are 18 ms, or 1.8 ms
    for bytes_per_s, seconds in ((1e9, 18e-3), (1e10, 8e-3)):
        device = replace(device, bytes_per_s=bytes_per_s)
        assert product_seconds(device, 4000, 1000, 1000) == pytest.approx(seconds)


def parts(cost, batch):
    """Seconds of an iteration by kind: of its layers, and the head, which `stages` has on top."""
    (*_, last), _ = cost.stages(batch)
    layer = cost.layer_seconds(batch)
    head = last - cost.cpu_s - cost.layers * sum(layer)
    of_layers = {k: cost.config.n_layer * seconds for k, seconds in layer._asdict().items()}
    return of_layers | {"head": head}


# In BATCH 7 tokens are 8 rows. The chunk's 8 padded queries see 10 + 5 / 2 keys: 2 flop for each of
# the 8 dimensions, twice. Rows and columns of the four are 24 + 16 + 40 + 24. Each chunk has a row
# of the head and reads its own keys. There are four products and five others; attention starts for
# each chunk, and for all decodes together.
def test_parts_of_an_iteration():
    flops = (8 * 8 * 576, 4 * 8 * 12.5 * 4 * 8, 0, 2 * 4 * 8 * 100)
    moved = [4 * 2 * (576 + 7 * 104), 4 * 16 * (15 + 8 + 20), 4 * 2 * 7 * (8 * 8 + 2 * 16 + 2 * 32)]
    moved = [*moved, 2 * (800 + 3 * 108)]
    kernels = (16, 8, 20, 1)
    names = ("linear", "attention", "others", "head")
    start = CostModel(SMALL, START)
    for device, counts, unit in ((MATH, flops, 1e-6), (MOVE, moved, 1e-6), (START, kernels, 1)):
        expected = {name: part * unit for name, part in zip(names, counts, strict=True)}
        assert parts(CostModel(SMALL, device), BATCH) == pytest.approx(expected | {"all_reduce": 0})
    assert start.seconds(DECODES) == 4 * (4 + 5 + 1) + 1
    assert start.seconds([PREFILL, (3, 0, 2), (4, 0, 9)]) == 4 * (4 + 5 + 3) + 1


BOTH = replace(MATH, attention_bytes_per_s=1e6)
ATTENTION = [
    (BOTH, 1, (10, 5), 8 * 12.5 * 32),
    (BOTH, 1, (1000, 2), 4 * 1001 * 32),
    # a kernel that skips no masked pair computes all of a chunk
    (replace(MATH, skips_masked=False), 1, (10, 5), 8 * 15 * 32),
    # 160 us for each key, where 4 padded queries take 128 us
    (replace(MATH, attention_bytes_per_s=1e5), 1, (1000, 2), 1002 * 160),
    # four GPUs divide the queries, of 8 dimensions, but not two heads' keys, of 16 bytes
    (MATH, 2, (10, 5), 8 * 12.5 * 4 * 4),
    (MATH, 4, (10, 5), 8 * 12.5 * 4 * 2),
    (MOVE, 2, (10, 5), 15 * 8),
    (MOVE, 4, (10, 5), 15 * 8),
]


@pytest.mark.parametrize("device, tp, chunk, microseconds", ATTENTION)
def test_attention_takes_the_longer_of_arithmetic_and_memory_time(device, tp, chunk, microseconds):
    assert CostModel(SMALL, device, tp).chunk_seconds(*chunk) == pytest.approx(microseconds / 1e6)


# (tokens, keys before, measured us): FlashAttention on an A100, 32 query and 4 KV heads of 128,
# from Vidur's data/profiling/a100/attention.csv
MEASURED_ATTENTION = [
    *((576, 0, 89), (576, 512, 121.6), (576, 1024, 159), (544, 3072, 308.8)),
    *((1984, 0, 651), (1984, 1024, 809.6), (1984, 2048, 988.4), (2048, 0, 681.4)),
    *((3392, 512, 1777), (3456, 0, 1699.4), (3584, 0, 1821.8), (3584, 256, 1874.8)),
]


def test_attention_over_chunks_of_an_a100_was_measured():
    two_gpus = CostModel(GEOMETRIES["llama2-70b"], A100, tp=2)
    errors = [
        abs(two_gpus.chunk_seconds(start, length) / (microseconds * 1e-6) - 1)
        for length, start, microseconds in MEASURED_ATTENTION
    ]
    assert np.median(errors) < 0.15


# (GPUs, link, MB, measured us), from Vidur's data/profiling/network and data/profiling/a40
ALL_REDUCES = [
    *((2, "nvlink3-pair", mb, us) for mb, us in ((0.46, 57), (26, 172), (131, 718))),
    *((4, "nvlink3-pairs", mb, us) for mb, us in ((0.05, 59), (0.5, 89), (1.57, 163))),
    *((4, "a40-pairs", mb, us) for mb, us in ((4.19, 190), (33.6, 1260), (100.7, 3754))),
    *((8, "nvlink3", mb, us) for mb, us in ((0.5, 32), (6.3, 122), (14.7, 230), (65, 668))),
]


@pytest.mark.parametrize("gpus, link, megabytes, microseconds", ALL_REDUCES)
def test_an_all_reduce_takes_what_was_measured(gpus, link, megabytes, microseconds):
    wide = GPTConfig("llama", vocab_size=64, n_layer=1, n_head=8, n_embd=5000, head_dim=64)
    cost = CostModel(wide, A100, tp=gpus, tp_link=LINKS[link])
    tokens = round(megabytes * 1e6 / (2 * 5000))
    of_two = cost.layer_seconds([(0, 0, tokens)]).all_reduce
    assert of_two / 2 == pytest.approx(microseconds * 1e-6, rel=0.2)


# Yi-34B on two A100, in ms: the data of Sarathi-Serve's Figure 14
WHOLE_PROMPTS = {2047: 378, 4095: 775, 8191: 1754, 16383: 4535}


@pytest.mark.parametrize("prompt_len, published_ms", WHOLE_PROMPTS.items())
def test_whole_prompts_take_as_long_as_published(prompt_len, published_ms):
    cost = CostModel.named("yi-34b", tp=2, tp_link="nvlink3-pair")
    assert 1e3 * cost.seconds([(0, 0, prompt_len)]) == pytest.approx(published_ms, rel=0.07)


SYSTEMS = [
    (dict(preset="yi-34b", tp=2, tp_link="nvlink3-pair"), 0.2),
    (dict(preset="mistral-7b"), 0.1),
]


@pytest.mark.parametrize("system, strict_slo", SYSTEMS)
def test_five_decode_iterations_are_the_strict_slo(system, strict_slo):
    seconds = CostModel.named(**system).seconds(decodes(32, 4096))
    assert 5 * seconds == pytest.approx(strict_slo, rel=0.1)  # Sarathi-Serve, Table 3


def test_decodes_beside_a_chunk_take_longer_in_attention():
    cost = CostModel(SMALL, replace(MOVE, riding=1.5))
    for batch, keys in ((DECODES, 28), ([PREFILL], 15), (BATCH, 15 + 1.5 * 28)):
        assert cost.layer_seconds(batch).attention == pytest.approx(16e-6 * keys)  # 16 bytes each
    riding = [model.device.riding for model in (A6000_13B, A100_33B)]
    assert riding == [pytest.approx((15.2 - 10) / 3 / (5.68 / 4))] * 2  # SARATHI, Table 2


def test_stages_of_a_pipeline():
    link = Link(bytes_per_s=1e3, step_s=0.25)
    cost = CostModel(SMALL, MATH, pp=2, pp_link=link, cpu_s=0.5)
    layer = (2 * 8 * 576 + 8 * 12.5 * 32) / 1e6
    head = 6400e-6
    stages, hop = cost.stages(BATCH)
    assert stages == pytest.approx([0.5 + 2 * layer, 0.5 + 2 * layer + head])
    assert hop == pytest.approx(0.25 + 7 * 8 * 2 / 1e3)
    assert cost.seconds(BATCH) == pytest.approx(1 + 4 * layer + head + hop)
    assert cost.layer_seconds(BATCH).attention == pytest.approx(8 * 12.5 * 32 / 1e6)
    divided = CostModel(SMALL, MATH, tp=2, pp=2, pp_link=link)
    assert divided.stages(BATCH)[1] == pytest.approx(0.25 + 7 * 8 / 1e3)
    *first, last = CostModel(SMALL, MATH, tp=2, pp=4).stages(BATCH)[0]
    assert first == 3 * first[:1] and last - first[0] == pytest.approx(2 * 4 * 8 * 50 / 1e6)


def test_all_reduces_of_an_iteration():
    link = Link(bytes_per_s=1e3, step_s=0.5)
    # four GPUs: six steps, each with a quarter of 7 tokens of 8 numbers
    once = 2 * 3 * (0.5 + 7 * 8 * 2 / 4 / 1e3)
    for parallel_block, all_reduces in ((False, 2), (True, 1)):
        cost = CostModel(SMALL, MATH, tp=4, tp_link=link, parallel_block=parallel_block)
        assert cost.layer_seconds(BATCH).all_reduce == pytest.approx(all_reduces * once)
    two = CostModel(SMALL, START, tp=2, tp_link=link)
    assert two.layer_seconds(BATCH).all_reduce == pytest.approx(2 * (1 + 2 * (0.5 + 56e-3)))
    assert CostModel(SMALL, START, tp_link=link).layer_seconds(BATCH).all_reduce == 0
    assert set(PARALLEL_BLOCKS) == {"falcon-180b"}


def test_devices_have_a_name_and_a_link_unless_given():
    with pytest.raises(ValueError, match="device='b200': must be one of a100-80gb, a6000, a40, h1"):
        find(DEVICES, "device", "b200")
    cost = CostModel.named("yi-34b", "a40", tp=2, pp=2)
    assert (cost.stage_link, cost.pp_link) == (LINKS["pcie4"], LINKS["infiniband"])
    assert {device.link for device in DEVICES.values()} <= LINKS.keys()
    # one that is known by its data sheet reaches the share of it that an A100 reaches
    for rate, share in (("flops", 989 / 312), ("bytes", 3.35 / 2.039)):
        for field in (f"{rate}_per_s", f"attention_{rate}_per_s"):
            assert getattr(DEVICES["h100"], field) == pytest.approx(share * getattr(A100, field))


# Of all kinds: on one GPU, divided, in a pipeline, with fewer KV heads than GPUs
COSTS = [
    lambda: CostModel.named("llama-13b", "a6000", cpu_s=5e-3),
    lambda: CostModel(GEOMETRIES["yi-34b"], A100, tp=2),
    lambda: CostModel(GEOMETRIES["gpt3-175b"], A100, tp=8, pp=8),
    lambda: CostModel(GEOMETRIES["falcon-180b"], A100, tp=4, pp=2, parallel_block=True),
    lambda: CostModel(GEOMETRIES["llama2-70b"], DEVICES["h100"], tp=16, pp=4),
]


@pytest.mark.parametrize("make", COSTS)
def test_more_work_is_never_faster(make):
    draw = random.Random(0)
    cost = make()

    def chunk():
        return (0, draw.randrange(4000), draw.choice([1, 1, 1, 2, draw.randrange(2, 1500)]))

    for _ in range(300):
        batch = [chunk() for _ in range(draw.randrange(1, 30))]
        seconds = cost.seconds(batch)
        shuffled = draw.sample(batch, len(batch))
        assert 0 < seconds < inf and cost.seconds(shuffled) == pytest.approx(seconds, rel=1e-12)
        (_, start, length), *others = batch
        more = draw.choice([1, draw.randrange(1, 600)])
        for longer in ((0, start, length + more), (0, start + more, length)):
            assert cost.seconds([longer, *others]) > seconds
        assert cost.seconds([*batch, chunk()]) > seconds


def test_weights_of_the_gpu_that_has_most():
    tied = replace(SMALL, tie_embeddings=True)
    cases = [(SMALL, 1, 1, 4 * 576, 2), (tied, 1, 1, 4 * 576, 1)]  # tp, pp, layers, embeddings
    cases += [(SMALL, 1, 2, 2 * 576, 1), (SMALL, 2, 2, 2 * 288, 0.5)]
    for config, tp, pp, layers, embeddings in cases:
        cost = CostModel(config, MATH, tp=tp, pp=pp)
        assert cost.weight_bytes() == 2 * (layers + embeddings * 100 * 8)


@pytest.mark.parametrize("name", ["llama-7b", "llama2-70b", "gpt2"])
def test_memory_on_one_gpu_is_that_of_the_engine(name):
    cost = CostModel(GEOMETRIES[name], replace(A100, memory_bytes=200e9))
    kv_bytes = kv_bytes_per_token(GEOMETRIES[name], torch.float16)
    assert cost.kv_bytes * cost.layers == kv_bytes
    max_requests = (180_000_000_000 - cost.weight_bytes()) // (3000 * kv_bytes)  # SARATHI §4.3.1
    assert cost.max_batch(3000) == max_requests > 0


@pytest.mark.parametrize("pp, batch", [(8, 27), (1, 11)])
def test_gpt3_runs_the_batches_of_sarathi_on_a100s(pp, batch):
    cost = CostModel(GEOMETRIES["gpt3-175b"], A100, tp=8, pp=pp)
    assert cost.max_batch(4096) == batch  # §5.3


def test_a_model_that_does_not_fit_says_what_to_do():
    large = CostModel(GEOMETRIES["llama2-70b"], DEVICES["a6000"])
    # 80 * (8192 * (10240 + 8192) + 3 * 8192 * 28672) and 2 * 32000 * 8192 of two bytes
    message = "138.0 GB of weights do not fit 90% of the 48 GB of an A6000: try more tp or pp"
    for ask in (large.kv_tokens, lambda: large.max_batch(1)):
        with pytest.raises(ValueError, match=message):
            ask()
    left = 7808 / 0.9 + (4 * 16) / 0.9  # 7,808 bytes of weights, and one token
    assert CostModel(SMALL, replace(MATH, memory_bytes=left + 1e-6)).kv_tokens() == 1
    with pytest.raises(ValueError, match="do not fit"):
        CostModel(SMALL, replace(MATH, memory_bytes=left - 2)).kv_tokens()


WHOLE = "a whole number of at least 1"
SECONDS = "a finite number of seconds, at least 0"
BAD = [({"tp": 3}, "tp=3: must divide n_head=4"), ({"pp": 3}, "pp=3: must divide n_layer=4")]
BAD += [({"tp": 4, "config": replace(SMALL, n_inner=18)}, "tp=4: must divide n_inner=18")]
BAD += [({"tp": tp}, f"tp={tp!r}: must be {WHOLE}") for tp in (0, -1, 1.5, "2")]
BAD += [({"pp": pp}, f"pp={pp}: must be {WHOLE}") for pp in (0, -2, 1.5)]
BAD += [({"cpu_s": s}, f"cpu_s={s}: must be {SECONDS}") for s in (-1e-9, nan, inf)]


@pytest.mark.parametrize("changes, message", BAD)
def test_bad_arrangements_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        CostModel(**{"config": SMALL, "device": MATH} | changes)


def test_batches_and_table_2_of_sarathi():
    cost = replace(CostModel.named("llama-13b", "a6000"), device=A6000_13B.device)
    assert [cost.max_batch(n) for n in (2048, 3072)] == [10, 6]  # §4.3.1
    batches = {(224.8, 10): [(0, 0, 1024)], (44.28, 5.68): decodes(4, 1024)}
    batches[223.2, 15.2] = [(9, 0, 1021), *decodes(3, 1024)]
    for published, batch in batches.items():
        layer = cost.layer_seconds(batch)
        ours = [1e3 * cost.layers * seconds for seconds in (layer.linear, layer.attention)]
        assert ours == pytest.approx(published, rel=0.02)


def test_a_fitted_cost_predicts_what_the_laws_of_its_stages_do():
    law = np.array([3e-3, 1e-4, 5e-4, 1e-6, 1e-7])
    shapes = [(64, 0, 0, 2080), (64, 4, 800, 59_680), (300, 9, 8100, 105_150)]
    shapes += [(0, 4, 800, 0), (0, 9, 8100, 0)]
    profile = [(BatchShape(*shape), float(law @ [1, *shape])) for shape in shapes]
    quicker = [(shape, seconds / 2) for shape, seconds in profile]
    # 100 * 50 + (1 + ... + 50) pairs; 10 + 700 keys
    prefills = SimpleNamespace(is_decoding=False)
    decoding = [SimpleNamespace(is_decoding=True, tokens=[0] * n) for n in (10, 700)]
    batch = [(prefills, 100, 50), *((request, len(request.tokens) - 1, 1) for request in decoding)]
    stages, hop_s = FittedCost([profile, quicker], 0.25).stages(batch)
    seconds = IterationTime(profile).predict(BatchShape(50, 2, 710, 6275))
    assert stages == pytest.approx([seconds, seconds / 2]) and hop_s == 0.25
    assert FittedCost([profile]).stages(batch) == ([seconds], 0.0)


def test_interpolation_is_linear_and_level_outside_of_the_points():
    points = [(0, 0.0), (10, 2.0), (30, 3.0)]
    values = [interpolate(x, points) for x in (-5, 0, 5, 10, 20, 30, 99)]
    assert values == [0.0, 0.0, 1.0, 2.0, 2.5, 3.0, 3.0]
