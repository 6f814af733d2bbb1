"""Serve arriving requests, and find the rate that a policy can keep up with.

    python bench.py serve --qps 1.5                     every policy on the same arrivals
    python bench.py capacity --slo strict               the highest rate at which each meets the SLO
    python bench.py serve --simulate a100-80gb --preset yi-34b --tp 2     on a simulated machine

The SLO is a multiple of the time of a decode iteration, which is measured first (Sarathi-Serve
§5.1). Read first: lab/measure/capacity.py. Read next: serve_options.py, serve_report.py."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tqdm import tqdm

from cli.loading import load_model
from cli.options import write_json, write_text
from config import EngineConfig
from lab.commands.frame import reporting
from lab.commands.serve_options import (
    KV_SENDS,
    CapacityOptions,
    ServeOptions,
    add_options,
    resolve,
)
from lab.commands.serve_report import (
    conclude,
    describe_load,
    format_point,
    format_sizes,
    print_capacities,
    print_runs,
    run_json,
    search_json,
)
from lab.measure import capacity, workload
from lab.measure.capacity import JudgedRun, SearchResult, Trial
from lab.measure.machine import Machine, RealMachine
from lab.measure.machine_info import MachineInfo
from lab.measure.run_loop import LoadInterrupted, Run
from lab.measure.run_plan import run_plan
from lab.measure.token_budget import MULTIPLES
from lab.measure.workload import Arrival
from lab.simulator.devices import LINKS
from lab.simulator.machine import CountingMachine, SimulatedMachine
from lab.simulator.pools import KVLink, simulate_pools
from page.html import page
from page.records import Recorder, instance_names
from policies.pools import Pools

__all__ = ["add_options", "main", "resolve"]

SIZES = "sarathi-serve"  # the instances of two pools have memory and batches as under this policy
ArrivalsAt = Callable[[float | None], list[Arrival]]  # a rate, or the trace's own -> a load
Serve = Callable[..., Run]  # of a load, as Machine.serve


def make_workload(options: ServeOptions) -> tuple[ArrivalsAt, str]:
    """The arrivals at a rate, and a description of them. Without a rate a trace keeps its own."""
    prefix, prefixes = options.shared_prefix
    longest = options.max_len - prefix
    logged: list[Arrival] = []
    lengths: list[tuple[int, int]] = []
    if options.trace:
        scale = options.trace_scale
        logged, left_out = workload.read_trace(options.trace, longest, scale, options.requests)
        description = f"{len(logged)} requests of {options.trace}, lengths times {scale:g} "
        description += f"({left_out} left out)"
    else:
        lengths = workload.make_lengths(options.lengths, options.requests, longest, options.seed)
        sizes = f"of {options.lengths}"
        if options.lengths in workload.LENGTHS:
            sizes = f"with the lengths of {options.lengths} scaled to {longest:,}"
        description = f"{options.requests} requests {sizes} tokens"
        if prefix:
            description += f", each after a prefix of {prefix:,} ({prefixes} in all)"
        if options.long_prompt:
            description += f", after one with a prompt of {options.long_prompt:,}"
            output_len = min(16, longest - options.long_prompt)
            lengths.insert(0, (options.long_prompt, output_len))
        description += ", Poisson arrivals"

    def arrivals_at(qps: float | None) -> list[Arrival]:
        if not logged:
            arrivals = workload.poisson(lengths, qps or 1.0, options.seed)
        else:
            arrivals = workload.rescale(logged, qps) if qps else logged
        names = list(options.classes)
        shares = list(options.classes.values())
        classes = random.Random(options.seed).choices(names, shares, k=len(arrivals))
        pairs = zip(arrivals, classes, strict=True)
        return [
            arrival._replace(priority=name, prompt_len=prefix + arrival.prompt_len)
            for arrival, name in pairs
        ]

    return arrivals_at, description


def make_machine(options: ServeOptions) -> Machine:
    """The machine of --simulate, or this one. Raises ValueError for options that make no sense
    together."""
    name = options.model.name
    make_prompts = partial(workload.prompts, seed=options.seed, shared=options.shared_prefix)
    if options.simulate:
        return SimulatedMachine(
            options.cost(),
            name,
            replicas=options.replicas,
            max_len=options.max_len,
            chunk=options.chunk,
            make_prompts=make_prompts,
        )
    return RealMachine(
        load_model(options.model, options.max_len, positions_from="--max-len"),
        name,
        chunk=options.chunk,
        max_len=options.max_len,
        attention=options.model.attention,
        make_prompts=make_prompts,
    )


def pooled_servers(
    options: ServeOptions, pools: Pools, machine: SimulatedMachine
) -> dict[str, Serve]:
    """The servers of --pools, which prefill whole prompts, or chunks."""
    is_layer_wise = options.kv_send == "layers"
    kv_link = KVLink.of(machine.cost, LINKS[options.kv_link], layer_wise=is_layer_wise)
    servers: dict[str, Serve] = {}
    for kind, cuts_prompts in {"": False, " chunks": True}.items():
        run = partial(
            simulate_pools,
            machine.cost,
            pools=pools,
            kv_link=kv_link,
            cuts_prompts=cuts_prompts,
        )
        server = CountingMachine(run, machine.make_prompts)
        servers[f"pools {pools}{kind}"] = server.serve
    return servers


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Servers and the load that all of them get. `report` is what --json holds: each number is
    printed and written when it is known."""

    options: ServeOptions
    arrivals_at: ArrivalsAt
    servers: Mapping[str, Serve]
    report: dict[str, Any]
    machine: MachineInfo
    rate_counts: bool = False  # see metrics.missed
    replicas: int = 1  # whose batches are apart, as those of the stages of a pipeline are not

    def run(self, name: str, qps: float | None, recorder: Recorder | None = None) -> Run:
        """Let a server serve the load at this rate."""
        arrivals = self.arrivals_at(qps)
        with tqdm(total=len(arrivals), desc=name, disable=None, leave=False) as bar:
            return self.servers[name](arrivals, progress=bar.update, recorder=recorder)

    def judge(self, name: str, run: Run) -> JudgedRun:
        """Whether a run met the SLO."""
        return capacity.judge(
            run,
            self.report["slo_s"],
            ttft_slo_s=self.options.ttft_slo,
            rate_counts=self.rate_counts,
        )

    def keep(self, results: str, name: str, row: dict[str, Any]) -> None:
        """Keep the row of a server among the `results`, and write the report."""
        self.report.setdefault(results, {})[name] = row
        self.report["conclusion"] = conclude(self.report)
        write_json(self.options, self.report)


