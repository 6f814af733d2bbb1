"""Times of single iterations of a model, whole and by operation.

Of a batch are timed: all of it, its attention, and its matrix products by SARATHI's names of
operations (Table 1), each alone on as many rows; `others` is what is left. The head is left out, as
in the papers. Read first: measure.py. Read next: claims.py."""

import re
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import median

from experiments import measure
from experiments.options import runner_for
from kv_cache import Span
from model import GPT

OPERATIONS = [*measure.LINEAR, "attention", "whole"]


def points(sizes):
    """Each combination of sizes, {name: a number or a list}; or of several such, one by one."""
    for its in sizes if isinstance(sizes, list) else [sizes]:
        lists = [value if isinstance(value, list) else [value] for value in its.values()]
        yield from (dict(zip(its, values)) for values in product(*lists))


def batches(text):
    """What "2 * 2048/256 + 6x1@1024, 512" stands for: a list of batches, one after another, each a
    tuple of (tokens, the length where they end). "512" is a prompt, "1@1024" a decode that reads
    1,024 tokens, "6x" so many of them, "/256" in chunks, a batch for each; "+" is beside, "2 *"
    twice, and "," after. Raises ValueError."""
    found = []
    for sequence in text.split(","):
        times, _, summands = sequence.rpartition("*")
        some = [()]
        for word in map(str.strip, summands.split("+")):
            if not (match := re.fullmatch(r"(?:(\d+)x)?(\d+)(?:@(\d+))?(?:/(\d+))?", word)):
                raise ValueError(f"{text}: {word!r} must be like 1024, 6x1@1024 or 2048/256")
            count, tokens, end, size = (int(number or 0) for number in match.groups())
            end, size = end or tokens, size or tokens
            starts = range(end - tokens, end, size)
            chunks = [(min(size, end - at), min(at + size, end)) for at in starts]
            some = [batch + (chunk,) * (count or 1) for batch in some for chunk in chunks]
        found += some * int(times or 1)
    return found


def spans(batch):
    """The batch as Spans, of requests with one page each, that want no logits."""
    return [Span([i], end - n, [1] * n, False) for i, (n, end) in enumerate(batch)]


def timed(setup, its, parts=OPERATIONS, layers=None):
    """({batch: {part: ms}}, whether the machine was busy), of the model or so many layers of it.
    All take turns, on a cache of noise. Of all operations also `linear`, a sum, and `others`."""
    model, (repeats, tries), runs = setup.model, (3, 1) if setup.args.quick else (5, 2), {}
    if layers:
        model = GPT(replace(model.config, n_layer=layers), model.device, model.dtype)
    length = max(end for batch in its for _, end in batch)
    runner = runner_for(model)(model, max(map(len, its)), length, length, setup.args.attention)
    runner.cache.data.normal_()
    for batch in its:
        rows, chunks = sum(n for n, _ in batch), spans(batch)
        run = {name: measure.bare_products(model, rows, 0, [name]) for name in measure.LINEAR}
        run["attention"] = measure.attention_alone(runner, chunks)
        run["whole"] = partial(runner.greedy, chunks)
        runs |= {(batch, part): run[part] for part in parts}
    again = partial(measure.interleaved, runs, model.device, repeats, warmup=1)
    typical = lambda timings: median(timing.spread for timing in timings.values())
    timings, drift = measure.steadily(again, model.device, tries, typical)
    found = {batch: {part: timings[batch, part].ms for part in parts} for batch in its}
    for row in found.values() if parts == OPERATIONS else ():
        row["linear"] = sum(map(row.get, measure.LINEAR))
        row["others"] = max(0.0, row["whole"] - row["linear"] - row["attention"])
    return found, drift > measure.BUSY


def intensities(setup, batch):
    """{operation: flops per byte}, where all that goes in or out is moved once; and the `ridge`."""
    config, size, rows = setup.model.config, setup.model.dtype.itemsize, sum(n for n, _ in batch)
    costs = {}
    for name, layer in zip(measure.LINEAR, measure.linear_layers(setup.model)):
        weights, n = layer.weight.numel(), layer.in_features
        costs[name] = 2 * rows * weights, size * (weights + rows * (n + weights // n))
    costs["linear"] = [sum(column) for column in zip(*costs.values())]
    flops, kv_bytes = measure.attention_cost(config, spans(batch), setup.model.dtype)
    q_and_out = 2 * config.n_layer * rows * config.n_head * config.head_dim * size
    costs["attention"] = flops, kv_bytes + q_and_out
    costs["ridge"] = setup.machine["flops_per_s"], setup.machine["bytes_per_s"]
    return {name: flops / moved for name, (flops, moved) in costs.items()}


def measured(setup, its):
    """([(sizes, {series: {part: ms, and "tokens"}})] of a claim's `batches`, whether the machine
    was busy). Of what is `computed`, the parts are intensities."""
    cases, done = [], {}
    for at in points(its[setup.size]):
        only = at.get("only", [*its["batches"]])
        for name, text in its["batches"].items():
            if name in only:
                cases.append((at, name, batches(text.format_map(at))))
    unlike = dict.fromkeys(batch for *_, case in cases for batch in case)
    if its.get("computed"):
        rows, busy = {batch: intensities(setup, batch) for batch in unlike}, setup.machine["busy"]
    else:
        rows, busy = timed(setup, unlike, its.get("parts", OPERATIONS), its.get("layers"))
    for at, name, case in cases:
        row = {part: sum(rows[batch][part] for batch in case) for part in rows[case[0]]}
        row["tokens"] = sum(n for batch in case for n, _ in batch)
        done.setdefault(str(at), (at, {}))[1][name] = row
    return [*done.values()], busy
