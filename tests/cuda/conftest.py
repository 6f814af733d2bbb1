"""The pretended GPU of the tests in this folder."""

import pytest

from tests.cuda.fake_gpu import FakeGPU


@pytest.fixture
def gpu(request):
    """A pretended A100; another compute capability by indirect parametrization."""
    with FakeGPU(getattr(request, "param", (8, 0))).plugged_in() as gpu:
        yield gpu
