"""A Lab answers what a claim asks, with a model on this machine or with the papers' on theirs.

    def s_f3(lab: Lab) -> Finding:
        times = lab.time({"decode": [decodes(6, context=1024)]})

    time              single iterations, whole and by operation     batch_times.py
    decode_maximal    decodes alone and beside a chunk              decode_maximal.py
    gains             requests that are all there at the start      offline_load.py
    serve             requests that arrive while others run         run_loop.py
    capacity          the highest rate that meets an SLO            capacity.py
    token_budgets     the largest that meet some SLOs               token_budget.py

A claim does not know which of the two answers: RealLab, here, measures; CostLab, in cost_lab.py,
computes. A Lab keeps all results: claims that need the same measurement share it. It also notes
whether the machine was busy. Read first: checks.py. Read next:
claim.py, phases.py."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import (
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    runtime_checkable,
)

from tqdm import tqdm

from cli.loading import ModelOptions
from config import EngineConfig
from lab.claims.checks import Condition
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
    Base,
    Bounded,
    JudgedRun,
    estimated_qps,
    judge,
    search_capacity,
    slo_seconds,
    time_steadily,
)
from lab.measure.decode_maximal import DecodeMaximal, measure_decode_maximal
from lab.measure.machine import Machine, RealMachine
from lab.measure.machine_info import RealMachineInfo
from lab.measure.offline_load import OfflineLoad, PolicyRun, policy_runs, run_policies
from lab.measure.run_loop import Run
from lab.measure.run_plan import run_plan
from lab.measure.token_budget import Case, Profiled, choose_budget
from lab.measure.workload import Arrival
from model import GPT
from parallel.stages import runner_for
from runtime.memory import small_page_size

Size = Literal["gpu", "cpu", "quick"]  # each claim has up to three lists of sizes
Sized = TypeVar("Sized")
Result = TypeVar("Result")
Params = ParamSpec("Params")
TimeCases = Callable[[Sequence[Case]], list[Profiled]]
CAPACITY_RATIO = 1.25  # a search ends when a rate that is so many times higher fails
# Our choice. SARATHI's products promise 1.63x on an A6000 (B = 6, C = 256), and 1.22x to 1.33x come
# out: a third of the promise is left. Of 1.3x that would be 1.1x, which noise does not hide.
CLEAR_GAIN = 1.3


@runtime_checkable
class Timed(Protocol):
    """A result that says whether the machine was busy."""

    @property
    def busy(self) -> bool:
        """Whether the machine was too busy for the result to be believed."""
        ...


@dataclass(frozen=True)
class Served:
    """Runs of several policies on one load, and their SLO."""

    slo_s: float
    records: dict[str, Run]  # by policy: every iteration and every request
    runs: dict[str, JudgedRun]  # by policy: the numbers, and whether the SLO was met


@dataclass(frozen=True)
class Capacities:
    """The highest rates at which several policies meet an SLO."""

    slo_s: float
    busy: bool  # whether the machine was too busy for the base of the SLO, or for a search
    qps: dict[str, Bounded]  # by policy


@dataclass(frozen=True)
class Lockstep:
    """A load of requests of one length that are all there at the start, and that begin and end
    together."""

    length: int  # tokens of a request, prompt and output
    batch: int
    chunk: int
    requests: int

    @property
    def pd_ratio(self) -> float:
        """The P:D at which prompts and outputs run out together: C / (B - 1), SARATHI §5.1.3."""
        return self.chunk / (self.batch - 1)

    def offline(self, pd_ratio: float, requests: int, seed: int = 0) -> OfflineLoad:
        """The load with `pd_ratio` prompt tokens per output token."""
        return OfflineLoad(
            seq_len=self.length,
            pd_ratio=pd_ratio,
            batch=self.batch,
            requests=requests,
            lockstep=True,
            seed=seed,
        )


@dataclass(frozen=True)
class TokenBudgets:
    """The largest token budgets that meet some SLOs, and the batches that were timed."""

    slos_s: dict[str, float]  # by the name of the SLO
    budgets: dict[str, Bounded]  # "at least" the largest that may be timed
    profile: list[Profiled]
    busy: bool = False  # whether the machine was too busy for the times to be believed


def once(measure: Callable[Concatenate[Any, Params], Result]) -> Callable[..., Result]:
    """A method of a Lab that measures each of its arguments once, for all claims. It notes whether
    the machine was busy."""

    @wraps(measure)
    def measure_once(lab: "Lab", *args: Params.args, **kwargs: Params.kwargs) -> Result:
        key = repr((measure.__name__, args, kwargs))
        if key not in lab.results:
            lab.results[key] = measure(lab, *args, **kwargs)
        lab.busy = lab.busy or is_busy(lab.results[key])
        return lab.results[key]

    return measure_once


def is_busy(result: Any) -> bool:
    """Whether the machine was too busy for a result, or for one of a dict of results."""
    results = result.values() if isinstance(result, dict) else [result]
    return any(isinstance(each, Timed) and each.busy for each in results)


class Lab:
    """What a claim asks. Its results are shared by all claims."""

    cached_tokens = 0  # before the first token of a chunk that is timed alone

    def __init__(
        self,
        model: GPT,
        size: Size,
        *,
        ridge: float,
        machine: Mapping[str, object],
        attention: str = "auto",
        seed: int = 0,
    ) -> None:
        """Computing with a batch of `ridge` rows takes as long as reading the weights. `machine` is
        what pictures say of it."""
        self.model = model
        self.size: Size = size
        self.ridge = ridge
        self.machine = machine
        self.attention = attention
        self.seed = seed
        self.picture = ""  # the file in which the claim is drawn
        self.busy = False  # whether the machine was too busy during a measurement of this claim
        self.results: dict[str, Any] = {}  # by what was measured, and its arguments

    def for_claim(self, picture: str) -> Self:
        """This Lab for the next claim, which is drawn to a file."""
        self.picture = picture
        self.busy = False
        return self

    def pick(self, gpu: Sized, *, cpu: Sized | None = None, quick: Sized | None = None) -> Sized:
        """The size of these three that the claim is measured at. By default that of a CPU is that
        of a GPU, and that with --quick is that of a CPU."""
        if self.size == "quick" and quick is not None:
            return quick
        return gpu if self.size == "gpu" or cpu is None else cpu

    @property
    def chunk(self) -> int:
        """The chunk size of a server, unless its policy says another."""
        return self.pick(512, cpu=128)

    def scaled(self, tokens: int) -> int:
        """So many tokens, or a quarter of them with --quick."""
        return self.pick(tokens, quick=tokens // 4)

    def ridge_above(self, rows: float) -> Condition:
        """A batch of so many rows takes no longer than the reading of the weights."""
        observed = f"it is at {self.ridge:.0f}"
        return Condition(f"the ridge is above {rows:g} rows", self.ridge > rows, observed)

    def ridge_below(self, rows: float) -> Condition:
        """A batch of so many rows takes longer than the reading of the weights."""
        observed = f"it is at {self.ridge:.0f}"
        return Condition(f"the ridge is below {rows:g} rows", self.ridge < rows, observed)

    def riding_pays(self, batch: int, chunk: int) -> Condition:
        """Matrix products alone promise a clear gain of decode-maximal batches (SARATHI §4.4).

        The unit of time is a row; reading the weights takes `ridge` rows. A batch of `chunk` rows
        has batch - 1 decodes. Request-level computes its other rows with prompts, and the decodes
        in a fraction (batch - 1) / batch of an iteration of their own."""
        riding = batch - 1
        request_level = chunk - riding + riding / batch * max(self.ridge, batch)
        gain = request_level / max(self.ridge, chunk)
        return Condition(
            f"products alone promise {CLEAR_GAIN:g}x with {batch} requests and chunks of {chunk}",
            gain >= CLEAR_GAIN,
            f"they promise {gain:.2f}x, as the ridge is at {self.ridge:.0f} rows",
        )

    def has_tiles(self) -> Condition:
        """Matrix products compute whole tiles of 128 rows."""
        description = "matrix products compute whole tiles of 128 rows, as a GPU's do"
        return Condition(description, self.size == "gpu", "those of a CPU are smaller")

    def time(
        self,
        sequences: Mapping[str, Sequence[Batch]],
        layers: int | None = None,
        repeats: int = 5,
    ) -> dict[str, SequenceTime]:
        """Time sequences of batches, by their names: whole, and each operation alone.

        `layers`: with a model of so many layers; None: with all of them."""
        raise NotImplementedError

    def intensities(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Flops per byte of each operation. This is arithmetic; nothing is timed."""
        return intensities(self.model, batches)

    def decode_maximal(self, *, context: int, batch: int, chunk: int) -> DecodeMaximal:
        """Time batches as SARATHI's Table 2 does: `batch` decodes alone, and all but one beside a
        chunk."""
        raise NotImplementedError

    def gains(
        self, policies: Sequence[str], load: Lockstep, pd_ratio: float
    ) -> dict[str, float | None]:
        """The throughput of each policy over that of request-level, with `pd_ratio` prompt tokens
        per output token."""
        raise NotImplementedError

    def riding_pays_for(self, loads: Sequence[Lockstep]) -> Condition:
        """The least promising of the Conditions under which riding pays."""
        conditions = [self.riding_pays(load.batch, load.chunk) for load in loads]
        return next((each for each in conditions if not each.is_met), conditions[0])

    @once
    def token_budgets(
        self, slos: Sequence[str], *, decodes: int, max_budget: int, tile: int
    ) -> TokenBudgets:
        """Find the largest token budget that meets each SLO, by timing hybrid batches (SS-§4.3).

        The `decodes` are at the context of the iteration that the SLOs are multiples of."""
        self.check_length(max_budget)
        max_len = self._config().max_len or 0
        base = self.server(max_len).base
        context = base.context
        time_cases = self.case_timer(decodes, context, max_budget)
        time_one = cache(lambda case: time_cases([case])[0])  # searches begin with the same batches
        runner: Any = None  # which is not used
        slos_s = {slo: slo_seconds(slo, base) for slo in slos}
        budgets: dict[str, Bounded] = {}
        timed: dict[Profiled, None] = {}
        for slo, slo_s in slos_s.items():
            budget, profile = choose_budget(
                runner,
                slo_s,
                decodes,
                [context],
                tile,
                max_budget,
                lambda _, cases: list(map(time_one, cases)),
            )
            budgets[slo] = Bounded(budget, "at least" if budget + tile > max_budget else "")
            timed |= dict.fromkeys(profile)
        busy = self.base_busy(max_len) or any(row.spread > timing.BUSY for row in timed)
        return TokenBudgets(slos_s, budgets, list(timed), busy)

    def case_timer(self, decodes: int, context: int, max_budget: int) -> TimeCases:
        """What times batches of up to `max_budget` tokens, so many of them decodes at a context."""
        raise NotImplementedError

    def server(self, max_len: int) -> Machine:
        """The machine as a server of requests of up to `max_len` tokens."""
        raise NotImplementedError

    def base_busy(self, max_len: int) -> bool:
        """Whether the machine was too busy while the base of its SLOs was timed."""
        return False

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
        config = self._config(batch, max_len, kv_tokens)
        longest_request = config.max_len or 0
        base = self.server(longest_request).base
        slo_s = slo_seconds("strict", base)
        if arrivals:
            timed = [arrival._replace(time=arrival.time * base.seconds) for arrival in arrivals]
        else:
            pairs = workload.make_lengths(lengths, requests, longest_request, self.seed)
            timed = self._arrivals(pairs, qps or self._rate(load, base, pairs))
        records = {
            name: self._run(name, policy_config, timed)
            for name, policy_config in self._plan(policies, config, slo_s).items()
        }
        runs = {name: judge(run, slo_s) for name, run in records.items()}
        self.busy = self.busy or self.base_busy(longest_request) or is_busy(runs)
        return Served(slo_s, records, runs)

    @once
    def _run(self, name: str, config: EngineConfig, arrivals: Sequence[Arrival]) -> Run:
        """The run of one policy, which claims share."""
        return serve_one(self.server(config.max_len or 0), name, config, arrivals)

    @once
    def capacity(
        self,
        policies: Sequence[str],
        *,
        slo: str,
        lengths: str,
        requests: int,
        batch: int,
        kv_tokens: int | None = None,
    ) -> Capacities:
        """Search the highest rate at which each policy meets an SLO."""
        config = self._config(batch, None, kv_tokens)
        max_len = config.max_len or 0
        machine = self.server(max_len)
        slo_s = slo_seconds(slo, machine.base)
        pairs = workload.make_lengths(lengths, requests, max_len, self.seed)
        start = self._rate(0.5, machine.base, pairs)
        qps = {}
        busy = self.base_busy(max_len)
        for name, policy_config in self._plan(policies, config, slo_s).items():

            def run_at_rate(
                rate: float, name: str = name, policy_config: EngineConfig = policy_config
            ) -> JudgedRun:
                arrivals = self._arrivals(pairs, rate)
                return judge(serve_one(machine, name, policy_config, arrivals), slo_s)

            search = search_capacity(run_at_rate, start, CAPACITY_RATIO)
            qps[name] = search.capacity_qps
            busy = busy or search.busy
        return Capacities(slo_s, busy, qps)

    def _config(
        self,
        batch: int | None = None,
        max_len: int | None = None,
        kv_tokens: int | None = None,
    ) -> EngineConfig:
        """The EngineConfig of a server, without a policy. None: the default of `bench.py serve`,
        where the cache has room for a third of the requests if each has `max_len` tokens; on a GPU
        requests of 2,048 tokens, 20 of which fit."""
        batch = batch or self.pick(128, cpu=32)
        max_len = max_len or self.pick(2048, cpu=1024)
        self.check_length(max_len)
        page_size = small_page_size(max_len, self.model.device)
        a_third = max(1, batch // 3) * -(-max_len // page_size) * page_size
        kv_tokens = kv_tokens or self.pick(40960, cpu=0) or a_third
        return EngineConfig(
            chunk=self.chunk,
            max_batch=batch,
            max_len=max_len,
            page_size=page_size,
            pages=kv_tokens // page_size,
            attention=self.attention,
        )

    def _plan(
        self, policies: Sequence[str], config: EngineConfig, slo_s: float
    ) -> dict[str, EngineConfig]:
        """The EngineConfig of each policy."""
        return run_plan(policies, [config.page_size or 1], config, slo_s)

    def _arrivals(self, lengths: Sequence[tuple[int, int]], qps: float) -> list[Arrival]:
        """Requests of these lengths that arrive at a rate, as a Poisson process."""
        return workload.poisson(lengths, qps, self.seed)

    def _rate(self, load: float, base: Base, lengths: Sequence[tuple[int, int]]) -> float:
        """A share of the estimated capacity, in requests per second, with two digits."""
        return float(f"{load * estimated_qps(base, self._arrivals(lengths, 1.0)):.2g}")

    def check_length(self, tokens: int) -> None:
        """Raise ValueError for a request that is too long for the model."""
        if not self.fits(tokens):
            limit = self.model.config.max_positions
            raise ValueError(f"{tokens} tokens: this model is limited to {limit}")

    def fits(self, tokens: int) -> bool:
        """Whether a request is not too long for the model."""
        return tokens <= self.model.config.max_positions


def serve_one(
    machine: Machine, name: str, config: EngineConfig, arrivals: Sequence[Arrival]
) -> Run:
    """Serve the arrivals under one policy, with a progress bar of that name."""
    with tqdm(total=len(arrivals), desc=name, disable=None, leave=False) as bar:
        return machine.serve(config, arrivals, progress=bar.update, recorder=None)


class RealLab(Lab):
    """A Lab that measures with a model on this machine."""

    # On a CPU the first token of a page also costs the zeros that fill the page. A chunk after
    # another token does not begin a page, so that its time depends on its tokens alone.
    cached_tokens = 1

    def __init__(
        self, model: GPT, machine: RealMachineInfo, options: ModelOptions, size: Size
    ) -> None:
        super().__init__(
            model,
            size,
            ridge=machine.ridge_tokens,
            machine=machine.to_json(),
            attention=options.attention,
            seed=options.seed,
        )
        self.info = machine

    @once
    def time(
        self,
        sequences: Mapping[str, Sequence[Batch]],
        layers: int | None = None,
        repeats: int = 5,
    ) -> dict[str, SequenceTime]:
        """As Lab.time. There are three repeats with --quick."""
        self.check_length(longest(sequences))
        return time_sequences(
            keep_layers(self.model, layers, self.seed) if layers else self.model,
            self.info,
            sequences,
            repeats=self.pick(repeats, quick=3),
            attention=self.attention,
        )

    @once
    def decode_maximal(self, *, context: int, batch: int, chunk: int) -> DecodeMaximal:
        """As Lab.decode_maximal."""
        self.check_length(context)
        return measure_decode_maximal(
            self.model,
            self.info,
            context=context,
            batch=batch,
            chunk=chunk,
            attention=self.attention,
        )

    def gains(
        self, policies: Sequence[str], load: Lockstep, pd_ratio: float
    ) -> dict[str, float | None]:
        """As Lab.gains."""
        rows = self._run_policies(policies, load, pd_ratio)
        return {name: row.gain for name, row in rows.items()}

    @once
    def _run_policies(
        self, policies: Sequence[str], load: Lockstep, pd_ratio: float
    ) -> dict[str, PolicyRun]:
        self.check_length(load.length)
        offline = load.offline(pd_ratio, load.requests, self.seed)
        count = len(policies) * offline.tokens
        with tqdm(desc="tokens", total=count, leave=False, disable=None) as bar:
            runs = run_policies(
                self.model,
                policies,
                offline,
                chunk=load.chunk,
                attention=self.attention,
                progress=bar.update,
            )
            return policy_runs(policies, dict(runs), load.batch)

    def case_timer(self, decodes: int, context: int, max_budget: int) -> TimeCases:
        """As Lab.case_timer."""
        page_size = self._config().page_size or 1
        pages = decodes * -(-context // page_size) + -(-max_budget // page_size)
        runner = runner_for(self.model)(self.model, pages, page_size, max_budget, self.attention)
        return partial(time_steadily, runner)

    def base_busy(self, max_len: int) -> bool:
        """As Lab.base_busy."""
        return bool(self.server(max_len).info.base_busy)

    @once
    def server(self, max_len: int) -> RealMachine:
        """This machine. The base of its SLOs is timed once for all claims."""
        return RealMachine(
            self.model,
            self.info.model,
            chunk=self.chunk,
            max_len=max_len,
            attention=self.attention,
            make_prompts=partial(workload.prompts, seed=self.seed),
        )

    def capacity(self, policies: Sequence[str], **load: Any) -> Capacities:
        """As Lab.capacity. Raises ValueError with --quick."""
        if self.size == "quick":
            raise ValueError("--quick: a search for a capacity takes minutes")
        return super().capacity(policies, **load)
