"""What today's engines decide, and the questions their users ask: six pages, all simulated.

    for page in PAGES: print(page.function().to_markdown())

Read first: policies/today.py, policies/remedies.py. Read next: lab/commands/today.py."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from cli.tables import Cell, format_table
from config import EngineConfig
from lab.claims.today_rules import Step, conduct_of, differs, smallest_difference
from lab.measure.capacity import possible_qps
from lab.measure.metrics import RunSummary, summarize_run
from lab.measure.run_loop import Run
from lab.measure.workload import Arrival, poisson, sample_lengths
from lab.simulator.cost_model import CostModel
from lab.simulator.machine import base_of
from lab.simulator.random_loads import random_load
from lab.simulator.simulation import simulate
from policies.cards import CARDS
from policies.priority import PRIORITIES

RANDOM_LOADS = 200  # in lock step
MODEL = "llama3-8b"  # on one A100
PAGE_SIZE = 64
CHUNK = 512
MAX_LEN = 4096
CHAT_TOKENS = 64 * MAX_LEN  # of memory


@dataclass(frozen=True)
class Page:
    """The answer to a question: text with tables, and a picture if one says more."""

    name: str  # of its picture's file
    question: str
    parts: Sequence[str]  # paragraphs and tables in Markdown
    chart: dict[str, dict[str, float]] | None = None  # {quantity: {policy: number}}

    def to_markdown(self) -> str:
        """The page as text."""
        return "\n\n".join([f"## {self.question}", *self.parts])


def chart_of(
    rows: Mapping[str, Sequence[Cell]], quantities: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """The chart of some columns of a table: {head of the column: name of the quantity}."""
    chart: dict[str, dict[str, Any]] = {quantity: {} for quantity in quantities.values()}
    for name, row in rows.items():
        for head, number, _ in row:
            if head in quantities:
                chart[quantities[head]][name.replace("`", "")] = number
    return chart


def serve(
    arrivals: Sequence[Arrival],
    policy: str,
    *,
    chunk: int = CHUNK,
    max_len: int = MAX_LEN,
    tokens: int = CHAT_TOKENS,
    max_batch: int = 64,
    options: Mapping[str, object] | None = None,
) -> Run:
    """Simulate a run on one A100 with memory for so many tokens."""
    config = EngineConfig(
        policy,
        chunk=chunk,
        max_batch=max_batch,
        max_len=max_len,
        page_size=PAGE_SIZE,
        pages=tokens // PAGE_SIZE,
        policy_options=dict(options or {}),
    )
    return simulate(CostModel.named(MODEL), config, arrivals).run


def summary_of(run: Run) -> RunSummary:
    """The numbers of a run."""
    return summarize_run(run.completions, run.iterations, run.seconds)


def chats(requests: int, load: float) -> tuple[list[tuple[int, int]], float]:
    """The lengths of some chats, and so many times the rate that is possible with them."""
    lengths = sample_lengths("sharegpt4", requests, MAX_LEN, seed=0)
    base = base_of(CostModel.named(MODEL), MAX_LEN, CHUNK)
    return lengths, load * possible_qps(base, lengths)


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
        "engines",
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
        "vllm-v1",
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
            "what was promised to a prompt, and it is preempted half-way (*How much memory to "
            "reserve?*).",
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


# ---- 3. One long prompt among short ones ---------------------------------------------------------

LONG_PROMPT = 32_000
LONG_MAX_LEN = 32_768
LONG_CHUNK = 2048
LONG_POLICIES: dict[str, tuple[str, dict[str, object]]] = {  # label -> policy, options
    "sarathi-serve": ("sarathi-serve", {}),
    "vllm-v1": ("vllm-v1", {}),
    "vllm-v1, threshold 512": ("vllm-v1", {"long_prefill_token_threshold": 512}),
    "threshold under contention": ("threshold-under-contention", {}),
    "P-PAS, 512 under pressure": ("ppas", {}),
    "4 prefills at once": ("equal-progress", {}),
    "shortest uncached first": ("shortest-uncached", {}),
    "priority (deadlines)": ("priority", {}),
    "SGLang": ("sglang", {}),
    "interval 4": ("interval", {"every": 4}),
    "interval 8": ("interval", {"every": 8}),
}


def long_among_short_load() -> list[Arrival]:
    """Four short requests a second for 30 s; one long prompt after 5 s and one after 15 s."""
    short = poisson([(200, 100)] * 120, 4.0, seed=0)
    long = [Arrival(time, LONG_PROMPT, 100) for time in (5.0, 15.0)]
    return sorted([*short, *long], key=lambda arrival: arrival.time)


def long_rows() -> dict[str, list[Cell]]:
    """Latencies of short requests and of long ones, under each policy."""
    arrivals = long_among_short_load()
    long = [arrival.prompt_len == LONG_PROMPT for arrival in arrivals]
    first_long = arrivals[long.index(True)].time
    rows: dict[str, list[Cell]] = {}
    for label, (policy, options) in LONG_POLICIES.items():
        run = serve(
            arrivals,
            policy,
            chunk=LONG_CHUNK,
            max_len=LONG_MAX_LEN,
            tokens=8 * LONG_MAX_LEN,
            options=options,
        )
        ttfts = [completion.ttft or 0.0 for completion in run.completions]
        behind = [  # those that arrive while a long prompt is computed
            ttft
            for arrival, is_long, ttft in zip(arrivals, long, ttfts, strict=True)
            if not is_long
            and first_long <= arrival.time < first_long + 15
            and (arrival.time - first_long) % 10 < 5
        ]
        tbt_s = summary_of(run).tbt_s
        long_ttfts = [ttft for is_long, ttft in zip(long, ttfts, strict=True) if is_long]
        rows[label] = [
            ("short TTFT P50", median(behind), ".2f"),
            ("worst", max(behind), ".2f"),
            ("long TTFT", max(long_ttfts), ".2f"),
            ("TBT P99", tbt_s.p99, ".3f"),
            ("longest gap", tbt_s.max, ".3f"),
        ]
    return rows


def long_among_short() -> Page:
    """A long prompt among short ones under several policies."""
    rows = long_rows()
    return Page(
        "long-prompt",
        "One long prompt among short ones",
        [
            f"Four requests of 200 + 100 tokens a second, and twice a prompt of {LONG_PROMPT:,}. "
            f"Budget {LONG_CHUNK:,}; {MODEL} on one A100, simulated. *short* are the requests that "
            "arrive within 5 s of a long one. All in seconds.",
            format_table("policy", rows),
            "First come, first served makes every short prompt wait for the rest of the long one. "
            "Whoever lets them pass, by shares, by length or by deadline, serves them within one "
            "iteration or two, and the long one waits a little longer. More answers then run "
            "while it is computed, so more gaps are long: P99 TBT rises, the longest gap does not. "
            "A threshold shortens the iterations, too: best for the short ones, worst for the long "
            "one; under contention only, less of both. A smaller budget under pressure (P-PAS) "
            "cures the gaps, not the short prompts. Prefill first and alone (SGLang) stops all "
            "answers meanwhile, which P99 TBT does not show; an interval cures that, and all "
            "prompts wait longer.",
        ],
        chart_of(
            rows,
            {
                "worst": "worst short TTFT, s",
                "long TTFT": "long TTFT, s",
                "TBT P99": "P99 TBT, s",
                "longest gap": "longest gap, s",
            },
        ),
    )


# ---- 4. How much memory to reserve ---------------------------------------------------------------

MEMORY_TOKENS = 6 * MAX_LEN
MEMORY_POLICIES = {  # what is reserved at admission -> policy
    "max_len": "sarathi",
    "prompt + max_new": "no-evict",
    "the peak": "peak",
    "a ratio of outputs": "sglang-mixed",
    "15 % margin": "hf",
    "prompt, 1 % free": "sarathi-serve",
    "prompt, decodes wait": "fastgen",
    "first chunk": "vllm-v1",
}


def memory_to_reserve() -> Page:
    """Reservations side by side on tight memory."""
    arrivals = poisson(*chats(200, load=2.0), seed=0)
    rows: dict[str, list[Cell]] = {}
    for reserved, policy in MEMORY_POLICIES.items():
        summary = summary_of(serve(arrivals, policy, tokens=MEMORY_TOKENS))
        rows[f"{reserved} (`{policy}`)"] = [
            ("tokens/s", summary.tokens_per_s, ",.0f"),
            ("run at once", summary.running_mean, ".1f"),
            ("preemptions", summary.preemptions, ",d"),
            ("computed again", summary.recomputed_tokens, ",d"),
            ("TTFT P50", summary.ttft_s.p50, ".1f"),
            ("TBT P99", summary.tbt_s.p99, ".3f"),
            ("longest gap", summary.tbt_s.max, ".2f"),
        ]
    return Page(
        "memory",
        "How much memory to reserve?",
        [
            f"200 chat requests, more than can be served, in memory for {MEMORY_TOKENS:,} tokens: "
            f"six requests of max_len = {MAX_LEN:,}. Budget 512, {MODEL} on one A100, "
            "simulated; seconds. Outputs are as long as max_new_tokens says, which favours whoever "
            "reserves them.",
            format_table("reserved", rows),
            "max_len wastes half of the memory or more. Reserving little runs more at once, "
            "preempts, and computes again; meanwhile that answer stands still, which the longest "
            "gap shows and P99 TBT does not. Letting decodes wait computes least again; the answer "
            "stands still until others end. The peak admits nearly as many as the prompt alone, "
            "and preempts nobody here.",
        ],
        chart_of(
            rows,
            {
                "tokens/s": "tokens/s",
                "preemptions": "preemptions",
                "TTFT P50": "TTFT P50, s",
                "longest gap": "longest gap, s",
            },
        ),
    )


# ---- 5. Chunking shows nothing here: why? --------------------------------------------------------

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
    lengths, qps = chats(150, load=0.75)
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
    summary = summary_of(run)
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
            serve(setting.arrivals, policy, max_batch=setting.max_batch)
        )
        for setting in checklist_settings()
        for policy in setting.policies
    }
    return Page(
        "checklist",
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


# ---- 6. More than can be served ------------------------------------------------------------------

OVERLOAD = 2.0  # times what is possible
AGEING_S = 5.0
AGEINGS: dict[str, dict[str, object]] = {  # label -> options of `priority`
    "never": {"ageing": 1e30},
    "up to normal": {"ageing": AGEING_S, "ageing_to": "normal"},
    "up to realtime": {"ageing": AGEING_S},
}


def overload_by_class() -> Page:
    """How long each class waits under `priority` when twice as many come as can be served."""
    arrivals = [
        arrival._replace(priority=PRIORITIES[i % len(PRIORITIES)])
        for i, arrival in enumerate(poisson(*chats(1000, OVERLOAD), seed=0))
    ]
    rows: dict[str, list[Cell]] = {}
    for label, options in AGEINGS.items():
        completions = serve(arrivals, "priority", options=options).completions
        rows[label] = [
            (name, max(c.ttft or 0.0 for c in completions if c.service.priority == number), ".1f")
            for number, name in enumerate(PRIORITIES)
        ]
    return Page(
        "overload",
        "More than can be served: who waits?",
        [
            "Twice as many requests as can be served, a quarter of each class, under `priority`. "
            f"The longest TTFT by class, in seconds; {MODEL} on one A100, simulated. *Ageing* "
            f"lifts a waiting request by one class every {AGEING_S:g} s (30 by default).",
            format_table("ageing", rows),
            "In lasting overload ageing makes the classes that it reaches equal: up to realtime, "
            "they are worth nothing. Without ageing the low ones wait for the end of the overload. "
            'With `ageing_to="normal"` they wait as the normal ones do, and realtime and high ones '
            "are spared. None of this makes the queue shorter: a server turns requests away beyond "
            "its `--max-waiting`.",
        ],
        chart_of(rows, {name: f"{name}: longest TTFT, s" for name in PRIORITIES}),
    )


PAGES: dict[str, Callable[[], Page]] = {
    "engines": who_does_what,
    "vllm-v1": is_vllm_sarathi_serve,
    "long-prompt": long_among_short,
    "memory": memory_to_reserve,
    "overload": overload_by_class,
    "checklist": chunking_shows_nothing,
}
