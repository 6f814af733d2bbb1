"""Both papers' claims of single iterations, measured here: `CLAIMS`, functions of a Setup.

An iteration is timed whole, and apart: its attention, and its matrix products by SARATHI's names of
operations (Table 1), each alone on as many rows; `others` is what is left. The head is left out, as
in the papers. A claim is judged by numbers of `timed` alone. Read first: claims.py, measure.py,
offline.py. Read next: paper_loads.py, the claims of whole runs."""

import math
import tomllib
from argparse import Namespace
from dataclasses import replace
from functools import partial
from itertools import pairwise, permutations
from pathlib import Path
from statistics import fmean, median

from engine import EngineConfig
from experiments import measure, offline
from experiments.claims import Finding, Panel
from experiments.options import runner_for
from experiments.run import plan
from experiments.tables import show
from experiments.workload import prompts
from kv_cache import Span
from model import GPT, Block

SIZES = tomllib.loads(Path(__file__).with_name("sizes.toml").read_text("utf-8"))
TILES = 128, 256
SATURATED = 0.85  # of the peak: what 256 tokens reach in S-F4a
NOISE = 1.1  # up to this factor numbers are the same


def batch(count, start, length, slot=0):
    """Spans of so many chunks, of requests in this slot and the next; without their heads."""
    return [Span([slot + i], start, [1] * length, False) for i in range(count)]


def iteration(runner, spans):
    """{name: function}: what runs an iteration."""
    return {"whole": partial(runner.greedy, spans)}


def operations(runner, spans):
    """{name: function}: what runs an iteration, and each operation of it alone."""
    rows = sum(span.length for span in spans)
    its = {name: measure.bare_products(runner.model, rows, 0, [name]) for name in measure.LINEAR}
    return its | {"attn": measure.attention_alone(runner, spans)} | iteration(runner, spans)


def in_chunks(runner, sizes):
    """{name: function}: what runs a prompt in chunks, (length, chunk), and its attention alone."""
    length, chunk = sizes
    its = [batch(1, at, min(chunk, length - at)) for at in range(0, length, chunk)]
    attention = [measure.attention_alone(runner, spans) for spans in its]
    prefill = [partial(runner.greedy, spans) for spans in its]
    both = {"attention": attention, "prefill": prefill}
    return {name: lambda runs=runs: [run() for run in runs] for name, runs in both.items()}


def timed(setup, slots, length, cases, parts=iteration, model=None):
    """({group: {x: {name: ms}}} of the `parts` of cases, {group: {x: Spans}}, and whether the
    machine was busy). All take turns, on a cache of so many slots of `length` tokens of noise."""
    model, (repeats, tries) = model or setup.model, (3, 1) if setup.args.quick else (5, 2)
    runner = runner_for(model)(model, slots, length, length, setup.args.attention)
    runner.cache.data.normal_()
    runs = {(g, x): parts(runner, spans) for g, its in cases.items() for x, spans in its.items()}
    flat = {(*case, name): run for case, its in runs.items() for name, run in its.items()}
    again = partial(measure.interleaved, flat, model.device, repeats, warmup=1)
    typical = lambda timings: median(timing.spread for timing in timings.values())
    timings, drift = measure.steadily(again, model.device, tries, typical)
    found = {group: {x: {} for x in its} for group, its in cases.items()}
    for (group, x, name), timing in timings.items():
        found[group][x][name] = timing.ms
    return found, drift > measure.BUSY


def per_token(setup, slots, length, cases, parts=operations, model=None):
    """`timed` of such cases, per token; of operations also the sum of `linear` ones, and others."""
    found, busy = timed(setup, slots, length, cases, parts, model)
    for group, x in ((group, x) for group, its in cases.items() for x in its):
        tokens = sum(span.length for span in cases[group][x])
        row = found[group][x] = {name: ms / tokens for name, ms in found[group][x].items()}
        if "attn" in row:
            row["linear"] = sum(row[name] for name in measure.LINEAR)
            row["others"] = max(0.0, row["whole"] - row["linear"] - row["attn"])
    return found, busy


def falls(values):
    """Whether numbers fall, but for noise."""
    return values[-1] < values[0] and all(b <= NOISE * a for a, b in pairwise(values))


