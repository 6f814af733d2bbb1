"""What `serve` and `capacity` print: the heading, tables, and what to conclude from them.

Read first: metrics.py and run.py, which find these numbers. Read next: serving.py, which prints.
"""

import statistics
import textwrap
from functools import reduce

from experiments.measure import TOO_BUSY, mark
from experiments.options import machine_lines
from experiments.tables import print_table, show
from policies.slo import MAX_DELAY_S, SLOS

# the tables of `serve`: head -> what of metrics.summarize_run is below it, and its format
LATENCIES = {
    "TTFT P50": ("ttft_s.p50", ",.2f"),
    "TTFT P99": ("ttft_s.p99", ",.2f"),
    "delay P50": ("scheduling_delay_s.p50", ",.2f"),
    "TBT P50": ("tbt_s.p50", ",.3f"),
    "TBT P99": ("tbt_s.p99", ",.3f"),
    "stalls": ("stalls.count", ",d"),
    "over SLO": ("stalls.over_slo", ",d"),
    "longest": ("stalls.longest.seconds", ",.3f"),
    "caused by": ("stalls.longest.caused_by", "d"),
}
BATCHES = {
    "tokens/s": ("tokens_per_s", ",.0f"),
    "prefill": ("prefill_only", ".0%"),
    "hybrid": ("hybrid", ".0%"),
    "decode": ("decode_only", ".0%"),
    "at once": ("running_mean", ",.1f"),
    "peak": ("running_peak", "d"),
    "preempted": ("preemptions", ",d"),
    "refused": ("refused", ",d"),
    "own time": ("own_fraction", ".1%"),
}


def print_heading(machine, args, report, arrivals):
    """What all the numbers depend on. `report` has the load, slo_s, and whether it is slo_busy."""
    base, kv_tokens = machine.base, args.kv_tokens
    prompt, output = (statistics.median(column) for column in list(zip(*arrivals))[1:3])
    multiple = f"{args.slo}, {SLOS[args.slo]} of these" if args.slo in SLOS else "as asked for"
    span, rate = "", ""
    if args.command == "serve":
        span = f"; the last comes after {arrivals[-1].time:,.0f} s"
        rate = f" at {args.qps:g} a second" if args.qps else " at its own rate"
    print(
        f"{machine_lines(machine.machine)}"
        f"load: {report['load']}{rate}; median prompt {prompt:g}, output {output:g} tokens{span}\n"
        f"memory: {kv_tokens:,} tokens of KV cache, {kv_tokens // args.max_len} requests if each "
        f"reserves {args.max_len:,}; pages of {', '.join(map(str, args.page_size))} tokens\n"
        f"at most {args.batch} requests at once; chunk {args.chunk}\n{machine.lines}"
        f"{mark('a decode iteration', report['slo_busy'])} takes {base.seconds:.4f} s (batch "
        f"{base.decodes}, context {base.context:,}, no prefill)\n"
        f"SLO: P99 TBT at most {report['slo_s']:.3f} s ({multiple}), median scheduling delay at "
        f"most {MAX_DELAY_S:g} s\n"
    )


def print_columns(first, columns, rows):
    """A table with some of the columns above; `rows` is {name: metrics.summarize_run}."""
    get = lambda value, key: value and value[key]  # there may be no longest stall
    paths = [path.split(".") for path, _ in columns.values()]
    table = [[name, *(reduce(get, path, row) for path in paths)] for name, row in rows.items()]
    print_table({first: ""} | {head: spec for head, (_, spec) in columns.items()}, table)


def print_runs(rows, tbt_slo_s):
    """The tables of `serve`; who was cut short, or disturbed, is marked."""
    cut = {name: name + " (cut short)" * bool(row["cut_short"]) for name, row in rows.items()}
    rows = {mark(cut[name], row["busy"]): row for name, row in rows.items()}
    print_columns("seconds", LATENCIES, rows)
    print(
        "\nfrom arrival to: the first token (TTFT), being scheduled (delay); TBT: between two "
        "tokens of a request,\npreemptions included; a stall is one in which others' prefill was "
        "computed, caused by the request with the\nmost of it; over SLO: longer than "
        f"{tbt_slo_s:.3f} s\n"
    )
    print_columns("batches", BATCHES, rows)
    print(
        "\ntokens/s: prompt and output; at once: requests running, mean over time and peak; own "
        "time: all of a step but\nthe forward pass and fetching its tokens"
    )


