"""The schedule page: what a real browser makes of the records."""

import json
import random
import re
import shlex
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import pytest

from bench import main
from cli.options import write_text
from config import EngineConfig
from engine import Engine
from lab.commands import explore
from lab.commands.today import papers_policies
from lab.measure.capacity import slo_seconds
from lab.measure.metrics import find_stalls, summarize_run
from lab.measure.workload import Arrival
from lab.simulator.cost_model import CostModel
from lab.simulator.simulation import bubble_kinds, simulate
from page.html import page
from page.policy_notes import NOTES
from page.records import Recorder
from policies import ALL_POLICIES, POLICIES
from sampling import SamplingParams
from tests.helpers import tiny_model, with_slow
from tests.pages import (
    LOADS,
    PIXELS,
    RED,
    a_load,
    a_stall,
    expected_metrics,
    in_turn,
    opened,
    opened_runs,
    seconds,
    simulated,
)


@pytest.mark.parametrize("policy", with_slow(LOADS, fast=["vllm", "sarathi-serve"]))
def test_every_iteration_shows_what_really_was(browser, tmp_path, policy):
    run, truth = simulated(policy, **LOADS[policy])
    preempted = sum(c.preemptions for c in run.completions)
    reserves = "sarathi", "orca-best", "orca, shared, in a pipeline"  # all at admission
    assert preempted or policy in reserves
    order = list(range(len(truth.states)))
    random.Random(0).shuffle(order)  # backwards and forwards
    order = order[:300]
    with opened_runs(browser, tmp_path, {policy: truth}) as tab:
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


def test_numbers_and_table_are_those_of_the_library(browser, tmp_path):
    run, truth = simulated("vllm", pages=48)
    other, other_truth = simulated("sarathi-serve")
    expected = expected_metrics(run, truth)
    with opened_runs(browser, tmp_path, {"vllm": truth, "sarathi-serve": other_truth}) as tab:
        tab.keyboard.press("End")
        tab.wait_for_function("document.querySelectorAll('#policytable tbody tr').length == 2")
        tab.wait_for_timeout(400)
        cells = "row => Object.fromEntries(row.map(td => [td.dataset.k, td.innerText]))"
        shown, *table = [
            tab.eval_on_selector_all(f"{rows} [data-k]", cells)
            for rows in ("#numbers", "tbody tr:nth-child(1)", "tbody tr:nth-child(2)")
        ]
        exact = tab.evaluate("panes.map(pane => pane.run.metrics())")
        last_rows = tab.eval_on_selector_all(
            "#numbers tr", "all => all.map(tr => [tr.cells[0].innerText, tr.cells[3].innerText])"
        )
        half = tab.evaluate("[...focused.run.so_far(200).tbt]")
    assert exact == [
        pytest.approx(expected, rel=1e-4),
        pytest.approx(expected_metrics(other, other_truth), rel=1e-4),
    ]
    for row, numbers in zip(table, exact, strict=True):
        for key in ("ttft_p50", "ttft_p90", "tbt_p99", "longest"):
            assert seconds(row[key]) == pytest.approx(numbers[key], rel=5e-3)
        assert row["tokens_per_s"] == f"{numbers['tokens_per_s']:,.0f}"
        assert row["cache"] == f"{100 * numbers['cache']:.0f} %"
        assert row["stalls"] == f"{numbers['stalls']:,}"
    summary = summarize_run(run.completions, run.iterations, run.seconds)
    for key, latency in ("ttft", summary.ttft_s), ("tbt", summary.tbt_s):
        for q, value in (0.5, latency.p50), (0.99, latency.p99), (1, latency.max):
            assert seconds(shown[f"{key}-{q}"]) == pytest.approx(value, rel=5e-3)
    assert dict(last_rows)["preemptions"] == f"{summary.preemptions}" != "0"
    assert dict(last_rows)["stalls, longer than 50.0 ms"] == f"{expected['stalls']}" != "0"
    end = in_turn(truth)[200]["end"] + 1e-6
    times = [pair for c in run.completions for pair in pairwise(c.token_times)]
    gaps = [b - a for a, b in times if b < end]
    assert half == pytest.approx(sorted(gaps), abs=3e-6)  # times are written in microseconds


