"""Chunked prefill equals full prefill; a hybrid batch equals its parts; a request does not notice its company.

In all of these tests the cache holds NaN wherever nothing was written, so that reading one position too many
makes a result NaN.
"""

import types

import pytest
import torch

import attention
from attention import Extent, SDPA, XFormers, staircase
from conftest import alone, poisoned_cache, run, tiny_model
from engine import Engine
from model import GPT, Span
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
    return torch.cat([run(model, cache, [Span(slot, start, tokens[start : start + chunk])], all_rows=True)
                      for start in range(0, len(tokens), chunk)])


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
    prompts = {5: tokens_of(model, 9, 1), 0: tokens_of(model, 17, 2), 3: tokens_of(model, 1, 3), 6: tokens_of(model, 30, 4)}
    done = {5: 8, 0: 16, 3: 0, 6: 11}  # tokens of each prompt that are computed before the hybrid batch

    def prepared():
        cache = poisoned_cache(model, 8, 40)
        for slot, n in done.items():
            if n:
                run(model, cache, [Span(slot, 0, prompts[slot][:n])])
        return cache

    spans = [Span(slot, done[slot], prompts[slot][done[slot]:]) for slot in (6, 5, 0, 3)]
    hybrid_cache, parts_cache = prepared(), prepared()
    together = run(model, hybrid_cache, spans)
    apart = torch.cat([run(model, parts_cache, [span]) for span in spans])
    close(together, apart)
    torch.testing.assert_close(hybrid_cache.data, parts_cache.data, rtol=0, atol=1e-10, equal_nan=True)


def test_logits_come_only_for_the_spans_that_want_them(model):
    spans = [Span(0, 0, tokens_of(model, 5, 1)), Span(2, 0, tokens_of(model, 1, 2), False), Span(1, 0, tokens_of(model, 3, 3))]
    wanted = run(model, poisoned_cache(model, 3, 8), spans)
    everything = run(model, poisoned_cache(model, 3, 8), [span._replace(wants_logits=True) for span in spans])
    close(wanted, everything[[0, 2]])
    nothing = run(model, poisoned_cache(model, 3, 8), [span._replace(wants_logits=False) for span in spans])
    assert nothing.shape == (0, model.config.vocab_size)


def test_a_slot_can_be_used_again(model):
    cache = poisoned_cache(model, 2, 40)
    run(model, cache, [Span(1, 0, tokens_of(model, 40, 1))])  # a longer request was here before
    tokens = tokens_of(model, 12, 2)
    reused = [run(model, cache, [Span(1, start, tokens[start : start + 5])]) for start in (0, 5, 10)]
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


def test_xformers_masks_are_figure_6():
    pytest.importorskip("xformers")
    for start, length in [(0, 4), (4, 4), (8, 4), (5, 2)]:
        mask = attention.chunk_bias(length).materialize((length, start + length))
        assert torch.equal(mask == 0, figure_6(start, length))
    extents = [Extent(3, 6, 1), Extent(0, 0, 1), Extent(2, 9, 1)]  # decodes in slots of 10 positions
    mask = attention.decode_bias(extents, slots=5, max_len=10).materialize((3, 50))
    expected = torch.zeros(3, 50, dtype=torch.bool)
    for row, (slot, start, _) in enumerate(extents):
        expected[row, slot * 10 : slot * 10 + start + 1] = True
    assert torch.equal(mask == 0, expected)


@pytest.mark.parametrize("split_k", [True, False])
def test_xformers_plan_equals_sdpa(model, split_k, monkeypatch):
    """The CUDA path, with xformers' operator replaced by one that follows its documented contract on a CPU."""
    fmha = pytest.importorskip("xformers.ops.fmha")

    def operator(q, keys, values, attn_bias=None, op=None):
        assert op is (fmha.triton_splitk.FwOp if split_k and q.shape[1] == 3 else None)
        if q.ndim == 5:  # (1, n, n_kv_head, group, head_dim), the KV head shared with a stride of 0
            assert keys.stride(3) == values.stride(3) == 0
            q, keys, values = (x.flatten(2, 3) for x in (q, keys, values))
        if attn_bias is None:
            mask = torch.zeros(q.shape[1], keys.shape[1], dtype=q.dtype)
        else:
            mask = attn_bias.materialize((q.shape[1], keys.shape[1]), dtype=q.dtype)
        seen = (mask == 0).any(dim=0)  # the operator does not touch what no query sees
        q, keys, values = q[0].transpose(0, 1), keys[0, seen].transpose(0, 1), values[0, seen].transpose(0, 1)
        scores = q @ keys.transpose(1, 2) / q.shape[-1] ** 0.5 + mask[:, seen]
        return (scores.softmax(dim=-1) @ values).transpose(0, 1)[None]

    cache = poisoned_cache(model, 5, 24)
    cache.data.uniform_()
    cache.data = cache.data.transpose(3, 4).contiguous().transpose(3, 4)  # the layout of CUDA
    backend = XFormers.__new__(XFormers)
    backend.fmha = types.SimpleNamespace(memory_efficient_attention_forward=operator, triton_splitk=fmha.triton_splitk)
    backend.group = model.config.n_head // model.config.n_kv_head
    backend.max_len, backend.slots, backend.device, backend.split_k = 24, 5, torch.device("cpu"), split_k
    extents = [Extent(4, 20, 1), Extent(0, 0, 1), Extent(2, 7, 1), Extent(1, 5, 9), Extent(3, 0, 6)]
    q = torch.randn(3 + 9 + 6, model.config.n_head, model.config.head_dim, dtype=torch.float64)
    for layer in range(model.config.n_layer):
        expected = SDPA(model.config, cache).plan(extents)(q, *cache.layer(layer))
        close(backend.plan(extents)(q, *cache.layer(layer)), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-3), (torch.bfloat16, 0.3), (torch.float16, 0.05)], ids=str)
@pytest.mark.parametrize("n_kv_head", [4, 2])
def test_cuda_equals_cpu(n_kv_head, dtype, tolerance):
    pytest.importorskip("xformers")
    torch.backends.cuda.matmul.allow_tf32 = False
    config = tiny_model(n_kv_head=n_kv_head, head_dim=64).config
    reference = GPT(config, dtype=torch.float64, seed=3)
    model = GPT(config, "cuda", dtype, seed=None)
    model.load_state_dict(reference.state_dict())
    prompts = [tokens_of(reference, n, n) for n in (1, 30, 7, 150)]
    for policy in POLICIES:
        engine = Engine(model, policy, chunk=16, max_batch=3, max_len=200, tile=1)
        engine.cache.data.fill_(float("nan"))
        done = engine.generate(prompts, SamplingParams(max_new_tokens=6, logprobs=True))
        for completion in done:
            tokens = completion.prompt + completion.tokens
            logits = prefill(reference, tokens, len(tokens)).log_softmax(-1)[len(completion.prompt) - 1 : -1]
            expected = logits.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(completion.logprobs, dtype=torch.float64), expected, rtol=0, atol=tolerance)
