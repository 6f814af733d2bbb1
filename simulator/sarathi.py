"""SARATHI's experiments on the machines of the paper, simulated, each beside what the paper says.

Every experiment, here and in sarathi_serve.py, is a generator of Tables, from (run, requests,
cpu_s). `run(function, jobs)` calls the function with each tuple of arguments, maybe in parallel.
Those of Sarathi-Serve have `requests` in each run, and `cpu_s` of CPU in each iteration. Read
first: simulation.py, published.toml. Read next: sarathi_serve.py, and report.py, which prints.
"""

import math
import tomllib
from collections import namedtuple
from dataclasses import replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from statistics import median

from experiments.workload import Arrival, zipf_lengths
from policies.config import EngineConfig
from simulator.cost_model import CostModel
from simulator.devices import LINKS
from simulator.simulation import bubble_kinds, simulate
from views.schedule_page import Recorder

PUBLISHED = tomllib.loads(Path(__file__).with_name("published.toml").read_text("utf-8"))
NANOGPT_CPU_S = 4e-3  # of SARATHI's code beside its operations: what S-F7 leaves on average
LONGEST = 4096  # tokens of a request of S-F12
A6000_13B = CostModel.named("llama-13b", "a6000", cpu_s=NANOGPT_CPU_S)
A100_33B = CostModel.named("llama-33b", cpu_s=NANOGPT_CPU_S)
PIPELINE, TP_ONLY = CostModel.named("gpt3-175b", tp=8, pp=8), CostModel.named("gpt3-175b", tp=8)
MOST = {1024: 18, 2048: 10, 3072: 6}  # length -> 13B's largest batch on an A6000, S-§4.3.1


class Table:
    """A table of published.toml, filled: its `claim`, `title`, `note` and `columns`, as print_table
    takes them; `rows`; `errors`, {what is published, and what is simulated: how far it is off};
    what is concluded besides, `finding`; the arguments of what draws it, `data`; and what a page
    is made of, `recorders`."""

    def __init__(self, name, rows, columns=None, finding="", data=(), recorders=None):
        """`rows` maps names to what is simulated, or is a list of that for the names in the file.
        The last numbers of a row are compared; `columns` are those of the others, if not in the
        file. Raises KeyError for a row that is not there."""
        its = PUBLISHED[name]
        its = PUBLISHED.get(its.get("as"), {}) | its
        self.claim, self.title, self.note = name.split()[0], its["title"], its.get("note", "")
        self.finding, self.data, self.rows, self.errors = finding, data, [], {}
        self.recorders = recorders
        self.columns = {its.get("rows", ""): ""} | (columns or its.get("columns", {}))
        alone, with_errors = len(self.columns) - 1, its.get("errors", True)
        published = its.get("published", {})
        compared = its.get("compared", {"paper": ".2f"}) if published else {}
        for head, spec in compared.items():
            self.columns |= {head: spec, f"simulated {head}".removesuffix(" paper"): spec}
            if with_errors:
                self.columns["its error" if "error" in self.columns else "error"] = "+.0%"
        rows = rows if isinstance(rows, dict) else dict(zip(published, rows, strict=True))
        for row, simulated in rows.items():
            cells = [row, *simulated[:alone]]
            papers = published and published[row if row in published else "others"]
            for head, paper, ours in zip(compared, papers, simulated[alone:]):
                paper, error = None if paper == "-" else paper, None  # TOML has no null
                if with_errors and isinstance(paper, int | float) and ours is not None:
                    error = None if getattr(ours, "bound", "") else ours / paper - 1
                    what = row if head == "paper" else f"{row}, {head}"
                    what += f": {paper:.3g} published, {ours:.3g} simulated"
                    self.errors[what] = math.inf if error is None else abs(error)
                cells += [paper, ours, error] if with_errors else [paper, ours]
            self.rows.append(cells)

    def json(self):
        """The claim, the title, the rows as {head: value} with numbers as numbers, and the note."""
        bare = lambda cell: cell[0] if isinstance(cell, tuple) else cell
        plain = lambda cell: f"{cell:.4g}" if getattr(cell, "bound", "") else cell
        rows = [dict(zip(self.columns, map(plain, map(bare, row)))) for row in self.rows]
        return {"claim": self.claim, "title": self.title, "rows": rows, "note": self.note}


def decodes(count, context):
    """A batch of so many decodes, each of which reads `context` tokens, its own among them."""
    return [(0, context - 1, 1)] * count


# in seconds, but for the batch and a share; `bubble` is the median of `bubbles`, of each request
Offline = namedtuple("Offline", "batch makespan utilisation bubble bubbles ends")