def test_the_keyboard_is_enough(browser, tmp_path):
    runs = {name: simulated(name)[1] for name in ("vllm", "sarathi-serve")}
    last = len(in_turn(runs["vllm"])) - 1
    with opened_runs(browser, tmp_path, runs) as tab:

        def after(keys, expression="cursor"):
            for key in keys.split():
                tab.keyboard.press(key.replace("Space", " "))
            tab.wait_for_function("!dirty")
            return tab.evaluate(expression)

        assert tab.text_content("#position").startswith("iteration 1 of ")
        for keys, cursor in {
            "ArrowRight ArrowRight ArrowRight ArrowLeft": 2,
            "Shift+ArrowRight": 12,
            "End": last,
            "Home": 0,
        }.items():
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


def test_tab_reaches_everything_and_all_of_it_has_a_name(browser, tmp_path):
    with opened_runs(browser, tmp_path, {"vllm": simulated("vllm", pages=48)[1]}) as tab:
        tab.evaluate("go(focused.run, 200)")
        tab.wait_for_function("!dirty")
        controls = "[...document.querySelectorAll('button, select, input, summary')]"
        expected = tab.evaluate(f"{controls}.filter(c => c.offsetParent && !c.disabled).length")
        batch, queue = tab.evaluate(
            "['chips', 'queue'].map(id => $(id).querySelectorAll('button').length)"
        )
        assert batch > 1 and queue > 1
        reached = "document.activeElement.dataset.tabbed = 1"
        for _ in range(expected):
            tab.keyboard.press("Tab")
            tab.evaluate(reached)
        assert tab.evaluate(f"{controls}.filter(c => c.dataset.tabbed).length") == expected
        lanes = tab.eval_on_selector_all(".run .sr li", "all => all.map(li => li.innerText)")
        assert len(lanes) == 40 and re.match(
            r"Request 0: a prompt of [\d,]+ tokens, first token after .*, longest gap .* stall",
            lanes[0],
        )
        assert tab.locator("main").count() == 1
        for role in ("button", "combobox", "slider", "img"):
            assert (
                tab.get_by_role(role).count() == tab.get_by_role(role, name=re.compile(".")).count()
            )
        chip = tab.get_by_role("button", name=re.compile("^request [0-9]+: token")).first
        chip.focus()
        request = int(chip.get_attribute("data-request"))
        tab.keyboard.press("Enter")
        tab.wait_for_function("!dirty")
        assert tab.evaluate("[pinned_request, lit_request]") == [request, request]
        assert chip.get_attribute("aria-pressed") == "true"
        tab.keyboard.press("ArrowLeft")
        tab.wait_for_function("!dirty")
        focused = tab.evaluate(
            "document.activeElement.dataset.request ?? document.activeElement.id"
        )
        assert focused in (str(request), "chips")  # it is not lost when the batch changes
        lines = tab.text_content("#pinnedline") + tab.text_content("#gapline")
        assert f"equest {request}" in lines


def test_the_tour_has_nine_stops_and_shows_what_it_says(browser, tmp_path):
    run, truth = simulated("sarathi-serve", pages=40)
    with opened_runs(browser, tmp_path, {"sarathi-serve": truth}) as tab:
        tab.keyboard.press("t")
        told = []
        for n in range(9):
            tab.wait_for_function(f"document.getElementById('stop').textContent[0] == '{n + 1}'")
            told.append(
                (tab.text_content("#stoptext"), tab.evaluate("focused.run.iterations[cursor]"))
            )
            tab.keyboard.press("Enter")  # the button "next" has the focus
        assert tab.is_hidden("#tour")
    _, (stall, _), (_, chunk), (_, ride), (_, budget), (short, _), _, (_, memory), (_, load) = told
    most_tokens = max(len(c.prompt) for c in run.completions)
    slowest = max(c.ttft for c in run.completions if 4 * len(c.prompt) <= most_tokens)
    assert f"a prompt of {most_tokens:,} tokens" in short
    assert seconds(re.search(r"waits ([\d.]+ m?s) for", short)[1]) == pytest.approx(
        slowest, rel=5e-3
    )
    longest = max(gap for c in run.completions for gap in c.tbt)
    assert f"waited {1e3 * longest:.3g} ms" in stall or f"waited {longest:.3g} s" in stall
    lengths = {
        r["request"]["id"]: r["request"]["prompt_len"] for r in truth.records if "request" in r
    }
    assert any(n < lengths[i] for i, _, n in chunk["chunks"])
    most = max(len(r["decodes"]) for r in in_turn(truth) if r["chunks"])
    assert len(ride["decodes"]) == most
    assert budget["why"][0] == "budget" and memory["preempted"]
    assert load["waiting"] == max(r["waiting"] for r in in_turn(truth))


