"""From records to numbers: latencies, generation stalls, throughput, what the batches were made of.

Pure functions of Requests and Iterations (engine.py; iterations in the order of time). All times
are in seconds on one clock. A value that does not exist is None, never 0 or NaN. Latencies are
those of Sarathi-Serve §2.4, stalls those of §3.2 and Figure 1, the condition for capacity that of
§5.1. TTFT, TBT and scheduling delay count for every request that has them, also for one that was
aborted.

Read next: run_loop.py."""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from lab.measure.token_budget import MAX_DELAY_S
from policies.observers import Iteration
from request import Request

FINISHED = ("stop", "length")  # finish reasons of requests that got all of their output
SERVED = 0.75  # share of the rate of arrivals that must be served meanwhile; few are in the making
FEWEST = 8  # requests that tell anything about a rate


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of a list of numbers; all None if the list is empty."""

    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None


def percentiles(values: Iterable[float | None]) -> Percentiles:
    """The Percentiles of the values that are not None, interpolated linearly."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return Percentiles(None, None, None, None)
    p50, p90, p99, largest = np.quantile(numbers, [0.5, 0.9, 0.99, 1.0]).tolist()
    return Percentiles(p50, p90, p99, largest)


@dataclass(frozen=True, slots=True)
class Stall:
    """A generation stall: a gap between two tokens of a request that holds prefill of others."""

    request_id: int  # the request that waited
    start: float  # when its previous token was known, in s
    end: float  # when its next token was known, in s
    prefill_tokens: int  # of others, computed in the gap
    caused_by: int  # the request with most of these tokens; of equals, the one computed first

    @property
    def seconds(self) -> float:
        """The whole gap: a hybrid batch does not tell the chunk's time from the decode's."""
        return self.end - self.start


def find_stalls(completions: Sequence[Request], iterations: Sequence[Iteration]) -> list[Stall]:
    """Every generation stall, request by request.

    A gap holds the iterations that began in it: at one token or later, and before the next token.
    A request that prefills itself again after a preemption does not stall itself. A decode that
    rides with a chunk of another request waits for it, and counts: the SLO says whether that harms.
    """
    prefills_of: dict[int, list[tuple[float, int, int]]] = defaultdict(list)  # of each micro-batch:
    micro_batch_of: dict[int, int] = {}  # (when it began, request id, tokens) in order
    for iteration in iterations:
        for request_id, _, length, is_decode in iteration.chunks:
            micro_batch_of[request_id] = iteration.micro_batch  # the last one counts
            if not is_decode:
                prefill = (iteration.start, request_id, length)
                prefills_of[iteration.micro_batch].append(prefill)
    stalls = []
    for completion in completions:
        prefills = prefills_of[micro_batch_of.get(completion.id, 0)]
        if not prefills:
            continue
        times = completion.token_times
        firsts = [bisect_left(prefills, (time,)) for time in times]  # the first after each token
        for i, (start, end) in enumerate(pairwise(times)):
            tokens: Counter[int] = Counter()  # request id -> prefill tokens, in order
            for _, request_id, length in prefills[firsts[i] : firsts[i + 1]]:
                if request_id != completion.id:
                    tokens[request_id] += length
            if tokens:
                caused_by = max(tokens, key=lambda request_id: tokens[request_id])
                stalls.append(Stall(completion.id, start, end, tokens.total(), caused_by))
    return stalls


def ratio(amount: float | None, total: float | None) -> float | None:
    """The quotient; None if one of them is not there, or the total is 0."""
    return float(amount / total) if amount is not None and total else None


@dataclass(frozen=True, kw_only=True)
class QueueSummary:
    """Whether requests wait longer and longer: see `summarize_queue`."""

    arrived_per_s: float | None  # requests
    scheduled_per_s: float | None  # requests, while others wait; None: few ever waited
    served_per_s: float | None  # requests, while others arrive, see served_rate
    grew: bool


def served_rate(completions: Sequence[Request]) -> float | None:
    """How many requests per second were served until the last one arrived; None if few arrived.

    The tail after the last arrival does not count: it tells how long a request takes, not how many
    are served. Nor need a request have ended: it counts by the share of its tokens that were there,
    those of the prompt from the first output token on."""
    if len(completions) < FEWEST:
        return None
    first = min(completion.arrival for completion in completions)
    last = max(completion.arrival for completion in completions)
    served = 0.0
    for completion in completions:
        prompt_len = completion.prompt_len
        times = completion.token_times
        output_len = bisect_right(times, last)
        if output_len:
            served += (prompt_len + output_len) / (prompt_len + len(times))
    return ratio(served, last - first)


