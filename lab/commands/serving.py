"""Serve arriving requests in real time, and find the rate that a policy can keep up with.

    python bench.py serve --qps 1.5         every policy on the same arrivals
    python bench.py capacity --slo strict   the highest rate at which each meets the SLO

Both measure the time of a decode iteration first, of which the SLO is a multiple (Sarathi-Serve
§5.1). Read first: run.py, which measures what is printed here."""

import csv
import io
import random
import re
import statistics
import textwrap
from argparse import ArgumentTypeError
from dataclasses import asdict
from functools import partial
from itertools import product

from tqdm import tqdm

from cli import options
from cli.options import number, whole
from config import EngineConfig
from lab.measure import capacity, load_run, metrics, workload
from lab.measure import timing as measure
from lab.measure.run_plan import run_plan
from policies.priority import PRIORITIES
from policies.token_budget import MAX_DELAY_S, MULTIPLES
from views import tables
from views.page import Recorder, page

CACHING = {"off": [False], "on": [True], "both": [False, True]}  # --prefix-caching


def shared_prefix(text):
    """--shared-prefix: (length, count)."""
    if pair := re.fullmatch(r"0*([1-9]\d{0,8}):0*([1-9]\d{0,8})", text):
        return int(pair[1]), int(pair[2])
    raise ArgumentTypeError(f"{text:.60}: must be LENGTH:COUNT, two whole numbers, as in 512:4")


def class_shares(text):
    """--classes: {class: how many requests are of it, in relation to the others}."""
    parts = [part.strip().partition("=") for part in text.split(",")]
    shares = {name: share for name, _, share in parts}
    if len(shares) < len(parts) or not shares.keys() <= {*PRIORITIES}:
        raise ArgumentTypeError(f"{text}: must be some of {', '.join(PRIORITIES)}, each = a number")
    return {name: number(above=0)(share) for name, share in shares.items()}


def page_sizes(text):
    """--page-size: a list, in which "max" stays."""
    return [
        part if part == "max" else whole(least=1)(part) for part in map(str.strip, text.split(","))
    ]


def add_options(parser, command):
    """The options of `command`, "serve" or "capacity"."""
    words = dict(datasets=", ".join(workload.LENGTHS), columns=", ".join(workload.TRACE_COLUMNS))
    types = dict(shares=class_shares, prefix=shared_prefix, sizes=page_sizes, caching=CACHING)
    slo = lambda text: text if text in MULTIPLES else number(above=0)(text)
    parser.add_table(command, "serving", "json", **words, **types, slo=slo)
    if command == "capacity":
        parser.set_defaults(classes={"normal": 1}, qps=None, long_prompt=None, csv=None, html=None)
    parser.add_model_options("llama3-8b on a GPU with 75 GB or more, else llama-160m")


