"""The schedule page: what a real browser makes of the records."""

import json
import random
import re
import shlex
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench import main
from config import EngineConfig
from engine import Engine
from lab.commands.today import papers_policies
from lab.measure.metrics import find_stalls, summarize_run
from lab.measure.workload import Arrival
from lab.simulator.cost_model import CostModel
from lab.simulator.simulation import bubble_kinds, simulate
from page.html import page
from page.records import Recorder
from policies import ALL_POLICIES, POLICIES
from policies.cards import CARDS
from sampling import SamplingParams
from tests.helpers import tiny_model, with_slow
from tests.pages import (
    LOADS,
    PIXELS,
    RED,
    SLO_S,
    a_load,
    a_stall,
    data_of,
    expected_metrics,
    in_turn,
    opened,
    opened_runs,
    recorded,
    seconds,
    shown_runs,
    simulated,
    texts,
)
from tests.servers import serving


@pytest.mark.parametrize("policy", with_slow(LOADS, fast=["vllm", "sarathi-serve"]))
def test_every_iteration_shows_what_really_was(show, policy):
    run, truth = simulated(policy, **LOADS[policy])
    preempted = sum(c.preemptions for c in run.completions)
    reserves = "sarathi", "orca-best", "orca, shared, in a pipeline"  # all at admission
    assert preempted or policy in reserves
    order = list(range(len(in_turn(truth))))
    random.Random(0).shuffle(order)  # backwards and forwards
    order = order[:300]
    tab = show({policy: truth})
    shown = tab.evaluate(
        """order => order.map(k => {
            const {run} = focused, state = run.at(k), iteration = run.iterations[k];
            const running = [...state.progress.values()].filter(
                r => r.pages.length && r.micro_batch === iteration.micro_batch);
            return [running.map(r => [r.id, r.computed, r.output, [...r.pages]]),
                    run.waiting(state, iteration).map(r => r.id)];
        })""",
        order,
    )
    cached = tab.evaluate("focused.run.iterations.at(-1).cached_tokens")
    assert cached == sum(c.cached_tokens for c in run.completions)
    assert (cached > 5000) == ("shared" in policy)
    for k, (running, queue) in zip(order, shown, strict=True):
        assert {i: progress for i, *progress in running} == truth.states[k]
        # a pipeline's queue is seen when its batch is made, not later
        if "pp" not in LOADS[policy]:
            assert queue == truth.waiting[k]


CELLS = """rows => [...document.querySelectorAll(rows)].map(row => Object.fromEntries(
    [...row.querySelectorAll("[data-k]")].map(cell => [cell.dataset.k, cell.innerText])))"""


def test_numbers_and_table_are_those_of_the_library(any_browser, tmp_path):
    runs = {"vllm": simulated("vllm", pages=48), "sarathi-serve": simulated("sarathi-serve")}
    recorders = {name: recorder for name, (_, recorder) in runs.items()}
    expected = [expected_metrics(*run) for run in runs.values()]
    run, _ = runs["vllm"]
    summary = summarize_run(run.completions, run.iterations, run.seconds)
    with opened_runs(any_browser, tmp_path, recorders) as tab:
        assert tab.evaluate("data.slo_s") == SLO_S
        exact = tab.evaluate("panes.map(pane => pane.run.metrics())")
        tab.evaluate("go(focused.run, Infinity)")
        tab.wait_for_function("$('numbers').innerText.includes('first token\\t\\t\\t40')")
        tab.wait_for_function("$('policytable').rows.length === 3")
        table = tab.evaluate(CELLS, "#policytable tbody tr")
        (numbers,) = tab.evaluate(CELLS, "#numbers")
        rows = dict(re.findall(r"(?m)^(.+?)\t+(.+)$", texts(tab, "#numbers")[0]))
    assert exact == [pytest.approx(metrics, rel=1e-4) for metrics in expected]
    for row, metrics in zip(table, expected, strict=True):
        for key in ("ttft_p50", "ttft_p90", "tbt_p99", "longest"):
            assert seconds(row[key]) == pytest.approx(metrics[key], rel=5e-3)
        assert row["tokens_per_s"] == f"{metrics['tokens_per_s']:,.0f}"
        assert row["cache"] == f"{100 * metrics['cache']:.0f} %"
        assert row["stalls"] == f"{metrics['stalls']:,}"
    for key, latency in ("ttft", summary.ttft_s), ("tbt", summary.tbt_s):
        for q, value in (0.5, latency.p50), (0.99, latency.p99), (1, latency.max):
            assert seconds(numbers[f"{key}-{q}"]) == pytest.approx(value, rel=5e-3)
    assert rows["preemptions"] == f"{summary.preemptions}" != "0"
    assert rows["stalls, longer than 50.0 ms"] == f"{expected[0]['stalls']}" != "0"


