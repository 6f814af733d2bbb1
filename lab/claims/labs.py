"""A lab answers what a claim asks: a PaperLab computes, on a paper's machine, a RealLab measures.

    def decode_and_prefill(lab: Lab) -> Result:
        times = lab.time({"decode": [decodes(6, context=1024)]})

    time              batches, whole and by operation          batch_times.py
    decode_cost       decodes alone and beside a chunk         decode_cost.py
    gains             requests that are all there at first     offline_load.py
    serve, run        requests that arrive while others run    run_loop.py
    capacity          the highest rate that meets an SLO       capacity.py

Read first: systems.py. Read next: claim.py, batches.py."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property, partial

from config import EngineConfig
from lab.claims.systems import System
from lab.measure import workload
from lab.measure.batch_times import (
    Batch,
    BatchTime,
    SequenceTime,
    add_up,
    keep_layers,
    time_sequences,
)
from lab.measure.capacity import (
    Base,
    Bounded,
    Hopeless,
    JudgedRun,
    Verdict,
    judge,
    possible_qps,
    search_capacity,
    slo_seconds,
)
from lab.measure.decode_cost import DecodeCost, measure_decode_cost, table_2_batches
from lab.measure.machine import RealMachine
from lab.measure.machine_info import RealMachineInfo
from lab.measure.metrics import RunSummary, missed, summarize_run
from lab.measure.offline_load import OfflineLoad, policy_runs, run_policies
from lab.measure.run_loop import Run
from lab.measure.run_plan import run_plan
from lab.measure.workload import LENGTHS, Arrival
from lab.simulator.cost_model import product_seconds
from lab.simulator.machine import base_of
from lab.simulator.simulation import Simulated, simulate
from model import GPT
from parallel.stages import runner_for

CHUNK = 256  # tokens, of gains
COST_S = 6  # of the pairs that tell what a decode costs
Load = tuple[str, int, str, float]  # policy, batch, lengths, requests per second


class Lab(ABC):
    """What a claim asks. Computing a batch of `ridge` rows takes as long as reading the weights."""

    name: str
    ridge: float
    base: Base  # the decode iteration that SLOs are multiples of
    is_small: bool  # a CPU: requests, chunks and memory are a quarter of the papers'
    requests: int  # of a search for a capacity
    batch: int  # the most requests at once
    page_size: int
    cached_tokens: int  # before a chunk that is timed alone, see RealLab
    busy: bool = False  # whether others used the machine

    def scaled(self, tokens: int) -> int:
        """So many tokens, or a quarter of them on a CPU."""
        return tokens // 4 if self.is_small else tokens

    def limit(self, lengths: str) -> int:
        """The longest request of a load."""
        return 1024 if self.is_small else 2048

    @abstractmethod
    def time(
        self, sequences: Mapping[str, Sequence[Batch]], layers: int | None = None
    ) -> dict[str, SequenceTime]:
        """Time sequences of batches, by their names, with a model of so many layers; None: all."""

    @abstractmethod
    def decode_cost(self, context: int, batch: int, chunk: int) -> DecodeCost:
        """Time `batch` decodes alone, and all but one beside a chunk, as SARATHI's Table 2."""

    @abstractmethod
    def gains(
        self, policies: Sequence[str], length: int, batch: int, pd_ratio: float
    ) -> dict[str, float]:
        """The throughput of each policy over request-level's, of requests in lockstep."""

    @abstractmethod
    def run(
        self,
        config: EngineConfig,
        arrivals: Sequence[Arrival],
        slo_s: float | None = None,
        record: bool = False,
    ) -> Run:
        """Serve arrivals. A run may end when it misses `slo_s`; `record`: it has iterations."""

    def serve(
        self,
        policy: str,
        lengths: str,
        *,
        requests: int,
        qps: float | None = None,
        share: float = 0.5,
        seed: int = 0,
        record: bool = False,
    ) -> JudgedRun:
        """Serve Poisson arrivals: at `qps` on a paper's machine, at a share of what is estimated to
        be possible here, or without `qps`."""
        limit = self.limit(lengths)
        pairs = workload.make_lengths(lengths, requests, limit, seed)
        if qps is None or isinstance(self, RealLab):
            qps = share * possible_qps(self.base, pairs)
        arrivals = workload.poisson(pairs, qps, seed)
        run = self.run(self.config(policy, limit, self.batch), arrivals, record=record)
        return judge(run, slo_seconds("strict", self.base))

    @abstractmethod
    def capacity(self, server: str, lengths: str, slo: str) -> Bounded:
        """The highest rate at which a server meets the strict or the relaxed SLO of P99 TBT."""

    def search(
        self, policy: str, batch: int, lengths: str, slo_s: float, start: float, ratio: float
    ) -> Bounded:
        """Search the highest rate that meets an SLO, up to `ratio`, from a share of what is
        estimated to be possible on."""
        pairs = workload.make_lengths(lengths, self.requests, self.limit(lengths), 0)
        start_qps = start * possible_qps(self.base, pairs)
        search = search_capacity(
            partial(self.try_rate, policy, batch, lengths, slo_s), start_qps, ratio
        )
        self.busy = self.busy or search.busy
        return search.capacity_qps

    def try_rate(self, policy: str, batch: int, lengths: str, slo_s: float, qps: float) -> Verdict:
        """Whether a server meets an SLO at a rate."""
        return judge(self.run_at(policy, batch, lengths, qps, slo_s), slo_s)

    def run_at(self, policy: str, batch: int, lengths: str, qps: float, slo_s: float) -> Run:
        """Serve Poisson arrivals."""
        limit = self.limit(lengths)
        pairs = workload.make_lengths(lengths, self.requests, limit, 0)
        arrivals = workload.poisson(pairs, qps, 0)
        return self.run(self.config(policy, limit, batch), arrivals, slo_s)

    @abstractmethod
    def kv_tokens(self, max_len: int, batch: int) -> int:
        """How many tokens of keys and values there is room for."""

    def config(self, policy: str, max_len: int, batch: int, kv_tokens: int = 0) -> EngineConfig:
        """The EngineConfig of a policy, whose name may end in a chunk size. Without `kv_tokens` it
        has all the memory."""
        pages = (kv_tokens or self.kv_tokens(max_len, batch)) // self.page_size
        config = EngineConfig(
            chunk=self.scaled(512),
            max_batch=batch,
            max_len=max_len,
            page_size=self.page_size,
            pages=pages,
        )
        return run_plan([policy], [self.page_size], config)[policy]