def summarize_queue(completions: Sequence[Request]) -> QueueSummary:
    """Find out whether the queue grew: whether delays became longer, and more requests arrive than
    the server can do.

    Delays became longer if the last quarter of the requests waited longer than the second, in the
    median. What the server can do is the rate at which it schedules requests while others wait.
    That is counted if half of the requests wait, and not in the first quarter, where few decode
    yet."""
    scheduled = sorted((c.arrival, c.scheduled) for c in completions if c.scheduled is not None)
    quarter = len(scheduled) // 4
    delays = [start - arrival for arrival, start in scheduled]
    early = percentiles(delays[quarter : 2 * quarter]).p50
    late = percentiles(delays[-quarter:]).p50
    arrivals, starts = np.sort(np.reshape(scheduled, (-1, 2)), axis=0).T  # (requests,), in order
    arrived_per_s = ratio(len(scheduled) - 1, np.diff(arrivals).sum())
    # whether the next request is there already when one is scheduled
    waits = (arrivals[1:] <= starts[:-1])[quarter:]
    scheduled_per_s = None
    if 2 * waits.sum() >= max(FEWEST, len(waits)):
        scheduled_per_s = ratio(waits.sum(), np.diff(starts)[quarter:][waits].sum())
    overloaded = bool(arrived_per_s and scheduled_per_s and scheduled_per_s < arrived_per_s)
    slower = early is not None and late is not None and early < late
    return QueueSummary(
        arrived_per_s=arrived_per_s,
        scheduled_per_s=scheduled_per_s,
        served_per_s=served_rate(completions),
        grew=overloaded and slower,
    )


class FullRound(NamedTuple):
    """A part of a run in which the batch was full: as many requests are admitted as it holds."""

    iterations: Sequence[Iteration]
    seconds: float

    @property
    def tokens(self) -> int:
        """How many tokens were computed, of prompts and outputs."""
        return sum(i.prefill_tokens + i.decode_tokens for i in self.iterations)


def full_rounds(iterations: Sequence[Iteration], B: int) -> list[FullRound]:
    """The rounds of a run in which its batch of B requests was full; none if there were fewer than
    2 B + 1 requests.

    Request B, counted from 0, finds the batch full. A round begins with the iteration that admits
    it, or a request whose number is a further multiple of B, and ends where the next one begins.
    With requests of one length, a policy repeats itself every round."""
    admitted_in: dict[int, int] = {}  # request id -> the index of its first iteration
    for index, iteration in enumerate(iterations):
        for request_id, *_ in iteration.chunks:
            admitted_in.setdefault(request_id, index)
    firsts = sorted(admitted_in.values())[B::B]
    return [
        FullRound(iterations[first:end], iterations[end].start - iterations[first].start)
        for first, end in pairwise(firsts)
    ]


