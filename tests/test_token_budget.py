"""The token budget, held against the largest of all budgets under a law. No clock is believed."""

import pytest

from lab.measure.token_budget import choose_budget, hybrid_spans
from tests.helpers import poisoned_cache, tiny_model

CASES = [(8, 20, 3), (3, 20, 3), (40, 20, 3), (64, 64, 1), (1, 1, 1)]


@pytest.mark.parametrize("budget, context, decodes", CASES)
def test_a_hybrid_batch_has_the_tokens_it_says(budget, context, decodes):
    cache = poisoned_cache(tiny_model(), pages=8, page_size=16, max_len=64)
    spans = hybrid_spans(cache, budget, context, decodes)
    chunk = budget - decodes
    assert sum(span.length for span in spans) == budget
    assert all((span.start, span.length) == (context - 1, 1) for span in spans[:decodes])
    for span in spans[decodes:]:
        assert span.end == max(context, chunk)
    for span in spans:
        assert len(set(span.pages)) == len(span.pages) == -(-span.end // 16)


@pytest.mark.parametrize("tile", [1, 32])
@pytest.mark.parametrize("decodes", [1, 6, 32])
@pytest.mark.parametrize("max_budget", [100, 257, 1024])
def test_the_budget_is_the_largest_of_whole_tiles_that_meets_the_slo(tile, decodes, max_budget):
    timed = []

    def seconds_of(budget):
        timed.append(budget)
        return 10e-3 + 1e-3 * (budget - decodes)

    tile = min(tile, max_budget)
    first = (decodes // tile + 1) * tile
    every = range(first, max(max_budget, first) + 1, tile)
    for slo in (0.0101, 0.02, 0.045, 0.08, 0.15, 0.31, 2.0):
        fitting = [budget for budget in every if seconds_of(budget) <= slo]
        timed.clear()
        if not fitting:
            with pytest.raises(ValueError):
                choose_budget(seconds_of, slo, decodes, tile, max_budget)
            continue
        assert choose_budget(seconds_of, slo, decodes, tile, max_budget) == fitting[-1]
        assert len(set(timed)) <= 2 + 2 * max(1, (max_budget // tile)).bit_length()
