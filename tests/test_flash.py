"""Attention by torch's FlashAttention is that of the papers, from the arguments that it is given.

The operator runs on CUDA alone: here its definition takes its place, see cuda/flash.py."""

import random
from types import SimpleNamespace

import pytest
import torch

import attention
from attention import SDPA
from attention.flash import Flash
from kv_cache import Span, slot_mapping
from model import FlatBatch
from test_equivalence import a_span, close
from tests.cuda.flash import pretend_flash
from tests.helpers import poisoned_cache, tiny_model
from tests.test_xformers import NoWaiting

SLOTS = [([4], 20, 1), ([0], 0, 1), ([2], 7, 1), ([1], 5, 9), ([3], 0, 6)], (5, 24, 24)
PAGES = (
    [  # the first two are decodes
        ([7, 0, 5], 600, 1),
        ([3], 0, 1),
        ([2, 9], 250, 9),
        ([1, 8, 4], 511, 2),
        ([6], 0, 30),
    ],
    (10, 256, 700),
)


def written_cache(model, spans, sizes):
    """A cache in CUDA's layout that holds the keys and values of these spans, NaN elsewhere."""
    cache = poisoned_cache(model, *sizes, position_major=True)
    for span in spans:
        slots = slot_mapping(span.pages, cache.page_size, 0, span.end)
        cache.data[:, :, :, slots] = torch.rand_like(cache.data[:, :, :, slots])
    return cache


@pytest.mark.parametrize("case", [SLOTS, PAGES], ids=["slots", "pages"])
def test_flash_equals_sdpa_in_every_part_of_a_batch(model, case, monkeypatch):
    pretend_flash(monkeypatch)
    model = tiny_model(model.config.family, model.config.n_kv_head, head_dim=16)
    spans = [a_span(*span) for span in case[0]]
    cache = written_cache(model, spans, case[1])
    backend = Flash(model.config, cache)
    layer = cache.layer(0)
    for part in (spans, spans[:2], spans[:1], spans[3:], spans[1:4]):
        rows = sum(span.length for span in part)
        qkv = torch.randn(rows, 3 * model.config.n_head, 16, dtype=torch.float64)
        q = qkv[:, : model.config.n_head]  # a view, as in the model
        close(backend.plan(part)(q, *layer), SDPA(model.config, cache).plan(part)(q, *layer))


def test_random_batches_equal_sdpa(monkeypatch):
    pretend_flash(monkeypatch)
    model = tiny_model(n_kv_head=2, head_dim=16)
    draw = random.Random(1)
    for page_size, max_len in [(33, 33), (64, 64), (256, 600), (512, 1500)] * 5:
        table_len = -(-max_len // page_size)
        pages = draw.sample(range(8 * table_len), 8 * table_len)
        spans = []
        for i in range(draw.randint(1, 8)):
            end = draw.randint(1, max_len)
            start = draw.choice([0, end - 1, draw.randrange(end)])
            table = pages[i * table_len : (i + 1) * table_len]
            spans.append(Span(table, start, [0] * (end - start)))
        spans.sort(key=lambda span: span.length > 1)
        cache = written_cache(model, spans, (len(pages), page_size, max_len))
        q = torch.randn(sum(span.length for span in spans), 4, 16, dtype=torch.float64)
        plan = Flash(model.config, cache).plan(spans)
        close(plan(q, *cache.layer(1)), SDPA(model.config, cache).plan(spans)(q, *cache.layer(1)))


@pytest.mark.parametrize("case", [SLOTS, PAGES], ids=["slots", "pages"])
def test_flash_copies_its_numbers_at_once_and_no_keys(case, monkeypatch):
    transfers, keys_at = [], set()
    tensor = torch.tensor

    def operator(q, k, v, *arguments, **options):
        keys_at.add((k.data_ptr(), v.data_ptr()))
        return (torch.zeros_like(q),)

    pretend_flash(monkeypatch, operator)
    model = tiny_model(head_dim=16, max_positions=1024)
    spans = [a_span(*span) for span in case[0]]
    cache = poisoned_cache(model, *case[1], position_major=True)
    backend = Flash(model.config, cache)
    monkeypatch.setattr(torch, "tensor", lambda *a, **o: transfers.append(a) or tensor(*a, **o))
    with NoWaiting():
        batch = FlatBatch.build(spans, backend)
        assert len(transfers) == 2  # the batch's own, and these
        keys_at.clear()
        model(batch, cache)
    assert keys_at == {tuple(x.data_ptr() for x in cache.layer(layer)) for layer in (0, 1)}


@pytest.mark.parametrize("sizes", [(1, 1), (3, 1), (2, 2)])
def test_the_probe_reads_nothing_behind_its_page(sizes, monkeypatch):
    pretend_flash(monkeypatch)
    model = tiny_model(head_dim=16)
    Flash(model.config, poisoned_cache(model, *sizes, position_major=True))


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(page_size=64, max_len=256), "page_size=64: must be max_len or a multiple of 256"),
        (dict(page_size=40, head_dim=12), "head_dim=12 is not supported"),
        (dict(page_size=40, head_dim=264), "head_dim=264 is not supported"),
    ],
)
def test_what_flash_does_not_support_is_refused(changes, message, monkeypatch):
    pretend_flash(monkeypatch)
    model = tiny_model(head_dim=changes.get("head_dim", 16))
    page_size = changes["page_size"]
    cache = poisoned_cache(model, 8, page_size, changes.get("max_len"), position_major=True)
    with pytest.raises(ValueError, match=message):
        Flash(model.config, cache)


