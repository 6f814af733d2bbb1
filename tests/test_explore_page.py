"""The page of `bench.py explore`: its opening, buttons and boxes, in both themes and all sizes."""

import re
from itertools import pairwise

import pytest

from bench import main
from lab.commands import explore
from lab.explore.runs import record_run
from lab.simulator.cost_model import CostModel
from tests.pages import (
    choose,
    enter,
    in_turn,
    opened,
    recorded,
    seconds,
    shown_runs,
    texts,
)

# the colours in which the canvases write, each on the one that it is written on
WRITTEN = ["back stall", "back prefill", "ink back", "soft back"]
VIOLATIONS = """async script => {
    (0, eval)(script);
    const {violations} = await axe.run(document, {resultTypes: ["violations"]});
    return violations.map(({id, nodes}) => [id, ...nodes.map(({html}) => html.slice(0, 99))]); }"""


def check_page(tab):
    """Nothing is wider than the window, and axe-core finds nothing, in both themes."""
    from axe_playwright_python.base import AXE_SCRIPT

    for _ in range(2):
        tab.keyboard.press("d")
        tab.wait_for_function("!dirty")
        assert tab.evaluate(VIOLATIONS, AXE_SCRIPT) == []
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("size", [(1400, 900), (800, 1200), (390, 844)])
def test_the_page_fits_and_can_be_read_and_the_tour_covers_nothing(any_browser, explored, size):
    with opened(any_browser, f"file://{explored}", size, skip_opening=False) as tab:
        tab.evaluate("end_opening()")
        for front, back in map(str.split, WRITTEN):
            style = f"color:var(--{front});background:var(--{back})"
            tab.evaluate(f"$('opening').insertAdjacentHTML('beforeend', '<p style={style}>A</p>')")
        check_page(tab)
        enter(tab)
        check_page(tab)
        before = tab.evaluate("cursor")
        tab.keyboard.press("ArrowLeft")
        assert tab.evaluate("cursor") == before - 1
        tab.keyboard.press("t")
        for stop in range(1, 10):
            tab.wait_for_function(f"$('stop').textContent.startsWith('{stop} of 9: ') && !dirty")
            assert len(tab.text_content("#stoptext")) > 40
            marks = tab.evaluate("TOUR[stop_number].marks")
            if marks[0] == "lanes":
                top = "focused.canvas.getBoundingClientRect().top"
                tab.wait_for_function(f"{top} >= 0")
                card = "$('tour').getBoundingClientRect().top"
                assert tab.evaluate(f"{top} + focused.lanes_height <= {card}")
            if stop == 2:
                check_page(tab)
            tab.keyboard.press("Enter")  # the button "next" has the focus
        assert tab.evaluate("$('tour').hidden")


OPENING = """() => [...document.querySelectorAll("body *")].filter(element =>
    element.checkVisibility({visibilityProperty: true})
    && element.matches("button, input, select, p, h1, h2, canvas"))
    .map(element => element.id || element.tagName)"""
PLAYING = ["title", "H2", "CANVAS", "CANVAS", "H2", "CANVAS", "CANVAS", "story"]
BUTTONS = ["chunkslider", "again", "everything", "ownpolicy"]


@pytest.mark.parametrize("size", [(1400, 900), (390, 844)])
def test_the_page_opens_with_one_picture_that_plays_once(open_explored, size):
    tab = open_explored(size=size, skip_opening=False)
    assert shown_runs(tab) == ["vllm | * | A to D", "sarathi-serve | 256 | A to D"]
    assert 0 < tab.evaluate("revealed") < tab.evaluate("range()[1]")
    assert tab.evaluate(OPENING) == [*PLAYING, *BUTTONS]
    tab.evaluate("opening.began -= 1e6")
    tab.wait_for_function("revealed === Infinity && !dirty")
    assert tab.evaluate(OPENING) == [*PLAYING, *BUTTONS]
    whole = "[document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
    assert tab.evaluate(whole) == list(size)  # nothing is below the first screen
    tab.click("#again")
    tab.wait_for_function("revealed < Infinity")
    assert "#" not in tab.url  # or it would not open like this again
    tab.click("#again")  # skips what is left
    assert tab.evaluate("revealed === Infinity")
    tab.click("#everything")
    tab.wait_for_function("$('position').textContent && !dirty")
    assert tab.is_visible("#choices") and not tab.is_visible("#opening")


