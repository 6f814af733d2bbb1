"""A Bench whose times come from a cost model, and systems that are broken on purpose.

The functions of lab/papers/ run on it as on a machine, but without noise and within seconds. The
schedulers are the real ones. A broken system differs from the real one in one thing, so that it is
plain which claims depend on it."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from lab.measure.batch_times import (
    Batch,
    BatchTime,
    SequenceTime,
    TimedChunk,
    add_up,
)
from lab.measure.batch_times import decodes as hand_made_decodes
from lab.measure.capacity import Bounded, slo_seconds
from lab.measure.decode_maximal import DecodeMaximal, compare_decodes, table_2_batches
from lab.measure.offline_load import OfflineLoad, PolicyRun, summarize_policy, with_gains
from lab.measure.run_plan import run_plan
from lab.measure.token_budget import Case, Profiled, choose_budget
from lab.papers.bench import NO_PREFIX, Bench, Capacities, Served, ServingLimits, Size, TokenBudgets
from lab.simulator.cost_model import Chunks, CostModel, LayerSeconds, product_seconds
from lab.simulator.machine import CountingMachine, base_of
from lab.simulator.simulation import simulate
from model import Block
from scheduler import VLLM, Request, RequestLevel, SarathiServe
from scheduler import Batch as ScheduledBatch
from tests.helpers import machine_info

SHORT_RUN = 30  # requests
OPERATIONS = ("preproj", "postproj", "ffn_ln1", "ffn_ln2")

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
BREAKS: tuple[Break, ...] = (
    "request-level admits while others run",
    "nothing is chunked",
    "decodes ride in batches of their own",
    "attention is ten times slower in hybrid batches",
    "pages are never shared out",
    "weights are read again for each row",
    "a chunk meets no keys but its own",
    "all rows but the first cost nothing",
)


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

    def operation_seconds(self, batch: Chunks) -> dict[str, float]:
        """Seconds of each product in all layers. Their sum is scaled to that of layer_seconds."""
        tokens = sum(length for _, _, length in batch)
        seconds = {
            name: product_seconds(self.device, tokens, *getattr(self.matrices, name))
            for name in OPERATIONS
        }
        scale = self.layers * self.layer_seconds(batch).linear / sum(seconds.values())
        return {name: scale * s for name, s in seconds.items()}


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


class CostBench(Bench):
    """A Bench that measures on the GPUs of a cost model."""

    def __init__(self, preset: str, device: str, broken: Break | None, size: Size = "gpu") -> None:
        self.cost = BreakableCost.named(preset, device)
        self.cost.broken = broken
        gpu = self.cost.device
        model: Any = SimpleNamespace(
            config=replace(self.cost.config, max_positions=10**6),
            blocks=[Block(self.cost.config, device="meta")],
            dtype=torch.float16,
            device=torch.device("cpu"),  # so that pages are small, as vLLM's
        )
        machine = machine_info(
            device=gpu.name,
            model=preset,
            flops_per_s=gpu.flops_per_s,
            bytes_per_s=gpu.bytes_per_s,
            ridge_tokens=gpu.flops_per_s / gpu.bytes_per_s,
            base_busy=False,
        )
        options: Any = SimpleNamespace(attention="auto", seed=0)
        super().__init__(model, machine, options, size, picture="picture.png")

    def time_batches(
        self,
        sequences: Mapping[str, Sequence[Batch]],
        layers: int | None = None,
        repeats: int = 5,
    ) -> dict[str, SequenceTime]:
        """The times of sequences of batches; those of one layer are a share of those of all."""
        return {
            name: add_up(self.model, sequence, [self.time_of(batch, layers) for batch in sequence])
            for name, sequence in sequences.items()
        }

    def time_of(self, batch: Batch, layers: int | None = None, head: bool = False) -> BatchTime:
        """The BatchTime of a batch."""
        share = 1e3 * (layers or self.cost.layers) / self.cost.layers
        chunks = [(None, chunk.end - chunk.tokens, chunk.tokens) for chunk in batch]
        times = self.cost.layer_seconds(chunks)
        operations = self.cost.operation_seconds(chunks)
        head_ms = 0.0
        if head:
            config = self.cost.config
            rows_s = product_seconds(self.cost.device, len(batch), config.n_embd, config.vocab_size)
            head_ms = 1e3 * rows_s
        products_ms = share * sum(operations.values()) + head_ms
        attention_ms = share * self.cost.layers * times.attention
        other_ms = share * self.cost.layers * times.others
        return BatchTime(
            total_ms=products_ms + attention_ms + other_ms,
            attention_ms=attention_ms,
            preproj_ms=share * operations["preproj"],
            postproj_ms=share * operations["postproj"],
            ffn_ln1_ms=share * operations["ffn_ln1"],
            ffn_ln2_ms=share * operations["ffn_ln2"],
            head_ms=head_ms,
            products_ms=products_ms,
            attention_limit_ms=attention_ms,
            other_ms=other_ms,
            spread=0.0,
            busy=False,
        )

    def intensities(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Flops per byte. If weights are read for each row, each row is a batch."""
        if self.cost.broken == "weights are read again for each row":
            prompt = batches[0][0]  # the others are alike
            batches = [(TimedChunk(1, end),) for end in range(1, prompt.end + 1)]
        return super().intensities(batches)

    def decode_maximal(self, *, context: int, batch: int, chunk: int) -> DecodeMaximal:
        """SARATHI's Table 2."""
        batches = table_2_batches(context, batch, chunk)
        times = {name: self.time_of(each, head=True) for name, each in batches.items()}
        return compare_decodes(times, context, batch, chunk)

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
        """Requests in lockstep, under each policy."""
        load = OfflineLoad(
            seq_len=seq_len,
            pd_ratio=pd_ratio,
            batch=batch,
            requests=min(requests, 2 * batch + 1),  # the fewest that fill a pipeline
            lockstep=True,
        )
        rows = {}
        for name, config in run_plan(policies, [seq_len], load.config(chunk)).items():
            run = simulate(self.cost, config, load.arrivals()).run
            rows[name] = summarize_policy(run, batch)
        return {name: with_gains(row, rows["request-level"]) for name, row in rows.items()}

    def serve(self, policies: Sequence[str], *, requests: int = 4, **load: Any) -> Served:
        """Runs of a load. Short ones are enough to see who wins."""
        return super().serve(policies, requests=min(requests, SHORT_RUN), **load)

    def capacity(self, policies: Sequence[str], *, requests: int, **load: Any) -> Capacities:
        """The highest rates, of short runs."""
        return super().capacity(policies, requests=min(requests, SHORT_RUN), **load)

    def token_budgets(
        self, slos: Sequence[str], *, decodes: int, max_budget: int, tile: int
    ) -> TokenBudgets:
        """The largest budgets, of batches that the cost model times."""
        base = base_of(self.cost, self._limits(None, None, None).max_len)
        profile: list[Profiled] = []
        budgets: dict[str, Bounded] = {}

        def timed(_: Any, cases: Sequence[Case]) -> list[Profiled]:
            rows = []
            for budget, context, riding in cases:
                chunk: Batch = (TimedChunk(budget - riding, budget),) if budget > riding else ()
                batch = (*chunk, *hand_made_decodes(riding, context))
                rows.append(Profiled(budget, context, riding, self.time_of(batch).total_ms / 1e3))
            return rows

        slos_s = {slo: slo_seconds(slo, base) for slo in slos}
        for slo, slo_s in slos_s.items():
            budget, rows = choose_budget(
                self.model, slo_s, decodes, [base.context], tile, max_budget, timed
            )
            budgets[slo] = Bounded(budget)
            profile += rows
        return TokenBudgets(slos_s, budgets, profile)

    def _real_machine(self, limits: ServingLimits) -> Any:
        """The GPUs as a server."""
        machine: Any = CountingMachine(
            partial(simulate, self.cost), seed=0, shared_prefix=NO_PREFIX
        )
        machine.base = base_of(self.cost, limits.max_len, limits.chunk)
        machine.info = self.machine
        return machine

    def _fitted_machine(self, limits: ServingLimits) -> Any:
        """The same."""
        return self._real_machine(limits)