def test_a_sentence_says_in_words_why_the_batch_is_as_it_is(browser, tmp_path):
    recorder = Recorder()
    recorder.settings = dict(chunk=256, max_batch=4, max_len=2048, policy="SarathiServe")
    recorder.settings |= dict(pages=64, page_size=64, micro_batches=1)
    for i, prompt in enumerate((10, 10, 10, 10, 10, 900, 500)):
        request = dict(id=i, arrival=0.0, prompt_len=prompt, max_new_tokens=9, priority=2)
        recorder.records.append({"request": request})
    like = dict(
        budget=256, preempted=[], micro_batch=0, ended=[], free_pages=9, decodes=[], chunks=[]
    )
    like |= dict(start=0.0, launch=0.5, end=1.0, pages=[], queue=[6], waiting=1, why=None)
    first = dict(chunks=[[i, 0, 10] for i in range(3)], pages=[[i, 0, i] for i in range(3)])
    second = dict(decodes=[0, 1, 2], chunks=[[5, 0, 253]], pages=[[5, 0, 5, 6]], start=1.0, end=2.0)
    third = dict(decodes=[0, 1, 2], start=2.0, end=3.0, preempted=[5], waiting=2, queue=[5, 6])
    third |= dict(why=["pages", 15, 1])
    fourth = dict(chunks=[[3, 0, 10]], pages=[[3, 0, 3]], budget=None, start=3.0, end=4.0)
    fourth |= dict(why=["policy"])
    fifth = dict(chunks=[[6, 64, 100]], pages=[[6, 0, 2, 9, 10]], start=4.0, end=5.0)
    records = [like | first, like | second | dict(why=["budget", 0, 500]), like | third]
    recorder.records += [*records, like | fourth, like | fifth]
    with opened_runs(browser, tmp_path, {"sarathi-serve": recorder}) as tab:
        said = [tab.evaluate("k => explain(focused.run, k)", k) for k in range(5)]
        tab.keyboard.press("End")
        pages = "document.getElementById('pagesname').textContent"
        tab.wait_for_function(f"{pages}.includes('striped')")
        shared = tab.evaluate(pages)
        chips = tab.text_content("#chips")
        stripes = tab.evaluate(
            """() => { const pen = $("pages").getContext("2d");  // page 2 is 18 pixels wide
                return [2, 14].map(y => pen.getImageData(2 * 18 + 2, y, 1, 1).data.join()); }"""
        )
    assert said[1] == (
        "3 decodes first, then tokens 0 to 252 of request 5's 900, and the budget of 256 is full; "
        "request 6 waits: no budget left."
    )
    assert said[2] == (
        "No page was free: request 5 lost its pages and will be computed again; 3 decodes and no "
        "prefill; request 5 waits, and 1 behind it: it needs 15 pages and 1 is free."
    )
    assert said[3] == (
        "Request 3's whole prompt of 10 tokens; 3 running decodes wait: this batch is of "
        "prefill alone; request 6 waits: this policy lets in nobody more in this iteration."
    )
    assert said[4].startswith(
        "Tokens 64 to 163 of request 6's 500 (64 tokens found in the cache), and the budget "
        "of 256: 156 are left"
    )
    assert "6: tokens 64 to 163, prefill, 64 found in the cache" in chips
    # request 6 reads page 2 beside its own request 2; 0, 1 and 3 have a page each
    assert (
        "6 of 64 pages taken, 1 by several requests, striped" in shared and len(set(stripes)) == 2
    )


CONTRAST = """([front, back]) => {  // of two colours of the theme, as WCAG defines it
    const luminance = color => {
        const parts = [1, 3, 5].map(i => parseInt(css(color).slice(i, i + 2), 16) / 255);
        const [r, g, b] = parts.map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
    const [low, high] = [front, back].map(luminance).sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05); }"""
TEXTS = (
    "ink back, ink panel, soft back, soft panel, stall back, accent back, back prefill, back stall"
)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_have_the_contrast_of_wcag_aa(browser, tmp_path, scheme):
    with opened_runs(browser, tmp_path, {"vllm": a_stall(20, 10)}, scheme=scheme) as tab:
        for pair in TEXTS.split(", "):
            names = [f"--{name}" for name in pair.split()]
            assert tab.evaluate(CONTRAST, names) >= 4.5, pair


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(browser, tmp_path, scheme):
    _, truth = simulated("vllm")
    with opened_runs(browser, tmp_path, {"vllm": truth}, width=375, scheme=scheme) as tab:
        assert tab.evaluate("document.documentElement.dataset.theme") == scheme
        assert tab.evaluate("document.documentElement.scrollWidth") <= 375