def test_the_opening_counts_a_stall_and_follows_the_chunk_size(open_explored):
    tab = open_explored(skip_opening=False)
    tab.evaluate("end_opening()")
    written = """moment => {
        const texts = [], pen = {fillText: text => texts.push(text), fillRect() {}};
        pen.measureText = () => ({width: 0});
        revealed = moment;
        draw_opening(panes[0], pen);
        revealed = Infinity;
        return texts.filter(text => text.includes("ms")); }"""
    gap = tab.evaluate("panes[0].run.longest_gap()")
    longest = f"{1e3 * (gap['until'] - gap['since']):.0f} ms"
    for later, seen in (0.05, []), (0.1, ["100 ms"] * 2), (1, [longest] * 2):  # A and B
        assert tab.evaluate(written, gap["since"] + later) == seen
    tab.locator("#chunkslider").press("Home")
    tab.wait_for_function("panes[1].run.name === 'sarathi-serve | 128 | A to D'")
    tab.wait_for_function("$('story').textContent.includes('chunk 128')")


def test_who_wants_no_motion_sees_the_last_frame(open_explored):
    tab = open_explored(skip_opening=False, reduced_motion="reduce")
    tab.wait_for_function("opening.is_open && dirty === false")
    assert tab.evaluate("[revealed === Infinity, opening.began]") == [True, None]
    assert tab.is_visible("#again")


def test_all_boxes_show_the_state_after_an_iteration(open_explored):
    tab = open_explored("#policy=vllm&i=11")
    tab.wait_for_function("$('numbers').innerText.includes('2 go on')")
    gap = tab.evaluate("focused.run.longest_gap()")
    wait = tab.evaluate("focused.run.iterations[10].end") - gap["since"]
    assert seconds(tab.text_content("[data-k='tbt-1']")) == pytest.approx(wait, rel=5e-3)
    assert re.search(r"stalls, longer than [\d.]+ ms\s+2 go on\s+2\n", *texts(tab, "#numbers"))
    running = texts(tab, "#running tr")
    assert ["1,000 of 1,000" in row for row in running] == [False, False, False, True, True]
    assert "The queue after it: 0" in tab.text_content("#queuename")


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


def test_bench_page_and_exercise_count_the_same_stalls(open_explored, show, capsys):
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
    main([*simulated.split(), "--policies", ",".join(POLICIES)])
    head, _, *rows = re.findall(r"(?m)^\|(.*)\|$", capsys.readouterr().out)[:4]
    column = [name.strip() for name in head.split("|")].index("stalls")
    assert [int(row.split("|")[column]) for row in rows] == expected


def test_explore_has_a_run_for_every_button(open_explored):
    tab = open_explored()
    choices = tab.evaluate("data.choices")
    assert choices["policy"][0] == "ShortestFirst" and len(choices["load"]) == 9
    found = tab.evaluate(
        """async () => { const names = [];
            for (const policy of data.choices.policy)
            for (const chunk of data.choices.chunk)
            for (const load of data.choices.load) {
                await choose({policy, chunk, load, beside: "nothing"});
                names.push([policy, chunk, load, panes[0].run.name.split(" | ")]);
            } return names; }"""
    )
    assert len({tuple(name) for *_, name in found}) == len(tab.evaluate("data.runs"))
    for policy, chunk, load, name in found:
        if policy in explore.REMEDIES:
            load = explore.LONG_AMONG_SHORT
        if policy == explore.POOLS_NAME:
            load = explore.TWO_GPUS
        assert name in ([policy, chunk, load], [policy, "*", load])
    tab.evaluate("choose({policy: 'ppas', beside: 'interval'})")  # it chooses the load, too
    assert tab.get_attribute("[data-label='one long among short']", "aria-pressed") == "true"
    assert len(shown_runs(tab)) == 2
    tab.evaluate("choose({load: 'steady'})")  # of which neither has a run
    assert shown_runs(tab) == ["ShortestFirst | 1024 | steady"]
    assert tab.is_hidden("[data-label='ppas']")


