"""SARATHI's experiments on the machines of the paper, simulated, each beside what the paper says.

Every experiment, here and in sarathi_serve.py, is a generator of Tables, from (run, requests,
cpu_s). `run(function, jobs)` calls the function with each tuple of arguments, maybe in parallel.
Those of Sarathi-Serve have `requests` in each run, and `cpu_s` of CPU in each iteration. Read
first: simulation.py, published.toml. Read next: sarathi_serve.py, and report.py, which prints.
"""

import tomllib
from collections import namedtuple
from itertools import chain, product
from pathlib import Path
from statistics import median

from experiments.tables import Table
from experiments.workload import Arrival, zipf_lengths
from policies.config import EngineConfig
from simulator.cost_model import System
from simulator.simulation import bubble_kinds, simulate

PUBLISHED = tomllib.loads(Path(__file__).with_name("published.toml").read_text("utf-8"))
NANOGPT_CPU_S = 4e-3  # of SARATHI's code beside its operations: what S-F7 leaves on average
LONGEST = 4096  # tokens of a request of S-F12
A6000_13B = System("llama-13b", "a6000", cpu_s=NANOGPT_CPU_S)
A100_33B = System("llama-33b", cpu_s=NANOGPT_CPU_S)
PIPELINE, TP_ONLY = System("gpt3-175b", tp=8, pp=8), System("gpt3-175b", tp=8)
MOST = {1024: 18, 2048: 10, 3072: 6}  # length -> 13B's largest batch on an A6000, S-§4.3.1


def beside(paper, simulated):
    """Three cells: the paper's number, or words; ours; by how much it differs, if that is known."""
    paper = None if paper == "-" else paper  # TOML has no null
    known = isinstance(paper, int | float) and simulated and not getattr(simulated, "bound", "")
    return [paper, simulated, simulated / paper - 1 if known else None]


def table(name, rows, columns=None, finding="", data=()):
    """The Table `name` of published.toml, of rows of a name and what is simulated: the last numbers
    have beside them what is published, and `columns` are those before, if not in the file. Raises
    KeyError for a row that is not in the file."""
    its = PUBLISHED[name]
    its = PUBLISHED.get(its.get("as"), {}) | its
    published, cells = its.get("published", {}), 3 if its.get("errors", True) else 2
    heads = {its.get("rows", ""): ""} | (columns or its.get("columns", {}))
    alone = len(heads)
    for head, spec in its.get("compared", {"paper": ".2f"}).items() if published else ():
        error = "its error" if "error" in heads else "error"
        three = (head, spec), (f"simulated {head}".removesuffix(" paper"), spec), (error, "+.0%")
        heads |= three[:cells]

    def beside_published(row):
        papers = published and published[row[0] if row[0] in published else "others"]
        pairs = zip(papers, row[alone:])
        return [*row[:alone], *chain.from_iterable(beside(*pair)[:cells] for pair in pairs)]

    rows, note = list(map(beside_published, rows)), its.get("note", "")
    return Table(name.split()[0], its["title"], heads, rows, note, data, finding)


def decodes(count, context):
    """A batch of so many decodes, each of which reads `context` tokens, its own among them."""
    return [(0, context - 1, 1)] * count


# in seconds, but for the batch and a share; `bubble` is the median of `bubbles`, of each request
Offline = namedtuple("Offline", "batch makespan utilisation bubble bubbles ends")


def offline(system, policy, lengths, replicas=1, chunk=256, batch=None, longest=LONGEST):
    """Simulate requests of `lengths`, all there at time 0: an Offline. `batch` None: what fits."""
    cost = system.cost()
    batch = batch or cost.max_batch(longest)
    config = EngineConfig(policy, chunk, batch, longest, page_size=longest, pages=batch * cost.pp)
    arrivals = [Arrival(0.0, *pair) for pair in lengths]
    seen = simulate(cost, config, arrivals, replicas=replicas, record=False)
    ends = [completion.token_times[-1] for completion in seen.run.completions]
    its = seen.run.seconds, seen.utilisation, median(seen.bubbles)
    return Offline(batch, *its, seen.bubbles, ends)


