"""SLOs of the time between tokens, and the token budget that meets one (Sarathi-Serve §4.3, §5.1).

Hybrid batches are timed, and the largest budget that meets the SLO is taken: by the engine when it
starts with chunk="auto", and by `python bench.py budget`. Read first: iteration_time.py."""

import statistics
import time
import warnings
from bisect import bisect_left
from dataclasses import replace
from itertools import cycle, islice
from typing import NamedTuple

from kv_cache import Span
from policies import find_policy, policy_options
from policies.iteration_time import BatchShape

BASE_BATCH = 32  # of the decode iteration that SLOs are multiples of, at base_context
SLOS = {"strict": 5, "relaxed": 25}  # §5.1: of TBT, as multiples of the time of a decode iteration
MULTIPLES = SLOS | {f"{n}x": n for n in range(1, 101)}  # others, by their names
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
    """Spans of `decodes` requests that decode at `context`, and a chunk up to there, or a longer
    one from 0, that fills the budget. They take the cache's pages in turn, and share them where
    there are too few, which may take less time."""
    pages, chunk = cycle(range(cache.pages)), budget - decodes
    table = lambda tokens: list(islice(pages, -(-tokens // cache.page_size)))
    spans = [Span(table(context), context - 1, [0]) for _ in range(decodes)]
    if chunk > 0:
        start = max(0, context - chunk)
        spans.append(Span(table(start + chunk), start, [0] * chunk))
    return spans


def time_iterations(runner, cases, repeats=2):
    """A Profiled for each of `cases`, (budget, context, decodes), in order. Each runs `repeats`
    times after a first that does not count, the cases in turn. What the cache holds is lost."""
    samples, batches = [[] for _ in cases], [hybrid_spans(runner.cache, *case) for case in cases]
    last = max(page for spans in batches for span in spans for page in span.pages)
    slots = (last + 1) * runner.cache.page_size
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


def choose_budget(runner, tbt_slo, decodes, contexts, tile, most, timed=None):
    """The static token budget for an SLO, and a list of what was Profiled, by `timed`: budgets of
    whole tiles, up to `most` tokens, with `decodes` at each context, doubling until the SLO is
    missed, then by halves. Raises ValueError if none meets it."""
    tile, timed = min(tile, most), timed or time_iterations
    profile = timed(runner, [(decodes, context, decodes) for context in contexts])
    alone = max(row.seconds for row in profile)

    def meets(budget):
        rows = timed(runner, [(budget, context, decodes) for context in contexts])
        profile.extend(rows)
        return all(row.seconds <= tbt_slo for row in rows)

    good, budget = 0, (decodes // tile + 1) * tile  # the first with room for a chunk
    most = max(most, budget)
    while budget <= most and meets(budget):
        good, budget = budget, 2 * budget
    if not good:
        takes = f"{decodes} decodes alone take {alone:.4g} s at a context of {max(contexts)}"
        raise ValueError(f"tbt_slo={tbt_slo:.4g}: no token budget meets it, {takes}")
    larger = range(good + tile, min(budget, most // tile * tile + tile), tile)
    return good + tile * bisect_left(larger, True, key=lambda its: not meets(its)), profile


def auto_budget(runner, config):
    """The EngineConfig with chunk="auto" replaced by the largest budget that meets its tbt_slo, or
    the strict SLO; a policy that predicts is given what was timed to find it."""
    options, base, its = dict(config.policy_options), [], runner
    context = base_context(config.max_len)
    tile = options.get("tile", 128 if runner.model.device.type == "cuda" else 32)
    if (tbt_slo := options.get("tbt_slo")) is None:
        if not runner.cache.data.is_cuda:  # there pages that decodes share may be read once
            pages = BASE_BATCH * -(-context // config.page_size)
            its = type(runner)(runner.model, pages, config.page_size, attention=config.attention)
        base = time_iterations(its, [(BASE_BATCH, context, BASE_BATCH)], repeats=5)
        tbt_slo = SLOS["strict"] * base[0].seconds
    contexts = [max(1, config.max_len // 2)]
    fit = max(1, config.pages * config.page_size // contexts[0])
    decodes = min(BASE_BATCH, config.max_batch, fit)
    chunk, rows = choose_budget(runner, tbt_slo, decodes, contexts, tile, config.max_len)
    if (spread := max(row.spread for row in base + rows)) > UNSTEADY:
        what = f"chunk='auto' is {chunk}; times spread by {spread:.0%}, is the machine busy?"
        warnings.warn(what, stacklevel=4)  # of who makes the engine
    if "profile" in policy_options(find_policy(config.policy)):
        options["profile"] = [(row.shape, row.seconds) for row in rows]
    return replace(config, chunk=chunk, policy_options=options)
