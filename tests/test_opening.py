"""The opening of the page of `bench.py explore`, and its boxes: what is seen, and when."""

import re

import pytest

from lab.commands import explore
from lab.simulator.cost_model import CostModel
from tests.pages import opened, seconds

OPENING = """() => [...document.querySelectorAll("body *")].filter(element =>
    element.checkVisibility({visibilityProperty: true})
    && element.matches("button, input, select, p, h1, h2, canvas"))
    .map(element => element.id || element.tagName)"""


@pytest.mark.parametrize("size", [(1400, 900), (390, 844)])
def test_the_page_opens_with_one_picture_that_plays_once(browser, explored, size):
    width, height = size
    address = f"file://{explored}"
    with opened(browser, address, width=width, skip_opening=False) as tab:
        tab.set_viewport_size({"width": width, "height": height})
        runs = ["vllm | * | A to D", "sarathi-serve | 256 | A to D"]
        assert tab.evaluate("panes.map(pane => pane.run.name)") == runs
        assert 0 < tab.evaluate("revealed") < tab.evaluate("range()[1]")
        while_playing = ["title", "H2", "CANVAS", "CANVAS", "H2", "CANVAS", "CANVAS", "story"]
        assert tab.evaluate(OPENING) == while_playing
        tab.evaluate("opening.began -= 1e6")
        tab.wait_for_function("revealed === Infinity && !dirty")
        buttons = ["dragchunk", "again", "everything", "ownpolicy"]
        assert tab.evaluate(OPENING) == [*while_playing, *buttons]
        whole = "[document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
        assert tab.evaluate(whole) == [width, height]  # nothing is below the first screen
        assert "stand still for" in tab.text_content("#story")
        tab.click("#again")
        tab.wait_for_function("revealed < Infinity")
        assert tab.url == address  # or it would not open like this again
        tab.evaluate("end_opening()")
        tab.click("#everything")
        tab.wait_for_function("$('position').textContent && !dirty")
        assert tab.is_visible("#choices") and not tab.is_visible("#opening")


def test_the_opening_counts_a_stall_and_follows_the_chunk_size(browser, explored):
    with opened(browser, f"file://{explored}", skip_opening=False) as tab:
        tab.evaluate("end_opening()")
        written = """moment => {
            const texts = [], pen = {fillText: text => texts.push(text), fillRect() {}};
            pen.measureText = () => ({width: 0});
            revealed = moment;
            draw_opening(panes[0], pen);
            revealed = Infinity;
            return texts.filter(text => text.includes("ms")); }"""
        gap = tab.evaluate("panes[0].run.longest_gap()")
        since = gap["since"]
        assert tab.evaluate(written, since + 0.05) == []  # it is no stall yet
        assert tab.evaluate(written, since + 0.1) == ["100 ms"] * 2  # of A and B
        longest = f"{1e3 * (gap['until'] - since):.0f} ms"
        assert tab.evaluate(written, since + 1) == [longest] * 2
        assert f"for {longest}, a generation stall" in tab.text_content("#story")
        tab.click("#dragchunk")
        tab.keyboard.press("Home")
        tab.wait_for_function("panes[1].run.name === 'sarathi-serve | 128 | A to D'")
        shorter = tab.evaluate("panes[1].run.longest_gap()")
        tab.wait_for_function("$('story').textContent.includes('chunk 128')")
        shorter_ms = 1e3 * (shorter["until"] - shorter["since"])
        assert tab.text_content("#story").endswith(f"waits longer than {shorter_ms:.1f} ms.")


def test_who_wants_no_motion_sees_the_last_frame(browser, explored):
    context = browser.new_context(reduced_motion="reduce")
    tab = context.new_page()
    tab.goto(f"file://{explored}")
    tab.wait_for_function("opening.is_open && dirty === false")
    assert tab.evaluate("[revealed === Infinity, opening.began]") == [True, None]
    assert tab.is_visible("#again")
    context.close()


def test_all_boxes_show_the_state_after_an_iteration(browser, explored):
    with opened(browser, f"file://{explored}#policy=vllm&i=11") as tab:
        tab.wait_for_timeout(400)
        rows = re.findall(r"<tr><td>(.*?)</tr>", tab.inner_html("#numbers"))
        (stalls,) = [row for row in rows if row.startswith("stalls")]
        assert "2 go on" in stalls and stalls.endswith("2</td>")
        gap = tab.evaluate("focused.run.longest_gap()")
        wait = tab.evaluate("focused.run.iterations[10].end") - gap["since"]
        assert seconds(tab.text_content("[data-k='tbt-1']")) == pytest.approx(wait, rel=5e-3)
        running = tab.eval_on_selector_all("#running tr", "all => all.map(tr => tr.innerText)")
        assert ["1,000 of 1,000" in row for row in running] == [False, False, False, True, True]
        assert "The queue after it: 0" in tab.text_content("#queuename")


@pytest.mark.parametrize("decodes, chunk", [(1, 0), (32, 0), (0, 225), (31, 225)])
def test_the_box_of_costs_says_what_the_cost_model_says(browser, explored, decodes, chunk):
    cost = CostModel.named(explore.MODEL)

    def ms(rows):
        linear_s = cost.layers * cost.layer_seconds([(0, 0, rows)]).linear
        return f"{1e3 * linear_s:#.3g} ms"

    with opened(browser, f"file://{explored}#policy=vllm") as tab:
        for field, value in ("costdecodes", decodes), ("costchunk", chunk):
            tab.evaluate(f"$('{field}').value = {value}; draw_costs()")
        line = tab.text_content("#costline")
        counts = tab.eval_on_selector_all(".counts b", "all => all.map(b => b.textContent)")
    if not chunk:
        assert counts == [ms(1)]  # reading, as long as for one row
        assert f": {counts[0]}, as one. Up to 128 rows reading takes longer" in line
    else:
        assert counts == [ms(256)]  # whole tiles
        assert (f"add nothing to its {ms(256)}; alone they take {ms(1)}" in line) == (decodes > 0)
