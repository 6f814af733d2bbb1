"""Chunked equals full prefill; a hybrid batch equals its parts; no request notices its company.

The cache holds NaN wherever nothing was written: one position too many makes a result NaN.
"""

import copy
import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attention
from attention import paged
from attention.cpu_matmul import Matmul
from attention.paged import PagedSDPA, gather, page_rows
from attention.plan import staircase
from attention.sdpa import SDPA
from engine import Engine
from kv_cache import slot_mapping
from model import GPT, FlatBatch
from policies import POLICIES
from pretrained.rope import rope_table
from runtime.lone_chunk import lone_chunk
from sampling import SamplingParams
from tests.helpers import alone, block_tables, poison, poisoned_cache, run, tiny_model

by_layout = pytest.mark.parametrize("position_major", [False, True], ids=["heads", "slots"])


@pytest.fixture(autouse=True, params=["sdpa", "matmul"])
def backend(request, monkeypatch):
    """All of this holds for both backends of a CPU, also the one that is not for float64."""
    if request.param == "matmul":
        monkeypatch.setattr(attention, "BY_MATMUL", (torch.float64, torch.float32, torch.bfloat16))
        monkeypatch.setattr("attention.cpu_matmul.KEY_BLOCK", 16)


def tokens_of(model, n, seed=0):
    """n random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (n,), generator=generator).tolist()


def close(actual, expected, atol=1e-10, **options):
    """Raise unless equal. NaN equals nothing, or itself with equal_nan=True."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol, **options)


