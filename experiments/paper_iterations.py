"""Both papers' claims of single iterations, measured here: `CLAIMS`, functions of a Setup.

An iteration is timed whole, and apart: its attention, and its matrix products by SARATHI's names of
operations (Table 1), each alone on as many rows; `others` is what is left. The head is left out, as
in the papers. Read first: claims.py, measure.py, offline.py. Next: paper_loads.py, whole runs."""

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


def sizes(setup):
    """What is timed here, of sizes.toml."""
    return Namespace(**SIZES["gpu" if setup.big else "quick" if setup.args.quick else "cpu"])


def chunk_at(start, length, slot=0):
    """The Span of a chunk of the request in that slot. Its head is not computed."""
    return Span([slot], start, [1] * length, False)


def whole(count, length):
    """The Spans of so many whole prompts."""
    return [chunk_at(0, length, slot) for slot in range(count)]


def decodes(count, context, slot=0):
    """The Spans of so many decodes, in that slot and those behind it."""
    return [chunk_at(context - 1, 1, slot + i) for i in range(count)]


def iteration(runner, spans):
    """{name: function}: what runs an iteration."""
    return {"whole": partial(runner.greedy, spans)}


def operations(runner, spans):
    """{name: function}: what runs an iteration, and each operation of it alone."""
    rows = sum(span.length for span in spans)
    its = {name: measure.bare_products(runner.model, rows, 0, [name]) for name in measure.LINEAR}
    return its | {"attn": measure.attention_alone(runner, spans)} | iteration(runner, spans)


def in_chunks(runner, length_chunk):
    """{name: function}: what runs a prompt in chunks, and its attention alone."""
    length, chunk = length_chunk
    batches = [[chunk_at(at, min(chunk, length - at))] for at in range(0, length, chunk)]
    attention = [measure.attention_alone(runner, spans) for spans in batches]
    prefill = [partial(runner.greedy, spans) for spans in batches]
    both = {"prefill": prefill, "attention": attention}
    return {name: lambda its=its: [run() for run in its] for name, its in both.items()}


def timed(setup, slots, length, cases, parts=iteration, model=None, times=1):
    """({group: {x: {name: ms}}} of the `parts` of cases, {group: {x: Spans}}, and whether the
    machine was busy). All take turns, on a cache of so many slots of `length` tokens of noise."""
    model, times = model or setup.model, times * (3 if setup.args.quick else 5)
    runner = runner_for(model)(model, slots, length, length, setup.args.attention)
    runner.cache.data.normal_()
    runs = {(g, x): parts(runner, spans) for g, its in cases.items() for x, spans in its.items()}
    flat = {(*case, name): run for case, its in runs.items() for name, run in its.items()}
    again = partial(measure.interleaved, flat, model.device, times, warmup=1)
    typical = lambda timings: median(timing.spread for timing in timings.values())
    timings, drift = measure.steadily(again, model.device, 1 if setup.args.quick else 2, typical)
    rows = {group: {x: {} for x in its} for group, its in cases.items()}
    for (group, x, name), timing in timings.items():
        rows[group][x][name] = timing.ms
    return rows, drift > measure.BUSY


def per_token(setup, slots, length, cases, model=None, parts=operations):
    """`timed` of cases, {group: {x: Spans}}, per token; and the sum of `linear`, and `others`."""
    found, busy = timed(setup, slots, length, cases, parts, model)
    for group, its in cases.items():
        for x, spans in its.items():
            row, tokens = found[group][x], sum(span.length for span in spans)
            row |= {name: ms / tokens for name, ms in row.items()}
            if "attn" in row:
                row["linear"] = sum(row[name] for name in measure.LINEAR)
                row["others"] = max(0.0, row["whole"] - row["linear"] - row["attn"])
    return found, busy


def falls(values):
    """Whether numbers fall, but for noise."""
    values = list(values)
    return values[-1] < values[0] and all(b <= NOISE * a for a, b in pairwise(values))


def saturates(rates):
    """The fewest tokens with SATURATED of the peak of {tokens: rate}."""
    return min(n for n, rate in rates.items() if rate >= SATURATED * max(rates.values()))


def listed(values, spec=".1f"):
    """Numbers as text, None as "-"."""
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