def test_the_keyboard_is_enough(show):
    runs = {name: simulated(name)[1] for name in ("vllm", "sarathi-serve")}
    last = len(in_turn(runs["vllm"])) - 1
    tab = show(runs)

    def after(keys, expression="cursor"):
        for key in keys.split():
            tab.keyboard.press(key.replace("Space", " "))
        tab.wait_for_function("!dirty")
        return tab.evaluate(expression)

    steps = "ArrowRight ArrowRight ArrowRight ArrowLeft"
    for keys, cursor in (steps, 2), ("Shift+ArrowRight", 12), ("End", last), ("Home", 0):
        assert after(keys) == cursor
    whole, near, again = [after(key, "view.to - view.from") for key in "0+0"]
    assert (near, again) == (pytest.approx(0.6 * whole), pytest.approx(whole))
    tab.select_option("#speed", "100")
    tab.evaluate("document.activeElement.blur()")
    after("Space")
    tab.wait_for_function("cursor > 20")
    stopped = after("Space")
    tab.wait_for_timeout(200)
    assert tab.evaluate("cursor") == stopped
    assert after("d", "document.documentElement.dataset.theme") == "dark"
    assert after("o", "focused === panes[1]")
    with tab.expect_download():
        after("s")
    tab.focus("#scrub")
    assert after("Home ArrowRight") == 1


def test_tab_reaches_everything_and_lanes_are_told(show):
    tab = show({"vllm": simulated("vllm", pages=48)[1]})
    tab.evaluate("go(focused.run, 200)")
    tab.wait_for_function("!dirty")
    controls = "[...document.querySelectorAll('button, select, input, summary')]"
    expected = tab.evaluate(f"{controls}.filter(c => c.offsetParent && !c.disabled).length")
    for _ in range(expected):
        tab.keyboard.press("Tab")
        tab.evaluate("document.activeElement.dataset.tabbed = 1")
    assert tab.evaluate(f"{controls}.filter(c => c.dataset.tabbed).length") == expected > 20
    lanes = texts(tab, ".run .sr li")
    said = r"Request 0: a prompt of [\d,]+ tokens, first token after .*, longest gap .* stall"
    assert len(lanes) == 40 and re.match(said, lanes[0])
    chip = tab.get_by_role("button", name=re.compile("^request [0-9]+: token")).first
    chip.focus()
    request = int(chip.get_attribute("data-request"))
    tab.keyboard.press("Enter")
    tab.wait_for_function("!dirty")
    assert tab.evaluate("[pinned_request, lit_request]") == [request, request]
    assert chip.get_attribute("aria-pressed") == "true"
    tab.keyboard.press("ArrowLeft")
    tab.wait_for_function("!dirty")
    focused = "document.activeElement.dataset.request ?? document.activeElement.id"
    assert tab.evaluate(focused) in (str(request), "chips")  # not lost when the batch changes
    assert f"equest {request}" in "".join(texts(tab, "#pinnedline, #gapline"))


def test_the_tour_has_nine_stops_and_shows_what_it_says(show):
    run, truth = simulated("sarathi-serve", pages=40)
    tab = show({"sarathi-serve": truth})
    tab.keyboard.press("t")
    told = []
    for n in range(1, 10):
        tab.wait_for_function(f"$('stop').textContent.startsWith('{n} of 9: ')")
        told.append((tab.text_content("#stoptext"), tab.evaluate("focused.run.iterations[cursor]")))
        tab.keyboard.press("Enter")  # the button "next" has the focus
    assert tab.is_hidden("#tour")
    _, (stall, _), (_, chunk), (_, ride), (_, budget), (short, _), _, (_, memory), (_, load) = told
    most_tokens = max(c.prompt_len for c in run.completions)
    slowest = max(c.ttft for c in run.completions if 4 * c.prompt_len <= most_tokens)
    assert f"a prompt of {most_tokens:,} tokens" in short
    waits = re.search(r"waits ([\d.]+ m?s) for", short)
    assert seconds(waits[1]) == pytest.approx(slowest, rel=5e-3)
    longest = max(gap for c in run.completions for gap in c.tbt)
    waited = re.search(r"waited ([\d.]+ m?s)", stall)
    assert seconds(waited[1]) == pytest.approx(longest, rel=5e-3)
    lengths = {c.id: c.prompt_len for c in run.completions}
    assert any(n < lengths[i] for i, _, n in chunk["chunks"])
    records = in_turn(truth)
    assert len(ride["decodes"]) == max(len(r["decodes"]) for r in records if r["chunks"])
    assert budget["why"][0] == "budget" and memory["preempted"]
    assert load["waiting"] == max(r["waiting"] for r in records)


