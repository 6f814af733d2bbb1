"""SARATHI's claims on this machine: `bench.py --chunk 256`.

Prints (1) SARATHI's Table 2: what a decode costs alone and riding with a prefill chunk, each time
beside its limit; (2) the policies end to end at the balanced ratio of prefill to decode tokens,
P:D = C / (B - 1); (3) what to conclude. Functions that measure print nothing.

Read first: engine.py and measure.py. Read next: serving.py, for requests that arrive while others
run: Sarathi-Serve's half.
"""

import sys
import tempfile
import time
from dataclasses import replace
from functools import partial

import torch

from engine import Engine, EngineConfig, Runner
from experiments import measure
from experiments.machine import describe_machine
from experiments.metrics import summarize_run
from experiments.options import load_model, machine_lines, number, policy_names, whole, write_json
from experiments.run import EngineServer, LoadRun
from experiments.tables import print_table, show
from experiments.workload import Arrival, prompts
from kv_cache import Span
from model import GPT
from policies import POLICIES
from pretrained.checkpoints import LLAMA_FIELDS
from pretrained.presets import PRESETS
from sampling import SamplingParams

CANDIDATE_CHUNKS = (32, 64, 128, 256, 512, 1024)
PARTS = ("linear", "bare", "attention", "attention_alone", "total")  # what is timed of a batch
DEFAULT_POLICIES = "request-level,orca-best,vllm,sarathi,sarathi-serve"


def add_options(parser):
    """The options of the command."""
    add, balanced = parser.add, "C / (B - 1), which is balanced"
    names = ", ".join(name for name in POLICIES if name != "dynamic")
    names = f"comma-separated, from {names}, or my_policy.py:ClassName; orca-best lets one prompt"
    add("--chunk", "C, the chunk size and token budget, in tokens", 256, type=whole(1))
    add("--batch", "B, the most requests at once", 6, type=whole(2))
    add("--seq-len", "prompt and output tokens of a request, together", 1000, type=whole(3))
    add("--pd-ratio", "prompt tokens per output token", shown=balanced, type=number(above=0))
    add("--policies", f"{names} into a batch", DEFAULT_POLICIES, type=policy_names())
    add("--requests", "how many requests are served end to end", shown="2 B", type=whole(1))
    parser.add_model_options("llama-13b on a GPU with 40 GB or more, else llama-160m")
    theirs = "also serve the requests with transformers' generate"
    add("--transformers", theirs, False, action="store_true")
    parser.add_files(plot="draw each policy's iterations")


def check(parser, args):
    """Fill in what was left open; exit with a message if options make no sense together."""
    chunk, batch = f"--chunk {args.chunk}", f"--batch {args.batch}"
    if args.chunk < args.batch:
        parser.error(f"{chunk}: must be at least {batch}, or there is no room for a chunk")
    if args.chunk > args.seq_len:
        parser.error(f"{chunk}: must be at most --seq-len {args.seq_len}")
    if "dynamic" in args.policies:
        parser.error("--policies dynamic: follows an SLO, see bench.py serve and capacity")
    given = args.init_from or args.model not in PRESETS or PRESETS[args.model].family == "llama"
    if args.transformers and not given:
        only = "with random weights only a LLaMA can be compared, use --init-from"
        parser.error(f"--transformers: {only}")
    args.pd_ratio = args.pd_ratio or args.chunk / (args.batch - 1)
    args.requests = args.requests or 2 * args.batch


