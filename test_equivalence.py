"""Chunked prefill equals full prefill; a hybrid batch equals its parts; a request does not notice its company.

In all of these tests the cache holds NaN wherever nothing was written, so that reading one position too many
makes a result NaN.
"""

from types import SimpleNamespace

import pytest
import torch

import attention
from attention import Extent, SDPA, XFormers, staircase
from conftest import alone, poisoned_cache, run, tiny_model
from engine import Engine
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


def prefill(model, tokens, chunk, slot=0):
    """Logits of every prompt token, (len(tokens), vocab_size), computed `chunk` tokens at a time."""
    cache = poisoned_cache(model, slot + 1, len(tokens))
    return torch.cat(
        [
            run(model, cache, [Span([slot], start, tokens[start : start + chunk])], all_rows=True)
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


@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_tokens_are_the_same_under_every_policy_and_alone(model, policy):
    prompts = [tokens_of(model, n, n) for n in (1, 30, 7, 2, 45, 16, 8)]
    params = [SamplingParams(max_new_tokens=n) for n in (9, 1, 12, 5, 3, 8, 2)]
    engine = Engine(model, policy, chunk=8, max_batch=3, max_len=64)
    engine.cache.data.fill_(float("nan"))
    done = engine.generate(prompts, params)
    assert [c.tokens for c in done] == [alone(model, *request) for request in zip(prompts, params)]


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


@pytest.mark.parametrize("split_k", [True, False])
def test_xformers_plan_equals_sdpa(model, split_k, monkeypatch):
    """The CUDA path, with xformers' operators replaced by one that follows their contract on a CPU."""
    fmha = pytest.importorskip("xformers.ops.fmha")
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
    monkeypatch.setattr(fmha.flash, "FLASH_VERSION", "2.8.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(attention, "SIXTEEN_BITS", (torch.float64,))
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
    "backend, dtype, tolerance",
    [
        ("sdpa", torch.float32, 1e-3),
        ("sdpa", torch.bfloat16, 0.1),
        ("xformers", torch.bfloat16, 0.1),
        ("xformers", torch.float16, 0.02),
        ("xformers-split-k", torch.bfloat16, 0.1),
    ],
    ids=str,
)
@pytest.mark.parametrize("n_kv_head", [4, 2])
def test_cuda_equals_cpu(n_kv_head, backend, dtype, tolerance):
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
        engine = Engine(model, policy, chunk=48, max_batch=3, max_len=720, attention=backend)
        engine.cache.data.fill_(float("nan"))
        for completion in engine.generate(prompts, SamplingParams(max_new_tokens=6, logprobs=True), progress=False):
            tokens = completion.prompt + completion.tokens
            logits = prefill(reference, tokens, len(tokens)).log_softmax(-1)[len(completion.prompt) - 1 : -1]
            expected = logits.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
            got = torch.tensor(completion.logprobs, dtype=torch.float64)
            torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)
