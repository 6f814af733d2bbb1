"""GPT-2 and LLaMA in one file, over a hybrid batch and a preallocated KV cache.

The model knows tokens, positions and pages. It does not know requests, policies or time.

    batch = FlatBatch.build(chunks, attention)
    logits = model(batch, cache)

`FlatBatch` lays prefill chunks and decodes side by side as the rows of one matrix. Every linear
layer multiplies that one matrix: its weights are read once for the chunk and for all decodes that
ride with it. This is SARATHI's fused linear path (§4.3.1, "we fuse all the linear operations, while
letting the attention computations for the prefill and decodes happen separately"). The linear
layers are called as in SARATHI's Table 1: preproj, postproj, ffn_ln1, ffn_ln2.

Read first: kv_cache.py and attention/. Read next: sampling.py."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from attention.plan import AttentionBackend, AttentionPlan, to_device
from config import GPTConfig
from kv_cache import KVCache, slot_mapping
from pretrained import checkpoints
from pretrained.random_weights import init_weights
from request import Chunk


class FlatBatch(NamedTuple):
    """A hybrid batch as one row per token: all that its layers share, made once."""

    tokens: Tensor  # (num_tokens,)
    positions: Tensor  # (num_tokens,)
    slot_mapping: Tensor  # (num_tokens,), where keys and values go, see kv_cache.py
    logit_rows: Tensor  # (num_logits,), in the order in which the chunks were given
    attend: AttentionPlan

    @classmethod
    def build(cls, chunks: Sequence[Chunk], attention: AttentionBackend) -> Self:
        """Flatten `chunks`, decodes first, and copy the result to the device at once.

        `attention` was made for the cache that the batch will be run on. No two chunks may write
        the same slot."""
        order = sorted(range(len(chunks)), key=lambda i: chunks[i].length > 1)
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        last_row = {}  # of each chunk
        for i in order:
            request, start, length = chunks[i]
            end = start + length
            tokens += request.tokens[start:end]
            positions += range(start, end)
            slots += slot_mapping(request.pages, attention.page_size, start, end)
            last_row[i] = len(tokens) - 1
        logit_rows = [last_row[i] for i, chunk in enumerate(chunks) if chunk.yields_token]
        flat = to_device(tokens + positions + slots + logit_rows, attention.device)
        sizes = [len(tokens), len(tokens), len(tokens), len(logit_rows)]
        return cls(*flat.split(sizes), attend=attention.plan([chunks[i] for i in order]))


class GPT(nn.Module):
    """A GPT-2 or LLaMA that computes hybrid batches."""

    def __init__(
        self,
        config: GPTConfig,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int | None = 0,
    ) -> None:
        """A model with random weights, or with memory that is not filled if `seed` is None.

        The weights are made in `dtype` on `device`: there is never a second copy of them."""
        super().__init__()
        self.config = config
        self.compiled = False  # see fast.compile_layers
        self.rope: Tensor | None = None  # a rope_table as long as a cache needs it
        with torch.device("meta"):  # memory comes below
            self.token_embedding = nn.Embedding(config.vocab_size, config.n_embd)
            if config.family == "gpt2":
                self.position_embedding = nn.Embedding(config.max_positions, config.n_embd)
            self.blocks: Any = nn.ModuleList(Block(config) for _ in range(config.n_layer))
            self.final_norm = new_norm(config)
            self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.to(dtype)
        self.allocate(device)
        if seed is not None:
            init_weights(self, seed)

    @classmethod
    def from_pretrained(
        cls, name: str, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> Self:
        """Load a checkpoint: a directory or a name on the Hub, as transformers takes it, or a GGUF
        file.

        `max_positions` may be its sliding window. Raises as checkpoints.read_config and
        load_weights."""
        model = cls(checkpoints.read_config(name), "meta", dtype, seed=None)
        checkpoints.load_weights(model, name, device)
        return model

    def allocate(self, device: torch.device | str) -> None:
        """Give all weights memory on this device, which is not filled."""
        self.to_empty(device=device)
        self.requires_grad_(False)
        self.tie()

    def tie(self) -> None:
        """Let head and embedding share their memory, if they are tied."""
        if self.config.tie_embeddings:
            self.head.weight = self.token_embedding.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.rope = None  # in to(...): it is made anew, and never rounded to 16 bits
        return super()._apply(fn, recurse)

    @torch.inference_mode()
    def forward(self, batch: FlatBatch, cache: KVCache) -> Tensor:
        """Compute a batch, write its keys and values into `cache`, return logits.

        (num_logits, vocab_size): a row for each chunk that yields a token, in their order."""
        x = self.compute_layers(self.embed(batch), batch, cache)
        return self.logits(x, batch)

    def embed(self, batch: FlatBatch) -> Tensor:
        """The first part of forward: (num_tokens, n_embd)."""
        x = self.token_embedding(batch.tokens)
        return x if self.config.family == "llama" else x + self.position_embedding(batch.positions)

    def compute_layers(self, x: Tensor, batch: FlatBatch, cache: KVCache) -> Tensor:
        """The second part, with attention: (num_tokens, n_embd) -> the same."""
        config = self.config
        inputs = []
        if config.family == "llama":
            if self.rope is None or len(self.rope) < cache.max_len:
                self.rope = rope_table(config, cache.max_len, self.device, self.dtype)
            inputs = [self.rope[batch.positions]]
        for layer, block in enumerate(self.blocks):
            qkv = block.project(x, *inputs)
            q, kv = qkv.split([config.n_head, 2 * config.n_kv_head], dim=1)
            cache.write(layer, kv, batch.slot_mapping)
            y = batch.attend(q, *cache.layer(layer))
            x = block.finish(x, y)
        return x

    def logits(self, x: Tensor, batch: FlatBatch) -> Tensor:
        """The last part: x (num_tokens, n_embd) -> (num_logits, vocab_size)."""
        return self.head(self.final_norm(x[batch.logit_rows]))

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.final_norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        return self.final_norm.weight.dtype


class Block(nn.Module):
    """One transformer layer: `project`, then attention over the cache, then `finish`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        bias = config.family == "gpt2"
        qkv_dim = (config.n_head + 2 * config.n_kv_head) * config.head_dim
        ffn_in = config.n_inner if bias else 2 * config.n_inner  # SwiGLU: gate and up in one matrix
        self.attn_norm = new_norm(config)
        self.preproj = nn.Linear(config.n_embd, qkv_dim, bias or config.qkv_bias)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(config.head_dim, config.norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim, config.norm_eps)
        self.postproj = nn.Linear(config.n_head * config.head_dim, config.n_embd, bias)
        self.ffn_norm = new_norm(config)
        self.ffn_ln1 = nn.Linear(config.n_embd, ffn_in, bias)
        self.ffn_ln2 = nn.Linear(config.n_inner, config.n_embd, bias)

    def project(self, x: Tensor, rope: Tensor | None = None) -> Tensor:
        """x (num_tokens, n_embd), rope (num_tokens, 2, 1, head_dim), rows of the rope_table
        -> q, k and v side by side, (num_tokens, n_head + 2 * n_kv_head, head_dim)."""
        n_head, n_kv_head = self.config.n_head, self.config.n_kv_head
        qkv = self.preproj(self.attn_norm(x)).view(len(x), -1, self.config.head_dim)
        if self.config.qk_norm:
            q, k, v = qkv.split([n_head, n_kv_head, n_kv_head], dim=1)
            qkv = torch.cat([self.q_norm(q), self.k_norm(k), v], dim=1)
        if rope is not None:
            rotate_(qkv[:, : n_head + n_kv_head], *rope.unbind(1))
        return qkv

    def finish(self, x: Tensor, y: Tensor) -> Tensor:
        """The rest of the layer: x (num_tokens, n_embd), y (num_tokens, n_head, head_dim) -> x."""
        x = self.postproj(y.flatten(1)).add_(x)
        h = self.ffn_ln1(self.ffn_norm(x))
        if self.config.family == "gpt2":
            h = F.gelu(h, approximate="tanh")
        else:
            gate, up = h.chunk(2, dim=-1)
            h = F.silu(gate).mul_(up)
        return self.ffn_ln2(h).add_(x)


