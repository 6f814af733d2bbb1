"""Attention by xformers, held against torch's sdpa, from the masks that it is given.

Its operators are replaced by attention by definition of each sequence of a mask. See also cuda/."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fast
from attention.sdpa import SDPA
from engine import Engine
from fast import fallback
from fast.padding import padded_size, padded_sizes
from fast.xformers import XFormers
from kv_cache import slot_mapping
from model import FlatBatch
from sampling import SamplingParams, sample
from test_equivalence import a_span, close
from tests.cuda.flash import attend_sequences
from tests.helpers import poisoned_cache, tiny_model


def test_numbers_of_decodes_are_padded_to_few_sizes():
    assert padded_sizes(50) == [1, 2, 4, 8, 16, 24, 32, 48, 64]
    assert padded_size(129) == 160
    for n in range(1, 257):
        size = padded_size(n)
        assert n <= size <= max(2 * n, 8)
        assert padded_size(size) == size


@pytest.fixture
def operators(monkeypatch):
    """Lets XFormers be made as on CUDA. Returns a function that lets another one compute: one of
    (operator, inputs) that returns y."""
    from xformers.ops import fmha

    monkeypatch.setattr(fmha.flash, "FLASH_VERSION", "2.8.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setitem(fast.DEVICES, "xformers-split-k", "cpu")
    for module in (fast, fallback):
        monkeypatch.setattr(module, "SIXTEEN_BITS", (torch.float64,))

    def let_compute(compute):
        def apply(operator, inputs, needs_gradient):
            return compute(operator, inputs), None

        for operator in (fmha.flash.FwOp, fmha.triton_splitk.FwOp):
            monkeypatch.setattr(operator, "apply", classmethod(apply))
        return fmha.flash.FwOp, fmha.triton_splitk.FwOp

    return let_compute


# decodes, chunks, (pages, page_size, max_len)
ONE_PAGE_EACH = (
    [([4], 20, 1), ([0], 0, 1), ([2], 7, 1)],
    [([1], 5, 9), ([3], 0, 6)],
    (5, 24, 24),
)
SMALL_PAGES = (  # request 3 has a page to grow into
    [([11, 0, 7, 3], 200, 1), ([5], 0, 1), ([19, 18], 127, 1), ([4, 6, 8, 17], 128, 1)],
    [([9, 2], 60, 9), ([1, 20], 0, 6), ([16, 13, 14, 15], 190, 66), ([12, 10], 64, 2)],
    (21, 64, 256),
)
in_both_layouts = pytest.mark.parametrize(
    "case",
    [ONE_PAGE_EACH, SMALL_PAGES],
    ids=["one page each", "small"],
)
OF_THIS_MACHINE = ("device=", "dtype=", "requires", "operator wasn't built", "triton is not")


@pytest.mark.parametrize("split_k", [True, False])
@in_both_layouts
def test_xformers_plan_equals_sdpa(model, case, split_k, operators):
    """Nothing is copied but small pages, and only those of chunks: decodes follow block tables."""
    decodes, chunks, sizes = case
    is_paged = case is SMALL_PAGES
    model = tiny_model(model.config.family, model.config.n_kv_head, head_dim=16)
    cache = poisoned_cache(model, *sizes, position_major=True)
    calls = []

    def attend(operator, inputs):
        calls.append((operator, inputs.query.shape[1]))
        assert inputs.key.stride(3) == inputs.value.stride(3) == 0 or inputs.key.shape[3] == 1
        inputs.validate_inputs()
        reasons = operator.not_supported_reasons(inputs)  # of shapes, strides and mask
        assert all(reason.startswith(OF_THIS_MACHINE) for reason in reasons)
        is_view = inputs.key.data_ptr() == cache.data.data_ptr()
        assert is_view or (is_paged and operator is flash_operator)
        return attend_sequences(inputs)

    flash_operator, split_k_operator = operators(attend)
    decodes = [a_span(*span) for span in decodes]
    chunks = [a_span(*span) for span in chunks]
    spans = decodes + chunks
    data = cache.data[0]
    for span in spans:
        slots = slot_mapping(span.pages, cache.page_size, 0, span.end)
        data[:, :, slots] = torch.rand_like(data[:, :, slots])
    backend = XFormers(model.config, cache, split_k)
    decode_operator = split_k_operator if split_k or is_paged else flash_operator
    assert [operator for operator, _ in calls] == [decode_operator, flash_operator]  # the probe
    calls.clear()
    n = len(decodes)
    rows = sum(span.length for span in chunks)
    layer = cache.layer(0)
    q = torch.randn(n + rows, model.config.n_head, model.config.head_dim, dtype=torch.float64)
    expected = SDPA(model.config, cache).plan(spans)(q, *layer)
    close(backend.plan(spans)(q, *layer), expected)
    size = padded_size(n) if decode_operator is split_k_operator else n
    assert calls == [(decode_operator, size), (flash_operator, rows)]
    close(backend.plan(decodes[:-1])(q[: n - 1], *layer), expected[: n - 1])
    close(backend.plan(chunks)(q[n:], *layer), expected[n:])


WAITS = {
    "item",
    "_local_scalar_dense",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "equal",
}


class NoWaiting(TorchDispatchMode):
    """Raises where a GPU would be waited for: where the computer looks at a number in a tensor."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.overloadpacket.__name__ in WAITS:
            raise RuntimeError(f"{operator} waits for the device")
        return operator(*args, **kwargs or {})


@in_both_layouts
def test_xformers_and_sampling_do_not_wait_for_the_device(case, operators):
    decodes, chunks, sizes = case
    operators(lambda operator, inputs: inputs.query)
    model = tiny_model(head_dim=16)
    cache = poisoned_cache(model, *sizes, position_major=True)
    backend = XFormers(model.config, cache)
    spans = [a_span(*span) for span in decodes + chunks]
    params = [
        SamplingParams(logprobs=True),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=5),
        SamplingParams(temperature=2.0, top_p=0.5),
    ]
    params = (params * 2)[: len(spans)]
    with NoWaiting():
        logits = model(FlatBatch.build(spans, backend), cache)
        tokens, _ = sample(logits, params, range(9))
    with pytest.raises(RuntimeError, match="waits for the device"), NoWaiting():
        tokens[0].item()


@pytest.mark.parametrize("policy", ["vllm", "sarathi-serve"])
@pytest.mark.parametrize("page_size", [64, 256])
def test_no_kernel_is_left_to_compile_after_warm_up(policy, page_size, operators):
    """Triton compiles split-K for the number of decodes, a bound of keys, the tables' width."""
    kernels = set()

    def note_kernel(operator, inputs):
        mask = inputs.attn_bias
        is_paged = hasattr(mask, "block_tables")
        bound = mask.block_tables.shape[1] if is_paged else mask.k_seqinfo.max_seqlen
        if operator is split_k_operator:
            kernels.add((inputs.query.shape[1], is_paged, bound))
        return inputs.query

    _, split_k_operator = operators(note_kernel)
    engine = Engine(
        tiny_model(n_layer=1, head_dim=16),
        policy=policy,
        chunk=48,
        max_batch=13,
        max_len=256,
        page_size=page_size,
        attention="xformers-split-k",
    )
    engine.warm_up()
    warm = set(kernels)
    assert len(warm) == len(padded_sizes(13))
    prompts = [[1] * (10 + 5 * i) for i in range(26)]
    params = [SamplingParams(4 + i) for i in range(26)]
    engine.generate(prompts, params, progress=False)
    assert kernels == warm
