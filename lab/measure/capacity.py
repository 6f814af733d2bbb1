"""Whether a run meets its SLO, and the highest rate that does: the capacity (Sarathi-Serve §5.1).

    base, drift = measure_base(model, chunk, max_len)    how fast this machine is
    slo_s = slo_seconds("strict", base)                  the SLO of P99 TBT, a multiple of that
    judged = judge(run, slo_s)                           what a run measured, and if it met the SLO
    result = search_capacity(run_at_rate, start=1.0)     the highest rate that meets it

Read first: run_loop.py, metrics.py."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from lab.measure import metrics, token_budget
from lab.measure import timing as measure
from lab.measure.metrics import Percentiles, RunSummary, percentiles
from lab.measure.run_loop import Run
from lab.measure.token_budget import MAX_DELAY_S, Case, Profiled, TimedRunner
from lab.measure.workload import Arrival
from model import GPT
from parallel.stages import runner_for
from policies.observers import Sent
from request import Request

STEP = 1.5  # a factor of the rate, in a search
MAX_STEPS = 7  # up or down from where a search begins: a factor of 17
MAX_RUNS = 60  # of a search, which takes a dozen
ROUNDS = 4  # how many times the requests that may run at once must arrive


@dataclass(frozen=True)
class Base:
    """How fast a machine is. SLOs are multiples of this (§5.1)."""

    seconds: float  # of an iteration that decodes `decodes` requests at `context` tokens
    prefill_token_s: float  # of a prefill chunk in a batch of its own
    decodes: int
    context: int


def measure_base(
    model: GPT, chunk: int, max_len: int, attention: str = "auto"
) -> tuple[Base, float]:
    """The Base of this machine for requests of up to max_len tokens, and the machine's drift, see
    timing.steadily."""
    context = token_budget.base_context(max_len)
    chunk = min(chunk, max_len)
    longest = max(context, chunk)
    runner = runner_for(model)(model, token_budget.BASE_BATCH, longest, longest, attention)
    cases = [(token_budget.BASE_BATCH, context, token_budget.BASE_BATCH), (chunk, chunk, 0)]
    decode, prefill = time_steadily(runner, cases, repeats=5, tries=3)
    base = Base(
        seconds=decode.seconds,
        prefill_token_s=prefill.seconds / chunk,
        decodes=decode.decodes,
        context=context,
    )
    return base, decode.spread


def time_steadily(
    runner: TimedRunner, cases: Sequence[Case], repeats: int = 2, tries: int = 2
) -> list[Profiled]:
    """token_budget.time_iterations on a machine that is not busy, whose drift is the spread."""

    def time_cases() -> list[Profiled]:
        return token_budget.time_iterations(runner, cases, repeats)

    def largest_spread(rows: Sequence[Profiled]) -> float:
        return max(row.spread for row in rows)

    device = runner.cache.data.device
    rows, drift = measure.steadily(time_cases, device, tries, largest_spread)
    return [row._replace(spread=drift) for row in rows]


def slo_seconds(target: str | float, base: Base) -> float:
    """The SLO of TBT in seconds. `target` is "strict", "relaxed", another name in MULTIPLES, or a
    number of seconds. Raises ValueError if it is below one decode iteration, which no policy can
    meet."""
    if target in token_budget.MULTIPLES:
        seconds = token_budget.MULTIPLES[target] * base.seconds
    else:
        seconds = float(target)
    if seconds < base.seconds:
        takes = f"one decode iteration, which takes {base.seconds:.3g} s here"
        raise ValueError(f"SLO of {seconds:g} s: below {takes}")
    return seconds


def estimated_qps(base: Base, arrivals: Iterable[Arrival]) -> float:
    """Requests per second with full chunks and batches, and nothing shared. This is an upper
    bound."""
    arrivals = list(arrivals)
    prefill_s = sum(arrival.prompt_len for arrival in arrivals) * base.prefill_token_s
    decode_s = sum(arrival.output_len for arrival in arrivals) * base.seconds / base.decodes
    return len(arrivals) / (prefill_s + decode_s)


def possible_qps(base: Base, lengths: Sequence[tuple[int, int]]) -> float:
    """The estimate for requests of these lengths, prompt and output."""
    return estimated_qps(base, [Arrival(0.0, *pair) for pair in lengths])


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a run met its SLO."""

    missed: str = ""  # what of the SLO it missed, in words; "": it met the SLO
    busy: bool = False  # whether others used the machine, so that the verdict is not believed

    @property
    def met(self) -> bool:
        """Whether the run met its SLO."""
        return not self.missed


