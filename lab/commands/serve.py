"""Serve arriving requests, and find the rate that a policy can keep up with.

    python bench.py serve --qps 1.5                     every policy on the same arrivals
    python bench.py capacity --slo strict               the highest rate at which each meets the SLO
    python bench.py serve --simulate a100-80gb --preset yi-34b --tp 2     on a simulated machine
    python bench.py serve --simulate this               this machine, and its simulation beside it

The SLO is a multiple of the time of a decode iteration, which is measured first (Sarathi-Serve
§5.1). Read first: lab/measure/capacity.py. Read next: serve_options.py, serve_report.py."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
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
from lab.commands.serve_report import (
    conclude,
    format_heading,
    format_point,
    print_capacities,
    print_runs,
    requests_csv,
    search_json,
)
from lab.measure import capacity, workload
from lab.measure.capacity import JudgedRun, SearchResult, Trial
from lab.measure.link import measure_link
from lab.measure.machine import Machine, RealMachine
from lab.measure.run_loop import LoadInterrupted, Run
from lab.measure.run_plan import run_plan
from lab.measure.token_budget import MULTIPLES
from lab.measure.workload import Arrival
from lab.simulator.devices import LINKS, Link
from lab.simulator.machine import (
    CountingMachine,
    FittedMachine,
    SimulatedMachine,
)
from lab.simulator.pools import KVLink, simulate_pools
from lab.simulator.referee import broken_rules
from page.html import page
from page.records import Recorder, instance_names
from parallel.instances import ChunkedPoolsEngine, PoolsEngine
from parallel.shard import Shard

__all__ = ["add_options", "main", "resolve"]

SIZES = "sarathi-serve"  # the instances of two pools have memory and batches as under this policy
ArrivalsAt = Callable[[float | None], list[Arrival]]  # a rate, or the trace's own -> a load


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
        return SimulatedMachine(
            options.cost(),
            options.model.name,
            replicas=options.replicas,
            max_len=options.max_len,
            chunk=options.chunk,
            seed=options.seed,
            shared_prefix=options.shared_prefix,
        )
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


class PoolsLink(NamedTuple):
    """What joins two pools."""

    text: str
    simulated: KVLink | None  # None if nothing is simulated


def pools_link(options: ServeOptions, machine: Machine) -> PoolsLink:
    """The link that the options name; or that between two ranks, which is measured where it is
    simulated, too."""
    if isinstance(machine, SimulatedMachine):
        is_layer_wise = options.kv_send == "layers"
        link = KVLink.of(machine.cost, LINKS[options.kv_link], layer_wise=is_layer_wise)
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
            elif isinstance(server, SimulatedMachine | FittedMachine) and kv_link is not None:
                run = partial(
                    simulate_pools,
                    server.cost,
                    pools=options.pools,
                    kv_link=kv_link,
                    cuts_prompts=cuts_prompts,
                )
                pooled = CountingMachine(
                    run,
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
        self.judged: dict[str, JudgedRun] = {}  # of serve
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
        if recorder:
            self.name_instances(recorder, run)
        return self.add(name, qps, run)

    def name_instances(self, recorder: Recorder, run: Run) -> None:
        """Let the page have a lane for each instance: of two pools, with what is sent between them,
        or of replicas."""
        options = self.options
        replicas = 1
        if isinstance(options, ServeOptions) and options.model.pp == 1:
            replicas = options.replicas
        if run.transfers:
            recorder.add_transfers(run.transfers)
        elif "prefills" not in recorder.settings and replicas > 1:
            recorder.name_replicas(instance_names("replica", replicas))

    def add(self, name: str, qps: float | None, run: Run) -> JudgedRun:
        """Print and write what was measured in a run."""
        judged = capacity.judge(
            run, self.slo_s, self.broken.get(name), rate_counts=self.has_enough_requests
        )
        if self.is_serving:
            self.runs[name] = run
            self.judged[name] = judged
            self.results[name] = {"qps": qps, **judged.to_json()}
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
            print_runs(self.judged, self.slo_s)
        else:
            print_capacities(self.searches, self.unit)
        print(self.report["conclusion"])
        if options.plot:
            from lab.pictures.timelines import plot_capacity, plot_serving

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