def token_times(setup):
    """S-F3, SS-F4: a token of prefill costs the same in any batch, a decode less the larger it is;
    its linear share falls, that of attention does not."""
    its, L = sizes(setup), sizes(setup).context
    cases = {"prefill": {B: whole(B, L) for B in its.prompts}}
    cases["decode"] = {B: decodes(B, L) for B in its.batches}
    found, busy = per_token(setup, max(its.batches), L, cases)
    cases = {"prefill": {n: whole(1, n) for n in its.lengths}}
    cases["decode"] = {n: decodes(1, n) for n in its.lengths}
    alone, also = per_token(setup, 1, max(its.lengths), cases)
    share = lambda row, name="linear": row[name] / row["whole"]
    shares = {n: {phase: share(rows[n]) for phase, rows in alone.items()} for n in its.lengths}
    prefill, decode = found.values()
    flat, costs = ([row["whole"] for row in rows.values()] for rows in found.values())
    token, one, last = prefill[1], decode[1], decode[max(decode)]
    ours = f"a decode costs {listed(cost / flat[0] for cost in costs)}x prefill at B = "
    ours += f"{listed(decode, 'd')}; others {share(token, 'others'):.0%}; linear layers "
    ours += f"{min(min(row.values()) for row in shares.values()):.0%} or more, there a decode is "
    ours += f"{one['linear'] / token['linear']:.0f} prefill tokens"
    shape = [
        (max(flat) <= 1.25 * min(flat), f"prefill takes {listed(flat, '.3f')} ms per token"),
        (falls(costs), f"a decode takes {listed(costs)} ms"),
        (share(last) < share(one), f"linear share of a decode {share(one):.0%}, {share(last):.0%}"),
        (share(last, "attn") >= share(one, "attn"), "the share of attention in a decode falls"),
    ]
    parts = [(f"{p}, {L:,}", "batch", "ms per token", ".3f", "xy", its) for p, its in found.items()]
    parts.append(("linear layers, batch 1", "length", "share of the time", ".0%", "x", shares))
    return finding(parts, ours, shape, busy or also)


def throughput(setup):
    """S-F4a, SS-F3: prefill saturates early, decode rises about linearly with the batch."""
    its, L, parts, rates, drifted = sizes(setup), sizes(setup).context, [], [], []
    one = GPT(replace(setup.model.config, n_layer=1), setup.model.device, setup.model.dtype)
    for name, model, more in ("", None, []), (", one layer", one, its.more):
        cases = {"prefill": {n: whole(1, n) for n in sorted({*TILES, *its.tokens}) if 16 <= n < L}}
        cases["prefill"] |= {B * L: whole(B, L) for B in its.prompts}
        cases["decode"] = {B: decodes(B, L) for B in its.batches + more}
        found, busy = per_token(setup, max(its.batches + more), L, cases, model, iteration)
        drifted.append(busy)
        for phase, rows in found.items():
            rates.append({n: 1 / row["whole"] for n, row in rows.items()})
            rows = {n: {"tokens per ms": rate} for n, rate in rates[-1].items()}
            parts.append((f"{phase}{name}, {L:,}", "tokens", "rate", ".3f", "xy", rows))
    prefill, decode, _, layer = rates
    few, most, ridge = min(decode), max(decode), setup.machine["ridge_tokens"]
    gain, below = decode[most] / decode[few], 1 - prefill[256] / max(prefill.values())
    ours = f"prefill saturates at B L = {saturates(prefill):,}, 256 is {below:.1%} below the peak; "
    ours += f"decode of one layer at B = {saturates(layer)}"
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


