"""Chunked equals full prefill; a hybrid batch equals its parts; no request notices its company.

The cache holds NaN wherever nothing was written: one position too many makes a result NaN.
"""

import copy
import itertools
import random
import shutil
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import attention
from attention import SDPA, gather, page_rows, staircase
from engine import Engine
from kernels import xformers
from kernels.matmul import Matmul
from kernels.xformers import XFormers
from kv_cache import Span, slot_mapping
from model import GPT, FlatBatch, rope_table
from policies import POLICIES
from sampling import SamplingParams, sample
from tests.helpers import alone, block_tables, poison, poisoned_cache, run, tiny_model

by_layout = pytest.mark.parametrize("position_major", [False, True], ids=["heads", "slots"])


@pytest.fixture(autouse=True, params=["sdpa", "matmul"])
def backend(request, monkeypatch):
    """All of this holds for both backends of a CPU, also the one that is not for float64."""
    if request.param == "matmul":
        if any(word in request.node.name for word in ("xformers", "cuda")):
            pytest.skip("not of these backends")
        monkeypatch.setattr(attention, "BY_MATMUL", (torch.float64, torch.float32, torch.bfloat16))
        monkeypatch.setattr("kernels.matmul.KEY_BLOCK", 16)


def tokens_of(model, n, seed=0):
    """n random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (n,), generator=generator).tolist()


def close(actual, expected, atol=1e-10, **options):
    """Raise unless equal. NaN equals nothing, or itself with equal_nan=True."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol, **options)


def a_span(pages, start, length):
    """A Span of which only the place matters."""
    return Span(pages, start, [0] * length)


def figure_6(start, length):
    """SARATHI's Figure 6, position by position: query start + i sees key j if j <= start + i."""
    return torch.tensor([[j <= start + i for j in range(start + length)] for i in range(length)])


def in_dtype(model, dtype, device="cpu"):
    """A copy of the model in another dtype; the shared one stays as it is."""
    other = GPT(model.config, device, dtype, seed=None)
    other.load_state_dict(model.state_dict())
    return other


