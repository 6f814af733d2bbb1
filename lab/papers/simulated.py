"""Both papers' experiments on their machines, and a post's, simulated, beside what they say.

An experiment is a generator of Tables, from (run, requests, cpu_s). `run(function, jobs)` calls the
function with each tuple of arguments, maybe in parallel. Those of Sarathi-Serve have `requests` in
each run, and `cpu_s` of CPU in each iteration; what the paper leaves open, loads, budgets and batch
sizes, is that of the scripts that its authors published. Budgets are of 512 tokens, but for names
such as "sarathi-serve:2048". Read first: simulation.py, published.toml. Next: report.py."""

import math
import tomllib
from collections import namedtuple
from dataclasses import replace
from functools import cache
from itertools import chain, combinations, cycle, product, starmap
from pathlib import Path
from statistics import median

import numpy as np

from config import EngineConfig
from lab.measure import metrics
from lab.measure.load_run import capacity, estimated_qps, plan, slo_seconds
from lab.measure.workload import LENGTHS, Arrival, poisson, sample_lengths, zipf_lengths
from lab.simulator.cost_model import CostModel
from lab.simulator.machine import base_of
from lab.simulator.simulation import bubble_kinds, simulate
from policies.token_budget import SLOS
from views import tables

PUBLISHED = tomllib.loads(Path(__file__).with_name("published.toml").read_text("utf-8"))
SYSTEMS = PUBLISHED["systems"]
LONGEST = 4096  # tokens of a request of S-F12
MOST = {1024: 18, 2048: 10, 3072: 6}  # length -> 13B's largest batch on an A6000, S-§4.3.1


def system(name, cpu_s=0.0):
    """The CostModel of one of SYSTEMS, whose stages take so much CPU if the file does not say."""
    cost = CostModel.named(**{"cpu_s": cpu_s} | SYSTEMS[name]["machine"])
    return replace(cost, device=replace(cost.device, riding=SYSTEMS[name].get("riding", 1.0)))


A6000_13B, A100_33B = system("LLaMA-13B"), system("LLaMA-33B")
PIPELINE, TP_ONLY = system("GPT-3"), system("GPT-3, TP 8")


class Table:
    """A table of published.toml, filled: its `claim`, `title`, `note`, `columns` and `rows`, for
    markdown; `errors`, how far each number is off; `data`, the arguments of what draws it."""

    def __init__(self, name, rows, columns=None, data=()):
        """`rows` maps names to what is simulated, or is a list of that for the names in the file.
        The last numbers of a row are compared; `columns` are those that are not in the file."""
        its = PUBLISHED.get(PUBLISHED[name].get("as"), {}) | PUBLISHED[name]
        published = its.get("published", {})
        self.claim, self.title, self.note = name.split()[0], its["title"], its.get("note", "")
        self.columns = {its.get("rows", ""): ""} | (columns or its["columns"])
        self.data, self.rows, self.errors = data, [], []
        if not isinstance(rows, dict):
            rows = dict(zip(its.get("cases", published), rows, strict=True))
        for row, simulated in rows.items():
            papers = published and published[row if row in published else "others"]
            alone = len(simulated) - len(papers)
            self.rows.append([row, *simulated[:alone]])
            for paper, ours in zip(papers, simulated[alone:]):
                self.rows[-1] += [None if paper == "-" else paper, ours]  # TOML has no null
                if "error" in self.columns:
                    self.rows[-1].append(self.error(paper, ours))

    def error(self, paper, ours):
        """How far ours is off, counted in `errors`; None if that is not known, or no number."""
        if isinstance(paper, str) or ours is None:
            return None
        error = None if getattr(ours, "bound", "") else ours / paper - 1
        self.errors.append(math.inf if error is None else abs(error))
        return error

    def json(self):
        """The claim, the title, the rows as {head: value} with numbers as numbers, and the note."""
        plain = lambda cell: f"{cell:.4g}" if getattr(cell, "bound", "") else cell
        rows = [dict(zip(self.columns, map(plain, row))) for row in self.rows]
        return {"claim": self.claim, "title": self.title, "rows": rows, "note": self.note}


def decodes(count, context):
    """A batch of so many decodes, each of which reads `context` tokens, its own among them."""
    return [(0, context - 1, 1)] * count


# in seconds, but for the batch and a share; `bubble` is the median of `bubbles`, of each request
Offline = namedtuple("Offline", "batch makespan utilisation bubble bubbles ends")