def new_norm(config: GPTConfig) -> nn.LayerNorm | nn.RMSNorm:
    """The family's normalization of x (num_tokens, n_embd)."""
    if config.family == "gpt2":
        return nn.LayerNorm(config.n_embd, eps=config.norm_eps)
    return nn.RMSNorm(config.n_embd, eps=config.norm_eps)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """RoPE, in place: x (num_tokens, heads, head_dim), cos and sin (num_tokens, 1, head_dim).

    It is computed in the type of cos and sin. Dimension i is paired with i + head_dim / 2, as in
    checkpoints in the Hugging Face format."""
    x.copy_(torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin))


def rope_table(
    config: GPTConfig, positions: int, device: torch.device | str, dtype: torch.dtype
) -> Tensor:
    """The factors of `rotate_`, (positions, 2, 1, head_dim), at least float32.

    At every position there are the cosines of all angles, twice, and their sines, first negative.
    LLaMA 3's `rope_scaling` stretches wavelengths longer than the trained context by `factor`,
    keeps those much shorter, and interpolates between."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequency = config.rope_theta**-exponent  # (head_dim / 2,), the angle per position
    scaling = config.rope_scaling
    if scaling is not None:
        turns = scaling.original_max_positions * frequency / (2 * math.pi)  # in trained contexts
        low = scaling.low_freq_factor
        high = scaling.high_freq_factor
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = frequency * (keep + (1 - keep) / scaling.factor)
    position = torch.arange(positions, dtype=torch.float64)
    angle = torch.outer(position, frequency)
    cos = angle.cos()
    sin = angle.sin()
    table = torch.stack([torch.cat([cos, cos], 1), torch.cat([-sin, sin], 1)], dim=1).unsqueeze(2)
    return table.to(device=device, dtype=torch.promote_types(dtype, torch.float32))
