"""The policies of scheduler.py on a clock that only counts: no model, no tensors, a cost model instead.

    result = simulate(cost, ("sarathi-serve", {}), arrivals, settings)

It follows engine.py: requests are added when they arrive, a policy makes a batch, the batch takes its time, its
requests move on. But the batch goes through the S stages of a pipeline (SARATHI §5.3), and others follow it. There are
S *micro-batches*, each with a scheduler, running requests and a share of the memory of its own; all take from one line.
The next iteration of a micro-batch begins when its last one has left the last stage. Stages are first come, first
served, so no batch overtakes another, and all times of a batch are known when it enters.

A *bubble* is the time that a stage has been idle when a batch reaches it, and is charged to every request in that batch
(SARATHI §5.3: "the sum of bubble time for all the micro-batches across all iterations for a given request"). It is no
bubble where there is too little to do to keep all stages busy: while a micro-batch has no requests, and until a stage
has had its first batch after that.

Tokens are counted, not kept: `tokens` of a request is a range.

Read first: scheduler.py and cost_model.py. Read next: figures_sarathi.py, which simulates the papers' experiments.
"""

import heapq
import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from kv_cache import Pages
from records import Completion, Iteration
from scheduler import POLICIES, PRIORITIES, Request, check_whole, make_scheduler
from serving import Run


class StageRun(NamedTuple):
    """A batch on a stage. Times in seconds; `chunks` are (request id, length, is_decode)."""

    replica: int
    stage: int
    micro_batch: int
    start: float
    end: float
    bubble: float
    chunks: list


@dataclass
class Simulated:
    """What a simulation saw. Times are in seconds from its start; request i is that of arrivals[i].

    run           a serving.Run, as of a real engine; its iterations are there if they were recorded
    bubbles       the bubble time of each request, over all its iterations and all stages
    busy          (replica, stage) -> seconds that it worked
    stage_runs    a StageRun for each batch on each stage, in the order in which batches entered, if asked for
    batches       how many there were, and `tokens` in them, recomputed ones included
    """

    run: Run
    bubbles: list
    busy: dict
    stage_runs: list
    batches: int
    tokens: int

    @property
    def utilisation(self):
        """The share of the time that the stages worked, on average."""
        return sum(self.busy.values()) / (len(self.busy) * self.run.seconds) if self.run.seconds else 0.0


class Pipeline:
    """One replica: when each of its stages has finished all that has entered, and how long each has worked.

    `idle` are the micro-batches without requests, `all_busy_since` when there last ceased to be any.
    """

    def __init__(self, number, stages):
        self.number, self.free, self.busy = number, [0.0] * stages, [0.0] * stages
        self.idle, self.all_busy_since = set(), 0.0

    def enter(self, now, seconds, hop):
        """Send a batch through that takes seconds[s] on stage s. Returns [(start, end, bubble)] of the stages."""
        spans, free, time = [], self.free, now
        for stage, duration in enumerate(seconds):
            idle = time - free[stage]
            all_busy = not self.idle and free[stage] > self.all_busy_since  # else there was too little to do
            bubble = idle if idle > 0.0 and all_busy else 0.0
            time = max(time, free[stage])  # the stage may still be at work
            free[stage] = end = time + duration
            self.busy[stage] += duration
            spans.append((time, end, bubble))
            time = end + hop
        return spans


class MicroBatch(NamedTuple):
    """A scheduler with its share of the memory, and the pipeline that it runs on; numbered over all pipelines."""

    number: int
    scheduler: object
    pipeline: Pipeline


def simulate(cost, spec, arrivals, settings, **more):
    """Serve `arrivals` under the policy of `spec`, (name, options), and return a Simulated. See Simulation."""
    return Simulation(cost, spec, arrivals, settings, **more).run()