@dataclass(frozen=True, kw_only=True)
class LinkSummary:
    """What requests waited for between two pools, after their first tokens, in seconds."""

    waited_s: Percentiles  # for memory on the decode side
    exposed_s: Percentiles  # for the link

    @classmethod
    def of(cls, transfers: Sequence[Sent]) -> "LinkSummary | None":
        """The LinkSummary of these transfers; None without any."""
        if not transfers:
            return None
        return cls(
            waited_s=percentiles(sent.waited_s for sent in transfers),
            exposed_s=percentiles(sent.exposed_s for sent in transfers),
        )


@dataclass(frozen=True, kw_only=True)
class JudgedRun(RunSummary, Verdict):
    """The numbers of a Run, and whether it met its SLO."""

    goodput_per_s: float | None  # see metrics.goodput
    own_fraction: float | None
    refused: int
    cut_short: str | None
    drift: float
    link: LinkSummary | None = None  # of two pools


def judge(
    run: Run,
    tbt_slo_s: float,
    *,
    ttft_slo_s: float = MAX_DELAY_S,
    rate_counts: bool = True,
) -> JudgedRun:
    """Summarize a Run, and find out whether it met an SLO of P99 TBT in seconds. A run that was cut
    short did not, as everything before the cut may have ended well. Only goodput depends on
    `ttft_slo_s`. See metrics.missed for `rate_counts`."""
    summary = metrics.summarize_run(run.completions, run.iterations, run.seconds, tbt_slo_s)
    link = LinkSummary.of(run.transfers)
    missed = run.cut_short or metrics.missed(summary, tbt_slo_s, rate_counts=rate_counts)
    waited_s = link.waited_s.p50 if link else None
    if waited_s and waited_s > MAX_DELAY_S and not missed:
        missed = f"median wait of {waited_s:,.2f} s for memory on the decode side"
    return JudgedRun(
        **vars(summary),
        goodput_per_s=metrics.goodput(
            run.completions, run.seconds, ttft_slo_s=ttft_slo_s, tbt_slo_s=tbt_slo_s
        ),
        own_fraction=run.own_fraction,
        refused=run.refused,
        cut_short=run.cut_short,
        drift=run.drift,
        link=link,
        missed=missed,
        busy=run.drift > measure.BUSY,
    )


class Hopeless:
    """Tells from the requests that have ended whether a run will miss an SLO of P99 TBT, or the
    limit of the median scheduling delay, whatever comes after. A LoadRun's `gives_up`."""

    def __init__(self, arrivals: Sequence[Arrival], tbt_slo_s: float) -> None:
        self.tbt_slo_s = tbt_slo_s
        gaps = sum(arrival.output_len - 1 for arrival in arrivals)
        self.too_many_gaps = values_above_quantile(gaps, 0.99)
        self.too_many_delays = values_above_quantile(len(arrivals), 0.5)
        self.long_gaps = 0
        self.long_delays = 0

    def __call__(self, completion: Request) -> bool:
        """Count a request that has ended. Whether the run is hopeless now."""
        self.long_gaps += sum(gap > self.tbt_slo_s for gap in completion.tbt)
        delay_s = completion.scheduling_delay
        self.long_delays += delay_s is not None and delay_s > MAX_DELAY_S
        return self.long_gaps >= self.too_many_gaps or self.long_delays >= self.too_many_delays


def values_above_quantile(count: int, quantile: float) -> int:
    """How many of `count` values must be above a limit, so that the quantile of all of them, as
    metrics.percentiles interpolates it, is above it, too; 1 of no values."""
    return max(1, count - math.floor(quantile * (count - 1)))


