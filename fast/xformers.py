"""FlashAttention and Triton split-K through xformers, on CUDA: a backend of attention/."""

import logging
import warnings
from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attention.plan import AttentionPlan, to_device
from config import GPTConfig
from fast.fallback import check_gpu, probe
from fast.padding import padded_size, padded_tables
from kv_cache import KVCache, slot_mapping
from request import Chunk, lone_chunk

CPU = torch.device("cpu")
PADDING = lone_chunk([0], 0, [0])  # a decode that attends to one key, the first of page 0


class Call(NamedTuple):
    """One call of an operator of xformers."""

    rows: slice  # of q
    mask: Any  # one of xformers.ops.fmha.attn_bias
    operator: Any  # one of xformers.ops.fmha
    slots: Tensor | None = None  # whose keys and values are copied side by side first
    padding: int = 0  # queries that are added, and whose outputs are cut off


class XFormers:
    """All decodes in one call, all longer chunks in another.

    xformers sees the cache of a layer as one long sequence of keys. With one page for each request
    a block-diagonal mask with *gappy keys* says where in it each request's keys begin and how many
    there are, so the pages may lie in any order, and nothing is copied. With `split_k` the decodes
    go to Triton split-K, which cuts the keys into pieces so that a few decodes fill the GPU.

    Their number is padded to one of few sizes, as Triton compiles a kernel for each.

    With small pages they go there in any case, with a *paged* mask, which follows the block tables.
    The kernel for chunks does not know these: the pages of the chunks' requests are copied side by
    side first, little beside what a chunk computes."""

    def __init__(self, config: GPTConfig, cache: KVCache, split_k: bool = False) -> None:
        """Raises ImportError without xformers, ValueError where its operators do not run."""
        self.cache = cache
        self.device = cache.data.device
        self.page_size = cache.page_size
        self.group = config.n_head // config.n_kv_head
        self.paged = cache.page_size < cache.max_len
        split_k = split_k or self.paged
        check_gpu("xformers", cache)
        if self.paged and cache.page_size % 64:
            raise ValueError(f"page_size={cache.page_size}: must be max_len or a multiple of 64")
        head_dims = (16, 32, 64, 128, 256) if split_k else range(8, 257, 8)
        if config.head_dim not in head_dims:
            raise ValueError(f"attention='xformers': head_dim={config.head_dim} is not supported")
        fmha = import_xformers()
        if fmha.flash.FLASH_VERSION == "0.0.0":
            raise ValueError("attention='xformers': this torch was built without FlashAttention")
        # The operators are applied directly: xformers' own dispatch refuses them all when its C++
        # extension was built for another torch, though torch's FlashAttention and Triton need none.
        self.inputs = fmha.Inputs
        self.chunk_operator = fmha.flash.FwOp
        self.decode_operator = fmha.triton_splitk.FwOp if split_k else fmha.flash.FwOp
        self.pads_decodes = split_k  # Triton compiles a kernel for each number of decodes
        probe(self, config, cache)

    def plan(self, chunks: Sequence[Chunk]) -> AttentionPlan:
        """The plan of a batch, see plan.AttentionBackend."""
        decodes = list(takewhile(lambda chunk: chunk.length == 1, chunks))
        prefills = chunks[len(decodes) :]
        calls = []
        if decodes:
            calls.append(self.plan_decodes(decodes))
        if prefills:
            calls.append(self.plan_prefills(prefills, first_row=len(decodes)))
        return partial(self.attend, calls)

    def plan_decodes(self, decodes: Sequence[Chunk]) -> Call:
        """The call of some decodes, the first rows of q."""
        padding = 0
        if self.pads_decodes:
            padding = padded_size(len(decodes)) - len(decodes)
        padded = [*decodes, *padding * [PADDING]]
        if self.paged:
            mask = paged_bias(padded, self.page_size, self.cache.max_len, self.device)
        else:
            mask = gappy_bias(padded, self.cache.pages, self.page_size, self.device)
        rows = slice(len(decodes))
        return Call(rows, mask, self.decode_operator, padding=padding)

    def plan_prefills(self, chunks: Sequence[Chunk], first_row: int) -> Call:
        """The call of some longer chunks, the last rows of q. The mask may be that of a copy."""
        pages = self.cache.pages
        slots = None
        if self.paged:
            copied_pages: list[int] = []
            copied_chunks = []
            for chunk in chunks:
                copied_chunks.append(lone_chunk([len(copied_pages)], chunk.start, chunk.tokens))
                copied_pages += chunk.used_pages(self.page_size)
            chunks = copied_chunks
            pages = len(copied_pages)
            numbers = slot_mapping(copied_pages, self.page_size, 0, pages * self.page_size)
            slots = to_device(numbers, self.device)
        mask = gappy_bias(chunks, pages, self.page_size, self.device)
        return Call(slice(first_row, None), mask, self.chunk_operator, slots)

    def attend(
        self,
        calls: Sequence[Call],
        q: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """Attention of all rows of q, in the `calls` of a plan; shapes as in AttentionPlan."""
        parts = []
        for call in calls:
            q_rows = q[None, call.rows].unflatten(2, (-1, self.group))
            # q_rows (1, n, n_kv_head, group, head_dim)
            if call.padding:
                q_rows = F.pad(q_rows, 7 * [0] + [call.padding])
            k = self.merge(call, keys)
            v = self.merge(call, values)
            inputs = self.inputs(q_rows, k, v, attn_bias=call.mask)
            with torch.cuda.device_of(q):  # where Triton launches its kernels
                y, _ = call.operator.apply(inputs, needs_gradient=False)
            y = y[0, : y.shape[1] - call.padding]
            parts.append(y.reshape(-1, *q.shape[1:]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def merge(self, call: Call, x: Tensor) -> Tensor:
        """Keys or values (n_kv_head, slots, head_dim) -> (1, slots, n_kv_head, group, head_dim): a
        view, or some pages of them.

        Heads of a group are the same memory, with a stride of 0, which the operators recognise."""
        x = x.transpose(0, 1)
        if call.slots is not None:
            x = x.index_select(0, call.slots)
        return x[None, :, :, None].expand(-1, -1, -1, self.group, -1)


def import_xformers() -> Any:
    """xformers.ops.fmha, imported only where it is used. Raises ImportError.

    Its alarms are silenced: that extensions of its own cannot be loaded, of which none is used
    here, and that it calls Triton in deprecated ways."""
    logger = logging.getLogger("xformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from xformers.ops import fmha
    finally:
        logger.setLevel(level)
    return fmha


def gappy_bias(
    chunks: Sequence[Chunk],
    pages: int,
    page_size: int,
    device: torch.device = CPU,
) -> Any:
    """xformers' mask of some chunks over the keys of `pages` pages, (sum of their lengths, slots).

    Each chunk sees its own keys, from its first page on, causally, aligned at its last query."""
    from xformers.ops.fmha.attn_bias import BlockDiagonalCausalWithOffsetGappyKeysMask

    starts = [chunk.pages[0] * page_size for chunk in chunks]
    mask = BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(
        q_seqlen=[chunk.length for chunk in chunks],
        kv_seqstarts=[*starts, pages * page_size],
        kv_seqlen=[chunk.end for chunk in chunks],
        device=device,
    )
    # Only a bound, and Triton split-K compiles a kernel for each value: one, not one per decode.
    mask.k_seqinfo.max_seqlen = max(page_size, mask.k_seqinfo.max_seqlen)
    return mask


def paged_bias(
    decodes: Sequence[Chunk],
    page_size: int,
    max_len: int,
    device: torch.device = CPU,
) -> Any:
    """xformers' mask of some decodes over all pages, which it finds through their block tables."""
    from xformers.ops.fmha.attn_bias import PagedBlockDiagonalCausalWithOffsetPaddedKeysMask

    tables = padded_tables(decodes, page_size, max_len)  # Triton compiles one kernel for each width
    return PagedBlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
        q_seqlen=[1] * len(decodes),
        kv_seqlen=[chunk.end for chunk in decodes],
        block_tables=to_device(tables, device, torch.int32),
        page_size=page_size,
        device=device,
    )
