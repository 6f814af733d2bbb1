"""How `bench.py serve` and `capacity` serve a load. What there is at an interrupt is kept.

Read first: serve.py, lab/measure/capacity.py and machine.py."""

import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cli.files import options_json, plain, write_text
from cli.loading import load_model, resolve_model
from cli.model import ModelOptions, split_names
from cli.tables import Cell, format_table
from config import EngineConfig
from lab.commands.frame import reporting
from lab.commands.options import CapacityOptions, LoadOptions, ServeOptions
from lab.measure import capacity, timing, workload
from lab.measure.capacity import ROUNDS, JudgedRun, SearchResult, Trial
from lab.measure.machine import Machine, RealMachine
from lab.measure.run_loop import Run
from lab.measure.run_plan import run_plan
from lab.measure.token_budget import MULTIPLES
from lab.measure.workload import Arrival
from lab.simulator.cost_model import CostModel
from lab.simulator.devices import LINKS
from lab.simulator.machine import CountingMachine, SimulatedMachine
from lab.simulator.pools import KVLink, simulate_pools
from lab.simulator.two_pools import Pools
from page.html import page
from page.records import Recorder, instance_names
from runtime.memory import small_page_size

CACHING = {"off": [False], "on": [True], "both": [False, True]}  # --prefix-caching
NOTE = """
TTFT: from arrival to the first token; TBT: between two; stalls: TBTs above the SLO with others'
prefill in them; goodput: requests a second that met their SLOs; at once: running, the mean over
time; cached: prefill that was found, not computed
"""
CAPACITY_NOTE = """
capacity: the highest rate that was met, a step of --ratio below one that was not, twice; at least:
no rate that was tried was too high; below: none was low enough
"""
ArrivalsAt = Callable[[float | None], list[Arrival]]  # a rate, or the trace's own -> a load
Serve = Callable[..., Run]  # of a load, as Machine.serve


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a load and of its engines, where nothing is left open."""

    requests: int
    max_len: int
    chunk: int
    batch: int
    page_size: list[int]  # one run each
    prefix_caching: list[bool]  # one run each
    kv_tokens: int
    replicas: int
    at_once: int  # requests that may run


def find_sizes(options: LoadOptions, model: ModelOptions, requests: tuple[int, int]) -> Sizes:
    """The sizes of these options. `requests` is how many arrive by default on a CPU and on a GPU.

    Raises ValueError for less memory than a request needs, and for more than a GPU has."""
    on_gpu = options.simulate is not None or str(model.device).startswith("cuda")
    max_len = options.max_len or (8192 if on_gpu else 1024)
    batch = options.batch or (128 if on_gpu else 32)
    replicas = Pools.parse(options.pools).instances if options.pools else options.replicas
    if replicas > 1 and not options.simulate:
        raise ValueError("--replicas and --pools: go with --simulate")
    device = "cpu" if options.simulate else str(model.device)  # simulated attention reads any page
    names = split_names(options.page_size or str(small_page_size(max_len, device)))
    page_sizes = list(dict.fromkeys(max_len if name == "max" else int(name) for name in names))
    request_tokens = model.pp * max(-(-max_len // size) * size for size in page_sizes)
    available = max(request_tokens, batch // 3 * request_tokens // model.pp)
    if options.simulate:
        available = cost_of(options, model).kv_tokens()
    kv_tokens = options.kv_tokens or available
    if kv_tokens < request_tokens or (options.simulate and kv_tokens > available):
        limits = f"at least {request_tokens}, for one request, and at most what fits"
        raise ValueError(f"--kv-tokens {kv_tokens}: must be {limits}")
    caching = options.prefix_caching or ("both" if prefix_of(options)[0] else "off")
    return Sizes(
        requests=options.requests or requests[on_gpu],
        max_len=max_len,
        chunk=options.chunk or (512 if on_gpu else 128),
        batch=batch,
        page_size=page_sizes,
        prefix_caching=CACHING[caching],
        kv_tokens=kv_tokens,
        replicas=replicas,
        at_once=batch * model.pp * replicas,
    )


def cost_of(options: LoadOptions, model: ModelOptions) -> CostModel:
    """The cost model of the simulated GPUs. Raises ValueError for unknown names, and sizes that do
    not divide the model."""
    return CostModel.named(
        str(model.preset),
        str(options.simulate),
        tp=model.tp,
        pp=model.pp,
        tp_link=options.tp_link,
        pp_link=options.pp_link,
        cpu_s=options.cpu_ms / 1e3,
    )


def prefix_of(options: LoadOptions) -> tuple[int, int]:
    """The length of shared prefixes, and how many there are."""
    length, _, count = options.shared_prefix.partition(":")
    return int(length), int(count)


def make_workload(options: LoadOptions, sizes: Sizes, seed: int) -> tuple[ArrivalsAt, str]:
    """The arrivals at a rate, and a description of them. Without a rate a trace keeps its own."""
    prefix, prefixes = prefix_of(options)
    longest = sizes.max_len - prefix
    logged: list[Arrival] = []
    lengths: list[tuple[int, int]] = []
    if options.trace:
        logged, left_out = workload.read_trace(options.trace, longest, count=sizes.requests)
        description = f"{len(logged)} requests of {options.trace} ({left_out} left out)"
    else:
        lengths = workload.make_lengths(options.lengths, sizes.requests, longest, seed)
        description = f"{sizes.requests} requests of {options.lengths}, up to {longest:,} tokens"
    if prefix:
        description += f", each after a prefix of {prefix:,} ({prefixes} in all)"
    shares = {"normal": 1.0}
    if isinstance(options, ServeOptions):
        parts = [part.partition("=") for part in split_names(options.classes)]
        shares = {name.strip(): float(share) for name, _, share in parts}
        if options.long_prompt:
            description += f", after one with a prompt of {options.long_prompt:,}"
            lengths.insert(0, (options.long_prompt, min(16, longest - options.long_prompt)))

    def arrivals_at(qps: float | None) -> list[Arrival]:
        arrivals = logged
        if not logged:
            arrivals = workload.poisson(lengths, qps or 1.0, seed)
        elif qps:
            arrivals = workload.rescale(logged, qps)
        classes = random.Random(seed).choices([*shares], [*shares.values()], k=len(arrivals))
        return [
            arrival._replace(priority=name, prompt_len=prefix + arrival.prompt_len)
            for arrival, name in zip(arrivals, classes, strict=True)
        ]

    return arrivals_at, description


def make_machine(options: LoadOptions, sizes: Sizes, model: ModelOptions) -> Machine:
    """The machine of --simulate, or this one."""
    shapes: dict[str, Any] = {"max_len": sizes.max_len, "chunk": sizes.chunk}
    shapes["make_prompts"] = partial(workload.prompts, seed=model.seed, shared=prefix_of(options))
    if options.simulate:
        cost = cost_of(options, model)
        return SimulatedMachine(cost, model.name, replicas=sizes.replicas, **shapes)
    loaded = load_model(model, sizes.max_len, positions_from="--max-len")
    return RealMachine(loaded, model.name, attention=model.attention, **shapes)


def half_of_possible_qps(machine: Machine, arrivals: list[Arrival]) -> float:
    """Half of the rate that a machine should be able to serve: where no other is given."""
    possible_qps = machine.micro_batches * capacity.estimated_qps(machine.base, arrivals)
    return float(f"{possible_qps / 2:.2g}")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Servers, and the load that all of them get."""

    servers: Mapping[str, Serve]
    arrivals_at: ArrivalsAt
    judge: Callable[[Run], JudgedRun]
    machine: Machine
    sizes: Sizes
    start_qps: float  # half of what should be possible
    report: dict[str, Any]  # what --json writes

    @property
    def slo_s(self) -> float:
        """The SLO of P99 TBT in seconds."""
        return self.report["slo_s"]

    def run(self, name: str, qps: float | None, recorder: Recorder | None = None) -> Run:
        """Let a server serve the load at this rate."""
        arrivals = self.arrivals_at(qps)
        with tqdm(total=len(arrivals), desc=name, disable=None, leave=False) as bar:
            return self.servers[name](arrivals, progress=bar.update, recorder=recorder)


