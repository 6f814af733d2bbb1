"""Engines on a pretended GPU: every policy and backend serves, and waits once an iteration."""

import pytest
import torch

from attention.sdpa import SDPA
from engine import Engine
from model import GPT, GPTConfig
from policies import POLICIES
from sampling import SamplingParams
from tests.cuda.batches import CUDA_BACKENDS, reads_pages

pytestmark = [
    pytest.mark.cuda_build,
    pytest.mark.filterwarnings("ignore:.*which is slower"),  # auto, where its first choice cannot
    pytest.mark.filterwarnings("error:.*without CUDA graphs"),
]

MAX_LEN = 720
PAGES = {
    MAX_LEN: 3,
    256: 7,
    128: 12,
    64: 15,
    16: 60,
}  # by their size; one page for each request
SERVED = [  # backend, page_size
    (backend, page_size)
    for backend in ("auto", "sdpa", *CUDA_BACKENDS)
    for page_size in (MAX_LEN, 256, 64)
    if backend in ("auto", "sdpa") or reads_pages(backend, page_size, MAX_LEN)
]
OPTIONS = [dict(attention=attention, page_size=page_size) for attention, page_size in SERVED]
OPTIONS += [dict(policy=policy, page_size=n) for policy in POLICIES for n in (MAX_LEN, 64)]
OPTIONS += [dict(prefix_caching=True, page_size=n) for n in (256, 64)]
FAMILIES = [
    dict(family="gpt2", n_kv_head=4),
    dict(n_kv_head=4),
    dict(n_kv_head=1),
]
PARAMS = [
    SamplingParams(3, logprobs=True),
    SamplingParams(3, temperature=0.7, top_k=5),
    SamplingParams(3, temperature=1, top_p=0.5, logprobs=True),
    SamplingParams(3, temperature=2),
    SamplingParams(3),
]
PROMPTS = [[1] * n for n in (1, 30, 7, 150, 400)]


def new_model(family="llama", n_kv_head=2, dtype=torch.bfloat16, head_dim=64, **changes):
    """A model on the pretended GPU."""
    sizes = dict(
        vocab_size=61,
        n_layer=1,
        n_head=4,
        n_kv_head=n_kv_head,
        n_embd=4 * head_dim,
        n_inner=48,
        head_dim=head_dim,
        max_positions=1024,
    )
    return GPT(GPTConfig(family, **sizes | changes), "cuda", dtype)


def serve(gpu, model, policy="sarathi-serve", attention="auto", page_size=MAX_LEN, **options):
    """The engine that served five requests after it was warmed up.

    It must not wait for the GPU but once an iteration, to fetch its tokens, or see it end; and
    launch no Triton kernel that was not compiled in the warm-up."""
    engine = Engine(
        model,
        policy=policy,
        attention=attention,
        chunk=256,
        max_batch=3,
        max_len=MAX_LEN,
        page_size=page_size,
        pages=PAGES[page_size],
        policy_options={"tbt_slo": 1.0} if policy == "dynamic" else {},
        **options,
    )
    engine.warm_up()
    compiled = set(gpu.compiled)
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        engine.add_request(prompt, params)
    completions = []
    while engine.has_work:
        gpu.waits.clear()
        events = engine.step()
        completions += [event.request for event in events if event.finish_reason]
        (wait,) = gpu.waits
        assert wait.reason == ("tolist" if events else "synchronize")
        assert wait.place.startswith("runner.py:")
    assert sorted(len(completion.output) for completion in completions) == [3] * 5
    assert gpu.compiled == compiled
    return engine


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_policy_and_every_backend_serves(gpu, options):
    serve(gpu, new_model(), **options)


@pytest.mark.parametrize("attention", ["sdpa", *CUDA_BACKENDS])
@pytest.mark.parametrize("changes", FAMILIES, ids=str)
def test_every_family_serves_with_every_backend(gpu, changes, attention):
    serve(gpu, new_model(dtype=torch.float16, **changes), attention=attention)


@pytest.mark.parametrize("page_size", [MAX_LEN, 16])
def test_float32_is_served_by_torch(gpu, page_size):
    engine = serve(gpu, new_model(dtype=torch.float32), page_size=page_size)
    assert isinstance(engine.runner.attention, SDPA)


@pytest.mark.parametrize(
    "gpu",
    [
        (8, 6),
        (8, 9),
        (9, 0),
    ],
    indirect=True,
)
def test_newer_gpus_are_served(gpu):
    engine = serve(gpu, new_model(), page_size=64)
    assert not isinstance(engine.runner.attention, SDPA)
