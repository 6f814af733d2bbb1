"""Serve arriving requests, and find the rate that a policy can keep up with.

    python bench.py serve --qps 1.5                     every policy on the same arrivals
    python bench.py capacity --slo strict               the highest rate at which each meets the SLO
    python bench.py serve --simulate a100-80gb --preset yi-34b --tp 2     on a simulated machine
    python bench.py serve --simulate this               this machine, and its simulation beside it

The SLO is a multiple of the time of a decode iteration, which is measured first (Sarathi-Serve
§5.1). Read first: lab/measure/capacity.py. Read next: serve_options.py."""

import csv
import io
import random
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from tqdm import tqdm

from cli.loading import load_model
from cli.options import write_json, write_text, wrote, wrote_page
from config import EngineConfig
from lab.commands.serve_options import (
    KV_SENDS,
    THIS,
    CapacityOptions,
    LoadOptions,
    ServeOptions,
    add_options,
    resolve,
)
from lab.measure import capacity, metrics, timing, workload
from lab.measure.capacity import JudgedRun, SearchResult, Trial
from lab.measure.link import measure_link
from lab.measure.machine import Machine, RealMachine
from lab.measure.run_loop import LoadInterrupted, Run
from lab.measure.run_plan import run_plan
from lab.measure.workload import Arrival
from lab.simulator.devices import LINKS, Link
from lab.simulator.machine import (
    CountingMachine,
    FittedMachine,
    SimulatedMachine,
    SimulatedMachineOptions,
)
from lab.simulator.pools import KVLink, PooledMachine
from lab.simulator.referee import broken_rules, mark_broken
from parallel.instances import ChunkedPoolsEngine, PoolsEngine
from parallel.shard import Shard
from policies.token_budget import MAX_DELAY_S, MULTIPLES
from views.page import Recorder, page
from views.tables import Column, format_table, show

__all__ = ["add_options", "main", "resolve"]

SIZES = "sarathi-serve"  # the instances of two pools have memory and batches as under this policy
ArrivalsAt = Callable[[float | None], list[Arrival]]  # a rate, or the trace's own -> a load


@dataclass(frozen=True)
class ServedRow:
    """A row of the tables of serve: a run, and its rate."""

    qps: float | None  # None: the trace's own
    judged: JudgedRun

    def to_json(self) -> dict[str, Any]:
        """The rate and the numbers."""
        return {"qps": self.qps, **self.judged.to_json()}


@dataclass(frozen=True)
class CapacityRow:
    """A row of the table of capacity: a search, and its capacity relative to vllm's."""

    search: SearchResult[JudgedRun]
    gain: capacity.Bounded | None

    def best(self, number: Callable[[metrics.RunSummary], float | None]) -> float | None:
        """A number of the run at the capacity; None if every run failed."""
        best = self.search.best
        return number(best.verdict.summary) if best else None

    def link_s(self) -> float | None:
        """P99 of the time on the link between two pools, in the run at the capacity."""
        best = self.search.best
        link = best.verdict.link if best else None
        return link.exposed_s.p99 if link else None


LATENCY_COLUMNS: list[Column[JudgedRun]] = [
    Column("TTFT P50", lambda run: run.summary.ttft_s.p50, ",.2f"),
    Column("TTFT P99", lambda run: run.summary.ttft_s.p99, ",.2f"),
    Column("delay P50", lambda run: run.summary.scheduling_delay_s.p50, ",.2f"),
    Column("TBT P50", lambda run: run.summary.tbt_s.p50, ",.3f"),
    Column("TBT P99", lambda run: run.summary.tbt_s.p99, ",.3f"),
    Column("stalls", lambda run: run.summary.stalls.count, ",d"),
    Column("over SLO", lambda run: run.summary.stalls.over_slo, ",d"),
    Column("longest", lambda run: _longest(run, "seconds"), ",.3f"),
    Column("caused by", lambda run: _longest(run, "caused_by"), "d"),
]
LINK_COLUMNS: list[Column[JudgedRun]] = [  # only where there are two pools
    Column("memory P99", lambda run: run.link.waited_s.p99 if run.link else None, ",.3f"),
    Column("link P50", lambda run: run.link.exposed_s.p50 if run.link else None, ",.4f"),
    Column("link P99", lambda run: run.link.exposed_s.p99 if run.link else None, ",.4f"),
]
LINK_NOTE = (
    "memory, link: how long a request waits, after its first token, for memory on the decode side, "
    "then for its keys\nand values on the link"
)
BATCH_COLUMNS: list[Column[JudgedRun]] = [
    Column("tokens/s", lambda run: run.summary.tokens_per_s, ",.0f"),
    Column("prefill", lambda run: run.summary.prefill_only, ".0%"),
    Column("hybrid", lambda run: run.summary.hybrid, ".0%"),
    Column("decode", lambda run: run.summary.decode_only, ".0%"),
    Column("at once", lambda run: run.summary.running_mean, ",.1f"),
    Column("peak", lambda run: run.summary.running_peak, "d"),
    Column("preempted", lambda run: run.summary.preemptions, ",d"),
    Column("cached", lambda run: run.summary.cached, ".0%"),
    Column("refused", lambda run: run.refused, ",d"),
    Column("own time", lambda run: run.own_fraction, ".1%"),
]
BATCH_NOTE = """
TTFT, delay: from arrival to the first token, to being scheduled; a stall is a TBT with others' prefill in it,
caused by who had most of that; over SLO: longer than {slo_s:.3f} s; tokens/s: prompt and output; at once: running,
mean over time and peak; cached: prefill that was found, not computed; own time: all of a step but the
forward pass and fetching its tokens"""  # noqa: E501
CAPACITY_NOTE = (
    "capacity: the highest rate that was met, a step of --ratio (5 % without) below one that was "
    "not, twice; at least: no rate\nthat was tried was too high; below: none was low enough"
)


