"""One run of a load, and what is made of several: an SLO, a capacity (Sarathi-Serve §5.1).

    run = serve(model, config, arrivals, prompts)    one engine, one load, in real time
    run = LoadRun(server, arrivals, prompts).run()   the same loop, whatever serves
    qps, points = capacity(run_at_rate, start)       the highest rate that meets the SLO

A *server* is an engine or a simulation. It gets request i when arrivals[i] says, at its `time`:

    ready_at()               seconds of the run at which its next batch can be, inf without work
    wait_until(time)         let the time pass, if it has not
    add(i, arrival, prompt)  queue request i; raises QueueFull
    step()                   make a batch; returns its Events, and sets last_iteration, maybe None
    abort(i)                 end request i and return its Completion
    clock()                  seconds of the run
    missing                  readings of measure.Probe so far; none of a simulation
    schedulers               those that make its batches, which a recorder watches

Read first: workload.py, engine.py, metrics.py. Read next: serving.py, which prints the tables."""

import gc
import heapq
import math
import statistics
import time
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from cli import options
from engine import Completion, Iteration, QueueFull
from lab.measure import metrics
from lab.measure import timing as measure
from policies import find_policy
from policies import token_budget as slo
from policies.priority import PRIORITIES
from sampling import SamplingParams

MAX_RUNS = 60  # of a search, which takes a dozen


class Run(NamedTuple):
    """What was seen of one run. Times are in seconds from its start, request i is arrivals[i]."""

    completions: list[Completion]  # of all that came, by i; "abort": refused, or interrupted
    iterations: list[Iteration]
    seconds: float  # to the last token
    own_fraction: float | None  # of the steps' time: all but forward and fetching its tokens
    refused: int = 0  # how many found max_waiting others in the queue
    cut_short: str | None = None  # "interrupted", if it was
    drift: float = 0.0  # of a machine that others use, see measure.steadily
    offered_per_s: float | None = None  # requests, where arrivals follow others


class LoadRun:
    """Brings `arrivals` to a server, with the token ids of workload.prompts, or None where lengths
    are enough. Who follows another is due when that one has ended, and continues its prompt and
    output; a refused turn ends its chat: what would follow is in no count. `progress` is called
    after each request that ended, a `recorder` of views/page.py sees all of it."""

    def __init__(self, server, arrivals, prompts=None, progress=lambda: None, recorder=None):
        self.server, self.arrivals, self.prompts = server, arrivals, prompts
        self.progress, self.recorder = progress, recorder
        self.completions, self.iterations = {}, []  # of request i; in order
        self.arrived, self.refused, self.cut_short = set(), 0, None
        self.next_turn = {its.follows: i for i, its in enumerate(arrivals)}
        known = ((its.time, i) for i, its in enumerate(arrivals) if its.follows is None)
        self.due = sorted(known)  # a heap of (time, i)
        span = self.due[-1][0] - self.due[0][0] if len(self.due) < len(arrivals) else 0.0  # seconds
        self.offered_per_s = (len(arrivals) - 1) / span if span else None
        self.in_steps = 0.0  # seconds
        if recorder:
            recorder.watch(server.schedulers)

    def step(self):
        """Add the request that is due, or else run one iteration. False if all is done."""
        server, at = self.server, self.server.ready_at()
        if self.due and self.due[0][0] <= at:
            self._add(*self.due[0])
            return True
        if at == math.inf:
            return False
        began, events = server.clock(), server.step()
        self.in_steps += server.clock() - began
        for event in events:
            if event.completion:
                self.completions[event.request_id] = event.completion
                if (i := self.next_turn.get(event.request_id)) is not None:
                    due = event.completion.token_times[-1] + self.arrivals[i].time
                    heapq.heappush(self.due, (due, i))
                self.progress()
        if iteration := server.last_iteration:
            self.iterations.append(iteration)
            if self.recorder:
                self.recorder.add(iteration)
        return True

    def run(self):
        """Step until all is done, and return the Run. A KeyboardInterrupt has it as its `run`."""
        try:
            while self.step():
                pass
        except KeyboardInterrupt as interrupt:
            self.cut_short = "interrupted"
            interrupt.run = self.result()
            raise
        return self.result()

    def result(self):
        """The Run up to here. Aborts what still runs."""
        for i in self.arrived - self.completions.keys():
            # an interrupt may have come as it was added, or in the step that ended it
            with suppress(*(KeyError, ValueError) if self.cut_short else ()):
                self.completions[i] = self.server.abort(i)
        done = [self.completions[i] for i in sorted(self.completions)]
        ends = [c.token_times[-1] for c in done if c.token_times] + [i.end for i in self.iterations]
        in_forward = sum(i.end - i.launch for i in self.iterations)
        own = 1 - in_forward / self.in_steps if self.in_steps else 0.0
        own = own if len(self.server.schedulers) == 1 else None  # batches overlap
        drift = statistics.fmean(self.server.missing or [0.0])
        how = own, self.refused, self.cut_short, drift, self.offered_per_s
        return Run(done, self.iterations, max(ends, default=0.0), *how)

    def _add(self, time, i):
        """Bring request i, which is due first, to the server."""
        self.server.wait_until(time)
        heapq.heappop(self.due)
        self.arrived.add(i)
        arrival = self.arrivals[i]._replace(time=time)
        prompt = self.prompts[i] if self.prompts else None
        if prompt and arrival.follows is not None:
            before = self.completions[arrival.follows]
            prompt = before.prompt + before.tokens + prompt
        try:
            self.server.add(i, arrival, prompt)
        except QueueFull:
            self.refused += 1
            what = range(arrival.prompt_len), time, PRIORITIES.index(arrival.priority)
            self.completions[i] = Completion(i, *what, finish_reason="abort")