def saturates(rates):
    """The fewest tokens with SATURATED of the peak of {tokens: rate}."""
    return min(n for n, rate in rates.items() if rate >= SATURATED * max(rates.values()))


def listed(values, spec=".1f"):
    """Numbers as text."""
    return ", ".join(show(value, spec) for value in values)


def finding(parts, ours, shape, busy):
    """The Finding of `parts`, tables that are drawn: (title, x, y, format, log, {x: {name: y}}).
    `shape` has a pair for each thing that the claim says: whether it shows, and what is seen."""
    tables, panels = [], []
    for title, x, y, spec, log, rows in parts:
        names = dict.fromkeys(name for row in rows.values() for name in row)
        table = [[f"{at:,}", *map(row.get, names)] for at, row in rows.items()]
        tables.append((f"{title}: {y}", {x: "", **dict.fromkeys(names, spec)}, table))
        lines = {name: [(at, row.get(name)) for at, row in rows.items()] for name in names}
        panels.append(Panel(title, x, y, lines, log))
    why = "; ".join(dict.fromkeys(seen for shows, seen in shape if not shows))
    return Finding(tables, ours, all(shows for shows, _ in shape), why, panels, busy)


def token_times(setup, its):
    """S-F3, SS-F4: a token of prefill costs the same in any batch, a decode less the larger it is;
    its linear share falls, that of attention does not. Linear layers take most of the time."""
    L, each, ms = its.context, its.lengths, "ms per token"
    cases = {"prefill": {B: batch(B, 0, L) for B in its.prompts}}
    cases["decode"] = {B: batch(B, L - 1, 1) for B in its.batches}
    found, busy = per_token(setup, max(its.batches), L, cases)
    cases = {"prefill": {n: batch(1, 0, n) for n in each}}
    cases["decode"] = {n: batch(1, n - 1, 1) for n in each}
    alone, also = per_token(setup, 1, max(each), cases)
    share = lambda row, name="linear": row[name] / row["whole"]
    shares = {n: {phase: share(rows[n]) for phase, rows in alone.items()} for n in each}
    flat, costs = ([row["whole"] for row in rows.values()] for rows in found.values())
    (token, *_), (one, *_, last) = (list(rows.values()) for rows in found.values())
    ours = f"a decode costs {listed(cost / flat[0] for cost in costs)}x prefill at B = "
    ours += f"{listed(its.batches, '')}; others {share(token, 'others'):.0%}; linear layers "
    ours += f"{min(min(row.values()) for row in shares.values()):.0%} or more, there a decode is "
    ours += f"{one['linear'] / token['linear']:.0f} prefill tokens"
    attention = f"attention {share(one, 'attn'):.0%}, {share(last, 'attn'):.0%} of a decode"
    shape = [
        (max(flat) <= 1.25 * min(flat), f"a token of prefill takes {listed(flat, '.3f')} ms"),
        (falls(costs), f"a decode takes {listed(costs)} ms"),
        (share(last) < share(one), f"linear {share(one):.0%}, {share(last):.0%} of a decode"),
        (share(last, "attn") >= share(one, "attn"), attention),
        (all(min(row.values()) > 0.5 for row in shares.values()), ours),
    ]
    parts = [(f"{name}, {L:,}", "batch", ms, ".3f", "xy", rows) for name, rows in found.items()]
    parts.append(("linear layers, batch 1", "length", "share of the time", ".0%", "x", shares))
    return finding(parts, ours, shape, busy or also)


