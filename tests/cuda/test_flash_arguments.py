"""Attention computed from exactly what flash attention's operator is given equals its definition."""

import random
from types import SimpleNamespace

import pytest
import torch

from attention import BACKENDS, DEVICES
from kv_cache import Span, slot_mapping
from model import GPTConfig
from tests.cuda.flash import FlashByDefinition, attend, attend_spans
from tests.helpers import poisoned_cache

FLASH_BACKENDS = [name for name in BACKENDS if DEVICES.get(name) == "cuda" and "split" not in name]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # of a result of about 1, rounded
HEAD_DIMS = [8, 32, 64, 80, 128, 256]
CASES = 40  # random hybrid batches for each backend and layout


def make_backend(name, config, cache, monkeypatch, capability=(8, 0)):
    """The backend of that name over a cache on the CPU that lies as one on CUDA."""
    if name.startswith("xformers") and torch.version.cuda is None:
        pytest.skip("xformers' FlashAttention needs the CUDA build of torch, see tests/README.md")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    return BACKENDS[name](config, cache)


def random_spans(rng, page_size, pages_each, max_len):
    """Up to 7 spans, decodes first, whose block tables are scattered; and the pages of a cache."""
    ends = [rng.randint(1, max_len) for _ in range(rng.randint(1, 7))]
    lengths = [rng.choice([1, 1, min(2, end), rng.randint(1, end), end]) for end in ends]
    pages = len(ends) * pages_each + 2
    free_pages = rng.sample(range(pages), pages)
    spans = []
    for end, length in sorted(zip(ends, lengths, strict=True), key=lambda pair: pair[1] > 1):
        table = [free_pages.pop() for _ in range(-(-end // page_size))]
        spans.append(Span(table, end - length, [0] * length))
    return spans, pages


def fill(cache, spans):
    """Random keys and values where the spans may read, NaN elsewhere."""
    cache.data.fill_(float("nan"))
    for span in spans:
        slots = slot_mapping(span.pages, cache.page_size, 0, span.end)
        written = cache.data[:, :, :, slots]
        cache.data[:, :, :, slots] = torch.randn(written.shape).to(written.dtype)


@pytest.mark.parametrize("page_size, pages_each", [(300, 1), (64, 5), (256, 2)])
@pytest.mark.parametrize("name", FLASH_BACKENDS)
def test_what_flash_is_given_yields_attention(name, page_size, pages_each, monkeypatch):
    """Hybrid batches of all kinds; where a page is not in a block table, or not written, is NaN."""
    rng = random.Random(f"{name}/{page_size}")
    torch.manual_seed(rng.randrange(2**32))
    calls = 0
    for _ in range(CASES):
        dtype = rng.choice([torch.float16, torch.bfloat16])
        n_kv_head = rng.choice([1, 2, 4])
        n_head = n_kv_head * rng.choice([1, 2, 8])
        head_dim = rng.choice([d for d in HEAD_DIMS if d not in (8, 80) or pages_each == 1])
        config = GPTConfig(
            n_layer=2, n_head=n_head, n_kv_head=n_kv_head, n_embd=64, head_dim=head_dim
        )
        max_len = pages_each * page_size - (7 if pages_each > 1 else 0)
        spans, pages = random_spans(rng, page_size, pages_each, max_len)
        model = SimpleNamespace(config=config, dtype=dtype)
        cache = poisoned_cache(model, pages, page_size, max_len, position_major=True)
        backend = make_backend(name, config, cache, monkeypatch)
        fill(cache, spans)
        rows = sum(span.length for span in spans)
        q = torch.randn(rows, n_head + 2 * n_kv_head, head_dim).to(dtype)[:, :n_head]
        with FlashByDefinition() as flash:
            y = backend.plan(spans)(q, *cache.layer(1))
        calls += len(flash.calls)
        expected = attend_spans(q, *cache.layer(1), spans, page_size)
        assert y.shape == q.shape and y.dtype == dtype
        torch.testing.assert_close(y.double(), expected, rtol=0, atol=TOLERANCE[dtype])
    assert calls >= CASES / 2  # or other operators were called


def test_the_definition_is_that_of_torch():
    q, k, v = (torch.randn(n, heads, 16) for n, heads in ((3, 4), (7, 2), (7, 2)))
    ours = attend(q, k, v, None, causal=True)
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    hidden = torch.ones(3, 7, dtype=torch.bool).tril(4)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=hidden, enable_gqa=True
    )
    torch.testing.assert_close(ours, theirs.transpose(0, 1))
