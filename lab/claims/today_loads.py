"""Loads of lab/claims/today.py: how a policy is run on one, and what is printed of it.

Read next: today.py."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from config import EngineConfig
from lab.measure.metrics import summarize_run
from lab.measure.run_loop import Run
from lab.measure.workload import Arrival
from lab.simulator.cost_model import CostModel
from lab.simulator.simulation import simulate

MODEL = "llama3-8b"  # on one A100
PAGE_SIZE = 64


@dataclass(frozen=True)
class Server:
    """How a policy is run."""

    policy: str
    chunk: int
    max_len: int
    tokens: int  # of memory
    max_batch: int = 64
    options: dict[str, object] = field(default_factory=dict)


def serve(server: Server, arrivals: Sequence[Arrival]) -> Run:
    """Simulate a run on one A100."""
    config = EngineConfig(
        server.policy,
        chunk=server.chunk,
        max_batch=server.max_batch,
        max_len=server.max_len,
        page_size=PAGE_SIZE,
        pages=server.tokens // PAGE_SIZE,
        policy_options=server.options,
    )
    return simulate(CostModel.named(MODEL), config, arrivals).run


@dataclass(frozen=True)
class Latencies:
    """What is printed of a run, in seconds."""

    ttft_p50: float
    tbt_p50: float
    tbt_mean: float
    tbt_p99: float
    tbt_max: float
    tpot_p99: float
    tokens_per_s: float
    preemptions: int
    recomputed: int
    running: float


def latencies(run: Run) -> Latencies:
    """The Latencies of a run in which requests have ended."""
    summary = summarize_run(run.completions, run.iterations, run.seconds)
    gaps = [gap for completion in run.completions for gap in completion.tbt]
    tpots = [float(np.mean(c.tbt)) for c in run.completions if c.tbt]
    return Latencies(
        ttft_p50=summary.ttft_s.p50 or 0.0,
        tbt_p50=summary.tbt_s.p50 or 0.0,
        tbt_mean=float(np.mean(gaps)),
        tbt_p99=summary.tbt_s.p99 or 0.0,
        tbt_max=summary.tbt_s.max or 0.0,
        tpot_p99=float(np.quantile(tpots, 0.99)),
        tokens_per_s=summary.tokens_per_s or 0.0,
        preemptions=summary.preemptions or 0,
        recomputed=summary.recomputed_tokens or 0,
        running=summary.running_mean or 0.0,
    )