def _longest(run: JudgedRun, field: str) -> Any:
    """A field of a run's longest stall, if it had stalls."""
    longest = run.summary.stalls.longest
    return getattr(longest, field) if longest else None


def make_workload(options: LoadOptions) -> tuple[ArrivalsAt, str]:
    """The arrivals at a rate, and a description of them. Without a rate a trace keeps its own."""
    prefix, prefixes = options.shared_prefix
    longest = options.max_len - prefix
    unit = "requests"
    turns = ""
    logged: list[Arrival] | None = None
    lengths: list[tuple[int, int]] = []
    if options.turns > 1:
        unit = "chats"
        turns = f" of up to {options.turns} turns, {workload.THINK_S:g} s after each answer"
    if options.trace:
        logged, left_out = workload.read_trace(
            options.trace, longest, options.trace_scale, options.requests
        )
        scale = f"lengths times {options.trace_scale:g}"
        description = f"{len(logged)} {unit} of {options.trace}, {scale} ({left_out} left out)"
        description += turns
    else:
        lengths = workload.make_lengths(options.lengths, options.requests, longest, options.seed)
        sizes = f"of {options.lengths}"
        if options.lengths in workload.LENGTHS:
            sizes = f"with the lengths of {options.lengths} scaled to {longest:,}"
        description = f"{options.requests} {unit} {sizes} tokens{turns}"
        if prefix:
            description += f", each after a prefix of {prefix:,} ({prefixes} in all)"
        if options.long_prompt:
            description += f", after one with a prompt of {options.long_prompt:,}"
            output_len = min(16, longest - options.long_prompt)
            lengths.insert(0, (options.long_prompt, output_len))
        description += ", Poisson arrivals"

    def first_turns(qps: float | None) -> list[Arrival]:
        if logged is not None:
            return workload.rescale(logged, qps) if qps else logged
        if qps is None:
            raise ValueError("qps=None: only a trace has a rate of its own")
        return workload.poisson(lengths, qps, options.seed)

    def arrivals_at(qps: float | None) -> list[Arrival]:
        arrivals = first_turns(qps)
        names = list(options.classes)
        shares = list(options.classes.values())
        classes = random.Random(options.seed).choices(names, shares, k=len(arrivals))
        pairs = zip(arrivals, classes, strict=True)
        arrivals = [arrival._replace(priority=name) for arrival, name in pairs]
        load = workload.chats(arrivals, options.turns)
        return [arrival._replace(prompt_len=prefix + arrival.prompt_len) for arrival in load]

    return arrivals_at, description


def make_machine(options: ServeOptions) -> Machine:
    """The machine of --simulate, or this one. Raises ValueError for options that make no sense
    together."""
    if options.is_elsewhere:
        return SimulatedMachine(simulated_options(options))
    model = load_model(options.model, options.max_len, positions_from="--max-len")
    attention = options.model.attention
    real = RealMachine(
        model,
        options.model.name,
        chunk=options.chunk,
        max_len=options.max_len,
        attention=attention,
        seed=options.seed,
        shared_prefix=options.shared_prefix,
    )
    if options.simulate != THIS:
        return real
    is_alone = options.command != "serve"
    return FittedMachine(real, max_len=options.max_len, attention=attention, is_alone=is_alone)


