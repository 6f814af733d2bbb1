"""What `bench.py serve` and `capacity` print and write: lines, tables, and the conclusion.

Read first: lab/measure/metrics.py, cli/tables.py. Read next: serve.py."""

import csv
import io
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from cli.tables import Cell, format_table, show
from lab.commands.serve_options import LoadOptions, ServeOptions
from lab.measure import capacity, metrics, timing
from lab.measure.capacity import JudgedRun, LinkSummary, SearchResult
from lab.measure.machine import Machine
from lab.measure.run_loop import Run
from lab.measure.token_budget import MAX_DELAY_S, MULTIPLES
from lab.measure.workload import Arrival
from lab.simulator.referee import mark_broken


def latency_cells(run: JudgedRun) -> list[Cell]:
    """What clients saw of a run."""
    summary = run.summary
    stalls = summary.stalls
    longest = stalls.longest
    cells: list[Cell] = [
        ("TTFT P50", summary.ttft_s.p50, ",.2f"),
        ("TTFT P99", summary.ttft_s.p99, ",.2f"),
        ("delay P50", summary.scheduling_delay_s.p50, ",.2f"),
        ("TBT P50", summary.tbt_s.p50, ",.3f"),
        ("TBT P99", summary.tbt_s.p99, ",.3f"),
        ("beside prefill", stalls.count, ",d"),
        ("stalls", stalls.over_slo, ",d"),
        ("longest", longest.seconds if longest else None, ",.3f"),
        ("caused by", longest.caused_by if longest else None, "d"),
    ]
    return cells


def link_cells(link: LinkSummary | None) -> list[Cell]:
    """What requests waited for between two pools."""
    return [
        ("memory P99", link.waited_s.p99 if link else None, ",.3f"),
        ("link P50", link.exposed_s.p50 if link else None, ",.4f"),
        ("link P99", link.exposed_s.p99 if link else None, ",.4f"),
    ]


def batch_cells(run: JudgedRun) -> list[Cell]:
    """What the batches of a run were made of."""
    summary = run.summary
    return [
        ("tokens/s", summary.tokens_per_s, ",.0f"),
        ("prefill", summary.prefill_only, ".0%"),
        ("hybrid", summary.hybrid, ".0%"),
        ("decode", summary.decode_only, ".0%"),
        ("at once", summary.running_mean, ",.1f"),
        ("peak", summary.running_peak, "d"),
        ("preempted", summary.preemptions, ",d"),
        ("cached", summary.cached, ".0%"),
        ("refused", run.refused, ",d"),
        ("own time", run.own_fraction, ".1%"),
    ]


LINK_NOTE = (
    "memory, link: how long a request waits, after its first token, for memory on the decode side, "
    "then for its keys\nand values on the link"
)
BATCH_NOTE = """
TTFT, delay: from arrival to the first token, to being scheduled; beside prefill: TBTs with others' prefill in them,
the longest caused by who had most of that; stalls: those above {slo_s:.3f} s; tokens/s: prompt and output; at once:
running, mean over time and peak; cached: prefill that was found, not computed; own time: all of a step but the
forward pass and fetching its tokens"""  # noqa: E501
CAPACITY_NOTE = (
    "capacity: the highest rate that was met, a step of --ratio (5 % without) below one that was "
    "not, twice; at least: no rate\nthat was tried was too high; below: none was low enough"
)


def describe_load(options: LoadOptions, load: str, arrivals: Sequence[Arrival]) -> str:
    """The load of `make_workload`, at its rate, in a line."""
    prompt_len = statistics.median(arrival.prompt_len for arrival in arrivals)
    output_len = statistics.median(arrival.output_len for arrival in arrivals)
    rate = ""
    span = ""
    if options.command == "serve":
        last = max(arrival.time for arrival in arrivals if arrival.follows is None)
        rate = " at its own rate"
        span = f"; the last comes after {last:,.0f} s"
    if options.qps:
        rate = f" at {options.qps:g} a second"
    median = f"median prompt {prompt_len:g}, output {output_len:g} tokens"
    return f"load: {load}{rate}; {median}{span}"


def format_heading(
    machine: Machine, options: ServeOptions, report: Mapping[str, Any], arrivals: Sequence[Arrival]
) -> str:
    """All that the numbers depend on."""
    pages = ", ".join(str(size) for size in options.page_size)
    shared = "; shared: by prompts that begin alike" if any(options.prefix_caching) else ""
    longest = options.kv_tokens // options.max_len
    iteration = timing.mark("a decode iteration", report["slo_busy"])
    base = machine.base
    multiple = "as asked for"
    if options.slo in MULTIPLES:
        multiple = f"{options.slo}, {MULTIPLES[options.slo]} of these"
    return (
        f"{machine.info.heading()}{describe_load(options, report['load'], arrivals)}\n"
        f"memory: {options.kv_tokens:,} tokens of KV cache, {longest} requests if each reserves "
        f"{options.max_len:,}; pages of {pages} tokens{shared}\n"
        f"at most {options.batch} requests at once; chunk {options.chunk}\n"
        f"{machine.notes}{iteration} takes {base.seconds:.4f} s (batch {base.decodes}, "
        f"context {base.context:,}, no prefill)\n"
        f"SLO: P99 TBT at most {report['slo_s']:.3f} s ({multiple}), "
        f"median delay at most {MAX_DELAY_S:g} s\n"
    )