SHORT = [(0, 10, 9)] * 3
SENTENCES = [  # policy, load, iteration, what is said of it
    (
        "sarathi-serve",
        dict(requests=[*SHORT, (0.5, 900, 9), (0.5, 500, 9)]),
        2,
        "3 decodes first, then tokens 0 to 252 of request 3's 900, and the budget of 256 is full; "
        "request 4 waits: no budget left.",
    ),
    (
        "sarathi-serve",
        dict(requests=[(0, 30, 9)] * 2 + [(0.5, 10, 9), (0.5, 40, 9)], pages=5, page_size=16),
        4,
        "No page was free: requests 2 and 1 lost their pages and will be computed again; 1 decode "
        "and no prefill; request 1 waits, and 2 behind it: it needs 3 pages and 2 are free.",
    ),
    (
        "vllm",
        dict(requests=[*SHORT, (0.5, 10, 9), (0.5, 1000, 9)]),
        2,
        "Request 3's whole prompt of 10 tokens, and the budget of 1,009: 999 are left; 3 running "
        "decodes wait: this batch is of prefill alone; request 4 waits: its prompt, 1,000 tokens "
        "to compute, is not cut, and 999 are left of the budget.",
    ),
    (
        "orca-best",
        dict(requests=SHORT),
        1,
        "Request 0's whole prompt of 10 tokens; request 1 waits, and 1 behind it: this policy lets "
        "in nobody more in this iteration.",
    ),
    (
        "fastgen",
        dict(requests=[(0, 30, 9)] * 2, pages=5, page_size=16),
        4,
        "1 decode and no prefill; 1 running decode waits: this policy leaves decodes out.",
    ),
    (
        "sarathi-serve",
        dict(requests=[(0, 130, 9, 128), (2, 500, 9, 128)], prefix_caching=True),
        3,
        "1 decode first, then tokens 128 to 382 of request 1's 500 (128 tokens found in the cache),"
        " and the budget of 256 is full.",
    ),
]


def test_a_sentence_says_in_words_why_the_batch_is_as_it_is(show):
    runs = {f"run {i}": recorded(row[0], **row[1]) for i, row in enumerate(SENTENCES)}
    tab = show(runs)
    for name, (_, _, iteration, sentence) in zip(runs, SENTENCES, strict=True):
        tab.evaluate("run => choose({run})", name)
        tab.evaluate("k => go(focused.run, k)", iteration - 1)
        tab.wait_for_function("!dirty")
        assert tab.text_content("#decision") == sentence
    # the last request reads two pages of the first, which has three, beside six of its own
    assert "1: tokens 128 to 382, prefill, 128 found in the cache" in texts(tab, "#chips")[0]
    taken = "9 of 64 pages taken, 2 by several requests, striped"
    assert taken in tab.text_content("#pagesname")
    stripes = """() => {  // page 0 is 18 pixels wide
        const pen = $("pages").getContext("2d");
        return [2, 14].map(y => pen.getImageData(2, y, 1, 1).data.join()); }"""
    assert len(set(tab.evaluate(stripes))) == 2
    tab.evaluate("choose({run: 'run 1'})")
    tab.evaluate("focused.run.iterations[2].free_pages = 3")
    sentence = tab.evaluate("explain(focused.run, 3)")
    assert sentence.startswith("Requests 2 and 1 lost their pages")  # for no page


def long_run():
    """The Recorder of a run of 10,000 iterations and more, with a batch that is always full."""
    arrivals = [Arrival(0.1 * i, 300 + 37 * i % 400, 700 + 53 * i % 600) for i in range(240)]
    _, recorder = simulated("sarathi-serve", pages=512, arrivals=arrivals)
    return recorder