def check(parser, args):
    """Exit with a message if options make no sense together. Sets those that were left open."""
    longest, long, (prefix, _) = args.max_len, args.long_prompt, args.shared_prefix
    if prefix > longest - 2:
        parser.error(f"--shared-prefix {prefix}: must leave 2 of --max-len {longest} tokens")
    if long and (long >= (left := longest - prefix) or args.turns > 1):
        less = f"below {left}, --max-len less --shared-prefix, and not with --turns"
        parser.error(f"--long-prompt {long}: must be {less}")
    if args.trace and (args.lengths != "sharegpt4" or long or prefix):
        parser.error("--trace: has its own lengths, no --lengths, --long-prompt, --shared-prefix")
    if args.trace_scale != 1 and not args.trace:
        parser.error("--trace-scale: goes with --trace")
    sizes = args.page_size or [min(64, -(-longest // 2))]
    sizes = [longest if size == "max" else size for size in sizes]
    if max(sizes) > longest:
        parser.error(f"--page-size {max(sizes)}: must be at most --max-len {longest}")
    shares = prefix or args.turns > 1
    args.prefix_caching = CACHING[args.prefix_caching or ("both" if shares else "off")]
    if True in args.prefix_caching and max(sizes) == longest:
        parser.error(f"--page-size {longest}: must be below --max-len, or --prefix-caching off")
    args.page_size = list(dict.fromkeys(sizes))
    needed = max(-(-longest // size) * size for size in sizes)  # of one request
    args.kv_tokens = args.kv_tokens or max(args.pp, args.batch // 3) * needed
    if args.kv_tokens < needed:
        parser.error(f"--kv-tokens {args.kv_tokens}: must be at least {needed}, for one request")


def make_workload(args):
    """(arrivals at a rate, a function; what to call them). Without a rate a trace keeps its own."""
    count, prompt, (prefix, prefixes) = args.requests, args.long_prompt, args.shared_prefix
    longest, what, turns = args.max_len - prefix, "requests", ""
    if args.turns > 1:
        what = "chats"
        turns = f" of up to {args.turns} turns, {workload.THINK_S:g} s after each answer"
    if args.trace:
        logged, left_out = workload.read_trace(args.trace, longest, args.trace_scale, count)
        name = f"{len(logged)} {what} of {args.trace}, lengths times {args.trace_scale:g} "
        name += f"({left_out} left out){turns}"
        at_rate = lambda qps: workload.rescale(logged, qps) if qps else logged
    else:
        lengths = workload.make_lengths(args.lengths, count, longest, args.seed)
        scaled = f"with the lengths of {args.lengths} scaled to {longest:,}"
        asked = scaled if args.lengths in workload.LENGTHS else f"of {args.lengths}"
        after = f", after one with a prompt of {prompt:,}" if prompt else ""
        shared = f", each after a prefix of {prefix:,} ({prefixes} in all)" if prefix else ""
        name = f"{count} {what} {asked} tokens{turns}{shared}{after}, Poisson arrivals"
        lengths[:0] = [(prompt, min(16, longest - prompt))] if prompt else []
        at_rate = lambda qps: workload.poisson(lengths, qps, args.seed)

    def arrivals_at(qps):
        arrivals, (names, shares) = at_rate(qps), zip(*args.classes.items())
        drawn = random.Random(args.seed).choices(names, shares, k=len(arrivals))
        arrivals = [arrival._replace(priority=its) for arrival, its in zip(arrivals, drawn)]
        load = workload.chats(arrivals, args.turns)
        return [arrival._replace(prompt_len=prefix + arrival.prompt_len) for arrival in load]

    return arrivals_at, name


class RealMachine:
    """This machine and a model on it: how fast it is, what the heading says, a way to serve."""

    micro_batches, lines = 1, ""  # that it works on at once; more that the heading says

    def __init__(self, args, config, model=None):
        self.model = model = model or options.load_model(args, "max_len", "llama3-8b", 75e9)
        self.base, drift = capacity.measure_base(
            model, config.chunk, config.max_len, config.attention
        )
        self.machine, self.args = measure.describe_machine(model, args, config.chunk), args
        self.machine["base_busy"] = drift > measure.BUSY

    def serve(self, config, arrivals, **more):
        """run.serve with random prompts."""
        load = arrivals, self.model.config.vocab_size, self.args.seed, self.args.shared_prefix
        return load_run.serve(self.model, config, arrivals, workload.prompts(*load), **more)


class Session:
    """Runs of several policies on one load, for `serve` or `capacity`. `report` is what --json
    holds: each number is printed and written when it is known."""

    def __init__(self, args, arrivals_at, report):
        self.args, self.arrivals_at, self.report = args, arrivals_at, report
        self.serving, self.slo_s = args.command == "serve", report["slo_s"]
        self.found = report.setdefault("runs" if self.serving else "results", {})
        self.trials = {}
        self.records, self.recorders = {}, {}  # of each run of `serve`

    def run_all(self, servers, start):
        """Let each of `servers`, {name: a function of arrivals, as run.serve}, serve at the rate of
        --qps, or search its capacity from `start`. What there is at an interrupt is kept."""
        try:
            for name, serve in servers.items():
                run_at_rate = partial(self.run_at_rate, name, serve)
                if self.serving:
                    run_at_rate(self.args.qps)
                else:
                    capacity.search_capacity(run_at_rate, start, self.args.ratio)
        except KeyboardInterrupt as interrupt:
            if self.serving and isinstance(interrupt, load_run.LoadInterrupted):
                self.add(name, self.args.qps, interrupt.run)
            print("interrupted: what was seen until then is kept")
            raise
        finally:
            if self.found:
                self.finish()

    def run_at_rate(self, name, serve, qps):
        """Serve the load at this rate: what `add` returns."""
        arrivals = self.arrivals_at(qps)
        recorder = self.recorders.setdefault(name, Recorder()) if self.args.html else None
        with tqdm(total=len(arrivals), desc=name, disable=None, leave=False) as bar:
            seen = serve(arrivals, progress=bar.update, recorder=recorder)
        return self.add(name, qps, seen)

    def add(self, name, qps, seen):
        """Print and write what was seen of a run: run.summarize and its `qps`, which it returns."""
        judged = capacity.judge(seen, self.slo_s)
        row = {"qps": qps} | judged.to_json()
        if self.serving:
            self.records[name], self.found[name] = seen, row
        else:
            trials = self.trials.setdefault(name, [])
            trials.append(capacity.Trial(qps, judged))
            self.found[name] = search_json(capacity.summarize_search(trials, self.args.ratio))
        print_point(name, row, self.report["unit"])
        self.report["conclusion"] = conclude(self.report)
        options.write_json(self.args, self.report)
        if self.args.csv:
            rows_of, its = metrics.request_rows, self.records.items()
            rows = [
                {"policy": name} | row
                for name, seen in its
                for row in rows_of(seen.completions, seen.iterations)
            ]
            table = [*rows[:1], *map(dict.values, rows)]  # the keys of the first are the header
            csv.writer(text := io.StringIO(newline="")).writerows(table)
            options.write_text(self.args.csv, text.getvalue())
        return judged

    def finish(self):
        """Print the tables and what to conclude, draw, and say which files were written."""
        args, machine = self.args, self.report["machine"]
        print()
        if self.serving:
            print_runs(self.found, self.slo_s)
        else:
            print_capacities(self.found, self.report["unit"])
        print(self.report["conclusion"])
        if args.plot:
            from views.timelines import plot_capacity, plot_serving

            draw = plot_serving if self.serving else plot_capacity
            draw(self.records or self.found, machine, args.plot, self.slo_s)
        if args.html:
            heading = options.machine_lines(machine)
            text = page(self.report["load"], heading, self.recorders, slo_s=self.slo_s)
            options.write_text(args.html, text)
        options.wrote(args.json, args.csv, args.plot, args.html)


def main(args, make_machine):
    """The command args.command, on make_machine(args, config): its report, which --json writes.
    Raises ValueError for a bad load or SLO."""
    same = {name: getattr(args, name) for name in ("chunk", "max_len", "max_waiting", "attention")}
    config = EngineConfig(**same, max_batch=args.batch, page_size=1, pages=args.kv_tokens)
    plan = partial(run_plan, args.policies, args.page_size, config, caching=args.prefix_caching)
    plan(1.0)  # what is wrong with it, or with the load, ends here, before a model is loaded
    arrivals_at, load = make_workload(args)
    serving = args.command == "serve"
    own_rate = serving and args.trace and args.qps is None
    arrivals = arrivals_at(None if own_rate else 1.0)
    machine = make_machine(args, config)
    base, slo_s = machine.base, capacity.slo_seconds(args.slo, machine.base)
    start = float(f"{machine.micro_batches * capacity.estimated_qps(base, arrivals) / 2:.2g}")
    if serving and not own_rate:
        args.qps = args.qps or start
        arrivals = arrivals_at(args.qps)
    report = {"command": args.command, "machine": machine.machine, "load": load, "slo_s": slo_s}
    report["slo_busy"] = args.slo in MULTIPLES and machine.machine.get("base_busy", False)
    report |= {"base": asdict(base), "unit": ("requests/s", "chats/s")[args.turns > 1]}
    print_heading(machine, args, report, arrivals)
    sides = getattr(machine, "sides", {"": machine})  # a simulation of this machine has two
    pairs = product(plan(slo_s).items(), sides.items())
    servers = {name + side: partial(by.serve, its) for (name, its), (side, by) in pairs}
    Session(args, arrivals_at, report).run_all(servers, start)
    return report


def describe_load(args, load, arrivals):
    """The load of `make_workload`, at its rate, in a line."""
    serving = args.command == "serve"
    prompt, output = (statistics.median(column) for column in list(zip(*arrivals))[1:3])
    last = max(arrival.time for arrival in arrivals if arrival.follows is None)
    span = f"; the last comes after {last:,.0f} s" if serving else ""
    rate = f" at {args.qps:g} a second" if args.qps else " at its own rate" if serving else ""
    return f"load: {load}{rate}; median prompt {prompt:g}, output {output:g} tokens{span}"


def print_heading(machine, args, report, arrivals):
    """What all the numbers depend on. `report` has the load, slo_s, and whether it is slo_busy."""
    words = dict(machine=machine, args=args, report=report, most_s=MAX_DELAY_S)
    about = options.machine_lines(machine.machine) + describe_load(args, report["load"], arrivals)
    words |= dict(longest=args.kv_tokens // args.max_len, pages=", ".join(map(str, args.page_size)))
    words["shared"] = "; shared: by prompts that begin alike" * any(args.prefix_caching)
    words["iteration"] = measure.mark("a decode iteration", report["slo_busy"])
    times = MULTIPLES.get(args.slo)
    words["multiple"] = f"{args.slo}, {times} of these" if times else "as asked for"
    print(tables.TABLES["heading"]["text"].format(**words, about=about))


def print_point(name, point, unit):
    """A run in a line, for when it is done: what Session.add returns, its rate in `unit`."""
    rate = "" if point["qps"] is None else f"{point['qps']:.3f} {unit}, "
    its = tables.TABLES["point"]["columns"].items()
    times = ", ".join(f"{what} {tables.show(point[key], spec)} s" for what, (key, spec) in its)
    verdict = f"not met: {point['missed']}" if point["missed"] else "met"
    print(f"{measure.mark(name, point['busy'])}: {rate}{times}; SLO {verdict}")


def print_runs(rows, tbt_slo_s):
    """The tables of `serve`: name -> what Session.add returns. The disturbed are marked."""
    shown = {}
    for name, row in rows.items():
        name += " (cut short)" * bool(row["cut_short"])
        name = measure.mark(name, row["busy"])
        shown[name] = row | row["stalls"] | (row["stalls"]["longest"] or {})
    tables.print_rows("latencies", shown)
    tables.print_rows("batches", shown, slo_s=tbt_slo_s)


def search_json(result):
    """A SearchResult as --json has it: its best run, and all of them."""
    points = [{"qps": trial.qps} | trial.verdict.to_json() for trial in result.trials]
    best = {"qps": 0.0}
    if result.best:
        best = {"qps": result.best.qps} | result.best.verdict.to_json()
    return best | {
        "capacity_qps": result.capacity_qps,
        "bound": result.capacity_qps.bound,
        "points": points,
        "missed": result.missed,
        "busy": result.busy,
    }


def print_capacities(results, unit):
    """The table of `capacity`: name -> run.search_json, rates in `unit`."""
    shown, vllm = {}, results.get("vllm")
    for name, its in results.items():
        gain = 1.0 if its is vllm else vllm and its["capacity_qps"].over(vllm["capacity_qps"])
        shown[measure.mark(name, its["busy"])] = its | {"gain": gain, "runs": len(its["points"])}
    tables.print_rows("capacities", shown, unit=unit)


def conclude(report):
    """What `serve` or `capacity` found, in a paragraph: who meets the SLO, or which rates fail; of
    runs that were cut short or disturbed, or whose SLO is a multiple of what was, nothing."""
    found, slo_s = report.get("runs") or report["results"], f"{report['slo_s']:,.3f} s"
    whole = {name: its for name, its in found.items() if not its.get("cut_short")}
    sure = {name: its for name, its in whole.items() if not (its["busy"] or report["slo_busy"])}
    missed = [f"{name} ({its['missed']})" for name, its in sure.items() if its["missed"]]
    if not sure:
        text = f"Conclusion: {measure.TOO_BUSY if whole else 'no run came to its end'}."
    elif "runs" in report:
        met = [name for name, its in sure.items() if its["met"]]
        text = f"SLO of {slo_s}: met by {'; '.join(met) or 'none'}"  # a name may have a comma
        text += f"; not met by {', '.join(missed)}." if missed else "."
    else:
        each = [f"{its['capacity_qps']:,.2f} under {name}" for name, its in sure.items()]
        text = f"Capacity in {report['unit']} with P99 TBT up to {slo_s}: {', '.join(each)}."
        text += f" Higher rates fail under {', '.join(missed)}." if missed else ""
    return textwrap.fill(text, 100, break_on_hyphens=False)
