"""The schedule page: what a real browser makes of the records."""

import json
import random
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise

import pytest

from bench import main
from cli.options import write_text
from engine import Engine
from lab.measure.metrics import percentiles, summarize_run
from lab.measure.workload import Arrival
from sampling import SamplingParams
from tests.helpers import tiny_model
from tests.pages import LOADS, SLO_S, a_load, in_turn, opened, opened_runs, simulated
from views.page import Recorder, page


@pytest.mark.parametrize("policy", LOADS)
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


def seconds(text):
    """What the page writes as "81.2 ms" or "1.23 s"."""
    number, unit = text.split()
    return float(number) * {"ms": 1e-3, "s": 1.0}[unit]


def test_the_numbers_are_those_of_metrics(browser, tmp_path):
    run, truth = simulated("vllm", pages=48)
    summary = summarize_run(run.completions, run.iterations, run.seconds)
    gaps = [gap for c in run.completions for gap in c.tbt]
    with opened_runs(browser, tmp_path, {"vllm": truth}) as tab:
        exact = tab.evaluate(
            """() => { const {ttft, tbt} = focused.run.so_far(Infinity);
                return [ttft, tbt].map(of => [0.5, 0.99, 1].map(q => quantile(of, q))); }"""
        )
        tab.keyboard.press("End")
        tab.wait_for_timeout(400)
        for key, found in zip(("ttft", "tbt"), exact, strict=True):
            expected = [
                getattr(getattr(summary, f"{key}_s"), name) for name in ("p50", "p99", "max")
            ]
            assert found == pytest.approx(expected, abs=3e-6)  # times are written in microseconds
            cells = [tab.text_content(f"[data-k='{key}-{q}']") for q in (0.5, 0.99, 1)]
            assert list(map(seconds, cells)) == pytest.approx(expected, rel=5e-3)
        rows = dict(
            re.findall(r"<tr><td>([^<]*)</td>.*?>([^<]*)</td></tr>", tab.inner_html("#numbers"))
        )
        over = sum(gap > SLO_S for gap in gaps)
        assert over > 10 and rows["gaps longer than 50.0 ms"] == f"{over:,}"
        assert rows["preemptions"] == f"{summary.preemptions}" != "0"
        assert tab.evaluate("focused.run.requests.size") == len(run.completions)
        half = tab.evaluate("[...focused.run.so_far(200).tbt]")
    end = in_turn(truth)[200]["end"]
    times = [pair for c in run.completions for pair in pairwise(c.token_times)]
    expected = percentiles(b - a for a, b in times if b < end + 1e-6)
    assert len(half) == sum(b < end + 1e-6 for _, b in times)
    assert half[-1] == pytest.approx(expected.max, abs=3e-6)


def test_the_keyboard_is_enough(browser, tmp_path):
    runs = {name: simulated(name)[1] for name in ("vllm", "sarathi-serve")}

    def where(tab):
        return int(re.search(r"[\d,]+", tab.text_content("#position"))[0].replace(",", ""))

    with opened_runs(browser, tmp_path, runs) as tab:

        def press(*keys):
            for key in keys:
                tab.keyboard.press(key)
                tab.wait_for_timeout(60)

        assert where(tab) == 1
        press("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft")
        assert where(tab) == 3
        press("Shift+ArrowRight")
        assert where(tab) == 13
        press("End")
        assert where(tab) == len(in_turn(runs["vllm"]))
        press("Home")
        assert where(tab) == 1

        def span():
            return tab.evaluate("view.to - view.from")

        whole = span()
        press("+")
        assert span() == pytest.approx(0.6 * whole)
        press("0")
        assert span() == pytest.approx(whole)
        tab.select_option("#speed", "100")
        tab.evaluate("document.activeElement.blur()")
        press(" ")
        tab.wait_for_function("cursor > 20")
        press(" ")
        stopped = where(tab)
        tab.wait_for_timeout(200)
        assert where(tab) == stopped > 20
        press("d")
        assert tab.evaluate("document.documentElement.dataset.theme") == "dark"
        press("o")
        assert tab.evaluate("focused === panes[1]")
        with tab.expect_download():
            press("s")
        tab.focus("#scrub")
        press("Home", "ArrowRight")
        assert where(tab) == 2