def long_run():
    """The Recorder of a run of 10,000 iterations and more) with a batch that is always full."""
    arrivals = [Arrival(0.1 * i, 300 + 37 * i % 400, 700 + 53 * i % 600) for i in range(240)]
    _, recorder = simulated("sarathi-serve", pages=512, arrivals=arrivals)
    return recorder


@pytest.mark.slow
def test_ten_thousand_iterations_are_less_than_five_megabytes(browser, tmp_path):
    recorder = long_run()
    assert len(in_turn(recorder)) > 10_000
    with opened_runs(browser, tmp_path, {"sarathi-serve": recorder}) as tab:
        assert tab.evaluate("focused.run.iterations.length") == len(in_turn(recorder))
    assert (tmp_path / "page.html").stat().st_size < 5e6


def test_explore_has_a_run_for_every_button(browser, explored):
    with opened(browser, f"file://{explored}") as tab:
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
        assert tab.evaluate("panes.length") == 2
        tab.evaluate("choose({load: 'steady'})")  # of which neither has a run
        assert tab.evaluate("panes.map(pane => pane.run.name)") == ["ShortestFirst | 1024 | steady"]
        assert tab.is_hidden("[data-label='ppas']")
        quick = """async () => {
            const click = label => document.querySelector(`[data-label="${label}"]`).click();
            click("1024");
            click("128");  // is loaded, the one before is not
            await new Promise(end => setTimeout(end, 400));
            return panes[0].run.name; }"""
        tab.evaluate("loaded.clear()")
        tab.evaluate("choose({policy: 'sarathi-serve', chunk: '128'})")
        assert tab.evaluate(quick).split(" | ")[1] == "128"
        tab.evaluate("set_view(-Infinity, Infinity), go(focused.run, 9)")
        moment = tab.evaluate("moment")
        for name in ("request-level", "sarathi-serve", "orca"):
            tab.evaluate(f"choose({{policy: '{name}', load: 'overload'}})")
            whole = "[view.from <= focused.run.begin, view.to >= focused.run.end, moment]"
            assert tab.evaluate(whole) == [True, True, moment]  # what was seen and chosen stays
        tab.evaluate("choose({policy: 'vllm'})")
        assert tab.is_disabled("[data-label='256']")  # which it does not go by
        tab.evaluate("tour(0); tour(-1)")
        tab.wait_for_timeout(300)
        assert tab.is_hidden("#tour")
        tab.select_option("#beside", "vllm")
        tab.evaluate("choose({policy: 'orca'})")
        tab.wait_for_function("panes.length == 2 && panes[1].run.name.startsWith('vllm')")
        tab.click("#start")
        tab.wait_for_function("document.getElementById('stop').textContent[0] == '1'")


def test_the_loads_of_explore_are_as_they_are_called():
    cost = CostModel.named(explore.MODEL)
    slo_s = slo_seconds("strict", explore.base_of(cost, explore.MAX_LEN, explore.BASE_CHUNK))
    loads = explore.make_loads(cost, 60)
    runs = {name: explore.record_run("sarathi-serve", "256", loads[name], slo_s) for name in loads}

    def preemptions(name):
        return sum(len(record["preempted"]) for record in in_turn(runs[name]))

    assert preemptions("tight memory") and not preemptions("overload")
    longest_queue = {name: max(r["waiting"] for r in in_turn(runs[name])) for name in runs}
    assert longest_queue["overload"] > 2 * longest_queue["steady"]
    assert longest_queue["burst"] >= 14  # a quarter of 60 at once
    prompts = [arrival.prompt_len for arrival in loads["one long among short"].arrivals]
    assert len(prompts) == 60 and prompts.count(200) == 59 and prompts[14] == 16_000
    first_starts = {}
    for record in in_turn(runs["shared prefixes"]):
        for request_id, start, _ in record["chunks"]:
            first_starts.setdefault(request_id, start)
    assert sum(start >= 448 for start in first_starts.values()) > 50  # behind the shared prefix
    assert runs["pipeline bubbles"].settings["micro_batches"] == 2
    assert [name for name in runs if runs[name].settings.get("letters")] == ["A to D"]
    alone = [cost.seconds([span] * n) for span, n in (((0, 1024, 1), 32), ((0, 0, 224), 1))]
    costs = explore.measure_costs(cost)
    assert [costs["decodes_s"], costs["chunk_s"]] == pytest.approx(alone)
    assert costs["both_s"] < 0.75 * sum(alone)  # decodes ride along