def intensity(setup):
    """S-F4b, SS-F5: every operation of a decode has 100 times fewer flops per byte than a prompt's;
    linear layers are above the ridge that is measured here in prefill, and below it in decode."""
    its, L, per_byte = sizes(setup), sizes(setup).context, "flops per byte"
    ridge = setup.machine["flops_per_s"] / setup.machine["bytes_per_s"]
    of = partial(intensities, setup.model.config, setup.model.dtype)
    prefill = {B: of(whole(B, L)) for B in its.batches}
    decode = {B: of(decodes(B, L)) for B in its.batches + its.more}
    lines = {2**n: {"linear": of(whole(1, 2**n))["linear"], "ridge": ridge} for n in range(13)}
    far = {name: high / decode[1][name] for name, high in prefill[1].items()}
    least, most = min(far, key=far.get), max(its.batches)
    high, low = prefill[1]["linear"], decode[most]["linear"]
    ours = f"decode {min(far.values()):.0f}x-{max(far.values()):.0f}x below prefill at B = 1; "
    ours += f"a prompt has {high:.0f} {per_byte}, {most} decodes {low:.0f}, the ridge {ridge:.0f}"
    shape = [(far[least] > 100, f"{least}: {far[least]:.0f}x"), (low < ridge < high, ours)]
    parts = [
        (f"prefill of {L:,}", "batch", per_byte, ".1f", "xy", prefill),
        (f"decode at {L:,}", "batch", per_byte, ".1f", "xy", decode),
        ("linear layers", "tokens", per_byte, ".1f", "xy", lines),
    ]
    return finding(parts, ours, shape, setup.machine["busy"])


def tiles(setup):
    """S-F7, SS-F6: the time of linear layers is flat for few tokens, and grows as they do for many;
    on a GPU there is a step behind each tile, larger than that of any token nearby."""
    tokens = sorted({*sizes(setup).tokens, *(n + i for n in TILES for i in (-2, -1, 0, 1, 2))})
    products = lambda runner, spans: measure.bare_products(runner.model, spans[0].length, 0)
    both = lambda *its: {"whole": iteration(*its)["whole"], "linear layers": products(*its)}
    cases = {"": {n: whole(1, n) for n in tokens}}
    found, busy = timed(setup, 1, tokens[-1], cases, both, times=2)
    ms = {n: row["whole"] for n, row in found[""].items()}
    linear = {n: row["linear layers"] for n, row in found[""].items()}
    ours, shape = ", ".join(f"{n}: {ms[n]:.1f} ms" for n in (128, 256, 257)), []
    for n in TILES:
        step, *others = (ms[m + 1] / ms[m] - 1 for m in (n, n - 2, n - 1, n + 1))
        noise = max(map(abs, others))
        ours += f"; a token more than {n}: {step:+.1%}, nearby up to {noise:.1%}"
        shape.append((not setup.big or step > max(0.05, noise), f"no step at {n}"))
    one, few, *_, many, most = tokens
    flat, rise = linear[few] / linear[one], linear[most] / linear[many]
    power = math.log(rise, most / many)
    shape.append((flat <= (few / one) ** 0.5, f"{few} tokens take {flat:.1f}x the time of {one}"))
    shape.append((0.8 <= power <= 1.2, f"{most:,} tokens take {rise:.1f}x the time of {many}"))
    return finding([("one prompt", "tokens", "ms", ".2f", "", found[""])], ours, shape, busy)


def speedups(setup):
    """S-F8, S-T2: a decode is cheaper that rides with a chunk, the less so the larger batch and
    context; timed by offline.decode_maximal."""
    its, riding, busy = sizes(setup), {}, False
    points = [(context, B, its.chunk) for context, batches in its.loads for B in batches]
    for context, B, chunk in [*points, (its.context, 4, its.context)]:
        more = dict(seq_len=context, batch=B, chunk=chunk)
        args = Namespace(**vars(setup.args) | more)
        rows, speedup, _ = offline.decode_maximal(setup.model, setup.machine, args)
        busy |= offline.is_busy(rows)
        riding[context, B, chunk] = speedup["total"]
    riding.popitem()  # that and the rows are Table 2
    keys = "products_ms", "attention_ms", "total_ms", "prefill_token_ms", "decode_token_ms"
    table = [[name, row["decodes"], *map(row.get, keys)] for name, row in rows.items()]
    columns = {"batch": "", "decodes": "d"} | dict.fromkeys(keys, ".2f")
    known = {case: times for case, times in riding.items() if times}
    pairs = [(a, b) for a, b in permutations(known, 2) if a[0] <= b[0] and a[1] <= b[1]]
    wrong = [f"{known[b]:.1f}x at {b[:2]}" for a, b in pairs if known[b] > NOISE * known[a]]
    ours = (
        f"{listed(sorted(known.values())[:: max(1, len(known) - 1)])}x, least and most; Table 2: "
    )
    ours += f"{table[1][-1]:.2f} ms alone, {table[2][-1]:.2f} riding"
    shape = [
        (len(known) > 1 and min(known.values()) > 1, ours),
        (not wrong, f"it rises to {', '.join(wrong)}, context and batch"),
    ]
    names, drawn = {c: f"at {c:,}" for c, _ in its.loads}, {}
    for (context, B, _), times in riding.items():
        drawn.setdefault(B, {})[names[context]] = times
    parts = [(f"speedup, chunk {its.chunk}", "batch", "times", ".1fx", "", drawn)]
    its = finding(parts, ours, shape, busy)
    return its._replace(tables=[*its.tables, ("Table 2", columns, table)])


