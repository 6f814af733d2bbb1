"""What today's engines decide, and the questions their users ask: three pages, all simulated.

    for page in PAGES: print(page.function().to_markdown())

Read first: policies/today.py, policies/remedies.py. Read next: lab/commands/today.py."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cli.tables import Cell, format_table
from config import EngineConfig
from lab.claims.today_rules import Step, conduct_of, differs, smallest_difference
from lab.measure.capacity import possible_qps
from lab.measure.metrics import summarize_run
from lab.measure.run_loop import Run
from lab.measure.workload import Arrival, poisson, sample_lengths
from lab.simulator.cost_model import CostModel
from lab.simulator.machine import base_of
from lab.simulator.random_loads import random_load
from lab.simulator.simulation import simulate
from policies.cards import CARDS

RANDOM_LOADS = 200  # in lock step
MODEL = "llama3-8b"  # on one A100
MAX_LEN = 4096


@dataclass(frozen=True)
class Page:
    """The answer to a question: text with tables."""

    question: str
    parts: Sequence[str]  # paragraphs and tables in Markdown

    def to_markdown(self) -> str:
        """The page as text."""
        return "\n\n".join([f"## {self.question}", *self.parts])


def serve(arrivals: Sequence[Arrival], policy: str, max_batch: int) -> Run:
    """Simulate a run on one A100."""
    config = EngineConfig(
        policy,
        chunk=512,
        max_batch=max_batch,
        max_len=MAX_LEN,
        page_size=64,
        pages=MAX_LEN,  # room for 64 of the longest requests
    )
    return simulate(CostModel.named(MODEL), config, arrivals).run


# ---- 1. Who does what today ----------------------------------------------------------------------


def who_does_what() -> Page:
    """One table, engine by engine, found out by trying the policies."""
    cards = [card for card in CARDS.values() if card.engine]
    cards = [
        *(card for card in cards if card.engine != "proposed"),
        CARDS["sarathi-serve"],
        *(card for card in cards if card.engine == "proposed"),
    ]
    rows = {}
    for card in cards:
        conduct = conduct_of(card.name)
        rows[card.name] = [
            ("whose, and version", ", ".join(filter(None, (card.engine, card.version))), ""),
            ("a batch is", conduct.batch, ""),
            ("a long prompt in front", conduct.long_prompt, ""),
            ("memory for two", conduct.pages_for_two, ""),
            ("out of memory pays", conduct.out_of_memory, ""),
        ]
    equal = ", ".join(f"{card.equal} (`{card.name}`)" for card in cards if card.equal)
    return Page(
        "Who does what today?",
        [
            "Each row was found out by trying the policy: prompts arrive while a request decodes; "
            "a short prompt comes behind a long one; two requests of 10 + 20 and 10 + 12 tokens "
            "want to run at once; two requests decode, and the older one, with fewer outputs, "
            "finds no page. *Memory for two* is the least, in tokens, with which both run: 30 is "
            "the longer one, 44 the most that both ever hold, 52 prompt and output of both.",
            format_table("policy", rows),
            f"With the engine's own scheduler and cache all batches were equal on {equal} random "
            "loads (`python -m tests.beside NAME`, where the engine is installed). The other rules "
            "were read. Each class says in what it differs from its engine.",
        ],
    )


# ---- 2. Is vLLM's default Sarathi-Serve? ---------------------------------------------------------


def is_vllm_sarathi_serve() -> Page:
    """vllm-v1 and sarathi-serve in lock step."""
    pair = ("vllm-v1", "sarathi-serve")
    loads = [random_load(pair[0], seed) for seed in range(RANDOM_LOADS)]
    plain = [load for load in loads if not load.config.prefix_caching]
    cached = [load for load in loads if load.config.prefix_caching]
    ample = sum(differs(*pair, load, ample=True) for load in plain)
    tight = sum(differs(*pair, load, ample=False) for load in plain)
    shared = sum(differs(*pair, load, ample=True) for load in cached)
    difference = smallest_difference(*pair)
    assert difference is not None
    load = difference.load
    requests = ", ".join(f"{prompt} + {output}" for prompt, output in load.requests)
    return Page(
        "Is vLLM's default Sarathi-Serve?",
        [
            f"In lock step on {len(plain)} random loads, with enough memory for all: {ample} "
            f"differ. With memory from tight to ample: {tight} differ. So yes, batch for batch, as "
            "long as memory suffices. With prefix caching, vLLM's default, "
            f"{shared} of {len(cached)} differ: in vLLM a prompt also finds pages that the same "
            "batch computes for the one before it. vLLM V1 does not put decodes first; but a "
            "request is admitted only into what those before it leave, and they never take more "
            "later. So no decode is ever beyond the budget.",
            "They differ in memory. `sarathi-serve` gives a prompt all its pages at once and keeps "
            "1 % free; vLLM V1 looks whether the prompt fits, and takes the pages chunk by chunk. "
            f"The smallest load that shows it: prompt + output {requests}, budget {load.chunk}, "
            f"memory for {load.pages} tokens.",
            _side_by_side(pair, difference.steps),
            "`sarathi-serve` has given all its pages away and must preempt; in vLLM V1 the first "
            "request has ended before memory is short. The price comes under load: others use "
            "what was promised to a prompt, and it is preempted half-way.",
        ],
    )


def _side_by_side(names: tuple[str, str], steps: tuple[list[Step], list[Step]]) -> str:
    """Both schedules as a table."""
    rows = {
        str(i): [
            (name, _show(run[i]) if i < len(run) else "", "")
            for name, run in zip(names, steps, strict=True)
        ]
        for i in range(max(map(len, steps)))
    }
    return format_table("iteration", rows)


def _show(step: Step) -> str:
    return ", ".join(
        f"{request}: {chunk if chunk == 'decode' else f'{chunk} of its prompt'}"
        for request, chunk in step.items()
    )


# ---- 3. Chunking shows nothing here: why? --------------------------------------------------------

SERVE = "serve --simulate a100-80gb --preset llama3-8b --max-len 4096 --policies vllm,sarathi-serve"
CHECKLIST = {  # reason -> the options of SERVE that show it
    "**It does show** in P99 TBT and the longest stall": "--qps 6",
    "**Offline**: all prompts come at once, stalls are few and huge: P99 is even lower without "
    "chunks. Look at the longest": "--qps 1000 --requests 128",
    "**Prompts below the budget** are never cut": "--qps 6 --lengths 100+400",
    "**All slots are full**: a prompt waits for a slot, and overlaps with few "
    "decodes": "--qps 6 --batch 2",
    "**The mean, P50 or TPOT is looked at**, not P99 TBT: most gaps hold no prefill, and TPOT "
    "averages a request's gaps before the percentile is taken": "--qps 6",
    "**A low load**: stalls are rarer than 1 % of the gaps, so P99 does not see them; the longest "
    "gap does": "--qps 0.1",
    "**The baseline chunks already**: vLLM V1 does by default, see "
    "above": "--qps 6 --policies vllm-v1,sarathi-serve",
}


class Setting(NamedTuple):
    """A load under which people look for the gain of chunks."""

    description: str
    arrivals: list[Arrival]
    max_batch: int
    policies: tuple[str, str]


def checklist_settings() -> list[Setting]:
    """The load that shows the gain, and those that hide it."""
    lengths = sample_lengths("sharegpt4", 150, MAX_LEN, seed=0)
    qps = 0.75 * possible_qps(base_of(CostModel.named(MODEL), MAX_LEN, 512), lengths)
    chat = poisson(lengths, qps, seed=0)
    at_once = [arrival._replace(time=0.0) for arrival in chat]
    short = poisson([(min(prompt, 100), output) for prompt, output in lengths], qps, 0)
    pair = ("vllm", "sarathi-serve")
    return [
        Setting("a chat load at 75 % of what is possible", chat, 64, pair),
        Setting("offline: all at once", at_once, 150, pair),
        Setting("prompts of 100 at most, below the budget", short, 64, pair),
        Setting("all slots full: 2 at once", chat, 2, pair),
        Setting("a load of 2 %", poisson(lengths, qps / 37.5, seed=0), 64, pair),
        Setting("a baseline that chunks already", chat, 64, ("vllm-v1", "sarathi-serve")),
    ]


def checklist_row(run: Run) -> list[Cell]:
    """All latencies of a run."""
    summary = summarize_run(run.completions, run.iterations, run.seconds)
    gaps = [gap for completion in run.completions for gap in completion.tbt]
    tpots = [float(np.mean(completion.tbt)) for completion in run.completions if completion.tbt]
    return [
        ("TTFT P50", summary.ttft_s.p50, ".3f"),
        ("TBT = ITL P50", summary.tbt_s.p50, ".3f"),
        ("mean", float(np.mean(gaps)), ".3f"),
        ("P99", summary.tbt_s.p99, ".3f"),
        ("longest", summary.tbt_s.max, ".3f"),
        ("TPOT P99", float(np.quantile(tpots, 0.99)), ".3f"),
        ("tokens/s", summary.tokens_per_s, ",.0f"),
    ]


def chunking_shows_nothing() -> Page:
    """Settings in which the gain does not show, with all metrics."""
    rows = {
        f"{setting.description}: {policy}": checklist_row(
            serve(setting.arrivals, policy, setting.max_batch)
        )
        for setting in checklist_settings()
        for policy in setting.policies
    }
    return Page(
        "Chunking shows nothing here: why?",
        [
            f"`vllm` computes whole prompts alone, `sarathi-serve` chunks of 512; {MODEL} on one "
            "A100, simulated; seconds. The first load shows the gain, in P99 and in the longest "
            "gap. Each other one hides it.",
            format_table("load: policy", rows),
            f"To see it, add to `bench.py {SERVE}`:",
            "\n".join(f"- {reason}: `{options}`" for reason, options in CHECKLIST.items()),
        ],
    )


PAGES: dict[str, Callable[[], Page]] = {
    "engines": who_does_what,
    "vllm-v1": is_vllm_sarathi_serve,
    "checklist": chunking_shows_nothing,
}
