"""Attention over a hybrid batch: the one place where the batch is taken apart.

The linear layers of a hybrid batch see one matrix. Attention cannot: every request has its own keys
and values. A chunk [start, start + length) attends to its request's past, keys 0 … start - 1, and
causally to itself (SARATHI §4.2, Figure 6); a decode is a chunk of length 1.

There are two backends. Each is made once for a cache and makes a *plan* once per iteration: masks and
index tensors depend on the batch only, so they are not built again for each layer. A plan is a function

    attend(q, keys, values) -> out

    q, out         (num_tokens, n_head, head_dim), the rows of all chunks one after the other
    keys, values   (slots, n_kv_head, max_len, head_dim), one layer of the cache

Grouped-query attention: `group = n_head // n_kv_head` consecutive query heads share one KV head.

Read next: model.py, which calls the plan.
"""

import importlib.util
import warnings
from typing import NamedTuple

import torch
import torch.nn.functional as F

QUERY_BLOCK = 128  # queries per call on a CPU: a block skips the keys that lie after its last query


class Extent(NamedTuple):
    """Where a chunk's keys lie: slot `slot` of the cache, positions 0 … start + length - 1."""

    slot: int
    start: int
    length: int


def make_attention(config, cache, backend="auto"):
    """The backend for a cache: `sdpa`, `xformers`, or `auto` (xformers on CUDA, sdpa elsewhere).

    Raises what `check_backend` raises, and ImportError if xformers was asked for and is missing.
    """
    check_backend(backend, cache.data.device)
    on_cuda = cache.data.is_cuda
    if backend == "auto":
        backend = "xformers" if on_cuda else "sdpa"
        if on_cuda and not importlib.util.find_spec("xformers"):
            warnings.warn("xformers is not installed: attention makes one call of torch per chunk, which is slower")
            backend = "sdpa"
    return XFormers(config, cache) if backend == "xformers" else SDPA(config, cache)


def check_backend(backend, device):
    """Raise ValueError for an unknown name, or for xformers anywhere but on CUDA."""
    if backend not in ("auto", "sdpa", "xformers"):
        raise ValueError(f"attention={backend!r}: must be 'auto', 'sdpa' or 'xformers'")
    if backend == "xformers" and device.type != "cuda":
        raise ValueError("attention='xformers': xformers has no CPU operator, use 'sdpa' or a CUDA device")


# -----------------------------------------------------------------------------------------------------
# everywhere: torch's scaled_dot_product_attention


def staircase(queries, past, group, dtype, device="cpu"):
    """The mask of every possible chunk, as an additive bias: 0 = attend, -inf = do not.

    Shape (queries * group, past + queries). Row i * group + g belongs to query i; column `past + i` is
    the query's own key. A chunk of `length` at `start` sees the window

        staircase[: length * group, past - start : past + length]

    of it, which is SARATHI's Figure 6 for that chunk with every row repeated for the group's heads.
    """
    column = torch.arange(past + queries, device=device) - past
    row = torch.arange(queries, device=device).repeat_interleave(group)
    bias = torch.zeros(queries * group, past + queries, dtype=dtype, device=device)
    return bias.masked_fill_(column > row[:, None], float("-inf"))


class SDPA:
    """One `scaled_dot_product_attention` call per chunk, or per block of QUERY_BLOCK queries of it.

    Each call reads exactly the keys it needs, as a view of the cache: no padding, no gathering. The query
    heads that share a KV head are folded into the query length, (length, n_kv_head, group, head_dim) ->
    (n_kv_head, length * group, head_dim), so keys and values are read once per group and not once per head.
    """

    def __init__(self, config, cache):
        self.group = config.n_head // config.n_kv_head
        self.past, self.device = cache.max_len, cache.data.device
        self.bias = staircase(min(QUERY_BLOCK, cache.max_len), self.past, self.group,
                              cache.data.dtype, self.device)

    def mask(self, start, length):
        """The additive mask of a block of queries, (length * group, start + length). None for a decode."""
        if length == 1:
            return None  # the last query sees every key
        window = self.bias[: length * self.group, self.past - start : self.past + length]
        return window.contiguous() if window.is_cuda else window  # CUDA kernels want aligned rows

    def plan(self, extents):
        """See the top of this file. `extents` are in the order of the rows of q."""
        blocks, row = [], 0
        for slot, start, length in extents:
            for offset in range(0, length, QUERY_BLOCK):
                n = min(QUERY_BLOCK, length - offset)
                blocks.append((slot, row + offset, n, start + offset + n, self.mask(start + offset, n)))
            row += length

        def attend(q, keys, values):
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            head_dim = q.shape[2]
            # torch's CPU kernel takes a slow path for a single query in 16 bits: computing it twice takes half the time
            twice = q.dtype in (torch.bfloat16, torch.float16) and not q.is_cuda
            for slot, row, n, kv_len, mask in blocks:
                folded = q[row : row + n].view(n, -1, self.group, head_dim).transpose(0, 1)
                folded = folded.reshape(1, -1, n * self.group, head_dim)  # (1, n_kv_head, n * group, head_dim)
                if twice and folded.shape[2] == 1:
                    folded = folded.expand(-1, -1, 2, -1)
                y = F.scaled_dot_product_attention(
                    folded, keys[slot, None, :, :kv_len], values[slot, None, :, :kv_len], attn_mask=mask)
                y = y[0, :, : n * self.group].unflatten(1, (n, self.group))  # (n_kv_head, n, group, head_dim)
                out[row : row + n].view(n, -1, self.group, head_dim).copy_(y.transpose(0, 1))
            return out

        return attend


