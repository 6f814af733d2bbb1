"""Attention by xformers: its masks are Figure 6, and its plan is that of torch.

Stand-ins that follow xformers' contract take the place of its operators. See also cuda/."""

import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import attention
from attention import SDPA, PagedSDPA, fallback, xformers
from attention.decode_sizes import padded_size, padded_sizes
from attention.xformers import XFormers
from engine import Engine
from kv_cache import slot_mapping
from model import FlatBatch
from policies import POLICIES
from sampling import SamplingParams, sample
from test_equivalence import a_span, close, figure_6
from tests.helpers import poisoned_cache, tiny_model

SEVERAL = [([3], 6, 1), ([0], 0, 1), ([2], 9, 1)], [([4], 5, 2), ([1], 0, 12), ([2], 3, 9)]


@pytest.mark.parametrize("spans", [*([([0], start, 4)] for start in (0, 4, 8)), *SEVERAL])
def test_xformers_mask_is_figure_6_in_every_page(spans):
    expected = torch.zeros(sum(length for *_, length in spans), 60, dtype=torch.bool)
    row = 0
    for (page,), start, length in spans:  # pages of 12 tokens
        slots_of_page = slice(page * 12, page * 12 + start + length)
        expected[row : row + length, slots_of_page] = figure_6(start, length)
        row += length
    mask = xformers.gappy_bias([a_span(*span) for span in spans], pages=5, page_size=12)
    assert torch.equal(mask.materialize(expected.shape) == 0, expected)
    assert mask.k_seqinfo.max_seqlen == 12  # always, or Triton would compile in each iteration


def seen_by_split_k(mask, slots):
    """What Triton split-K reads of a paged mask, (n, slots): of decode i the first seqlen[i].

    Not `materialize`: it goes on behind a request's end, and a table's padding would hide a page.
    """
    seen = torch.zeros(len(mask.block_tables), slots, dtype=torch.bool)
    for row, table, n in zip(
        seen, mask.block_tables.tolist(), mask.k_seqinfo.seqlen.tolist(), strict=True
    ):
        row[slot_mapping(table, mask.page_size, 0, n)] = True
    return seen


LAST_PAGE = [([0, 5, 2], 8, 1), ([1], 3, 1), ([4, 3], 5, 1)]
TO_GROW = [([5, 1, 2], 2, 1)]
DECODES = [[([4], 0, 1)], [([0], 0, 1)], [([2, 0], 7, 1), ([3, 4], 4, 1)], LAST_PAGE, TO_GROW]


@pytest.mark.parametrize("spans", DECODES)
def test_paged_mask_is_figure_6_in_every_block_table(spans):
    n = len(spans)
    expected = torch.zeros(len(spans), 24, dtype=torch.bool)
    for row, (pages, start, length) in zip(expected, spans, strict=True):  # pages of 4 tokens
        row[slot_mapping(pages, 4, 0, start + 1)] = figure_6(start, length)[0]
    mask = xformers.paged_bias([a_span(*span) for span in spans], page_size=4, max_len=12)
    assert torch.equal(seen_by_split_k(mask, 24), expected)
    assert mask.block_tables.dtype == torch.int32 and mask.block_tables.is_contiguous()
    assert mask.block_tables.shape == (n, 3)  # always, or Triton would compile in each iteration
    assert mask.k_seqinfo.padding == 12 and mask.q_seqinfo.seqstart.tolist() == list(range(n + 1))
    if not any(0 in pages for pages, *_ in spans):  # where xformers' own reading can be read
        own_mask = mask.materialize((n, 12 * n)) == 0
        assert torch.equal(own_mask, expected[:, : own_mask.shape[1]])
        assert not expected[:, own_mask.shape[1] :].any()


@pytest.mark.slow
def test_nothing_is_printed_when_xformers_is_imported():
    program = "from attention.xformers import import_xformers; import_xformers()"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


# CUDA


