"""Systems that are broken on purpose: each differs from the real one in one thing.

    with broken("orca never makes hybrid batches"): ...

A break is a list of functions, methods and properties that are replaced: (owner, name, the new one,
which is called with the old one before its arguments). So it is plain which claims depend on what
is broken."""

import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import mean, median
from typing import Any

import pytest

from kv_cache import Pages
from lab.claims import labs
from lab.measure import metrics, workload
from lab.measure.batch_times import TimedChunk
from lab.simulator.cost_model import CostModel, LayerSeconds, StageTimes
from policies.ablations import ChunkedOnly, HybridOnly
from request import Batch, Request
from scheduler import VLLM, Orca, OrcaBest, RequestLevel, Sarathi, SarathiServe, Scheduler

Change = tuple[object, str, Callable[..., Any]]


# ---- what an iteration takes ---------------------------------------------------------------------


def added(*parts: LayerSeconds) -> LayerSeconds:
    """The sum of the times of batches."""
    return LayerSeconds(*map(sum, zip(*parts, strict=True)))


def of_chunks(change: Callable[[int, int], tuple[int, int]]) -> Change:
    """Batches take as long as others would: each chunk, (start, length), is another."""

    def layer_seconds(old: Any, self: CostModel, batch: Any) -> LayerSeconds:
        return old(self, [(0, *change(start, n)) for _, start, n in batch])

    return CostModel, "layer_seconds", layer_seconds


def hybrid_seconds(change: Callable[..., LayerSeconds]) -> Change:
    """Hybrid batches take other times: of (those of all, of the chunks, of the decodes)."""

    def layer_seconds(old: Any, self: CostModel, batch: Any) -> LayerSeconds:
        chunks = [chunk for chunk in batch if chunk[2] > 1]
        decodes = [chunk for chunk in batch if chunk[2] == 1]
        if not chunks or not decodes:
            return old(self, batch)
        return change(old(self, batch), old(self, chunks), old(self, decodes))

    return CostModel, "layer_seconds", layer_seconds


def chunks_one_by_one(old: Any, self: CostModel, batch: Any) -> LayerSeconds:
    """layer_seconds of a system that computes each prompt's chunk on its own."""
    chunks = [chunk for chunk in batch if chunk[2] > 1]
    parts = [old(self, [chunk]) for chunk in chunks[1:]]
    return added(*parts, old(self, [chunk for chunk in batch if chunk not in chunks[1:]]))


def intensity_by_row(old: Any, model: Any, batches: Any) -> Any:
    """intensities() if the weights are read for each row: each row is a batch."""
    end = batches[0][0].end  # the others are alike
    return old(model, [(TimedChunk(1, each),) for each in range(1, end + 1)])


# ---- what a batch is made of ---------------------------------------------------------------------


def keep(policy: type[Scheduler], kept: Callable[[list[Any], list[Any]], list[Any]]) -> Change:
    """A policy's batches keep some of their chunks: of (prefills, decodes), unless one is []."""

    def schedule(old: Any, self: Scheduler) -> Batch:
        batch = old(self)
        prefills = [chunk for chunk in batch if not chunk.request.is_decoding]
        decodes = [chunk for chunk in batch if chunk.request.is_decoding]
        if prefills and decodes:
            batch[:] = kept(prefills, decodes)
        return batch

    return policy, "schedule", schedule


def take_turns(prefills: list[Any], decodes: list[Any]) -> list[Any]:
    """Without decodes, if the first of them has an odd number of tokens."""
    return prefills if len(decodes[0].request.tokens) % 2 else decodes + prefills


def after_decodes(change: Callable[[Batch, int], int]) -> Change:
    """After the decodes the batch has another budget left: of (the batch, how many they are)."""

    def add_decodes(old: Any, self: Batch, requests: Any) -> None:
        old(self, requests)
        self.left = change(self, len(requests))

    return Batch, "add_decodes", add_decodes


def add_whole(old: Any, self: Batch, request: Any, limit: int = sys.maxsize) -> int:
    """Batch.add of a system that never cuts a prompt."""
    whole = Batch()
    length = old(whole, request)
    self += whole
    self.left -= length
    return length


def admit_while_others_run(old: Any, self: RequestLevel) -> Batch:
    """A schedule() that admits as Orca's does."""
    batch = Batch()
    while self.admit():
        pass
    for request in self.running:
        batch.add(request)
    return batch


def one_at_a_time(old: Any, self: RequestLevel) -> Batch:
    """A schedule() of batches of one request."""
    batch = Batch()
    for request in self.running or filter(None, [self.admit()]):
        batch.add(request)
    return batch


