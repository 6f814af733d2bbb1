"""SLOs of the time between tokens, and the token budget that meets one (Sarathi-Serve §4.3, §5.1).

Hybrid batches are timed, and the largest budget that meets the SLO is taken: by `auto_budget`, and
by `python bench.py batches --slo`. Read first: policies/iteration_time.py."""

import warnings
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from typing import Any, NamedTuple, Protocol

from config import EngineConfig
from engine import Engine
from kv_cache import KVCache
from lab.measure import timing
from policies import find_policy, policy_options
from policies.iteration_time import BatchShape
from request import Chunk, lone_chunk
from runtime.runner import Runner

BASE_BATCH = 32  # decodes, at base_context, in the decode iteration that SLOs are multiples of
SLOS = {"strict": 5, "relaxed": 25}  # §5.1: of TBT, as multiples of the time of a decode iteration
MULTIPLES = SLOS | {f"{n}x": n for n in range(1, 101)}  # others, by their names
MAX_DELAY_S = 2.0  # §5.1: of the median scheduling delay
UNSTEADY = 0.2  # spread above which a time is not believed

Case = tuple[int, int, int]  # a batch to time: (budget, context, decodes)


class Profiled(NamedTuple):
    """The median seconds of a batch: `decodes` at `context`, and a chunk up to there fills it."""

    budget: int
    context: int
    decodes: int
    seconds: float
    spread: float = 0.0  # between the quartiles, as a fraction, or more if the machine drifted

    @property
    def shape(self) -> BatchShape:
        """The same batch for IterationTime."""
        chunk = self.budget - self.decodes
        decodes = BatchShape(decodes=self.decodes, context_tokens=self.decodes * self.context)
        return decodes.with_chunk(max(0, self.context - chunk), chunk)


class TimedRunner(Protocol):
    """A model with a cache that can compute chunks, such as runtime.runner.Runner."""

    cache: KVCache

    def greedy(self, chunks: Sequence[Chunk]) -> list[int]: ...


TimeIterations = Callable[[Any, Sequence[Case]], list[Profiled]]


