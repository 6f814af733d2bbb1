"""What claims are measured with: a model, and the machine that it runs on.

    def s_f3(bench: Bench) -> Finding:
        times = bench.time_batches({"decode": [decodes(6, context=1024)]}, repeats=5)

A Bench calls the libraries of lab/measure. It keeps what they return, so that claims share what
they measure alike, and it remembers whether the machine was busy. Read first:
lab/measure/batch_times.py, decode_maximal.py, offline_load.py, capacity.py. Read next:
measured_batches.py."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from tqdm import tqdm

from cli.loading import ModelOptions
from config import EngineConfig
from lab.measure import workload
from lab.measure.batch_times import (
    Batch,
    SequenceTime,
    keep_layers,
    longest,
    time_sequences,
)
from lab.measure.capacity import (
    JudgedRun,
    SearchResult,
    estimated_qps,
    judge,
    search_capacity,
    slo_seconds,
)
from lab.measure.decode_maximal import DecodeMaximal, measure_decode_maximal
from lab.measure.load_run import Run
from lab.measure.machine_info import RealMachineInfo
from lab.measure.offline_load import OfflineLoad, PolicyRun, run_policies
from lab.measure.run_plan import run_plan
from lab.measure.workload import Arrival
from lab.papers.serving_machines import FittedMachine, RealMachine, ServingLimits, ServingMachine
from model import GPT

Size = Literal["gpu", "cpu", "quick"]  # which sizes claims are measured at
Sized = TypeVar("Sized")
Result = TypeVar("Result")
CAPACITY_RATIO = 1.25  # the last step of a search: a rate so much higher fails


class Measured(Protocol):
    """Something that was measured."""

    @property
    def busy(self) -> bool:
        """Whether the machine was too busy for it to be believed."""
        ...


@dataclass(frozen=True)
class Served:
    """What several policies made of requests that arrive while others run."""

    slo_s: float
    slo_busy: bool  # whether the machine was too busy while the base of the SLO was timed
    records: dict[str, Run]  # by policy
    runs: dict[str, JudgedRun]  # their numbers


@dataclass(frozen=True)
class Capacities:
    """The highest rates at which several policies meet an SLO."""

    slo_s: float
    slo_busy: bool  # whether the machine was too busy while the base of the SLO was timed
    results: dict[str, SearchResult[JudgedRun]]  # by policy


@dataclass
class Bench:
    """A model on this machine, and everything that claims measure with it."""

    model: GPT
    machine: RealMachineInfo
    options: ModelOptions
    size: Size
    picture: str = ""  # the file in which the claim is drawn
    busy: bool = False  # whether the machine was too busy during a measurement of this claim
    measured: dict[Hashable, Any] = field(default_factory=dict)  # {what was asked for: result}
    machines: dict[Hashable, ServingMachine] = field(default_factory=dict)

    def for_claim(self, picture: str) -> "Bench":
        """A Bench for the next claim, which shares what was measured for those before."""
        return replace(self, picture=picture, busy=False)

    def pick(self, *, gpu: Sized, cpu: Sized, quick: Sized) -> Sized:
        """The size for this device, and for --quick."""
        return {"gpu": gpu, "cpu": cpu, "quick": quick}[self.size]

    def _once(self, key: Hashable, measure: Callable[[], Result]) -> Result:
        """What `measure()` returns, or returned the first time that `key` was asked for."""
        if key not in self.measured:
            self.measured[key] = measure()
        return self.measured[key]

    def _note_busy(self, results: Iterable[Measured]) -> None:
        """Remember if the machine was too busy for one of these results."""
        self.busy = self.busy or any(result.busy for result in results)

    def _check_length(self, tokens: int) -> None:
        """Raise ValueError for a request that is too long for the model."""
        limit = self.model.config.max_positions
        if tokens > limit:
            raise ValueError(f"{tokens} tokens: this model is limited to {limit}")

    def time_batches(
        self,
        sequences: Mapping[str, Sequence[Batch]],
        repeats: int,
        layers: int | None = None,
    ) -> dict[str, SequenceTime]:
        """What sequences of batches take, whole and by operation; maybe with so many layers."""
        self._check_length(longest(sequences))

        def time_all() -> dict[str, SequenceTime]:
            model = keep_layers(self.model, layers, self.options.seed) if layers else self.model
            return time_sequences(
                model,
                self.machine,
                sequences,
                repeats=repeats,
                attention=self.options.attention,
            )

        cases = tuple((name, tuple(batches)) for name, batches in sequences.items())
        times = self._once(("batches", cases, repeats, layers), time_all)
        self._note_busy(times.values())
        return times

    def time_batch(
        self, sequence: Sequence[Batch], repeats: int, layers: int | None = None
    ) -> SequenceTime:
        """What one sequence of batches takes, timed alone."""
        return self.time_batches({"batch": sequence}, repeats, layers)["batch"]

    def decode_maximal(self, *, context: int, batch: int, chunk: int) -> DecodeMaximal:
        """SARATHI's Table 2: what a decode costs alone and beside a chunk."""
        self._check_length(context)
        measure = partial(
            measure_decode_maximal,
            self.model,
            self.machine,
            context=context,
            batch=batch,
            chunk=chunk,
            attention=self.options.attention,
        )
        table = self._once(("decode_maximal", context, batch, chunk), measure)
        self._note_busy([table])
        return table

    def run_policies(
        self,
        policies: Sequence[str],
        *,
        seq_len: int,
        batch: int,
        chunk: int,
        requests: int,
        pd_ratio: float,
    ) -> dict[str, PolicyRun]:
        """What policies make of requests in lockstep that are all there at the start."""
        self._check_length(seq_len)
        load = OfflineLoad(
            seq_len=seq_len,
            pd_ratio=pd_ratio,
            batch=batch,
            requests=requests,
            lockstep=True,
            seed=self.options.seed,
        )

        def run_all() -> dict[str, PolicyRun]:
            count = len(policies) * requests
            with tqdm(desc="requests", total=count, leave=False, disable=None) as bar:
                rows = run_policies(
                    self.model,
                    policies,
                    load,
                    chunk=chunk,
                    attention=self.options.attention,
                    progress=bar.update,
                )
                return dict(rows)

        rows = self._once(("policies", tuple(policies), load, chunk), run_all)
        self._note_busy(rows.values())
        return rows

    def serve(
        self,
        policies: Sequence[str],
        *,
        lengths: str = "sharegpt4",
        requests: int = 4,
        qps: float | None = None,
        trace: Path | None = None,
        batch: int | None = None,
        max_len: int | None = None,
        kv_tokens: int | None = None,
    ) -> Served:
        """What policies make of requests that arrive while others run.

        They come at `qps`, by default at half of what is estimated to be possible; or they are
        those of a trace, at its times. Other defaults are those of `bench.py serve`."""
        limits = self._limits(batch, max_len, kv_tokens)

        def serve_all() -> Served:
            machine = self._machine_for(limits, simulated=False)
            slo_s = slo_seconds("strict", machine.base)
            if trace:
                arrivals, _ = workload.read_trace(trace, limits.max_len)
            else:
                pairs = workload.make_lengths(lengths, requests, limits.max_len, self.options.seed)
                rate = qps or starting_rate(machine, self._arrivals(pairs, 1.0))
                arrivals = self._arrivals(pairs, rate)
            records = {}
            for name, policy_config in self._plan(policies, limits, slo_s).items():
                records[name] = serve_one(machine, name, policy_config, arrivals)
            runs = {name: judge(run, slo_s) for name, run in records.items()}
            return Served(slo_s, machine.base_busy, records, runs)

        key = ("serve", tuple(policies), lengths, requests, qps, trace, batch, max_len, kv_tokens)
        served = self._once(key, serve_all)
        self.busy = self.busy or served.slo_busy
        self._note_busy(served.runs.values())
        return served

    def capacity(
        self,
        policies: Sequence[str],
        *,
        slo: str,
        lengths: str,
        requests: int,
        batch: int,
        max_len: int | None = None,
        kv_tokens: int | None = None,
    ) -> Capacities:
        """The highest rates at which policies meet an SLO; with --quick simulated."""
        limits = self._limits(batch, max_len, kv_tokens)

        def search_all() -> Capacities:
            machine = self._machine_for(limits, simulated=self.size == "quick")
            slo_s = slo_seconds(slo, machine.base)
            pairs = workload.make_lengths(lengths, requests, limits.max_len, self.options.seed)
            start = starting_rate(machine, self._arrivals(pairs, 1.0))
            results = {}
            for name, policy_config in self._plan(policies, limits, slo_s).items():

                def run_at_rate(
                    qps: float, name: str = name, policy_config: EngineConfig = policy_config
                ) -> JudgedRun:
                    arrivals = self._arrivals(pairs, qps)
                    return judge(serve_one(machine, name, policy_config, arrivals), slo_s)

                results[name] = search_capacity(run_at_rate, start, CAPACITY_RATIO)
            return Capacities(slo_s, machine.base_busy, results)

        key = ("capacity", tuple(policies), slo, lengths, requests, batch, max_len, kv_tokens)
        capacities = self._once(key, search_all)
        self.busy = self.busy or capacities.slo_busy
        self._note_busy(capacities.results.values())
        return capacities

    def _limits(
        self, batch: int | None, max_len: int | None, kv_tokens: int | None
    ) -> ServingLimits:
        """What a server is limited to. None takes the default of `bench.py serve`: the cache has
        room for a third of the requests if each has `max_len` tokens."""
        batch = batch or self.pick(gpu=128, cpu=32, quick=32)
        max_len = max_len or self.pick(gpu=8192, cpu=1024, quick=1024)
        self._check_length(max_len)
        page_size = min(64, -(-max_len // 2))
        pages_of_request = -(-max_len // page_size)
        return ServingLimits(
            chunk=self.pick(gpu=512, cpu=128, quick=128),
            batch=batch,
            max_len=max_len,
            page_size=page_size,
            kv_tokens=kv_tokens or max(1, batch // 3) * pages_of_request * page_size,
            attention=self.options.attention,
        )

    def _plan(
        self, policies: Sequence[str], limits: ServingLimits, slo_s: float
    ) -> dict[str, EngineConfig]:
        """The EngineConfig of each policy."""
        return run_plan(policies, [limits.page_size], limits.config, slo_s)

    def _arrivals(self, lengths: Sequence[tuple[int, int]], qps: float) -> list[Arrival]:
        """Requests of these lengths that arrive at a rate."""
        return workload.poisson(lengths, qps, self.options.seed)

    def _machine_for(self, limits: ServingLimits, simulated: bool) -> ServingMachine:
        """What serves requests, measured once: this machine, or its simulation."""
        key = (simulated, limits.max_len, limits.chunk)
        if key not in self.machines:
            make_machine = FittedMachine if simulated else RealMachine
            self.machines[key] = make_machine(self.model, limits, self.options.seed)
        return self.machines[key]


def starting_rate(machine: ServingMachine, arrivals: Sequence[Arrival]) -> float:
    """Half of the rate that is estimated to be possible, with two digits."""
    return float(f"{estimated_qps(machine.base, arrivals) / 2:.2g}")


def serve_one(
    machine: ServingMachine, name: str, config: EngineConfig, arrivals: Sequence[Arrival]
) -> Run:
    """Serve the arrivals under one policy, with a progress bar of that name."""
    with tqdm(total=len(arrivals), desc=name, disable=None, leave=False) as bar:
        return machine.serve(config, arrivals, progress=bar.update)