class PaperLab(Lab):
    """A Lab that computes on a paper's system. The schedulers are the real ones."""

    is_small = False
    requests = 512  # with 64 a gain of Mistral-7B over vllm is a fifth larger
    batch = 128
    page_size = 64
    cached_tokens = 0

    def __init__(self, system: System) -> None:
        self.system = system
        self.name = system.name
        self.cost = system.cost
        self.ridge = self.cost.device.flops_per_s / self.cost.device.bytes_per_s
        self.base = base_of(self.cost)
        self.finished: dict[Load, RunSummary] = {}  # of runs that were not given up
        self.given_up: dict[Load, float] = {}  # the longest SLO in seconds that a run has missed

    def limit(self, lengths: str) -> int:
        """The longest request of a data set, as the paper has it."""
        return LENGTHS[lengths].limit if lengths in LENGTHS else super().limit(lengths)

    def time(
        self, sequences: Mapping[str, Sequence[Batch]], layers: int | None = None
    ) -> dict[str, SequenceTime]:
        """As Lab.time. The times of some layers are a share of those of all."""
        matrices = list(self.cost.matrices)
        return {
            name: add_up(batches, [self.time_of(batch, layers) for batch in batches], matrices, 2)
            for name, batches in sequences.items()
        }

    def time_of(self, batch: Batch, layers: int | None = None) -> BatchTime:
        """The BatchTime of a batch: of some layers, or of a whole iteration with the CPU's time."""
        cost = self.cost
        chunks = [(None, chunk.end - chunk.tokens, chunk.tokens) for chunk in batch]
        tokens = sum(chunk.tokens for chunk in batch)
        seconds = cost.layer_seconds(chunks)
        layers_ms = 1e3 * (layers or cost.layers)
        operations_s = {
            name: product_seconds(cost.device, tokens, *matrix)
            for name, matrix in cost.matrices._asdict().items()
        }
        scale = seconds.linear / sum(operations_s.values())  # the GPUs of a layer talk meanwhile
        operations_ms = {name: layers_ms * scale * s for name, s in operations_s.items()}
        return BatchTime(
            total_ms=layers_ms * sum(seconds) if layers else 1e3 * cost.seconds(chunks),
            operations_ms=operations_ms | {"attention": layers_ms * seconds.attention},
            gpu_ms={},
        )

    def decode_cost(self, context: int, batch: int, chunk: int) -> DecodeCost:
        """As Lab.decode_cost."""
        batches = table_2_batches(context, batch, chunk)
        samples = {name: [self.time_of(each).total_ms] * 2 for name, each in batches.items()}
        return DecodeCost.of(samples, batches)

    def gains(
        self, policies: Sequence[str], length: int, batch: int, pd_ratio: float
    ) -> dict[str, float]:
        """As Lab.gains, of forty rounds."""
        load = OfflineLoad(
            seq_len=length, pd_ratio=pd_ratio, batch=batch, requests=40 * batch, lockstep=True
        )
        seconds = {}
        for name, config in run_plan(policies, [length], load.config(CHUNK)).items():
            run = simulate(self.cost, config, load.arrivals(), record=False).run
            seconds[name] = run.seconds
        return {name: seconds["request-level"] / each for name, each in seconds.items()}

    def run(
        self,
        config: EngineConfig,
        arrivals: Sequence[Arrival],
        slo_s: float | None = None,
        record: bool = False,
    ) -> Run:
        """As Lab.run."""
        gives_up = None if slo_s is None else Hopeless(arrivals, slo_s)
        return simulate(self.cost, config, arrivals, record=record, gives_up=gives_up).run

    def offline(
        self,
        policy: str,
        arrivals: Sequence[Arrival],
        *,
        chunk: int = 256,
        tile: int | None = None,
        batch: int | None = None,
        max_len: int = 4096,
        replicas: int = 1,
        record: bool = False,
    ) -> Simulated:
        """Serve requests, each of which has memory for `max_len` tokens: as many as fit at once."""
        batch = batch or self.cost.max_batch(max_len)
        config = EngineConfig(
            policy=policy,
            chunk=chunk,
            max_batch=batch,
            max_len=max_len,
            page_size=max_len,
            pages=batch * self.cost.pp,
            policy_options={"tile": tile} if tile else {},
        )
        return simulate(self.cost, config, arrivals, replicas=replicas, record=record)

    def kv_tokens(self, max_len: int, batch: int) -> int:
        """As Lab.kv_tokens: all that the GPUs have."""
        return self.cost.kv_tokens()

    def capacity(self, server: str, lengths: str, slo: str) -> Bounded:
        """As Lab.capacity, under the SLOs of the paper's Table 3."""
        policy, batch = self.system.server(server, slo)
        return self.capacity_at(policy, batch, lengths, self.system.slos_s[slo])

    def capacity_at(
        self, policy: str, batch: int, lengths: str, slo_s: float, ratio: float = 1.05
    ) -> Bounded:
        """The capacity under an SLO in seconds, up to `ratio`."""
        # from the upper bound down: runs that fail are short
        return self.search(policy, batch, lengths, slo_s, self.cost.pp, ratio)

    def try_rate(self, policy: str, batch: int, lengths: str, slo_s: float, qps: float) -> Verdict:
        """As Lab.try_rate. A load is served once for all SLOs, or again for a longer one if the
        run was given up."""
        load = (policy, batch, lengths, qps)
        if load not in self.finished and slo_s > self.given_up.get(load, 0.0):
            run = self.run_at(policy, batch, lengths, qps, slo_s)
            if run.cut_short:
                self.given_up[load] = slo_s
            else:
                self.finished[load] = summarize_run(run.completions, [], run.seconds)
        if load in self.finished:
            return Verdict(missed=missed(self.finished[load], slo_s))
        return Verdict(missed="given up")


