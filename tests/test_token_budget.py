"""The token budget, held against the largest of all budgets under a law. No clock is believed."""

import pytest

from engine import Engine
from lab.measure import timing
from lab.measure import token_budget as slo
from lab.measure.token_budget import Profiled, auto_budget, choose_budget, hybrid_spans
from runtime.runner import Runner
from sampling import SamplingParams
from tests.helpers import alone, poisoned_cache, tiny_model


@pytest.fixture
def law(monkeypatch):
    """Replaces the stopwatch by a law; collects the cases it was asked for."""
    real = slo.time_iterations
    asked = []

    def set_law(seconds):
        def timed(runner, cases, repeats=2):
            asked.extend(cases)
            if runner is not None:
                assert len(real(runner, cases)) == len(cases)  # they can be run
            return [Profiled(*case, seconds(*case)) for case in cases]

        monkeypatch.setattr(slo, "time_iterations", timed)
        return asked

    return set_law


def linear(budget, context, decodes):
    return 10e-3 + 1e-3 * (budget - decodes) + 1e-6 * decodes * context


CASES = [(8, 20, 3), (3, 20, 3), (40, 20, 3), (64, 64, 1), (1, 1, 1)]


@pytest.mark.parametrize("page_size", [4, 16, 64])
@pytest.mark.parametrize("budget, context, decodes", CASES)
def test_a_hybrid_batch_has_the_tokens_it_says(budget, context, decodes, page_size):
    cache = poisoned_cache(tiny_model(), 128 // page_size, page_size, max_len=64)
    spans = hybrid_spans(cache, budget, context, decodes)
    chunk = budget - decodes
    assert sum(span.length for span in spans) == budget
    assert len(spans) == decodes + (chunk > 0)
    assert all((span.start, span.length) == (context - 1, 1) for span in spans[:decodes])
    for span in spans[decodes:]:  # ends at the context, or is all there is
        assert span.end == max(context, chunk) and span.start >= 0
    for span in spans:
        assert len(set(span.pages)) == len(span.pages) == -(-span.end // page_size)
        assert all(0 <= page < cache.pages for page in span.pages)
    shape = Profiled(budget, context, decodes, 1.0).shape
    counts = shape.prefill_tokens, shape.decodes, shape.context_tokens
    assert counts == (chunk, decodes, decodes * context)
    keys = [span.start + i + 1 for span in spans[decodes:] for i in range(span.length)]
    assert shape.prefill_pairs == sum(keys)


def test_each_case_is_run_and_gets_its_own_times(monkeypatch):
    runner = Runner(tiny_model(), 4, 64)
    sizes = []
    forward = type(runner.model).forward

    def note_size(self, batch, cache):
        sizes.append(len(batch.tokens))
        return forward(self, batch, cache)

    def interleaved(variants, device, repeats, warmup):
        assert (repeats, warmup) == (3, 1)
        for run in variants.values():
            run()
        return {key: timing.Timing(1000.0 * sizes[key], key / 2) for key in variants}

    monkeypatch.setattr(type(runner.model), "forward", note_size)
    monkeypatch.setattr(timing, "interleaved", interleaved)
    rows = slo.time_iterations(runner, [(3, 20, 3), (8, 30, 2)], repeats=3)
    assert rows == [Profiled(3, 20, 3, 3.0, 0.0), Profiled(8, 30, 2, 8.0, 0.5)]


@pytest.mark.parametrize("tile", [1, 32])
@pytest.mark.parametrize("decodes", [1, 6, 32])
@pytest.mark.parametrize("most", [100, 257, 1024])
def test_the_budget_is_the_largest_of_whole_tiles_that_meets_the_slo(law, tile, decodes, most):
    asked = law(linear)
    # a tile is at most all there may be
    contexts = (50, 900)
    tile = min(tile, most)
    first = (decodes // tile + 1) * tile
    for target in (0.0101, 0.02, 0.045, 0.08, 0.15, 0.31, 2.0):
        limits = target, decodes, contexts, tile, most

        def meets(b, t=target):
            return all(linear(b, c, decodes) <= t for c in contexts)

        every = range(first, max(most, first) + 1, tile)
        if not any(meets(budget) for budget in every):
            with pytest.raises(ValueError):
                choose_budget(None, *limits)
            continue
        del asked[:]
        budget, profile = choose_budget(None, *limits)
        assert budget == max(filter(meets, every))
        assert [tuple(row[:3]) for row in profile] == asked  # nothing timed is thrown away
        assert len({case[0] for case in asked}) <= 2 + 2 * max(1, (most // tile)).bit_length()
        assert {case[:2] for case in asked} >= {(b, c) for b in (decodes, budget) for c in contexts}


PROMPTS = [[7, 8, 9], [1] * 20, [5], [3, 1, 4, 1, 5, 9, 2, 6] * 4, [60, 0, 60]]


def auto(policy, **settings):
    model = tiny_model()
    return Engine(model, auto_budget(Engine(model, policy=policy, **settings)))


@pytest.mark.parametrize("policy", ["sarathi-serve", "dynamic"])
def test_auto_finds_a_budget_and_leaves_nothing_behind(policy, monkeypatch):
    monkeypatch.setitem(slo.SLOS, "strict", 1e6)  # the machine may be busy
    params = SamplingParams(8, temperature=1.0, seed=3)
    options = {"tbt_slo": 10.0} if policy in ("dynamic", "priority") else {}
    engine = auto(policy, max_batch=3, max_len=64, page_size=16, policy_options=options)
    assert not engine.has_work and engine.scheduler.pages.num_free == 12
    assert engine.config.chunk == engine.scheduler.chunk in (32, 64)
    assert engine.last_iteration is None
    engine.runner.cache.data.fill_(float("nan"))
    done = engine.generate(PROMPTS, params)
    assert [c.output for c in done] == [alone(tiny_model(), prompt, params) for prompt in PROMPTS]
    assert [c.id for c in done] == list(range(5))


@pytest.mark.parametrize("policy", ["dynamic", "priority"])
def test_auto_keeps_its_profile_for_the_dynamic_budget(law, policy):
    law(linear)
    options = dict(tbt_slo=0.1, tile=4)
    scheduler = auto(policy, max_batch=8, max_len=256, policy_options=options).scheduler
    assert scheduler.chunk == 96  # 10 ms, 1 ms for 8 decodes at 128 keys, 88 tokens in 88 ms
    assert scheduler.iteration_time.largest_prefill >= 88
    predicted = scheduler.iteration_time.predict(Profiled(96, 128, 8, 0).shape)
    assert predicted == pytest.approx(0.1, rel=0.03)
    for tbt_slo in (0.005, linear(8, 128, 8)):  # below a decode iteration; no room for a chunk
        with pytest.raises(ValueError):
            auto(policy, max_batch=8, max_len=256, policy_options=dict(tbt_slo=tbt_slo))
