"""Serve arriving requests in real time, and find the rate that a policy can keep up with.

    python bench.py serve --qps 1.5         every policy on the same arrivals: latencies, stalls, preemptions, batches
    python bench.py capacity --slo strict   the highest rate at which each policy meets the SLO (Sarathi-Serve §5.1)

Both measure the time of a decode iteration first, of which the SLO is a multiple. Ablations are lists of policies:

    python bench.py serve --policies hybrid-only,chunked-only,sarathi-serve     (Sarathi-Serve, Table 4)
    python bench.py serve --policies request-level,orca,sarathi:512,sarathi:256,sarathi:128

Read first: serving.py, which measures what is printed here.
"""

import csv
import json
import math
import random
import statistics
import sys
from functools import partial

import torch
from tqdm import tqdm

import cli
from chrome_trace import write_chrome_trace
from experiments import describe_machine, paged_attention
from metrics import find_stalls, percentiles, request_rows
from scheduler import PRIORITIES
from serving import (MAX_DELAY_S, SLOS, Hopeless, Settings, capacity, estimated_qps, measure_base, plan,
                     rate_point, serve, slo_seconds, specs, summarize)
from simulated_server import THIS, FittedServer, SimulatedServer, add_simulation_options, check_simulation_options
from workload import LENGTHS, fixed_lengths, poisson, prompts, read_trace, rescale, sample_lengths

DEFAULTS = {  # option -> (on a CPU, on a GPU)
    "chunk": (128, 512), "batch": (32, 128), "max_len": (1024, 8192),
    "serve": (48, 500), "capacity": (80, 400),  # --requests
}


def parse_args(argv):
    """The options of argv[0], "serve" or "capacity", checked. Exits with a message for one that makes no sense."""
    command, serving = argv[0], argv[0] == "serve"
    parser = cli.OptionParser(prog=f"bench.py {command}", description=__doc__.split("\n\n")[0])
    add = parser.add
    if serving:
        add("--qps", "requests per second on average", shown="half of what is estimated to be possible, or the trace's "
            "own", type=float)
    add("--requests", "how many requests arrive", shown="{} on a CPU, {} on a GPU".format(*DEFAULTS[command]), type=int)
    add("--lengths", f"of prompts and outputs: {', '.join(LENGTHS)}, scaled to --max-len, or PROMPT+OUTPUT tokens; "
        "several of these, with commas, follow each other", "sharegpt4")
    if serving:
        add("--long-prompt", "one more request, the first to arrive, has so many prompt tokens", shown="none", type=int)
        add("--classes", "share of the requests in each class of the policy `priority`, as in realtime=0.1,low=0.5; "
            "the rest are normal", "", shown="all normal")
    add("--trace", "lengths and arrivals from a log with columns arrived_at, num_prefill_tokens, num_decode_tokens",
        shown="none", metavar="FILE.csv")
    add("--trace-scale", "multiplies the lengths in the trace", 1.0, type=float)
    add("--policies", f"comma-separated, from {', '.join(specs())}; sarathi-serve:64 has a chunk of its own",
        "vllm,orca,sarathi-serve,dynamic")
    add("--chunk", "C, the chunk size and token budget, in tokens", shown="128 on a CPU, 512 on a GPU", type=int)
    add("--batch", "B, the most requests at once", shown="32 on a CPU, 128 on a GPU", type=int)
    add("--max-len", "the longest request, prompt and output", shown="1024 on a CPU, 8192 on a GPU", type=int)
    add("--page-size", "tokens in a page, or max for a slot per request; several, with commas, run every policy with "
        "each", shown="64, or max if that is less")
    add("--kv-tokens", "tokens that the cache holds, for every policy and page size", type=int,
        shown="a third of --batch requests of --max-len")
    add("--max-waiting", "refuse a request that finds so many in the queue", shown="no limit", type=int)
    add("--slo", "of P99 TBT: strict or relaxed, 5 or 25 decode iterations, or seconds", "strict")
    parser.add_model_options("llama3-8b on a GPU with 75 GB or more, else llama-160m")
    add_simulation_options(parser)
    files = ["json", "plot"] + ["csv", "chrome-trace"] * serving
    add("--json", "write all that is printed, with these options", shown="none", metavar="FILE")
    add("--plot", "draw latencies and timelines" if serving else "draw capacities, and latency against rate",
        shown="none", metavar="FILE")
    if serving:
        add("--csv", "write a row for each request and policy", shown="none", metavar="FILE")
        add("--chrome-trace", "write what happened when, for https://ui.perfetto.dev", shown="none", metavar="FILE")
    args = parser.parse_args(argv[1:])
    if args.simulate in (None, THIS):
        parser.check_model_options(args)
    parser.check_files(args, *files)
    on_gpu = args.simulate not in (None, THIS) or args.device.startswith("cuda")
    for option in ("chunk", "batch", "max_len"):
        if getattr(args, option) is None:
            setattr(args, option, DEFAULTS[option][on_gpu])
    if args.chunk > max(args.max_len, DEFAULTS["chunk"][on_gpu]):
        parser.error(f"--chunk {args.chunk}: must be at most --max-len {args.max_len}")
    args.requests = DEFAULTS[command][on_gpu] if args.requests is None else args.requests
    for option, least in (("requests", 1), ("chunk", 1), ("batch", 1), ("max_len", 3), ("kv_tokens", 1),
                          ("max_waiting", 1), ("seed", 0), ("replicas", 1)):
        value = getattr(args, option)
        if value is not None and value < least:
            parser.error(f"--{option.replace('_', '-')} {value}: must be at least {least}")
    if serving and args.qps is not None and not 0 < args.qps < math.inf:
        parser.error(f"--qps {args.qps:g}: must be a finite number above 0")
    if args.slo not in SLOS:
        try:
            args.slo = float(args.slo)
        except ValueError:
            parser.error(f"--slo {args.slo!r}: must be {', '.join(SLOS)} or a number of seconds")
        if not 0 < args.slo < math.inf:
            parser.error(f"--slo {args.slo:g}: must be a finite number of seconds above 0")
    check_simulation_options(parser, args)
    args.page_size = parse_page_sizes(parser, args)
    args.classes = parse_classes(parser, args.classes) if serving else {}
    if serving and args.long_prompt is not None and not 1 <= args.long_prompt < args.max_len:
        parser.error(f"--long-prompt {args.long_prompt}: must be 1 … {args.max_len - 1}, below --max-len")
    if args.trace and (args.lengths != "sharegpt4" or serving and args.long_prompt):
        parser.error("--trace: has lengths of its own, give no --lengths and no --long-prompt")
    if args.trace_scale != 1 and not args.trace:
        parser.error("--trace-scale: goes with --trace")
    args.policies = list(dict.fromkeys(name.strip() for name in args.policies.split(",") if name.strip()))
    if not args.policies:
        parser.error("--policies: give at least one")
    try:
        plan(args.policies, args.page_size, Settings())
    except ValueError as error:
        parser.error(f"--policies: {error}")
    return args


