"""Single iterations, whole and by operation, as in SARATHI's Table 2 and Figures 3, 4 and 7.

    python bench.py batches 2048 2048/256 6x1@1024 "250@2048 + 6x1@1024"

times a prompt; the same in chunks, one after another; six decodes that read 1,024 tokens each; and
a chunk beside them. Timed are the iteration, without the model's head as in the papers, and alone
its attention and its matrix products, by the names of SARATHI's Table 1. Read first: measure.py."""

import re
from argparse import ArgumentTypeError
from dataclasses import replace
from functools import partial
from statistics import median

import numpy as np

from cli import options
from kv_cache import Span
from lab.measure import timing as measure
from model import GPT
from views import tables

N = r"([1-9]\d{0,6})"
CHUNKS = re.compile(rf"(?:{N}x)?{N}(?:@{N})?(?:/{N})?")  # "6x1@1024", "2048/256"
PRODUCTS = *measure.LINEAR, "head"


def series(text):
    """A type of options: (name, batches) of "name=2 * 2048/256 + 6x1@1024, 512"; a batch is a tuple
    of (tokens, the length where they end). "512" is a prompt, "1@1024" a decode that reads 1,024
    tokens, "6x" so many of them, "/256" in chunks, a batch for each; "+" is beside, "2 *" twice,
    "," and after that."""
    name, _, batches = text.rpartition("=")
    found = []
    for sequence in batches.split(","):
        times, _, summands = sequence.rpartition("*")
        beside = [()]  # the batches of the words so far
        for word in map(str.strip, summands.split("+")):
            match = CHUNKS.fullmatch(word)
            count, tokens, end, size = (int(n or 0) for n in match.groups()) if match else [0] * 4
            end, size = end or tokens, size or tokens
            if not match or tokens > end or not re.fullmatch(N, times.strip() or "1"):
                raise ArgumentTypeError(f"{text:.60}: {word!r} must be like 6x1@1024 or 2048/256")
            starts = range(end - tokens, end, size)
            chunks = [(min(size, end - at), min(at + size, end)) for at in starts]
            beside = [batch + (chunk,) * (count or 1) for batch in beside for chunk in chunks]
        found += beside * int(times or 1)
    return name or text, found


def add_options(parser):
    """The options of `batches`."""
    what = "each maybe with a name, as in 'chunks=2048/256'; 2 * 6x1@512 are twice six decodes"
    parser.add_argument("batches", help=what, nargs="+", type=series)
    parser.add_table("batches", "json")
    parser.add_model_options("llama-13b on a GPU with 40 GB or more, else llama-160m")


def check(parser, args):
    """Exit with a message if one name has two meanings. Sets args.batch_length: the longest."""
    if len(names := dict(args.batches)) < len(args.batches):
        parser.error(f"batches: {len(args.batches)} have {len(names)} names, {', '.join(names)}")
    args.batch_length = max(end for its in names.values() for batch in its for _, end in batch)


def spans(batch, wants_logits=False):
    """A batch as Spans of requests that have one page each."""
    return [Span([i], end - n, [1] * n, wants_logits) for i, (n, end) in enumerate(batch)]


def timed(runner, machine, batches, repeats, head=False, title=None):
    """{name: row} of {name: batch}, timed in turn. In a row are ms of the `total`, of each of
    measure.LINEAR, and of the `head` with it, of these `products` together, of `attention`, with
    its limit, and of `other`; whether the machine was `busy`."""
    model, runs = runner.model, {}
    heads = [model.head] if head and model.head else []
    runner.cache.data.normal_()
    for name, batch in batches.items():
        rows, chunks = sum(n for n, _ in batch), spans(batch, head)
        runs[name, "total"] = partial(runner.greedy, chunks)
        runs[name, "attention"] = measure.attention_alone(runner, chunks)
        runs[name, "head"] = measure.bare_products(model, len(batch), heads)
        for part in measure.LINEAR:
            layers = measure.linear_layers(model, [part])
            runs[name, part] = measure.bare_products(model, rows, layers)
    time_all = partial(measure.interleaved, runs, model.device, repeats, title=title)
    typical = lambda timings: median(timings[name, "total"].spread for name in batches)
    timings, drift = measure.steadily(time_all, model.device, tries=2, spread_of=typical)
    found = {}
    for name, batch in batches.items():
        row = {f"{part}_ms": timings[name, part].ms for part in ("total", "attention", *PRODUCTS)}
        row["products_ms"] = sum(row[f"{part}_ms"] for part in PRODUCTS)
        other_ms = row["total_ms"] - row["products_ms"] - row["attention_ms"]
        cost = measure.attention_cost(model.config, spans(batch), model.dtype)
        limits_s = [x / machine[rate] for x, rate in zip(cost, ("flops_per_s", "bytes_per_s"))]
        row |= {"attention_limit_ms": 1e3 * model.stages * max(limits_s)}
        row |= {"other_ms": max(0.0, other_ms), "spread": timings[name, "total"].spread}
        found[name] = row | {"busy": max(drift, row["spread"]) > measure.BUSY}
    return found


def intensities(model, batches):
    """{operation: flops per byte}, where all that goes in or out is moved once."""
    config, size = model.config, model.dtype.itemsize
    rows = sum(n for batch in batches for n, _ in batch)
    costs = [measure.attention_cost(config, spans(batch), model.dtype) for batch in batches]
    q_and_out = 2 * config.n_layer * rows * config.n_head * config.head_dim * size
    costs = {"attention": np.sum(costs, axis=0) + (0, q_and_out)}  # (flops, bytes) of each
    for name in measure.LINEAR:
        layer = getattr(model.blocks[0], name)
        weights, n = layer.weight.numel(), layer.in_features
        moved = size * (len(batches) * weights + rows * (n + weights // n))
        costs[name] = config.n_layer * np.array([2 * rows * weights, moved])
    costs["products"] = sum(map(costs.get, measure.LINEAR))
    return {name: flops / moved for name, (flops, moved) in costs.items()}


def main(args, model=None, machine=None):
    """The command, maybe with a model and a machine that are known: its report."""
    model = model or options.load_model(args, "batch_length")
    machine = machine or measure.describe_machine(model, args, rows=256)
    if args.layers:
        if model.compiled or hasattr(model, "ranks"):
            raise ValueError("--layers: does not go with --compile, --tp, --pp")
        config = replace(model.config, n_layer=args.layers)
        model = GPT(config, model.device, model.dtype, args.seed)
        machine = machine | {"model": f"{machine['model']}, cut to --layers {args.layers}"}
        machine["parameters"] = sum(p.numel() for p in model.parameters())
    batches = {batch: batch for _, its in args.batches for batch in its}
    sizes = max(map(len, batches)), args.batch_length, args.batch_length
    runner = options.runner_for(model)(model, *sizes, args.attention)
    rows = timed(runner, machine, batches, args.repeats, title="batches")
    found = {}
    for name, its in args.batches:
        row = found[name] = {key: sum(rows[batch][key] for batch in its) for key in rows[its[0]]}
        row |= {key: max(rows[batch][key] for batch in its) for key in ("spread", "busy")}
        row["tokens"] = sum(n for batch in its for n, _ in batch)
        row["tokens_per_ms"] = row["tokens"] / row["total_ms"]
        row["intensity"] = intensities(model, its)
    print(options.machine_lines(machine))
    tables.print_rows(
        "timed", {measure.mark(name, row["busy"]): row for name, row in found.items()}
    )
    report = {"machine": machine, "batches": found}
    options.write_json(args, report)
    options.wrote(args.json)
    return report
