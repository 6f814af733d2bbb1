"""xformers' split-K, interpreted, held against attention by definition."""

import pytest

from tests.cuda.split_k import Decodes, Worker, interpret

pytestmark = pytest.mark.cuda_build

TOLERANCE = 3e-3  # of float16, and results of up to about 3
PAGED = [(64, 512, (1, 63, 64, 65, 129, 300)), (128, 512, (5, 128, 129, 255)), (64, 512, (500,))]
ONE_PAGE_EACH = [(500, 500, (1, 20, 300)), (500, 500, (499,)), (200, 200, (7,) * 9)]
HEADS = [
    (4, 4, 16),
    (4, 2, 64),
    (8, 1, 16),
    (4, 2, 128),
    (2, 1, 256),
]  # n_head, n_kv_head, head_dim
INTERPRETED = [
    *(Decodes("xformers", *heads, *pages) for heads in HEADS for pages in PAGED),
    *(Decodes("xformers-split-k", *heads, *pages) for heads in HEADS for pages in ONE_PAGE_EACH),
    Decodes("xformers", 20, 1, 64, 64, 320, (300, 4), capability=(9, 0)),
    Decodes("xformers-split-k", 4, 2, 64, 200, 200, (200, 1, 199), capability=(9, 0)),
]


def name_of(decodes):
    """The name of a case."""
    heads = f"{decodes.n_head}/{decodes.n_kv_head}x{decodes.head_dim}"
    major, minor = decodes.capability
    return f"{decodes.backend}-{heads}-{len(decodes.ends)}@{decodes.page_size}-sm{major}{minor}"


@pytest.fixture(scope="module")
def interpreter():
    """A process in which Triton interprets its kernels, with numpy."""
    worker = Worker(TRITON_INTERPRET="1")
    yield worker
    worker.close()


@pytest.mark.parametrize("decodes", INTERPRETED, ids=name_of)
def test_interpreted_split_k_equals_attention_by_definition(decodes, interpreter):
    """In float16: the interpreter's products of bfloat16 are wrong."""
    assert interpreter.call(interpret, decodes) < TOLERANCE
