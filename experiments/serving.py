"""Serve arriving requests in real time, and find the rate that a policy can keep up with.

    python bench.py serve --qps 1.5         every policy on the same arrivals
    python bench.py capacity --slo strict   the highest rate at which each meets the SLO

Both measure the time of a decode iteration first, of which the SLO is a multiple (Sarathi-Serve
§5.1). An ablation is a list of policies, as in its Table 4:

    python bench.py serve --policies hybrid-only,chunked-only,sarathi-serve

Read first: run.py, which measures what is printed here.
"""

import csv
import random
import statistics
import sys
from argparse import ArgumentTypeError
from contextlib import suppress

from tqdm import tqdm

from engine import Runner
from experiments import run, workload
from experiments.machine import describe_machine
from experiments.measure import attention_alone, interleaved
from experiments.metrics import find_stalls, percentiles, request_rows
from experiments.options import load_model, machine_lines, number, policy_names, whole, write_json
from experiments.tables import print_table, show
from kv_cache import Span
from policies import POLICIES
from policies.config import EngineConfig
from policies.priority import PRIORITIES
from policies.slo import MAX_DELAY_S, SLOS

DEFAULTS = {"chunk": (128, 512), "batch": (32, 128), "max_len": (1024, 8192)}  # on a CPU, on a GPU
REQUESTS = {"serve": (48, 500), "capacity": (80, 400)}


def slo_target(text):
    """--slo: "strict", "relaxed" or a number of seconds."""
    with suppress(ArgumentTypeError):
        return text if text in SLOS else number(above=0)(text)
    allowed = f"{', '.join(SLOS)} or a finite number of seconds above 0"
    raise ArgumentTypeError(f"{text}: must be {allowed}")


def class_shares(text):
    """--classes: {class: share}, with the rest in normal; {} for none."""
    shares = {}
    for part in filter(None, text.split(",")):
        name, _, share = part.strip().partition("=")
        if name not in PRIORITIES or name in shares:
            allowed = f"must be one of {', '.join(PRIORITIES)}, once, =, and a share of 0 … 1"
            raise ArgumentTypeError(f"{part}: {allowed}")
        shares[name] = number(least=0, most=1)(share)
    rest = 1 - sum(shares.values())
    if rest < -1e-9:
        raise ArgumentTypeError(f"{text}: the shares must not add up to more than 1")
    return shares and shares | {"normal": shares.get("normal", 0.0) + max(0.0, rest)}


def add_options(parser, command):
    """The options of `command`, "serve" or "capacity"."""
    parser.set_defaults(command=command)
    serving, add, size = command == "serve", parser.add, dict(type=whole(1))
    defaults = DEFAULTS | {"requests": REQUESTS[command]}
    on = {name: "{} on a CPU, {} on a GPU".format(*both) for name, both in defaults.items()}
    if serving:
        shown = "half of what is estimated to be possible, or the trace's own"
        add("--qps", "requests per second on average", shown=shown, type=number(above=0))
    add("--requests", "how many requests arrive", shown=on["requests"], **size)
    lengths = f"{', '.join(workload.LENGTHS)}, scaled to --max-len, or PROMPT+OUTPUT tokens"
    lengths = f"of prompts and outputs: {lengths}; several, with commas, follow each other"
    add("--lengths", lengths, "sharegpt4")
    if serving:
        add("--long-prompt", "one more request, the first, has so many prompt tokens", **size)
        shares = "share of each class of the policy `priority`, as in realtime=0.1,low=0.5"
        add("--classes", shares, "", shown="all normal", type=class_shares)
    trace = "lengths and arrivals from a log with columns " + ", ".join(workload.TRACE_COLUMNS)
    add("--trace", trace, metavar="FILE.csv")
    add("--trace-scale", "multiplies the lengths in it", 1.0, type=number(above=0, most=1))
    policies = f"comma-separated, from {', '.join(POLICIES)}, or my_policy.py:ClassName; "
    policies += "sarathi-serve:64 has a chunk of its own"
    some = "vllm,orca,sarathi-serve,dynamic"
    add("--policies", policies, some, type=policy_names(chunks=True))
    add("--chunk", "C, the chunk size and token budget, in tokens", shown=on["chunk"], **size)
    add("--batch", "B, the most requests at once", shown=on["batch"], **size)
    add("--max-len", "the longest prompt and output", shown=on["max_len"], type=whole(3))
    pages = "tokens in a page, or max for a slot per request; several, with commas: each with each"
    add("--page-size", pages, shown="64, or max if that is less")
    third = "a third of --batch requests of --max-len"
    add("--kv-tokens", "tokens in the cache, for every policy and page size", shown=third, **size)
    add("--max-waiting", "refuse who finds so many in the queue", shown="no limit", **size)
    slo = "of P99 TBT: strict or relaxed, 5 or 25 decode iterations, or seconds"
    add("--slo", slo, "strict", type=slo_target)
    parser.add_model_options("llama3-8b on a GPU with 75 GB or more, else llama-160m")
    plot = "latencies and timelines" if serving else "capacities, and latency against rate"
    trace = "write what happened when, for https://ui.perfetto.dev"
    more = {"csv": "write a row for each request and policy", "chrome_trace": trace}
    parser.add_files(plot=f"draw {plot}", **more if serving else {})


