"""The experiments of bench.py: each returns what it measured as plain numbers, and prints nothing.

Read first: engine.py and measure.py. Read next: bench.py, which prints the tables.
"""

import platform
import random
import statistics
import tempfile
import time
from functools import partial

import numpy as np
import torch

import measure
from attention import make_attention
from engine import Engine
from kv_cache import KVCache, Pages
from measure import interleaved
from model import GPT, FlatBatch, Span
from sampling import SamplingParams
from scheduler import POLICIES, Request, make_scheduler

SPECS = {name: (name, {}) for name in POLICIES} | {"orca-best": ("orca", {"prefills": 1})}
CANDIDATE_CHUNKS = (32, 64, 128, 256, 512, 1024)

# -----------------------------------------------------------------------------------------------------
# the machine


def describe_machine(model, args, rows):
    """What the numbers depend on, and the limits that they are compared with.

    Among others `flops_per_s` and `bytes_per_s`, measured, `ridge_tokens`, the rows in a batch for which computing
    (two flops for each weight and row) takes as long as reading the weights, and `schedule_us`, microseconds. `rows` is
    how many rows the products are measured with.
    """
    device = model.device
    products = measure.bare_products(model, rows, 0)
    seconds = interleaved({"products": products}, device)["products"].ms / 1e3
    rate = measure.product_flops(model, rows, 0) / seconds
    bandwidth = measure.memory_bandwidth(device)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name(),
        "dtype": args.dtype, "model": args.init_from or args.model,
        "parameters": sum(p.numel() for p in model.parameters()),
        "threads": torch.get_num_threads(), "torch": torch.__version__, "compiled": args.compile,
        "flops_per_s": rate, "bytes_per_s": bandwidth,
        "ridge_tokens": rate / bandwidth * model.dtype.itemsize / 2,
        "schedule_us": schedule_us(),
    }


def processor_name():
    """The CPU's name, as well as it can be found."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def schedule_us(running=128, waiting=1000):
    """Microseconds that one `schedule()` takes with so many running and waiting: the slowest policy's median."""
    medians = []
    for policy in POLICIES:
        scheduler = make_scheduler(policy, Pages(running, 2048), chunk=512, max_batch=running, max_len=2048)
        for i in range(running + waiting):
            scheduler.add(Request(i, [0] * 1000, 1000, 100))
        while request := scheduler.admit():
            request.tokens.append(0)
            request.num_computed = 1000  # it decodes
        times = []
        for _ in range(200):
            start = time.perf_counter()
            scheduler.schedule()
            times.append(time.perf_counter() - start)
        medians.append(statistics.median(times) * 1e6)
    return max(medians)


# -----------------------------------------------------------------------------------------------------
# what a decode costs: SARATHI, Table 2