def main(args):
    """The command."""
    began = time.perf_counter()
    model = load_model(args, "seq_len")
    machine = describe_machine(model, args, args.chunk)
    print(
        f"{machine_lines(machine)}measured limits: {machine['flops_per_s'] / 1e12:,.2f} TFLOP/s in "
        f"matrix products of these shapes, {machine['bytes_per_s'] / 1e9:,.0f} GB/s of memory; "
        f"ridge: {machine['ridge_tokens']:,.0f} tokens\nschedule() takes "
        f"{machine['schedule_us']:.0f} us with 128 requests running and 1,000 waiting (median, "
        "slowest policy)\n"
    )
    table, speedup = decode_maximal(model, machine, args)
    print_decode_maximal(table, speedup, args)
    policies, timelines = end_to_end(model, args)
    print_end_to_end(policies, args)
    advice = advise(model, table, args)
    conclusion = conclude(table, policies, advice, args)
    print(conclusion)
    comparison = against_transformers(model, args) if args.transformers else None
    if comparison:
        theirs, ours, equal = comparison.values()
        ours = f"{ours:,.0f}, {ours / theirs:.2f}x ({equal:.0%} of the tokens are equal)"
        theirs = f"transformers' generate, same weights and requests: {theirs:,.0f} tokens/s"
        print(f"\n{theirs}; sarathi: {ours}")
    seconds, memory = time.perf_counter() - began, peak_memory_bytes(model.device)
    print(f"\ntook {seconds:.0f} s and at most {memory / 1e9:.1f} GB of memory")
    if args.plot:
        from views.timelines import plot_timelines

        plot_timelines(timelines, machine, args.plot)
    report = {"machine": machine, "decode_maximal": table, "decode_speedup": speedup}
    report |= {"end_to_end": policies, "advice": advice, "conclusion": conclusion}
    report |= {"transformers": comparison, "seconds": seconds, "peak_memory_bytes": memory}
    write_json(args, report)


