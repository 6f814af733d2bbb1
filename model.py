"""GPT-2 and LLaMA in one file, over a hybrid batch and a preallocated KV cache.

The model knows tokens, positions and pages. It does not know requests, policies or time.

    batch = FlatBatch.build([Span(pages=[0], start=0, tokens=[...]), ...], attention)
    logits = model(batch, cache)

`FlatBatch` lays prefill chunks and decodes side by side as the rows of one matrix. Every linear layer
multiplies that one matrix: its weights are read once for the chunk and for all decodes that ride with
it. This is SARATHI's fused linear path (§4.3.1, "we fuse all the linear operations, while letting the
attention computations for the prefill and decodes happen separately"). The linear layers are called as in SARATHI's
Table 1: preproj, postproj, ffn_ln1, ffn_ln2.

Read first: kv_cache.py and attention.py. Read next: sampling.py and engine.py.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from attention import Extent
from kv_cache import cells

# -----------------------------------------------------------------------------------------------------
# configuration


@dataclass(frozen=True)
class RopeScaling:
    """LLaMA 3's frequency scaling (`rope_type: llama3` in a config.json), for contexts longer than trained."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class GPTConfig:
    """The geometry of a model. Raises ValueError, naming the field, where it makes no sense.

    `family` is "gpt2" (LayerNorm, learned positions, GELU, biases) or "llama" (RMSNorm, RoPE, SwiGLU).
    `n_kv_head`, `head_dim` and `n_inner` default to n_head, n_embd // n_head and 4 * n_embd.
    """

    family: str = "llama"
    vocab_size: int = 32000
    n_layer: int = 32
    n_head: int = 32
    n_embd: int = 4096
    n_kv_head: int | None = None
    head_dim: int | None = None
    n_inner: int | None = None
    max_positions: int = 2048
    norm_eps: float = 1e-5
    qkv_bias: bool = False  # GPT-2 has biases everywhere in any case
    tie_embeddings: bool = False
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None

    def __post_init__(self):
        for field, default in (("n_kv_head", self.n_head), ("head_dim", self.n_embd // max(self.n_head, 1)),
                               ("n_inner", 4 * self.n_embd)):
            if getattr(self, field) is None:
                object.__setattr__(self, field, default)
        if self.family not in ("gpt2", "llama"):
            raise ValueError(f"family={self.family!r}: must be 'gpt2' or 'llama'")
        for field in ("vocab_size", "n_layer", "n_head", "n_embd", "n_kv_head", "head_dim", "n_inner", "max_positions"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)}: must be at least 1")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_kv_head={self.n_kv_head}: must divide n_head={self.n_head}")
        if self.family == "llama" and self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: must be even, RoPE rotates pairs")

    @classmethod
    def preset(cls, name, **changes):
        """A geometry by name (see PRESETS), with some fields changed. Raises ValueError if unknown."""
        if name not in PRESETS:
            raise ValueError(f"preset={name!r}: must be one of {', '.join(PRESETS)}")
        return replace(PRESETS[name], **changes)

    def num_params(self):
        """How many numbers the model holds; a tied embedding counts once."""
        with torch.device("meta"):
            return sum(p.numel() for p in GPT(self, device="meta", seed=None).parameters())


def _gpt2(n_layer, n_head, n_embd):
    return GPTConfig("gpt2", 50257, n_layer, n_head, n_embd, max_positions=1024, tie_embeddings=True)


def _llama1(n_layer, n_head, n_embd, n_inner):
    return GPTConfig("llama", 32000, n_layer, n_head, n_embd, n_inner=n_inner, norm_eps=1e-6)


