"""All claims: those that one device can show, in the order in which they are measured, and those
that are simulated on the papers' machines.

    found = EXPERIMENTS["bubbles"].claims[0].function(EXPERIMENTS["bubbles"].lab(Setup()))

S is SARATHI, SS Sarathi-Serve, D DistServe, B a post on schedulers, C a Chinese post on SARATHI; F
is a figure, T a table, a number alone a section. Claims that share runs follow each other. Read
first: phases.py, batches.py, offline.py, serving.py, clusters.py, capacities.py, pools.py. Read
next: report.py."""

from dataclasses import dataclass

from lab.claims import batches, capacities, clusters, offline, phases, pools, serving
from lab.claims.claim import Claim
from lab.claims.cost_lab import CostLab
from lab.claims.jobs import Setup
from lab.claims.systems import A6000_13B, YI_34B, ServingSystem

CLAIMS = [
    phases.s_f3,
    phases.s_f4a,
    phases.s_f4b,
    phases.s_3_1,
    phases.s_f7,
    batches.s_f8,
    offline.s_t4,
    offline.s_f9,
    offline.s_f9b,
    offline.s_f11b,
    offline.s_f11,
    batches.s_f10,
    batches.s_f10b,
    batches.s_f13,
    offline.s_f13c,
    offline.s_4_4,
    batches.c_1,
    serving.ss_f7,
    batches.ss_f9,
    batches.ss_f9b,
    batches.ss_f14,
    serving.ss_f10,
    serving.ss_f12,
    serving.ss_5_2,
    serving.ss_t4,
    serving.ss_f1,
    serving.ss_4_3,
    offline.b_1,
    offline.b_1b,
    batches.b_2,
    batches.b_3,
    serving.b_7,
]


@dataclass(frozen=True)
class Experiment:
    """Some claims that are simulated together."""

    claims: list[Claim]
    system: ServingSystem | None = None  # of claims that ask for no other; None: SARATHI's

    def lab(self, setup: Setup) -> CostLab:
        """The lab of the system."""
        cost = self.system.cost(setup.cpu_s) if self.system else A6000_13B
        return CostLab(cost, setup=setup)

    @property
    def ids(self) -> str:
        """The ids of the claims."""
        return ", ".join(claim_id for claim in self.claims for claim_id in claim.ids)


EXPERIMENTS = {
    "sarathi": Experiment(
        [
            batches.s_f8,
            phases.s_f7,
            phases.s_f3,
            phases.s_f4a,
            clusters.s_4_2,
            clusters.s_4_3_1,
        ]
    ),
    "serving": Experiment(
        [clusters.ss_t3, clusters.ss_3_3, clusters.ss_f6, clusters.ss_f9c, batches.ss_f14],
        system=YI_34B,
    ),
    "throughput": Experiment(
        [
            offline.s_t4,
            clusters.s_t4b,
            offline.s_f9,
            offline.s_f11b,
            offline.s_f11,
            batches.s_f13,
            offline.s_f13c,
        ]
    ),
    "bubbles": Experiment([clusters.ss_f8]),
    "pipeline": Experiment([clusters.s_f12]),
    "capacity": Experiment([capacities.ss_f10b, capacities.ss_f11]),
    "slo": Experiment([capacities.ss_f12b]),
    "nodes": Experiment([capacities.ss_f13]),
    "ablation": Experiment([capacities.ss_t4b]),
    "pools": Experiment([pools.d_f1]),
    "post": Experiment([capacities.b_7b]),
}