def throughput(setup, its):
    """S-F4a, SS-F3: prefill saturates early, decode rises about linearly with the batch."""
    L, parts, rates, drifted = its.context, [], [], []
    layer = GPT(replace(setup.model.config, n_layer=1), setup.model.device, setup.model.dtype)
    for name, model, more in ("", None, []), (", one layer", layer, its.more):
        most, few = max(its.batches + more), sorted({its.chunk, *its.tokens})
        cases = {"prefill": {n: batch(1, 0, n) for n in few if 16 <= n < L}}
        cases["prefill"] |= {B * L: batch(B, 0, L) for B in its.prompts}
        cases["decode"] = {B: batch(B, L - 1, 1) for B in its.batches + more}
        found, busy = per_token(setup, most, L, cases, iteration, model)
        drifted.append(busy)
        for phase, rows in found.items():
            rates.append({n: 1 / row["whole"] for n, row in rows.items()})
            rows = {n: {"tokens per ms": rate} for n, rate in rates[-1].items()}
            parts.append((f"{phase}{name}, {L:,}", "tokens", "rate", ".3f", "xy", rows))
    prefill, decode, _, layer = rates
    few, most, ridge = min(decode), max(decode), setup.machine["ridge_tokens"]
    gain, below = decode[most] / decode[few], 1 - prefill[its.chunk] / max(prefill.values())
    ours = (
        f"prefill saturates at B L = {saturates(prefill):,}, {its.chunk} is {below:.1%} below the "
    )
    ours += f"peak; decode of one layer at B = {saturates(layer)}"
    seen = f"{most} decodes have {gain:.1f}x the rate of {few}, for the ridge is {ridge:.0f} rows"
    shape = [(saturates(prefill) <= 512, ours), (gain >= (most / few) ** 0.7, seen)]
    return finding(parts, ours, shape, any(drifted))


def intensities(config, dtype, spans):
    """{operation: flops per byte} of an iteration: all that goes into it or out is moved once."""
    block, rows, its = Block(config, device="meta"), sum(span.length for span in spans), {}
    for name in measure.LINEAR:
        inputs, outputs = getattr(block, name).in_features, getattr(block, name).out_features
        moved = inputs * outputs + rows * (inputs + outputs)
        its[name] = 2 * rows * inputs * outputs, moved * dtype.itemsize
    its["linear"] = [sum(column) for column in zip(*its.values())]
    flops, kv_bytes = measure.attention_cost(config, spans, dtype)
    q_and_out = 2 * config.n_layer * rows * config.n_head * config.head_dim * dtype.itemsize
    its["attn"] = flops, kv_bytes + q_and_out
    return {name: flops / moved for name, (flops, moved) in its.items()}


def intensity(setup, its):
    """S-F4b, SS-F5: every operation of a decode has 100 times fewer flops per byte than a prompt's;
    linear layers are above the ridge that is measured here in prefill, and below it in decode."""
    L, y, config = 1024, "flops per byte", setup.model.config  # the paper's: nothing is timed
    of, most = partial(intensities, config, setup.model.dtype), max(its.batches)
    ridge = setup.machine["flops_per_s"] / setup.machine["bytes_per_s"]
    prefill = {B: of(batch(B, 0, L)) for B in its.batches}
    decode = {B: of(batch(B, L - 1, 1)) for B in its.batches + its.more}
    linear = {2**n: {"linear": of(batch(1, 0, 2**n))["linear"], "ridge": ridge} for n in range(13)}
    far = {name: flops / decode[1][name] for name, flops in prefill[1].items()}
    high, low, least = prefill[1]["linear"], decode[most]["linear"], min(far, key=far.get)
    ours = (
        f"decode {min(far.values()):.0f}x to {max(far.values()):.0f}x below prefill at B = 1; in "
    )
    ours += (
        f"linear layers {high:.0f} {y} in a prompt, {low:.0f} in {most} decodes, ridge {ridge:.0f}"
    )
    shared = f"{config.n_head // config.n_kv_head} query heads share what is read"
    shape = [
        (far[least] > 100, f"{least} is {far[least]:.0f}x below: in attention {shared}"),
        (low < ridge < high, ours),
    ]
    parts = [
        (f"prefill, {L:,}", "batch", y, ".1f", "xy", prefill),
        (f"decode, {L:,}", "batch", y, ".1f", "xy", decode),
        ("linear layers", "tokens", y, ".1f", "xy", linear),
    ]
    return finding(parts, ours, shape, setup.machine["busy"])


