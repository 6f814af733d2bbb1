"""Serve arriving requests in real time, and find the rate that a policy can keep up with.

    python bench.py serve --qps 1.5         every policy on the same arrivals
    python bench.py capacity --slo strict   the highest rate at which each meets the SLO

Both measure the time of a decode iteration first, of which the SLO is a multiple (Sarathi-Serve
§5.1). Read first: run.py, which measures what is printed here.
"""

import csv
import io
import random
import re
from argparse import ArgumentTypeError
from functools import partial

from tqdm import tqdm

from experiments import measure, options, run, workload
from experiments import serving_report as texts
from experiments.machine import describe_machine
from experiments.metrics import request_rows
from experiments.options import number, whole
from policies import POLICIES
from policies.config import EngineConfig
from policies.priority import PRIORITIES
from policies.slo import SLOS

DEFAULTS = {"chunk": (128, 512), "batch": (32, 128), "max_len": (1024, 8192)}  # on a CPU, on a GPU
REQUESTS = {"serve": (48, 500), "capacity": (80, 400)}
LONGEST_S = 1e7  # that a load may last: nobody waits for more than 116 days


def class_shares(text):
    """--classes: {class: how many requests are of it, in relation to the others}."""
    shares = {}
    for part in text.split(","):
        name, _, share = part.strip().partition("=")
        if name not in PRIORITIES or name in shares:
            allowed = f"must be one of {', '.join(PRIORITIES)}, once, = and a number"
            raise ArgumentTypeError(f"{part}: {allowed}")
        shares[name] = number(above=0)(share)
    return shares


def add_options(parser, command):
    """The options of `command`, "serve" or "capacity"."""
    only_of_serve = dict(qps=None, long_prompt=None, csv=None, chrome_trace=None)
    parser.set_defaults(command=command, classes={"normal": 1}, **only_of_serve)
    serving, add, size = command == "serve", parser.add, dict(type=whole(1))
    defaults = DEFAULTS | {"requests": REQUESTS[command]}
    on = {name: "{} on a CPU, {} on a GPU".format(*both) for name, both in defaults.items()}
    if serving:
        shown = "half of what is estimated to be possible, or the trace's own"
        add("--qps", "requests per second on average", shown=shown, type=number(least=1e-4))
    add("--requests", "how many requests arrive", shown=on["requests"], type=whole(1, 10**6))
    lengths = f"{', '.join(workload.LENGTHS)}, scaled to --max-len, or PROMPT+OUTPUT tokens"
    lengths = f"of prompts and outputs: {lengths}; several, with commas, follow each other"
    add("--lengths", lengths, "sharegpt4")
    if serving:
        add("--long-prompt", "one more request, the first, has so many prompt tokens", **size)
        shares = "shares of the classes of `priority`, as in realtime=1,normal=4,low=5; see --csv"
        add("--classes", shares, "normal=1", type=class_shares)
    trace = "lengths and arrivals from a log with columns " + ", ".join(workload.TRACE_COLUMNS)
    add("--trace", trace, metavar="FILE.csv")
    add("--trace-scale", "multiplies the lengths in it", 1.0, type=number(above=0, most=1))
    policies = f"comma-separated, from {', '.join(POLICIES)}, or my_policy.py:ClassName; vllm is "
    policies += "its scheduler of 2023, as in the paper; sarathi-serve:64 has a chunk of its own"
    some = "vllm,orca,sarathi-serve,dynamic"
    add("--policies", policies, some, type=options.policy_names(chunks=True))
    add("--chunk", "C, the chunk size and token budget, in tokens", shown=on["chunk"], **size)
    add("--batch", "B, the most requests at once", shown=on["batch"], **size)
    add("--max-len", "the longest prompt and output", shown=on["max_len"], type=whole(3))
    pages = "tokens in a page, or max for a slot per request; several, with commas: each with each"
    add("--page-size", pages, shown="64, or max if that is less")
    third = "a third of --batch requests of --max-len"
    add("--kv-tokens", "tokens in the cache, for every policy and page size", shown=third, **size)
    add("--max-waiting", "refuse who finds so many in the queue", shown="no limit", **size)
    slo = "of P99 TBT: strict or relaxed, 5 or 25 decode iterations, or seconds"
    target = lambda text: text if text in SLOS else number(above=0)(text)
    add("--slo", slo, "strict", type=target)
    parser.add_model_options("llama3-8b on a GPU with 75 GB or more, else llama-160m")
    plot = "latencies and timelines" if serving else "capacities, and latency against rate"
    trace = "write what happened when, for https://ui.perfetto.dev, which reads FILE.gz as well"
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
    longest, long_prompt = args.max_len, args.long_prompt
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
        if not re.fullmatch(r"\d{1,15}", size) or not 1 <= int(size) <= longest:
            parser.error(f"--page-size {size:.20}: must be 1 … {longest} (--max-len) or max")
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
        pairs = asked.split(",")
        if not all(re.fullmatch(r" *\d{1,15} *\+ *\d{1,15} *", pair) for pair in pairs):
            allowed = f"{', '.join(workload.LENGTHS)} or PROMPT+OUTPUT, as in 500+50,20+5"
            raise ValueError(f"--lengths {asked!r}: must be {allowed}")
        if len(pairs) > count:
            raise ValueError(f"--requests {count}: must be at least {len(pairs)}, as --lengths has")
        lengths = []
        for i, pair in enumerate(pairs, start=1):
            share = count * i // len(pairs) - len(lengths)
            lengths += workload.fixed_lengths(*map(int, pair.split("+")), share, longest)
        name = f"{count} requests of {asked} tokens"
    if prompt := args.long_prompt:
        output = min(16, longest - prompt)
        lengths = workload.fixed_lengths(prompt, output, 1, longest) + lengths
        name += f", after one with a prompt of {prompt:,}"
    return lengths, name