def print_point(name, point):
    """A run in a line, for when it is done: run.rate_point."""
    rate = "" if point["qps"] is None else f"{point['qps']:.3f} requests/s, "
    keys = {"P50 TTFT": "p50_ttft_s", "P99 TBT": "p99_tbt_s", "longest stall": "longest_stall_s"}
    keys |= {"median delay": "p50_delay_s"}
    times = ", ".join(f"{what} {show(point[key], ',.3f')} s" for what, key in keys.items())
    verdict = f"not met: {point['missed']}" if point["missed"] else "met"
    print(f"{mark(name, point['busy'])}: {rate}{times}; SLO {verdict}")


def print_capacities(results):
    """The table of `capacity`. Results: name -> run.found_so_far."""
    table, vllm = [], results.get("vllm")
    for name, its in results.items():
        qps, count = its["capacity_qps"], len(its["points"])
        gain = 1.0 if its is vllm else vllm and qps.over(vllm["capacity_qps"])
        seen = map(its.get, ("p50_ttft_s", "p99_tbt_s", "tokens_per_s"))
        table.append([mark(name, its["busy"]), qps, gain, *seen, count])
    columns = {"policy": "", "capacity in requests/s": ",.2f", "relative to vllm": ",.2fx"}
    columns |= {"P50 TTFT s": ",.2f", "P99 TBT s": ",.3f", "tokens/s": ",.0f", "runs": "d"}
    print_table(columns, table)
    print(
        "\ncapacity: the highest rate that was met, 5 % below one that was not, twice; latencies "
        "and tokens/s (prompt and\noutput) are those at this rate"
    )


def listed(parts):
    """The text of a list: "a, b and c", or "none"."""
    *parts, last = parts or ["none"]
    return f"{', '.join(parts)} and {last}" if parts else last


def compare(name, other, rows):
    """What one has and costs over the other, a sentence; "" if nothing is known."""
    keys = {"P99 TBT": "p99_tbt_s", "median TTFT": "p50_ttft_s", "throughput": "tokens_per_s"}
    pairs = {what: [rows[n].get(key) for n in (name, other)] for what, key in keys.items()}
    ratios = [f"{a / b:.2f}x the {what}" for what, (a, b) in pairs.items() if a and b]
    return f" Against {other}, {name} has {listed(ratios)}." if ratios else ""


def conclude(report):
    """What `serve` or `capacity` found, in a paragraph: who meets the SLO, and at what price.

    Nothing is said of a run that was cut short, nor of what others disturbed; if that was what the
    SLO is a multiple of, of nothing.
    """
    found, slo_s = report.get("runs") or report["results"], f"{report['slo_s']:,.3f} s"
    whole = {name: its for name, its in found.items() if not its.get("cut_short")}
    sure = {name: its for name, its in whole.items() if not (its["busy"] or report["slo_busy"])}
    if not sure:
        return f"Conclusion: {TOO_BUSY if whole else 'no run came to its end'}."
    if "runs" in report:
        names = sorted(sure, key=lambda name: sure[name]["p99_tbt_s"] or 0.0)
        met = [name for name in names if sure[name]["met"]]
        failed = [f"{name} ({sure[name]['missed']})" for name in names if name not in met]
        text = f"SLO of {slo_s}: met by {listed(met)}"
        text += f"; not met by {listed(failed)}. " if failed else ". "
        time = lambda name, key: show(sure[name][key], ",.3f")
        each = [f"{time(n, 'longest_stall_s')} and {time(n, 'p99_tbt_s')} under {n}" for n in names]
        text += f"Longest stall and P99 TBT in s: {'; '.join(each)}."
    else:
        qps = {name: its["capacity_qps"] for name, its in sure.items()}
        names = sorted(qps, key=lambda name: (qps[name].bound == "below", -qps[name]))
        each = [f"{qps[name]:,.2f} under {name}" for name in names]
        text = f"Capacity in requests/s with P99 TBT up to {slo_s}: {', '.join(each)}."
        gains = {name: qps[names[0]].over(qps[name]) or "an unknown multiple" for name in names[1:]}
        each = [f"{show(gain, '.2fx')} that of {name}" for name, gain in gains.items()]
        text += f" That of {names[0]} is {listed(each)}." if each else ""
        each = [f"{sure[name]['missed']} under {name}" for name in names if sure[name]["missed"]]
        text += f" Higher rates fail: {listed(each)}." if each else ""
    if others := names[1:]:
        text += compare(names[0], "vllm" if "vllm" in others else others[-1], sure)
    return textwrap.fill(text, 100, break_on_hyphens=False)