def test_explore_opens_with_four_requests_and_the_longest_gap(browser, explored):
    with opened(browser, f"file://{explored}#policy=vllm&beside=sarathi-serve&i=11") as tab:
        titles = tab.eval_on_selector_all(".run h2", "all => all.map(h => h.textContent)")
        assert titles == ["vllm", "sarathi-serve, chunk 256"]
        stalled, served = tab.eval_on_selector_all(
            ".run .gap", "all => all.map(p => p.textContent)"
        )
        who = r"request A, token 11: waited \d+ ms for the prompts of requests C and D"
        assert re.search(who, stalled)
        assert "times the usual gap, a stall" in stalled and "stall" not in served
        ratios = tab.evaluate("[1.94, 14.2, 99.7, 236.4, 2500].map(format_ratio)")
        assert ratios == ["1.9", "14", "100", "236", "2,500"]
        assert tab.evaluate("panes.map(pane => pane.scales)[0] === panes[1].scales")
    with opened(browser, f"file://{explored}") as tab:  # a policy of one's own comes first
        assert tab.evaluate("panes.map(pane => pane.run.name)") == [
            "ShortestFirst | 256 | A to D",
            "sarathi-serve | 256 | A to D",
        ]
        gap = tab.evaluate("focused.run.longest_gap()")
        iteration = tab.evaluate("focused.run.iterations[cursor]")
        assert gap["since"] <= iteration["start"] < gap["until"] and iteration["chunks"]


def test_the_address_restores_what_was_shown(browser, explored):
    with opened(browser, f"file://{explored}") as tab:
        tab.click("[data-label='vllm']")
        tab.wait_for_function("panes[0].run.name.startsWith('vllm')")
        tab.click("[data-label='burst']")
        tab.wait_for_function("panes[0].run.name.endsWith('burst')")
        tab.keyboard.press("g")
        tab.wait_for_timeout(400)
        shown = "[panes.map(pane => pane.run.name), cursor, pinned_request, view.from, view.to]"
        address = tab.url
        before = tab.evaluate(shown)
    assert "policy=vllm&chunk=256&load=burst&beside=sarathi-serve&i=" in address
    with opened(browser, address) as tab:
        names, cursor, request, *window = tab.evaluate(shown)
        assert [names, cursor, request] == before[:3] and request is not None
        assert window == pytest.approx(before[3:], abs=1e-3)
        tab.evaluate("location.hash = '#policy=orca&load=steady&i=7'")
        tab.wait_for_function("panes.length == 1 && panes[0].run.name == 'orca | * | steady'")
        tab.wait_for_function("cursor == 6")


@pytest.mark.parametrize("width", [1200, 375])
def test_a_stall_is_red_at_every_zoom(browser, tmp_path, width):
    with opened_runs(browser, tmp_path, {"vllm": a_stall()}, width=width) as tab:
        for span in (1000, 99, 20, 9, 3, 1, 0.4, 0.1, 0.01):
            tab.evaluate(f"set_view(4.1 - {span} / 2, 4.1 + {span} / 2)")
            tab.wait_for_function("!dirty")
            lane = tab.evaluate("[LEFT, 0, LEFT + panes[0].width, panes[0].lane_height - 1]")
            counts = tab.evaluate(PIXELS, lane)
            assert counts.get(RED, 0) >= 10, span
            if span == 20:  # the other gaps are far below the SLO of 0.05 s: none is yellow or red
                assert counts[RED] < 0.1 * sum(counts.values())
            if span == 3:
                strip = tab.evaluate("[LEFT, ...[panes[0].band('gaps')].flatMap(b => [b[0]])]")
                bottom = tab.evaluate("panes[0].band('gaps')[1]")
                right = tab.evaluate("LEFT + panes[0].width")
                assert tab.evaluate(PIXELS, [*strip, right, bottom]).get(RED, 0) >= 10
            if span == 0.4:  # a tick for each token
                ink = counts.get(
                    tab.evaluate(
                        "palette.ink.match(/\\w\\w/g).map(h => parseInt(h, 16)).join(' ')"
                    ),
                    0,
                )
                assert ink > 5 * 20


def test_gaps_on_a_pixel_are_drawn_as_their_longest(browser, tmp_path):
    with opened_runs(browser, tmp_path, {"vllm": a_stall(20, 10)}) as tab:
        gaps = [[0, 1], [1, 4], [4, 5], [5, 15], [15, 16]]
        merged = tab.evaluate("gaps => merge_gaps(gaps, 8)", gaps)
    assert merged == [[0, 5, 3], [5, 15, 10], [15, 16, 1]]