def test_what_was_seen_and_chosen_stays(open_explored):
    tab = open_explored("#policy=sarathi-serve&chunk=128")
    quick = """async () => {
        const click = label => document.querySelector(`[data-label="${label}"]`).click();
        click("1024");
        click("128");  // is loaded, the one before is not
        await new Promise(end => setTimeout(end, 400)); }"""
    tab.evaluate(quick)
    assert shown_runs(tab) == ["sarathi-serve | 128 | A to D"]
    tab.evaluate("set_view(-Infinity, Infinity), go(focused.run, 9)")
    moment = tab.evaluate("moment")
    for name in ("request-level", "sarathi-serve", "orca"):
        tab.evaluate(f"choose({{policy: '{name}', load: 'overload'}})")
        whole = "[view.from <= focused.run.begin, view.to >= focused.run.end, moment]"
        assert tab.evaluate(whole) == [True, True, moment]
    tab.evaluate("choose({policy: 'vllm'})")
    assert tab.is_disabled("[data-label='256']")  # which it does not go by
    tab.evaluate("tour(0); tour(-1)")
    tab.wait_for_timeout(300)
    assert tab.is_hidden("#tour")
    tab.select_option("#beside", "vllm")
    choose(tab, "policy", "vllm")
    assert len(shown_runs(tab)) == 1
    assert tab.inner_text("#notice") == "vllm is compared with itself: one picture shows both."
    tab.click("[data-label='orca']")
    tab.wait_for_function("panes.length == 2 && panes[1].run.name.startsWith('vllm')")
    assert not tab.is_visible("#notice")
    tab.click("#start")
    tab.wait_for_function("$('stop').textContent[0] == '1'")


def test_the_loads_of_explore_are_as_they_are_called():
    loads = explore.make_loads(CostModel.named(explore.MODEL), 60)
    runs = {name: record_run("sarathi-serve", "256", load, 1.0) for name, load in loads.items()}
    records = {name: in_turn(run) for name, run in runs.items()}
    preempting = {name for name in runs if any(r["preempted"] for r in records[name])}
    assert "tight memory" in preempting and "overload" not in preempting
    longest_queue = {name: max(r["waiting"] for r in records[name]) for name in runs}
    assert longest_queue["overload"] > 2 * longest_queue["steady"]
    assert longest_queue["burst"] >= 14  # a quarter of 60 at once
    prompts = [arrival.prompt_len for arrival in loads["one long among short"].arrivals]
    assert len(prompts) == 60 and prompts.count(200) == 59 and prompts[14] == 16_000
    first_starts = {}
    for request_id, start, _ in sum([r["chunks"] for r in records["shared prefixes"]], []):
        first_starts.setdefault(request_id, start)
    assert sum(start >= 448 for start in first_starts.values()) > 50  # behind the shared prefix
    assert runs["pipeline bubbles"].settings["micro_batches"] == 2
    assert [name for name in runs if runs[name].settings.get("letters")] == ["A to D"]


def test_the_costs_of_explore_are_those_of_decodes_and_a_chunk_alone_and_together():
    cost = CostModel.named(explore.MODEL)
    decodes_s = cost.seconds([(0, 1024, 1)] * 32)
    chunk_s = cost.seconds([(0, 0, 224)])
    costs = explore.measure_costs(cost)
    assert costs["decodes_s"] == pytest.approx(decodes_s)
    assert costs["chunk_s"] == pytest.approx(chunk_s)
    assert costs["both_s"] < 0.75 * (decodes_s + chunk_s)  # decodes ride along


def test_explore_looks_at_the_longest_gap(open_explored):
    tab = open_explored("#policy=vllm&beside=sarathi-serve&i=11")
    assert texts(tab, ".run h2") == ["vllm", "sarathi-serve, chunk 256"]
    stalled, served = texts(tab, ".run .gap")
    who = r"request A, token 11: waited \d+ ms for the prompts of requests C and D"
    assert re.search(who, stalled)
    assert "times the usual gap, a stall" in stalled and "stall" not in served
    tab = open_explored()  # a policy of one's own comes first
    assert shown_runs(tab) == ["ShortestFirst | 256 | A to D", "sarathi-serve | 256 | A to D"]
    gap = tab.evaluate("focused.run.longest_gap()")
    iteration = tab.evaluate("focused.run.iterations[cursor]")
    assert gap["since"] <= iteration["start"] < gap["until"] and iteration["chunks"]


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


