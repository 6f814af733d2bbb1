"""The backends for CUDA, held against attention by definition, from exactly what operators get."""

import random

import pytest
import torch

from fast import BACKENDS, Flash
from fast.padding import padded_size
from model import FlatBatch
from test_equivalence import a_span
from tests.cuda.batches import (
    CUDA_BACKENDS,
    capability,
    config_of,
    fill,
    new_cache,
    random_queries,
    reads_pages,
    scattered_spans,
)
from tests.cuda.flash import attend_sequences, attend_spans, pretend_flash
from tests.helpers import poisoned_cache, tiny_model

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # results are rounded to these types
CASES = [
    (name, page_size, max_len)
    for name in CUDA_BACKENDS
    for page_size, max_len in ((300, 300), (64, 313), (256, 505))
    if reads_pages(name, page_size, max_len)
]
BATCHES = 12  # of each case


@pytest.fixture
def xformers_calls(monkeypatch):
    """(is it split-K, number of queries, address of keys) of each call of xformers' operators.

    They are computed by definition, if xformers allows them."""
    from xformers.ops import fmha

    calls = []

    def apply(operator, inputs, needs_gradient):
        is_split_k = operator is fmha.triton_splitk.FwOp
        calls.append((is_split_k, inputs.query.shape[1], inputs.key.data_ptr()))
        return attend_sequences(operator, inputs), None

    for operator in (fmha.flash.FwOp, fmha.triton_splitk.FwOp):
        monkeypatch.setattr(operator, "apply", classmethod(apply))
    monkeypatch.setattr(fmha.flash, "FLASH_VERSION", "2.8.0")
    return calls


def random_ends(rng, max_len):
    """(end, length) of some spans, of which about half are decodes."""
    ends = []
    for _ in range(rng.randint(1, 7)):
        end = rng.randint(1, max_len)
        length = rng.choice([1, 1, min(2, end), rng.randint(1, end), end])
        ends.append((end, length))
    return ends


@pytest.mark.parametrize("name, page_size, max_len", CASES)
def test_what_operators_are_given_yields_attention(
    name, page_size, max_len, xformers_calls, monkeypatch
):
    """NaN lies in all slots that a span may not read."""
    flash_calls = pretend_flash(monkeypatch, tuple(TOLERANCE))
    rng = random.Random(f"{name}/{page_size}")
    torch.manual_seed(rng.randrange(2**32))
    is_paged = page_size < max_len
    has_split_k = name == "xformers-split-k" or (name == "xformers" and is_paged)
    head_dims = [32, 64, 128, 256] if has_split_k else [8, 32, 80, 256]
    for _ in range(BATCHES):
        dtype = rng.choice([torch.float16, torch.bfloat16])
        n_kv_head = rng.choice([1, 2, 4])
        config = config_of(n_kv_head * rng.choice([1, 2, 8]), n_kv_head, rng.choice(head_dims))
        spans, pages = scattered_spans(rng, random_ends(rng, max_len), page_size)
        cache = new_cache(config, pages, page_size, max_len, dtype)
        layer = cache.layer(1)
        q = random_queries(spans, config, dtype)
        with capability(8, 0):
            backend = BACKENDS[name](config, cache)  # tries its operators
            fill(cache, spans)
            flash_calls.clear()
            xformers_calls.clear()
            y = backend.plan(spans)(q, *layer)
        expected = attend_spans(q, *layer, spans, page_size)
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), expected, rtol=0, atol=TOLERANCE[dtype])
        decodes = [span for span in spans if span.length == 1]
        if name == "flash":
            assert len(flash_calls) == bool(decodes) + (len(decodes) < len(spans))
            continue
        assert not flash_calls
        for is_split_k, queries, address in xformers_calls:
            reads_cache = address == layer[0].data_ptr()
            assert reads_cache or (is_paged and not is_split_k)  # only chunks copy their pages
            assert not is_split_k or queries == padded_size(len(decodes))
        assert any(is_split_k for is_split_k, *_ in xformers_calls) == (
            has_split_k and bool(decodes)
        )


SLOTS = [  # pages, start, length
    ([4], 20, 1),
    ([0], 0, 1),
    ([2], 7, 1),
    ([1], 5, 9),
    ([3], 0, 6),
]
PAGES = [
    ([7, 0, 5], 600, 1),
    ([3], 0, 1),
    ([2, 9], 250, 9),
    ([6], 0, 30),
]


@pytest.mark.parametrize(
    "spans, sizes",
    [(SLOTS, (5, 24, 24)), (PAGES, (10, 256, 700))],
    ids=["slots", "pages"],
)
def test_flash_copies_its_numbers_at_once_and_no_keys(spans, sizes, monkeypatch):
    transfers = []
    new_tensor = torch.tensor

    def counted(numbers, **options):
        transfers.append(numbers)
        return new_tensor(numbers, **options)

    calls = pretend_flash(monkeypatch)
    model = tiny_model(head_dim=16, max_positions=1024)
    cache = poisoned_cache(model, *sizes, position_major=True)
    backend = Flash(model.config, cache)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "tensor", counted)
        batch = FlatBatch.build([a_span(*span) for span in spans], backend)
    assert len(transfers) == 2  # the batch's own, and these
    calls.clear()
    model(batch, cache)
    keys_at = {(call.key.data_ptr(), call.value.data_ptr()) for call in calls}
    assert keys_at == {tuple(x.data_ptr() for x in cache.layer(layer)) for layer in (0, 1)}
