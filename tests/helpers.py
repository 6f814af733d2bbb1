"""Models, caches and runs that the tests share."""

import math
import random
import subprocess
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import bench
from attention.sdpa import SDPA
from kv_cache import KVCache, slot_mapping
from lab.measure.machine_info import RealMachineInfo
from model import GPT, FlatBatch, GPTConfig
from policies import POLICIES, make_scheduler
from policies.iteration_time import BatchShape
from policies.pages import make_pages
from pretrained.tokenizers import ByteTokenizer
from request import lone_chunk
from runtime import runner
from sampling import SamplingParams, sample
from scheduler import Scheduler

IN_ORDER = [name for name, cls in POLICIES.items() if not cls.reorders]
RESERVING = [  # max_len tokens at admission
    name for name, cls in POLICIES.items() if cls.reserved is Scheduler.reserved
]
GROWING = [name for name in POLICIES if name not in RESERVING]  # page by page


ROOT = Path(__file__).parents[1]


def parse(argv):
    """The options of a command line of bench.py, as its command gets them, by name."""
    words = bench.command_line(argv)
    _, bound, _ = bench.app.parse_args(words, exit_on_error=False, print_error=False)
    return SimpleNamespace(**bound.arguments)


def repository(pattern):
    """The files of the repository that match, from its top folder: not what lies beside them."""
    command = ["git", "ls-files", pattern]
    listed = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    return [Path(line) for line in listed.stdout.splitlines()]


@dataclass(frozen=True)
class FakeTokenizer(ByteTokenizer):
    """A tokenizer of two functions. A message of a chat is a line."""

    encode: Callable[..., Any]
    decode: Callable[..., Any]
    stop_token_ids: frozenset[int] = frozenset()
    special_tokens: Mapping[str, int] = field(default_factory=dict)

    def _replace(self, **changes):
        return replace(self, **changes)


def with_slow(values, fast):
    """The values of a parameter. All but `fast` are run with -m slow only."""
    params = []
    for value in values:
        row = value if isinstance(value, tuple) else (value,)
        marks = [] if value in fast else [pytest.mark.slow]
        param = pytest.param(*row, marks=marks)
        params.append(param)
    return params