def decodes_first(old: Any, self: VLLM) -> Batch:
    """A schedule() that lets prompts in only when no request decodes."""
    batch = Batch()
    batch.add_decodes(self.grow_decodes())
    return batch or old(self)


def new_prompts_first(old: Any, self: SarathiServe) -> Batch:
    """A schedule() that finishes last what was started."""
    batch = Batch(self.chunk)
    batch.add_decodes(self.grow_decodes())
    begun = self.prefilling()
    while batch.left > 0 and (request := self.admit()):
        batch.add(request)
    for request in begun:
        batch.add(request)
    return batch


def one_prompt(old: Any, self: SarathiServe) -> Batch:
    """A schedule() that computes one prompt in a batch, and admits one."""
    batch = Batch(self.chunk)
    batch.add_decodes(self.grow_decodes())
    if batch.left > 0:
        prompts = self.prefilling() or filter(None, [self.admit()])
        for request in list(prompts)[:1]:
            batch.add(request)
    return batch


def newest_first(old: Any, self: Scheduler) -> Any:
    """An admit() of the request that came last."""
    if self.waiting:
        self.waiting.appendleft(self.waiting.pop())
    return old(self)


def preempt_often(old: Any, self: Scheduler) -> Any:
    """A grow_decodes() that preempts a request when the oldest has a multiple of 20 tokens."""
    if len(self.running) > 1 and len(self.running[0].tokens) % 20 == 0:
        self.preempt(max(self.running, key=self.rank))
    return old(self)