@pytest.mark.slow
def test_ten_thousand_iterations_are_less_than_five_megabytes(show, tmp_path):
    recorder = long_run()
    tab = show({"sarathi-serve": recorder})
    assert tab.evaluate("focused.run.iterations.length") == len(in_turn(recorder)) > 10_000
    assert (tmp_path / "page.html").stat().st_size < 5e6


@pytest.mark.parametrize("width", [1200, 375])
def test_a_stall_is_red_at_every_zoom(any_browser, tmp_path, width):
    with opened_runs(any_browser, tmp_path, {"vllm": a_stall()}, size=(width, 800)) as tab:
        ink = tab.evaluate("palette.ink.match(/\\w\\w/g).map(h => parseInt(h, 16)).join(' ')")

        def pixels(band):
            corners = f"{band}.flatMap((y, i) => [i ? LEFT + panes[0].width : LEFT, y])"
            return tab.evaluate(PIXELS, tab.evaluate(corners))

        for span in (1000, 99, 20, 9, 3, 1, 0.4, 0.1, 0.01):
            tab.evaluate(f"set_view(4.1 - {span} / 2, 4.1 + {span} / 2)")
            tab.wait_for_function("!dirty")
            lane = pixels("[0, panes[0].lane_height - 1]")
            assert lane.get(RED, 0) >= 10, span
            if span == 20:  # the other gaps are far below the SLO of 0.05 s: none is yellow or red
                assert lane[RED] < 0.1 * sum(lane.values())
            if span == 3:
                assert pixels("panes[0].band('gaps')").get(RED, 0) >= 10
            if span == 0.4:  # a tick for each token
                assert lane.get(ink, 0) > 5 * 20


def test_only_who_is_there_has_a_lane_and_none_is_as_red_as_a_stall(show):
    tab = show({"vllm": a_stall()})
    for window, ids in ([0, 0.4], [0]), ([4, 5], [0, 1]), ([899, 901], [2]):
        tab.evaluate("window => set_view(...window)", window)
        tab.wait_for_function("!dirty")
        assert tab.evaluate("panes[0].ids") == ids
    hues = tab.evaluate("Array.from({length: 1000}, (_, id) => hue_of(id))")
    assert min(hues) >= 30 and max(hues) <= 310


def test_the_tip_says_who_waited_for_whom(show):
    tab = show({"vllm": a_stall()})
    box = tab.locator("canvas[role=img]").first.bounding_box()

    def place(time, y):
        return box["x"] + tab.evaluate(f"panes[0].x({time})"), box["y"] + y

    def tip_at(time, y):
        tab.mouse.move(*place(time, y))
        return tab.text_content("#tip")

    stall = "equest 0, token 201: waited 200 ms for request 1's prompt of 900 tokens."
    assert tip_at(5.2, 5) == "R" + stall  # which is a quarter of a pixel wide, and near
    tab.evaluate("set_view(3.9, 4.3)")
    tab.wait_for_function("!dirty")
    strip = tab.evaluate("panes[0].band('gaps')[1] - 3")
    assert tip_at(4.1, strip).endswith(f"the longest gap here: r{stall}")
    said = "Request 0, token 199: 20.0 ms after the token before."
    assert tip_at(3.97, 5) == said
    lane = 1.5 * tab.evaluate("panes[0].lane_height")
    said = "Request 1: tokens 0 to 899 of its prompt of 900, alone, in 180 ms."
    assert tip_at(4.1, lane) == said
    assert tip_at(3.995, lane) == "Request 1 waits 10.0 ms to be computed."
    tab.mouse.click(*place(4.1, 5))
    tab.mouse.move(5, 5)
    assert tab.evaluate("[lit_request, pinned_request]") == [0, 0]
    tab.wait_for_function("!dirty")
    assert set(tab.evaluate("[...document.querySelectorAll('.lit')].map(e => e.innerText)"))
    assert tab.is_hidden("#tip")
    tab.keyboard.press("Home")
    tab.keyboard.press("g")
    tab.wait_for_function("!dirty")
    assert tab.text_content("#gapline") == f"Gap: r{stall}"


