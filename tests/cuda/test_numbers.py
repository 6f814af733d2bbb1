"""Every policy on CUDA, held against a plain float64 prefill on the CPU. This needs a GPU."""

import random
from typing import NamedTuple

import pytest
import torch

from engine import Engine
from policies import POLICIES
from sampling import SamplingParams, sample
from test_equivalence import in_dtype, prefill
from tests.helpers import tiny_model

MAX_LEN = 720
TOLERANCE = {
    torch.float32: 1e-3,
    torch.bfloat16: 0.1,
    torch.float16: 0.02,
}


GREEDY = [SamplingParams(6, logprobs=True)]
MIXED = [
    *GREEDY,
    SamplingParams(9, temperature=0.7, top_k=5, logprobs=True),
    SamplingParams(9, temperature=1.0, top_p=0.5, logprobs=True),
    SamplingParams(9, temperature=2.0, logprobs=True),
]


class Load(NamedTuple):
    """Some prompts, all of them beginnings of one text, and how they are served."""

    prompt_lengths: list[int]
    chunk: int
    max_batch: int
    params: list[SamplingParams]  # of the prompts, again and again
    prefix_caching: bool = False

    def params_of_each(self):
        """The params of each prompt."""
        return [self.params[i % len(self.params)] for i in range(len(self.prompt_lengths))]


FEW = Load(
    [1, 30, 7, 150, 700],
    chunk=48,
    max_batch=3,
    params=GREEDY,
)
MANY = Load(
    [1, 30, 7, 150, 700, 260, 300, 12, 650, 3],
    chunk=200,
    max_batch=9,
    params=MIXED,
)
LOADS = {
    "few": FEW,
    "many": MANY,
    "shared": MANY._replace(prefix_caching=True),
}
GEOMETRIES = {  # n_head, n_kv_head, head_dim
    "mha": (4, 4, 64),
    "gqa": (4, 2, 64),
    "mqa": (4, 1, 64),
    "groups of 8": (16, 2, 128),
}
ON_CUDA = [  # attention, dtype, page_size
    "sdpa float32 720",
    "sdpa float32 16",
    "sdpa bfloat16 720",
    "sdpa bfloat16 64",
    "xformers bfloat16 720",
    "xformers bfloat16 64",
    "xformers float16 64",
    "xformers float16 128",
    "xformers-split-k bfloat16 720",
    "flash bfloat16 720",
    "flash bfloat16 256",
    "flash float16 720",
    "auto bfloat16 64",
]
LOADS_OF = {
    "mha": ["few"],
    "gqa": ["few"],
    "mqa": ["few"],
    "groups of 8": ["many", "shared"],
}
CASES = [
    (geometry, load, case)
    for geometry, loads in LOADS_OF.items()
    for load in loads
    for case in ON_CUDA
    if load != "shared" or not case.endswith("720")  # prefixes are shared by small pages
]


def reference_model(geometry, dtype):
    """A float64 model whose weights are numbers of `dtype`."""
    n_head, n_kv_head, head_dim = GEOMETRIES[geometry]
    sizes = dict(
        n_head=n_head,
        n_kv_head=n_kv_head,
        head_dim=head_dim,
        max_positions=1024,
    )
    model = tiny_model(**sizes)
    for p in model.parameters():  # of a size that attention decides on the outcome
        p.copy_((p / 3 if p.ndim > 1 else p).to(dtype))
    return model


def serve(model, load, policy, attention, page_size):
    """The completions of a load."""
    pages = load.max_batch * -(-MAX_LEN // page_size)
    engine = Engine(
        model,
        policy=policy,
        attention=attention,
        chunk=load.chunk,
        max_batch=load.max_batch,
        max_len=MAX_LEN,
        page_size=page_size,
        pages=pages * 2 // 3 if page_size < MAX_LEN else pages,  # some are preempted
        prefix_caching=load.prefix_caching,
        policy_options={"tbt_slo": 1.0} if policy == "dynamic" else {},
    )
    engine.runner.cache.data.fill_(float("nan"))  # nobody reads what was not written
    rng = random.Random(0)
    text = [rng.randrange(model.config.vocab_size) for _ in range(MAX_LEN)]
    prompts = [text[:n] for n in load.prompt_lengths]
    return engine.generate(prompts, load.params_of_each(), progress=False)


def largest_difference(reference, completions):
    """Of the log probabilities of all chosen tokens, from those of a plain prefill."""
    differences = []
    for completion in completions:
        n = completion.prompt_len
        logits = prefill(reference, completion.prompt + completion.output)
        logprobs = logits.log_softmax(dim=-1)[n - 1 : -1]
        expected = logprobs.gather(1, torch.tensor(completion.output)[:, None])[:, 0]
        chosen = torch.tensor(completion.logprobs, dtype=torch.float64)
        assert not chosen.isnan().any()
        differences.append((chosen - expected).abs().max().item())
    return max(differences)


@pytest.mark.cuda_device
@pytest.mark.filterwarnings("error:.*without CUDA graphs")
@pytest.mark.parametrize("geometry, load, case", CASES)
def test_cuda_equals_cpu(geometry, load, case):
    attention, dtype_name, page_size = case.split()
    dtype = getattr(torch, dtype_name)
    torch.backends.cuda.matmul.allow_tf32 = False
    reference = reference_model(geometry, dtype)
    model = in_dtype(reference, dtype, "cuda")
    for policy in POLICIES if load == "few" else ("sarathi-serve", "vllm"):
        completions = serve(
            model,
            LOADS[load],
            policy,
            attention,
            int(page_size),
        )
        assert largest_difference(reference, completions) < TOLERANCE[dtype], policy


@pytest.mark.cuda_device
def test_cuda_draws_the_tokens_of_the_cpu():
    logits = torch.randn(200, 5000, generator=torch.Generator().manual_seed(0))
    ways = [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.0, 0, 0.5), (2.0, 2000, 0.9)] * 50
    params = [SamplingParams(1, *way, seed=seed) for seed, way in enumerate(ways)]
    tokens, _ = sample(logits, params, range(200))
    on_cuda, _ = sample(logits.cuda(), params, range(200))
    assert on_cuda.tolist() == tokens.tolist()