@dataclass(frozen=True, kw_only=True)
class StallSummary:
    """The generation stalls of a run."""

    count: int | None  # None: iterations are not known
    longest: Stall | None  # the first of equals
    over_slo: int | None  # how many were longer than the SLO of TBT; None: there is none


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What is known of a run. What iterations tell is None where they are not known, as of a
    simulation that keeps no record of them."""

    requests: int
    finished: int
    ttft_s: Percentiles
    tbt_s: Percentiles  # of all gaps of all requests
    scheduling_delay_s: Percentiles
    queue: QueueSummary
    tokens_per_s: float | None  # prompt and output; of prompts, computed or found in the cache
    preemptions: int | None
    recomputed_tokens: int | None
    cached_tokens: int | None
    cached: float | None  # the share of tokens to prefill, again too, that the cache held already
    stalls: StallSummary
    iterations: int
    prefill_only: float | None  # shares of the iterations
    decode_only: float | None
    hybrid: float | None
    tokens_per_iteration: float | None
    running_mean: float | None  # requests at once, over the time of the iterations

    @property
    def longest_stall_s(self) -> float | None:
        """The length of the longest stall: 0 without stalls, None if iterations are not known."""
        if self.stalls.longest:
            return self.stalls.longest.seconds
        return 0.0 if self.iterations else None

    @property
    def p50_ttft_s(self) -> float | None:
        """The median TTFT."""
        return self.ttft_s.p50

    @property
    def p99_ttft_s(self) -> float | None:
        """The 99th percentile of TTFT."""
        return self.ttft_s.p99

    @property
    def p50_tbt_s(self) -> float | None:
        """The median TBT."""
        return self.tbt_s.p50

    @property
    def p99_tbt_s(self) -> float | None:
        """The 99th percentile of TBT."""
        return self.tbt_s.p99

    @property
    def p50_delay_s(self) -> float | None:
        """The median scheduling delay."""
        return self.scheduling_delay_s.p50


def summarize_run(
    completions: Sequence[Request],
    iterations: Sequence[Iteration],
    seconds: float,
    tbt_slo_s: float | None = None,
) -> RunSummary:
    """Summarize a run of so many seconds: latencies, stalls, and what its batches were made of.
    Without `iterations` it is what the requests tell."""
    count = len(iterations)
    kinds = Counter((i.prefill_tokens > 0, i.decode_tokens > 0) for i in iterations)
    batch_tokens = sum(i.prefill_tokens + i.decode_tokens for i in iterations)
    busy_s = sum(i.end - i.start for i in iterations)
    served_tokens = sum(c.prompt_len + len(c.token_times) for c in completions if c.token_times)
    scheduled = [c for c in completions if c.scheduled is not None]
    cached_tokens = sum(c.cached_tokens for c in scheduled)
    prefill_tokens = sum(c.prompt_len + c.recomputed_tokens for c in scheduled)
    stalls = find_stalls(completions, iterations)
    return RunSummary(
        requests=len(completions),
        finished=sum(c.finish_reason in FINISHED for c in completions),
        ttft_s=percentiles(c.ttft for c in completions),
        tbt_s=percentiles(gap for c in completions for gap in c.tbt),
        scheduling_delay_s=percentiles(c.scheduling_delay for c in completions),
        queue=summarize_queue(completions),
        tokens_per_s=ratio(served_tokens, seconds),
        preemptions=sum(c.preemptions for c in scheduled) if count else None,
        recomputed_tokens=sum(c.recomputed_tokens for c in scheduled) if count else None,
        cached_tokens=cached_tokens if count else None,
        cached=ratio(cached_tokens, prefill_tokens) if count else None,
        stalls=StallSummary(
            count=len(stalls) if count else None,
            longest=max(stalls, key=lambda stall: stall.seconds, default=None),
            over_slo=sum(s.seconds > tbt_slo_s for s in stalls) if count and tbt_slo_s else None,
        ),
        iterations=count,
        prefill_only=ratio(kinds[True, False], count),
        decode_only=ratio(kinds[False, True], count),
        hybrid=ratio(kinds[True, True], count),
        tokens_per_iteration=ratio(batch_tokens, count),
        running_mean=ratio(sum(i.running * (i.end - i.start) for i in iterations), busy_s),
    )


def goodput(
    completions: Sequence[Request], seconds: float, *, ttft_slo_s: float, tbt_slo_s: float
) -> float | None:
    """How many requests per second met their SLOs, in a run of so many seconds; None of a run that
    took no time.

    They have finished, their TTFT is within its SLO, and 99 % of their TBTs are within theirs: the
    mean of them, which other programs count, would hide a stall."""

    def is_good(completion: Request) -> bool:
        if completion.finish_reason not in FINISHED or completion.ttft is None:
            return False
        if completion.ttft > ttft_slo_s:
            return False
        p99_tbt_s = percentiles(completion.tbt).p99 or 0.0  # a single token has no TBT
        return p99_tbt_s <= tbt_slo_s

    return ratio(sum(map(is_good, completions)), seconds)


def missed(summary: RunSummary, tbt_slo_s: float, *, rate_counts: bool = True) -> str:
    """What a run missed of its SLO, in words; "" if its rate can be sustained.

    The SLO is met if P99 TBT and the median scheduling delay are within their limits, every request
    has finished, requests are served about as fast as they arrive, and the queue does not grow. A
    growing queue would lift the median delay only in a longer run. If all requests fit into one
    batch, none waits, and only the rate at which they are served tells that there are too many.
    That rate counts if there were several times as many requests as may run at once: else too
    large a part of them is under way when the last one arrives."""
    failures = []
    if summary.finished < summary.requests or not summary.requests:
        failures.append(f"{summary.finished} of {summary.requests} requests finished")
    p99_tbt_s = summary.tbt_s.p99 or 0.0
    if p99_tbt_s > tbt_slo_s:
        failures.append(f"P99 TBT of {p99_tbt_s:,.3f} s")
    median_delay_s = summary.scheduling_delay_s.p50 or 0.0
    if median_delay_s > MAX_DELAY_S:
        failures.append(f"median delay of {median_delay_s:,.2f} s")
    queue = summary.queue
    arrived_per_s = queue.arrived_per_s or 0.0
    served_per_s = queue.served_per_s if rate_counts else None
    if served_per_s is not None and served_per_s < SERVED * arrived_per_s:
        rates = f"{served_per_s:,.3g} of {arrived_per_s:,.3g}"
        failures.append(f"{rates} requests a second served")
    if queue.grew:
        failures.append(
            f"the queue grew: {arrived_per_s:,.3g} requests a second arrive, "
            f"{queue.scheduled_per_s:,.3g} are scheduled"
        )
    return ", ".join(failures)
