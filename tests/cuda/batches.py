"""Hybrid batches, and caches on the CPU that lie as those on CUDA do, with NaN in unread slots."""

import contextlib
from types import SimpleNamespace
from unittest import mock

import torch

from fast import BACKENDS, DEVICES
from kv_cache import slot_mapping
from model import GPTConfig
from request import lone_chunk
from tests.helpers import poisoned_cache

CUDA_BACKENDS = [name for name in BACKENDS if DEVICES.get(name) == "cuda"]
PAGE_MULTIPLES = {"flash": 256}  # what a backend demands of small pages; others: 64


def reads_pages(name, page_size, max_len):
    """Whether the backend of that name reads pages of this size."""
    return page_size == max_len or page_size % PAGE_MULTIPLES.get(name, 64) == 0


def config_of(n_head, n_kv_head, head_dim):
    """The geometry of attention; the other sizes are of no importance."""
    return GPTConfig(
        n_layer=2, n_head=n_head, n_kv_head=n_kv_head, n_embd=64, n_inner=64, head_dim=head_dim
    )


def scattered_spans(rng, ends, page_size):
    """Spans of these (end, length), decodes first, in pages that lie anywhere in a cache; and the
    number of pages of that cache, two of which no span has."""
    pages = sum(-(-end // page_size) for end, _ in ends) + 2
    free_pages = rng.sample(range(pages), pages)
    spans = []
    for end, length in sorted(ends, key=lambda pair: pair[1] > 1):
        table = [free_pages.pop() for _ in range(-(-end // page_size))]
        spans.append(lone_chunk(table, end - length, [0] * length))
    return spans, pages


def new_cache(config, pages, page_size, max_len, dtype):
    """A cache on the CPU in the layout that it has on CUDA."""
    model = SimpleNamespace(config=config, dtype=dtype)
    return poisoned_cache(model, pages, page_size, max_len, position_major=True)


def fill(cache, spans):
    """Put random keys and values where the spans may read, and NaN everywhere else."""
    cache.data.fill_(float("nan"))
    for span in spans:
        slots = slot_mapping(span.pages, cache.page_size, 0, span.end)
        written = cache.data[:, :, :, slots]
        cache.data[:, :, :, slots] = torch.randn(written.shape).to(written.dtype)


def random_queries(spans, config, dtype):
    """q of these spans, (num_tokens, n_head, head_dim), a view of q, k and v as in the model."""
    rows = sum(span.length for span in spans)
    heads = config.n_head + 2 * config.n_kv_head
    return torch.randn(rows, heads, config.head_dim).to(dtype)[:, : config.n_head]


def on_cuda(cache):
    """A cache of the CPU that says that it is on a GPU."""
    data = SimpleNamespace(
        is_cuda=True,
        dtype=cache.data.dtype,
        device=cache.data.device,
        shape=cache.data.shape,
    )
    return SimpleNamespace(**vars(cache) | dict(layer=cache.layer, data=data))


@contextlib.contextmanager
def capability(major, minor):
    """Pretend that tensors of the CPU are on a GPU of this compute capability."""
    with mock.patch.multiple(
        torch.cuda,
        get_device_capability=lambda device=None: (major, minor),
        device_of=lambda tensor: contextlib.nullcontext(),
        current_device=lambda: 0,
    ):
        yield
