"""Published geometries by name: `GPTConfig.preset("llama-7b")`. Read next: checkpoints.py."""

from model import GPTConfig


def _gpt2(n_layer, n_head, n_embd):
    more = dict(max_positions=1024, tie_embeddings=True)
    return GPTConfig("gpt2", 50257, n_layer, n_head, n_embd, **more)


def _llama(n_layer, n_head, n_kv_head, n_embd, n_inner, max_positions, vocab_size=32000, **more):
    more |= dict(n_kv_head=n_kv_head, n_inner=n_inner, max_positions=max_positions)
    return GPTConfig("llama", vocab_size, n_layer, n_head, n_embd, **more)


# llama-tiny and llama-160m are this repository's own.
PRESETS = {
    "llama-tiny": _llama(2, 4, 2, 64, 192, 2048, 256, tie_embeddings=True),  # to try things out
    "gpt2": _gpt2(12, 12, 768),
    "gpt2-medium": _gpt2(24, 16, 1024),
    "gpt2-large": _gpt2(36, 20, 1280),
    "gpt2-xl": _gpt2(48, 25, 1600),
    # The default where there is no GPU. Wide and shallow, with grouped heads of 128 and a
    # vocabulary of bytes, so that attention and the output head take about the share of an
    # iteration that they take in a large model.
    "llama-160m": _llama(6, 12, 2, 1536, 4608, 8192, 256, tie_embeddings=True),
    "llama-7b": _llama(32, 32, 32, 4096, 11008, 2048, norm_eps=1e-6),
    "llama-13b": _llama(40, 40, 40, 5120, 13824, 2048, norm_eps=1e-6),
    "llama-33b": _llama(60, 52, 52, 6656, 17920, 2048, norm_eps=1e-6),
    "llama-65b": _llama(80, 64, 64, 8192, 22016, 2048, norm_eps=1e-6),
    "codellama-34b": _llama(48, 64, 8, 8192, 22016, 16384, rope_theta=1e6),
    "llama2-70b": _llama(80, 64, 8, 8192, 28672, 4096),
    "llama3-8b": _llama(32, 32, 8, 4096, 14336, 8192, 128256, rope_theta=5e5),
    # Mistral 7B v0.1 attends to the last 4,096 positions only; up to there it is a LLaMA.
    "mistral-7b": _llama(32, 32, 8, 4096, 14336, 4096),
    "yi-34b": _llama(60, 56, 8, 7168, 20480, 4096, 64000, rope_theta=5e6),
}
