"""Geometries by name, as fields of model.GPTConfig: `GPTConfig.preset("llama-7b")`.

A field that is not given has GPTConfig's default: 32,000 tokens, 2,048 positions, as many KV heads
as heads."""

from typing import Any

GPT2: dict[str, Any] = {
    "family": "gpt2",
    "vocab_size": 50257,
    "max_positions": 1024,
    "tie_embeddings": True,
}

# Fields of GPTConfig by `model_type`, where they are not as its defaults say.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": {"family": "gpt2", "tie_embeddings": True},
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
}

# fmt: off
PRESETS: dict[str, dict[str, Any]] = {
    # This repository's own, to try things out.
    "llama-tiny": dict(n_layer=2, n_head=4, n_kv_head=2, n_embd=64, n_inner=192,
                       vocab_size=256, tie_embeddings=True),

    "gpt2": dict(n_layer=12, n_head=12, n_embd=768, **GPT2),
    "gpt2-medium": dict(n_layer=24, n_head=16, n_embd=1024, **GPT2),
    "gpt2-large": dict(n_layer=36, n_head=20, n_embd=1280, **GPT2),
    "gpt2-xl": dict(n_layer=48, n_head=25, n_embd=1600, **GPT2),

    # This repository's own, the default where there is no GPU. Wide and shallow, with grouped heads
    # of 128 and a vocabulary of bytes: attention and the output head take about the share of an
    # iteration that they take in a large model.
    "wide-160m": dict(n_layer=6, n_head=12, n_kv_head=2, n_embd=1536, n_inner=4608,
                      vocab_size=256, max_positions=8192, tie_embeddings=True),

    "llama-7b": dict(n_layer=32, n_head=32, n_embd=4096, n_inner=11008, norm_eps=1e-6),
    "llama-13b": dict(n_layer=40, n_head=40, n_embd=5120, n_inner=13824, norm_eps=1e-6),
    "llama-33b": dict(n_layer=60, n_head=52, n_embd=6656, n_inner=17920, norm_eps=1e-6),
    "llama-65b": dict(n_layer=80, n_head=64, n_embd=8192, n_inner=22016, norm_eps=1e-6),
    "codellama-34b": dict(n_layer=48, n_head=64, n_kv_head=8, n_embd=8192, n_inner=22016,
                          max_positions=16384, rope_theta=1e6),
    "llama2-70b": dict(n_layer=80, n_head=64, n_kv_head=8, n_embd=8192, n_inner=28672,
                       max_positions=4096),
    "llama3-8b": dict(n_layer=32, n_head=32, n_kv_head=8, n_embd=4096, n_inner=14336,
                      vocab_size=128256, max_positions=8192, rope_theta=5e5),
    # Mistral 7B v0.1 attends to the last 4,096 positions only; up to there it is a LLaMA.
    "mistral-7b": dict(n_layer=32, n_head=32, n_kv_head=8, n_embd=4096, n_inner=14336,
                       max_positions=4096),
    "yi-34b": dict(n_layer=60, n_head=56, n_kv_head=8, n_embd=7168, n_inner=20480,
                   vocab_size=64000, max_positions=4096, rope_theta=5e6),
}
# fmt: on
