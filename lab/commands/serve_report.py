"""What `bench.py serve` and `capacity` print and write: lines, tables, and the conclusion.

Read first: lab/measure/metrics.py, cli/tables.py. Read next: serve.py."""

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from cli.options import plain
from cli.tables import Cell, format_table, show
from lab.commands.serve_options import ServeOptions
from lab.measure import capacity, timing
from lab.measure.capacity import JudgedRun, SearchResult
from lab.measure.machine import Machine
from lab.measure.token_budget import MAX_DELAY_S, MULTIPLES
from lab.measure.workload import Arrival

NOTE = """
TTFT, delay: from arrival to the first token, to being scheduled; beside prefill: TBTs with others' prefill in them,
the longest caused by who had most of that; stalls: those above {tbt_slo_s:.3f} s; goodput: requests that met their
SLOs, per second: TTFT up to {ttft_slo_s:g} s, their own P99 TBT up to {tbt_slo_s:.3f} s; tokens/s: prompt and output; at once:
running, mean over time and peak; cached: prefill that was found, not computed; own time: all of a step but the
forward pass and fetching its tokens"""  # noqa: E501
LINK_NOTE = """
memory, link: how long a request waits, after its first token, for memory on the decode side, then for its keys
and values on the link"""  # noqa: E501
CAPACITY_NOTE = """
capacity: the highest rate that was met, a step of --ratio (5 % without) below one that was not, twice; at least: no rate
that was tried was too high; below: none was low enough
"""  # noqa: E501


def describe_load(options: ServeOptions, load: str, arrivals: Sequence[Arrival]) -> str:
    """The load of `make_workload`, at its rate, as a line."""
    prompt_len = statistics.median(arrival.prompt_len for arrival in arrivals)
    output_len = statistics.median(arrival.output_len for arrival in arrivals)
    rate = ""
    span = ""
    if options.command == "serve":
        last = max(arrival.time for arrival in arrivals)
        rate = " at its own rate"
        span = f"; the last comes after {last:,.0f} s"
    if options.qps:
        rate = f" at {options.qps:g} a second"
    median = f"median prompt {prompt_len:g}, output {output_len:g} tokens"
    text = textwrap.fill(
        f"load: {load}{rate}; {median}{span}", 100, break_long_words=False, break_on_hyphens=False
    )
    return f"{text}\n"


def format_sizes(machine: Machine, options: ServeOptions, report: Mapping[str, Any]) -> str:
    """The memory, the batch and the SLO."""
    pages = ", ".join(str(size) for size in options.page_size)
    shared = "; shared: by prompts that begin alike" if any(options.prefix_caching) else ""
    longest = options.kv_tokens // options.max_len
    iteration = timing.mark("a decode iteration", report["slo_busy"])
    base = machine.base
    multiple = "as asked for"
    if options.slo in MULTIPLES:
        multiple = f"{options.slo}, {MULTIPLES[options.slo]} of these"
    return (
        f"memory: {options.kv_tokens:,} tokens of KV cache, {longest} requests if each reserves "
        f"{options.max_len:,}; pages of {pages} tokens{shared}\n"
        f"at most {options.batch} requests at once; chunk {options.chunk}\n"
        f"{machine.notes}{iteration} takes {base.seconds:.4f} s (batch {base.decodes}, "
        f"context {base.context:,}, no prefill)\n"
        f"SLO: P99 TBT at most {report['slo_s']:.3f} s ({multiple}), "
        f"median delay at most {MAX_DELAY_S:g} s\n"
    )


def format_point(name: str, qps: float | None, judged: JudgedRun) -> str:
    """A run in a line, for when it has ended."""
    rate = "" if qps is None else f"{qps:.3f} requests/s, "
    times = {
        "P50 TTFT": judged.p50_ttft_s,
        "P99 TBT": judged.p99_tbt_s,
        "longest stall": judged.longest_stall_s,
        "median delay": judged.p50_delay_s,
    }
    texts = ", ".join(f"{head} {show(seconds, ',.3f')} s" for head, seconds in times.items())
    verdict = f"not met: {judged.missed}" if judged.missed else "met"
    return f"{timing.mark(name, judged.busy)}: {rate}{texts}; SLO {verdict}"