def offline(cost, policy, lengths, replicas=1, chunk=256, tile=None, batch=None, longest=LONGEST):
    """Simulate requests of `lengths`, all there at 0: an Offline. None is what the device has."""
    batch, options = batch or cost.max_batch(longest), {"tile": tile} if tile else {}
    sizes = dict(page_size=longest, pages=batch * cost.pp, policy_options=options)
    config = EngineConfig(policy, chunk, batch, longest, **sizes)
    arrivals = [Arrival(0.0, *pair) for pair in lengths]
    seen = simulate(cost, config, arrivals, replicas=replicas, record=False)
    bubbles, ends = [*seen.bubbles.values()], [c.token_times[-1] for c in seen.run.completions]
    return Offline(batch, seen.run.seconds, seen.utilisation, median(bubbles), bubbles, ends)


def throughput(policy, cost, batch, length, pd_ratio, chunk=256, requests=40):
    """Tokens per second, prompts and outputs, of 40 B requests that are all there at time 0."""
    output = max(1, round(length / (pd_ratio + 1)))
    lengths = [(length - output, output)] * (requests * batch)
    makespan = offline(cost, policy, lengths, 1, chunk, None, batch, length).makespan
    return len(lengths) * length / makespan


def decode_speedup(cost, batch, length, chunk=256):
    """How many times cheaper a decode is in a batch with a chunk than without, S-§5.1.1."""
    seconds, riding = cost.seconds, decodes(batch - 1, length)
    prefill = (0, length - chunk, chunk - (batch - 1))
    each = (seconds([prefill, *riding]) - seconds([prefill])) / len(riding)
    return seconds(decodes(batch, length)) / batch / each


def gains(policies, *case):
    """The `throughput` of each of these policies in a case, as a multiple of the baseline's."""
    alone, *others = [throughput(policy, *case) for policy in ("request-level", *policies)]
    return [its / alone for its in others]


def sarathi_iterations(run, requests, cpu_s):
    """S-T2, S-F7, S-F3 and S-F8: single iterations of LLaMA-13B on an A6000; S-§4.3.1."""
    cost = A6000_13B
    batches = [(0, 0, 1024)], decodes(4, 1024), [(0, 0, 1021), *decodes(3, 1024)]
    layers = [cost.layer_seconds(batch) for batch in batches]
    times = [seconds for layer in layers for seconds in (layer.linear, layer.attention)]
    yield Table("S-T2", [[1e3 * (cost.config.n_layer * seconds)] for seconds in times])
    yield Table("S-F7", [[1e3 * cost.seconds([(0, 0, n)])] for n in (128, 256, 257)])
    ratio = lambda n: cost.seconds(decodes(n, 1024)) / cost.seconds([(0, 0, 1024)] * n)
    yield Table("S-F3", [[1024 * ratio(batch)] for batch in (1, 2, 18)])
    speedup = lambda b, n: decode_speedup(cost, b, n) if b <= MOST[n] else None
    yield Table("S-F8", [[speedup(b, n) for b in (2, 4, 6, 10, 18)] for n in MOST])
    cases = [*product((A6000_13B, A100_33B), MOST), (PIPELINE, LONGEST), (TP_ONLY, LONGEST)]
    yield Table("S-§4.3.1", [[cost.max_batch(length)] for cost, length in cases])


def sarathi_end_to_end(run, requests, cpu_s):
    """S-T4, S-F9 and S-F11: throughput of SARATHI and Orca over the baseline on one GPU."""
    cases = [(system(name), *more) for name, *more in PUBLISHED["S-T4"]["cases"].values()]
    found = run(gains, [(["sarathi"], *case) for case in cases])
    yield Table("S-T4", [[decode_speedup(*its[:3]), *ours] for its, ours in zip(cases, found)])
    both, ratios = ["sarathi", "orca-best"], (4, 7, 14, 28, 56, 112)
    jobs = [(both, A6000_13B, 18, 1024, *its) for its in product(ratios, (128, 256, 512))]
    found = np.reshape(run(gains, jobs), (6, 3, 2)).T  # (policy, chunk, ratio)
    yield Table("S-F9", found[0].tolist())
    jobs = [(both, A6000_13B, b, length, 256 / (b - 1)) for length, b in MOST.items()]
    yield Table("S-F11", [*run(gains, jobs), [None, found[1, 1].max()]])