def throughput(system, policy, batch, length, pd_ratio, chunk=256, requests=40):
    """Tokens per second, prompts and outputs, of 40 B requests that are all there at time 0."""
    output = max(1, round(length / (pd_ratio + 1)))
    lengths = [(length - output, output)] * (requests * batch)
    makespan = offline(system, policy, lengths, 1, chunk, batch, length).makespan
    return len(lengths) * length / makespan


def decode_speedup(system, batch, length, chunk=256):
    """How many times cheaper a decode is in a batch with a chunk than without, S-§5.1.1."""
    seconds, riding = system.cost().seconds, decodes(batch - 1, length)
    prefill = (0, length - chunk, chunk - (batch - 1))
    each = (seconds([prefill, *riding]) - seconds([prefill])) / len(riding)
    return seconds(decodes(batch, length)) / batch / each


def sarathi_iterations(run, requests, cpu_s):
    """S-T2, S-F7, S-F3 and S-F8: single iterations of LLaMA-13B on an A6000; S-§4.3.1."""
    cost = A6000_13B.cost()
    batches = {"prefill 1,024": [(0, 0, 1024)], "4 decodes": decodes(4, 1024)}
    batches["1,021 + 3"] = [(0, 0, 1021), *decodes(3, 1024)]
    rows = [
        [f"{name}: {kind}", 1e3 * cost.parts(batch)[kind]]
        for name, batch in batches.items()
        for kind in ("linear", "attention")
    ]
    yield table("S-T2", rows)
    rows = [[f"prompt of {n}", 1e3 * cost.seconds([(0, 0, n)])] for n in (128, 256, 257)]
    yield table("S-F7", rows)
    prefill_token_s = {b: cost.seconds([(0, 0, 1024)] * b) / 1024 for b in (1, 2, 18)}
    decodes_s = {b: cost.seconds(decodes(b, 1024)) for b in prefill_token_s}
    yield table("S-F3", [[f"batch {b}", s / prefill_token_s[b]] for b, s in decodes_s.items()])

    batches, rows = (2, 4, 6, 10, 18), []
    for n, most in MOST.items():
        found = [decode_speedup(A6000_13B, b, n) if b <= most else None for b in batches]
        rows.append([f"context {n:,}", *found])
    found = [speedup for _, *speedups in rows for speedup in speedups if speedup]
    finding = f"2.8x to 10x published, {min(found):.1f}x to {max(found):.1f}x simulated"
    yield table("S-F8", rows, {f"B = {batch}": ".1fx" for batch in batches}, finding)

    cases = [*product((A6000_13B, A100_33B), MOST), (PIPELINE, LONGEST), (TP_ONLY, LONGEST)]
    name = "{}, {}, TP {} x PP {}, {}K"
    rows = [[name.format(*its[:4], n // 1024), its.cost().max_batch(n)] for its, n in cases]
    yield table("S-§4.3.1", rows)


def sarathi_end_to_end(run, requests, cpu_s):
    """S-T4, S-F9 and S-F11: throughput of SARATHI and Orca over the baseline on one GPU."""
    table_4 = [(A6000_13B, 6, length, 50) for length in (1024, 2048, 3072)]
    table_4 += [(A100_33B, 10, 1024, 28), (A100_33B, 5, 2048, 63), (A100_33B, 3, 3072, 127)]
    ratios = (4, 7, 14, 28, 56, 112)
    figure_9 = {c: [(A6000_13B, 18, 1024, pd, c) for pd in ratios] for c in (128, 256, 512)}
    figure_11 = [(A6000_13B, b, length, 256 / (b - 1)) for length, b in MOST.items()]
    cases = [*table_4, *sum(figure_9.values(), []), *figure_11]
    wanted = [(case, policy) for case in cases for policy in ("request-level", "sarathi")]
    wanted += [(case, "orca-best") for case in (*figure_11, *figure_9[256])]
    jobs = [(system, policy, *load) for (system, *load), policy in wanted]
    found = dict(zip(wanted, run(throughput, jobs)))

    def gain(case, policy="sarathi"):
        return found[case, policy] / found[case, "request-level"]

    rows = []
    for case in table_4:
        system, b, n, pd = case
        name = f"{system.model}, {n // 1024}K, B {b}, P:D {pd}"
        rows.append([name, decode_speedup(system, b, n), gain(case)])
    yield table("S-T4", rows)

    rows = [[f"chunk {chunk}", *map(gain, cases)] for chunk, cases in figure_9.items()]
    finding = "1.27x with chunks of 256 and 1.23x with 512 published, "
    finding += f"{gain(figure_9[256][2]):.2f}x and {gain(figure_9[512][3]):.2f}x simulated"
    yield table("S-F9", rows, {f"P:D {pd}": ".2fx" for pd in ratios}, finding)

    orca = lambda case: gain(case, "orca-best")
    rows = [[f"{c[2] // 1024}K, B {c[1]}", gain(c), orca(c)] for c in figure_11]
    rows.append(["1K, Orca's peak (S-F11b)", None, max(map(orca, figure_9[256]))])
    yield table("S-F11", rows)


def pipeline_jobs(lengths, chunk=256, alone="orca-best", **changes):
    """Arguments of `offline`: Orca's pipeline, replicas under the policy `alone`, SARATHI's."""
    pipeline, single = PIPELINE._replace(**changes), TP_ONLY._replace(**changes)
    runs = ((pipeline, "orca-best", 1), (single, alone, 8), (pipeline, "sarathi", 1))
    return [(system, policy, lengths, copies, chunk) for system, policy, copies in runs]


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
        "Ethernet between stages": pipeline_jobs(few, pp_link="ethernet"),
        "4 ms of CPU per stage": pipeline_jobs(few, cpu_s=4e-3),
        "10 ms of CPU per stage": pipeline_jobs(few, cpu_s=10e-3),
    }
    results = run(offline, sum(variants.values(), []))
    found = dict(zip(variants, zip(results[::3], results[1::3], results[2::3])))
    names = ("orca-best, TP 8 x PP 8", "TP 8, 8 replicas", "sarathi, TP 8 x PP 8")
    whole = dict(zip(names, found["10,000 requests"]))
    yield table("S-F12", [[name, *its[:4]] for name, its in whole.items()], data=(whole,))

    rows = []
    for name, (orca, alone, ours) in found.items():
        pairs = ((alone, ours), (orca, ours), (orca, alone))
        gains = [theirs.makespan / its.makespan for theirs, its in pairs]
        rows.append([name, *gains, orca.bubble / ours.bubble if ours.bubble else None])
    heads = list(PUBLISHED["S-F12 gains"]["published"])
    yield table("S-F12 gains", list(zip(heads, rows[0][1:])))
    yield table("S-F12 variants", rows, dict.fromkeys(heads, ".2fx"))


def bubble_example(run, requests, cpu_s):
    """S-F1, S-F5 and SS-F8: four requests in two stages, and the bubbles PB1, PB2 and PB3."""
    stage_runs, kinds, rows = {}, {}, []
    arrivals = [Arrival(0.0, prompt, 20) for prompt in (2048, 1024, 2040, 1020)]
    for policy in ("orca-best", "sarathi-serve"):
        config = EngineConfig(policy, 256, 2, 8192, page_size=8192, pages=4)
        seen = simulate(PIPELINE._replace(pp=2).cost(), config, arrivals)
        stage_runs[policy], kinds[policy] = seen.stage_runs, bubble_kinds(seen.stage_runs)
        sums = dict.fromkeys(("PB1", "PB2", "PB3"), 0.0)
        for stage_run, kind in kinds[policy]:
            sums[kind] += stage_run.bubble
        times = (*sums.values(), sum(sums.values()), seen.run.seconds)
        rows.append([policy, *(1e3 * seconds for seconds in times)])
    whole, chunked = (f"{bubbles:.0f} ms" for *_, bubbles, _ in rows)
    finding = f"drawn without numbers; bubbles of {whole} with whole prompts, {chunked} with chunks"
    yield table("SS-F8", rows, finding=finding, data=(stage_runs, kinds))
