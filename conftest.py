"""What all tests share: one thread, and the models. The helpers are in tests/helpers.py."""

import pytest
import torch

from tests.helpers import tiny_model

torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other, and others

FAMILIES = [("gpt2", 4), ("llama", 4), ("llama", 2), ("llama", 1)]
NAMES = ["gpt2", "llama", "llama-grouped", "llama-multi-query"]


@pytest.fixture(scope="session", params=FAMILIES, ids=NAMES)
def model(request):
    """Both families, with plain, grouped and shared KV heads, in float64."""
    return tiny_model(*request.param)
