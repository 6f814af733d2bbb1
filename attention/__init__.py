"""Attention over a hybrid batch: the one place where the batch is taken apart.

The linear layers of a hybrid batch see one matrix. Attention cannot: every request has its own keys
and values. A chunk [start, start + length) attends to its request's past, keys 0 … start - 1, and
causally to itself (SARATHI §4.2, Figure 6); a decode is a chunk of length 1.

There are several backends. Each is made once for a cache, and makes a *plan* once per iteration:
masks and index tensors depend on the batch only, so they are not built again for each layer.
Grouped-query attention: `group = n_head // n_kv_head` consecutive query heads share one KV head.

Read next: plan.py and sdpa.py, then model.py, which calls the plan."""

import warnings
from collections.abc import Callable
from functools import partial

import torch

from attention.cpu_matmul import Matmul
from attention.flash import Flash
from attention.plan import SIXTEEN_BITS, AttentionBackend
from attention.sdpa import SDPA
from attention.xformers import XFormers
from errors import check_one_of
from kv_cache import KVCache, ModelShape

BY_MATMUL = (torch.bfloat16,)  # on a CPU; the scores of float16 could overflow


def fastest_backend(config: ModelShape, cache: KVCache) -> AttentionBackend:
    """flash for 16 bits on CUDA, else xformers; matmul for bfloat16 on a CPU; else sdpa.

    If flash or xformers cannot run, a warning says why, and which backend does."""
    dtype = cache.data.dtype
    if not cache.data.is_cuda:
        return Matmul(config, cache) if dtype in BY_MATMUL else SDPA(config, cache)
    failures = []
    for name in ("flash", "xformers", "sdpa") if dtype in SIXTEEN_BITS else ("sdpa",):
        try:
            backend = BACKENDS[name](config, cache)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # those of Triton's compiler have no type in common
            failures.append(f"{name} cannot run, {type(error).__name__}: {error}")
            continue
        if failures:
            warnings.warn(
                f"attention={name!r}, which is slower: {'; '.join(failures)}", stacklevel=3
            )
        return backend
    raise ValueError(f"attention='auto': {'; '.join(failures)}")


BACKENDS: dict[str, Callable[[ModelShape, KVCache], AttentionBackend]] = {
    "auto": fastest_backend,
    "sdpa": SDPA,
    "matmul": Matmul,
    "flash": Flash,
    "xformers": XFormers,
    "xformers-split-k": partial(XFormers, split_k=True),
}
CUDA_ONLY = ("flash", "xformers", "xformers-split-k")
DEVICES = {"matmul": "cpu", **dict.fromkeys(CUDA_ONLY, "cuda")}  # the others: any


def make_attention(config: ModelShape, cache: KVCache, backend: str = "auto") -> AttentionBackend:
    """The backend of that name, for a cache. Raises as check_backend and `XFormers`."""
    check_backend(backend, cache.data.device)
    return BACKENDS[backend](config, cache)


def check_backend(backend: str, device: torch.device) -> None:
    """Raise ValueError for an unknown name, or one that is not for this device."""
    check_one_of("attention", backend, BACKENDS)
    needed = DEVICES.get(backend, device.type)
    if device.type != needed:
        raise ValueError(f"attention={backend!r}: runs on {needed} alone, 'sdpa' anywhere")
