"""Models and helpers that the tests share."""

import math
import random
from collections import deque

import pytest
import torch

from attention import make_attention
from iteration_time import BatchShape
from kv_cache import KVCache, Pages, cells
from model import GPT, FlatBatch, GPTConfig, Span
from sampling import SamplingParams, sample
from scheduler import make_scheduler


torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other, and for whatever else runs


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


def poison(engine):
    """Put NaN wherever no running request has something computed: free pages, and what lies beyond num_computed."""
    size = engine.cache.page_size
    unused = torch.ones(engine.cache.data.shape[3], dtype=torch.bool)
    unused[[i for r in engine.scheduler.running for i in cells(r.pages, size, 0, r.num_computed)]] = False
    engine.cache.data[:, :, :, unused] = float("nan")


def block_tables(needed, scattered, seed=0):
    """A block table of needed[i] pages for each request i; the cache must have 2 * sum(needed) pages.

    Scattered tables are shuffled among each other and no page follows another; the rest of the cache lies between.
    The others are one piece of memory each, and do not begin with page 0.
    """
    total = sum(needed)
    pages = random.Random(seed).sample(range(0, 2 * total, 2), total) if scattered else list(range(1, total + 1))
    return [[pages.pop(0) for _ in range(count)] for count in needed]


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


class VirtualRun:
    """A scheduler on a virtual clock: each batch takes `law(BatchShape)` seconds, times seeded noise and `slowdown`.

    After `run`, `token_times` holds the times of each request's tokens, `scheduled` those of all its chunks, and `log`
    (time, seconds, shape, chunks) for each iteration. What any policy must keep is asserted in every iteration.
    """

    def __init__(self, policy, law, noise=0.0, seed=0, pages=4096, page_size=16, **options):
        self.now, self.law, self.noise, self.random = 0.0, law, noise, random.Random(seed)
        options = dict(chunk=256, max_batch=16, max_len=2048) | options
        self.scheduler = make_scheduler(policy, Pages(pages, page_size), clock=lambda: self.now, **options)
        self.token_times, self.scheduled, self.log = {}, {}, []

    def add(self, request):
        self.token_times[request.id], self.scheduled[request.id] = [], []
        self.scheduler.add(request)

    def step(self, slowdown=1.0):
        """One iteration. Returns its batch, which is empty only if there is nothing to do."""
        scheduler = self.scheduler
        batch = scheduler.schedule()
        assert batch or not (scheduler.running or scheduler.waiting)
        scheduler.pages.check_integrity([request.pages for request in scheduler.running])
        assert (
            len({chunk.request.id for chunk in batch}) == len(batch) and len(scheduler.running) <= scheduler.max_batch
        )
        decodes = [request for request in scheduler.running if request.is_decoding]
        assert sum(chunk.length for chunk in batch) <= max(len(decodes), scheduler.budget or math.inf)
        assert all(request in [chunk.request for chunk in batch] for request in decodes)  # a running decode never waits
        assert not set(scheduler.running) & set(scheduler.waiting)
        shape = BatchShape.of(batch)
        seconds = self.law(shape) * slowdown * self.random.lognormvariate(0, self.noise)
        if batch:
            scheduler.observe(batch, seconds)
            self.log.append((self.now, seconds, shape, [(chunk.request.id, chunk.length) for chunk in batch]))
            self.now += seconds
        for request, start, length in batch:
            assert start == request.num_computed and start + length <= len(request.pages) * scheduler.pages.page_size
            self.scheduled[request.id].append(self.now - seconds)
            request.num_computed += length
            if request.num_computed == len(request.tokens):
                request.tokens.append(0)
                self.token_times[request.id].append(self.now)
                if len(request.tokens) == request.prompt_len + request.max_new_tokens:
                    scheduler.remove(request)
        return batch

    def run(self, requests, until=math.inf, slowdown=lambda now: 1.0):
        """Let these requests arrive when they do, and run until nothing is left to do, or that time."""
        coming = deque(sorted(requests, key=lambda request: request.arrival))
        while self.now < until:
            while coming and coming[0].arrival <= self.now:
                self.add(coming.popleft())
            if not self.step(slowdown(self.now)):
                if not coming:
                    break
                self.now = coming[0].arrival
        return self

    def ttft(self, request):
        return self.token_times[request.id][0] - request.arrival

    def tbt(self, requests=None):
        """All times between tokens, of these requests or of all, sorted."""
        times = self.token_times.values() if requests is None else [self.token_times[r.id] for r in requests]
        return sorted(later - earlier for t in times for earlier, later in zip(t, t[1:]))


def percentile(values, p):
    """The smallest of the values that at least p % of them do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * p / 100) - 1)]
