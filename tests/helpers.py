"""Models, caches and runs that the tests share."""

import math
import random
from collections import Counter, defaultdict, deque
from itertools import pairwise

import pytest
import torch

from attention import make_attention
from kv_cache import KVCache, slot_mapping
from lab.measure.machine_info import RealMachineInfo
from model import GPT, FlatBatch, GPTConfig
from policies import POLICIES, make_scheduler
from policies.iteration_time import BatchShape
from policies.pages import make_pages
from sampling import SamplingParams, sample
from scheduler import Scheduler
from speedups.lone_chunk import lone_chunk

# first come, first served, and the newest is preempted: what decides on that is scheduler.py's, or
# dynamic.py's, which at most lets the head of the line wait
DECIDE = ("admit", "rank", "grow_decodes", "schedule")
HOMES = {p: {getattr(cls, part).__module__ for part in DECIDE} for p, cls in POLICIES.items()}
FIRST_COME = {"scheduler", "policies.ablations", "policies.dynamic"}
IN_ORDER = [policy for policy, homes in HOMES.items() if homes <= FIRST_COME]
RESERVING = [  # max_len tokens at admission
    name for name, cls in POLICIES.items() if cls.reserved is Scheduler.reserved
]
GROWING = [name for name in POLICIES if name not in RESERVING]  # page by page


def with_slow(values, fast):
    """The values of a parameter. All but `fast` are run with -m slow only."""
    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    slow = [pytest.mark.slow]
    return [
        pytest.param(*row, marks=[] if value in fast else slow)
        for value, row in zip(values, rows, strict=True)
    ]


def tiny_model(family="llama", n_kv_head=4, dtype=torch.float64, **changes):
    """A small model whose logits are well apart and whose norms and biases are not the identity."""
    sizes = dict(vocab_size=61, n_layer=2, n_head=4, n_embd=32, n_inner=48, max_positions=512)
    config = GPTConfig(family, n_kv_head=n_kv_head, **sizes | changes)
    model = GPT(config, dtype=torch.float64, seed=1)
    generator = torch.Generator().manual_seed(2)
    for p in model.parameters():
        if p.ndim == 1:
            p.normal_(1, 0.3, generator=generator)
        else:
            p.mul_(10)
    return model.to(dtype)