# Published geometries, but for llama-tiny and llama-160m, which are this repository's own.
PRESETS = {
    "llama-tiny": GPTConfig("llama", 256, 2, 4, 64, n_kv_head=2, n_inner=192, tie_embeddings=True),  # to try things out
    "gpt2": _gpt2(12, 12, 768),
    "gpt2-medium": _gpt2(24, 16, 1024),
    "gpt2-large": _gpt2(36, 20, 1280),
    "gpt2-xl": _gpt2(48, 25, 1600),
    # The default where there is no GPU. Wide and shallow, with grouped heads of 128 and a vocabulary of bytes, so that
    # attention and the output head take about the share of an iteration that they take in a large model.
    "llama-160m": GPTConfig("llama", 256, 6, 12, 1536, n_kv_head=2, n_inner=4608, max_positions=8192,
                            tie_embeddings=True),
    "llama-7b": _llama1(32, 32, 4096, 11008),
    "llama-13b": _llama1(40, 40, 5120, 13824),
    "llama-33b": _llama1(60, 52, 6656, 17920),
    "llama-65b": _llama1(80, 64, 8192, 22016),
    "codellama-34b": GPTConfig("llama", 32000, 48, 64, 8192, n_kv_head=8, n_inner=22016, max_positions=16384,
                               rope_theta=1000000.0),
    "llama2-70b": GPTConfig("llama", 32000, 80, 64, 8192, n_kv_head=8, n_inner=28672, max_positions=4096),
    "llama3-8b": GPTConfig("llama", 128256, 32, 32, 4096, n_kv_head=8, n_inner=14336, max_positions=8192,
                           rope_theta=500000.0),
    # Mistral 7B v0.1 attends to the last 4,096 positions only; up to there it is a LLaMA.
    "mistral-7b": GPTConfig("llama", 32000, 32, 32, 4096, n_kv_head=8, n_inner=14336, max_positions=4096),
    "yi-34b": GPTConfig("llama", 64000, 60, 56, 7168, n_kv_head=8, n_inner=20480, max_positions=4096,
                        rope_theta=5000000.0),
}

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}  # for command lines

# -----------------------------------------------------------------------------------------------------
# the batch


class Span(NamedTuple):
    """A chunk as the model sees it: `tokens` are the request's tokens start, start + 1, …, `pages` its block table."""

    pages: list
    start: int
    tokens: list
    wants_logits: bool = True  # whether the logits after its last token are needed


class FlatBatch(NamedTuple):
    """A hybrid batch as one row per token, with everything that depends on the batch but not on the layer."""

    tokens: torch.Tensor  # (num_tokens,)
    positions: torch.Tensor  # (num_tokens,)
    cells: torch.Tensor  # (num_tokens,), where keys and values go, see kv_cache.py
    logit_rows: torch.Tensor  # (num_logits,), in the order in which the spans were given
    attend: object  # the attention plan, see attention.py

    @classmethod
    def build(cls, spans, attention):
        """Flatten `spans`, decodes first, and copy the result to the device at once.

        `attention` is a backend of attention.py, made for the cache that the batch will be run on. No page
        may appear in two spans.
        """
        tokens, positions, written, extents, last_row = [], [], [], [], {}
        # decodes first: xformers computes them in one call
        for i in sorted(range(len(spans)), key=lambda i: len(spans[i].tokens) > 1):
            pages, start, new, _ = spans[i]
            tokens += new
            positions += range(start, start + len(new))
            written += cells(pages, attention.page_size, start, start + len(new))
            extents.append(Extent(pages, start, len(new)))
            last_row[i] = len(tokens) - 1
        logit_rows = [last_row[i] for i, span in enumerate(spans) if span.wants_logits]
        flat = torch.tensor(tokens + positions + written + logit_rows).to(attention.device, non_blocking=True)
        return cls(*flat.split([len(tokens)] * 3 + [len(logit_rows)]), attention.plan(extents))


# -----------------------------------------------------------------------------------------------------
# the model