def test_the_tour_has_seven_stops_and_shows_what_it_says(browser, tmp_path):
    run, truth = simulated("sarathi-serve", pages=40)
    with opened_runs(browser, tmp_path, {"sarathi-serve": truth}) as tab:
        tab.keyboard.press("t")
        told = []
        for n in range(7):
            tab.wait_for_function(f"document.getElementById('stop').textContent[0] == '{n + 1}'")
            told.append(
                (tab.text_content("#stoptext"), tab.evaluate("focused.run.iterations[cursor]"))
            )
            tab.keyboard.press("Enter")  # the button "next" has the focus
        assert tab.is_hidden("#tour")
    (stall, _), (_, chunk), (_, ride), (_, budget), (_, memory), (_, load), _ = told
    assert f"{max(gap for c in run.completions for gap in c.tbt):.3g} s" in stall
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
        shared, chips = tab.evaluate(pages), tab.text_content("#chips")
        stripes = tab.evaluate(
            """() => { const pen = $("pages").getContext("2d");  // page 2 is 18 pixels wide
                return [2, 14].map(y => pen.getImageData(2 * 18 + 2, y, 1, 1).data.join()); }"""
        )
    assert said[1] == (
        "3 decodes first, then 253 of 256 tokens for request 5 (its 0 to 252 of 900); "
        "request 6 waits: no budget left."
    )
    assert said[2] == (
        "No page was free: request 5 lost its pages and will be computed again; 3 decodes and no "
        "prefill; request 5 waits, and 1 behind it: it needs 15 pages and 1 is free."
    )
    assert said[3] == (
        "10 tokens for request 3 (its whole prompt); 3 running decodes wait: this batch is of "
        "prefill alone; request 6 waits: this policy lets in nobody more in this iteration."
    )
    assert "100 of 256 tokens for request 6 (its 64 to 163 of 500; 64 tokens found in" in said[4]
    assert "6: tokens 64 to 163, prefill, 64 found in the cache" in chips
    # request 6 reads page 2 beside its own request 2; 0, 1 and 3 have a page each
    assert (
        "6 of 64 pages taken, 1 by several requests, striped" in shared and len(set(stripes)) == 2
    )


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


def test_ten_thousand_iterations_are_less_than_five_megabytes(browser, tmp_path):
    recorder = long_run()
    assert len(in_turn(recorder)) > 10_000
    with opened_runs(browser, tmp_path, {"sarathi-serve": recorder}) as tab:
        assert tab.evaluate("focused.run.iterations.length") == len(in_turn(recorder))
    assert (tmp_path / "page.html").stat().st_size < 5e6


def test_explore_has_a_run_for_every_place_of_the_sliders(browser, tmp_path, capsys):
    file = tmp_path / "explore.html"
    main(["explore", "policies/template.py:ShortestFirst", "--requests", "6", "--html", str(file)])
    assert capsys.readouterr().out == f"wrote {file}, open {file.as_uri()}\n"
    with opened(browser, f"file://{file}") as tab:
        choices = tab.evaluate("data.choices")
        assert choices["policy"][0] == "ShortestFirst" and len(choices["load"]) == 3
        found = tab.evaluate(
            """async () => { const names = new Set();
                for (const policy of data.choices.policy.keys())
                for (const chunk of data.choices.chunk.keys())
                for (const load of [0, 2]) for (const memory of [0, 1]) {
                    const at = {policy, chunk, load, memory};
                    for (const [name, n] of Object.entries(at)) $(`choose-${name}`).value = n;
                    await choose();
                    names.add(panes[0].run.name);
                } return [...names]; }"""
        )
        cut = [name for name in found if " | * | " not in name]
        assert len(found) == len(set(found)) and {name.split(" | ")[1] for name in cut} == {
            *choices["chunk"]
        }
        quick = """async () => {
            const slider = $("choose-chunk"), wait = () => new Promise(end => setTimeout(end, 400));
            const move = value => {
                slider.value = value;
                slider.dispatchEvent(new Event("input"));
            };
            move(3);
            move(0);  // is loaded, the one before is not
            await wait();
            return panes[0].run.name; }"""
        tab.evaluate("loaded.clear()")
        tab.evaluate("choose({policy: 'sarathi-serve', chunk: data.choices.chunk[0]})")
        assert tab.evaluate(quick).split(" | ")[1] == choices["chunk"][0]
        tab.evaluate("set_view(-Infinity, Infinity), go(focused.run, 9)")
        moment = tab.evaluate("moment")
        for name in ("request-level", "sarathi-serve", "orca"):
            tab.evaluate(f"choose({{policy: '{name}', load: 'heavy'}})")
            whole = "[view.from <= focused.run.begin, view.to >= focused.run.end, moment]"
            assert tab.evaluate(whole) == [True, True, moment]  # what was seen and chosen stays
        tab.evaluate("choose({policy: 'vllm'})")
        assert tab.is_disabled("#choose-chunk")  # which it does not go by
        tab.evaluate("tour(0); tour(-1)")
        tab.wait_for_timeout(300)
        assert tab.is_hidden("#tour")
        tab.select_option("#beside", "vllm")
        tab.wait_for_function("panes.length == 2 && panes[1].run.name.startsWith('vllm')")
        tab.click("text=tour")
        tab.wait_for_function("document.getElementById('stop').textContent[0] == '1'")


@pytest.mark.parametrize("command", ["offline", "serve", "simulated"])
def test_the_bench_writes_a_page(command, tmp_path, capsys):
    file, tiny = tmp_path / "page.html", ["--preset", "llama-tiny", "--dtype", "float32"]
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
            records, end = recorder.records, len(recorder.records)
            new = snapshot if int(place) == 10**15 else records[int(place) :]
            said = {"records": new, "place": begun if int(place) == 10**15 else end}
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
    snapshot, begun = [recorder.snapshot()], len(recorder.records)
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
            with tab.expect_download() as download:
                tab.click("#save")
            events = json.loads(download.value.path().read_text())["traceEvents"]
            assert [e["name"] for e in events if e["ph"] == "i"] == ["finished"] * 2
    finally:
        server.shutdown()