def pipeline_jobs(requests, lengths, alone, chunk, tile, units, stage_ms, layer_ms):
    """Arguments of `offline`: Orca's pipeline, replicas under the policy `alone`, SARATHI's. Of the
    CPU's time `stage_ms` keep a stage from other work; `layer_ms` of each layer, but those of a
    pipeline's last stage, only this batch."""
    load = zipf_lengths(*lengths, 0.4, 10, 10_000, 0)[:requests]
    device, hop, stage_s = replace(PIPELINE.device, units=units), PIPELINE.pp_link, stage_ms / 1e3
    hop = hop._replace(step_s=hop.step_s + PIPELINE.layers * layer_ms / 1e3)
    pipeline = replace(PIPELINE, device=device, cpu_s=stage_s, pp_link=hop)
    single = replace(TP_ONLY, device=device, cpu_s=stage_s + TP_ONLY.layers * layer_ms / 1e3)
    runs = (pipeline, "orca-best"), (single, alone, 8), (pipeline, "sarathi", 1, chunk, tile)
    return [(cost, policy, load, *more) for cost, policy, *more in runs]


def sarathi_pipeline(run, requests, cpu_s):
    """S-F12: GPT-3 on 64 A100, a pipeline under Orca and SARATHI, and replicas without one."""
    its = PUBLISHED["S-F12 variants"]
    jobs = [pipeline_jobs(**its["usual"] | changes) for changes in its["cases"].values()]
    results, rows = iter(run(offline, chain(*jobs))), []
    systems = list(zip(results, results, results))
    for orca, alone, ours in systems:
        ratios = [a.makespan / b.makespan for a, b in ((alone, ours), (orca, ours), (orca, alone))]
        bubbles = orca.bubble / ours.bubble if ours.bubble else None
        rows.append([*ratios, bubbles, orca.bubble, ours.bubble])
    whole = dict(zip(PUBLISHED["S-F12"]["cases"], systems[0]))
    yield Table("S-F12", [its[:4] for its in systems[0]], data=(whole,))
    yield Table("S-F12 gains", [[gain] for gain in rows[0][:4]])
    yield Table("S-F12 variants", rows)
    yield Table("S-F12 assumed", [[gain] for gain in rows[-1][:4]])


def bubble_example(run, requests, cpu_s):
    """S-F1, S-F5 and SS-F8: four requests in two stages, and the bubbles PB1, PB2 and PB3."""
    stage_runs, kinds, rows = {}, {}, {}
    arrivals = [Arrival(0.0, prompt, 20) for prompt in (2048, 1024, 2040, 1020)]
    for policy in ("orca-best", "sarathi-serve"):
        config = EngineConfig(policy, 256, 2, 8192, page_size=8192, pages=4)
        seen = simulate(replace(PIPELINE, pp=2), config, arrivals)
        stage_runs[policy], kinds[policy] = seen.stage_runs, bubble_kinds(seen.stage_runs)
        sums = dict.fromkeys(("PB1", "PB2", "PB3"), 0.0)
        for stage_run, kind in kinds[policy]:
            sums[kind] += 1e3 * stage_run.bubble
        rows[policy] = [*sums.values(), sum(sums.values()), 1e3 * seen.run.seconds]
    yield Table("SS-F8", rows, data=(stage_runs, kinds))


def latencies(cost, policy, trace, qps, requests, seed=0, batch=128):
    """summarize_latencies of a run in all the memory there is, of Poisson arrivals with lengths of
    a trace, all at time 0 if `qps` is infinite. `policy` is what run.plan takes."""
    limit, pages = LENGTHS[trace].limit, cost.kv_tokens() // 64
    config = EngineConfig("vllm", 512, batch, limit, page_size=64, pages=pages)
    load = poisson(sample_lengths(trace, requests, limit, seed), qps, seed)
    run = simulate(cost, plan([policy], [64], config)[policy], load, record=False).run
    return metrics.summarize_latencies(run.completions, run.seconds)


def find_capacities(cost, policies, batch, trace, slos_s, requests, ratio):
    """The capacity under each of these SLOs in seconds, Bounded. `policies`, with commas, take them
    in turns; runs at one rate are shared."""
    load = poisson(sample_lengths(trace, requests, LENGTHS[trace].limit, 0), 1.0, 0)
    serve = cache(lambda policy, qps: latencies(cost, policy, trace, qps, requests, 0, batch))
    start = float(f"{0.3 * cost.pp * estimated_qps(base_of(cost), load):.1g}")
    met = lambda policy, slo_s: lambda qps: {"met": not metrics.missed(serve(policy, qps), slo_s)}
    turns = zip(cycle(policies.split(",")), slos_s)
    return [capacity(met(*its), start, ratio)[0] for its in turns]