def poisoned_cache(model, pages, page_size, max_len=None, position_major=False):
    """A cache whose slots hold NaN until they are written. `max_len` is by default one page's,
    `position_major` the layout that a cache has on CUDA."""
    device = "cuda" if position_major else "cpu"
    empty = torch.empty_permuted

    def permuted(*sizes, device, dtype):
        return empty(*sizes, dtype=dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_permuted", permuted)
        sizes = pages, page_size, device, model.dtype, max_len or page_size
        cache = KVCache(model.config, *sizes)
    cache.data.fill_(float("nan"))
    return cache


def poison(engine):
    """Spoil whatever nobody may read: NaN, but in the pages that are begun, where attention may
    read what it hides, big numbers behind num_computed. What running requests have computed may be
    read, and pages that can be found."""
    cache = engine.runner.cache
    size = engine.runner.cache.page_size
    unused = torch.ones(cache.data.shape[3], dtype=torch.bool)
    unused.view(-1, size)[list(named(engine.scheduler.pages))] = False
    for r in engine.scheduler.running:
        page_end = -(-r.num_computed // size) * size
        unused[slot_mapping(r.pages, size, 0, page_end)] = False
        cache.data[:, :, :, slot_mapping(r.pages, size, r.num_computed, page_end)] = 1e4
    cache.data[:, :, :, unused] = float("nan")


def named(pages):
    """The pages that can be found, a set."""
    if not pages.prefix_caching:
        return set()
    return {page for page in range(pages.total) if pages.is_cached(page)}


def owned(pages):
    """The pages in block tables, a list in order, each as often as it is in one."""
    return [page for page, readers in enumerate(pages.ref_counts) for _ in range(readers)]


def guard(engine):
    """Let an engine raise RuntimeError before it writes into a page that is in two block tables, or
    that can be found."""
    cache = engine.runner.cache
    write = cache.write

    def guarded(layer, kv, slots):
        readers = Counter(page for r in engine.scheduler.running for page in r.pages)
        for page in {slot // cache.page_size for slot in slots.tolist()}:
            if readers[page] != 1 or page in named(engine.scheduler.pages):
                raise RuntimeError(f"page {page} is written, in {readers[page]} block tables")
        write(layer, kv, slots)

    cache.write = guarded
    return engine


def block_tables(needed, scattered, seed=0):
    """A block table of needed[i] pages for each i, of a cache of 2 * sum(needed) pages.

    Scattered tables are shuffled among each other and no page follows another. The others are one
    piece of memory each, and do not begin with page 0.
    """
    total = sum(needed)
    pages = list(range(1, total + 1))
    if scattered:
        pages = random.Random(seed).sample(range(0, 2 * total, 2), total)
    return [[pages.pop(0) for _ in range(count)] for count in needed]


def run(model, cache, spans, all_rows=False):
    """Logits of the spans that want them; `all_rows`: of every token, as in the flat batch."""
    batch = FlatBatch.build(spans, make_attention(model.config, cache))
    if all_rows:
        batch = batch._replace(logit_rows=torch.arange(len(batch.tokens)))
    return model(batch, cache)


GREEDY = SamplingParams()


def alone(model, prompt, params=GREEDY, stop=()):
    """What a request must yield: no engine, no chunks, all computed again for each token."""
    tokens = list(prompt)
    for n in range(params.max_new_tokens):
        logits = run(model, poisoned_cache(model, 1, len(tokens)), [lone_chunk([0], 0, tokens)])
        tokens.append(int(sample(logits, [params], [n])[0]))
        if tokens[-1] in {*params.stop_token_ids, *stop}:
            break
    return tokens[len(prompt) :]


class VirtualRun:
    """A scheduler on a virtual clock: a batch takes law(BatchShape) * seeded noise * slowdown.

    `token_times` holds the times of each request's tokens, `scheduled` those of its chunks, `log`
    (time, seconds, shape, [(request id, length)]) for each iteration, which asserts what any policy
    must keep.
    """

    def __init__(
        self, policy, law, noise=0.0, seed=0, pages=4096, page_size=16, shares=False, **options
    ):
        self.now = 0.0
        self.law = law
        self.noise = noise
        self.random = random.Random(seed)
        options = dict(chunk=256, max_batch=16, max_len=2048, clock=lambda: self.now) | options
        self.scheduler = make_scheduler(policy, make_pages(pages, page_size, shares), **options)
        self.token_times = {}
        self.scheduled = defaultdict(list)
        self.log = []

    def add(self, request):
        """Let a request arrive."""
        self.token_times[request.id] = request.token_times
        self.scheduler.add(request)

    def step(self, slowdown=1.0):
        """One iteration. Returns its batch, which is empty only if there is nothing to do."""
        scheduler = self.scheduler
        batch = scheduler.next_batch()
        running = scheduler.running
        requests = [chunk.request for chunk in batch]
        assert batch or not (running or scheduler.waiting)
        check_integrity(scheduler.pages, [request.pages for request in running])
        assert len({r.id for r in requests}) == len(batch) and len(running) <= scheduler.max_batch
        decodes = [request for request in running if request.is_decoding]
        assert sum(chunk.length for chunk in batch) <= max(len(decodes), batch.budget or math.inf)
        assert all(request in requests for request in decodes)  # a running decode never waits
        assert not set(running) & set(scheduler.waiting)
        for r, start, length in batch:
            assert start == r.num_computed
            assert start + length <= len(r.pages) * scheduler.pages.page_size
            self.scheduled[r.id].append(self.now)
        shape = BatchShape.of(batch)
        seconds = self.law(shape) * slowdown * self.random.lognormvariate(0, self.noise)
        if batch:
            scheduler.observe(batch, seconds)
            self.log.append((self.now, seconds, shape, [(c.request.id, c.length) for c in batch]))
            self.now += seconds
        scheduler.advance(batch, [0 if chunk.yields_token else None for chunk in batch], self.now)
        return batch

    def run(self, requests, until=math.inf, slowdown=lambda now: 1.0):
        """Let these requests arrive when they do, and run until nothing is left, or that time."""
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
        """Its time to first token."""
        return request.token_times[0] - request.arrival

    def tbt(self, requests=None):
        """All times between tokens, of these requests or of all, sorted."""
        times = self.token_times.values() if requests is None else [r.token_times for r in requests]
        return sorted(later - earlier for t in times for earlier, later in pairwise(t))


def percentile(values, p):
    """The smallest of the values that at least p % of them do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * p / 100) - 1)]


def check_integrity(pages, tables=None):
    """Raise RuntimeError unless every page is free or owned; and, with `tables`, the block tables
    of all requests, unless these are all that is owned, and no page is in two of them, but for
    `prefix_caching`, where each page counts as often as it is in one."""
    read = owned(pages)
    if len(set(read)) + pages.num_free != pages.total:
        raise RuntimeError(f"pages leaked: {pages.num_free} free, {read} owned")
    if tables is not None and sorted(sum(tables, [])) != read:
        raise RuntimeError(f"block tables {tables} are not the pages owned, {read}")
    if not pages.prefix_caching and len(set(read)) != len(read):
        raise RuntimeError(f"pages are shared: {read}")
    cached = named(pages)
    evictable = set(pages._evictable) if pages.prefix_caching else set()
    occupied = {page for page in range(pages.total) if pages._taken[page]}
    if cached.difference(read) != evictable or cached.union(read) != occupied:
        summary = f"{evictable} can be given away, {occupied} are not blank"
        raise RuntimeError(f"pages {cached} can be found, {read} are owned, {summary}")


def machine_info(**changes):
    """A RealMachineInfo that was never measured."""
    numbers = {"flops_per_s": 1.0, "bytes_per_s": 1.0, "ridge_tokens": 1.0, "parameters": 1}
    names = {"device": "-", "torch": "-", "model": "-", "dtype": "-"}
    states = {"threads": 1, "compiled": False, "busy": False}
    return RealMachineInfo(**numbers | names | states | changes)
