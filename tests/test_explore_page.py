"""The page of `bench.py explore` in a browser, held against the cost model and `serve --json`."""

import json

import pytest

from bench import main
from lab.commands import explore
from lab.simulator.cost_model import CostModel
from tests.pages import (
    choose,
    opened,
    recorded,
    shown_runs,
    texts,
)


@pytest.mark.parametrize("decodes, chunk", [(1, 0), (32, 0), (0, 225), (31, 225)])
def test_the_box_of_costs_says_what_the_cost_model_says(open_explored, decodes, chunk):
    cost = CostModel.named(explore.MODEL)

    def ms(rows):
        linear_s = cost.layers * cost.layer_seconds([(0, 0, rows)]).linear
        return f"{1e3 * linear_s:#.3g} ms"

    tab = open_explored("#policy=vllm")
    for field, value in ("costdecodes", decodes), ("costchunk", chunk):
        tab.evaluate(f"$('{field}').value = {value}; draw_costs()")
    line = tab.text_content("#costline")
    counts = texts(tab, ".counts b")
    if not chunk:
        assert counts == [ms(1)]  # reading, as long as for one row
        assert f": {counts[0]}, as one. Up to 128 rows reading takes longer" in line
    else:
        assert counts == [ms(256)]  # whole tiles
        assert (f"add nothing to its {ms(256)}; alone they take {ms(1)}" in line) == (decodes > 0)


POLICIES = ["vllm", "sarathi-serve"]


def test_bench_page_and_exercise_count_the_same_stalls(open_explored, show, tmp_path):
    cost = CostModel.named(explore.MODEL)
    requests = [(0, 64, 40)] * 2 + [(0.1, 1000, 20)] * 2
    requests.append((9, 2008, 40))  # alone, as long as max_len
    expected = [2, 0]  # A and B stall while the prompts of C and D are computed whole

    tab = open_explored("#policy=vllm&beside=sarathi-serve")
    slo_s = tab.evaluate("data.slo_s")
    assert tab.evaluate("panes.map(pane => pane.run.stalls.length)") == expected

    runs = {
        policy: recorded(
            policy,
            lambda batch: cost.seconds([(0, chunk.start, chunk.length) for chunk in batch]),
            requests=requests,
        )
        for policy in POLICIES
    }
    tab = show(runs, slo_s=slo_s)
    assert tab.evaluate("panes.map(pane => pane.run.stalls.length)") == expected

    sizes = f"--max-len 2048 --chunk 256 --batch 32 --trace {explore.TRACE} --slo {slo_s}"
    simulated = f"serve --simulate a100-80gb --preset {explore.MODEL} {sizes}"
    file = tmp_path / "serve.json"
    main([*simulated.split(), "--policies", ",".join(POLICIES), "--json", str(file)])
    report = json.loads(file.read_text("utf-8"))["runs"]
    assert [report[policy]["stalls"]["over_slo"] for policy in POLICIES] == expected


def test_the_costs_of_explore_are_those_of_decodes_and_a_chunk_alone_and_together():
    cost = CostModel.named(explore.MODEL)
    decodes_s = cost.seconds([(0, 1024, 1)] * 32)
    chunk_s = cost.seconds([(0, 0, 224)])
    costs = explore.measure_costs(cost)
    assert costs["decodes_s"] == pytest.approx(decodes_s)
    assert costs["chunk_s"] == pytest.approx(chunk_s)
    assert costs["both_s"] < 0.75 * (decodes_s + chunk_s)  # decodes ride along


def test_the_page_of_ones_own_policy_opens_on_it(browser, explored):
    with opened(browser, f"file://{explored}", skip_opening=False) as tab:
        tab.wait_for_function("panes.length === 2 && !dirty")
        names = [run.split(" | ")[0] for run in shown_runs(tab)]
        assert names == ["ShortestFirst", "sarathi-serve"]
        assert not tab.is_visible("#opening") and tab.is_visible("#choices")


def test_the_address_restores_what_was_shown(open_explored):
    shown = "[panes.map(pane => pane.run.name), cursor, pinned_request, view.from, view.to]"
    tab = open_explored()
    choose(tab, "policy", "vllm")
    choose(tab, "load", "burst")
    tab.keyboard.press("g")
    tab.wait_for_function("location.hash.includes('request=')")
    address = tab.url
    *before, window = *tab.evaluate(shown)[:3], tab.evaluate("[view.from, view.to]")
    assert "policy=vllm&chunk=256&load=burst&beside=sarathi-serve&i=" in address
    tab = open_explored("#" + address.partition("#")[2])
    *after, low, high = tab.evaluate(shown)
    assert after == before and after[-1] is not None
    assert [low, high] == pytest.approx(window, abs=1e-3)
    tab.evaluate("location.hash = '#policy=orca&load=steady&i=7'")
    tab.wait_for_function("panes.length == 1 && cursor == 6")
    assert shown_runs(tab) == ["orca | * | steady"]
