"""Attention over a hybrid batch: the one place where the batch is taken apart.

The linear layers of a hybrid batch see one matrix. Attention cannot: every request has its own keys
and values. A chunk [start, start + length) attends to its request's past, keys 0 … start - 1, and
causally to itself (SARATHI §4.2, Figure 6); a decode is a chunk of length 1.

There are several backends. Each is made once for a cache, and makes a *plan* once per iteration:
masks and index tensors depend on the batch only, so they are not built again for each layer.
Grouped-query attention: `group = n_head // n_kv_head` consecutive query heads share one KV head.

Read next: plan.py and sdpa.py, the backend to read; then model.py, which calls the plan."""

from collections.abc import Callable
from functools import partial

import torch

from attention.cpu_matmul import Matmul
from attention.fallback import first_that_runs
from attention.flash import Flash
from attention.plan import SIXTEEN_BITS, AttentionBackend
from attention.sdpa import SDPA
from attention.xformers import XFormers
from config import GPTConfig
from kv_cache import KVCache

BY_MATMUL = (torch.bfloat16,)  # on a CPU; the scores of float16 could overflow
ON_CUDA = {"flash": Flash, "xformers": XFormers, "sdpa": SDPA}  # the fastest first


def fastest_backend(config: GPTConfig, cache: KVCache) -> AttentionBackend:
    """Of ON_CUDA the first that runs; on a CPU matmul for bfloat16; elsewhere sdpa."""
    if cache.data.is_cuda and cache.data.dtype in SIXTEEN_BITS:
        return first_that_runs(ON_CUDA, config, cache)
    if not cache.data.is_cuda and cache.data.dtype in BY_MATMUL:
        return Matmul(config, cache)
    return SDPA(config, cache)


BACKENDS: dict[str, Callable[[GPTConfig, KVCache], AttentionBackend]] = {
    "auto": fastest_backend,
    "matmul": Matmul,
    "xformers-split-k": partial(XFormers, split_k=True),
    **ON_CUDA,
}
DEVICES = {"matmul": "cpu", "flash": "cuda", "xformers": "cuda", "xformers-split-k": "cuda"}


def make_attention(config: GPTConfig, cache: KVCache, backend: str = "auto") -> AttentionBackend:
    """The backend of that name, for a cache. Raises as check_backend and `XFormers`."""
    check_backend(backend, cache.data.device)
    return BACKENDS[backend](config, cache)


def check_backend(backend: str, device: torch.device) -> None:
    """Raise ValueError for an unknown name, or one that is not for this device."""
    if backend not in BACKENDS:
        raise ValueError(f"attention={backend!r}: must be one of {', '.join(BACKENDS)}")
    needed = DEVICES.get(backend, device.type)
    if device.type != needed:
        raise ValueError(f"attention={backend!r}: runs on {needed} alone, 'sdpa' anywhere")