def peak_memory_bytes(device):
    """The most memory in use: of the GPU, or of this process (0 on Windows, which tells none)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:
        return 0
    scale = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def decode_maximal(model, machine, args):
    """Time a chunk alone, B decodes alone, and the chunk with B - 1 decodes, at context seq_len.

    Returns (rows, speedup). `rows` maps the batch to its numbers, times in ms; `speedup` says how
    many times cheaper a decode is in the hybrid batch than in the decode-only one: in all, in the
    linear layers, and in the bare products; None where its cost is lost in the noise.

    A decode of the hybrid batch costs what the batch takes longer than the same chunk alone,
    divided by the number of decodes (SARATHI §5.1.1). Limits are as `print_decode_maximal` says.
    """
    B, context = args.batch, args.seq_len
    runner = Runner(model, B, context, attention=args.attention)
    runner.cache.data.normal_()
    length = args.chunk - (B - 1)
    chunk = [Span([0], context - length, [1] * length)]
    decodes = [Span([slot], context - 1, [1]) for slot in range(B)]
    batches = {
        "prefill-only": (chunk, length, 0),
        "decode-only": (decodes, 0, B),
        "decode-maximal": (chunk + decodes[1:], length, B - 1),
    }
    runner.greedy([Span([0], 0, [1] * context)])  # no timed run asks the system for memory

    variants, watched = {}, {}
    for name, (spans, prefill_tokens, num_decodes) in batches.items():
        watched[name] = {"linear": [], "attention": []}
        variants[name, "total"] = partial(runner.greedy, spans)
        variants[name, "watched"] = partial(greedy_watched, runner, spans, watched[name])
        tokens = prefill_tokens + num_decodes
        variants[name, "bare"] = measure.bare_products(model, tokens, len(spans))
        variants[name, "attention_alone"] = measure.attention_alone(runner, spans)
    timings = measure.interleaved(variants, model.device)
    for name, parts in watched.items():
        for part, values in parts.items():
            timings[name, part] = measure.summarize(values[measure.WARMUP :])
        if args.compile:  # what is fused into the linear layers cannot be told apart from them
            total = timings[name, "total"]
            timings[name, "linear"] = total._replace(ms=total.ms - timings[name, "attention"].ms)

    rows = {}
    for name, (spans, prefill_tokens, num_decodes) in batches.items():
        row = {f"{part}_ms": timings[name, part].ms for part in PARTS}
        flops, kv_bytes = measure.attention_cost(model.config, spans, model.dtype)
        limit = max(flops / machine["flops_per_s"], kv_bytes / machine["bytes_per_s"])
        rows[name] = row | {
            "prefill_tokens": prefill_tokens,
            "decodes": num_decodes,
            "attention_limit_ms": 1e3 * limit,
            "other_ms": max(0.0, row["total_ms"] - row["linear_ms"] - row["attention_ms"]),
            "limit_ms": row["bare_ms"] + row["attention_alone_ms"],
            "spread": timings[name, "total"].spread,
            "prefill_token_ms": None,
            "decode_token_ms": None,
        }
    prefill, decode, hybrid = rows.values()
    prefill["prefill_token_ms"] = hybrid["prefill_token_ms"] = prefill["total_ms"] / length
    decode["decode_token_ms"] = decode["total_ms"] / B
    hybrid["decode_token_ms"] = (hybrid["total_ms"] - prefill["total_ms"]) / (B - 1)

    speedup = {}
    for part in ("total", "linear", "bare"):
        prefill, decode, hybrid = (timings[name, part] for name in batches)
        extra, noise = hybrid.ms - prefill.ms, prefill.ms * prefill.spread / 2
        speedup[part] = decode.ms / B / (extra / (B - 1)) if extra > noise else None
    return rows, speedup


def greedy_watched(runner, spans, watched):
    """runner.greedy, adding the ms of linear layers and of attention to the lists in `watched`."""
    model, watch = runner.model, measure.Stopwatch(runner.model.device)
    with measure.watch_linear(model) as linear_watch:
        batch = measure.watch_attention(runner.flatten(spans), watch)
        model(batch, runner.cache).argmax(dim=-1).tolist()
    measure.synchronize(model.device)
    watched["linear"].append(linear_watch.read_ms())
    watched["attention"].append(watch.read_ms())


def print_decode_maximal(rows, speedup, args):
    """Table 2, on this machine: what `decode_maximal` returned."""
    print(
        f"1. What a decode costs (SARATHI, Table 2): chunk {args.chunk}, batch {args.batch}, "
        f"context {args.seq_len}, times in ms\n"
    )
    heads = "linear, bare, attention, limit, other, total, total limit".split(", ")
    columns = {"batch": "", "prefill + decodes": "", **dict.fromkeys(heads, ".1f"), "spread": ".0%"}
    columns |= {"per prefill token": ".3f", "per decode token": ".3f"}
    keys = "linear_ms bare_ms attention_ms attention_limit_ms other_ms total_ms limit_ms spread "
    keys = (keys + "prefill_token_ms decode_token_ms").split()
    tokens = "{prefill_tokens} + {decodes}".format_map
    print_table(columns, [[n, tokens(row), *map(row.get, keys)] for n, row in rows.items()])
    total, linear, bare = (show(x or "more than can be measured", ".1fx") for x in speedup.values())
    print(
        f"\ndecode speedup {total}; linear layers {linear} (bare products {bare})\n"
        "bare: the same matrix products alone; limit of attention: its flops over the product rate "
        "or its K and V\nover the bandwidth, the larger; limit of the total: bare products + "
        "attention alone, both measured\n"
    )


class BusyClock:
    """Seconds inside `with clock:`, the own time of an engine that takes turns with others."""

    def __init__(self):
        self.elapsed, self.since = 0.0, None

    def __enter__(self):
        self.since = time.perf_counter()
        return self

    def __exit__(self, *_):
        self.elapsed, self.since = self(), None

    def __call__(self):
        """The time, in seconds."""
        return self.elapsed + (0.0 if self.since is None else time.perf_counter() - self.since)


def output_tokens(args):
    """Output tokens of a request of seq_len tokens at the ratio pd_ratio: 1 … seq_len - 1."""
    return min(max(1, round(args.seq_len / (1 + args.pd_ratio))), args.seq_len - 1)


def make_load(args):
    """The Arrivals, for every policy alike: prompt + output = seq_len tokens at the ratio pd_ratio.

    The load is steady: everybody waits at time 0, and the first B requests want 1/B, 2/B, … of the
    output, as if the server had been running before; otherwise requests would begin and end in
    lockstep for ever.
    """
    B, output = args.batch, output_tokens(args)
    outputs = [max(1, output * min(i + 1, B) // B) for i in range(args.requests)]
    return [Arrival(0.0, args.seq_len - output, wanted) for wanted in outputs]


def end_to_end(model, args):
    """Serve one load under each policy. Returns (name -> row of the table, name -> Iterations).

    On a CPU the engines take turns, and the one that has used the least time is next: when the
    machine slows down for a while, it slows down for all of them. A GPU is steadier and short of
    memory: there one cache is held at a time.
    """
    arrivals = make_load(args)
    tokens = prompts(arrivals, model.config.vocab_size, args.seed)
    limits = dict(chunk=args.chunk, max_batch=args.batch, max_len=args.seq_len)
    config = EngineConfig(**limits, attention=args.attention)
    rows, timelines = {}, {}
    groups = [[name] for name in args.policies] if model.device.type == "cuda" else [args.policies]
    for names in groups:
        loads = {}
        for name in names:
            clock = BusyClock()
            engine = Engine(model, replace(config, policy=name), clock=clock)
            engine.warm_up()
            loads[name] = LoadRun(EngineServer(engine, tokens, clock), arrivals)
        active = list(loads.values())
        while active:
            load = min(active, key=lambda load: load.server.clock())
            with load.server.clock as clock:
                if not load.step():
                    active.remove(load)
                measure.synchronize(model.device)  # a step without a new token has not waited
                if load.iterations:
                    load.iterations[-1] = load.iterations[-1]._replace(end=clock())
        for name, load in loads.items():
            run = load.result()
            rows[name], timelines[name] = row_of(run, load.server.clock()), run.iterations
        del loads, load, engine  # and the caches, before others are made
    baseline = rows.get("request-level")
    for row in rows.values():
        row["gain"] = row["tokens_per_s"] / baseline["tokens_per_s"] if baseline else None
    return rows, timelines


def row_of(run, seconds):
    """The line of the table for a Run of so many seconds: tokens/s, seconds, and counts."""
    found = summarize_run(run.completions, run.iterations, seconds)
    row = {key: found[key] for key in ("tokens_per_s", "iterations", "tokens_per_iteration")}
    row |= {"p50_ttft_s": found["ttft_s"]["p50"], "p99_tbt_s": found["tbt_s"]["p99"] or 0.0}
    return row | {"longest_stall_s": found["stalls"]["length_s"]["max"] or 0.0}


def print_end_to_end(rows, args):
    """The table of policies."""
    output, B = output_tokens(args), args.batch
    prompt = args.seq_len - output
    print(
        f"2. End to end: {args.requests} requests of {prompt} + {output} tokens (P:D "
        f"{prompt / output:.0f}; the first {B} want 1/{B}, 2/{B}, ...\n"
        f"   of the output), batch {B}, chunk {args.chunk}, all there at time 0\n"
    )
    columns = {"policy": "", "tokens/s": ",.0f", "gain": ".2fx", "P50 TTFT s": ".2f"}
    columns |= {"P99 TBT s": ".3f", "longest stall s": ".3f", "iterations": ""}
    keys = "tokens_per_s gain p50_ttft_s p99_tbt_s longest_stall_s iterations tokens_per_iteration"
    table = [[name, *map(row.get, keys.split())] for name, row in rows.items()]
    print_table(columns | {"tokens/iteration": ".0f"}, table)
    print(
        "\nthroughput counts prompt and output tokens; gain is over request-level; a stall is a "
        "gap between two\ntokens in which prompt tokens were computed; each policy ran on its own "
        "clock\n"
    )


def against_transformers(model, args):
    """Throughput of transformers' generate and of sarathi: same weights, dtype, requests and batch.

    Returns both in tokens per second, prompt and output, and the fraction of equal output tokens:
    in 16 bits, rounding lets greedy texts part. Without --init-from, both have random weights.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    c, device, dtype = model.config, model.device, model.dtype
    if args.init_from:
        theirs = AutoModelForCausalLM.from_pretrained(args.init_from, dtype=dtype)
    else:
        names = ((name, field) for name, (field, *_) in LLAMA_FIELDS.items() if hasattr(c, field))
        theirs = LlamaForCausalLM(LlamaConfig(**{name: getattr(c, field) for name, field in names}))
        theirs = theirs.to(dtype)
        with tempfile.TemporaryDirectory() as directory:
            theirs.save_pretrained(directory)
            model = GPT.from_pretrained(directory, device, dtype)
        if args.compile:
            model.compile()
    theirs = theirs.to(device).eval()
    B, output = args.batch, output_tokens(args)
    tokens = prompts(make_load(args), c.vocab_size, args.seed)
    config = dict(policy="sarathi", chunk=args.chunk, max_batch=B, max_len=args.seq_len)
    engine = Engine(model, **config, attention=args.attention)

    @torch.inference_mode()
    def generate(batch, new_tokens):
        ids = torch.tensor(batch, device=device)
        options = dict(do_sample=False, eos_token_id=None, pad_token_id=0)
        options |= dict(max_new_tokens=new_tokens, min_new_tokens=new_tokens)
        out = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return out[:, ids.shape[1] :].tolist()

    def timed(function, *args):
        start = time.perf_counter()
        return function(*args), time.perf_counter() - start  # both wait for their tokens

    generate(tokens[:1], 2)  # warm up
    engine.generate(tokens[:1], SamplingParams(max_new_tokens=1), False)
    batches = [tokens[i : i + B] for i in range(0, len(tokens), B)]
    half, params = len(batches) // 2, SamplingParams(max_new_tokens=output)
    found = [timed(generate, batch, output) for batch in batches[:half]]
    ours, our_seconds = timed(engine.generate, tokens, params, False)  # amid, should it drift
    found += [timed(generate, batch, output) for batch in batches[half:]]
    their_tokens = [row for batch, _ in found for row in batch]
    equal = sum(a == b for row, c in zip(their_tokens, ours) for a, b in zip(row, c.tokens))
    total = len(tokens) * args.seq_len
    return {
        "transformers_tokens_per_s": total / sum(seconds for _, seconds in found),
        "sarathi_tokens_per_s": total / our_seconds,
        "equal_tokens": equal / (len(tokens) * output),
    }


