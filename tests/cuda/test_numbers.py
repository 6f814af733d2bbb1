"""Every policy on CUDA, held against a plain float64 prefill on the CPU. This needs a GPU."""

import random

import pytest
import torch

from engine import Engine
from policies import POLICIES
from sampling import SamplingParams, sample
from test_equivalence import in_dtype, prefill
from tests.helpers import tiny_model

pytestmark = [
    pytest.mark.cuda_device,
    pytest.mark.filterwarnings("error:.*without CUDA graphs"),
]

DEVICE = "cuda"
MAX_LEN = 720
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
PROMPT_LENGTHS = [1, 30, 7, 150, 700, 260, 300, 12, 650, 3]
PARAMS = [
    SamplingParams(6, logprobs=True),
    SamplingParams(9, temperature=0.7, top_k=5, logprobs=True),
    SamplingParams(9, temperature=1.0, top_p=0.5, logprobs=True),
    SamplingParams(9, temperature=2.0, logprobs=True),
]
GEOMETRIES = [  # n_head, n_kv_head, head_dim
    (4, 4, 64),
    (4, 1, 64),
    (16, 2, 128),
]
CASES = [  # attention, dtype, page_size
    ("sdpa", torch.float32, 720),
    ("sdpa", torch.float32, 16),
    ("sdpa", torch.bfloat16, 720),
    ("sdpa", torch.bfloat16, 64),
    ("xformers", torch.bfloat16, 720),
    ("xformers", torch.bfloat16, 64),
    ("xformers", torch.float16, 64),
    ("xformers", torch.float16, 128),
    ("xformers-split-k", torch.bfloat16, 720),
    ("flash", torch.bfloat16, 720),
    ("flash", torch.bfloat16, 256),
    ("flash", torch.float16, 720),
    ("auto", torch.bfloat16, 64),
]


def reference_model(geometry, dtype):
    """A float64 model whose weights are numbers of `dtype`."""
    n_head, n_kv_head, head_dim = geometry
    model = tiny_model(
        n_head=n_head,
        n_kv_head=n_kv_head,
        head_dim=head_dim,
        max_positions=1024,
    )
    for p in model.parameters():  # of a size that attention decides on the outcome
        p.copy_((p / 3 if p.ndim > 1 else p).to(dtype))
    return model


def serve(model, policy, attention, page_size):
    """The requests that begin with one text, after they were served."""
    pages = 9 * -(-MAX_LEN // page_size)
    has_small_pages = page_size < MAX_LEN
    engine = Engine(
        model,
        policy=policy,
        attention=attention,
        chunk=200,
        max_batch=9,
        max_len=MAX_LEN,
        page_size=page_size,
        pages=pages * 2 // 3 if has_small_pages else pages,  # some are preempted
        prefix_caching=has_small_pages,
        policy_options={"tbt_slo": 1.0} if policy == "dynamic" else {},
    )
    engine.runner.cache.data.fill_(float("nan"))  # nobody reads what was not written
    rng = random.Random(0)
    text = [rng.randrange(model.config.vocab_size) for _ in range(MAX_LEN)]
    prompts = [text[:n] for n in PROMPT_LENGTHS]
    params = [PARAMS[i % len(PARAMS)] for i in range(len(prompts))]
    return engine.generate(prompts, params, progress=False)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("attention, dtype, page_size", CASES)
def test_cuda_equals_cpu(geometry, attention, dtype, page_size):
    torch.backends.cuda.matmul.allow_tf32 = False
    reference = reference_model(geometry, dtype)
    model = in_dtype(reference, dtype, DEVICE)
    for policy in POLICIES if geometry == (4, 4, 64) else ("sarathi-serve", "vllm"):
        for request in serve(model, policy, attention, page_size):
            logits = prefill(reference, request.tokens)
            rows = logits.log_softmax(dim=-1)[request.prompt_len - 1 : -1]
            expected = rows.gather(1, torch.tensor(request.output)[:, None])[:, 0].tolist()
            assert request.logprobs == pytest.approx(expected, rel=0, abs=TOLERANCE[dtype]), policy


def test_cuda_draws_the_tokens_of_the_cpu():
    logits = torch.randn(200, 5000, generator=torch.Generator().manual_seed(0))
    ways = [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.0, 0, 0.5), (2.0, 2000, 0.9)] * 50
    params = [SamplingParams(1, *way, seed=seed) for seed, way in enumerate(ways)]
    tokens, _ = sample(logits, params, range(200))
    on_device, _ = sample(logits.to(DEVICE), params, range(200))
    assert on_device.tolist() == tokens.tolist()
