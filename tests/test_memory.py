"""Memory, sizes and weights, held against formulas of the papers and published sizes."""

from dataclasses import replace

import pytest
import torch

from config import EngineConfig, QueueFull, TooLong
from engine import Engine
from kv_cache import KVCache, kv_bytes_per_token
from model import GPT, GPTConfig
from runtime.memory import check_memory, free_bytes, pages_that_fit, small_page_size
from sampling import SamplingParams
from tests.helpers import finish, tiny_model

MODEL = tiny_model(n_kv_head=2)


@pytest.fixture
def let_be_free(monkeypatch):
    """Sets the memory that is free."""
    return lambda free: monkeypatch.setattr("runtime.memory.free_bytes", lambda device: free)


def test_kv_bytes_are_known_before_they_are_allocated():
    for pages, page_size, dtype in [(1, 7, torch.float64), (5, 40, torch.bfloat16)]:
        data = KVCache(MODEL.config, pages, page_size, dtype=dtype).data
        assert pages * page_size * kv_bytes_per_token(MODEL.config, dtype) == data.nbytes
    thirteen_b = GPTConfig.preset("llama-13b")  # 40 layers * 2 * 5,120 * 2 bytes
    assert kv_bytes_per_token(thirteen_b, torch.float16) == 819_200


def test_pages_that_fit_are_the_formula(let_be_free, monkeypatch):
    # LLaMA-13B, SARATHI §4.3.1: 40 layers, 5,120 wide, K and V, 2 bytes; 22 GB for them
    model = GPT(GPTConfig.preset("llama-13b"), "meta", torch.float16, seed=None)
    let_be_free(44 * 10**9)  # half is left
    assert pages_that_fit(model, 1024, 1024) == 26  # 22e9 / (819,200 * 1,024) = 26.2
    assert pages_that_fit(model, 2048, 16) == 1678
    let_be_free(10)
    with pytest.raises(ValueError):
        pages_that_fit(model, 2048, 16)
    let_be_free(30 * 10**9)
    monkeypatch.setattr(GPT, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 80 * 10**9))
    assert pages_that_fit(model, 1024, 1024) == 26  # a tenth of a GPU is for activations


def test_memory_is_asked_for_before_it_is_taken(monkeypatch):
    cpu = torch.device("cpu")
    check_memory("little", 2**20, cpu)
    with pytest.raises(ValueError):
        check_memory("much", 10**18, cpu)
    container = {"memory.max": "1000000", "memory.stat": "anon 400000\nfile 300000"}
    monkeypatch.setattr("runtime.memory.Path.read_text", lambda path: container[path.name])
    assert free_bytes(cpu) == 600000


def test_small_pages_are_those_that_attention_reads_fastest():
    sizes = {
        ("cpu", 4096): 64,
        ("cpu", 41): 21,
        ("cuda", 4096): 256,
        ("cuda", 510): 64,
    }
    for (device, max_len), size in sizes.items():
        assert small_page_size(max_len, device) == size
    engine = Engine(
        MODEL,
        prefix_caching=True,
        max_len=41,
        max_batch=2,
    )
    assert engine.scheduler.pages.page_size == 21


def test_without_a_batch_size_memory_decides(let_be_free):
    per_token = 2 * 2 * 2 * 8 * 8
    let_be_free(2 * (7 * 40 * per_token + 99))  # half of it is left to others
    engine = Engine(MODEL, max_len=40)
    assert engine.scheduler.max_batch == engine.runner.cache.pages == 7
    with pytest.raises(ValueError):
        Engine(MODEL, max_len=400)
    with pytest.raises(ValueError):
        Engine(MODEL, max_len=40, max_batch=1000)
    let_be_free(10**7)
    assert Engine(MODEL, max_len=4, page_size=2).scheduler.max_batch == 256  # however much there is


