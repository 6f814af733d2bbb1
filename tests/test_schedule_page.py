"""The schedule page in a real browser, held against the records and the library's own metrics."""

import random

import pytest

from tests.helpers import with_slow
from tests.pages import (
    LOADS,
    PIXELS,
    RED,
    a_stall,
    expected_metrics,
    in_turn,
    opened_runs,
    seconds,
    shown_runs,
    simulated,
    texts,
)
from tests.servers import serving

STATES = """order => order.map(k => {
    const {run} = focused, state = run.at(k), iteration = run.iterations[k];
    const running = [...state.progress.values()].filter(
        r => r.pages.length && r.micro_batch === iteration.micro_batch);
    return [running.map(r => [r.id, r.computed, r.output, [...r.pages]]),
            run.waiting(state, iteration).map(r => r.id)]; })"""


@pytest.mark.parametrize("policy", with_slow(LOADS, fast=["vllm", "sarathi-serve"]))
def test_every_iteration_shows_what_really_was(show, policy):
    run, truth = simulated(policy, **LOADS[policy])
    order = list(range(len(in_turn(truth))))
    random.Random(0).shuffle(order)  # backwards and forwards
    order = order[:300]
    tab = show({policy: truth})
    cached = tab.evaluate("focused.run.iterations.at(-1).cached_tokens")
    expected = sum(request.cached_tokens for request in run.completions)
    assert cached == expected
    for k, (running, queue) in zip(order, tab.evaluate(STATES, order), strict=True):
        assert {i: progress for i, *progress in running} == truth.states[k]
        # a pipeline's queue is seen when its batch is made, not later
        if "pp" not in LOADS[policy]:
            assert queue == truth.waiting[k]


CELLS = """rows => [...document.querySelectorAll(rows)].map(row => Object.fromEntries(
    [...row.querySelectorAll("[data-k]")].map(cell => [cell.dataset.k, cell.innerText])))"""


NUMBERS = {"ttft-0.5": "ttft_p50", "tbt-0.99": "tbt_p99", "tbt-1": "longest"}


def test_numbers_and_table_are_those_of_the_library(browser, tmp_path):
    runs = {"vllm": simulated("vllm", pages=48), "sarathi-serve": simulated("sarathi-serve")}
    recorders = {name: recorder for name, (_, recorder) in runs.items()}
    expected = [expected_metrics(*run) for run in runs.values()]
    with opened_runs(browser, tmp_path, recorders) as tab:
        exact = tab.evaluate("panes.map(pane => pane.run.metrics())")
        tab.wait_for_function("$('policytable').rows.length === 3")
        table = tab.evaluate(CELLS, "#policytable tbody tr")
        tab.evaluate("go(focused.run, Infinity)")
        tab.wait_for_function("$('numbers').innerText.includes('\\t40')")  # all 40 requests
        (numbers,) = tab.evaluate(CELLS, "#numbers")
    assert exact == [pytest.approx(metrics, rel=1e-4) for metrics in expected]
    assert expected[0]["stalls"] > 0
    for row, metrics in zip(table, expected, strict=True):
        for key in ("ttft_p50", "ttft_p90", "tbt_p99", "longest"):
            assert seconds(row[key]) == pytest.approx(metrics[key], rel=5e-3)
        assert int(row["stalls"].replace(",", "")) == metrics["stalls"]
    for key, metric in NUMBERS.items():
        value = expected[0][metric]
        assert seconds(numbers[key]) == pytest.approx(value, rel=5e-3)


def test_the_keyboard_is_enough(show):
    runs = {name: simulated(name)[1] for name in ("vllm", "sarathi-serve")}
    last = len(in_turn(runs["vllm"])) - 1
    tab = show(runs)

    def after(keys, expression="cursor"):
        for key in keys.split():
            tab.keyboard.press(key.replace("Space", " "))
        tab.wait_for_function("!dirty")
        return tab.evaluate(expression)

    assert after("ArrowRight ArrowRight ArrowRight ArrowLeft") == 2
    assert after("Shift+ArrowRight") == 12
    assert after("End") == last
    assert after("Home") == 0
    width = "view.to - view.from"
    whole = after("0", width)
    assert after("+", width) == pytest.approx(0.6 * whole)
    assert after("0", width) == pytest.approx(whole)
    after("Space")
    tab.wait_for_function("cursor > 2")
    assert after("o", "focused === panes[1]")
    with tab.expect_download():
        after("s")


@pytest.mark.parametrize("width", [1200, 375])
def test_a_stall_is_red_at_every_zoom(browser, tmp_path, width):
    with opened_runs(browser, tmp_path, {"vllm": a_stall()}, size=(width, 800)) as tab:
        ink = tab.evaluate("palette.ink.match(/\\w\\w/g).map(h => parseInt(h, 16)).join(' ')")

        def pixels(band):
            corners = f"{band}.flatMap((y, i) => [i ? LEFT + panes[0].width : LEFT, y])"
            return tab.evaluate(PIXELS, tab.evaluate(corners))

        for span in (1000, 20, 3, 0.4, 0.01):
            tab.evaluate(f"set_view(4.1 - {span} / 2, 4.1 + {span} / 2)")
            tab.wait_for_function("!dirty")
            lane = pixels("[0, panes[0].lane_height - 1]")
            assert lane.get(RED, 0) >= 10, span
            if span == 20:  # the other gaps are below the SLO of 0.05 s: none is red
                assert lane[RED] < 0.1 * sum(lane.values())
            if span == 3:
                assert pixels("panes[0].band('gaps')").get(RED, 0) >= 10
            if span == 0.4:  # a tick for each token
                assert lane.get(ink, 0) > 5 * 20


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