def print_runs(runs: Mapping[str, JudgedRun], ttft_slo_s: float, tbt_slo_s: float) -> None:
    """Print the tables of `serve`: what clients saw, and what the batches were made of. Runs that
    were disturbed or cut short are marked."""
    latencies: dict[str, list[Cell]] = {}
    batches: dict[str, list[Cell]] = {}
    links: dict[str, list[Cell]] = {}
    for name, run in runs.items():
        cut = f"{name} (cut short)" if run.cut_short else name
        marked = timing.mark(cut, run.busy)
        longest = run.stalls.longest
        latencies[marked] = [
            ("TTFT P50", run.p50_ttft_s, ",.2f"),
            ("TTFT P99", run.p99_ttft_s, ",.2f"),
            ("delay P50", run.p50_delay_s, ",.2f"),
            ("TBT P50", run.p50_tbt_s, ",.3f"),
            ("TBT P99", run.p99_tbt_s, ",.3f"),
            ("beside prefill", run.stalls.count, ",d"),
            ("stalls", run.stalls.over_slo, ",d"),
            ("longest", longest and longest.seconds, ",.3f"),
            ("caused by", longest and longest.caused_by, "d"),
        ]
        if run.link:
            links[marked] = [
                ("memory P99", run.link.waited_s.p99, ",.3f"),
                ("link P50", run.link.exposed_s.p50, ",.4f"),
                ("link P99", run.link.exposed_s.p99, ",.4f"),
            ]
        batches[marked] = [
            ("goodput", run.goodput_per_s, ",.2f"),
            ("tokens/s", run.tokens_per_s, ",.0f"),
            ("prefill", run.prefill_only, ".0%"),
            ("hybrid", run.hybrid, ".0%"),
            ("decode", run.decode_only, ".0%"),
            ("at once", run.running_mean, ",.1f"),
            ("peak", run.running_peak, "d"),
            ("preempted", run.preemptions, ",d"),
            ("cached", run.cached, ".0%"),
            ("refused", run.refused, ",d"),
            ("own time", run.own_fraction, ".1%"),
        ]
    print(format_table("seconds", latencies), end="\n\n")
    print(format_table("batches", batches))
    print(NOTE.format(ttft_slo_s=ttft_slo_s, tbt_slo_s=tbt_slo_s), end="\n\n")
    if links:
        print(format_table("seconds", links))
        print(LINK_NOTE, end="\n\n")


def print_capacities(searches: Mapping[str, SearchResult[JudgedRun]]) -> None:
    """Print the table of `capacity`."""
    has_link = any(search.best and search.best.verdict.link for search in searches.values())
    vllm = searches.get("vllm")
    rows: dict[str, list[Cell]] = {}
    for name, search in searches.items():
        gain = None
        if vllm:
            gain = search.capacity_qps.over(vllm.capacity_qps)
        if search is vllm:
            gain = capacity.Bounded(1.0)
        best = search.best.verdict if search.best else None  # the run at the capacity
        row: list[Cell] = [
            ("capacity in requests/s", search.capacity_qps, ",.2f"),
            ("relative to vllm", gain, ",.2fx"),
            ("P50 TTFT s", best and best.p50_ttft_s, ",.2f"),
            ("P99 TBT s", best and best.p99_tbt_s, ",.3f"),
            ("tokens/s", best and best.tokens_per_s, ",.0f"),
            ("runs", len(search.trials), "d"),
        ]
        if has_link:
            row.append(("P99 link s", best and best.link and best.link.exposed_s.p99, ",.4f"))
        rows[timing.mark(name, search.busy)] = row
    print(f"{format_table('policy', rows)}\n{CAPACITY_NOTE}")


def run_json(qps: float | None, run: JudgedRun) -> dict[str, Any]:
    """A run at a rate as --json has it. Only two pools have a link."""
    row = {"qps": qps, **plain(run)}
    if run.link is None:
        del row["link"]
    return row


def search_json(search: SearchResult[JudgedRun]) -> dict[str, Any]:
    """A search as --json has it: its best run, and all of them."""
    points = [run_json(trial.qps, trial.verdict) for trial in search.trials]
    best = run_json(search.best.qps, search.best.verdict) if search.best else {"qps": 0.0}
    return best | {
        "capacity_qps": search.capacity_qps,
        "bound": search.capacity_qps.bound,
        "points": points,
        "missed": search.missed,
        "busy": search.busy,
    }


def conclude(report: Mapping[str, Any]) -> str:
    """The result of `serve` or `capacity` in a paragraph: which policies meet the SLO, or at which
    rates. Runs that were cut short or disturbed do not count, nor does an SLO that is a multiple of
    a disturbed measurement."""
    results = report.get("runs") or report["results"]
    slo_s = f"{report['slo_s']:,.3f} s"
    complete = {name: row for name, row in results.items() if not row.get("cut_short")}
    sure = {name: row for name, row in complete.items() if not (row["busy"] or report["slo_busy"])}
    missed = [f"{name} ({row['missed']})" for name, row in sure.items() if row["missed"]]
    if not sure:
        text = f"Conclusion: {timing.TOO_BUSY if complete else 'no run came to its end'}."
    elif "runs" in report:
        met = [name for name, row in sure.items() if row["met"]]
        text = f"SLO of {slo_s}: met by {'; '.join(met) or 'none'}"  # a name may have a comma
        text += f"; not met by {', '.join(missed)}." if missed else "."
    else:
        rates = [f"{row['capacity_qps']:,.2f} under {name}" for name, row in sure.items()]
        text = f"Capacity in requests/s with P99 TBT up to {slo_s}: {', '.join(rates)}."
        if missed:
            text += f" Higher rates fail under {', '.join(missed)}."
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)