def offline(cost, policy, lengths, replicas=1, chunk=256, batch=None, longest=LONGEST):
    """Simulate requests of `lengths`, all there at time 0: an Offline. `batch` None: what fits."""
    batch = batch or cost.max_batch(longest)
    config = EngineConfig(policy, chunk, batch, longest, page_size=longest, pages=batch * cost.pp)
    arrivals = [Arrival(0.0, *pair) for pair in lengths]
    seen = simulate(cost, config, arrivals, replicas=replicas, record=False)
    ends = [completion.token_times[-1] for completion in seen.run.completions]
    its = seen.run.seconds, seen.utilisation, median(seen.bubbles)
    return Offline(batch, *its, seen.bubbles, ends)


def throughput(policy, cost, batch, length, pd_ratio, chunk=256, requests=40):
    """Tokens per second, prompts and outputs, of 40 B requests that are all there at time 0."""
    output = max(1, round(length / (pd_ratio + 1)))
    lengths = [(length - output, output)] * (requests * batch)
    makespan = offline(cost, policy, lengths, 1, chunk, batch, length).makespan
    return len(lengths) * length / makespan


def decode_speedup(cost, batch, length, chunk=256):
    """How many times cheaper a decode is in a batch with a chunk than without, S-§5.1.1."""
    seconds, riding = cost.seconds, decodes(batch - 1, length)
    prefill = (0, length - chunk, chunk - (batch - 1))
    each = (seconds([prefill, *riding]) - seconds([prefill])) / len(riding)
    return seconds(decodes(batch, length)) / batch / each


def sarathi_iterations(run, requests, cpu_s):
    """S-T2, S-F7, S-F3 and S-F8: single iterations of LLaMA-13B on an A6000; S-§4.3.1."""
    cost = A6000_13B
    batches = [(0, 0, 1024)], decodes(4, 1024), [(0, 0, 1021), *decodes(3, 1024)]
    layers = map(cost.layer_seconds, batches)
    times = [layer[kind] for layer in layers for kind in ("linear", "attention")]
    yield Table("S-T2", [[1e3 * (cost.config.n_layer * seconds)] for seconds in times])
    yield Table("S-F7", [[1e3 * cost.seconds([(0, 0, n)])] for n in (128, 256, 257)])
    ratios = []
    for batch in (1, 2, 18):
        prefill_token_s = cost.seconds([(0, 0, 1024)] * batch) / 1024
        ratios.append([cost.seconds(decodes(batch, 1024)) / prefill_token_s])
    yield Table("S-F3", ratios)

    batches, rows = (2, 4, 6, 10, 18), {}
    for n, most in MOST.items():
        found = [decode_speedup(A6000_13B, batch, n) for batch in batches if batch <= most]
        rows[f"context {n:,}"] = found + [None] * (len(batches) - len(found))
    found = [speedup for row in rows.values() for speedup in row if speedup]
    finding = f"2.8x to 10x published, {min(found):.1f}x to {max(found):.1f}x simulated"
    yield Table("S-F8", rows, {f"B = {batch}": ".1fx" for batch in batches}, finding)

    cases = [*product((A6000_13B, A100_33B), MOST), (PIPELINE, LONGEST), (TP_ONLY, LONGEST)]
    yield Table("S-§4.3.1", [[cost.max_batch(length)] for cost, length in cases])


def sarathi_end_to_end(run, requests, cpu_s):
    """S-T4, S-F9 and S-F11: throughput of SARATHI and Orca over the baseline on one GPU."""
    table_4 = [(A6000_13B, 6, length, 50) for length in MOST]
    table_4 += [(A100_33B, 10, 1024, 28), (A100_33B, 5, 2048, 63), (A100_33B, 3, 3072, 127)]
    ratios = (4, 7, 14, 28, 56, 112)
    figure_9 = {c: [(A6000_13B, 18, 1024, pd, c) for pd in ratios] for c in (128, 256, 512)}
    figure_11 = [(A6000_13B, b, length, 256 / (b - 1)) for length, b in MOST.items()]
    cases = [*table_4, *chain(*figure_9.values()), *figure_11]
    wanted = [(policy, *case) for case in cases for policy in ("request-level", "sarathi")]
    wanted += [("orca-best", *case) for case in (*figure_11, *figure_9[256])]
    found = dict(zip(wanted, run(throughput, wanted)))
    gain = lambda policy, case: found[policy, *case] / found["request-level", *case]
    ours, orca = partial(gain, "sarathi"), partial(gain, "orca-best")

    yield Table("S-T4", [[decode_speedup(*case[:3]), ours(case)] for case in table_4])

    rows = {f"chunk {chunk}": list(map(ours, cases)) for chunk, cases in figure_9.items()}
    finding = "1.27x with chunks of 256 and 1.23x with 512 published, "
    finding += f"{rows['chunk 256'][2]:.2f}x and {rows['chunk 512'][3]:.2f}x simulated"
    yield Table("S-F9", rows, {f"P:D {pd}": ".2fx" for pd in ratios}, finding)

    rows = [[ours(case), orca(case)] for case in figure_11]
    yield Table("S-F11", [*rows, [None, max(map(orca, figure_9[256]))]])