class EngineServer:
    """An engine as a server. Outputs have the lengths of the load: no stop tokens. Latencies count
    from the arrival, also if that is in an iteration."""

    def __init__(self, engine, clock, sleep=time.sleep):
        self.engine, self.clock, self.sleep, self.missing = engine, clock, sleep, []
        self.step, self.abort, self.schedulers = engine.step, engine.abort, engine.schedulers
        self.probe, self.next_glance = measure.probe_of(engine.runner.model.device), 0.0

    last_iteration = property(lambda self: self.engine.last_iteration)

    def ready_at(self):
        """At once, if there is anything to do. Every second it takes a glance at who else does."""
        if not self.engine.has_work:
            return math.inf
        now = self.clock()
        if now >= self.next_glance:
            self.missing.append(self.probe.take(measure.GLANCE_S))
            self.next_glance = now + 1
        return now

    def wait_until(self, time):
        """Sleep for as long as it takes."""
        while (left := time - self.clock()) > 0:
            self.sleep(left)

    def add(self, i, arrival, prompt):
        """Queue request i. Raises QueueFull."""
        params = SamplingParams(max_new_tokens=arrival.output_len)
        more = dict(priority=arrival.priority, ttft_slo=arrival.ttft_slo, tbt_slo=arrival.tbt_slo)
        self.engine.add_request(prompt, params, arrival.time, request_id=i, **more)


def serve(model, config, arrivals, prompts, *, now=time.perf_counter, sleep=time.sleep, **watching):
    """Serve `arrivals` with `prompts` by an engine of `config`, in real time. Returns a Run. What
    Python holds when the clock starts is left out of garbage collection until the end, so that no
    pause grows with it. `now` and `sleep` are the time it runs in; `watching`: as of LoadRun, and
    `made`, a function that sees the engine before it begins."""
    gc.collect()  # the cache of the engine before
    start, made = now(), watching.pop("made", id)
    clock = lambda: now() - start  # sees what `start` becomes below
    engine = options.engine_for(model).from_config(model, config, clock=clock)
    engine.warm_up()
    load = LoadRun(EngineServer(engine, clock, sleep), arrivals, prompts, **watching)
    gc.collect()
    gc.freeze()
    try:
        made(engine)
        start = now()
        return load.run()
    finally:
        gc.unfreeze()


def summarize(run, tbt_slo_s):
    """summarize_run of a Run, and: whether it `met` the SLO, what it `missed`, own_fraction,
    refused, cut_short, drift, and whether the machine was `busy`."""
    summary = metrics.summarize_run(*run[:3], tbt_slo_s, run.offered_per_s)
    missed = run.cut_short or metrics.missed(summary, tbt_slo_s)  # all before a cut may have ended
    more = {name: getattr(run, name) for name in ("own_fraction", "refused", "cut_short", "drift")}
    return summary | more | {"met": not missed, "missed": missed, "busy": run.drift > measure.BUSY}


def goes_by_chunk(name):
    """Whether the policy of that name has a chunk size, and not a budget that it finds itself."""
    return find_policy(name).cuts_prompts and name != "dynamic"


