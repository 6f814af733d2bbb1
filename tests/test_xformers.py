"""Attention by xformers, held against torch's sdpa, from the masks that it is given.

Stand-ins that follow xformers' contract take the place of its operators. See also cuda/."""

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
from tests.helpers import poisoned_cache, tiny_model


def seen_by_split_k(mask, slots):
    """What Triton split-K reads of a paged mask, (n, slots): of decode i the first seqlen[i].

    Not `materialize`: it goes on behind a request's end, and padding would hide a page."""
    seen = torch.zeros(len(mask.block_tables), slots, dtype=torch.bool)
    lengths = mask.k_seqinfo.seqlen.tolist()
    for row, table, length in zip(seen, mask.block_tables.tolist(), lengths, strict=True):
        row[slot_mapping(table, mask.page_size, 0, length)] = True
    return seen


def test_numbers_of_decodes_are_padded_to_few_sizes():
    sizes = {1: 1, 2: 2, 3: 4, 9: 16, 17: 24, 33: 48, 128: 128, 129: 160, 160: 160, 161: 192}
    assert {n: padded_size(n) for n in sizes} == sizes
    assert padded_sizes(6) == [1, 2, 4, 8]
    assert len(padded_sizes(128)) == 11
    for n in range(1, 257):
        size = padded_size(n)
        assert n <= size <= max(2 * n, 8)
        assert padded_size(size) == size


# CUDA


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


def return_queries(operator, inputs):
    """What an operator might return."""
    return inputs.query


# (decodes, chunks), (pages, page_size, max_len)
ONE_PAGE_EACH = [[([4], 20, 1), ([0], 0, 1), ([2], 7, 1)], [([1], 5, 9), ([3], 0, 6)], (5, 24, 24)]
SMALL_PAGES = [  # request 3 has a page to grow into
    [([11, 0, 7, 3], 200, 1), ([5], 0, 1), ([19, 18], 127, 1), ([4, 6, 8, 17], 128, 1)],
    [([9, 2], 60, 9), ([1, 20], 0, 6), ([16, 13, 14, 15], 190, 66), ([12, 10], 64, 2)],
    (21, 64, 256),
]
LAYOUTS = [ONE_PAGE_EACH, SMALL_PAGES]
in_both_layouts = pytest.mark.parametrize("case", LAYOUTS, ids=["one page each", "small"])
OF_THIS_MACHINE = ("device=", "dtype=", "requires", "operator wasn't built", "triton is not")


@pytest.mark.parametrize("split_k", [True, False])
@in_both_layouts
def test_xformers_plan_equals_sdpa(model, case, split_k, operators):
    """The CUDA path, with an operator on a CPU that follows xformers' contract. Nothing is copied
    but small pages, and only those of chunks: decodes follow the block tables."""
    decodes, chunks, sizes = case
    pages, page_size, _ = sizes
    is_paged = case is SMALL_PAGES
    model = tiny_model(model.config.family, model.config.n_kv_head, head_dim=16)
    cache = poisoned_cache(model, *sizes, position_major=True)
    calls = []

    def attend(operator, inputs):
        arguments = (inputs.query, inputs.key, inputs.value)
        q, keys, values = (x.flatten(2, 3)[0].transpose(0, 1) for x in arguments)
        calls.append((operator, q.shape[1], keys.shape[1] // page_size))
        assert inputs.key.stride(3) == inputs.value.stride(3) == 0 or inputs.key.shape[3] == 1
        inputs.validate_inputs()
        reasons = operator.not_supported_reasons(inputs)  # of shapes, strides and mask
        assert all(reason.startswith(OF_THIS_MACHINE) for reason in reasons)
        if not is_paged or operator is split_k_operator:
            assert inputs.key.data_ptr() == cache.data.data_ptr()  # a view, not a copy
        visible = visible_keys(inputs.attn_bias, q.shape[1], keys.shape[1])
        read = visible.any(dim=0)  # the operators do not touch what no query sees
        scores = q @ keys[:, read].transpose(1, 2) * inputs.scale_float
        scores = scores.masked_fill(~visible[:, read], float("-inf"))
        y = (scores.softmax(dim=-1) @ values[:, read].nan_to_num()).transpose(0, 1)[None]
        return y.unflatten(2, inputs.query.shape[2:4])

    flash_operator, split_k_operator = operators(attend)
    decodes = [a_span(*span) for span in decodes]
    chunks = [a_span(*span) for span in chunks]
    data = cache.data[0]
    for span in decodes + chunks:
        slots = slot_mapping(span.pages, page_size, 0, span.end)
        data[:, :, slots] = torch.rand_like(data[:, :, slots])
    backend = XFormers(model.config, cache, split_k)
    decode_operator = split_k_operator if split_k or is_paged else flash_operator
    assert [operator for operator, *_ in calls] == [decode_operator, flash_operator]  # the probe
    calls.clear()
    n = len(decodes)
    rows = sum(span.length for span in chunks)
    layer = cache.layer(0)
    q = torch.randn(n + rows, model.config.n_head, model.config.head_dim, dtype=torch.float64)
    expected = SDPA(model.config, cache).plan(decodes + chunks)(q, *layer)
    close(backend.plan(decodes + chunks)(q, *layer), expected)
    size = padded_size(n) if decode_operator is split_k_operator else n
    copied_pages = 9 if is_paged else pages
    assert calls == [(decode_operator, size, pages), (flash_operator, rows, copied_pages)]
    close(backend.plan(decodes[:-1])(q[: n - 1], *layer), expected[: n - 1])
    close(backend.plan(chunks)(q[n:], *layer), expected[n:])


def visible_keys(mask, rows, slots):
    """Which keys each query sees, (rows, slots)."""
    if hasattr(mask, "block_tables"):
        return seen_by_split_k(mask, slots)
    assert slots == mask.k_seqinfo.seqstart_py[-1]
    assert mask.k_seqinfo.max_seqlen >= max(mask.k_seqinfo.seqlen_py)
    return mask.materialize((rows, slots)) == 0


WAITS = {"item", "_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal"}


class NoWaiting(TorchDispatchMode):
    """Raises where a GPU would be waited for: where the computer looks at a number in a tensor."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.overloadpacket.__name__ in WAITS:
            raise RuntimeError(f"{operator} waits for the device")
        return operator(*args, **kwargs or {})


@in_both_layouts
def test_xformers_and_sampling_do_not_wait_for_the_device(case, operators):
    decodes, chunks, sizes = case
    operators(return_queries)
    model = tiny_model(head_dim=16)
    cache = poisoned_cache(model, *sizes, position_major=True)
    backend = XFormers(model.config, cache)
    spans = [a_span(*span) for span in decodes + chunks]
    ways = [(0, 0, 1), (1, 0, 1), (0.7, 5, 1), (2, 0, 0.5)] * 2
    params = [SamplingParams(1, *way, logprobs=True) for way in ways[: len(spans)]]
    with NoWaiting():
        tokens, _ = sample(model(FlatBatch.build(spans, backend), cache), params, range(9))
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
    max_batch = 13
    engine = Engine(
        tiny_model(n_layer=1, head_dim=16),
        policy=policy,
        chunk=48,
        max_batch=max_batch,
        max_len=256,
        page_size=page_size,
        attention="xformers-split-k",
    )
    engine.warm_up()
    warm = set(kernels)
    assert len(warm) == len(padded_sizes(max_batch))
    requests = range(2 * max_batch)
    params = [SamplingParams(4 + i) for i in requests]
    engine.generate([[1] * (10 + 5 * i) for i in requests], params, progress=False)
    assert kernels == warm