def test_the_tip_says_who_waited_for_whom(browser, tmp_path):
    with opened_runs(browser, tmp_path, {"vllm": a_stall()}) as tab:
        box = tab.locator("canvas[role=img]").first.bounding_box()

        def tip_at(time, y):
            x = tab.evaluate(f"panes[0].x({time})")
            tab.mouse.move(box["x"] + x, box["y"] + y)
            return tab.text_content("#tip")

        stall = "equest 0, token 201: waited 200 ms for request 1's prompt of 900 tokens."
        assert tip_at(4.1, 5) == "R" + stall
        strip = tab.evaluate("panes[0].band('gaps')[1] - 3")
        assert tip_at(4.1, strip).endswith(f"the longest gap here: r{stall}")
        assert tip_at(2.01, 5).startswith("Request 0, token ")
        assert "20.0 ms after the token before" in tab.text_content("#tip")
        lane = tab.evaluate("panes[0].lane_height")
        assert tip_at(4.1, 1.5 * lane) == (
            "Request 1: tokens 0 to 899 of its prompt of 900, alone, in 180 ms."
        )
        assert tip_at(2, 1.5 * lane) == "Request 1 waits 3.50 s to be computed."
        tab.mouse.click(box["x"] + tab.evaluate("panes[0].x(4.1)"), box["y"] + 5)
        tab.mouse.move(5, 5)
        assert tab.evaluate("[lit_request, pinned_request]") == [0, 0]
        tab.wait_for_function("!dirty")
        lit = tab.eval_on_selector_all(".lit", "all => all.map(e => e.dataset.request)")
        assert lit and set(lit) == {"0"}  # also among those that run
        assert tab.is_hidden("#tip")
        tab.keyboard.press("Home")
        tab.keyboard.press("g")
        tab.wait_for_function("!dirty")
        assert tab.text_content("#gapline") == f"Gap: r{stall}"


def test_a_tap_says_who_waited_and_the_page_fits_a_phone(browser, explored):
    with opened(browser, f"file://{explored}#policy=vllm", width=375, touch=True) as tab:
        assert tab.evaluate("document.documentElement.scrollWidth") <= 375
        box = tab.locator("canvas[role=img]").first.bounding_box()
        assert box["y"] + tab.evaluate("panes[0].lanes_height") < 800  # seen without scrolling
        x = tab.evaluate("panes[0].x(0.2)")
        tab.touchscreen.tap(box["x"] + x, box["y"] + 5)
        tab.wait_for_timeout(300)
        assert tab.is_visible("#tip")
        assert re.match(r"Request A, token 11: waited \d+ ms for", tab.text_content("#tip"))
        tab.evaluate("tour(1)")
        tab.wait_for_function("stop_number == 1 && !$('tour').hidden && !dirty")
        tab.wait_for_timeout(300)
        lanes, card = tab.evaluate(
            """['canvas[role=img]', '#tour'].map(
                selector => document.querySelector(selector).getBoundingClientRect().top)"""
        )
        height = tab.evaluate("panes[0].height")
        assert lanes >= 0 and lanes + height < card  # the card hides nothing of the picture


def test_stages_of_a_pipeline_have_lanes_with_their_bubbles(browser, tmp_path):
    cost = CostModel.named("llama3-8b", pp=2)
    arrivals = a_load(20)
    config = EngineConfig("orca", 256, max_batch=8, max_len=2048, page_size=64, pages=512)
    recorder = Recorder()
    run = simulate(cost, config, arrivals, recorder=recorder)
    kinds = bubble_kinds(run.stage_runs)
    recorder.add_stages(run.stage_runs, kinds)
    assert all(len(record["stages"]) == 2 for record in in_turn(recorder))
    bubble, kind = max(kinds, key=lambda pair: pair[0].bubble)
    busy = next(stage_run for stage_run in run.stage_runs if not stage_run.bubble)
    with opened_runs(browser, tmp_path, {"orca": recorder}) as tab:
        top = tab.evaluate("panes[0].band('stages')[0]")

        def told(stage_run, time):
            y = top + 18 * stage_run.stage + 5
            return tab.evaluate(f"describe(panes[0], {time}, {y})")

        text = told(bubble, bubble.start - bubble.bubble / 2)
        waits = re.match(rf"Stage {bubble.stage + 1} waits ([\d.]+ m?s) for its next batch", text)
        assert seconds(waits[1]) == pytest.approx(bubble.bubble, rel=5e-3)
        assert text.endswith(f" ({kind}).")
        assert " computes " in told(busy, (busy.start + busy.end) / 2)
        total = sum(stage_run.bubble for stage_run in run.stage_runs)
        said = re.search(r"Bubbles: ([\d.]+ m?s) in all", tab.text_content(".run p.soft"))
        assert seconds(said[1]) == pytest.approx(total, rel=5e-3)

        def pixels(stage_run, start, end):
            tab.evaluate(f"set_view({stage_run.start} - 0.1, {stage_run.start} + 0.1)")
            tab.wait_for_function("!dirty")
            left, right = tab.evaluate(f"[panes[0].x({start}) + 2, panes[0].x({end}) - 2]")
            y = top + 18 * stage_run.stage
            return tab.evaluate(PIXELS, [left, y + 1, right, y + 14])

        assert len(pixels(busy, busy.start, busy.end)) == 1  # a box of one colour
        assert len(pixels(bubble, bubble.start - bubble.bubble, bubble.start)) > 2  # hatched