# -----------------------------------------------------------------------------------------------------
# CUDA: xformers


class XFormers:
    """xformers' memory_efficient_attention: all decodes in one call, each longer chunk in one call.

    xformers sees the cache of a layer as one long sequence of slots * max_len keys. A block-diagonal mask
    with *gappy keys* says where in it each decode's keys begin and how many there are, so slots may lie in
    any order, with holes, and nothing is copied. Decodes go to Triton split-K, which cuts long keys
    into pieces so that a few decodes fill the GPU; where it does not run (float32, GPUs older than
    sm80), a decode is treated like any other chunk.
    """

    def __init__(self, config, cache):
        from xformers.ops import fmha  # imported only where it is used: it has no CPU operator

        self.fmha = fmha
        self.group = config.n_head // config.n_kv_head
        self.max_len, self.slots, self.device = cache.max_len, cache.slots, cache.data.device
        self.split_k = (cache.data.dtype in (torch.float16, torch.bfloat16)
                        and torch.cuda.get_device_capability(self.device) >= (8, 0))

    def plan(self, extents):
        """See the top of this file. Decodes must come first in `extents`."""
        decodes = 0
        if self.split_k:
            while decodes < len(extents) and extents[decodes].length == 1:
                decodes += 1
        if decodes:
            decode_mask = decode_bias(extents[:decodes], self.slots, self.max_len, self.device)
        chunks, row = [], decodes
        for slot, start, length in extents[decodes:]:
            chunks.append((row, row + length, slot * self.max_len, start + length, chunk_bias(length)))
            row += length

        def attend(q, keys, values):
            out = torch.empty_like(q)
            keys, values = self.merge(keys), self.merge(values)
            if decodes:
                out[:decodes] = self.call(q[:decodes], keys, values, decode_mask, self.fmha.triton_splitk.FwOp)
            for row, end, first_key, kv_len, mask in chunks:
                out[row:end] = self.call(q[row:end], keys[:, first_key : first_key + kv_len],
                                         values[:, first_key : first_key + kv_len], mask)
            return out

        return attend

    def merge(self, x):
        """(slots, n_kv_head, max_len, head_dim) -> (1, slots * max_len, n_kv_head, head_dim), a view."""
        return x.transpose(1, 2).flatten(0, 1)[None]

    def call(self, q, keys, values, mask, op=None):
        """One call: q (n, n_head, head_dim), keys and values (1, kv_len, n_kv_head, head_dim) -> like q."""
        n, n_head, head_dim = q.shape
        q = q[None]
        if self.group > 1:  # (1, length, n_kv_head, group, head_dim); a stride of 0 marks the shared KV head
            q = q.view(1, n, -1, self.group, head_dim)
            keys = keys.unsqueeze(3).expand(-1, -1, -1, self.group, -1)
            values = values.unsqueeze(3).expand(-1, -1, -1, self.group, -1)
        return self.fmha.memory_efficient_attention_forward(q, keys, values, attn_bias=mask, op=op).reshape(
            n, n_head, head_dim)


def chunk_bias(length):
    """xformers' mask of one chunk over its own keys: causal, aligned at the last key. None for a decode."""
    from xformers.ops.fmha.attn_bias import LowerTriangularFromBottomRightMask

    return LowerTriangularFromBottomRightMask() if length > 1 else None


def decode_bias(extents, slots, max_len, device="cpu"):
    """xformers' mask of a batch of decodes over the keys of all slots, (len(extents), slots * max_len)."""
    from xformers.ops.fmha.attn_bias import BlockDiagonalCausalWithOffsetGappyKeysMask

    return BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(
        q_seqlen=[1] * len(extents),
        kv_seqstarts=[extent.slot * max_len for extent in extents] + [slots * max_len],
        kv_seqlen=[extent.start + 1 for extent in extents],
        device=torch.device(device))