def simulated_options(options: ServeOptions) -> SimulatedMachineOptions:
    """The simulated machine that the options name."""
    assert options.simulate is not None and options.model.preset is not None
    return SimulatedMachineOptions(
        device=options.simulate,
        preset=options.model.preset,
        tp=options.model.tp,
        pp=options.model.pp,
        replicas=options.replicas,
        tp_link=options.tp_link,
        pp_link=options.pp_link,
        cpu_ms=options.cpu_ms,
        max_len=options.max_len,
        chunk=options.chunk,
        seed=options.seed,
        shared_prefix=options.shared_prefix,
    )


class PoolsLink(NamedTuple):
    """What joins two pools."""

    text: str
    simulated: KVLink | None  # None if nothing is simulated


def pools_link(options: ServeOptions, machine: Machine) -> PoolsLink:
    """The link that the options name; or that between two ranks, which is measured where it is
    simulated, too."""
    if isinstance(machine, SimulatedMachine):
        is_layer_wise = options.kv_send == "layers"
        link = KVLink.of(machine.gpus, LINKS[options.kv_link], layer_wise=is_layer_wise)
        return PoolsLink(f"{options.kv_link}, {KV_SENDS[options.kv_send]}", link)
    text = f"torch.distributed, {KV_SENDS['end']}"
    if not isinstance(machine, FittedMachine):
        return PoolsLink(text, None)
    model = machine.real.model
    assert isinstance(model, Shard)  # there are two ranks
    speed = measure_link(model, options.max_len, options.model.attention)
    text += f": {1e3 * speed.step_s:.2f} ms and {speed.bytes_per_s / 1e9:.3g} GB/s"
    return PoolsLink(text, KVLink(Link(speed.bytes_per_s, speed.step_s), speed.token_bytes))


def pooled_servers(
    options: ServeOptions, machine: Machine, kv_link: KVLink | None
) -> dict[str, Callable[..., Run]]:
    """{name: a function as Machine.serve} of --pools, which prefill whole prompts, or chunks. Real
    and simulated as in machines_of."""
    servers: dict[str, Callable[..., Run]] = {}
    assert options.pools is not None
    for suffix, server in machines_of(options, machine).items():
        for kind, cuts_prompts in {"": False, " chunks": True}.items():
            name = f"pools {options.pools}{kind}{suffix}"
            if isinstance(server, RealMachine):
                engine_class = ChunkedPoolsEngine if cuts_prompts else PoolsEngine
                servers[name] = partial(server.serve, engine_class=engine_class)
            elif isinstance(server, CountingMachine) and kv_link is not None:
                pooled = PooledMachine(
                    server.cost,
                    options.pools,
                    kv_link,
                    cuts_prompts=cuts_prompts,
                    seed=options.seed,
                    shared_prefix=options.shared_prefix,
                    drift=server.drift,
                )
                servers[name] = pooled.serve
    return servers


def machines_of(options: ServeOptions, machine: Machine) -> dict[str, Machine]:
    """{what follows the name of a policy: the machine that serves it}. With --simulate this, serve
    shows the real machine and its simulation side by side."""
    if isinstance(machine, FittedMachine) and options.command == "serve":
        return {"": machine.real, ", simulated": machine}
    return {"": machine}