def test_a_gap_names_the_preemption_or_else_the_prefill_in_it(browser, tmp_path):
    run, truth = simulated("sarathi-serve", pages=40)
    with opened_runs(browser, tmp_path, {"sarathi-serve": truth}) as tab:
        told = tab.evaluate(
            """() => { const {run} = focused, {lanes} = run;
                return [...lanes].flatMap(([id, {gaps}]) => gaps.map(([since, until], i) =>
                    [id, i, explain_gap(run, {id, since, until, token: i + 2})])); }"""
        )
    stalls = {
        (stall.request_id, stall.end): stall
        for stall in find_stalls(run.completions, run.iterations)
    }
    preempted = [(i, r["start"]) for r in in_turn(truth) for i in r["preempted"]]
    times = {c.request_id: c.token_times for c in run.completions}
    lost = 0
    for request_id, i, text in told:
        since, until = times[request_id][i : i + 2]
        stall = stalls.get((request_id, until))
        # a record has microseconds
        window = round(since, 6), round(until, 6)
        if any(r == request_id and window[0] <= s < window[1] for r, s in preempted):
            lost += 1
            assert text.endswith("as it had lost its pages and was computed again")
        elif stall:
            assert f"{stall.prefill_tokens:,} tokens" in text or "prompt of" in text
            assert str(stall.caused_by) in text or " more: " in text
        else:
            assert text.endswith("after the token before")
    assert lost >= 5 and len(told) == sum(len(c.tbt) for c in run.completions)


def test_only_requests_in_the_window_have_a_lane(browser, tmp_path):
    with opened_runs(browser, tmp_path, {"vllm": a_stall()}) as tab:
        for window, ids in ([0, 0.4], [0]), ([1, 2], [0, 1]), ([899, 901], [2]):
            tab.evaluate("window => set_view(...window)", window)
            tab.wait_for_function("!dirty")
            assert tab.evaluate("panes[0].ids") == ids


def test_the_tour_stands_in_a_gap_where_iterations_pause(browser, tmp_path):
    recorder = a_stall(20, 10)
    iterations = in_turn(recorder)
    iterations[9]["chunks"] = [[2, 0, 900]]  # as much prefill, but before the gap
    iterations[9]["pages"] = [[2, 0, 3]]
    for number, iteration in enumerate(iterations):  # each begins 0.01 s after the last has ended
        for key in ("start", "launch", "end"):
            iteration[key] = round(iteration[key] + 0.01 * number, 6)
    del recorder.records[-1]
    with opened_runs(browser, tmp_path, {"vllm": recorder}) as tab:
        gap = tab.evaluate("focused.run.longest_gap()")
        k = tab.evaluate("iteration_of_gap(focused.run, focused.run.longest_gap())")
    assert gap["until"] - gap["since"] == pytest.approx(0.22)
    assert iterations[k]["chunks"] == [[1, 0, 900]]


def test_no_request_has_the_red_of_a_stall(browser, tmp_path):
    with opened_runs(browser, tmp_path, {"vllm": a_stall(20, 10)}) as tab:
        hues = tab.evaluate("Array.from({length: 1000}, (_, id) => hue_of(id))")
        assert min(hues) >= 30 and max(hues) <= 310


def test_every_policy_has_its_note_in_the_readme_of_policies():
    assert set(POLICIES) <= set(NOTES) <= set(ALL_POLICIES)
    assert papers_policies() in Path("policies/README.md").read_text("utf-8")


