"""SLOs of the time between tokens, and the token budget that meets one (Sarathi-Serve §4.3, §5.1).

    budget, profile = choose_budget(runner, tbt_slo=0.3, decodes=16, contexts=(256, 1024), ...)

times hybrid batches once, over token budgets and contexts, and takes the largest budget that meets
the SLO. The profile is also what a dynamic budget begins with. The engine does this at start-up for
chunk="auto"; `python bench.py budget` draws the curve. Read first: iteration_time.py and model.py.
Read next: engine.py, for Runner.
"""

import statistics
import time
import warnings
from dataclasses import replace
from typing import NamedTuple

from kv_cache import Span
from policies import find_policy, policy_options
from policies.iteration_time import BatchShape

BASE_BATCH = 32
SLOS = {"strict": 5, "relaxed": 25}  # §5.1: of TBT, as multiples of the time of a decode iteration
MAX_DELAY_S = 2.0  # §5.1: of the median scheduling delay
UNSTEADY = 0.2  # spread above which a time is not believed


class Profiled(NamedTuple):
    """The median seconds of a batch: `decodes` at `context`, and a chunk up to there fills it."""

    budget: int
    context: int
    decodes: int
    seconds: float
    spread: float = 0.0  # between the quartiles, as a fraction, or more if the machine drifted

    @property
    def shape(self):
        """What IterationTime wants to know of it."""
        shape = BatchShape(0, self.decodes, self.decodes * self.context)
        chunk = self.budget - self.decodes
        return shape.with_chunk(max(0, self.context - chunk), chunk)


def hybrid_spans(cache, budget, context, decodes):
    """Spans of `decodes` requests that decode at `context`, and a chunk up to there fills the rest.
    A chunk that is longer than `context` starts its request. Only time matters here: the requests
    take the cache's pages in turn, and share them where there are too few."""

    def table(first, tokens):
        return [(first + i) % cache.pages for i in range(-(-tokens // cache.page_size))]

    apart, chunk = -(-context // cache.page_size), budget - decodes
    spans = [Span(table(i * apart, context), context - 1, [0]) for i in range(decodes)]
    if chunk > 0:
        start = max(0, context - chunk)
        spans.append(Span(table(decodes * apart, start + chunk), start, [0] * chunk))
    return spans


def time_iterations(runner, cases, repeats=2):
    """A Profiled for each of `cases`, (budget, context, decodes), in order. Each runs `repeats`
    times after a first that does not count, the cases in turn. What the cache holds is lost."""
    samples, batches = [[] for _ in cases], [hybrid_spans(runner.cache, *case) for case in cases]
    used = 1 + max(page for spans in batches for span in spans for page in span.pages)
    slots = used * runner.cache.page_size
    runner.cache.data[:, :, :, :slots].zero_()  # what never was written may be slow to compute with
    for repeat in range(repeats + 1):
        for spans, seconds in zip(batches, samples):
            start = time.perf_counter()
            runner.greedy(spans)
            if repeat:
                seconds.append(time.perf_counter() - start)
    quartiles = [statistics.quantiles(seconds, n=4, method="inclusive") for seconds in samples]
    return [Profiled(*case, b, (c - a) / b) for case, (a, b, c) in zip(cases, quartiles)]


def base_context(max_len):
    """Context of the base decode iteration: 4,096 tokens, or max_len / 2 where that is less."""
    return max(1, min(4096, max_len // 2))


def base_decode_iteration(runner, max_len, timed=None):
    """What SLOs are multiples of, a Profiled: 32 decodes at the base context (§5.1)."""
    cases = [(BASE_BATCH, base_context(max_len), BASE_BATCH)]
    return (timed or time_iterations)(runner, cases, repeats=5)[0]


def doubts(profile):
    """What to say of a profile of a busy machine; nothing of others."""
    spread = max(row.spread for row in profile)
    return f"; times spread by {spread:.0%}, is the machine busy?" if spread > UNSTEADY else ""


def choose_budget(runner, tbt_slo, decodes, contexts, tile, most, timed=None):
    """The static token budget for an SLO: (budget, profile), the profile as a list of Profiled.
    Budgets of whole tiles are timed with `decodes` at each context: the first with room for a
    chunk, then doubling up to `most` tokens or until the SLO is missed, then by halves between the
    last that met it and the first that did not. Raises ValueError if none meets it. `timed` is used
    instead of `time_iterations`."""
    tile, timed = min(tile, most), timed or time_iterations
    profile = timed(runner, [(decodes, context, decodes) for context in contexts])
    base = max(row.seconds for row in profile)

    def meets(budget):
        rows = timed(runner, [(budget, context, decodes) for context in contexts])
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
        raise ValueError(
            f"tbt_slo={tbt_slo:.4g}: no token budget meets it, {decodes} decodes alone take "
            f"{base:.4g} s at a context of {max(contexts)}{doubts(profile)}"
        )
    return good, profile


def auto_budget(runner, config):
    """The EngineConfig with chunk="auto" replaced by the largest budget that meets its tbt_slo, or
    the strict SLO; a policy that predicts is given what was timed to find it."""
    tile = 128 if runner.model.device.type == "cuda" else 32
    tbt_slo, tile = config.options.get("tbt_slo"), config.options.get("tile", tile)
    base = []
    if tbt_slo is None:
        base = [base_decode_iteration(runner, config.max_len)]
        tbt_slo = SLOS["strict"] * base[0].seconds
    decodes, contexts = min(BASE_BATCH, config.max_batch), [max(1, config.max_len // 2)]
    chunk, rows = choose_budget(runner, tbt_slo, decodes, contexts, tile, config.max_len)
    if doubt := doubts(base + rows):
        warnings.warn(f"chunk='auto' is {chunk}{doubt}", stacklevel=3)  # who makes the engine
    options = dict(config.options)
    if "profile" in policy_options(find_policy(config.policy)):
        options["profile"] = [(row.shape, row.seconds) for row in rows]
    return replace(config, chunk=chunk, options=options)
