"""The fastest attention backend that runs on this GPU, with this torch, for this cache."""

import warnings
from collections.abc import Callable, Mapping

import torch

from attention.plan import AttentionBackend
from kv_cache import KVCache, ModelShape


def first_that_runs(
    backends: Mapping[str, Callable[[ModelShape, KVCache], AttentionBackend]],
    config: ModelShape,
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
