"""Which attention backends run on this GPU, with this torch, for this cache."""

import warnings
from collections.abc import Callable, Mapping

import torch

from attention.plan import AttentionBackend
from config import GPTConfig
from kv_cache import KVCache
from request import lone_chunk

SIXTEEN_BITS = (torch.float16, torch.bfloat16)


def check_gpu(name: str, cache: KVCache) -> None:
    """Raise ValueError, for the backend of that name, unless the GPU runs FlashAttention 2."""
    data = cache.data
    is_new = torch.cuda.get_device_capability(data.device) >= (8, 0)
    if data.dtype not in SIXTEEN_BITS or not is_new:
        raise ValueError(f"attention={name!r}: needs 16 bits and a GPU of sm80 or newer")


def probe(backend: AttentionBackend, config: GPTConfig, cache: KVCache) -> None:
    """Compute a decode and a chunk, in the first and the last page: it fails here if at all."""
    decode = lone_chunk([0], 0, [0])
    chunk = lone_chunk([cache.pages - 1], 0, [0] * min(2, cache.max_len))
    rows = decode.length + chunk.length
    keys, values = cache.layer(0)
    q = keys.new_zeros(rows, config.n_head, config.head_dim)
    plan = backend.plan([decode, chunk])
    plan(q, keys, values)


def first_that_runs(
    backends: Mapping[str, Callable[[GPTConfig, KVCache], AttentionBackend]],
    config: GPTConfig,
    cache: KVCache,
) -> AttentionBackend:
    """The first of the backends that can be made. The fastest comes first.

    A warning says which ones cannot run and why, and which one does. Raises
    torch.OutOfMemoryError, which says nothing about a backend, and ValueError if none runs."""
    failures = []
    for name, make_backend in backends.items():
        try:
            backend = make_backend(config, cache)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # those of Triton's compiler have no type in common
            failures.append(f"{name} cannot run, {type(error).__name__}: {error}")
            continue
        if failures:
            slower = f"attention={name!r}, which is slower"
            warnings.warn(f"{slower}: {'; '.join(failures)}", stacklevel=4)
        return backend
    raise ValueError(f"attention='auto': {'; '.join(failures)}")
