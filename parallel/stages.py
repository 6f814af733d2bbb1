"""An Engine whose model is in several processes: micro-batches in flight through its stages.

Rank 0 schedules. A batch's spans go to all ranks at once, its activations from stage to stage, sent
without waiting for the next, and what the last stage has sampled comes back, with the times of all.
Read first: policies/micro_batches.py, ranks.py and shard.py."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from config import MAX_BATCH, EngineConfig
from engine import Computed, Engine, Iteration, Runner
from policies.micro_batches import MicroBatches
from sampling import SamplingParams


class Stage:
    """What a rank does when it is told to: its Shard, and the cache of each runner of rank 0."""

    def __init__(self, model):
        self.model, self.runners, self.sent, self.waited = model, {}, deque(), 0.0  # seconds
        self.alive = WeakSet()  # on rank 0: ParallelRunners

    def room(self, alive, config):
        """Forget all runners but those `alive`: how many pages a config has then, or ValueError."""
        self.runners = {key: self.runners[key] for key in alive}
        return config.for_model(self.model).pages

    def make(self, alive, key, *sizes):
        """Make a Runner, when all but those of the keys `alive` are gone."""
        self.runners = {other: self.runners[other] for other in alive}
        self.runners[key] = Runner(self.model, *sizes)
        self.runners[key].cache.data.zero_()  # what never was written may be slow to compute with
        return True

    def account(self):
        """Seconds so far: on Ranks.clock; waiting; in sums."""
        return self.model.ranks.clock(), self.model.ranks.waited, self.model.summing_s

    @torch.inference_mode()
    def run(self, key, spans, params, positions):
        """Compute a batch from what the stage before sends, and send it on, or sample. Returns on
        one rank of each stage (start, end, waited before, what Runner.fetch returns); seconds."""
        model, ranks, runner = self.model, self.model.ranks, self.runners[key]
        start, batch = ranks.clock(), runner.flatten(spans)
        if ranks.stage:
            ready = ranks.clock()
            x = model.final_norm.weight.new_empty(len(batch.tokens), model.config.n_embd)
            dist.recv(x, ranks.rank - ranks.tp)
            runner.fetch(x, [], [])  # waits for a GPU
            start = ranks.clock()
            ranks.waited += start - ready
        waited, self.waited = ranks.waited - self.waited, ranks.waited
        x = model.compute_layers(x if ranks.stage else model.embed(batch), batch, runner.cache)
        last = ranks.stage == ranks.pp - 1
        drawn = (model.logits(x, batch), params, positions) if last else (x, [], [])
        sampled, end = runner.fetch(*drawn), ranks.clock()
        if not last:
            self.sent.append(dist.isend(x, ranks.rank + ranks.tp))
            if len(self.sent) > 2 * ranks.pp:
                self.sent.popleft().wait()
        return None if ranks.part else (start, end, waited, sampled)


class ParallelRunner(Runner):
    """The runners of all ranks. Its model, cache and attention are those of rank 0."""

    def __init__(self, model, pages, page_size, max_len=None, attention="auto"):
        self.ranks, self.key = model.ranks, next(model.ranks.numbers)
        work, sizes = self.ranks.work, (pages, page_size, max_len, attention)
        self.ranks.call("make", [its.key for its in work.alive], self.key, *sizes)
        vars(self).update(vars(work.runners[self.key]))
        work.alive.add(self)

    def collect(self, order):
        """What Stage.run returns on each stage. Waits for it, and leaves it in ranks.answers."""
        return [its for _, its in sorted(self.ranks.wait(order, self.ranks.pp).items())]

    def greedy(self, spans):
        """As Runner.greedy, through all stages."""
        wanted = sum(span.wants_logits for span in spans)
        order = self.ranks.order("run", self.key, spans, [SamplingParams()] * wanted, [0] * wanted)
        *_, sampled = self.collect(order)[-1]
        del self.ranks.answers[order]
        return [token for token, _ in sampled]


class ParallelEngine(Engine):
    """An engine on all ranks. `max_batch` is of each micro-batch; they share the pages, as many as
    the smallest rank has room for. With `record`, `micro_batches` learns what the stages do."""

    make_runner, record = ParallelRunner, False

    def _start(
        self, model: Any, config: EngineConfig, tokenizer: Any, clock: Callable[[], float]
    ) -> None:
        pp = model.ranks.pp
        whole = replace(config, max_batch=config.max_batch and config.max_batch * pp)
        alive = [its.key for its in model.ranks.work.alive]
        pages = min(model.ranks.call("room", alive, whole))
        batch = config.max_batch or min(pages // pp, MAX_BATCH)
        config = replace(config, pages=pages, max_batch=batch)
        super()._start(model, config, tokenizer, clock)
        self.micro_batches = MicroBatches(self.config, pp, clock)
        self.schedulers = self.micro_batches.schedulers
        self.scheduler = self.schedulers[0]  # that of the micro-batch whose turn it is
        self.state = tuple(range(pp)), ()  # who may go on; what `_launch` returned of the others

    @property
    def has_work(self):
        """Whether any request has not ended, or any batch is on its way."""
        return bool(self.scheduler.requests or self.state[1])

    def abort(self, request_id):
        """As of Engine."""
        self.scheduler = self.micro_batches.running_in(request_id)
        return super().abort(request_id)

    def step(self):
        """Send the next batch on its way, or wait for the first: an Event for each new token.
        As Ranks.order it may end all. All that it changes of `state` is one assignment."""
        self.last_iteration, (ready, flights) = None, self.state
        for number in () if self._computed else ready:  # what was computed is recorded first
            self.scheduler = self.schedulers[number]
            if batch := self.micro_batches.next_batch(number, start := self.clock()):
                flight = self._launch(number, batch, start)
                self.state = tuple(n for n in ready if n != number), (*flights, flight)
                return []
        events = []
        if flights:
            (order, begun, *flight), *others = flights
            stages, number = self.runner.collect(order), flight[1].micro_batch
            if self._computed or begun == self.micro_batches.begun:  # else its requests begin anew
                events = self._land(*flight, stages)
            self.state, self._computed = ((*ready, number), tuple(others)), None
            del self.runner.ranks.answers[order]
        return events

    def _launch(self, number, batch, start):
        """Let a Batch begin. The pages of micro-batches lie one behind the other."""
        first, inputs = number * self.scheduler.pages.total, self._inputs(batch)
        spans = [
            span._replace(pages=[first + page for page in span.pages]) for span in inputs.spans
        ]
        iteration = Iteration.begin(batch, self.schedulers, start, micro_batch=number)
        iteration = iteration._replace(launch=self.clock())
        arguments = spans, inputs.params, inputs.positions
        order = self.runner.ranks.order("run", self.runner.key, *arguments)
        its = self.micro_batches
        return order, its.begun, batch, iteration, its.full_since(number)

    def _land(self, batch, iteration, full_since, stages):
        """The Events of a Batch, from what Stage.run returned on each stage."""
        self.scheduler = self.schedulers[number := iteration.micro_batch]
        if not self._computed:  # else an interrupt came
            now, drawn = self.clock(), iter(stages[-1][-1])
            shift = now - time.perf_counter()  # to this engine's clock
            times = [(start + shift, end + shift, waited) for start, end, waited, _ in stages]
            sampled = [next(drawn) if chunk.yields_token else None for chunk in batch]
            if self.record:
                self.micro_batches.book(number, times, full_since, batch, iteration.chunks)
            self.scheduler.observe(batch, now - iteration.start)
            self._computed = Computed(batch, sampled, iteration._replace(end=now))
        return self._advance(self._computed)
