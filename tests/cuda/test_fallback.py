"""`auto` takes torch's attention where others fail, held against the list of fast.ON_CUDA."""

import pytest
import torch

from attention.sdpa import SDPA
from fast import BACKENDS, make_attention
from tests.cuda.batches import CUDA_BACKENDS, capability, config_of, new_cache, on_cuda

CONFIG = config_of(4, 2, 64)
LAYOUTS = [
    (256, 256),
    (256, 512),
    (64, 512),
]  # page_size, max_len: flash, or split-K, is tried


def out_of_resources():
    """Triton's, where a kernel wants more shared memory than the GPU has."""
    from triton.runtime import errors  # Triton comes with CUDA's torch

    return errors.OutOfResources(200_000, 101_376, "shared memory")


ERRORS = [
    pytest.param(out_of_resources, marks=pytest.mark.cuda_build),
    lambda: RuntimeError("Failed to find C compiler"),
    lambda: AssertionError("x.ndim == 3"),
]


@pytest.fixture
def fail(monkeypatch):
    """A function that lets all operators for CUDA raise an error when they are tried."""

    def fail(error):
        def probe(*args):
            raise error

        monkeypatch.setattr("fast.flash.probe", probe)
        monkeypatch.setattr("fast.xformers.probe", probe)

    return fail


def cache_of(page_size=256, max_len=512):
    """A small cache that says that it is on a GPU."""
    return on_cuda(new_cache(CONFIG, 4, page_size, max_len, torch.float16))


@pytest.mark.parametrize("page_size, max_len", LAYOUTS)
@pytest.mark.parametrize("make_error", ERRORS)
def test_auto_falls_back_on_whatever_is_raised(make_error, page_size, max_len, fail):
    fail(make_error())
    with capability(8, 0), pytest.warns(UserWarning) as warned:
        backend = make_attention(CONFIG, cache_of(page_size, max_len))
    assert isinstance(backend, SDPA)
    assert len(warned) == 1


@pytest.mark.parametrize("name", CUDA_BACKENDS)
def test_a_backend_that_is_asked_for_by_name_raises(name, fail):
    fail(TypeError("other"))
    with capability(8, 0), pytest.raises((TypeError, ValueError)):
        BACKENDS[name](CONFIG, cache_of(max_len=256))


def test_a_lack_of_memory_says_nothing_of_a_backend(fail):
    fail(torch.OutOfMemoryError())
    with capability(8, 0), pytest.raises(torch.OutOfMemoryError):
        make_attention(CONFIG, cache_of())


def test_gpus_before_sm80_run_on_torch():
    with capability(7, 5), pytest.warns(UserWarning) as warned:
        assert isinstance(make_attention(CONFIG, cache_of()), SDPA)
    assert len(warned) == 1