def rope_frequencies(config):
    """The angle per position of each pair of dimensions, float64, (head_dim / 2,).

    With `rope_scaling`, LLaMA 3's rule: wavelengths longer than the trained context are stretched by
    `factor`, those much shorter are kept, and those in between are interpolated.
    """
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequency = config.rope_theta**-exponent
    if config.rope_scaling is None:
        return frequency
    s = config.rope_scaling
    periods = s.original_max_positions * frequency / (2 * math.pi)  # full turns within the trained context
    keep = ((periods - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(0, 1)
    return frequency * (keep + (1 - keep) / s.factor)


def rope_table(config, device, dtype):
    """cos and sin of every position, (max_positions, 2, 1, head_dim / 2), at least float32."""
    angles = torch.outer(torch.arange(config.max_positions, dtype=torch.float64), rope_frequencies(config))
    table = torch.stack([angles.cos(), angles.sin()], dim=1).unsqueeze(2)
    return table.to(device=device, dtype=torch.promote_types(dtype, torch.float32))


def rotate(x, cos, sin):
    """RoPE. x (num_tokens, heads, head_dim); cos and sin (num_tokens, 1, head_dim / 2).

    Dimension i is paired with i + head_dim / 2, as in checkpoints in the Hugging Face format.
    """
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Block(nn.Module):
    """One transformer layer: `project`, then attention over the cache, then `finish`."""

    def __init__(self, config, **factory):
        super().__init__()
        self.config = config
        bias = config.family == "gpt2"
        qkv_heads = config.n_head + 2 * config.n_kv_head
        ffn_in = config.n_inner if bias else 2 * config.n_inner  # SwiGLU: gate and up in one matrix
        self.attn_norm = _norm(config, **factory)
        self.preproj = nn.Linear(config.n_embd, qkv_heads * config.head_dim, bias or config.qkv_bias, **factory)
        self.postproj = nn.Linear(config.n_head * config.head_dim, config.n_embd, bias, **factory)
        self.ffn_norm = _norm(config, **factory)
        self.ffn_ln1 = nn.Linear(config.n_embd, ffn_in, bias, **factory)
        self.ffn_ln2 = nn.Linear(config.n_inner, config.n_embd, bias, **factory)

    def project(self, x, rope=None):
        """x (num_tokens, n_embd) -> q (num_tokens, n_head, head_dim), k and v (num_tokens, n_kv_head, head_dim)."""
        n_head, n_kv_head = self.config.n_head, self.config.n_kv_head
        qkv = self.preproj(self.attn_norm(x)).view(len(x), -1, self.config.head_dim)
        qk, v = qkv.split([n_head + n_kv_head, n_kv_head], dim=1)
        if rope is not None:
            qk = rotate(qk, *rope.unbind(1))
        q, k = qk.split([n_head, n_kv_head], dim=1)
        return q, k, v

    def finish(self, x, y):
        """The rest of the layer. x (num_tokens, n_embd), y (num_tokens, n_head, head_dim) -> like x."""
        x = x + self.postproj(y.flatten(1))
        h = self.ffn_ln1(self.ffn_norm(x))
        if self.config.family == "gpt2":
            h = F.gelu(h, approximate="tanh")
        else:
            gate, up = h.chunk(2, dim=-1)
            h = F.silu(gate) * up
        return x + self.ffn_ln2(h)


def _norm(config, **factory):
    cls = nn.LayerNorm if config.family == "gpt2" else nn.RMSNorm
    return cls(config.n_embd, eps=config.norm_eps, **factory)


# The rows of a long prefill go through a layer in pieces. A CPU's allocator returns blocks of over 32 MB to the system,
# and new ones mean page faults; smaller activations are kept and used again. On CUDA it only bounds their memory.
ROWS_PER_PIECE = {"cpu": 1024, "cuda": 8192}


def _by_rows(function, *tensors):
    """function(*tensors), a tensor or a tuple, computed in pieces. It must treat rows independently."""
    most = ROWS_PER_PIECE.get(tensors[0].device.type, 8192)
    if len(tensors[0]) <= most:
        return function(*tensors)
    parts = [function(*rows) for rows in zip(*(tensor.split(most) for tensor in tensors))]
    if isinstance(parts[0], tuple):
        return tuple(torch.cat(columns) for columns in zip(*parts))
    return torch.cat(parts)


class GPT(nn.Module):
    """A GPT-2 or LLaMA that computes hybrid batches."""

    def __init__(self, config, device="cpu", dtype=torch.float32, seed=0):
        """A model with random weights, or with memory that is not filled if `seed` is None.

        The weights are made in `dtype` on `device`: there is never a second copy of them.
        """
        super().__init__()
        self.config = config
        factory = dict(device="meta", dtype=dtype)
        self.token_embedding = nn.Embedding(config.vocab_size, config.n_embd, **factory)
        if config.family == "gpt2":
            self.position_embedding = nn.Embedding(config.max_positions, config.n_embd, **factory)
        self.blocks = nn.ModuleList(Block(config, **factory) for _ in range(config.n_layer))
        self.final_norm = _norm(config, **factory)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False, **factory)
        if config.tie_embeddings:
            self.head.weight = None  # it would be allocated only to be replaced
        self.to_empty(device=device)
        if config.tie_embeddings:
            self.head.weight = self.token_embedding.weight
        self.requires_grad_(False)
        self.rope = rope_table(config, device, dtype) if config.family == "llama" else None
        if seed is not None:
            self._init_weights(torch.Generator(device).manual_seed(seed))

    def _init_weights(self, generator):
        # GPT-2's rule: normal(0, 0.02), scaled down where a layer adds to the residual stream
        for name, p in self.named_parameters():
            if p.ndim == 1:
                p.fill_(1.0 if name.endswith("norm.weight") else 0.0)
            else:
                residual = name.endswith(("postproj.weight", "ffn_ln2.weight"))
                p.normal_(0, 0.02 / math.sqrt(2 * self.config.n_layer) if residual else 0.02, generator=generator)

    @classmethod
    def from_pretrained(cls, name, device="cpu", dtype=torch.float32):
        """Load a checkpoint in the Hugging Face format: a local directory, or a name on the Hub.

        `max_positions` may be the checkpoint's sliding window. Raises ValueError for an unknown architecture, an
        unsupported option, or a tensor that is unknown or missing, FileNotFoundError where there is nothing to load.
        """
        import checkpoint

        directory = checkpoint.find(name)
        model = cls(checkpoint.read_config(directory), device, dtype, seed=None)
        checkpoint.load_weights(model, directory)
        return model

    def _apply(self, function, recurse=True):
        # model.to(...) and its like: the table follows to the device, but is never rounded to 16 bits
        super()._apply(function, recurse)
        if getattr(self, "rope", None) is not None:
            self.rope = rope_table(self.config, self.device, self.dtype)
        return self

    @property
    def device(self):
        """Where the weights are."""
        return self.head.weight.device

    @property
    def dtype(self):
        """What the weights are."""
        return self.head.weight.dtype

    def compile(self):
        """torch.compile each layer before and after attention: the operations between the products are fused."""
        for block in self.blocks:
            block.project = torch.compile(block.project, dynamic=True)
            block.finish = torch.compile(block.finish, dynamic=True)

    @torch.inference_mode()
    def forward(self, batch, cache):
        """Compute a FlatBatch, write its keys and values into `cache`, return logits (num_logits, vocab_size).

        There is one row of logits for each span that wants them, in the order of the spans.
        """
        x = self.token_embedding(batch.tokens)  # (num_tokens, n_embd)
        if self.config.family == "gpt2":
            x = x + self.position_embedding(batch.positions)
        rope = () if self.rope is None else (self.rope[batch.positions],)
        for layer, block in enumerate(self.blocks):
            q, k, v = _by_rows(block.project, x, *rope)
            cache.write(layer, k, v, batch.cells)
            x = _by_rows(block.finish, x, batch.attend(q, *cache.layer(layer)))
        return self.head(self.final_norm(x[batch.logit_rows]))