def decode_maximal(model, machine, args):
    """Time a chunk alone, B decodes alone, and the chunk with B - 1 decodes, all at a context of seq_len.

    Returns (rows, speedup). `rows` maps the batch to its numbers, times in ms; `speedup` says how many times cheaper
    a decode is in the hybrid batch than in the decode-only one: in all, in the linear layers, and in the bare
    products; None where its cost in the hybrid batch is lost in the noise.

    A decode of the hybrid batch costs what the batch takes longer than the same chunk alone, divided by the number of
    decodes (SARATHI §5.1.1). Limits: for the linear layers the same matrix products run bare; for attention the
    larger of its flops over the product rate and of its keys and values over the bandwidth; for the total the bare
    products and the attention alone, both measured.
    """
    B, context = args.batch, args.seq_len
    cache = KVCache(model.config, B, context, model.device, model.dtype)
    cache.data.normal_()
    attention = make_attention(model.config, cache, args.attention)
    length = args.chunk - (B - 1)
    chunk = [Span([0], context - length, [1] * length)]
    decodes = [Span([slot], context - 1, [1]) for slot in range(B)]
    batches = {"prefill-only": (chunk, length, 0), "decode-only": (decodes, 0, B),
               "decode-maximal": (chunk + decodes[1:], length, B - 1)}
    iterate(model, [Span([0], 0, [1] * context)], attention, cache)  # so that no timed run asks the system for memory

    variants, watched = {}, {}
    for name, (spans, prefill_tokens, num_decodes) in batches.items():
        watched[name] = {"linear": [], "attention": []}
        variants[name, "total"] = partial(iterate, model, spans, attention, cache)
        variants[name, "watched"] = partial(iterate_watched, model, spans, attention, cache, watched[name])
        variants[name, "bare"] = measure.bare_products(model, prefill_tokens + num_decodes, len(spans))
        variants[name, "attention_alone"] = attention_alone(model, spans, attention, cache)
    timings = interleaved(variants, model.device)
    for name, parts in watched.items():
        for part, values in parts.items():
            timings[name, part] = measure.summarize(values[measure.WARMUP :])
        if args.compile:  # what is fused into the linear layers cannot be told apart from them
            total = timings[name, "total"]
            timings[name, "linear"] = total._replace(ms=total.ms - timings[name, "attention"].ms)

    rows = {}
    for name, (spans, prefill_tokens, num_decodes) in batches.items():
        total, linear, attn = (timings[name, part].ms for part in ("total", "linear", "attention"))
        extents = [(span.pages, span.start, len(span.tokens)) for span in spans]
        flops, kv_bytes = measure.attention_cost(model.config, extents, model.dtype)
        bare, alone = timings[name, "bare"].ms, timings[name, "attention_alone"].ms
        rows[name] = {
            "prefill_tokens": prefill_tokens, "decodes": num_decodes, "linear_ms": linear, "bare_ms": bare,
            "attention_ms": attn, "attention_alone_ms": alone,
            "attention_limit_ms": 1e3 * max(flops / machine["flops_per_s"], kv_bytes / machine["bytes_per_s"]),
            "other_ms": max(0.0, total - linear - attn),
            "total_ms": total, "limit_ms": bare + alone, "spread": timings[name, "total"].spread,
            "prefill_token_ms": None, "decode_token_ms": None,
        }
    prefill, decode, hybrid = rows.values()
    prefill["prefill_token_ms"] = hybrid["prefill_token_ms"] = prefill["total_ms"] / length
    decode["decode_token_ms"] = decode["total_ms"] / B
    hybrid["decode_token_ms"] = (hybrid["total_ms"] - prefill["total_ms"]) / (B - 1)

    speedup = {}
    for part in ("total", "linear", "bare"):
        extra = timings["decode-maximal", part].ms - timings["prefill-only", part].ms
        noise = timings["prefill-only", part].ms * timings["prefill-only", part].spread / 2
        speedup[part] = timings["decode-only", part].ms / B / (extra / (B - 1)) if extra > noise else None
    return rows, speedup


def iterate(model, spans, attention, cache):
    """One greedy iteration, from spans to tokens."""
    return model(FlatBatch.build(spans, attention), cache).argmax(dim=-1).tolist()


def iterate_watched(model, spans, attention, cache, watched):
    """The same, adding the milliseconds of linear layers and of attention to the lists in `watched`."""
    attention_watch = measure.Stopwatch(model.device)
    with measure.watch_linear(model) as linear_watch:
        batch = measure.watch_attention(FlatBatch.build(spans, attention), attention_watch)
        model(batch, cache).argmax(dim=-1).tolist()
    measure.synchronize(model.device)
    watched["linear"].append(linear_watch.read_ms())
    watched["attention"].append(attention_watch.read_ms())


def attention_alone(model, spans, attention, cache):
    """A function that runs the attention of one iteration in all layers, and nothing else."""
    batch = FlatBatch.build(spans, attention)
    q = torch.randn(len(batch.tokens), model.config.n_head, model.config.head_dim,
                    device=model.device, dtype=model.dtype)

    @torch.inference_mode()
    def run():
        for layer in range(model.config.n_layer):
            batch.attend(q, *cache.layer(layer))

    return run


