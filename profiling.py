"""The one-time profile that a token budget is chosen from (Sarathi-Serve §4.3).

    budget, profile = choose_budget(model, cache, attention, tbt_slo=0.3, decodes=16, contexts=(256, 1024), ...)

times hybrid batches over token budgets and contexts, and takes the largest budget that meets the SLO. The profile is
also what a dynamic budget begins with (IterationTime). The engine does this at start-up for chunk="auto"; `python
bench.py budget` draws the curve.

Read first: iteration_time.py and model.py. Read next: engine.py.
"""

import statistics
import time
from typing import NamedTuple

from attention import make_attention
from iteration_time import BatchShape
from kv_cache import KVCache
from model import FlatBatch, Span

BASE_BATCH = 32
STRICT, RELAXED = 5, 25  # Sarathi-Serve §5.1: the TBT SLO as a multiple of the time of a decode iteration


class Profiled(NamedTuple):
    """The median time of hybrid batches of `budget` tokens: `decodes` at `context`, and a chunk that ends there."""

    budget: int
    context: int
    decodes: int
    seconds: float

    @property
    def shape(self):
        """What IterationTime wants to know of it."""
        shape = BatchShape(0, self.decodes, self.decodes * self.context)
        chunk = self.budget - self.decodes
        return shape.with_chunk(max(0, self.context - chunk), chunk)


def hybrid_spans(cache, budget, context, decodes):
    """Spans of `decodes` requests that decode at `context`, and of a chunk that ends there and fills the budget up.

    A chunk that is longer than `context` starts its request. Only time matters here: the requests take the cache's
    pages in turn, and share them where there are too few.
    """
    def table(first, tokens):
        return [(first + i) % cache.pages for i in range(-(-tokens // cache.page_size))]

    apart, chunk = -(-context // cache.page_size), budget - decodes
    spans = [Span(table(i * apart, context), context - 1, [0]) for i in range(decodes)]
    if chunk > 0:
        start = max(0, context - chunk)
        spans.append(Span(table(decodes * apart, start + chunk), start, [0] * chunk))
    return spans


def time_iterations(model, cache, attention, cases, repeats=2):
    """Time hybrid batches. `cases` are (budget, context, decodes); returns a Profiled for each, in order.

    Each is run `repeats` times after a first that does not count, the cases in turn. What the cache holds is lost.
    """
    samples, batches = [[] for _ in cases], [hybrid_spans(cache, *case) for case in cases]
    used = 1 + max(page for spans in batches for span in spans for page in span.pages)
    cache.data[:, :, :, : used * cache.page_size].zero_()  # what never was written may be slow to compute with
    for repeat in range(repeats + 1):
        for spans, seconds in zip(batches, samples):
            start = time.perf_counter()
            batch = FlatBatch.build(spans, attention)
            model(batch, cache).argmax(dim=-1).tolist()  # waits for a GPU
            if repeat:
                seconds.append(time.perf_counter() - start)
    return [Profiled(*case, statistics.median(seconds)) for case, seconds in zip(cases, samples)]


def time_batches(model, cases, max_len, attention, repeats=2):
    """A Profiled for each batch of `cases`, (prefill tokens, context, decodes), in a cache of its own.

    Its pages of 64 tokens lie side by side. No chunk, context or their sum is longer than `max_len`.
    """
    page_size = min(64, max_len)
    needed = [-(-context // page_size) * decodes + -(-max(prefill, context) // page_size)
              for prefill, context, decodes in cases]
    cache = KVCache(model.config, max(needed), page_size, model.device, model.dtype, max_len)
    cases = [(prefill + decodes, context, decodes) for prefill, context, decodes in cases]
    return time_iterations(model, cache, make_attention(model.config, cache, attention), cases, repeats)


def cost_cases(max_len):
    """The batches that cost_model.FittedCost is fitted to, as `time_batches` wants them."""
    contexts = max(1, max_len // 8), max(1, 3 * max_len // 4)
    cases = [(min(prefill, max_len), context, decodes)
             for prefill in (0, 32, 256) for context in contexts for decodes in (0, 4, 16)]
    return [case for case in cases if case[0] or case[2]] + [(min(512, max_len), max_len, 0)]


def base_context(max_len):
    """Context of the base decode iteration: 4,096 tokens, or as much less as max_len is less than 8,192."""
    return max(1, min(4096, max_len // 2))


def base_decode_iteration(model, cache, attention, max_len):
    """The decode iteration that SLOs are multiples of: 32 decodes at the base context, no prefill; a Profiled.

    Sarathi-Serve §5.1.
    """
    return time_iterations(model, cache, attention, [(BASE_BATCH, base_context(max_len), BASE_BATCH)], repeats=5)[0]


def choose_budget(model, cache, attention, tbt_slo, decodes, contexts, tile, most):
    """The static token budget for an SLO: (budget, profile), the profile as a list of Profiled.

    Budgets of whole tiles are timed with `decodes` at each context: the first with room for a chunk, then doubling up
    to `most` tokens or until the SLO is missed, then by halves between the last that met it and the first that did not.
    Raises ValueError if none meets it.
    """
    tile = min(tile, most)
    profile = time_iterations(model, cache, attention, [(decodes, context, decodes) for context in contexts])
    base = max(row.seconds for row in profile)

    def meets(budget):
        rows = time_iterations(model, cache, attention, [(budget, context, decodes) for context in contexts])
        profile.extend(rows)
        return all(row.seconds <= tbt_slo for row in rows)

    good, budget = 0, (decodes // tile + 1) * tile  # the first with room for a chunk
    most = max(most, budget)
    while budget <= most and meets(budget):
        good, budget = budget, 2 * budget
    bad = min(budget, most // tile * tile + tile)
    while good and bad - good > tile:
        middle = (good + bad) // 2 // tile * tile
        good, bad = (middle, bad) if meets(middle) else (good, middle)
    if not good:
        raise ValueError(f"tbt_slo={tbt_slo:.4g}: no token budget meets it, {decodes} decodes alone take {base:.4g} s "
                         f"at a context of {max(contexts)}")
    return good, profile
