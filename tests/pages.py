"""Recorded runs, their pages in a real browser, and the editor there: what tests share."""

import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from cli.files import write_text
from config import EngineConfig
from exercises.loads import Load, LoadRequest
from exercises.lockstep import one_second
from exercises.report import record
from lab.measure.metrics import find_stalls, summarize_run
from lab.measure.workload import poisson, sample_lengths
from lab.simulator.cost_model import CostModel
from lab.simulator.simulation import simulate
from page.html import page
from page.records import Recorder
from policies import find_policy
from tests.forked import ROOT

PYODIDE_FOLDER = Path(os.environ.get("PYODIDE", ROOT / "node_modules/pyodide"))
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SLO_S = 0.05
needs_pyodide = pytest.mark.skipif(
    not (PYODIDE_FOLDER / "pyodide.mjs").is_file(),
    reason="the editor needs the npm package pyodide",
)
# the head of a policy of one's own
MINE = "from scheduler import SarathiServe\nclass Mine(SarathiServe):\n"


class Truth(Recorder):
    """A Recorder that also keeps what really was, as each batch had been decided: `states`, a dict
    {request id: [num_computed, output, pages]} of those that ran, and `waiting`."""

    def __init__(self):
        super().__init__()
        self.states = []
        self.waiting = []

    def decided(self, scheduler, batch):
        super().decided(scheduler, batch)
        if batch:
            state = {}
            for request in scheduler.running:
                output = len(request.tokens) - request.prompt_len
                state[request.id] = [request.num_computed, output, list(request.pages)]
            self.states.append(state)
            self.waiting.append([request.id for request in scheduler.waiting])


def a_load(count=40, qps=14.0, max_len=2048):
    return poisson(sample_lengths("sharegpt4", count, max_len, 0), qps, 0)


def simulated(policy, chunk=256, pages=96, arrivals=None, pp=1, **more):
    """(what was seen, its Truth) of a run in so little memory that some are preempted. With
    prefix_caching every third prompt is alike, as far as it goes."""
    sizes = dict(
        max_batch=24,
        max_len=2048,
        page_size=64,
        pages=pages,
    )
    config = EngineConfig(policy.partition(",")[0], chunk, **sizes, **more)
    recorder = Truth()
    cost = CostModel.named("llama3-8b", pp=pp)
    arrivals = arrivals or a_load()
    prompts = None
    if config.prefix_caching:
        prompts = [[i % 3] * arrival.prompt_len for i, arrival in enumerate(arrivals)]
    return simulate(cost, config, arrivals, prompts, recorder=recorder).run, recorder


def in_turn(recorder):
    """Its records of iterations."""
    return [record for record in recorder.records if "start" in record]


LOADS = {  # policies, and after a comma what is special
    "vllm": dict(pages=48),
    "sarathi-serve": dict(pages=40),
    "sarathi": dict(pages=160),
    "chunked-only": dict(pages=40),
    "priority": dict(pages=40),
    "orca-best": dict(pages=256, pp=2),
    "sarathi-serve, shared": dict(pages=40, prefix_caching=True),
    "orca, shared, in a pipeline": dict(pages=256, pp=2, prefix_caching=True),
}


DRAWN = "dirty === false"
SOURCE_HAS_RUN = "!document.getElementById('runsource').disabled"


@contextmanager
def opened(browser, address, size=(1200, 800), skip_opening=True):
    """The page at an address, drawn; nothing it logs is an error, and no file asks the network."""
    width, height = size
    viewport = {"width": width, "height": height}
    tab = browser.new_page(viewport=viewport, offline="file:" in address)
    errors = []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    tab.goto(address)
    tab.wait_for_function(DRAWN)
    if skip_opening:
        enter(tab)
    yield tab
    assert errors == []
    tab.close()


def enter(tab):
    """Wait for a page, and leave its opening, if it has one."""
    tab.wait_for_function(DRAWN)
    tab.evaluate("close_opening()")
    tab.wait_for_function("$('position').textContent && !dirty")


def texts(tab, selector):
    """What all of these elements say."""
    return tab.evaluate(f"[...document.querySelectorAll(`{selector}`)].map(e => e.innerText)")


def shown_runs(tab):
    """The names of the runs that are drawn."""
    return tab.evaluate("panes.map(pane => pane.run.name)")


def choose(tab, axis, label):
    """Press the button of a label, and wait until a run that is drawn has it."""
    tab.click(f"#choices button[data-axis='{axis}'][data-label='{label}']")
    tab.wait_for_function(f"panes.some(pane => pane.run.name.includes('{label}')) && !dirty")


def run_source(tab, source=None):
    """Press the editor's button, with another source, wait, and return the line that is said."""
    if source is not None:
        tab.fill("#source", source)
    tab.click("#runsource")
    tab.wait_for_function(SOURCE_HAS_RUN, timeout=120_000)
    return tab.text_content("#result")


def seconds(text):
    """What the page writes as "81.2 ms" or "1.23 s"."""
    number, unit = text.split()
    return float(number) * {"ms": 1e-3, "s": 1.0}[unit]


@contextmanager
def opened_runs(browser, folder, runs, slo_s=SLO_S, **options):
    """The page of these {name: Recorder}."""
    file = folder / "page.html"
    write_text(file, page("A test", "no machine", runs, slo_s=slo_s))
    with opened(browser, f"file://{file}", **options) as tab:
        yield tab


def expected_metrics(run, recorder):
    """What the page's table is to say of a run, by the library's own measures."""
    summary = summarize_run(run.completions, run.iterations, run.seconds)
    ttfts = [request.ttft for request in run.completions]
    stalls = find_stalls(run.completions, run.iterations)
    pages = recorder.settings["pages"]
    busy_s = 0.0
    used_s = 0.0
    for iteration in run.iterations:
        seconds = iteration.end - iteration.start
        busy_s += seconds
        used_s += seconds * (pages - iteration.free_pages)
    return {
        "ttft_p50": summary.ttft_s.p50,
        "ttft_p90": np.quantile(ttfts, 0.9),
        "tbt_p99": summary.tbt_s.p99,
        "longest": summary.tbt_s.max,
        "stalls": sum(stall.seconds > SLO_S for stall in stalls),
        "tokens_per_s": summary.tokens_per_s,
        "cache": used_s / pages / busy_s,
    }


def recorded(policy, seconds=one_second, **load):
    """A Recorder of these (arrival, prompt, output, and maybe shared) tokens under a policy."""
    sizes = dict(chunk=256, max_batch=8, pages=64, page_size=64) | load
    sizes["requests"] = tuple(LoadRequest(*request) for request in sizes["requests"])
    return record(find_policy(policy), Load(**sizes), seconds)


def a_stall():
    """A Recorder of request 0 with gaps of 0.02 s, and at 4 s one of 0.2 s, in which 1 is prefilled
    whole."""
    requests = [(0.0, 10, 400), (3.99, 900, 1), (900.0, 10, 1)]
    return recorded(
        "vllm", lambda batch: 0.18 if batch[0].length == 900 else 0.02, requests=requests
    )


PIXELS = """([x0, y0, x1, y1]) => {  // how many pixels of a part of the picture have which colour
    const {canvas} = panes[0], scale = devicePixelRatio, counts = {};
    const {data} = canvas.getContext("2d").getImageData(
        x0 * scale, y0 * scale, (x1 - x0) * scale, (y1 - y0) * scale);
    for (let i = 0; i < data.length; i += 4) {
        const rgb = data.slice(i, i + 3).join(" ");
        counts[rgb] = (counts[rgb] ?? 0) + 1;
    }
    return counts; }"""
RED = "201 33 28"