def prefill(model, tokens, chunk=None, page_size=None, scattered=False, position_major=None):
    """Logits of every prompt token, (len(tokens), vocab_size), `chunk` tokens at a time or all at
    once; without a `page_size` in one page."""
    n, chunk = len(tokens), chunk or len(tokens)
    page_size = page_size or n
    [table] = block_tables([-(-n // page_size)], scattered)
    cache = poisoned_cache(model, 2 * len(table), page_size, n, position_major)
    spans = [Span(table, start, tokens[start : start + chunk]) for start in range(0, n, chunk)]
    return torch.cat([run(model, cache, [span], all_rows=True) for span in spans])


def by_definition(model, tokens):
    """Logits of every token, from the papers' formulas: no cache, no chunks, no folded heads."""
    c, n = model.config, len(tokens)
    x = model.token_embedding.weight[tokens]
    if c.family == "gpt2":
        x = x + model.position_embedding.weight[:n]
    frequency = c.rope_theta ** -(torch.arange(0, c.head_dim, 2, dtype=x.dtype) / c.head_dim)
    angle = torch.arange(n)[:, None] * frequency
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]  # (n, 1, head_dim / 2)
    for block in model.blocks:
        qkv = block.preproj(block.attn_norm(x)).unflatten(1, (-1, c.head_dim))
        q, k, v = qkv.split([c.n_head, c.n_kv_head, c.n_kv_head], dim=1)
        if c.qk_norm:
            q, k = block.q_norm(q), block.k_norm(k)
        if c.family == "llama":  # RoPE turns pairs of dimensions, read as complex numbers
            turned = [torch.complex(*y.chunk(2, dim=-1)) * turn for y in (q, k)]
            q, k = (torch.cat([y.real, y.imag], dim=-1) for y in turned)
        k, v = (y.repeat_interleave(c.n_head // c.n_kv_head, dim=1) for y in (k, v))
        scores = torch.einsum("ihd, jhd -> hij", q, k) / c.head_dim**0.5
        scores = scores.masked_fill(~figure_6(0, n), float("-inf"))
        x = block.finish(x, torch.einsum("hij, jhd -> ihd", scores.softmax(dim=-1), v))
    return model.head(model.final_norm(x))


# chunks, batches, policies


@pytest.mark.parametrize("dtype, atol", [(torch.float64, 1e-10), (torch.float32, 1e-4)], ids=str)
def test_every_chunk_size_equals_full_prefill(model, dtype, atol):
    model = in_dtype(model, dtype)
    tokens = tokens_of(model, 33)
    full = prefill(model, tokens)
    assert full.std() > 0.5  # the logits are far enough apart for the comparison to mean something
    close(full, by_definition(model, tokens), atol)
    for chunk in range(1, len(tokens) + 1):
        close(prefill(model, tokens, chunk), full, atol)


@by_layout
@pytest.mark.parametrize("scattered", [False, True], ids=["consecutive", "scattered"])
@pytest.mark.parametrize("n, page_size", [(33, 1), (33, 16), (33, 33), (130, 64)])
def test_chunks_in_pages_equal_full_prefill(model, n, page_size, scattered, position_major):
    tokens = tokens_of(model, n)
    full = prefill(model, tokens)
    for chunk in range(1, 34) if n == 33 else (9, 63, 64, 65, 128, 129, 130):
        close(prefill(model, tokens, chunk, page_size, scattered, position_major), full)


def test_chunks_longer_than_a_query_block_equal_full_prefill(model, monkeypatch):
    tokens = tokens_of(model, 300)
    with monkeypatch.context() as patch:
        patch.setattr(attention, "QUERY_BLOCK", 512)  # the whole prompt is one block
        full = prefill(model, tokens)
    for chunk in (1, 127, 128, 129, 200, 256, 300):
        close(prefill(model, tokens, chunk), full)


def test_rows_go_through_a_layer_in_pieces_without_a_trace():
    model = tiny_model(max_positions=2048)
    tokens = tokens_of(model, 1500)  # more than one piece on a CPU
    close(prefill(model, tokens), prefill(model, tokens, 700))


@pytest.mark.parametrize("page_size", [1, 4, 16, 64, 70])
def test_hybrid_batch_in_scattered_pages_equals_its_parts(model, page_size):
    # three decode, two are in the middle, one begins
    lengths, done = (9, 70, 1, 30, 17, 64), (8, 69, 0, 11, 16, 3)
    prompts = [tokens_of(model, n, n) for n in lengths]
    tables = block_tables([-(-n // page_size) for n in lengths], scattered=True)
    tables[1] = sorted(tables[1])  # pages in order, but not side by side
    spans = [Span(table, n, prompt[n:]) for prompt, table, n in zip(prompts, tables, done)]
    ends = [-(-s.end // page_size) * page_size for s in spans]  # of the last pages
    own = [i for s, end in zip(spans, ends) for i in slot_mapping(s.pages, page_size, s.start, end)]
    expected = [prefill(model, prompt)[n:] for prompt, n in zip(prompts, done)]
    rows = sorted(range(len(spans)), key=lambda i: spans[i].length > 1)  # decodes first
    caches = []
    for position_major in (False, True):
        cache = poisoned_cache(model, 2 * sum(map(len, tables)), page_size, 70, position_major)
        for prompt, table, n in zip(prompts, tables, done):
            if n:
                run(model, cache, [Span(table, 0, prompt[:n])])
        before, parts = cache.data.clone(), copy.deepcopy(cache)
        close(run(model, cache, spans, all_rows=True), torch.cat([expected[i] for i in rows]))
        for span, logits in zip(spans, expected):
            close(run(model, parts, [span]), logits[-1:])
        close(cache.data, parts.data, equal_nan=True)
        before[:, :, :, own] = cache.data[:, :, :, own]
        close(cache.data, before, atol=0, equal_nan=True)  # nothing else was touched
        caches.append(cache)
    close(caches[0].data, caches[1].data, equal_nan=True)
    assert caches[0].data.stride() != caches[1].data.stride() or model.config.n_kv_head == 1


def test_decodes_come_first_in_a_flat_batch_and_logits_only_for_the_spans_that_want_them():
    backend = SimpleNamespace(device=torch.device("cpu"), page_size=16, plan=lambda spans: spans)
    first, last = Span([3], 4, [7, 8]), Span([0], 0, [1, 2, 3], False)
    decodes = [Span([1], 9, [5]), Span([2], 6, [4])]
    batch = FlatBatch.build([first, decodes[0], last, decodes[1]], backend)
    assert batch.attend == [*decodes, first, last]
    assert batch.tokens.tolist() == [5, 4, 7, 8, 1, 2, 3]
    assert batch.positions.tolist() == [9, 6, 4, 5, 0, 1, 2]
    assert batch.slot_mapping.tolist() == [25, 38, 52, 53, 0, 1, 2]
    assert batch.logit_rows.tolist() == [3, 0, 1]  # in the order of the spans that want logits


@pytest.fixture(scope="module")
def requests(model):
    """(prompt, params, what it must yield) of some requests."""
    sizes = [(1, 9), (30, 1), (7, 12), (2, 5), (45, 3), (16, 8), (8, 2)]  # prompt, output
    asked = [(tokens_of(model, n, n), SamplingParams(max_new_tokens=out)) for n, out in sizes]
    return [(prompt, params, alone(model, prompt, params)) for prompt, params in asked]


@pytest.mark.parametrize("page_size, pages", [(64, 3), (16, 5), (4, 17), (1, 70)])
@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_tokens_are_the_same_under_every_policy_and_alone(
    model, requests, policy, page_size, pages, monkeypatch
):
    sizes = dict(chunk=8, max_batch=3, max_len=64, page_size=page_size, pages=pages)
    engine, forward = Engine(model, policy=policy, **sizes), GPT.forward
    monkeypatch.setattr(GPT, "forward", lambda *args: poison(engine) or forward(*args))
    prompts, params, expected = zip(*requests)
    done = engine.generate(prompts, params, progress=False)
    assert [c.tokens for c in done] == list(expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_lose_no_more_than_rounding(model, dtype):
    rounded = in_dtype(in_dtype(model, dtype), torch.float64)
    for p in rounded.parameters():  # the softmax of a small model is so sharp that rounding shows
        p.copy_(p / 10 if p.ndim > 1 else p)
    tokens, small = tokens_of(model, 300), in_dtype(rounded, dtype)
    expected = prefill(rounded, tokens)
    for chunk in (1, 7, 129, 300):
        got = prefill(small, tokens, chunk).double()
        assert (got - expected).abs().max() < 0.05 * expected.abs().max()
    assert rope_table(model.config, "cpu", dtype).dtype == torch.float32
    if model.rope is not None:
        assert small.rope.dtype == rounded.to(dtype).rope.dtype == torch.float32


def test_compile_takes_both_halves_of_every_layer(monkeypatch):
    model, compiled = tiny_model(), []
    monkeypatch.setattr(torch, "compile", lambda f, dynamic: compiled.append(f) or f)
    model.compile()
    assert [f.__name__ for f in compiled] == ["project", "finish"] * model.config.n_layer


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_model_gives_the_same_logits():
    model = tiny_model(dtype=torch.float32)
    compiled = in_dtype(model, torch.float32)
    compiled.compile()
    for tokens in ([1, 2, 3, 4, 5], [6]):
        close(prefill(compiled, tokens), prefill(model, tokens), 1e-4)


# pages


@given(st.data(), st.integers(1, 9))
@settings(deadline=None)
def test_slots_and_pages_are_the_formula_token_by_token(data, page_size):
    pages = data.draw(st.lists(st.integers(0, 50), min_size=1, max_size=9, unique=True))
    start = data.draw(st.integers(0, len(pages) * page_size))
    end = data.draw(st.integers(start, len(pages) * page_size))
    expected = [pages[t // page_size] * page_size + t % page_size for t in range(start, end)]
    assert slot_mapping(pages, page_size, start, end) == expected
    pages += [99]  # to grow into
    assert slot_mapping(pages, page_size, start, end) == expected
    span = Span(pages, start, [0] * (end - start))
    assert (span.length, span.end) == (len(expected), end)
    used = [page for i, page in enumerate(pages) if i * page_size < end]
    assert span.used_pages(page_size) == used


@by_layout
@pytest.mark.parametrize("n_kv_head", [1, 2, 4])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_gather_copies_exactly_these_pages(n_kv_head, page_size, position_major):
    model = tiny_model(n_kv_head=n_kv_head)
    cache = poisoned_cache(model, 7, page_size, position_major=position_major)
    cache.data.copy_(torch.arange(cache.data.numel()).view(cache.data.shape))
    for pages in ([3], [6, 0], [5, 2, 3, 0], [0, 1, 2, 3, 4, 5, 6], [4, 4]):
        rows = page_rows(pages, cache)
        assert rows.shape[-1] == len(pages)
        for x in cache.layer(1):
            expected = torch.cat([x.split(page_size, dim=1)[page] for page in pages], dim=1)
            assert torch.equal(gather(x, rows.flatten(), page_size), expected)
            if len(pages) > 1:  # a plan makes the rows of all its chunks at once
                part = gather(x, rows[..., 1:].flatten(), page_size)
                assert torch.equal(part, expected[:, page_size:])


def test_pages_that_follow_each_other_are_read_in_place(monkeypatch):
    model, copied = tiny_model(n_kv_head=2), []
    cache = poisoned_cache(model, 8, 4, max_len=32)
    counted = lambda x, rows, size: copied.append(len(rows)) or gather(x, rows, size)
    monkeypatch.setattr(attention, "gather", counted)
    in_pieces = [[5, 1, 6], [1, 0], [3, 5], [3, 4, 6], [4, 3, 5]]
    tables = [(table, 0) for table in ([2, 3, 4], [7], [0], [3, 4, 5, 6])]
    for table, copies in [*tables, *((table, 2 * model.config.n_layer) for table in in_pieces)]:
        del copied[:]
        run(model, cache, [Span(table, 0, [1] * (4 * len(table)))])
        assert len(copied) == copies
        run(model, cache, [Span(table + [0], 4 * len(table) - 1, [1])])  # page 0 is not read
        assert len(copied) == 2 * copies


# the masks


@pytest.mark.parametrize("group", [1, 2, 4])
def test_sdpa_mask_is_figure_6(group):
    model = tiny_model(n_kv_head=4 // group)
    backend = SDPA(model.config, poisoned_cache(model, 1, 32))
    assert torch.equal(backend.bias, staircase(32, 32, group, torch.float64))
    beyond = Matmul(model.config, poisoned_cache(model, 1, 32))
    for start in range(24):
        for length in range(1, 8):
            window = backend.bias[: length * group, 32 - start : 32 + length]  # as promised
            expected = figure_6(start, length).repeat_interleave(group, dim=0)
            assert torch.equal(window == 0, expected)
            assert torch.equal(window == float("-inf"), ~expected)
            mask = backend.mask(start, length, start + length)
            assert mask is None if length == 1 else torch.equal(mask, window)
            wider = beyond.mask(start, length, start + length + 5)  # from the first own key on
            assert torch.equal(wider[:, :length], window[:, start:])
            assert wider.shape[1] == length + 5 and (wider[:, length:] == float("-inf")).all()


@pytest.mark.parametrize("times", [1, 3], ids=["mostly-read", "hardly-read"])
@pytest.mark.parametrize("scattered", [False, True], ids=["in-order", "scattered"])
@pytest.mark.parametrize("page_size, longest", [(1, 9), (4, 30), (16, 40), (16, 16), (40, 40)])
@pytest.mark.parametrize("n_kv_head", [4, 2])
def test_decodes_that_share_pages_equal_each_alone(
    n_kv_head, page_size, longest, scattered, times, monkeypatch
):
    """So many decodes each read the same full pages first, and then their own. NaN lies wherever
    nobody may read, and big numbers behind the tokens of pages that were begun before."""
    monkeypatch.setattr("kernels.matmul.PAGE_BLOCK", 4)
    model, rng = tiny_model(n_kv_head=n_kv_head), random.Random(1)
    for readers in ((1,) * 9, (2,), (3, 3), (5,), (5, 1, 2, 3, 1, 1), (1,)):
        shared = [rng.randint(0, (longest - 5) // page_size) * (n > 1) for n in readers]
        ends = [(i, rng.randint(shared[i] * page_size + 1, longest)) for i in whose(readers)]
        ends += [(0, min(longest, shared[0] * page_size + 3))]  # of a chunk
        own = [-(-end // page_size) - shared[i] for i, end in ends]
        pages = sum(shared) + sum(own)
        order = range(pages + 1)
        if scattered:
            order = rng.sample(order, pages + 1)
        tables = [[order[page] for page in its] for its in block_tables([*shared, *own], False)]
        cache = poisoned_cache(model, times * pages + 1, page_size, longest)
        spans, k, v = [], *cache.layer(0)
        for (i, end), its in zip(ends, tables[len(shared) :]):
            spans.append(a_span(tables[i] + its, end - 1, 1))
            begun = -(-(end - 1) // page_size) * page_size
            for x in (k, v):
                x[:, slot_mapping(spans[-1].pages, page_size, end, begun)] = 1e4
                slots = slot_mapping(spans[-1].pages, page_size, 0, end)
                x[:, slots] = torch.randn_like(x[:, slots])
        start = shared[0] * page_size
        spans[-1] = a_span(spans[-1].pages, start, ends[-1][1] - start)
        rows = sum(span.length for span in spans)
        q = torch.randn(rows, 4, model.config.head_dim, dtype=torch.float64)
        expected, n = SDPA(model.config, cache).plan(spans)(q, k, v), len(spans) - 1
        together = Matmul(model.config, cache)
        close(together.plan(spans)(q, k, v), expected)
        close(together.plan(spans[:-1])(q[:n], k, v), expected[:n])
        for i, span in enumerate(spans[:-1]):
            close(together.plan([span])(q[i : i + 1], k, v), expected[i : i + 1])


def whose(counts):
    """[0, 0, 1] for counts of 2 and 1."""
    return [i for i, count in enumerate(counts) for _ in range(count)]


SEVERAL = [([3], 6, 1), ([0], 0, 1), ([2], 9, 1)], [([4], 5, 2), ([1], 0, 12), ([2], 3, 9)]


@pytest.mark.parametrize("spans", [*([([0], start, 4)] for start in (0, 4, 8)), *SEVERAL])
def test_xformers_mask_is_figure_6_in_every_page(spans):
    pytest.importorskip("xformers")
    expected, row = torch.zeros(sum(length for *_, length in spans), 60, dtype=torch.bool), 0
    for (page,), start, length in spans:  # pages of 12 tokens
        here = slice(page * 12, page * 12 + start + length)
        expected[row : row + length, here] = figure_6(start, length)
        row += length
    mask = xformers.gappy_bias([a_span(*span) for span in spans], pages=5, page_size=12)
    assert torch.equal(mask.materialize(expected.shape) == 0, expected)
    assert mask.k_seqinfo.max_seqlen == 12  # always, or Triton would compile in each iteration


def seen_by_split_k(mask, slots):
    """What Triton split-K reads of a paged mask, (n, slots): of decode i the first seqlen[i].

    Not `materialize`: it goes on behind a request's end, and a table's padding would hide a page.
    """
    seen = torch.zeros(len(mask.block_tables), slots, dtype=torch.bool)
    for row, table, n in zip(seen, mask.block_tables.tolist(), mask.k_seqinfo.seqlen.tolist()):
        row[slot_mapping(table, mask.page_size, 0, n)] = True
    return seen


LAST_PAGE, TO_GROW = [([0, 5, 2], 8, 1), ([1], 3, 1), ([4, 3], 5, 1)], [([5, 1, 2], 2, 1)]
DECODES = [[([4], 0, 1)], [([0], 0, 1)], [([2, 0], 7, 1), ([3, 4], 4, 1)], LAST_PAGE, TO_GROW]


@pytest.mark.parametrize("spans", DECODES)
def test_paged_mask_is_figure_6_in_every_block_table(spans):
    pytest.importorskip("xformers")
    n, expected = len(spans), torch.zeros(len(spans), 24, dtype=torch.bool)
    for row, (pages, start, length) in zip(expected, spans):  # pages of 4 tokens
        row[slot_mapping(pages, 4, 0, start + 1)] = figure_6(start, length)[0]
    mask = xformers.paged_bias([a_span(*span) for span in spans], page_size=4, max_len=12)
    assert torch.equal(seen_by_split_k(mask, 24), expected)
    assert mask.block_tables.dtype == torch.int32 and mask.block_tables.is_contiguous()
    assert mask.block_tables.shape == (n, 3)  # always, or Triton would compile in each iteration
    assert mask.k_seqinfo.padding == 12 and mask.q_seqinfo.seqstart.tolist() == list(range(n + 1))
    if not any(0 in pages for pages, *_ in spans):  # where xformers' own reading can be read
        own = mask.materialize((n, 12 * n)) == 0
        assert torch.equal(own, expected[:, : own.shape[1]])
        assert not expected[:, own.shape[1] :].any()


# CUDA


@pytest.fixture
def on_a_pretended_gpu(monkeypatch):
    """XFormers as it is made on CUDA, with xformers' operators still to be replaced."""
    fmha = pytest.importorskip("xformers.ops.fmha")
    monkeypatch.setattr(fmha.flash, "FLASH_VERSION", "2.8.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    for module in (attention, xformers):
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
    (decodes, chunks, sizes), fmha, calls = case, on_a_pretended_gpu, []
    model = tiny_model(model.config.family, model.config.n_kv_head, head_dim=16)
    (pages, page_size, _), paged = sizes, case is SMALL_PAGES
    split_k_operator, flash = fmha.triton_splitk.FwOp, fmha.flash.FwOp
    of_this_machine = ("device=", "dtype=", "requires", "operator wasn't built", "triton is not")

    def apply(operator, inputs, needs_gradient):
        mask, arguments = inputs.attn_bias, (inputs.query, inputs.key, inputs.value)
        q, keys, values = (x.flatten(2, 3)[0].transpose(0, 1) for x in arguments)
        calls.append((operator, q.shape[1], keys.shape[1] // page_size))
        assert inputs.key.stride(3) == inputs.value.stride(3) == 0 or inputs.key.shape[3] == 1
        inputs.validate_inputs()
        wrong = operator.not_supported_reasons(inputs)  # of shapes, strides and mask
        assert not [reason for reason in wrong if not reason.startswith(of_this_machine)]
        if not paged or operator is split_k_operator:
            assert inputs.key.data_ptr() == cache.data.data_ptr()  # a view, not a copy
        if hasattr(mask, "block_tables"):
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

    for operator in (flash, split_k_operator):
        monkeypatch.setattr(operator, "apply", classmethod(apply))
    cache = poisoned_cache(model, *sizes, position_major=True)
    data, layer = cache.data[0], cache.layer(0)
    decodes, chunks = ([a_span(*span) for span in spans] for spans in (decodes, chunks))
    for span in decodes + chunks:
        slots = slot_mapping(span.pages, page_size, 0, span.end)
        data[:, :, slots] = torch.rand_like(data[:, :, slots])
    backend = XFormers(model.config, cache, split_k)
    decode_operator = split_k_operator if split_k or paged else flash
    assert [operator for operator, *_ in calls] == [decode_operator, flash]  # the probe
    del calls[:]
    n, more = len(decodes), sum(span.length for span in chunks)
    q = torch.randn(n + more, model.config.n_head, model.config.head_dim, dtype=torch.float64)
    expected = SDPA(model.config, cache).plan(decodes + chunks)(q, *layer)
    close(backend.plan(decodes + chunks)(q, *layer), expected)
    assert calls == [(decode_operator, n, pages), (flash, more, 9 if paged else pages)]
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
    model, (decodes, chunks, sizes) = tiny_model(head_dim=16), case
    for operator in (on_a_pretended_gpu.flash.FwOp, on_a_pretended_gpu.triton_splitk.FwOp):
        attends = lambda op, inputs, needs_gradient: (inputs.query, None)
        monkeypatch.setattr(operator, "apply", classmethod(attends))
    cache = poisoned_cache(model, *sizes, position_major=True)
    backend, spans = XFormers(model.config, cache), [a_span(*span) for span in decodes + chunks]
    chosen = [(0, 0, 1), (1, 0, 1), (0.7, 5, 1), (2, 0, 0.5)] * 2
    params = [SamplingParams(1, t, k, p, logprobs=True) for t, k, p in chosen[: len(spans)]]
    with NoWaiting():
        tokens, _ = sample(model(FlatBatch.build(spans, backend), cache), params, range(9))
    with pytest.raises(RuntimeError, match="waits for the device"), NoWaiting():
        tokens[0].item()


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


CUDA_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
ON_CUDA = "sdpa float32 720 16, sdpa bfloat16 720 64, xformers bfloat16 720 64".split(", ")
ON_CUDA += "xformers float16 720 64 128, xformers-split-k bfloat16 720, auto bfloat16 64".split(
    ", "
)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", ON_CUDA)
@pytest.mark.parametrize("n_kv_head", [4, 2, 1])
def test_cuda_equals_cpu(n_kv_head, case):
    backend, dtype, *page_sizes = case.split()
    if backend != "sdpa":
        pytest.importorskip("xformers")
    dtype = getattr(torch, dtype)
    torch.backends.cuda.matmul.allow_tf32 = False
    reference = tiny_model(n_kv_head=n_kv_head, head_dim=64, max_positions=1024)
    for p in reference.parameters():
        p.copy_((p / 3 if p.ndim > 1 else p).to(dtype))  # attention still decides on the outcome
    model = in_dtype(reference, dtype, "cuda")
    prompts = [tokens_of(reference, n, n) for n in (1, 30, 7, 150, 700)]
    sizes = dict(chunk=48, max_batch=3, max_len=720)
    params = SamplingParams(max_new_tokens=6, logprobs=True)
    for policy, page_size in itertools.product(POLICIES, map(int, page_sizes)):
        sizes |= dict(page_size=page_size, pages={720: 3, 128: 7, 64: 15, 16: 60}[page_size])
        engine = Engine(model, policy=policy, attention=backend, **sizes)
        engine.runner.cache.data.fill_(float("nan"))
        for completion in engine.generate(prompts, params, progress=False):
            n, tokens = len(completion.prompt), completion.prompt + completion.tokens
            logprobs = prefill(reference, tokens).log_softmax(-1)[n - 1 : -1]
            expected = logprobs.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
            got = torch.tensor(completion.logprobs, dtype=torch.float64)
            close(got, expected, CUDA_TOLERANCE[dtype])
