"""How `bench.py serve` and `capacity` serve a load, and what they print and write.

What is finished when they are interrupted is printed and written. Read first: load.py,
lab/measure/capacity.py."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tqdm import tqdm

from cli.files import options_json, plain, write_json, write_text, wrote, wrote_page
from cli.loading import resolve_model
from cli.model import ModelOptions, split_names
from cli.tables import Cell, format_table
from lab.commands import load
from lab.commands.load import Serve, Sizes
from lab.commands.options import CapacityOptions, LoadOptions, ServeOptions
from lab.measure import capacity, timing
from lab.measure.capacity import JudgedRun, SearchResult
from lab.measure.machine import Machine
from lab.measure.run_loop import Run
from lab.measure.run_plan import run_plan
from page.html import page
from page.records import Recorder, instance_names

NOTE = """
TTFT: from arrival to the first token; TBT: between two; stall: a TBT with others' prefill in it;
goodput: requests a second that met their SLOs; cached: prefill that was found, not computed
"""
CAPACITY_NOTE = """
capacity: the highest rate that was met, a step of 1.05 below one that was not, twice; at least: no
rate that was tried was too high; below: none was low enough
"""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Servers on a machine, and the load that all of them get."""

    options: LoadOptions
    model: ModelOptions
    sizes: Sizes
    machine: Machine
    servers: Mapping[str, Serve]
    slo_s: float
    start_qps: float  # half of what should be possible
    report: dict[str, Any]  # what --json has before the results

    def run(
        self,
        name: str,
        qps: float | None,
        ttft_slo_s: float = capacity.MAX_DELAY_S,
        recorder: Recorder | None = None,
    ) -> tuple[Run, JudgedRun]:
        """Let a server serve the load at this rate, and print whether it met the SLO."""
        arrivals = load.arrivals_of(self.options, self.sizes, self.model.seed, qps)
        with tqdm(total=len(arrivals), desc=name, disable=None, leave=False) as bar:
            run = self.servers[name](arrivals, progress=bar.update, recorder=recorder)
        rate_counts = self.sizes.requests >= capacity.ROUNDS * self.sizes.at_once
        judged = capacity.judge(run, self.slo_s, ttft_slo_s=ttft_slo_s, rate_counts=rate_counts)
        rate = f"{qps:.3f} requests/s" if qps else "its own rate"
        verdict = f"not met: {judged.missed}" if judged.missed else "met"
        print(f"{timing.mark(name, judged.busy)}: {rate}, SLO {verdict}")
        return run, judged


def prepare(options: LoadOptions, model: ModelOptions) -> Setup:
    """Make the load, the machine and the servers, and print what they are. Errors of the load and
    of policies come before a model is loaded."""
    if not options.simulate:
        model = resolve_model(model, gpu_preset="llama3-8b", gpu_bytes=75e9)
    sizes = load.find_sizes(options, model)
    run_plan(split_names(options.policies), [1], sizes.config(model.attention))
    arrivals = load.arrivals_of(options, sizes, model.seed)
    fewest = capacity.ROUNDS * sizes.at_once
    if isinstance(options, CapacityOptions) and len(arrivals) < fewest:
        limit = f"at least {fewest}, {capacity.ROUNDS} for each that may run"
        raise ValueError(f"--requests {len(arrivals)}: must be {limit}")
    machine = load.make_machine(options, sizes, model)
    base = machine.base
    slo_s = capacity.slo_seconds(options.slo, base)
    info = machine.info.to_json()
    busy = info.get("base_busy", False)
    description = f"{len(arrivals)} requests of {options.trace or options.lengths}"
    print(
        f"{machine.info.heading()}{machine.notes}{description}, of up to {sizes.max_len:,} tokens; "
        f"memory for {sizes.kv_tokens:,}, batch {sizes.batch}, chunk {sizes.chunk}\n"
        f"SLO: P99 TBT at most {slo_s:.3f} s ({options.slo}); "
        f"{timing.mark('a decode iteration', busy)} takes {base.seconds:.4f} s "
        f"(batch {base.decodes}, context {base.context:,})\n"
    )
    return Setup(
        options=options,
        model=model,
        sizes=sizes,
        machine=machine,
        servers=load.make_servers(options, sizes, machine, model.attention, slo_s),
        slo_s=slo_s,
        start_qps=load.half_of_possible_qps(machine, arrivals),
        report={
            "options": options_json(options, model) | asdict(sizes),
            "machine": info,
            "load": description,
            "slo_s": slo_s,
            "base": vars(base),
        },
    )


