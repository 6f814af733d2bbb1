"""fast/ on a CPU, held against torch's sdpa: blocks of queries, products, compiled layers."""

import itertools
import random

import pytest
import torch

from attention.sdpa import SDPA
from fast import compile_layers
from fast.cpu_blocks import Blocks
from fast.cpu_matmul import Matmul
from kv_cache import slot_mapping
from test_equivalence import a_span, close, in_dtype, prefill
from tests.helpers import block_tables, poisoned_cache, tiny_model

scattered_or_not = pytest.mark.parametrize(
    "scattered",
    [False, True],
    ids=["in-order", "scattered"],
)


def attention_and_torch(backend, model, cache, spans):
    """What this backend yields for the spans, and what torch's attention does."""
    layer = cache.layer(0)
    for span in spans:
        fill(layer, span, cache.page_size)
    rows = sum(span.length for span in spans)
    q = torch.randn(rows, model.config.n_head, model.config.head_dim, dtype=torch.float64)
    plans = [each(model.config, cache).plan(spans) for each in (backend, SDPA)]
    return [plan(q, *layer) for plan in plans]


def fill(layer, span, page_size):
    """Put random keys and values where a span may read, and big numbers behind, if its last page
    was begun before."""
    begun = -(-(span.end - 1) // page_size) * page_size
    slots = slot_mapping(span.pages, page_size, 0, span.end)
    behind = slot_mapping(span.pages, page_size, span.end, begun)
    for x in layer:
        x[:, slots] = torch.randn_like(x[:, slots])
        x[:, behind] = 1e4


SPANS = {  # length: start
    1: 299,
    127: 40,
    128: 3,
    129: 0,
    200: 100,
    300: 0,
}


@pytest.mark.parametrize("backend", [Blocks, Matmul])
@scattered_or_not
def test_blocks_of_a_chunk_equal_one_call(backend, scattered):
    model = tiny_model(n_kv_head=2)
    tables = block_tables([19] * len(SPANS), scattered)
    spans = []
    for table, length in zip(tables, SPANS, strict=True):
        span = a_span(table, SPANS[length], length)
        spans.append(span)
    cache = poisoned_cache(model, 2 * 19 * len(SPANS), 16, 304)
    actual, expected = attention_and_torch(backend, model, cache, spans)
    close(actual, expected)


READERS = [  # how many decodes share their first pages, for each beginning
    [1] * 9,
    [2],
    [3, 3],
    [5],
    [5, 1, 2, 3, 1, 1],
    [1],
]


@pytest.mark.parametrize("times", [1, 3], ids=["mostly-read", "hardly-read"])
@scattered_or_not
@pytest.mark.parametrize(
    "page_size, longest",
    [
        (1, 9),
        (4, 30),
        (16, 16),
    ],
)
@pytest.mark.parametrize("n_kv_head", [4, 2])
@pytest.mark.parametrize("has_chunk", [False, True])
def test_decodes_that_share_pages_equal_each_alone(
    n_kv_head, page_size, longest, scattered, times, has_chunk, monkeypatch
):
    """Some decodes read the same full pages first, and then their own; so does a chunk."""
    monkeypatch.setattr("fast.cpu_matmul.PAGE_BLOCK", 4)
    model = tiny_model(n_kv_head=n_kv_head)
    rng = random.Random(1)
    for readers in READERS:
        spans, pages = spans_that_share_pages(rng, readers, page_size, longest, has_chunk)
        if scattered:
            order = rng.sample(range(pages), pages)
            for span in spans:
                span.pages[:] = [order[page] for page in span.pages]
        cache = poisoned_cache(model, times * pages, page_size, longest)
        actual, expected = attention_and_torch(Matmul, model, cache, spans)
        close(actual, expected)


def spans_that_share_pages(rng, readers, page_size, longest, has_chunk):
    """Decodes, of which readers[i] share their first pages for each i, a chunk that shares those of
    the last, and the number of pages of their cache, one of which nobody has."""
    new_page = itertools.count().__next__
    spans = []
    for count in readers:
        shared = rng.randint(0, (longest - 5) // page_size) if count > 1 else 0
        prefix = [new_page() for _ in range(shared)]
        start = shared * page_size
        for _ in range(count):
            end = rng.randint(start + 1, longest)
            table = prefix + [new_page() for _ in range(start, end, page_size)]
            spans.append(a_span(table, end - 1, 1))
    if has_chunk:
        length = min(3, longest - start)
        table = prefix + [new_page() for _ in range(0, length, page_size)]
        spans.append(a_span(table, start, length))
    return spans, new_page() + 1


@pytest.mark.slow  # and needs a C++ compiler
def test_compiled_model_gives_the_same_logits():
    model = tiny_model(dtype=torch.float32, n_layer=1)
    compiled = in_dtype(model, torch.float32)
    compile_layers(compiled)
    for tokens in ([1, 2, 3, 4, 5], [6]):
        close(prefill(compiled, tokens), prefill(model, tokens), 1e-4)
