"""The page of `bench.py explore` in a browser, held against the cost model and `serve --json`."""

import json
from itertools import pairwise

import pytest

from bench import main
from lab.commands import explore
from lab.explore.runs import record_run
from lab.simulator.cost_model import CostModel
from tests.pages import (
    DRAWN,
    choose,
    in_turn,
    opened,
    recorded,
    seconds,
    shown_runs,
    texts,
)


@pytest.mark.parametrize("decodes, chunk, tiles", [(1, 0, 1), (32, 0, 1), (31, 225, 256)])
def test_the_box_of_costs_says_what_the_cost_model_says(open_explored, decodes, chunk, tiles):
    cost = CostModel.named(explore.MODEL)
    linear_s = cost.layers * cost.layer_seconds([(0, 0, tiles)]).linear
    tab = open_explored("#policy=vllm")
    costs = tab.evaluate("data.costs")
    batch = tab.evaluate("[$('costdecodes').valueAsNumber, $('costchunk').valueAsNumber]")
    assert batch == [costs["decodes"], costs["chunk"]]  # that of the tour
    added_s = costs["both_s"] - costs["chunk_s"]
    assert seconds(texts(tab, "#costwhole b")[-1]) == pytest.approx(added_s, rel=5e-3)
    tab.evaluate(f"$('costdecodes').value = {decodes}; $('costchunk').value = {chunk}")
    tab.evaluate("draw_costs()")
    (longest,) = texts(tab, ".counts b")
    assert seconds(longest) == pytest.approx(linear_s, rel=5e-3)


POLICIES = ["vllm", "sarathi-serve"]


def test_bench_page_and_exercise_count_the_same_stalls(open_explored, show, tmp_path):
    """A and B stall while the prompts of C and D are computed whole."""
    cost = CostModel.named(explore.MODEL)
    requests = [
        (0, 64, 40),
        (0, 64, 40),
        (0.1, 1000, 20),
        (0.1, 1000, 20),
        (9, 2008, 40),  # alone, as long as max_len
    ]
    stalls = "panes.map(pane => pane.run.stalls.length)"
    tab = open_explored("#policy=vllm&beside=sarathi-serve")
    slo_s = tab.evaluate("data.slo_s")
    assert tab.evaluate(stalls) == [2, 0]

    def seconds_of(batch):
        return cost.seconds([(0, chunk.start, chunk.length) for chunk in batch])

    runs = {policy: recorded(policy, seconds_of, requests=requests) for policy in POLICIES}
    assert show(runs, slo_s=slo_s).evaluate(stalls) == [2, 0]
    sizes = f"--max-len 2048 --chunk 256 --batch 32 --trace {explore.TRACE} --slo {slo_s}"
    simulated = f"serve --simulate a100-80gb --preset {explore.MODEL} {sizes}"
    file = tmp_path / "serve.json"
    main([*simulated.split(), "--policies", ",".join(POLICIES), "--json", str(file)])
    report = json.loads(file.read_text("utf-8"))["runs"]
    assert report["vllm"]["stalls"]["over_slo"] == 2
    assert report["sarathi-serve"]["stalls"]["over_slo"] == 0


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
        assert not tab.is_visible("#opening")


def test_the_address_restores_what_was_shown(open_explored):
    shown = "[panes.map(pane => pane.run.name), cursor, pinned_request]"
    tab = open_explored()
    choose(tab, "policy", "vllm")
    choose(tab, "load", "burst")
    tab.keyboard.press("g")
    tab.wait_for_function("location.hash.includes('request=')")
    before = tab.evaluate(shown)
    tab = open_explored("#" + tab.url.partition("#")[2])
    assert tab.evaluate(shown) == before


def times_of(records, request, prompt_len):
    """When the tokens of a request were there."""
    times = []
    for record in records:
        is_last = [start + n == prompt_len for r, start, n in record["chunks"] if r == request]
        if request in record["decodes"] or any(is_last):
            times.append(record["end"])
    return times


WRITTEN = """() => {  // the counts of tokens in the bars, where these have room
    const texts = [], pen = {fillText: text => texts.push(text), fillRect() {}};
    pen.measureText = () => ({width: 0});
    draw_opening(panes[1], pen);
    const counts = texts.filter(text => text.includes("token"));
    return counts.map(text => parseInt(text.replace(",", ""))); }"""


@pytest.mark.parametrize(
    "chunk, cut, written", [("256", [2, 3], []), ("1024", [3], [1000, 22, 978])]
)
def test_the_opening_says_what_the_run_of_a_chunk_size_did(open_first, chunk, cut, written):
    load = explore.make_loads(CostModel.named(explore.MODEL), 12)["A to D"]
    arrivals = load.arrivals
    records = in_turn(record_run("sarathi-serve", chunk, load, 1.0))
    gaps = []
    for request, arrival in enumerate(arrivals):
        times = times_of(records, request, arrival.prompt_len)
        gaps += [after - before for before, after in pairwise(times)]
    tab = open_first()
    tab.evaluate(f"choose({{chunk: '{chunk}'}}).then(end_opening)")
    tab.wait_for_function(DRAWN)
    facts = tab.evaluate("facts_of(panes[1].run)")
    assert facts["late"] == [2, 3]
    assert facts["cut"] == cut
    assert facts["last"] == 3
    assert facts["gap_s"] == pytest.approx(max(gaps))
    assert facts["ttft_s"] == pytest.approx(times[0] - arrivals[3].time)
    assert tab.evaluate(WRITTEN) == written
    *_, gap, ttft = texts(tab, "#story b")
    assert seconds(gap) == pytest.approx(max(gaps), rel=5e-3)
    assert seconds(ttft) == pytest.approx(facts["ttft_s"], rel=5e-3)


def test_the_tour_begins_with_the_cockpit(open_first):
    tab = open_first()
    tab.click("#everything")
    tab.wait_for_function("stop_number === 0 && $('position').textContent")
    assert tab.is_visible("#tour") and shown_runs(tab)[0].startswith("vllm")


def test_hatched_is_as_much_of_the_stages_as_there_are_bubbles(open_explored):
    tab = open_explored("#policy=vllm&load=pipeline+bubbles")
    load = explore.make_loads(CostModel.named(explore.MODEL), 12)["pipeline bubbles"]
    bubbles = [0.0, 0.0]
    for record in in_turn(record_run("vllm", "*", load, tab.evaluate("SLO"))):
        for stage, (_, _, *bubble) in enumerate(record["stages"]):
            bubbles[stage] += bubble[0] if bubble else 0.0
    area = """() => {
        set_view(-Infinity, Infinity);
        const areas = [0, 0], [top] = panes[0].band("stages");
        const pen = {fillRect(x, y, width, height) {
            if (this.fillStyle === "hatched") areas[(y - top) / STAGE_HEIGHT] += width * height;
        }, createPattern: () => "hatched"};
        draw_stages(panes[0], pen);
        return areas.map(area => area / (STAGE_HEIGHT - 3) * panes[0].seconds_per_pixel); }"""
    assert tab.evaluate(area) == pytest.approx(bubbles, rel=1e-3)


def test_nothing_is_seen_before_there_is_a_run(browser, explored):
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(f"file://{explored}")
    assert not any(map(tab.is_visible, ["#title", "#bar", "#details h2", "#opening"]))
    context.close()