def hybrid_spans(cache: KVCache, budget: int, context: int, decodes: int) -> list[Chunk]:
    """Chunks of `decodes` requests that decode at `context`, and of a chunk that fills the budget.

    The chunk ends at `context`, or begins at 0 if it is longer. They take the cache's pages in
    turn. Where there are too few they share pages, which may take less time."""
    pages = cycle(range(cache.pages))
    chunk = budget - decodes
    spans = [(context - 1, 1)] * decodes  # (start, length)
    if chunk > 0:
        spans.append((max(0, context - chunk), chunk))
    chunks = []
    for start, length in spans:
        block_table = list(islice(pages, -(-(start + length) // cache.page_size)))
        chunks.append(lone_chunk(block_table, start, [0] * length))
    return chunks


def time_iterations(runner: TimedRunner, cases: Sequence[Case], repeats: int = 2) -> list[Profiled]:
    """A Profiled for each case, in order. The content of the cache is lost.

    Each case runs `repeats` times after a first time that does not count, all cases in turn."""
    cache = runner.cache
    batches = [hybrid_spans(cache, *case) for case in cases]
    last_page = max(page for chunks in batches for chunk in chunks for page in chunk.pages)
    slots = (last_page + 1) * cache.page_size
    cache.data[:, :, :, :slots].zero_()  # garbage may be slow to compute with
    variants = {number: partial(runner.greedy, chunks) for number, chunks in enumerate(batches)}
    timings = timing.interleaved(variants, cache.data.device, repeats, warmup=1)
    return [
        Profiled(*case, seconds=timings[number].ms / 1e3, spread=timings[number].spread)
        for number, case in enumerate(cases)
    ]


def base_context(max_len: int) -> int:
    """Context of the base decode iteration: 4,096 tokens, or max_len / 2 where that is less."""
    return min(4096, max_len // 2)


def choose_budget(
    runner: TimedRunner,
    tbt_slo: float,
    decodes: int,
    contexts: Sequence[int],
    tile: int,
    max_budget: int,
    timed: TimeIterations | None = None,
) -> tuple[int, list[Profiled]]:
    """The static token budget for an SLO, and the profile of all batches that were timed.

    Budgets of whole tiles up to `max_budget` are timed, with `decodes` at each context. They double
    until one misses the SLO. A binary search follows. `timed` takes the place of time_iterations.
    Raises ValueError if no budget meets the SLO."""
    timed = timed or time_iterations
    tile = min(tile, max_budget)
    profile: list[Profiled] = []

    def slowest(budget: int) -> float:
        rows = timed(runner, [(budget, context, decodes) for context in contexts])
        profile.extend(rows)
        return max(row.seconds for row in rows)

    def misses(budget: int) -> bool:
        return slowest(budget) > tbt_slo

    decode_s = slowest(decodes)
    best = 0
    budget = (decodes // tile + 1) * tile  # the first with room for a chunk
    max_budget = max(max_budget, budget)
    while budget <= max_budget and not misses(budget):
        best = budget
        budget = 2 * budget
    if not best:
        takes = f"{decodes} decodes alone take {decode_s:.4g} s at a context of {max(contexts)}"
        raise ValueError(f"tbt_slo={tbt_slo:.4g}: no token budget meets it, {takes}")
    end = min(budget, max_budget + 1)  # it misses the SLO, or is too large
    between = range(best + tile, end, tile)
    best += tile * bisect_left(between, True, key=misses)
    return best, profile


def auto_budget(engine: Engine) -> EngineConfig:
    """The config of an engine, with the largest chunk that meets the policy's tbt_slo, or else the
    strict SLO: `Engine(model, auto_budget(Engine(model, ...)))`. Spoils what its cache holds.

    A policy that predicts gets the profile as an option, too. Raises ValueError for a policy that
    does not cut prompts, and for an SLO that no budget meets."""
    config = engine.config
    runner = engine.runner
    options = dict(config.policy_options)
    policy = find_policy(config.policy)
    if not policy.cuts_prompts:
        raise ValueError(f"chunk: policy {config.policy!r} does not cut prompts")
    cache = runner.cache
    tile = options.get("tile", 128 if cache.data.is_cuda else 32)
    tbt_slo = options.get("tbt_slo")
    timed: list[Profiled] = []
    if tbt_slo is None:
        base = time_base_iteration(runner, config.attention)
        tbt_slo = SLOS["strict"] * base.seconds
        timed.append(base)
    context = cache.max_len // 2
    requests_that_fit = max(1, cache.pages * cache.page_size // context)
    decodes = min(BASE_BATCH, engine.scheduler.max_batch, requests_that_fit)
    chunk, profile = choose_budget(runner, tbt_slo, decodes, [context], tile, cache.max_len)
    spread = max(row.spread for row in timed + profile)
    if spread > UNSTEADY:
        message = f"chunk is {chunk}; times spread by {spread:.0%}, is the machine busy?"
        warnings.warn(message, stacklevel=2)
    if "profile" in policy_options(policy):
        options["profile"] = [(row.shape, row.seconds) for row in profile]
    return replace(config, chunk=chunk, policy_options=options)


def time_base_iteration(runner: Runner, attention: str = "auto") -> Profiled:
    """The decode iteration that SLOs are multiples of."""
    cache = runner.cache
    context = base_context(cache.max_len)
    pages = BASE_BATCH * -(-context // cache.page_size)
    base_runner = runner
    if cache.pages < pages:  # those that decodes share may be read only once
        make_runner = type(runner)
        base_runner = make_runner(runner.model, pages, cache.page_size, cache.max_len, attention)
    [base] = time_iterations(base_runner, [(BASE_BATCH, context, BASE_BATCH)], repeats=5)
    return base