def paged_attention(model, page_size, decodes, context, backend="auto"):
    """What pages cost: the time of the attention of a decode-only batch, all layers, under three layouts.

    Returns {"slots", "consecutive", "scattered"} -> Timing: one slot for each request, and pages of `page_size` that
    follow each other, or lie anywhere.
    """
    variants = {}
    for name, size in (("slots", context), ("consecutive", page_size), ("scattered", page_size)):
        pages = -(-context // size)
        cache = KVCache(model.config, decodes * pages, size, model.device, model.dtype, context)
        cache.data.normal_()
        order = list(range(cache.pages))
        if name == "scattered":
            random.Random(0).shuffle(order)
        spans = [Span(order[i * pages : (i + 1) * pages], context - 1, [1]) for i in range(decodes)]
        variants[name] = attention_alone(model, spans, make_attention(model.config, cache, backend), cache)
    return interleaved(variants, model.device)


# -----------------------------------------------------------------------------------------------------
# the policies end to end


class BusyClock:
    """Seconds spent between `resume` and `pause`: the own time of an engine that takes turns with others."""

    def __init__(self):
        self.elapsed, self.resumed = 0.0, None

    def resume(self):
        """Let the time run."""
        self.resumed = time.perf_counter()

    def pause(self):
        """Stop the time."""
        self.elapsed += time.perf_counter() - self.resumed
        self.resumed = None

    def __call__(self):
        """The time, in seconds."""
        return self.elapsed + (time.perf_counter() - self.resumed if self.resumed else 0.0)


def output_tokens(args):
    """Output tokens of a request of seq_len tokens in all, at the ratio pd_ratio: at least 1, and so of the prompt."""
    return min(max(1, round(args.seq_len / (1 + args.pd_ratio))), args.seq_len - 1)


def workload(args, vocab_size):
    """[(prompt, max_new_tokens)] with prompt + output = seq_len tokens at the ratio pd_ratio, for every policy alike.

    The load is steady: everybody waits at time 0, and the first B requests want 1/B, 2/B, … of the output, as if
    the server had been running before; otherwise requests would begin and end in lockstep for ever.
    """
    output = output_tokens(args)
    rng = random.Random(args.seed)
    requests = []
    for i in range(args.requests):
        prompt = [rng.randrange(vocab_size) for _ in range(args.seq_len - output)]
        requests.append((prompt, max(1, output * min(i + 1, args.batch) // args.batch)))
    return requests


class PolicyRun:
    """One engine that serves the workload in its own time, and what was seen of it."""

    def __init__(self, model, name, requests, args):
        policy, options = SPECS[name]
        self.clock = BusyClock()
        self.engine = Engine(model, policy, args.chunk, args.batch, args.seq_len, attention=args.attention,
                             clock=self.clock, **options)
        # warm up: one long prefill, and decode batches of every size, for kernels that are compiled for each
        params = [SamplingParams(max_new_tokens=min(n, args.seq_len - 1)) for n in range(2, args.batch + 2)]
        self.engine.generate([[0] * (args.seq_len - 2)], SamplingParams(max_new_tokens=2), progress=False)
        self.engine.generate([[0]] * args.batch, params, progress=False)
        self.iterations, self.completions, self.stalls = [], [], []
        self._prefilled, self._last = 0, {}  # prefill tokens so far; those at each request's last token
        for prompt, max_new_tokens in requests:
            self.engine.add_request(prompt, SamplingParams(max_new_tokens=max_new_tokens), arrival=0.0)

    def step(self):
        """Run one iteration on the own clock."""
        self.clock.resume()
        events = self.engine.step()
        measure.synchronize(self.engine.cache.data.device)  # an iteration without new tokens does not wait for a GPU
        iteration = self.engine.last_iteration._replace(end=self.clock())
        self.clock.pause()
        self.iterations.append(iteration)
        self._prefilled += iteration.prefill_tokens
        now = iteration.end
        for event in events:
            if event.request_id in self._last:
                since, prefilled = self._last[event.request_id]
                if self._prefilled > prefilled:  # others' prefill came between two tokens: a generation stall
                    self.stalls.append(now - since)
            self._last[event.request_id] = now, self._prefilled
            if event.completion:
                self.completions.append(event.completion)

    def row(self):
        """The line of the table: tokens per second, seconds, and counts."""
        tokens = sum(len(c.prompt) + len(c.tokens) for c in self.completions)
        tbt = [gap for c in self.completions for gap in c.tbt]
        computed = sum(i.prefill_tokens + i.decode_tokens for i in self.iterations)
        return {
            "tokens_per_s": tokens / self.clock.elapsed,
            "p50_ttft_s": float(np.median([c.ttft for c in self.completions])),
            "p99_tbt_s": float(np.quantile(tbt, 0.99)) if tbt else 0.0,
            "longest_stall_s": max(self.stalls, default=0.0),
            "iterations": len(self.iterations),
            "tokens_per_iteration": computed / len(self.iterations),
        }


def end_to_end(model, args):
    """Serve the same requests under each policy. Returns (name -> row of the table, name -> list of Iteration).

    On a CPU the engines take turns, and the one that has used the least time is next: when the machine slows down for
    a while, it slows down for all of them. A GPU is steadier and short of memory: there one cache is held at a time.
    """
    requests = workload(args, model.config.vocab_size)
    rows, timelines = {}, {}
    groups = [[name] for name in args.policies] if model.device.type == "cuda" else [args.policies]
    for names in groups:
        runs = {name: PolicyRun(model, name, requests, args) for name in names}
        while active := [run for run in runs.values() if run.engine.has_work]:
            min(active, key=lambda run: run.clock.elapsed).step()
        rows |= {name: run.row() for name, run in runs.items()}
        timelines |= {name: run.iterations for name, run in runs.items()}
        del runs  # and the caches, before others are made
    baseline = rows.get("request-level")
    for row in rows.values():
        row["gain"] = row["tokens_per_s"] / baseline["tokens_per_s"] if baseline else None
    return rows, timelines


def against_transformers(model, args):
    """Throughput of transformers' generate and of the sarathi policy: same weights, dtype, requests and batch.

    Returns both in tokens per second, prompt and output, and the fraction of equal output tokens (in 16 bits, rounding
    lets greedy texts part). Without --init-from, both load the same random LLaMA.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    c = model.config
    if args.init_from:
        theirs = AutoModelForCausalLM.from_pretrained(args.init_from, dtype=model.dtype).to(model.device).eval()
    else:
        config = LlamaConfig(
            vocab_size=c.vocab_size, hidden_size=c.n_embd, intermediate_size=c.n_inner, num_hidden_layers=c.n_layer,
            num_attention_heads=c.n_head, num_key_value_heads=c.n_kv_head, head_dim=c.head_dim,
            max_position_embeddings=c.max_positions, tie_word_embeddings=c.tie_embeddings, rms_norm_eps=c.norm_eps)
        theirs = LlamaForCausalLM(config).to(device=model.device, dtype=model.dtype).eval()
        with tempfile.TemporaryDirectory() as directory:
            theirs.save_pretrained(directory)
            model = GPT.from_pretrained(directory, model.device, model.dtype)
        if args.compile:
            model.compile()
    prompts, output = [prompt for prompt, _ in workload(args, c.vocab_size)], output_tokens(args)
    engine = Engine(model, "sarathi", args.chunk, args.batch, args.seq_len, attention=args.attention)

    @torch.inference_mode()
    def generate(prompts, new_tokens):
        ids = torch.tensor(prompts, device=model.device)
        out = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False,
                              min_new_tokens=new_tokens, eos_token_id=None, pad_token_id=0)
        return out[:, ids.shape[1]:].tolist()

    def timed(function, *args):
        measure.synchronize(model.device)
        start = time.perf_counter()
        result = function(*args)
        measure.synchronize(model.device)
        return result, time.perf_counter() - start

    params = SamplingParams(max_new_tokens=output)
    generate(prompts[:1], 2)  # warm up
    engine.generate(prompts[:1], SamplingParams(max_new_tokens=1), False)
    batches = [prompts[i : i + args.batch] for i in range(0, len(prompts), args.batch)]
    half = len(batches) // 2
    first = [timed(generate, batch, output) for batch in batches[:half]]
    ours, our_seconds = timed(engine.generate, prompts, params, False)  # in the middle, should the machine drift
    theirs_timed = first + [timed(generate, batch, output) for batch in batches[half:]]
    their_tokens = [tokens for batch, _ in theirs_timed for tokens in batch]
    equal = sum(a == b for row, c in zip(their_tokens, ours) for a, b in zip(row, c.tokens))
    tokens = len(prompts) * args.seq_len
    return {"transformers_tokens_per_s": tokens / sum(seconds for _, seconds in theirs_timed),
            "sarathi_tokens_per_s": tokens / our_seconds, "equal_tokens": equal / (len(prompts) * output)}


# -----------------------------------------------------------------------------------------------------
# which chunk size suits the machine


def advise(model, rows, args):
    """Which chunk size suits this machine: the one with the largest gain that its measured rates predict.

    For each chunk size at its own balanced ratio P:D = C / (B - 1), one decode-maximal batch replaces C - (B - 1)
    prefill tokens at the best rate and B - 1 decodes of a decode-only batch (SARATHI §4.4, §5.1.3). Matrix
    products are timed bare at each size; attention costs each token what it did in Table 2. Returns `product_ms` and
    `predicted_gain`, each by number of tokens, and `favoured_chunk`, the one with the largest gain.
    """
    B = args.batch
    sizes = sorted({*(c for c in CANDIDATE_CHUNKS if B < c <= args.seq_len), args.chunk})
    products = interleaved({c: measure.bare_products(model, c, 0) for c in (B, *sizes)}, model.device, repeats=5)
    prefill_attention = rows["prefill-only"]["attention_ms"] / rows["prefill-only"]["prefill_tokens"]
    decode_attention = rows["decode-only"]["attention_ms"] / B
    best_rate = min(products[c].ms / c for c in sizes)
    gains = {}
    for chunk in sizes:
        prefill, decodes = chunk - (B - 1), B - 1
        attention = prefill * prefill_attention + decodes * decode_attention
        apart = prefill * best_rate + decodes * products[B].ms / B + attention
        gains[chunk] = apart / (products[chunk].ms + attention)
    return {"product_ms": {c: products[c].ms for c in (B, *sizes)}, "predicted_gain": gains,
            "favoured_chunk": max(gains, key=gains.get)}
