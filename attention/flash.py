"""torch's own FlashAttention over sequences of many lengths, on CUDA: a backend of attention/.

It calls the operator below `torch.nn.attention.varlen.varlen_attn`. That function asks for causal
masks in a way that keeps the kernel from folding the query heads of a decode that share a KV head.
It also fills a tensor of random state in each layer, which nothing reads here."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from attention.fallback import check_gpu, probe
from attention.plan import to_device
from kv_cache import KVCache
from pretrained.geometry import GPTConfig
from request import Chunk
from runtime.memory import FLASH_PAGE


class Call(NamedTuple):
    """One call of the operator, for n chunks of one length or of several. Tensors are int32."""

    num_tokens: int  # rows of q, of all chunks
    max_q: int  # rows of the longest chunk
    cu_seqlens_q: Tensor  # (n + 1,), chunk i has rows cu_seqlens_q[i], ... before the next one's
    cu_seqlens_k: Tensor  # (n + 1,), the slot of chunk i's first key; 0 with block tables; and a 0
    seqused_k: Tensor  # (n,), the number of keys of chunk i
    block_table: Tensor | None  # (n, pages of max_len tokens), padded with 0; None: keys in a row

    @classmethod
    def of(cls, chunks: Sequence[Chunk], tensors: Iterator[Tensor], paged: bool) -> "Call":
        """The call of these chunks. Takes four of the tensors: those of `call_numbers`."""
        lengths = [chunk.length for chunk in chunks]
        cu_seqlens_q, cu_seqlens_k, seqused_k, table = (next(tensors) for _ in range(4))
        block_table = table.view(len(chunks), -1) if paged else None
        return cls(sum(lengths), max(lengths), cu_seqlens_q, cu_seqlens_k, seqused_k, block_table)


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
        for call, rows in zip(self.calls, q.split([c.num_tokens for c in self.calls]), strict=True):
            parts.append(self.attend(call, rows, keys, values))
        return torch.cat(parts)

    def attend(self, call: Call, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of the rows of one call."""
        k, v = keys.transpose(0, 1), values.transpose(0, 1)  # (slots, n_kv_head, head_dim)
        if call.block_table is not None:
            k, v = k.unflatten(0, (-1, self.page_size)), v.unflatten(0, (-1, self.page_size))
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
        groups = [group for group in (decodes, chunks[len(decodes) :]) if group]
        paged = [self.reads_block_tables(group) for group in groups]
        arguments = []
        for group, is_paged in zip(groups, paged, strict=True):
            arguments += self.call_numbers(group, is_paged)
        flat = [number for numbers in arguments for number in numbers]
        on_device = to_device(flat, self.device, torch.int32)  # all in one transfer
        tensors = iter(on_device.split([len(numbers) for numbers in arguments]))
        calls = [
            Call.of(group, tensors, is_paged) for group, is_paged in zip(groups, paged, strict=True)
        ]
        return FlashPlan(calls, self.page_size, self.max_len)

    def reads_block_tables(self, chunks: Sequence[Chunk]) -> bool:
        """Whether the call of these chunks follows block tables."""
        decodes = chunks[0].length == 1
        return self.paged or (decodes and self.page_size % FLASH_PAGE == 0)

    def call_numbers(self, chunks: Sequence[Chunk], paged: bool) -> list[list[int]]:
        """The numbers in the four tensors of a Call, in their order."""
        width = -(-self.max_len // self.page_size)
        starts = [0] * len(chunks)
        tables: list[int] = []
        if paged:
            for chunk in chunks:
                pages = chunk.used_pages(self.page_size)
                tables += pages + [0] * (width - len(pages))
        else:
            starts = [chunk.pages[0] * self.page_size for chunk in chunks]
        cu_seqlens_q = list(accumulate((chunk.length for chunk in chunks), initial=0))
        return [cu_seqlens_q, [*starts, 0], [chunk.end for chunk in chunks], tables]
