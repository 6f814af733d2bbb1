"""The schedule page in a real browser, held against the records and the library's own metrics."""

import json
import random
import re
from contextlib import contextmanager

import pytest

from bench import main
from config import EngineConfig
from engine import Engine
from lab.measure.metrics import find_stalls, summarize_run
from lab.simulator.cost_model import CostModel
from lab.simulator.simulation import bubble_kinds, simulate
from page.html import page
from page.records import Recorder
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
    with serving(api={"key": "sésame"}) as served:
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