def serving_capacity(run, requests, cpu_s):
    """SS-F10 and SS-F11: capacity of four models on both traces under both SLOs."""
    for claim in ("SS-F10", "SS-F11"):
        made, ratio = {claim: {}, f"{claim} at the paper's SLOs": {}}, PUBLISHED[claim]["ratio"]
        for name, trace in product(PUBLISHED[claim]["models"], LENGTHS):
            cost, its = system(name, cpu_s), SYSTEMS[name]
            slos_s = [slo_seconds(kind, base_of(cost)) for kind in SLOS]
            load = trace, slos_s + its["slos"], requests, ratio  # two SLOs for each table
            found = run(find_capacities, [(cost, *server, *load) for server in its["servers"]])
            for (table, kind), slo_s, *others, ours in zip(product(made, SLOS), load[1], *found):
                row = [slo_s, *others, ours, *map(ours.over, others)]
                made[table][f"{name}, {trace}, {kind}"] = row
        yield from starmap(Table, made.items())


def capacity_against_slo(run, requests, cpu_s):
    """SS-F12: capacity over the SLO, vllm at three batch sizes and two token budgets."""
    servers, best = PUBLISHED["SS-F12"]["cases"], []
    for name, slos in PUBLISHED["SS-F12"]["slos"].items():
        cost, load = system(name, cpu_s), ("sharegpt4", slos, requests, 1.1)
        found = run(find_capacities, [(cost, *its, *load) for its in servers.values()])
        rows = {f"{name}: {server}": rates for server, rates in zip(servers, found)}
        gains = [max(ours).over(other) for *ours, other in zip(*found[-2:], found[-3])]
        rows["best budget over vllm, batch 128"] = [tables.show(gain, ".2fx") for gain in gains]
        best.append(dict(zip(slos, gains)))
        yield Table("SS-F12", rows, {f"{slo:g} s": ".2f" for slo in slos})
    yield Table("SS-F12 gains", [[best[0][0.1]], [best[1][1.0]]])


def across_nodes(run, requests, cpu_s):
    """SS-F13: Falcon-180B on two nodes joined by Ethernet, TP 8 against TP 4 x PP 2."""
    pipeline, tensor, rows = system("Falcon-180B", cpu_s), system("Falcon-180B, TP 8", cpu_s), []
    for batch, gb_per_s in PUBLISHED["SS-F13"]["cases"].values():
        link = pipeline.pp_link._replace(bytes_per_s=1e9 * gb_per_s)
        costs = replace(tensor, tp_link=link), replace(pipeline, pp_link=link)
        # of both one CPU's part: a stage prepares its own while the one before computes
        s = [cost.seconds(decodes(batch, 2048)) - (cost.pp - 1) * cpu_s for cost in costs]
        rows.append([1e3 * s[0], 1e3 * s[1], s[0] / s[1]])
    yield Table("SS-F13", rows)
    slos = [slo_seconds(kind, base_of(pipeline)) for kind in SLOS]
    _, vllm, sarathi = SYSTEMS["Falcon-180B"]["servers"]
    servers = (tensor, *vllm), (pipeline, *vllm), (pipeline, *sarathi)
    found = run(find_capacities, [(*its, "sharegpt4", slos, requests, 1.1) for its in servers])
    columns = {f"{kind}, {slo:.2f} s": ".3f" for kind, slo in zip(SLOS, slos)}
    yield Table("SS-F13 capacity", found, columns)
    alone, vllm, ours = found
    over = ours[0].over(alone[0]), ours[0].over(vllm[0]), ours[1].over(vllm[1])
    yield Table("SS-F13 gains", [[gain] for gain in over])


def ablation(run, requests, cpu_s):
    """SS-T4: hybrid batches alone, chunks alone, and both; medians of five seeds."""
    yi, loads = system("Yi-34B", cpu_s), PUBLISHED["SS-T4"]["cases"].values()
    jobs = [(yi, *load, 128, seed) for load in loads for seed in range(5)]
    seen = [(its["ttft_s"]["p50"], its["tbt_s"]["p99"]) for its in run(latencies, jobs)]
    yield Table("SS-T4", np.median(np.reshape(seen, (len(loads), 5, 2)), axis=1).tolist())


def post(run, requests, cpu_s):
    """B-7: the post's comparison of schedulers, LLaMA2-70B on four H100, 128 users."""
    cost, papers = system("LLaMA2-70B, H100", cpu_s), PUBLISHED["B-7"]["published"]
    jobs = [(cost, name, "sharegpt4", qps, requests) for qps in (math.inf, 1.5) for name in papers]
    found = run(latencies, jobs)
    both = zip(found, found[len(papers) :])
    rows = [[a["tokens_per_s"], a["tbt_s"]["p99"], b["ttft_s"]["p99"]] for a, b in both]
    yield Table("B-7", rows)
    pairs = list(combinations(zip(papers.values(), rows), 2))
    alike = lambda i: sum((a[i] < c[i]) == (b[i] < d[i]) for (a, b), (c, d) in pairs)
    yield Table("B-7 order", [[alike(i)] for i in range(3)])
