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

from attention.plan import staircase
from engine import Engine
from examples import nano
from kv_cache import slot_mapping
from model import GPT, FlatBatch, GPTConfig
from policies import POLICIES
from request import lone_chunk
from runtime import runner
from sampling import SamplingParams
from tests.helpers import alone, block_tables, poison, poisoned_cache, run

BY_MATMUL = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
]


@pytest.fixture(autouse=True, params=["plain", "matmul"])
def backend(request, monkeypatch):
    """All of this holds for the plain way, and for fast/'s products, which are for bfloat16."""
    if request.param == "plain":
        monkeypatch.setattr(runner, "find_fast", lambda: None)
        return
    fast = pytest.importorskip("fast")
    monkeypatch.setattr(fast, "BY_MATMUL", BY_MATMUL)
    monkeypatch.setattr("fast.cpu_matmul.KEY_BLOCK", 16)


def tokens_of(model, n, seed=0):
    """n random token ids."""
    rng = random.Random(seed)
    return rng.choices(range(model.config.vocab_size), k=n)


def close(actual, expected, atol=1e-10, **options):
    """Raise unless equal. NaN equals nothing, or itself with equal_nan=True."""
    torch.testing.assert_close(
        actual,
        expected,
        rtol=0,
        atol=atol,
        **options,
    )


def a_span(pages, start, length):
    """A Chunk of which only the place matters."""
    return lone_chunk(pages, start, [0] * length)


def figure_6(start, length):
    """SARATHI's Figure 6, position by position: query start + i sees key j if j <= start + i."""
    visible = torch.empty(length, start + length, dtype=torch.bool)
    for i, row in enumerate(visible):
        for j in range(start + length):
            row[j] = j <= start + i
    return visible


def in_dtype(model, dtype, device="cpu"):
    """A copy of the model in another dtype; the shared one stays as it is."""
    other = GPT(model.config, device, dtype, seed=None)
    other.load_state_dict(model.state_dict())
    return other


def prefill(model, tokens, chunk=None):
    """Logits of every prompt token, (len(tokens), vocab_size), `chunk` at a time or all at once."""
    n = len(tokens)
    chunk = chunk or n
    cache = poisoned_cache(model, 2, page_size=n)
    logits = []
    for start in range(0, n, chunk):
        part = tokens[start : start + chunk]
        span = lone_chunk([1], start, part)
        logits.append(run(model, cache, [span], all_rows=True))
    return torch.cat(logits)


def rms_norm(x, weight, eps):
    """Zhang and Sennrich 2019, with the eps that is in every implementation."""
    mean_square = x.square().mean(dim=-1, keepdim=True)
    return x / (mean_square + eps).sqrt() * weight


def by_definition(model, tokens):
    """Logits of every token, from the papers' formulas: no cache, no chunks, no folded heads."""
    c = model.config
    n = len(tokens)
    group = c.n_head // c.n_kv_head
    x = model.token_embedding.weight[tokens]
    if c.family == "gpt2":
        x = x + model.position_embedding.weight[:n]
    dimension = torch.arange(0, c.head_dim, 2, dtype=x.dtype)
    frequency = c.rope_theta ** (-dimension / c.head_dim)
    angle = torch.outer(torch.arange(n), frequency)
    turn = torch.polar(torch.ones_like(angle), angle)
    turn = turn.unsqueeze(1)  # (n, 1, head_dim / 2)
    for block in model.blocks:
        qkv = block.preproj(block.attn_norm(x))
        qkv = qkv.unflatten(1, (-1, c.head_dim))
        q, k, v = qkv.split([c.n_head, c.n_kv_head, c.n_kv_head], dim=1)
        if c.qk_norm:
            q = rms_norm(q, block.q_norm.weight, c.norm_eps)
            k = rms_norm(k, block.k_norm.weight, c.norm_eps)
        if c.family == "llama":
            q = turned(q, turn)
            k = turned(k, turn)
        k = k.repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)
        scores = torch.einsum("ihd, jhd -> hij", q, k)
        scores = scores / c.head_dim**0.5
        scores[:, ~figure_6(0, n)] = float("-inf")
        probs = scores.softmax(dim=-1)
        y = torch.einsum("hij, jhd -> ihd", probs, v)
        x = block.finish(x, y)
    return model.head(model.final_norm(x))


def turned(x, turn):
    """RoPE turns pairs of dimensions, read as complex numbers (Su et al. 2021)."""
    real, imag = x.chunk(2, dim=-1)
    y = torch.complex(real, imag) * turn
    return torch.cat([y.real, y.imag], dim=-1)


