"""A Lab on a paper's machine: all that it answers comes from a cost model, within seconds.

    lab = CostLab(CostModel.named("llama-13b", "a6000"))
    lab.time({"prompt": [prompts(1, 1024)]})["prompt"].total_ms

The schedulers are the real ones, on a clock that counts. Read first: labs.py,
lab/simulator/cost_model.py. Read next: systems.py."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from config import EngineConfig
from lab.claims.labs import NO_PREFIX, Lab, Lockstep, ServerAndBase, Size, TimeCases
from lab.measure.batch_times import (
    Batch,
    BatchTime,
    SequenceTime,
    TimedChunk,
    add_up,
)
from lab.measure.batch_times import (
    decodes as decode_batch,
)
from lab.measure.decode_maximal import DecodeMaximal, compare_decodes, table_2_batches
from lab.measure.offline_load import summarize_policy, with_gains
from lab.measure.run_plan import run_plan
from lab.measure.token_budget import Case, Profiled
from lab.simulator.cost_model import CostModel, product_seconds
from lab.simulator.machine import CountingMachine, base_of
from lab.simulator.simulation import simulate
from model import Block


class CostLab(Lab):
    """A Lab that computes, on the GPUs of a cost model."""

    def __init__(self, cost: CostModel, size: Size = "gpu") -> None:
        self.cost = cost
        model: Any = SimpleNamespace(
            config=replace(cost.config, max_positions=10**6),
            blocks=[Block(cost.config, device="meta")],
            dtype=torch.float16,
            device=torch.device("cpu"),  # so that pages are small, as vLLM's
        )
        device = cost.device
        ridge = device.flops_per_s / device.bytes_per_s
        super().__init__(model, size, ridge=ridge, machine=asdict(device))

    def time(
        self,
        sequences: Mapping[str, Sequence[Batch]],
        layers: int | None = None,
        repeats: int = 5,
    ) -> dict[str, SequenceTime]:
        """As Lab.time. The times of some layers are a share of those of all."""
        return {
            name: add_up(self.model, sequence, [self.time_of(batch, layers) for batch in sequence])
            for name, sequence in sequences.items()
        }

    def time_of(self, batch: Batch, layers: int | None = None, head: bool = False) -> BatchTime:
        """The BatchTime of a batch."""
        share = 1e3 * (layers or self.cost.layers) / self.cost.layers
        chunks = [(None, chunk.end - chunk.tokens, chunk.tokens) for chunk in batch]
        times = self.cost.layer_seconds(chunks)
        operations = self._operation_seconds(sum(chunk.tokens for chunk in batch), times.linear)
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
            **{f"{name}_ms": share * seconds for name, seconds in operations.items()},
            head_ms=head_ms,
            products_ms=products_ms,
            attention_limit_ms=attention_ms,
            other_ms=other_ms,
            spread=0.0,
            busy=False,
        )

    def _operation_seconds(self, tokens: int, linear_s: float) -> dict[str, float]:
        """Seconds of each product in all layers, which together take `linear_s` in one."""
        seconds = {
            name: product_seconds(self.cost.device, tokens, *matrix)
            for name, matrix in self.cost.matrices._asdict().items()
        }
        scale = self.cost.layers * linear_s / sum(seconds.values())
        return {name: scale * s for name, s in seconds.items()}

    def decode_maximal(self, *, context: int, batch: int, chunk: int) -> DecodeMaximal:
        """As Lab.decode_maximal."""
        batches = table_2_batches(context, batch, chunk)
        times = {name: self.time_of(each, head=True) for name, each in batches.items()}
        return compare_decodes(times, context, batch, chunk)

    def gains(
        self, policies: Sequence[str], load: Lockstep, pd_ratio: float
    ) -> dict[str, float | None]:
        """As Lab.gains."""
        # the fewest requests that fill a pipeline
        offline = load.offline(pd_ratio, min(load.requests, 2 * load.batch + 1))
        rows = {}
        for name, config in run_plan(policies, [load.length], offline.config(load.chunk)).items():
            run = simulate(self.cost, config, offline.arrivals()).run
            rows[name] = summarize_policy(run, load.batch)
        base = rows["request-level"]
        return {name: with_gains(row, base).gain for name, row in rows.items()}

    def case_timer(self, decodes: int, context: int, max_budget: int) -> TimeCases:
        """As Lab.case_timer."""

        def time_cases(cases: Sequence[Case]) -> list[Profiled]:
            rows = []
            for budget, at, riding in cases:
                chunk: Batch = (TimedChunk(budget - riding, budget),) if budget > riding else ()
                seconds = self.time_of((*chunk, *decode_batch(riding, at))).total_ms / 1e3
                rows.append(Profiled(budget, at, riding, seconds))
            return rows

        return time_cases

    def server(self, config: EngineConfig) -> ServerAndBase:
        """The GPUs as a server."""
        machine = CountingMachine(partial(simulate, self.cost), seed=0, shared_prefix=NO_PREFIX)
        base = base_of(self.cost, config.max_len or 0, self.chunk)
        return ServerAndBase(machine, base, busy=False)