def tiles(setup, its):
    """S-F7, SS-F6: the time of linear layers is flat for few tokens, and grows as they do for many;
    on a GPU there is a step behind each tile, larger than that of any token nearby."""
    tokens = sorted({*its.tokens, *(n + i for n in TILES for i in (-1, 0, 1, 2))})
    products = lambda runner, spans: measure.bare_products(runner.model, spans[0].length, 0)
    both = lambda *case: iteration(*case) | {"linear layers": products(*case)}
    cases = {"one prompt": {n: batch(1, 0, n) for n in tokens}}
    found, busy = timed(setup, 1, tokens[-1], cases, both)
    rows = found["one prompt"]
    ms, linear = ({n: row[name] for n, row in rows.items()} for name in ("whole", "linear layers"))
    ours, shape = ", ".join(f"{n}: {ms[n]:.1f} ms" for n in (128, 256, 257)), []
    for n in TILES:
        step, *others = (ms[m + 1] / ms[m] - 1 for m in (n, n - 1, n + 1))
        ours += f"; a token more than {n}: {step:+.1%}, nearby {listed(others, '+.1%')}"
        shape.append((not setup.big or step > max(0.05, *map(abs, others)), ours))
    one, few, *_, many, most = tokens
    flat, rise = linear[few] / linear[one], linear[most] / linear[many]
    power = math.log(rise, most / many)
    shape.append((flat <= (few / one) ** 0.5, f"{few} tokens take {flat:.1f}x the time of {one}"))
    shape.append((0.8 <= power <= 1.2, f"{most:,} tokens take {rise:.1f}x the time of {many}"))
    return finding([("one prompt", "tokens", "ms", ".2f", "", rows)], ours, shape, busy)


def speedups(setup, its):
    """S-F8, S-T2: a decode is cheaper that rides with a chunk, the less so the larger batch and
    context; timed by offline.decode_maximal."""
    riding, known, busy, table_2 = {}, {}, False, tuple(its.table_2)
    points = [(context, B, its.chunk) for context, batches in its.loads for B in batches]
    for context, B, chunk in [*points, table_2]:
        more = dict(seq_len=context, batch=B, chunk=chunk)
        args = Namespace(**vars(setup.args) | more)
        rows, speedup, _ = offline.decode_maximal(setup.model, setup.machine, args)
        riding[context, B, chunk], busy = speedup["total"], busy or offline.is_busy(rows)
        if speedup["total"]:  # at least and at most, as its noise is that of the chunk alone
            alone, _, both = rows.values()
            noise = alone["total_ms"] * alone["spread"] / 2 / (both["total_ms"] - alone["total_ms"])
            known[context, B, chunk] = (
                speedup["total"] / (1 + noise),
                speedup["total"] * (1 + noise),
            )
    del riding[table_2]
    known.pop(table_2, None)
    keys = "products_ms", "attention_ms", "total_ms", "prefill_token_ms", "decode_token_ms"
    seen = lambda ms: ms if ms is None or ms >= 0 else None  # or it is lost in the noise
    table = [[name, *(seen(row.get(key)) for key in keys)] for name, row in rows.items()]
    columns = {"batch": ""} | dict.fromkeys(keys, ".2f")
    said = lambda cases: ", ".join(f"{riding[c]:.1f}x at {c[:2]}" for c in dict.fromkeys(cases))
    pairs = [(a, b) for a, b in permutations(known, 2) if a[0] <= b[0] and a[1] <= b[1]]
    rises = said(b for a, b in pairs if known[b][0] > known[a][1])
    dear = said(case for case, (_, most) in known.items() if most <= 1)
    ours = f"{listed(riding.values(), '.1fx')}; Table 2: a decode takes "
    ours += f"{listed((row[-1] for row in table[1:]), '.2f')} ms alone and riding"
    shape = [(not rises, f"it rises to {rises}, context and batch"), (not dear, f"only {dear}")]
    drawn = {B: {} for _, B, _ in riding}
    for (context, B, _), times in riding.items():
        drawn[B][f"at {context:,}"] = times
    parts = [(f"decode speedup, chunk {its.chunk}", "batch", "times", ".1fx", "", drawn)]
    its = finding(parts, ours, shape, busy)
    if len(known) < 2:
        its = its._replace(holds=None, why="a decode that rides costs less than the noise")
    return its._replace(tables=[*its.tables, ("Table 2", columns, table)])


