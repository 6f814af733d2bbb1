"""Attention computed from exactly what flash's operator is given equals its definition.

Also: what fast.flash copies to the GPU, and what it refuses."""

import random

import pytest
import torch

from fast import BACKENDS, Flash
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
from tests.cuda.flash import (
    FlashByDefinition,
    attend,
    attend_sequences,
    attend_spans,
    pretend_flash,
)
from tests.helpers import poisoned_cache, tiny_model
from tests.test_xformers import NoWaiting

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # results are rounded to these types
LAYOUTS = [(300, 300), (64, 313), (256, 505)]  # page_size, max_len
BATCHES = 40  # of random spans, for each backend and layout
CASES = [  # xformers' FlashAttention is in the CUDA build
    pytest.param(name, *sizes, marks=[pytest.mark.cuda_build] * name.startswith("xformers"))
    for name in CUDA_BACKENDS
    for sizes in LAYOUTS
    if reads_pages(name, *sizes)
]


@pytest.fixture
def split_k_by_definition(monkeypatch):
    """Split-K, which test_split_k.py runs, is replaced by what its paged or gappy mask says."""
    from xformers.ops.fmha import triton_splitk

    def apply(operator, inputs, needs_gradient):
        return attend_sequences(inputs), None

    monkeypatch.setattr(triton_splitk.FwOp, "apply", classmethod(apply))


def random_ends(rng, max_len):
    """(end, length) of some spans, of which about half are decodes."""
    ends = []
    for _ in range(rng.randint(1, 7)):
        end = rng.randint(1, max_len)
        ends.append((end, rng.choice([1, 1, min(2, end), rng.randint(1, end), end])))
    return ends


@pytest.mark.slow
@pytest.mark.parametrize("name, page_size, max_len", CASES)
def test_what_flash_is_given_yields_attention(name, page_size, max_len, split_k_by_definition):
    """NaN lies in all slots that a span may not read."""
    rng = random.Random(f"{name}/{page_size}")
    torch.manual_seed(rng.randrange(2**32))
    has_split_k = name == "xformers-split-k" or (name == "xformers" and page_size < max_len)
    other_head_dims = [] if has_split_k else [8, 80]
    calls = 0
    for _ in range(BATCHES):
        dtype = rng.choice([torch.float16, torch.bfloat16])
        n_kv_head = rng.choice([1, 2, 4])
        head_dim = rng.choice([32, 64, 128, 256, *other_head_dims])
        config = config_of(n_kv_head * rng.choice([1, 2, 8]), n_kv_head, head_dim)
        spans, pages = scattered_spans(rng, random_ends(rng, max_len), page_size)
        cache = new_cache(config, pages, page_size, max_len, dtype)
        q = random_queries(spans, config, dtype)
        with FlashByDefinition() as flash, capability(8, 0):
            backend = BACKENDS[name](config, cache)  # tries its operators
            fill(cache, spans)
            flash.calls.clear()
            y = backend.plan(spans)(q, *cache.layer(1))
        expected = attend_spans(q, *cache.layer(1), spans, page_size)
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), expected, rtol=0, atol=TOLERANCE[dtype])
        calls += len(flash.calls)
    assert calls > BATCHES / 2  # or it was not flash that computed


def test_the_definition_is_that_of_torch():
    q, k, v = (torch.randn(n, heads, 16) for n, heads in ((3, 4), (7, 2), (7, 2)))
    ours = attend(q, k, v, None, causal=True)
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    visible = torch.ones(3, 7, dtype=torch.bool).tril(4)
    attention = torch.nn.functional.scaled_dot_product_attention
    theirs = attention(q, k, v, attn_mask=visible, enable_gqa=True)
    torch.testing.assert_close(ours, theirs.transpose(0, 1))


SLOTS = [([4], 20, 1), ([0], 0, 1), ([2], 7, 1), ([1], 5, 9), ([3], 0, 6)], (5, 24, 24)
PAGES = [([7, 0, 5], 600, 1), ([3], 0, 1), ([2, 9], 250, 9), ([6], 0, 30)], (10, 256, 700)


@pytest.mark.parametrize("spans, sizes", [SLOTS, PAGES], ids=["slots", "pages"])
def test_flash_copies_its_numbers_at_once_and_no_keys(spans, sizes, monkeypatch):
    transfers = []
    keys_at = set()
    new_tensor = torch.tensor

    def operator(q, k, v, *arguments, **options):
        keys_at.add((k.data_ptr(), v.data_ptr()))
        return (torch.zeros_like(q),)

    def counted(numbers, **options):
        transfers.append(numbers)
        return new_tensor(numbers, **options)

    pretend_flash(monkeypatch, operator)
    model = tiny_model(head_dim=16, max_positions=1024)
    cache = poisoned_cache(model, *sizes, position_major=True)
    backend = Flash(model.config, cache)
    monkeypatch.setattr(torch, "tensor", counted)
    with NoWaiting():
        batch = FlatBatch.build([a_span(*span) for span in spans], backend)
        assert len(transfers) == 2  # the batch's own, and these
        keys_at.clear()
        model(batch, cache)
    assert keys_at == {tuple(x.data_ptr() for x in cache.layer(layer)) for layer in (0, 1)}