def prepare(
    options: LoadOptions, model: ModelOptions, requests: tuple[int, int], ttft_slo_s: float
) -> Comparison:
    """Make the machine, the load and the servers, and print what they are. Errors of the load and
    of policies come before a model is loaded."""
    if not options.simulate:
        model = resolve_model(model, gpu_preset="llama3-8b", gpu_bytes=75e9)
    sizes = find_sizes(options, model, requests)
    if isinstance(options, CapacityOptions):
        least = ROUNDS * sizes.at_once
        sizes = replace(sizes, requests=options.requests or max(sizes.requests, least))
    plan = partial(
        run_plan,
        page_sizes=sizes.page_size,
        caching=sizes.prefix_caching,
        config=EngineConfig(
            chunk=sizes.chunk,
            max_batch=sizes.batch,
            max_len=sizes.max_len,
            attention=model.attention,
            page_size=1,
            pages=sizes.kv_tokens,
        ),
    )
    policies = split_names(options.policies)
    plan(policies, tbt_slo_s=1.0)
    arrivals_at, load = make_workload(options, sizes, model.seed)
    arrivals = arrivals_at(None if options.trace else 1.0)
    if isinstance(options, CapacityOptions) and len(arrivals) < ROUNDS * sizes.at_once:
        limit = f"{ROUNDS} times what may run at once, {sizes.at_once} (--batch)"
        raise ValueError(f"--requests {len(arrivals)}: must be at least {limit}")
    machine = make_machine(options, sizes, model)
    base = machine.base
    slo_s = capacity.slo_seconds(options.slo, base)
    info = machine.info.to_json()
    print(
        f"{machine.info.heading()}{machine.notes}load: {load}\n"
        f"memory: {sizes.kv_tokens:,} tokens of KV cache, pages of "
        f"{', '.join(map(str, sizes.page_size))}; at most {sizes.batch} requests at once; chunk "
        f"{sizes.chunk}\nSLO: P99 TBT at most {slo_s:.3f} s ({options.slo}); "
        f"{timing.mark('a decode iteration', info.get('base_busy', False))} takes "
        f"{base.seconds:.4f} s (batch {base.decodes}, context {base.context:,})\n"
    )
    servers: dict[str, Serve] = {
        name: partial(machine.serve, config)
        for name, config in plan(policies, tbt_slo_s=slo_s).items()
    }
    if options.pools and isinstance(machine, SimulatedMachine):
        (config,) = plan(["sarathi-serve"], tbt_slo_s=slo_s).values()  # for memory and batches
        servers |= pooled_servers(Pools.parse(options.pools), machine, config)
    return Comparison(
        servers=servers,
        arrivals_at=arrivals_at,
        judge=partial(
            capacity.judge,
            tbt_slo_s=slo_s,
            ttft_slo_s=ttft_slo_s,
            rate_counts=sizes.requests >= ROUNDS * sizes.at_once,
        ),
        machine=machine,
        sizes=sizes,
        start_qps=half_of_possible_qps(machine, arrivals),
        report={
            "options": options_json(options, model) | asdict(sizes),
            "machine": info,
            "load": load,
            "slo_s": slo_s,
            "slo_busy": options.slo in MULTIPLES and info.get("base_busy", False),
            "base": vars(base),
        },
    )


