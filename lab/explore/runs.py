"""Simulated runs for the schedule page: of bench.py explore, and of a policy written in the page.

Both come from `record_run`, so that they can be compared. Plain Python. Read next: answer.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from config import EngineConfig
from lab.measure.arrival import Arrival
from lab.measure.run_plan import goes_by_chunk, run_plan
from lab.simulator.cost_model import CostModel
from lab.simulator.simulation import bubble_kinds, simulate
from page.records import Recorder, instance_names

MODEL = "llama3-8b"  # on one A100
CHUNKS = ("128", "256", "512", "1024")
MAX_BATCH = 32
MAX_LEN = 2048
PAGE_SIZE = 64
AMPLE = 24  # requests of the longest that fit into the memory


@dataclass(frozen=True)
class Load:
    """The requests of a run, and the machine that serves them."""

    arrivals: Sequence[Arrival]
    tokens: int = AMPLE * MAX_LEN  # of the KV cache
    max_len: int = MAX_LEN
    pp: int = 1  # stages of the pipeline
    replicas: int = 1
    prompts: list[list[int]] | None = None  # if they share prefixes, which then are cached
    letters: bool = False  # whether requests are named A, B, C

    @property
    def config(self) -> EngineConfig:
        """The EngineConfig of its engines, without a policy, for the largest chunks."""
        return EngineConfig(
            chunk=int(CHUNKS[-1]),
            max_batch=MAX_BATCH,
            max_len=self.max_len,
            page_size=PAGE_SIZE,
            pages=self.tokens // PAGE_SIZE,
        )

    def to_json(self) -> dict[str, Any]:
        """All fields, for `from_json`. Only times and lengths of the arrivals are kept."""
        arrivals = [[a.time, a.prompt_len, a.output_len] for a in self.arrivals]
        return {**vars(self), "arrivals": arrivals}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """The load of which these are the fields."""
        arrivals = [Arrival(*arrival) for arrival in fields["arrivals"]]
        return cls(**{**fields, "arrivals": arrivals})


def record_run(
    policy: str, chunk: str, load: Load, slo_s: float, recorder: Recorder | None = None
) -> Recorder:
    """Simulate a load under a policy, and record it. `chunk` counts if the policy has a chunk size.

    If the run fails, a `recorder` that was given holds what came before."""
    recorder = recorder or Recorder()
    label = f"{policy}:{chunk}" if goes_by_chunk(policy) else policy
    config = run_plan([label], [PAGE_SIZE], load.config, slo_s, [load.prompts is not None])[label]
    cost = CostModel.named(MODEL, pp=load.pp)
    simulated = simulate(
        cost, config, load.arrivals, load.prompts, replicas=load.replicas, recorder=recorder
    )
    if load.replicas > 1:
        recorder.name_replicas(instance_names("GPU", load.replicas))
    if load.pp > 1:
        recorder.add_stages(simulated.stage_runs, bubble_kinds(simulated.stage_runs))
    if load.letters:
        recorder.settings["letters"] = True
    return recorder
