"""Hybrid batches, and caches on the CPU that lie as those on CUDA do, with NaN in unread slots."""

import contextlib
import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor

from attention import BACKENDS, DEVICES
from kv_cache import KVCache, slot_mapping
from model import GPTConfig
from request import Chunk
from runtime.lone_chunk import lone_chunk
from tests.helpers import poisoned_cache

CUDA_BACKENDS = [name for name in BACKENDS if DEVICES.get(name) == "cuda"]
PAGE_MULTIPLES = {"flash": 256}  # what a backend demands of small pages; others: 64


def reads_pages(name: str, page_size: int, max_len: int) -> bool:
    """Whether the backend of that name reads pages of this size."""
    return page_size == max_len or page_size % PAGE_MULTIPLES.get(name, 64) == 0


def config_of(n_head: int, n_kv_head: int, head_dim: int) -> GPTConfig:
    """The geometry of attention; the other sizes are of no importance."""
    return GPTConfig(
        n_layer=2, n_head=n_head, n_kv_head=n_kv_head, n_embd=64, n_inner=64, head_dim=head_dim
    )


def random_ends(rng: random.Random, count: int, max_len: int) -> list[tuple[int, int]]:
    """(end, length) of some spans, of which about half are decodes."""
    ends = [rng.randint(1, max_len) for _ in range(count)]
    return [(end, rng.choice([1, 1, min(2, end), rng.randint(1, end), end])) for end in ends]


def scattered_spans(
    rng: random.Random, ends: Sequence[tuple[int, int]], page_size: int
) -> tuple[list[Chunk], int]:
    """Spans of these (end, length), decodes first, in pages that lie anywhere in a cache; and the
    number of pages of that cache, two of which no span has."""
    pages = sum(-(-end // page_size) for end, _ in ends) + 2
    free_pages = rng.sample(range(pages), pages)
    spans = []
    for end, length in sorted(ends, key=lambda pair: pair[1] > 1):
        table = [free_pages.pop() for _ in range(-(-end // page_size))]
        spans.append(lone_chunk(table, end - length, [0] * length))
    return spans, pages


def new_cache(
    config: GPTConfig, pages: int, page_size: int, max_len: int, dtype: torch.dtype
) -> KVCache:
    """A cache on the CPU in the layout that it has on CUDA."""
    model = SimpleNamespace(config=config, dtype=dtype)
    return poisoned_cache(model, pages, page_size, max_len, position_major=True)


def fill(cache: KVCache, spans: Sequence[Chunk]) -> None:
    """Put random keys and values where the spans may read, and NaN everywhere else."""
    cache.data.fill_(float("nan"))
    for span in spans:
        slots = slot_mapping(span.pages, cache.page_size, 0, span.end)
        written = cache.data[:, :, :, slots]
        cache.data[:, :, :, slots] = torch.randn(written.shape).to(written.dtype)


def random_queries(spans: Sequence[Chunk], config: GPTConfig, dtype: torch.dtype) -> Tensor:
    """q of these spans, (num_tokens, n_head, head_dim), a view of q, k and v as in the model."""
    rows = sum(span.length for span in spans)
    heads = config.n_head + 2 * config.n_kv_head
    return torch.randn(rows, heads, config.head_dim).to(dtype)[:, : config.n_head]


@contextlib.contextmanager
def capability(major: int, minor: int) -> Iterator[None]:
    """Pretend that tensors of the CPU are on a GPU of this compute capability."""
    answers = {
        "get_device_capability": (major, minor),
        "device_of": contextlib.nullcontext(),
        "current_device": 0,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            function = mock.Mock(return_value=answer)
            stack.enter_context(mock.patch.object(torch.cuda, name, function))
        yield
