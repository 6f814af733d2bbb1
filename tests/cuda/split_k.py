"""xformers' Triton kernels of split-K, interpreted in a process of their own: no GPU is needed.

Triton decides at its import whether it interprets. `Worker` starts a process for it."""

import logging
import random
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

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
from tests.cuda.flash import FlashByDefinition, attend_spans

SECONDS = 280  # for one call, below the limit of a test


class Decodes(NamedTuple):
    """A batch of decodes, and the model and cache that they run on."""

    backend: str
    n_head: int
    n_kv_head: int
    head_dim: int
    page_size: int
    max_len: int
    ends: tuple[int, ...]  # the number of keys of each
    capability: tuple[int, int] = (8, 0)


class Worker:
    """A process whose Triton has this environment."""

    def __init__(self, **environment):
        self.environment = environment
        self.pool = ProcessPoolExecutor(1, get_context("spawn"))

    def call(self, function, *args):
        """The result of a function of this file, or what it raises."""
        with pytest.MonkeyPatch.context() as patch:  # the process starts at the first call
            for name, value in self.environment.items():
                patch.setenv(name, value)
            return self.pool.submit(function, *args).result(SECONDS)

    def close(self):
        """End the process."""
        self.pool.shutdown()


def interpret(decodes):
    """The largest difference of interpreted split-K in float16 from attention by definition."""
    torch.manual_seed(0)
    logging.getLogger("xformers").setLevel(logging.ERROR)
    config = config_of(decodes.n_head, decodes.n_kv_head, decodes.head_dim)
    ends = [(end, 1) for end in decodes.ends]
    spans, pages = scattered_spans(random.Random(0), ends, decodes.page_size)
    cache = new_cache(config, pages, decodes.page_size, decodes.max_len, torch.float16)
    q = random_queries(spans, config, torch.float16)
    with capability(*decodes.capability), FlashByDefinition() as flash:
        backend = BACKENDS[decodes.backend](config, cache)
        fill(cache, spans)
        del flash.calls[:]
        y = backend.plan(spans)(q, *cache.layer(1))
    assert not flash.calls  # it was Triton that computed
    expected = attend_spans(q, *cache.layer(1), spans, decodes.page_size)
    difference = (y.double() - expected).abs().max()
    return float("inf") if difference.isnan() else difference.item()