def a_span(pages, start, length):
    """A Chunk of which only the place matters."""
    return lone_chunk(pages, start, [0] * length)


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
    n = len(tokens)
    chunk = chunk or len(tokens)
    page_size = page_size or n
    [table] = block_tables([-(-n // page_size)], scattered)
    cache = poisoned_cache(model, 2 * len(table), page_size, n, position_major)
    spans = [
        lone_chunk(table, start, tokens[start : start + chunk]) for start in range(0, n, chunk)
    ]
    return torch.cat([run(model, cache, [span], all_rows=True) for span in spans])


def by_definition(model, tokens):
    """Logits of every token, from the papers' formulas: no cache, no chunks, no folded heads."""
    c = model.config
    n = len(tokens)
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
            q = block.q_norm(q)
            k = block.k_norm(k)
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
@pytest.mark.parametrize("sizes", ["boundaries", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("n, page_size", [(33, 1), (33, 16), (33, 33), (130, 64)])
def test_chunks_in_pages_equal_full_prefill(model, n, page_size, sizes, scattered, position_major):
    tokens = tokens_of(model, n)
    full = prefill(model, tokens)
    chunks = {9, page_size - 1, page_size, page_size + 1, 2 * page_size, n - 1, n}
    if sizes == "all" and n == 33:
        chunks = set(range(1, n + 1))
    for chunk in chunks - {0}:
        close(prefill(model, tokens, chunk, page_size, scattered, position_major), full)


def test_chunks_longer_than_a_query_block_equal_full_prefill(model, monkeypatch):
    tokens = tokens_of(model, 300)
    with monkeypatch.context() as patch:
        patch.setattr(attention.sdpa, "QUERY_BLOCK", 512)  # the whole prompt is one block
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
    lengths = (9, 70, 1, 30, 17, 64)
    num_cached = (8, 69, 0, 11, 16, 3)
    prompts = [tokens_of(model, n, n) for n in lengths]
    tables = block_tables([-(-n // page_size) for n in lengths], scattered=True)
    tables[1] = sorted(tables[1])  # pages in order, but not side by side
    spans = [
        lone_chunk(table, n, prompt[n:])
        for prompt, table, n in zip(prompts, tables, num_cached, strict=True)
    ]
    ends = [-(-s.end // page_size) * page_size for s in spans]  # of the last pages
    own_slots = [
        i
        for s, end in zip(spans, ends, strict=True)
        for i in slot_mapping(s.pages, page_size, s.start, end)
    ]
    expected = [prefill(model, prompt)[n:] for prompt, n in zip(prompts, num_cached, strict=True)]
    rows = sorted(range(len(spans)), key=lambda i: spans[i].length > 1)  # decodes first
    caches = []
    for position_major in (False, True):
        cache = poisoned_cache(model, 2 * sum(map(len, tables)), page_size, 70, position_major)
        for prompt, table, n in zip(prompts, tables, num_cached, strict=True):
            if n:
                run(model, cache, [lone_chunk(table, 0, prompt[:n])])
        before = cache.data.clone()
        parts = copy.deepcopy(cache)
        close(run(model, cache, spans, all_rows=True), torch.cat([expected[i] for i in rows]))
        for span, logits in zip(spans, expected, strict=True):
            close(run(model, parts, [span]), logits[-1:])
        close(cache.data, parts.data, equal_nan=True)
        before[:, :, :, own_slots] = cache.data[:, :, :, own_slots]
        close(cache.data, before, atol=0, equal_nan=True)  # nothing else was touched
        caches.append(cache)
    close(caches[0].data, caches[1].data, equal_nan=True)
    assert caches[0].data.stride() != caches[1].data.stride() or model.config.n_kv_head == 1


def test_a_flat_batch_has_decodes_first_and_only_the_logits_asked_for():
    backend = SimpleNamespace(device=torch.device("cpu"), page_size=16, plan=lambda spans: spans)
    first = lone_chunk([3], 4, [7, 8])
    last = lone_chunk([0], 0, [1, 2, 3], False)
    decodes = [lone_chunk([1], 9, [5]), lone_chunk([2], 6, [4])]
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
    prompts_and_params = [
        (tokens_of(model, n, n), SamplingParams(max_new_tokens=out)) for n, out in sizes
    ]
    return [(prompt, params, alone(model, prompt, params)) for prompt, params in prompts_and_params]


@pytest.mark.parametrize("page_size, pages", [(64, 3), (16, 5), (4, 17), (1, 70)])
@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_tokens_are_the_same_under_every_policy_and_alone(
    model, requests, policy, page_size, pages, monkeypatch
):
    sizes = dict(chunk=8, max_batch=3, max_len=64, page_size=page_size, pages=pages)
    engine = Engine(model, policy=policy, **sizes)
    forward = GPT.forward
    monkeypatch.setattr(GPT, "forward", lambda *args: poison(engine) or forward(*args))
    prompts, params, expected = zip(*requests, strict=True)
    completions = engine.generate(prompts, params, progress=False)
    assert [c.tokens for c in completions] == list(expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_lose_no_more_than_rounding(model, dtype):
    rounded = in_dtype(in_dtype(model, dtype), torch.float64)
    for p in rounded.parameters():  # the softmax of a small model is so sharp that rounding shows
        p.copy_(p / 10 if p.ndim > 1 else p)
    tokens = tokens_of(model, 150)
    small = in_dtype(rounded, dtype)
    expected = prefill(rounded, tokens)
    for chunk in (1, 7, 129, 150):
        got = prefill(small, tokens, chunk).double()
        assert (got - expected).abs().max() < 0.05 * expected.abs().max()
    assert rope_table(model.config, "cpu", dtype).dtype == torch.float32
    if model.rope is not None:
        assert small.rope.dtype == rounded.to(dtype).rope.dtype == torch.float32


def test_compile_takes_both_halves_of_every_layer(monkeypatch):
    model = tiny_model()
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda f, dynamic: compiled.append(f) or f)
    model.compile()
    assert [f.__name__ for f in compiled] == ["project", "finish"] * model.config.n_layer


@pytest.mark.slow  # and needs a C++ compiler
def test_compiled_model_gives_the_same_logits():
    model = tiny_model(dtype=torch.float32, n_layer=1)
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
    span = lone_chunk(pages, start, [0] * (end - start))
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
    model = tiny_model(n_kv_head=2)
    copied = []
    cache = poisoned_cache(model, 8, 4, max_len=32)

    def counted(x, rows, size):
        return copied.append(len(rows)) or gather(x, rows, size)

    monkeypatch.setattr(paged, "gather", counted)
    in_pieces = [[5, 1, 6], [1, 0], [3, 5], [3, 4, 6], [4, 3, 5]]
    tables = [(table, 0) for table in ([2, 3, 4], [7], [0], [3, 4, 5, 6])]
    for table, copies in [*tables, *((table, 2 * model.config.n_layer) for table in in_pieces)]:
        del copied[:]
        run(model, cache, [lone_chunk(table, 0, [1] * (4 * len(table)))])
        assert len(copied) == copies
        run(model, cache, [lone_chunk(table + [0], 4 * len(table) - 1, [1])])  # page 0 is not read
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
    monkeypatch.setattr("attention.cpu_matmul.PAGE_BLOCK", 4)
    model = tiny_model(n_kv_head=n_kv_head)
    rng = random.Random(1)
    for readers in ((1,) * 9, (2,), (3, 3), (5,), (5, 1, 2, 3, 1, 1), (1,)):
        shared = [rng.randint(0, (longest - 5) // page_size) * (n > 1) for n in readers]
        ends = [(i, rng.randint(shared[i] * page_size + 1, longest)) for i in whose(readers)]
        ends += [(0, min(longest, shared[0] * page_size + 3))]  # of a chunk
        own_pages = [-(-end // page_size) - shared[i] for i, end in ends]
        pages = sum(shared) + sum(own_pages)
        order = range(pages + 1)
        if scattered:
            order = rng.sample(order, pages + 1)
        tables = [
            [order[page] for page in table] for table in block_tables([*shared, *own_pages], False)
        ]
        cache = poisoned_cache(model, times * pages + 1, page_size, longest)
        spans, k, v = [], *cache.layer(0)
        for (i, end), own_table in zip(ends, tables[len(shared) :], strict=True):
            spans.append(a_span(tables[i] + own_table, end - 1, 1))
            page_end = -(-(end - 1) // page_size) * page_size
            for x in (k, v):
                x[:, slot_mapping(spans[-1].pages, page_size, end, page_end)] = 1e4
                slots = slot_mapping(spans[-1].pages, page_size, 0, end)
                x[:, slots] = torch.randn_like(x[:, slots])
        start = shared[0] * page_size
        spans[-1] = a_span(spans[-1].pages, start, ends[-1][1] - start)
        rows = sum(span.length for span in spans)
        q = torch.randn(rows, 4, model.config.head_dim, dtype=torch.float64)
        expected = PagedSDPA(model.config, cache).plan(spans)(q, k, v)
        n = len(spans) - 1
        together = Matmul(model.config, cache)
        close(together.plan(spans)(q, k, v), expected)
        close(together.plan(spans[:-1])(q[:n], k, v), expected[:n])
        for i, span in enumerate(spans[:-1]):
            close(together.plan([span])(q[i : i + 1], k, v), expected[i : i + 1])


def whose(counts):
    """[0, 0, 1] for counts of 2 and 1."""
    return [i for i, count in enumerate(counts) for _ in range(count)]
