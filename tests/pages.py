"""Recorded runs, and their pages in a real browser: what the tests of views/page.py share."""

import shutil
from contextlib import contextmanager

from cli.options import write_text
from config import EngineConfig
from lab.measure.workload import poisson, sample_lengths
from lab.simulator.cost_model import CostModel
from lab.simulator.simulation import simulate
from views.page import page
from views.records import Recorder

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SLO_S = 0.05


class Truth(Recorder):
    """A Recorder that also keeps what really was, as each batch had been decided: `states`, a dict
    {request id: [num_computed, output, pages]} of those that ran, and `waiting`."""

    def __init__(self):
        super().__init__()
        self.states, self.waiting = [], []

    def _decide(self, number, scheduler, next_batch):
        batch = super()._decide(number, scheduler, next_batch)
        if batch:
            state = {
                r.id: [r.num_computed, len(r.tokens) - r.prompt_len, list(r.pages)]
                for r in scheduler.running
            }
            self.states.append(state)
            self.waiting.append([r.id for r in scheduler.waiting])
        return batch


def a_load(count=40, qps=14.0, max_len=2048):
    return poisson(sample_lengths("sharegpt4", count, max_len, 0), qps, 0)


def simulated(policy, chunk=256, pages=96, arrivals=None, pp=1, **more):
    """(what was seen, its Truth) of a run in so little memory that some are preempted. With
    prefix_caching every third prompt is alike, as far as it goes."""
    sizes = dict(max_batch=24, max_len=2048, page_size=64, pages=pages)
    config = EngineConfig(policy.partition(",")[0], chunk, **sizes, **more)
    recorder = Truth()
    cost, arrivals = CostModel.named("llama3-8b", pp=pp), arrivals or a_load()
    alike = [[i % 3] * arrival.prompt_len for i, arrival in enumerate(arrivals)]
    prompts = alike if config.prefix_caching else None
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


DRAWN = "document.getElementById('position').textContent != ''"


@contextmanager
def opened(browser, address, width=1200, scheme="light", until=DRAWN, touch=False):
    """The page at an address, drawn; nothing it logs is an error, and no file asks the network."""
    context = browser.new_context(
        viewport={"width": width, "height": 800},
        color_scheme=scheme,
        offline="file:" in address,
        has_touch=touch,
    )
    tab, errors = context.new_page(), []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    tab.goto(address)
    tab.wait_for_function(until)
    yield tab
    assert not errors
    context.close()


@contextmanager
def opened_runs(browser, folder, runs, **options):
    write_text(folder / "page.html", page("A test", "no machine", runs, slo_s=SLO_S))
    with opened(browser, f"file://{folder}/page.html", **options) as tab:
        yield tab