def pooled_servers(
    pools: Pools, machine: SimulatedMachine, config: EngineConfig
) -> dict[str, Serve]:
    """Two pools that prefill whole prompts, or chunks, and send keys and values layer by layer."""
    kv_link = KVLink.of(machine.cost, LINKS["infiniband"])
    servers: dict[str, Serve] = {}
    for kind, cuts_prompts in {"": False, " chunks": True}.items():
        run = partial(
            simulate_pools, machine.cost, pools=pools, kv_link=kv_link, cuts_prompts=cuts_prompts
        )
        counting = CountingMachine(run, machine.make_prompts)
        servers[f"pools {pools}{kind}"] = partial(counting.serve, config)
    return servers


def serve(options: ServeOptions, model: ModelOptions) -> None:
    """`bench.py serve`: let each server serve at --qps."""
    compared = prepare(options, model, (48, 500), options.ttft_slo)
    report = compared.report
    qps = options.qps
    if not qps and not options.trace:
        qps = compared.start_qps
    runs: dict[str, Run] = {}
    judged: dict[str, JudgedRun] = {}
    recorders: dict[str, Recorder] = {}

    def keep(name: str, run: Run) -> None:
        runs[name] = run
        judged[name] = compared.judge(run)
        print_point(name, qps, judged[name])
        report.setdefault("runs", {})[name] = run_json(qps, judged[name])

    def show() -> None:
        latencies = {marked(name, run): latency_cells(run) for name, run in judged.items()}
        batches = {marked(name, run): batch_cells(run) for name, run in judged.items()}
        print(f"\n{format_table('seconds', latencies)}\n\n{format_table('batches', batches)}{NOTE}")

    def draw(file: Path) -> None:
        from lab.pictures.timelines import plot_serving

        plot_serving(runs, report["machine"], str(file), compared.slo_s)

    def write_page(file: Path) -> None:
        heading = compared.machine.info.heading()
        write_text(file, page(report["load"], heading, recorders, slo_s=compared.slo_s))

    with reporting(options, report, show, plot=draw, html=write_page):
        for name in compared.servers:
            if options.html:
                recorders[name] = Recorder()
            run = compared.run(name, qps, recorders.get(name))
            if name in recorders:
                name_instances(recorders[name], run, compared.sizes.replicas, model.pp)
            keep(name, run)