def balanced(setup, its):
    """S-F10: B requests as request-level computes them, and as sarathi does where all decodes ride,
    P:D = C / (B - 1): linear layers take less time together, attention does not. Decodes are timed
    in the middle of the output, and everything counts as often as it comes."""
    n, C, drifted, rows = its.context // its.chunk, its.chunk, [], {}
    for B in its.balanced:
        size, D = C - B + 1, n * (B - 1)
        P, middle = n * size, n * size + D // 2
        cases = {"prompts": {0: batch(1, 0, P)}, "decodes": {0: batch(B, middle, 1)}}
        riding = batch(B - 1, middle, 1, slot=1)
        cases["both"] = {at: [*batch(1, at, size), *riding] for at in range(0, P, size)}
        times, busy = per_token(setup, B, its.context, cases)
        drifted.append(busy)
        (prompt,), (decode,), hybrid = (group.values() for group in times.values())
        apart = {name: B * (P * prompt[name] + D * decode[name]) for name in prompt}
        both = {name: B * C * sum(row[name] for row in hybrid) for name in prompt}
        less = {name: ms / (both[name] or math.nan) for name, ms in apart.items()}
        rows[B] = {"request-level, ms": apart, "sarathi, ms": both, "times less": less}
    of = lambda *names: [row["times less"][name] for row in rows.values() for name in names]
    ffn, others, linear, attention = (
        listed(of(*names), ".2fx")
        for names in (measure.LINEAR[2:], measure.LINEAR[:2], ["linear"], ["attn"])
    )
    ours = f"ffn {ffn} less, preproj and postproj {others}"
    row = fmean(row["linear"] for row in hybrid) / prompt["linear"]
    seen = (
        f"linear layers take {linear} less, attention {attention}; there a row of a hybrid batch "
    )
    seen += f"takes {row:.2f}x as long as one of a prompt"
    shape = [(min(of("linear")) > 1.02 and max(of("attn")) <= NOISE, seen)]
    parts = [
        (f"{n * C:,} tokens, chunk {C}", "batch", y, ".2f", "", {B: rows[B][y] for B in rows})
        for y in rows[B]
    ]
    return finding(parts, ours, shape, any(drifted))


def chunked(setup, lengths, chunks):
    """({length: {chunk: {"attention": times, "prefill": times}}} of a prompt in chunks to the same
    whole, and whether the machine was busy)."""
    cases = {n: {c: (n, c) for c in (*chunks, n) if c <= n} for n in lengths}
    found, busy = timed(setup, 1, max(lengths), cases, in_chunks)
    over = lambda row, base: {name: row[name] / base[name] for name in row}
    return {n: {c: over(found[n][c], found[n][n]) for c in chunks if c < n} for n in lengths}, busy


def gains(setup, L, B, chunks):
    """[throughput of sarathi, for each of the chunks, over that of request-level], at what is
    balanced for the second of them."""
    args = Namespace(batch=B, seq_len=L, requests=2 * B + 1, pd_ratio=chunks[1] / (B - 1))
    arrivals, names = offline.make_load(args), [f"sarathi:{chunk}" for chunk in chunks]
    limits = dict(max_batch=B, max_len=L, pages=B, page_size=L, attention=setup.args.attention)
    configs = plan(["request-level", *names], [L], EngineConfig(**limits))
    tokens = prompts(arrivals, setup.model.config.vocab_size, setup.args.seed)
    runs = offline.serve_in_turns(setup.model, configs, arrivals, tokens, None, {})
    return [runs["request-level"].seconds / runs[name].seconds for name in names]


def small_chunks(setup, its):
    """S-F13: what chunks add to attention and prefill falls with their size; the best gain end to
    end, which is not measured with --quick, is in between."""
    found, busy = chunked(setup, [its.context], its.chunks)
    rows = found[its.context]
    times = {name: [row[name] for row in rows.values()] for name in ("attention", "prefill")}
    shape = [(falls(x), f"{name} takes {listed(x, '.2f')}x") for name, x in times.items()]
    if not setup.args.quick:
        gain = times["end-to-end gain"] = gains(setup, its.context, its.riding, its.chunks)
        best = f"chunks of {its.chunks[gain.index(max(gain))]} are best end to end"
        shape.append((max(gain) not in (gain[0], gain[-1]), best))
    ours = ", ".join(f"{name} {listed(x, '.2f')}x" for name, x in times.items())
    ours += f" at chunks of {listed(rows, '')}"
    rows = {chunk: dict(zip(times, row)) for chunk, row in zip(rows, zip(*times.values()))}
    parts = [(f"a prompt of {its.context:,}", "chunk", "times", ".2fx", "x", rows)]
    return finding(parts, ours, shape, busy)