class RealLab(Lab):
    """A Lab that measures with a model on this machine."""

    requests = 32  # of a search: four for each slot, as queues show only then
    slots = 8
    # On a CPU the first token of a page also costs the zeros that fill the page. A chunk after
    # another token does not begin a page, so that its time depends on its tokens alone.
    cached_tokens = 1

    def __init__(self, model: GPT, info: RealMachineInfo, attention: str, seed: int) -> None:
        self.model = model
        self.info = info
        self.name = f"{info.model}, {info.device}"
        self.ridge = info.ridge_tokens
        self.attention = attention
        self.seed = seed
        self.is_small = model.device.type == "cpu"
        self.batch = 32 if self.is_small else 128
        self.page_size = 64 if self.is_small else 256

    @cached_property
    def machine(self) -> RealMachine:
        """This machine as a server of loads."""
        return RealMachine(
            self.model,
            self.info.model,
            chunk=self.scaled(512),
            max_len=self.limit(""),
            attention=self.attention,
            make_prompts=partial(workload.prompts, seed=self.seed),
        )

    @cached_property
    def base(self) -> Base:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As of Lab, measured when a load needs it."""
        self.busy = self.busy or bool(self.machine.info.base_busy)
        return self.machine.base

    def time(
        self, sequences: Mapping[str, Sequence[Batch]], layers: int | None = None
    ) -> dict[str, SequenceTime]:
        """As Lab.time."""
        model = keep_layers(self.model, layers, self.seed) if layers else self.model
        times = time_sequences(model, self.info, sequences, attention=self.attention)
        self.busy = self.busy or any(time.busy for time in times.values())
        return times

    def decode_cost(self, context: int, batch: int, chunk: int) -> DecodeCost:
        """As Lab.decode_cost, in wall time."""
        runner = runner_for(self.model)(self.model, batch, context, context, self.attention)
        batches = table_2_batches(context, batch, chunk)
        cost = measure_decode_cost(runner, batches, limit_s=COST_S)
        self.busy = self.busy or cost.busy
        return cost

    def gains(
        self, policies: Sequence[str], length: int, batch: int, pd_ratio: float
    ) -> dict[str, float]:
        """As Lab.gains, of full batches."""
        requests = 4 * batch + 1
        load = OfflineLoad(
            seq_len=length, pd_ratio=pd_ratio, batch=batch, requests=requests, lockstep=True
        )
        runs = dict(run_policies(self.model, policies, load, chunk=CHUNK, attention=self.attention))
        rows = policy_runs(policies, runs, batch)
        self.busy = self.busy or any(row.busy for row in rows.values())
        return {name: row.gain or 0.0 for name, row in rows.items()}

    def run(
        self,
        config: EngineConfig,
        arrivals: Sequence[Arrival],
        slo_s: float | None = None,
        record: bool = False,
    ) -> Run:
        """As Lab.run, to the end."""
        run = self.machine.serve(config, arrivals)
        self.busy = self.busy or judge(run, self.base.seconds).busy
        return run

    def kv_tokens(self, max_len: int, batch: int) -> int:
        """As Lab.kv_tokens: for a third of the batch, if each has `max_len`."""
        return max(1, batch // 3) * max_len

    def capacity(self, server: str, lengths: str, slo: str) -> Bounded:
        """As Lab.capacity, under multiples of a decode iteration."""
        return self.search(server, self.slots, lengths, slo_seconds(slo, self.base), 0.5, 1.25)
