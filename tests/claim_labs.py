"""Labs whose times come from a cost model, and systems that are broken on purpose.

The claims run on them as on a machine, but without noise and within seconds. The schedulers are the
real ones. A broken system differs from the real one in one thing, so that it is plain which claims
depend on it."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import pytest

from lab.claims.cost_lab import CostLab
from lab.claims.labs import Capacities, Lockstep, Served, Size
from lab.measure.batch_times import Batch, TimedChunk
from lab.measure.offline_load import policy_runs
from lab.measure.run_plan import run_plan
from lab.simulator.cost_model import Chunks, CostModel, LayerSeconds
from lab.simulator.simulation import simulate
from scheduler import VLLM, Request, RequestLevel, SarathiServe
from scheduler import Batch as ScheduledBatch

SHORT_RUN = 30  # requests

Break = Literal[
    "request-level admits while others run",
    "nothing is chunked",
    "decodes ride in batches of their own",
    "attention is ten times slower in hybrid batches",
    "pages are never shared out",
    "weights are read again for each row",
    "a chunk meets no keys but its own",
    "all rows but the first cost nothing",
]
BREAKS: tuple[Break, ...] = get_args(Break)


@dataclass(eq=False)
class BreakableCost(CostModel):
    """A CostModel that computes as a broken system would."""

    broken: Break | None = None

    def layer_seconds(self, batch: Chunks) -> LayerSeconds:
        """The LayerSeconds of a batch, as the system is broken."""
        chunks = [chunk for chunk in batch if chunk[2] > 1]
        decodes = [chunk for chunk in batch if chunk[2] == 1]
        if self.broken == "nothing is chunked":
            chunks = [(request, 0, start + length) for request, start, length in chunks]
            return super().layer_seconds([*chunks, *decodes])
        if self.broken == "a chunk meets no keys but its own":
            chunks = [(request, 0, length) for request, _, length in chunks]
            return super().layer_seconds([*chunks, *decodes])
        if not chunks or not decodes:
            return super().layer_seconds(batch)
        if self.broken == "decodes ride in batches of their own":
            alone = zip(super().layer_seconds(chunks), super().layer_seconds(decodes), strict=True)
            return LayerSeconds(*[sum(pair) for pair in alone])
        times = super().layer_seconds(batch)
        if self.broken == "attention is ten times slower in hybrid batches":
            return times._replace(attention=10 * times.attention)
        return times

    def token_seconds(self, tokens: int) -> tuple[float, float, float]:
        """Seconds of products, other operations and all-reduces in a layer."""
        if self.broken == "weights are read again for each row" and tokens > 1:
            linear_s, others_s, all_reduce_s = super().token_seconds(1)
            return tokens * linear_s, tokens * others_s, tokens * all_reduce_s
        if self.broken == "all rows but the first cost nothing":
            return super().token_seconds(1)
        return super().token_seconds(tokens)


def admit_while_others_run(scheduler: RequestLevel) -> ScheduledBatch:
    """A schedule() that admits as Orca's does."""
    batch = ScheduledBatch()
    while scheduler.admit():
        pass
    for request in scheduler.running:
        batch.add(request)
    return batch


cut_to_budget = ScheduledBatch.add


def add_whole(batch: ScheduledBatch, request: Request, limit: int = sys.maxsize) -> int:
    """A Batch.add() that never cuts a prompt."""
    whole = ScheduledBatch()
    length = cut_to_budget(whole, request)
    batch += whole
    batch.left -= length
    return length


def reserve_max_len(scheduler: VLLM | SarathiServe, request: Request) -> int:
    """A reserved() that gives each request the memory of the longest."""
    return scheduler.max_len


@contextmanager
def broken_schedulers(broken: Break | None) -> Iterator[None]:
    """Schedulers that decide as those of a broken system."""
    with pytest.MonkeyPatch.context() as patch:
        if broken == "request-level admits while others run":
            patch.setattr(RequestLevel, "schedule", admit_while_others_run)
        if broken == "nothing is chunked":
            patch.setattr(ScheduledBatch, "add", add_whole)
        if broken == "pages are never shared out":
            patch.setattr(VLLM, "reserved", reserve_max_len)
            patch.setattr(SarathiServe, "reserved", reserve_max_len)
        yield


class ShortLab(CostLab):
    """A CostLab whose runs are short: they are enough to see who wins."""

    cached_tokens = 1  # as of a real lab

    def __init__(self, preset: str, device: str, broken: Break | None = None, size: Size = "gpu"):
        cost = BreakableCost.named(preset, device)
        cost.broken = broken
        super().__init__(cost, size)

    def intensities(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Flops per byte. If weights are read for each row, each row is a batch."""
        if self.cost.broken == "weights are read again for each row":
            prompt = batches[0][0]  # the others are alike
            batches = [(TimedChunk(1, end),) for end in range(1, prompt.end + 1)]
        return super().intensities(batches)

    def gains(
        self, policies: Sequence[str], load: Lockstep, pd_ratio: float
    ) -> dict[str, float | None]:
        """As Lab.gains, of a full pipeline, as a real lab measures it."""
        offline = load.offline(pd_ratio, min(load.requests, 2 * load.batch + 1))
        configs = run_plan(policies, [load.length], offline.config(load.chunk))
        runs = {
            name: simulate(self.cost, config, offline.arrivals()).run
            for name, config in configs.items()
        }
        rows = policy_runs(policies, runs, load.batch)
        return {name: row.gain for name, row in rows.items()}

    def serve(self, policies: Sequence[str], *, requests: int = 4, **load: Any) -> Served:
        """As Lab.serve, of fewer requests."""
        return super().serve(policies, requests=min(requests, SHORT_RUN), **load)

    def capacity(self, policies: Sequence[str], *, requests: int, **load: Any) -> Capacities:
        """As Lab.capacity, of fewer requests."""
        return super().capacity(policies, requests=min(requests, SHORT_RUN), **load)


def lab_with(size: Size = "quick", **answers: Any) -> ShortLab:
    """A ShortLab with other methods of these names."""
    lab = ShortLab("llama3-8b", "a100-80gb", size=size)
    for name, answer in answers.items():
        setattr(lab, name, answer)
    return lab