def balanced(setup):
    """S-F10: B requests as request-level computes them, and as sarathi does where all decodes ride,
    P:D = C / (B - 1): linear layers take less time together, attention does not. Decodes are timed
    in the middle of the output, and everything counts as often as it comes."""
    its, drifted, apart, together, less = sizes(setup), [], {}, {}, {}
    n, C = its.context // its.chunk, its.chunk
    for B in its.balanced:
        size, D = C - B + 1, n * (B - 1)
        P, middle = n * size, n * size + D // 2
        riding = decodes(B - 1, middle, slot=1)
        cases = {"prompts": {0: whole(1, P)}, "decodes": {0: decodes(B, middle)}}
        cases["both"] = {at: [chunk_at(at, size), *riding] for at in range(0, P, size)}
        found, busy = per_token(setup, B, its.context, cases)
        drifted.append(busy)
        (prompt,), (decode,), hybrid = (rows.values() for rows in found.values())
        apart[B] = {name: B * (P * prompt[name] + D * decode[name]) for name in prompt}
        together[B] = {name: B * C * sum(row[name] for row in hybrid) for name in prompt}
        less[B] = {name: ms / (together[B][name] or math.nan) for name, ms in apart[B].items()}
    of = lambda *names: listed((row[name] for row in less.values() for name in names), ".2f")
    ours = f"ffn {of('ffn_ln1', 'ffn_ln2')}x, pre- and postproj {of('preproj', 'postproj')}x less"
    linear, attention = ([row[name] for row in less.values()] for name in ("linear", "attn"))
    shape = [
        (min(linear) > 1, f"linear layers take {of('linear')}x less"),
        (max(attention) <= NOISE, f"attention takes {of('attn')}x less"),
    ]
    title = f"{n * C:,} tokens, chunk {C}"
    parts = [
        (f"{title}, request-level", "batch", "ms", ".0f", "", apart),
        (f"{title}, sarathi", "batch", "ms", ".0f", "", together),
        (title, "batch", "times less under sarathi", ".2fx", "", less),
    ]
    return finding(parts, ours, shape, any(drifted))


