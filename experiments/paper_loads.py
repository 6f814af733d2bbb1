"""The papers' claims about whole loads: throughput of requests that are all there, latencies of
those that arrive. Each is a function from a claims.Setup to a Finding, by its id in CLAIMS.

On a GPU prompts, chunks and batches are the papers', but datasets are scaled to 4,096 tokens; on a
CPU all are a quarter, or a third. Read first: claims.py, offline.py, run.py."""

import gc
import math
from dataclasses import replace
from functools import cache, partial
from itertools import combinations
from statistics import geometric_mean
from typing import NamedTuple

from experiments.claims import Finding, Panel
from experiments.measure import BUSY, steadily
from experiments.metrics import find_stalls, missed, steady, summarize_latencies, summarize_run
from experiments.offline import serve_in_turns
from experiments.options import engine_for
from experiments.run import capacity, estimated_qps, measure_base, plan, serve
from experiments.tables import show
from experiments.workload import Arrival, poisson, prompts, sample_lengths
from kv_cache import Pages
from policies.config import EngineConfig, pages_that_fit
from sampling import SamplingParams
from scheduler import Request

SMALLER = 4  # what the papers' sizes are divided by on a CPU
NOISE = 0.02  # in a ratio of throughputs
DATASETS = "sharegpt4", "arxiv"
SLOS = 5, 10, 15, 25, 50  # of TBT, in decode iterations: the paper's of 0.1 s (strict) to 1 s
RATE = 0.6  # of the requests per second that are estimated to be possible: all keep up with it


