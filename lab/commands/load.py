"""A load, and the servers that all get it, as the options of a command line name them.

Read first: options.py, lab/measure/workload.py and machine.py. Read next: serve_run.py."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from cli.loading import load_model
from cli.model import ModelOptions, split_names
from config import EngineConfig
from lab.commands.options import CapacityOptions, LoadOptions, ServeOptions
from lab.measure import capacity, workload
from lab.measure.machine import Machine, RealMachine
from lab.measure.run_loop import Run
from lab.measure.run_plan import run_plan
from lab.measure.workload import Arrival
from lab.simulator.cost_model import CostModel
from lab.simulator.devices import LINKS
from lab.simulator.machine import SimulatedMachine
from lab.simulator.pools import KVLink, simulate_pools
from lab.simulator.two_pools import Pools
from runtime.memory import small_page_size

CACHING = {"off": [False], "on": [True], "both": [False, True]}  # --prefix-caching
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

    def config(self, attention: str) -> EngineConfig:
        """The EngineConfig of all runs, but for their policies, pages and prefix caching."""
        return EngineConfig(
            chunk=self.chunk,
            max_batch=self.batch,
            max_len=self.max_len,
            attention=attention,
            page_size=1,
            pages=self.kv_tokens,
        )


def find_sizes(options: LoadOptions, model: ModelOptions) -> Sizes:
    """The sizes of these options. Raises ValueError for less memory than a request needs."""
    on_gpu = options.simulate is not None or str(model.device).startswith("cuda")
    max_len = options.max_len or (8192 if on_gpu else 1024)
    batch = options.batch or (128 if on_gpu else 32)
    replicas = Pools.parse(options.pools).instances if options.pools else options.replicas
    at_once = batch * model.pp * replicas
    requests = 500 if on_gpu else 48
    if isinstance(options, CapacityOptions):
        requests = capacity.ROUNDS * at_once
    device = "cpu" if options.simulate else str(model.device)  # simulated attention reads any page
    names = split_names(options.page_size or str(small_page_size(max_len, device)))
    page_sizes = list(dict.fromkeys(max_len if name == "max" else int(name) for name in names))
    request_tokens = max(-(-max_len // size) * size for size in page_sizes)
    kv_tokens = max(model.pp, batch // 3) * request_tokens
    if options.simulate:
        kv_tokens = cost_of(options, model).kv_tokens()
    kv_tokens = options.kv_tokens or kv_tokens
    if kv_tokens < model.pp * request_tokens:
        least = f"at least {model.pp * request_tokens}, for one request"
        raise ValueError(f"--kv-tokens {kv_tokens}: must be {least}")
    caching = options.prefix_caching or ("both" if prefix_of(options)[0] else "off")
    return Sizes(
        requests=options.requests or requests,
        max_len=max_len,
        chunk=options.chunk or (512 if on_gpu else 128),
        batch=batch,
        page_size=page_sizes,
        prefix_caching=CACHING[caching],
        kv_tokens=kv_tokens,
        replicas=replicas,
        at_once=at_once,
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


def arrivals_of(
    options: LoadOptions, sizes: Sizes, seed: int, qps: float | None = None
) -> list[Arrival]:
    """The load at a rate; without one at a trace's own, or at one request a second."""
    prefix, _ = prefix_of(options)
    longest = sizes.max_len - prefix
    shares = {"normal": 1.0}
    long_prompt = None
    if isinstance(options, ServeOptions):
        long_prompt = options.long_prompt
        pairs = [part.partition("=") for part in split_names(options.classes)]
        shares = {name.strip(): float(share) for name, _, share in pairs}
    if options.trace:
        arrivals, _ = workload.read_trace(options.trace, longest, count=sizes.requests)
        if qps:
            arrivals = workload.rescale(arrivals, qps)
    else:
        lengths = workload.make_lengths(options.lengths, sizes.requests, longest, seed)
        if long_prompt:
            lengths.insert(0, (long_prompt, min(16, longest - long_prompt)))
        arrivals = workload.poisson(lengths, qps or 1.0, seed)
    classes = random.Random(seed).choices([*shares], [*shares.values()], k=len(arrivals))
    return [
        arrival._replace(priority=name, prompt_len=prefix + arrival.prompt_len)
        for arrival, name in zip(arrivals, classes, strict=True)
    ]


def make_machine(options: LoadOptions, sizes: Sizes, model: ModelOptions) -> Machine:
    """The machine of --simulate, or this one."""
    shapes: dict[str, Any] = {"max_len": sizes.max_len, "chunk": sizes.chunk}
    shapes["make_prompts"] = partial(workload.prompts, seed=model.seed, shared=prefix_of(options))
    if options.simulate:
        cost = cost_of(options, model)
        return SimulatedMachine(cost, model.name, replicas=sizes.replicas, **shapes)
    loaded = load_model(model, sizes.max_len, positions_from="--max-len")
    return RealMachine(loaded, model.name, attention=model.attention, **shapes)


def make_servers(
    options: LoadOptions, sizes: Sizes, machine: Machine, attention: str, slo_s: float
) -> dict[str, Serve]:
    """The server of each policy, page size and caching, by its label, and the two pools of --pools,
    which prefill whole prompts, or chunks. Raises ValueError for unknown policies."""
    plan = partial(
        run_plan,
        page_sizes=sizes.page_size,
        config=sizes.config(attention),
        tbt_slo_s=slo_s,
        caching=sizes.prefix_caching,
    )
    configs = plan(split_names(options.policies))
    servers: dict[str, Serve] = {
        label: partial(machine.serve, config) for label, config in configs.items()
    }
    if options.pools and isinstance(machine, SimulatedMachine):
        pools = Pools.parse(options.pools)
        kv_link = KVLink.of(machine.cost, LINKS["infiniband"])
        simulate = partial(simulate_pools, machine.cost, pools=pools, kv_link=kv_link)
        (config,) = plan(["sarathi-serve"]).values()  # for memory and batches
        for kind, cuts_prompts in {"": False, " chunks": True}.items():
            run = partial(simulate, cuts_prompts=cuts_prompts)
            servers[f"pools {pools}{kind}"] = partial(machine.serve, config, simulate=run)
    return servers


def half_of_possible_qps(machine: Machine, arrivals: list[Arrival]) -> float:
    """Half of the rate that a machine should be able to serve: where no other is given."""
    possible_qps = machine.micro_batches * capacity.estimated_qps(machine.base, arrivals)
    return float(f"{possible_qps / 2:.2g}")
