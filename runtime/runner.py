"""A model with its cache, and all that makes it fast on this device.

    runner = Runner(model, pages=16, page_size=2048)
    logits = runner.forward(FlatBatch.build(chunks, runner.attention))
    tokens = runner.sample(logits, chunks)

Read first: engine.py, which calls it. Read next: cuda_graphs.py, packed_linear.py."""

import sys
from collections.abc import Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from attention import Flash, XFormers, check_backend, make_attention
from attention.decode_sizes import padded_sizes
from kv_cache import KVCache, kv_bytes_per_token
from model import GPT, FlatBatch
from request import Chunk
from runtime.cuda_graphs import DecodeGraphs
from runtime.lone_chunk import lone_chunk
from runtime.memory import check_memory
from runtime.packed_linear import pack
from sampling import SamplingParams, sample

Sampled = tuple[int, float | None]  # a token; its logprob, if a request in the batch wants it


class Runner:
    """Launches batches, and fetches their tokens. `forward` computes a FlatBatch: its logits."""

    def __init__(
        self,
        model: GPT,
        pages: int,
        page_size: int,
        max_len: int | None = None,
        attention: str = "auto",
    ) -> None:
        check_backend(attention, model.device)
        cache_bytes = pages * page_size * kv_bytes_per_token(model.config, model.dtype)
        check_memory(f"pages={pages}, page_size={page_size}", cache_bytes, model.device)
        self.cache = KVCache(model.config, pages, page_size, model.device, model.dtype, max_len)
        self.attention = make_attention(model.config, self.cache, attention)
        self.model = pack(model)
        self.forward = DecodeGraphs(self.model, self.cache, self.attention).forward

    def greedy(self, chunks: Sequence[Chunk]) -> list[int]:
        """The likeliest next token of each chunk that yields one. Waits for a GPU."""
        logits = self.forward(FlatBatch.build(chunks, self.attention))
        if len(logits) == 0:
            self.wait()
        return logits.argmax(dim=-1).tolist()

    def sample(self, logits: Tensor, batch: Sequence[Chunk]) -> list[int | None]:
        """The token after each chunk, None for one that yields none, see tokens_of."""
        requests = [chunk.request for chunk in batch if chunk.yields_token]
        params = [request.params for request in requests]
        positions = [len(request.tokens) - request.prompt_len for request in requests]
        return tokens_of(batch, self.fetch(logits, params, positions))

    def fetch(
        self, logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
    ) -> list[Sampled]:
        """Sample on the device and read the tokens from it, in one transfer.

        Row i of logits decides output token positions[i] of a request with params[i]."""
        if not params:
            self.wait()
            return []
        tokens, logprobs = sample(logits, params, positions)
        if logprobs is None:
            return [(token, None) for token in tokens.tolist()]
        pairs = torch.stack([tokens.double(), logprobs.double()], dim=1).tolist()
        return [(int(token), logprob) for token, logprob in pairs]

    def wait(self) -> None:
        """Wait for a GPU, or an iteration would seem to end before it does."""
        if self.cache.data.is_cuda:
            torch.cuda.current_stream(self.cache.data.device).synchronize()

    def warm_up(self, max_batch: int) -> None:
        """Clear the cache, and compute a batch of decodes of each size up to max_batch: nothing is
        left to be compiled or recorded.

        Begins with the largest, whose memory the others share. Spoils the first slots of pages."""
        self.cache.data.zero_()
        if not isinstance(self.attention, Flash | XFormers):
            return  # whose sizes are not padded
        hide_bar = None if sys.stderr else True  # None: unless on a terminal
        sizes = padded_sizes(max_batch)[::-1]
        with tqdm(sizes, desc="compile decodes", disable=hide_bar) as bar:
            for size in bar:
                bar.set_postfix_str(f"batch of {size}")
                pages = [i % self.cache.pages for i in range(min(size, max_batch))]
                self.greedy([lone_chunk([page], 0, [0]) for page in pages])


def tokens_of(batch: Sequence[Chunk], sampled: Sequence[Sampled]) -> list[int | None]:
    """The token of each chunk, None for a chunk that yields none. Requests learn their logprobs."""
    results = iter(sampled)
    tokens: list[int | None] = []
    for chunk in batch:
        if not chunk.yields_token:
            tokens.append(None)
            continue
        token, logprob = next(results)
        tokens.append(token)
        request = chunk.request
        if logprob is not None and request.params.logprobs:
            request.logprobs[chunk.end - request.prompt_len :] = [logprob]
    return tokens
