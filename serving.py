"""Serving under load: requests arrive while others run, and each policy meets the same ones in real time.

    run = serve(model, SPECS["vllm"], arrivals, prompts, settings)      one engine, one workload, one run
    qps, points = capacity(run_at_rate, start)                          the highest rate that meets the SLO

Sarathi-Serve §5.1 says what is measured: the latencies of a run at some rate, and the *capacity*, the highest Poisson
rate at which P99 TBT meets its SLO and the median scheduling delay is at most 2 s. The SLO is a multiple of the time of
one decode iteration on this machine, which `measure_base` measures. Nothing is printed here.

Read first: workload.py, engine.py and metrics.py. Read next: bench_serve.py, which prints the tables.
"""

import gc
import math
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from attention import make_attention
from engine import Engine, QueueFull
from experiments import SPECS
from kv_cache import KVCache
from metrics import meets_slo, summarize_run
from profiling import BASE_BATCH, RELAXED, STRICT, base_context, base_decode_iteration, time_iterations
from records import Completion
from sampling import SamplingParams
from scheduler import POLICIES, PRIORITIES

SLOS = {"strict": STRICT, "relaxed": RELAXED}
MAX_DELAY_S = 2.0  # of the median scheduling delay


@dataclass(frozen=True)
class Settings:
    """What all policies are given alike: the arguments of Engine, but the memory in tokens.

    `kv_tokens` is how many tokens the cache holds, whatever the size of a page; None: max_batch requests of max_len.
    """

    chunk: int = 256
    max_batch: int = 32
    max_len: int = 1024
    page_size: int = 64
    kv_tokens: int | None = None
    max_waiting: int | None = None
    attention: str = "auto"

    @property
    def pages(self):
        """How many pages the cache has."""
        if self.kv_tokens is None:
            return self.max_batch * -(-self.max_len // self.page_size)
        return self.kv_tokens // self.page_size


def specs(tbt_slo_s=None):
    """name -> (policy, options of the policy): those of experiments.SPECS, and the budget that follows the SLO."""
    return SPECS | {"dynamic": ("sarathi-serve", {"tbt_slo": tbt_slo_s})}


def plan(names, page_sizes, settings, tbt_slo_s=None):
    """What is to be run: label -> (spec, settings), for each name with each page size.

    A name is one of `specs`, or has a chunk size of its own, "sarathi-serve:128". Raises ValueError if it is neither,
    or the policy does not go by a chunk size.
    """
    known, runs = specs(tbt_slo_s), {}
    for label in names:
        name, colon, chunk = label.partition(":")
        if name not in known:
            raise ValueError(f"{name!r} is not one of {', '.join(known)}")
        policy, options = known[name]
        if colon and (not POLICIES[policy].cuts_prompts or "tbt_slo" in options):
            raise ValueError(f"{label!r}: {name} does not go by a chunk size")
        if colon and (not chunk.isdecimal() or int(chunk) < 1):
            raise ValueError(f"{label!r}: after the colon must be a chunk size of at least 1")
        for size in page_sizes:
            key = label if len(page_sizes) == 1 else f"{label}, pages of {size}"
            runs[key] = known[name], replace(settings, page_size=size, chunk=int(chunk) if colon else settings.chunk)
    return runs


# -----------------------------------------------------------------------------------------------------
# the SLO


class Base(NamedTuple):
    """How fast this machine is: seconds of a decode iteration without prefill, and of one token of a prefill."""

    seconds: float
    prefill_token_s: float
    decodes: int
    context: int


def measure_base(model, settings):
    """Measure what the SLO is a multiple of, see profiling.base_decode_iteration, in a cache of its own.

    Where max_len is below 8,192 the context shrinks with it: the machine is then slower, or the model smaller, and the
    lengths of the workload shrink alike. Also times a chunk alone, to estimate which rates are worth a try.
    """
    context, chunk = base_context(settings.max_len), min(settings.chunk, settings.max_len)
    longest = max(context, chunk)
    cache = KVCache(model.config, BASE_BATCH, longest, model.device, model.dtype, max_len=longest)
    attention = make_attention(model.config, cache, settings.attention)
    decode = base_decode_iteration(model, cache, attention, settings.max_len)
    prefill = time_iterations(model, cache, attention, [(chunk, chunk, 0)])[0]
    return Base(decode.seconds, prefill.seconds / chunk, decode.decodes, context)


def slo_seconds(slo, base):
    """The SLO of TBT in seconds, from "strict", "relaxed" or a number of seconds.

    Raises ValueError if it is below one decode iteration: no policy can meet that.
    """
    seconds = SLOS[slo] * base.seconds if slo in SLOS else float(slo)
    if seconds < base.seconds:
        raise ValueError(f"SLO of {seconds:g} s: below one decode iteration, which takes {base.seconds:.3g} s here "
                         f"(batch {base.decodes}, context {base.context:,})")
    return seconds


def estimated_qps(base, arrivals):
    """Requests per second that this machine might serve of these, if all ran in full chunks and full batches.

    More than it will: a chunk slows down with its context, and a batch of fewer decodes costs nearly as much.
    """
    seconds = sum(a.prompt_len * base.prefill_token_s + a.output_len * base.seconds / base.decodes for a in arrivals)
    return len(arrivals) / seconds


class Hopeless:
    """Watches a run and says when it cannot meet the SLO any more, however well the rest of it goes.

    That is certain, not likely, when so many TBTs or scheduling delays are over their limits that the percentile over
    the whole workload is. A request that waits counts as soon as it has waited too long.
    """

    def __init__(self, arrivals, tbt_slo_s, max_delay_s=MAX_DELAY_S):
        self.tbt_slo_s, self.max_delay_s = tbt_slo_s, max_delay_s
        self.decisive_slow = self._decides(sum(a.output_len - 1 for a in arrivals), 0.99)
        self.decisive_late = self._decides(len(arrivals), 0.5)
        self.slow = self.late = 0
        self._waiting, self._last = {}, {}  # arrival of each that was not yet scheduled; time of each one's last token

    @staticmethod
    def _decides(count, quantile):
        """How many of `count` values must be over a limit for the quantile, interpolated as numpy does, to be."""
        return count - math.floor(quantile * (count - 1))

    def arrived(self, request_id, time):
        """A request arrived."""
        self._waiting[request_id] = time

    def check(self, iteration, events):
        """After each iteration: why the run has failed, or None as long as it may succeed."""
        for request_id, _, _ in iteration.chunks:
            arrival = self._waiting.pop(request_id, iteration.start)
            self.late += iteration.start - arrival > self.max_delay_s
        for event in events:
            last = self._last.get(event.request_id, iteration.end)
            self.slow += iteration.end - last > self.tbt_slo_s
            self._last[event.request_id] = iteration.end
        if self.slow >= self.decisive_slow:
            return f"{self.slow} TBTs over {self.tbt_slo_s:.3g} s"
        late = self.late + sum(iteration.end - arrival > self.max_delay_s for arrival in self._waiting.values())
        if late >= self.decisive_late:
            return f"{late} scheduling delays over {self.max_delay_s:g} s"
        return None


# -----------------------------------------------------------------------------------------------------
# one run


class Clock:
    """Seconds since it was made, or last restarted, by the clock `now`."""

    def __init__(self, now):
        self.now = now
        self.restart()

    def restart(self):
        """Begin at 0 again."""
        self.zero = self.now()

    def __call__(self):
        """The time, in seconds."""
        return self.now() - self.zero


class Run(NamedTuple):
    """What was seen of one run. Times are in seconds from its start, request i is that of arrivals[i].

    completions    engine.Completion of all that arrived, in that order; those that a full queue refused, or that ran
                   when the run was cut short, are aborted
    iterations     engine.Iteration of every step
    seconds        from the start to the last token
    own_fraction   the time of all steps without the forward pass and the fetching of its tokens, over all their time
    refused        how many found max_waiting others in the queue
    cut_short      why the run was given up, None if it was not
    """

    completions: list
    iterations: list
    seconds: float
    own_fraction: float
    refused: int = 0
    cut_short: str | None = None


def warm_up(engine, max_batch, max_len):
    """Let nothing happen for the first time while the clock runs: page faults, kernels compiled for a batch size."""
    engine.cache.data.zero_()
    quiet = partial(engine.generate, progress=False)
    quiet([[0] * (max_len - 2)], SamplingParams(max_new_tokens=2))
    sizes = range(min(max_batch, engine.max_waiting or max_batch))
    quiet([[0] for _ in sizes], [SamplingParams(max_new_tokens=min(n + 2, max_len - 1)) for n in sizes])


def serve(model, spec, arrivals, prompts, settings, *, classes=None, hopeless=None, progress=None,
          now=time.perf_counter, sleep=time.sleep):
    """Serve `arrivals` with `prompts` under the policy of `spec`, (name, options), in real time. Returns a Run.

    A request is added at its arrival, or after the iteration in which that falls, and its latencies count from its
    arrival. Outputs have the lengths of the workload: no stop tokens. What Python holds when the clock starts is left
    out of garbage collection until the end, so that no pause grows with it. `classes` holds the priority of each
    request, None: all are normal. `hopeless` is a Hopeless that may cut the run short; `progress` is called after each
    request that finished; `now` and `sleep` are the time it runs in.
    """
    policy, options = spec
    gc.collect()  # the cache of the engine before
    clock = Clock(now)
    engine = Engine(model, policy, settings.chunk, settings.max_batch, settings.max_len, page_size=settings.page_size,
                    pages=settings.pages, max_waiting=settings.max_waiting, attention=settings.attention, clock=clock,
                    **options)
    warm_up(engine, settings.max_batch, settings.max_len)
    number, done, iterations = {}, {}, []  # engine's request id -> index of the arrival -> Completion
    refused, cut_short, seconds, in_steps, in_forward, position = 0, None, 0.0, 0.0, 0.0, 0
    gc.collect()
    gc.freeze()
    try:
        clock.restart()
        while not cut_short:
            while position < len(arrivals) and arrivals[position].time <= clock():
                arrival, its_class = arrivals[position], classes[position] if classes else "normal"
                try:
                    request_id = engine.add_request(prompts[position], SamplingParams(arrival.output_len), arrival.time,
                                                    priority=its_class)
                    number[request_id] = position
                    if hopeless:
                        hopeless.arrived(request_id, arrival.time)
                except QueueFull:
                    refused += 1
                    done[position] = Completion(position, prompts[position], arrival.time,
                                                PRIORITIES.index(its_class), finish_reason="abort")
                position += 1
            if engine.has_work:
                began = clock()
                events = engine.step()
                in_steps += clock() - began
                iteration = engine.last_iteration
                in_forward += iteration.end - iteration.launch
                iterations.append(iteration)
                seconds = iteration.end
                for event in events:
                    if event.completion:
                        done[number[event.request_id]] = event.completion
                        if progress:
                            progress()
                cut_short = hopeless and hopeless.check(iteration, events)
            elif position < len(arrivals):
                sleep(max(0.0, arrivals[position].time - clock()))
            else:
                break
    finally:
        gc.unfreeze()
    for request_id, index in number.items():
        if index not in done:
            done[index] = engine.abort(request_id)
    completions = [replace(done[index], request_id=index) for index in sorted(done)]
    iterations = [i._replace(chunks=[(number[request_id], *rest) for request_id, *rest in i.chunks],
                             preempted=[number[request_id] for request_id in i.preempted]) for i in iterations]
    return Run(completions, iterations, seconds, 1 - in_forward / in_steps if in_steps else 0.0, refused, cut_short)


def summarize(run, tbt_slo_s):
    """metrics.summarize_run of a Run, and whether it `met` the SLO, its `own_fraction`, `refused` and `cut_short`."""
    summary = summarize_run(run.completions, run.iterations, run.seconds, tbt_slo_s)
    met = not run.cut_short and meets_slo(summary, tbt_slo_s, MAX_DELAY_S)  # all that came before a cut may have ended
    return summary | {"met": met, "own_fraction": run.own_fraction, "refused": run.refused, "cut_short": run.cut_short}


# -----------------------------------------------------------------------------------------------------
# capacity


def rate_point(qps, summary):
    """One point of the latency-throughput curve, from `summarize`. Where the run was cut short: of what was seen."""
    return {"qps": qps, "p50_tbt_s": summary["tbt_s"]["p50"], "p99_tbt_s": summary["tbt_s"]["p99"],
            "p50_ttft_s": summary["ttft_s"]["p50"], "p99_ttft_s": summary["ttft_s"]["p99"],
            "p50_delay_s": summary["scheduling_delay_s"]["p50"], "tokens_per_s": summary["tokens_per_s"],
            "met": summary["met"], "cut_short": summary["cut_short"]}


def capacity(run_at_rate, start, ratio=1.05, most=16):
    """The highest rate that meets the SLO, within a factor of `ratio`. Returns (qps, points).

    `run_at_rate(qps)` runs the workload at that rate and returns a dict with `met`; `points` are these dicts in the
    order of the runs. From `start` the rate goes up or down by half until one was met and one was not; what is between
    them is halved on a logarithmic scale. One run is no proof on a machine that others use: the lowest rate that failed
    is run a second time, and if it is met then, the first failure was noise and the search goes on above it.

    The result is 0 if no rate down to start / most was met, and start * most if all up to there were.
    """
    low, failures, rate, points = 0.0, {}, start, []  # the highest rate met; failed rate above it -> how often
    while True:
        points.append(run_at_rate(rate))
        if points[-1]["met"]:
            low = max(low, rate)
            failures = {failed: times for failed, times in failures.items() if failed > low}
        else:
            failures[rate] = failures.get(rate, 0) + 1
        high = min(failures, default=None)
        if low == start * most or high == start / most:
            break
        if high is None:
            rate = min(1.5 * low, start * most)
        elif not low:
            rate = max(high / 1.5, start / most)
        elif high > ratio * low:
            rate = math.sqrt(low * high)
        elif failures[high] < 2:
            rate = high
        else:
            break
    return low, points
