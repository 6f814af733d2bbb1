"""Labs whose times come from a cost model, and whose runs are short.

The claims run on them as on a machine, but without noise and within seconds. The schedulers are the
real ones."""

from collections.abc import Sequence
from typing import Any

from lab.claims.cost_lab import CostLab
from lab.claims.labs import Capacities, Lockstep, Served, Size
from lab.measure.offline_load import policy_runs
from lab.measure.run_plan import run_plan
from lab.simulator.cost_model import CostModel
from lab.simulator.simulation import simulate

SHORT_RUN = 30  # requests


class ShortLab(CostLab):
    """A CostLab whose runs are short: they are enough to see who wins."""

    cached_tokens = 1  # as of a real lab

    def __init__(self, preset: str, device: str, size: Size = "gpu"):
        super().__init__(CostModel.named(preset, device), size)

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
