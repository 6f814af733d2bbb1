"""xformers' split-K, interpreted by Triton, held against attention by definition.

Triton decides at its import whether it interprets: so it does in a process of its own."""

import logging
import random
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from unittest import mock

import pytest
import torch

from fast import BACKENDS
from tests.cuda.batches import (
    capability,
    config_of,
    fill,
    new_cache,
    random_queries,
    scattered_spans,
)
from tests.cuda.flash import attend_spans

pytestmark = pytest.mark.cuda_build

HEADS = [  # n_head, n_kv_head, head_dim
    (4, 4, 16),
    (4, 2, 64),
    (8, 1, 16),
    (4, 2, 128),
    (2, 1, 256),
]
PAGES = [  # backend, page_size, max_len, number of keys of each decode
    ("xformers", 64, 512, (1, 63, 64, 65, 129, 300)),
    ("xformers", 128, 512, (5, 128, 129, 255)),
    ("xformers", 64, 512, (500,)),
    ("xformers-split-k", 500, 500, (1, 20, 300)),
    ("xformers-split-k", 500, 500, (499,)),
    ("xformers-split-k", 200, 200, (7,) * 9),
]


def largest_difference(backend, page_size, max_len, ends, heads, gpu):
    """Of interpreted split-K in float16 from attention by definition.

    Not in bfloat16, whose products the interpreter computes wrongly."""
    torch.manual_seed(0)
    logging.getLogger("xformers").setLevel(logging.ERROR)
    config = config_of(*heads)
    pairs = [(end, 1) for end in ends]
    spans, pages = scattered_spans(random.Random(0), pairs, page_size)
    cache = new_cache(config, pages, page_size, max_len, torch.float16)
    q = random_queries(spans, config, torch.float16)
    layer = cache.layer(1)
    with capability(*gpu), mock.patch("fast.xformers.probe"):  # flash has no kernel on a CPU
        attention = BACKENDS[backend](config, cache)
    fill(cache, spans)
    with capability(*gpu):
        y = attention.plan(spans)(q, *layer)
    expected = attend_spans(q, *layer, spans, page_size)
    return (y.double() - expected).abs().max().item()


@pytest.fixture(scope="module")
def interpreter():
    """A process in which Triton interprets its kernels, with numpy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            yield pool


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("pages", PAGES)
def test_interpreted_split_k_equals_attention_by_definition(pages, heads, interpreter):
    gpu = (9, 0) if heads == (4, 2, 64) else (8, 0)
    difference = interpreter.submit(largest_difference, *pages, heads, gpu).result()
    assert difference < 3e-3  # of float16, and results of up to about 3; NaN is not