def compare_runs(comparison: Comparison) -> None:
    """`serve`: let each server serve at --qps. What there is at an interrupt is kept."""
    options = comparison.options
    report = comparison.report
    slo_s = report["slo_s"]
    runs: dict[str, Run] = {}
    judged: dict[str, JudgedRun] = {}
    recorders: dict[str, Recorder] = {}

    def keep(name: str, run: Run) -> None:
        runs[name] = run
        judged[name] = comparison.judge(name, run)
        print(format_point(name, options.qps, judged[name]))
        comparison.keep("runs", name, run_json(options.qps, judged[name]))

    def show() -> None:
        print()
        print_runs(judged, options.ttft_slo, slo_s)
        print(report["conclusion"])

    def draw(file: str) -> None:
        from lab.pictures.timelines import plot_serving

        plot_serving(runs, report["machine"], file, slo_s)

    def write_page(file: str) -> None:
        heading = comparison.machine.heading()
        write_text(file, page(report["load"], heading, recorders, slo_s=slo_s))

    with reporting(options, report, show, plot=draw, html=write_page):
        for name in comparison.servers:
            if options.html:
                recorders[name] = Recorder()
            try:
                run = comparison.run(name, options.qps, recorders.get(name))
            except LoadInterrupted as interrupt:
                keep(name, interrupt.run)
                raise
            if name in recorders:
                name_instances(recorders[name], run, comparison.replicas)
            keep(name, run)


def name_instances(recorder: Recorder, run: Run, replicas: int) -> None:
    """Let the page have a lane for each instance: of two pools, with what is sent between them, or
    of replicas."""
    if run.transfers:
        recorder.add_transfers(run.transfers)
    elif "prefills" not in recorder.settings and replicas > 1:
        recorder.name_replicas(instance_names("replica", replicas))