def make_workload(args):
    """(arrivals at a rate, a function; what to call them). Without a rate a trace keeps its own."""

    def draw_classes(arrivals):
        names, shares = zip(*args.classes.items())
        names = random.Random(args.seed).choices(names, shares, k=len(arrivals))
        return [arrival._replace(priority=name) for arrival, name in zip(arrivals, names)]

    if not args.trace:
        lengths, name = make_lengths(args)
        poisson = lambda qps: draw_classes(workload.poisson(lengths, qps, args.seed))
        return poisson, f"{name}, Poisson arrivals"

    limits = args.max_len, args.trace_scale, args.requests
    arrivals, left_out = workload.read_trace(args.trace, *limits)
    arrivals, last = draw_classes(arrivals), arrivals[-1].time

    def of_trace(qps):
        if qps is None and last > LONGEST_S:
            given = f"{args.trace}: the last request comes {last:.3g} s after the first"
            raise ValueError(f"{given}: must be at most {LONGEST_S:g}, or at a rate of --qps")
        return arrivals if qps is None else workload.rescale(arrivals, qps)

    name = f"{len(arrivals)} requests of {args.trace}, lengths times {args.trace_scale:g}"
    return of_trace, f"{name} ({left_out} left out)"


class RealMachine:
    """This machine and a model on it: how fast it is, what the heading says, a way to serve."""

    micro_batches, lines = 1, ""  # that it works on at once; more that the heading says

    def __init__(self, args, config):
        self.model = model = options.load_model(args, "max_len", "llama3-8b", gpu_bytes=75e9)
        base, spread = partial(run.measure_base, model, config), lambda found: found[1]
        (self.base, _), drift = measure.steadily(base, model.device, spread_of=spread)
        self.machine, self.seed = describe_machine(model, args, args.chunk), args.seed
        self.machine["base_busy"] = drift > measure.BUSY

    def serve(self, config, arrivals, **more):
        """run.serve with random prompts."""
        prompts = workload.prompts(arrivals, self.model.config.vocab_size, self.seed)
        return run.serve(self.model, config, arrivals, prompts, **more)


def serve_with_bar(machine, name, config, arrivals, **more):
    """Serve with a progress bar, on a terminal."""
    with tqdm(total=len(arrivals), desc=name, disable=None, leave=False) as bar:
        return machine.serve(config, arrivals, progress=bar.update, **more)


