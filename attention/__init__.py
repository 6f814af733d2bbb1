"""Attention over a hybrid batch: the one place where the batch is taken apart.

The linear layers of a hybrid batch see one matrix. Attention cannot: every request has its own keys
and values. A chunk [start, start + length) attends to its request's past, keys 0 … start - 1, and
causally to itself (SARATHI §4.2, Figure 6); a decode is a chunk of length 1.

There are three backends. Each is made once for a cache and makes a *plan* once per iteration: masks
and index tensors depend on the batch only, so they are not built again for each layer. A plan is

    attend(q, keys, values) -> out

    q, out         (num_tokens, n_head, head_dim), the rows of all spans one after the other
    keys, values   (n_kv_head, slots, head_dim), one layer of the cache

Grouped-query attention: `group = n_head // n_kv_head` consecutive query heads share one KV head.
Read next: model.py, which calls the plan."""

import warnings

import torch

from attention.cpu_matmul import Matmul
from attention.plan import SIXTEEN_BITS
from attention.sdpa import SDPA
from attention.xformers import XFormers
from errors import check_one_of

BACKENDS = ("auto", "sdpa", "matmul", "xformers", "xformers-split-k")
BY_MATMUL = (torch.bfloat16,)  # on a CPU; the scores of float16 could overflow


def make_attention(config, cache, backend="auto"):
    """The backend for a cache: `sdpa`, `matmul`, `xformers`, `xformers-split-k`, or `auto`.

    `auto` is xformers for 16 bits on CUDA, matmul for bfloat16 on a CPU, else sdpa; if xformers
    cannot run it says so, and takes sdpa. Raises what `XFormers` raises."""
    if backend == "auto" and cache.data.is_cuda and cache.data.dtype in SIXTEEN_BITS:
        try:
            return XFormers(config, cache)
        except (ImportError, ValueError, RuntimeError) as error:
            slower = "attention runs on torch alone, one call per chunk, which is slower"
            warnings.warn(f"{slower}: {error}", stacklevel=2)
    if "xformers" in backend:
        return XFormers(config, cache, "split-k" in backend)
    if backend == "auto" and not cache.data.is_cuda and cache.data.dtype in BY_MATMUL:
        backend = "matmul"
    return Matmul(config, cache) if backend == "matmul" else SDPA(config, cache)


def check_backend(backend, device):
    """Raise ValueError for an unknown name, or one that is not for this device."""
    check_one_of("attention", backend, BACKENDS)
    own = "cuda" if "xformers" in backend else "cpu" if backend == "matmul" else device.type
    if device.type != own:
        raise ValueError(f"attention={backend!r}: runs on {own} alone, 'sdpa' anywhere")