class Session:
    """Runs of several policies on one load, for `serve` or `capacity`. `report` is what --json
    holds: each number is printed and written when it is known."""

    def __init__(
        self,
        options: LoadOptions,
        arrivals_at: ArrivalsAt,
        report: dict[str, Any],
        heading: str,
        broken: Mapping[str, str] | None = None,
    ) -> None:
        """`broken` names the rule that the policy of a run breaks, by the name of the run."""
        self.broken = broken or {}
        self.options = options
        self.arrivals_at = arrivals_at
        self.report = report
        self.heading = heading  # of the machine
        self.slo_s: float = report["slo_s"]
        self.unit: str = report["unit"]
        self.rows: dict[str, ServedRow] = {}  # of serve
        self.runs: dict[str, Run] = {}
        self.recorders: dict[str, Recorder] = {}
        self.trials: dict[str, list[Trial[JudgedRun]]] = {}  # of capacity
        self.searches: dict[str, SearchResult[JudgedRun]] = {}
        self.results = report.setdefault("runs" if self.is_serving else "results", {})

    @property
    def is_serving(self) -> bool:
        """Whether the command is serve, not capacity."""
        return self.options.command == "serve"

    @property
    def has_enough_requests(self) -> bool:
        """Whether there are several times the requests that may run at once, as far as is known."""
        options = self.options
        return isinstance(options, ServeOptions) and options.requests >= options.fewest_requests

    def run_all(self, servers: Mapping[str, Callable[..., Run]], start: float = 0.0) -> None:
        """Let each of `servers` serve at --qps, or search its capacity from the rate `start`.

        A server is a function as Machine.serve of a load. What there is at an interrupt is kept."""
        name = ""
        try:
            for name, serve in servers.items():
                run_at_rate = partial(self.run_at_rate, name, serve)
                if isinstance(self.options, CapacityOptions) and name in self.broken:
                    run_at_rate(start)  # no rate is met
                elif isinstance(self.options, CapacityOptions):
                    capacity.search_capacity(run_at_rate, start, self.options.ratio)
                else:
                    run_at_rate(self.options.qps)
        except KeyboardInterrupt as interrupt:
            if self.is_serving and isinstance(interrupt, LoadInterrupted):
                self.add(name, self.options.qps, interrupt.run)
            print("interrupted: what was seen until then is kept")
            raise
        finally:
            if self.results:
                self.finish()

    def run_at_rate(self, name: str, serve: Callable[..., Run], qps: float | None) -> JudgedRun:
        """Serve the load at this rate, and say whether the SLO was met."""
        arrivals = self.arrivals_at(qps)
        recorder = self.recorders.setdefault(name, Recorder()) if self.options.html else None
        with tqdm(total=len(arrivals), desc=name, disable=None, leave=False) as bar:
            run = serve(arrivals, progress=bar.update, recorder=recorder)
        if recorder and run.transfers:
            recorder.add_transfers(run.transfers)
        return self.add(name, qps, run)

    def add(self, name: str, qps: float | None, run: Run) -> JudgedRun:
        """Print and write what was measured in a run."""
        judged = capacity.judge(
            run, self.slo_s, self.broken.get(name), rate_counts=self.has_enough_requests
        )
        if self.is_serving:
            self.runs[name] = run
            self.rows[name] = ServedRow(qps, judged)
            self.results[name] = self.rows[name].to_json()
        else:
            assert qps is not None and isinstance(self.options, CapacityOptions)
            trials = self.trials.setdefault(name, [])
            trials.append(Trial(qps, judged))
            search = capacity.summarize_search(trials, self.options.ratio)
            self.searches[name] = search
            self.results[name] = search_json(search)
        print(format_point(name, qps, judged, self.unit))
        self.report["conclusion"] = conclude(self.report)
        write_json(self.options, self.report)
        if self.options.csv:
            write_text(self.options.csv, requests_csv(self.runs))
        return judged

    def finish(self) -> None:
        """Print the tables and the conclusion, draw, and say which files were written."""
        options = self.options
        print()
        if self.is_serving:
            print_runs({name: row.judged for name, row in self.rows.items()}, self.slo_s)
        else:
            print_capacities(self.searches, self.unit)
        print(self.report["conclusion"])
        if options.plot:
            from views.timelines import plot_capacity, plot_serving

            machine = self.report["machine"]
            if self.is_serving:
                plot_serving(self.runs, machine, options.plot, self.slo_s)
            else:
                plot_capacity(self.results, machine, options.plot, self.slo_s)
        if options.html:
            html = page(self.report["load"], self.heading, self.recorders, slo_s=self.slo_s)
            write_text(options.html, html)
        wrote(options.json, options.csv, options.plot)
        wrote_page(options.html)


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


