"""The papers' claims about whole loads: throughput of requests that are all there, latencies of
those that arrive. Each is a function from a claims.Setup to a Finding, by its id in CLAIMS.

On a GPU prompts, chunks and batches are the papers', but datasets are scaled to 4,096 tokens; on a
CPU all are a quarter, or a third. Read first: claims.py, offline.py, run.py."""

import gc
import math
from dataclasses import replace
from functools import cache, partial
from itertools import combinations
from typing import NamedTuple

from experiments.claims import Finding, Panel
from experiments.measure import BUSY, steadily
from experiments.metrics import find_stalls, missed, steady, summarize_latencies
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
RATE = 0.6  # of the requests per second that are estimated to be possible: all keep up with it
STEP = 1.25  # of the rates that are tried for a capacity


def sizes_of(setup, *papers):
    """The papers' numbers of tokens, or of requests, as they are here."""
    return [n if setup.big else n // SMALLER for n in papers]


def config_of(setup, max_len, batch, page_size, requests):
    """What run.plan begins with: memory for so many requests of max_len, or as there is."""
    gc.collect()  # the caches of engines before
    most, pages = pages_that_fit(setup.model, max_len, page_size), -(-max_len // page_size)
    sizes = dict(max_batch=batch, max_len=max_len, page_size=page_size)
    return EngineConfig(**sizes, pages=min(most, requests * pages), attention=setup.args.attention)


def in_turns(setup, names, config, arrivals):
    """({policy: Run}, whether it was busy), see serve_in_turns; a GPU has room for one at a time."""
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
    """Policies while the pipeline of each was full, {policy: number}."""

    gains: dict  # in throughput over request-level, the baseline
    token_ms: dict  # that a token takes, where prompts are computed
    busy: bool


@cache
def steady_state(setup, context, batch, ratio, *policies):
    """The Steady of policies. Requests are all alike: they begin and end together where a policy
    lets them, which is Orca's worst case (SARATHI §5.2)."""
    output, rounds = max(1, round(context / (1 + ratio))), 2 if setup.args.quick else 4
    arrivals = [Arrival(0.0, context - output, output)] * (rounds * batch + 1)
    config, policies = (
        config_of(setup, context, batch, context, batch),
        ["request-level", *policies],
    )
    runs, busy = in_turns(setup, policies, config, arrivals)
    rates, token_ms = {n: steady(run.iterations, batch)[1] for n, run in runs.items()}, {}
    for name, run in runs.items():
        its = [i for i in run.iterations if i.prefill_tokens]
        tokens = sum(i.prefill_tokens + i.decode_tokens for i in its)
        token_ms[name] = 1e3 * sum(i.end - i.start for i in its) / tokens
    return Steady({n: rate / rates["request-level"] for n, rate in rates.items()}, token_ms, busy)


def compare(setup, title, x, found, ours, holds, log=""):
    """The Finding of {x: Steady}, in which the last policy is one of SARATHI's."""
    names = next(iter(found.values())).gains
    gains = {name: {at: its.gains[name] for at, its in found.items()} for name in names}
    costs = {name: {at: its.token_ms[name] for at, its in found.items()} for name in names}
    table, panel = grid(f"steady state, {title}", x, "gain", gains, ".2fx", log)
    more, _ = grid("what a token takes where prompts are computed", x, "ms", costs, ".3f")
    (whole, *_, chunk), name = next(iter(found.values())).token_ms.values(), [*names][-1]
    why = (
        f"a token takes {whole:.2f} ms in whole prompts and {chunk:.2f} under {name}: chunks lose "
    )
    why += "what decodes gain, as reading the weights takes no longer than computing "
    why += f"{setup.machine['ridge_tokens']:.0f} rows"
    busy = any(its.busy for its in found.values())
    return Finding([table, more], ours, holds, "" if holds else why, [panel], busy)


def at_balance(setup, batches, *policies):
    """(chunk, {context: Steady}) at three contexts and P:D = C / (B - 1)."""
    chunk, *contexts = sizes_of(setup, 256, 1024, 2048, 3072)
    run, policies = partial(steady_state, setup), (*policies, f"sarathi:{chunk}")
    return chunk, {n: run(n, b, chunk / (b - 1), *policies) for n, b in zip(contexts, batches)}


def peak_gains(setup):
    """S-T4: gains in three contexts."""
    chunk, found = at_balance(setup, (6, 6, 6))
    gains = [its.gains[f"sarathi:{chunk}"] for its in found.values()]
    title = f"chunk {chunk}, batch 6, P:D {chunk / 5:.1f}"
    ours = ", ".join(f"{gain:.2f}x" for gain in gains)
    return compare(setup, title, "context", found, ours, min(gains) > 1 + NOISE)


def judge_peaks(gains, batch):
    """S-F9, of {chunk: {P:D: gain}}: where each gains most, and whether it does gain there, that is
    within a step of C / (B - 1), and it moves right with C."""
    peaks = {chunk: max(its, key=its.get) for chunk, its in gains.items()}
    close = all(0.49 < peak * (batch - 1) / chunk < 2.01 for chunk, peak in peaks.items())
    gained = all(gains[chunk][peak] > 1 + NOISE for chunk, peak in peaks.items())
    return peaks, close and gained and not misplaced(peaks, gains)


def gains_over_ratios(setup):
    """S-F9, and S-F11b: gains over P:D for three chunks, and for Orca's best case."""
    (*chunks, context), batch = sizes_of(setup, 128, 256, 512, 1024), 18 if setup.big else 6
    policies = "orca-best", *(f"sarathi:{chunk}" for chunk in chunks)
    ratios = [times * chunks[1] / (batch - 1) for times in (0.25, 0.5, 1, 2, 4)]
    found = {ratio: steady_state(setup, context, batch, ratio, *policies) for ratio in ratios}
    gains = {c: {r: its.gains[f"sarathi:{c}"] for r, its in found.items()} for c in chunks}
    peaks, holds = judge_peaks(gains, batch)
    at = (f"{gains[c][r]:.2f}x at P:D {r:.1f} (C {c})" for c, r in peaks.items())
    title = f"context {context:,}, batch {batch}, C / (B - 1) of "
    title += ", ".join(f"{chunk / (batch - 1):.1f}" for chunk in chunks)
    return compare(setup, title, "P:D", found, f"peaks: {', '.join(at)}", holds, "x")


def judge_orca(worst, best, ours):
    """S-F11, of gains: sarathi > Orca's best case >= its worst, which is about the baseline."""
    return abs(worst - 1) < 2 * NOISE and best > worst - NOISE and ours > best + NOISE


def against_orca(setup):
    """S-F11: SARATHI, and Orca at its best and, as "orca", at its worst."""
    batches = (18, 10, 6) if setup.big else (6, 3, 2)
    chunk, found = at_balance(setup, batches, "orca", "orca-best")
    gains = [[*its.gains.values()][1:] for its in found.values()]
    worst, best, ours = (" / ".join(f"{x:.2f}" for x in its) for its in zip(*gains))
    title = f"chunk {chunk}, batch {', '.join(map(str, batches))}, P:D = C / (B - 1)"
    ours, holds = (
        f"sarathi {ours}, Orca best {best}, worst {worst}",
        [judge_orca(*g) for g in gains],
    )
    return compare(setup, title, "context", found, ours, all(holds))


class Load(NamedTuple):
    """Requests of a dataset, and the machine that they come to."""

    lengths: list
    possible: float  # requests per second, estimated
    base_s: float  # of a decode iteration
    config: EngineConfig
    title: str
    busy: bool


@cache
def load_of(setup, dataset):
    """The Load of a dataset, of a few seconds at the rate that is possible."""
    max_len, batch = sizes_of(setup, 4096, 128)
    config = config_of(setup, max_len, batch, min(64, max_len), max(1, batch // 3))
    time_base = partial(measure_base, setup.model, config)
    (base, _), drift = steadily(time_base, setup.model.device, spread_of=lambda found: found[1])
    lengths = sample_lengths(dataset, 200, max_len, setup.args.seed)
    possible = estimated_qps(base, [Arrival(0.0, *pair) for pair in lengths])
    lengths = lengths[: max(24, round((3 if setup.args.quick else 7) * possible))]
    title = f"{len(lengths)} requests of {dataset} scaled to {max_len:,} tokens, "
    title += f"{config.pages * config.page_size:,} tokens of KV cache"
    return Load(lengths, possible, base.seconds, config, title, drift > BUSY)


@cache
def serve_at(setup, dataset, policy, batch, qps):
    """What summarize_latencies says of a server at that rate, and whether it was `busy`."""
    load, seed = load_of(setup, dataset), setup.args.seed
    config = replace(load.config, max_batch=batch)
    config = plan([policy], [config.page_size], config)[policy]
    arrivals, drift = poisson(load.lengths, qps, seed), 0.0
    if setup.args.quick and setup.simulated:
        run = setup.simulated(config, arrivals)
    else:
        tokens = prompts(arrivals, setup.model.config.vocab_size, seed)
        once = partial(serve, setup.model, config, arrivals, tokens)
        run, drift = steadily(once, setup.model.device, 2, lambda run: run.drift)
    its = summarize_latencies(run.completions, run.seconds, run.offered_per_s)
    return its | {"busy": drift > BUSY}


def judge_capacity(gains):
    """SS-F10 and SS-F12, of SARATHI's gains in capacity, Bounded or None, from the strictest SLO to
    the most relaxed: there are, most where it is strict, and nowhere a loss."""
    return None not in gains and gains[0] > 1 and gains[0] >= gains[-1] and min(gains) >= 1


def capacities(setup, datasets, slos, others):
    """The Finding of capacity under SLOs, in decode iterations, of other servers, {name: (policy,
    batch)}, and of Sarathi-Serve with two budgets. At each rate a server runs once for all."""
    *budgets, batch = sizes_of(setup, 512, 2048, 128)
    servers = others | {f"budget {n}": (f"sarathi-serve:{n}", batch) for n in budgets}
    drawn, gains, tried = [], {}, []

    def run_at(dataset, server, slo_s, qps):
        tried.append(serve_at(setup, dataset, *server, round(qps, 9)))
        return {"met": not missed(tried[-1], slo_s)}

    for dataset in datasets:
        load, found = load_of(setup, dataset), {}
        for name, server in servers.items():
            runs = {
                n * load.base_s: partial(run_at, dataset, server, n * load.base_s) for n in slos
            }
            found[name] = {s: capacity(run, load.possible / 2, STEP)[0] for s, run in runs.items()}
        how = "simulated with this machine's law: " * bool(setup.args.quick and setup.simulated)
        drawn.append(grid(how + load.title, "SLO s", "requests/s", found, ".2f"))
        best = [max(pair) for pair in zip(*(found[f"budget {n}"].values() for n in budgets))]
        for name in others:
            its = [ours.over(theirs) for ours, theirs in zip(best, found[name].values())]
            gains[f"over {name}, {dataset}"] = its
    texts = {name: [show(gain, ".2fx") for gain in its] for name, its in gains.items()}
    ours = "; ".join(f"{its[0]} strict, {its[-1]} relaxed {name}" for name, its in texts.items())
    wrong = [name for name, its in gains.items() if not judge_capacity(its)]
    why = "; ".join(f"{name}: {', '.join(texts[name])}" for name in wrong)
    busy = any(its["busy"] for its in tried) or any(load_of(setup, its).busy for its in datasets)
    tables, panels = zip(*drawn)
    return Finding([*tables], ours, not wrong, why, [*panels], busy)


def capacity_of_datasets(setup):
    """SS-F10 and SS-F11: capacity under the strict and the relaxed SLO."""
    others = {name: (name, sizes_of(setup, 128)[0]) for name in ("orca", "vllm")}
    return capacities(setup, ("sharegpt4", "arxiv"), (5, 25), others)


def capacity_over_slos(setup):
    """SS-F12: capacity over SLOs (the paper's are 0.1 s to 1 s), of three batches of vllm."""
    others = {f"vllm, batch {n}": ("vllm", n) for n in sizes_of(setup, 32, 64, 128)}
    return capacities(setup, ("sharegpt4",), (5, 10, 15, 25, 50), others)


def latencies(setup, dataset, names, share):
    """({policy: summarize_latencies} at that share of the possible rate, whether it was busy)."""
    load = load_of(setup, dataset)
    arrivals = poisson(load.lengths, share * load.possible, setup.args.seed)
    runs, busy = in_turns(setup, names, load.config, arrivals)
    found = {n: summarize_latencies(run.completions, run.seconds) for n, run in runs.items()}
    return found, busy or load.busy


def by_policy(title, values, orders, busy):
    """The Finding of {what: {policy: number}} that should rise in these orders of policies."""
    columns = {"": ""} | dict.fromkeys(next(iter(values.values())), ",.3f")
    rows = [[what, *its.values()] for what, its in values.items()]
    wrong = {what: misplaced(its, orders[what]) for what, its in values.items()}
    right = sum(math.comb(len(its), 2) for its in values.values()) - sum(map(len, wrong.values()))
    ours = [
        f"{what} {' / '.join(f'{x:,.3f}' for x in its.values())}" for what, its in values.items()
    ]
    why = "; ".join(f"{what}: not {', '.join(its)}" for what, its in wrong.items() if its)
    ours = f"{', '.join(ours)}; {right} pairs in order"
    return Finding([(title, columns, rows)], ours, not why, why, [], busy)


def ablation(setup):
    """SS-T4: hybrid batches alone, chunks alone, and both."""
    (chunk,), values, orders, titles, busy = sizes_of(setup, 512), {}, {}, [], False
    hybrid, chunked, both = names = "hybrid-only", f"chunked-only:{chunk}", f"sarathi-serve:{chunk}"
    for dataset in ("sharegpt4", "arxiv"):
        found, was_busy = latencies(setup, dataset, names, RATE)
        busy = busy or was_busy
        for (key, p), order in {
            ("ttft_s", "p50"): (hybrid, both, chunked),
            ("tbt_s", "p99"): (both, chunked, hybrid),
        }.items():
            what = f"{dataset}, {p.upper()} {key[:-2].upper()} s"
            values[what], orders[what] = {n: found[n][key][p] for n in names}, order
        titles.append(load_of(setup, dataset).title)
    title = f"{RATE:.0%} of the rate that is possible by estimate: {'; '.join(titles)}"
    return by_policy(title, values, orders, busy)


def schedulers(setup):
    """B-7: static batches, Orca, and Orca with chunks; all at once, and TTFT at a rate."""
    chunks = [f"sarathi:{n}" for n in sizes_of(setup, 512, 256, 128)]
    names = static, orca, *_ = "request-level", "orca", *chunks
    full, busy = latencies(setup, "sharegpt4", names, math.inf)
    some, was_busy = latencies(setup, "sharegpt4", names, RATE)
    values = {
        "tokens/ms": {name: its["tokens_per_s"] / 1e3 for name, its in full.items()},
        "P99 TBT s": {name: its["tbt_s"]["p99"] for name, its in full.items()},
        "P99 TTFT s": {name: its["ttft_s"]["p99"] for name, its in some.items()},
    }
    orders = [static, *chunks[::-1], orca], [*chunks[::-1], orca, static], [orca, *chunks, static]
    title = f"{load_of(setup, 'sharegpt4').title}; at once, TTFT at {RATE:.0%} of what is possible"
    its = by_policy(title, values, dict(zip(values, orders)), busy or was_busy)
    why = f"{its.why}; {static} lets nobody in between two tokens, so that its TBT is a decode's"
    return its._replace(why=why if its.why else "")


def timeline(setup, policy, chunk):
    """(completions, iterations, when C and D came) of SS-F7: 2 and 3, C and D, come with long
    prompts when 0 and 1, A and B, decode."""
    more, chat = dict(attention=setup.args.attention), SamplingParams
    engine = engine_for(setup.model)(setup.model, EngineConfig(policy, chunk, 4, 4 * chunk, **more))
    engine.warm_up()
    done, iterations = {}, []
    short, long = (chunk // 8, 10), (2 * chunk - 4, 4)  # of chunk - 2, or fewer with C beside A, B
    for coming, steps in (((short, short), 2), ((long, long), math.inf)):
        came = engine.clock()
        for length, output in coming:
            engine.add_request([1] * length, SamplingParams(max_new_tokens=output))
        while steps and engine.has_work:
            done |= {e.request_id: e.completion for e in engine.step() if e.completion}
            iterations.append(engine.last_iteration)
            steps -= 1
    return [done[i] for i in range(4)], iterations, came


def judge_stalls(stalls, waited, chunk):
    """SS-F7, of {policy: the most prefill tokens between two tokens of A or B}, and the policies
    under which C and D wait until A and B have ended; their prompts are longer than a chunk."""
    small = stalls["request-level"] == 0 < stalls["sarathi-serve"] <= chunk
    return small and min(stalls["vllm"], stalls["orca"]) > 2 * chunk and waited == ["request-level"]


def stall_example(setup):
    """SS-F7: two requests decode when two with long prompts come, under four policies."""
    policies, (chunk,) = ("vllm", "orca", "request-level", "sarathi-serve"), sizes_of(setup, 512)
    rows, panels, stalls, waited, count = [], [], {}, [], 0
    for policy in policies:
        done, iterations, came = timeline(setup, policy, chunk)
        lanes = {name: [] for name in "ABCD"}
        for iteration in iterations:
            its = {who: "d" if decodes else f"{n}" for who, _, n, decodes in iteration.chunks}
            for i, name in enumerate(lanes):
                lanes[name].append(its.get(i))
        took = [f"{1e3 * (i.end - i.start):.0f}" for i in iterations]
        rows += [[f"{policy}: {name}", *its] for name, its in (lanes | {"ms": took}).items()]
        count = max(count, len(iterations))
        found = find_stalls(done[:2], iterations)
        stalls[policy] = max((stall.prefill_tokens for stall in found), default=0)
        if done[2].scheduled > max(its.token_times[-1] for its in done[:2]):
            waited.append(policy)
        lines = {
            n: [(t - came, k) for k, t in enumerate(c.token_times, 1)] for n, c in zip(lanes, done)
        }
        panels.append(Panel(policy, "s since C and D came", "output tokens", lines))
    rows = [row + [None] * (count + 1 - len(row)) for row in rows]
    columns = {"iteration": ""} | {str(n): "" for n in range(1, count + 1)}
    title = f"what each computes: d a decode, else tokens of a prompt; chunk {chunk}"
    ours = ", ".join(f"{name} {n:,}" for name, n in stalls.items())
    ours = f"most prefill between two tokens of A or B: {ours}"
    holds = judge_stalls(stalls, waited, chunk)
    return Finding([(title, columns, rows)], ours, holds, "" if holds else f"{waited=}", panels)


def static_slots(setup):
    """B-1: slots used under static batching, as the post counts, a step for each token, and in the
    iterations of request-level, on a scheduler without a model."""
    lengths, used = ((128, 500), (64, 50), (256, 200), (32, 30)), {}
    totals = [sum(pair) for pair in lengths]
    used["a step per token"] = [
        sum(n >= step for n in totals) for step in range(1, max(totals) + 1)
    ]
    config = EngineConfig("request-level", max_batch=4, max_len=max(totals))
    scheduler, counts = config.scheduler(Pages(4, max(totals)), lambda: len(counts)), []
    for i, (prompt_len, output_len) in enumerate(lengths):
        scheduler.add(Request(i, [0] * prompt_len, prompt_len, output_len))
    while batch := scheduler.next_batch():
        counts.append(len(batch))
        scheduler.advance(batch, [0] * len(batch), len(counts))
    used["an iteration of request-level"] = counts
    shares = {
        name: {n / 4: its.count(n) / len(its) for n in (4, 3, 2, 1)} for name, its in used.items()
    }
    table, _ = grid("share of the time", "slots used", "step", shares, ".1%")
    means = [sum(its) / len(its) / 4 for its in used.values()]
    lines = {name: [*enumerate(its)] for name, its in used.items()}
    ours = f"{means[0]:.1%} by the post's count, {means[1]:.1%} of an engine's iterations"
    holds = round(means[0], 3) == 0.502 and sorted(set(counts)) == [1, 2, 3, 4]
    return Finding([table], ours, holds, "", [Panel("slots used, of 4", "step", "requests", lines)])


CLAIMS = {
    "S-T4": peak_gains,
    "S-F9": gains_over_ratios,
    "S-F11": against_orca,
    "SS-F7": stall_example,
    "SS-F10": capacity_of_datasets,
    "SS-F12": capacity_over_slos,
    "SS-T4": ablation,
    "B-1": static_slots,
    "B-7": schedulers,
}