def pipeline_jobs(lengths, chunk=256, alone="orca-best", **changes):
    """Arguments of `offline`: Orca's pipeline, replicas under the policy `alone`, SARATHI's."""
    pipeline, single = replace(PIPELINE, **changes), replace(TP_ONLY, **changes)
    runs = ((pipeline, "orca-best", 1), (single, alone, 8), (pipeline, "sarathi", 1))
    return [(cost, policy, lengths, copies, chunk) for cost, policy, copies in runs]


def sarathi_pipeline(run, requests, cpu_s):
    """S-F12: GPT-3 on 64 A100, a pipeline under Orca and SARATHI, and replicas without one."""
    mixed = zipf_lengths(1024, LONGEST, 0.4, 10, 10_000, 0)
    few = mixed[:1000]
    mean = sum(map(sum, few)) // 1000
    variants = {
        "10,000 requests": pipeline_jobs(mixed),
        "1,000 of them": pipeline_jobs(few),
        "all of one length": pipeline_jobs([(mean - mean // 11, mean // 11)] * 1000),
        "replicas under request-level": pipeline_jobs(few, alone="request-level"),
        "replicas under SARATHI": pipeline_jobs(few, alone="sarathi"),
        "chunk 512": pipeline_jobs(few, chunk=512),
        "Ethernet between stages": pipeline_jobs(few, pp_link=LINKS["ethernet"]),
        "4 ms of CPU per stage": pipeline_jobs(few, cpu_s=4e-3),
        "10 ms of CPU per stage": pipeline_jobs(few, cpu_s=10e-3),
    }
    results = iter(run(offline, chain(*variants.values())))
    found = dict(zip(variants, zip(results, results, results)))
    names = ("orca-best, TP 8 x PP 8", "TP 8, 8 replicas", "sarathi, TP 8 x PP 8")
    whole = dict(zip(names, found["10,000 requests"]))
    yield Table("S-F12", {name: its[:4] for name, its in whole.items()}, data=(whole,))

    rows = {}
    for name, (orca, alone, ours) in found.items():
        pairs = ((alone, ours), (orca, ours), (orca, alone))
        gains = [theirs.makespan / its.makespan for theirs, its in pairs]
        rows[name] = [*gains, orca.bubble / ours.bubble if ours.bubble else None]
    yield Table("S-F12 gains", [[gain] for gain in rows["10,000 requests"]])
    heads = PUBLISHED["S-F12 gains"]["published"]
    yield Table("S-F12 variants", rows, dict.fromkeys(heads, ".2fx"))


def bubble_example(run, requests, cpu_s):
    """S-F1, S-F5 and SS-F8: four requests in two stages, and the bubbles PB1, PB2 and PB3."""
    stage_runs, kinds, rows = {}, {}, {}
    arrivals = [Arrival(0.0, prompt, 20) for prompt in (2048, 1024, 2040, 1020)]
    recorders = {policy: Recorder() for policy in ("orca-best", "sarathi-serve")}
    for policy, recorder in recorders.items():
        config = EngineConfig(policy, 256, 2, 8192, page_size=8192, pages=4)
        seen = simulate(replace(PIPELINE, pp=2), config, arrivals, recorder=recorder)
        stage_runs[policy], kinds[policy] = seen.stage_runs, bubble_kinds(seen.stage_runs)
        sums = dict.fromkeys(("PB1", "PB2", "PB3"), 0.0)
        for stage_run, kind in kinds[policy]:
            sums[kind] += stage_run.bubble
        times = (*sums.values(), sum(sums.values()), seen.run.seconds)
        rows[policy] = [1e3 * seconds for seconds in times]
    whole, chunked = (f"{bubbles:.0f} ms" for *_, bubbles, _ in rows.values())
    finding = f"drawn without numbers; bubbles of {whole} with whole prompts, {chunked} with chunks"
    yield Table("SS-F8", rows, None, finding, (stage_runs, kinds), recorders)
