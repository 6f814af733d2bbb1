"""A Lab on a paper's machine: all that it answers comes from a cost model, within seconds.

    lab = CostLab(CostModel.named("llama-13b", "a6000"))
    lab.time({"prompt": [prompts(1, 1024)]})["prompt"].total_ms

The schedulers are the real ones, on a clock that counts. Read first: labs.py,
jobs.py. Read next: clusters.py."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Self

import torch

from lab.claims.jobs import OfflineJob, Setup, offline
from lab.claims.labs import Lab, Lockstep, Size, TimeCases
from lab.measure import workload
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
from lab.measure.run_plan import run_plan
from lab.measure.token_budget import Case, Profiled
from lab.simulator.cost_model import CostModel, product_seconds
from lab.simulator.machine import SimulatedMachine
from model import Block


class CostLab(Lab):
    """A Lab that computes, on the GPUs of a cost model."""

    rounds = 40  # of a load that is all there at the start: so many times its batch

    def __init__(self, cost: CostModel, size: Size = "gpu", setup: Setup | None = None) -> None:
        self.cost = cost
        self.setup = setup or Setup()
        with torch.device("meta"):  # its sizes are looked at, nothing else
            block = Block(cost.config)
        model: Any = SimpleNamespace(
            config=replace(cost.config, max_positions=10**6),
            blocks=[block],
            dtype=torch.float16,
            device=torch.device("cpu"),  # so that pages are small, as vLLM's
        )
        device = cost.device
        ridge = device.flops_per_s / device.bytes_per_s
        machine = {"device": f"simulated: {device.name}", "model": "", "dtype": "16 bits"}
        super().__init__(model, size, ridge=ridge, machine=machine)

    def on(self, cost: CostModel) -> Self:
        """The same with another machine."""
        return type(self)(cost, self.size, self.setup)

    def time(
        self,
        sequences: Mapping[str, Sequence[Batch]],
        layers: int | None = None,
        repeats: int = 5,
    ) -> dict[str, SequenceTime]:
        """As Lab.time. The times of some layers are a share of those of all."""
        times = {}
        for name, sequence in sequences.items():
            of_batches = [self.time_of(batch, layers) for batch in sequence]
            times[name] = add_up(self.model, sequence, of_batches)
        return times

    def time_of(self, batch: Batch, layers: int | None = None, head: bool = False) -> BatchTime:
        """The BatchTime of a batch. With all layers the total has all that an iteration takes, with
        head and CPU time; `head`: the products have the head, too."""
        share = 1e3 * (layers or self.cost.layers)
        chunks = [(None, chunk.end - chunk.tokens, chunk.tokens) for chunk in batch]
        tokens = sum(chunk.tokens for chunk in batch)
        times = self.cost.layer_seconds(chunks)
        operations = self._operation_seconds(tokens, times.linear)
        total_ms = share * sum(times) if layers else 1e3 * self.cost.seconds(chunks)
        head_ms = 0.0
        if head:
            config = self.cost.config
            rows_s = product_seconds(self.cost.device, len(batch), config.n_embd, config.vocab_size)
            head_ms = 1e3 * rows_s
        products_ms = share * times.linear + head_ms
        attention_ms = share * times.attention
        return BatchTime(
            total_ms=total_ms,
            attention_ms=attention_ms,
            **{f"{name}_ms": share * seconds for name, seconds in operations.items()},
            head_ms=head_ms,
            products_ms=products_ms,
            attention_limit_ms=attention_ms,
            other_ms=total_ms - products_ms - attention_ms,
            spread=0.0,
            busy=False,
        )

    def _operation_seconds(self, tokens: int, linear_s: float) -> dict[str, float]:
        """Seconds of each product in a layer, which together take `linear_s`."""
        seconds = {
            name: product_seconds(self.cost.device, tokens, *matrix)
            for name, matrix in self.cost.matrices._asdict().items()
        }
        scale = linear_s / sum(seconds.values())
        return {name: scale * s for name, s in seconds.items()}

    def decode_maximal(self, *, context: int, batch: int, chunk: int) -> DecodeMaximal:
        """As Lab.decode_maximal."""
        batches = table_2_batches(context, batch, chunk)
        times = {}
        for name, hybrid in batches.items():
            times[name] = self.time_of(hybrid, head=True)
        return compare_decodes(times, context, batch, chunk)

    def gains(
        self, policies: Sequence[str], load: Lockstep, pd_ratio: float
    ) -> dict[str, float | None]:
        """As Lab.gains."""
        offline_load = load.offline(pd_ratio, self.rounds * load.batch)
        arrivals = offline_load.arrivals()
        config = offline_load.config(load.chunk)
        jobs = {}
        for name, policy_config in run_plan(policies, [load.length], config).items():
            jobs[name] = OfflineJob(self.cost, policy_config, arrivals)
        runs = self.setup.run_all(offline, jobs)
        base_s = runs["request-level"].makespan_s
        return {name: base_s / run.makespan_s for name, run in runs.items()}

    def case_timer(self, decodes: int, context: int, max_budget: int) -> TimeCases:
        """As Lab.case_timer."""

        def time_cases(cases: Sequence[Case]) -> list[Profiled]:
            rows = []
            for budget, at, riding in cases:
                chunk: Batch = (TimedChunk(budget - riding, budget),) if budget > riding else ()
                batch = (*chunk, *decode_batch(riding, at))
                seconds = self.time_of(batch).total_ms / 1e3
                rows.append(Profiled(budget, at, riding, seconds))
            return rows

        return time_cases

    def server(self, max_len: int) -> SimulatedMachine:
        """The GPUs as a server."""
        return SimulatedMachine(
            self.cost,
            model="",
            replicas=1,
            max_len=max_len,
            chunk=self.chunk,
            make_prompts=partial(workload.prompts, seed=0),
        )
