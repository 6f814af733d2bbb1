"""A Bench measures claims with a model on this machine.

    def s_f3(bench: Bench) -> Finding:
        times = bench.time_batches({"decode": [decodes(6, context=1024)]})

Each method calls a library of lab/measure, with the options of the command line:

    time_batches, time_batch    single iterations, whole and by operation    batch_times.py
    decode_maximal              decodes alone and beside a chunk             decode_maximal.py
    run_policies                requests that are all there at the start     offline_load.py
    serve                       requests that arrive while others run        run_loop.py
    capacity                    the highest rate that meets an SLO           capacity.py
    token_budgets               the largest that meet some SLOs              token_budget.py

A Bench keeps all results: claims that need the same measurement share it. It also notes whether the
machine was busy. Read first: finding.py. Read next: measured_batches.py."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, runtime_checkable

from tqdm import tqdm

from cli.loading import ModelOptions
from config import EngineConfig
from hardware.memory import small_page_size
from lab.measure import timing, workload
from lab.measure.batch_times import (
    Batch,
    SequenceTime,
    intensities,
    keep_layers,
    longest,
    time_sequences,
)
from lab.measure.capacity import (
    Bounded,
    JudgedRun,
    SearchResult,
    estimated_qps,
    judge,
    search_capacity,
    slo_seconds,
    time_steadily,
)
from lab.measure.decode_maximal import DecodeMaximal, measure_decode_maximal
from lab.measure.machine import Machine, RealMachine
from lab.measure.machine_info import RealMachineInfo
from lab.measure.offline_load import OfflineLoad, PolicyRun, run_policies
from lab.measure.run_loop import Run
from lab.measure.run_plan import run_plan
from lab.measure.token_budget import Case, Profiled, TimedRunner, choose_budget
from lab.measure.workload import Arrival
from lab.simulator.machine import FittedMachine
from model import GPT
from parallel import runner_for

Size = Literal["gpu", "cpu", "quick"]  # each claim has three lists of sizes
Sized = TypeVar("Sized")
Result = TypeVar("Result")
Params = ParamSpec("Params")
NO_PREFIX = (0, 1)  # one prefix of no tokens: prompts share nothing
CAPACITY_RATIO = 1.25  # a search ends when a rate that is so many times higher fails


@runtime_checkable
class Measured(Protocol):
    """A result that says whether the machine was busy."""

    @property
    def busy(self) -> bool:
        """Whether the machine was too busy for the result to be believed."""
        ...


@dataclass(frozen=True)
class Served:
    """Runs of several policies on one load, and their SLO."""

    slo_s: float
    slo_busy: bool  # whether the machine was too busy while the base of the SLO was timed
    records: dict[str, Run]  # by policy: every iteration and every request
    runs: dict[str, JudgedRun]  # by policy: the numbers, and whether the SLO was met

    @property
    def busy(self) -> bool:
        """Whether the machine was too busy for the base of the SLO, or for one of the runs."""
        return self.slo_busy or any(run.busy for run in self.runs.values())


@dataclass(frozen=True)
class Capacities:
    """The highest rates at which several policies meet an SLO."""

    slo_s: float
    slo_busy: bool  # whether the machine was too busy while the base of the SLO was timed
    results: dict[str, SearchResult[JudgedRun]]  # by policy

    @property
    def busy(self) -> bool:
        """Whether the machine was too busy for the base of the SLO, or for one of the searches."""
        return self.slo_busy or any(result.busy for result in self.results.values())


@dataclass(frozen=True)
class TokenBudgets:
    """The largest token budgets that meet some SLOs, and the batches that were timed."""

    slos_s: dict[str, float]  # by the name of the SLO
    budgets: dict[str, Bounded]  # "at least" the largest that may be timed
    profile: list[Profiled]
    slo_busy: bool = False  # whether the machine was too busy while the base was timed

    @property
    def busy(self) -> bool:
        """Whether the machine was too busy for the times to be believed."""
        return self.slo_busy or any(row.spread > timing.BUSY for row in self.profile)


@dataclass(frozen=True, kw_only=True)
class ServingLimits:
    """The limits of a server, whatever its policy."""

    chunk: int  # tokens
    batch: int  # requests that run at once
    max_len: int  # tokens of a request
    page_size: int
    kv_tokens: int  # tokens that fit into the cache

    def config(self, attention: str) -> EngineConfig:
        """The EngineConfig of such a server, without a policy."""
        return EngineConfig(
            chunk=self.chunk,
            max_batch=self.batch,
            max_len=self.max_len,
            page_size=self.page_size,
            pages=self.kv_tokens // self.page_size,
            attention=attention,
        )


def once(measure: Callable[Concatenate["Bench", Params], Result]) -> Callable[..., Result]:
    """A method of Bench that measures each of its arguments once, for all claims. It notes whether
    the machine was busy."""

    @wraps(measure)
    def measure_once(bench: "Bench", *args: Params.args, **kwargs: Params.kwargs) -> Result:
        key = repr((measure.__name__, args, kwargs))
        if key not in bench.measured:
            bench.measured[key] = measure(bench, *args, **kwargs)
        result = bench.measured[key]
        bench.note_busy(result)
        return result

    return measure_once


@dataclass
class Bench:
    """Measures one claim with a model on this machine. It shares its results with other claims."""

    model: GPT
    machine: RealMachineInfo
    options: ModelOptions
    size: Size
    picture: str = ""  # the file in which the claim is drawn
    busy: bool = False  # whether the machine was too busy during a measurement of this claim
    measured: dict[str, Any] = field(default_factory=dict)  # results, by their arguments

    def for_claim(self, picture: str) -> "Bench":
        """A Bench for the next claim, with all results of the claims before it."""
        return replace(self, picture=picture, busy=False)

    def pick(self, *, gpu: Sized, cpu: Sized, quick: Sized) -> Sized:
        """The size of these three that the claim is measured at."""
        return {"gpu": gpu, "cpu": cpu, "quick": quick}[self.size]

    def scaled(self, tokens: int) -> int:
        """So many tokens, or a quarter of them with --quick."""
        return self.pick(gpu=tokens, cpu=tokens, quick=tokens // 4)

    def note_busy(self, result: Any) -> None:
        """Set `busy` if the machine was too busy for a result, or for one of a dict of results."""
        results = result.values() if isinstance(result, dict) else [result]
        self.busy = self.busy or any(isinstance(each, Measured) and each.busy for each in results)

    @once
    def time_batches(
        self,
        sequences: Mapping[str, Sequence[Batch]],
        layers: int | None = None,
        repeats: int = 5,
    ) -> dict[str, SequenceTime]:
        """Time sequences of batches, by their names: whole, and each operation alone.

        `layers`: with a model of so many layers; None: with all of them. There are three repeats
        with --quick."""
        self._check_length(longest(sequences))
        return time_sequences(
            keep_layers(self.model, layers, self.options.seed) if layers else self.model,
            self.machine,
            sequences,
            repeats=self.pick(gpu=repeats, cpu=repeats, quick=3),
            attention=self.options.attention,
        )

    def time_batch(self, sequence: Sequence[Batch], layers: int | None = None) -> SequenceTime:
        """Time one sequence of batches, without others in turn."""
        return self.time_batches({"batch": sequence}, layers)["batch"]

    def intensities(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Flops per byte of each operation. This is arithmetic; nothing is timed."""
        return intensities(self.model, batches)

    @once
    def decode_maximal(self, *, context: int, batch: int, chunk: int) -> DecodeMaximal:
        """Time batches as SARATHI's Table 2 does: `batch` decodes alone, and all but one beside a
        chunk."""
        self._check_length(context)
        return measure_decode_maximal(
            self.model,
            self.machine,
            context=context,
            batch=batch,
            chunk=chunk,
            attention=self.options.attention,
        )

    @once
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
        """Serve requests that are all there at the start, and begin and end together (lockstep).

        Prompt and output are `seq_len` tokens together, with `pd_ratio` prompt tokens per output
        token. The result has a row for each policy, with its gain over request-level."""
        self._check_length(seq_len)
        load = OfflineLoad(
            seq_len=seq_len,
            pd_ratio=pd_ratio,
            batch=batch,
            requests=requests,
            lockstep=True,
            seed=self.options.seed,
        )
        count = len(policies) * load.tokens
        with tqdm(desc="tokens", total=count, leave=False, disable=None) as bar:
            rows = run_policies(
                self.model,
                policies,
                load,
                chunk=chunk,
                attention=self.options.attention,
                progress=bar.update,
            )
            return dict(rows)

    def serve(
        self,
        policies: Sequence[str],
        *,
        lengths: str = "sharegpt4",
        requests: int = 4,
        load: float = 0.5,
        qps: float | None = None,
        arrivals: Sequence[Arrival] | None = None,
        batch: int | None = None,
        max_len: int | None = None,
        kv_tokens: int | None = None,
    ) -> Served:
        """Serve requests that arrive while others run, under each policy.

        They arrive at `qps`; None: at `load`, a share of the estimated capacity. `arrivals` are
        requests with times of their own, which count decode iterations. Other defaults are those of
        `bench.py serve`. The SLO is the strict one. Policies run one after another, so that claims
        share the run of a policy."""
        limits = self._limits(batch, max_len, kv_tokens)
        machine = self._real_machine(limits)
        slo_s = slo_seconds("strict", machine.base)
        if arrivals:
            unit_s = machine.base.seconds
            timed = [arrival._replace(time=arrival.time * unit_s) for arrival in arrivals]
        else:
            pairs = workload.make_lengths(lengths, requests, limits.max_len, self.options.seed)
            timed = self._arrivals(pairs, qps or rate_at(load, machine, self._arrivals(pairs, 1.0)))
        records = {
            name: self._serve_one(name, config, timed, limits)
            for name, config in self._plan(policies, limits, slo_s).items()
        }
        runs = {name: judge(run, slo_s) for name, run in records.items()}
        served = Served(slo_s, bool(machine.info.base_busy), records, runs)
        self.note_busy(served)
        return served

    @once
    def _serve_one(
        self, name: str, config: EngineConfig, arrivals: Sequence[Arrival], limits: ServingLimits
    ) -> Run:
        """The run of one policy, which claims share."""
        return serve_one(self._real_machine(limits), name, config, arrivals)

    @once
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
        simulated: bool = False,
    ) -> Capacities:
        """Search the highest rate at which each policy meets an SLO. `simulated`: of this machine
        as it was profiled, as always with --quick."""
        limits = self._limits(batch, max_len, kv_tokens)
        real = self._real_machine(limits)
        is_fitted = simulated or self.size == "quick"
        machine = self._fitted_machine(limits) if is_fitted else real
        slo_s = slo_seconds(slo, machine.base)
        pairs = workload.make_lengths(lengths, requests, limits.max_len, self.options.seed)
        start = rate_at(0.5, machine, self._arrivals(pairs, 1.0))
        results = {}
        for name, policy_config in self._plan(policies, limits, slo_s).items():

            def run_at_rate(
                qps: float, name: str = name, policy_config: EngineConfig = policy_config
            ) -> JudgedRun:
                arrivals = self._arrivals(pairs, qps)
                return judge(serve_one(machine, name, policy_config, arrivals), slo_s)

            results[name] = search_capacity(run_at_rate, start, CAPACITY_RATIO)
        return Capacities(slo_s, bool(real.info.base_busy), results)

    @once
    def token_budgets(
        self,
        slos: Sequence[str],
        *,
        decodes: int,
        max_budget: int,
        tile: int,
        max_len: int | None = None,
    ) -> TokenBudgets:
        """Find the largest token budget that meets each SLO, by timing hybrid batches (SS-§4.3).

        The `decodes` are at the context of the iteration that the SLOs are multiples of. That
        depends on `max_len`, whose default is that of `bench.py serve`."""
        self._check_length(max_budget)
        limits = self._limits(None, max_len, None)
        machine = self._real_machine(limits)
        context = machine.base.context
        page_size = limits.page_size
        pages = decodes * -(-context // page_size) + -(-max_budget // page_size)
        runner = runner_for(self.model)(
            self.model, pages, page_size, max_budget, self.options.attention
        )
        slos_s: dict[str, float] = {}
        budgets: dict[str, Bounded] = {}
        timed: dict[Case, Profiled] = {}  # the searches begin with the same batches

        def time_once(runner: TimedRunner, cases: Sequence[Case]) -> list[Profiled]:
            new_cases = [case for case in cases if case not in timed]
            if new_cases:
                rows = time_steadily(runner, new_cases)
                timed.update(zip(new_cases, rows, strict=True))
            return [timed[case] for case in cases]

        for slo in slos:
            slos_s[slo] = slo_seconds(slo, machine.base)
            budget, _ = choose_budget(
                runner, slos_s[slo], decodes, [context], tile, max_budget, time_once
            )
            is_limited = budget + tile > max_budget
            budgets[slo] = Bounded(budget, "at least" if is_limited else "")
        profile = list(timed.values())
        return TokenBudgets(slos_s, budgets, profile, bool(machine.info.base_busy))

    def _limits(
        self, batch: int | None, max_len: int | None, kv_tokens: int | None
    ) -> ServingLimits:
        """The limits of a server. None: the default of `bench.py serve`, where the cache has room
        for a third of the requests if each has `max_len` tokens; on a GPU requests of 2,048 tokens,
        20 of which fit."""
        batch = batch or self.pick(gpu=128, cpu=32, quick=32)
        max_len = max_len or self.pick(gpu=2048, cpu=1024, quick=1024)
        kv_tokens = kv_tokens or self.pick(gpu=40960, cpu=None, quick=None)
        self._check_length(max_len)
        page_size = small_page_size(max_len, self.model.device)
        pages_of_request = -(-max_len // page_size)
        return ServingLimits(
            chunk=self.pick(gpu=512, cpu=128, quick=128),
            batch=batch,
            max_len=max_len,
            page_size=page_size,
            kv_tokens=kv_tokens or max(1, batch // 3) * pages_of_request * page_size,
        )

    def _plan(
        self, policies: Sequence[str], limits: ServingLimits, slo_s: float
    ) -> dict[str, EngineConfig]:
        """The EngineConfig of each policy."""
        config = limits.config(self.options.attention)
        return run_plan(policies, [limits.page_size], config, slo_s)

    def _arrivals(self, lengths: Sequence[tuple[int, int]], qps: float) -> list[Arrival]:
        """Requests of these lengths that arrive at a rate, as a Poisson process."""
        return workload.poisson(lengths, qps, self.options.seed)

    def _real_machine(self, limits: ServingLimits) -> RealMachine:
        """This machine as a server. The base of its SLOs is timed once for all claims."""
        return self._real(limits.max_len, limits.chunk)

    @once
    def _real(self, max_len: int, chunk: int) -> RealMachine:
        return RealMachine(
            self.model,
            self.machine.model,
            chunk=chunk,
            max_len=max_len,
            attention=self.options.attention,
            seed=self.options.seed,
            shared_prefix=NO_PREFIX,
        )

    def _fitted_machine(self, limits: ServingLimits) -> FittedMachine:
        """A simulation of this machine. The batches that it is fitted to are timed once."""
        return self._fitted(limits.max_len, limits.chunk)

    @once
    def _fitted(self, max_len: int, chunk: int) -> FittedMachine:
        return FittedMachine(
            self._real(max_len, chunk),
            max_len=max_len,
            attention=self.options.attention,
            is_alone=True,
        )

    def _check_length(self, tokens: int) -> None:
        """Raise ValueError for a request that is too long for the model."""
        limit = self.model.config.max_positions
        if tokens > limit:
            raise ValueError(f"{tokens} tokens: this model is limited to {limit}")


def rate_at(load: float, machine: Machine, arrivals: Sequence[Arrival]) -> float:
    """A share of the estimated capacity, in requests per second, with two digits."""
    return float(f"{load * estimated_qps(machine.base, arrivals):.2g}")


def serve_one(
    machine: Machine, name: str, config: EngineConfig, arrivals: Sequence[Arrival]
) -> Run:
    """Serve the arrivals under one policy, with a progress bar of that name."""
    with tqdm(total=len(arrivals), desc=name, disable=None, leave=False) as bar:
        return machine.serve(config, arrivals, progress=bar.update, recorder=None)