@pytest.fixture
def on_a_pretended_gpu(monkeypatch):
    """XFormers as it is made on CUDA, with xformers' operators still to be replaced."""
    from xformers.ops import fmha

    monkeypatch.setattr(fmha.flash, "FLASH_VERSION", "2.8.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    for module in (attention, fallback):
        monkeypatch.setattr(module, "SIXTEEN_BITS", (torch.float64,))
    return fmha


# (decodes, chunks), (pages, page_size, max_len)
ONE_PAGE_EACH = [[([4], 20, 1), ([0], 0, 1), ([2], 7, 1)], [([1], 5, 9), ([3], 0, 6)], (5, 24, 24)]
SMALL_PAGES = [  # request 3 has a page to grow into
    [([11, 0, 7, 3], 200, 1), ([5], 0, 1), ([19, 18], 127, 1), ([4, 6, 8, 17], 128, 1)],
    [([9, 2], 60, 9), ([1, 20], 0, 6), ([16, 13, 14, 15], 190, 66), ([12, 10], 64, 2)],
    (21, 64, 256),
]


@pytest.mark.parametrize("split_k", [True, False])
@pytest.mark.parametrize("case", [ONE_PAGE_EACH, SMALL_PAGES], ids=["one page each", "small"])
def test_xformers_plan_equals_sdpa(model, case, split_k, on_a_pretended_gpu, monkeypatch):
    """The CUDA path, with an operator on a CPU that follows xformers' contract. Nothing is copied
    but small pages, and only those of chunks: decodes follow the block tables."""
    decodes, chunks, sizes = case
    fmha = on_a_pretended_gpu
    calls = []
    model = tiny_model(model.config.family, model.config.n_kv_head, head_dim=16)
    pages, page_size, _ = sizes
    paged = case is SMALL_PAGES
    split_k_operator = fmha.triton_splitk.FwOp
    flash = fmha.flash.FwOp
    of_this_machine = ("device=", "dtype=", "requires", "operator wasn't built", "triton is not")

    def apply(operator, inputs, needs_gradient):
        mask = inputs.attn_bias
        arguments = (inputs.query, inputs.key, inputs.value)
        q, keys, values = (x.flatten(2, 3)[0].transpose(0, 1) for x in arguments)
        calls.append((operator, q.shape[1], keys.shape[1] // page_size))
        assert inputs.key.stride(3) == inputs.value.stride(3) == 0 or inputs.key.shape[3] == 1
        inputs.validate_inputs()
        reasons = operator.not_supported_reasons(inputs)  # of shapes, strides and mask
        assert not [reason for reason in reasons if not reason.startswith(of_this_machine)]
        if not paged or operator is split_k_operator:
            assert inputs.key.data_ptr() == cache.data.data_ptr()  # a view, not a copy
        if hasattr(mask, "block_tables"):
            visible = seen_by_split_k(mask, keys.shape[1])
        else:
            assert keys.shape[1] == mask.k_seqinfo.seqstart_py[-1]
            assert mask.k_seqinfo.max_seqlen >= max(mask.k_seqinfo.seqlen_py)
            visible = mask.materialize((q.shape[1], keys.shape[1])) == 0
        read = visible.any(dim=0)  # the operators do not touch what no query sees
        scores = q @ keys[:, read].transpose(1, 2) * inputs.scale_float
        scores = scores.masked_fill(~visible[:, read], float("-inf"))
        y = (scores.softmax(dim=-1) @ values[:, read].nan_to_num()).transpose(0, 1)[None]
        return y.unflatten(2, inputs.query.shape[2:4]), None

    for operator in (flash, split_k_operator):
        monkeypatch.setattr(operator, "apply", classmethod(apply))
    cache = poisoned_cache(model, *sizes, position_major=True)
    data = cache.data[0]
    layer = cache.layer(0)
    decodes, chunks = ([a_span(*span) for span in spans] for spans in (decodes, chunks))
    for span in decodes + chunks:
        slots = slot_mapping(span.pages, page_size, 0, span.end)
        data[:, :, slots] = torch.rand_like(data[:, :, slots])
    backend = XFormers(model.config, cache, split_k)
    decode_operator = split_k_operator if split_k or paged else flash
    assert [operator for operator, *_ in calls] == [decode_operator, flash]  # the probe
    del calls[:]
    n = len(decodes)
    size = padded_size(n) if decode_operator is split_k_operator else n
    num_chunk_tokens = sum(span.length for span in chunks)
    q = torch.randn(
        n + num_chunk_tokens, model.config.n_head, model.config.head_dim, dtype=torch.float64
    )
    expected = PagedSDPA(model.config, cache).plan(decodes + chunks)(q, *layer)
    close(backend.plan(decodes + chunks)(q, *layer), expected)
    assert calls == [
        (decode_operator, size, pages),
        (flash, num_chunk_tokens, 9 if paged else pages),
    ]
    close(backend.plan(decodes[:-1])(q[: n - 1], *layer), expected[: n - 1])
    close(backend.plan(chunks)(q[n:], *layer), expected[n:])


WAITS = {"item", "_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal"}


class NoWaiting(TorchDispatchMode):
    """Raises where a GPU would be waited for: where the computer looks at a number in a tensor."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.overloadpacket.__name__ in WAITS:
            raise RuntimeError(f"{operator} waits for the device")
        return operator(*args, **kwargs or {})


@pytest.mark.parametrize("case", [ONE_PAGE_EACH, SMALL_PAGES], ids=["one page each", "small"])
def test_xformers_and_sampling_do_not_wait_for_the_device(case, on_a_pretended_gpu, monkeypatch):
    model = tiny_model(head_dim=16)
    decodes, chunks, sizes = case
    for operator in (on_a_pretended_gpu.flash.FwOp, on_a_pretended_gpu.triton_splitk.FwOp):

        def attends(op, inputs, needs_gradient):
            return (inputs.query, None)

        monkeypatch.setattr(operator, "apply", classmethod(attends))
    cache = poisoned_cache(model, *sizes, position_major=True)
    backend = XFormers(model.config, cache)
    spans = [a_span(*span) for span in decodes + chunks]
    chosen = [(0, 0, 1), (1, 0, 1), (0.7, 5, 1), (2, 0, 0.5)] * 2
    params = [SamplingParams(1, t, k, p, logprobs=True) for t, k, p in chosen[: len(spans)]]
    with NoWaiting():
        tokens, _ = sample(model(FlatBatch.build(spans, backend), cache), params, range(9))
    with pytest.raises(RuntimeError, match="waits for the device"), NoWaiting():
        tokens[0].item()


def test_numbers_of_decodes_are_padded_to_few_sizes():
    assert [padded_size(n) for n in (1, 2, 3, 8, 9, 17, 33, 128, 129, 160, 161)] == [
        *(1, 2, 4, 8, 16, 24, 48, 128, 160, 160, 192)
    ]
    assert padded_sizes(6) == [1, 2, 4, 8]
    assert len(padded_sizes(128)) == 11
    for n in range(1, 257):
        assert n <= padded_size(n) <= max(2 * n, 8) and padded_size(padded_size(n)) == padded_size(
            n
        )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("paged", [True, False], ids=["pages", "slots"])
def test_no_kernel_is_left_to_compile_after_warm_up(policy, paged, on_a_pretended_gpu, monkeypatch):
    """Triton compiles split-K for the number of decodes, a bound of keys, the tables' width."""
    kernels = Counter()

    def split_k(operator, inputs, needs_gradient):
        mask = inputs.attn_bias
        width = mask.block_tables.shape[1] if hasattr(mask, "block_tables") else None
        kernels[
            inputs.query.shape[1], mask.k_seqinfo.max_seqlen if width is None else None, width
        ] += 1
        return inputs.query, None

    def flash(operator, inputs, needs_gradient):
        return inputs.query, None

    fmha = on_a_pretended_gpu
    monkeypatch.setattr(fmha.triton_splitk.FwOp, "apply", classmethod(split_k))
    monkeypatch.setattr(fmha.flash.FwOp, "apply", classmethod(flash))
    monkeypatch.setitem(attention.DEVICES, "xformers-split-k", "cpu")
    model = tiny_model(n_layer=1, head_dim=16)
    max_batch = 13
    engine = Engine(
        model,
        policy=policy,
        chunk=48,
        max_batch=max_batch,
        max_len=256,
        page_size=64 if paged else 256,
        attention="xformers-split-k",
        policy_options={"tbt_slo": 1.0} if policy == "dynamic" else {},
    )
    engine.warm_up()
    warm = set(kernels)
    assert len(warm) == len(padded_sizes(max_batch))
    prompts = [[1] * (10 + 5 * i) for i in range(2 * max_batch)]
    engine.generate(prompts, [SamplingParams(4 + i) for i in range(2 * max_batch)], progress=False)
    assert set(kernels) == warm


@pytest.mark.parametrize("page_size", [16, 96])
def test_pages_that_xformers_cannot_read_are_refused_or_go_to_torch(page_size, on_a_pretended_gpu):
    model = tiny_model(head_dim=16)
    cache = poisoned_cache(model, 20, page_size, max_len=256, position_major=True)
    with pytest.raises(ValueError, match=f"page_size={page_size}: must be .*a multiple of 64"):
        XFormers(model.config, cache)
    pretended = SimpleNamespace(is_cuda=True, dtype=cache.data.dtype, device=cache.data.device)
    cache = SimpleNamespace(**dict(vars(cache), layer=cache.layer, data=pretended))
    with pytest.warns(UserWarning, match=f"page_size={page_size}"):  # auto says why
        assert isinstance(attention.make_attention(model.config, cache), SDPA)
