"""Chunks in blocks of queries by torch's kernel: a backend for any device, float32 on a CPU first.

A block does not read the keys that lie behind its last query."""

from collections.abc import Sequence

import torch

from attention.plan import AttentionPlan
from attention.sdpa import SDPA
from config import GPTConfig
from kv_cache import KVCache
from request import Chunk

QUERY_BLOCK = 128


class Blocks(SDPA):
    """The plain backend, over the blocks of each chunk: each is a chunk itself."""

    def __init__(self, config: GPTConfig, cache: KVCache) -> None:
        super().__init__(config, cache)
        if cache.data.is_cuda:  # cuDNN plans for each new number of keys: for each decode
            torch.backends.cuda.enable_cudnn_sdp(False)

    def plan(self, chunks: Sequence[Chunk]) -> AttentionPlan:
        """The plan of a batch, see plan.AttentionBackend."""
        return super().plan([block for chunk in chunks for block in blocks_of(chunk)])


def blocks_of(chunk: Chunk) -> list[Chunk]:
    """The same tokens as chunks of up to QUERY_BLOCK."""
    blocks = []
    for start in range(chunk.start, chunk.end, QUERY_BLOCK):
        length = min(QUERY_BLOCK, chunk.end - start)
        blocks.append(Chunk(chunk.request, start, length))
    return blocks