class Simulation:
    """One run.

    cost        a CostModel, or anything with its `stages`, `pp`, `cpu_s` and `tile`
    arrivals    workload.Arrival, sorted by time
    settings    serving.Settings: max_batch is that of each micro-batch, the memory is what those of a pipeline share
    replicas    independent pipelines that take from the same line
    classes, progress     as in serving.serve
    record      whether to keep an Iteration for each batch, for metrics.py; `timeline`, whether to keep StageRuns

    Raises ValueError where the engine would: for an unknown policy or option, memory in which no request of max_len
    fits, and a request longer than that.
    """

    def __init__(self, cost, spec, arrivals, settings, *, replicas=1, classes=None, progress=None, record=True,
                 timeline=False):
        check_whole("replicas", replicas, least=1)
        policy, options = spec
        if policy in POLICIES and "tile" in POLICIES[policy].options:  # as in engine.py
            options = {"tile": cost.tile} | options
        self.cost, self.arrivals, self.settings, self.progress = cost, arrivals, settings, progress
        self.recording, self.keeps_timeline = record, timeline
        self.now, self.seconds, self.line = 0.0, 0.0, None
        self.ready, self.idle = [], deque()  # a heap, see _push; micro-batches without work
        self.turn = 0
        self.schedulers = []
        self.pipelines = [Pipeline(number, cost.pp) for number in range(replicas)]
        for pipeline in self.pipelines:
            for number in range(cost.pp):
                scheduler = make_scheduler(policy, Pages(settings.pages // cost.pp, settings.page_size),
                                           chunk=settings.chunk, max_batch=settings.max_batch,
                                           max_len=settings.max_len, clock=lambda: self.now, **options)
                self.line = scheduler.waiting if self.line is None else self.line
                scheduler.waiting = self.line
                self.schedulers.append(scheduler)
                self._push(0.0, MicroBatch(pipeline.number * cost.pp + number, scheduler, pipeline))
        for arrival in arrivals:
            scheduler.check_fits(arrival.prompt_len, arrival.output_len)
        classes = classes or ["normal"] * len(arrivals)
        self.completions = [Completion(i, range(a.prompt_len), a.time, PRIORITIES.index(its_class))
                            for i, (a, its_class) in enumerate(zip(arrivals, classes))]
        self.token_times = [completion.token_times for completion in self.completions]
        self.bubbles, self.iterations, self.stage_runs = [0.0] * len(arrivals), [], []
        self.position = self.refused = self.batches = self.tokens = 0

    def _push(self, time, micro_batch):
        """Let it go on at that time, after all that may go on earlier, or were told so before.

        The second time and the turn are its place in the line, which it keeps if it finds the first stage at work.
        """
        heapq.heappush(self.ready, (time, time, self.turn, micro_batch))
        self.turn += 1

    def run(self):
        """Until all requests have ended."""
        arrivals, ready, idle = self.arrivals, self.ready, self.idle
        while True:
            coming = arrivals[self.position].time if self.position < len(arrivals) else math.inf
            if coming < math.inf and (not ready or coming <= ready[0][0]):
                self._wake(coming)
            if not ready:
                break
            self.now, *place, micro_batch = heapq.heappop(ready)
            free = micro_batch.pipeline.free[0]
            if free > self.now:  # another one has just entered; keep the place in the line
                heapq.heappush(ready, (free, *place, micro_batch))
                continue
            self._arrive()
            if self.line or micro_batch.scheduler.running:
                self._iterate(micro_batch)
            else:
                idle.append(micro_batch)
                micro_batch.pipeline.idle.add(micro_batch.number)
        busy = {(p.number, stage): seconds for p in self.pipelines for stage, seconds in enumerate(p.busy)}
        own = self.batches * self.cost.pp * self.cost.cpu_s / (sum(busy.values()) or 1.0)
        run = Run(self.completions, self.iterations, self.seconds, own, self.refused)
        return Simulated(run, self.bubbles, busy, self.stage_runs, self.batches, self.tokens)

    def _wake(self, time):
        """Let all micro-batches that are idle look for work at that time, the one that has been idle longest first."""
        while self.idle:
            self._push(time, self.idle.popleft())

    def _arrive(self):
        """Put all that have arrived by now in the line."""
        arrivals, most = self.arrivals, self.settings.max_waiting
        while self.position < len(arrivals) and arrivals[self.position].time <= self.now:
            i, (time, prompt_len, output_len) = self.position, arrivals[self.position]
            self.position += 1
            if most is not None and len(self.line) >= most:
                self.refused += 1
                self.completions[i].finish_reason = "abort"
                continue
            request = Request(i, range(prompt_len), prompt_len, output_len, priority=self.completions[i].priority,
                              arrival=time)
            self.line.append(request)

    def _iterate(self, micro_batch):
        """Make a batch, send it through the pipeline, and move its requests on."""
        scheduler, pipeline = micro_batch.scheduler, micro_batch.pipeline
        before = [(request, request.preemptions) for request in scheduler.running] if self.recording else ()
        batch = scheduler.schedule()
        if not batch:
            raise RuntimeError(f"{type(scheduler).__name__}.schedule() returned nothing, though there is work")
        if self.line:
            self._wake(self.now)  # what it left, or preempted, is for the others
        if micro_batch.number in pipeline.idle:
            pipeline.idle.remove(micro_batch.number)
            pipeline.all_busy_since = self.now
        seconds, hop = self.cost.stages(batch)
        spans = pipeline.enter(self.now, seconds, hop)
        end = spans[-1][1]
        self._push(end, micro_batch)
        scheduler.observe(batch, end - self.now)  # with what it waits for stages: a TBT has that, too
        if self.recording or self.keeps_timeline:
            chunks = [(request.id, length, request.is_decoding) for request, _, length in batch]
        if self.keeps_timeline:
            self.stage_runs += [StageRun(pipeline.number, stage, micro_batch.number, *span, chunks)
                                for stage, span in enumerate(spans)]
        if self.recording:
            preempted = [request.id for request, count in before if request.preemptions > count]
            running = sum([len(other.running) for other in self.schedulers])
            free_pages = sum([other.pages.num_free for other in self.schedulers])
            self.iterations.append(Iteration(self.now, end, chunks, self.now + self.cost.cpu_s, len(self.line), running,
                                             free_pages, scheduler.budget, preempted, micro_batch.number))
        self._advance(scheduler, batch, end, sum([bubble for _, _, bubble in spans]))

    def _advance(self, scheduler, batch, end, bubble):
        """Move the requests of a batch on, whose tokens are known at `end`."""
        completions, token_times, ended = self.completions, self.token_times, []
        for request, start, length in batch:
            request.num_computed = done = start + length
            if not start and completions[request.id].scheduled is None:  # looking at start is quicker
                completions[request.id].scheduled = self.now
            if done == len(request.tokens):
                request.tokens = range(done + 1)
                token_times[request.id].append(end)
                if done + 1 == request.prompt_len + request.max_new_tokens:
                    ended.append(request)
        if bubble:
            for request, _, _ in batch:
                self.bubbles[request.id] += bubble
        for request in ended:
            scheduler.remove(request)
            completion = completions[request.id]
            completion.finish_reason = "length"
            completion.tokens = range(request.max_new_tokens)
            completion.preemptions, completion.recomputed_tokens = request.preemptions, request.recomputed
            if self.progress:
                self.progress()
        self.tokens += sum([length for _, _, length in batch])
        self.batches += 1
        self.seconds = max(self.seconds, end)


def bubble_kinds(stage_runs):
    """Which bubble is of which kind: (StageRun, "PB1", "PB2" or "PB3") for every batch that a stage waited for.

    SARATHI §3.2: while a stage is idle after one batch, another is still computed elsewhere. PB1: both have prefill, of
    different length; PB2: one has prefill and one has not; PB3: both are decodes alone, of different context.
    """
    done, last, kinds = {}, {}, []  # whether there was prefill: in a stage's last batch, in a micro-batch's last one
    for run in stage_runs:
        stage, micro_batch = (run.replica, run.stage), run.micro_batch
        prefill = any(not is_decode for _, _, is_decode in run.chunks)
        if run.bubble:  # the first stage waits for this micro-batch to leave the last one, others for this batch
            awaited, before = prefill if run.stage else last[micro_batch], done[stage]
            kinds.append((run, "PB1" if awaited and before else "PB2" if awaited or before else "PB3"))
        done[stage] = last[micro_batch] = prefill
    return kinds
