"""The one-time profile: what it times, what it chooses, and what chunk="auto" makes of it. No clock is believed."""

import json

import pytest

import bench
import profiling
from conftest import alone, poisoned_cache, tiny_model
from engine import Engine
from profiling import Profiled, base_decode_iteration, choose_budget, hybrid_spans, time_iterations
from sampling import SamplingParams
from scheduler import PRIORITIES


@pytest.fixture
def law(monkeypatch):
    """Replaces the stopwatch by a law; collects the cases it was asked for."""

    real = profiling.time_iterations

    def set_law(seconds):
        def timed(model, cache, attention, cases, repeats=2):
            asked.extend(cases)
            if model is not None:
                assert len(real(model, cache, attention, cases, 1)) == len(cases)  # they can be run
            return [Profiled(*case, seconds(*case)) for case in cases]

        monkeypatch.setattr(profiling, "time_iterations", timed)
        return asked

    asked = []
    return set_law


def linear(budget, context, decodes):
    return 10e-3 + 1e-3 * (budget - decodes) + 1e-6 * decodes * context


# -----------------------------------------------------------------------------------------------------
# what is timed


@pytest.mark.parametrize("page_size", [4, 16, 64])
@pytest.mark.parametrize("budget, context, decodes", [(8, 20, 3), (3, 20, 3), (40, 20, 3), (64, 64, 1), (1, 1, 1)])
def test_a_hybrid_batch_has_the_tokens_it_says(budget, context, decodes, page_size):
    cache = poisoned_cache(tiny_model(), 128 // page_size, page_size, max_len=64)
    spans = hybrid_spans(cache, budget, context, decodes)
    assert sum(len(span.tokens) for span in spans) == budget
    assert len(spans) == decodes + (budget > decodes)
    for span in spans[:decodes]:
        assert len(span.tokens) == 1 and span.start == context - 1
    for span in spans[decodes:]:  # ends at the context, or is all there is
        assert span.start + len(span.tokens) == max(context, budget - decodes) and span.start >= 0
    for span in spans:
        assert len(set(span.pages)) == len(span.pages) == -(-(span.start + len(span.tokens)) // page_size)
        assert all(0 <= page < cache.pages for page in span.pages)
    shape = Profiled(budget, context, decodes, 1.0).shape
    assert (shape.prefill_tokens, shape.decodes, shape.context_tokens) == (budget - decodes, decodes, decodes * context)
    keys = [span.start + i + 1 for span in spans[decodes:] for i in range(len(span.tokens))]
    assert shape.prefill_pairs == sum(keys)


def test_each_case_is_run_and_gets_the_median_of_its_own_times(monkeypatch):
    model = tiny_model()
    engine = Engine(model, max_batch=4, max_len=64)
    now, sizes = [0.0], []
    extra = {3: iter([50.0, 1.0, 2.0, 9.0]), 8: iter([70.0, 5.0, 4.0, 4.5])}  # the first does not count
    forward = type(model).forward

    def slow(self, batch, cache):
        sizes.append(len(batch.tokens))
        now[0] += next(extra[sizes[-1]])
        return forward(self, batch, cache)

    monkeypatch.setattr(type(model), "forward", slow)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    rows = time_iterations(model, engine.cache, engine.attention, [(3, 20, 3), (8, 30, 2)], repeats=3)
    assert rows == [Profiled(3, 20, 3, 2.0), Profiled(8, 30, 2, 4.5)]
    assert sizes == [3, 8] * 4  # in turn


@pytest.mark.parametrize("max_len, case", [(16384, (32, 4096, 32)), (2048, (32, 1024, 32)), (1, (32, 1, 32))])
def test_slos_are_multiples_of_a_decode_iteration_as_in_the_paper(law, max_len, case):
    asked = law(linear)
    assert base_decode_iteration(None, None, None, max_len) == Profiled(*case, linear(*case))
    assert asked == [case]


# -----------------------------------------------------------------------------------------------------
# what is chosen


@pytest.mark.parametrize("policy", ["request-level", "orca", "vllm", "hybrid-only"])
def test_auto_is_refused_where_prompts_are_not_cut(policy):
    with pytest.raises(ValueError, match=f"chunk='auto': policy '{policy}' does not cut prompts"):
        Engine(tiny_model(), policy, "auto", max_batch=2, max_len=32)


@pytest.mark.parametrize("tile", [1, 8, 32, 128])
@pytest.mark.parametrize("decodes", [1, 6, 32])
@pytest.mark.parametrize("most", [100, 257, 1024])
def test_the_budget_is_the_largest_of_whole_tiles_that_meets_the_slo(law, tile, decodes, most):
    asked = law(linear)
    contexts, tile = (50, 900), min(tile, most)  # a tile is at most all there may be
    first = (decodes // tile + 1) * tile
    slos = [0.0101, 0.02, 0.045, 0.08, 0.15, 0.31, 2.0]
    for slo in slos:
        every = range(tile, max(most, first) + 1, tile)
        meets = [b for b in every if b > decodes and all(linear(b, c, decodes) <= slo for c in contexts)]
        if not meets:
            with pytest.raises(ValueError, match=f"tbt_slo={slo:.4g}: no token budget meets it, {decodes} decodes"):
                choose_budget(None, None, None, slo, decodes, contexts, tile, most)
            continue
        del asked[:]
        budget, profile = choose_budget(None, None, None, slo, decodes, contexts, tile, most)
        assert budget == max(meets)
        assert [(row.budget, row.context, row.decodes) for row in profile] == asked  # nothing timed is thrown away
        assert len({case[0] for case in asked}) <= 2 + 2 * max(1, (most // tile)).bit_length()
        assert {case[:2] for case in asked} >= {(b, c) for b in (decodes, budget) for c in contexts}


def test_the_slowest_context_counts(law):
    law(lambda budget, context, decodes: 1e-3 * budget * (4 if context == 500 else 1))
    assert choose_budget(None, None, None, 0.4, 4, (100, 500, 900), 4, 4096)[0] == 100


# -----------------------------------------------------------------------------------------------------
# chunk="auto"

PROMPTS = [[7, 8, 9], [1] * 20, [5], [3, 1, 4, 1, 5, 9, 2, 6] * 4, [60, 0, 60]]


@pytest.mark.parametrize("policy", ["sarathi-serve", "sarathi", "priority"])
def test_auto_finds_a_budget_and_leaves_nothing_behind(policy, monkeypatch):
    monkeypatch.setattr("engine.STRICT", 1e6)  # the machine may be busy
    model, params = tiny_model(), SamplingParams(8, temperature=1.0, seed=3)
    options = {} if policy == "sarathi" else {"tbt_slo": 10.0}
    engine = Engine(model, policy, "auto", max_batch=3, max_len=64, page_size=16, **options)
    scheduler = engine.scheduler
    assert not scheduler.waiting and not scheduler.running and scheduler.pages.num_free == 12
    assert 3 < scheduler.chunk <= 64 and (scheduler.chunk % 32 == 0)
    assert engine.last_iteration is None and not engine.has_work
    engine.cache.data.fill_(float("nan"))
    done = engine.generate(PROMPTS, params)
    assert [c.tokens for c in done] == [alone(model, prompt, params) for prompt in PROMPTS]
    assert [c.request_id for c in done] == list(range(5))


@pytest.mark.parametrize("policy", ["sarathi-serve", "priority"])
def test_auto_keeps_its_profile_for_the_dynamic_budget(law, policy):
    law(linear)
    engine = Engine(tiny_model(), policy, "auto", max_batch=8, max_len=256, tbt_slo=0.1, tile=4)
    assert engine.scheduler.chunk == 96  # 10 ms, 1 ms for 8 decodes at 128 keys, and 88 tokens in 88 ms
    assert engine.scheduler.iteration_time.largest_prefill >= 88
    assert engine.scheduler.iteration_time.predict(Profiled(96, 128, 8, 0).shape) == pytest.approx(0.1, rel=0.03)


def test_without_an_slo_auto_takes_the_strict_one(law):
    law(linear)
    base = linear(32, 128, 32)
    for policy in ("sarathi-serve", "sarathi"):
        engine = Engine(tiny_model(), policy, "auto", max_batch=8, max_len=256, tile=1)
        assert engine.scheduler.chunk == max(b for b in range(9, 257) if linear(b, 128, 8) <= 5 * base)


def test_an_slo_below_one_decode_iteration_is_refused(law):
    law(linear)
    base = linear(8, 128, 8)
    with pytest.raises(ValueError, match="tbt_slo=0.005: no token budget meets it, 8 decodes alone take 0.01102 s"):
        Engine(tiny_model(), "sarathi-serve", "auto", max_batch=8, max_len=256, tbt_slo=0.005)
    with pytest.raises(ValueError, match="no token budget meets it"):  # that leaves no room for a chunk
        Engine(tiny_model(), "priority", "auto", max_batch=8, max_len=256, tbt_slo=base)


@pytest.mark.parametrize("max_len, max_batch", [(1, 1), (2, 3), (20, 40), (33, 40), (64, 40)])
@pytest.mark.parametrize("policy", ["sarathi-serve", "sarathi", "priority", "chunked-only"])
def test_auto_works_however_short_the_requests_are(law, policy, max_len, max_batch):
    law(lambda budget, context, decodes: 1.0)
    engine = Engine(tiny_model(), policy, "auto", max_batch=max_batch, max_len=max_len)
    assert engine.scheduler.chunk > min(32, max_batch)


@pytest.mark.parametrize("arrival", [float("nan"), float("inf"), "now"])
def test_a_request_must_arrive_at_a_time(arrival):
    for policy in ("sarathi-serve", "priority"):
        engine = Engine(tiny_model(), policy, max_batch=2, max_len=16)
        with pytest.raises(ValueError, match=f"arrival={arrival!r}"):
            engine.add_request([1], SamplingParams(1), arrival)
        assert not engine.has_work and not engine.scheduler.waiting
        for when in (1e12, -1e12):  # another clock's: served all the same
            for priority in PRIORITIES:
                engine.add_request([1, 2], SamplingParams(2), arrival=when, priority=priority)
        while engine.has_work:
            engine.step()


@pytest.mark.parametrize("decodes, max_len", [(3, 64), (1, 16), (40, 16)])
def test_the_budget_command_prints_why_and_writes_everything(decodes, max_len, tmp_path, capsys, monkeypatch):
    machine = {"device": "-", "threads": 1, "torch": "-", "model": "-", "parameters": 1, "dtype": "-", "compiled": 0}
    monkeypatch.setattr("bench_budget.describe_machine", lambda *_: machine)
    options = ["--decodes", str(decodes), "--max-len", str(max_len), "--model", "llama-tiny", "--device", "cpu"]
    files = ["--json", str(tmp_path / "b.json"), "--plot", str(tmp_path / "b.png")]
    bench.main(["budget", "--slo-tbt", "100", "--dtype", "float32", *options, *files])
    text, report = capsys.readouterr().out, json.loads((tmp_path / "b.json").read_text())
    tile = min(32, max_len)
    assert report["budget"] == max(max_len, (decodes // tile + 1) * tile) // tile * tile  # an SLO that all meet
    assert f"Token budget {report['budget']}: the largest of whole tiles" in text and "the strict SLO is" in text
    assert {row["context"] for row in report["profile"]} == {max(1, max_len // 8), max_len // 2}
    assert (tmp_path / "b.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="tbt_slo=1e-09: no token budget meets it"):
        bench.main(["budget", "--slo-tbt", "1e-9", "--dtype", "float32", *options])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("", "--slo-tbt"),
        ("--slo-tbt 0", "--slo-tbt 0"),
        ("--slo-tbt nan", "--slo-tbt nan"),
        ("--slo-tbt 1 --contexts 5,0", "--contexts 5,0"),
        ("--slo-tbt 1 --contexts 5000", "--contexts 5000"),
        ("--slo-tbt 1 --decodes 0", "--decodes 0"),
        ("--slo-tbt 1 --tile 0", "--tile 0"),
        ("--slo-tbt 1 --plot /no/such/dir/a.png", "--plot /no/such/dir/a.png"),
    ],
)
def test_the_budget_command_refuses_what_makes_no_sense(arguments, message, capsys):
    with pytest.raises(SystemExit):
        bench.main(["budget", "--device", "cpu", *arguments.split()])
    assert message in capsys.readouterr().err