def tiny_model(family="llama", n_kv_head=4, dtype=torch.float64, **changes):
    """A small model whose logits are well apart and whose norms and biases are not the identity."""
    sizes = dict(
        vocab_size=61,
        n_layer=2,
        n_head=4,
        n_embd=32,
        n_inner=48,
        max_positions=512,
    )
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
    size = cache.page_size
    slots = cache.data.shape[3]
    cached = list(named(engine.scheduler.pages))
    unused = torch.ones(slots, dtype=torch.bool)
    unused.view(-1, size)[cached] = False
    for request in engine.scheduler.running:
        end = request.num_computed
        page_end = -(-end // size) * size
        begun = slot_mapping(request.pages, size, 0, page_end)
        behind = slot_mapping(request.pages, size, end, page_end)
        unused[begun] = False
        cache.data[:, :, :, behind] = 1e4
    cache.data[:, :, :, unused] = float("nan")


def named(pages):
    """The pages that can be found, a set."""
    if not pages.prefix_caching:
        return set()
    return {page for page in range(pages.total) if pages.is_cached(page)}


def owned(pages):
    """The pages in block tables, a list in order, each as often as it is in one."""
    counts = Counter(dict(enumerate(pages.ref_counts)))
    return list(counts.elements())


def guard(engine):
    """Let an engine raise RuntimeError before it writes into a page that is in no block table, or
    in two, or that can be found; the latter two unless its policy `shares_in_batch`."""
    cache = engine.runner.cache
    write = cache.write

    def guarded(layer, kv, slots):
        readers = Counter(page for r in engine.scheduler.running for page in r.pages)
        for page in {slot // cache.page_size for slot in slots.tolist()}:
            is_shared = readers[page] > 1 or page in named(engine.scheduler.pages)
            if not readers[page] or (is_shared and not engine.scheduler.shares_in_batch):
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
    fast = runner.find_fast()
    make_attention = fast.make_attention if fast else SDPA
    batch = FlatBatch.build(spans, make_attention(model.config, cache))
    if all_rows:
        batch = batch._replace(logit_rows=torch.arange(len(batch.tokens)))
    return model(batch, cache)


def finish(engine):
    """The events of all steps until nothing is left to do."""
    events = []
    for _ in range(1000):
        if engine.has_work:
            events += engine.step()
    scheduler = engine.scheduler
    assert engine.step() == []
    assert not (scheduler.requests or scheduler.running or scheduler.waiting)
    assert scheduler.pages.num_free == scheduler.pages.total
    return events


def completions_of(events):
    """{request id: Request} of the requests that ended with these events."""
    return {event.request.id: event.request for event in events if event.finish_reason}


def facts(request):
    """What came of a Request, to compare it: its fields, but not its tokens, only how many."""
    names = "id prompt_len arrival service scheduled token_times finish_reason preemptions"
    names += " recomputed_tokens cached_tokens"
    return len(request.tokens), [getattr(request, name) for name in names.split()]


GREEDY = SamplingParams()


def alone(model, prompt, params=GREEDY, stop=()):
    """What a request must yield: no engine, no chunks, all computed again for each token."""
    tokens = list(prompt)
    for n in range(params.max_new_tokens):
        cache = poisoned_cache(model, 1, len(tokens))
        logits = run(model, cache, [lone_chunk([0], 0, tokens)])
        sampled, _ = sample(logits, [params], [n])
        tokens += sampled.tolist()
        if tokens[-1] in {*params.stop_token_ids, *stop}:
            break
    return tokens[len(prompt) :]


class VirtualRun:
    """A scheduler on a virtual clock: a batch takes law(BatchShape) * seeded noise * slowdown.

    `token_times` holds the times of each request's tokens, `scheduled` those of its chunks, `log`
    (time, seconds, shape, [(request id, length)]) for each iteration, which asserts what any policy
    must keep."""

    def __init__(
        self,
        policy,
        law,
        noise=0.0,
        seed=0,
        pages=4096,
        page_size=16,
        shares=False,
        **options,
    ):
        self.now = 0.0
        self.law = law
        self.noise = noise
        self.random = random.Random(seed)
        sizes = dict(
            chunk=256,
            max_batch=16,
            max_len=2048,
            clock=lambda: self.now,
        )
        cache = make_pages(pages, page_size, shares)
        self.scheduler = make_scheduler(policy, cache, **sizes | options)
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
        check_batch(scheduler, batch)
        requests = [chunk.request for chunk in batch]
        assert all(r in requests for r in scheduler.running if r.is_decoding)  # none ever waits
        for chunk in batch:
            self.scheduled[chunk.request.id].append(self.now)
        shape = BatchShape.of(batch)
        noise = self.random.lognormvariate(0, self.noise)
        seconds = self.law(shape) * slowdown * noise
        if batch:
            scheduler.observe(batch, seconds)
            lengths = [(chunk.request.id, chunk.length) for chunk in batch]
            self.log.append((self.now, seconds, shape, lengths))
            self.now += seconds
        advance(scheduler, batch, self.now)
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
        ids = self.token_times if requests is None else [request.id for request in requests]
        pairs = [pair for i in ids for pair in pairwise(self.token_times[i])]
        return sorted(later - earlier for earlier, later in pairs)


def advance(scheduler, batch, now=0.0, token=0):
    """Let `token` be what was sampled for each chunk that yields one."""
    tokens = [token if chunk.yields_token else None for chunk in batch]
    return scheduler.advance(batch, tokens, now)


def check_batch(scheduler, batch):
    """Assert what any policy of this repository must keep."""
    running = scheduler.running
    requests = [chunk.request for chunk in batch]
    assert batch or not (running or scheduler.waiting)
    check_integrity(scheduler.pages, [request.pages for request in running])
    assert len(set(requests)) == len(batch)  # a request has one chunk
    assert len(running) <= scheduler.max_batch
    decodes = [request for request in running if request.is_decoding]
    assert sum(chunk.length for chunk in batch) <= max(len(decodes), batch.budget)
    assert not set(running) & set(scheduler.waiting)
    assert not any(request.pages or request.num_computed for request in scheduler.waiting)
    for chunk in batch:
        assert chunk.start == chunk.request.num_computed
        assert chunk.end <= len(chunk.pages) * scheduler.pages.page_size


def check_integrity(pages, tables=None):
    """Assert that every page is free or owned; and, with `tables`, the block tables of all
    requests, that these are all that is owned. No page is in two of them, but for `prefix_caching`,
    where each page counts as often as it is in one."""
    read = owned(pages)
    assert len(set(read)) + pages.num_free == pages.total  # no page leaked
    assert tables is None or sorted(sum(tables, [])) == read
    assert pages.prefix_caching or len(set(read)) == len(read)
    cached = named(pages)
    evictable = set(pages._evictable) if pages.prefix_caching else set()
    assert cached.difference(read) == evictable
    assert cached.union(read) == {page for page in range(pages.total) if pages._taken[page]}


def machine_info(**changes):
    """A RealMachineInfo that was never measured."""
    info = RealMachineInfo(
        device="-",
        torch="-",
        model="-",
        dtype="-",
        threads=1,
        parameters=1,
        flops_per_s=1.0,
        bytes_per_s=1.0,
        ridge_tokens=1.0,
        compiled=False,
        busy=False,
    )
    return replace(info, **changes)