def main(options: ServeOptions) -> dict[str, Any]:
    """The command: its report, which --json writes. Raises ValueError for a bad load or SLO."""
    config = EngineConfig(
        chunk=options.chunk,
        max_batch=options.batch,
        max_len=options.max_len,
        max_waiting=options.max_waiting,
        attention=options.model.attention,
        page_size=1,
        pages=options.kv_tokens,
    )
    plan = partial(
        run_plan, options.policies, options.page_size, config, caching=options.prefix_caching
    )
    plan(1.0)  # errors in it, and in the load, end the command before a model is loaded
    arrivals_at, load = make_workload(options)
    is_serving = options.command == "serve"
    has_own_rate = is_serving and options.trace is not None and options.qps is None
    arrivals = arrivals_at(None if has_own_rate else 1.0)
    if isinstance(options, CapacityOptions):
        check_enough(arrivals, options)
    machine = make_machine(options)
    slo_s = capacity.slo_seconds(options.slo, machine.base)
    possible_qps = machine.micro_batches * capacity.estimated_qps(machine.base, arrivals)
    start = float(f"{possible_qps / 2:.2g}")
    if is_serving and not has_own_rate:
        options = replace(options, qps=options.qps or start)
        arrivals = arrivals_at(options.qps)
    info = machine.info.to_json()
    report = {
        "command": options.command,
        "machine": info,
        "load": load,
        "slo_s": slo_s,
        "slo_busy": options.slo in MULTIPLES and info.get("base_busy", False),
        "base": asdict(machine.base),
        "unit": "chats/s" if options.turns > 1 else "requests/s",
    }
    print(format_heading(machine, options, report, arrivals))
    kv_link = None  # that is simulated
    if options.pools:
        link_text, kv_link = pools_link(options, machine)
        print(
            f"pools: {options.pools.prefill} of {options.replicas} instances prefill, "
            f"{options.pools.decode} decode; keys and values over {link_text}\n"
        )
    configs = plan(slo_s)
    violations = broken_rules(run_config.policy for run_config in configs.values())
    for violation in violations.values():
        print(f"{violation.sentence}: no SLO is met\n")
    servers = {}
    broken = {}
    for name, run_config in configs.items():
        for suffix, server in machines_of(options, machine).items():
            servers[name + suffix] = partial(server.serve, run_config)
            if run_config.policy in violations:
                broken[name + suffix] = violations[run_config.policy].rule
    if options.pools:
        pooled_plan = run_plan(
            [SIZES], options.page_size, config, slo_s, caching=options.prefix_caching
        )
        for name, serve in pooled_servers(options, machine, kv_link).items():
            for label, run_config in pooled_plan.items():
                servers[label.replace(SIZES, name)] = partial(serve, run_config)
    session = Session(options, arrivals_at, report, machine.info.heading(), broken)
    session.run_all(servers, start)
    return report


def check_enough(arrivals: Sequence[Arrival], options: CapacityOptions) -> None:
    """Raise ValueError for a load of too few requests, or chats, to search a capacity with."""
    requests = sum(arrival.follows is None for arrival in arrivals)
    fewest = options.fewest_requests
    if requests < fewest:
        limit = f"must be at least {fewest}, {capacity.ROUNDS} times what may run at once"
        given = f"--requests {requests}"
        if options.trace:
            given = f"--trace {options.trace} with {requests} requests"
        raise ValueError(f"{given}: {limit} (--batch {options.batch})")


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
    columns = list(LATENCY_COLUMNS)
    note = BATCH_NOTE.format(slo_s=tbt_slo_s).removeprefix("\n")
    if any(run.link for run in runs.values()):
        columns += LINK_COLUMNS
        note += f"\n{LINK_NOTE}"
    print(format_table("seconds", columns, marked), end="\n\n")
    print(format_table("batches", BATCH_COLUMNS, marked), end="\n\n")
    print(note, end="\n\n")


def print_capacities(searches: Mapping[str, SearchResult[JudgedRun]], unit: str) -> None:
    """Print the table of `capacity`, rates in `unit`."""
    columns: list[Column[CapacityRow]] = [
        Column(f"capacity in {unit}", lambda row: row.search.capacity_qps, ",.2f"),
        Column("relative to vllm", lambda row: row.gain, ",.2fx"),
        Column("P50 TTFT s", lambda row: row.best(lambda run: run.ttft_s.p50), ",.2f"),
        Column("P99 TBT s", lambda row: row.best(lambda run: run.tbt_s.p99), ",.3f"),
        Column("tokens/s", lambda row: row.best(lambda run: run.tokens_per_s), ",.0f"),
        Column("runs", lambda row: len(row.search.trials), "d"),
    ]
    if any(search.best and search.best.verdict.link for search in searches.values()):
        columns.append(Column("P99 link s", CapacityRow.link_s, ",.4f"))
    vllm = searches.get("vllm")
    rows = {}
    for name, search in searches.items():
        gain = None
        if search is vllm:
            gain = capacity.Bounded(1.0)
        elif vllm:
            gain = search.capacity_qps.over(vllm.capacity_qps)
        marked = mark_broken(name, search.trials[-1].verdict.broken_rule)
        rows[timing.mark(marked, search.busy)] = CapacityRow(search, gain)
    print(format_table("policy", columns, rows), end="\n\n")
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