# chunks, batches, policies


@pytest.mark.parametrize(
    "dtype, atol",
    [
        (torch.float64, 1e-10),
        (torch.float32, 1e-4),
    ],
)
def test_every_chunk_size_equals_full_prefill(model, dtype, atol):
    model = in_dtype(model, dtype)
    tokens = tokens_of(model, 33)
    full = prefill(model, tokens)
    assert full.std() > 0.5  # the logits are far enough apart for the comparison to mean something
    close(full, by_definition(model, tokens), atol)
    for chunk in range(1, 34):
        chunked = prefill(model, tokens, chunk)
        close(chunked, full, atol)


HYBRID = {  # length of a prompt: so much of it is computed
    9: 8,
    70: 69,
    1: 0,
    30: 11,
    17: 16,
    64: 3,
}


@pytest.mark.parametrize(
    "position_major",
    [False, True],
    ids=["heads", "slots"],
)
@pytest.mark.parametrize(
    "scattered",
    [False, True],
    ids=["consecutive", "scattered"],
)
@pytest.mark.parametrize("page_size", [1, 16, 70])
def test_hybrid_batch_equals_its_parts(model, page_size, scattered, position_major):
    needed = [-(-n // page_size) for n in HYBRID]
    tables = block_tables(needed, scattered)
    tables[1].sort()  # pages in order, but not side by side
    cache = poisoned_cache(
        model,
        2 * sum(needed),
        page_size,
        70,
        position_major,
    )
    spans = []
    expected = []
    for table, n in zip(tables, HYBRID, strict=True):
        prompt = tokens_of(model, n, seed=n)
        start = HYBRID[n]
        if start:
            past = lone_chunk(table, 0, prompt[:start])
            run(model, cache, [past])
        span = lone_chunk(table, start, prompt[start:])
        spans.append(span)
        logits = prefill(model, prompt)
        expected.append(logits[-1:])
    before = cache.data.clone()
    parts = copy.deepcopy(cache)
    together = run(model, cache, spans)
    close(together, torch.cat(expected))
    for span, logits in zip(spans, expected, strict=True):
        by_itself = run(model, parts, [span])
        close(by_itself, logits)
    close(cache.data, parts.data, equal_nan=True)
    for span in spans:  # nothing else was touched: the rest of a page may have been cleared
        page_end = -(-span.end // page_size) * page_size
        slots = slot_mapping(span.pages, page_size, span.start, page_end)
        before[:, :, :, slots] = cache.data[:, :, :, slots]
    close(cache.data, before, atol=0, equal_nan=True)
    heads, slots = cache.data.stride()[2:4]
    assert (slots > heads) == position_major or model.config.n_kv_head == 1


def test_a_flat_batch_has_decodes_first_and_only_the_logits_asked_for():
    backend = SimpleNamespace(
        device=torch.device("cpu"),
        page_size=16,
        plan=lambda spans: spans,
    )
    ends = lone_chunk([3], 4, [7, 8])
    decode = lone_chunk([1], 9, [5])
    begins = lone_chunk([0], 0, [1, 2, 3], False)
    another = lone_chunk([2], 6, [4])
    batch = FlatBatch.build([ends, decode, begins, another], backend)
    assert batch.attend == [decode, another, ends, begins]
    assert batch.tokens.tolist() == [5, 4, 7, 8, 1, 2, 3]
    assert batch.positions.tolist() == [9, 6, 4, 5, 0, 1, 2]
    assert batch.slot_mapping.tolist() == [25, 38, 52, 53, 0, 1, 2]
    assert batch.logit_rows.tolist() == [3, 0, 1]  # in the order of the spans that want logits


@pytest.fixture(scope="module")
def requests(model):
    """(prompts, params, what they must yield) of some requests."""
    prompts = [tokens_of(model, n, seed=n) for n in (1, 30, 7, 2, 45, 16, 8)]
    params = [SamplingParams(max_new_tokens=n) for n in (9, 1, 12, 5, 3, 8, 2)]
    pairs = zip(prompts, params, strict=True)
    return prompts, params, [alone(model, *pair) for pair in pairs]


@pytest.mark.parametrize("page_size, pages", [(16, 5), (4, 17)])
@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_tokens_are_the_same_under_every_policy_and_alone(
    model, requests, policy, page_size, pages, monkeypatch
):
    engine = Engine(
        model,
        policy=policy,
        chunk=8,
        max_batch=3,
        max_len=64,
        page_size=page_size,
        pages=pages,
    )
    forward = GPT.forward

    def poisoned_forward(*args):
        poison(engine)
        return forward(*args)

    monkeypatch.setattr(GPT, "forward", poisoned_forward)
    prompts, params, expected = requests
    completions = engine.generate(prompts, params, progress=False)
    assert [c.output for c in completions] == expected


@pytest.fixture(scope="module")
def models_of_nano():
    """nano.py's model, and the engine's with the same weights."""
    torch.manual_seed(0)
    llama = nano.LLaMA().double()
    for weight in llama.parameters():
        weight.data *= 2  # so that outputs vary
    config = GPTConfig(
        "llama",
        vocab_size=27,
        n_layer=2,
        n_head=4,
        n_embd=32,
        n_inner=128,
        max_positions=512,
        norm_eps=torch.finfo(torch.float64).eps,
    )
    model = GPT(config, dtype=torch.float64, seed=None)
    model.load_state_dict(llama.state_dict())
    return llama, model


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "schedule",
    [
        nano.request_level,
        nano.orca,
        nano.vllm,
        nano.sarathi_serve,
    ],
)
def test_batches_and_tokens_are_those_of_nano(schedule, seed, models_of_nano):
    """examples/nano.py shares no line with the engine: it has a model and policies of its own."""
    llama, model = models_of_nano
    rng = random.Random(seed)
    max_batch = rng.randint(1, 4)
    chunk = rng.randint(1, 16)
    requests = []
    now = 0
    for request_id in range(6):
        now += rng.choice([0, 0, 1, 3, 30])
        prompt_len = rng.choice([1, 5, 20, 60])
        prompt = rng.choices(range(27), k=prompt_len)
        max_new_tokens = rng.randint(1, 12)
        request = nano.Request(request_id, now, max_new_tokens, prompt)
        requests.append(request)
    engine = Engine(
        model,
        policy=schedule.__name__.replace("_", "-"),
        chunk=chunk,
        max_batch=max_batch,
        max_len=512,
        page_size=16,
        pages=64 * max_batch,  # memory for all, and for the watermark
    )
    batches, outputs = served(engine, requests)
    expected = []

    def logged(server):
        batch = schedule(server)
        expected.append([(request.id, start, length) for request, start, length in batch])
        return batch

    server = nano.Server([*requests], max_batch, chunk)
    nano.serve(llama, server, logged)
    assert batches == expected
    assert outputs == [request.tokens[-request.max_new_tokens :] for request in requests]


def served(engine, requests):
    """The batches of an engine, [(request id, start, length), ...] each, and the outputs, if the
    requests arrive when they do on the clock of nano.py: a tick for 8 tokens."""
    batches = []
    outputs = [[] for _ in requests]
    coming = list(requests)
    now = 0
    while coming or engine.has_work:
        while coming and coming[0].arrival <= now:
            request = coming.pop(0)
            params = SamplingParams(request.max_new_tokens)
            engine.add_request(request.tokens, params)
        batch = engine.scheduler.next_batch()
        batches.append([(chunk.request.id, chunk.start, chunk.length) for chunk in batch])
        num_tokens = sum(chunk.length for chunk in batch)
        now += max(1, -(-num_tokens // 8))
        for event in engine.step():
            outputs[event.request.id].append(event.token)
    return batches, outputs


# pages


@given(st.data(), st.integers(1, 9))
@settings(deadline=None)
def test_slots_and_pages_are_the_formula_token_by_token(data, page_size):
    distinct = st.lists(
        st.integers(0, 50),
        min_size=1,
        max_size=9,
        unique=True,
    )
    pages = data.draw(distinct)
    end = data.draw(st.integers(0, len(pages) * page_size))
    start = data.draw(st.integers(0, end))
    expected = []
    for position in range(start, end):
        page = pages[position // page_size]
        expected.append(page * page_size + position % page_size)
    table = [*pages, 99]  # with a page to grow into
    assert slot_mapping(table, page_size, start, end) == expected
    span = a_span(table, start, end - start)
    assert span.length == end - start
    assert span.end == end
    used = [page for i, page in enumerate(pages) if i * page_size < end]
    assert span.used_pages(page_size) == used


# the mask


@pytest.mark.parametrize("group", [1, 2, 4])
def test_the_mask_is_figure_6(group):
    for past in range(9):
        for queries in range(1, 8):
            mask = staircase(queries, past, group, torch.float64)
            visible = figure_6(past, queries)
            visible = visible.repeat_interleave(group, dim=0)
            assert torch.equal(mask == 0, visible)
            assert torch.equal(mask == float("-inf"), ~visible)