# What `auto` takes


def pretended_cache(model, page_size=64):
    """A cache that says that it is on a GPU."""
    cache = poisoned_cache(model, 4, page_size, 256, position_major=True)
    data = SimpleNamespace(is_cuda=True, dtype=cache.data.dtype, device=cache.data.device)
    return SimpleNamespace(**dict(vars(cache), layer=cache.layer, data=data))


class CompilationError(Exception):
    """As Triton's errors are: of no other type."""


@pytest.mark.parametrize("error", [CompilationError, RuntimeError, AssertionError, TypeError])
def test_auto_falls_back_on_whatever_a_backend_raises(error, monkeypatch):
    pretend_flash(monkeypatch)
    model = tiny_model(head_dim=16)

    def fails(*arguments):
        raise error("no kernel here")

    monkeypatch.setitem(attention.ON_CUDA, "flash", fails)
    monkeypatch.setitem(attention.ON_CUDA, "xformers", lambda *_: "made by xformers")
    said = f"'xformers'.*flash cannot run, {error.__name__}: no kernel here$"
    with pytest.warns(UserWarning, match=said) as warned:
        assert attention.make_attention(model.config, pretended_cache(model)) == "made by xformers"
    assert len(warned) == 1
    monkeypatch.setitem(attention.ON_CUDA, "xformers", fails)
    said = "attention='sdpa'.*flash cannot run.*xformers cannot run"
    with pytest.warns(UserWarning, match=said) as warned:
        assert isinstance(attention.make_attention(model.config, pretended_cache(model)), SDPA)
    assert len(warned) == 1


def test_out_of_memory_is_not_taken_for_a_backend_that_cannot_run(monkeypatch):
    def full(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    pretend_flash(monkeypatch, full)
    model = tiny_model(head_dim=16)
    with pytest.raises(torch.OutOfMemoryError):
        attention.make_attention(model.config, pretended_cache(model, page_size=256))


def test_auto_takes_flash_without_a_word(monkeypatch, recwarn):
    pretend_flash(monkeypatch)
    model = tiny_model(head_dim=16)
    cache = pretended_cache(model, page_size=256)
    assert isinstance(attention.make_attention(model.config, cache), Flash)
    assert not recwarn.list


def test_gpus_before_sm80_go_to_sdpa_with_a_warning(monkeypatch):
    pretend_flash(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    model = tiny_model(head_dim=16)
    with pytest.warns(UserWarning, match="attention='sdpa'.*needs 16 bits and a GPU of sm80"):
        assert isinstance(attention.make_attention(model.config, pretended_cache(model)), SDPA)