def serve(options: ServeOptions, model: ModelOptions) -> None:
    """`bench.py serve`: let each server serve at --qps."""
    setup = prepare(options, model)
    qps = options.qps
    if not qps and not options.trace:
        qps = setup.start_qps
    runs: dict[str, Run] = {}
    judged: dict[str, JudgedRun] = {}
    recorders: dict[str, Recorder] = {}
    try:
        for name in setup.servers:
            recorder = Recorder() if options.html else None
            runs[name], judged[name] = setup.run(name, qps, options.ttft_slo, recorder)
            if recorder:
                name_instances(recorder, runs[name], setup)
                recorders[name] = recorder
    finally:
        if judged:
            print_runs(judged)
            rows = {name: {"qps": qps, **plain(run)} for name, run in judged.items()}
            write_json(options.json, setup.report | {"runs": rows})
            wrote(options.json)
        if judged and options.plot:
            from lab.pictures.timelines import plot_timelines

            plot_timelines(runs, setup.report["machine"], options.plot, setup.slo_s)
            wrote(options.plot)
        if judged and options.html:
            heading = setup.machine.info.heading()
            text = page(setup.report["load"], heading, recorders, slo_s=setup.slo_s)
            write_text(options.html, text)
            wrote_page(options.html)


def name_instances(recorder: Recorder, run: Run, setup: Setup) -> None:
    """Let the page have a lane for each instance: of two pools, with what is sent between them, or
    of replicas."""
    replicas = setup.sizes.replicas
    if run.transfers:
        recorder.add_transfers(run.transfers)
    elif "prefills" not in recorder.settings and replicas > 1 and setup.model.pp == 1:
        recorder.name_replicas(instance_names("replica", replicas))


def find_capacities(options: CapacityOptions, model: ModelOptions) -> None:
    """`bench.py capacity`: search the highest rate at which each server meets the SLO."""
    setup = prepare(options, model)
    searches: dict[str, SearchResult[JudgedRun]] = {}
    try:
        for name in setup.servers:

            def run_at_rate(qps: float, name: str = name) -> JudgedRun:
                return setup.run(name, qps)[1]

            searches[name] = capacity.search_capacity(run_at_rate, setup.start_qps)
    finally:
        results = {name: search_json(search) for name, search in searches.items()}
        if searches:
            print_capacities(searches)
            write_json(options.json, setup.report | {"results": results})
            wrote(options.json)
        if searches and options.plot:
            from lab.pictures.capacities import plot_capacities

            plot_capacities(results, setup.report["machine"], options.plot, setup.slo_s)
            wrote(options.plot)


def print_runs(judged: Mapping[str, JudgedRun]) -> None:
    """Print what clients saw, and what the machine did."""
    rows: dict[str, list[Cell]] = {}
    for name, run in judged.items():
        rows[timing.mark(name, run.busy)] = [
            ("TTFT P50", run.p50_ttft_s, ",.2f"),
            ("TTFT P99", run.p99_ttft_s, ",.2f"),
            ("TBT P50", run.p50_tbt_s, ",.3f"),
            ("TBT P99", run.p99_tbt_s, ",.3f"),
            ("longest stall", run.longest_stall_s, ",.3f"),
            ("goodput", run.goodput_per_s, ",.2f"),
            ("tokens/s", run.tokens_per_s, ",.0f"),
            ("preempted", run.preemptions, ",d"),
            ("cached", run.cached, ".0%"),
        ]
    print(f"\n{format_table('seconds', rows)}\n{NOTE}")


def print_capacities(searches: Mapping[str, SearchResult[JudgedRun]]) -> None:
    """Print the capacities, and the run at each."""
    vllm = searches.get("vllm")
    rows: dict[str, list[Cell]] = {}
    for name, search in searches.items():
        best = search.best.verdict if search.best else None
        rows[timing.mark(name, search.busy)] = [
            ("capacity in requests/s", search.capacity_qps, ",.2f"),
            ("relative to vllm", vllm and search.capacity_qps.over(vllm.capacity_qps), ",.2fx"),
            ("P50 TTFT s", best and best.p50_ttft_s, ",.2f"),
            ("P99 TBT s", best and best.p99_tbt_s, ",.3f"),
        ]
    print(f"\n{format_table('policy', rows)}\n{CAPACITY_NOTE}")


def search_json(search: SearchResult[JudgedRun]) -> dict[str, Any]:
    """A search as --json has it, with all of its runs."""
    return {
        "capacity_qps": search.capacity_qps,
        "bound": search.capacity_qps.bound,
        "points": [{"qps": trial.qps, **plain(trial.verdict)} for trial in search.trials],
        "missed": search.missed,
        "busy": search.busy,
    }