def sizes_of(setup, *papers):
    """The papers' numbers of tokens, or of requests, as they are here."""
    return [n if setup.big else n // SMALLER for n in papers]


def config_of(setup, max_len, batch, page_size, requests):
    """What run.plan begins with: memory for so many requests of max_len, or as there is."""
    gc.collect()  # the caches of engines before
    pages = requests * -(-max_len // page_size)
    memory = dict(pages=min(pages, pages_that_fit(setup.model, max_len, page_size)))
    sizes = dict(max_batch=batch, max_len=max_len, page_size=page_size)
    return EngineConfig(**sizes, **memory, attention=setup.args.attention)


def in_turns(setup, names, config, arrivals):
    """({policy: Run}, whether it was busy), see serve_in_turns; on a GPU, which has room for one at
    a time, each alone."""
    tokens = prompts(arrivals, setup.model.config.vocab_size, setup.args.seed)
    configs, runs = plan(names, [config.page_size], config), {}
    for group in [{name: configs[name]} for name in names] if setup.big else [configs]:
        runs |= serve_in_turns(setup.model, group, arrivals, tokens, None, {})
    return runs, any(run.drift > BUSY for run in runs.values())


def grid(title, x, y, values, spec, log=""):
    """A table and a Panel of {name: {x: y}}: for each name a row, and a line."""
    columns = {y: ""} | {f"{x} {at:,.4g}": spec for at in next(iter(values.values()))}
    plain = lambda number: show(number, spec) if getattr(number, "bound", "") else number
    rows = [[name, *map(plain, its.values())] for name, its in values.items()]
    lines = {name: [*its.items()] for name, its in values.items()}
    return (title, columns, rows), Panel(title, x, y, lines, log)


def misplaced(values, order):
    """["a < b"] for each pair of names in `order` for which that is not so in {name: number}."""
    return [f"{a} < {b}" for a, b in combinations(order, 2) if not values[a] < values[b]]


class Steady(NamedTuple):
    """Policies while the pipeline of each was full: {policy: number}."""

    gains: dict  # in throughput over request-level
    token_ms: dict  # that a token takes in batches with prompts; of request-level too
    busy: bool


@cache
def steady_state(setup, context, batch, ratio, *policies):
    """The Steady of policies. Requests are all alike: they begin and end together where a policy
    lets them, which is Orca's worst case (SARATHI §5.2)."""
    output, rounds = max(1, round(context / (1 + ratio))), 2 if setup.args.quick else 4
    arrivals = [Arrival(0.0, context - output, output)] * (rounds * batch + 1)
    config = config_of(setup, context, batch, context, batch)
    runs, busy = in_turns(setup, ["request-level", *policies], config, arrivals)
    rates, token_ms = {}, {}
    for name, run in runs.items():
        full, rates[name], _ = steady(run.iterations, batch)
        its = [i for i in full if i.prefill_tokens]
        tokens = sum(i.prefill_tokens + i.decode_tokens for i in its)
        token_ms[name] = 1e3 * sum(i.end - i.start for i in its) / tokens
    base = rates.pop("request-level")
    return Steady({name: rate / base for name, rate in rates.items()}, token_ms, busy)


def compare(setup, title, x, found, ours, holds, log=""):
    """The Finding of {x: Steady}, whose last policy is one of SARATHI's."""
    (gains, costs, busy), names = zip(*found.values()), next(iter(found.values())).token_ms
    by = lambda its: {n: dict(zip(found, (row[n] for row in its))) for n in names if n in its[0]}
    table, panel = grid(f"steady state, {title}", x, "gain", by(gains), ".2fx", log)
    more, _ = grid("what a token takes in batches with prompts", x, "ms", by(costs), ".3f")
    whole, *_, hybrid = (" / ".join(f"{row[name]:.2f}" for row in costs) for name in names)
    why = f"a token takes {hybrid} ms in SARATHI's batches, {whole} in whole prompts: what a chunk "
    why += f"can hide is the time of {setup.machine['ridge_tokens']:.0f} rows, of reading weights"
    return Finding([table, more], ours, holds, "" if holds else why, [panel], any(busy))


def judge_orca(worst, best, ours):
    """S-F11, of gains: SARATHI > Orca's best case >= its worst, which is about the baseline."""
    return abs(worst - 1) < 2 * NOISE and best > worst - NOISE and ours > best + NOISE


def at_balance(batches, judge, setup):
    """S-T4 and S-F11: gains in three contexts at P:D = C / (B - 1), of SARATHI, of Orca's best case
    and, as "orca", of its worst. Over P:D they are in S-F9."""
    chunk, *contexts = sizes_of(setup, 256, 1024, 2048, 3072)
    batches = batches if setup.big else (6, 3, 2)
    cases = {n: (n, batch, chunk / (batch - 1)) for n, batch in zip(contexts, batches)}
    policies = "orca", "orca-best", f"sarathi:{chunk}"
    found = {n: steady_state(setup, *its, *policies) for n, its in cases.items()}
    gains = [its.gains.values() for its in found.values()]
    worst, best, ours = (" / ".join(f"{x:.2f}x" for x in its) for its in zip(*gains))
    ours, title = f"{ours}; Orca best {best}, worst {worst}", f"chunk {chunk}, batches {batches}"
    return compare(setup, title, "context", found, ours, all(judge(*its) for its in gains))


def judge_peaks(gains, batch):
    """S-F9, of {chunk: {P:D: gain}}: {chunk: P:D of the peak}, the middle of all that are no less
    than it but for noise, and whether these are gains, within a factor of 2 of C / (B - 1), and
    move right with C."""
    most = {chunk: max(its.values()) for chunk, its in gains.items()}
    flat = {c: [at for at, x in its.items() if x > most[c] - NOISE] for c, its in gains.items()}
    peaks = {chunk: geometric_mean(its) for chunk, its in flat.items()}
    close = all(0.49 < peak * (batch - 1) / chunk < 2.01 for chunk, peak in peaks.items())
    return peaks, min(most.values()) > 1 + NOISE and close and not misplaced(peaks, peaks)


def gains_over_ratios(setup):
    """S-F9: gains over P:D for three chunks, and for Orca's best case."""
    (*chunks, context), batch = sizes_of(setup, 128, 256, 512, 1024), 18 if setup.big else 6
    policies = "orca-best", *(f"sarathi:{chunk}" for chunk in chunks)
    steps = (0.5, 1, 2) if setup.args.quick else (0.25, 0.5, 1, 2, 4)
    ratios = [step * chunks[1] / (batch - 1) for step in steps]
    found = {ratio: steady_state(setup, context, batch, ratio, *policies) for ratio in ratios}
    gains = {c: {r: its.gains[f"sarathi:{c}"] for r, its in found.items()} for c in chunks}
    peaks, holds = judge_peaks(gains, batch)
    at = (f"{max(gains[c].values()):.2f}x at P:D {n:.1f} (C {c})" for c, n in peaks.items())
    title = f"context {context:,}, batch {batch}, C / (B - 1) = "
    title += ", ".join(f"{chunk / (batch - 1):.1f}" for chunk in chunks)
    return compare(setup, title, "P:D", found, f"peaks: {', '.join(at)}", holds, "x")


class Load(NamedTuple):
    """Requests of a dataset, and the machine that they come to."""

    lengths: list
    count: int  # how many of them are served in real time
    possible: float  # requests per second, estimated
    base_s: float  # of a decode iteration
    config: EngineConfig
    title: str
    busy: bool


@cache
def base_of(setup):
    """(EngineConfig of all loads, Base of run.measure_base, whether the machine was busy)."""
    max_len, batch = sizes_of(setup, 4096, 128)
    config = config_of(setup, max_len, batch, min(64, max_len), max(1, batch // 3))
    measure = partial(measure_base, setup.model, config)
    (base, _), drift = steadily(measure, setup.model.device, spread_of=lambda found: found[1])
    return config, base, drift > BUSY


@cache
def load_of(setup, dataset):
    """The Load of a dataset, of a few seconds at the rate that is possible."""
    config, base, busy = base_of(setup)
    lengths = sample_lengths(dataset, 100, config.max_len, setup.args.seed)
    possible = estimated_qps(base, [Arrival(0.0, *pair) for pair in lengths])
    least, seconds = (12, 2) if setup.args.quick else (24, 7)
    count = min(len(lengths), max(least, round(seconds * possible)))
    title = f"requests of {dataset} scaled to {config.max_len:,} tokens, "
    title += f"{config.pages * config.page_size:,} tokens of KV cache"
    return Load(lengths, count, possible, base.seconds, config, title, busy)


@cache
def serve_at(setup, dataset, policy, batch, qps):
    """What summarize_latencies says of a server at that rate, and whether it was `busy`."""
    load, seed, drift = load_of(setup, dataset), setup.args.seed, 0.0
    config = plan([policy], [load.config.page_size], replace(load.config, max_batch=batch))[policy]
    if setup.simulated:
        run = setup.simulated(config, poisson(load.lengths, qps, seed))
    else:
        arrivals = poisson(load.lengths[: load.count], qps, seed)
        tokens = prompts(arrivals, setup.model.config.vocab_size, seed)
        once = partial(serve, setup.model, config, arrivals, tokens)
        run, drift = steadily(once, setup.model.device, 2, lambda run: run.drift)
    its = summarize_latencies(run.completions, run.seconds, run.offered_per_s)
    return its | {"busy": drift > BUSY or load.busy}


def judge_capacity(gains):
    """SS-F10 to SS-F12, of SARATHI's gains in capacity, Bounded or None, from the strictest SLO to
    the most relaxed: there are, most where it is strict, and nowhere a loss."""
    return None not in gains and 1 < gains[0] >= gains[-1] and min(gains) >= 1


def capacities_on(setup, dataset, servers, slos_s):
    """({server: {SLO: capacity}}, whether it was busy). At a rate a server runs once for all."""
    start, tried = load_of(setup, dataset).possible / 2, []

    def run_at(server, slo_s, qps):
        tried.append(serve_at(setup, dataset, *server, round(qps, 9)))
        return {"met": not missed(tried[-1], slo_s)}

    search = lambda server, slo_s: capacity(partial(run_at, server, slo_s), start, 1.25)[0]
    found = {name: {slo_s: search(its, slo_s) for slo_s in slos_s} for name, its in servers.items()}
    return found, any(its["busy"] for its in tried)


def capacities(datasets, slos, others, setup):
    """SS-F10 to SS-F12: capacity under SLOs, in decode iterations, of other servers, (policy, the
    paper's batch), and of Sarathi-Serve with the better of two budgets."""
    others = [(policy, *sizes_of(setup, batch)) for policy, batch in others]
    others = {f"{policy}, batch {batch}": (policy, batch) for policy, batch in others}
    *budgets, batch = sizes_of(setup, 512, 2048, 128)
    ours = {f"budget {n}": (f"sarathi-serve:{n}", batch) for n in budgets}
    drawn, texts, why, is_busy = [], [], [], False
    for dataset in datasets:
        load = load_of(setup, dataset)
        slos_s = [multiple * load.base_s for multiple in slos]
        found, busy = capacities_on(setup, dataset, others | ours, slos_s)
        how = "simulated with this machine's law" if setup.simulated else "measured"
        title = f"{how}: {len(load.lengths) if setup.simulated else load.count} {load.title}"
        drawn.append(grid(title, "SLO s", "requests/s", found, ".2f"))
        best, is_busy = {at: max(found[n][at] for n in ours) for at in slos_s}, is_busy or busy
        for name in others:
            gains = [best[at].over(found[name][at]) for at in slos_s]
            texts.append(f"{dataset} over {name} {' '.join(show(x, '.2fx') for x in gains)}")
            why += [] if judge_capacity(gains) else texts[-1:]
    tables, panels = map(list, zip(*drawn))
    text = f"strict to relaxed: {', '.join(texts)}"
    return Finding(tables, text, not why, ", ".join(why), panels, is_busy)


@cache
def latencies(setup, dataset, names, share):
    """({policy: summarize_run} at that share of the possible rate, whether it was busy)."""
    load = load_of(setup, dataset)
    arrivals = poisson(load.lengths[: load.count], share * load.possible, setup.args.seed)
    runs, busy = in_turns(setup, names, load.config, arrivals)
    return {n: summarize_run(*run[:3]) for n, run in runs.items()}, busy or load.busy


def by_policy(setup, names, cases):
    """The Finding of cases, (dataset, share of the possible rate, key of summarize_run, policies in
    the order in which it should rise)."""
    rows, wrong, texts, is_busy, titles = [], [], [], False, {}
    for dataset, share, key, order in cases:
        found, busy = latencies(setup, dataset, names, share)
        load, its = load_of(setup, dataset), {name: found[name][key] for name in names}
        rate = f"{share * load.possible:.2f}/s" if share < math.inf else "all at once"
        rows.append([f"{dataset}, {rate}: {key}", *its.values()])
        wrong += [f"{dataset} {key} of {pair}" for pair in misplaced(its, order)]
        texts.append(f"{dataset} {key} {' / '.join(f'{x:,.3f}' for x in its.values())}")
        titles |= {f"{load.count} {load.title}": None}
        is_busy |= busy
    count = len(cases) * math.comb(len(names), 2)
    ours = f"{count - len(wrong)} of {count} pairs in order: {', '.join(texts)}"
    why, columns = f"not so: {', '.join(wrong)}", {"": ""} | dict.fromkeys(names, ",.3f")
    table = "; ".join(titles), columns, rows
    return Finding([table], ours, not wrong, why if wrong else "", [], is_busy)


def ablation(setup):
    """SS-T4: hybrid batches alone, chunks alone, and both."""
    chunk = sizes_of(setup, 512)[0]
    hybrid, chunked, both = names = "hybrid-only", f"chunked-only:{chunk}", f"sarathi-serve:{chunk}"
    orders = {"p50_ttft_s": (hybrid, both, chunked), "p99_tbt_s": (both, chunked, hybrid)}
    return by_policy(setup, names, [(d, RATE, *its) for d in DATASETS for its in orders.items()])


def schedulers(setup):
    """B-7: static batches, Orca, and Orca with chunks. request-level lets nobody in between two
    tokens: its TBT cannot be the longest, as the post has it."""
    chunks = [f"sarathi:{n}" for n in sizes_of(setup, 512, 256, 128)]
    slower, names = [*chunks[::-1], "orca"], ("request-level", "orca", *chunks)
    cases = [
        ("sharegpt4", math.inf, "tokens_per_s", ["request-level", *slower]),
        ("sharegpt4", math.inf, "p99_tbt_s", [*slower, "request-level"]),
        ("sharegpt4", RATE, "p99_ttft_s", [*slower[::-1], "request-level"]),
    ]
    its = by_policy(setup, names, cases)
    more = ". request-level lets nobody in between two tokens: its TBT is that of decodes alone"
    return its._replace(why=f"{its.why}{more}" if its.why else "")


def timeline(setup, policy, chunk):
    """(completions, iterations, when C and D came) of SS-F7, requests 0 to 3: A and B decode when C
    and D come, with prompts of two chunks beside all decodes."""
    config = EngineConfig(policy, chunk, 4, 4 * chunk, attention=setup.args.attention)
    engine = engine_for(setup.model)(setup.model, config)
    engine.warm_up()
    done, iterations, long = {}, [], (2 * (chunk - 2), 2 * (chunk - 3))
    for lengths, output, steps in (((chunk // 8,) * 2, 10, 2), (long, 4, math.inf)):
        came = engine.clock()
        for length in lengths:
            engine.add_request([1] * length, SamplingParams(max_new_tokens=output))
        while steps and engine.has_work:
            done |= {e.request_id: e.completion for e in engine.step() if e.completion}
            iterations.append(engine.last_iteration)
            steps -= 1
    return [done[i] for i in range(4)], iterations, came


def judge_stalls(stalls, waits, chunk):
    """SS-F7, of {policy: the most prefill tokens between two tokens of A or B}, and the policies
    under which C, whose prompt is longer than a chunk, waits until A and B have ended."""
    small = stalls["request-level"] == 0 < stalls["sarathi-serve"] <= chunk
    return small and min(stalls["vllm"], stalls["orca"]) > 2 * chunk and waits == ["request-level"]


def stall_example(setup):
    """SS-F7: two requests decode when two with long prompts come, under four policies."""
    (chunk,), rows, panels, stalls, waits = sizes_of(setup, 512), [], [], {}, []
    for policy in ("vllm", "orca", "request-level", "sarathi-serve"):
        done, iterations, came = timeline(setup, policy, chunk)
        lanes = {name: [None] * len(iterations) for name in ("A", "B", "C", "D", "ms")}
        for n, iteration in enumerate(iterations):
            lanes["ms"][n] = f"{1e3 * (iteration.end - iteration.start):.0f}"
            for who, _, length, decodes in iteration.chunks:
                lanes["ABCD"[who]][n] = "d" if decodes else str(length)
        rows += [[f"{policy}: {name}", *its] for name, its in lanes.items()]
        found = find_stalls(done[:2], iterations)
        stalls[policy] = max((stall.prefill_tokens for stall in found), default=0)
        waits += [policy] * (done[2].scheduled > max(its.token_times[-1] for its in done[:2]))
        times = {name: [t - came for t in its.token_times] for name, its in zip("ABCD", done)}
        lines = {name: [(t, n) for n, t in enumerate(its, 1)] for name, its in times.items()}
        panels.append(Panel(policy, "s since C and D came", "output tokens", lines))
    count = max(map(len, rows))
    columns = {"iteration": ""} | {str(n): "" for n in range(1, count)}
    title = f"what is computed: d is a decode, a number tokens of a prompt; budget {chunk}"
    ours = ", ".join(f"{policy} {n:,}" for policy, n in stalls.items())
    table = title, columns, [row + [None] * (count - len(row)) for row in rows]
    why, holds = f"C waits under {', '.join(waits)}", judge_stalls(stalls, waits, chunk)
    ours = f"most tokens of prompts between two of A or B: {ours}"
    return Finding([table], ours, holds, "" if holds else why, panels)


def static_slots(setup):
    """B-1: slots used under static batching, as the post counts, a step for each token, and in the
    iterations of request-level, on a scheduler without a model."""
    lengths, counts = ((128, 500), (64, 50), (256, 200), (32, 30)), []
    totals = [sum(pair) for pair in lengths]
    steps = [sum(n > step for n in totals) for step in range(max(totals))]
    config = EngineConfig("request-level", max_batch=len(lengths), max_len=len(steps))
    scheduler = config.scheduler(Pages(len(lengths), len(steps)), lambda: len(counts))
    for i, (prompt_len, output_len) in enumerate(lengths):
        scheduler.add(Request(i, [0] * prompt_len, prompt_len, output_len))
    while batch := scheduler.next_batch():
        counts.append(len(batch))
        scheduler.advance(batch, [0] * len(batch), len(counts))
    used = {"post, a step per token": steps, "request-level, an iteration": counts}
    columns = {"share of the time": ""} | {f"{25 * n} % of slots": ".1%" for n in (4, 3, 2, 1)}
    rows = [[name, *(its.count(n) / len(its) for n in (4, 3, 2, 1))] for name, its in used.items()]
    post, engine = (sum(its) / len(its) / len(lengths) for its in used.values())
    panel = Panel("slots used", "step", "of 4", {name: [*enumerate(i)] for name, i in used.items()})
    ours, levels = f"{post:.1%} by the post's count, {engine:.1%} of iterations", [4, 3, 2, 1]
    holds = [*dict.fromkeys(steps)] == [*dict.fromkeys(counts)] == levels and round(post, 2) == 0.5
    return Finding([("slots used under static batching", columns, rows)], ours, holds, "", [panel])


CLAIMS = {
    "S-T4": partial(at_balance, (6, 6, 6), lambda worst, best, ours: ours > 1 + NOISE),
    "S-F9": gains_over_ratios,
    "S-F11": partial(at_balance, (18, 10, 6), judge_orca),
    "SS-F7": stall_example,
    "SS-F10": partial(capacities, DATASETS, (5, 25), [("orca", 128), ("vllm", 128)]),
    "SS-F12": partial(capacities, DATASETS[:1], SLOS, [("vllm", n) for n in (32, 64, 128)]),
    "SS-T4": ablation,
    "B-1": static_slots,
    "B-7": schedulers,
}
