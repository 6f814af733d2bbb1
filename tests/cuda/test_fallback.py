"""Where the operators for CUDA fail, `auto` takes torch's attention: the definition is the same."""

import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attention.sdpa import SDPA
from fast import BACKENDS, make_attention
from tests.cuda.batches import (
    CUDA_BACKENDS,
    capability,
    config_of,
    fill,
    new_cache,
    on_cuda,
    random_queries,
    scattered_spans,
)
from tests.cuda.flash import attend_spans, flash_call

CONFIG = config_of(4, 2, 64)
LAYOUTS = [(256, 256), (256, 512), (64, 512)]  # page_size, max_len: flash, or split-K, is tried


def out_of_resources():
    """Triton's, where a kernel wants more shared memory than the GPU has."""
    from triton.runtime import errors  # Triton comes with CUDA's torch

    return errors.OutOfResources(200_000, 101_376, "shared memory")


ERRORS = [
    pytest.param(out_of_resources, marks=pytest.mark.cuda_build),
    lambda: RuntimeError("Failed to find C compiler"),
    lambda: AssertionError("x.ndim == 3"),
]


class FailingFlash(TorchDispatchMode):
    """Raises an error in place of torch's flash attention."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if flash_call(op, args, kwargs) is not None:
            raise self.error
        return op(*args, **kwargs)


@pytest.fixture
def failing(monkeypatch):
    """A function that lets all operators for CUDA raise an error."""
    from xformers.ops import fmha

    new_tensor = torch.tensor

    def unpinned(*args, pin_memory=False, **kwargs):  # that would take a driver
        return new_tensor(*args, **kwargs)

    monkeypatch.setattr(torch, "tensor", unpinned)

    def fail(error):
        def apply(operator, inputs, needs_gradient):
            raise error

        for operator in (fmha.flash.FwOp, fmha.triton_splitk.FwOp):
            monkeypatch.setattr(operator, "apply", classmethod(apply))
        monkeypatch.setattr(fmha.flash, "FLASH_VERSION", "2.5.7")
        return FailingFlash(error)

    return fail


def cache_of(page_size=256, max_len=512):
    """A small cache that says that it is on a GPU."""
    return on_cuda(new_cache(CONFIG, 4, page_size, max_len, torch.float16))


@pytest.mark.parametrize("page_size, max_len", LAYOUTS)
@pytest.mark.parametrize("make_error", ERRORS)
def test_auto_falls_back_on_whatever_is_raised(make_error, page_size, max_len, failing):
    error = make_error()
    spans, pages = scattered_spans(random.Random(0), [(200, 1), (256, 130), (9, 9)], page_size)
    cache = new_cache(CONFIG, pages, page_size, max_len, torch.float16)
    with failing(error), capability(8, 0), pytest.warns(UserWarning) as warned:
        backend = make_attention(CONFIG, on_cuda(cache))
    assert isinstance(backend, SDPA)
    assert len(warned) == 1
    fill(cache, spans)
    q = random_queries(spans, CONFIG, torch.float16)
    layer = cache.layer(1)
    y = backend.plan(spans)(q, *layer)
    expected = attend_spans(q, *layer, spans, page_size)
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=3e-3)


@pytest.mark.parametrize("name", CUDA_BACKENDS)
def test_a_backend_that_is_asked_for_by_name_raises(name, failing):
    with failing(TypeError("other")), capability(8, 0), pytest.raises(TypeError):
        BACKENDS[name](CONFIG, cache_of(max_len=256))


def test_gpus_before_sm80_run_on_torch(failing):
    unused = failing(AssertionError("was called"))
    with unused, capability(7, 5), pytest.warns(UserWarning, match="sm80") as warned:
        assert isinstance(make_attention(CONFIG, cache_of()), SDPA)
    assert len(warned) == 1