def plan(names, page_sizes, config, tbt_slo_s=None, caching=(False,)):
    """What is to be run: label -> EngineConfig, for each name with each page size, and with each
    prefix_caching of `caching`. A name is one that find_policy takes, and may end in a chunk size
    of its own, "sarathi:128". All have the memory of `config`: pages * page_size tokens. Raises
    ValueError for an unknown policy, and for a chunk size where it does not go by one."""
    runs, tokens = {}, config.pages * config.page_size
    for label in names:
        head, _, last = label.rpartition(":")
        name, chunk = (head, last) if last.isdecimal() else (label, None)
        by_chunk = goes_by_chunk(name)  # raises for an unknown policy, with a chunk or without
        if chunk and not by_chunk:
            raise ValueError(f"{label!r}: {name} does not go by a chunk size")
        its = replace(config, policy=name, chunk=int(chunk or config.chunk))
        if name == "dynamic":
            its = replace(its, policy_options=its.policy_options | {"tbt_slo": tbt_slo_s})
        for size, shared in product(page_sizes, caching):
            key = label if len(page_sizes) == 1 else f"{label}, pages of {size}"
            key += ", shared" if shared and len(caching) > 1 else ""
            runs[key] = replace(its, page_size=size, pages=tokens // size, prefix_caching=shared)
    return runs


class Base(NamedTuple):
    """How fast a machine is: what SLOs are multiples of (§5.1)."""

    seconds: float  # of an iteration that decodes `decodes` requests at `context` tokens
    prefill_token_s: float  # of a chunk alone
    decodes: int
    context: int


def measure_base(model, config):
    """The Base of this machine, and its drift, see measure.steadily."""
    context, chunk = slo.base_context(config.max_len), min(config.chunk, config.max_len)
    longest = max(context, chunk)
    runner = options.runner_for(model)(model, slo.BASE_BATCH, longest, longest, config.attention)
    cases = [(slo.BASE_BATCH, context, slo.BASE_BATCH), (chunk, chunk, 0)]
    time_both = lambda: slo.time_iterations(runner, cases, repeats=5)
    worst = lambda rows: max(row.spread for row in rows)
    (decode, prefill), drift = measure.steadily(time_both, model.device, spread_of=worst)
    return Base(decode.seconds, prefill.seconds / chunk, decode.decodes, context), drift


def slo_seconds(target, base):
    """The SLO of TBT in seconds, from "strict", "relaxed" or a number of seconds. Raises ValueError
    if it is below one decode iteration: no policy can meet that."""
    multiple = slo.MULTIPLES.get(target)
    seconds = multiple * base.seconds if multiple else float(target)
    if seconds < base.seconds:
        takes = f"one decode iteration, which takes {base.seconds:.3g} s here"
        raise ValueError(f"SLO of {seconds:g} s: below {takes}")
    return seconds


def estimated_qps(base, arrivals):
    """Requests, or chats, per second in full chunks and batches, nothing shared: an upper bound."""
    prefill = sum(arrival.prompt_len for arrival in arrivals) * base.prefill_token_s
    decode = sum(arrival.output_len for arrival in arrivals) * base.seconds / base.decodes
    return sum(arrival.follows is None for arrival in arrivals) / (prefill + decode)


class Bounded(float):
    """A number, or what it is "at least" or "below", its `bound`, and is printed so."""

    def __new__(cls, number, bound=""):
        self = super().__new__(cls, number)
        self.bound = bound
        return self

    def __format__(self, spec):
        return f"{self.bound} {super().__format__(spec)}".lstrip()

    def over(self, other):
        """How many times the other it is, Bounded; None if that may be anything."""
        turned = {"": "", "below": "at least", "at least": "below"}[other.bound]
        bounds = {self.bound, turned} - {""}
        return Bounded(self / other, "".join(bounds)) if len(bounds) < 2 else None


def found_so_far(points, ratio=1.05):
    """What the points of a search show, if it was finished or not: that of the capacity, and more.
    capacity_qps is Bounded: the highest rate that was met, or "at least" that if none up to `ratio`
    above it failed, or "below" the lowest rate. `missed` is what was at the lowest rate that failed
    above it, and `busy` whether the machine was whenever that was tried."""
    at = max((p for p in points if p["met"]), key=lambda p: p["qps"], default={"qps": 0.0})
    high = min((p["qps"] for p in points if p["qps"] > at["qps"]), default=math.inf)
    failed, close = [p for p in points if p["qps"] == high], high <= ratio * at["qps"]
    qps = Bounded(at["qps"] or high, "" if close else "at least" if at["qps"] else "below")
    found = {"capacity_qps": qps, "bound": qps.bound, "points": points}
    found["missed"] = failed[-1].get("missed", "") if failed else ""
    found["busy"] = bool(failed) and all(point.get("busy") for point in failed)
    return at | found


def capacity(run_at_rate, start, ratio=1.05, most=16):
    """The highest rate that meets the SLO, within a factor of `ratio`: (qps, points), qps as in
    found_so_far. `run_at_rate(qps)` runs the load at that rate and returns a dict with `met`, a
    point. From `start` the rate goes up or down by half, at most to start * most or start / most,
    until one was met and one was not, then by logarithmic halves between them. One run is no proof
    on a machine that others use: what failed while it was `busy` is run again, and so is the lowest
    rate that failed; if that is met then, the search goes on above it. It ends after MAX_RUNS."""
    low, points, rate = 0.0, [], start
    while len(points) < MAX_RUNS:
        points.append({"qps": rate} | run_at_rate(rate))
        low = max(low, rate) if points[-1]["met"] else low
        failed = [point["qps"] for point in points if point["qps"] > low]
        high = min(failed, default=None)
        if points[-1].get("busy") and failed.count(rate) == 1:
            continue
        if low == start * most or high == start / most:
            break
        if high is None:
            rate = min(1.5 * low, start * most)
        elif not low:
            rate = max(high / 1.5, start / most)
        elif high > ratio * low:
            rate = math.sqrt(low * high)
        elif failed.count(high) < 2:
            rate = high
        else:
            break
    return found_so_far(points, ratio)["capacity_qps"], points