def test_sarathi_is_aligned_to_the_tile_on_cuda_only(monkeypatch):
    def budget(**options):
        sizes = dict(chunk=300, max_batch=3, max_len=400)
        engine = Engine(MODEL, policy="sarathi", policy_options=options, **sizes)
        return engine.scheduler.budget

    assert budget() == 300
    monkeypatch.setattr(GPT, "device", torch.device("cuda"))
    monkeypatch.setattr("engine.Runner", lambda *_: None)
    monkeypatch.setattr("runtime.memory.check_memory", lambda *_: None)
    assert budget() == 256
    assert budget(tile=64) == 256
    assert budget(tile=100) == 300


def test_random_weights_follow_gpt2():
    config = GPTConfig("gpt2", 512, 8, 4, 128)
    for name, p in GPT(config).named_parameters():
        if p.ndim == 1:
            assert (p == ("norm.weight" in name)).all()
        else:
            is_residual = name.endswith(("postproj.weight", "ffn_ln2.weight"))
            std = 0.02 / 4 if is_residual else 0.02  # 4 = sqrt(2 * 8 layers)
            assert p.std().item() == pytest.approx(std, rel=0.1)


PUBLISHED_SIZES = {
    "gpt2": 124e6,
    "gpt2-xl": 1558e6,
    "llama-7b": 6.74e9,
    "llama-13b": 13.02e9,
    "llama-33b": 32.5e9,
    "llama2-70b": 69.0e9,
    "llama3-8b": 8.03e9,
    "mistral-7b": 7.24e9,
    "yi-34b": 34.4e9,
}


@pytest.mark.parametrize("name, size", PUBLISHED_SIZES.items())
def test_presets_have_their_published_size(name, size):
    model = GPT(GPTConfig.preset(name), "meta", seed=None)
    parameters = sum(p.numel() for p in model.parameters())
    assert parameters == pytest.approx(size, rel=0.01)


def test_the_defaults_are_those_of_llama_7b_and_the_readme():
    config = replace(GPTConfig(), n_inner=11008, norm_eps=1e-6)
    assert config == GPTConfig.preset("llama-7b")
    assert not config.qk_norm
    assert EngineConfig().policy == "sarathi-serve"
    assert EngineConfig().chunk == 256


@pytest.mark.parametrize(
    "name, call",
    [
        ("n_layer", lambda: GPTConfig(n_layer=0)),
        ("n_kv_head", lambda: GPTConfig(n_head=4, n_kv_head=3)),
        ("head_dim", lambda: GPTConfig(head_dim=3)),  # RoPE turns pairs
        ("preset", lambda: GPTConfig.preset("llama-9b")),
        ("chunk", lambda: Engine(MODEL, chunk=0)),
        ("pages", lambda: Engine(MODEL, max_len=16, page_size=4, pages=3)),  # too few for max_len
        ("max_len", lambda: Engine(MODEL, max_len=10**6)),  # more than the model's positions
        ("policy", lambda: Engine(MODEL, policy="sarathi-serv", max_len=16)),
        ("max_new_tokens", lambda: SamplingParams(0)),
        ("temperature", lambda: SamplingParams(temperature=-0.1)),
        ("top_k", lambda: SamplingParams(top_k=-1)),
        ("top_p", lambda: SamplingParams(top_p=0.0)),
        ("top_p", lambda: SamplingParams(top_p=1.1)),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(name, call):
    with pytest.raises(ValueError, match=rf"^{name}\b"):
        call()


def test_a_refused_request_leaves_the_engine_as_it_was():
    engine = Engine(
        MODEL,
        chunk=4,
        max_batch=2,
        max_len=16,
        max_waiting=1,
    )
    kept = engine.add_request([1, 2], SamplingParams(3))
    for prompt in ([], [1, 61], "a text, and no tokenizer"):
        with pytest.raises(ValueError):
            engine.add_request(prompt, SamplingParams(3))
    with pytest.raises(TooLong):
        engine.add_request([1] * 9, SamplingParams(8))
    with pytest.raises(QueueFull):
        engine.add_request([1], SamplingParams(1))
    assert list(engine.scheduler.requests) == [kept]
    assert len(finish(engine)) == 3
