"""Chunked prefill equals full prefill; a hybrid batch equals its parts; a request does not notice its company.

In all of these tests the cache holds NaN wherever nothing was written, so that reading one position too many
makes a result NaN.
"""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attention
from attention import Extent, SDPA, XFormers, follow_each_other, gather, page_rows, staircase
from conftest import alone, block_tables, poison, poisoned_cache, run, tiny_model
from engine import Engine
from kv_cache import cells
from model import GPT, FlatBatch, Span, rope_table
from sampling import SamplingParams
from scheduler import POLICIES

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}


def tokens_of(model, n, seed=0):
    """n random token ids."""
    return torch.randint(model.config.vocab_size, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def close(actual, expected, dtype=torch.float64):
    """Raise unless equal within the tolerance of the dtype. NaN equals nothing."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE[dtype])


def prefill(model, tokens, chunk, page_size=None, scattered=False, position_major=None):
    """Logits of every prompt token, (len(tokens), vocab_size), computed `chunk` tokens at a time.

    Without a `page_size` the request has one page, the only one.
    """
    if page_size is None:
        table, cache = [0], poisoned_cache(model, 1, len(tokens))
    else:
        [table] = block_tables([-(-len(tokens) // page_size)], scattered)
        cache = poisoned_cache(model, 2 * len(table), page_size, len(tokens), position_major)
    return torch.cat(
        [
            run(model, cache, [Span(table, start, tokens[start : start + chunk])], all_rows=True)
            for start in range(0, len(tokens), chunk)
        ]
    )


def in_dtype(model, dtype):
    """The model in another dtype; the shared one stays as it is."""
    other = GPT(model.config, dtype=dtype, seed=None)
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_chunk_size_equals_full_prefill(model, dtype):
    model = in_dtype(model, dtype)
    tokens = tokens_of(model, 33)
    full = prefill(model, tokens, len(tokens))
    assert full.std() > 0.5  # the logits are far enough apart for the comparison to mean something
    for chunk in range(1, len(tokens) + 1):
        close(prefill(model, tokens, chunk), full, dtype)


@pytest.mark.parametrize("position_major", [False, True], ids=["heads first", "cells first"])
@pytest.mark.parametrize("scattered", [False, True], ids=["consecutive", "scattered"])
@pytest.mark.parametrize(
    "n, page_size, chunks",
    [
        (33, 1, range(1, 34)),
        (33, 16, range(1, 34)),
        (33, 33, range(1, 34, 4)),  # max_len
        (130, 64, (9, 63, 64, 65, 128, 129, 130)),
    ],
)
def test_every_chunk_size_equals_full_prefill_in_pages(model, n, page_size, chunks, scattered, position_major):
    tokens = tokens_of(model, n)
    full = prefill(model, tokens, n)
    for chunk in chunks:
        close(prefill(model, tokens, chunk, page_size, scattered, position_major), full)


@pytest.mark.parametrize("chunk", [1, 127, 128, 129, 200, 256, 300])
def test_chunks_longer_than_a_query_block_equal_full_prefill(model, chunk, monkeypatch):
    tokens = tokens_of(model, 300)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 512)  # the whole prompt is one block
    full = prefill(model, tokens, len(tokens))
    monkeypatch.undo()
    close(prefill(model, tokens, chunk), full)


def test_rows_go_through_a_layer_in_pieces_without_a_trace():
    model = tiny_model(max_positions=2048)
    tokens = tokens_of(model, 1500)  # more than one piece on a CPU
    close(prefill(model, tokens, 1500), prefill(model, tokens, 700))


def test_hybrid_batch_equals_its_parts(model):
    # four requests in slots of any order, with holes; three decode, one prefills its second chunk
    prompts = {
        5: tokens_of(model, 9, 1),
        0: tokens_of(model, 17, 2),
        3: tokens_of(model, 1, 3),
        6: tokens_of(model, 30, 4),
    }
    done = {5: 8, 0: 16, 3: 0, 6: 11}  # tokens of each prompt that are computed before the hybrid batch

    def prepared():
        cache = poisoned_cache(model, 8, 40)
        for slot, n in done.items():
            if n:
                run(model, cache, [Span([slot], 0, prompts[slot][:n])])
        return cache

    spans = [Span([slot], done[slot], prompts[slot][done[slot] :]) for slot in (6, 5, 0, 3)]
    hybrid_cache, parts_cache = prepared(), prepared()
    together = run(model, hybrid_cache, spans)
    apart = torch.cat([run(model, parts_cache, [span]) for span in spans])
    close(together, apart)
    torch.testing.assert_close(hybrid_cache.data, parts_cache.data, rtol=0, atol=1e-10, equal_nan=True)


@pytest.mark.parametrize("position_major", [False, True], ids=["heads first", "cells first"])
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_hybrid_batch_in_scattered_pages_equals_its_parts_in_slots(model, page_size, position_major):
    lengths, done = (9, 70, 1, 30, 17, 64), (8, 69, 0, 11, 16, 3)  # three decode, two are in the middle, one begins
    prompts = [tokens_of(model, n, n) for n in lengths]
    tables = block_tables([-(-n // page_size) for n in lengths], scattered=True)
    tables[1] = sorted(tables[1])  # pages in order, but not side by side
    cache = poisoned_cache(model, 2 * sum(map(len, tables)), page_size, 70, position_major)
    spans = []
    for prompt, table, n in zip(prompts, tables, done):
        if n:
            run(model, cache, [Span(table, 0, prompt[:n])])
        spans.append(Span(table, n, prompt[n:]))
    before = cache.data.clone()
    together = run(model, cache, spans, all_rows=True)
    # the rows of the flat batch: decodes first
    order = sorted(range(len(spans)), key=lambda i: len(spans[i].tokens) > 1)
    close(together, torch.cat([prefill(model, prompts[i], lengths[i])[done[i] :] for i in order]))
    written = [i for span in spans for i in cells(span.pages, page_size, span.start, span.start + len(span.tokens))]
    before[:, :, :, written] = cache.data[:, :, :, written]
    torch.testing.assert_close(cache.data, before, rtol=0, atol=0, equal_nan=True)  # nothing else was touched


def test_logits_come_only_for_the_spans_that_want_them(model):
    spans = [
        Span([0], 0, tokens_of(model, 5, 1)),
        Span([2], 0, tokens_of(model, 1, 2), False),
        Span([1], 0, tokens_of(model, 3, 3)),
    ]
    wanted = run(model, poisoned_cache(model, 3, 8), spans)
    everything = run(model, poisoned_cache(model, 3, 8), [span._replace(wants_logits=True) for span in spans])
    close(wanted, everything[[0, 2]])
    nothing = run(model, poisoned_cache(model, 3, 8), [span._replace(wants_logits=False) for span in spans])
    assert nothing.shape == (0, model.config.vocab_size)


def test_decodes_come_first_in_a_flat_batch():
    backend = SimpleNamespace(device=torch.device("cpu"), page_size=16, plan=lambda extents: extents)
    spans = [Span([3], 4, [7, 8]), Span([1], 9, [5]), Span([0], 0, [1, 2, 3], False), Span([2], 6, [4])]
    batch = FlatBatch.build(spans, backend)
    assert batch.attend == [Extent([1], 9, 1), Extent([2], 6, 1), Extent([3], 4, 2), Extent([0], 0, 3)]
    assert batch.tokens.tolist() == [5, 4, 7, 8, 1, 2, 3]
    assert batch.positions.tolist() == [9, 6, 4, 5, 0, 1, 2]
    assert batch.cells.tolist() == [25, 38, 52, 53, 0, 1, 2]
    assert batch.logit_rows.tolist() == [3, 0, 1]  # in the order of the spans that want logits


def test_a_slot_can_be_used_again(model):
    cache = poisoned_cache(model, 2, 40)
    run(model, cache, [Span([1], 0, tokens_of(model, 40, 1))])  # a longer request was here before
    tokens = tokens_of(model, 12, 2)
    reused = [run(model, cache, [Span([1], start, tokens[start : start + 5])]) for start in (0, 5, 10)]
    close(reused[-1], prefill(model, tokens, 12)[-1:])


@pytest.mark.parametrize("page_size, pages", [(64, 3), (16, 5), (4, 17), (1, 70)])
@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_tokens_are_the_same_under_every_policy_and_alone(model, policy, page_size, pages, monkeypatch):
    prompts = [tokens_of(model, n, n) for n in (1, 30, 7, 2, 45, 16, 8)]
    params = [SamplingParams(max_new_tokens=n) for n in (9, 1, 12, 5, 3, 8, 2)]
    engine = Engine(model, policy, chunk=8, max_batch=3, max_len=64, page_size=page_size, pages=pages)
    forward = GPT.forward

    def in_a_poisoned_cache(self, batch, cache):
        poison(engine)
        return forward(self, batch, cache)

    with monkeypatch.context() as patch:
        patch.setattr(GPT, "forward", in_a_poisoned_cache)
        done = engine.generate(prompts, params)
    assert [c.tokens for c in done] == [alone(model, *request) for request in zip(prompts, params)]


# -----------------------------------------------------------------------------------------------------
# pages


@given(st.data(), st.integers(1, 9))
@settings(deadline=None)
def test_cells_are_the_formula_token_by_token(data, page_size):
    pages = data.draw(st.lists(st.integers(0, 50), min_size=1, max_size=9, unique=True))
    start = data.draw(st.integers(0, len(pages) * page_size))
    end = data.draw(st.integers(start, len(pages) * page_size))
    expected = [pages[t // page_size] * page_size + t % page_size for t in range(start, end)]
    assert cells(pages, page_size, start, end) == expected
    assert cells(pages + [99], page_size, start, end) == expected  # pages to grow into change nothing


def test_pages_that_follow_each_other():
    for pages in ([0], [7], [3, 4], [5, 6, 7, 8]):
        assert follow_each_other(pages)
    for pages in ([1, 0], [3, 5], [3, 4, 6], [4, 3, 5], [2, 3, 4, 4]):
        assert not follow_each_other(pages)


def test_an_extent_knows_which_pages_hold_its_keys():
    for page_size in (1, 4, 5):
        for start in range(12):
            for length in range(1, 12 - start):
                used = Extent(list(range(20, 40)), start, length).used_pages(page_size)
                assert used == [20 + page for page in sorted({t // page_size for t in range(start + length)})]


@pytest.mark.parametrize("position_major", [False, True], ids=["heads first", "cells first"])
@pytest.mark.parametrize("n_kv_head", [1, 2, 4])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_gather_copies_exactly_these_pages(n_kv_head, page_size, position_major):
    cache = poisoned_cache(tiny_model(n_kv_head=n_kv_head), 7, page_size, position_major=position_major)
    cache.data.copy_(torch.arange(cache.data.numel()).view(cache.data.shape))
    for pages in ([3], [6, 0], [5, 2, 3, 0], [0, 1, 2, 3, 4, 5, 6], [4, 4]):
        rows = page_rows(pages, cache)
        assert rows.shape[-1] == len(pages)
        for x in cache.layer(1):
            expected = torch.cat([x[:, page * page_size : (page + 1) * page_size] for page in pages], dim=1)
            assert torch.equal(gather(x, rows.flatten(), page_size), expected)
            if len(pages) > 1:  # a plan makes the rows of all its chunks at once
                part = gather(x, rows[..., 1:].flatten(), page_size)
                assert torch.equal(part, expected[:, page_size:])


def test_pages_that_follow_each_other_are_read_in_place(monkeypatch):
    model = tiny_model(n_kv_head=2)
    cache, copied = poisoned_cache(model, 8, 4, max_len=32), []
    copy = gather
    monkeypatch.setattr(attention, "gather", lambda x, rows, size: copied.append(len(rows)) or copy(x, rows, size))
    for table, copies in (([2, 3, 4], 0), ([7], 0), ([5, 1, 6], 2 * model.config.n_layer)):
        del copied[:]
        run(model, cache, [Span(table, 0, [1] * (4 * len(table)))])
        assert len(copied) == copies
        run(model, cache, [Span(table + [0], 4 * len(table) - 1, [1])])  # a page to grow into is not read
        assert len(copied) == 2 * copies


# -----------------------------------------------------------------------------------------------------
# the masks


def figure_6(start, length):
    """SARATHI's Figure 6, position by position: query start + i sees key j if j <= start + i."""
    return torch.tensor([[j <= start + i for j in range(start + length)] for i in range(length)])


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("start, length", [(0, 4), (4, 4), (8, 4), (0, 1), (5, 2), (3, 7)])
def test_sdpa_mask_is_figure_6(start, length, group):
    bias = staircase(8, 12, group, torch.float32)
    mask = bias[: length * group, 12 - start : 12 + length]  # the window that the docstring promises
    expected = figure_6(start, length).repeat_interleave(group, dim=0)
    assert torch.equal(mask == 0, expected)
    assert torch.equal(mask == float("-inf"), ~expected)


def test_the_mask_that_sdpa_uses_is_figure_6():
    model = tiny_model(n_kv_head=2)
    backend = SDPA(model.config, poisoned_cache(model, 1, 32))
    for start in range(0, 24):
        for length in range(2, 8):
            assert torch.equal(backend.mask(start, length) == 0, figure_6(start, length).repeat_interleave(2, dim=0))


@pytest.mark.parametrize(
    "extents",
    [
        [Extent([0], 0, 4)],
        [Extent([0], 4, 4)],
        [Extent([0], 8, 4)],
        [Extent([3], 6, 1), Extent([0], 0, 1), Extent([2], 9, 1)],
        [Extent([4], 5, 2), Extent([1], 0, 12), Extent([2], 3, 9)],
    ],
)
def test_xformers_mask_is_figure_6_in_every_slot(extents):
    pytest.importorskip("xformers")
    expected, row = torch.zeros(sum(e.length for e in extents), 60, dtype=torch.bool), 0
    for (slot,), start, length in extents:  # pages of 12 tokens
        expected[row : row + length, slot * 12 : slot * 12 + start + length] = figure_6(start, length)
        row += length
    mask = attention.gappy_bias(extents, [e.pages[0] for e in extents], pages=5, page_size=12)
    assert torch.equal(mask.materialize(expected.shape) == 0, expected)
    assert mask.k_seqinfo.max_seqlen == 12  # the same in every iteration, or Triton would compile a kernel in each


def seen_by_split_k(mask, num_cells):
    """What Triton split-K reads of a paged mask: decode i sees the first seqlen[i] cells of its pages, (n, num_cells).

    Not `materialize`: it goes through the pages behind a request's end as well, and the padding of a block table would
    hide the page that it names.
    """
    seen = torch.zeros(len(mask.block_tables), num_cells, dtype=torch.bool)
    for i, (table, n) in enumerate(zip(mask.block_tables.tolist(), mask.k_seqinfo.seqlen.tolist())):
        for t in range(n):
            seen[i, table[t // mask.page_size] * mask.page_size + t % mask.page_size] = True
    return seen


@pytest.mark.parametrize(
    "extents",
    [
        [Extent([4], 0, 1)],
        [Extent([0], 0, 1)],
        [Extent([2, 0], 7, 1), Extent([3, 4], 4, 1)],
        [Extent([0, 5, 2], 8, 1), Extent([1], 3, 1), Extent([4, 3], 5, 1)],
        [Extent([5, 1, 2], 2, 1)],  # two pages to grow into
    ],
)
def test_paged_mask_is_figure_6_in_every_block_table(extents):
    pytest.importorskip("xformers")
    expected = torch.zeros(len(extents), 24, dtype=torch.bool)
    for row, (pages, start, length) in enumerate(extents):  # pages of 4 tokens
        expected[row, cells(pages, 4, 0, start + 1)] = figure_6(start, length)[0]
    mask = attention.paged_bias(extents, page_size=4, max_len=12)
    assert torch.equal(seen_by_split_k(mask, 24), expected)
    assert mask.block_tables.dtype == torch.int32 and mask.block_tables.is_contiguous()
    assert mask.block_tables.shape == (len(extents), 3)  # the same in every iteration, or Triton would compile again
    assert mask.k_seqinfo.padding == 12 and mask.q_seqinfo.seqstart.tolist() == list(range(len(extents) + 1))
    if not any(0 in extent.pages for extent in extents):  # where it can be read, xformers' own reading is the same
        own = mask.materialize((len(extents), 12 * len(extents))) == 0
        assert torch.equal(own, expected[:, : own.shape[1]]) and not expected[:, own.shape[1] :].any()


@pytest.fixture
def on_a_pretended_gpu(monkeypatch):
    """XFormers as it is made on CUDA, with xformers' operators still to be replaced."""
    fmha = pytest.importorskip("xformers.ops.fmha")
    monkeypatch.setattr(fmha.flash, "FLASH_VERSION", "2.8.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(attention, "SIXTEEN_BITS", (torch.float64,))
    return fmha


@pytest.mark.parametrize("split_k", [True, False])
def test_paged_xformers_plan_equals_sdpa(model, split_k, on_a_pretended_gpu, monkeypatch):
    """The CUDA path with pages of 64: decodes follow their block tables, chunks read a copy of their pages."""
    fmha = on_a_pretended_gpu
    model = tiny_model(model.config.family, model.config.n_kv_head, head_dim=16)
    calls = []

    def apply(operator, inputs, needs_gradient):
        mask = inputs.attn_bias
        q, keys, values = (x.flatten(2, 3)[0].transpose(0, 1) for x in (inputs.query, inputs.key, inputs.value))
        calls.append((operator, q.shape[1], keys.shape[1] // 64))
        assert inputs.key.stride(3) == inputs.value.stride(3) == 0 or inputs.key.shape[3] == 1
        inputs.validate_inputs()
        of_this_machine = ("device=", "dtype=", "requires", "operator wasn't built", "triton is not available")
        wrong = operator.not_supported_reasons(inputs)  # xformers' own opinion of shapes, strides and mask
        assert not [reason for reason in wrong if not reason.startswith(of_this_machine)]
        if operator is fmha.triton_splitk.FwOp:
            assert inputs.key.data_ptr() == cache.data[layer, 0].data_ptr()  # a view, not a copy
            seen = seen_by_split_k(mask, keys.shape[1])
        else:
            assert keys.shape[1] == mask.k_seqinfo.seqstart_py[-1]
            assert mask.k_seqinfo.max_seqlen >= max(mask.k_seqinfo.seqlen_py)
            seen = mask.materialize((q.shape[1], keys.shape[1])) == 0
        read = seen.any(dim=0)  # the operators do not touch what no query sees
        scores = q @ keys[:, read].transpose(1, 2) * inputs.scale_float
        scores = scores.masked_fill(~seen[:, read], float("-inf"))
        y = (scores.softmax(dim=-1) @ values[:, read]).transpose(0, 1)[None]
        return y.unflatten(2, inputs.query.shape[2:4]), None

    for operator in (fmha.flash.FwOp, fmha.triton_splitk.FwOp):
        monkeypatch.setattr(operator, "apply", classmethod(apply))
    extents = [
        Extent([11, 0, 7, 3], 200, 1),
        Extent([5], 0, 1),
        Extent([19, 18], 127, 1),
        Extent([4, 6, 8, 17], 128, 1),  # a page to grow into
        Extent([9, 2], 60, 9),
        Extent([1, 20], 0, 6),
        Extent([16, 13, 14, 15], 190, 66),
        Extent([12, 10], 64, 2),
    ]
    cache = poisoned_cache(model, 21, 64, max_len=256, position_major=True)
    layer = 0
    for pages, start, length in extents:
        for data in cache.layer(layer):
            written = cells(pages, 64, 0, start + length)
            data[:, written] = torch.rand(model.config.n_kv_head, len(written), 16, dtype=torch.float64)
    backend = XFormers(model.config, cache, split_k)
    assert [operator for operator, *_ in calls] == [fmha.triton_splitk.FwOp, fmha.flash.FwOp]  # the probe
    del calls[:]
    q = torch.randn(4 + 9 + 6 + 66 + 2, model.config.n_head, model.config.head_dim, dtype=torch.float64)
    expected = SDPA(model.config, cache).plan(extents)(q, *cache.layer(layer))
    close(backend.plan(extents)(q, *cache.layer(layer)), expected)
    assert calls == [(fmha.triton_splitk.FwOp, 4, 21), (fmha.flash.FwOp, 83, 9)]  # all pages; those of the chunks
    close(backend.plan(extents[:3])(q[:3], *cache.layer(layer)), expected[:3])
    close(backend.plan(extents[4:])(q[4:], *cache.layer(layer)), expected[4:])


def test_xformers_refuses_pages_that_its_kernel_cannot_read(on_a_pretended_gpu):
    model = tiny_model(head_dim=16)
    for page_size in (16, 96):
        with pytest.raises(ValueError, match=f"page_size={page_size}: must be max_len or a multiple of 64"):
            XFormers(model.config, poisoned_cache(model, 20, page_size, max_len=256, position_major=True))


def test_auto_says_why_small_pages_go_to_torch(on_a_pretended_gpu):
    model = tiny_model(head_dim=16)
    cache = poisoned_cache(model, 20, 16, max_len=256, position_major=True)
    pretended = SimpleNamespace(is_cuda=True, dtype=cache.data.dtype, device=cache.data.device)
    attributes = dict(vars(cache), layer=cache.layer, data=pretended)
    with pytest.warns(UserWarning, match="page_size=16"):
        backend = attention.make_attention(model.config, SimpleNamespace(**attributes))
    assert isinstance(backend, SDPA)


@pytest.mark.parametrize("split_k", [True, False])
def test_xformers_plan_equals_sdpa(model, split_k, on_a_pretended_gpu, monkeypatch):
    """The CUDA path, with xformers' operators replaced by one that follows their contract on a CPU."""
    fmha = on_a_pretended_gpu
    model = tiny_model(model.config.family, model.config.n_kv_head, head_dim=16)
    calls = []

    def apply(operator, inputs, needs_gradient):
        calls.append((operator, inputs.query.shape[1]))
        assert inputs.key.stride(3) == inputs.value.stride(3) == 0 or inputs.key.shape[3] == 1
        assert inputs.key.data_ptr() == cache.data[layer, 0].data_ptr()  # a view, not a copy
        q, keys, values = (x.flatten(2, 3)[0].transpose(0, 1) for x in (inputs.query, inputs.key, inputs.value))
        mask = inputs.attn_bias.materialize((q.shape[1], keys.shape[1]), dtype=q.dtype)
        seen = (mask == 0).any(dim=0)  # the operators do not touch what no query sees
        scores = q @ keys[:, seen].transpose(1, 2) * inputs.scale_float + mask[:, seen]
        y = (scores.softmax(dim=-1) @ values[:, seen]).transpose(0, 1)[None]
        return y.unflatten(2, inputs.query.shape[2:4]), None

    for operator in (fmha.flash.FwOp, fmha.triton_splitk.FwOp):
        monkeypatch.setattr(operator, "apply", classmethod(apply))
    cache = poisoned_cache(model, 5, 24, position_major=True)
    layer, extents = 0, [Extent([4], 20, 1), Extent([0], 0, 1), Extent([2], 7, 1), Extent([1], 5, 9), Extent([3], 0, 6)]
    for (slot,), start, length in extents:
        for data in cache.layer(layer):
            data[:, 24 * slot :][:, : start + length] = torch.rand(
                model.config.n_kv_head, start + length, 16, dtype=torch.float64
            )
    backend = XFormers(model.config, cache, split_k)
    q = torch.randn(3 + 9 + 6, model.config.n_head, model.config.head_dim, dtype=torch.float64)
    expected = SDPA(model.config, cache).plan(extents)(q, *cache.layer(layer))
    del calls[:]  # but for the probe
    close(backend.plan(extents)(q, *cache.layer(layer)), expected)
    assert calls == [(fmha.triton_splitk.FwOp if split_k else fmha.flash.FwOp, 3), (fmha.flash.FwOp, 15)]


def test_both_layouts_of_the_cache_hold_the_same(model):
    spans = [Span([2], 0, tokens_of(model, 9, 1)), Span([0], 0, tokens_of(model, 1, 2))]
    caches = [poisoned_cache(model, 3, 12, position_major=major) for major in (False, True)]
    close(run(model, caches[0], spans), run(model, caches[1], spans))
    torch.testing.assert_close(caches[0].data, caches[1].data, rtol=0, atol=0, equal_nan=True)
    assert caches[0].data.stride() != caches[1].data.stride() or model.config.n_kv_head == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("chunk", [1, 7, 129, 300])
def test_sixteen_bits_lose_no_more_than_rounding(model, dtype, chunk):
    rounded = in_dtype(in_dtype(model, dtype), torch.float64)
    for p in rounded.parameters():
        p.copy_(p / 10 if p.ndim > 1 else p)  # the softmax of a small model is so sharp that rounding would show
    tokens = tokens_of(model, 300)
    expected = prefill(rounded, tokens, 300)
    got = prefill(in_dtype(rounded, dtype), tokens, chunk).double()
    assert (got - expected).abs().max() < 0.05 * expected.abs().max()
    assert rope_table(model.config, "cpu", dtype).dtype == torch.float32
    if model.rope is not None:
        assert in_dtype(model, dtype).rope.dtype == rounded.to(dtype).rope.dtype == torch.float32


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "backend, dtype, tolerance, page_size, pages",
    [
        ("sdpa", torch.float32, 1e-3, 720, 3),
        ("sdpa", torch.float32, 1e-3, 16, 60),
        ("sdpa", torch.bfloat16, 0.1, 720, 3),
        ("sdpa", torch.bfloat16, 0.1, 64, 15),
        ("xformers", torch.bfloat16, 0.1, 720, 3),
        ("xformers", torch.float16, 0.02, 720, 3),
        ("xformers-split-k", torch.bfloat16, 0.1, 720, 3),
        ("xformers", torch.bfloat16, 0.1, 64, 15),
        ("xformers", torch.float16, 0.02, 64, 15),
        ("xformers", torch.float16, 0.02, 128, 7),
        ("auto", torch.bfloat16, 0.1, 64, 15),
    ],
    ids=str,
)
@pytest.mark.parametrize("n_kv_head", [4, 2, 1])
def test_cuda_equals_cpu(n_kv_head, backend, dtype, tolerance, page_size, pages):
    if backend != "sdpa":
        pytest.importorskip("xformers")
    torch.backends.cuda.matmul.allow_tf32 = False
    reference = tiny_model(n_kv_head=n_kv_head, head_dim=64, max_positions=1024)
    for p in reference.parameters():
        p.copy_((p / 3 if p.ndim > 1 else p).to(dtype))  # attention still decides on the outcome
    model = GPT(reference.config, "cuda", dtype, seed=None)
    model.load_state_dict(reference.state_dict())
    prompts = [tokens_of(reference, n, n) for n in (1, 30, 7, 150, 700)]
    for policy in POLICIES:
        engine = Engine(
            model, policy, chunk=48, max_batch=3, max_len=720, page_size=page_size, pages=pages, attention=backend
        )
        engine.cache.data.fill_(float("nan"))
        for completion in engine.generate(prompts, SamplingParams(max_new_tokens=6, logprobs=True), progress=False):
            tokens = completion.prompt + completion.tokens
            logits = prefill(reference, tokens, len(tokens)).log_softmax(-1)[len(completion.prompt) - 1 : -1]
            expected = logits.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
            got = torch.tensor(completion.logprobs, dtype=torch.float64)
            torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)
