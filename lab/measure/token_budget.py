"""SLOs of the time between tokens, and the token budget that meets one (Sarathi-Serve §4.3, §5.1).

Hybrid batches are timed, and the largest budget that meets the SLO is taken, by
`python bench.py batches --slo`. Read first: timing.py."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice
from typing import NamedTuple

from kv_cache import KVCache
from lab.measure import timing
from request import Chunk, lone_chunk
from runtime.runner import Runner

BASE_BATCH = 32  # decodes, at base_context, in the decode iteration that SLOs are multiples of
SLOS = {"strict": 5, "relaxed": 25}  # §5.1: of TBT, as multiples of the time of a decode iteration
MULTIPLES = SLOS | {f"{n}x": n for n in range(1, 101)}  # others, by their names
MAX_DELAY_S = 2.0  # §5.1: of the median scheduling delay

Case = tuple[int, int, int]  # a batch to time: (budget, context, decodes)


class Profiled(NamedTuple):
    """The median seconds of a batch: `decodes` at `context`, and a chunk up to there fills it."""

    budget: int
    context: int
    decodes: int
    seconds: float
    spread: float = 0.0  # of all that was timed with it: see timing.steadily


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


def time_iterations(
    runner: Runner, cases: Sequence[Case], repeats: int = 2, tries: int = 2
) -> list[Profiled]:
    """A Profiled for each case, in order, on a machine that is not busy: see timing.steadily. The
    content of the cache is lost.

    Each case runs `repeats` times after a first time that does not count, all cases in turn."""
    cache = runner.cache
    device = cache.data.device
    batches = [hybrid_spans(cache, *case) for case in cases]
    last_page = max(page for chunks in batches for chunk in chunks for page in chunk.pages)
    slots = (last_page + 1) * cache.page_size
    cache.data[:, :, :, :slots].zero_()  # garbage may be slow to compute with
    variants = {number: partial(runner.greedy, chunks) for number, chunks in enumerate(batches)}

    def time_cases() -> dict[int, timing.Timing]:
        return timing.interleaved(variants, device, repeats, warmup=1)

    def largest_spread(timings: dict[int, timing.Timing]) -> float:
        return max(each.spread for each in timings.values())

    timings, drift = timing.steadily(time_cases, device, tries, largest_spread)
    return [
        Profiled(*case, seconds=timings[number].ms / 1e3, spread=drift)
        for number, case in enumerate(cases)
    ]


def base_context(max_len: int) -> int:
    """Context of the base decode iteration: 4,096 tokens, or max_len / 2 where that is less."""
    return min(4096, max_len // 2)


def choose_budget(
    seconds_of: Callable[[int], float], tbt_slo: float, decodes: int, tile: int, max_budget: int
) -> int:
    """The static token budget for an SLO. `seconds_of` times a batch of so many tokens, of which
    `decodes` decode.

    Budgets of whole tiles up to `max_budget` are timed. They double until one misses the SLO. A
    binary search follows. Raises ValueError if no budget meets the SLO."""

    def misses(budget: int) -> bool:
        return seconds_of(budget) > tbt_slo

    tile = min(tile, max_budget)
    decode_s = seconds_of(decodes)
    best = 0
    budget = (decodes // tile + 1) * tile  # the first with room for a chunk
    max_budget = max(max_budget, budget)
    while budget <= max_budget and not misses(budget):
        best = budget
        budget = 2 * budget
    if not best:
        alone = f"{decodes} decodes alone take {decode_s:.4g} s"
        raise ValueError(f"tbt_slo={tbt_slo:.4g}: no token budget meets it, {alone}")
    end = min(budget, max_budget + 1)  # it misses the SLO, or is too large
    between = range(best + tile, end, tile)
    return best + tile * bisect_left(between, True, key=misses)