def name_instances(recorder: Recorder, run: Run, replicas: int, pp: int) -> None:
    """Let the page have a lane for each instance: of two pools, with what is sent between them, or
    of replicas."""
    if run.transfers:
        recorder.add_transfers(run.transfers)
    elif "prefills" not in recorder.settings and replicas > 1 and pp == 1:
        recorder.name_replicas(instance_names("replica", replicas))


def find_capacities(options: CapacityOptions, model: ModelOptions) -> None:
    """`bench.py capacity`: search the highest rate at which each server meets the SLO."""
    compared = prepare(options, model, (128, 512), capacity.MAX_DELAY_S)
    report = compared.report
    searches: dict[str, SearchResult[JudgedRun]] = {}

    def search(name: str) -> None:
        trials: list[Trial[JudgedRun]] = []

        def run_at_rate(qps: float) -> JudgedRun:
            judged = compared.judge(compared.run(name, qps))
            trials.append(Trial(qps, judged))
            searches[name] = capacity.summarize_search(trials, options.ratio)
            print_point(name, qps, judged)
            report.setdefault("results", {})[name] = search_json(searches[name])
            return judged

        capacity.search_capacity(run_at_rate, compared.start_qps, options.ratio)

    def show() -> None:
        vllm = searches.get("vllm")
        rows = {
            timing.mark(name, found.busy): capacity_cells(found, vllm)
            for name, found in searches.items()
        }
        print(f"\n{format_table('policy', rows)}\n{CAPACITY_NOTE}")

    def draw(file: Path) -> None:
        from lab.pictures.timelines import plot_capacity

        plot_capacity(report["results"], report["machine"], str(file), compared.slo_s)

    with reporting(options, report, show, plot=draw):
        for name in compared.servers:
            search(name)


def print_point(name: str, qps: float | None, run: JudgedRun) -> None:
    """Print whether a run met the SLO, when it has ended."""
    rate = "its own rate" if qps is None else f"{qps:.3f} requests/s"
    verdict = f"not met: {run.missed}" if run.missed else "met"
    print(f"{marked(name, run)}: {rate}, SLO {verdict}")


def marked(name: str, run: JudgedRun) -> str:
    """The name of a run, marked if it was disturbed."""
    return timing.mark(name, run.busy)


def latency_cells(run: JudgedRun) -> list[Cell]:
    """What clients saw."""
    return [
        ("TTFT P50", run.p50_ttft_s, ",.2f"),
        ("TTFT P99", run.p99_ttft_s, ",.2f"),
        ("delay P50", run.p50_delay_s, ",.2f"),
        ("TBT P50", run.p50_tbt_s, ",.3f"),
        ("TBT P99", run.p99_tbt_s, ",.3f"),
        ("stalls", run.stalls.over_slo, ",d"),
        ("longest", run.longest_stall_s, ",.3f"),
        ("goodput", run.goodput_per_s, ",.2f"),
    ]


def batch_cells(run: JudgedRun) -> list[Cell]:
    """What the batches were made of."""
    return [
        ("tokens/s", run.tokens_per_s, ",.0f"),
        ("prefill", run.prefill_only, ".0%"),
        ("hybrid", run.hybrid, ".0%"),
        ("decode", run.decode_only, ".0%"),
        ("at once", run.running_mean, ",.1f"),
        ("preempted", run.preemptions, ",d"),
        ("cached", run.cached, ".0%"),
    ]


def capacity_cells(
    search: SearchResult[JudgedRun], vllm: SearchResult[JudgedRun] | None
) -> list[Cell]:
    """A capacity, and the run at that rate."""
    gain = search.capacity_qps.over(vllm.capacity_qps) if vllm else None
    best = search.best.verdict if search.best else None
    return [
        ("capacity in requests/s", search.capacity_qps, ",.2f"),
        ("relative to vllm", capacity.Bounded(1.0) if search is vllm else gain, ",.2fx"),
        ("P50 TTFT s", best and best.p50_ttft_s, ",.2f"),
        ("P99 TBT s", best and best.p99_tbt_s, ",.3f"),
        ("tokens/s", best and best.tokens_per_s, ",.0f"),
        ("runs", len(search.trials), "d"),
    ]


def run_json(qps: float | None, run: JudgedRun) -> dict[str, Any]:
    """A run at a rate as --json has it."""
    return {"qps": qps, **plain(run)}


def search_json(search: SearchResult[JudgedRun]) -> dict[str, Any]:
    """A search as --json has it: its best run, and all of them."""
    best = run_json(search.best.qps, search.best.verdict) if search.best else {"qps": 0.0}
    return best | {
        "capacity_qps": search.capacity_qps,
        "bound": search.capacity_qps.bound,
        "points": [run_json(trial.qps, trial.verdict) for trial in search.trials],
        "missed": search.missed,
        "busy": search.busy,
    }