def long_chunks(setup, its):
    """SS-F14: small chunks add 25 % to a prefill at most, large ones about nothing."""
    found, busy = chunked(setup, its.lengths, its.long_chunks)
    rows = {n: {c: row["prefill"] - 1 for c, row in found[n].items()} for n in found}
    added = {c: [row[c] for row in rows.values() if c in row] for c in its.long_chunks}
    ours = "; ".join(f"chunk {c}: {listed(more, '+.0%')}" for c, more in added.items())
    ours += f" at up to {max(its.lengths):,} tokens"
    small, *_, large = added.values()
    falling = fmean(large) < fmean(small) + 0.02
    shape = [(max(small) <= 0.25 and max(large) <= 0.05 and falling, ours)]
    rows = {n: {f"chunk {c}": share for c, share in row.items()} for n, row in rows.items()}
    parts = [("chunked prefill", "tokens", "added to that of no chunks", "+.1%", "x", rows)]
    return finding(parts, ours, shape, busy)


def beside_decodes(setup, its):
    """SS-F9: an iteration of decodes takes the longer, the longer a whole prompt in it; with a
    chunk, the last of the prompt, it does not."""
    riding, size = batch(its.riding, its.context - 1, 1, slot=1), its.chunk - its.riding
    cases = {"decodes": {0: riding}}
    cases["prompt"] = {n: batch(1, 0, n) + riding for n in its.lengths}
    cases["chunk"] = {n: batch(1, n - size, size) + riding for n in its.lengths}
    found, busy = timed(setup, its.riding + 1, max(its.context, *its.lengths), cases)
    alone = found.pop("decodes")[0]["whole"]
    rows = {n: {name: found[name][n]["whole"] / alone for name in found} for n in its.lengths}
    prompt, chunk = ([row[name] for row in rows.values()] for name in found)
    ours = f"{listed(prompt)}x with prompts of {listed(its.lengths, ',')}, {listed(chunk)}x with a "
    ours += f"chunk of {its.chunk}"
    even = max(chunk) <= 1.5 * min(chunk)
    shape = [(falls(prompt[::-1]) and even and prompt[-1] >= 2 * chunk[-1], ours)]
    title = f"{its.riding} decodes at {its.context:,}, {alone:.1f} ms, with a prompt or a chunk"
    parts = [(title, "tokens", "times the decodes alone", ".1fx", "xy", rows)]
    return finding(parts, ours, shape, busy)


def stall(setup, its):
    """B-2: a prompt beside decodes is one long stall, or even steps in chunks."""
    riding, n = batch(its.riding, its.context - 1, 1, slot=1), its.stall
    cases = {"decodes": {0: riding}, "whole": {0: batch(1, 0, n) + riding}}
    cases["chunks"] = {at: batch(1, at, its.chunk) + riding for at in range(0, n, its.chunk)}
    found, busy = timed(setup, its.riding + 1, max(n, its.context), cases)
    (alone,), (long,), steps = ([r["whole"] for r in rows.values()] for rows in found.values())
    lines = [alone, long, *[alone] * len(steps)], [alone, *steps, alone]
    rows = {i: dict(zip(("whole", "in chunks"), gaps)) for i, gaps in enumerate(zip(*lines), 1)}
    ours = f"one stall of {long:.0f} ms against {len(steps)} steps of {min(steps):.0f}-"
    ours += f"{max(steps):.0f} ms, decodes alone {alone:.0f}"
    shape = [(max(steps) <= min(1.5 * min(steps), long / 2), ours)]
    title = f"{n:,} tokens beside {its.riding} decodes, chunk {its.chunk}"
    return finding([(title, "iteration", "ms", ".1f", "", rows)], ours, shape, busy)


def measured(claim):
    """The claim as a function of a Setup: with the sizes for this machine."""
    of = lambda setup: "gpu" if setup.big else "quick" if setup.args.quick else "cpu"
    return lambda setup: claim(setup, Namespace(**SIZES[of(setup)]))


CLAIMS = {
    "S-F3": measured(token_times),
    "S-F4a": measured(throughput),
    "S-F4b": measured(intensity),
    "S-F7": measured(tiles),
    "S-F8": measured(speedups),
    "S-F10": measured(balanced),
    "S-F13": measured(small_chunks),
    "SS-F9": measured(beside_decodes),
    "SS-F14": measured(long_chunks),
    "B-2": measured(stall),
}
