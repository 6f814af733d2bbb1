"""Models and helpers that the tests share."""

import pytest
import torch

from attention import make_attention
from kv_cache import KVCache
from model import GPT, FlatBatch, GPTConfig, Span
from sampling import SamplingParams, sample


def tiny_model(family="llama", n_kv_head=4, dtype=torch.float64, vocab_size=61, max_positions=512, **changes):
    """A small model whose logits are well apart and whose norms and biases are not the identity."""
    config = GPTConfig(
        family,
        vocab_size,
        n_layer=2,
        n_head=4,
        n_embd=32,
        n_kv_head=n_kv_head,
        n_inner=48,
        max_positions=max_positions,
        **changes,
    )
    model = GPT(config, dtype=torch.float64, seed=1)
    generator = torch.Generator().manual_seed(2)
    for p in model.parameters():
        if p.ndim == 1:
            p.normal_(1, 0.3, generator=generator)
        else:
            p.mul_(10)
    return model.to(dtype)


def poisoned_cache(model, pages, page_size, max_len=None, position_major=None):
    """A cache in which every cell holds NaN until it is written. `max_len` is that of one page unless it is given."""
    max_len = max_len or page_size
    cache = KVCache(model.config, pages, page_size, dtype=model.dtype, max_len=max_len, position_major=position_major)
    cache.data.fill_(float("nan"))
    return cache


def run(model, cache, spans, all_rows=False):
    """Logits of the spans that want them; with `all_rows`, of every token in the order of the flat batch."""
    batch = FlatBatch.build(spans, make_attention(model.config, cache))
    if all_rows:
        batch = batch._replace(logit_rows=torch.arange(len(batch.tokens)))
    return model(batch, cache)


def alone(model, prompt, params=SamplingParams(), stop=()):
    """What a request must yield: no engine, no chunks, the whole sequence computed again for each token."""
    tokens = list(prompt)
    for n in range(params.max_new_tokens):
        cache = poisoned_cache(model, 1, len(tokens))
        logits = run(model, cache, [Span([0], 0, tokens)])
        tokens.append(int(sample(logits, [params], [n])[0]))
        if tokens[-1] in {*params.stop_token_ids, *stop}:
            break
    return tokens[len(prompt) :]


@pytest.fixture(
    scope="session",
    params=[("gpt2", 4), ("llama", 4), ("llama", 2), ("llama", 1)],
    ids=["gpt2", "llama", "llama-grouped", "llama-multi-query"],
)
def model(request):
    """Both families, with plain, grouped and shared KV heads, in float64."""
    return tiny_model(*request.param)