def chunked(setup, lengths, chunks):
    """({length: {chunk: {"prefill": times, "attention": times}}} of a prompt in chunks to the same
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


def small_chunks(setup):
    """S-F13: what chunks add to attention and prefill falls with their size; the best gain end to
    end, which is not measured with --quick, is in between."""
    its = sizes(setup)
    found, busy = chunked(setup, [its.context], its.chunks)
    rows = found[its.context]
    times = {name: [row[name] for row in rows.values()] for name in ("attention", "prefill")}
    shape = [(falls(x), f"{name} takes {listed(x, '.2f')}x") for name, x in times.items()]
    if not setup.args.quick:
        gain = times["end-to-end gain"] = gains(setup, its.context, its.riding, its.chunks)
        best = f"chunks of {its.chunks[gain.index(max(gain))]} are best end to end"
        shape.append((max(gain) not in (gain[0], gain[-1]), best))
    ours = ", ".join(f"{name} {listed(x, '.2f')}x" for name, x in times.items())
    ours += f" at chunks of {listed(rows, 'd')}"
    rows = {chunk: dict(zip(times, row)) for chunk, row in zip(rows, zip(*times.values()))}
    parts = [(f"a prompt of {its.context:,}", "chunk", "times", ".2fx", "x", rows)]
    return finding(parts, ours, shape, busy)


def long_chunks(setup):
    """SS-F14: small chunks add 25 % to a prefill at most, large ones about nothing."""
    its = sizes(setup)
    found, busy = chunked(setup, its.lengths, its.long_chunks)
    rows = {n: {c: row["prefill"] - 1 for c, row in found[n].items()} for n in found}
    added = {c: [row[c] for row in rows.values() if c in row] for c in its.long_chunks}
    ours = "; ".join(f"chunk {c}: {listed(its, '+.0%')}" for c, its in added.items())
    ours += f" at up to {max(its.lengths):,} tokens"
    small, *_, large = added.values()
    falling = fmean(large) < fmean(small) + 0.02
    shape = [(max(small) <= 0.25 and max(large) <= 0.05 and falling, ours)]
    rows = {n: {f"chunk {c}": share for c, share in row.items()} for n, row in rows.items()}
    parts = [("chunked prefill", "tokens", "added to that of no chunks", "+.1%", "x", rows)]
    return finding(parts, ours, shape, busy)


def beside_decodes(setup):
    """SS-F9: an iteration of decodes takes the longer, the longer a whole prompt in it; with a
    chunk, the last of the prompt, it does not."""
    its, size = sizes(setup), sizes(setup).chunk - sizes(setup).riding
    riding = decodes(its.riding, its.context, slot=1)
    cases = {"decodes": {0: riding}}
    cases["prompt"] = {n: [*whole(1, n), *riding] for n in its.lengths}
    cases["chunk"] = {n: [chunk_at(n - size, size), *riding] for n in its.lengths}
    found, busy = timed(setup, its.riding + 1, max(its.lengths), cases)
    alone = found.pop("decodes")[0]["whole"]
    rows = {n: {name: found[name][n]["whole"] / alone for name in found} for n in its.lengths}
    prompt, chunk = ([row[name] for row in rows.values()] for name in found)
    ours = f"up to {max(prompt):.1f}x with a prompt, {max(chunk):.1f}x with a chunk of {its.chunk}"
    shape = [
        (falls(prompt[::-1]), f"with a prompt {listed(prompt)}x"),
        (max(chunk) <= 1.5 * min(chunk), f"with a chunk {listed(chunk)}x"),
        (prompt[-1] >= 2 * chunk[-1], ours),
    ]
    title = f"{its.riding} decodes at {its.context:,}, {alone:.1f} ms, with a prompt or a chunk"
    parts = [(title, "prompt", "times the decodes alone", ".1fx", "xy", rows)]
    return finding(parts, ours, shape, busy)


def stall(setup):
    """B-2: a prompt beside decodes is one long stall, or even steps in chunks."""
    its, n = sizes(setup), sizes(setup).stall
    riding = decodes(its.riding, its.context, slot=1)
    cases = {"decodes": {0: riding}, "whole": {0: [*whole(1, n), *riding]}}
    cases["chunks"] = {at: [chunk_at(at, its.chunk), *riding] for at in range(0, n, its.chunk)}
    found, busy = timed(setup, its.riding + 1, max(n, its.context), cases)
    (alone,), (long,), steps = ([r["whole"] for r in rows.values()] for rows in found.values())
    lines = [alone, long, *[alone] * len(steps)], [alone, *steps, alone]
    rows = {i: dict(zip(("whole", "in chunks"), gaps)) for i, gaps in enumerate(zip(*lines), 1)}
    ours = f"one stall of {long:.0f} ms against {len(steps)} steps of {min(steps):.0f}-"
    ours += f"{max(steps):.0f} ms, decodes alone {alone:.0f}"
    shape = [(max(steps) <= min(1.5 * min(steps), long / 2), ours)]
    title = f"{n:,} tokens beside {its.riding} decodes, chunk {its.chunk}"
    return finding([(title, "iteration", "ms", ".1f", "", rows)], ours, shape, busy)


CLAIMS = {
    **{"S-F3": token_times, "S-F4a": throughput, "S-F4b": intensity, "S-F7": tiles},
    **{"S-F8": speedups, "S-F10": balanced, "S-F13": small_chunks},
    **{"SS-F9": beside_decodes, "SS-F14": long_chunks, "B-2": stall},
}
