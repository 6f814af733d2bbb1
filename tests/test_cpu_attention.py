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


@pytest.mark.parametrize("backend", [Blocks, Matmul])
@pytest.mark.parametrize("scattered", [False, True], ids=["in-order", "scattered"])
def test_blocks_of_a_chunk_equal_one_call(backend, scattered):
    model = tiny_model(n_kv_head=2)
    lengths = [1, 1, 127, 128, 129, 200, 300]
    starts = [0, 299, 40, 3, 0, 100, 0]
    tables = block_tables([-(-300 // 16)] * len(lengths), scattered)
    spans = [a_span(*row) for row in zip(tables, starts, lengths, strict=True)]
    cache = poisoned_cache(model, 2 * sum(map(len, tables)), 16, 304)
    layer = cache.layer(0)
    for span in spans:
        fill(layer, span, 16)
    q = torch.randn(sum(lengths), 4, model.config.head_dim, dtype=torch.float64)
    expected = SDPA(model.config, cache).plan(spans)(q, *layer)
    close(backend(model.config, cache).plan(spans)(q, *layer), expected)


READERS = [[1] * 9, [2], [3, 3], [5], [5, 1, 2, 3, 1, 1], [1]]


@pytest.mark.parametrize("times", [1, 3], ids=["mostly-read", "hardly-read"])
@pytest.mark.parametrize("scattered", [False, True], ids=["in-order", "scattered"])
@pytest.mark.parametrize(
    "page_size, longest",
    [
        (1, 9),
        (4, 30),
        (16, 16),
    ],
)
@pytest.mark.parametrize("n_kv_head", [4, 2])
def test_decodes_that_share_pages_equal_each_alone(
    n_kv_head, page_size, longest, scattered, times, monkeypatch
):
    """Some decodes read the same full pages first, and then their own; so does a chunk."""
    monkeypatch.setattr("fast.cpu_matmul.PAGE_BLOCK", 4)
    model = tiny_model(n_kv_head=n_kv_head)
    rng = random.Random(1)
    for readers in READERS:
        decodes, chunk, pages = spans_that_share_pages(rng, readers, page_size, longest)
        spans = [*decodes, chunk]
        if scattered:
            order = rng.sample(range(pages), pages)
            for span in spans:
                span.pages[:] = [order[page] for page in span.pages]
        cache = poisoned_cache(model, times * pages, page_size, longest)
        layer = cache.layer(0)
        for span in spans:
            fill(layer, span, page_size)
        n = len(decodes)
        q = torch.randn(n + chunk.length, 4, model.config.head_dim, dtype=torch.float64)
        expected = SDPA(model.config, cache).plan(spans)(q, *layer)
        backend = Matmul(model.config, cache)
        close(backend.plan(spans)(q, *layer), expected)
        close(backend.plan(decodes)(q[:n], *layer), expected[:n])


def spans_that_share_pages(rng, readers, page_size, longest):
    """Decodes, of which readers[i] share their first pages for each i, a chunk that shares those of
    the first, and the number of pages of their cache, one of which nobody has."""
    new_page = itertools.count().__next__
    prefixes = []
    decodes = []
    for count in readers:
        shared = rng.randint(0, (longest - 5) // page_size) if count > 1 else 0
        prefix = [new_page() for _ in range(shared)]
        prefixes.append(prefix)
        for _ in range(count):
            end = rng.randint(shared * page_size + 1, longest)
            own = [new_page() for _ in range(shared, -(-end // page_size))]
            decodes.append(a_span(prefix + own, end - 1, 1))
    start = len(prefixes[0]) * page_size
    length = min(3, longest - start)
    own = [new_page() for _ in range(-(-length // page_size))]
    chunk = a_span(prefixes[0] + own, start, length)
    return decodes, chunk, new_page() + 1


def fill(layer, span, page_size):
    """Put random keys and values where a span may read, and big numbers behind, if its last page
    was begun before."""
    for x in layer:
        slots = slot_mapping(span.pages, page_size, 0, span.end)
        x[:, slots] = torch.randn_like(x[:, slots])
        begun = -(-(span.end - 1) // page_size) * page_size
        x[:, slot_mapping(span.pages, page_size, span.end, begun)] = 1e4


@pytest.mark.slow  # and needs a C++ compiler
def test_compiled_model_gives_the_same_logits():
    model = tiny_model(dtype=torch.float32, n_layer=1)
    compiled = in_dtype(model, torch.float32)
    compile_layers(compiled)
    for tokens in ([1, 2, 3, 4, 5], [6]):
        close(prefill(compiled, tokens), prefill(model, tokens), 1e-4)