@pytest.mark.parametrize(
    "fragment, names, notice",
    [
        (
            "policy=Mine+(yours)&load=steady&beside=Mine+(yours)",
            ["ShortestFirst | 256 | steady"],
            "The address names Mine (yours), which is not there yet: run it in the editor below.",
        ),
        (
            "policy=vllm&load=heavy&beside=nobody",
            ["vllm | * | A to D"],
            "The address names heavy, which this page does not have. "
            "The address names nobody, which this page does not have.",
        ),
    ],
)
def test_what_an_address_names_and_is_not_there_is_said(open_explored, fragment, names, notice):
    tab = open_explored(f"#{fragment}")
    tab.wait_for_function("$('notice').textContent")
    assert shown_runs(tab) == names and texts(tab, "#notice") == [notice]
    tab.click("[data-label='A to D']")
    tab.wait_for_function("!$('notice').textContent")  # it was said once


def test_a_tap_says_who_waited(open_explored):
    tab = open_explored("#policy=vllm", size=(375, 800), has_touch=True)
    box = tab.locator("canvas[role=img]").first.bounding_box()
    assert box["y"] + tab.evaluate("panes[0].lanes_height") < 800  # seen without scrolling
    tab.touchscreen.tap(box["x"] + tab.evaluate("panes[0].x(0.2)"), box["y"] + 5)
    tab.wait_for_function("!$('tip').hidden")
    assert re.match(r"Request A, token 11: waited \d+ ms for", tab.text_content("#tip"))


@pytest.mark.parametrize("chunk", ["256", "1024"])
def test_the_opening_says_what_the_run_of_a_chunk_size_did(open_explored, chunk):
    load = explore.make_loads(CostModel.named(explore.MODEL), 12)["A to D"]
    records = in_turn(record_run("sarathi-serve", chunk, load, 1.0))
    computed = [  # of C and D, in each iteration
        [length for record in records for other, _, length in record["chunks"] if other == request]
        for request in (2, 3)
    ]
    ends = [
        [
            record["end"]
            for record in records
            if request in record["decodes"]
            or any(
                other == request and start + length == load.arrivals[request].prompt_len
                for other, start, length in record["chunks"]
            )
        ]
        for request in range(4)
    ]
    gaps = [after - before for times in ends for before, after in pairwise(times)]
    waits = [times[0] - load.arrivals[request].time for request, times in enumerate(ends)]

    tab = open_explored(skip_opening=False)
    tab.evaluate(f"choose({{chunk: '{chunk}'}}).then(end_opening)")
    facts = tab.evaluate("facts_of(panes[1].run)")
    assert facts["late"] == [2, 3] and facts["last"] == 3
    assert facts["cut"] == [i + 2 for i, lengths in enumerate(computed) if len(lengths) > 1]
    assert facts["gap_s"] == pytest.approx(max(gaps))
    assert facts["ttft_s"] == pytest.approx(max(waits))
    is_stall = facts["gap_s"] > tab.evaluate("SLO")
    assert tab.evaluate("document.querySelectorAll('#story .stall').length") == 1 + is_stall
    written = """() => {
        const texts = [], pen = {fillText: text => texts.push(text), fillRect() {}};
        pen.measureText = () => ({width: 0});
        draw_opening(panes[1], pen);
        return texts.filter(text => text.includes("token")); }"""
    expected = {"256": [], "1024": sum(computed, [])}[chunk]  # where bars have room
    counts = [int(text.split()[0].replace(",", "")) for text in tab.evaluate(written)]
    assert counts == expected


@pytest.mark.parametrize("own", [True, False])
def test_the_tour_begins_with_the_cockpit_unless_a_policy_of_ones_own_is_there(open_explored, own):
    tab = open_explored(skip_opening=False)
    if not own:
        tab.evaluate("axes[0][1].shift()")
    tab.click("#everything")
    tab.wait_for_function(f"stop_number === {-1 if own else 0} && $('position').textContent")
    assert tab.is_visible("#tour") == (not own)
    assert shown_runs(tab)[0].startswith("ShortestFirst" if own else "vllm")


def test_the_box_of_costs_begins_with_the_batch_of_the_tour(open_explored):
    tab = open_explored("#policy=vllm")
    sliders = "[$('costdecodes').valueAsNumber, $('costchunk').valueAsNumber]"
    costs = tab.evaluate("data.costs")
    assert tab.evaluate(sliders) == [costs["decodes"], costs["chunk"]]
    added = tab.evaluate("format_seconds(data.costs.both_s - data.costs.chunk_s)")
    assert texts(tab, "#costwhole b")[-1] == added


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