class Bounded(float):
    """A number, or a bound of one: `bound` is "", "at least" or "below", and is printed with it."""

    bound: str

    def __new__(cls, number: float, bound: str = "") -> "Bounded":
        """The number, and what it is a bound of."""
        self = super().__new__(cls, number)
        self.bound = bound
        return self

    def __format__(self, spec: str) -> str:
        return f"{self.bound} {super().__format__(spec)}".lstrip()

    def over(self, other: "Bounded") -> "Bounded | None":
        """The quotient of both; None if their bounds leave it open."""
        turned = {"": "", "below": "at least", "at least": "below"}[other.bound]
        bounds = {self.bound, turned} - {""}
        if len(bounds) > 1:
            return None
        return Bounded(self / other, "".join(bounds))


AnyVerdict = TypeVar("AnyVerdict", bound=Verdict)


@dataclass(frozen=True)
class Trial(Generic[AnyVerdict]):
    """One run of a search: its rate, and whether it met the SLO there."""

    qps: float
    verdict: AnyVerdict


@dataclass(frozen=True)
class SearchResult(Generic[AnyVerdict]):
    """What the runs of a search show, whether it was finished or not."""

    capacity_qps: Bounded
    trials: list[Trial[AnyVerdict]]
    best: Trial[AnyVerdict] | None  # the run at the capacity; None if every run failed
    missed: str  # what was missed at the lowest rate above the capacity
    busy: bool  # whether the machine was busy whenever that rate was tried


def summarize_search(
    trials: Sequence[Trial[AnyVerdict]], ratio: float = 1.05
) -> SearchResult[AnyVerdict]:
    """What the runs of a search show.

    The capacity is the highest rate that met the SLO. It is "at least" that if no rate up to
    `ratio` times above it failed, and "below" the lowest rate if none met the SLO."""
    met = [trial for trial in trials if trial.verdict.met]
    best = max(met, key=lambda trial: trial.qps, default=None)
    best_qps = best.qps if best else 0.0
    failed_qps = min((trial.qps for trial in trials if trial.qps > best_qps), default=math.inf)
    failed = [trial.verdict for trial in trials if trial.qps == failed_qps]
    if failed_qps <= ratio * best_qps:
        capacity = Bounded(best_qps)
    elif best:
        capacity = Bounded(best_qps, "at least")
    else:
        capacity = Bounded(failed_qps, "below")
    return SearchResult(
        capacity_qps=capacity,
        trials=list(trials),
        best=best,
        missed=failed[-1].missed if failed else "",
        busy=bool(failed) and all(verdict.busy for verdict in failed),
    )


def rate_of(step: int) -> float:
    """The rate of a step, in requests per second: STEP times that of the step before."""
    return STEP**step


def search_capacity(
    run_at_rate: Callable[[float], AnyVerdict], start: float, ratio: float = 1.05
) -> SearchResult[AnyVerdict]:
    """Find the highest rate that meets the SLO, within a factor of `ratio`. `run_at_rate(qps)` runs
    the load at a rate and says whether that met it.

    The rates are those of `rate_of`, whatever `start` is, and logarithmic halves between them: two
    searches end at the same one. From `start` it goes up or down, at most MAX_STEPS, until one rate
    was met and one was not. From there it goes by halves between them.
    One run is no proof on a machine that others use. So a rate that failed while the machine was
    busy is run again, and so is the lowest rate that failed; if it is met then, the search goes on
    above it. The search ends after MAX_RUNS."""
    trials: list[Trial[AnyVerdict]] = []
    first = round(math.log(start, STEP))
    highest = rate_of(first + MAX_STEPS)
    lowest = rate_of(first - MAX_STEPS)
    good = 0.0  # the highest rate that was met
    step = first
    rate = rate_of(step)
    while len(trials) < MAX_RUNS:
        verdict = run_at_rate(rate)
        trials.append(Trial(rate, verdict))
        if verdict.met:
            good = max(good, rate)
        failed = [trial.qps for trial in trials if trial.qps > good]
        bad = min(failed, default=None)  # the lowest rate that failed above it
        if verdict.busy and failed.count(rate) == 1:
            continue
        if good == highest or bad == lowest:
            break
        if bad is None:
            while rate_of(step) <= good:
                step += 1
            rate = rate_of(step)
        elif not good:
            step -= 1
            rate = rate_of(step)
        elif bad > ratio * good:
            rate = math.sqrt(good * bad)
        elif failed.count(bad) < 2:
            rate = bad
        else:
            break
    return summarize_search(trials, ratio)
