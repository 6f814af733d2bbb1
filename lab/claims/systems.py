"""The papers' systems: models on machines, as cost models.

S is SARATHI, SS is Sarathi-Serve. Read first: lab/simulator/cost_model.py. Read next: jobs.py,
cost_lab.py."""

from dataclasses import dataclass, field, replace
from typing import Any

from lab.simulator.cost_model import CostModel

# SARATHI's code on one GPU, nanoGPT's, takes 4 ms of CPU beside its operations. That is the average
# of what its Figure 7 leaves.
NANOGPT_CPU_S = 4e-3
# It calls attention for decodes apart from that for a chunk beside them (S-§4.3.1), which takes
# longer: three decodes add 5.2 ms to that of 1,021 prefill tokens, where four decodes alone take
# 5.68 ms (S-T2).
RIDING = (5.2 / 3) / (5.68 / 4)


def sarathi_code(cost: CostModel, riding: float = 1.0) -> CostModel:
    """A CostModel with the kernels of SARATHI's code. Its attention is xformers', which skips
    masked keys; the profile of an A100 is of Sarathi-Serve's, which does not."""
    return replace(cost, device=replace(cost.device, riding=riding, skips_masked=True))


def nanogpt_on_one_gpu(preset: str, device: str) -> CostModel:
    """The CostModel of SARATHI's code on one GPU."""
    return sarathi_code(CostModel.named(preset, device, cpu_s=NANOGPT_CPU_S), RIDING)


A6000_13B = nanogpt_on_one_gpu("llama-13b", "a6000")
A100_33B = nanogpt_on_one_gpu("llama-33b", "a100-80gb")

GPT3_PIPELINE = sarathi_code(CostModel.named("gpt3-175b", tp=8, pp=8))  # S-F12
GPT3_REPLICA = sarathi_code(CostModel.named("gpt3-175b", tp=8))
GPT3_LAYER = sarathi_code(CostModel.named("gpt3-175b"))  # on one A100, S-§4.2
GPT3_MAX_LEN = 4096  # tokens of a request

MEASURED_PROMPT = 2047  # tokens of the prompt whose chunks ServingSystem.prefill_s has


def chunk_seconds(cost: CostModel, chunk: int) -> float:
    """The average time of a chunk of MEASURED_PROMPT without CPU time."""
    starts = range(0, MEASURED_PROMPT, chunk)
    chunks = [(0, start, min(chunk, MEASURED_PROMPT - start)) for start in starts]
    cpu_s = cost.pp * cost.cpu_s
    seconds = [cost.seconds([chunk]) - cpu_s for chunk in chunks]
    return sum(seconds) / len(seconds)


@dataclass(frozen=True)
class ServingSystem:
    """One of Sarathi-Serve's systems (SS-T1, SS-§5). GPUs are joined in pairs by NVLink, so that
    four or eight talk through PCIe."""

    name: str
    preset: str  # a name in GEOMETRIES
    slos_s: dict[str, float]  # of P99 TBT (SS-T3)
    orca_batch: int  # that of the authors' scripts
    relaxed_budget: int = 2048  # tokens of sarathi-serve under the relaxed SLO
    machine: dict[str, Any] = field(default_factory=dict)  # of CostModel.named
    prefill_s: dict[int, float] = field(default_factory=dict)  # as measured: chunk -> its time

    def cost(self, cpu_s: float) -> CostModel:
        """The CostModel of this system with so much CPU time in each stage, and with prefills that
        take as long as measured where that is known."""
        cost = CostModel.named(self.preset, cpu_s=cpu_s, **self.machine)
        excess = []
        for chunk, measured_s in self.prefill_s.items():
            excess.append((chunk, measured_s - chunk_seconds(cost, chunk)))
        return replace(cost, measured_excess=tuple(excess))

    def servers(self, slo: str) -> dict[str, tuple[str, int]]:
        """The servers that are compared under the "strict" or the "relaxed" SLO (SS-§5.1): their
        policies, as run_plan takes them, and batch sizes."""
        budget = 512 if slo == "strict" else self.relaxed_budget
        return {
            "orca": ("orca", self.orca_batch),
            "vllm": ("vllm", 128),
            "sarathi-serve": (f"sarathi-serve:{budget}", 128),
        }


MISTRAL_7B = ServingSystem(
    name="Mistral-7B",
    preset="mistral-7b",
    slos_s={"strict": 0.1, "relaxed": 0.5},
    orca_batch=16,
)
YI_34B = ServingSystem(
    name="Yi-34B",
    preset="yi-34b",
    slos_s={"strict": 0.2, "relaxed": 1},
    orca_batch=16,
    machine={"tp": 2, "tp_link": "nvlink3-pair"},
    # The authors' data of Figure 14 (microsoft/sarathi-serve, osdi-experiments/figure-9): 435.7 ms
    # in chunks of 512, 444.2 in chunks of 1,024, 377.7 in one. The cost model alone has 394, 379
    # and 376. Why an iteration of 512 or 1,024 tokens takes longer there is open.
    prefill_s={512: 0.4357 / 4, 1024: 0.4442 / 2, 2048: 0.3777},
)
LLAMA2_70B = ServingSystem(
    name="LLaMA2-70B",
    preset="llama2-70b",
    slos_s={"strict": 1, "relaxed": 5},
    orca_batch=8,
    relaxed_budget=1536,
    machine={
        "device": "a40",
        "tp": 4,
        "pp": 2,
        "tp_link": "a40-pairs",
        "pp_link": "pcie4",
    },
)
FALCON_180B = ServingSystem(
    name="Falcon-180B",
    preset="falcon-180b",
    slos_s={"strict": 1, "relaxed": 5},
    orca_batch=8,
    machine={"tp": 4, "pp": 2, "tp_link": "nvlink3-pairs", "pp_link": "ethernet"},
)


def falcon_180b_without_pipeline(cpu_s: float) -> CostModel:
    """Falcon-180B with each layer on all eight GPUs of two nodes."""
    return CostModel.named("falcon-180b", tp=8, tp_link="ethernet", cpu_s=cpu_s)


def llama2_70b_on_h100(cpu_s: float) -> CostModel:
    """The system of the post: LLaMA2-70B on four H100."""
    return CostModel.named("llama2-70b", "h100", tp=4, cpu_s=cpu_s)