def fill_in(args, on_gpu):
    """Set the options whose default depends on the machine, here or simulated."""
    for option, defaults in (DEFAULTS | {"requests": REQUESTS[args.command]}).items():
        setattr(args, option, getattr(args, option) or defaults[on_gpu])


def check(parser, args):
    """Exit with a message if options make no sense together. Sets page_size and kv_tokens.

    Raises ValueError for policies that make no sense.
    """
    longest, long_prompt = args.max_len, getattr(args, "long_prompt", None)
    if args.chunk > max(longest, *DEFAULTS["chunk"]):
        parser.error(f"--chunk {args.chunk}: must be at most --max-len {longest}")
    if long_prompt and long_prompt >= longest:
        parser.error(f"--long-prompt {long_prompt}: must be below --max-len {longest}")
    if args.trace and (args.lengths != "sharegpt4" or long_prompt):
        parser.error("--trace: has lengths of its own, no --lengths and no --long-prompt")
    if args.trace_scale != 1 and not args.trace:
        parser.error("--trace-scale: goes with --trace")
    sizes = [text.strip() for text in (args.page_size or str(min(64, longest))).split(",")]
    sizes = list(dict.fromkeys(str(longest) if size == "max" else size for size in sizes))
    for size in sizes:
        if not size.isdecimal() or not 1 <= int(size) <= longest:
            parser.error(f"--page-size {size}: must be 1 … {longest} (--max-len) or max")
    args.page_size = [int(size) for size in sizes]
    needed = max(-(-longest // size) * size for size in args.page_size)  # of one request
    args.kv_tokens = args.kv_tokens or max(1, args.batch // 3) * needed
    if args.kv_tokens < needed:
        takes = f"what a request of --max-len {longest} takes in whole pages"
        parser.error(f"--kv-tokens {args.kv_tokens}: must be at least {needed}, {takes}")
    run.plan(args.policies, args.page_size, make_config(args), tbt_slo_s=1.0)


def make_config(args):
    """The EngineConfig of all runs, but for what run.plan changes: its pages are of one token."""
    limits = dict(chunk=args.chunk, max_batch=args.batch, max_waiting=args.max_waiting)
    memory = dict(max_len=args.max_len, page_size=1, pages=args.kv_tokens)
    return EngineConfig(**limits, **memory, attention=args.attention)


def make_lengths(args):
    """[(prompt_len, output_len)] for --lengths and --long-prompt, and what to call them."""
    longest, count, asked = args.max_len, args.requests, args.lengths
    if asked in workload.LENGTHS:
        lengths = workload.sample_lengths(asked, count, longest, args.seed)
        name = f"{count} requests with the lengths of {asked} scaled to {longest:,} tokens"
    else:
        pairs = [[part.strip() for part in pair.split("+")] for pair in asked.split(",")]
        if any(len(pair) != 2 or not "".join(pair).isdecimal() for pair in pairs):
            names = ", ".join(workload.LENGTHS)
            allowed = f"{names} or PROMPT+OUTPUT, as in 500+50, or several with commas"
            raise ValueError(f"--lengths {asked!r}: must be {allowed}")
        if len(pairs) > count:
            raise ValueError(f"--requests {count}: must be at least {len(pairs)}, as --lengths has")
        lengths = []
        for i, pair in enumerate(pairs, start=1):
            share = count * i // len(pairs) - len(lengths)
            lengths += workload.fixed_lengths(*map(int, pair), share, longest)
        name = f"{count} requests of {asked} tokens"
    if prompt := getattr(args, "long_prompt", None):
        output = min(16, longest - prompt)
        lengths = workload.fixed_lengths(prompt, output, 1, longest) + lengths
        name += f", after one with a prompt of {prompt:,}"
    return lengths, name


def make_workload(args):
    """(arrivals at a rate, a function; what to call them). Without a rate a trace keeps its own."""
    shares = getattr(args, "classes", None) or {"normal": 1}

    def draw_classes(arrivals):
        names = random.Random(args.seed).choices([*shares], shares.values(), k=len(arrivals))
        return [arrival._replace(priority=name) for arrival, name in zip(arrivals, names)]

    if args.trace:
        limits = args.max_len, args.trace_scale, args.requests
        arrivals, left_out = workload.read_trace(args.trace, *limits)
        name = f"{len(arrivals)} requests of {args.trace}, lengths times {args.trace_scale:g}"
        name, arrivals = f"{name} ({left_out} left out)", draw_classes(arrivals)
        return lambda qps: arrivals if qps is None else workload.rescale(arrivals, qps), name
    lengths, name = make_lengths(args)
    poisson = lambda qps: draw_classes(workload.poisson(lengths, qps, args.seed))
    return poisson, f"{name}, Poisson arrivals"


def paged_attention(model, page_size, decodes, context, attention="auto"):
    """What pages cost in the attention of a decode-only batch, over the time with one for each.

    {"consecutive": of pages that follow each other, "scattered"}.
    """
    variants, sizes = {}, {"slots": context, "consecutive": page_size, "scattered": page_size}
    for name, size in sizes.items():
        pages = -(-context // size)
        order = list(range(decodes * pages))
        runner = Runner(model, len(order), size, context, attention)
        runner.cache.data.normal_()
        if name == "scattered":
            random.Random(0).shuffle(order)
        starts = range(0, len(order), pages)
        spans = [Span(order[i : i + pages], context - 1, [1]) for i in starts]
        variants[name] = attention_alone(runner, spans)
    slots, *times = interleaved(variants, model.device).values()
    return {name: its.ms / slots.ms for name, its in zip(("consecutive", "scattered"), times)}


class RealMachine:
    """This machine and a model on it: how fast it is, what the heading says, a way to serve."""

    micro_batches = 1  # that it works on at once

    def __init__(self, args, config):
        self.model = load_model(args, "max_len", gpu_model="llama3-8b", gpu_bytes=75e9)
        self.base = run.measure_base(self.model, config)
        self.machine, costs = describe_machine(self.model, args, args.chunk), {}
        self.machine["paged_attention"], self.lines, self.seed = costs, "", args.seed
        what = min(8, args.batch), args.max_len - args.max_len // 8, args.attention
        for size in [size for size in args.page_size if size < args.max_len]:
            costs[str(size)] = its = paged_attention(self.model, size, *what)
            self.lines += (
                f"attention of decodes in pages of {size}: {its['consecutive']:.2f}x the time in "
                f"slots if they follow each other, {its['scattered']:.2f}x if they are scattered\n"
            )

    def serve(self, config, arrivals, **more):
        """run.serve with random prompts."""
        prompts = workload.prompts(arrivals, self.model.config.vocab_size, self.seed)
        return run.serve(self.model, config, arrivals, prompts, **more)


def print_heading(machine, args, load, arrivals, tbt_slo_s):
    """What all the numbers depend on."""
    base, kv_tokens = machine.base, args.kv_tokens
    prompt, output = (statistics.median(column) for column in list(zip(*arrivals))[1:3])
    multiple = f"{args.slo}, {SLOS[args.slo]} of these" if args.slo in SLOS else "as asked for"
    span, rate = "", ""
    if args.command == "serve":
        span = f"; the last comes after {arrivals[-1].time:,.0f} s"
        rate = f" at {args.qps:g} a second" if args.qps else " at its own rate"
    print(
        f"{machine_lines(machine.machine)}"
        f"load: {load}{rate}; median prompt {prompt:g}, output {output:g} tokens{span}\n"
        f"memory: {kv_tokens:,} tokens of KV cache, {kv_tokens // args.max_len} requests if each "
        f"reserves {args.max_len:,}; pages of {', '.join(map(str, args.page_size))} tokens\n"
        f"at most {args.batch} requests at once; chunk {args.chunk}\n{machine.lines}"
        f"a decode iteration takes {base.seconds:.4f} s (batch {base.decodes}, context "
        f"{base.context:,}, no prefill)\nSLO: P99 TBT at most {tbt_slo_s:.3f} s ({multiple}), "
        f"median scheduling delay at most {MAX_DELAY_S:g} s\n"
    )


def print_rows(heads, spec, rows):
    """A table of numbers with the format `spec`, or that of their column, as in "stalls|d"."""
    columns = [head.partition("|")[::2] for head in heads.split(", ")]
    print_table([(head, own or spec) for head, own in columns], rows)


def print_runs(rows, tbt_slo_s):
    """The tables of `serve`."""
    quantiles, latencies = ("p50", "p90", "p99"), ("ttft_s", "scheduling_delay_s", "latency_s")
    heads = "seconds, TTFT P50, P90, P99, delay P50, P90, P99, latency P50, P90, P99"
    table = [[n, *(row[key][p] for key in latencies for p in quantiles)] for n, row in rows.items()]
    print_rows(heads, ",.2f", table)
    print(
        "\nTTFT: arrival to first token; delay: arrival to first being scheduled; latency: arrival "
        "to last token\n"
    )
    heads = "seconds, TBT P50, P90, P99, stalls|d, over SLO|d, longest, of request|d, caused by|d"
    table, parts = [], ("seconds", "request_id", "caused_by", "prefill_tokens")
    for name, row in rows.items():
        stalls, met = row["stalls"], "yes" if row["met"] else "no"
        tbt, longest = row["tbt_s"], stalls["longest"] or {}
        table.append([name, *map(tbt.get, quantiles), stalls["count"], stalls["over_slo"]])
        table[-1] += [*map(longest.get, parts), met]
    print_rows(f"{heads}, prefill|d, meets SLO", ",.3f", table)
    print(
        "\nTBT: between two tokens of a request, preemptions included; a stall is one in which "
        "others' prefill was\ncomputed, and is caused by the request with the most of it; over "
        f"SLO: longer than {tbt_slo_s:.3f} s\n"
    )
    heads = "batches, tokens/s, prefill %, hybrid %, decode %, tokens each, at once|,.1f, peak|d, "
    parts = "tokens_per_iteration running_mean running_peak preemptions recomputed_tokens refused"
    table = []
    for name, row in rows.items():
        shares = [
            row[kind] and 100 * row[kind] for kind in ("prefill_only", "hybrid", "decode_only")
        ]
        more = [row[part] for part in parts.split()]
        table.append([name, row["tokens_per_s"], *shares, *more, 100 * row["own_fraction"]])
    print_rows(f"{heads}preempted|d, recomputed, refused|d, own time %|,.1f", ",.0f", table)
    print(
        "\ntokens/s: prompt and output; at once: requests running, mean over time and peak; "
        "recomputed: tokens of\npreempted requests; own time: all of a step but the forward pass "
        "and fetching its tokens"
    )


def print_classes(runs):
    """A row for each policy and class of requests."""
    table = []
    for name, seen in runs.items():
        for priority, its_name in enumerate(PRIORITIES):
            if its := [c for c in seen.completions if c.priority == priority]:
                ttft = percentiles(c.ttft for c in its)
                tbt = percentiles(gap for c in its for gap in c.tbt)
                times = ttft["p50"], ttft["p90"], ttft["p99"], tbt["p50"], tbt["p99"]
                table.append([name, its_name, len(its), *times, sum(c.preemptions for c in its)])
    heads = "seconds, class, requests|d, TTFT P50, P90, P99, TBT P50|,.3f, P99|,.3f, preempted|d"
    print()
    print_rows(heads, ",.2f", table)


def print_capacities(results):
    """The table of `capacity`. Results: name -> {"capacity_qps", "points"}."""
    baseline, table = results.get("vllm", {}).get("capacity_qps"), []
    for name, result in results.items():
        qps, points = result["capacity_qps"], result["points"]
        at = next((point for point in points if point["met"] and point["qps"] == qps), {})
        bound = "below " if not qps else "at least " if all(p["met"] for p in points) else ""
        found = bound + show(qps or min(point["qps"] for point in points), ",.2f")
        gain = qps / baseline if baseline and qps else None
        seen = [at.get(key) for key in ("p50_ttft_s", "p99_tbt_s", "tokens_per_s")]
        table.append([name, found, gain, *seen, len(points)])
    heads = "policy, capacity in requests/s, relative to vllm|.2fx, P50 TTFT s, P99 TBT s|,.3f, "
    print()
    print_rows(f"{heads}tokens/s|,.0f, runs|d", ",.2f", table)
    print(
        "\ncapacity: the highest rate that was met, 5 % below one that was not, twice; latencies "
        "and tokens/s (prompt and\noutput) are those at this rate"
    )


def serve_with_bar(machine, name, config, arrivals, **more):
    """Serve with a progress bar, on a terminal."""
    with tqdm(total=len(arrivals), desc=name, disable=None, leave=False) as bar:
        return machine.serve(config, arrivals, progress=bar.update, **more)


def serve_all(machine, configs, arrivals, args, tbt_slo_s):
    """Run all of `configs`, print tables, write files. Returns name -> the numbers of its run."""
    runs, requests = {}, []
    for name, config in configs.items():
        seen = runs[name] = serve_with_bar(machine, name, config, arrivals)
        if not sys.stderr.isatty():
            count = len(seen.completions)
            print(f"{name}: {count} requests in {seen.seconds:.0f} s", file=sys.stderr)
        table = request_rows(seen.completions, find_stalls(seen.completions, seen.iterations))
        requests += [{"policy": name} | row for row in table]
    rows = {name: run.summarize(seen, tbt_slo_s) for name, seen in runs.items()}
    print_runs(rows, tbt_slo_s)
    if args.classes:
        print_classes(runs)
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, requests[0])
            writer.writeheader()
            writer.writerows(requests)
    records = {name: (seen.completions, seen.iterations) for name, seen in runs.items()}
    if args.chrome_trace:
        from views.chrome_trace import write_chrome_trace

        write_chrome_trace(args.chrome_trace, records)
    if args.plot:
        from views.serving import plot_serving

        plot_serving(records, machine.machine, args.plot, slo_s=tbt_slo_s)
    return rows


def search_all(machine, configs, arrivals_at, start, args, tbt_slo_s):
    """Search the capacity of each, print them. Returns name -> {"capacity_qps", "points"}."""
    results = {}
    for name, config in configs.items():

        def run_at_rate(qps, name=name, config=config):
            arrivals = arrivals_at(qps)
            hopeless = run.Hopeless(arrivals, tbt_slo_s)
            seen = serve_with_bar(machine, name, config, arrivals, hopeless=hopeless)
            point = run.rate_point(qps, run.summarize(seen, tbt_slo_s))
            verdict = "met" if point["met"] else f"not met: {point['cut_short'] or 'the SLO'}"
            tbt, delay = show(point["p99_tbt_s"], ",.3f"), show(point["p50_delay_s"], ",.2f")
            seen = f"P99 TBT {tbt} s, median delay {delay} s"
            print(f"{name}: {qps:.3f} requests/s, {seen}, {verdict}")
            return point

        qps, points = run.capacity(run_at_rate, start)
        results[name] = {"capacity_qps": qps, "points": points}
    print_capacities(results)
    if args.plot:
        from views.search import plot_capacity

        plot_capacity(results, machine.machine, args.plot, slo_s=tbt_slo_s)
    return results


def main(args, make_machine=RealMachine):
    """The command args.command, on make_machine(args, config). ValueError for a bad load or SLO."""
    arrivals_at, name = make_workload(args)  # what is wrong ends here, before a model is loaded
    serving, qps = args.command == "serve", getattr(args, "qps", None)
    own_rate = serving and args.trace and qps is None
    arrivals = arrivals_at(None if own_rate else qps or 1.0)
    config = make_config(args)
    machine = make_machine(args, config)
    base, tbt_slo_s = machine.base, run.slo_seconds(args.slo, machine.base)
    start = float(f"{machine.micro_batches * run.estimated_qps(base, arrivals) / 2:.2g}")
    if serving and not own_rate:
        args.qps = qps or start
        arrivals = arrivals_at(args.qps)
    print_heading(machine, args, name, arrivals, tbt_slo_s)
    configs = run.plan(args.policies, args.page_size, config, tbt_slo_s)
    report = {"command": args.command, "machine": machine.machine, "load": name}
    report |= {"base": base._asdict(), "slo_s": tbt_slo_s}
    if serving:
        report["runs"] = serve_all(machine, configs, arrivals, args, tbt_slo_s)
    else:
        report["results"] = search_all(machine, configs, arrivals_at, start, args, tbt_slo_s)
    write_json(args, report)
