"""torch's own FlashAttention over sequences of many lengths, on CUDA: a backend of attention/.

It calls the operator below `torch.nn.attention.varlen.varlen_attn`. That function asks for causal
masks in a way that keeps the kernel from folding the query heads of a decode that share a KV head.
It also fills a tensor of random state in each layer, which nothing reads here."""

from collections.abc import Sequence
from itertools import accumulate, chain, islice, takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from attention.plan import to_device
from config import GPTConfig
from fast.fallback import check_gpu, probe
from fast.padding import padded_tables
from kv_cache import FLASH_PAGE, KVCache
from request import Chunk


class Call(NamedTuple):
    """One call of the operator, for n chunks of one length or of several. Tensors are int32."""

    num_tokens: int  # rows of q, of all chunks
    max_q: int  # rows of the longest chunk
    cu_seqlens_q: Tensor  # (n + 1,), chunk i has rows cu_seqlens_q[i], ... before the next one's
    cu_seqlens_k: Tensor  # (n + 1,), the slot of chunk i's first key; 0 with block tables; and a 0
    seqused_k: Tensor  # (n,), the number of keys of chunk i
    block_table: Tensor | None  # (n, pages of max_len tokens), padded with 0; None: keys in a row


class FlashPlan(NamedTuple):
    """Attention for one batch, see plan.AttentionPlan."""

    calls: list[Call]
    page_size: int
    max_len: int

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of all rows of q; shapes as in AttentionPlan."""
        if len(self.calls) == 1:
            return self.attend(self.calls[0], q, keys, values)
        parts = []
        row = 0
        for call in self.calls:
            end = row + call.num_tokens
            parts.append(self.attend(call, q[row:end], keys, values))
            row = end
        return torch.cat(parts)

    def attend(self, call: Call, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of the rows of one call."""
        k = keys.transpose(0, 1)  # (slots, n_kv_head, head_dim)
        v = values.transpose(0, 1)
        if call.block_table is not None:
            k = k.unflatten(0, (-1, self.page_size))
            v = v.unflatten(0, (-1, self.page_size))
        return torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            call.cu_seqlens_q,
            call.cu_seqlens_k,
            call.max_q,
            self.max_len,  # only a bound: the same for every batch that a CUDA graph replays
            0.0,  # dropout
            True,  # causal, aligned at the last query and the last key of each chunk
            False,  # no debug mask
            seqused_k=call.seqused_k,
            block_table=call.block_table,
        )[0]


class Flash:
    """All decodes in one call, all longer chunks in another.

    The operator sees the cache of a layer as one long sequence of keys. With one page for each
    request it is told where in it each request's keys begin, and how many there are. With small
    pages it follows the block tables. Nothing is copied.

    For decodes it folds the query heads that share a KV head, and cuts the keys into pieces where
    there are too few decodes to fill the GPU. Without shared KV heads it does so only behind block
    tables. So decodes have them wherever the size of pages allows it."""

    def __init__(self, config: GPTConfig, cache: KVCache) -> None:
        """Raises ValueError for what is not supported, and whatever the operator raises."""
        self.device = cache.data.device
        self.page_size = cache.page_size
        self.max_len = cache.max_len
        self.paged = cache.page_size < cache.max_len
        check_gpu("flash", cache)
        if self.paged and cache.page_size % FLASH_PAGE:
            allowed = f"must be max_len or a multiple of {FLASH_PAGE} for attention='flash'"
            raise ValueError(f"page_size={cache.page_size}: {allowed}")
        if config.head_dim % 8 or config.head_dim > 256:
            raise ValueError(f"attention='flash': head_dim={config.head_dim} is not supported")
        probe(self, config, cache)

    def plan(self, chunks: Sequence[Chunk]) -> FlashPlan:
        """The plan of a batch, see plan.AttentionBackend."""
        decodes = list(takewhile(lambda chunk: chunk.length == 1, chunks))
        prefills = chunks[len(decodes) :]
        groups = [group for group in (decodes, prefills) if group]
        lists = []
        for group in groups:
            lists += self.call_numbers(group)
        numbers = list(chain.from_iterable(lists))
        on_device = to_device(numbers, self.device, torch.int32)  # all in one transfer
        tensors = iter(on_device.split([len(each) for each in lists]))
        calls = []
        for group in groups:
            lengths = [chunk.length for chunk in group]
            cu_seqlens_q, cu_seqlens_k, seqused_k, tables = islice(tensors, 4)
            call = Call(
                num_tokens=sum(lengths),
                max_q=max(lengths),
                cu_seqlens_q=cu_seqlens_q,
                cu_seqlens_k=cu_seqlens_k,
                seqused_k=seqused_k,
                block_table=tables.view(len(group), -1) if len(tables) else None,
            )
            calls.append(call)
        return FlashPlan(calls, self.page_size, self.max_len)

    def call_numbers(self, chunks: Sequence[Chunk]) -> list[list[int]]:
        """The numbers in the four tensors of a Call, in their order."""
        cu_seqlens_q = [0, *accumulate(chunk.length for chunk in chunks)]
        seqused_k = [chunk.end for chunk in chunks]
        is_decode = chunks[0].length == 1
        if not self.paged and not (is_decode and self.page_size % FLASH_PAGE == 0):
            starts = [chunk.pages[0] * self.page_size for chunk in chunks]
            return [cu_seqlens_q, [*starts, 0], seqused_k, []]
        tables = padded_tables(chunks, self.page_size, self.max_len)
        cu_seqlens_k = [0] * len(cu_seqlens_q)
        return [cu_seqlens_q, cu_seqlens_k, seqused_k, list(chain.from_iterable(tables))]