def test_stages_of_a_pipeline_have_lanes_with_their_bubbles(show):
    cost = CostModel.named("llama3-8b", pp=2)
    config = EngineConfig("orca", 256, max_batch=8, max_len=2048, page_size=64, pages=512)
    recorder = Recorder()
    run = simulate(cost, config, a_load(20), recorder=recorder)
    kinds = bubble_kinds(run.stage_runs)
    recorder.add_stages(run.stage_runs, kinds)
    assert all(len(record["stages"]) == 2 for record in in_turn(recorder))
    bubble, kind = max(kinds, key=lambda pair: pair[0].bubble)
    busy = next(stage_run for stage_run in run.stage_runs if not stage_run.bubble)
    tab = show({"orca": recorder})
    top = tab.evaluate("panes[0].band('stages')[0]")

    def told_and_drawn(stage, start, end):
        y = top + 18 * stage
        told = tab.evaluate(f"describe(panes[0], {(start + end) / 2}, {y + 5})")
        tab.evaluate(f"set_view({start} - 0.1, {start} + 0.1)")
        tab.wait_for_function("!dirty")
        left, right = tab.evaluate(f"[panes[0].x({start}) + 2, panes[0].x({end}) - 2]")
        return told, tab.evaluate(PIXELS, [left, y + 1, right, y + 14])

    told, colors = told_and_drawn(bubble.stage, bubble.start - bubble.bubble, bubble.start)
    waits = rf"Stage {bubble.stage + 1} waits (.*) for its next batch: .* \({kind}\)\."
    assert seconds(re.match(waits, told)[1]) == pytest.approx(bubble.bubble, rel=5e-3)
    assert len(colors) > 2  # hatched
    told, colors = told_and_drawn(busy.stage, busy.start, busy.end)
    assert " computes " in told and len(colors) == 1
    total = sum(stage_run.bubble for stage_run in run.stage_runs)
    said = re.search(r"Bubbles: ([\d.]+ m?s) in all", tab.text_content(".run p.soft"))
    assert seconds(said[1]) == pytest.approx(total, rel=5e-3)


def test_a_gap_names_the_preemption_or_else_the_prefill_in_it(show):
    run, truth = simulated("sarathi-serve", pages=40)
    tab = show({"sarathi-serve": truth})
    told = tab.evaluate(
        """() => { const {run} = focused, {lanes} = run;
            return [...lanes].flatMap(([id, {gaps}]) => gaps.map(([since, until], i) =>
                [id, i, explain_gap(run, {id, since, until, token: i + 2})])); }"""
    )
    found = find_stalls(run.completions, run.iterations)
    stalls = {(stall.request_id, stall.end): stall for stall in found}
    preempted = [(i, r["start"]) for r in in_turn(truth) for i in r["preempted"]]
    times = {c.id: c.token_times for c in run.completions}
    lost = 0
    for request_id, i, text in told:
        since, until = times[request_id][i : i + 2]
        stall = stalls.get((request_id, until))
        window = round(since, 6), round(until, 6)  # a record has microseconds
        if any(r == request_id and window[0] <= s < window[1] for r, s in preempted):
            lost += 1
            assert text.endswith("as it had lost its pages and was computed again")
        elif stall:
            assert f"{stall.prefill_tokens:,} tokens" in text or "prompt of" in text
            assert str(stall.caused_by) in text or " more: " in text
        else:
            assert text.endswith("after the token before")
    assert lost >= 5 and len(told) == sum(len(c.tbt) for c in run.completions)


def test_every_policy_has_its_note_in_the_readme_of_policies():
    assert set(POLICIES) <= set(CARDS) <= set(ALL_POLICIES)
    assert papers_policies() in Path("policies/README.md").read_text("utf-8")


TINY = "--preset llama-tiny --dtype float32"


@pytest.mark.parametrize(
    "command",
    [
        f"offline {TINY} --chunk 16 --seq-len 40 --batch 2 --requests 2",
        f"serve {TINY} --max-len 64 --chunk 16 --requests 3",
        "serve --simulate a100-80gb --preset llama3-8b --requests 5",
    ],
)
def test_the_bench_writes_a_page(command, tmp_path, capsys):
    file = tmp_path / "page.html"
    names = ["request-level", "sarathi-serve"]
    main([*command.split(), "--policies", ",".join(names), "--html", str(file)])
    assert capsys.readouterr().out.endswith(f"wrote {file}, open {file.as_uri()}\n")
    runs = data_of(file)["runs"]
    assert [run["name"] for run in runs] == names
    assert all(run["settings"]["pages"] and run["data"] for run in runs)


@contextmanager
def opened_live(browser, title, answer, until="dirty === false"):
    """A live page, whose questions for records from a place on are answered by a function."""

    def handle(route):
        _, is_question, place = route.request.url.partition("/records/")
        if is_question:
            route.fulfill(json=answer(int(place)))
        else:
            text = page(title, "vllm, chunk 16", live="/records")
            route.fulfill(body=text, content_type="text/html")

    with opened(browser, "http://live/", until=until, route=handle) as tab:
        yield tab