def parse_page_sizes(parser, args):
    """--page-size as a list of numbers; sets --kv-tokens if it was not given.

    Exits with a message if a size is not allowed, or the cache too small for one request.
    """
    sizes = []
    for text in (args.page_size or str(min(64, args.max_len))).split(","):
        size = args.max_len if text.strip() == "max" else int(text) if text.strip().isdecimal() else 0
        if not 1 <= size <= args.max_len:
            parser.error(f"--page-size {text.strip()}: must be 1 … {args.max_len} (--max-len) or max")
        sizes.append(size)
    needed = max(-(-args.max_len // size) * size for size in sizes)  # of one request, in whole pages
    if args.kv_tokens is None:
        args.kv_tokens = max(1, args.batch // 3) * needed
    if args.kv_tokens < needed:
        parser.error(f"--kv-tokens {args.kv_tokens}: must be at least {needed}, what a request of --max-len "
                     f"{args.max_len} takes in whole pages")
    return list(dict.fromkeys(sizes))


def parse_classes(parser, text):
    """--classes as {class: share}, with the rest in normal. Exits with a message if it makes no sense."""
    shares = {}
    for part in filter(None, text.split(",")):
        name, _, share = part.strip().partition("=")
        try:
            shares[name] = float(share)
        except ValueError:
            shares[name] = math.nan
        if name not in PRIORITIES or text.count(name) > 1 or not 0 <= shares[name] <= 1:
            parser.error(f"--classes {part}: must be one of {', '.join(PRIORITIES)}, =, and a share of 0 … 1")
    if sum(shares.values()) > 1 + 1e-9:
        parser.error(f"--classes {text}: the shares must not add up to more than 1")
    rest = max(0.0, 1 - sum(shares.values()))
    return shares | {"normal": shares.get("normal", 0.0) + rest} if shares else {}


def make_lengths(args):
    """[(prompt_len, output_len)] for --lengths and --long-prompt, and what to call them."""
    if args.lengths in LENGTHS:
        lengths = sample_lengths(args.lengths, args.requests, args.max_len, args.seed)
        name = f"{args.requests} requests with the lengths of {args.lengths} scaled to {args.max_len:,} tokens"
    else:
        pairs = [pair.split("+") for pair in args.lengths.split(",")]
        if not all(len(pair) == 2 and all(part.strip().isdecimal() for part in pair) for pair in pairs):
            raise ValueError(f"--lengths {args.lengths!r}: must be {', '.join(LENGTHS)} or PROMPT+OUTPUT, as in "
                             "500+50, or several of these with commas")
        if len(pairs) > args.requests:
            raise ValueError(f"--requests {args.requests}: must be at least the number of --lengths, {len(pairs)}")
        lengths = []
        for number, pair in enumerate(pairs, start=1):
            count = args.requests * number // len(pairs) - len(lengths)
            lengths += fixed_lengths(*map(int, pair), count, args.max_len)
        name = f"{args.requests} requests of {args.lengths} tokens"
    if getattr(args, "long_prompt", None):
        lengths = fixed_lengths(args.long_prompt, min(16, args.max_len - args.long_prompt), 1, args.max_len) + lengths
        name += f", after one with a prompt of {args.long_prompt:,}"
    return lengths, name


def make_workload(args):
    """(arrivals at a rate, a function; what to call them). Without a rate a trace keeps its own."""
    if args.trace:
        arrivals, left_out = read_trace(args.trace, args.max_len, args.trace_scale, args.requests)
        name = f"{len(arrivals)} requests of {args.trace}, lengths times {args.trace_scale:g} ({left_out} left out)"
        return lambda qps: arrivals if qps is None else rescale(arrivals, qps), name
    lengths, name = make_lengths(args)
    return lambda qps: poisson(lengths, qps, args.seed), f"{name}, Poisson arrivals"


def draw_classes(args, count):
    """A class for each of `count` requests, at random."""
    if not args.classes:
        return ["normal"] * count
    return random.Random(args.seed).choices(list(args.classes), args.classes.values(), k=count)


# -----------------------------------------------------------------------------------------------------
# what is printed


def print_heading(machine, args, arrivals, name, qps, base, tbt_slo_s, more):
    """What all the numbers depend on; `more` are lines of the server."""
    prompt, output = (statistics.median(lengths) for lengths in list(zip(*arrivals))[1:])
    pages = ", ".join(str(size) for size in args.page_size)
    span = f"; the last comes after {arrivals[-1].time:,.0f} s" if qps else ""
    multiple = f"{args.slo}, {SLOS[args.slo]} of these" if args.slo in SLOS else "as asked for"
    print(f"{cli.machine_lines(machine)}"
          f"load: {name}{qps}; median prompt {prompt:g}, output {output:g} tokens{span}\n"
          f"memory: {args.kv_tokens:,} tokens of KV cache, {args.kv_tokens // args.max_len} requests if each reserves "
          f"{args.max_len:,}; pages of {pages} tokens\n"
          f"at most {args.batch} requests at once; chunk {args.chunk}\n"
          f"{more}"
          f"a decode iteration takes {base.seconds:.4f} s (batch {base.decodes}, context {base.context:,}, no prefill)"
          f"\n"
          f"SLO: P99 TBT at most {tbt_slo_s:.3f} s ({multiple}), median scheduling delay at most {MAX_DELAY_S:g} s\n")


def show(value, digits=2):
    """A number for a table, or a dash."""
    return "-" if value is None else f"{value:,.{digits}f}"


def print_runs(rows, tbt_slo_s):
    """The tables of `serve`."""
    table = [["seconds", "TTFT P50", "P90", "P99", "delay P50", "P90", "P99", "latency P50", "P90", "P99"]]
    for name, row in rows.items():
        table.append([name, *(show(row[what][p]) for what in ("ttft_s", "scheduling_delay_s", "latency_s")
                              for p in ("p50", "p90", "p99"))])
    cli.print_table(table)
    print("\nTTFT: arrival to first token; delay: arrival to first being scheduled; latency: arrival to last token\n")

    table = [["seconds", "TBT P50", "P90", "P99", "stalls", "over SLO", "longest", "of request", "caused by", "prefill",
              "meets SLO"]]
    for name, row in rows.items():
        stalls, worst = row["stalls"], row["stalls"]["longest"]
        longest = ["-"] * 4
        if worst:
            who = (str(worst[key]) for key in ("request_id", "caused_by", "prefill_tokens"))
            longest = [show(worst["seconds"], 3), *who]
        table.append([name, *(show(row["tbt_s"][p], 3) for p in ("p50", "p90", "p99")), str(stalls["count"]),
                      str(stalls["over_slo"]), *longest, "yes" if row["met"] else "no"])
    cli.print_table(table)
    print("\nTBT: between two tokens of a request, preemptions included; a stall is one in which others' prefill was\n"
          f"computed, and is caused by the request with the most of it; over SLO: longer than {tbt_slo_s:.3f} s\n")

    table = [["batches", "tokens/s", "prefill %", "hybrid %", "decode %", "tokens each", "at once", "peak", "preempted",
              "recomputed", "refused", "own time %"]]
    for name, row in rows.items():
        table.append([name, show(row["tokens_per_s"], 0), *(show(row[kind] and 100 * row[kind], 0) for kind in (
            "prefill_only", "hybrid", "decode_only")), show(row["tokens_per_iteration"], 0),
            show(row["running_mean"], 1), str(row["running_peak"]), str(row["preemptions"]),
            show(row["recomputed_tokens"], 0), str(row["refused"]), show(100 * row["own_fraction"], 1)])
    cli.print_table(table)
    print("\ntokens/s: prompt and output; at once: requests running, mean over time and peak; recomputed: tokens of\n"
          "preempted requests; own time: all of a step but the forward pass and fetching its tokens")


def print_classes(records):
    """A row for each policy and class of requests. `records`: name -> (completions, iterations)."""
    table = [["seconds", "class", "requests", "TTFT P50", "P90", "P99", "TBT P50", "P99", "preempted"]]
    for name, (completions, _) in records.items():
        for priority, its_name in enumerate(PRIORITIES):
            if its := [c for c in completions if c.priority == priority]:
                ttft, tbt = percentiles([c.ttft for c in its]), percentiles([gap for c in its for gap in c.tbt])
                table.append([name, its_name, str(len(its)), *(show(ttft[p]) for p in ("p50", "p90", "p99")),
                              show(tbt["p50"], 3), show(tbt["p99"], 3), str(sum(c.preemptions for c in its))])
    print()
    cli.print_table(table)


def print_capacities(results):
    """The table of `capacity`. Results: name -> {"capacity_qps", "points"}."""
    baseline = results.get("vllm", {}).get("capacity_qps")
    table = [["policy", "capacity in requests/s", "relative to vllm", "P50 TTFT s", "P99 TBT s", "tokens/s", "runs"]]
    for name, result in results.items():
        qps, points = result["capacity_qps"], result["points"]
        at = next((point for point in points if point["met"] and point["qps"] == qps), {})
        bound = "" if qps and not all(point["met"] for point in points) else "at least " if qps else "below "
        table.append([name, bound + show(qps or min(point["qps"] for point in points)),
                      f"{qps / baseline:.2f}x" if baseline and qps else "-", show(at.get("p50_ttft_s")),
                      show(at.get("p99_tbt_s"), 3), show(at.get("tokens_per_s"), 0), str(len(points))])
    print()
    cli.print_table(table)
    print("\ncapacity: the highest rate that was met, 5 % below one that was not, twice; latencies and tokens/s "
          "(prompt and\noutput) are those at this rate")


def describe_point(name, point):
    """One run of the search, in a line."""
    verdict = "met" if point["met"] else f"not met: {point['cut_short'] or 'the SLO'}"
    return (f"{name}: {point['qps']:.3f} requests/s, P99 TBT {show(point['p99_tbt_s'], 3)} s, median delay "
            f"{show(point['p50_delay_s'])} s, {verdict}")


# -----------------------------------------------------------------------------------------------------
# the two commands


class Server:
    """This machine and a model on it: how fast it is, what the heading says of it, and a way to serve."""

    micro_batches = 1  # that it works on at once

    def __init__(self, args, settings):
        if args.threads:
            torch.set_num_threads(args.threads)
        self.model, self.seed = cli.load_model(args, "max_len", gpu_model="llama3-8b", gpu_bytes=75e9), args.seed
        self.base = measure_base(self.model, settings)
        self.machine = describe_machine(self.model, args, args.chunk)
        self.lines, costs = "", {}
        for size in args.page_size:
            if size < args.max_len:
                times = paged_attention(self.model, size, min(8, args.batch), args.max_len - args.max_len // 8,
                                        args.attention)
                costs[str(size)] = {name: times[name].ms / times["slots"].ms for name in ("consecutive", "scattered")}
                together, apart = costs[str(size)].values()
                self.lines += (f"attention of decodes in pages of {size}: {together:.2f}x the time in slots if they "
                               f"follow each other, {apart:.2f}x if they are scattered\n")
        self.machine["paged_attention"] = costs

    def serve(self, spec, arrivals, settings, **more):
        """serving.serve with random prompts."""
        return serve(self.model, spec, arrivals, prompts(arrivals, self.model.config.vocab_size, self.seed), settings,
                     **more)


def serve_with_bar(server, name, spec, arrivals, settings, **more):
    """Serve with a progress bar, on a terminal."""
    with tqdm(total=len(arrivals), desc=name, disable=None, leave=False) as bar:
        return server.serve(spec, arrivals, settings, progress=bar.update, **more)


def main(argv):
    """The command line; argv[0] is "serve" or "capacity"."""
    args = parse_args(argv)
    serving = argv[0] == "serve"
    arrivals_at, name = make_workload(args)  # a malformed trace ends here, before a model is loaded
    arrivals = arrivals_at(args.qps if serving and (args.qps or args.trace) else 1.0)
    settings = Settings(args.chunk, args.batch, args.max_len, args.page_size[0], args.kv_tokens, args.max_waiting,
                        args.attention)
    server = Server(args, settings) if args.simulate in (None, THIS) else SimulatedServer(args)
    if args.simulate == THIS:
        server = FittedServer(server, args)
    base, machine = server.base, server.machine
    tbt_slo_s = slo_seconds(args.slo, base)
    runs = plan(args.policies, args.page_size, settings, tbt_slo_s)
    start = float(f"{server.micro_batches * estimated_qps(base, arrivals) / 2:.2g}")
    if serving and args.qps is None and not args.trace:
        args.qps = start
        arrivals = arrivals_at(start)
    qps = (f" at {args.qps:g} a second" if args.qps else " at its own rate") if serving else ""
    print_heading(machine, args, arrivals, name, qps, base, tbt_slo_s, server.lines)
    report = {"command": argv[0], "options": vars(args), "machine": machine, "load": name, "base": base._asdict(),
              "slo_s": tbt_slo_s}
    if serving:
        report["runs"] = serve_all(server, runs, arrivals, args, tbt_slo_s)
    else:
        report["results"] = search_all(server, runs, arrivals_at, start, tbt_slo_s)
        print_capacities(report["results"])
        if args.plot:
            from plot_search import plot_capacity

            plot_capacity(report["results"], machine, args.plot, slo_s=tbt_slo_s)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(report, file, indent=2)


def serve_all(server, runs, arrivals, args, tbt_slo_s):
    """Run what `plan` returned, print the tables, write the files. Returns name -> the numbers of its run."""
    records, rows, requests = {}, {}, []
    classes = draw_classes(args, len(arrivals))
    for name, (spec, settings) in runs.items():
        run = serve_with_bar(server, name, spec, arrivals, settings, classes=classes)
        if not sys.stderr.isatty():
            print(f"{name}: {len(run.completions)} requests in {run.seconds:.0f} s", file=sys.stderr)
        records[name], rows[name] = (run.completions, run.iterations), summarize(run, tbt_slo_s)
        requests += [{"policy": name} | row for row in request_rows(run.completions, find_stalls(*records[name]))]
    print_runs(rows, tbt_slo_s)
    if args.classes:
        print_classes(records)
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, requests[0])
            writer.writeheader()
            writer.writerows(requests)
    if args.chrome_trace:
        write_chrome_trace(args.chrome_trace, records)
    if args.plot:
        from plot_serving import plot_serving

        plot_serving(records, server.machine, args.plot, slo_s=tbt_slo_s)
    return rows


def search_all(server, runs, arrivals_at, start, tbt_slo_s):
    """Search the capacity of each of what `plan` returned. Returns name -> {"capacity_qps", "points"}."""
    def run_at_rate(name, spec, settings, qps):
        arrivals = arrivals_at(qps)
        run = serve_with_bar(server, name, spec, arrivals, settings, hopeless=Hopeless(arrivals, tbt_slo_s))
        point = rate_point(qps, summarize(run, tbt_slo_s))
        print(describe_point(name, point))
        return point

    results = {}
    for name, (spec, settings) in runs.items():
        qps, points = capacity(partial(run_at_rate, name, spec, settings), start)
        results[name] = {"capacity_qps": qps, "points": points}
    return results