def half_the_slots(old: Any, self: Scheduler, *args: Any, max_batch: int, **more: Any) -> None:
    """A Scheduler.__init__ with half of the batch size."""
    old(self, *args, max_batch=max(1, max_batch // 2), **more)


def ignore_tiles(old: Any, self: Sarathi, *args: Any, tile: int = 1, **more: Any) -> None:
    """A Sarathi.__init__ that rounds nothing."""
    old(self, *args, **more)


def max_len_reserved(old: Any, self: Scheduler, request: Any) -> int:
    """A reserved() that gives each request the memory of the longest."""
    return self.max_len


# ---- what is made of a run -----------------------------------------------------------------------


def gaps(change: Callable[[Request, list[float]], list[float]]) -> Change:
    """The times between the tokens of a request are others."""
    return Request, "tbt", lambda old, self: change(self, old(self))


def p99_is_p90(old: Any, values: Any) -> Any:
    """percentiles() of which the last is another."""
    percentiles = old(values)
    return replace(percentiles, p99=percentiles.p90)


def ttft_since_scheduled(old: Any, self: Request) -> float | None:
    """A Request.ttft without the time in the queue."""
    return self.token_times[0] - self.scheduled if self.token_times else None


def alike(old: Any, *args: Any) -> Any:
    """make_lengths() that gives all requests the median lengths."""
    pairs = old(*args)
    return [tuple(int(median(each)) for each in zip(*pairs, strict=True))] * len(pairs)


SYSTEMS: dict[str, list[Change]] = {
    # what an iteration takes
    "weights are read again for each row": [
        (
            CostModel,
            "token_seconds",
            lambda old, self, n: tuple(n * each for each in old(self, 1)),
        ),
        (labs, "intensities", intensity_by_row),
    ],
    "all rows but the first cost nothing": [
        (CostModel, "token_seconds", lambda old, self, n: old(self, 1))
    ],
    "a chunk meets no keys but its own": [of_chunks(lambda start, n: (start * (n == 1), n))],
    "attention goes by the chunk alone": [
        (CostModel, "chunk_seconds", lambda old, self, start, n: n * old(self, 0, 1))
    ],
    "attention of a chunk takes three times": [
        (CostModel, "chunk_seconds", lambda old, self, start, n: 3 * old(self, start, n))
    ],
    "no key is kept: decodes compute all again": [
        of_chunks(lambda start, n: (0, start + n)),
    ],
    "a decode reads one key": [
        of_chunks(lambda start, n: (start * (n > 1), n)),
    ],
    "a decode reads four times its keys": [
        of_chunks(lambda start, n: (start * (1 if n > 1 else 4), n)),
    ],
    "other operations take half as long as products": [
        (
            CostModel,
            "token_seconds",
            lambda old, self, n: (old(self, n)[0], old(self, n)[0] / 2, old(self, n)[2]),
        )
    ],
    "the CPU takes 20 ms": [
        (
            CostModel,
            "stages",
            lambda old, self, batch: StageTimes(
                [0.02 + seconds for seconds in old(self, batch).seconds], 0.0
            ),
        )
    ],
    "decodes ride in batches of their own": [
        hybrid_seconds(lambda _, chunks, decodes: added(chunks, decodes))
    ],
    "attention is ten times slower in hybrid batches": [
        hybrid_seconds(lambda times, *_: times._replace(attention=10 * times.attention))
    ],
    "products are a quarter slower in hybrid batches": [
        hybrid_seconds(lambda times, *_: times._replace(linear=1.25 * times.linear))
    ],
    "riding decodes read no keys": [
        hybrid_seconds(lambda times, chunks, _: times._replace(attention=chunks.attention))
    ],
    "chunks of a batch are computed one by one": [(CostModel, "layer_seconds", chunks_one_by_one)],
    # what a batch is made of
    "nothing is chunked": [
        of_chunks(lambda start, n: (0, start + n) if n > 1 else (start, n)),
        (Batch, "add", add_whole),
    ],
    "request-level admits while others run": [(RequestLevel, "schedule", admit_while_others_run)],
    "request-level runs one at a time": [(RequestLevel, "schedule", one_at_a_time)],
    "orca never makes hybrid batches": [keep(Orca, lambda prefills, decodes: prefills)],
    "orca-best is orca": [(OrcaBest, "most_prefills", lambda old: math.inf)],
    "vllm lets decodes go first": [(VLLM, "schedule", decodes_first)],
    "vllm computes one prompt at a time": [
        (VLLM, "head_fits", lambda old, self, batch: not batch and old(self, batch))
    ],
    "decodes are skipped every second time": [
        keep(Sarathi, take_turns),
        keep(SarathiServe, take_turns),
    ],
    "only two decodes ride": [
        keep(Sarathi, lambda prefills, decodes: decodes[:2] + prefills),
        keep(SarathiServe, lambda prefills, decodes: decodes[:2] + prefills),
    ],
    "the budget is ignored beyond three decodes": [
        after_decodes(lambda batch, decodes: sys.maxsize if decodes > 3 else batch.left)
    ],
    "decodes are not in the budget": [after_decodes(lambda batch, decodes: batch.left + decodes)],
    "a batch has C + 1 tokens": [after_decodes(lambda batch, decodes: batch.left + 1)],
    "the budget is not rounded to tiles": [(Sarathi, "__init__", ignore_tiles)],
    "sarathi-serve computes one prompt at a time": [(SarathiServe, "schedule", one_prompt)],
    "sarathi-serve begins new prompts first": [(SarathiServe, "schedule", new_prompts_first)],
    "chunked-only is sarathi-serve": [
        (ChunkedOnly, "schedule", lambda old, self: SarathiServe.schedule(self))
    ],
    "hybrid-only cuts prompts": [
        (HybridOnly, "token_budget", lambda old, *args: SarathiServe.token_budget(*args))
    ],
    "who comes last is admitted first": [(Scheduler, "admit", newest_first)],
    "half of the slots are used": [(Scheduler, "__init__", half_the_slots)],
    "a request is preempted now and then": [(Scheduler, "grow_decodes", preempt_often)],
    "pages are never shared out": [
        (VLLM, "reserved", max_len_reserved),
        (SarathiServe, "reserved", max_len_reserved),
    ],
    "memory has no end": [
        (Pages, "__init__", lambda old, self, total, size: old(self, 50 * total, size))
    ],
    # what is made of a run
    "TBT is the mean of a request": [gaps(lambda _, tbt: [mean(tbt)] * len(tbt) if tbt else [])],
    "the longest gap of a request is left out": [gaps(lambda _, tbt: sorted(tbt)[:-1])],
    "TTFT is a gap, too": [gaps(lambda self, tbt: [self.ttft, *tbt])],
    "P99 is P90": [(metrics, "percentiles", p99_is_p90)],
    "TTFT begins when a request is scheduled": [(Request, "ttft", ttft_since_scheduled)],
    "a queue may grow": [
        (
            metrics,
            "summarize_queue",
            lambda old, *args: replace(old(*args), grew=False),
        )
    ],
    "all requests have the median lengths": [(workload, "make_lengths", alike)],
}


def changed(old: Any, new: Callable[..., Any]) -> Any:
    """What stands in the place of `old`: a function, a property, or a value without arguments."""
    if isinstance(old, property):
        return property(functools.partial(new, old.fget))
    if not callable(old):
        return new(old)

    @functools.wraps(old)
    def function(*args: Any, **options: Any) -> Any:
        return new(old, *args, **options)

    return function


@contextmanager
def broken(system: str | None) -> Iterator[None]:
    """The system of that name in the place of the real one; None: the real one."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, new in SYSTEMS[system] if system else []:
            # a property is itself, not its value
            patch.setattr(owner, name, changed(inspect.getattr_static(owner, name), new))
        yield