def test_a_live_page_follows_an_engine(browser):
    recorder = Recorder()
    engine = Engine(tiny_model(), chunk=16, max_batch=2, max_len=64, page_size=16)
    recorder.watch([engine.scheduler])

    def step():
        engine.step()
        recorder.add(engine.last_iteration)

    for prompt in ([1] * 30, [2] * 20):
        engine.add_request(prompt, SamplingParams(max_new_tokens=16))
    step()
    step()
    snapshot = [recorder.snapshot()]
    begun = len(recorder.records)
    step()

    def answer(place):
        is_new = place == 10**15
        return {
            "records": snapshot if is_new else recorder.records[place:],
            "place": begun if is_new else len(recorder.records),
            "texts": {"0": "the <b>first</b> text", "1": "the second"},
        }

    with opened_live(browser, "</script><b>&", answer) as tab:
        while engine.has_work:
            step()
        count = len(in_turn(recorder)) - 2
        tab.wait_for_function(f"focused.run.iterations.length == {count}")
        progress = "[...focused.run.state.progress.values()]"
        state = tab.evaluate(f"{progress}.map(r => [r.output, r.ended])")
        assert state == [[16, "length"], [16, "length"]]
        assert tab.text_content("h1") == "</script><b>&: vllm, chunk 16"  # it ends no data
        assert shown_runs(tab) == ["</script><b>&"]
        assert tab.text_content(".run h2") == "sarathi-serve"
        assert tab.text_content(".run .gap").startswith("The last minute: ")
        lines = ["1 the second", "0 the <b>first</b> text"]
        assert [" ".join(text.split()) for text in texts(tab, "#texts p")] == lines
        tab.hover("#texts p")
        assert tab.evaluate("lit_request") == 1
        lane = "describe(panes[0], focused.run.end, 1.5 * panes[0].lane_height)"
        assert "It writes: … the second" in tab.evaluate(lane)
        tab.keyboard.press("Home")
        tab.wait_for_function("cursor == 0")
        start = tab.evaluate("focused.run.iterations[0].start - focused.run.begin")
        tab.wait_for_function(f"$('position').textContent.endsWith('at {start:.3f} s')")
        with tab.expect_download() as download:
            tab.click("#save")
        events = json.loads(download.value.path().read_text("utf-8"))["traceEvents"]
        assert [e["name"] for e in events if e["ph"] == "i"] == ["finished"] * 2


def test_a_live_page_asks_for_the_key_and_sends_it_in_a_header_alone(browser):
    with serving(key="sésame") as served:
        urls = []
        tab = browser.new_page()
        tab.on("request", lambda request: urls.append(request.url))
        tab.goto(served.url)
        for key_before, key in ("", "x"), ("x", "sésame"):
            tab.wait_for_function(f"api_key == '{key_before}' && !$('keyform').hidden")
            assert not texts(tab, "#texts p") and not shown_runs(tab)
            tab.keyboard.type(key)  # the field has the focus
            tab.keyboard.press("Enter")
        tab.wait_for_selector("#try:not([hidden])")
        headers = {"authorization": "Bearer sésame".encode()}
        body = {"prompt": "hello", "max_tokens": 20}
        done = served.http.post("/v1/completions", json=body, headers=headers).json()
        shown = f"$('texts').querySelector('bdi')?.textContent == '{done['choices'][0]['text']}'"
        tab.wait_for_function(shown)
        assert tab.is_hidden("#keyform")
        stored = tab.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}])")
        kept = [*urls, tab.url, tab.content(), stored, tab.evaluate("document.cookie")]
        assert f"{served.url}/records/{10**15}" in urls
        assert not [text for text in kept if "sésame" in text or "s%C3%A9same" in text]
        tab.close()


def test_an_idle_live_page_says_what_to_send(browser):
    nothing = {"records": [{"live": [], "settings": {}}], "place": 0, "texts": {}}
    is_told = "!$('try').hidden"
    with opened_live(browser, "mine", lambda place: nothing, until=is_told) as tab:
        command = shlex.split(tab.text_content("#try"))
        assert command[:3] == ["curl", "-N", "http://live/v1/completions"]
        assert json.loads(command[-1])["model"] == "mine"
        assert tab.text_content("h1") == "mine: vllm, chunk 16"