def format_point(name: str, qps: float | None, judged: JudgedRun, unit: str) -> str:
    """A run in a line, for when it has ended."""
    rate = "" if qps is None else f"{qps:.3f} {unit}, "
    summary = judged.summary
    times = {
        "P50 TTFT": summary.ttft_s.p50,
        "P99 TBT": summary.tbt_s.p99,
        "longest stall": summary.longest_stall_s,
        "median delay": summary.scheduling_delay_s.p50,
    }
    texts = ", ".join(f"{head} {show(seconds, ',.3f')} s" for head, seconds in times.items())
    verdict = f"not met: {judged.missed}" if judged.missed else "met"
    return f"{timing.mark(name, judged.busy)}: {rate}{texts}; SLO {verdict}"


def print_runs(runs: Mapping[str, JudgedRun], tbt_slo_s: float) -> None:
    """Print the tables of `serve`. Runs that were disturbed or cut short are marked."""
    marked = {}
    for name, run in runs.items():
        cut = f"{name} (cut short)" if run.cut_short else name
        marked[timing.mark(mark_broken(cut, run.broken_rule), run.busy)] = run
    note = BATCH_NOTE.format(slo_s=tbt_slo_s).removeprefix("\n")
    latencies = {name: latency_cells(run) for name, run in marked.items()}
    if any(run.link for run in runs.values()):
        for name, run in marked.items():
            latencies[name] += link_cells(run.link)
        note += f"\n{LINK_NOTE}"
    print(format_table("seconds", latencies), end="\n\n")
    batches = {name: batch_cells(run) for name, run in marked.items()}
    print(format_table("batches", batches), end="\n\n")
    print(note, end="\n\n")


def print_capacities(searches: Mapping[str, SearchResult[JudgedRun]], unit: str) -> None:
    """Print the table of `capacity`, rates in `unit`."""
    has_link = any(search.best and search.best.verdict.link for search in searches.values())
    vllm = searches.get("vllm")
    rows: dict[str, list[Cell]] = {}
    for name, search in searches.items():
        gain = None
        if search is vllm:
            gain = capacity.Bounded(1.0)
        elif vllm:
            gain = search.capacity_qps.over(vllm.capacity_qps)
        best = search.best.verdict if search.best else None  # the run at the capacity
        link = best.link if best else None
        row: list[Cell] = [
            (f"capacity in {unit}", search.capacity_qps, ",.2f"),
            ("relative to vllm", gain, ",.2fx"),
            ("P50 TTFT s", best and best.summary.ttft_s.p50, ",.2f"),
            ("P99 TBT s", best and best.summary.tbt_s.p99, ",.3f"),
            ("tokens/s", best and best.summary.tokens_per_s, ",.0f"),
            ("runs", len(search.trials), "d"),
        ]
        if has_link:
            row.append(("P99 link s", link and link.exposed_s.p99, ",.4f"))
        marked = mark_broken(name, search.trials[-1].verdict.broken_rule)
        rows[timing.mark(marked, search.busy)] = row
    print(format_table("policy", rows), end="\n\n")
    print(CAPACITY_NOTE, end="\n\n")


def search_json(search: SearchResult[JudgedRun]) -> dict[str, Any]:
    """A search as --json has it: its best run, and all of them."""
    points = [{"qps": trial.qps, **trial.verdict.to_json()} for trial in search.trials]
    best: dict[str, Any] = {"qps": 0.0}
    if search.best:
        best = {"qps": search.best.qps, **search.best.verdict.to_json()}
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
        text = f"Capacity in {report['unit']} with P99 TBT up to {slo_s}: {', '.join(rates)}."
        if missed:
            text += f" Higher rates fail under {', '.join(missed)}."
    return textwrap.fill(text, 100, break_on_hyphens=False)


def requests_csv(runs: Mapping[str, Run]) -> str:
    """A row for each request of each run, as the text of a CSV file."""
    rows = [
        {"policy": name, **row}
        for name, run in runs.items()
        for row in metrics.request_rows(run.completions, run.iterations)
    ]
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerows(rows[:1])  # the keys of the first are the header
    writer.writerows(row.values() for row in rows)
    return text.getvalue()