def advise(model, rows, args):
    """Which chunk size suits this machine: the one with the largest gain that its rates predict.

    For each chunk size at its own balanced ratio P:D = C / (B - 1), one decode-maximal batch
    replaces C - (B - 1) prefill tokens at the best rate and B - 1 decodes of a decode-only batch
    (SARATHI §4.4, §5.1.3). Matrix products are timed bare at each size; attention costs each token
    what it did in Table 2. Returns `product_ms` and `predicted_gain`, by size, `favoured_chunk`.
    """
    B, alone = args.batch, rows["prefill-only"]
    sizes = sorted({*(c for c in CANDIDATE_CHUNKS if B < c <= args.seq_len), args.chunk})
    products = {c: measure.bare_products(model, c, 0) for c in (B, *sizes)}
    timings = measure.interleaved(products, model.device, repeats=5)
    product_ms = {c: timing.ms for c, timing in timings.items()}
    best_rate = min(product_ms[c] / c for c in sizes)
    prefill_attention = alone["attention_ms"] / alone["prefill_tokens"]
    decode_attention = rows["decode-only"]["attention_ms"] / B
    gains = {}
    for chunk in sizes:
        prefill, decodes = chunk - (B - 1), B - 1
        attention = prefill * prefill_attention + decodes * decode_attention
        apart = prefill * best_rate + decodes * product_ms[B] / B + attention
        gains[chunk] = apart / (product_ms[chunk] + attention)
    best = max(gains, key=gains.get)
    return {"product_ms": product_ms, "predicted_gain": gains, "favoured_chunk": best}