def test_the_page_imports_no_torch():
    code = "import sys, page.html; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("command", ["offline", "serve", "simulated"])
def test_the_bench_writes_a_page(command, tmp_path, capsys):
    file = tmp_path / "page.html"
    tiny = ["--preset", "llama-tiny", "--dtype", "float32"]
    words = {
        "offline": [*tiny, "--chunk", "16", "--seq-len", "40", "--batch", "2"],
        "serve": ["serve", *tiny, "--max-len", "64", "--chunk", "16", "--requests", "3"],
        "simulated": [
            "serve",
            "--simulate",
            "a100-80gb",
            "--preset",
            "llama3-8b",
            "--requests",
            "5",
        ],
    }[command]
    names = ["request-level", "sarathi-serve"]
    main([*words, "--policies", ",".join(names), "--html", str(file)])
    assert capsys.readouterr().out.endswith(f"wrote {file}, open {file.as_uri()}\n")
    text = file.read_text()
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    assert [run["name"] for run in data["runs"]] == names
    assert all(run["settings"]["pages"] and run["data"] for run in data["runs"])


def test_what_is_in_the_page_cannot_end_its_data(browser, tmp_path):
    _, truth = simulated("vllm", arrivals=a_load(3))
    write_text(tmp_path / "page.html", page("</script><b>&", "<i>", {"vllm": truth}))
    with opened(browser, f"file://{tmp_path}/page.html") as tab:
        assert tab.text_content("#title") == "</script><b>&"
        assert tab.text_content("#machine") == "<i>"


def test_a_live_page_follows_an_engine(browser):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            _, _, place = self.path.partition("/records/")
            self.send_response(200)
            self.end_headers()
            if not place:
                self.wfile.write(page("live", live="/records").encode())
                return
            records = recorder.records
            end = len(recorder.records)
            new = snapshot if int(place) == 10**15 else records[int(place) :]
            said = {"records": new, "place": begun if int(place) == 10**15 else end}
            said["texts"] = {"0": "the <b>first</b> text", "1": "the second"}
            self.wfile.write(json.dumps(said).encode())

        def log_message(self, *_):
            pass

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
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    step()
    try:
        with opened(browser, f"http://127.0.0.1:{server.server_port}/") as tab:
            while engine.has_work:
                step()
            count = len(in_turn(recorder)) - 2
            tab.wait_for_function(f"focused.run.iterations.length == {count}")
            state = tab.evaluate(
                "[...focused.run.state.progress.values()].map(r => [r.output, r.ended])"
            )
            assert state == [[16, "length"], [16, "length"]]
            assert tab.text_content(".run h2") == "sarathi-serve"
            assert tab.text_content(".run .gap").startswith("The last minute: ")
            texts = tab.eval_on_selector_all("#texts p", "all => all.map(p => p.innerText)")
            assert [re.split(r"\s+", text, maxsplit=1) for text in texts] == [
                ["1", "the second"],
                ["0", "the <b>first</b> text"],
            ]
            tab.hover("#texts p")
            assert tab.evaluate("lit_request") == 1
            assert "It writes: … the second" in tab.evaluate(
                "describe(panes[0], focused.run.end, 1.5 * panes[0].lane_height)"
            )
            tab.keyboard.press("Home")
            tab.wait_for_function("cursor == 0")
            start = tab.evaluate("focused.run.iterations[0].start - focused.run.begin")
            tab.wait_for_function(f"$('position').textContent.endsWith('at {start:.3f} s')")
            with tab.expect_download() as download:
                tab.click("#save")
            events = json.loads(download.value.path().read_text())["traceEvents"]
            assert [e["name"] for e in events if e["ph"] == "i"] == ["finished"] * 2
    finally:
        server.shutdown()
        server.server_close()


def test_an_idle_live_page_says_what_to_send(browser):
    def answer(route):
        if "/records/" in route.request.url:
            nothing = {"records": [{"live": [], "settings": {}}], "place": 0, "texts": {}}
            route.fulfill(json=nothing)
        else:
            text = page("mine", "vllm, chunk 16", live="/records")
            route.fulfill(body=text, content_type="text/html")

    context = browser.new_context()
    context.route("http://idle/**", answer)
    tab = context.new_page()
    tab.goto("http://idle/")
    tab.wait_for_selector("#try:visible")
    command = shlex.split(tab.text_content("#try"))
    assert command[:3] == ["curl", "-N", "http://idle/v1/completions"]
    assert json.loads(command[-1])["model"] == "mine"
    assert tab.text_content("h1") == "mine: vllm, chunk 16"
    context.close()
