"""xformers' Triton kernels of split-K without a GPU: interpreted, or compiled for one.

Both need a process of their own. Triton decides at its import whether it interprets, and has one
driver. `Worker` starts such a process, and the other functions here run in it."""

import logging
import random
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import pytest
import torch

from fast import BACKENDS
from request import lone_chunk
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


class Compiler:
    """Stands for a Triton kernel: compiles it for each new set of arguments, launches nothing."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.count = 0

    def __getitem__(self, grid):
        return self.compile

    def compile(self, *args, **kwargs):
        """Compile for these arguments if that was not done before."""
        function = getattr(self.kernel, "fn", self.kernel)  # under xformers' heuristics
        function = function if hasattr(function, "device_caches") else self.kernel
        before = sum(len(cache[0]) for cache in function.device_caches.values())
        self.kernel.run(*args, grid=(1, 1, 1), warmup=True, **kwargs)
        self.count += sum(len(cache[0]) for cache in function.device_caches.values()) - before


def pretend_driver(capability):
    """Let Triton compile for a GPU of that compute capability, which need not be here."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    major, minor = capability
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 10 * major + minor, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device=None: 0,
        )
    )


def count_compiled(decodes, sizes):
    """How many kernels Triton compiles for a GPU for batches of so many decodes, one by one."""
    logging.getLogger("xformers").setLevel(logging.ERROR)
    from xformers.ops.fmha import triton_splitk
    from xformers.ops.fmha._triton import splitk_kernels

    pretend_driver(decodes.capability)
    config = config_of(decodes.n_head, decodes.n_kv_head, decodes.head_dim)
    (end,) = decodes.ends
    table = list(range(-(-end // decodes.page_size)))
    pages = max(sizes) if decodes.page_size == decodes.max_len else len(table)
    cache = new_cache(config, pages, decodes.page_size, decodes.max_len, torch.bfloat16)
    split_k = Compiler(splitk_kernels._get_splitk_kernel(1))
    reduce = Compiler(splitk_kernels._splitK_reduce)
    get_kernel = classmethod(lambda operator: split_k)
    counts = []
    with (
        mock.patch.object(triton_splitk.FwOp, "get_kernel", get_kernel),
        mock.patch.object(splitk_kernels, "_splitK_reduce", reduce),
        capability(*decodes.capability),
        FlashByDefinition(),
    ):
        backend = BACKENDS[decodes.backend](config, cache)
        for size in sizes:
            before = split_k.count + reduce.count
            spans = [lone_chunk(table, end - 1, [0]) for _ in range(size)]
            q = random_queries(spans, config, torch.bfloat16)
            backend.plan(spans)(q, *cache.layer(1))
            counts.append(split_k.count + reduce.count - before)
    return counts