def conclude(rows, policy_rows, advice, args):
    """One paragraph in plain words."""
    decode, hybrid = (rows[name]["decode_token_ms"] for name in ("decode-only", "decode-maximal"))
    less = f"{hybrid:.2f} ms riding with a chunk, {decode / (hybrid or 1):.1f}x less"
    riding = less if hybrid > 0 else "nothing riding"
    text = f"3. A decode costs {decode:.2f} ms in a batch of its own and {riding}."
    if gain := policy_rows.get("sarathi", {}).get("gain"):
        text += f" Served by sarathi, this load runs at {gain:.2f}x request-level's throughput."
    products = (f"{ms / c:.2f} at {c}" for c, ms in advice["product_ms"].items())
    text += f"\n   Matrix products alone, in ms per token: {', '.join(products)} tokens.\n  "
    best, gains = advice["favoured_chunk"], advice["predicted_gain"]
    if best == args.chunk:
        here = f"Chunk {best} is what this machine's balance favours"
        return f"{text} {here}: {gains[best]:.2f}x is to be expected."
    return (
        f"{text} This machine's balance favours --chunk {best}: from its measured rates a gain of\n"
        f"   {gains[best]:.2f}x is to be expected there, at its own P:D of "
        f"{best / (args.batch - 1):.0f}, against {gains[args.chunk]:.2f}x at {args.chunk}."
    )