def serve_all(machine, configs, arrivals, args, report, runs):
    """Run all of `configs`: the Runs go to `runs`, their numbers to report["runs"], by name.

    An interrupt loses nothing: the run that it cuts off counts as far as it came.
    """

    def keep(name, seen):
        runs[name], row = seen, run.summarize(seen, report["slo_s"])
        report["runs"][name] = row | run.rate_point(args.qps, row)
        texts.print_point(name, report["runs"][name])
        save(args, report, runs)

    for name, config in configs.items():
        try:
            keep(name, serve_with_bar(machine, name, config, arrivals))
        except KeyboardInterrupt as interrupt:
            if seen := getattr(interrupt, "run", None):
                keep(name, seen)
            raise


def search_all(machine, configs, arrivals_at, start, args, report):
    """Search the capacity of each: run.found_so_far goes to report["results"], by name."""

    def run_at_rate(qps, name, config, points):
        arrivals = arrivals_at(qps)
        hopeless = run.Hopeless(arrivals, report["slo_s"])
        seen = serve_with_bar(machine, name, config, arrivals, hopeless=hopeless)
        points.append(run.rate_point(qps, run.summarize(seen, report["slo_s"])))
        report["results"][name] = run.found_so_far(points)
        texts.print_point(name, points[-1])
        save(args, report, {})
        return points[-1]

    for name, config in configs.items():
        run.capacity(partial(run_at_rate, name=name, config=config, points=[]), start)


def save(args, report, runs):
    """Write what there is, after each run. Sets report["conclusion"]."""
    report["conclusion"] = texts.conclude(report)
    options.write_json(args, report)
    if not args.csv:
        return
    rows = [{"policy": name} | row for name, its in runs.items() for row in request_rows(*its[:2])]
    if rows:
        writer = csv.DictWriter(text := io.StringIO(newline=""), rows[0])
        writer.writeheader()
        writer.writerows(rows)
        options.write_text(args.csv, text.getvalue())


def finish(machine, args, report, runs):
    """Print the tables and what to conclude, draw, and say which files were written."""
    slo_s, records = report["slo_s"], {name: its[:2] for name, its in runs.items()}
    print()
    if runs:
        texts.print_runs(report["runs"], slo_s)
    else:
        texts.print_capacities(report["results"])
    print(f"\n{report['conclusion']}")
    if runs and args.chrome_trace:
        from views.chrome_trace import write_chrome_trace

        write_chrome_trace(args.chrome_trace, records)
    if args.plot:
        from views import search, serving

        draw = serving.plot_serving if runs else search.plot_capacity
        draw(records or report["results"], machine.machine, args.plot, slo_s)
    options.wrote(args.json, args.csv, args.chrome_trace, args.plot)


def main(args, make_machine=RealMachine):
    """The command args.command, on make_machine(args, config). ValueError for a bad load or SLO."""
    arrivals_at, name = make_workload(args)  # what is wrong ends here, before a model is loaded
    serving = args.command == "serve"
    own_rate = serving and args.trace and args.qps is None
    arrivals = arrivals_at(None if own_rate else 1.0)
    config = make_config(args)
    machine = make_machine(args, config)
    base, slo_s = machine.base, run.slo_seconds(args.slo, machine.base)
    start = float(f"{machine.micro_batches * run.estimated_qps(base, arrivals) / 2:.2g}")
    if serving and not own_rate:
        args.qps = args.qps or start
        arrivals = arrivals_at(args.qps)
    slo_busy = args.slo in SLOS and machine.machine.get("base_busy", False)
    report = {"command": args.command, "machine": machine.machine, "load": name}
    report |= {"base": base._asdict(), "slo_s": slo_s, "slo_busy": slo_busy}
    report |= {"runs" if serving else "results": {}}
    texts.print_heading(machine, args, report, arrivals)
    configs, runs = run.plan(args.policies, args.page_size, config, slo_s), {}
    try:
        if serving:
            serve_all(machine, configs, arrivals, args, report, runs)
        else:
            search_all(machine, configs, arrivals_at, start, args, report)
    except KeyboardInterrupt:
        print("interrupted: what was seen until then is kept")
        raise
    finally:
        if "conclusion" in report:
            finish(machine, args, report, runs)
