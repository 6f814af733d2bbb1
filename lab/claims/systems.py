"""The papers' systems: models on machines, as cost models.

S is SARATHI, SS is Sarathi-Serve, B a post on schedulers, D DistServe. Read first:
lab/simulator/cost_model.py. Read next: labs.py."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lab.simulator.cost_model import CostModel

# SARATHI's code on one GPU, nanoGPT's, takes 4 ms of CPU beside its operations. That is the average
# of what its Figure 7 leaves.
NANOGPT_CPU_S = 4e-3
# It calls attention for decodes apart from that for a chunk beside them (S-§4.3.1), which takes
# longer: three decodes add 5.2 ms to that of 1,021 prefill tokens, where four decodes alone take
# 5.68 ms (S-T2).
RIDING = (5.2 / 3) / (5.68 / 4)
MEASURED_PROMPT = 2047  # tokens of the prompt whose chunks were measured, see with_prefills


@dataclass(frozen=True, eq=False)
class System:
    """A system of a paper. The last three are of Sarathi-Serve's (SS-T1, SS-T3, SS-§5)."""

    name: str
    cost: CostModel
    slos_s: Mapping[str, float] = field(default_factory=dict)  # of P99 TBT
    orca_batch: int = 128  # that of the authors' scripts
    relaxed_budget: int = 2048  # tokens of sarathi-serve under the relaxed SLO

    def server(self, name: str, slo: str) -> tuple[str, int]:
        """The policy, as run_plan takes it, and the batch of a server under an SLO (SS-§5.1)."""
        budget = 512 if slo == "strict" else self.relaxed_budget
        if name == "sarathi-serve":
            return f"{name}:{budget}", 128
        return name, self.orca_batch if name == "orca" else 128


def sarathi_code(cost: CostModel, riding: float = 1.0) -> CostModel:
    """A CostModel with the kernels of SARATHI's code. Its attention is xformers', which skips
    masked keys; the profile of an A100 is of Sarathi-Serve's, which does not."""
    return replace(cost, device=replace(cost.device, riding=riding, skips_masked=True))


def nanogpt_on_one_gpu(preset: str, device: str) -> CostModel:
    """The CostModel of SARATHI's code on one GPU."""
    return sarathi_code(CostModel.named(preset, device, cpu_s=NANOGPT_CPU_S), RIDING)


def with_prefills(cost: CostModel, measured_s: Mapping[int, float]) -> CostModel:
    """A CostModel whose prefills take as long as measured: {chunk: seconds of an average one}."""
    excess = []
    for size, seconds in measured_s.items():
        starts = range(0, MEASURED_PROMPT, size)
        chunks = [(0, start, min(size, MEASURED_PROMPT - start)) for start in starts]
        computed_s = sum(cost.seconds([chunk]) for chunk in chunks) / len(chunks)
        excess.append((size, seconds - computed_s))
    return replace(cost, measured_excess=tuple(excess))


A6000_13B = System("LLaMA-13B, A6000", nanogpt_on_one_gpu("llama-13b", "a6000"))
A100_33B = System("LLaMA-33B, A100", nanogpt_on_one_gpu("llama-33b", "a100-80gb"))
GPT3_LAYER = System("GPT-3, A100", sarathi_code(CostModel.named("gpt3-175b")))  # S-§4.2
GPT3_REPLICA = System("GPT-3, TP 8", sarathi_code(CostModel.named("gpt3-175b", tp=8)))
GPT3_PIPELINE = System("GPT-3, TP 8 x PP 8", sarathi_code(CostModel.named("gpt3-175b", tp=8, pp=8)))
GPT3_TWO_STAGES = System("GPT-3, TP 8 x PP 2", replace(GPT3_PIPELINE.cost, pp=2))

# GPUs are joined in pairs by NVLink, so that four or eight talk through PCIe.
MISTRAL_7B = System(
    name="Mistral-7B, A100",
    cost=CostModel.named("mistral-7b"),
    slos_s={"strict": 0.1, "relaxed": 0.5},
    orca_batch=16,
)
YI_34B = System(
    name="Yi-34B, two A100",
    # The authors' data of Figure 14 (microsoft/sarathi-serve, osdi-experiments/figure-9): 435.7 ms
    # in chunks of 512, 444.2 in chunks of 1,024, 377.7 in one. The cost model alone has 394, 379
    # and 376. Why an iteration of 512 or 1,024 tokens takes longer there is open.
    cost=with_prefills(
        CostModel.named("yi-34b", tp=2, tp_link="nvlink3-pair"),
        {512: 0.4357 / 4, 1024: 0.4442 / 2, 2048: 0.3777},
    ),
    slos_s={"strict": 0.2, "relaxed": 1},
    orca_batch=16,
)
LLAMA2_70B = System(
    name="LLaMA2-70B, eight A40",
    cost=CostModel.named("llama2-70b", "a40", tp=4, pp=2, tp_link="a40-pairs", pp_link="pcie4"),
    slos_s={"strict": 1, "relaxed": 5},
    orca_batch=8,
    relaxed_budget=1536,
)
FALCON_180B = System(
    name="Falcon-180B, eight A100",
    cost=CostModel.named("falcon-180b", tp=4, pp=2, tp_link="nvlink3-pairs", pp_link="ethernet"),
    slos_s={"strict": 1, "relaxed": 5},
    orca_batch=8,
)
FALCON_180B_TP_8 = replace(  # each layer on all eight GPUs of two nodes
    FALCON_180B, cost=CostModel.named("falcon-180b", tp=8, tp_link="ethernet")
)
H100_70B = System("LLaMA2-70B, four H100", CostModel.named("llama2-70b", "h100", tp=4))  # B-7
A100_13B = System("LLaMA-13B, A100", CostModel.named("llama-13b", "a100-80gb"))  # D-F1