def compare_capacities(comparison: Comparison, start: float, ratio: float) -> None:
    """`capacity`: search the highest rate at which each server meets the SLO, from the rate `start`
    on. What there is at an interrupt is kept."""
    report = comparison.report
    searches: dict[str, SearchResult[JudgedRun]] = {}

    def search(name: str) -> None:
        trials: list[Trial[JudgedRun]] = []

        def run_at_rate(qps: float) -> JudgedRun:
            judged = comparison.judge(name, comparison.run(name, qps))
            trials.append(Trial(qps, judged))
            searches[name] = capacity.summarize_search(trials, ratio)
            print(format_point(name, qps, judged))
            comparison.keep("results", name, search_json(searches[name]))
            return judged

        capacity.search_capacity(run_at_rate, start, ratio)

    def show() -> None:
        print()
        print_capacities(searches)
        print(report["conclusion"])

    def draw(file: str) -> None:
        from lab.pictures.timelines import plot_capacity

        plot_capacity(report["results"], report["machine"], file, report["slo_s"])

    with reporting(comparison.options, report, show, plot=draw):
        for name in comparison.servers:
            search(name)


def main(options: ServeOptions) -> dict[str, Any]:
    """The command: its report, which --json writes. Raises ValueError for a bad load or SLO."""
    plan = partial(
        run_plan,
        page_sizes=options.page_size,
        caching=options.prefix_caching,
        config=EngineConfig(
            chunk=options.chunk,
            max_batch=options.batch,
            max_len=options.max_len,
            max_waiting=options.max_waiting,
            attention=options.model.attention,
            page_size=1,
            pages=options.kv_tokens,
        ),
    )
    plan(options.policies, tbt_slo_s=1.0)  # errors end the command before a model is loaded
    arrivals_at, load = make_workload(options)
    is_serving = options.command == "serve"
    has_own_rate = is_serving and options.trace is not None and options.qps is None
    arrivals = arrivals_at(None if has_own_rate else 1.0)
    if isinstance(options, CapacityOptions):
        check_enough(arrivals, options)
    machine = make_machine(options)
    base = machine.base
    slo_s = capacity.slo_seconds(options.slo, base)
    start = half_of_possible_qps(machine, arrivals)
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
        "base": vars(base),
    }
    print(machine.info.heading() + describe_load(options, load, arrivals), end="")
    print(format_sizes(machine, options, report))
    configs = plan(options.policies, tbt_slo_s=slo_s)
    if options.pools:
        print(
            f"pools: {options.pools.prefill} of {options.replicas} instances prefill, "
            f"{options.pools.decode} decode; keys and values over {options.kv_link}, "
            f"{KV_SENDS[options.kv_send]}\n"
        )
    servers: dict[str, Serve] = {}
    for name, config in configs.items():
        servers[name] = partial(machine.serve, config)
    if options.pools and isinstance(machine, SimulatedMachine):
        pooled_configs = plan([SIZES], tbt_slo_s=slo_s)
        for name, serve in pooled_servers(options, options.pools, machine).items():
            for label, config in pooled_configs.items():
                servers[name + label.removeprefix(SIZES)] = partial(serve, config)
    comparison = Comparison(
        options=options,
        arrivals_at=arrivals_at,
        servers=servers,
        report=report,
        machine=machine.info,
        rate_counts=options.requests >= options.fewest_requests,
        replicas=options.replicas if options.model.pp == 1 else 1,
    )
    if isinstance(options, CapacityOptions):
        compare_capacities(comparison, start, options.ratio)
    else:
        compare_runs(comparison)
    return report


def half_of_possible_qps(machine: Machine, arrivals: list[Arrival]) -> float:
    """Half of the rate that a machine should be able to serve: where no other is given."""
    possible_qps = machine.micro_batches * capacity.estimated_qps(machine.base, arrivals)
    return float(f"{possible_qps / 2:.2g}")


def check_enough(arrivals: list[Arrival], options: CapacityOptions) -> None:
    """Raise ValueError for a load of too few requests to search a capacity with."""
    requests = len(arrivals)
    fewest = options.fewest_requests
    if requests < fewest:
        limit = f"must be at least {fewest}, {capacity.ROUNDS} times what may run at once"
        option = f"--requests {requests}"
        if options.trace:
            option = f"--trace {options.trace} with {requests} requests"
        raise ValueError(f"{option}: {limit} (--batch {options.batch})")
